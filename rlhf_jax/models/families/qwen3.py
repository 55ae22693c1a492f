"""Qwen3: Llama's layout with norms of each query and key head, and an explicit head size. arXiv:2505.09388."""

from __future__ import annotations

from typing import Any

from rlhf_jax.models.decoder_context import DecoderConfig
from rlhf_jax.models.families import qwen2
from rlhf_jax.models.families.hf_config import Reader, finish
from rlhf_jax.models.families.llama import common

NESTED_DEFAULTS = qwen2.NESTED_DEFAULTS


def config_from_hf(hf: dict[str, Any], where: str) -> DecoderConfig:
    """UserError for a key that is missing, wrong or not supported."""
    reader = Reader(hf, where)
    fields = common(reader, head_dim=128, kv_default=32, positions=32_768)
    bias = reader.flag("attention_bias", False)
    fields |= {"query_key_value_bias": bias, "attention_out_bias": bias, "qk_norm": "head"}
    fields["layer_window"] = qwen2.upper_windows(reader, fields["num_hidden_layers"])
    return finish(reader, fields)
