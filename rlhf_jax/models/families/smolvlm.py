"""SmolVLM and Idefics3 with their images: config.json and the tensor table.

The text part is a Llama (see `llama`), the rest is `models.vision`. `image_text` reads the text part alone.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.models.decoder_context import DecoderConfig
from rlhf_jax.models.families import image_text, llama
from rlhf_jax.models.families.hf_config import Reader, finish
from rlhf_jax.models.tensor_table import Tensor
from rlhf_jax.models.vision import VisionConfig, VisionDecoderConfig

PREFIX = "model."
_TEXT, _VISION, _CONNECTOR = "text_model", "vision_model", "connector"
_VISION_LINEARS: dict[str, tuple[str, ...]] = {
    "q_proj": ("attention", "query"),
    "k_proj": ("attention", "key"),
    "v_proj": ("attention", "value"),
    "out_proj": ("attention", "dense"),
    "fc1": ("mlp", "dense_h_to_4h"),
    "fc2": ("mlp", "dense_4h_to_h"),
}
LINEARS: dict[str, tuple[str, ...]] = {
    **{f"{_TEXT}.{name}": path for name, path in llama.LINEARS.items()},
    **{f"{_VISION}.{name}": ("vision", "layers", *path) for name, path in _VISION_LINEARS.items()},
    f"{_CONNECTOR}.proj": ("connector", "proj"),
}
MODULES = llama.MODULES
ACTIVATIONS = {**llama.ACTIVATIONS, "gelu_python_tanh": "gelu_tanh"}


def config_from_hf(hf: dict[str, Any], where: str) -> VisionDecoderConfig:
    """UserError for a key that is missing, wrong or not supported."""
    text = image_text.text_config(hf, where, {"llama": llama.NESTED_DEFAULTS})
    decoder = llama.config_from_hf(text, f"{where}: text_config")
    reader = Reader(hf, where)
    token, scale = reader.value("image_token_id", 128_257), reader.size("scale_factor", 2)
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < decoder.vocab_size:
        reader.refuse("image_token_id", f"it must be an id of the text model, 0 to {decoder.vocab_size - 1}.")
    vision = _vision_config(hf.get("vision_config"), where, scale, f"{hf['model_type']}_vision")
    fields = {field.name: getattr(decoder, field.name) for field in dataclasses.fields(DecoderConfig)}
    fields["source"] = json.dumps(hf, sort_keys=True)
    return VisionDecoderConfig(**fields, vision=vision, image_token_id=token)


def _vision_config(config_values: Any, where: str, scale: int, model_type: str) -> VisionConfig:
    config_values = {} if config_values is None else config_values
    if not isinstance(config_values, dict):
        raise UserError(f"{where}: vision_config is {config_values!r}; it must be the config of the vision model.")
    reader = Reader(config_values, f"{where}: vision_config")
    reader.only("num_channels", 3)
    reader.only("attention_dropout", 0.0, 0)
    width, heads = reader.size("hidden_size", 1152), reader.size("num_attention_heads", 16)
    if width % heads:
        reader.refuse("hidden_size", f"it is not divisible by num_attention_heads, {heads}.")
    image, patch = reader.size("image_size", 224), reader.size("patch_size", 32)
    if patch > image or (image // patch) % scale:
        reader.refuse(
            "image_size",
            f"its {image // patch} patches of {patch} pixels a side are not divisible by scale_factor {scale}.",
        )
    fields: dict[str, Any] = {
        "vocab_size": 1,
        "hidden_size": width,
        "num_hidden_layers": reader.size("num_hidden_layers", 12),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "intermediate_size": reader.size("intermediate_size", 3072),
        "max_position_embeddings": (image // patch) ** 2,
        "norm": "layer_norm",
        "norm_eps": reader.number("layer_norm_eps", 1e-6),
        "activation": reader.choice("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
        "gated_mlp": False,
        "query_key_value_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "initializer_range": reader.number("initializer_range", 0.02),
    }
    tower = dataclasses.replace(finish(reader, fields, model_type=model_type), source="")
    return VisionConfig(tower, image, patch, scale)


def config_to_hf(config: VisionDecoderConfig, kind: str) -> dict[str, Any]:
    """config.json as it was read; UserError for a scalar head, which transformers does not have here."""
    if kind != "causal":
        raise UserError("a model that reads images has a causal head only: transformers has no classifier of its form.")
    hf = json.loads(config.source)
    return {key: value for key, value in hf.items() if key not in ("_name_or_path", "transformers_version", "auto_map")}


def tensors(config: VisionDecoderConfig) -> list[Tensor]:
    """The tensors without "model.", paths below "backbone"."""
    vision = config.vision
    tower, width = vision.tower, vision.tower.hidden_size
    out = [dataclasses.replace(tensor, name=f"{_TEXT}.{tensor.name}") for tensor in llama.tensors(config)]
    patch = (width, 3, vision.patch_size, vision.patch_size)

    def add(name: str, shape: tuple[int, ...], *path: str, layer: int | None = None, transpose: bool = False) -> None:
        out.append(Tensor(f"{_VISION}.{name}", shape, ("vision", *path), layer, transpose))

    add("embeddings.patch_embedding.weight", patch, "patch_embedding", "kernel")
    add("embeddings.patch_embedding.bias", (width,), "patch_embedding", "bias")
    table = "embeddings.position_embedding.weight"
    add(table, (vision.patches**2, width), "position_embedding", "embedding")
    shapes = {"fc1": (tower.intermediate_size, width), "fc2": (width, tower.intermediate_size)}
    norms = {"layer_norm1": "input_layernorm", "layer_norm2": "post_attention_layernorm"}
    for layer in range(tower.num_hidden_layers):
        start = f"encoder.layers.{layer}"
        for theirs, ours in norms.items():
            add(f"{start}.{theirs}.weight", (width,), "layers", ours, "scale", layer=layer)
            add(f"{start}.{theirs}.bias", (width,), "layers", ours, "bias", layer=layer)
        for name, path in _VISION_LINEARS.items():
            module = f"{start}.{'mlp' if 'mlp' in path else 'self_attn'}.{name}"
            shape = shapes.get(name, (width, width))
            add(f"{module}.weight", shape, "layers", *path, "kernel", layer=layer, transpose=True)
            add(f"{module}.bias", shape[:1], "layers", *path, "bias", layer=layer)
    add("post_layernorm.weight", (width,), "final_layer_norm", "scale")
    add("post_layernorm.bias", (width,), "final_layer_norm", "bias")
    shape = (config.hidden_size, width * vision.scale_factor**2)
    proj = f"{_CONNECTOR}.modality_projection.proj.weight"
    return [*out, Tensor(proj, shape, ("connector", "proj", "kernel"), 0, True)]
