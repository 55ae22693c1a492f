"""Differences, their tolerances, and the table that a replay prints."""

from __future__ import annotations

import dataclasses
import math

import numpy as np


def distance(ours, theirs) -> float:
    """||ours - theirs|| / ||theirs||, absolute where theirs is zero; infinite where shapes differ."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
        return math.inf
    gap = float(np.linalg.norm(ours - theirs)) / (float(np.linalg.norm(theirs)) or 1.0)
    return gap if math.isfinite(gap) else math.inf


def metric_distance(ours: float, theirs: float) -> float:
    """|ours - theirs| / max(|theirs|, 0.01), 0 where both are nan."""
    if math.isnan(ours) and math.isnan(theirs):
        return 0.0
    gap = abs(ours - theirs) / max(abs(theirs), 0.01)
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
