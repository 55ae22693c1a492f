"""Llama 2, 3, 3.1 and 3.2, and checkpoints of its shape (SmolLM2): config.json and the tensor table.

Touvron et al. 2023, arXiv:2307.09288; Grattafiori et al. 2024, arXiv:2407.21783; transformers' `LlamaModel`. The other
families of this layout use its tensor table, which follows the switches of the config.
"""

from __future__ import annotations

from typing import Any

from rlhf_jax.models.decoder_context import DecoderConfig
from rlhf_jax.models.families.hf_config import Reader, finish, sizes
from rlhf_jax.models.tensor_table import Tensor

PREFIX = "model."
IGNORED = (r"^layers\.\d+\.self_attn\.rotary_emb\.inv_freq$", r"^rotary_emb\.inv_freq$")
LINEARS: dict[str, tuple[str, ...]] = {
    "q_proj": ("layers", "attention", "query"),
    "k_proj": ("layers", "attention", "key"),
    "v_proj": ("layers", "attention", "value"),
    "o_proj": ("layers", "attention", "dense"),
    "gate_proj": ("layers", "mlp", "gate"),
    "up_proj": ("layers", "mlp", "dense_h_to_4h"),
    "down_proj": ("layers", "mlp", "dense_4h_to_h"),
}
FUSED_LINEARS: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("layers", "attention", "query_key_value"),
    "o_proj": LINEARS["o_proj"],
    "gate_up_proj": ("layers", "mlp", "gate_up"),
    "down_proj": LINEARS["down_proj"],
}
LORA_TARGETS = ("q_proj", "v_proj")
MODULES: dict[str, tuple[str, ...]] = {
    "embed_tokens": ("backbone", "embed_in"),
    "norm": ("backbone", "final_layer_norm"),
    "lm_head": ("embed_out",),
    "score": ("score",),
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}


NESTED_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


def common(
    reader: Reader,
    *,
    head_dim: int | None = None,
    theta: float = 10_000.0,
    eps: float = 1e-6,
    positions: int = 2048,
    **sizes_of: Any,
) -> dict[str, Any]:
    """Fields that Llama and the families of its layout read alike, with the defaults of a class."""
    fields = sizes(reader, **sizes_of)
    default = head_dim or fields["hidden_size"] // fields["num_attention_heads"]
    fields["head_dim"] = reader.size("head_dim", default)
    fields["max_position_embeddings"] = reader.size("max_position_embeddings", positions)
    fields["ropes"] = (reader.rope(fields["head_dim"], theta, fields["max_position_embeddings"]),)
    fields["norm_eps"] = reader.number("rms_norm_eps", eps)
    fields["activation"] = reader.choice("hidden_act", "silu", ACTIVATIONS)
    fields["initializer_range"] = reader.number("initializer_range", 0.02)
    fields["attention_dropout"] = reader.number("attention_dropout", 0.0)
    fields["tie_word_embeddings"] = reader.flag("tie_word_embeddings", False)
    return fields


def config_from_hf(hf: dict[str, Any], where: str) -> DecoderConfig:
    """UserError for a key that is missing, wrong or not supported."""
    reader = Reader(hf, where)
    fields = common(reader)
    bias = reader.flag("attention_bias", False)
    fields |= {"query_key_value_bias": bias, "attention_out_bias": bias, "mlp_bias": reader.flag("mlp_bias", False)}
    return finish(reader, fields)


def tensors(config: DecoderConfig) -> list[Tensor]:
    """The backbone's tensors: names without prefix, paths below "backbone". A kernel is torch's weight, transposed."""
    width, units, size = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_width = config.num_attention_heads * size, config.num_key_value_heads * size
    bias, norms = config.query_key_value_bias, ["post_attention_layernorm"]
    norms += ["input_layernorm"] if config.residual != "post" else []
    norms += ["pre_feedforward_layernorm"] if config.residual == "sandwich" else []
    norms += ["post_feedforward_layernorm"] if config.residual != "sequential" else []
    names = FUSED_LINEARS if config.qkv == "blocks" else LINEARS
    shapes = {
        "q_proj": (heads, width, bias),
        "k_proj": (kv_width, width, bias),
        "v_proj": (kv_width, width, bias),
        "qkv_proj": (heads + 2 * kv_width, width, bias),
        "o_proj": (width, heads, config.attention_out_bias),
        "gate_proj": (units, width, config.mlp_bias),
        "up_proj": (units, width, config.mlp_bias),
        "gate_up_proj": (2 * units, width, config.mlp_bias),
        "down_proj": (width, units, config.mlp_bias),
    }
    vectors = {}
    if config.qk_norm is not None:
        by_head = config.qk_norm == "head"
        vectors = {
            "q_norm": ("query_norm", size if by_head else heads),
            "k_norm": ("key_norm", size if by_head else kv_width),
        }
    out = [Tensor("embed_tokens.weight", (config.vocab_size, width), ("embed_in", "embedding"))]
    for layer in range(config.num_hidden_layers):
        for norm in norms:
            out.append(Tensor(f"layers.{layer}.{norm}.weight", (width,), ("layers", norm, "scale"), layer))
        for name, (ours, length) in vectors.items():
            path = ("layers", "attention", ours, "scale")
            out.append(Tensor(f"layers.{layer}.self_attn.{name}.weight", (length,), path, layer))
        for name, path in names.items():
            module = f"layers.{layer}.{'mlp' if 'mlp' in path else 'self_attn'}.{name}"
            rows, columns, has_bias = shapes[name]
            out.append(Tensor(f"{module}.weight", (rows, columns), (*path, "kernel"), layer, True))
            if has_bias:
                out.append(Tensor(f"{module}.bias", (rows,), (*path, "bias"), layer))
    return [*out, Tensor("norm.weight", (width,), ("final_layer_norm", "scale"))]
