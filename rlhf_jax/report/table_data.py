"""What a page says in words: how far each run is, its last numbers, its config beside recipe and defaults."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax.config import STAGES, StageConfig
from rlhf_jax.evaluate import calibration_error
from rlhf_jax.metrics.catalog import explain
from rlhf_jax.report import read_run
from rlhf_jax.report.read_run import Run
from rlhf_jax.report.series import Group, number, options_of

HEADLINES = {
    "policy": (
        ("eval/scores", "held-out score"),
        ("objective/scores", "score"),
        ("objective/kl", "KL"),
        ("val/response_length", "length"),
        ("completions/clipped_ratio", "not ended"),
        ("policy/entropy_avg", "entropy"),
        ("val/explained_variance", "expl. variance"),
    ),
    "reward": (
        ("eval/accuracy", "held-out accuracy"),
        ("accuracy", "accuracy"),
        ("loss", "loss"),
        ("margin", "margin"),
    ),
    "sft": (("eval/loss", "held-out loss"), ("loss", "loss"), ("eval/perplexity", "perplexity")),
}


def status(run: Run, now: float | None = None) -> dict[str, Any]:
    """{"state": finished, running or stopped, "updates", "total", "seconds": of all updates, "median": of an update,
    "memory": MiB, "seen": when the last line was written}; None where it is not known."""
    _, walls = run.series.get("wall_time", ((), ()))
    seen = float(walls[-1]) if len(walls) else None
    seconds, last = run.series.get("time/step", ((), ()))[1], run.updates
    # The other stages' updates are only started in their step_time.
    usual = _median(run, "step_time" if "time/generate" in run.series else "time/step")
    if run.finished is not None:
        state = "finished"
    else:
        quiet = (time.time() if now is None else now) - seen if seen is not None else math.inf
        state = "running" if quiet < max(600.0, 20 * (usual or 0.0)) else "stopped or waiting"
    episodes, total = run.config.get("total_episodes"), run.config.get("max_steps")
    batch = run.config.get("batch_size")
    if isinstance(episodes, int) and isinstance(batch, int) and batch > 0:
        total = episodes // batch
    if run.finished is not None and not isinstance(total, int):
        total = run.finished.get("step")
    memory = [
        max(run.series[n][1], default=0.0) for n in ("memory/peak_rss_mib", "memory/peak_device_mib") if n in run.series
    ]
    return {
        "state": state,
        "updates": last,
        "total": total if isinstance(total, int) and total >= last else None,
        "seconds": number(sum(x for x in seconds if math.isfinite(x))) if len(seconds) else None,
        "median": usual,
        "memory": number(max(memory)) if memory else None,
        "seen": seen,
    }


def _median(run: Run, name: str) -> float | None:
    """Median of a timing over the updates but the first, which compiles."""
    values = np.asarray(run.series.get(name, ((), ()))[1][1:], np.float64)
    values = values[np.isfinite(values)]
    return number(float(np.median(values)), 4) if len(values) else None


def headlines(group: Group, tab: str) -> list[dict[str, Any]]:
    """[{"metric", "label", "value", "spread", "first"}]: means of the last (first) tenth, at least 1 and at most 20."""
    found = []
    for name, label in HEADLINES[tab]:
        parts = [np.asarray(run.series[name][1], np.float64) for run in group.runs if name in run.series]
        parts = [part[np.isfinite(part)] for part in parts]
        parts = [part for part in parts if len(part)]
        if not parts:
            continue
        n = [1 if name.startswith("eval/") else min(max(len(part) // 10, 1), 20) for part in parts]
        last = [float(part[-k:].mean()) for part, k in zip(parts, n, strict=True)]
        first = [float(part[:k].mean()) for part, k in zip(parts, n, strict=True)]
        spread = float(np.std(last, ddof=1)) if len(last) > 1 else None
        if spread is None and name == "eval/scores" and "eval/scores_se" in group.runs[0].series:
            spread = float(group.runs[0].series["eval/scores_se"][1][-1])
        found.append(
            {
                "metric": name,
                "label": label,
                "value": number(float(np.mean(last)), 4),
                "first": number(float(np.mean(first)), 4),
                "spread": None if spread is None else number(spread, 2),
            }
        )
    return found


def calibration(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """[{"run", "step", "set", "pairs", "error", "bins": [[confidence, accuracy, pairs]]}] of calibration/."""
    found = []
    for i, run in enumerate(runs):
        for step, path in run.files("calibration", r"(\d+)\.jsonl"):
            sets: dict[str, list[list[float]]] = {}
            for row in run.rows(path, 1000):
                point = [read_run.number(row.get(name)) for name in ("confidence", "accuracy", "pairs")]
                if None not in point and all(map(math.isfinite, point)) and point[2] > 0:
                    sets.setdefault(str(row.get("set", ""))[:100], []).append(point)
            for name, points in sets.items():
                pairs = sum(point[2] for point in points)
                error = calibration_error([dict(zip(("confidence", "accuracy", "pairs"), point)) for point in points])
                found.append(
                    {
                        "run": i,
                        "step": step,
                        "set": name,
                        "pairs": number(pairs, 9),
                        "error": number(error, 3),
                        "bins": [[number(x, 4) for x in point] for point in points],
                    }
                )
    return found


def comparisons(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """[{"name", "rows"}], one a pipeline, of the comparison.json that its policies end with; equal rows stand once."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        data = read_run.object_in(os.path.join(run.path, "comparison.json"))
        if data is not None and isinstance(data.get("rows"), list):
            rows = [row for row in data["rows"] if isinstance(row, dict) and isinstance(row.get("name"), str)]
            rows = [{k: v for k, v in row.items() if k == "name" or read_run.number(v) is not None} for row in rows]
            there = found.setdefault(os.path.dirname(run.path.rstrip("/")), [])
            there += [row for row in rows if row not in there]
    return [{"name": os.path.basename(folder), "rows": rows} for folder, rows in found.items()]


# --- configs


def options(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Every option of the groups' configs, in the order of the dataclass.

    Returns:
      [{"name", "about", "values": JSON text a group, "recipes": the same of the config file or None, "defaults": of the
      dataclass, "changed": a value is not the recipe's or the default, "differs": groups have different values}]
    """
    shown, recipes, defaults, about = [], [], [], {}
    for group in groups:
        run = group.runs[0]
        config_type = STAGES[run.stage]
        shown.append(options_of(run))
        inside = dataclasses.replace(run, config=run.recipe["options"]) if run.recipe else None
        recipes.append(options_of(inside) if inside else None)
        defaults.append(
            {f.name: f.default for f in dataclasses.fields(config_type)} | {"run_dir": run.config.get("run_dir")}
        )
        about |= docs(config_type)
    rows = []
    for name in dict.fromkeys([*about, *(name for values in shown for name in values)]):
        values = [_json(values, name) for values in shown]
        recipe = [None if values is None else _json(values, name) for values in recipes]
        default = [_json(values, name) for values in defaults]
        if all(value is None for value in values):
            continue
        seeds = [[str(run.config.get("seed")) for run in group.runs] for group in groups]
        if name == "seed":
            values = [", ".join(s) for s in seeds]
        pairs = list(zip(values, recipe, default, strict=True))
        rows.append(
            {
                "name": name,
                "about": about.get(name, ""),
                "values": values,
                "recipes": recipe,
                "defaults": default,
                "changed": [name != "run_dir" and v not in (None, d if r is None else r) for v, r, d in pairs],
                "unusual": any(name != "run_dir" and v not in (None, d) for v, _, d in pairs),
                "differs": name != "run_dir" and len({v for v in values if v is not None}) > 1,
            }
        )
    return rows


def _json(values: dict[str, Any], name: str) -> str | None:
    return json.dumps(values[name], ensure_ascii=False, default=str) if name in values else None


def docs(config_type: type[StageConfig]) -> dict[str, str]:
    """The words under each field of a config dataclass, by name, in its order."""
    found: dict[str, str] = {}
    for part in reversed(config_type.__mro__[:-1]):
        body = ast.parse(inspect.getsource(part)).body[0].body
        for field, words in zip(body, body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(words, ast.Expr)
                and isinstance(words.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(words.value.value).split())
    return found


def tooltips(names: Sequence[str]) -> dict[str, list[str]]:
    """{metric: [meaning, healthy, what to do]} of those that are explained."""
    found = {name: explain(name) for name in names}
    return {name: [e.meaning, e.healthy, e.action] for name, e in found.items() if e is not None}
