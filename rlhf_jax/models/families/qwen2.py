"""Qwen2 and Qwen2.5: Llama's layout with biases of query, key and value. arXiv:2407.10671, arXiv:2412.15115."""

from __future__ import annotations

from typing import Any

from rlhf_jax.models.decoder_context import DecoderConfig
from rlhf_jax.models.families.hf_config import Reader, finish
from rlhf_jax.models.families.llama import common

NESTED_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
}


def upper_windows(reader: Reader, layers: int) -> tuple[int | None, ...]:
    """The window of the layers from max_window_layers on, where use_sliding_window is set."""
    window, first = reader.value("sliding_window", 4096), reader.value("max_window_layers", 28)
    used = reader.flag("use_sliding_window", False) and window is not None
    types = ["sliding_attention" if used and index >= first else "full_attention" for index in range(layers)]
    return reader.windows(layers, window if used else None, types)


def config_from_hf(hf: dict[str, Any], where: str) -> DecoderConfig:
    """UserError for a key that is missing, wrong or not supported."""
    reader = Reader(hf, where)
    fields = common(reader, kv_default=32, positions=32_768)
    fields |= {"query_key_value_bias": True, "layer_window": upper_windows(reader, fields["num_hidden_layers"])}
    return finish(reader, fields)
