"""A tiny SmolVLM of transformers with every weight random, its tokenizer, processor and images, as the reference for
ours."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from tests.helpers.optional import optional

torch, pil = optional("torch"), optional("PIL.Image")

EOS, PAD, IMAGE = 0, 59, 58
SIZE, TOKENS = 16, 4  # pixels of a tile, image tokens of a tile
SPECIAL = ["<end_of_utterance>", "<fake_token_around_image>", "<global-img>", "<image>"]
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
TEXT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": 33,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": 4,
}
TEMPLATE = (
    "<|im_start|>{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for b in m['content'] %}{% if b['type'] == 'image' %}<image>{% else %} {{ b['text'] }} {% endif %}{% endfor %}"
    "{% endif %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def reference(
    kind: str = "smolvlm", seed: int = 0, text: dict | None = None, vision: dict | None = None, **fields: Any
):
    """A transformers model; `text` and `vision` override the sizes."""
    generator = torch.Generator().manual_seed(seed)
    config_class, class_name = {
        "smolvlm": (transformers.SmolVLMConfig, "SmolVLMForConditionalGeneration"),
        "idefics3": (transformers.Idefics3Config, "Idefics3ForConditionalGeneration"),
    }[kind]
    tie = fields.pop("tie_word_embeddings", False)
    config = config_class(
        text_config={"model_type": "llama", **TEXT, **(text or {}), "tie_word_embeddings": tie},
        vision_config={**VISION, **(vision or {})},
        image_token_id=IMAGE,
        scale_factor=fields.pop("scale_factor", 2),
        tie_word_embeddings=tie,
        **fields,
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, class_name)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and "norm" in name and name.endswith("weight")
            parameter.copy_(1.0 + 0.2 * noise if is_norm else 0.15 * noise)
    return model.eval()


def save_processor(folder: Path, splitting: bool = True, size: int = SIZE, longest: int = 3 * SIZE) -> None:
    """preprocessor_config.json, and the tokenizer with its chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<eos>", *(f"w{i}" for i in range(1, 30)), "user:", "assistant:", "system:", "<|im_start|>", *ROWS]
    words += ["<unk>", *(f"x{i}" for i in range(100))]
    words = words[: IMAGE - 3]
    vocabulary = {word: i for i, word in enumerate([*words, *SPECIAL, "<pad>"])}
    assert vocabulary["<image>"] == IMAGE and vocabulary["<pad>"] == PAD
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<|im_start|>",
        extra_special_tokens=[*SPECIAL, *ROWS],
    )
    hf.chat_template = TEMPLATE
    hf.save_pretrained(folder)
    content = {
        "image_processor_type": "SmolVLMImageProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": splitting,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_pad": True,
        "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5, 0.6, 0.4],
        "rescale_factor": 1 / 255,
        "resample": 1,
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": size},
    }
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(content))


@functools.cache
def shared(kind: str = "smolvlm"):
    """`reference(kind)`, made once."""
    return reference(kind)


def checkpoint(folder: Path, splitting: bool = False, model: Any = None, **options: Any) -> str:
    """A folder with the model, its tokenizer and its processor."""
    (shared() if model is None else model).save_pretrained(folder)
    save_processor(folder, splitting, **options)
    return str(folder)


def picture(seed: int, width: int, height: int, mode: str = "RGB"):
    """A PIL image of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 4), np.uint8)
    return pil.fromarray(noise, "RGBA").convert(mode)


def prompt_rows(rng: np.random.Generator, counts, tiles: int, length: int, image_tokens: int = TOKENS):
    """Tokens [P, length] with the image tokens of `counts` tiles a row between random words, left-padded, their mask,
    and pixels [P, tiles, 3, SIZE, SIZE] float32 whose other tiles are zeros."""
    tokens, mask = np.full((len(counts), length), PAD, np.int32), np.zeros((len(counts), length), bool)
    pixels = np.zeros((len(counts), tiles, 3, SIZE, SIZE), np.float32)
    for row, count in enumerate(counts):
        ids = list(rng.integers(1, 30, 2))
        for tile in range(count):
            ids += [IMAGE] * image_tokens + list(rng.integers(1, 30, rng.integers(1, 3)))
            pixels[row, tile] = rng.normal(size=(3, SIZE, SIZE))
        ids = ids[:length]
        tokens[row, length - len(ids) :], mask[row, length - len(ids) :] = ids, True
    return tokens, mask, pixels
