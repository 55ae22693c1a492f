"""One mesh for all models, and the sharding of each array on it.

The axes are `data` (rows), `fsdp` (rows, and a shard of params and optimizer state) and `tensor` (heads and hidden
units). A laptop uses a 1 x 1 x 1 mesh, so that sharding is not a second code path. Steps compiled by `jax.jit` follow
the sharding of their arguments; no mesh is set globally.
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
      data, fsdp, tensor: devices on each axis; one may be -1 for all remaining devices.
      devices: default: all devices of all processes.

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
        # A TPU slice is a torus, and a mesh axis (64 of 4x4x8) may need a part of one of its physical axes.
        split = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(split, AXES, axis_types=auto)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Maps names of a model's logical axes to mesh axes. Hashable: static under jit.

    Logical axes: `rows` of a batch; `data`, rows where `fsdp` shards another axis; `draws`, rows where no other axis is
    sharded; `fsdp` and `tensor`, the two axes of a matrix; `vocabulary`, sharded over both.

    Attributes:
      mesh: of the run.
      folded: whether the model's heads do not divide by `tensor`; that axis then shards params and rows like `fsdp`.
      manual: whether arrays are those of one shard of the rows, inside `jax.shard_map` over `row_axes`.
    """

    mesh: Mesh
    folded: bool = False
    manual: bool = False

    @property
    def platform(self) -> str:
        """Of the mesh's devices: 'cpu', 'gpu' or 'tpu'."""
        return self.mesh.devices.flat[0].platform


def row_axes(layout: Layout) -> tuple[str, ...]:
    """The mesh axes that rows are split over."""
    return _mesh_axes("rows", layout.folded)


def _mesh_axes(name: str | None, folded: bool) -> tuple[str, ...]:
    """The mesh axes of a logical axis; none for None."""
    if folded:
        named = {"rows": AXES, "fsdp": ("fsdp", "tensor"), "tensor": ()}
    else:
        named = {"rows": ("data", "fsdp"), "fsdp": ("fsdp",), "tensor": ("tensor",)}
    return {None: (), "data": ("data",), "draws": AXES, "vocabulary": ("fsdp", "tensor"), **named}[name]


def partition_rules(names: Sequence[tuple[str, tuple[str | None, ...]]], folded: bool = False) -> Rules:
    """Rules of a family, (pattern, logical axes), as (pattern, PartitionSpec)."""

    def spec(axes: Sequence[tuple[str, ...]]) -> P:
        return P(*(None if not names else names[0] if len(names) == 1 else names for names in axes))

    return tuple((pattern, spec([_mesh_axes(name, folded) for name in row])) for pattern, row in names)


def fitting_axes(layout: Layout, name: str | None, size: int) -> tuple[str, ...] | None:
    """The mesh axes of a logical axis of that size; None: it does not divide by them."""
    choices = [_mesh_axes(name, layout.folded)] + ([ROWS[0]] if name in ("rows", "draws") else [])
    if layout.manual:
        choices = [tuple(axis for axis in axes if axis not in row_axes(layout)) for axes in choices]
    fits = (axes for axes in choices if size % math.prod(layout.mesh.shape[axis] for axis in axes) == 0)
    return next(fits, None)


def constrain(layout: Layout | None, x: Any, *names: str | None) -> Any:
    """A sharding constraint, inside jit, from the logical axes of an array.

    Args:
      layout: None, or of a single device: no constraint.
      names: of its first axes, as in `Layout`; the others are not sharded. An axis whose size does not divide is left
        to the compiler.

    Returns:
      The array.
    """
    if layout is None or layout.mesh.size == 1:
        return x
    entries: list[Any] = []
    for size, name in zip(x.shape, names, strict=False):
        axes = fitting_axes(layout, name, size)
        entries.append(P.UNCONSTRAINED if axes is None else axes or None)
    if layout.manual:
        return jax.lax.with_sharding_constraint(x, P(*entries))  # of the mesh that shard_map has set
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, P(*entries)))


def param_specs(tree: Any, rules: Rules, mesh: Mesh, *, strict: bool = True) -> Any:
    """A PartitionSpec for each leaf of `tree`, from the first rule whose pattern matches the leaf's path.

    A path is the leaf's keys joined by '/'. The pattern is searched in it, and `^` matches at the start of any of its
    parts, so that rules of a model also apply inside a TrainState or an optimizer state ('0/mu/policy/backbone/...').
    Leaves of a single element (counters, scales) are replicated and need no rule. Where a leaf's sizes do not divide by
    the mesh axes of its rule, the next rule that matches is used, if there is one.

    Args:
      tree: pytree of arrays or ShapeDtypeStructs.
      rules: (regular expression, PartitionSpec) pairs.
      mesh: with the axes that the specs name.
      strict: False replicates a leaf with fewer axes than its rule, as in the state of factored optimizers.

    Returns:
      A pytree of the same structure with a PartitionSpec per leaf.

    Raises:
      UserError: no rule matches a leaf, a mesh axis is used twice or does not exist, or a size does not divide. Names
        the leaf and the numbers.
    """
    compiled = [(re.compile(pattern), spec) for pattern, spec in rules]

    def leaf_spec(path, leaf) -> P:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shape = tuple(np.shape(leaf)) if not hasattr(leaf, "shape") else tuple(leaf.shape)
        if math.prod(shape) == 1:
            return P()
        parts = name.split("/")
        tails = ["/".join(parts[i:]) for i in range(len(parts))]
        matching = [spec for pattern, spec in compiled if any(pattern.search(tail) for tail in tails)]
        if not matching:
            raise UserError(f"no sharding rule matches {name} {shape}: add one to the family's param_rules")
        if not strict and len(matching[0]) > len(shape):
            return P()
        spec = next((spec for spec in matching if _divides(shape, spec, mesh)), matching[0])
        _check_spec(name, shape, spec, mesh)
        return spec

    return jax.tree_util.tree_map_with_path(leaf_spec, tree)


def _spec_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one dimension of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _divides(shape: tuple[int, ...], spec: P, mesh: Mesh) -> bool:
    """Whether each size divides by the devices on the mesh axes of its dimension."""
    parts = [math.prod(mesh.shape.get(axis, 1) for axis in _spec_axes(entry)) for entry in spec]
    return all(size % count == 0 for size, count in zip(shape, parts, strict=False))


def _check_spec(name: str, shape: tuple[int, ...], spec: P, mesh: Mesh) -> None:
    """Raises a UserError unless an array of this shape can be sharded by this spec."""
    if len(spec) > len(shape):
        raise UserError(f"{name} {shape} has {len(shape)} axes, but its sharding rule {spec} names {len(spec)}")
    used: set[str] = set()
    for dimension, entry in enumerate(spec):
        axes = _spec_axes(entry)
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
    """`param_specs` as NamedShardings, for params or optimizer state.

    Args and errors as `param_specs`; returns a pytree of the same structure with a NamedSharding per leaf.
    """
    specs = param_specs(tree, rules, mesh, strict=strict)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: its leading dimension (rows) over `data` and `fsdp`."""
    return NamedSharding(mesh, ROWS)


def row_shards(mesh: Mesh) -> int:
    """The number of shards of rows, by which every batch must divide: devices on `data` times devices on `fsdp`."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding, may_alias=False)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return reshard(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def place(tree: Any, where: Any) -> Any:
    """Puts arrays on the mesh. Never aliases `tree`, so the result may be donated while `tree` stays in use.

    Args:
      tree: pytree of numpy or jax arrays; with several processes, each passes the same whole arrays and keeps its part.
        Do not write into a numpy array afterwards: the device may read it later, and a CPU may keep using it.
      where: a pytree of NamedShardings of the same structure, or one for all leaves.

    Returns:
      A pytree of jax.Arrays with those shardings.
    """
    if isinstance(where, NamedSharding):
        return jax.tree.map(lambda x: _put(x, where), tree)
    return jax.tree.map(_put, tree, where)


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Puts a batch on the mesh: rows sharded over `data` and `fsdp`, scalars replicated.

    Args:
      batch: pytree of arrays [B, ...] or []; with several processes, each passes the whole batch.

    Returns:
      The batch as jax.Arrays.

    Raises:
      UserError: B does not divide by the number of row shards.
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


class HostShape(jax.ShapeDtypeStruct):
    """An array in the host memory of devices that are only described: these list no memories, and jax then drops the
    memory from a sharding."""


def memory_kinds(device: jax.Device) -> set[str]:
    """The memories that a device reaches; none of a device that is only described."""
    return {memory.kind for memory in device.addressable_memories()}


def in_host_memory(x: Any) -> bool:
    """Whether an array, or a shape, is in pinned host memory."""
    return isinstance(x, HostShape) or x.sharding.memory_kind == PINNED


def to_host_memory(params: Any, option: str) -> Any:
    """Moves params to the pinned host memory of their devices, with the same sharding; `resident` copies them back.

    Args:
      params: pytree of jax.Arrays, or of ShapeDtypeStructs with shardings.
      option: of the user, for the error.

    Raises:
      UserError: the devices have no such memory.
    """

    def move(x):
        device = next(iter(x.sharding.device_set))
        kinds = memory_kinds(device)
        if not kinds:
            return HostShape(x.shape, x.dtype, sharding=x.sharding)
        if PINNED not in kinds:
            kinds = ", ".join(sorted(kinds))
            raise UserError(f"--{option}: {device.device_kind} has no {PINNED} memory ({kinds}); remove the option")
        return _to_memory(x, PINNED)

    return jax.tree.map(move, params)


def _to_memory(x: Any, kind: str) -> Any:
    where = x.sharding.with_memory_kind(kind)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    return jax.device_put(x, where)


def resident(params: Any) -> Any:
    """Params in device memory: those of `to_host_memory` as copies, which are freed after use."""

    def to_device(x):
        if isinstance(x, HostShape):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        return _to_memory(x, "device") if in_host_memory(x) else x

    return jax.tree.map(to_device, params)


def spread_rows(batch: Any, mesh: Mesh | None, axis: int = 0) -> Any:
    """A sharding constraint, inside jit, of an axis of rows over `data` and `fsdp`.

    Without it the compiler may replicate all rows after a gather, so that every device does the work of all.

    Args:
      batch: pytree of arrays or None; arrays whose rows do not divide get no constraint.
      mesh: None: no constraint.
      axis: of the rows.

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
    """Changes the sharding of arrays across processes. Every process must call it, in the same order.

    Args:
      tree: pytree of jax.Arrays.
      where: of all leaves.

    Returns:
      The same pytree, in new buffers where the sharding changes.
    """
    return jax.jit(_identity, out_shardings=where)(tree)


def _identity(x: Any) -> Any:
    return x  # a function, since each lambda would be another program


def path_names(tree: Any) -> list[str]:
    """The path of each leaf of a pytree, as 'policy/backbone/...', in the order of `jax.tree.leaves`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def fetch(tree: Any) -> Any:
    """Whole arrays on the host, as numpy. With several processes, every one must call it, in the same order.

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
