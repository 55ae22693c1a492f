"""Reward over-optimization: a gold reward that is measured but not trained on, as a function of √KL."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhf_jax.report import charts
from rlhf_jax.report.series import Group, rounded_list
from rlhf_jax.rewards.interface import BY_NAME, function_name, number_duplicates, split_spec

MIN_POINTS = 6
"""Minimum number of points for a fit."""


def gold_metric(group: Group) -> str | None:
    """rewards/NAME/mean of the group's first reward of weight 0; None if there is none, or its name is ambiguous."""
    config, metrics = group.runs[0].config, group.names()
    weights = config.get("reward_weights") or ()
    names = _reward_names(config)
    logged = [name.split("/")[1] for name in metrics if name.startswith("rewards/") and name.endswith("/mean")]
    other_names = [name for name in logged if name not in names]  # functions passed to rlhf_jax.run
    if len(other_names) == 1 and len(names) + 1 == len(weights):
        names += other_names
    if len(names) != len(weights):
        return None
    candidates = [f"rewards/{name}/mean" for name, weight in zip(names, weights) if weight == 0]
    return next((name for name in candidates if name in metrics), None)


def _reward_names(config: dict[str, Any]) -> list[str]:
    """The names of a config's rewards, in the order of its weights."""
    models = [path for path in (config.get("reward_model_path"), *(config.get("more_reward_models") or ())) if path]
    ensemble = config.get("reward_ensemble", "sum")
    if len(models) > 1 and ensemble != "sum":
        models = [f"ensemble_{ensemble}"]
    functions = [_logged_name(spec) for spec in config.get("reward_funcs") or ()]
    functions += ["server"] if config.get("reward_server") else []
    return [*number_duplicates(path.rstrip("/").split("/")[-1] for path in models), *number_duplicates(functions)]


def _logged_name(spec: str) -> str:
    """The name in metrics of an entry of `reward_funcs`."""
    if spec in BY_NAME:
        return function_name(BY_NAME[spec])
    return split_spec(spec)[1]


def fit(d: np.ndarray, r: np.ndarray) -> tuple[float, float, float] | None:
    """(R_0, alpha, beta) of R(d) = R_0 + d (alpha - beta log d), by least squares; R(0) = R_0.

    Args:
      d: [N] √KL, at least 0.
      r: [N] rewards.

    Returns:
      The coefficients, or None if there are too few points or d is constant.

    Source: Gao, Schulman and Hilton 2022 (arXiv 2210.10760), equation 2, of reinforcement learning.
    """
    valid = np.isfinite(d) & np.isfinite(r) & (d >= 0)
    d, r = d[valid], r[valid]
    if len(d) < MIN_POINTS or d.max() - d.min() < 1e-3:
        return None
    features = np.stack([np.ones_like(d), d, -_d_log_d(d)], axis=1)
    coefficients, _, rank, _ = np.linalg.lstsq(features, r, rcond=None)
    return tuple(coefficients.tolist()) if rank == 3 else None


def fitted_reward(coefficients: tuple[float, float, float], d: np.ndarray) -> np.ndarray:
    """R(d) of a fit: [N]."""
    start, alpha, beta = coefficients
    return start + alpha * d - beta * _d_log_d(d)


def _d_log_d(d: np.ndarray) -> np.ndarray:
    return d * np.log(np.where(d > 0, d, 1.0))


def gold_reward_chart(curves: charts.Curves) -> dict[str, Any] | None:
    """The data of the chart of gold rewards against √KL; None if no run measures one.

    Returns:
      {"train", "eval": as `charts.scatter`, "fits": [{"group", "alpha", "beta", "peak": √KL of the maximum or None,
      "x", "y": points of the fit}], "name": of the reward}
    """
    chart: dict[str, Any] = {"train": [], "eval": [], "fits": [], "name": None}
    for i, group in enumerate(curves.groups):
        if (metric := gold_metric(group)) is None:
            continue
        group_curves = charts.Curves([group])
        chart["name"] = chart["name"] or metric.split("/")[1]
        for kind, x, y in (("train", "objective/kl", metric), ("eval", "eval/kl", f"eval_{metric}")):
            points = charts.scatter(group_curves, x, y, square_root=True)
            chart[kind] += [{**point, "group": i} for point in points]
        kl, reward = group.curve("objective/kl"), group.curve(metric)
        d = np.sqrt(np.maximum(kl.mean, 0.0))
        if (coefficients := fit(d, reward.at(kl.steps))) is not None:
            chart["fits"].append({"group": i, **_fit_row(coefficients, float(np.nanmax(d)))})
    return chart if chart["name"] is not None else None


def _fit_row(coefficients: tuple[float, float, float], max_d: float) -> dict[str, Any]:
    _, alpha, beta = coefficients
    x = np.linspace(0.0, max_d, 60)
    # dR/dd = alpha - beta (log d + 1) = 0
    peak = float(np.exp(np.clip(alpha / beta - 1, -50, 50))) if beta > 0 else None
    peak = peak if peak is not None and peak <= max_d else None
    row = dict(zip(("alpha", "beta", "peak"), rounded_list([alpha, beta, np.nan if peak is None else peak], 3)))
    return {**row, "x": rounded_list(x), "y": rounded_list(fitted_reward(coefficients, x))}
