"""Our side of benchmark.py, in its own process: whole updates of the training loop.

    python scripts/bench/benchmark_ours.py WORK --pair N [--name NAME] [--micro M]

benchmark.py prepares WORK. The result goes to WORK/ours-NAME.json; NAME is N by default.
"""

from __future__ import annotations

import json
import shutil
import time
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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

from rlhf_jax.config import STAGES as CONFIGS
from rlhf_jax.config import files as config_files
from rlhf_jax.config.check import check
from rlhf_jax.dry_run import memory as dry_run_memory
from rlhf_jax.dry_run import roofline
from rlhf_jax.metrics import logger as metrics_logger
from rlhf_jax.option import checked_types
from rlhf_jax.parallel import peaks, xla_flags
from rlhf_jax.runtime import compile_cache, progress, stopping
from rlhf_jax.runtime import run_folder as run_folders
from rlhf_jax.runtime.callbacks import Control
from rlhf_jax.runtime.loop import Loop, Patience
from rlhf_jax.runtime.monitor import Monitor
from rlhf_jax.stages import open_stage


def config_of(case: Case, work: Path, micro: int | None, run_dir: str):
    """Our config for the case."""
    return CONFIGS[case.algo](**our_options(case, work, micro, run_dir))


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
    """Runs all updates in the training loop: (state, timings of each update, peak memory so far)."""
    config = stage.config
    run_folder = run_folders.RunFolder.open(config.run_dir, json.loads(config_files.to_json(config)), config.resume)
    stops, monitor = stopping.Stops(), Monitor(stage, run_folder)
    logger = metrics_logger.MetricLogger.open(
        run_folder.path,
        report_to=config.report_to,
        monitor=monitor,
        terminal=progress.TerminalLines(total_steps=stage.total_steps, logging_steps=config.logging_steps),
        records_rows=stage.records_rows,
    )
    loop = Loop(
        stage,
        state=stage.state,
        start=0,
        run_folder=run_folder,
        checkpoints=NoCheckpoints(),
        logger=logger,
        callbacks=(),
        control=Control(),
        stops=stops,
        monitor=monitor,
        patience=Patience(stage, run_folder),
    )
    with logger, loop.guarded():
        while loop.updates_remain():
            loop.begin_update()
            loop.end_update(*stage.train_step(loop.state, loop.step, stops.tick))
            loop.finish_update()
    return loop.state, metrics_logger.read_metrics(run_folder.timings), memory()


def loop_phases(line: dict[str, float]) -> dict[str, float]:
    """Timings of one update under the names of `benchmark_case.LOOP`."""
    names = {"generate": "generate", "score": "reward", "experience": "experience", "update": "update"}
    return {new: line[f"time/{old}"] for old, new in names.items()}


def predicted(stage) -> dict[str, dict[str, float | None]]:
    """Peak MiB and seconds of the stage's programs as a dry run prints them; no seconds for a device without rates.

    A call has compiled them, so that XLA compiles none again.
    """
    rates, trips = roofline.rates(jax.devices()[0], stage.config.dtype), stage.config.response_length - 1
    return {
        program.name: {
            "peak_mib": program.peak / 2**20,
            "seconds": rates and roofline.predict(program.text, rates, trips).seconds,
        }
        for program in dry_run_memory.programs(stage)
    }


def matmul_flops(device: str, dtype: str) -> float:
    """FLOP/s of the fastest large matrix product."""
    return max(peaks.product_rate(jnp.ones((n, n), dtype)) for n in matrix_sizes(device))


def measure(case: Case, work: Path, pair: int, name: str, micro: int | None) -> dict[str, Any]:
    """All measurements of this process."""
    compiling = compile_cache.CompileTimer()
    shutil.rmtree(work / f"run-{name}", ignore_errors=True)  # of an earlier command
    config = config_of(case, work, micro, str(work / f"run-{name}"))
    check(checked_types(config))
    began = time.perf_counter()
    stage = open_stage(config, train_dataset=rows_of(work, pair), compile_ahead=True)
    result: dict[str, Any] = {"micro": stage.config.micro_batch_size, "load_seconds": time.perf_counter() - began}
    try:
        compiling.since_last()
        state, lines, peak = updates(stage)
        result |= {"updates": [line["time/step"] for line in lines], "loop": [loop_phases(x) for x in lines]}
        result |= {"compile_seconds": compiling.seconds, **peak}
        if case.predict:
            try:
                result["predicted"] = predicted(stage)
            except Exception:  # what was measured counts without it
                traceback.print_exc()
        if case.profile and pair == 0:
            with jax.profiler.trace(case.profile):
                state, metrics, _ = stage.train_step(state, case.updates)
                jax.block_until_ready((state, metrics))
    finally:
        stage.close()
    device = jax.devices()[0]
    result |= {"device": "cpu" if device.platform == "cpu" else "cuda" if device.platform == "gpu" else device.platform}
    result |= {"device_kind": device.device_kind, "versions": {"jax": jax.__version__}}
    return result | {"matmul_flops": matmul_flops(result["device"], case.dtype)}


def main() -> None:
    """One measurement; running out of memory is a result, not an error."""
    case, args = child_arguments()
    xla_flags.add_those_of_run(case.deterministic)
    try:
        result = measure(case, args.work, args.pair, args.name, args.micro)
    except (JaxRuntimeError, MemoryError) as error:
        if isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        result = {"out_of_memory": str(error)[:300]}
    write_result(args.work, "ours", args.name, result)


if __name__ == "__main__":
    main()
