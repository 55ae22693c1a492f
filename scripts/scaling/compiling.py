"""Ahead-of-time compilation for TPUs and GPUs, without the hardware, with the text of the optimized program.

`assigned` stops after XLA's buffer assignment: all passes have run, instructions are scheduled and every array has its
address. What follows is code generation, which takes from seconds to most of an hour and does not change the text:
`whole` finds the same FLOPs, bytes moved and bytes sent, and the same peak up to 16 KiB
(tests/scripts/test_scaling.py). The compiler cannot be told to stop there. It continues in a thread until the process
ends, so call it in a process of its own, as `run_in_process` does.
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

from rlhf_jax.dry_run import memory, topologies
from rlhf_jax.parallel import xla_flags

_ASSIGNED = "after_optimizations_after_buffer_assignment.txt"
_ALLOCATIONS = "after_optimizations-buffer-assignment.txt"


def _dump(folder: str) -> dict[str, Any]:
    # jaxlib cannot parse everything that the TPU compiler produces, so the text is read from its dump.
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def _file(folder: str, end: str) -> pathlib.Path | None:
    """Dump of the program itself; parts of it may be compiled separately, under other names."""
    return next(pathlib.Path(folder).glob(f"module_*.jit_*.{end}"), None)


def whole(name: str, traced: Any, other_resident: int) -> memory.Program:
    """As `memory.compile_program`, with the text; also for CPU devices."""
    with tempfile.TemporaryDirectory() as folder:
        program = memory.compile_program(name, traced, other_resident, _dump(folder))
        if program.refused:
            return program
        file = _file(folder, "after_codegen.txt")
        return dataclasses.replace(program, text=file.read_text() if file else program.compiled.as_text())


def compile_fn_of(device: Any) -> Callable[[str, Any, int], memory.Program]:
    """`assigned` for TPUs; for GPUs, whose programs take half a minute, the whole compilation with the text."""
    return for_gpu if topologies.described_gpu(device) else assigned


def for_gpu(name: str, traced: Any, other_resident: int) -> memory.Program:
    """As `memory.compile_program` for a described GPU, with the text."""
    program = memory.compile_program(name, traced, other_resident, xla_flags.GPU)
    return dataclasses.replace(program, text=program.compiled.as_text())


def assigned(name: str, traced: Any, other_resident: int) -> memory.Program:
    """As `whole`, but returns after buffer assignment, with its sizes."""
    began, done = time.perf_counter(), []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:

        def run() -> None:
            try:
                done.append(memory.compile_program(name, traced, other_resident, _dump(folder)))
            except Exception as error:  # raised again below, in the waiting thread
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
    return memory.Program(name, seconds, arguments, 0, own, 0, other_resident, traced=traced, text=text)


def _written(folder: str) -> bool:
    """Whether the text is complete: the compiler writes its options again after it."""
    text, options = _file(folder, _ASSIGNED), _file(folder, "debug_options")
    return bool(text and options) and options.stat().st_mtime_ns >= text.stat().st_mtime_ns


def sizes(assignment: str) -> tuple[int, int]:
    """Bytes of a program's arguments, and of its temporaries and outputs, from XLA's list of allocations."""
    arguments = own = 0
    for size, kind in re.findall(r"^allocation \d+: size (\d+), page \d+, (.*)$", assignment, re.MULTILINE):
        if "parameter" in kind:
            arguments += int(size)
        elif "preallocated-temp" in kind or "maybe-live-out" in kind:
            own += int(size)
    return arguments, own


def run_in_process(work: Callable[..., None], *args: Any) -> int:
    """Runs `work(*args)` in a process that exits when it returns, with any threads; returns the exit code."""
    process = multiprocessing.get_context("spawn").Process(target=_run_and_exit, args=(work, args))
    process.start()
    process.join()
    return process.exitcode


def _run_and_exit(work: Callable[..., None], args: tuple) -> None:
    work(*args)
    sys.stdout.flush()
    os._exit(0)
