"""Models of images and text whose text part is one of the families: that part alone is read.

Their config.json nests the text model's as `text_config`; transformers 4 and 5 name its tensors differently. On text
such a model computes what its text model does. Exports are the text model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_jax.errors import UserError

HEAD = "lm_head.weight"
_LLAVA_PREFIXES = ("model.language_model.", "language_model.model.")
_HEADS = (HEAD, "language_model.lm_head.weight")
_VISION = re.compile(
    r"(model\.)?(vision_tower|vision_model|multi_modal_projector|embed_vision|connector|image_newline)(\.|$)"
)


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A model_type of images and text.

    Attributes:
      architecture: its class name.
      text_type: model_type of a text_config that has none.
      prefixes: of the text model's tensors, in the versions of transformers.
    """

    architecture: str
    text_type: str
    prefixes: tuple[str, ...] = _LLAVA_PREFIXES


_SMOLVLM: dict[str, Any] = {
    "text_type": "llama",
    "prefixes": ("model.text_model.",),
}
WRAPPERS = {
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", "gemma3_text"),
    "mistral3": Wrapper("Mistral3ForConditionalGeneration", "mistral"),
    "llava": Wrapper("LlavaForConditionalGeneration", "llama"),
    "llava_next": Wrapper("LlavaNextForConditionalGeneration", "llama"),
    "internvl": Wrapper("InternVLForConditionalGeneration", "qwen2"),
    "idefics3": Wrapper("Idefics3ForConditionalGeneration", **_SMOLVLM),
    "smolvlm": Wrapper("SmolVLMForConditionalGeneration", **_SMOLVLM),
}
"""By model_type."""


def is_image_text(hf: Mapping[str, Any]) -> bool:
    """Whether a config.json is of such a model."""
    return isinstance(hf.get("model_type"), str) and hf["model_type"] in WRAPPERS


def text_config(hf: Mapping[str, Any], where: str, defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The config.json of the text model, complete.

    Args:
      hf: of the whole model.
      where: it was read.
      defaults: by model_type of the text models that are supported, what an absent key of text_config means.

    Raises:
      UserError: names the key.
    """
    wrapper, nested = WRAPPERS[hf["model_type"]], hf.get("text_config")
    if not isinstance(nested, dict):
        raise UserError(f"{where}: text_config is {nested!r}; it must be the config of the text model.")
    kind = nested.get("model_type", wrapper.text_type)
    if not isinstance(kind, str) or kind not in defaults:
        raise UserError(
            f"{where}: text_config: model_type {kind!r} is not supported within {hf['model_type']!r}; supported: "
            f"{', '.join(defaults)}."
        )
    text = {**defaults[kind], **nested, "model_type": kind}
    if hf.get("quantization_config"):
        text["quantization_config"] = hf["quantization_config"]
    # transformers 4 ties by the text model's key, 5 by the whole model's, which it takes from the former's.
    ties = [value for value in (hf.get("tie_word_embeddings"), nested.get("tie_word_embeddings")) if value is not None]
    if ties:
        text["tie_word_embeddings"] = any(ties) if all(isinstance(value, bool) for value in ties) else ties[0]
    return text


def text_tensors(
    hf: Mapping[str, Any], names: Iterable[str], prefix: str, tied: bool, where: str
) -> tuple[dict[str, str], int]:
    """Which tensors of a checkpoint are the text model's.

    Args:
      hf: config.json of the whole model.
      names: of the checkpoint's tensors.
      prefix: of the text model's own tensors.
      tied: whether its head is its embedding.
      where: the checkpoint is, for errors.

    Returns:
      ({a tensor's name: its name in a checkpoint of the text model}, number of other tensors)

    Raises:
      UserError: a tensor of no known part, or a head beside a tied embedding.
    """
    text, vision_count = {}, 0
    for name in names:
        standalone_name = text_name(hf, name, prefix)
        if standalone_name == HEAD and tied:
            raise UserError(
                f"{where}: there is a tensor {name}, but the head is tied to the embedding by config.json. Set "
                "tie_word_embeddings to false in it and in its text_config if the head has weights of its own."
            )
        if standalone_name is not None:
            text[name] = standalone_name
        elif _VISION.match(name):
            vision_count += 1
        else:
            raise UserError(f"{where}: tensor {name} is of no known part of a model_type {hf['model_type']!r}.")
    return text, vision_count


def text_name(hf: Mapping[str, Any], name: str, prefix: str) -> str | None:
    """The name of a tensor in a checkpoint of the text model; None for one of another part."""
    if name in _HEADS:
        return HEAD
    start = next((start for start in WRAPPERS[hf["model_type"]].prefixes if name.startswith(start)), None)
    return None if start is None else prefix + name.removeprefix(start)
