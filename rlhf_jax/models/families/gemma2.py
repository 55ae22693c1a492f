"""Gemma 2: norms around attention and MLP, soft caps, a window on every other layer. arXiv:2408.00118."""

from __future__ import annotations

from typing import Any

from rlhf_jax.models.decoder_context import DecoderConfig
from rlhf_jax.models.families.hf_config import Reader, finish
from rlhf_jax.models.families.llama import ACTIVATIONS, common


def gemma_fields(reader: Reader, **defaults: Any) -> dict[str, Any]:
    """Fields that Gemma 2 and 3 share."""
    reader.value("hidden_act")  # transformers ignores it
    fields = common(reader, head_dim=256, kv_default=4, **defaults)
    fields["activation"] = reader.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS)
    fields["tie_word_embeddings"] = reader.flag("tie_word_embeddings", True)
    fields["attention_scale"] = reader.number("query_pre_attn_scalar", 256.0) ** -0.5
    bias = reader.flag("attention_bias", False)
    fields |= {"query_key_value_bias": bias, "attention_out_bias": bias}
    fields |= {"norm_offset": True, "norm_in_float32": True, "residual": "sandwich"}
    fields["embedding_scale"] = fields["hidden_size"] ** 0.5
    reader.only("use_bidirectional_attention", None, False)
    return fields


def softcap(reader: Reader, key: str, default: float | None) -> float | None:
    """A soft cap; null is none."""
    return None if reader.value(key, default) is None else reader.number(key, default or 0.0)


def config_from_hf(hf: dict[str, Any], where: str) -> DecoderConfig:
    """UserError for a key that is missing, wrong or not supported."""
    reader = Reader(hf, where)
    fields = gemma_fields(reader, positions=8192)
    fields["attention_softcap"] = softcap(reader, "attn_logit_softcapping", 50.0)
    fields["logit_softcap"] = softcap(reader, "final_logit_softcapping", 30.0)
    layers = fields["num_hidden_layers"]
    types = ["full_attention" if index % 2 else "sliding_attention" for index in range(layers)]
    fields["layer_window"] = reader.windows(layers, reader.size("sliding_window", 4096), types)
    return finish(reader, fields, pad=0)
