"""Models: one decoder for all families, LoRA, quantized kernels, Hugging Face checkpoints in and out."""

from rlhf_jax.models.registry import FAMILIES, HEADS, IMAGE_FAMILIES, Family, Model, custom_shape, pythia

__all__ = ["FAMILIES", "HEADS", "IMAGE_FAMILIES", "Family", "Model", "custom_shape", "pythia"]
