"""Phi-3: Llama's layout with query, key and value in one linear layer, and gate and up in one. arXiv:2404.14219."""

from __future__ import annotations

from typing import Any

from rlhf_jax.models.decoder_context import DecoderConfig
from rlhf_jax.models.families.hf_config import Reader, finish
from rlhf_jax.models.families.llama import common


def config_from_hf(hf: dict[str, Any], where: str) -> DecoderConfig:
    """UserError for a key that is missing, wrong or not supported."""
    reader = Reader(hf, where)
    fields = common(reader, eps=1e-5, positions=4096)
    reader.value("original_max_position_embeddings")  # of 'longrope', which is refused
    if fields["ropes"][0].rope_type != "default":  # transformers takes them for 'longrope', or refuses them
        key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
        reader.refuse(key, "only type 'default' is supported.")
    for key in ("resid_pdrop", "embd_pdrop"):
        reader.only(key, 0.0)
    fields |= {"qkv": "blocks", "fused_gate": True}
    if reader.value("sliding_window") is not None:
        fields["layer_window"] = (reader.size("sliding_window"),) * fields["num_hidden_layers"]
    return finish(reader, fields, pad=32_000)
