"""--deterministic: programs that give the same bits on every run, on GPUs too."""

from __future__ import annotations

import os

# No kernels with an unspecified order of addition, and no choice of kernels by their measured speed.
FLAGS = ("--xla_gpu_exclude_nondeterministic_ops=true", "--xla_gpu_autotune_level=0")


def enable() -> None:
    """Sets XLA's flags, except those that the user has set. Call it before JAX initializes its devices."""
    user_flags = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.split("=")[0] for flag in user_flags}
    os.environ["XLA_FLAGS"] = " ".join([*user_flags, *(flag for flag in FLAGS if flag.split("=")[0] not in names)])
