"""--deterministic: programs that give the same bits every time, on GPUs too."""

from __future__ import annotations

import os

# Kernels whose order of adding is not fixed are replaced or refused; none is chosen by how fast it just was.
FLAGS = ("--xla_gpu_exclude_nondeterministic_ops=true", "--xla_gpu_autotune_level=0")


def enable() -> None:
    """Sets XLA's flags; call it before anything asks for devices. Flags of the user's own stay."""
    given = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.split("=")[0] for flag in given}
    os.environ["XLA_FLAGS"] = " ".join([*given, *(flag for flag in FLAGS if flag.split("=")[0] not in names)])
