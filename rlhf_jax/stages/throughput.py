"""Tokens a second, and shares of the device's peaks, of each phase of an update."""

from __future__ import annotations

from typing import Any

from rlhf_jax.parallel import peaks
from rlhf_jax.stages.stage import Stage


class Throughput:
    """Computes the speed of an update for timings.jsonl, from its work by formula (see `work`) and its seconds.

    Attributes:
      peak: of all devices of the mesh; None before the first update ended.
    """

    def __init__(self, stage: Stage):
        self._stage = stage
        self.peak: peaks.Peak | None = None

    def measure_peak(self) -> str:
        """Sets the peak, while the devices are idle after the first update; returns a line on it."""
        config, devices = self._stage.config, self._stage.weights.mesh.devices
        one = peaks.peak(devices.flat[0], config.dtype)
        self.peak = one.of(devices.size)
        each = f" of {devices.size} devices" if devices.size > 1 else ""
        return (
            f"mfu and bandwidth are shares of {self.peak.flops / 1e12:,.3g} TFLOP/s of {config.dtype} and "
            f"{self.peak.bandwidth / 1e9:,.0f} GB/s{each}, {one.source}"
        )

    def __call__(self, step: int, tokens: int, timings: dict[str, Any]) -> dict[str, float]:
        """The numbers of an update; none where its work is unknown.

        Args:
          step: 1-based.
          tokens: of the update, prompts and responses.
          timings: its seconds.

        Returns:
          "mfu", and for each phase "mfu/PHASE" and "tokens_per_second/PHASE"; "bandwidth/generate"; "peak/flops" and
          "peak/bandwidth", which they were divided by
        """
        if self.peak is None or tokens <= 0 or not (phases := self._stage.work(step, tokens)):
            return {}
        if any(f"time/{name}" in timings for name in phases):
            update, seconds = timings["step_time"], {name: timings.get(f"time/{name}", 0.0) for name in phases}
        else:  # updates that the host does not wait for
            update = timings["time/step"] - timings["time/save"]
            seconds = dict.fromkeys(phases, update)
        if min(update, *seconds.values()) <= 0:
            return {}
        flops = sum(work.flops for work in phases.values())
        numbers = {"mfu": flops / update / self.peak.flops}
        for name, work in phases.items():
            numbers[f"tokens_per_second/{name}"] = work.tokens / seconds[name]
            numbers[f"mfu/{name}"] = work.flops / seconds[name] / self.peak.flops
            if work.bytes:
                numbers[f"bandwidth/{name}"] = work.bytes / seconds[name] / self.peak.bandwidth
        return {**numbers, "peak/flops": self.peak.flops, "peak/bandwidth": self.peak.bandwidth}
