"""Seconds of an update's phases."""

from __future__ import annotations

import time

import jax


class Clock:
    """Seconds of each phase: waits for its results, so that a phase pays for its own work."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def wait(self, phase: str, result):
        """Blocks on `result`, books the time since the last call under `phase`, hands the result on."""
        result = jax.block_until_ready(result)
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now
        return result
