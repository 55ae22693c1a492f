"""What surrounds a run and may change the rounding of its numbers: versions, devices, settings of jax and XLA."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import platform

import jax

from rlhf_jax.parallel import jax_settings

PACKAGES = (
    "rlhf_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "tokenizers", "datasets", "numpy"
)  # fmt: skip
VARIABLES = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
"""Environment variables of the devices' libraries that change the kernels that they choose."""


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that affect the results of a run."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def cpu() -> tuple[str, str]:
    """The name of the CPU, and a mark of its instruction set."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    features = "".join(sorted(line for line in set(lines) if line.startswith(("flags", "Features"))))
    features = features or platform.processor() + platform.platform()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    mark = hashlib.sha256((platform.machine() + features).encode()).hexdigest()[:12]
    return next(iter(names), platform.processor() or platform.machine()), mark


def environment() -> dict[str, str]:
    """What may change the rounding of a run's numbers, by name. It starts jax's devices."""
    device = jax.devices()[0]
    flags = [word for word in os.environ.get("XLA_FLAGS", "").split() if not word.startswith("--xla_dump")]
    entries = {
        **versions(),
        "devices": f"{jax.device_count()} x {device.device_kind}",
        "processes": str(jax.process_count()),
        "XLA_FLAGS": " ".join(sorted(flags)),
        **{name: os.environ.get(name, "") for name in VARIABLES},
        **jax_settings.rounding(),
    }
    if device.platform == "cpu":
        name, mark = cpu()
        return {**entries, "CPU": f"{name} ({mark})"}
    return {**entries, "device software": " ".join(device.client.platform_version.split())}
