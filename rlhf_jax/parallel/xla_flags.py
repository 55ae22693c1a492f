"""XLA's flags of a run, in XLA_FLAGS. Call `add` before JAX initializes its devices."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

# Triton's matrix products multiply the compile time. The search for Triton's tiles of a softmax takes most of it where
# masks are computed beside the scores, and its programs are not faster (docs/benchmarks.md, "On a GPU").
GPU = {"xla_gpu_enable_triton_gemm": False, "xla_disable_hlo_passes": "triton-softmax-rewriter"}
# No kernels with an unspecified order of addition, and no choice of kernels by their measured speed.
DETERMINISTIC = {"xla_gpu_exclude_nondeterministic_ops": True, "xla_gpu_autotune_level": "0"}
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def flags_now() -> dict[str, str]:
    """The flags in XLA_FLAGS; '' is one without a value."""
    return dict(word.removeprefix("--").partition("=")[::2] for word in os.environ.get("XLA_FLAGS", "").split())


def are_deterministic() -> bool:
    """Whether the flags ask for kernels with a specified order of addition alone, as `DETERMINISTIC` does."""
    flags, names = flags_now(), ("xla_gpu_exclude_nondeterministic_ops", "xla_gpu_deterministic_ops")
    return any(flags.get(name, "false").lower() in ("", "true", "1") for name in names)


def add(flags: Mapping[str, bool | str]) -> None:
    """Adds flags to XLA_FLAGS. A flag that the user has set stays, except for lists of passes, which are joined."""
    old_flags = flags_now()
    flags = {name: str(value).lower() if isinstance(value, bool) else value for name, value in flags.items()}
    merged = {**flags, **old_flags}
    passes = "xla_disable_hlo_passes"
    if passes in flags and passes in old_flags:
        merged[passes] = ",".join(dict.fromkeys([*old_flags[passes].split(","), *flags[passes].split(",")]))
    words = [f"--{name}={value}" if value or name not in old_flags else f"--{name}" for name, value in merged.items()]
    os.environ["XLA_FLAGS"] = " ".join(words)


def add_those_of_run(deterministic: bool = False) -> None:
    """Adds `DETERMINISTIC` where a run asks for it, and `GPU` where JAX may find NVIDIA GPUs; elsewhere that would only
    change the keys of cached programs."""
    if deterministic:
        add(DETERMINISTIC)
    platforms = os.environ.get("JAX_PLATFORMS", "")
    gpu_allowed = not platforms or {"cuda", "gpu"} & set(platforms.split(","))
    if gpu_allowed and any(importlib.util.find_spec(name) for name in CUDA_PLUGINS):
        add(GPU)
