"""Curves of metrics: aggregation over seeds, and downsampling that keeps peaks."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax.report.read_run import Run
from rlhf_jax.runtime.config_diff import may_change

MAX_POINTS = 600
"""Maximum number of points of a curve."""


@dataclasses.dataclass
class Group:
    """Runs whose configs differ only in the seed and in options that do not change results.

    Attributes:
      label: name on the page.
      runs: sorted by seed.
    """

    label: str
    runs: list[Run]

    @property
    def stage(self) -> str:
        """sft, reward, ppo, rloo or grpo."""
        return self.runs[0].stage

    def names(self) -> list[str]:
        """The metrics of its runs, in order of first appearance."""
        return list(dict.fromkeys(name for run in self.runs for name in run.series))

    def curve(self, name: str) -> Curve:
        """A metric over the runs that have it, at their common steps."""
        return aggregate_runs([tuple(map(np.asarray, run.series[name])) for run in self.runs if name in run.series])


@dataclasses.dataclass(frozen=True)
class Curve:
    """Steps [N]; mean, minimum and maximum [N] over `count` runs, NaN without a finite value."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    count: int

    def at(self, steps: np.ndarray) -> np.ndarray:
        """The mean at steps, NaN at steps without a value."""
        means = dict(zip(self.steps.tolist(), self.mean.tolist(), strict=True))
        return np.array([means.get(step, math.nan) for step in np.asarray(steps).tolist()])


def aggregate_runs(runs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Curve:
    """One curve from the (steps, values) of several runs."""
    if not runs:
        empty = np.zeros(0)
        return Curve(empty, empty, empty, empty, 0)
    steps = runs[0][0]
    for other, _ in runs[1:]:
        steps = np.intersect1d(steps, other)
    rows = np.stack([values[np.isin(run_steps, steps)] for run_steps, values in runs])
    finite = np.isfinite(rows)
    count = finite.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean = np.where(finite, rows, 0.0).sum(axis=0) / count
    low = np.where(count > 0, np.where(finite, rows, np.inf).min(axis=0), np.nan)
    high = np.where(count > 0, np.where(finite, rows, -np.inf).max(axis=0), np.nan)
    return Curve(steps, mean, low, high, len(runs))


def downsample(curve: Curve, max_points: int = MAX_POINTS) -> Curve:
    """At most `max_points` points of a curve: both ends, and the minimum and maximum of each interval."""
    n = len(curve.steps)
    if n <= max_points:
        return curve
    positions = {0, n - 1}
    low, high = (np.where(np.isfinite(x), x, np.nan) for x in (curve.low, curve.high))
    edges = np.linspace(1, n - 1, max((max_points - 2) // 2, 1) + 1).astype(int)
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        if np.isfinite(low[start:end]).any():
            positions |= {start + int(np.nanargmin(low[start:end])), start + int(np.nanargmax(high[start:end]))}
        else:  # keep the gap
            positions.add(int(start))
    index = np.array(sorted(positions))
    return Curve(curve.steps[index], curve.mean[index], curve.low[index], curve.high[index], curve.count)


def options_of(run: Run) -> dict[str, Any]:
    """The options of a run, with the folder of its pipeline replaced by `{run_dir}`."""
    root, stage = os.path.split(str(run.config.get("run_dir", "")))
    prefix = f"{root}/" if root and stage == run.stage else None
    return {
        name: "{run_dir}/" + value[len(prefix) :]
        if prefix and name != "run_dir" and isinstance(value, str) and value.startswith(prefix)
        else value
        for name, value in run.config.items()
    }


def group_by_config(runs: Sequence[Run]) -> list[Group]:
    """Groups of runs with the same config except the seed, in order of first appearance."""
    groups: list[list[Run]] = []
    groups_by_key: dict[str, list[Run]] = {}
    for run in runs:
        # Runs of one group have the same starting model, or each the model of its own pipeline folder.
        keys = {_config_key(run, options) for options in (run.config, options_of(run))}
        members = next((groups_by_key[key] for key in keys if key in groups_by_key), None)
        # A second run with the same seed starts a new group: the same seed twice is no band.
        if members is None or any(other.config.get("seed") == run.config.get("seed") for other in members):
            groups.append(members := [])
        members.append(run)
        for key in keys:
            groups_by_key.setdefault(key, members)
    return [Group(_label(members), members) for members in groups]


def _config_key(run: Run, options: dict[str, Any]) -> str:
    same = {name: value for name, value in options.items() if name not in {"seed", *may_change()}}
    return json.dumps([run.stage, same], sort_keys=True, default=str)


def _label(runs: list[Run]) -> str:
    if len(runs) == 1:
        return runs[0].name
    runs.sort(key=lambda run: (str(type(run.config.get("seed"))), run.config.get("seed")))
    seeds = ", ".join(str(run.config.get("seed")) for run in runs)
    names = [run.name for run in runs]
    start = os.path.commonprefix(names)
    end = os.path.commonprefix([name[len(start) :][::-1] for name in names])[::-1]
    return f"{start}*{end}, seeds {seeds}"


def rounded(x: float, digits: int = 5) -> float | int | None:
    """A number for JSON, rounded to significant digits; None if it is not finite."""
    if not math.isfinite(x):
        return None
    short = float(f"{x:.{digits}g}") if abs(x) < 1e15 else x
    return int(short) if short == int(short) and abs(short) < 2**53 else short


def rounded_list(values: Any, digits: int = 5) -> list[float | int | None]:
    """`rounded` for each value."""
    return [rounded(x, digits) for x in np.asarray(values, np.float64).tolist()]
