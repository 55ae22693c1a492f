"""Resident memory of one of our processes, phase by phase. Linux only.

    python scripts/bench/benchmark.py --systems ours --work WORK ...
    python scripts/bench/process_memory.py WORK [--micro ROWS] [--updates N] [--cache DIR]

`benchmark.py --work` prepares WORK. Each line is the resident memory at the end of a phase and its peak within it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from benchmark_case import Case, rows_of, status_mib


class Memory:
    """This process's resident memory, and its peak since the last line."""

    def __init__(self):
        self.began = time.monotonic()
        print(f"{'MiB':42s}{'at end':>8s}{'peak':>8s}{'s':>8s}")

    def line(self, phase: str) -> None:
        """Prints the phase that ends here; the next one's peak starts again."""
        now = time.monotonic()
        seconds, self.began = now - self.began, now
        print(f"{phase:42s}{status_mib('VmRSS'):8.0f}{status_mib('VmHWM'):8.0f}{seconds:8.1f}", flush=True)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def main() -> None:
    """Opens the case's stage and runs updates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, metavar="WORK")
    parser.add_argument("--micro", type=int, metavar="ROWS", help="micro-batch size; default: ours")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--cache", help="folder of compiled programs, read and filled; default: none")
    args = parser.parse_args()
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "1" if args.cache else "0"
    memory = Memory()
    memory.line("python")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.devices()
    memory.line("jax")
    import benchmark_ours

    from rlhf_jax.runtime import compile_cache, host_memory
    from rlhf_jax.stages import open_stage

    memory.line("rlhf_jax")
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", args.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", compile_cache.MIN_COMPILE_SECONDS)

    def compiled(event: str, seconds: float, **_: object) -> None:
        if event.endswith("backend_compile_duration") and seconds >= compile_cache.MIN_COMPILE_SECONDS:
            memory.line("  up to a compiled program")

    case = Case.read(args.work)
    with tempfile.TemporaryDirectory() as run_dir:
        config = benchmark_ours.config_of(case, args.work, args.micro, run_dir)
        stage = open_stage(config, train_dataset=rows_of(args.work, 0))
        host_memory.trim()
        memory.line("tokenizer, rows, weights, optimizer")
        jax.monitoring.register_event_duration_secs_listener(compiled)  # before the timer, so before its trim
        compile_cache.CompileTimer()
        state = stage.state
        for update in range(args.updates):
            state, metrics, _ = stage.train_step(state, update)
            jax.block_until_ready((state, metrics))
            memory.line(f"update {update + 1}")
        arrays = sum(array.nbytes for array in jax.live_arrays()) / 2**20
        print(f"{'arrays between updates':42s}{arrays:8.0f}")
        stage.close()


if __name__ == "__main__":
    main()
