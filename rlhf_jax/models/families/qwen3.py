"""Qwen3: Llama's layout with norms of each query and key head, and an explicit head size. arXiv:2505.09388."""

from __future__ import annotations

from typing import Any

from rlhf_jax.models.context import DecoderConfig
from rlhf_jax.models.families.hf_config import Reader, finish
from rlhf_jax.models.families.llama import common
from rlhf_jax.models.families.qwen2 import upper_windows

NESTED_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
}


def config_from_hf(hf: dict[str, Any], where: str) -> DecoderConfig:
    """UserError for a key that is missing, wrong or not supported."""
    reader = Reader(hf, where)
    fields = common(reader, head_dim=128, kv_default=32, positions=32_768)
    bias = reader.flag("attention_bias", False)
    fields |= {"query_key_value_bias": bias, "attention_out_bias": bias, "qk_norm": "head"}
    fields["layer_window"] = upper_windows(reader, fields["num_hidden_layers"])
    return finish(reader, fields)
