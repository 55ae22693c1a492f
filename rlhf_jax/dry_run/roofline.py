"""Predicted seconds of programs that are compiled and not run, for CPUs, NVIDIA GPUs and TPUs.

Each instruction takes the time of its matrix products or that of its bytes, whichever is longer, or of a launch
(Williams et al. 2009, Roofline). On a CPU products and bytes go at the rates that are measured on it. On an H100 they
go at the rates that one reached of the published ones, and other GPUs and TPUs are taken to reach the same shares.
docs/benchmarks.md has predicted and measured seconds.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.dry_run import hlo, topologies
from rlhf_jax.parallel import peaks

REACHED_FLOPS, REACHED_BANDWIDTH = 879 / 989, 2.9 / 3.35
"""Shares of an H100's published rates that large bfloat16 products and copies reach (docs/benchmarks.md)."""
CUDNN_FLOPS = 72 / 989
"""Share that cuDNN's attention with a mask and its gradient reach: of rows of 565 tokens 73 GFLOP in 1.01 ms with heads
of 256, and 37 GFLOP in 0.51 ms with heads of 64 (docs/benchmarks.md)."""
LAUNCH = 3e-6
"""Seconds that an instruction takes at least on a GPU; assumed, not measured."""
GROUPS = {
    "norms": r"norm",
    "casts": r"convert_element_type$",
    "attention": r"attention",
    "mlp": r"mlp",
    "logits": r"logits",
    "optimizer": r"optimizer",
    "gathers": r"(gather|scatter|scatter-add|_take\)+/.*)$",
    "copies": r"^$|(dynamic_slice|dynamic_update_slice|copy)$",
}
"""Parts of a program by XLA's op_name, which has the names of modules and of `jax.named_scope`; the first that fits.
Copies are what a scan keeps of each layer for the backward pass, and what XLA adds by itself; the rest is 'other'."""


class Rates(NamedTuple):
    """What a device is predicted with."""

    flops: float
    """Of matrix products, FLOP/s."""
    attention: float
    """Of cuDNN's attention, FLOP/s."""
    bandwidth: tuple[tuple[float, float], ...]
    """(bytes that an instruction moves, bytes/s), ascending; between them bytes/s are linear in the logarithm."""
    launch: float
    """Seconds that an instruction takes at least."""

    def moving(self, size: float) -> float:
        """Seconds that an instruction takes to move `size` bytes."""
        sizes, rates = zip(*self.bandwidth, strict=True)
        return size / float(np.interp(np.log2(max(size, 1.0)), np.log2(sizes), rates))


class Predicted(NamedTuple):
    """Of one run of a program on a device."""

    seconds: float
    flops: float
    """Of its matrix products."""
    parts: Mapping[str, float]
    """Seconds of each of `GROUPS` that it has, and of the rest."""
    bounds: Mapping[str, float]
    """Seconds of what takes the time of its 'products', of its 'memory', and of its 'launches'."""


def rates(device: Any, dtype: str) -> Rates | None:
    """The rates that a device is predicted with: of a CPU those measured on it, of a GPU or described TPU shares of the
    published ones; None for other devices, and unpublished rates."""
    if device.platform == "cpu":
        flops = peaks.peak(device, dtype).flops
        return Rates(flops, flops, peaks.rates_by_size(device), 0.0)
    gpu = device.platform == "gpu"
    if device.device_kind not in peaks.PUBLISHED or not (gpu or topologies.described_tpu(device)):
        return None
    flops, bandwidth, _ = peaks.peak(device, dtype)
    reached = ((1.0, bandwidth * REACHED_BANDWIDTH),)
    return Rates(flops * REACHED_FLOPS, flops * CUDNN_FLOPS, reached, LAUNCH if gpu else 0.0)


def group(op_name: str) -> str:
    """The part of a program, of `GROUPS` or 'other', that an instruction belongs to."""
    return next((name for name, pattern in GROUPS.items() if re.search(pattern, op_name)), "other")


def predict(text: str, rates: Rates, unknown_trips: int) -> Predicted:
    """The time of a program.

    Args:
      text: of the compiled program.
      unknown_trips: as in `hlo.costs`.
    """
    parts, flops = collections.Counter(), 0.0
    bounds = dict.fromkeys(("products", "memory", "launches"), 0.0)
    for cost in hlo.costs(text, unknown_trips):
        part = group(cost.op)
        products = cost.flops / (rates.attention if cost.cudnn_attention else rates.flops)
        seconds = {"products": products, "memory": rates.moving(cost.bytes), "launches": rates.launch}
        bound = max(seconds, key=seconds.__getitem__)
        parts[part] += cost.times * seconds[bound]
        bounds[bound] += cost.times * seconds[bound]
        flops += cost.times * cost.flops
    return Predicted(sum(parts.values()), flops, parts, bounds)
