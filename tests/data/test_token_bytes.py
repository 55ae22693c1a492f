"""What each token adds to a text: joined, the text that the tokenizer decodes."""

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from rlhf_jax import data
from rlhf_jax.data.token_bytes import token_bytes
from rlhf_jax.errors import UserError
from tests.helpers import text_tokenizers
from tests.helpers.chat_tokenizer import bytes_tokenizer

ROWS = 1000


def with_byte_tokens():
    """A SentencePiece tokenizer whose bytes are tokens, as Llama 2's."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581yes", "no", "é"]
    model = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    replace = decoders.Replace("\u2581", " ")
    model.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    model.add_special_tokens(["<unk>", "<s>", "</s>"])
    hf = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", bos_token="<s>", unk_token="<unk>")
    return data.Tokenizer(hf=hf, name="bytes", pad_id=2, eos_id=2, vocab_size=len(words))


def with_added_tokens():
    """A byte-level tokenizer with a token for several spaces that was added, as Pythia's."""
    tokenizer = text_tokenizers.byte_level()
    tokenizer.hf.add_tokens(["   ", "é\n"])
    return tokenizer


TOKENIZERS = {
    **{name: lambda name=name: data.load_tokenizer(name) for name in ("synthetic", "arithmetic", "shapes")},
    "byte-level": text_tokenizers.byte_level,
    "byte-level with added tokens": with_added_tokens,
    "a chat model's": bytes_tokenizer,
    "bytes as tokens": with_byte_tokens,
    **{f"Metaspace {form}": lambda form=form: text_tokenizers.space_before(form) for form in ("first", "always")},
    "Llama 2's space": lambda: text_tokenizers.space_before("legacy"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_joined_bytes_are_the_decoded_text(name):
    tokenizer = TOKENIZERS[name]()
    spelled = token_bytes(tokenizer, ROWS)
    assert len(spelled) == ROWS
    usable = [i for i, text in enumerate(spelled) if text is not None]
    vocabulary = tokenizer.hf.get_vocab()
    specials = {i for i, token in tokenizer.hf.added_tokens_decoder.items() if token.special}
    assert set(usable) == set(vocabulary.values()) - specials
    rng = random.Random(0)
    # In the middle of a text: decoders may strip the space of its first word.
    first = next(i for i in usable if spelled[i].strip().isalnum())
    compared = 0
    while compared < 200:
        ids = [first, *rng.choices(usable, k=rng.randint(0, 5))]
        try:
            text = b"".join(spelled[i] for i in ids).decode()
        except UnicodeDecodeError:
            continue
        assert text.lstrip(" ") == tokenizer.decode(ids).lstrip(" ")
        compared += 1


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_tokens_without_bytes_of_their_own_are_refused(decoder):
    model = Backend(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    if decoder is not None:
        model.decoder = decoder
    hf = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="b")
    with pytest.raises(
        UserError, match="structured_outputs_regex needs a tokenizer whose tokens have bytes .* words.* decodes by"
    ):
        token_bytes(data.Tokenizer(hf=hf, name="words", pad_id=1, eos_id=1, vocab_size=3), 3)
