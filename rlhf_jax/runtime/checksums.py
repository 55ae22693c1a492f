"""Checksums of arrays on the device, which detect damaged checkpoints."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.types import Array


def _sums(x: Array) -> Array:
    """Two sums over an array's bits, modulo 2^32: plain, and weighted by position. [2] uint32.

    Any change within one word of 32 bits changes the first. Integer sums do not depend on the order of addition, hence
    not on the mesh.
    """
    if jnp.issubdtype(x.dtype, jnp.bool_):
        x = x.astype(jnp.uint8)
    word = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    word = word.astype(jnp.uint32)
    position, stride = jnp.uint32(0), 1
    for axis in reversed(range(x.ndim)):
        position = position + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride & 0xFFFFFFFF)
        stride *= x.shape[axis]
    weight = position * jnp.uint32(2654435769) | jnp.uint32(1)
    total = lambda x: jnp.sum(x, dtype=jnp.uint32)  # noqa: E731
    return jnp.stack([total(word), total(word * weight)])


@jax.jit
def checksums(tree: Any) -> Array:
    """`_sums` of every leaf of at most 32 bits an element: [leaves, 2] uint32, the same on every mesh."""
    return jnp.stack([_sums(x) for x in jax.tree.leaves(tree)])
