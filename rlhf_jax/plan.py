"""--dry_run: the resolved config, the batch arithmetic, the mesh and the memory, with nothing loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax import arithmetic, configfile, data, footprint, models, sharding
from rlhf_jax.config import PolicyConfig, PPOConfig, RLOOConfig, SFTConfig, StageConfig, stage_name
from rlhf_jax.models import hf

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _scratch(config: StageConfig):
    """The model of random weights."""
    rows = 50304
    if config.tokenizer_name_or_path:
        tokenizer = data.load_tokenizer(config.tokenizer_name_or_path, None, vocab_size=None)
        rows = 128 * math.ceil(tokenizer.vocab_size / 128)
    if "x" in config.scratch_model:
        return models.custom_shape(config.scratch_model, rows)
    return models.pythia(config.scratch_model, vocab_size=rows)


def _model(config: StageConfig, path: str | None, revision: str):
    """The model at `path`, from its config.json alone; None where there is none to read."""
    if path is None:
        return None
    folder, stage = os.path.split(config.run_dir)
    exports = [os.path.join(folder, *names) for names in (("sft", "policy"), ("reward", "reward_model"))]
    if stage == stage_name(config) and path in exports and not os.path.exists(path):
        # An earlier stage of the same pipeline will leave it there.
        raise FileNotFoundError(path)
    return hf.load_model(path, revision=revision)


def parameters(model: Any, head: str) -> int:
    """Number of parameters of a model with one head."""
    shapes = jax.eval_shape(lambda key: model.init(key, heads=(head,)), jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def roles(config: StageConfig) -> list[tuple[str, Any, str, bool]]:
    """(role, model, head, trained) of every model that the stage holds."""
    if not isinstance(config, PolicyConfig):
        head = "causal" if isinstance(config, SFTConfig) else "scalar"
        start = _scratch(config) if config.scratch_model else None
        return [("model", start or _model(config, config.model_name_or_path, config.model_revision), head, True)]
    policy = _scratch(config) if config.scratch_model else _model(config, config.sft_model_path, config.model_revision)
    reward = _model(config, config.reward_model_path, config.reward_model_revision)
    found = [("policy", policy, "causal", True)]
    if isinstance(config, PPOConfig) and config.value_model == "separate":
        value = _model(config, config.value_model_path, config.value_model_revision) or reward or policy
        found.append(("value", value, "scalar", True))
    if not isinstance(config, RLOOConfig) or config.beta:
        found.append(
            ("reference", _model(config, config.ref_model_path, config.ref_model_revision) or policy, "causal", False)
        )
    if reward is not None:
        found.append(("reward", reward, "scalar", False))
    for number, path in enumerate(config.more_reward_models, 2):
        found.append((f"reward {number}", _model(config, path, "main"), "scalar", False))
    return found


def mesh_of(config: StageConfig) -> Any:
    """The mesh of a stage: of the devices that are there, or of the TPU slice that --topology names."""
    devices = None if config.topology is None else footprint.topology_devices(config.topology)
    return sharding.make_mesh(config.mesh_data, config.mesh_fsdp, config.mesh_tensor, devices=devices)


def size(count: float) -> str:
    """Bytes in words, '12.3 MiB'."""
    unit = next((unit for unit in ("GiB", "MiB") if count >= UNITS[unit]), "KiB")
    return f"{count / UNITS[unit]:,.1f} {unit}"


def memory_lines(config: StageConfig, mesh: Any) -> list[str]:
    """The parameters of each model; what each device holds between programs and while each of them runs; whether it
    fits."""
    lines = []
    for role, model, head, trained in roles(config):
        what = "trained" if trained else "frozen"
        lines.append(f"{role:<12} {parameters(model, head):>15,} parameters, {what}")
    stage = footprint.planned_stage(config, mesh)
    device, parts = mesh.devices.flat[0], footprint.parts(stage)
    limit = footprint.capacity(device)
    has = f"which has {size(limit)}" if limit else "whose memory is not known"
    lines.append(f"each device ({device.device_kind}, {has}) holds")
    lines += [f"  {name:<12} {size(count):>12}" for name, count in parts.items()]
    lines.append(f"  {'together':<12} {size(sum(parts.values())):>12}")
    if isinstance(config, PolicyConfig):
        lines.append(f"  {'cache':<12} {size(footprint.cache_bytes(stage)):>12} of keys and values, while it generates")
    found = footprint.programs(stage)
    for program in found:
        if program.refused:
            lines.append(f"  {program.name:<12} {'':>12} refused by the compiler: {program.refused}")
            continue
        beside = size(program.temporary + program.outputs - program.aliased)
        compiled = f"(compiled in {program.seconds:.0f} s)"
        lines.append(f"  {program.name:<12} {size(program.peak):>12} at its peak, {beside} of them its own {compiled}")
    highest = max(found, key=lambda program: program.peak)
    return [*lines, verdict(highest, limit, any(program.refused for program in found))]


def verdict(highest: footprint.Program, limit: int | None, refused: bool) -> str:
    """Whether it fits, in a line."""
    if refused:
        return "memory: does NOT fit; split over more devices, smaller micro_batch_size or rollout_batch_size"
    if limit is None:
        return f"memory: {size(highest.peak)} a device at the highest, in {highest.name}"
    share = f"{size(highest.peak)} of {size(limit)} a device at the highest, in {highest.name}"
    if highest.peak > limit:
        return f"memory: does NOT fit: {share}; more devices, smaller micro_batch_size or rollout_batch_size"
    return f"memory: fits: {share}"


def show(config: StageConfig, tell: Callable[[str], None] = print) -> None:
    """Prints the plan of a stage: compiles its programs, but loads and writes nothing.

    Args:
      config: a stage's.
      tell: what to do with each line.

    Raises:
      UserError: a model's config cannot be read, or does not fit the run.
    """
    mesh = mesh_of(config)
    tell(configfile.to_json(config))
    device = mesh.devices.flat[0]
    for line in arithmetic.batch_lines(arithmetic.with_micro_batch(config, sharding.row_shards(mesh), device.platform)):
        tell(line)
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    where = f" of {config.topology}, compiled for and not there" if config.topology else ""
    devices = f"{mesh.size} {device.platform} device{'s' if mesh.size > 1 else ''}{where}"
    tell(f"mesh: {axes} ({devices}), jax {jax.__version__}")
    try:
        lines = memory_lines(config, mesh)
    except FileNotFoundError as error:
        lines = [f"memory: not known before {error} exists"]
    for line in lines:
        tell(line)
    tell(f"compute {jnp.dtype(config.dtype).name}; dry run: nothing was loaded or written")
