"""Each process' share of a batch: the rows that its devices hold, and those that it alone answers for.

Rows lie over the mesh axes `data` and `fsdp`. A mesh may order devices in its own way, and with `tensor` over several
processes two of them hold the same rows, so both are read from the sharding. With one process its share is everything.
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
      mesh: the run's.
      count: rows of the whole batch; they divide over the mesh.

    Returns:
      [H] int64, ascending.
    """
    where = sharding.batch_sharding(mesh)
    if where.is_fully_addressable:
        return np.arange(count)
    spans = {index[0].indices(count)[:2] for index in where.addressable_devices_indices_map((count,)).values()}
    return np.concatenate([np.arange(*span) for span in sorted(spans)])


def owners(mesh: Mesh, count: int) -> np.ndarray:
    """The process that answers for each row: the first of those that hold it.

    Args:
      mesh, count: as `held_rows`.

    Returns:
      [count] int64.
    """
    found = np.full(count, np.iinfo(np.int64).max)
    for device, index in sharding.batch_sharding(mesh).devices_indices_map((count,)).items():
        found[index] = np.minimum(found[index], device.process_index)
    return found


def place(batch: Any, mesh: Mesh, count: int) -> Any:
    """Puts a batch on the mesh, of which each process has its own rows only.

    Args:
      batch: pytree of numpy arrays [H, ...], the rows that `held_rows` names.
      mesh: the run's.
      count: rows of the whole batch.

    Returns:
      The batch as jax.Arrays [count, ...], rows over `data` and `fsdp`.

    Raises:
      UserError: with one process, rows that do not divide over the devices.
    """
    where = sharding.batch_sharding(mesh)
    if where.is_fully_addressable:
        return sharding.shard_batch(batch, mesh)
    held = held_rows(mesh, count)

    def put(x):
        def rows(index):
            start, stop, _ = index[0].indices(count)
            first = int(np.searchsorted(held, start))
            return x[first : first + stop - start]

        return jax.make_array_from_callback((count, *x.shape[1:]), where, rows)

    return jax.tree.map(put, batch)


def fetch(tree: Any, mesh: Mesh) -> Any:
    """This process' rows on the host, in one transfer. Every process must call it.

    Args:
      tree: pytree of jax.Arrays [B, ...].
      mesh: the run's.

    Returns:
      The same pytree of numpy arrays [H, ...], the rows that `held_rows` names.
    """
    where = sharding.batch_sharding(mesh)
    if where.is_fully_addressable:
        return jax.device_get(tree)
    by_rows = sharding.reshard(tree, where)

    def parts(x):
        # Several devices of this process may hold the same rows.
        shards = {shard.index[0].indices(x.shape[0])[0]: shard.data for shard in x.addressable_shards}
        return [shards[start] for start in sorted(shards)]

    leaves, structure = jax.tree.flatten(by_rows)
    return jax.tree.unflatten(structure, [np.concatenate(x) for x in jax.device_get([parts(x) for x in leaves])])
