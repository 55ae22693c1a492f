"""Flags of XLA for programs that run once, as those of most tests: making them fast takes longer than all else."""

import os
import subprocess
import sys

CACHED = "QUICK_XLA_FLAGS"
"""An environment variable, so that a process asks once for itself and for all that it starts."""


def is_known(flag: str) -> bool:
    """Whether the installed jaxlib has a flag: with one that it does not have, a process aborts."""
    return not subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ).returncode


def quick_flags() -> str:
    """The value for XLA_FLAGS. jaxlib 0.11 no longer has its second flag, which saves a third of the compilation."""
    if CACHED not in os.environ:
        emitters = "--xla_cpu_use_fusion_emitters=false"
        os.environ[CACHED] = "--xla_backend_optimization_level=0" + (f" {emitters}" if is_known(emitters) else "")
    return os.environ[CACHED]
