"""Plots training responses of several runs, one line a run and one colour an algorithm.

    python scripts/parity/curves.py --picture docs/quickstart_math.png GRPO=runs/m0/grpo GRPO=runs/m1/grpo PPO=...
    python scripts/parity/curves.py --panels kl --picture tldr.png PPO=runs/t/ppo RLOO=runs/t/rloo

`task`: accuracy of verifiable rewards, and entropy. `kl`: the reward model's score by update and against the KL. A run
is LABEL=FOLDER, the folder that has metrics.jsonl. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlhf_jax import UserError
from rlhf_jax.metrics import logger

COLOURS = ("#0b61a4", "#d1600a", "#2e7d32", "#7b1fa2", "#555555")
WINDOW = 5  # updates that a point is the mean of


class Panel(NamedTuple):
    """A part of the picture: the first of `names` that a run has, by update or against another metric."""

    title: str
    names: tuple[str, ...]
    against: str | None = None


ACCURACIES = tuple(f"rewards/{name}_reward/mean" for name in ("exact_match", "reasoning_gym", "instruction"))
# PPO has no entropy per token in the metrics of a rollout, but that of each optimizer step.
PANELS = {
    "task": (
        Panel("accuracy", ACCURACIES),
        Panel("entropy, nats a token", ("entropy", "policy/entropy_avg")),
    ),
    "kl": (
        Panel("score of the reward model", ("objective/scores",)),
        Panel("score against the KL of a response, nats", ("objective/scores",), "objective/kl"),
    ),
}


def smoothed(values: Sequence[float]) -> np.ndarray:
    """Means of WINDOW values that follow each other; fewer values than that are left as they are."""
    window = min(WINDOW, len(values))
    return np.convolve(values, np.ones(window) / window, mode="valid")


def curve(folder: Path, panel: Panel) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of every update of a run, from the first whole window on."""
    lines = logger.read_metrics(str(folder / "metrics.jsonl"))
    name = next((name for name in panel.names if lines and name in lines[0]), None)
    if name is None:
        raise UserError(f"{folder}/metrics.jsonl has none of {', '.join(panel.names)}")
    lines = [line for line in lines if name in line]
    values = smoothed([line[name] for line in lines])
    if panel.against is not None:
        return smoothed([line[panel.against] for line in lines]), values
    return np.arange(len(values)) + min(WINDOW, len(lines)), values


def draw(runs: Sequence[tuple[str, Path]], panels: Sequence[Panel], path: Path) -> None:
    """Plots the runs to a PNG."""
    try:
        from matplotlib.figure import Figure
        from PIL import Image  # matplotlib needs it too
    except ImportError:
        raise UserError("--picture needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(10, 4), layout="constrained")
    labels = list(dict.fromkeys(label for label, _ in runs))
    for axis, panel in zip(figure.subplots(1, len(panels)), panels):
        for label, colour in zip(labels, COLOURS):
            of_label = [curve(folder, panel) for other, folder in runs if other == label]
            for number, (x, y) in enumerate(of_label):
                axis.plot(
                    x,
                    y,
                    color=colour,
                    linewidth=1.3,
                    label=None if number else label if len(of_label) == 1 else f"{label}, {len(of_label)} runs",
                )
        axis.set(xlabel="KL" if panel.against else "update", title=panel.title)
        axis.grid(alpha=0.3)
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    with Image.open(path) as drawn:  # a palette cuts the file to a third
        drawn.convert("RGB").quantize(128).save(path, optimize=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 2: wrong options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER", help="runs, at most five labels")
    parser.add_argument("--panels", choices=PANELS, default="task", help="metrics to plot; default: task")
    parser.add_argument("--picture", type=Path, required=True, help="PNG of the plot")
    args = parser.parse_args(argv)
    try:
        runs = []
        for given in args.runs:
            label, equals, folder = given.partition("=")
            if not equals or not (Path(folder) / "metrics.jsonl").exists():
                raise UserError(f"{given!r} is not LABEL=FOLDER with a folder that has metrics.jsonl")
            runs.append((label, Path(folder)))
        draw(runs, PANELS[args.panels], args.picture)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
