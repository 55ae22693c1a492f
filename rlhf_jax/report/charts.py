"""Which charts a page has, and what they draw."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax.report.series import Curve, Group, number, numbers, thinned

PAGES = {"policy": ("ppo", "rloo"), "reward": ("reward",), "sft": ("sft",)}
"""A page's tabs, and the stages that are compared in each."""
TITLES = {"policy": "Policy", "reward": "Reward model", "sft": "SFT"}


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart: curves of metrics, each against the update.

    Attributes:
      title: above it.
      metrics: names or patterns with `*`; those that no run has are left out.
      log: a logarithmic axis, where all values are above 0.
      apart: with several groups a chart for each metric.
    """

    title: str
    metrics: tuple[str, ...]
    log: bool = False
    apart: bool = False


SECTIONS: tuple[tuple[str, tuple[Chart, ...]], ...] = (
    (
        "Reward",
        (
            Chart("Score", ("objective/scores", "eval/scores")),
            Chart("Reward after KL", ("objective/rlhf_reward",)),
            Chart("KL penalty in the reward", ("objective/non_score_reward",)),
            Chart("Each reward", ("rewards/*/mean",), apart=True),
            Chart("Spread of the scores", ("objective/scores_std", "reward_std")),
            Chart("Groups with equal scores", ("frac_reward_zero_std",)),
            Chart("Rows without a reward", ("rewards/dropped",)),
            Chart("Rewards of the pairs", ("mean_reward", "min_reward", "max_reward"), apart=True),
        ),
    ),
    (
        "KL and entropy",
        (
            Chart("KL to the reference", ("objective/kl", "eval/kl")),
            Chart("Entropy of a token", ("policy/entropy_avg",)),
            Chart("Surprise of a response", ("objective/entropy",)),
            Chart("KL coefficient", ("objective/kl_coef",)),
        ),
    ),
    (
        "Length and endings",
        (
            Chart("Response length", ("val/response_length", "eval/response_length")),
            Chart("Responses that end (eos rate)", ("eos_rate", "eval/eos_rate")),
            Chart("Shortest and longest", ("completions/min_length", "completions/max_length"), apart=True),
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
        ),
    ),
    (
        "Clipping and ratio",
        (
            Chart("Policy clip fraction", ("policy/clipfrac_avg",)),
            Chart("Value clip fraction", ("val/clipfrac_avg",)),
            Chart("Clip by side", ("clip_ratio/low_mean", "clip_ratio/high_mean"), apart=True),
            Chart("Policy moved by an update (approxkl)", ("policy/approxkl_avg",), log=True),
            Chart("Ratio", ("val/ratio",)),
            Chart("First ratio error", ("val/first_ratio_error",), log=True),
            Chart("Steps taken (target_kl)", ("policy/steps_done",)),
        ),
    ),
    ("Critic", (Chart("Explained variance", ("val/explained_variance", "eval_val/explained_variance")),)),
    (
        "Learning rate and gradient",
        (Chart("Learning rate", ("lr", "learning_rate")), Chart("Gradient norm", ("grad_norm",), log=True)),
    ),
    (
        "Time and memory",
        (
            Chart(
                "Seconds by phase, the first update left out",
                ("time/generate", "time/score", "time/experience", "time/update", "time/compile"),
                apart=True,
            ),
            Chart("Seconds of an update, the first left out", ("step_time", "time/step"), apart=True),
            Chart("Episodes a second", ("eps",)),
            Chart("Memory, MiB", ("memory/peak_rss_mib", "memory/peak_device_mib"), apart=True),
        ),
    ),
)
_OF_UPDATES = ("time/", "step_time", "eps")
_NEVER_DRAWN = ("wall_time", "epoch", "episode", "num_tokens", "reward", "learning_rate", "alarm/*", "nonfinite/*")


class Curves:
    """The curves of a tab by name, each read and thinned once, and the steps that many of them share."""

    def __init__(self, groups: Sequence[Group]):
        self.groups = groups
        self.grids: list[list[float]] = []
        self._known: dict[tuple[float, ...], int] = {}
        self.drawn: dict[str, dict[int, dict[str, Any]]] = {}

    def curve(self, group: Group, name: str) -> Curve:
        """A metric of a group; `eos_rate` is made of completions/clipped_ratio; times without the first update's."""
        if name == "eos_rate":
            cut = group.curve("completions/clipped_ratio")
            return Curve(cut.steps, 1 - cut.mean, 1 - cut.high, 1 - cut.low, cut.count)
        found = group.curve(name)
        if name.startswith(_OF_UPDATES) and len(found.steps) > 2:
            return Curve(found.steps[1:], found.mean[1:], found.low[1:], found.high[1:], found.count)
        return found

    def names(self) -> list[str]:
        """All metrics of the groups."""
        found = list(dict.fromkeys(name for group in self.groups for name in group.names()))
        return [*found, *(["eos_rate"] if "completions/clipped_ratio" in found else [])]

    def draw(self, name: str) -> None:
        """Puts a metric of all groups into `drawn`: {name: {group: {"x": of grids, "y", "low", "high"}}}."""
        if name in self.drawn:
            return
        self.drawn[name] = {}
        for i, group in enumerate(self.groups):
            curve = thinned(self.curve(group, name))
            if not len(curve.steps) or not np.isfinite(curve.mean).any():
                continue
            made = {"x": self.grid(curve.steps), "y": numbers(curve.mean)}
            if curve.count > 1:
                made |= {"low": numbers(curve.low), "high": numbers(curve.high)}
            self.drawn[name][i] = made

    def grid(self, steps: np.ndarray) -> int:
        """The place of these steps in `grids`."""
        key = tuple(steps.tolist())
        if key not in self._known:
            self._known[key] = len(self.grids)
            self.grids.append([number(x, 15) for x in key])
        return self._known[key]


def sections(curves: Curves) -> list[dict[str, Any]]:
    """[{"title", "charts": [{"title", "metrics", "log"}]}]: what there is to draw; at last what no chart has."""
    names, used, found = curves.names(), set(), []
    for title, charts in SECTIONS:
        made = []
        for chart in charts:
            wanted = [name for pattern in chart.metrics for name in names if fnmatch.fnmatchcase(name, pattern)]
            if chart.title == "Learning rate":
                wanted = wanted[:1]
            for name in (wanted := list(dict.fromkeys(wanted))):
                curves.draw(name)
            wanted = [name for name in wanted if curves.drawn[name]]
            used |= set(wanted)
            if chart.apart and len(curves.groups) > 1 and len(wanted) > 1:
                made += [{"title": f"{chart.title}: {name}", "metrics": [name], "log": chart.log} for name in wanted]
            elif wanted:
                made.append({"title": chart.title, "metrics": wanted, "log": chart.log})
        if made:
            found.append({"title": title, "charts": made})
    rest = [n for n in names if n not in used and not any(fnmatch.fnmatchcase(n, never) for never in _NEVER_DRAWN)]
    for name in rest:
        curves.draw(name)
    rest = [{"title": name, "metrics": [name], "log": False} for name in sorted(rest) if curves.drawn[name]]
    return [*found, {"title": "All other metrics", "charts": rest, "closed": True}] if rest else found


def against(curves: Curves, x: str, y: str, root: bool = False, most: int = 400) -> list[dict[str, Any]]:
    """Points of a metric against another, in the order of the updates: [{"group", "x", "y", "step"}].

    Args:
      curves: of a tab.
      x, y: metrics.
      root: of x the square root, 0 where it is below.
      most: points of a group, evenly chosen.
    """
    found = []
    for i, group in enumerate(curves.groups):
        across = curves.curve(group, x)
        up = curves.curve(group, y).at(across.steps)
        there = np.isfinite(across.mean) & np.isfinite(up)
        steps, values, up = across.steps[there], across.mean[there], up[there]
        if not len(steps):
            continue
        kept = np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).astype(int))
        values = np.sqrt(np.maximum(values, 0.0)) if root else values
        found.append({"group": i, "x": numbers(values[kept]), "y": numbers(up[kept]), "step": numbers(steps[kept])})
    return found


def clocks(curves: Curves) -> list[dict[str, Any]]:
    """What stands below a curve in place of the update: [{"step", "episode", "hours"}] of each group, thinned."""
    found = []
    for group in curves.groups:
        episode, seconds = group.curve("episode"), group.curve("time/step")
        steps = episode.steps if len(episode.steps) >= len(seconds.steps) else seconds.steps
        at = seconds.at(steps)
        hours = np.cumsum(np.where(np.isfinite(at), at, 0.0)) / 3600
        kept = np.unique(np.linspace(0, len(steps) - 1, min(300, len(steps))).astype(int)) if len(steps) else []
        found.append(
            {
                "step": numbers(steps[kept], 9),
                "episode": numbers(episode.at(steps)[kept], 9),
                "hours": numbers(hours[kept], 6),
            }
            if len(steps)
            else {"step": [], "episode": [], "hours": []}
        )
    return found
