"""Devices that are described: names, memory, and what is missing to compile for them."""

import importlib.util
import sys

import jax
import pytest

from rlhf_jax import train
from rlhf_jax.dry_run import topologies
from rlhf_jax.errors import UserError

GIB = 2**30


class Described:
    """Stands for a device of a topology, which needs its compiler to be made."""

    def __init__(self, kind, memories=()):
        self.platform, self.device_kind, self.memories = "gpu", kind, memories

    def addressable_memories(self):
        return self.memories

    def memory_stats(self):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED")


@pytest.mark.parametrize("name", ["h100", "h100:", "h100:0", "h100:8x0", "h100:8x2x2", "a100:x", "H200:-1"])
def test_gpus_are_counted_by_machine_then_machines(name):
    with pytest.raises(UserError, match=f"--topology {name}: .*h100:8x4"):
        topologies.topology_devices(name)


def test_an_unknown_accelerator_names_those_that_are_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(UserError, match="GPUs are a100, a100_40gb, a6000, h100, h200, as in h100:8"):
        topologies.topology_devices("b100:4")


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="jax's CUDA plugin is installed")
def test_without_the_plugin_a_topology_of_gpus_names_the_extra(capsys):
    assert train.main(["--config", "quickstart.py", "--topology", "h100:8", "--dry_run"]) == 2
    error = capsys.readouterr().err
    assert "--topology h100:8" in error and "pip install '.[gpu-aot]'" in error and jax.__version__ in error


def test_a_run_can_use_three_quarters_of_a_described_gpu_or_what_the_environment_says(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    device = Described("NVIDIA H100 80GB HBM3")
    assert topologies.capacity(device) == 84942979072 * 3 // 4
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert topologies.capacity(device) == int(84942979072 * 0.9)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(UserError, match="XLA_PYTHON_CLIENT_MEM_FRACTION=most"):
        topologies.capacity(device)


def test_only_a_gpu_that_is_not_there_is_compiled_for_without_triton():
    assert topologies.compiler_options(Described("NVIDIA H100 80GB HBM3")) == topologies.TRITON_OFF
    there = Described("NVIDIA H100 80GB HBM3", memories=jax.devices()[0].addressable_memories())
    assert topologies.compiler_options(there) is None
    assert topologies.compiler_options(jax.devices()[0]) is None


@pytest.mark.parametrize("name", topologies.GPUS)
def test_a_description_holds_every_number_of_the_gpu(name):
    gpu = topologies.GPUS[name]
    text = gpu.target_config()
    for field in ("capability", "cores", "units", "threads", "shared_core", "shared_block", "bandwidth", "l2", "clock"):
        assert f": {getattr(gpu, field)}" in text or f"{{ {getattr(gpu, field)} }}" in text
    assert f"device_memory_size: {gpu.memory}" in text and f'"{gpu.kind}"' in text
