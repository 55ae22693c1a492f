"""Alarms: signs in the metrics that a run of PPO or RLOO goes wrong. Functions of the metrics so far, and of nothing
else, so that a run that continues finds the alarms of one that never stopped."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable
from typing import Any

WINDOW = 5
"""Updates whose mean is a run's start, and those whose mean is held against it."""

Readings = dict[str, float]

ALARMS: dict[str, tuple[str, Callable[[float, Readings, Readings, Readings], bool], str]] = {
    # name: (what it watches, whether it is raised by (threshold, this update, the start, lately), in words)
    "kl_below": ("kl", lambda limit, now, start, late: now["kl"] < -limit, "objective/kl {kl:.4g} is below -{limit:g}"),
    "kl_above": ("kl", lambda limit, now, start, late: now["kl"] > limit, "objective/kl {kl:.4g} is above {limit:g}"),
    "first_ratio": (
        "ratio",
        lambda limit, now, start, late: abs(now["ratio"]) > limit,
        "val/first_ratio_error {ratio:.4g} is above {limit:g}: what is learned from is not what was sampled",
    ),
    "reward_std": (
        "std",
        lambda limit, now, start, late: now["std"] <= limit,
        "all scores of the batch are equal (standard deviation {std:.4g}): there is nothing to learn",
    ),
    "eos_share": (
        "eos",
        lambda limit, now, start, late: late["eos"] < limit * start["eos"],
        "{eos:.1%} of the responses end by themselves; at the start {start_eos:.1%} did",
    ),
    "length_growth": (
        "length",
        lambda limit, now, start, late: late["length"] > limit * start["length"],
        "responses have {length:.4g} tokens; at the start {start_length:.4g}",
    ),
    "length_collapse": (
        "length",
        lambda limit, now, start, late: late["length"] < limit * start["length"],
        "responses have {length:.4g} tokens; at the start {start_length:.4g}",
    ),
}


def threshold(config, name: str) -> float | None:
    """The threshold of an alarm; None: it is off.

    Args:
      config: a PPOConfig or RLOOConfig.
      name: one of ALARMS.
    """
    limits = {
        "kl_below": config.alarm_kl_below,
        "kl_above": config.alarm_kl_above,
        "first_ratio": config.alarm_first_ratio if config.dtype == "float32" else config.alarm_first_ratio_bfloat16,
        "reward_std": config.alarm_reward_std if config.batch_size > 1 else None,  # one score has no deviation
        "eos_share": config.alarm_eos_share,
        "length_growth": config.alarm_length_growth,
        "length_collapse": config.alarm_length_collapse,
    }
    return limits[name]


def readings(metrics: dict[str, Any]) -> Readings:
    """What alarms watch among an update's metrics; what is not there or no number is left out."""
    found = {
        "kl": metrics.get("objective/kl"),
        "ratio": metrics.get("val/first_ratio_error"),
        "std": metrics.get("reward_std", metrics.get("objective/scores_std")),
        "length": metrics.get("completions/mean_length"),
    }
    if metrics.get("frac_reward_zero_std") == 1.0:
        found["std"] = 0.0  # groups differ, but a group is compared with itself alone
    if "completions/clipped_ratio" in metrics:
        found["eos"] = 1.0 - metrics["completions/clipped_ratio"]
    return {name: float(x) for name, x in found.items() if x is not None and not math.isnan(x)}


WATCHED = (
    *("objective/kl", "val/first_ratio_error", "reward_std", "objective/scores_std", "frac_reward_zero_std"),
    *("completions/mean_length", "completions/clipped_ratio"),
)
"""The metrics that `readings` reads."""


def _means(parts: Iterable[Readings]) -> Readings:
    found = collections.defaultdict(list)
    for part in parts:
        for name, value in part.items():
            found[name].append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


class Alarms:
    """The alarms of a run, update by update.

    Attributes:
      raised: the names of those that stand now.
      asked: the first update at which an alarm of early_stop was raised, or None.
    """

    def __init__(self, config, lines: Iterable[dict[str, Any]] = ()):
        """Args: config, a PPOConfig or RLOOConfig; lines, of metrics.jsonl so far."""
        self._config = config
        self._start: list[Readings] = []
        self._lately: collections.deque[Readings] = collections.deque(maxlen=WINDOW)
        self.raised: frozenset[str] = frozenset()
        self.asked: int | None = None
        for line in lines:
            self.update(line["step"], line)

    def update(self, step: int, metrics: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
        """What update `step` adds.

        Args:
          step: 1-based.
          metrics: the update's; those of an evaluation alone change nothing.

        Returns:
          ({"alarm/NAME": 1.0 while it is raised, 0.0 once when it ends}, a line of words for each that begins)
        """
        now = readings(metrics)
        if "length" not in now:
            return {}, []
        if len(self._start) < WINDOW:
            self._start.append(now)
        self._lately.append(now)
        start, lately = _means(self._start), _means(self._lately)
        raised, words = set(), []
        for name, (watched, rule, text) in ALARMS.items():
            limit = threshold(self._config, name)
            if limit is None or watched not in now or not rule(limit, now, start, lately):
                continue
            raised.add(name)
            if name not in self.raised:
                at_start = {f"start_{key}": value for key, value in start.items()}
                shown = lately if watched in ("eos", "length") else now
                words.append(f"alarm {name}: {text.format(limit=limit, **at_start, **shown)}")
        found = {f"alarm/{name}": float(name in raised) for name in ALARMS if name in raised or name in self.raised}
        self.raised = frozenset(raised)
        if self.asked is None and raised.intersection(self._config.early_stop):
            self.asked = step
        return found, words
