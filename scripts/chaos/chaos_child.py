"""python -m rlhf_jax.train with instrumentation: reports its phases, so that `chaos.py` can kill it in one of them.

    python scripts/chaos/chaos_child.py --report FD [--before PHASE:STEP:N --signal KILL] -- \
        --config CONFIG --run_dir RUN ...

A line goes to the file descriptor FD when a phase begins and ends, and before each file change in the run's folder,
which Python's audit events report:

    SECONDS begin PHASE NUMBER | SECONDS end PHASE NUMBER | SECONDS file PHASE NUMBER N OPERATION PATH

Phases: compile (numbered from 1), rollout and update (by the update's number), save (by the step), export. A save runs
in the background after its call returns; it ends with the last rename in checkpoints/, which a `file` line reports.
--before sends the signal to the process right before the N-th file change of a phase ('any' counts all of the run).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

CHANGES = {"os.rename": "rename", "os.remove": "remove", "os.rmdir": "rmdir", "os.mkdir": "mkdir", "os.link": "link"}


class Reporter:
    """Writes the lines, and assigns each file change to a phase."""

    def __init__(self, pipe: int, run_dir: str, before: str | None, number: int):
        self.pipe, self.run_dir, self.signal = pipe, os.path.abspath(run_dir), number
        phase, step, count = before.split(":") if before else ("", "0", "0")
        self.before = (phase, int(step), int(count))
        self.saving = self.exporting = 0
        self.counts: dict[tuple[str, int], int] = {}
        self.lock = threading.Lock()

    def write(self, *words: object) -> None:
        """Writes one line; a single short write is atomic."""
        os.write(self.pipe, (" ".join(map(str, (f"{time.monotonic():.6f}", *words))) + "\n").encode())

    def run_phase(self, phase: str, number: int, call: Callable[[], object]):
        """`call()` as a phase, which ends when the result is computed."""
        import jax

        self.write("begin", phase, number)
        result = jax.block_until_ready(call())
        self.write("end", phase, number)
        return result

    def audit(self, event: str, arguments: tuple) -> None:
        """An audit hook that reports changes to files of the run."""
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
            operation, folder = "write", -1
        elif event in CHANGES:
            path, operation, folder = arguments[0], CHANGES[event], arguments[-1]
        else:
            return
        if isinstance(path, int):
            return
        path = os.fsdecode(path)
        if not os.path.isabs(path) and isinstance(folder, int) and folder >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        path = os.path.abspath(path)
        if path.startswith(self.run_dir + os.sep):
            with self.lock:
                self.changed(operation, os.path.relpath(path, self.run_dir))

    def changed(self, operation: str, path: str) -> None:
        """Reports that a file of the run is about to change."""
        phase = ("other", 0)
        if path.startswith("checkpoints" + os.sep) and self.saving:
            phase = ("save", self.saving)
        elif self.exporting and not path.startswith("checkpoints" + os.sep):
            phase = ("export", self.exporting)
        for name in (phase, ("any", 0)):
            self.counts[name] = self.counts.get(name, 0) + 1
        self.write("file", *phase, self.counts[phase], operation, path)
        if any((*name, self.counts[name]) == self.before for name in (phase, ("any", 0))):
            self.write("kill", *phase, self.counts[phase], operation, path)
            os.kill(os.getpid(), self.signal)


def watch(reporter: Reporter) -> None:
    """Wraps the functions that the loop calls with the reporter."""
    from jax._src import compiler

    from rlhf_jax import train
    from rlhf_jax.runtime import run_folder
    from rlhf_jax.runtime.checkpoint import Checkpoints

    compile_it, compiled = compiler.backend_compile_and_load, [0]

    @functools.wraps(compile_it)
    def compiling(*arguments, **options):
        compiled[0] += 1
        number = compiled[0]
        reporter.write("begin", "compile", number)
        program = compile_it(*arguments, **options)
        reporter.write("end", "compile", number)
        return program

    compiler.backend_compile_and_load = compiling

    save = Checkpoints.save

    @functools.wraps(save)
    def saving(self, step, *arguments, **options):
        reporter.saving = step
        reporter.write("begin", "save", step)
        return save(self, step, *arguments, **options)

    Checkpoints.save = saving

    finish = run_folder.RunFolder.finish

    @functools.wraps(finish)
    def finishing(self, *arguments, **options):
        finish(self, *arguments, **options)
        reporter.write("end", "export", 1)

    run_folder.RunFolder.finish = finishing
    train.open_stage = functools.partial(watched, reporter, train.open_stage)


def watched(reporter: Reporter, open_stage: Callable, *arguments, **options):
    """A stage that reports its rollouts and updates in training, and its export."""
    from rlhf_jax.stages import RolloutStage

    stage = open_stage(*arguments, **options)
    step_of, export_of, number = stage.train_step, stage.export, [0]

    def around(phase: str, call: Callable) -> Callable:
        return lambda *arguments: reporter.run_phase(phase, number[0], lambda: call(*arguments))

    def train_step(state, step, *arguments):
        number[0] = step + 1
        return step_of(state, step, *arguments)

    def export(state, folder):
        reporter.exporting = 1
        reporter.write("begin", "export", 1)
        return export_of(state, folder)

    stage.train_step, stage.export = train_step, export
    if isinstance(stage, RolloutStage):
        programs = stage.programs

        def run(name: str, program: Any, **arguments):
            phase = {"generate": "rollout", "update": "update"}.get(name)
            call = functools.partial(programs.run, name, program, **arguments)
            return call() if phase is None else reporter.run_phase(phase, number[0], call)

        # The evaluator keeps the original programs, so its rollouts are not reported.
        stage.programs = dataclasses.replace(programs, run=run)
    else:
        stage.update_step = around("update", stage.update_step)
    return stage


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code of the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=int, required=True, help="file descriptor for the lines")
    parser.add_argument("--before", metavar="PHASE:STEP:N", help="send the signal before this file change")
    parser.add_argument("--signal", choices=("KILL", "TERM"), default="KILL", help="of --before")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="--, then options of rlhf_jax.train")
    options = parser.parse_args(argv)
    train_options = options.train[1:] if options.train[:1] == ["--"] else options.train
    if "--run_dir" not in train_options:
        parser.error("give --run_dir FOLDER after --")
    from rlhf_jax import train

    run_dir = train_options[train_options.index("--run_dir") + 1]
    reporter = Reporter(options.report, run_dir, options.before, getattr(signal, f"SIG{options.signal}"))
    sys.addaudithook(reporter.audit)
    watch(reporter)
    return train.main(train_options)


if __name__ == "__main__":
    sys.exit(main())
