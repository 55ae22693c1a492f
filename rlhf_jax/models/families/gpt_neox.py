"""GPT-NeoX in Hugging Face's words: config.json of transformers 4 and 5, and the names of the tensors."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.models.families.gpt_neox_config import GPTNeoXConfig

PREFIX = "gpt_neox."
# Buffers of checkpoints written before transformers 4.30: causal masks and rotary frequencies, not weights.
IGNORED = (
    r"^layers\.\d+\.attention\.(bias|masked_bias)$",
    r"^layers\.\d+\.attention\.rotary_emb\.inv_freq$",
    r"^rotary_emb\.inv_freq$",
)
ARCHITECTURES = ("GPTNeoXForCausalLM", "GPTNeoXForSequenceClassification", "GPTNeoXModel", "ScalarModel")

_SAME_NAME = tuple(
    field.name for field in dataclasses.fields(GPTNeoXConfig) if field.name not in ("rotary_pct", "rotary_emb_base")
)
MOST_LAYERS = 10_000  # a list of a layer's tensors is made for each, before any file is opened
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_NATURAL = (*_REQUIRED, "max_position_embeddings")


def check(config: GPTNeoXConfig, where: str) -> None:
    """UserError, naming the key and the value, when no model can have this config."""
    for key in _NATURAL:
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
            f"{config.head_size} dimensions of a head; it must be an even number of them."
        )
    for key in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(config, key) < 1:
            raise UserError(f"{where}: {key} is {getattr(config, key)!r}; it must be at least 0 and less than 1.")


def _number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}: {key} is {value!r}; it must be a number.")
    return float(value)


def config_from_hf(hf: dict[str, Any], where: str) -> GPTNeoXConfig:
    """Our config from config.json's dict, keys of transformers 4 or 5.

    UserError, naming the key, the value and `where`, for what is missing or would be another function.
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
    # transformers 5 keeps both numbers in rope_parameters; 4 wrote its own names, and late ones the general names too.
    fields["rotary_pct"] = _first(rope, hf, "partial_rotary_factor", "rotary_pct", 0.25, where)
    fields["rotary_emb_base"] = _first(rope, hf, "rope_theta", "rotary_emb_base", 10000.0, where)
    config = GPTNeoXConfig(**fields)
    check(config, where)
    return config


def _first(rope: dict[str, Any], hf: dict[str, Any], name: str, legacy: str, default: float, where: str) -> float:
    for source, key in ((rope, name), (hf, legacy), (hf, name)):
        if source.get(key) is not None:
            return _number(source[key], key, where)
    return default


def config_to_hf(config: GPTNeoXConfig, kind: str) -> dict[str, Any]:
    """config.json's dict, readable by transformers 4 (rotary_pct) and 5 (rope_parameters); kind 'causal' or 'scalar'.

    Token ids default to Pythia's <|endoftext|>, 0; the caller knows the tokenizer and overrides them.
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


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a checkpoint's tensor goes: shape as in the file; `layer` is its index in the stacked [L, ...] param."""

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    layer: int | None = None
    transpose: bool = False


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
