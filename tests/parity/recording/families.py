"""Tiny transformers models of other families than GPT-NeoX, in which no switch of the family is idle.

Windows are shorter than a prompt with its response, soft caps small, and original contexts such that each regime of a
scaled rotary embedding has a dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 29,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA = {**SIZES, "sliding_window": 4, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
# (start of transformers' class names, arguments of the config)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SIZES, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}}),
    "qwen3": ("Qwen3", {**SIZES, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e3}}),
    "gemma2": (
        "Gemma2",
        {
            **GEMMA,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3_text": (
        "Gemma3",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 24,
            "n_head": 2,
            "n_inner": 40,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
}
CONFIGS = {"gemma3_text": "Gemma3TextConfig"}
CAUSAL = {"gpt2": "GPT2LMHeadModel"}
SCALAR = {"gemma3_text": "Gemma3TextForSequenceClassification"}


def make(family: str, kind: str, fields: dict[str, Any]) -> torch.nn.Module:
    """A model of the family: kind 'causal' or 'scalar'; `fields`: what all families' configs call alike."""
    start, settings = FAMILIES[family]
    labels = {"num_labels": 1} if kind == "scalar" else {}
    config = getattr(transformers, CONFIGS.get(family, f"{start}Config"))(**settings, **fields, **labels)
    if kind == "scalar":
        name = SCALAR.get(family, f"{start}ForSequenceClassification")
    else:
        name = CAUSAL.get(family, f"{start}ForCausalLM")
    return getattr(transformers, name)(config)
