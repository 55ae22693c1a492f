"""The charts of the page and their data."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax.report.series import Curve, Group, downsample, rounded, rounded_list

TABS = {"policy": "Policy", "reward": "Reward model", "sft": "SFT"}
"""Tabs of the page with their titles."""


def tab_of(stage: str) -> str:
    """The tab of a stage. Whatever else trains, an algorithm of a config file among it, trains a policy."""
    return stage if stage in TABS else "policy"


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart of metrics over updates.

    Attributes:
      title: of the chart.
      metrics: names or patterns with `*`; those that no run has are omitted.
      log: logarithmic axis, if all values are positive.
      separate: one chart for each metric if there are several groups.
    """

    title: str
    metrics: tuple[str, ...]
    log: bool = False
    separate: bool = False


SECTIONS: tuple[tuple[str, tuple[Chart, ...]], ...] = (
    (
        "Reward",
        (
            Chart("Score", ("objective/scores", "eval/scores")),
            Chart("Reward after KL", ("objective/rlhf_reward",)),
            Chart("KL penalty in the reward", ("objective/non_score_reward",)),
            Chart("Each reward", ("rewards/*/mean",), separate=True),
            Chart("Standard deviation of the score", ("objective/scores_std", "reward_std")),
            Chart("Groups with equal scores", ("frac_reward_zero_std",)),
            Chart("Rows without a reward", ("rewards/dropped",)),
            Chart("Rewards of pairs", ("mean_reward", "min_reward", "max_reward"), separate=True),
        ),
    ),
    (
        "KL and entropy",
        (
            Chart("KL to the reference", ("objective/kl", "eval/kl")),
            Chart("Entropy of a token", ("policy/entropy_avg",)),
            Chart("Negative log-probability of a response", ("objective/entropy",)),
            Chart("KL coefficient", ("objective/kl_coef",)),
            Chart("Coefficient of the entropy bonus", ("entropy_coef",)),
        ),
    ),
    (
        "Length and endings",
        (
            Chart("Response length", ("val/response_length", "eval/response_length")),
            Chart("Responses that end with eos", ("eos_rate", "eval/eos_rate")),
            Chart("Shortest and longest response", ("completions/min_length", "completions/max_length"), separate=True),
        ),
    ),
    (
        "Losses",
        (
            Chart("Loss", ("loss", "eval/loss", "eval_*/loss")),
            Chart("Accuracy on pairs", ("accuracy", "eval/accuracy", "eval_*/accuracy")),
            Chart("Margin", ("margin", "eval/margin", "eval_*/margin")),
            Chart("Calibration error", ("eval/calibration_error",)),
            Chart("Policy loss", ("loss/policy_avg",)),
            Chart("Value loss", ("loss/value_avg", "eval_loss/value_avg")),
            Chart("KL in the loss", ("loss/kl_avg",)),
        ),
    ),
    (
        "Clipping and ratio",
        (
            Chart("Policy clip fraction", ("policy/clipfrac_avg",)),
            Chart("Fraction bounded by dual_clip", ("policy/clipfrac_lower_avg",)),
            Chart("Value clip fraction", ("val/clipfrac_avg",)),
            Chart("Policy clip fraction by side", ("clip_ratio/low_mean", "clip_ratio/high_mean"), separate=True),
            Chart("KL of an update (approxkl)", ("policy/approxkl_avg",), log=True),
            Chart("Ratio", ("val/ratio",)),
            Chart("First ratio error", ("val/first_ratio_error",), log=True),
            Chart("Ratios above the cap (cispo)", ("cispo_clip_ratio",)),
            Chart("Weight of a response (vespo)", ("vespo/phi_seq_mean",)),
            Chart(
                "Log-probabilities, sampler to learner",
                ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"),
                log=True,
                separate=True,
            ),
            Chart("Weight by learner over sampler", ("sampling/importance_sampling_ratio/mean",)),
            Chart("Steps taken (target_kl)", ("policy/steps_done",)),
        ),
    ),
    ("Critic", (Chart("Explained variance", ("val/explained_variance", "eval_val/explained_variance")),)),
    (
        "Learning rate and gradient",
        (
            Chart("Learning rate", ("lr", "learning_rate")),
            Chart("Learning rate of the critic", ("critic_lr",)),
            Chart("Gradient norm", ("grad_norm",), log=True),
        ),
    ),
    (
        "Time and memory",
        (
            Chart(
                "Seconds by phase, without the first update",
                ("time/generate", "time/score", "time/experience", "time/update", "time/compile"),
                separate=True,
            ),
            Chart("Seconds of an update, without the first", ("step_time", "time/step"), separate=True),
            Chart("Episodes per second", ("eps",)),
            Chart(
                "Tokens per second by phase",
                tuple(f"tokens_per_second/{phase}" for phase in ("generate", "score", "experience", "update")),
                separate=True,
            ),
            Chart(
                "Model FLOPs by phase, share of the peak (MFU)",
                ("mfu", *(f"mfu/{phase}" for phase in ("generate", "score", "experience", "update"))),
            ),
            Chart("Bytes that decoding has to read, share of the bandwidth", ("bandwidth/generate",)),
            Chart("Memory, MiB", ("memory/peak_rss_mib", "memory/peak_device_mib"), separate=True),
        ),
    ),
)
_TIMINGS = ("time/", "step_time", "eps", "mfu", "tokens_per_second/", "bandwidth/")
_NO_CHART = (
    "wall_time",
    "peak/*",
    "epoch",
    "episode",
    "num_tokens",
    "reward",
    "learning_rate",
    "alarm/*",
    "nonfinite/*",
)


class Curves:
    """The curves of a tab by metric, each read and downsampled once.

    Attributes:
      groups: of the tab.
      data: {metric: {group: {"x": index in `grids`, "y", "low", "high"}}} of the metrics added so far.
      grids: distinct lists of steps, which many curves share.
    """

    def __init__(self, groups: Sequence[Group]):
        self.groups = groups
        self.grids: list[list[float]] = []
        self._grid_indices: dict[tuple[float, ...], int] = {}
        self.data: dict[str, dict[int, dict[str, Any]]] = {}

    def curve(self, group: Group, name: str) -> Curve:
        """A metric of a group. `eos_rate` is 1 - completions/clipped_ratio; timings skip the first update, which
        compiles."""
        if name == "eos_rate":
            clipped = group.curve("completions/clipped_ratio")
            return Curve(clipped.steps, 1 - clipped.mean, 1 - clipped.high, 1 - clipped.low, clipped.count)
        curve = group.curve(name)
        if name.startswith(_TIMINGS) and len(curve.steps) > 2:
            return Curve(curve.steps[1:], curve.mean[1:], curve.low[1:], curve.high[1:], curve.count)
        return curve

    def names(self) -> list[str]:
        """All metrics of the groups."""
        names = list(dict.fromkeys(name for group in self.groups for name in group.names()))
        return [*names, *(["eos_rate"] if "completions/clipped_ratio" in names else [])]

    def add(self, name: str) -> bool:
        """Adds a metric of all groups to `data`. Returns whether any group has values."""
        if name not in self.data:
            self.data[name] = {}
            for i, group in enumerate(self.groups):
                curve = downsample(self.curve(group, name))
                if not len(curve.steps) or not np.isfinite(curve.mean).any():
                    continue
                points = {"x": self._grid_index(curve.steps), "y": rounded_list(curve.mean)}
                if curve.count > 1:
                    points |= {"low": rounded_list(curve.low), "high": rounded_list(curve.high)}
                self.data[name][i] = points
        return bool(self.data[name])

    def _grid_index(self, steps: np.ndarray) -> int:
        """The index of steps in `grids`."""
        key = tuple(steps.tolist())
        if key not in self._grid_indices:
            self._grid_indices[key] = len(self.grids)
            self.grids.append([rounded(x, 15) for x in key])
        return self._grid_indices[key]


def sections(curves: Curves) -> list[dict[str, Any]]:
    """The charts with data: [{"title", "charts": [{"title", "metrics", "log"}]}]. The last section has the metrics
    without a chart in SECTIONS."""
    names, used, result = curves.names(), set(), []
    for title, charts in SECTIONS:
        section = []
        for chart in charts:
            matches = [name for pattern in chart.metrics for name in names if fnmatch.fnmatchcase(name, pattern)]
            if chart.title == "Learning rate":
                matches = matches[:1]
            metrics = [name for name in dict.fromkeys(matches) if curves.add(name)]
            used |= set(metrics)
            if chart.separate and len(curves.groups) > 1 and len(metrics) > 1:
                section += [{"title": f"{chart.title}: {n}", "metrics": [n], "log": chart.log} for n in metrics]
            elif metrics:
                section.append({"title": chart.title, "metrics": metrics, "log": chart.log})
        if section:
            result.append({"title": title, "charts": section})
    unlisted = [n for n in names if n not in used and not any(fnmatch.fnmatchcase(n, pattern) for pattern in _NO_CHART)]
    unlisted = [name for name in unlisted if curves.add(name)]
    charts = [{"title": name, "metrics": [name], "log": False} for name in sorted(unlisted)]
    return [*result, {"title": "All other metrics", "charts": charts, "closed": True}] if charts else result


def scatter(curves: Curves, x: str, y: str, square_root: bool = False, max_points: int = 400) -> list[dict[str, Any]]:
    """Points of metric y against metric x, ordered by update: [{"group", "x", "y", "step"}].

    Args:
      curves: of a tab.
      x, y: metrics.
      square_root: use the square root of x, clipped at 0.
      max_points: maximum number of points of a group, evenly spaced.
    """
    result = []
    for i, group in enumerate(curves.groups):
        x_curve = curves.curve(group, x)
        y_values = curves.curve(group, y).at(x_curve.steps)
        finite = np.isfinite(x_curve.mean) & np.isfinite(y_values)
        steps, x_values, y_values = x_curve.steps[finite], x_curve.mean[finite], y_values[finite]
        if not len(steps):
            continue
        indices = _evenly_spaced(len(steps), max_points)
        x_values = np.sqrt(np.maximum(x_values, 0.0)) if square_root else x_values
        points = {"x": rounded_list(x_values[indices]), "y": rounded_list(y_values[indices])}
        result.append({"group": i, **points, "step": rounded_list(steps[indices])})
    return result


def _evenly_spaced(n: int, count: int) -> np.ndarray:
    """At most `count` evenly spaced indices below n."""
    return np.unique(np.linspace(0, n - 1, min(count, n)).astype(int))


def clocks(curves: Curves) -> list[dict[str, Any]]:
    """Episodes and hours at steps, for the other x axes: [{"step", "episode", "hours"}] of each group, downsampled."""
    result = []
    for group in curves.groups:
        episode, seconds = group.curve("episode"), group.curve("time/step")
        steps = episode.steps if len(episode.steps) >= len(seconds.steps) else seconds.steps
        if not len(steps):
            result.append({"step": [], "episode": [], "hours": []})
            continue
        durations = seconds.at(steps)
        hours = np.cumsum(np.where(np.isfinite(durations), durations, 0.0)) / 3600
        indices = _evenly_spaced(len(steps), 300)
        result.append(
            {
                "step": rounded_list(steps[indices], 9),
                "episode": rounded_list(episode.at(steps)[indices], 9),
                "hours": rounded_list(hours[indices], 6),
            }
        )
    return result
