"""Our side of benchmark.py, in its own process: whole updates of the training loop, then each phase separately.

    python scripts/bench/benchmark_ours.py WORK --pair N [--name NAME] [--micro M]

benchmark.py prepares WORK. The result goes to WORK/ours-NAME.json; NAME is N by default.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_case import (
    Case,
    child_arguments,
    matrix_sizes,
    our_options,
    peak_rss_mib,
    rows_of,
    write_result,
)
from jax.errors import JaxRuntimeError

from rlhf_jax.algorithms import groups, microbatch, response_logprobs
from rlhf_jax.config import STAGES as CONFIGS
from rlhf_jax.config import files as config_files
from rlhf_jax.config.check import check
from rlhf_jax.generate import map_in_chunks
from rlhf_jax.metrics import logger as metrics_logger
from rlhf_jax.option import checked_types
from rlhf_jax.parallel import peaks, xla_flags
from rlhf_jax.runtime import compile_cache, progress, stopping
from rlhf_jax.runtime import run_folder as run_folders
from rlhf_jax.runtime.callbacks import Callback, Control
from rlhf_jax.runtime.loop import Loop, Patience
from rlhf_jax.runtime.monitor import Monitor
from rlhf_jax.stages import open_stage
from rlhf_jax.stages.programs import Programs

REPEATS = 3


def config_of(case: Case, work: Path, micro: int | None, run_dir: str):
    """Our config for the case."""
    return CONFIGS[case.algo](**our_options(case, work, micro, run_dir))


class Peak(Callback):
    """Peak memory up to the end of each update."""

    def __init__(self):
        self.memory: dict[str, float] = {}

    def on_step_end(self, step: int, metrics: dict[str, float], control: Control) -> None:
        """Update `step` is complete."""
        self.memory = memory()


def memory() -> dict[str, float]:
    """Peak memory in MiB of this process and of its fullest device."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    peak = {"peak_rss_mib": peak_rss_mib()}
    return peak | ({"peak_device_mib": max(peaks) / 2**20} if max(peaks) else {})


class NoCheckpoints:
    """Replaces a run's checkpoints, whose writing is not measured."""

    def save(self, *_: Any) -> None:
        """Does nothing."""


def updates(stage) -> tuple[Any, list[dict[str, float]], dict[str, float]]:
    """Runs all updates in the training loop: (state, timings of each update, peak memory)."""
    config = stage.config
    run_folder = run_folders.RunFolder.open(config.run_dir, json.loads(config_files.to_json(config)), config.resume)
    peak, control, stops, monitor = Peak(), Control(), stopping.Stops(), Monitor(stage, run_folder)
    logger = metrics_logger.MetricLogger.open(
        run_folder.path,
        report_to=config.report_to,
        monitor=monitor,
        terminal=progress.TerminalLines(total_steps=stage.total_steps, logging_steps=config.logging_steps),
        callback=lambda step, values: peak.on_step_end(step, values, control),
    )
    loop = Loop(
        stage,
        state=stage.state,
        start=0,
        run_folder=run_folder,
        checkpoints=NoCheckpoints(),
        logger=logger,
        callbacks=(peak,),
        control=control,
        stops=stops,
        monitor=monitor,
        patience=Patience(stage, run_folder),
    )
    with logger, loop.guarded():
        while loop.updates_remain():
            loop.begin_update()
            loop.end_update(*stage.train_step(loop.state, loop.step, stops.tick))
            loop.finish_update()
    return loop.state, metrics_logger.read_metrics(run_folder.timings), peak.memory


class CompileSplit:
    """Seconds of tracing, lowering and XLA (or reading its result from the cache) of each program that took long."""

    LEAST = 0.3  # seconds of a program, all together

    def __init__(self):
        self.seconds: dict[str, dict[str, float]] = {}
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event: str, seconds: float, fun_name: str = "", **_: object) -> None:
        kinds = {"jaxpr_trace": "trace", "jaxpr_to_mlir_module": "lower", "backend_compile": "xla"}
        kind = kinds.get(event.rsplit("/", 1)[-1].removesuffix("_duration"))
        if kind:
            name = fun_name.rsplit(".", 1)[-1].removeprefix("jit(").removesuffix(")").removeprefix("jit_")
            program = self.seconds.setdefault(name, {})
            program[kind] = program.get(kind, 0.0) + seconds

    def result(self) -> dict[str, dict[str, float]]:
        """By program; those with something for XLA."""
        long = {name: kinds for name, kinds in self.seconds.items() if "xla" in kinds}
        return {name: kinds for name, kinds in long.items() if sum(kinds.values()) >= self.LEAST}


def loop_phases(line: dict[str, float]) -> dict[str, float]:
    """Timings of one update under the names of `benchmark_case.LOOP`."""
    names = {"generate": "generate", "score": "reward", "experience": "experience", "update": "update"}
    return {new: line[f"time/{old}"] for old, new in names.items()}


def timed(run: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of a call and its result; the first call, which may compile, is reported separately."""
    seconds = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - began)
    return {"first": seconds[0], "all": seconds[1:], "seconds": median(seconds[1:])}


def prefill_only(stage) -> Programs:
    """Programs with responses of one token: a rollout is prefill and one sampled token."""
    context = dataclasses.replace(stage.context, config=dataclasses.replace(stage.config, response_length=1))
    return dataclasses.replace(stage.programs, context=context)


def forward_pass(stage, role: str) -> Callable:
    """Jitted forward pass of 'reference' (log-probabilities) or 'value': (params, rollout, experience) -> array."""
    config, models = stage.config, stage.models
    network = models.value if role == "value" and models.value else models.reference

    def run(params, rollout, experience):
        def forward(rows):
            network_now = network.replace(params=params)
            if role == "value":
                hidden = response_logprobs.response_hidden(network_now, rows, config)
                return network.model.scalars(params, hidden).reshape(rows.response.shape)
            return response_logprobs.response_logprobs(network_now, rows, config)[0]

        rows = experience if stage.shares_prompts else groups.split_groups(experience)
        count, size = rows.lengths.shape
        chunk = microbatch.groups_per_chunk(config.rollout_batch_size, size, count)
        return map_in_chunks(forward, rows, chunk)

    return jax.jit(run)


def phases(stage, state, wanted: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Times each wanted phase separately, with the stage's own programs where it has them.

    Args:
      stage: of PPO or RLOO.
      state: its train state; donated if 'update' is wanted.
      wanted: of `benchmark_case.PHASES`; 'generate' adds 'prefill' and 'decode', the rest of it.

    Returns:
      {phase: {"seconds": median, "all": list, "first": with compilation}}; decode has "seconds" only.
    """
    group, programs, times = stage.group_size, stage.programs, {}
    prompts = stage.train_data.batch(stage.config.seed, 0, stage.rows_per_update)
    rows = np.repeat(prompts.rows, group)

    def generate(programs):
        policy, keys = state.params["policy"], {"seed": state.seed, "step": state.step}
        return programs.generate(policy, programs.place(prompts), **keys, group_size=group)[0]

    if "generate" in wanted:
        short = prefill_only(stage)
        times["generate"], times["prefill"] = timed(lambda: generate(programs)), timed(lambda: generate(short))
        rest = times["generate"]["seconds"] - times["prefill"]["seconds"]
        if rest > 0.1 * times["generate"]["seconds"]:  # less is noise
            times["decode"] = {"seconds": rest}
    if set(wanted) == {"generate"}:
        return times
    rollout = generate(programs)

    def score():
        return stage.scorer.score(rollout, stage.train_data, rows, group=group, state=programs.trainer_state(0))

    if "reward" in wanted:
        times["reward"] = timed(lambda: score().scores)
    if set(wanted) <= {"generate", "reward"}:
        return times
    experience, metrics = jax.block_until_ready(programs.make_experience(state, rollout, score(), group))
    reference = stage.models.reference.replace(params=programs.reference_params(state))
    whole = stage.models.replace(reference=reference).with_trained(state.params)
    frozen = {"reference": whole.reference.params, "value": (whole.value or whole.policy).params}
    for role, params in frozen.items():
        if role in wanted:
            program = forward_pass(stage, role)
            times[role] = timed(lambda program=program, params=params: program(params, rollout, experience))
    if "update" in wanted:

        def update():
            nonlocal state
            state, updated = programs.update(state, experience, metrics)
            return updated

        times["update"] = timed(update)
    return times


def matmul_flops(device: str, dtype: str) -> float:
    """FLOP/s of the fastest large matrix product."""
    return max(peaks.product_rate(jnp.ones((n, n), dtype)) for n in matrix_sizes(device))


def measure(case: Case, work: Path, pair: int, name: str, micro: int | None) -> dict[str, Any]:
    """All measurements of this process."""
    compiling, split = compile_cache.CompileTimer(), CompileSplit()
    config = config_of(case, work, micro, str(work / f"run-{name}"))
    check(checked_types(config))
    began = time.perf_counter()
    stage = open_stage(config, train_dataset=rows_of(work, pair), compile_ahead=case.compile_ahead)
    result: dict[str, Any] = {"micro": stage.config.micro_batch_size, "load_seconds": time.perf_counter() - began}
    state = stage.state
    try:
        wanted = () if case.phase is None else tuple(stage_phases(case))
        if case.phase in (None, "all"):
            compiling.since_last()
            state, lines, peak = updates(stage)
            result |= {"updates": [line["time/step"] for line in lines], "loop": [loop_phases(x) for x in lines]}
            result |= {"compile_seconds": compiling.seconds, "compile_split": split.result(), **peak}
        if case.profile and pair == 0:
            if "updates" not in result:
                state, _, _ = stage.train_step(state, 0)  # compile before the trace
            with jax.profiler.trace(case.profile):
                state, metrics, _ = stage.train_step(state, case.updates)
                jax.block_until_ready((state, metrics))
        if wanted:
            result["phases"] = phases(stage, state, wanted)
            if "updates" not in result:
                result |= {"compile_seconds": compiling.seconds, **memory()}
    finally:
        stage.close()
    device = jax.devices()[0]
    result |= {"device": "cpu" if device.platform == "cpu" else "cuda" if device.platform == "gpu" else device.platform}
    result |= {"device_kind": device.device_kind, "versions": {"jax": jax.__version__}}
    return result | {"matmul_flops": matmul_flops(result["device"], case.dtype), "bandwidth": peaks.copy_rate()}


def stage_phases(case: Case) -> list[str]:
    """Phases selected by --phase."""
    names = ["generate", "reference", "reward", "value", "update"]
    if case.algo == "rloo":
        names.remove("value")
    return names if case.phase == "all" else [case.phase]


def main() -> None:
    """One measurement; running out of memory is a result, not an error."""
    case, args = child_arguments()
    xla_flags.add_those_of_gpus()
    try:
        result = measure(case, args.work, args.pair, args.name, args.micro)
    except (JaxRuntimeError, MemoryError) as error:
        if isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        result = {"out_of_memory": str(error)[:300]}
    write_result(args.work, "ours", args.name, result)


if __name__ == "__main__":
    main()
