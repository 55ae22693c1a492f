"""parallel/peaks.py: published peaks by the kind of device, measured ones elsewhere."""

import types

import jax
import jax.numpy as jnp

from rlhf_jax.parallel import peaks


def test_published_peaks_depend_on_the_dtype():
    device = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    assert peaks.peak(device, "bfloat16") == (989e12, 3.35e12, "published")
    assert peaks.peak(device, "float16") == peaks.peak(device, "bfloat16")
    assert peaks.peak(device, "float32") == (495e12, 3.35e12, "published")


def test_the_peak_of_another_device_is_measured_once():
    peak = peaks.peak(jax.devices()[0], "float32")
    assert peak.source == "measured" and 1e8 < peak.flops < 1e15 and 1e7 < peak.bandwidth < 1e13
    assert peaks.peak(jax.devices()[0], "float32") is peak
    assert peak.of(4) == (4 * peak.flops, 4 * peak.bandwidth, "measured")


def test_a_rate_is_of_the_fastest_run_after_the_first(monkeypatch):
    clock = iter([0.0, 1.0, 1.0, 5.0, 5.0, 7.0, 7.0, 10.0])  # runs of 1, 4, 2 and 3 s
    monkeypatch.setattr(peaks.time, "perf_counter", lambda: next(clock))
    assert peaks.product_rate(jnp.ones((10, 10)), calls=2) == 2 * 2 * 10**3 / 2.0
