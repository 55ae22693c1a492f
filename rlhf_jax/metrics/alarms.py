"""Alarms: signs in the metrics that a run of PPO, RLOO or GRPO goes wrong.

They depend on the metrics so far and on nothing else, so a resumed run has the same alarms as an uninterrupted one.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from rlhf_jax.metrics.options import AlarmOptions

WINDOW = 5
"""Number of updates in the mean at the start and in the recent mean."""

Readings = dict[str, float]

ALARMS: dict[str, tuple[str, Callable[[float, Readings, Readings, Readings], bool], str]] = {
    # name: (reading, condition on (threshold, this update, mean of the first, mean of the last), message)
    "kl_below": (
        "kl",
        lambda limit, now, start, recent: now["kl"] < -limit,
        "objective/kl {kl:.4g} is below -{limit:g}",
    ),
    "kl_above": ("kl", lambda limit, now, start, recent: now["kl"] > limit, "objective/kl {kl:.4g} is above {limit:g}"),
    "first_ratio": (
        "ratio",
        lambda limit, now, start, recent: abs(now["ratio"]) > limit,
        "val/first_ratio_error {ratio:.4g} is above {limit:g}: trained and sampled responses differ",
    ),
    "reward_std": (
        "std",
        lambda limit, now, start, recent: now["std"] <= limit,
        "responses that are compared have the same score (standard deviation {std:.4g}): there is no learning signal",
    ),
    "eos_share": (
        "eos",
        lambda limit, now, start, recent: recent["eos"] < limit * start["eos"],
        "{eos:.1%} of the responses end with eos; at the start {start_eos:.1%} did",
    ),
    "unused_ids": (
        "unused",
        lambda limit, now, start, recent: now["unused"] > limit,
        "{unused:.0f} sampled ids are ids that no token has, which decode to nothing (see suppress_unused_ids)",
    ),
    "length_growth": (
        "length",
        lambda limit, now, start, recent: recent["length"] > limit * start["length"],
        "responses have {length:.4g} tokens; at the start {start_length:.4g}",
    ),
    "length_collapse": (
        "length",
        lambda limit, now, start, recent: recent["length"] < limit * start["length"],
        "responses have {length:.4g} tokens; at the start {start_length:.4g}",
    ),
}


def thresholds(options: AlarmOptions, *, dtype: str, batch_size: int) -> dict[str, float | None]:
    """The threshold of each alarm; None if it is off.

    Args:
      options: alarm_*.
      dtype: compute dtype of the run.
      batch_size: episodes per update.
    """
    return {
        "kl_below": options.alarm_kl_below,
        "kl_above": options.alarm_kl_above,
        "first_ratio": options.alarm_first_ratio if dtype == "float32" else options.alarm_first_ratio_bfloat16,
        "reward_std": options.alarm_reward_std if batch_size > 1 else None,  # one score has no deviation
        "eos_share": options.alarm_eos_share,
        "unused_ids": None if options.alarm_unused_ids is None else options.alarm_unused_ids * batch_size,
        "length_growth": options.alarm_length_growth,
        "length_collapse": options.alarm_length_collapse,
    }


def readings(metrics: dict[str, Any]) -> Readings:
    """The readings of the alarms from an update's metrics, without missing ones and NaN."""
    values = {
        "kl": metrics.get("objective/kl"),
        "ratio": metrics.get("val/first_ratio_error"),
        "std": metrics.get("reward_std", metrics.get("objective/scores_std")),
        "length": metrics.get("completions/mean_length"),
        "unused": metrics.get("completions/unused_ids"),
    }
    if metrics.get("frac_reward_zero_std") == 1.0:
        values["std"] = 0.0  # groups may differ, but advantages compare within a group
    if "completions/clipped_ratio" in metrics:
        values["eos"] = 1.0 - metrics["completions/clipped_ratio"]
    return {name: float(x) for name, x in values.items() if x is not None and not math.isnan(x)}


WATCHED = (
    *("objective/kl", "val/first_ratio_error", "reward_std", "objective/scores_std", "frac_reward_zero_std"),
    *("completions/mean_length", "completions/clipped_ratio", "completions/unused_ids"),
)
"""Names of the metrics that `readings` uses."""


def _means(parts: Iterable[Readings]) -> Readings:
    lists = collections.defaultdict(list)
    for part in parts:
        for name, value in part.items():
            lists[name].append(value)
    return {name: sum(values) / len(values) for name, values in lists.items()}


class Alarms:
    """The alarms of a run, update by update.

    Attributes:
      raised: names of the alarms that are raised now.
      stop_step: the first update at which an alarm of early_stop was raised, or None.
    """

    def __init__(
        self,
        early_stop: Collection[str],
        thresholds: Mapping[str, float | None],
        lines: Iterable[dict[str, Any]] = (),
    ):
        """
        Args:
          early_stop: the alarms that end the run.
          thresholds: of `thresholds`.
          lines: of metrics.jsonl so far.
        """
        self._early_stop, self._thresholds = frozenset(early_stop), thresholds
        self._start: list[Readings] = []
        self._recent: collections.deque[Readings] = collections.deque(maxlen=WINDOW)
        self.raised: frozenset[str] = frozenset()
        self.stop_step: int | None = None
        for line in lines:
            self.update(line["step"], line)

    def update(self, step: int, metrics: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
        """Evaluates the alarms at update `step`.

        Args:
          step: 1-based.
          metrics: of the update; those of an evaluation alone change nothing.

        Returns:
          ({"alarm/NAME": 1.0 while it is raised, 0.0 once when it ends}, a message for each that begins)
        """
        now = readings(metrics)
        if "length" not in now:
            return {}, []
        if len(self._start) < WINDOW:
            self._start.append(now)
        self._recent.append(now)
        start, recent = _means(self._start), _means(self._recent)
        raised, messages = set(), []
        for name, (reading, condition, text) in ALARMS.items():
            limit = self._thresholds[name]
            if limit is None or reading not in now or not condition(limit, now, start, recent):
                continue
            raised.add(name)
            if name not in self.raised:
                at_start = {f"start_{key}": value for key, value in start.items()}
                current = recent if reading in ("eos", "length") else now
                messages.append(f"alarm {name}: {text.format(limit=limit, **at_start, **current)}")
        alarms = {f"alarm/{name}": float(name in raised) for name in ALARMS if name in raised or name in self.raised}
        self.raised = frozenset(raised)
        if self.stop_step is None and raised.intersection(self._early_stop):
            self.stop_step = step
        return alarms, messages
