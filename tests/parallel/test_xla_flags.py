import importlib.util

import pytest

from rlhf_jax.parallel import xla_flags


def flags(monkeypatch, given, added):
    monkeypatch.setenv("XLA_FLAGS", given)
    xla_flags.add(added)
    return dict(word.partition("=")[::2] for word in xla_flags.os.environ["XLA_FLAGS"].split())


def test_flags_that_the_user_has_set_stay(monkeypatch):
    given = "--xla_gpu_enable_triton_gemm=true --xla_dump_hlo_as_text --xla_dump_to=/tmp/a=b"
    assert flags(monkeypatch, given, {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": "0"}) == {
        "--xla_gpu_enable_triton_gemm": "true",
        "--xla_dump_hlo_as_text": "",
        "--xla_dump_to": "/tmp/a=b",
        "--xla_gpu_autotune_level": "0",
    }


def test_lists_of_passes_are_joined(monkeypatch):
    added = flags(monkeypatch, "--xla_disable_hlo_passes=dce,cse", {"xla_disable_hlo_passes": "cse,fusion"})
    assert added == {"--xla_disable_hlo_passes": "dce,cse,fusion"}
    assert flags(monkeypatch, "", {"xla_disable_hlo_passes": "fusion"}) == {"--xla_disable_hlo_passes": "fusion"}


@pytest.mark.parametrize(
    "platforms, plugin, added",
    [("", True, True), ("cuda,cpu", True, True), ("cpu", True, False), ("tpu", True, False), ("", False, False)],
)
def test_those_of_gpus_are_added_where_there_may_be_some(monkeypatch, platforms, plugin, added):
    find = importlib.util.find_spec
    there = dict.fromkeys(xla_flags.CUDA_PLUGINS, plugin)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: there.get(name) or find(name, *a))
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setenv("XLA_FLAGS", "")
    xla_flags.add_those_of_run()
    assert ("triton-softmax-rewriter" in xla_flags.os.environ["XLA_FLAGS"]) == added


@pytest.mark.parametrize(
    "given, deterministic",
    [
        ("", False),
        ("--xla_gpu_exclude_nondeterministic_ops=true", True),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_gpu_deterministic_ops=false --xla_dump_to=/tmp", False),
    ],
)
def test_flags_say_whether_kernels_are_deterministic(monkeypatch, given, deterministic):
    monkeypatch.setenv("XLA_FLAGS", given)
    assert xla_flags.are_deterministic() == deterministic
