"""Compiling for TPUs that are not there, with XLA's text of what comes out.

`assigned` goes as far as XLA's assignment of memory: every pass over the program has run, its instructions are
scheduled and each array has its place. What follows is machine code, a few seconds to most of an hour of it, and leaves
the text as it is: `whole` finds the same FLOPs, bytes moved and bytes sent, and the same peak but for 16 KiB
(tests/scripts/test_scaling.py). The compiler cannot be told to stop there, so it goes on in a thread until the process
ends: call it from one of its own, as `apart` does.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from rlhf_jax.dry_run import memory

_ASSIGNED = "after_optimizations_after_buffer_assignment.txt"
_ALLOCATIONS = "after_optimizations-buffer-assignment.txt"


def _dump(folder: str) -> dict[str, Any]:
    # jaxlib cannot read all that the TPU's compiler writes: its own text is taken from the disk.
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def _file(folder: str, end: str) -> pathlib.Path | None:
    """Of the program itself: parts of it may be compiled beside it, under other names."""
    return next(pathlib.Path(folder).glob(f"module_*.jit_*.{end}"), None)


def whole(name: str, traced: Any, beside: int) -> memory.Program:
    """As `footprint.compiled`, with the text; for a CPU's devices too."""
    with tempfile.TemporaryDirectory() as folder:
        program = memory.compiled(name, traced, beside, _dump(folder))
        if program.refused:
            return program
        file = _file(folder, "after_codegen.txt")
        return dataclasses.replace(program, text=file.read_text() if file else program.made.as_text())


def assigned(name: str, traced: Any, beside: int) -> memory.Program:
    """As `whole`, as soon as memory is assigned; its sizes are those of the assignment."""
    began, done = time.perf_counter(), []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:

        def run() -> None:
            try:
                done.append(memory.compiled(name, traced, beside, _dump(folder)))
            except Exception as error:  # raised again below, by the thread that waits
                done.append(error)

        threading.Thread(target=run, daemon=True).start()
        while not done and not _written(folder):
            time.sleep(0.2)
        if done and isinstance(done[0], Exception):
            raise done[0]
        if done and done[0].refused:
            return done[0]
        arguments, own = sizes(_file(folder, _ALLOCATIONS).read_text())
        text, seconds = _file(folder, _ASSIGNED).read_text(), time.perf_counter() - began
    return memory.Program(name, seconds, arguments, 0, own, 0, beside, traced=traced, text=text)


def _written(folder: str) -> bool:
    """Whether the text is whole: after it the compiler writes its options once more."""
    text, options = _file(folder, _ASSIGNED), _file(folder, "debug_options")
    return bool(text and options) and options.stat().st_mtime_ns >= text.stat().st_mtime_ns


def sizes(assignment: str) -> tuple[int, int]:
    """Bytes of a program's arguments, and of what it makes in memory beside them, from XLA's list of allocations."""
    arguments = own = 0
    for size, kind in re.findall(r"^allocation \d+: size (\d+), page \d+, (.*)$", assignment, re.MULTILINE):
        if "parameter" in kind:
            arguments += int(size)
        elif "preallocated-temp" in kind or "maybe-live-out" in kind:
            own += int(size)
    return arguments, own


def apart(work: Callable[..., None], *args: Any) -> int:
    """Runs `work(*args)` in a process that ends with it, whatever its threads do; its exit code."""
    process = multiprocessing.get_context("spawn").Process(target=_ended, args=(work, args))
    process.start()
    process.join()
    return process.exitcode


def _ended(work: Callable[..., None], args: tuple) -> None:
    work(*args)
    sys.stdout.flush()
    os._exit(0)
