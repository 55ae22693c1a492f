"""Peak rates of devices: matrix products and memory, published where they are known, else measured."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

COPY_ENTRIES = 2**26
"""float32 entries of the array whose copy measures bandwidth: 256 MiB read and 256 MiB written."""


class Peak(NamedTuple):
    """Rates of a device, or of several together."""

    flops: float
    """Of dense matrix products in the compute dtype, FLOP/s."""
    bandwidth: float
    """Of its memory, bytes/s."""
    source: str
    """'published' or 'measured'."""

    def of(self, devices: int) -> Peak:
        """The peak of several such devices together."""
        return self._replace(flops=self.flops * devices, bandwidth=self.bandwidth * devices)


# By jax's device_kind: FLOP/s of dense products in half precision, and in float32 as jax multiplies by default (TF32 on
# GPUs since Ampere, bfloat16 on TPUs), and bytes/s. From the vendors' data sheets.
PUBLISHED = {
    "NVIDIA A100-SXM4-40GB": (312e12, 156e12, 1.555e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 156e12, 2.039e12),
    "NVIDIA RTX A6000": (154.8e12, 77.4e12, 0.768e12),
    "NVIDIA L4": (121e12, 60e12, 0.3e12),
    "NVIDIA L40S": (362e12, 183e12, 0.864e12),
    "NVIDIA H100 PCIe": (756e12, 378e12, 2e12),
    "NVIDIA H100 80GB HBM3": (989e12, 495e12, 3.35e12),
    "NVIDIA H200": (989e12, 495e12, 4.8e12),
    "NVIDIA H200 141GB HBM3e": (989e12, 495e12, 4.8e12),  # as XLA describes it
    "TPU v5 lite": (197e12, 197e12, 0.819e12),
    "TPU v5": (459e12, 459e12, 2.765e12),
    "TPU v6 lite": (918e12, 918e12, 1.64e12),
}


def peak(device: Any, dtype: str) -> Peak:
    """The peak of a device: published, or measured on it in less than a second, once a process.

    Args:
      device: a jax.Device.
      dtype: of products, 'bfloat16', 'float16' or 'float32'.
    """
    if device.device_kind in PUBLISHED:
        half, float32, bandwidth = PUBLISHED[device.device_kind]
        return Peak(float32 if dtype == "float32" else half, bandwidth, "published")
    return _measured(device, dtype)


@functools.cache
def _measured(device: Any, dtype: str) -> Peak:
    with jax.default_device(device):
        return Peak(product_rate(jnp.ones((1024, 1024), dtype), calls=2), copy_rate(2**23, calls=2), "measured")


def product_rate(matrix: jax.Array, precision: str | None = None, calls: int = 1) -> float:
    """FLOP/s of the product of a square matrix with itself, the fastest of three runs.

    Args:
      matrix: [n, n].
      precision: as `jnp.matmul` takes it.
      calls: products in a row, so that their starts do not count.
    """
    multiply = jax.jit(lambda a: jnp.matmul(a, a, precision=precision))
    return calls * 2.0 * matrix.shape[0] ** 3 / fastest(lambda: [multiply(matrix) for _ in range(calls)])


def copy_rate(entries: int = COPY_ENTRIES, calls: int = 5) -> float:
    """Bytes/s of a copy of `entries` float32 numbers, read and written, the fastest of three runs."""
    source, copied = jnp.zeros(entries, jnp.float32), jax.jit(lambda x: x + 1)
    return calls * 8.0 * entries / fastest(lambda: [copied(source) for _ in range(calls)])


@functools.cache
def rates_by_size(device: Any) -> tuple[tuple[int, float], ...]:
    """(bytes that are read and written, bytes/s) of additions within a program, ascending: small ones stay in caches.

    Measured on the device in a few seconds, once a process. Unlike `copy_rate`, without a start and a new array for
    each.
    """

    def rate(size: int) -> float:
        turns = max(2**29 // size, 2)
        source = jnp.zeros(size // 8, jnp.float32)
        # A loop over more than this one array would copy them, which no one counts.
        add = jax.jit(lambda x: jax.lax.fori_loop(0, turns, lambda _, x: x + 1, x))
        return 1.0 * turns * size / fastest(lambda: add(source), repeats=6)

    with jax.default_device(device):
        return tuple((size, rate(size)) for size in (2**19, 2**22, 2**24, 2**25, 2**26, 2**27))


def fastest(run: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds of the fastest of `repeats` runs, after one that is not counted."""
    seconds = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
