"""Reliability of a reward model: accuracy and calibration on preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import special

from rlhf_jax.metrics.statistics import mean_and_standard_error, mean_interval


def reliability(margins: Sequence[float], bins: int = 10) -> list[dict[str, Any]]:
    """Accuracy by confidence: the bars of a reliability diagram.

    The confidence in a pair is sigmoid(|margin|) in [0.5, 1], the probability under the Bradley-Terry model.

    Args:
      margins: [N] score of the chosen response minus that of the rejected one.
      bins: number of bins of equal width; a confidence on an edge belongs to the upper bin.

    Returns:
      [{"low", "high": edges of the bin, "pairs": their number, "confidence": mean, "accuracy": share ranked correctly,
      a tie counting half; the last two None for an empty bin}]
    """
    margins = np.asarray(margins, np.float64)
    confidence, correct = special.expit(np.abs(margins)), (margins > 0) + 0.5 * (margins == 0)
    edges = np.linspace(0.5, 1.0, bins + 1)
    index = np.clip(np.searchsorted(edges, confidence, side="right") - 1, 0, bins - 1)
    rows = []
    for i in range(bins):
        in_bin = index == i
        row = {"low": float(edges[i]), "high": float(edges[i + 1]), "pairs": int(in_bin.sum())}
        row |= {"confidence": None, "accuracy": None}
        if row["pairs"]:
            row |= {"confidence": float(confidence[in_bin].mean()), "accuracy": float(correct[in_bin].mean())}
        rows.append(row)
    return rows


def calibration_error(rows: Sequence[dict[str, Any]]) -> float:
    """The expected calibration error of `reliability`'s rows: the mean over pairs of |accuracy - mean confidence| of
    their bin (Naeini et al. 2015; Guo et al. 2017, On Calibration of Modern Neural Networks); 0 without pairs."""
    filled = [row for row in rows if row["pairs"]]
    total = sum(row["pairs"] for row in filled)
    return sum(row["pairs"] * abs(row["accuracy"] - row["confidence"]) for row in filled) / max(total, 1)


def calibration(chosen: Sequence[float], rejected: Sequence[float], bins: int = 10, **options: Any) -> dict[str, Any]:
    """Accuracy and calibration of scores on human preference pairs.

    Under the Bradley-Terry model, chosen wins with probability sigmoid(chosen - rejected); see `reliability`.

    Args:
      chosen, rejected: [N] scores, N >= 1.
      bins: as `reliability`.
      **options: of `bootstrap`, for the accuracy's interval.

    Returns:
      {"pairs", "accuracy": chosen > rejected, "accuracy_se", "accuracy_low", "accuracy_high", "ties": count, "margin":
      mean, "margin_se", "loss": mean of -log sigmoid(margin), "brier": mean of (1 - sigmoid(margin))^2, "confidence":
      mean, "ece": the expected calibration error, "bins": as `reliability`}
    """
    margin = np.asarray(chosen, np.float64) - np.asarray(rejected, np.float64)
    rows = reliability(margin, bins)
    accuracy, error = mean_and_standard_error(margin > 0)
    low, high = mean_interval(margin > 0, **options)
    mean_margin, margin_error = mean_and_standard_error(margin)
    return {
        "pairs": int(margin.size),
        "accuracy": accuracy,
        "accuracy_se": error,
        "accuracy_low": low,
        "accuracy_high": high,
        "ties": int((margin == 0).sum()),
        "margin": mean_margin,
        "margin_se": margin_error,
        "loss": float(np.mean(np.logaddexp(0.0, -margin))),
        "brier": float(np.mean(special.expit(-margin) ** 2)),
        "confidence": float(special.expit(np.abs(margin)).mean()),
        "ece": calibration_error(rows),
        "bins": rows,
    }
