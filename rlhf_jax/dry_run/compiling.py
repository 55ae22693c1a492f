"""Compiling programs that never run: for the devices of this machine, and for TPUs and GPUs that it lacks.

For a TPU we wait until XLA has run all its passes, scheduled the instructions and given every array its address. Code
generation follows, from seconds to most of an hour, and changes none of the sizes (tests/dry_run/test_compiling.py
compares them). The compiler cannot be told to stop there: it runs until its process ends (`in_processes`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from rlhf_jax.dry_run import topologies

_ASSIGNED = "after_optimizations_after_buffer_assignment.txt"
_ALLOCATIONS = "after_optimizations-buffer-assignment.txt"


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program of an update; bytes are those of one device."""

    name: str
    seconds: float
    """Compile time."""
    arguments: int
    outputs: int
    temporary: int
    aliased: int
    """Outputs that reuse the buffers of arguments."""
    other_resident: int
    """Arrays of the stage that stay on the device and are no arguments of the program."""
    refused: str = ""
    """The compiler's reason if the program does not fit."""
    traced: Any = None
    """jax.stages.Traced."""
    compiled: Any = None
    """jax.stages.Compiled."""
    dumped_text: str = ""
    """Its optimised HLO, where it was read from XLA's dump."""

    @property
    def text(self) -> str:
        """Its optimised HLO."""
        return self.dumped_text or self.compiled.as_text()

    @property
    def peak(self) -> int:
        """Peak bytes on the device while it runs."""
        return self.other_resident + self.arguments + self.temporary + self.outputs - self.aliased


def compile_for(device: Any) -> Callable[[str, Any, int], Program]:
    """How programs are compiled for a device: (name, traced, bytes that are no arguments) -> Program."""
    if topologies.described_tpu(device):
        return compile_until_assigned
    return functools.partial(compile_program, options=topologies.compiler_options(device))


def compile_program(name: str, traced: Any, other_resident: int, options: dict[str, Any] | None = None) -> Program:
    """Compiles a program.

    Args:
      traced: jax.stages.Traced.
      other_resident: bytes of arrays on the device that are no arguments of the program.
      options: of XLA's compiler.

    Returns:
      The Program, with `refused` if it does not fit.
    """
    began = time.perf_counter()
    try:
        compiled = traced.lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        size, reason = _refusal(str(error))
        return Program(name, time.perf_counter() - began, 0, 0, size, 0, other_resident, reason, traced)
    memory, seconds = compiled.memory_analysis(), time.perf_counter() - began
    sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return Program(name, seconds, *sizes, memory.alias_size_in_bytes, other_resident, traced=traced, compiled=compiled)


def _refusal(error: str) -> tuple[int, str]:
    """(bytes that the program needs, 0 if the compiler's error does not say; the reason in one line)"""
    size = r"([\d.]+)([KMGT])"
    used = re.search(rf"Used {size} of {size}", error) or re.search(
        rf"memory required for [\w ]+ \({size}\) exceeds available HBM \({size}\)", error
    )
    if not used:
        return 0, error.splitlines()[0][:200]
    bytes_needed = float(used[1]) * 2 ** (10 * ("KMGT".index(used[2]) + 1))
    return int(bytes_needed), f"needs {used[1]} {used[2]}iB of {used[3]} {used[4]}iB"


@contextlib.contextmanager
def no_disk_cache() -> Iterator[None]:
    """Programs compiled within are not written to jax's cache on disk, since they are never run."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def compile_until_assigned(name: str, traced: Any, other_resident: int) -> Program:
    """As `compile_program` for a TPU, but it returns when every array has its address, and keeps the text."""
    began, done = time.perf_counter(), []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:

        def run() -> None:
            try:
                done.append(compile_program(name, traced, other_resident, dump_options(folder)))
            except Exception as error:  # raised again below, in the waiting thread
                done.append(error)

        threading.Thread(target=run, daemon=True).start()
        while not done and not _written(folder):
            time.sleep(0.2)
        if done and isinstance(done[0], Exception):
            raise done[0]
        if done and done[0].refused:
            return done[0]
        arguments, temporaries = sizes(dumped(folder, _ALLOCATIONS).read_text())
        text, seconds = dumped(folder, _ASSIGNED).read_text(), time.perf_counter() - began
    return Program(name, seconds, arguments, 0, temporaries, 0, other_resident, traced=traced, dumped_text=text)


def _written(folder: str) -> bool:
    """Whether the text is complete: the compiler writes its options again after it."""
    text, options = dumped(folder, _ASSIGNED), dumped(folder, "debug_options")
    return bool(text and options) and options.stat().st_mtime_ns >= text.stat().st_mtime_ns


def sizes(assignment: str) -> tuple[int, int]:
    """Bytes of a program's arguments, and of its temporaries and outputs, from XLA's list of allocations."""
    arguments = temporaries = 0
    for size, kind in re.findall(r"^allocation \d+: size (\d+), page \d+, (.*)$", assignment, re.MULTILINE):
        if "parameter" in kind:
            arguments += int(size)
        elif "preallocated-temp" in kind or "maybe-live-out" in kind:
            temporaries += int(size)
    return arguments, temporaries


def dump_options(folder: str) -> dict[str, Any]:
    """XLA's options for the text of a program in a folder: jaxlib cannot parse all that the TPU compiler produces."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def dumped(folder: str, end: str) -> pathlib.Path | None:
    """What XLA wrote about the program itself into a folder; parts may be compiled separately, under other names."""
    return next(pathlib.Path(folder).glob(f"module_*.jit_*.{end}"), None)
