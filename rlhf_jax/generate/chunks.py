"""Rows of a batch one part after another."""

from __future__ import annotations

import jax


def map_in_chunks(function, batch, rows_per_chunk: int | None):
    """Applies `function` to slices of `rows_per_chunk` rows one after another, to bound its memory.

    Chunks are strided (row i is in chunk i mod n), so that each spans all devices of a sharded batch.

    Args:
      function: pytree with leading dimension b -> pytree with leading dimension b.
      batch: pytree with leading dimension B.
      rows_per_chunk: b, divides B; None or B: one chunk.

    Returns:
      function(batch), as if called once.
    """
    b = jax.tree.leaves(batch)[0].shape[0]
    if rows_per_chunk is None or rows_per_chunk >= b:
        return function(batch)
    n = b // rows_per_chunk
    chunks = jax.tree.map(lambda x: x.reshape((rows_per_chunk, n) + x.shape[1:]).swapaxes(0, 1), batch)
    out = jax.lax.map(function, chunks)
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape((b,) + x.shape[2:]), out)


def largest_divisor(total: int, most: int) -> int:
    """The largest divisor of `total` that is at most `most`, at least 1."""
    return max(n for n in range(1, max(min(total, most), 1) + 1) if total % n == 0)
