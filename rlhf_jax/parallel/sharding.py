"""One mesh for every model, and where each array lies on it.

The axes are `data` (rows), `fsdp` (rows, and a share of params and optimizer state) and `tensor` (heads and hidden
units). A laptop runs on a 1 x 1 x 1 mesh: sharding is never a second code path. Steps compiled by `jax.jit` take the
placement of their arguments; no mesh is ever set globally.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rlhf_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")
ROWS = P(("data", "fsdp"))
PINNED = "pinned_host"

Rules = Sequence[tuple[str, P]]


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a run, data x fsdp x tensor.

    Args:
      data, fsdp, tensor: devices on each axis; one of them may be -1: all the devices that the others leave.
      devices: devices to use; default: all of every process.

    Returns:
      A Mesh with axes `data`, `fsdp`, `tensor`, all of type Auto.

    Raises:
      UserError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    product = " x ".join(f"mesh_{axis}={size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise UserError(f"{product}: each must be at least 1, and one of them may be -1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free:
        if len(devices) % fixed:
            raise UserError(f"{product}: {len(devices)} devices do not divide by {fixed}")
        sizes[free[0]] = len(devices) // fixed
    elif fixed != len(devices):
        raise UserError(f"{product} = {fixed}, but there are {len(devices)} devices: set one of them to -1")
    shape, auto = tuple(sizes.values()), (AxisType.Auto,) * 3
    try:
        return jax.make_mesh(shape, AXES, axis_types=auto, devices=devices)
    except NotImplementedError:
        # The links of a TPU slice form a torus, and an axis, as 64 of 4x4x8, may be part of one of its sides.
        split = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(split, AXES, axis_types=auto)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the axes of a model's arrays are called, and the mesh axes that split them. Hashable: static under jit.

    The names: `rows` of a batch; `data`, the rows where `fsdp` splits something else; `draws`, the rows where nothing
    else is split; `fsdp` and `tensor`, the two ways that a matrix is split; `vocabulary`, split both ways.

    Attributes:
      mesh: the run's.
      folded: the model's heads do not divide by `tensor`. Its devices share params as those on `fsdp` do, and rows too.
    """

    mesh: Mesh
    folded: bool = False


def _mesh_axes(name: str | None, folded: bool) -> tuple[str, ...]:
    """The mesh axes behind a name; None: of no split."""
    if folded:
        named = {"rows": AXES, "fsdp": ("fsdp", "tensor"), "tensor": ()}
    else:
        named = {"rows": ("data", "fsdp"), "fsdp": ("fsdp",), "tensor": ("tensor",)}
    return {None: (), "data": ("data",), "draws": AXES, "vocabulary": ("fsdp", "tensor"), **named}[name]


def partition_rules(names: Sequence[tuple[str, tuple[str | None, ...]]], folded: bool = False) -> Rules:
    """A family's rules, (pattern, names of axes), as (pattern, PartitionSpec)."""

    def spec(axes: Sequence[tuple[str, ...]]) -> P:
        return P(*(None if not found else found[0] if len(found) == 1 else found for found in axes))

    return tuple((pattern, spec([_mesh_axes(name, folded) for name in row])) for pattern, row in names)


def constrain(layout: Layout | None, x: Any, *names: str | None) -> Any:
    """Asks the compiler, inside jit, to lay an array as its axes' names say.

    Args:
      layout: None, or one of a single device: nothing is asked.
      x: an array.
      names: of its first axes, as in `Layout`; the others are whole. Rows that do not divide are left to the compiler.

    Returns:
      The array.
    """
    if layout is None or layout.mesh.size == 1:
        return x
    entries: list[Any] = []
    for size, name in zip(x.shape, names, strict=False):
        choices = [_mesh_axes(name, layout.folded)] + ([ROWS[0]] if name in ("rows", "draws") else [])
        fitting = [axes for axes in choices if size % math.prod(layout.mesh.shape[axis] for axis in axes) == 0]
        entries.append((fitting[0] or None) if fitting else P.UNCONSTRAINED)
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, P(*entries)))


def param_specs(tree: Any, rules: Rules, mesh: Mesh, *, strict: bool = True) -> Any:
    """A PartitionSpec for each leaf of `tree`, by the first rule whose pattern is found in the leaf's path.

    A path is the leaf's keys joined by '/'. A pattern is searched in it, and `^` stands for the start of any of its
    parts, so that rules written for a model also fit where it is one entry of a TrainState or of an optimizer's state
    ('0/mu/policy/backbone/...'). Leaves of a single element (counters, scales) are replicated and need no rule.

    Args:
      tree: pytree of arrays or ShapeDtypeStructs.
      rules: (regular expression, PartitionSpec) pairs.
      mesh: the mesh whose axes the specs name.
      strict: False replicates a leaf whose number of axes is not the rule's, as factored optimizers keep beside params.

    Returns:
      A pytree of the same structure with a PartitionSpec per leaf.

    Raises:
      UserError: a leaf that no rule matches, a mesh axis that is used twice or does not exist, a size that does not
        divide. Names the leaf and the numbers.
    """
    compiled = [(re.compile(pattern), spec) for pattern, spec in rules]

    def spec_of(path, leaf) -> P:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shape = tuple(np.shape(leaf)) if not hasattr(leaf, "shape") else tuple(leaf.shape)
        if math.prod(shape) == 1:
            return P()
        parts = name.split("/")
        tails = ["/".join(parts[i:]) for i in range(len(parts))]
        for pattern, spec in compiled:
            if any(pattern.search(tail) for tail in tails):
                if not strict and len(spec) > len(shape):
                    return P()
                _check_spec(name, shape, spec, mesh)
                return spec
        raise UserError(f"no sharding rule matches {name} {shape}: add one to the family's param_rules")

    return jax.tree_util.tree_map_with_path(spec_of, tree)


def _check_spec(name: str, shape: tuple[int, ...], spec: P, mesh: Mesh) -> None:
    """Raises a UserError unless an array of this shape can lie on the mesh by this spec."""
    if len(spec) > len(shape):
        raise UserError(f"{name} {shape} has {len(shape)} axes, but its sharding rule {spec} names {len(spec)}")
    used: set[str] = set()
    for dimension, entry in enumerate(spec):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes:
            if axis not in mesh.shape:
                raise UserError(
                    f"{name}: its sharding rule {spec} names axis '{axis}'; the mesh has {tuple(mesh.shape)}"
                )
            if axis in used:
                raise UserError(f"{name}: its sharding rule {spec} uses mesh axis '{axis}' twice")
            used.add(axis)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dimension] % parts:
            flags = " and ".join(f"mesh_{axis}={mesh.shape[axis]}" for axis in axes)
            raise UserError(
                f"{name} {shape}: dimension {dimension} of size {shape[dimension]} does not divide by {parts} ({flags})"
            )


def shardings(tree: Any, rules: Rules, mesh: Mesh, *, strict: bool = True) -> Any:
    """`param_specs` as NamedShardings: where each leaf of params or optimizer state lies.

    Args and errors as `param_specs`; returns a pytree of the same structure with a NamedSharding per leaf.
    """
    specs = param_specs(tree, rules, mesh, strict=strict)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Leading dimension (rows) over `data` and `fsdp`."""
    return NamedSharding(mesh, ROWS)


def row_shards(mesh: Mesh) -> int:
    """The number that every count of rows must divide by: devices on `data` times devices on `fsdp`."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding, may_alias=False)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return reshard(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def place(tree: Any, where: Any) -> Any:
    """Puts arrays on the mesh. The result may be donated while `tree` lives on, even where it lay there already.

    Args:
      tree: pytree of numpy or jax arrays; with several processes, each gives the same whole arrays and keeps its part.
        Do not write into a numpy array afterwards: the device may read it later, or for good on a CPU.
      where: a pytree of NamedShardings of the same structure, or one for all leaves.

    Returns:
      A pytree of jax.Arrays with those shardings.
    """
    if isinstance(where, NamedSharding):
        return jax.tree.map(lambda x: _put(x, where), tree)
    return jax.tree.map(_put, tree, where)


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Puts a batch on the mesh: rows over `data` and `fsdp`, scalars replicated.

    Args:
      batch: pytree of arrays [B, ...] or []; with several processes, each gives the whole batch.
      mesh: the run's mesh.

    Returns:
      The batch as jax.Arrays.

    Raises:
      UserError: B does not divide by the devices that rows are spread over.
    """
    parts = row_shards(mesh)

    def put(path, x):
        if np.ndim(x) == 0:
            return _put(x, replicated(mesh))
        rows = np.shape(x)[0]
        if rows % parts:
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "the batch"
            raise UserError(
                f"{name} has {rows} rows, which do not divide over {parts} devices "
                f"(mesh_data={mesh.shape['data']} x mesh_fsdp={mesh.shape['fsdp']})"
            )
        return _put(x, batch_sharding(mesh))

    return jax.tree_util.tree_map_with_path(put, batch)


def to_host_memory(params: Any, option: str) -> Any:
    """Params in their devices' pinned host memory, sharded as they were; `resident` brings them back.

    Args:
      params: pytree of jax.Arrays, or of ShapeDtypeStructs with shardings.
      option: what asked for it, for the error.

    Raises:
      UserError: the devices have no such memory.
    """

    def move(x):
        device = next(iter(x.sharding.device_set))
        kinds = {memory.kind for memory in device.addressable_memories()}
        if PINNED not in kinds:
            raise UserError(
                f"--{option}: {device.device_kind} has no {PINNED} memory ({', '.join(sorted(kinds))}); leave it away"
            )
        return _to_memory(x, PINNED)

    return jax.tree.map(move, params)


def _to_memory(x: Any, kind: str) -> Any:
    where = x.sharding.with_memory_kind(kind)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    return jax.device_put(x, where)


def resident(params: Any) -> Any:
    """Params on their devices: those of `to_host_memory` as copies, which go when they are no longer used."""

    def back(x):
        return _to_memory(x, "device") if x.sharding.memory_kind == PINNED else x

    return jax.tree.map(back, params)


def spread_rows(batch: Any, mesh: Mesh | None, axis: int = 0) -> Any:
    """Asks the compiler, inside jit, to spread an axis of rows over `data` and `fsdp`.

    After a gather it would otherwise lay all rows on every device, and each would do the work of all.

    Args:
      batch: pytree of arrays, or of None; those whose rows do not divide over the devices stay as they are.
      mesh: None: no mesh, nothing is asked.
      axis: which axis counts rows.

    Returns:
      The batch.
    """
    if mesh is None or row_shards(mesh) == 1:
        return batch

    def spread(x):
        if x.shape[axis] % row_shards(mesh):
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*[None] * axis, *ROWS)))

    return jax.tree.map(spread, batch)


def reshard(tree: Any, where: NamedSharding) -> Any:
    """Arrays of several processes laid out anew. Every one must call it, in the same order.

    Args:
      tree: pytree of jax.Arrays.
      where: of all leaves.

    Returns:
      The same pytree, in buffers of its own where the layout changes.
    """
    return jax.jit(_same, out_shardings=where)(tree)


def _same(x: Any) -> Any:
    return x  # not a lambda, which would be another program each time


def fetch(tree: Any) -> Any:
    """Whole arrays on the host, as numpy. With several processes every one must call it, in the same order.

    Args:
      tree: pytree of jax.Arrays, sharded or not.

    Returns:
      The same pytree of numpy arrays.
    """

    def whole(x):
        if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
            return reshard(x, replicated(x.sharding.mesh))
        return x

    return jax.device_get(jax.tree.map(whole, tree))
