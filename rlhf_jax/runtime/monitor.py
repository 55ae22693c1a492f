"""Checks each update's metrics on the host before they are written: counts nonfinite updates and raises alarms.

Every process reads the same metrics, so all come to the same decision.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhf_jax import storage
from rlhf_jax.algorithms import nonfinite
from rlhf_jax.errors import UserError
from rlhf_jax.metrics import logger
from rlhf_jax.metrics.alarms import WATCHED, Alarms, thresholds
from rlhf_jax.metrics.options import AlarmOptions
from rlhf_jax.parallel import multihost, sharding
from rlhf_jax.types import TrainState

_RAW = ("nonfinite/causes", "nonfinite/steps_applied", "nonfinite/in_a_row")
_WORDS = {
    "score": "a score",
    "logprob": "a log-probability",
    "value": "a value",
    "advantage": "an advantage",
    "return": "a return",
    "loss": "the loss",
    "gradient": "the gradient",
    "optimizer": "what the optimizer made of the gradient",
}


class NonFinite(UserError):
    """Something was not finite, and `on_nonfinite` says that the run ends.

    Attributes:
      update: 1-based, the one that is not finite. On every process the same.
      whole: no optimizer step of that update was taken: the state is that of the update before.
    """

    def __init__(self, message: str, update: int, whole: bool):
        super().__init__(message)
        self.update, self.whole = update, whole


class Monitor:
    """Monitors a stage's run. It restores its counts from metrics.jsonl, so that a resume continues them."""

    def __init__(self, stage, run_folder):
        """Args: stage; run_folder, a RunFolder truncated to the update that the run resumes from."""
        self._stage, self._folder, self._config = stage, run_folder, stage.config
        lines = multihost.from_first(self._so_far)
        self._updates = max((line.get("nonfinite/updates", 0) for line in lines), default=0)
        self._in_a_row = next((line["nonfinite/in_a_row"] for line in reversed(lines) if _RAW[2] in line), 0)
        config, self._alarms = stage.config, None
        if isinstance(config, AlarmOptions):
            limits = thresholds(config, dtype=config.dtype, batch_size=config.batch_size)
            self._alarms = Alarms(config.early_stop, limits, lines)
        self._error: NonFinite | None = None

    def _so_far(self) -> list[dict[str, Any]]:
        path = self._folder.metrics
        lines = logger.read_metrics(path) if storage.exists(path) else []
        keys = {"step", *WATCHED}
        return [{k: v for k, v in line.items() if k in keys or k.startswith("nonfinite/")} for line in lines]

    def over(self, step: int) -> bool:
        """Whether the run ends with update `step`: an alarm of early_stop was raised before it.

        Metrics are read one update late; so the update after the alarm is the last, also where they happen to be read
        earlier, for a checkpoint.
        """
        asked = None if self._alarms is None else self._alarms.stop_step
        return asked is not None and asked < step

    def inspect(self, step: int, metrics: dict[str, Any], closing: bool = False) -> tuple[dict[str, Any], list[str]]:
        """The metrics to write for an update, and lines for the terminal.

        Args:
          step: 1-based.
          metrics: host numbers.
          closing: other processes may not be here; nothing is fetched then.

        Returns:
          (metrics with `nonfinite/...` of nonfinite updates only, and `alarm/...`; lines)
        """
        causes, applied, in_a_row = (int(metrics.get(name, 0)) for name in _RAW)
        metrics, lines = {name: value for name, value in metrics.items() if name not in _RAW}, []
        names = nonfinite.cause_names(causes)
        if names:
            self._updates += 1
            metrics |= {f"nonfinite/{name}": 1.0 for name in names}
            metrics |= {"nonfinite/updates": self._updates, "nonfinite/steps_applied": applied}
            metrics |= {"nonfinite/in_a_row": in_a_row}
            if not closing:
                lines += self._report(step, names, applied, in_a_row)
        elif self._in_a_row and not in_a_row:
            metrics["nonfinite/in_a_row"] = 0
        self._in_a_row = in_a_row
        if self._alarms is not None:
            raised, messages = self._alarms.update(step, metrics)
            metrics |= raised
            lines += [f"{self._stage.name}: update {step}: {message}" for message in messages]
        return metrics, lines

    def _report(self, step: int, names: list[str], applied: int, in_a_row: int) -> list[str]:
        """Writes the rows of a nonfinite update; returns a line on it, or keeps an error where the run ends."""
        rows = self._stage.nonfinite_rows(step)
        path = self._folder.write_nonfinite(step, rows)
        message = f"update {step}: {_WORDS[names[0]]} is not a finite number"
        if names[1:]:
            message += f" (then neither {', '.join(_WORDS[name] for name in names[1:])})"
        first = next((row for row in rows if row.get("not_finite")), None)
        if first is not None:
            message += f", first for row {first['row']}: {first['prompt'][-200:]!r} -> {first['response'][:200]!r}"
        earlier = f" except {applied} optimizer steps before that, which stay" if applied else ""
        if in_a_row < nonfinite.max_in_a_row(self._config):
            return [f"{self._stage.name}: {message}; skipped{earlier} ({in_a_row} in a row). Its rows: {path}"]
        skips = self._config.on_nonfinite == "skip"
        count = f", the last of {in_a_row} in a row (max_nonfinite)" if skips else ""
        resume = "" if skips else " resume with --on_nonfinite skip;"
        self._error = NonFinite(
            f"{message}{count}. Nothing of this update reached the params{earlier}. Look at its rows in {path}; "
            f"then{resume} or start again with a lower learning_rate, max_grad_norm set, or other rewards or data",
            step,
            whole=applied == 0,
        )
        return []

    def raise_error(self) -> None:
        """Raises NonFinite where the metrics that `inspect` has seen end the run."""
        if self._error is not None:
            raise self._error

    def resumed(self, state: TrainState) -> TrainState:
        """A state from a checkpoint or of `before`: fewer bad updates in a row than end the run."""
        most = min(int(sharding.fetch(state.nonfinite)), nonfinite.max_in_a_row(self._config) - 1)
        return state.replace(nonfinite=self._stage.weights.place(np.int32(most), state.nonfinite.sharding))
