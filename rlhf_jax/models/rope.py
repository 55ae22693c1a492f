"""Rotary position embedding: its frequencies in the forms that checkpoints use, and the rotation.

Su et al. 2021, arXiv:2104.09864. Names of forms and numbers are transformers' (`rope_parameters`).
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from rlhf_jax.types import Array


@dataclasses.dataclass(frozen=True)
class Rope:
    """One rotary embedding. Hashable: static under jit."""

    ndims: int
    """Leading dimensions of a head that are rotated."""
    theta: float = 10_000.0
    rope_type: str = "default"
    """'default', 'linear', 'llama3', 'yarn', or 'none': no rotation (layers without positions)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cosine and sine ('yarn')."""

    def inverse_frequencies(self) -> np.ndarray:
        """[ndims / 2] float32."""
        exponents = np.arange(0, self.ndims, 2, dtype=np.float32) / np.float32(max(self.ndims, 1))
        frequencies = np.float32(1.0) / np.power(np.float32(self.theta), exponents, dtype=np.float32)
        if self.rope_type == "linear":
            return frequencies / np.float32(self.factor)
        if self.rope_type == "llama3":
            return self._llama3(frequencies)
        if self.rope_type == "yarn":
            return self._yarn(frequencies)
        return frequencies if self.rope_type == "default" else np.zeros_like(frequencies)

    def _llama3(self, frequencies: np.ndarray) -> np.ndarray:
        """Long waves are stretched by `factor`, short ones are left, those between are interpolated (Llama 3.1)."""
        waves = 2 * np.pi / frequencies
        turns = self.original_max_position_embeddings / waves
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (frequencies * (1 + (np.clip(smooth, 0, 1) - 1) * (1 - 1 / self.factor))).astype(np.float32)

    def _yarn(self, frequencies: np.ndarray) -> np.ndarray:
        """Peng et al. 2023, arXiv:2309.00071: dimensions of few turns are stretched, those of many are left."""

        def dimension(turns: float) -> float:
            length = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return self.ndims * math.log(length) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.ndims - 1)
        high += 0.001 * (low == high)
        stretched = np.clip((np.arange(self.ndims // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        return (frequencies * (1 - stretched) + frequencies / self.factor * stretched).astype(np.float32)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The factor of cosine and sine where the checkpoint does not give it."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def rotary_angles(positions: Array, rope: Rope) -> tuple[Array, Array]:
    """Cosine and sine of the rotary angles: positions [...] int32 -> two float32 arrays [..., 1, ndims / 2]; the 1
    broadcasts over heads. A rope of type 'none' gives 1 and 0."""
    if rope.rope_type == "default":
        inverse_frequency = rope.theta ** -(jnp.arange(0, rope.ndims, 2, dtype=jnp.float32) / max(rope.ndims, 1))
    else:
        inverse_frequency = jnp.asarray(rope.inverse_frequencies())
    inverse_frequency = inverse_frequency.reshape((1,) * (positions.ndim + 1) + inverse_frequency.shape)
    angles = positions[..., None, None].astype(jnp.float32) * inverse_frequency
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return cos, sin


def rotate(x: Array, rope: tuple[Array, Array]) -> Array:
    """Rotate the first R dimensions of each head, dimension i paired with i + R/2 (transformers' `rotate_half`).

    x [..., H, K], rope two arrays [..., 1, R/2] -> [..., H, K] in x's dtype; computed in float32.
    """
    cos, sin = rope
    half = cos.shape[-1]
    if half == 0:
        return x
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)
