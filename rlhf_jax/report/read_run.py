"""What a run's folder has, read as it is found: a run may be writing to it, or have been killed while it did."""

from __future__ import annotations

import array
import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_jax.config import STAGES
from rlhf_jax.errors import UserError
from rlhf_jax.utils.text import parse_json, short_repr

MOST_ROWS = 64
"""Rows of a file of samples that are read; its first ones."""
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
Series = tuple[array.array, array.array]
"""Steps, and values of a metric: NaN where it was one."""


@dataclasses.dataclass
class Run:
    """A stage's folder.

    Attributes:
      path: of the folder.
      name: what distinguishes it from the others of the page.
      stage: sft, reward, ppo or rloo.
      config: options by name.
      recipe: {"config": what --config named, "options": its values}, or None.
      series: of each metric and timing by name.
      finished: what finished.json says, or None.
      notes: what could not be read.
    """

    path: str
    name: str
    stage: str
    config: dict[str, Any]
    recipe: dict[str, Any] | None
    series: dict[str, Series]
    finished: dict[str, Any] | None
    notes: list[str]

    @property
    def updates(self) -> int:
        """The last update of which there are metrics."""
        return max((int(steps[-1]) for steps, _ in self.series.values() if len(steps)), default=0)

    def files(self, folder: str, pattern: str) -> list[tuple[int, str]]:
        """(step, path) of the files of a folder whose names are like a pattern with the step as its group, in order."""
        where = os.path.join(self.path, folder)
        names = os.listdir(where) if os.path.isdir(where) else []
        found = [(int(match[1]), os.path.join(where, name)) for name in names if (match := re.fullmatch(pattern, name))]
        return sorted(found)

    def rows(self, path: str, most: int | None = MOST_ROWS) -> list[dict[str, Any]]:
        """The first objects of a file of JSON lines; a note where some cannot be read."""
        found, bad = [], 0
        for row in objects(path):
            if row is None:
                bad += 1
            elif most is None or len(found) < most:
                found.append(row)
            else:
                break
        if bad:
            self.notes.append(f"{os.path.relpath(path, self.path)}: {bad} lines are no JSON objects, and left out")
        return found


def objects(path: str) -> Iterator[dict[str, Any] | None]:
    """The objects of a file of JSON lines, one by one; None for a line that is none. A torn last line is passed over:
    somebody is writing it. Nothing of a file that is not there."""
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


def number(value: Any) -> float | None:
    """A number as `metrics.json_value` writes it, NaN and the infinities too; None of anything else."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 2**1000 else None


def object_in(path: str) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = parse_json(file.read())
    except (OSError, json.JSONDecodeError):
        return None
    return found if isinstance(found, dict) else None


def stage_of(folder: str) -> str | None:
    """The stage whose run is in a folder; None: it is no run's folder."""
    stage = (object_in(os.path.join(folder, "config.json")) or {}).get("stage")
    return stage if isinstance(stage, str) and stage in STAGES else None


def folders(given: Sequence[str]) -> list[str]:
    """The stages' folders in the folders that are given: themselves, or up to two levels below.

    Raises:
      UserError: one is not there, or holds no run.
    """
    found = []
    for path in given:
        path = os.path.abspath(os.path.expanduser(path))
        if not os.path.isdir(path):
            raise UserError(f"{path}: there is no such folder. Give a run's --run_dir")
        here = (
            [path] if stage_of(path) else [stage for folder in (path, *_subfolders(path)) for stage in _below(folder)]
        )
        if not here:
            raise UserError(
                f"{path} holds no run: neither it nor a folder in it has a config.json of a run. Give a run's --run_dir"
            )
        found += here
    return list(dict.fromkeys(found))


def _subfolders(path: str) -> list[str]:
    return sorted(entry.path for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))


def _below(path: str) -> Iterator[str]:
    order = list(STAGES)
    stages = {sub: stage for sub in _subfolders(path) if (stage := stage_of(sub))}
    yield from sorted(stages, key=lambda sub: (order.index(stages[sub]), sub))


def names(paths: Sequence[str]) -> list[str]:
    """The shortest ends of paths by which they are distinguished, of two parts at least where there are several."""
    parts = [path.strip(os.sep).split(os.sep) for path in paths]
    for count in range(1 if len(paths) == 1 else 2, max(map(len, parts), default=1) + 1):
        ends = ["/".join(part[-count:]) for part in parts]
        if len(set(ends)) == len(ends):
            return ends
    return list(paths)


def read(path: str, name: str) -> Run:
    """Reads a stage's folder but for its samples."""
    config = object_in(os.path.join(path, "config.json")) or {}
    stage = config.pop("stage")
    recipe = object_in(os.path.join(path, "recipe.json"))
    if recipe is not None and not (isinstance(recipe.get("config"), str) and isinstance(recipe.get("options"), dict)):
        recipe = None
    finished = object_in(os.path.join(path, "finished.json"))
    run = Run(path, name, stage, config, recipe, {}, finished, [])
    for file in ("metrics.jsonl", "timings.jsonl"):
        _read_series(run, file)
    if not run.series:
        run.notes.append("metrics.jsonl has no update yet")
    return run


def _read_series(run: Run, file: str) -> None:
    """The columns of a file of lines with a step. A second line of a step (an evaluation) adds to the first."""
    bad, odd = 0, set()
    for row in objects(os.path.join(run.path, file)):
        step = None if row is None else row.pop("step", None)
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53:
            bad += 1
            continue
        for name, value in row.items():
            if (value := number(value)) is None:
                odd.add(name)
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
    if odd:
        some = ", ".join(short_repr(name, 60) for name in sorted(odd)[:5])
        run.notes.append(f"{file}: {some} {'are' if len(odd) > 1 else 'is'} no number, and left out")


def alarms(run: Run) -> list[dict[str, Any]]:
    """[{"name", "first", "last"}]: the updates at which each alarm began and had ended (None: it stands)."""
    found = []
    for name, (steps, values) in run.series.items():
        if not name.startswith("alarm/"):
            continue
        first = None
        for step, value in zip(steps, values, strict=True):
            if value and first is None:
                first = int(step)
            elif not value and first is not None:
                found.append({"name": name, "first": first, "last": int(step)})
                first = None
        if first is not None:
            found.append({"name": name, "first": first, "last": None})
    return sorted(found, key=lambda alarm: alarm["first"])


def not_finite(run: Run, most: int = 20) -> tuple[list[dict[str, Any]], dict[str, tuple[int, int]]]:
    """What was not finite.

    Returns:
      ([{"step", "causes", "applied", "rows"}] of the first `most` bad updates, {metric: (updates at which it was not
      finite, the first)})
    """
    causes: dict[int, list[str]] = {}
    for name, (steps, values) in run.series.items():
        part = name.removeprefix("nonfinite/")
        if part != name and part not in ("updates", "in_a_row", "steps_applied"):
            for step, value in zip(steps, values, strict=True):
                if value:
                    causes.setdefault(int(step), []).append(part)
    applied = dict(zip(*run.series.get("nonfinite/steps_applied", ((), ())), strict=True))
    files = dict(run.files("nonfinite", r"(\d+)\.jsonl"))
    events = [
        {
            "step": step,
            "causes": causes.get(step, []),
            "applied": int(applied.get(step, 0)),
            "rows": run.rows(files[step], 4) if step in files else [],
        }
        for step in sorted({*causes, *files})[:most]
    ]
    bad = {}
    for name, (steps, values) in run.series.items():
        where = [int(step) for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
        if where:
            bad[name] = (len(where), where[0])
    return events, bad
