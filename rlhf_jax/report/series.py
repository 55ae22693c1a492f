"""Curves: seeds of one config as a band, long series thinned so that no peak is lost."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax.config.diff import MAY_DIFFER, matches
from rlhf_jax.report.read_run import Run

MOST_POINTS = 600
"""Points of a curve."""


@dataclasses.dataclass
class Group:
    """Runs whose configs differ in the seed only, and in what changes nothing that a run computes.

    Attributes:
      label: what the page calls it.
      runs: its runs, by seed.
    """

    label: str
    runs: list[Run]

    @property
    def stage(self) -> str:
        """sft, reward, ppo or rloo."""
        return self.runs[0].stage

    def names(self) -> list[str]:
        """The metrics of its runs, in the order in which they came."""
        return list(dict.fromkeys(name for run in self.runs for name in run.series))

    def curve(self, name: str) -> Curve:
        """A metric of its runs: at each step that all those which have the metric have come to."""
        parts = [tuple(map(np.asarray, run.series[name])) for run in self.runs if name in run.series]
        return together(parts)


@dataclasses.dataclass(frozen=True)
class Curve:
    """Steps [N]; mean, least and greatest value [N] over `count` runs, NaN where there is no finite one."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    count: int

    def at(self, steps: np.ndarray) -> np.ndarray:
        """Its mean at steps, NaN where it has none."""
        found = dict(zip(self.steps.tolist(), self.mean.tolist(), strict=True))
        return np.array([found.get(step, math.nan) for step in np.asarray(steps).tolist()])


def together(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Curve:
    """One curve of several runs' (steps, values)."""
    if not parts:
        nothing = np.zeros(0)
        return Curve(nothing, nothing, nothing, nothing, 0)
    steps = parts[0][0]
    for other, _ in parts[1:]:
        steps = np.intersect1d(steps, other)
    rows = np.stack([values[np.isin(own, steps)] for own, values in parts])
    there = np.isfinite(rows)
    count = there.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean = np.where(there, rows, 0.0).sum(axis=0) / count
    low = np.where(count > 0, np.where(there, rows, np.inf).min(axis=0), np.nan)
    high = np.where(count > 0, np.where(there, rows, -np.inf).max(axis=0), np.nan)
    return Curve(steps, mean, low, high, len(parts))


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """A curve of at most `most` points: of each stretch the least and the greatest, and both ends of the whole."""
    n = len(curve.steps)
    if n <= most:
        return curve
    kept = {0, n - 1}
    low, high = (np.where(np.isfinite(x), x, np.nan) for x in (curve.low, curve.high))
    edges = np.linspace(1, n - 1, max((most - 2) // 2, 1) + 1).astype(int)
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        if np.isfinite(low[start:end]).any():
            kept |= {start + int(np.nanargmin(low[start:end])), start + int(np.nanargmax(high[start:end]))}
        else:  # a gap stays one
            kept.add(int(start))
    index = np.array(sorted(kept))
    return Curve(curve.steps[index], curve.mean[index], curve.low[index], curve.high[index], curve.count)


def options_of(run: Run) -> dict[str, Any]:
    """A run's options with the folder of its pipeline written as `{run_dir}`."""
    root, stage = os.path.split(str(run.config.get("run_dir", "")))
    inside = f"{root}/" if root and stage == run.stage else None
    return {
        name: "{run_dir}/" + value[len(inside) :]
        if inside and name != "run_dir" and isinstance(value, str) and value.startswith(inside)
        else value
        for name, value in run.config.items()
    }


def groups(runs: Sequence[Run]) -> list[Group]:
    """Runs by what they compute, the seed aside, in the order in which they were given."""
    found: list[list[Run]] = []
    known: dict[str, list[Run]] = {}
    for run in runs:
        # Seeds of a pipeline have each a model of its own; those of one stage may share one. Either is the same config.
        keys = {_key(run, options) for options in (run.config, options_of(run))}
        members = next((known[key] for key in keys if key in known), None)
        # Two runs of one seed are no band: the second stands by itself.
        if members is None or any(other.config.get("seed") == run.config.get("seed") for other in members):
            found.append(members := [])
        members.append(run)
        for key in keys:
            known.setdefault(key, members)
    return [Group(_label(members), members) for members in found]


def _key(run: Run, options: dict[str, Any]) -> str:
    same = {name: value for name, value in options.items() if name != "seed" and not matches(name, MAY_DIFFER)}
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


def number(x: float, digits: int = 5) -> float | int | None:
    """A number for JSON, in few digits; None for what is not finite."""
    if not math.isfinite(x):
        return None
    short = float(f"{x:.{digits}g}") if abs(x) < 1e15 else x
    return int(short) if short == int(short) and abs(short) < 2**53 else short


def numbers(values: Any, digits: int = 5) -> list[float | int | None]:
    """`number` of each."""
    return [number(x, digits) for x in np.asarray(values, np.float64).tolist()]
