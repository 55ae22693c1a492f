"""The memory that a stage needs on each device, by its own programs, which are compiled and never run.

No weights are loaded.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np

from rlhf_jax.config import PolicyConfig, SFTConfig, StageConfig, stage_name
from rlhf_jax.data import images
from rlhf_jax.dry_run import compiling, topologies
from rlhf_jax.dry_run.compiling import Program
from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf
from rlhf_jax.models.placement import AbstractWeights
from rlhf_jax.parallel import compile_ahead, sharding
from rlhf_jax.stages import ALGORITHMS, open_stage, rollout_models, sft
from rlhf_jax.stages.open_models import Source
from rlhf_jax.stages.stage import Rows


def stage_mesh(config: StageConfig) -> Any:
    """The mesh of a stage: of this machine's devices, or of those that --topology names."""
    devices = None if config.topology is None else topologies.topology_devices(config.topology)
    return sharding.make_mesh(config.mesh_data, config.mesh_fsdp, config.mesh_tensor, devices=devices)


def bytes_on_device(tree: Any) -> int:
    """Bytes on each device of arrays, or shapes, with shardings; arrays in host memory count 0."""
    on_device = [x for x in jax.tree.leaves(tree) if not sharding.in_host_memory(x)]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in on_device)


def abstract_stage(config: StageConfig, mesh: Any) -> Any:
    """The stage of a config with shapes in place of arrays.

    It reads config.json, tokenizer and image processor; no weights, no data. A model that reads images is given one a
    prompt, of the shape with the most tiles.

    Args:
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
    inputs = {"train_dataset": [row] * config.batch_size, "weights": AbstractWeights(mesh)}
    if isinstance(config, PolicyConfig):
        # Host functions use no device memory, and the stage needs at least one reward.
        quiet |= {"reward_funcs": (), "reward_server": None, "reward_weights": None}
        inputs["reward_funcs"] = [] if config.reward_model_path else [lambda completions, **_: [0.0] * len(completions)]
    return open_stage(dataclasses.replace(config, **quiet), **inputs)


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


class _Enough(Exception):
    """All programs that were asked for are traced."""


def programs(
    stage: Any,
    on_compiled: Callable[[Program], None] = lambda program: None,
    *,
    only: Sequence[str] = (),
    compile_fn: Callable[..., Program] | None = None,
    at_once: int = 1,
    rows: Rows = "allowed",
    micro_batch_size: int | None = None,
    to_disk: bool = False,
    compiled_before: Mapping[str, Program] = {},
) -> list[Program]:
    """The programs of an update, compiled.

    Args:
      stage: by `abstract_stage`.
      on_compiled: called with each program, in their order, as soon as it and those before it are compiled.
      only: names of the programs to compile; empty: all.
      compile_fn: (name, traced, bytes that are no arguments) -> Program; default: `compiling.compile_for` of the
        stage's devices.
      at_once: programs that are compiled at a time; with 1 a program is traced when the one before it is compiled.
      rows, micro_batch_size: as `Stage.trace_programs`.
      to_disk: whether jax's cache on disk keeps them, for a run to find.
      compiled_before: programs of this stage that need not be compiled again, by name.

    Returns:
      A Program each, in the order of an update.
    """
    resident_total = sum(resident_bytes(stage).values())
    compile_fn = compile_fn or compiling.compile_for(stage.mesh.devices.flat[0])
    compiled: list[Program] = []
    pending: collections.deque[futures.Future[Program]] = collections.deque()

    def take_first() -> None:
        compiled.append(pending.popleft().result())
        on_compiled(compiled[-1])

    def compile_one(name: str, traced: Any, other_resident: int) -> Program:
        program = compiled_before.get(name) or compile_fn(name, traced, other_resident)
        if program.refused:
            return program
        # XLA counts no arguments that a program does not read.
        return dataclasses.replace(program, other_resident=max(other_resident, resident_total - program.arguments))

    def build(name: str, program: Any, *args: Any, resident: Any = (), **arguments: Any) -> Any:
        traced = program.trace(*args, **arguments)
        if not only or name in only:
            pending.append(pool.submit(compile_one, name, traced, resident_total - bytes_on_device(resident)))
            if at_once == 1:
                take_first()
        if only and len(compiled) + len(pending) == len(only):
            raise _Enough
        return compile_ahead.result_shapes(traced.out_info, stage.mesh)

    cache = contextlib.nullcontext() if to_disk else compiling.no_disk_cache()
    with cache, futures.ThreadPoolExecutor(at_once) as pool:
        with contextlib.suppress(_Enough):
            stage.trace_programs(build, rows=rows, micro_batch_size=micro_batch_size)
        while pending:
            take_first()
    return compiled


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
