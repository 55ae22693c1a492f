"""--dry_run: prints the resolved config, the batch arithmetic, the mesh and the memory; loads no weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax import storage
from rlhf_jax.config import PolicyConfig, StageConfig, batch_sizes, stage_name
from rlhf_jax.config import files as config_files
from rlhf_jax.dry_run import hlo, in_processes, memory, micro_batches, roofline, topologies
from rlhf_jax.dry_run.compiling import Program
from rlhf_jax.parallel import peaks, sharding
from rlhf_jax.runtime import out_of_memory
from rlhf_jax.stages import disk
from rlhf_jax.utils.text import bytes_text


def missing_start(config: StageConfig) -> str | None:
    """The export of an earlier stage of the pipeline that this stage starts from, if it does not exist yet."""
    folder, stage = os.path.split(config.run_dir or "")
    exports = [os.path.join(folder, *names) for names in (("sft", "policy"), ("reward", "reward_model"))]
    starts = [value for value in vars(config).values() if value in exports and not storage.exists(value)]
    return starts[0] if starts and stage == stage_name(config) else None


def show_memory(
    config: StageConfig, mesh: Any, log: Callable[[str], None], compiled_before: Mapping[str, Program]
) -> None:
    """Logs the parameters of each model, each device's memory between and during programs, and whether it fits."""
    if (path := missing_start(config)) is not None:
        return log(f"memory: unknown until {path} exists")
    stage = memory.abstract_stage(config, mesh)
    for role, count, trained in disk.parameters(stage):
        log(f"{role:<12} {count:>15,} parameters, {'trained' if trained else 'frozen'}")
    if (shown := getattr(stage.train_data, "images", None)) is not None:
        log(
            f"images: one a prompt of {shown.tiles} tiles, the most that the image processor cuts one into; other "
            "numbers of images or tiles need other programs"
        )
    device, resident = mesh.devices.flat[0], memory.resident_bytes(stage)
    limit = topologies.capacity(device)
    log(f"resident on each device ({device.device_kind}, {usable(device, limit)})")
    for name, count in resident.items():
        log(f"  {name:<12} {bytes_text(count):>12}")
    log(f"  {'total':<12} {bytes_text(sum(resident.values())):>12}")
    if isinstance(config, PolicyConfig):
        log(f"  {'cache':<12} {bytes_text(memory.cache_bytes(stage)):>12} of keys and values, during generation")
    log(f"during each program, compiled for {device.device_kind}, which can take minutes")
    if topologies.described_tpu(device) and in_processes.can_compile(config):
        programs = in_processes.programs(config, lambda program: log(program_line(program)), compiled_before)
    else:
        at_once = min(4, os.cpu_count() or 1)
        options = {"at_once": at_once, "compiled_before": compiled_before}
        programs = memory.programs(stage, lambda program: log(program_line(program)), **options)
    for line in (*communication_lines(programs, mesh, config), *time_lines(programs, mesh, config)):
        log(line)
    if topologies.compiler_options(device):
        log(
            "compiled without Triton's matrix products, as a run is unless XLA_FLAGS says otherwise. CUDA and NCCL "
            "take some hundred MiB of their own"
        )
    log(verdict(config, programs, limit))


def program_line(program: Program) -> str:
    """A program's peak, or why the compiler refuses it."""
    if program.refused:
        return f"  {program.name:<12} {'':>12} refused by the compiler: {program.refused}"
    buffers = bytes_text(program.temporary + program.outputs - program.aliased)
    compiled = f"(compiled in {program.seconds:.0f} s)"
    return f"  {program.name:<12} {bytes_text(program.peak):>12} peak, {buffers} of it the program's own {compiled}"


def usable(device: Any, limit: int | None) -> str:
    """The memory of a device that a run can use, as text."""
    if limit is None:
        return "memory unknown"
    if (gpu := topologies.described_gpu(device)) is None:
        return f"{bytes_text(limit)} of memory"
    share = f"the {topologies.preallocated():g} of {bytes_text(gpu.memory)} that jax preallocates"
    return f"{bytes_text(limit)} of memory: {share}"


def communication_lines(programs: list[Program], mesh: Any, config: StageConfig) -> list[str]:
    """The bytes that a device sends in each program, by collective; none on one device."""
    if mesh.size == 1:
        return []
    steps = config.response_length  # decoding stops when all rows have ended
    lines = [f"sent by each device{', responses of full length' if steps > 1 else ''}"]
    for program in programs:
        if program.refused:
            continue
        sent: dict[str, float] = {}
        for collective in hlo.collectives(program.text, steps):
            sent[collective.kind] = sent.get(collective.kind, 0.0) + collective.sent * collective.times
        kinds = ", ".join(f"{kind} {bytes_text(sent[kind])}" for kind in sorted(sent) if sent[kind] >= 2**10)
        lines.append(f"  {program.name:<12} {bytes_text(sum(sent.values())):>12}{': ' if kinds else ''}{kinds}")
    return lines


def time_lines(programs: list[Program], mesh: Any, config: StageConfig) -> list[str]:
    """The predicted seconds of each program and of an update, their parts, and what to change next; none for this
    machine's own TPUs, for several devices of one CPU, which share its cores, and without published rates."""
    device = mesh.devices.flat[0]
    if mesh.size > 1 and device.platform == "cpu" or (rates := roofline.rates(device, config.dtype)) is None:
        return []
    peak = peaks.peak(device, config.dtype)
    between = ", communication between devices left out" if mesh.size > 1 else ""
    # On a CPU the arithmetic of elements takes time too.
    at_least = " at least" if device.platform == "cpu" else ""
    lines = [
        f"predicted seconds{at_least}, from the compiled instructions, for the longest prompts{between}; shares are of "
        f"{peak.flops / 1e12:.3g} TFLOP/s, {peak.source}"
    ]
    unknown_trips = config.response_length - 1
    predicted = {x.name: roofline.predict(x.text, rates, unknown_trips) for x in programs if not x.refused}
    for name, one in predicted.items():
        share = one.flops / one.seconds / peak.flops
        lines.append(f"  {name:<12} {one.seconds:>10.3g} s, {share:.0%} of the peak; {shares(one.parts)}")
    if len(predicted) == len(programs) > 1:
        seconds, flops = (sum(getattr(one, field) for one in predicted.values()) for field in ("seconds", "flops"))
        lines.append(f"  {'all':<12} {seconds:>10.3g} s an update, {flops / seconds / peak.flops:.0%} of the peak")
    return [*lines, *advice(config, predicted, device)]


def shares(seconds: Mapping[str, float]) -> str:
    """Parts of a time of half a percent and more as text, the longest first: 'mlp 60%, attention 40%'."""
    total = sum(seconds.values())
    parts = sorted(((part / total, name) for name, part in seconds.items()), reverse=True)
    return ", ".join(f"{name} {part:.0%}" for part, name in parts if part >= 0.005)


def advice(config: StageConfig, predicted: Mapping[str, roofline.Predicted], device: Any) -> list[str]:
    """A line on what bounds the program that takes most of the time, and the options that change it."""
    if not predicted:
        return []
    name, most = max(predicted.items(), key=lambda item: item[1].seconds)
    bound = max(most.bounds, key=most.bounds.__getitem__)
    rows = getattr(config, "rollout_batch_size", None)
    options = {
        "attn_implementation cudnn, where cuDNN supports the model": config.attn_implementation == "blocked"
        and device.platform == "gpu"
        and max(most.parts, key=most.parts.__getitem__) == "attention",
        "gradient_checkpointing with gradient_checkpointing_policy dots": (name, bound) == ("update", "memory")
        and device.platform == "gpu"
        and config.remat == "none",
        "a larger micro_batch_size": (name, bound) == ("update", "launches"),
        "a larger rollout_batch_size": name == "generate" and rows is not None and rows < config.batch_size,
        "kv_cache_dtype int8": (name, bound) == ("generate", "memory") and config.kv_cache_dtype == "auto",
    }
    fitting = [option for option, fits in options.items() if fits]
    change = f"; options that change it: {', '.join(fitting)}" if fitting else ""
    return [f"  most time: {name}, bound by {shares(most.bounds)}{change}"]


def verdict(config: StageConfig, programs: Sequence[Program], limit: int | None) -> str:
    """One line: whether it fits, and if it does not, the options that need less."""
    refused = next((program for program in programs if program.refused), None)
    highest = refused or max(programs, key=lambda program: program.peak)
    if refused is not None:
        problem = f"the compiler refuses {refused.name}"
    elif limit is None:
        return f"memory: peak {bytes_text(highest.peak)} per device, in {highest.name}"
    else:
        problem = f"peak {bytes_text(highest.peak)} of {bytes_text(limit)} per device, in {highest.name}"
        if highest.peak <= limit:
            return f"memory: fits: {problem}"
    return f"memory: does NOT fit: {problem}. {out_of_memory.what_needs_less(config, highest.name)}"


def show(config: StageConfig, log: Callable[[str], None] = print) -> None:
    """Prints the plan of a stage: compiles its programs, loads and writes nothing.

    Args:
      log: takes each line.

    Raises:
      UserError: a model's config cannot be read, or does not fit the run.
    """
    mesh = memory.stage_mesh(config)
    log(config_files.to_json(config))
    device = mesh.devices.flat[0]
    programs: dict[str, Program] = {}
    if missing_start(config) is None:
        config, programs = micro_batches.settled(config, memory.abstract_stage, log)
    config = batch_sizes.for_devices(config, sharding.row_shards(mesh), device.platform)
    for line in batch_sizes.batch_lines(config):
        log(line)
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    where = f" of {config.topology}, described" if config.topology else ""
    devices = f"{mesh.size} {device.platform} device{'s' if mesh.size > 1 else ''}{where}"
    log(f"mesh: {axes} ({devices}), jax {jax.__version__}")
    show_memory(config, mesh, log, programs)
    log(f"compute {jnp.dtype(config.dtype).name}; dry run: nothing was loaded or written")
