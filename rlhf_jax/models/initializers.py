"""Random initialization of params."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.types import Array


def normal(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32, *, std: float) -> Array:
    """Samples of N(0, std), the same to the last bit under jit and outside, on one device and on a mesh.

    Without the barrier XLA folds `std` into the last factor of `jax.random.normal`, and rounds once instead of twice.
    """
    return std * jax.lax.optimization_barrier(jax.random.normal(key, shape, dtype))
