"""Devices that are described: names, memory, and what is missing to compile for them."""

import importlib.util
import re
import sys

import jax
import pytest

from rlhf_jax import train
from rlhf_jax.dry_run import topologies
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import xla_flags

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


@pytest.mark.parametrize("name", ["b100:4", "rtx4090:1", "l4", "cpu:1"])
def test_an_unknown_accelerator_names_those_that_are_known(name):
    with pytest.raises(UserError, match=f"{name}: no such .*a100, a100_40gb, a6000, h100, h200, as .* v5e:4x4"):
        topologies.topology_devices(name)


def test_a_tpu_without_its_compiler_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(UserError, match=r"v5e:2x2: .*pip install '.\[tpu-aot\]'"):
        topologies.topology_devices("v5e:2x2")


def test_a_machine_has_at_most_eight_gpus():
    with pytest.raises(UserError, match="--topology h100:16: .*at most 8.*h100:8x2"):
        topologies.topology_devices("h100:16")


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
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.8")
    with pytest.raises(UserError, match="XLA_CLIENT_MEM_FRACTION and XLA_PYTHON_CLIENT_MEM_FRACTION are both set"):
        topologies.capacity(device)


@pytest.mark.parametrize("value", ["most", "nan", "inf", "0", "-1"])
def test_a_wrong_share_of_memory_is_named_before_anything_is_compiled(value, monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", value)
    assert train.main(["--config", "quickstart.py", "--topology", "h100:8", "--dry_run"]) == 2
    assert f"XLA_PYTHON_CLIENT_MEM_FRACTION={value}: set a share" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_compiled_for_with_the_flags_of_a_run_on_it():
    assert topologies.compiler_options(Described("NVIDIA H100 80GB HBM3")) == xla_flags.GPU
    there = Described("NVIDIA H100 80GB HBM3", memories=jax.devices()[0].addressable_memories())
    assert topologies.compiler_options(there) is None
    assert topologies.compiler_options(jax.devices()[0]) is None


@pytest.mark.parametrize("name", topologies.GPUS)
def test_a_description_holds_every_number_of_the_gpu(name):
    gpu = topologies.GPUS[name]
    text = gpu.target_config()
    fields = dict(re.findall(r"(\w+): ([\w.]+)", text))
    names = {
        "core_count": gpu.cores,
        "fpus_per_core": gpu.units,
        "threads_per_core_limit": gpu.threads,
        "shared_memory_per_core": gpu.shared_core,
        "shared_memory_per_block_optin": gpu.shared_block,
        "memory_bandwidth": gpu.bandwidth,
        "l2_cache_size": gpu.l2,
        "clock_rate_ghz": gpu.clock,
        "device_memory_size": gpu.memory,
    }
    assert {name: fields[name] for name in names} == {name: str(value) for name, value in names.items()}
    assert f"cuda_compute_capability {{ {gpu.capability} }}" in text and f'"{gpu.kind}"' in text
