"""Tiny models of every family, built by transformers with every vector random, as the reference for ours.

Head sizes of 16 have several rotary frequencies, the texts of the tests are longer than the windows and than the
original contexts of scaled rotary embeddings, soft caps are small, and no size divides another: each switch shows.
"""

from __future__ import annotations

import transformers

from tests.helpers.optional import optional

torch = optional("torch")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 64}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 60,
    "eos_token_id": 59,
    "bos_token_id": 58,
}
NO_HEAD_DIM = {**SIZES, "hidden_size": 64}
NO_HEAD_DIM.pop("head_dim")
# (transformers' classes without suffix, the arguments of its config)
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {**SIZES, "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 8, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen2": (
        "Qwen2",
        {
            **NO_HEAD_DIM,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 1e6},
        },
    ),
    "qwen3": ("Qwen3", {**SIZES, "rope_parameters": YARN, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {**NO_HEAD_DIM, "num_hidden_layers": 5, "rope_parameters": {"rope_theta": 5e3}}),
    "olmo2": ("Olmo2", {**NO_HEAD_DIM, "rope_parameters": {"rope_theta": 5e3}}),
    "gemma2": (
        "Gemma2",
        {
            **SIZES,
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3_text": (
        "Gemma3",
        {
            **SIZES,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "phi3": (
        "Phi3",
        {**NO_HEAD_DIM, "sliding_window": 8, "rope_parameters": {"rope_theta": 5e3, "partial_rotary_factor": 0.75}},
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 61,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 53,
            "n_positions": 256,
            "eos_token_id": 59,
            "bos_token_id": 58,
            "pad_token_id": 60,
        },
    ),
}
CONFIG_CLASSES = {"gemma3_text": "Gemma3TextConfig", "gpt2": "GPT2Config"}


def config_of(family: str, **fields):
    """transformers' config of the tiny model."""
    name, settings = FAMILIES[family]
    return getattr(transformers, CONFIG_CLASSES.get(family, f"{name}Config"))(**{**settings, **fields})


def reference(family: str, kind: str = "causal", seed: int = 0, **fields):
    """A transformers model with every weight random, norms and biases too."""
    name, config = FAMILIES[family][0], config_of(family, **fields)
    if kind == "scalar":
        config.num_labels = 1
        classes = {"gemma3_text": "Gemma3TextForSequenceClassification"}
        name = classes.get(family, f"{name}ForSequenceClassification")
    else:
        name = {"gpt2": "GPT2LMHeadModel"}.get(family, f"{name}ForCausalLM")
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and parameter_name.endswith("weight") and not family.startswith("gemma")
            parameter.copy_(1.0 + 0.2 * noise if is_norm else 0.2 * noise)
    return model.eval()
