"""Models: one decoder for all families, LoRA, quantized kernels, Hugging Face checkpoints in and out."""

from typing import TYPE_CHECKING

from rlhf_jax.utils.lazy import attributes

if TYPE_CHECKING:
    from rlhf_jax.models.model import HEADS, Model
    from rlhf_jax.models.registry import FAMILIES, IMAGE_FAMILIES, Family
    from rlhf_jax.models.scratch_shapes import custom_shape, pythia

_HOMES = {
    "FAMILIES": "registry",
    "HEADS": "model",
    "IMAGE_FAMILIES": "registry",
    "Family": "registry",
    "Model": "model",
    "custom_shape": "scratch_shapes",
    "pythia": "scratch_shapes",
}
__all__ = [*_HOMES]
__getattr__ = attributes(__name__, _HOMES)
