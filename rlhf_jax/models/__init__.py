"""Models: a small seam per family, Hugging Face checkpoints in and out. Imports no trainer."""

from rlhf_jax.models.registry import FAMILIES, HEADS, Family, Model, custom_shape, pythia

__all__ = ["FAMILIES", "HEADS", "Family", "Model", "custom_shape", "pythia"]
