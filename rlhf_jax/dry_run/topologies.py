"""TPU slices and NVIDIA GPUs to compile for without having them: their descriptions and their memory.

Any Linux machine compiles for TPUs with libtpu, and for GPUs with jax's CUDA plugin and ptxas, without a driver.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from typing import Any

import jax

from rlhf_jax.errors import UserError
from rlhf_jax.parallel import sharding, xla_flags

GIB = 2**30
# GiB of high-bandwidth memory that XLA allows, by jax's device kind: libtpu 0.0.51 reports them when a program
# does not fit. A device of a v4 topology is half a chip.
HBM = {"TPU v4": 15.25, "TPU v5 lite": 15.75, "TPU v5": 95.73, "TPU v6 lite": 31.24}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA must know of a GPU to compile for it; values of openxla/xla, xla/backends/gpu/target_config/specs."""

    kind: str
    """As jax's device_kind."""
    capability: str
    """CUDA's compute capability, in text format."""
    cores: int
    """Streaming multiprocessors."""
    units: int
    """Float32 units of a core."""
    threads: int
    """Of a core."""
    shared_core: int
    """Bytes of shared memory of a core."""
    shared_block: int
    """Bytes of shared memory that a block may ask for."""
    bandwidth: int
    """Bytes a second."""
    l2: int
    """Bytes."""
    clock: float
    """GHz."""
    memory: int
    """Bytes."""

    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto in text format."""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_core} threads_per_core_limit: {self.threads} core_count: {self.cores}
  fpus_per_core: {self.units} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2} clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory} shared_memory_per_block_optin: {self.shared_block}
  cuda_compute_capability {{ {self.capability} }} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }}
device_description_str: "{self.kind}"
"""


_SM80 = {"capability": "major: 8", "cores": 108, "units": 64, "threads": 2048, "clock": 1.41, "l2": 41943040}
_SM80 |= {"shared_core": 167936, "shared_block": 166912}
_SM90 = {"capability": "major: 9 feature_extension: ACCELERATED_FEATURES", "cores": 132, "units": 128, "threads": 2048}
_SM90 |= {"clock": 1.98, "l2": 52428800, "shared_core": 233472, "shared_block": 232448}
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", **_SM80, bandwidth=2039040000000, memory=85100068864),
    "a100_40gb": Gpu("NVIDIA A100-SXM4-40GB", **_SM80, bandwidth=1555200000000, memory=42331013120),
    "a6000": Gpu(
        "NVIDIA RTX A6000",
        capability="major: 8 minor: 6",
        cores=84,
        units=128,
        threads=1536,
        shared_core=102400,
        shared_block=101376,
        bandwidth=768096000000,
        l2=6291456,
        clock=1.8,
        memory=51041271808,
    ),
    "h100": Gpu("NVIDIA H100 80GB HBM3", **_SM90, bandwidth=3352320000000, memory=84942979072),
    "h200": Gpu("NVIDIA H200 141GB HBM3e", **_SM90, bandwidth=4800000000000, memory=151397597184),
}
"""By the name that --topology takes."""
MACHINE = 8
"""GPUs of a machine at most."""
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def topology_devices(name: str) -> tuple[Any, ...]:
    """The devices to compile for.

    Args:
      name: a TPU slice such as 'v5e:16x16', or GPUs: 'h100:8' is one machine of eight, 'h100:8x4' four of them.

    Raises:
      UserError: the compiler for them is not installed, or knows no such devices.
    """
    kind = name.split(":")[0].lower()
    if kind in GPUS:
        preallocated()  # jax's plugin would refuse a wrong value too, but only log why
        return _gpus(name)
    if not re.match(r"v\d", kind):
        raise UserError(
            f"--topology {name}: no such accelerator. GPUs are {', '.join(GPUS)}, as in h100:8 or h100:8x4; TPUs have "
            "a name and a shape, as in v5e:4x4 or v5p:2x2x2"
        )
    return _tpus(name)


@functools.cache
def _tpus(name: str) -> tuple[Any, ...]:
    from jax.experimental import topologies

    # Without these libtpu looks for a TPU on the network and lets only one process compile at a time.
    settings = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "none", "TPU_WORKER_HOSTNAMES": "localhost"}
    for variable, value in {**settings, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        os.environ.setdefault(variable, value)
    try:
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:
        raise UserError(
            f"--topology {name}: {_reason(error)}. Give a TPU name and shape such as v5e:4x4 or v5p:2x2x2; it needs "
            "pip install '.[tpu-aot]'"
        ) from error


@functools.cache
def _gpus(name: str) -> tuple[Any, ...]:
    from jax.experimental import topologies

    match = re.fullmatch(r"(\w+):([1-9]\d*)(?:x([1-9]\d*))?", name.lower())
    if match is None:
        raise UserError(
            f"--topology {name}: give the number of GPUs of a machine, then of machines if there are several, as in "
            "h100:8 or h100:8x4"
        )
    if int(match[2]) > MACHINE:
        raise UserError(
            f"--topology {name}: a machine has at most {MACHINE} of these GPUs; give machines, as in {match[1]}:8x2"
        )
    # jax's plugin asks for all of CUDA's libraries unless told that nothing will run.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    gpu, shape = GPUS[match[1]], f"1x{match[3] or 1}x{match[2]}"
    try:
        described = topologies.get_topology_desc("gpu", "cuda", target_config=gpu.target_config(), topology=shape)
        return tuple(described.devices)
    except Exception as error:
        raise UserError(
            f"--topology {name}: {_reason(error)}. It needs pip install '.[gpu-aot]', whose plugin must have the "
            f"version of jax, {jax.__version__}"
        ) from error


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def compiler_options(device: Any) -> dict[str, Any] | None:
    """What XLA must be told to compile for a device that is only described; None: nothing.

    For a GPU the flags of a run on it. With Triton's products XLA would take their default tiles, which fail to compile
    in some programs: on a real GPU it times them and drops those that do not compile.
    """
    return xla_flags.GPU if described_gpu(device) is not None else None


def described_gpu(device: Any) -> Gpu | None:
    """The description of a GPU that is only compiled for; None for other devices."""
    if device.platform != "gpu" or sharding.memory_kinds(device):
        return None
    return next((gpu for gpu in GPUS.values() if gpu.kind == device.device_kind), None)


def described_tpu(device: Any) -> bool:
    """Whether a device is a TPU that is only compiled for."""
    return device.platform == "tpu" and device.client.runtime_type == "compile_only_runtime"


def preallocated() -> float:
    """The share of a GPU's memory that jax takes when it starts, and that a run can use.

    Raises:
      UserError: both environment variables are set, which jax refuses, or the one that is set is no share.
    """
    names = [name for name in _FRACTIONS if os.environ.get(name)]
    if not names:
        return 0.75
    if len(names) > 1:
        raise UserError(f"{' and '.join(names)} are both set; set one of them")
    value = os.environ[names[0]]
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise UserError(f"{names[0]}={value}: set a share of the GPU's memory, such as 0.9")
    return share


def capacity(device: Any) -> int | None:
    """Bytes of a device's memory that a run can use; for a CPU device its share of the machine's; None if unknown."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    if (gpu := described_gpu(device)) is not None:
        return int(gpu.memory * preallocated())
    try:
        limit = (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # a described device
        limit = None
    gibibytes = HBM.get(device.device_kind)
    return limit if limit is not None or gibibytes is None else int(gibibytes * GIB)
