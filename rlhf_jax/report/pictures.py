"""PNGs of the curves that a paper or a message wants, by matplotlib, which only this file needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np

from rlhf_jax.errors import UserError
from rlhf_jax.report import charts, overoptimization
from rlhf_jax.report.series import Group, thinned

NEEDED = "matplotlib is not installed (pip install '.[report]', or give --no_png)"
PANELS = {
    "policy": (
        ("score", ("objective/scores", "eval/scores")),
        ("KL to the reference, nats", ("objective/kl",)),
        ("entropy of a token, nats", ("policy/entropy_avg",)),
        ("response length, tokens", ("val/response_length",)),
        ("responses that end", ("eos_rate",)),
        ("√KL against score", ()),
    ),
    "reward": (("loss", ("loss", "eval/loss")), ("accuracy", ("accuracy", "eval/accuracy")), ("margin", ("margin",))),
    "sft": (("loss", ("loss", "eval/loss")), ("learning rate", ("learning_rate",)), ("gradient norm", ("grad_norm",))),
}


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(groups: Sequence[Group], stem: str) -> list[str]:
    """Writes STEM-policy.png, STEM-reward.png and STEM-sft.png of the stages that are there; their paths.

    Raises:
      UserError: without matplotlib, or where they cannot be written.
    """
    if not available():
        raise UserError(NEEDED)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paths = []
    for tab, stages in charts.PAGES.items():
        curves = charts.Curves([group for group in groups if group.stage in stages])
        if not curves.groups:
            continue
        panels = PANELS[tab]
        figure = Figure(figsize=(12, 3.2 * (len(panels) // 3)), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (title, metrics) in zip(
            figure.subplots(len(panels) // 3, 3, squeeze=False).flat, panels, strict=True
        ):
            _panel(axes, curves, metrics)
            axes.set_title(title, fontsize=10)
            axes.grid(alpha=0.3)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        if labels:
            figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3), fontsize=8)
        paths.append(f"{stem}-{tab}.png")
        try:
            figure.savefig(paths[-1])
        except OSError as error:
            raise UserError(f"{paths[-1]} cannot be written ({error.strerror}). Give another --out") from error
    return paths


def _panel(axes, curves: charts.Curves, metrics: Sequence[str]) -> None:
    """Curves of metrics, those after the first dashed; of no metric the frontier, and the fits of a reward that is
    only measured."""
    for i, group in enumerate(curves.groups):
        colour = f"C{i % 10}"
        for place, name in enumerate(metrics):
            curve = thinned(curves.curve(group, name))
            if not np.isfinite(curve.mean).any():
                continue
            label = group.label.replace("$", r"\$") + (f", {name}" if place else "")
            axes.plot(curve.steps, curve.mean, color=colour, lw=1.3, ls="--" if place else "-", label=label)
            if curve.count > 1:
                axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.2, lw=0)
    if not metrics:
        for found in charts.against(curves, "objective/kl", "objective/scores", root=True):
            axes.scatter(found["x"], found["y"], s=8, color=f"C{found['group'] % 10}", alpha=0.6)
        if gold := overoptimization.frontier(curves):
            for found in gold["train"]:
                axes.scatter(found["x"], found["y"], s=12, marker="x", color=f"C{found['group'] % 10}", alpha=0.4)
            for found in gold["fits"]:
                axes.plot(found["x"], found["y"], color=f"C{found['group'] % 10}", lw=1.8)
            axes.set_ylabel(f"score (dots), {gold['name']} (crosses, fits)".replace("$", r"\$"), fontsize=8)
        axes.set_xlabel("√KL")
    else:
        axes.set_xlabel("update")
