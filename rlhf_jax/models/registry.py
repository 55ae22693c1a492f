"""The families of decoders that are supported: what each supplies, by its model_type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rlhf_jax.models.decoder_context import DecoderConfig
from rlhf_jax.models.families import (
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    hf_config,
    image_text,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    smollm3,
    smolvlm,
)


@dataclasses.dataclass(frozen=True)
class Family:
    """What a family of decoders supplies: config, the decoder's switches, tensor table. All functions are pure."""

    name: str  # model_type in config.json
    architectures: tuple[str, ...]  # supported class names in config.json: the causal model's, the classifier's, others
    config_from_hf: Callable  # config.json's dict, where it was read -> config; UserError for what is not supported
    config_to_hf: Callable  # config, kind -> dict
    decoder_config: Callable  # config -> DecoderConfig
    tensors: Callable  # config -> the checkpoint's backbone tensors, a list of tensor_table.Tensor
    prefix: str  # of the backbone's tensors in a checkpoint with a head
    ignored: tuple[str, ...]  # regular expressions of checkpoint buffers that hold no weights
    # A layer's linear layers by the checkpoint's names, their paths in the backbone.
    linears: dict[str, tuple[str, ...]] = dataclasses.field(hash=False)
    # Modules that may be trained in full beside adapters, their paths in the params.
    modules: dict[str, tuple[str, ...]] = dataclasses.field(hash=False)
    lora_targets: tuple[str, ...]  # the linear layers that PEFT adapts by default; empty: it has no default
    causal_head: str = "lm_head.weight"
    conv1d: bool = False  # linear layers are stored as [in, out]
    nested_defaults: dict[str, Any] = dataclasses.field(
        default_factory=dict, hash=False
    )  # of keys absent in a nested config
    reads_images: bool = False  # its config is a vision.VisionDecoderConfig


def _llama_layout(name: str, module: Any, class_name: str, **fields: Any) -> Family:
    """A family with Llama's tensor table; `class_name` is transformers', without its suffix."""
    suffixes = ("ForCausalLM", "ForSequenceClassification", "Model")
    architectures = fields.pop("architectures", tuple(class_name + suffix for suffix in suffixes))

    def config_to_hf(config: DecoderConfig, kind: str) -> dict[str, Any]:
        return hf_config.to_hf(config, architectures[kind == "scalar"])

    table = {"prefix": llama.PREFIX, "ignored": llama.IGNORED, "linears": llama.LINEARS, "modules": llama.MODULES}
    table |= {"tensors": llama.tensors, "lora_targets": llama.LORA_TARGETS, **fields}
    table["nested_defaults"] = getattr(module, "NESTED_DEFAULTS", {})
    functions = {"config_from_hf": module.config_from_hf, "config_to_hf": config_to_hf, "decoder_config": _as_it_is}
    return Family(name=name, architectures=architectures, **functions, **table)


def _as_it_is(config: DecoderConfig) -> DecoderConfig:
    return config


_GPT2 = {
    "architectures": gpt2.ARCHITECTURES,
    "prefix": gpt2.PREFIX,
    "ignored": gpt2.IGNORED,
    "linears": gpt2.LINEARS,
    "modules": gpt2.MODULES,
    "tensors": gpt2.tensors,
    "lora_targets": gpt2.LORA_TARGETS,
    "conv1d": True,
}
_FAMILIES = (
    Family(
        name="gpt_neox",
        architectures=gpt_neox.ARCHITECTURES,
        config_from_hf=gpt_neox.config_from_hf,
        config_to_hf=gpt_neox.config_to_hf,
        decoder_config=gpt_neox.decoder_config,
        tensors=gpt_neox.tensors,
        prefix=gpt_neox.PREFIX,
        ignored=gpt_neox.IGNORED,
        linears=gpt_neox.LINEARS,
        modules=gpt_neox.MODULES,
        lora_targets=gpt_neox.LORA_TARGETS,
        causal_head="embed_out.weight",
        nested_defaults=gpt_neox.NESTED_DEFAULTS,
    ),
    _llama_layout("llama", llama, "Llama"),
    _llama_layout("mistral", mistral, "Mistral"),
    _llama_layout("qwen2", qwen2, "Qwen2"),
    _llama_layout("qwen3", qwen3, "Qwen3"),
    _llama_layout("smollm3", smollm3, "SmolLM3", lora_targets=()),
    _llama_layout("olmo2", olmo2, "Olmo2", lora_targets=()),
    _llama_layout("gemma2", gemma2, "Gemma2"),
    _llama_layout("gemma3_text", gemma3, "Gemma3", architectures=gemma3.ARCHITECTURES),
    _llama_layout("phi3", phi3, "Phi3", linears=llama.FUSED_LINEARS, lora_targets=()),
    _llama_layout("gpt2", gpt2, "GPT2", **_GPT2),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}


_IMAGE_TABLE = {
    "config_from_hf": smolvlm.config_from_hf,
    "config_to_hf": smolvlm.config_to_hf,
    "decoder_config": _as_it_is,
    "tensors": smolvlm.tensors,
    "prefix": smolvlm.PREFIX,
    "ignored": (r"^vision_model\.embeddings\.position_ids$", *llama.IGNORED),
    "linears": smolvlm.LINEARS,
    "modules": smolvlm.MODULES,
    "lora_targets": (),
    "reads_images": True,
}
IMAGE_FAMILIES: dict[str, Family] = {
    name: Family(name=name, architectures=(image_text.WRAPPERS[name].architecture,), **_IMAGE_TABLE)
    for name in ("smolvlm", "idefics3")
}
"""Families that read images too, by model_type; without images a checkpoint is its text model, one of FAMILIES."""
