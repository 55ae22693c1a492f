"""Rows of a batch per process: those that its devices hold, and those that it owns.

Rows are sharded over the mesh axes `data` and `fsdp`. A mesh may order devices in any way, and with `tensor` across
processes several of them hold the same rows, so both are read from the sharding. A single process holds and owns all.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.parallel import sharding


def held_rows(mesh: Mesh, count: int) -> np.ndarray:
    """The rows of a batch that this process' devices hold.

    Args:
      count: rows of the whole batch, divisible by the row shards of the mesh.

    Returns:
      [H] int64, ascending.
    """
    by_rows = sharding.batch_sharding(mesh)
    if by_rows.is_fully_addressable:
        return np.arange(count)
    spans = {index[0].indices(count)[:2] for index in by_rows.addressable_devices_indices_map((count,)).values()}
    return np.concatenate([np.arange(*span) for span in sorted(spans)])


def owners(mesh: Mesh, count: int) -> np.ndarray:
    """The process that owns each row: the first of those that hold it.

    Args:
      mesh, count: as `held_rows`.

    Returns:
      [count] int64.
    """
    first = np.full(count, np.iinfo(np.int64).max)
    for device, index in sharding.batch_sharding(mesh).devices_indices_map((count,)).items():
        first[index] = np.minimum(first[index], device.process_index)
    return first


def place(batch: Any, mesh: Mesh, count: int) -> Any:
    """Puts a batch on the mesh from the rows that each process holds.

    Args:
      batch: pytree of numpy arrays [H, ...], the rows of `held_rows`.
      count: rows of the whole batch.

    Returns:
      The batch as jax.Arrays [count, ...], sharded over `data` and `fsdp`.

    Raises:
      UserError: with one process, if the rows do not divide over the devices.
    """
    by_rows = sharding.batch_sharding(mesh)
    if by_rows.is_fully_addressable:
        return sharding.shard_batch(batch, mesh)
    row_indices = held_rows(mesh, count)

    def put(x):
        def rows(index):
            start, stop, _ = index[0].indices(count)
            first = int(np.searchsorted(row_indices, start))
            return x[first : first + stop - start]

        return jax.make_array_from_callback((count, *x.shape[1:]), by_rows, rows)

    return jax.tree.map(put, batch)


def fetch(tree: Any, mesh: Mesh) -> Any:
    """Fetches this process' rows to the host, in one transfer. Every process must call it.

    Args:
      tree: pytree of jax.Arrays [B, ...].

    Returns:
      The same pytree of numpy arrays [H, ...], the rows of `held_rows`.
    """
    by_rows = sharding.batch_sharding(mesh)
    if by_rows.is_fully_addressable:
        return jax.device_get(tree)
    resharded = sharding.reshard(tree, by_rows)

    def parts(x):
        # Several devices of a process may hold the same rows.
        shards = {shard.index[0].indices(x.shape[0])[0]: shard.data for shard in x.addressable_shards}
        return [shards[start] for start in sorted(shards)]

    leaves, structure = jax.tree.flatten(resharded)
    return jax.tree.unflatten(structure, [np.concatenate(x) for x in jax.device_get([parts(x) for x in leaves])])
