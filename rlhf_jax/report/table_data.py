"""The data of the page's tables: status and latest metrics of runs, calibration, comparisons, configs."""

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

from rlhf_jax.config import STAGES, PolicyConfig, StageConfig
from rlhf_jax.evaluate import calibration_error
from rlhf_jax.metrics import statistics
from rlhf_jax.metrics.catalog import explain
from rlhf_jax.report import read_run
from rlhf_jax.report.read_run import Run
from rlhf_jax.report.series import Group, options_of, rounded

HEADLINES = {
    "policy": (
        ("eval/scores", "held-out score"),
        ("objective/scores", "score"),
        ("objective/kl", "KL"),
        ("val/response_length", "length"),
        ("completions/clipped_ratio", "without eos"),
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
    """The progress of a run.

    Returns:
      {"state": finished, running, or stopped or waiting, "updates", "total", "seconds": of all updates, "median":
      seconds of an update, "memory": MiB, "seen": time of the last line}, with None for unknown values.
    """
    _, wall_times = run.series.get("wall_time", ((), ()))
    seen = float(wall_times[-1]) if len(wall_times) else None
    seconds, last = run.series.get("time/step", ((), ()))[1], run.updates
    # In stages without generation step_time measures the dispatch of an update only.
    median = _median(run, "step_time" if "time/generate" in run.series else "time/step")
    if run.finished is not None:
        state = "finished"
    else:
        idle = (time.time() if now is None else now) - seen if seen is not None else math.inf
        state = "running" if idle < max(600.0, 20 * (median or 0.0)) else "stopped or waiting"
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
        "seconds": rounded(sum(x for x in seconds if math.isfinite(x))) if len(seconds) else None,
        "median": median,
        "memory": rounded(max(memory)) if memory else None,
        "seen": seen,
    }


def _median(run: Run, name: str) -> float | None:
    """Median of a timing over all updates except the first, which compiles."""
    values = np.asarray(run.series.get(name, ((), ()))[1][1:], np.float64)
    values = values[np.isfinite(values)]
    return rounded(float(np.median(values)), 4) if len(values) else None


def headlines(group: Group, tab: str) -> list[dict[str, Any]]:
    """The latest values of the main metrics.

    Returns:
      [{"metric", "label", "value", "first": means over the last and the first tenth of the updates (at most 20),
      "spread": half width of the 95 % t interval over seeds, or the standard error of a single run's held-out score}]
    """
    rows = []
    for name, label in HEADLINES[tab]:
        ends = [ends for run in group.runs if (ends := _first_and_final(run, name)) is not None]
        if not ends:
            continue
        first, last = zip(*ends, strict=True)
        spread = statistics.t_interval(last)[1] if len(last) > 1 else None
        if spread is None and name == "eval/scores" and "eval/scores_se" in group.runs[0].series:
            spread = float(group.runs[0].series["eval/scores_se"][1][-1])
        rows.append(
            {
                "metric": name,
                "label": label,
                "value": rounded(float(np.mean(last)), 4),
                "first": rounded(float(np.mean(first)), 4),
                "spread": None if spread is None else rounded(spread, 2),
            }
        )
    return rows


def _first_and_final(run: Run, name: str) -> tuple[float, float] | None:
    """Means of a metric over the first and the last tenth of the updates with finite values (at most 20), of an
    evaluation its first and last value; None without a value."""
    values = np.asarray(run.series.get(name, ((), ()))[1], np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    count = 1 if name.startswith("eval/") else min(max(len(values) // 10, 1), 20)
    return float(values[:count].mean()), float(values[-count:].mean())


def final_value(run: Run, name: str) -> float | None:
    """Mean of a metric over the last tenth of the updates (at most 20), of an evaluation the last value."""
    ends = _first_and_final(run, name)
    return None if ends is None else ends[1]


def calibration(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """[{"run", "step", "set", "pairs", "error", "bins": [[confidence, accuracy, pairs]]}] from the runs' calibration/
    folders."""
    rows = []
    for i, run in enumerate(runs):
        for step, path in run.files("calibration", r"(\d+)\.jsonl"):
            sets: dict[str, list[list[float]]] = {}
            for row in run.rows(path, 1000):
                point = [read_run.parse_number(row.get(name)) for name in ("confidence", "accuracy", "pairs")]
                if None not in point and all(map(math.isfinite, point)) and point[2] > 0:
                    sets.setdefault(str(row.get("set", ""))[:100], []).append(point)
            for name, points in sets.items():
                pairs = sum(point[2] for point in points)
                error = calibration_error([dict(zip(("confidence", "accuracy", "pairs"), point)) for point in points])
                rows.append(
                    {
                        "run": i,
                        "step": step,
                        "set": name,
                        "pairs": rounded(pairs, 9),
                        "error": rounded(error, 3),
                        "bins": [[rounded(x, 4) for x in point] for point in points],
                    }
                )
    return rows


def comparisons(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """[{"name", "folder", "rows"}] of each pipeline: the distinct rows of comparison.json in the folders of its stages,
    with their numbers alone."""
    pipelines: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        data = read_run.read_json_object(os.path.join(run.path, "comparison.json"))
        if data is not None and isinstance(data.get("rows"), list):
            rows = [row for row in data["rows"] if isinstance(row, dict) and isinstance(row.get("name"), str)]
            rows = [
                {k: v for k, v in _flat_rewards(row).items() if k == "name" or read_run.parse_number(v) is not None}
                for row in rows
            ]
            distinct = pipelines.setdefault(os.path.dirname(run.path.rstrip("/")), [])
            distinct += [row for row in rows if row not in distinct]
    return [{"name": os.path.basename(folder), "folder": folder, "rows": rows} for folder, rows in pipelines.items()]


def seed_comparisons(groups: Sequence[Group], pipelines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`comparisons` with one entry for the pipelines of a group's runs, in place of the first of them.

    Returns:
      [{"name", "rows", "count": number of pipelines}]; where it is above 1, a row has means over the pipelines that
      have the policy, and `KEY_se` is the half width of the 95 % t interval over them.
    """
    entries = {pipeline["folder"]: {**pipeline, "count": 1} for pipeline in pipelines}
    for group in groups:
        folders = list(dict.fromkeys(os.path.dirname(run.path.rstrip("/")) for run in group.runs))
        folders = [folder for folder in folders if folder in entries and entries[folder]["count"] == 1]
        if len(folders) < 2:
            continue
        members = [entries[folder]["rows"] for folder in folders]
        names = dict.fromkeys(row["name"] for rows in members for row in rows)
        rows = [_mean_row(name, [row for rows in members for row in rows if row["name"] == name]) for name in names]
        label = ", ".join(entries[folder]["name"] for folder in folders)
        entries[folders[0]] = {"name": label, "rows": rows, "count": len(folders)}
        for folder in folders[1:]:
            del entries[folder]
    return list(entries.values())


def _mean_row(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of a policy's numbers, with 95 % intervals as `_se`."""
    result: dict[str, Any] = {"name": name}
    for key in dict.fromkeys(key for row in rows for key in row if key != "name" and not key.endswith("_se")):
        values = [value for row in rows if (value := read_run.parse_number(row.get(key))) is not None]
        result[key], half_width = statistics.t_interval(values)
        if math.isfinite(half_width):
            result[f"{key}_se"] = half_width
    return result


def _flat_rewards(row: dict[str, Any]) -> dict[str, Any]:
    """A row of comparison.json with "rewards/NAME" and "rewards/NAME_se" in place of "rewards"."""
    rewards = row.get("rewards")
    for name, value in rewards.items() if isinstance(rewards, dict) else ():
        if isinstance(value, dict):
            row = row | {f"rewards/{name}": value.get("mean"), f"rewards/{name}_se": value.get("se")}
    return row


# --- configs


def options(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """All options of the groups' configs, in the order of the dataclass.

    Returns:
      [{"name", "about", "values": JSON of each group, "recipes": JSON of each config file or None, "defaults": of the
      dataclass, "changed": whether a value differs from the recipe (or else the default), "unusual": whether one
      differs from the default, "differs": whether groups differ}]
    """
    configs, recipes, defaults, about = [], [], [], {}
    for group in groups:
        run = group.runs[0]
        config_type = STAGES.get(run.stage, PolicyConfig)
        configs.append(options_of(run))
        recipes.append(options_of(dataclasses.replace(run, config=run.recipe["options"])) if run.recipe else None)
        defaults.append(
            {f.name: f.default for f in dataclasses.fields(config_type)} | {"run_dir": run.config.get("run_dir")}
        )
        about |= field_docs(config_type)
    rows = []
    for name in dict.fromkeys([*about, *(name for values in configs for name in values)]):
        values = [_json(values, name) for values in configs]
        recipe = [None if values is None else _json(values, name) for values in recipes]
        default = [_json(values, name) for values in defaults]
        if all(value is None for value in values):
            continue
        if name == "seed":
            values = [", ".join(str(run.config.get("seed")) for run in group.runs) for group in groups]
        triples = list(zip(values, recipe, default, strict=True))
        rows.append(
            {
                "name": name,
                "about": about.get(name, ""),
                "values": values,
                "recipes": recipe,
                "defaults": default,
                "changed": [name != "run_dir" and v not in (None, d if r is None else r) for v, r, d in triples],
                "unusual": any(name != "run_dir" and v not in (None, d) for v, _, d in triples),
                "differs": name != "run_dir" and len({v for v in values if v is not None}) > 1,
            }
        )
    return rows


def environments(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Versions, devices and settings of the groups' processes, without those that are empty.

    Returns:
      [{"name", "values": [distinct values of its processes] of each group, "differs": whether there are several}]
    """
    entries = [[entry for run in group.runs for entry in run.environments] for group in groups]
    rows = []
    for name in dict.fromkeys(name for group in entries for entry in group for name in entry):
        values = [list(dict.fromkeys(entry.get(name, "") for entry in group)) for group in entries]
        distinct = {value for group in values for value in group}
        if distinct != {""}:
            rows.append({"name": name, "values": values, "differs": len(distinct) > 1})
    return rows


def _json(values: dict[str, Any], name: str) -> str | None:
    return json.dumps(values[name], ensure_ascii=False, default=str) if name in values else None


def field_docs(config_type: type[StageConfig]) -> dict[str, str]:
    """The docstring of each field of a config dataclass, by name, in order."""
    result: dict[str, str] = {}
    for base in reversed(config_type.__mro__[:-1]):
        body = ast.parse(inspect.getsource(base)).body[0].body
        for field, doc in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                result[field.target.id] = " ".join(str(doc.value.value).split())
    return result


def tooltips(names: Sequence[str]) -> dict[str, list[str]]:
    """{metric: [meaning, healthy, what to do]} of the metrics in the catalog."""
    explanations = {name: explain(name) for name in names}
    return {name: [e.meaning, e.healthy, e.action] for name, e in explanations.items() if e is not None}
