"""Callbacks: objects that get a run's metrics and can request a stop, a checkpoint or an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlhf_jax.utils.forks import no_child_leaves


@dataclasses.dataclass
class Control:
    """Requests of a callback; the loop clears each when it is done.

    Attributes:
      stop: end after this update, with a checkpoint and exports.
      save: write a checkpoint after this update.
      evaluate: evaluate after this update.
    """

    stop: bool = False
    save: bool = False
    evaluate: bool = False


class Callback:
    """Override what you need. Metrics are host floats and arrive one update late, so that logging never blocks."""

    def on_train_begin(self, stage: Any, control: Control) -> None:
        """Called when models are loaded, before the first update."""

    def on_step_end(self, step: int, metrics: dict[str, float], control: Control) -> None:
        """Called with the metrics of update `step` (1-based)."""

    def on_evaluate(self, step: int, metrics: dict[str, float], control: Control) -> None:
        """Called with the metrics of the evaluation after update `step`."""

    def on_completions(self, step: int, rows: Sequence[dict[str, Any]], what: str) -> None:
        """Called with completions after update `step`: dicts of the same keys; `what` is 'samples' or 'training'."""

    def on_train_end(self, stage: Any, paths: dict[str, str]) -> None:
        """Called at the end of the run; `paths` are those of its models."""

    def close(self) -> None:
        """Called last, after `on_train_end`, an error or a stop: release resources."""


def call(callbacks: Sequence[Callback], method: str, *args: Any) -> None:
    """Calls a method of each callback."""
    for callback in callbacks:
        with no_child_leaves():
            getattr(callback, method)(*args)
