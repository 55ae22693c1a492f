"""Growth of the seconds and memory of a PPO update with batch, prompt, response, model and vocabulary sizes.

    python scripts/bench/growth.py --json OUT.json --picture docs/growth.png

One size at a time varies from a base: Pythia-14m, 16 rows, 256 + 64 tokens, float32, one epoch, micro-batches of 2.
Each point is a process of its own: our side of benchmark.py on synthetic posts with responses of full length. Seconds
are those of the update after the one that compiles; memory is the peak of the process. An exponent is the slope of the
least-squares line through the logarithms of the points.
"""

from __future__ import annotations

import argparse
import datetime
import math
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmark
import benchmark_work
import jax
from benchmark_case import Case, available_cores
from benchmark_report import load_warning, machine, peak_of

from rlhf_jax import UserError, data
from rlhf_jax.runtime.run_folder import write_atomically
from rlhf_jax.stages.work import Shape
from rlhf_jax.utils.strict_json import json_text

BASE = {"shape": "14m", "batch": 16, "query_length": 256, "response_length": 64}
MICRO = 2
AXES: dict[str, tuple[str, tuple]] = {
    "batch": ("batch", (8, 16, 32, 64, 128)),
    "prompt length": ("query_length", (64, 128, 256, 512, 1024)),
    "response length": ("response_length", (16, 64, 256, 512)),
    "model": ("shape", ("14m", "31m", "70m", "160m")),
    "vocabulary": ("shape", ("6x128x4@2048", "6x128x4@12576", "6x128x4@50304")),
}
"""Axis: the field of `Case` that varies, and its values."""


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of the least-squares line through (log x, log y)."""
    x, y = [math.log(v) for v in x], [math.log(v) for v in y]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)


def sizes_of(axis: str, values: Sequence[Any]) -> list[float]:
    """Sizes of the values of an axis: parameters of a model, rows of a vocabulary."""
    if axis == "vocabulary":
        return [float(value.rsplit("@", 1)[1]) for value in values]
    if axis == "model":
        models = [benchmark.model_of(value, data.load_tokenizer("synthetic")) for value in values]
        trees = [jax.eval_shape(lambda model=model: model.init(jax.random.key(0))) for model in models]
        return [float(sum(math.prod(x.shape) for x in jax.tree.leaves(tree))) for tree in trees]
    return [float(value) for value in values]


def point(case: Case, work: Path) -> dict[str, float]:
    """Seconds of an update, peak memory and FLOPs of one case."""
    work.mkdir(parents=True)
    model, lengths = benchmark.prepare(case, work, 1)
    result = benchmark.run_child("ours", case, work, 0, MICRO)
    if "out_of_memory" in result:
        raise UserError(f"{case.name}: out of memory")
    found = benchmark_work.case_work(case, Shape.of(model), lengths[0])
    flops = sum(found[phase].flops for phase in ("generate", "reward", "experience", "update"))
    return {"seconds": result["updates"][-1], "peak_mib": peak_of(result), "flops": float(flops)}


def measure(axes: dict[str, tuple[str, tuple]], base: dict[str, Any], cores: int, work: Path) -> list[dict[str, Any]]:
    """Points and exponents of every axis."""
    tables = []
    for axis, (field, values) in axes.items():
        rows = []
        for value in values:
            case = Case(**{**base, "epochs": 1, "updates": 2, "cores": cores, field: value})
            rows.append({"value": value, **point(case, work / f"{field}-{value}")})
            print(f"{axis} {value}: {rows[-1]['seconds']:.2f} s, {rows[-1]['peak_mib']:,.0f} MiB", flush=True)
        sizes = sizes_of(axis, values)
        for row, size in zip(rows, sizes):
            row["size"] = size
        slopes = {name: slope(sizes, [row[name] for row in rows]) for name in ("seconds", "flops", "peak_mib")}
        added = (rows[-1]["peak_mib"] - rows[0]["peak_mib"]) / (sizes[-1] - sizes[0])
        tables.append({"axis": axis, "points": rows, "exponents": slopes, "kib_each": added * 1024})
        print(
            f"{axis}: seconds grow as size^{slopes['seconds']:.2f}, the work as size^{slopes['flops']:.2f}, memory as "
            f"size^{slopes['peak_mib']:.2f}",
            flush=True,
        )
    return tables


def draw(tables: list[dict[str, Any]], path: Path) -> None:
    """Draws one log-log panel of seconds and memory per axis.

    Raises:
      UserError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--picture needs matplotlib: pip install matplotlib") from None
    # All panels share the scales, so that a size without effect gives a flat line.
    points = [row for table in tables for row in table["points"]]
    limits = {
        name: (min(row[name] for row in points) / 1.5, max(row[name] for row in points) * 1.5)
        for name in ("seconds", "peak_mib")
    }
    figure = Figure(figsize=(3.2 * len(tables), 3.2), layout="constrained")
    for axes, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables):
        sizes = [row["size"] for row in table["points"]]
        axes.loglog(sizes, [row["seconds"] for row in table["points"]], "o-", color="tab:blue")
        axes.set_xlabel(
            {"model": "parameters", "vocabulary": "rows of the vocabulary"}.get(table["axis"], table["axis"])
        )
        axes.set_ylabel("seconds an update", color="tab:blue")
        axes.set_ylim(limits["seconds"])
        axes.set_title(f"seconds ^ {table['exponents']['seconds']:.2f}\nmemory ^ {table['exponents']['peak_mib']:.2f}")
        right = axes.twinx()
        right.loglog(sizes, [row["peak_mib"] for row in table["points"]], "s--", color="tab:orange")
        right.set_ylabel("peak MiB", color="tab:orange")
        right.set_ylim(limits["peak_mib"])
        axes.set_xticks(sizes, [str(row["value"]).replace("6x128x4x", "") for row in table["points"]], rotation=45)
        axes.minorticks_off()
    figure.savefig(path, dpi=80)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 2: wrong options or a failed process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", default=",".join(AXES), help="comma-separated; default: all")
    parser.add_argument("--cores", type=int, default=available_cores(), help="cores per process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write a plot to this PNG")
    args = parser.parse_args(argv)
    try:
        names = args.axes.split(",")
        if unknown := [name for name in names if name not in AXES]:
            raise UserError(f"--axes {unknown[0]}: give some of {', '.join(AXES)}")
        jax.config.update("jax_platforms", "cpu")
        about = {"machine": machine(), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
        with tempfile.TemporaryDirectory() as folder:
            tables = measure({name: AXES[name] for name in names}, BASE, args.cores, Path(folder))
        if args.json:
            whole = {"command": shlex.join(sys.argv), **about, "base": BASE, "micro": MICRO, "tables": tables}
            write_atomically(str(args.json), json_text(whole, indent=2) + "\n")
        if args.picture:
            draw(tables, args.picture)
        print(load_warning(about["machine"]) or "", end="")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
