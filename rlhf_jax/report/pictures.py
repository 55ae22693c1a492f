"""PNG pictures of the main curves, by matplotlib, an optional dependency."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np

from rlhf_jax.errors import UserError
from rlhf_jax.report import charts, overoptimization, table_data
from rlhf_jax.report.series import Group, downsample

MISSING_MATPLOTLIB = "matplotlib is not installed (pip install '.[report]', or give --no_png)"
PANELS = {
    "policy": (
        ("score", ("objective/scores", "eval/scores")),
        ("KL to the reference, nats", ("objective/kl",)),
        ("entropy of a token, nats", ("policy/entropy_avg",)),
        ("response length, tokens", ("val/response_length",)),
        ("responses that end with eos", ("eos_rate",)),
        ("√KL against score", ()),
    ),
    "reward": (("loss", ("loss", "eval/loss")), ("accuracy", ("accuracy", "eval/accuracy")), ("margin", ("margin",))),
    "sft": (("loss", ("loss", "eval/loss")), ("learning rate", ("learning_rate",)), ("gradient norm", ("grad_norm",))),
}


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(groups: Sequence[Group], stem: str) -> list[str]:
    """Writes STEM-policy.png, STEM-reward.png and STEM-sft.png of the stages with runs. Returns their paths.

    Raises:
      UserError: matplotlib is missing, or a file cannot be written.
    """
    if not available():
        raise UserError(MISSING_MATPLOTLIB)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paths = []
    for tab in charts.TABS:
        curves = charts.Curves([group for group in groups if charts.tab_of(group.stage) == tab])
        if not curves.groups:
            continue
        panels = PANELS[tab]
        figure = Figure(figsize=(12, 3.2 * (len(panels) // 3)), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (title, metrics) in zip(
            figure.subplots(len(panels) // 3, 3, squeeze=False).flat, panels, strict=True
        ):
            _panel(axes, curves, metrics, tab)
            axes.set_title(title, fontsize=10)
            axes.grid(alpha=0.3)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        if labels:
            figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3), fontsize=8)
        paths.append(f"{stem}-{tab}.png")
        try:
            figure.savefig(paths[-1])
        except OSError as error:
            raise UserError(f"{paths[-1]} cannot be written ({error.strerror}). Set another --out") from error
    return paths


def _label(group: Group, tab: str) -> str:
    """A group's name in the legend; of several seeds with its first headline metric and its 95 % interval."""
    label = group.label.replace("$", r"\$")
    items = table_data.headlines(group, tab) if len(group.runs) > 1 else []
    if not items or items[0]["value"] is None or items[0]["spread"] is None:
        return label
    return f"{label}: {items[0]['label']} {items[0]['value']:.4g} ± {items[0]['spread']:.2g} (95 %)"


def _panel(axes, curves: charts.Curves, metrics: Sequence[str], tab: str) -> None:
    """Draws metrics over updates, the first solid and others dashed; without metrics the scores against √KL, with the
    gold reward and its fits."""
    if not metrics:
        _score_panel(axes, curves)
        return
    axes.set_xlabel("update")
    for i, group in enumerate(curves.groups):
        color = f"C{i % 10}"
        for index, name in enumerate(metrics):
            curve = downsample(curves.curve(group, name))
            if not np.isfinite(curve.mean).any():
                continue
            label = f"{group.label}, {name}".replace("$", r"\$") if index else _label(group, tab)
            axes.plot(curve.steps, curve.mean, color=color, lw=1.3, ls="--" if index else "-", label=label)
            if curve.count > 1:
                axes.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.2, lw=0)


def _score_panel(axes, curves: charts.Curves) -> None:
    axes.set_xlabel("√KL")
    for points in charts.scatter(curves, "objective/kl", "objective/scores", square_root=True):
        axes.scatter(points["x"], points["y"], s=8, color=f"C{points['group'] % 10}", alpha=0.6)
    if gold := overoptimization.gold_reward_chart(curves):
        for points in gold["train"]:
            axes.scatter(points["x"], points["y"], s=12, marker="x", color=f"C{points['group'] % 10}", alpha=0.4)
        for fit in gold["fits"]:
            axes.plot(fit["x"], fit["y"], color=f"C{fit['group'] % 10}", lw=1.8)
        axes.set_ylabel(f"score (dots), {gold['name']} (crosses, fits)".replace("$", r"\$"), fontsize=8)
