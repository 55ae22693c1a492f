"""GPT-2: learned positions, LayerNorm, a plain MLP. Radford et al. 2019; transformers' `GPT2Model`.

Its linear layers are stored as [in, out] (`Conv1D`), so kernels are not transposed.
"""

from __future__ import annotations

from typing import Any

from rlhf_jax.models.decoder_context import DecoderConfig
from rlhf_jax.models.families.hf_config import Reader, finish
from rlhf_jax.models.families.llama import ACTIVATIONS
from rlhf_jax.models.tensor_table import Tensor

ARCHITECTURES = ("GPT2LMHeadModel", "GPT2ForSequenceClassification", "GPT2Model")
PREFIX = "transformer."
IGNORED = (r"^h\.\d+\.attn\.(bias|masked_bias)$",)
LINEARS: dict[str, tuple[str, ...]] = {
    "c_attn": ("layers", "attention", "query_key_value"),
    "attn.c_proj": ("layers", "attention", "dense"),
    "c_fc": ("layers", "mlp", "dense_h_to_4h"),
    "mlp.c_proj": ("layers", "mlp", "dense_4h_to_h"),
}
LORA_TARGETS = ("c_attn",)
MODULES: dict[str, tuple[str, ...]] = {
    "wte": ("backbone", "embed_in"),
    "ln_f": ("backbone", "final_layer_norm"),
    "lm_head": ("embed_out",),
    "score": ("score",),
}
_FIXED = ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout")


def config_from_hf(hf: dict[str, Any], where: str) -> DecoderConfig:
    """UserError for a key that is missing, wrong or not supported."""
    reader = Reader(hf, where)
    width, heads = reader.size("n_embd"), reader.size("n_head")
    if width % heads:
        reader.refuse("n_embd", f"it is not divisible by n_head, {heads}.")
    for key in (*_FIXED, "n_ctx"):  # heads that are not used; the old name of n_positions
        reader.value(key)
    reader.only("scale_attn_weights", True)
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        reader.only(key, False)
    dropout = reader.number("resid_pdrop", 0.1)
    if reader.number("embd_pdrop", 0.1) != dropout:
        reader.refuse("embd_pdrop", f"it must equal resid_pdrop, {dropout}.")
    fields = {
        "vocab_size": reader.size("vocab_size", 50257),
        "hidden_size": width,
        "num_hidden_layers": reader.size("n_layer"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "intermediate_size": reader.size("n_inner", 4 * width),
        "max_position_embeddings": reader.size("n_positions", 1024),
        "norm": "layer_norm",
        "norm_eps": reader.number("layer_norm_epsilon", 1e-5),
        "activation": reader.choice("activation_function", "gelu_new", ACTIVATIONS),
        "gated_mlp": False,
        "qkv": "blocks",
        "query_key_value_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": reader.flag("tie_word_embeddings", True),
        "initializer_range": reader.number("initializer_range", 0.02),
        "hidden_dropout": dropout,
        "attention_dropout": reader.number("attn_pdrop", 0.1),
        "padding_idx": None,
    }
    return finish(reader, fields)


def tensors(config: DecoderConfig) -> list[Tensor]:
    """The backbone's tensors: names without prefix, paths below "backbone"."""
    width, units = config.hidden_size, config.intermediate_size
    linears = {
        "attn.c_attn": ("attention", "query_key_value", (width, 3 * width)),
        "attn.c_proj": ("attention", "dense", (width, width)),
        "mlp.c_fc": ("mlp", "dense_h_to_4h", (width, units)),
        "mlp.c_proj": ("mlp", "dense_4h_to_h", (units, width)),
    }
    norms = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
    out = [
        Tensor("wte.weight", (config.vocab_size, width), ("embed_in", "embedding")),
        Tensor("wpe.weight", (config.max_position_embeddings, width), ("embed_positions", "embedding")),
    ]
    for layer in range(config.num_hidden_layers):
        for name, ours in norms.items():
            out.append(Tensor(f"h.{layer}.{name}.weight", (width,), ("layers", ours, "scale"), layer))
            out.append(Tensor(f"h.{layer}.{name}.bias", (width,), ("layers", ours, "bias"), layer))
        for name, (part, ours, shape) in linears.items():
            out.append(Tensor(f"h.{layer}.{name}.weight", shape, ("layers", part, ours, "kernel"), layer))
            out.append(Tensor(f"h.{layer}.{name}.bias", shape[1:], ("layers", part, ours, "bias"), layer))
    out.append(Tensor("ln_f.weight", (width,), ("final_layer_norm", "scale")))
    return [*out, Tensor("ln_f.bias", (width,), ("final_layer_norm", "bias"))]
