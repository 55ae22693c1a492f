"""A byte-level tokenizer with ChatML's template, and messages."""

import tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_jax import data

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content | trim + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with a bos of its own and generation blocks, which mark what the assistant says."""


def bytes_tokenizer(template=CHATML, eos="<|im_end|>"):
    """Any text in bytes, with ChatML's two tokens and a bos that it adds to every text unless told not to."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>", "<bos>", "<end>"]
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        vocab_size=260,
        show_progress=False,
    )
    model.train_from_iterator([""], trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=eos, bos_token="<bos>", pad_token="<bos>", chat_template=template
    )
    eos_id = hf.convert_tokens_to_ids(eos)
    return data.Tokenizer(hf=hf, name="bytes", pad_id=2, eos_id=eos_id, vocab_size=len(hf))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}
