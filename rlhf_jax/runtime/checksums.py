"""What tells a damaged array from the one that was saved."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.types import Array


def _sums(x: Array) -> Array:
    """Two sums over an array's bits, modulo 2^32: plain, and weighted by position. [2] uint32.

    Any change within one word of 32 bits changes the first; whole numbers, so the order of adding, and with it the
    mesh, does not matter.
    """
    if jnp.issubdtype(x.dtype, jnp.bool_):
        x = x.astype(jnp.uint8)
    word = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    word = word.astype(jnp.uint32)
    place, stride = jnp.uint32(0), 1
    for axis in reversed(range(x.ndim)):
        place = place + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride & 0xFFFFFFFF)
        stride *= x.shape[axis]
    weight = place * jnp.uint32(2654435769) | jnp.uint32(1)
    total = lambda x: jnp.sum(x, dtype=jnp.uint32)  # noqa: E731
    return jnp.stack([total(word), total(word * weight)])


@jax.jit
def checksums(tree: Any) -> Array:
    """`_sums` of every leaf of at most 32 bits an element: [leaves, 2] uint32, the same on every mesh."""
    return jnp.stack([_sums(x) for x in jax.tree.leaves(tree)])
