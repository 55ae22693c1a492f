"""TRL's options and their counterparts here: the same name, another name, other options, or unsupported with a reason.

The tables are in trl_options.toml. An option that is a field here is the same option; NOTES has the differences. The
command line reads `answer`, and `python -m rlhf_jax.config.trl_options` prints docs/migrating.md.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import pathlib
import tomllib
from collections.abc import Collection
from typing import Any, Literal

from rlhf_jax.config.stages import STAGES


@dataclasses.dataclass(frozen=True)
class Renamed:
    """Another name of the option `to`; `values` translates values that differ."""

    to: str
    note: str = ""
    values: dict[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Unsupported:
    """Options (patterns with `*`) that do not exist in some stages, or in none, and why or what to give instead."""

    options: list[str]
    reason: str
    stages: list[str] | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    """The options of one of TRL's configs, and the stages that they apply to."""

    title: str
    stages: tuple[str, ...]
    options: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of the constructors of some of TRL's trainers, and what replaces it here."""

    name: str
    trainers: list[str]
    here: str


_DATA: dict[str, Any] = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RENAMED = {name: Renamed(**row) for name, row in _DATA["renamed"].items()}
VALUES: dict[str, dict[str, str]] = _DATA["values"]
"""Values that TRL also takes for an option that is the same here."""
TRANSLATED: dict[str, str] = _DATA["translated"]
HINTS: dict[str, list[str]] = _DATA["hints"]
"""Other libraries' names of an option -> names here, the best first: for messages, not accepted."""
UNSUPPORTED = [Unsupported(**row) for row in _DATA["unsupported"]]
NOTES: dict[str, str] = _DATA["notes"]
NOTES_BY_STAGE: dict[str, dict[str, str]] = _DATA["notes_by_stage"]
ARGUMENTS = [Argument(**row) for row in _DATA["argument"]]
TABLES = [Table(row["title"], tuple(row["stages"]), tuple(row["options"].split())) for row in _DATA["table"]]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one of TRL's options is in one stage."""

    kind: Literal["same", "renamed", "translated", "unsupported"]
    text: str = ""
    renamed: Renamed | None = None


def answer(name: str, stage: str) -> Answer | None:
    """What TRL's option `name` is in `stage` ('sft', 'reward', 'ppo', 'rloo', 'grpo'); None for an unknown name."""
    fields = {key: set(config_type.__dataclass_fields__) for key, config_type in STAGES.items()}
    if name in fields[stage]:
        return Answer("same", NOTES_BY_STAGE.get(stage, {}).get(name, NOTES.get(name, "")))
    if name in TRANSLATED and "num_mini_batches" in fields[stage]:
        return Answer("translated", TRANSLATED[name])
    renamed = RENAMED.get(name)
    if renamed and renamed.to in fields[stage]:
        return Answer("renamed", renamed.note, renamed)
    for row in UNSUPPORTED:
        in_stage = row.stages is None or stage in row.stages
        if in_stage and any(fnmatch.fnmatchcase(name, option) for option in row.options):
            return Answer("unsupported", row.reason)
    owners, prefix = [key for key in STAGES if name in fields[key]], "It is "
    if not owners and renamed:
        owners, prefix = [key for key in STAGES if renamed.to in fields[key]], f"It is {renamed.to} here, "
    if not owners and name in TRANSLATED:
        owners = [key for key in STAGES if "num_mini_batches" in fields[key]]
    if owners:
        names = " and ".join(filter(None, (", ".join(owners[:-1]), owners[-1])))
        return Answer("unsupported", f"{prefix}an option of {names}, not of {stage}.")
    return None


def hint(name: str, fields: Collection[str]) -> str | None:
    """The field that another library calls `name`; None where there is none."""
    return next((field for field in HINTS.get(name, ()) if field in fields), None)


def _row(name: str, stages: tuple[str, ...]) -> str:
    """One line of the page: the answers of the table's stages, equal ones together."""
    stages_of_cell: dict[str, list[str]] = {}
    for stage in stages:
        option = answer(name, stage)
        assert option is not None, f"TRL's {name} has no answer in {stage}"
        kind = f"`{option.renamed.to}`" if option.renamed else option.kind
        colon = ": " if option.kind in ("unsupported", "translated") else "; "
        stages_of_cell.setdefault(kind + colon + option.text if option.text else kind, []).append(stage)
    cells = [*stages_of_cell]
    if len(cells) > 1:
        cells = [f"**{', '.join(stages_of_cell[cell])}** {cell.rstrip('.')}" for cell in cells]
    return f"| `{name}` | {'; '.join(cells)} |"


def page() -> str:
    """The text of docs/migrating.md."""
    parts = [_DATA["introduction"]]
    for table in TABLES:
        rows = "\n".join(_row(name, table.stages) for name in table.options)
        parts.append(f"\n## {table.title}\n\n| TRL | here |\n|---|---|\n{rows}\n")
    everyone = sorted({trainer for argument in ARGUMENTS for trainer in argument.trainers})
    rows = "\n".join(
        f"| `{argument.name}` | {'all' if sorted(argument.trainers) == everyone else ', '.join(argument.trainers)} | "
        f"{argument.here} |"
        for argument in ARGUMENTS
    )
    parts.append(f"\n## Arguments of the trainers' constructors\n\n| argument | of | here |\n|---|---|---|\n{rows}\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
