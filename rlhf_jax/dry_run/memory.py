"""What a stage holds on each device, from its own programs: compiled for the mesh, never run, without a weight.

The same programs compile for devices that are not there: libtpu makes them for any TPU slice on any Linux machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from rlhf_jax.config import StageConfig, stage_name
from rlhf_jax.errors import UserError
from rlhf_jax.models.placement import AbstractWeights
from rlhf_jax.parallel import sharding
from rlhf_jax.stages import ALGORITHMS, open_stage

GIB = 2**30
# GiB of high-bandwidth memory that XLA gives the programs of a device, by jax's name of it: what libtpu 0.0.51 says
# when one does not fit. A device of a v4 topology is half a chip.
HBM = {"TPU v4": 15.25, "TPU v5 lite": 15.75, "TPU v5": 95.73, "TPU v6 lite": 31.24}


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program of an update; bytes are those of one device."""

    name: str
    seconds: float
    """That it took to compile."""
    arguments: int
    outputs: int
    temporary: int
    aliased: int
    """Outputs that take the place of arguments."""
    beside: int
    """What the stage holds on the device while the program runs, and the program does not see."""
    refused: str = ""
    """What the compiler said, where the program does not fit."""
    traced: Any = None
    """What was compiled, as jax.stages.Traced."""
    made: Any = None
    """What came out, as jax.stages.Compiled."""
    text: str = ""
    """XLA's text of it, where `make` kept that."""

    @property
    def peak(self) -> int:
        """The most bytes that are held while it runs."""
        return self.beside + self.arguments + self.temporary + self.outputs - self.aliased


@functools.cache
def topology_devices(name: str) -> tuple[Any, ...]:
    """The devices of a TPU slice that is not there, such as 'v5e:16x16'.

    Raises:
      UserError: libtpu is not installed, or knows no such slice.
    """
    from jax.experimental import topologies

    # Or libtpu asks the network which slice this machine is part of, and lets only one process compile at a time.
    alone = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "none", "TPU_WORKER_HOSTNAMES": "localhost"}
    for variable, value in {**alone, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        os.environ.setdefault(variable, value)
    try:
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"--topology {name}: {reason}. It takes a TPU's name and shape, v5e:4x4 or v5p:2x2x2, and "
            "pip install '.[tpu-aot]'"
        ) from error


def capacity(device: Any) -> int | None:
    """Bytes of a device's memory; of a CPU device its share of the machine's; None where nothing says."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    try:
        said = (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # a chip that is not there
        said = None
    known = HBM.get(device.device_kind)
    return said if said is not None or known is None else int(known * GIB)


def bytes_on_device(tree: Any) -> int:
    """Bytes that each device holds of arrays, or shapes, with shardings; what waits in host memory counts nothing."""
    here = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != sharding.PINNED]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in here)


def planned_stage(config: StageConfig, mesh: Any) -> Any:
    """The stage of a config on shapes alone: neither weights nor data are read, config.json and the tokenizer are.

    Args:
      config: a stage's.
      mesh: to lay it on; its devices need not be there.

    Raises:
      UserError: a model or the tokenizer cannot be read, or does not fit the run or the mesh.
    """
    # Placeholder rows in place of the data set: only their number matters, for the schedule. The two completions of a
    # pair differ, since equal ones are a bad row.
    texts = {"prompt_column": "a", "completion_column": "a", "chosen_column": "a", "rejected_column": "b"}
    row = {getattr(config, column): text for column, text in texts.items() if hasattr(config, column)}
    quiet = {"dataset_test_split": None, "eval_dataset_name": None, "max_train_samples": None}
    quiet |= {name: None for name in ("normalize_dataset_name", "margin_column") if hasattr(config, name)}
    given = {"train_dataset": [row] * config.batch_size, "weights": AbstractWeights(mesh)}
    if stage_name(config) in ALGORITHMS:
        # Functions of the host hold nothing on a device, and the stage asks for at least one reward.
        quiet |= {"reward_funcs": (), "reward_server": None, "reward_weights": None}
        given["reward_funcs"] = [] if config.reward_model_path else [lambda completions, **_: [0.0] * len(completions)]
    return open_stage(dataclasses.replace(config, **quiet), **given)


def parts(stage: Any) -> dict[str, int]:
    """Bytes that each device holds between programs: params of each role, optimizer, frozen models by name."""
    state = stage.state
    found = {role: bytes_on_device(params) for role, params in state.params.items()}
    found["optimizer"] = bytes_on_device(state.opt_state)
    return found | {name: bytes_on_device(params) for name, params in stage.frozen().items()}


def programs(
    stage: Any,
    tell: Callable[[Program], None] = lambda program: None,
    only: Sequence[str] = (),
    make: Callable[..., Program] | None = None,
) -> list[Program]:
    """The programs of an update, compiled.

    Args:
      stage: by `planned_stage`.
      tell: called with each as soon as it is there.
      only: names of the programs to compile; empty: all.
      make: compiles one, as `compiled`, the default.

    Returns:
      A Program each, in the order of an update.
    """
    held = sum(parts(stage).values())
    found: list[Program] = []

    def build(name: str, program: Any, *args: Any, resident: Any = ()) -> Any:
        if not only or name in only:
            found.append((make or compiled)(name, program.trace(*args), held - bytes_on_device(resident)))
            tell(found[-1])
        return on_mesh(program.eval_shape(*args), stage.mesh)

    stage.trace_programs(build)
    return found


def on_mesh(shapes: Any, mesh: Any) -> Any:
    """Shapes as a batch lies on the mesh: rows over `data` and `fsdp`, what has none on every device."""

    def place(x: Any) -> Any:
        rows = x.ndim and x.shape[0] % sharding.row_shards(mesh) == 0
        where = sharding.batch_sharding(mesh) if rows else sharding.replicated(mesh)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(place, shapes)


def compiled(name: str, traced: Any, beside: int, options: dict[str, Any] | None = None) -> Program:
    """Compiles a program.

    Args:
      name: of it.
      traced: jax.stages.Traced.
      beside: bytes that a device holds of what the program does not see.
      options: of XLA's compiler.

    Returns:
      The Program; with `refused` where it does not fit.
    """
    began = time.perf_counter()
    try:
        with _kept_nowhere():
            made = traced.lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        size, said = _refusal(str(error))
        return Program(name, time.perf_counter() - began, 0, 0, size, 0, beside, said, traced)
    memory, seconds = made.memory_analysis(), time.perf_counter() - began
    sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return Program(name, seconds, *sizes, memory.alias_size_in_bytes, beside, traced=traced, made=made)


def _refusal(error: str) -> tuple[int, str]:
    """Bytes that a program needs by the compiler's error (0: it says nothing of them), and that in a line."""
    size = r"([\d.]+)([KMGT])"
    used = re.search(rf"Used {size} of {size}", error) or re.search(
        rf"memory required for [\w ]+ \({size}\) exceeds available HBM \({size}\)", error
    )
    if not used:
        return 0, error.splitlines()[0][:200]
    bytes_needed = float(used[1]) * 2 ** (10 * ("KMGT".index(used[2]) + 1))
    return int(bytes_needed), f"needs {used[1]} {used[2]}iB of {used[3]} {used[4]}iB"


@contextlib.contextmanager
def _kept_nowhere() -> Iterator[None]:
    """Within it no program goes to jax's cache on disk: these are never run."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def cache_bytes(stage: Any) -> int:
    """Bytes of keys and values that each device holds while it samples a rollout's chunk."""
    config, policy = stage.config, stage.opened.policy
    rows = config.rollout_batch_size or config.batch_size
    layout = policy.layout
    split = sharding.row_shards(stage.mesh) * (1 if layout.folded else stage.mesh.shape["tensor"])
    shared = stage.group_size if stage.shares_prompts else 1
    columns = config.query_length / shared + config.response_length
    itemsize = np.dtype(jax.numpy.dtype(config.dtype)).itemsize
    return int(2 * policy.config.num_hidden_layers * policy.config.hidden_size * rows * columns * itemsize / split)
