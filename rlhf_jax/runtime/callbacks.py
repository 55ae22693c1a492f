"""Callbacks: objects that see a run's metrics and may stop it, save it or have it evaluated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass
class Control:
    """What a callback may ask for; the loop clears a wish when it has fulfilled it.

    Attributes:
      stop: end after this update, with checkpoint and exports.
      save: write a checkpoint after this update.
      evaluate: evaluate after this update.
    """

    stop: bool = False
    save: bool = False
    evaluate: bool = False


class Callback:
    """Override what you need. Metrics are host floats; they arrive one update late, so that logging never blocks."""

    def on_train_begin(self, stage: Any, control: Control) -> None:
        """Models are loaded, nothing has been learned."""

    def on_step_end(self, step: int, metrics: dict[str, float], control: Control) -> None:
        """Metrics of update `step` (1-based) are there."""

    def on_evaluate(self, step: int, metrics: dict[str, float], control: Control) -> None:
        """The evaluation after update `step` is there."""

    def on_completions(self, step: int, rows: Sequence[dict[str, Any]], what: str) -> None:
        """A table of completions after update `step`: dicts of the same keys; `what` is 'samples' or 'training'."""

    def on_train_end(self, stage: Any, paths: dict[str, str]) -> None:
        """The run is over; `paths` says where its models lie."""

    def close(self) -> None:
        """The stage is left, after `on_train_end` or because of an error or a stop: let go of what is open."""
