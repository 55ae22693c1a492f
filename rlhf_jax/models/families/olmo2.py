"""OLMo 2: norms after attention and MLP, and of query and key over all heads. arXiv:2501.00656."""

from __future__ import annotations

from typing import Any

from rlhf_jax.models.decoder_context import DecoderConfig
from rlhf_jax.models.families.hf_config import Reader, finish
from rlhf_jax.models.families.llama import common


def config_from_hf(hf: dict[str, Any], where: str) -> DecoderConfig:
    """UserError for a key that is missing, wrong or not supported."""
    reader = Reader(hf, where)
    fields = common(reader, eps=1e-5)
    bias = reader.flag("attention_bias", False)
    fields |= {"query_key_value_bias": bias, "attention_out_bias": bias}
    fields |= {"residual": "post", "qk_norm": "width", "norm_in_float32": True}
    return finish(reader, fields, pad=1)
