"""micro_batch_size by memory: the largest whose compiled update fits the devices.

Sizes are compiled, never run and never timed: the same config, data, devices and versions have the same size. A run
records it in its config.json, and a resume takes it from there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from rlhf_jax.config import PolicyConfig, StageConfig, batch_sizes
from rlhf_jax.dry_run import in_processes, memory, topologies
from rlhf_jax.dry_run.compiling import Program
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import multihost, sharding
from rlhf_jax.runtime import out_of_memory, run_folder
from rlhf_jax.stages import Stage
from rlhf_jax.stages.stage import Rows
from rlhf_jax.utils.text import bytes_text

USABLE = 0.9
"""Share of a device's memory that a compiled program may take: XLA counts neither fragmentation nor cuDNN's workspace.
On an H100 measured peaks were 2 to 4 % above the compiled ones (docs/benchmarks.md)."""
MOST_SIZES = 4
"""Sizes that are compiled, before the smallest is taken as it is."""
NEAR = 1.1
"""Times the memory that a size may need by estimate and still be compiled."""
PLATFORMS = ("gpu", "tpu")
"""Of devices that want large micro-batches. A CPU wants small ones, for its caches (docs/benchmarks.md)."""

ConfigT = TypeVar("ConfigT", bound=StageConfig)


class Need(NamedTuple):
    """What a program needs on each device, in bytes; infinite where the compiler refuses it."""

    peak: float
    temporary: float
    """The part of the peak that depends on the rows of a micro-batch: it grows at most in proportion to them."""


def settled(
    config: ConfigT, open_abstract: Callable[[ConfigT, Any], Stage], log: Callable[[str], None]
) -> tuple[ConfigT, dict[str, Program]]:
    """The config with the micro_batch_size of its run: that of its folder's config.json, or else by memory.

    It stays as it is where the options set micro-batches, or their size changes the loss; on CPUs; and for a run whose
    folder has no size, which began with that of `batch_sizes.for_devices`. On every process of a run.

    Args:
      config: resolved; with dry_run its folder is not read.
      open_abstract: (config, mesh) -> its stage on `AbstractWeights`, which is closed here.
      log: takes a line on the size that was chosen.

    Returns:
      (config, the programs of that size that were compiled, by name)
    """
    if not batch_sizes.leaves_micro_batches_open(config):
        return config, {}
    mesh = memory.stage_mesh(config)
    sizes = batch_sizes.even_sizes(config, sharding.row_shards(mesh))
    recorded = None
    if not config.dry_run:
        recorded = multihost.from_first(lambda: run_folder.recorded_options(str(config.run_dir)))
    if recorded is not None:
        size = recorded.get("micro_batch_size")
        as_before = dataclasses.replace(config, micro_batch_size=size)
        if size is None or _is_even(as_before, mesh.size):
            return as_before, {}
        devices = f"{mesh.size} device{'s' if mesh.size > 1 else ''}"
        log(f"micro_batch_size {size}, with which the run began, does not divide its rows over {devices}")
    device = next((x for x in mesh.devices.flat if x.process_index == jax.process_index()), mesh.devices.flat[0])
    if device.platform not in PLATFORMS:
        return config, {}
    capacities = multihost.agree(topologies.capacity(device))
    if None in capacities:
        log(f"micro_batch_size by tokens: the memory of {device.device_kind} is unknown")
        return config, {}
    stage = open_abstract(config, mesh)
    try:
        rows, programs = by_memory(stage, sizes, min(capacities), log)
    finally:
        stage.close()
    return dataclasses.replace(config, micro_batch_size=rows), programs


def _is_even(config: StageConfig, devices: int) -> bool:
    """Whether micro-batches of the config divide its minibatch, and spread evenly over the devices."""
    try:
        batch_sizes.check_devices(config, devices)
    except UserError:
        return False
    return not any(config.problems())


def by_memory(
    stage: Stage, sizes: Sequence[int], capacity: int, log: Callable[[str], None]
) -> tuple[int, dict[str, Program]]:
    """The largest size whose update, and forward passes before it, fit a device; the smallest if none does.

    Args:
      stage: on `AbstractWeights`; the search begins at the size of its config.
      sizes: ascending.
      capacity: bytes of a device.
      log: takes a line that says why.

    Returns:
      As `settled`, the size in place of the config.
    """
    config, device, usable = stage.config, stage.weights.mesh.devices.flat[0], USABLE * capacity
    assert config.micro_batch_size is not None
    in_process = topologies.described_tpu(device) and in_processes.can_compile(config)
    compiled: dict[tuple[int, str], Program] = {}

    def measure(name: str, rows: int) -> Need:
        if in_process:
            program = in_processes.in_process(dataclasses.replace(config, micro_batch_size=rows), name)
            assert program is not None
        else:
            lengths: Rows = "allowed" if config.dry_run else "longest"  # a dry run reads no data
            options = {"rows": lengths, "micro_batch_size": rows, "to_disk": not config.dry_run}
            (program,) = memory.programs(stage, only=(name,), **options)
        compiled[rows, name] = program
        refused = bool(program.refused)
        need = (math.inf, math.inf) if refused else (program.peak, program.temporary)
        return Need(*max(map(tuple, multihost.agree(need))))  # processes must go on with the same size

    rows, needs = largest(sizes, config.micro_batch_size, usable, lambda rows: measure("update", rows))
    fits = needs[rows].peak <= usable
    forward = ""  # its log-probabilities and values are computed in micro-batches too
    while fits and isinstance(config, PolicyConfig) and (need := measure("experience", rows)).peak > usable:
        forward, fits = f", experience {_text(need.peak)} with {rows}", rows > sizes[0]
        rows = sizes[max(sizes.index(rows) - 1, 0)]

    where = f"{device.device_kind} ({bytes_text(usable)}, {USABLE:g} of the memory of a run)"
    needed = f"the update needs {_said(rows, needs)}"
    if not fits:
        smallest, phase = dataclasses.replace(config, micro_batch_size=rows), "experience" if forward else "update"
        log(
            f"micro_batch_size {rows}: the smallest, and it does NOT fit {where}: {needed}{forward}. "
            f"{out_of_memory.what_needs_less(smallest, phase)}"
        )
    elif rows == sizes[-1]:
        log(f"micro_batch_size {rows}: the whole minibatch fits {where}: {needed}")
    else:
        more = forward or f", {_said(sizes[sizes.index(rows) + 1], needs)}"
        log(f"micro_batch_size {rows}: the largest that fits {where}: {needed}{more}")
    return rows, {name: program for (n, name), program in compiled.items() if n == rows}


def largest(
    sizes: Sequence[int], first: int, usable: float, measure: Callable[[int], Need]
) -> tuple[int, dict[int, Need]]:
    """The largest size that was measured and fits; the smallest size if none fits. (size, needs of measured sizes)

    Needs are close to affine in the rows. After one size the temporary bytes are taken as proportional, which is more
    than a larger size needs; then the line through two sizes says which is next. The size above the result is measured
    too, unless the line says that it is more than `NEAR` too large.

    Args:
      sizes: ascending.
      first: the size that is measured first.
      usable: bytes.
      measure: of a size.
    """
    needs: dict[int, Need] = {}
    rows = first
    while rows not in needs and len(needs) < MOST_SIZES:
        needs[rows] = measure(rows)
        rows = _next(sizes, usable, needs)
    rows = max((n for n, need in needs.items() if need.peak <= usable), default=sizes[0])
    if rows not in needs:
        needs[rows] = measure(rows)
    return rows, needs


def _next(sizes: Sequence[int], usable: float, needs: Mapping[int, Need]) -> int:
    """The size to measure next; one that is measured ends the search."""
    fitting = [n for n, need in needs.items() if need.peak <= usable]
    least = max(fitting, default=sizes[0])
    most = min((n for n in needs if n not in fitting), default=math.inf)
    open_sizes = [n for n in sizes if least <= n < most] or [least]
    if all(math.isinf(need.peak) for need in needs.values()):
        return open_sizes[len(open_sizes) // 2]
    above = open_sizes[:2][-1]
    if fitting and (len(needs) == 1 or estimate(above, needs) <= NEAR * usable):
        least = above
    return max((n for n in open_sizes if n == least or estimate(n, needs) <= usable), default=least)


def estimate(rows: int, needs: Mapping[int, Need]) -> float:
    """The peak of the update with micro-batches of `rows`, by those of other sizes, at least one of them finite."""
    near = sorted((n for n, need in needs.items() if math.isfinite(need.peak)), key=lambda n: abs(n - rows))
    a, b = near[0], near[1] if len(near) > 1 else None
    if b is None:
        return needs[a].peak + needs[a].temporary * (rows / a - 1)
    return needs[a].peak + (needs[b].peak - needs[a].peak) * (rows - a) / (b - a)


def _said(rows: int, needs: Mapping[int, Need]) -> str:
    """'52.1 GiB with 32 rows', or 'about 52.1 GiB with 32' where the size was not measured."""
    unit = f" row{'s' if rows > 1 else ''}" if rows in needs else ""
    about = "" if rows in needs else "about "
    return f"{about}{_text(needs[rows].peak if rows in needs else estimate(rows, needs))} with {rows}{unit}"


def _text(peak: float) -> str:
    return "more than the compiler allows" if math.isinf(peak) else bytes_text(peak)
