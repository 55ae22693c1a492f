"""python -m rlhf_jax.train that tells where it is, so that `chaos.py` can kill it there.

    python scripts/chaos/chaos_child.py --report FD [--before PHASE:STEP:N --signal KILL] -- \
        --config CONFIG --run_dir RUN ...

A line goes to the file descriptor FD when a phase begins and ends, and before each change of a file in the run's folder
(as Python's audit events tell: the library needs nothing for it):

    SECONDS begin PHASE NUMBER | SECONDS end PHASE NUMBER | SECONDS file PHASE NUMBER N OPERATION PATH

Phases: compile (numbered from 1), rollout and update (by the update's number), save (by the step), export. A save goes
on in the background after its call: it ends with the last rename in checkpoints/, which a `file` line tells. --before
ends the process by the signal right before the N-th change of a file in a phase ('any' counts all of the run).
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

CHANGES = {"os.rename": "rename", "os.remove": "remove", "os.rmdir": "rmdir", "os.mkdir": "mkdir", "os.link": "link"}


class Reporter:
    """Writes the lines, and knows which phase a change of a file belongs to."""

    def __init__(self, pipe: int, run_dir: str, before: str | None, number: int):
        self.pipe, self.run_dir, self.signal = pipe, os.path.abspath(run_dir), number
        phase, step, count = before.split(":") if before else ("", "0", "0")
        self.before = (phase, int(step), int(count))
        self.saving = self.exporting = 0
        self.counts: dict[tuple[str, int], int] = {}
        self.lock = threading.Lock()

    def tell(self, *words: object) -> None:
        """One line; whole, since it is short and goes out in one write."""
        os.write(self.pipe, (" ".join(map(str, (f"{time.monotonic():.6f}", *words))) + "\n").encode())

    def within(self, phase: str, number: int, call: Callable[[], object]):
        """`call()`, and what it returns once that is computed: what is launched in a phase ends in it."""
        import jax

        self.tell("begin", phase, number)
        found = jax.block_until_ready(call())
        self.tell("end", phase, number)
        return found

    def hear(self, event: str, arguments: tuple) -> None:
        """An audit hook: sees what Python is about to do to files."""
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
        """A file of the run is about to change."""
        phase = ("other", 0)
        if path.startswith("checkpoints" + os.sep) and self.saving:
            phase = ("save", self.saving)
        elif self.exporting and not path.startswith("checkpoints" + os.sep):
            phase = ("export", self.exporting)
        for name in (phase, ("any", 0)):
            self.counts[name] = self.counts.get(name, 0) + 1
        self.tell("file", *phase, self.counts[phase], operation, path)
        if any((*name, self.counts[name]) == self.before for name in (phase, ("any", 0))):
            self.tell("kill", *phase, self.counts[phase], operation, path)
            os.kill(os.getpid(), self.signal)


def watch(reporter: Reporter) -> None:
    """Puts the reporter between the loop and what it calls."""
    from jax._src import compiler

    from rlhf_jax import train
    from rlhf_jax.runtime import run_folder
    from rlhf_jax.runtime.checkpoint import Checkpoints

    compile_it, compiled = compiler.backend_compile_and_load, [0]

    @functools.wraps(compile_it)
    def compiling(*arguments, **options):
        compiled[0] += 1
        number = compiled[0]
        reporter.tell("begin", "compile", number)
        found = compile_it(*arguments, **options)
        reporter.tell("end", "compile", number)
        return found

    compiler.backend_compile_and_load = compiling

    save = Checkpoints.save

    @functools.wraps(save)
    def saving(self, step, *arguments, **options):
        reporter.saving = step
        reporter.tell("begin", "save", step)
        return save(self, step, *arguments, **options)

    Checkpoints.save = saving

    finish = run_folder.RunFolder.finish

    @functools.wraps(finish)
    def finishing(self, *arguments, **options):
        finish(self, *arguments, **options)
        reporter.tell("end", "export", 1)

    run_folder.RunFolder.finish = finishing
    train.open_stage = functools.partial(watched, reporter, train.open_stage)


def watched(reporter: Reporter, open_stage: Callable, *arguments, **options):
    """A stage whose rollouts and updates in training, and whose export, are told."""
    stage = open_stage(*arguments, **options)
    now: list[int] = []  # the number of the update that is made; evaluation rolls out too

    def around(phase: str, call: Callable) -> Callable:
        def inner(*arguments):
            return reporter.within(phase, now[0], lambda: call(*arguments)) if now else call(*arguments)

        return inner

    def train_step(state, step, *tick):
        now.append(step + 1)
        try:
            return step_of(state, step, *tick)
        finally:
            now.clear()

    def export(state, folder):
        reporter.exporting = 1
        reporter.tell("begin", "export", 1)
        return export_of(state, folder)

    step_of, export_of = stage.train_step, stage.export
    stage.train_step, stage.export = train_step, export
    if hasattr(stage, "programs"):
        generate, update = around("rollout", stage.programs.generate), around("update", stage.programs.update)
        stage.programs = dataclasses.replace(stage.programs, generate=generate, update=update)
        stage.runner = dataclasses.replace(stage.runner, programs=stage.programs)
    else:
        stage.update_step = around("update", stage.update_step)
    return stage


def main(argv: Sequence[str] | None = None) -> int:
    """The command: the exit status of the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=int, required=True, help="file descriptor that the lines go to")
    parser.add_argument("--before", metavar="PHASE:STEP:N", help="end before this change of a file")
    parser.add_argument("--signal", choices=("KILL", "TERM"), default="KILL", help="how")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- and the options of rlhf_jax.train")
    options = parser.parse_args(argv)
    train_options = options.train[1:] if options.train[:1] == ["--"] else options.train
    if "--run_dir" not in train_options:
        parser.error("give --run_dir FOLDER after --")
    from rlhf_jax import train

    run_dir = train_options[train_options.index("--run_dir") + 1]
    reporter = Reporter(options.report, run_dir, options.before, getattr(signal, f"SIG{options.signal}"))
    sys.addaudithook(reporter.hear)
    watch(reporter)
    return train.main(train_options)


if __name__ == "__main__":
    sys.exit(main())
