"""Reading of run folders. It tolerates incomplete files: a run may be writing to them, or was killed."""

from __future__ import annotations

import array
import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_jax import storage
from rlhf_jax.config import STAGES
from rlhf_jax.errors import UserError
from rlhf_jax.utils.text import parse_json, short_repr

MAX_ROWS = 64
"""Maximum number of rows read from a file of samples."""
# Of a run in a bucket: everything but its models, checkpoints and event files. A * also stands for slashes.
_COPIED = ("*.json", "*.jsonl")
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
Series = tuple[array.array, array.array]
"""(steps, values) of a metric; values may be NaN."""


@dataclasses.dataclass
class Run:
    """The folder of a stage.

    Attributes:
      path: of the folder.
      name: unique among the runs of the page.
      stage: sft, reward, ppo, rloo or grpo.
      config: options by name.
      recipe: {"config": argument of --config, "options": its values}, or None.
      series: of each metric and timing, by name.
      finished: content of finished.json, or None.
      environments: versions, devices and settings of its processes, in order (see `runtime.environment`).
      notes: problems found while reading.
    """

    path: str
    name: str
    stage: str
    config: dict[str, Any]
    recipe: dict[str, Any] | None
    series: dict[str, Series]
    finished: dict[str, Any] | None
    environments: list[dict[str, str]]
    notes: list[str]

    @property
    def updates(self) -> int:
        """The last update with metrics."""
        return max((int(steps[-1]) for steps, _ in self.series.values() if len(steps)), default=0)

    def files(self, folder: str, pattern: str) -> list[tuple[int, str]]:
        """(step, path) of the files in a folder whose names match a pattern with the step as its group, sorted."""
        parent = os.path.join(self.path, folder)
        names = os.listdir(parent) if os.path.isdir(parent) else []
        matches = [(re.fullmatch(pattern, name), os.path.join(parent, name)) for name in names]
        return sorted((int(match[1]), path) for match, path in matches if match)

    def rows(self, path: str, max_rows: int = MAX_ROWS) -> list[dict[str, Any]]:
        """The first objects of a file of JSON lines. Adds a note about lines that cannot be read."""
        rows, bad = [], 0
        for row in read_json_lines(path):
            if row is None:
                bad += 1
            elif len(rows) < max_rows:
                rows.append(row)
            else:
                break
        if bad:
            self.notes.append(f"{os.path.relpath(path, self.path)}: {bad} lines are no JSON objects, and left out")
        return rows


def read_json_lines(path: str) -> Iterator[dict[str, Any] | None]:
    """The objects of a file of JSON lines; None for a line that is no object. An incomplete last line, which the run
    may be writing, is skipped. A file that cannot be opened is empty."""
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                if line.endswith("\n"):
                    try:
                        row = parse_json(line)
                    except json.JSONDecodeError:
                        row = None
                    yield row if isinstance(row, dict) else None
    except OSError:
        return


def parse_number(value: Any) -> float | None:
    """A number from a file of metrics, where NaN and infinities are strings; None for any other value."""
    if isinstance(value, str):
        return _NONFINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 2**1000 else None


def read_json_object(path: str) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            value = parse_json(file.read())
    except (OSError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def stage_of(folder: str) -> str | None:
    """The stage of a run's folder, which may be an algorithm of a config file; None for another folder."""
    stage = (read_json_object(os.path.join(folder, "config.json")) or {}).get("stage")
    return stage if isinstance(stage, str) and stage != "pipeline" else None


def find_run_folders(run_dirs: Sequence[str]) -> list[str]:
    """The folders of stages: the arguments, or folders up to two levels below them.

    Raises:
      UserError: a folder does not exist or holds no run.
    """
    run_folders = []
    for path in run_dirs:
        path = storage.absolute(storage.local_copy(path, _COPIED))
        if not os.path.isdir(path):
            raise UserError(f"{path}: there is no such folder. Pass the --run_dir of a run")
        if not (stages := stage_folders(path)):
            raise UserError(
                f"{path} holds no run: neither it nor a subfolder has a run's config.json. Pass the --run_dir of a run"
            )
        run_folders += stages
    return list(dict.fromkeys(run_folders))


def stage_folders(path: str) -> list[str]:
    """The folders of stages in a local folder: itself, or those up to two levels below it."""
    if stage_of(path):
        return [path]
    return [stage for folder in (path, *_subfolders(path)) for stage in _subfolders_with_stages(folder)]


def _subfolders(path: str) -> list[str]:
    return sorted(entry.path for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))


def _subfolders_with_stages(path: str) -> Iterator[str]:
    """The subfolders that hold a stage, in the order of stages."""
    order = {stage: number for number, stage in enumerate(STAGES)}
    stages = {sub: stage for sub in _subfolders(path) if (stage := stage_of(sub))}
    yield from sorted(stages, key=lambda sub: (order.get(stages[sub], len(order)), sub))


def short_names(paths: Sequence[str]) -> list[str]:
    """The shortest unique ends of paths, of at least two components if there are several paths."""
    parts = [path.strip(os.sep).split(os.sep) for path in paths]
    for count in range(1 if len(paths) == 1 else 2, max(map(len, parts), default=1) + 1):
        ends = ["/".join(part[-count:]) for part in parts]
        if len(set(ends)) == len(ends):
            return ends
    return list(paths)


def read(path: str, name: str) -> Run:
    """Reads the folder of a stage, except its samples."""
    config = read_json_object(os.path.join(path, "config.json")) or {}
    stage = config.pop("stage")
    recipe = read_json_object(os.path.join(path, "recipe.json"))
    if recipe is not None and not (isinstance(recipe.get("config"), str) and isinstance(recipe.get("options"), dict)):
        recipe = None
    finished = read_json_object(os.path.join(path, "finished.json"))
    run = Run(path, name, stage, config, recipe, {}, finished, _environments(path), [])
    for file in ("metrics.jsonl", "timings.jsonl"):
        _read_series(run, file)
    if not run.series:
        run.notes.append("metrics.jsonl has no update yet")
    return run


def _environments(path: str) -> list[dict[str, str]]:
    environments = (read_json_object(os.path.join(path, "inputs.json")) or {}).get("environments")
    entries = [entry for entry in environments if isinstance(entry, dict)] if isinstance(environments, list) else []
    return [{name: str(value) for name, value in entry.items()} for entry in entries]


def _read_series(run: Run, file: str) -> None:
    """Adds the columns of a file of JSON lines with a step. Lines of the same step (as of an evaluation) are merged."""
    bad, not_numbers = 0, set()
    for row in read_json_lines(os.path.join(run.path, file)):
        step = None if row is None else row.pop("step", None)
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53:
            bad += 1
            continue
        for name, value in row.items():
            if (value := parse_number(value)) is None:
                not_numbers.add(name)
                continue
            steps, values = run.series.setdefault(name, (array.array("d"), array.array("d")))
            if not steps or steps[-1] < step:
                steps.append(step)
                values.append(value)
            elif steps[-1] == step:
                values[-1] = value
            else:
                bad += 1
    if bad:
        run.notes.append(f"{file}: {bad} values or lines are out of order or no JSON objects, and left out")
    if not_numbers:
        names = ", ".join(short_repr(name, 60) for name in sorted(not_numbers)[:5])
        run.notes.append(f"{file}: {names} {'are' if len(not_numbers) > 1 else 'is'} no number, and left out")


def alarm_periods(run: Run) -> list[dict[str, Any]]:
    """[{"name", "first", "last"}]: the updates at which each alarm was raised and cleared (None: still raised)."""
    periods = []
    for name, (steps, values) in run.series.items():
        if not name.startswith("alarm/"):
            continue
        first = None
        for step, value in zip(steps, values, strict=True):
            if value and first is None:
                first = int(step)
            elif not value and first is not None:
                periods.append({"name": name, "first": first, "last": int(step)})
                first = None
        if first is not None:
            periods.append({"name": name, "first": first, "last": None})
    return sorted(periods, key=lambda period: period["first"])


def nonfinite_events(run: Run, limit: int = 20) -> tuple[list[dict[str, Any]], dict[str, tuple[int, int]]]:
    """Non-finite updates and metrics.

    Returns:
      ([{"step", "causes", "applied", "rows"}] of the first `limit` non-finite updates, {metric: (number of updates with
      a non-finite value, the first of them)})
    """
    causes: dict[int, list[str]] = {}
    for name, (steps, values) in run.series.items():
        cause = name.removeprefix("nonfinite/")
        if cause != name and cause not in ("updates", "in_a_row", "steps_applied"):
            for step, value in zip(steps, values, strict=True):
                if value:
                    causes.setdefault(int(step), []).append(cause)
    applied = dict(zip(*run.series.get("nonfinite/steps_applied", ((), ())), strict=True))
    files = dict(run.files("nonfinite", r"(\d+)\.jsonl"))
    events = [
        {
            "step": step,
            "causes": causes.get(step, []),
            "applied": int(applied.get(step, 0)),
            "rows": run.rows(files[step], 4) if step in files else [],
        }
        for step in sorted({*causes, *files})[:limit]
    ]
    metrics = {}
    for name, (steps, values) in run.series.items():
        nonfinite_steps = [int(step) for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
        if nonfinite_steps:
            metrics[name] = (len(nonfinite_steps), nonfinite_steps[0])
    return events, metrics
