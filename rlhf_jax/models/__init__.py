"""Models: one decoder for all families, LoRA, quantized kernels, Hugging Face checkpoints in and out."""

from rlhf_jax.models.model import HEADS, Model
from rlhf_jax.models.registry import FAMILIES, IMAGE_FAMILIES, Family
from rlhf_jax.models.scratch_shapes import custom_shape, pythia

__all__ = ["FAMILIES", "HEADS", "IMAGE_FAMILIES", "Family", "Model", "custom_shape", "pythia"]
