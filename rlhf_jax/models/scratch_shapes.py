"""Models of a size that no checkpoint gives: a Pythia size, or a shape of any family."""

from __future__ import annotations

from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.models.families import gpt_neox
from rlhf_jax.models.model import Model
from rlhf_jax.models.registry import FAMILIES, IMAGE_FAMILIES


def pythia(shape: str, vocab_size: int | None = None, **overrides: Any) -> Model:
    """A model of the Pythia suite, without params.

    Args:
      shape: its size, '14m' to '12b'.
      vocab_size: rows of the embedding; None: the published ones.
      **overrides: fields of the family's config.

    Raises:
      UserError: there is no such size.
    """
    if shape not in gpt_neox.PYTHIA_SHAPES:
        raise UserError(f"Pythia has no size {shape!r}; sizes: {', '.join(gpt_neox.PYTHIA_SHAPES)}.")
    layers, width, heads, rows = gpt_neox.PYTHIA_SHAPES[shape]
    return _gpt_neox(layers, width, heads, vocab_size=rows if vocab_size is None else vocab_size, **overrides)


def custom_shape(spec: str, vocab_size: int, max_positions: int = 2048, **overrides: Any) -> Model:
    """A model of any family and size, without params.

    Args:
      spec: '[FAMILY:]LAYERSxWIDTHxHEADS[xKV]', such as '4x128x4' (GPT-NeoX) or 'qwen2:4x128x4x2'; KV are the heads of
        keys and values.
      vocab_size: rows of the embedding.
      max_positions: tokens of the context.
      **overrides: fields of the family's config.

    Raises:
      UserError: the spec is not of this form, or its numbers do not divide.
    """
    name, _, shape = spec.lower().rpartition(":")
    if (name or "gpt_neox") not in {**FAMILIES, **IMAGE_FAMILIES}:
        raise UserError(
            f"model shape {spec!r}: there is no family {name!r}; families: {', '.join([*FAMILIES, *IMAGE_FAMILIES])}."
        )
    try:
        layers, width, heads, *rest = (int(part) for part in shape.split("x"))
        (kv_heads,) = rest or (heads,)
    except ValueError:
        raise UserError(
            f"model shape {spec!r} is not [FAMILY:]LAYERSxWIDTHxHEADS[xKV], such as 4x128x4 or qwen2:4x128x4x2."
        ) from None
    if min(layers, width, heads, kv_heads) < 1 or width % heads or heads % kv_heads:
        raise UserError(
            f"model shape {spec!r}: numbers must be positive, the width {width} divisible by {heads} heads, and these "
            f"by {kv_heads} heads of keys and values."
        )
    if name in ("", "gpt_neox"):
        if kv_heads != heads:
            raise UserError(f"model shape {spec!r}: GPT-NeoX has as many heads of keys and values as of queries.")
        return _gpt_neox(
            layers, width, heads, vocab_size=vocab_size, max_position_embeddings=max_positions, **overrides
        )
    if name == "gpt2":
        hf = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": max_positions}
        hf |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        # A gated MLP has three matrices: 8/3 of the width has the size of the plain MLP's 4.
        hf = {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "head_dim": width // heads,
        }
        hf |= {"num_key_value_heads": kv_heads, "intermediate_size": -(-width // 3) * 8, "rms_norm_eps": 1e-6}
        hf |= {"max_position_embeddings": max_positions}
        hf |= {"query_pre_attn_scalar": width // heads} if name.startswith("gemma") else {}
    if name in IMAGE_FAMILIES:
        text = {"model_type": "llama", "vocab_size": vocab_size, **hf, "pad_token_id": None}
        vision = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
        vision |= {"intermediate_size": 4 * width, "image_size": 32, "patch_size": 8}
        hf = {"model_type": name, "text_config": text, "vision_config": vision, "scale_factor": 2, **overrides}
        return Model.from_hf_config({**hf, "tie_word_embeddings": True}, f"model shape {spec}", images=True)
    hf = {"model_type": name, "vocab_size": vocab_size, "tie_word_embeddings": True, **hf, **overrides}
    return Model.from_hf_config({**hf, "pad_token_id": None}, f"model shape {spec}")


def _gpt_neox(layers: int, width: int, heads: int, **fields: Any) -> Model:
    fields = {"intermediate_size": 4 * width, **fields}
    config = gpt_neox.GPTNeoXConfig(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, **fields)
    gpt_neox.check(config, f"model shape {layers}x{width}x{heads}")
    return Model(FAMILIES["gpt_neox"], config)
