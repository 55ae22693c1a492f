"""Mistral: Llama's layout with a window on all layers. Jiang et al. 2023, arXiv:2310.06825."""

from __future__ import annotations

from typing import Any

from rlhf_jax.models.decoder_context import DecoderConfig
from rlhf_jax.models.families.hf_config import Reader, finish
from rlhf_jax.models.families.llama import common

NESTED_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
}


def config_from_hf(hf: dict[str, Any], where: str) -> DecoderConfig:
    """UserError for a key that is missing, wrong or not supported."""
    reader = Reader(hf, where)
    fields = common(reader, kv_default=8, positions=131_072)
    window = reader.value("sliding_window", 4096)  # null: none; absent: that of the first version
    if window is not None:
        fields["layer_window"] = (reader.size("sliding_window", 4096),) * fields["num_hidden_layers"]
    return finish(reader, fields)
