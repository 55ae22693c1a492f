"""GPT-NeoX (Pythia): config.json in and out, the decoder's switches, the tensor table.

Black et al. 2022, arXiv:2204.06745; transformers' `GPTNeoXModel`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.models.decoder_context import DecoderConfig
from rlhf_jax.models.families.hf_config import judge_others
from rlhf_jax.models.rope import Rope
from rlhf_jax.models.tensor_table import Tensor


@dataclasses.dataclass(frozen=True)
class GPTNeoXConfig:
    """Everything that shapes the function; names are transformers' (rotary_* as in transformers 4)."""

    vocab_size: int = 50304
    hidden_size: int = 128
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    intermediate_size: int = 512
    max_position_embeddings: int = 2048
    rotary_pct: float = 0.25
    rotary_emb_base: float = 10000.0
    use_parallel_residual: bool = True
    attention_bias: bool = True
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        """K."""
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_ndims(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return int(self.head_dim * self.rotary_pct)


def decoder_config(config: GPTNeoXConfig) -> DecoderConfig:
    """The decoder's sizes and switches."""
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        ropes=(Rope(config.rotary_ndims, config.rotary_emb_base),),
        residual="parallel" if config.use_parallel_residual else "sequential",
        norm="layer_norm",
        norm_eps=config.layer_norm_eps,
        activation="gelu",
        gated_mlp=False,
        qkv="interleaved",
        query_key_value_bias=config.attention_bias,
        attention_out_bias=config.attention_bias,
        mlp_bias=True,
        tie_word_embeddings=config.tie_word_embeddings,
        initializer_range=config.initializer_range,
        hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
    )


# Layers, width, heads, vocabulary rows. Biderman et al. 2023, arXiv:2304.01373, table 1; rows of the published files.
PYTHIA_SHAPES: dict[str, tuple[int, int, int, int]] = {
    "14m": (6, 128, 4, 50304),
    "31m": (6, 256, 8, 50304),
    "70m": (6, 512, 8, 50304),
    "160m": (12, 768, 12, 50304),
    "410m": (24, 1024, 16, 50304),
    "1b": (16, 2048, 8, 50304),
    "1.4b": (24, 2048, 16, 50304),
    "2.8b": (32, 2560, 32, 50304),
    "6.9b": (32, 4096, 32, 50432),
    "12b": (36, 5120, 40, 50688),
}

# --- config.json -----------------------------------------------------------------------------------------------------

ARCHITECTURES = ("GPTNeoXForCausalLM", "GPTNeoXForSequenceClassification", "GPTNeoXModel", "ScalarModel")
# The config nested in a ScalarModel's is saved as its difference from transformers' defaults: what absent keys mean.
NESTED_DEFAULTS = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
}
MOST_LAYERS = 10_000  # the tensor table has rows for each, made before any file is opened

_SAME_NAME = tuple(
    field.name for field in dataclasses.fields(GPTNeoXConfig) if field.name not in ("rotary_pct", "rotary_emb_base")
)
_OTHER_KEYS = ("hidden_act", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_theta")
_OTHER_KEYS += ("rotary_pct", "rotary_emb_base")
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_POSITIVE = (*_REQUIRED, "max_position_embeddings")


def check(config: GPTNeoXConfig, where: str) -> None:
    """Raises a UserError that names the key and the value when no model can have this config."""
    for key in _POSITIVE:
        value = getattr(config, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{where}: {key} is {value!r}; it must be a positive whole number.")
        if value > (MOST_LAYERS if key == "num_hidden_layers" else 2**31 - 1):
            raise UserError(f"{where}: {key} is {value!r}, more than any model has.")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise UserError(f"{where}: {field.name} is {value!r}; it must be true or false.")
        if isinstance(field.default, float):
            _number(value, field.name, where)
    if config.hidden_size % config.num_attention_heads:
        raise UserError(
            f"{where}: hidden_size {config.hidden_size} is not divisible by "
            f"num_attention_heads {config.num_attention_heads}."
        )
    if not 0 <= config.rotary_pct <= 1 or config.rotary_ndims % 2:
        raise UserError(
            f"{where}: rotary_pct (partial_rotary_factor) {config.rotary_pct!r} rotates {config.rotary_ndims} of "
            f"{config.head_dim} dimensions of a head; it must be an even number of them."
        )
    for key in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(config, key) < 1:
            raise UserError(f"{where}: {key} is {getattr(config, key)!r}; it must be at least 0 and less than 1.")


def _number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}: {key} is {value!r}; it must be a number.")
    return float(value)


def config_from_hf(hf: dict[str, Any], where: str) -> GPTNeoXConfig:
    """The config from config.json's dict, with the keys of transformers 4 or 5.

    Raises a UserError that names the key, the value and `where` for a missing key and for what is not supported.
    """
    if missing := [key for key in _REQUIRED if hf.get(key) is None]:
        raise UserError(f"{where}: {missing[0]} is missing.")
    if (activation := hf.get("hidden_act", "gelu")) != "gelu":
        raise UserError(f"{where}: hidden_act {activation!r} is not supported; only 'gelu' (exact) is.")
    if hf.get("quantization_config"):
        raise UserError(f"{where}: quantization_config is not supported; use the unquantized checkpoint.")
    rope = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = hf.get(key) or {}
        if not isinstance(value, dict) or (kind := value.get("rope_type", value.get("type", "default"))) != "default":
            named = f"{key} {value!r}" if not isinstance(value, dict) else f"{key} of type {kind!r}"
            raise UserError(f"{where}: {named} is not supported; only the default rotary embedding is.")
        rope.update(value)
    fields = {key: hf[key] for key in _SAME_NAME if hf.get(key) is not None}
    # transformers 5 keeps both numbers in rope_parameters; 4 wrote its own names, and its last versions both.
    fields["rotary_pct"] = _first(rope, hf, "partial_rotary_factor", "rotary_pct", 0.25, where)
    fields["rotary_emb_base"] = _first(rope, hf, "rope_theta", "rotary_emb_base", 10000.0, where)
    config = GPTNeoXConfig(**fields)
    check(config, where)
    unread_keys = {key: value for key, value in hf.items() if key not in (*_SAME_NAME, *_OTHER_KEYS)}
    judge_others(unread_keys, "gpt_neox", vars(decoder_config(config)), where)
    return config


def _first(rope: dict[str, Any], hf: dict[str, Any], name: str, legacy: str, default: float, where: str) -> float:
    for source, key in ((rope, name), (hf, legacy), (hf, name)):
        if source.get(key) is not None:
            return _number(source[key], key, where)
    return default


def config_to_hf(config: GPTNeoXConfig, kind: str) -> dict[str, Any]:
    """config.json's dict, readable by transformers 4 (rotary_pct) and 5 (rope_parameters); kind 'causal' or 'scalar'.

    Token ids default to Pythia's <|endoftext|>, 0; a caller who knows the tokenizer overrides them.
    """
    hf = {key: getattr(config, key) for key in _SAME_NAME}
    hf |= {
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "rotary_pct": config.rotary_pct,
        "rotary_emb_base": config.rotary_emb_base,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rotary_emb_base,
            "partial_rotary_factor": config.rotary_pct,
        },
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": True,
    }
    if kind == "causal":
        return {"architectures": ["GPTNeoXForCausalLM"], **hf}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": ["GPTNeoXForSequenceClassification"], **hf, **labels}


# --- the tensor table -------------------------------------------------------------------------------------------------

PREFIX = "gpt_neox."
# Buffers of checkpoints written before transformers 4.30: causal masks and rotary frequencies, not weights.
IGNORED = (
    r"^layers\.\d+\.attention\.(bias|masked_bias)$",
    r"^layers\.\d+\.attention\.rotary_emb\.inv_freq$",
    r"^rotary_emb\.inv_freq$",
)
LINEARS: dict[str, tuple[str, ...]] = {
    "query_key_value": ("layers", "attention", "query_key_value"),
    "dense": ("layers", "attention", "dense"),
    "dense_h_to_4h": ("layers", "mlp", "dense_h_to_4h"),
    "dense_4h_to_h": ("layers", "mlp", "dense_4h_to_h"),
}
LORA_TARGETS = ("query_key_value",)
MODULES: dict[str, tuple[str, ...]] = {
    "embed_in": ("backbone", "embed_in"),
    "final_layer_norm": ("backbone", "final_layer_norm"),
    "embed_out": ("embed_out",),
    "score": ("score",),
}


def tensors(config: GPTNeoXConfig) -> list[Tensor]:
    """The backbone's tensors: names without prefix, paths below "backbone". A kernel is torch's weight, transposed."""
    width, units = config.hidden_size, config.intermediate_size
    linears = {
        "attention.query_key_value": (3 * width, width, config.attention_bias),
        "attention.dense": (width, width, config.attention_bias),
        "mlp.dense_h_to_4h": (units, width, True),
        "mlp.dense_4h_to_h": (width, units, True),
    }
    out = [Tensor("embed_in.weight", (config.vocab_size, width), ("embed_in", "embedding"))]
    for layer in range(config.num_hidden_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out.append(Tensor(f"layers.{layer}.{norm}.weight", (width,), ("layers", norm, "scale"), layer))
            out.append(Tensor(f"layers.{layer}.{norm}.bias", (width,), ("layers", norm, "bias"), layer))
        for linear, (rows, columns, bias) in linears.items():
            path = ("layers", *linear.split("."))
            out.append(Tensor(f"layers.{layer}.{linear}.weight", (rows, columns), (*path, "kernel"), layer, True))
            if bias:
                out.append(Tensor(f"layers.{layer}.{linear}.bias", (rows,), (*path, "bias"), layer))
    out.append(Tensor("final_layer_norm.weight", (width,), ("final_layer_norm", "scale")))
    out.append(Tensor("final_layer_norm.bias", (width,), ("final_layer_norm", "bias")))
    return out
