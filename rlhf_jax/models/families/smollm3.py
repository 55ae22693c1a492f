"""SmolLM3: Llama's layout, with no rotation on every fourth layer (Yang et al. 2025, arXiv:2501.18795)."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlhf_jax.models.decoder_context import DecoderConfig
from rlhf_jax.models.families.hf_config import Reader, finish
from rlhf_jax.models.families.llama import common


def config_from_hf(hf: dict[str, Any], where: str) -> DecoderConfig:
    """UserError for a key that is missing, wrong or not supported."""
    reader = Reader(hf, where)
    fields = common(reader, theta=2_000_000.0, kv_default=4, positions=32_768)
    fields["tie_word_embeddings"] = reader.flag("tie_word_embeddings", True)
    layers, interval = fields["num_hidden_layers"], reader.size("no_rope_layer_interval", 4)
    rotated = reader.by_layer("no_rope_layers", layers)  # 1: rotated, 0: not, whatever the key's name says
    rotated = [int((index + 1) % interval != 0) for index in range(layers)] if rotated is None else rotated
    (rope,) = fields["ropes"]
    unrotated = dataclasses.replace(rope, rope_type="none", attention_factor=1.0)  # yarn's factor is of the rotation
    fields |= {"ropes": (unrotated, rope), "layer_rope": tuple(map(int, rotated))}
    window = reader.value("sliding_window")
    used = reader.flag("use_sliding_window", False) and window is not None
    types = ["sliding_attention" if used and not rotates else "full_attention" for rotates in rotated]
    fields["layer_window"] = reader.windows(layers, window, types)
    bias = reader.flag("attention_bias", False)
    fields |= {"query_key_value_bias": bias, "attention_out_bias": bias, "mlp_bias": reader.flag("mlp_bias", False)}
    return finish(reader, fields, pad=128_004)
