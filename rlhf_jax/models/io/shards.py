"""Params one piece at a time: read from files into their shards, and gathered from their shards for files."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from rlhf_jax.models.io.safetensors import Index, Source
from rlhf_jax.parallel.sharding import replicated


@dataclasses.dataclass(frozen=True)
class HostParam:
    """A small param on the host of every process."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the param."""
        return self.array.shape

    def read(self, index: Index) -> np.ndarray:
        """array[index]."""
        return self.array[index]

    def view(self, layer: int | None = None) -> np.ndarray:
        """All of it, or a layer of a stacked one."""
        return self.array if layer is None else self.array[layer]


@dataclasses.dataclass(frozen=True)
class FileParam:
    """A param in a checkpoint: one tensor, or with `stacked` one for each layer; `transpose` swaps a tensor's axes."""

    tensors: tuple[Source, ...]
    transpose: bool = False
    stacked: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the param."""
        shape = self.tensors[0].shape
        shape = shape[::-1] if self.transpose else shape
        return (len(self.tensors), *shape) if self.stacked else shape

    def read(self, index: Index) -> np.ndarray:
        """param[index] as float32, reading only that; `index` has a slice without a step for each axis."""
        if not self.stacked:
            return np.ascontiguousarray(self._tensor(self.tensors[0], index))
        layers, *rest = index
        out = np.empty([part.stop - part.start for part in index], np.float32)
        for row, tensor in zip(out, self.tensors[layers]):
            row[...] = self._tensor(tensor, tuple(rest))
        return out

    def view(self, layer: int | None = None) -> np.ndarray:
        """All of it, or a layer of a stacked one, as float32 in the file's order: transposed, it is not contiguous."""
        if self.stacked and layer is None:
            return read_all(self)
        tensor = self.tensors[layer or 0]
        return self._tensor(tensor, (slice(None),) * len(tensor.shape))

    def _tensor(self, tensor: Source, index: Index) -> np.ndarray:
        return tensor.read(index[::-1]).T if self.transpose else tensor.read(index)


@dataclasses.dataclass(frozen=True)
class LoraParam:
    """A stacked kernel with an adapter added to it: kernel + a @ b, in float32."""

    kernel: Any  # FileParam or LoraParam
    a: np.ndarray  # [L, D, r]
    b: np.ndarray  # [L, r, F]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the param."""
        return self.kernel.shape

    def read(self, index: Index) -> np.ndarray:
        """param[index] as float32, reading only that part of the kernel."""
        layers, rows, columns = index
        out = self.kernel.read(index)
        for layer, a, b in zip(out, self.a[layers, rows], self.b[layers, :, columns]):
            layer += a @ b
        return out

    def view(self, layer: int | None = None) -> np.ndarray:
        """All of it, or a layer, as float32."""
        if layer is None:
            return read_all(self)
        return self.kernel.view(layer) + self.a[layer] @ self.b[layer]


Leaf = HostParam | FileParam | LoraParam


def read_all(leaf: Leaf) -> np.ndarray:
    """All of a param, float32."""
    return leaf.read(tuple(slice(0, size) for size in leaf.shape))


def read_shards(leaf: Leaf, sharding: NamedSharding) -> jax.Array:
    """A param on the devices, float32. Reads only the parts that this process' devices hold, one at a time."""
    holders: dict[tuple, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        ends = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape))
        holders.setdefault(ends, []).append(device)
    shards = []
    for ends, devices in holders.items():
        part = leaf.read(tuple(slice(*end) for end in ends))
        # Not aliased: on a CPU an aliased buffer is not donated.
        shards += jax.block_until_ready([jax.device_put(part, device, may_alias=False) for device in devices])
        del part  # before the next one is read
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def gather_to_host(leaf: Any, layer: int | None = None) -> np.ndarray:
    """A param, or one layer of a stacked one, on the host. Every process must call it, in the same order.

    Args:
      leaf: numpy array or jax.Array in any shards.
      layer: index on the first axis; None: all of it.

    Returns:
      A numpy array; do not write into it.
    """
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf if layer is None else leaf[layer])
    if leaf.is_fully_addressable and layer is None:
        return jax.device_get(leaf)
    where = None if leaf.is_fully_addressable else replicated(leaf.sharding.mesh)
    # The layer is an argument, so that all layers of a param share a program.
    return jax.device_get(_gather(where, layer is not None)(leaf, np.int32(layer or 0)))


@functools.cache
def _gather(where: NamedSharding | None, stacked: bool):
    def gather(leaf, layer):
        return jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False) if stacked else leaf

    return jax.jit(gather, out_shardings=where)
