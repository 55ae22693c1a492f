"""The memory that a stage needs on each device, by its own programs, which are compiled and never run.

No weights are loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from rlhf_jax.config import PolicyConfig, SFTConfig, StageConfig, stage_name
from rlhf_jax.data import images
from rlhf_jax.dry_run import topologies
from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf
from rlhf_jax.models.placement import AbstractWeights
from rlhf_jax.parallel import compile_ahead, sharding
from rlhf_jax.stages import ALGORITHMS, open_stage, rollout_models, sft
from rlhf_jax.stages.open_models import Source


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program of an update; bytes are those of one device."""

    name: str
    seconds: float
    """Compile time."""
    arguments: int
    outputs: int
    temporary: int
    aliased: int
    """Outputs that reuse the buffers of arguments."""
    other_resident: int
    """Arrays of the stage that stay on the device and are no arguments of the program."""
    refused: str = ""
    """The compiler's reason if the program does not fit."""
    traced: Any = None
    """jax.stages.Traced."""
    compiled: Any = None
    """jax.stages.Compiled."""
    text: str = ""
    """Its optimised HLO, if the compile function kept it."""

    @property
    def peak(self) -> int:
        """Peak bytes on the device while it runs."""
        return self.other_resident + self.arguments + self.temporary + self.outputs - self.aliased


def bytes_on_device(tree: Any) -> int:
    """Bytes on each device of arrays, or shapes, with shardings; arrays in host memory count 0."""
    on_device = [x for x in jax.tree.leaves(tree) if not sharding.in_host_memory(x)]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in on_device)


def abstract_stage(config: StageConfig, mesh: Any) -> Any:
    """The stage of a config with shapes in place of arrays.

    It reads config.json, tokenizer and image processor; no weights, no data. A model that reads images is given one a
    prompt, of the shape with the most tiles.

    Args:
      config: a stage's.
      mesh: its devices may be described ones.

    Raises:
      UserError: a model or the tokenizer cannot be read, or does not fit the run or the mesh.
    """
    # Placeholder rows in place of the data set: only their number matters, for the schedule. The two completions of a
    # pair differ, since equal ones are a bad row.
    options = vars(config)
    texts = {"prompt_column": "a", "completion_column": "a", "chosen_column": "a", "rejected_column": "b"}
    row = {options[column]: text for column, text in texts.items() if column in options}
    if config.assistant_only_loss:  # its mask is an argument of the update
        row = {
            config.prompt_column: [{"role": "user", "content": "a"}],
            config.completion_column: [{"role": "assistant", "content": "a"}],
        }
    if _trains_on_images(config):
        answer = options.get("completion_column")
        row = {column: [{"role": "assistant" if column == answer else "user", "content": "a"}] for column in row}
        row["image"] = _square_image()
    quiet = {"dataset_test_split": None, "eval_dataset_name": None, "max_train_samples": None, "datasets": None}
    quiet |= {name: None for name in ("normalize_dataset_name", "margin_column") if name in options}
    given = {"train_dataset": [row] * config.batch_size, "weights": AbstractWeights(mesh)}
    if isinstance(config, PolicyConfig):
        # Host functions use no device memory, and the stage needs at least one reward.
        quiet |= {"reward_funcs": (), "reward_server": None, "reward_weights": None}
        given["reward_funcs"] = [] if config.reward_model_path else [lambda completions, **_: [0.0] * len(completions)]
    return open_stage(dataclasses.replace(config, **quiet), **given)


def _trains_on_images(config: StageConfig) -> bool:
    """Whether the stage trains on images if its data has some: its model and its options allow it."""
    if not isinstance(config, SFTConfig | PolicyConfig):
        return False
    source = Source(config.starting_model, config.model_revision, config.scratch_model)
    if not source.reads_images:
        return False
    try:
        if isinstance(config, SFTConfig):
            sft.check_images(config)
        else:
            rollout_models.check_images(config, ALGORITHMS[stage_name(config)])
        if source.shape is None:
            hf.load_model(source.files, images=True)
            return images.has_processor(source.files)
    except UserError:  # it trains on text
        return False
    return True


def _square_image() -> bytes:
    """A file of a small square; the image processor enlarges it."""
    file = io.BytesIO()
    images.pillow().Image.new("RGB", (64, 64)).save(file, "PNG")
    return file.getvalue()


def resident_bytes(stage: Any) -> dict[str, int]:
    """Bytes on each device between programs: params of each role, optimizer, frozen models by name."""
    state = stage.state
    sizes = {role: bytes_on_device(params) for role, params in state.params.items()}
    sizes["optimizer"] = bytes_on_device(state.opt_state)
    return sizes | {name: bytes_on_device(params) for name, params in stage.frozen().items()}


def programs(
    stage: Any,
    on_compiled: Callable[[Program], None] = lambda program: None,
    only: Sequence[str] = (),
    compile_fn: Callable[..., Program] | None = None,
) -> list[Program]:
    """The programs of an update, compiled.

    Args:
      stage: by `abstract_stage`.
      on_compiled: called with each program as soon as it is compiled.
      only: names of the programs to compile; empty: all.
      compile_fn: (name, traced, bytes that are no arguments) -> Program; default: `compile_program`, with the options
        that described devices need.

    Returns:
      A Program each, in the order of an update.
    """
    resident_total = sum(resident_bytes(stage).values())
    options = topologies.compiler_options(stage.mesh.devices.flat[0])
    compile_fn = compile_fn or functools.partial(compile_program, options=options)
    compiled: list[Program] = []

    def build(name: str, program: Any, *args: Any, resident: Any = (), **arguments: Any) -> Any:
        if not only or name in only:
            others = resident_total - bytes_on_device(resident)
            made = compile_fn(name, program.trace(*args, **arguments), others)
            if not made.refused:  # XLA counts no arguments that a program does not read
                made = dataclasses.replace(made, other_resident=max(others, resident_total - made.arguments))
            compiled.append(made)
            on_compiled(compiled[-1])
        return compile_ahead.result_shapes(program.eval_shape(*args, **arguments), stage.mesh)

    stage.trace_programs(build)
    return compiled


def compile_program(name: str, traced: Any, other_resident: int, options: dict[str, Any] | None = None) -> Program:
    """Compiles a program.

    Args:
      name: of the program.
      traced: jax.stages.Traced.
      other_resident: bytes of arrays on the device that are no arguments of the program.
      options: of XLA's compiler.

    Returns:
      The Program, with `refused` if it does not fit.
    """
    began = time.perf_counter()
    try:
        with _no_disk_cache():
            compiled = traced.lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        size, reason = _refusal(str(error))
        return Program(name, time.perf_counter() - began, 0, 0, size, 0, other_resident, reason, traced)
    memory, seconds = compiled.memory_analysis(), time.perf_counter() - began
    sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return Program(name, seconds, *sizes, memory.alias_size_in_bytes, other_resident, traced=traced, compiled=compiled)


def _refusal(error: str) -> tuple[int, str]:
    """(bytes that the program needs, 0 if the compiler's error does not say; the reason in one line)"""
    size = r"([\d.]+)([KMGT])"
    used = re.search(rf"Used {size} of {size}", error) or re.search(
        rf"memory required for [\w ]+ \({size}\) exceeds available HBM \({size}\)", error
    )
    if not used:
        return 0, error.splitlines()[0][:200]
    bytes_needed = float(used[1]) * 2 ** (10 * ("KMGT".index(used[2]) + 1))
    return int(bytes_needed), f"needs {used[1]} {used[2]}iB of {used[3]} {used[4]}iB"


@contextlib.contextmanager
def _no_disk_cache() -> Iterator[None]:
    """Programs compiled within are not written to jax's cache on disk, since they are never run."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def cache_bytes(stage: Any) -> int:
    """Bytes of keys and values on each device while it samples a chunk of a rollout, or a queue in slots."""
    config, policy = stage.config, stage.opened.policy
    layout, decoder = policy.layout, policy.family.decoder_config(policy.config)
    split = sharding.row_shards(stage.mesh) * (1 if layout.folded else stage.mesh.shape["tensor"])
    shared = stage.group_size if stage.shares_prompts else 1
    rows = config.decode_slots or config.rollout_batch_size or config.batch_size
    prompts = (rows if config.decode_slots is None else config.batch_size) / shared
    if config.decode_slots is not None:
        prompts += rows  # a slot's own copy
    itemsize = np.dtype(jax.numpy.dtype(config.dtype)).itemsize
    own_itemsize = itemsize if config.kv_cache_dtype == "auto" else 1 + 4 / decoder.head_dim  # with a float32 scale
    values = 0.0
    for window in decoder.layer_window or (None,) * decoder.num_hidden_layers:
        window = max(config.query_length, config.response_length) if window is None else window
        values += prompts * min(config.query_length, window) * itemsize
        values += rows * min(config.response_length, window) * own_itemsize
    return int(2 * policy.held_heads * decoder.head_dim * values / split)
