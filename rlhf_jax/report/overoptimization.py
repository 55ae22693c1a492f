"""A reward that is measured and not learned from, against √KL: what optimising another reward does to it."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhf_jax.report import charts
from rlhf_jax.report.series import Group, numbers
from rlhf_jax.rewards.interface import number_duplicates

FEWEST = 6
"""Points of a fit."""


def metric_of(group: Group) -> str | None:
    """rewards/NAME/mean of the group's first reward of weight 0; None where there is none, or it cannot be told."""
    config, measures = group.runs[0].config, group.names()
    weights = config.get("reward_weights") or ()
    names = _names(config)
    there = [name.split("/")[1] for name in measures if name.startswith("rewards/") and name.endswith("/mean")]
    others = [name for name in there if name not in names]  # functions that rlhf_jax.run was given
    if len(others) == 1 and len(names) + 1 == len(weights):
        names += others
    if len(names) != len(weights):
        return None
    wanted = [f"rewards/{name}/mean" for name, weight in zip(names, weights) if weight == 0]
    return next((name for name in wanted if name in measures), None)


def _names(config: dict[str, Any]) -> list[str]:
    """The rewards that a config names, in the order of its weights."""
    models = [path for path in (config.get("reward_model_path"), *(config.get("more_reward_models") or ())) if path]
    together = config.get("reward_ensemble", "sum")
    if len(models) > 1 and together != "sum":
        models = [f"ensemble_{together}"]
    functions = [spec.rpartition(":")[2] for spec in config.get("reward_funcs") or ()]
    functions += ["server"] if config.get("reward_server") else []
    return [*number_duplicates(path.rstrip("/").split("/")[-1] for path in models), *number_duplicates(functions)]


def fit(d: np.ndarray, r: np.ndarray) -> tuple[float, float, float] | None:
    """(R_0, alpha, beta) of R(d) = R_0 + d (alpha - beta log d), by least squares; R(0) = R_0.

    Args:
      d: [N] √KL, at least 0.
      r: [N] the reward there.

    Returns:
      The numbers, or None for too few points or a policy that does not move.

    Source: Gao, Schulman and Hilton 2022 (arXiv 2210.10760), equation 2, of reinforcement learning.
    """
    there = np.isfinite(d) & np.isfinite(r) & (d >= 0)
    d, r = d[there], r[there]
    if len(d) < FEWEST or d.max() - d.min() < 1e-3:
        return None
    features = np.stack([np.ones_like(d), d, -_d_log_d(d)], axis=1)
    found, _, rank, _ = np.linalg.lstsq(features, r, rcond=None)
    return tuple(found.tolist()) if rank == 3 else None


def value(found: tuple[float, float, float], d: np.ndarray) -> np.ndarray:
    """R(d) of a fit: [N]."""
    start, alpha, beta = found
    return start + alpha * d - beta * _d_log_d(d)


def _d_log_d(d: np.ndarray) -> np.ndarray:
    return d * np.log(np.where(d > 0, d, 1.0))


def frontier(curves: charts.Curves) -> dict[str, list[dict[str, Any]]] | None:
    """What the chart of measured rewards draws; None where no run measures one.

    Returns:
      {"train", "eval": as `charts.against`, "fits": [{"group", "alpha", "beta", "peak": √KL where R is largest or
      None, "x", "y": the curve}], "name": the reward's}
    """
    found: dict[str, Any] = {"train": [], "eval": [], "fits": [], "name": None}
    for i, group in enumerate(curves.groups):
        if (metric := metric_of(group)) is None:
            continue
        one = charts.Curves([group])
        found["name"] = found["name"] or metric.split("/")[1]
        for kind, across, up in (("train", "objective/kl", metric), ("eval", "eval/kl", f"eval_{metric}")):
            found[kind] += [{**points, "group": i} for points in charts.against(one, across, up, root=True)]
        kl, reward = group.curve("objective/kl"), group.curve(metric)
        d = np.sqrt(np.maximum(kl.mean, 0.0))
        if (numbers_of := fit(d, reward.at(kl.steps))) is not None:
            found["fits"].append({"group": i, **_drawn(numbers_of, float(np.nanmax(d)))})
    return found if found["name"] is not None else None


def _drawn(found: tuple[float, float, float], furthest: float) -> dict[str, Any]:
    _, alpha, beta = found
    x = np.linspace(0.0, furthest, 60)
    # dR/dd = alpha - beta (log d + 1) = 0
    peak = float(np.exp(np.clip(alpha / beta - 1, -50, 50))) if beta > 0 else None
    peak = peak if peak is not None and peak <= furthest else None
    short = numbers([alpha, beta, np.nan if peak is None else peak], 3)
    return {**dict(zip(("alpha", "beta", "peak"), short)), "x": numbers(x), "y": numbers(value(found, x))}
