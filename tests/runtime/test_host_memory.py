"""Freed memory goes back to the system, also after a program was compiled."""

import ctypes
import platform
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

# 256 MiB in blocks too small for mmap, all freed but the last, which keeps the heap from shrinking.
PROGRAM = """
import ctypes, pathlib, resource
import jax
from rlhf_jax.runtime import compile_cache, host_memory

def resident_mib():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
timer = compile_cache.CompileTimer()
blocks = [libc.malloc(2**16) for _ in range(4096)]
for block in blocks:
    ctypes.memset(block, 1, 2**16)
for block in blocks[:-1]:
    libc.free(block)
before = resident_mib()
{}
print(before - resident_mib())
"""
COMPILED = "/jax/core/compile/backend_compile_duration"


def returned_mib(line: str) -> float:
    command = [sys.executable, "-c", PROGRAM.format(line)]
    return float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def test_trim_returns_what_was_freed():
    assert hasattr(ctypes.CDLL(None), "malloc_trim")
    assert returned_mib("host_memory.trim()") > 200


@pytest.mark.parametrize(("seconds", "returned"), [(1.0, True), (0.01, False)])
def test_memory_is_returned_after_a_program_that_took_long_to_compile(seconds, returned):
    mib = returned_mib(f"jax.monitoring.record_event_duration_secs({COMPILED!r}, {seconds})")
    assert (mib > 200) is returned, mib
