"""Durations of the phases of an update."""

from __future__ import annotations

import time

import jax


class Clock:
    """Seconds of each phase, from waiting for its results: dispatch is asynchronous."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def wait(self, phase: str, result):
        """Blocks until `result` is ready, records the time since the last call under `phase`, returns the result."""
        result = jax.block_until_ready(result)
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now
        return result
