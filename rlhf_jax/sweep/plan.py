"""The runs that a command line asks for, and the record of them in the sweep's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_jax import storage
from rlhf_jax.config import Config, command_line, resolve
from rlhf_jax.config.check import check
from rlhf_jax.errors import UserError
from rlhf_jax.runtime import config_diff
from rlhf_jax.runtime.options import CommandOptions
from rlhf_jax.utils.text import parse_json

PROG = "rlhf-jax sweep"
USAGE = f"""usage: {PROG} --config CONFIG --run_dir DIR --OPTION VALUE VALUE ... [--OPTION VALUE ...]

Trains once for each combination of the options that have several values, one run after another:

  {PROG} --config quickstart_rloo.py --rloo.learning_rate 1e-3 3e-3 --seed 0 1 2 --run_dir runs/rates

The last option varies fastest. Each run has a folder in DIR, as DIR/rloo.learning_rate=1e-3,seed=0. The same command
skips the runs that are finished and resumes one that was cut; with more values it adds their runs. The other options
are those of rlhf-jax train. Options that take a list cannot be swept.

A run that ends with an error is reported, and the sweep continues. DIR/sweep.csv gets a row for each run. A table is
printed at the end: the final metrics of the last stage; over several seeds their mean and its 95 % interval (Student's
t, which takes the seeds' results to be normally distributed). Two or three seeds are few: the interval is wide.

Exit status: 0; 2 if a run failed or something you gave is wrong; 75 when stopped by a signal or --max_minutes, which
counts for the whole sweep: the same command continues."""
ONE_PROCESS = "a sweep is one process: start each run by itself, with rlhf-jax train"
UNSWEEPABLE = {"run_dir", "resume", "override_resume", *(field.name for field in dataclasses.fields(CommandOptions))}
"""Options of the command or its folder: one value for all runs."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a sweep.

    Attributes:
      values: the swept options, by the names and words of the command line.
      config: with its folder.
    """

    values: dict[str, str]
    config: Config

    @property
    def title(self) -> str:
        """'learning_rate=1e-5, seed=0'."""
        return ", ".join(f"{name}={word}" for name, word in self.values.items())


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a command line asks for.

    Attributes:
      folder: of all runs.
      recipe: the config before the flags.
      flags: those with one value, by name.
      options: those with several values, in order.
      seeds: names of those options that are seeds.
      runs: their product; the last option varies fastest.
    """

    folder: str
    recipe: command_line.Recipe
    flags: dict[str, list[str]]
    options: dict[str, list[str]]
    seeds: frozenset[str]
    runs: list[Run]


def parse(argv: Sequence[str]) -> Sweep:
    """The sweep of a command line; writes nothing.

    Raises:
      SystemExit: after the help.
      UserError: an option is wrong or cannot be swept, nothing is swept, or two runs would be the same.
    """
    recipe, flags = command_line.read_flags(argv, PROG, lambda: USAGE)
    fields = {name: command_line.field_of(recipe.config, name) or (name, None) for name, _ in flags}
    options = {name: words for name, words in flags if len(words) > 1 and not command_line.takes_list(fields[name][1])}
    _check_options(flags, fields, options)
    runs: list[Run] = []
    for words in itertools.product(*options.values()):
        values = dict(zip(options, words, strict=True))
        flags_of_run = [(name, [values[name]] if name in values else words) for name, words in flags]
        quiet = contextlib.redirect_stderr(io.StringIO()) if runs else contextlib.nullcontext()
        with quiet:  # the notes of the first run are those of all
            config = command_line.with_flags(recipe.config, flags_of_run)
        run_dir = os.path.join(resolve(config).run_dir or "", folder_name(values))
        runs.append(Run(values, resolve(dataclasses.replace(config, run_dir=run_dir))))
        try:
            check(runs[-1].config)
        except UserError as error:
            raise UserError(f"{runs[-1].title}: {error}") from error
    for one, other in itertools.combinations(runs, 2):
        if dataclasses.replace(one.config, run_dir=other.config.run_dir) == other.config:
            raise UserError(f"{one.title} and {other.title} are the same run: give each value once")
    seeds = frozenset(name for name in options if fields[name][0].rpartition(".")[2] == "seed")
    fixed = {name: words for name, words in flags if name not in options and fields[name][0] != "run_dir"}
    return Sweep(os.path.dirname(runs[0].config.run_dir), recipe, fixed, options, seeds, runs)


def _check_options(flags, fields: Mapping[str, tuple[str, Any]], options: Mapping[str, list[str]]) -> None:
    """Raises a UserError for options that cannot be swept, and where none is."""
    names = [name for name, _ in flags]
    lists = [name for name, words in flags if len(words) > 1 and name not in options]
    for name, words in flags:
        takes_list = command_line.takes_list(fields[name][1])
        if takes_list and (names.count(name) > 1 or (len(words) > 1 and any("," in word.strip(",") for word in words))):
            raise UserError(f"--{name} takes a list and cannot be swept: start a sweep for each of its values")
        if name in options and names.count(name) > 1:
            raise UserError(f"--{name} is given twice: give all its values after one")
        if name in options and fields[name][0].rpartition(".")[2] in UNSWEEPABLE:
            raise UserError(f"--{name} cannot be swept: it is one value for all runs")
    if not options:
        hint = f"; --{lists[0]} takes a list, so its words are one value" if lists else ""
        raise UserError(f"nothing to sweep{hint}: give an option several values, as --seed 0 1 2")
    if all(field != "run_dir" for field, _ in fields.values()):
        raise UserError("--run_dir is missing: the folder of the sweep's runs")
    if (mode := dict(flags).get("distributed", ["auto"])) not in (["auto"], ["off"]):
        raise UserError(f"--distributed {' '.join(mode)}: {ONE_PROCESS}")


def folder_name(values: Mapping[str, str]) -> str:
    """'learning_rate=1e-5,seed=0'. Characters that some file systems refuse are %XX; a long name ends in its hash."""
    words = {name: re.sub(r"[^\w.+-]", lambda match: f"%{ord(match[0]):02X}", word) for name, word in values.items()}
    name = ",".join(f"{name}={word}" for name, word in words.items())
    return name if len(name.encode()) <= 200 else f"{name[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


# --- the folder


def write_record(sweep: Sweep) -> None:
    """Writes DIR/sweep.json: the config, the flags with one value, the swept options in order.

    Raises:
      UserError: the folder contains another sweep, or something else.
    """
    path = os.path.join(sweep.folder, "sweep.json")
    names = storage.list_names(sweep.folder) if storage.is_dir(sweep.folder) else []
    if "sweep.json" in names:
        try:
            record = parse_json(storage.read_text(path))
            lines = _differences(record["config"], record["flags"], record["options"], sweep)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({error}): choose another --run_dir") from error
        if lines:
            raise UserError(
                f"--run_dir {sweep.folder} contains another sweep: choose another folder, or restore these options\n  "
                + "\n  ".join(lines)
            )
    elif names := sorted(name for name in names if not name.startswith(".") and name != "sweep.json.tmp"):
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise UserError(f"--run_dir {sweep.folder} is not a sweep's folder (it contains {some}): choose another folder")
    storage.make_dir(sweep.folder)
    content = {"config": sweep.recipe.name, "flags": sweep.flags, "options": sweep.options}
    storage.write_atomically(path, json.dumps(content, indent=2) + "\n")


def _differences(config: str, flags: dict[str, list[str]], options: dict[str, list[str]], sweep: Sweep) -> list[str]:
    """What differs between the sweep of a folder and another: no values that were added, no options that a resume may
    change."""
    lines = [] if config == sweep.recipe.name else [f"--config: {config} before, now {sweep.recipe.name}"]
    if [*options] != [*sweep.options]:
        lines.append(f"swept options: {', '.join(options)} before, now {', '.join(sweep.options)}")
    swept = {*options, *sweep.options}
    free = config_diff.may_change(rounding=False)
    for name in dict.fromkeys((*flags, *sweep.flags)):
        old, new = (" ".join(each[name]) if name in each else "not given" for each in (flags, sweep.flags))
        field = command_line.field_of(sweep.recipe.config, name) or (name.rpartition(".")[2].removeprefix("no_"), None)
        if old != new and name not in swept and field[0].rpartition(".")[2] not in free:
            lines.append(f"--{name}: {old} before, now {new}")
    for name in options.keys() & sweep.options.keys():
        if missing := [word for word in options[name] if word not in sweep.options[name]]:
            lines.append(f"--{name}: {' '.join(missing)} is left out; values may only be added")
    return lines
