"""Differences, their tolerances, and the table that a replay prints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optax

from tests.parity.options import Refused, Stepping

METRICS = 1e-4
LOSSES = 1e-5  # of the size of a loss's terms
ROUNDING = 2.0**-23  # of the size of a KL's terms


def accumulating(optimizer: optax.GradientTransformation, accum: int) -> optax.GradientTransformation:
    """The optimizer on gradients that `accelerate` divided by the number of accumulated micro-batches."""
    return optax.chain(optax.scale(1.0 / accum), optimizer)


def absolute(ours, theirs) -> float:
    """||ours - theirs||, infinite where shapes differ or one is not finite."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    gap = float(np.linalg.norm(ours - theirs)) if ours.shape == theirs.shape else math.inf
    return gap if math.isfinite(gap) else math.inf


def distance(ours, theirs) -> float:
    """||ours - theirs|| / ||theirs||, absolute where theirs is zero; infinite where shapes differ."""
    return absolute(ours, theirs) / (float(np.linalg.norm(np.asarray(theirs, np.float64))) or 1.0)


def metric_distance(ours: float, theirs: float | None, terms: float = 0.0) -> float:
    """|ours - theirs| / max(|theirs|, 0.01), 0 where both are nan; TRL logs nan as None.

    A loss whose terms cancel is as exact as its terms, not as its sum: `terms` is their size, held to LOSSES.
    """
    theirs = math.nan if theirs is None else theirs
    if math.isnan(ours) and math.isnan(theirs):
        return 0.0
    gap = abs(ours - theirs) / max(abs(theirs), 0.01, terms * LOSSES / METRICS)
    return gap if math.isfinite(gap) else math.inf


@dataclasses.dataclass
class Row:
    """The worst difference seen of one quantity."""

    quantity: str
    tolerance: float
    difference: float = -1.0
    where: str = ""

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance


class Report:
    """Collects differences; one row a quantity, the worst of them."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.notes: list[str] = []

    def add(self, quantity: str, difference: float, tolerance: float, where: str) -> None:
        """Keeps the difference if it is the quantity's worst."""
        row = self.rows.setdefault(quantity, Row(quantity, tolerance))
        if difference > row.difference:
            row.difference, row.where = difference, where

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.passed for row in self.rows.values())

    def table(self) -> str:
        """Quantity, worst difference, tolerance, verdict and where the worst was."""
        width = max(len(name) for name in self.rows)
        lines = [f"{'quantity':<{width}}  difference  tolerance  verdict  worst at"]
        for row in self.rows.values():
            verdict = "ok" if row.passed else "OUT"
            lines.append(
                f"{row.quantity:<{width}}  {row.difference:10.2e}  {row.tolerance:9.0e}  {verdict:<7}  {row.where}"
            )
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def terms_of_kl(metrics: dict[str, float], kl_coef: float) -> dict[str, float]:
    """Sizes of terms, as `metric_distance` takes them, that leave a KL one float32 rounding of what it is summed from.

    A KL is a difference of two sums of log-probabilities, each as large as the entropy. TRL takes one from the sampler
    and the other from a forward pass, so that of two equal models (a new adapter) it logs not 0 but up to a fifth of
    this.
    """
    size = float(metrics["objective/entropy"]) * ROUNDING / LOSSES
    return {"objective/kl": size, "objective/non_score_reward": kl_coef * size}


def compare_log(
    report: Report,
    ours: dict[str, float],
    theirs: dict[str, Any],
    where: str,
    clocks: tuple[str, ...],
    unknown: str,
    terms: dict[str, float] | None = None,
) -> None:
    """Adds every metric that TRL logged, its clocks excepted; Refused, with `unknown`, for one that is not ours.

    `terms`: size of the terms of the metrics that nearly cancel.
    """
    for name, value in theirs.items():
        if name in clocks:
            continue
        if name not in ours:
            raise Refused(f"{unknown}: {name}, in the log of {where}")
        size = (terms or {}).get(name, 0.0)
        report.add(name, metric_distance(float(ours[name]), value, size), METRICS, where)


def as_accelerate_stepped(run: Callable[[int | None], Report], cut: Stepping, updates: int) -> Report:
    """The report of the run that steps as TRL did.

    On the last prompt batch of each pass over the data `accelerate` steps after every micro-batch (register row 2). The
    record does not say how many batches a pass had, so where micro-batches are accumulated each number is tried.

    Args:
      run: the whole replay, given the number of updates a pass; None: no pass ends.
      cut: how TRL cut its batches.
      updates: of the record.

    Returns:
      The first report that passes, with a note if a pass ended; else the one with the fewest quantities out.
    """
    reports = []
    for period in (None, *range(1, updates + 1)) if cut.accum > 1 else (None,):
        report = run(period)
        if period is not None:
            report.notes.append(
                f"updates {period - 1}, {2 * period - 1}, ...: TRL stepped after every micro-batch, as on the last "
                "prompt batch of a data pass"
            )
        if report.passed:
            return report
        reports.append(report)
    return min(reports, key=lambda report: sum(not row.passed for row in report.rows.values()))


def pass_ends(update: int, period: int | None) -> bool:
    """Whether the update is on the last prompt batch of a pass over the data."""
    return period is not None and (update + 1) % period == 0
