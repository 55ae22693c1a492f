"""Gemma 3, text (arXiv:2503.19786): Gemma 2 with norms of query and key heads; windowed layers rotate otherwise."""

from __future__ import annotations

from typing import Any

from rlhf_jax.models.decoder_context import DecoderConfig
from rlhf_jax.models.families.gemma2 import gemma_fields, softcap
from rlhf_jax.models.families.hf_config import Reader, finish
from rlhf_jax.models.rope import Rope

NESTED_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
    "pad_token_id": 0,
}
ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3TextForSequenceClassification", "Gemma3TextModel")


def config_from_hf(hf: dict[str, Any], where: str) -> DecoderConfig:
    """UserError for a key that is missing, wrong or not supported."""
    reader = Reader(hf, where)
    local = Reader({"rope_theta": hf.get("rope_local_base_freq"), **_rope_parameters(hf, "sliding_attention")}, where)
    global_reader = Reader({**hf, **_rope_parameters(hf, "full_attention")}, where)
    for key in ("rope_local_base_freq", "rope_theta", "rope_scaling", "rope_parameters"):
        reader.value(key)
    plain = Reader({key: value for key, value in hf.items() if not key.startswith("rope_")}, where)
    fields = gemma_fields(plain, positions=131_072)
    size, positions, layers = fields["head_dim"], fields["max_position_embeddings"], fields["num_hidden_layers"]
    ropes: tuple[Rope, ...] = (local.rope(size, 10_000.0, positions), global_reader.rope(size, 1_000_000.0, positions))
    serialized_pattern = reader.value("_sliding_window_pattern")  # as transformers 5 writes it
    pattern = reader.size("sliding_window_pattern", 6 if serialized_pattern is None else serialized_pattern)
    types = ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(layers)]
    types = reader.by_layer("layer_types", layers) or types
    window = reader.size("sliding_window", 4096)
    fields |= {"qk_norm": "head", "ropes": ropes, "layer_window": reader.windows(layers, window, types)}
    fields["layer_rope"] = tuple(int(kind == "full_attention") for kind in types)
    reader.value("attn_logit_softcapping")  # transformers ignores it
    fields["logit_softcap"] = softcap(reader, "final_logit_softcapping", None)
    reader.mark(plain)
    return finish(reader, fields, pad=0)


def _rope_parameters(hf: dict[str, Any], kind: str) -> dict[str, Any]:
    """rope_parameters of one kind of layers (transformers 5)."""
    ropes = hf.get("rope_parameters")
    return (
        {"rope_parameters": ropes[kind]} if isinstance(ropes, dict) and ropes.get(kind) else {"rope_parameters": None}
    )
