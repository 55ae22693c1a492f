"""How params are drawn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.types import Array


def normal(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32, *, std: float) -> Array:
    """Numbers of N(0, std), to the last bit the same under jit and outside, on one device and on a mesh.

    Without the barrier XLA folds `std` into the factor that `jax.random.normal` ends with, and rounds once, not twice.
    """
    return std * jax.lax.optimization_barrier(jax.random.normal(key, shape, dtype))
