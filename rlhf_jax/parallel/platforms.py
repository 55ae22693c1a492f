"""Whether jax finds the devices that it was asked for."""

from __future__ import annotations

import glob
import importlib.util
import os
import sys

import jax

from rlhf_jax.errors import UserError
from rlhf_jax.parallel.xla_flags import CUDA_PLUGINS

PLUGINS = {"cuda": ("cuda", CUDA_PLUGINS), "gpu": ("cuda", CUDA_PLUGINS), "tpu": ("tpu", ("libtpu",))}
"""By the platform that JAX_PLATFORMS names: the extra of this package that installs jax's plugin, and its modules."""
GPU_FILES = "/dev/nvidia[0-9]*"
TPU_FILES = "/dev/accel[0-9]*"


def check() -> None:
    """Starts jax's devices.

    Call it after `multihost.initialize`. Where jax uses the CPU though the machine has a GPU, prints a line.

    Raises:
      UserError: jax has none of the platform that JAX_PLATFORMS names.
    """
    asked = os.environ.get("JAX_PLATFORMS") or jax.config.jax_platforms or ""
    try:
        devices = jax.devices()
    except (AssertionError, RuntimeError) as error:
        raise UserError(_missing(asked, error)) from error
    if not asked and devices[0].platform == "cpu" and (gpus := len(glob.glob(GPU_FILES))):
        print(
            f"jax uses the CPU, though this machine has {_counted(gpus, 'NVIDIA GPU')}: {_install('cuda')}",
            file=sys.stderr,
            flush=True,
        )


def _missing(asked: str, error: Exception) -> str:
    hardware = [
        _counted(len(glob.glob(files)), name) for name, files in (("NVIDIA GPU", GPU_FILES), ("TPU chip", TPU_FILES))
    ]
    platforms = [name for name in asked.split(",") if name in PLUGINS and not _has_plugin(name)]
    reason = "; ".join(map(_install, platforms)) or str(error).split(" (set JAX_PLATFORMS")[0].splitlines()[0]
    return (
        f"JAX_PLATFORMS={asked}: jax has no such devices: {reason}. This machine has {' and '.join(hardware)}. "
        "JAX_PLATFORMS=cpu uses the CPU; without JAX_PLATFORMS jax takes the fastest devices that it finds"
    )


def _has_plugin(platform: str) -> bool:
    return any(importlib.util.find_spec(name) for name in PLUGINS[platform][1])


def _install(platform: str) -> str:
    return f"pip install '.[{PLUGINS[platform][0]}]' installs jax's plugin for it"


def _counted(count: int, name: str) -> str:
    return f"{count or 'no'} {name}{'' if count == 1 else 's'}"
