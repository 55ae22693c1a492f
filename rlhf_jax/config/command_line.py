"""The command line: `--config` names a config, every other flag one of its fields."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import typing
from collections.abc import Sequence
from typing import Any

import tyro

from rlhf_jax.config import STAGES, Config, Pipeline, StageConfig, stage_name, trl_options
from rlhf_jax.config import files as config_files
from rlhf_jax.errors import UserError

PROG = "python -m rlhf_jax.train"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a run began from.

    Attributes:
      name: as `--config` named it.
      config: as the file has it, without flags.
    """

    name: str
    config: Config


def parse(argv: Sequence[str]) -> Config:
    """The config of `parse_recipe`, with the flags."""
    return parse_recipe(argv)[0]


def parse_recipe(argv: Sequence[str]) -> tuple[Config, Recipe]:
    """The config that a command line asks for, the file's values, then the flags', left to right; and the file's alone.

    Prints help and raises SystemExit(0) on --help; raises UserError on anything wrong. TRL's other names are accepted
    where the meaning is the same (with a note on stderr) and refused with the reason where it is not.
    """
    flags = split_flags(argv)
    wants_help = any(name in ("help", "h") for name, _ in flags)
    specs = [words for name, words in flags if name == "config"]
    if not specs:
        if wants_help or not argv:
            print(usage())
            raise SystemExit(0 if wants_help else 2)
        raise UserError(f"--config is missing. Shipped: {', '.join(config_files.shipped_configs())}.")
    if len(specs[-1]) != 1:
        raise UserError(f"--config takes one config, got {len(specs[-1])}: {' '.join(specs[-1])}.")
    recipe = Recipe(specs[-1][0], config_files.load_config(specs[-1][0]))
    if wants_help:
        print_help(recipe.config, f"{PROG} --config {recipe.name}")
        raise SystemExit(0)
    return with_flags(recipe.config, [(name, words) for name, words in flags if name != "config"]), recipe


def split_flags(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(name, words) of each flag: `--kl-coef=0.1` and `--kl_coef 0.1` are both ('kl_coef', ['0.1'])."""
    flags: list[tuple[str, list[str]]] = []
    for word in argv:
        if word == "-h" or (word.startswith("--") and len(word) > 2):
            name, equals, value = word.lstrip("-").partition("=")
            flags.append((name.replace("-", "_"), [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
        else:
            raise UserError(f"{word!r} stands before any flag. Did you mean --config {word}?")
    return flags


def with_flags(config: Config, flags: Sequence[tuple[str, list[str]]]) -> Config:
    """The config with all flags applied, left to right; those that set several options come last, each once."""

    def several(name: str) -> bool:
        stage, _, option = name.rpartition(".")
        stage = stage or stage_name(config)
        found = trl_options.answer(option, stage) if stage in STAGES else None
        return found is not None and found.kind == "translated"

    last = {name: words for name, words in flags if several(name)}
    stages = [name.rpartition(".")[0] for name in last]
    if len(set(stages)) < len(stages):
        given = " and ".join(f"--{name}" for name in last)
        raise UserError(f"{given} exclude each other: both say how many responses an update has.")
    for name, words in [*(flag for flag in flags if flag[0] not in last), *last.items()]:
        config = with_flag(config, name, words)
    return config


def with_flag(config: Config, name: str, words: Sequence[str]) -> Config:
    """The config with one flag applied; `name` may be a field, `no_` and a boolean field, TRL's name, or STAGE.name."""
    if not isinstance(config, Pipeline):
        return _with_option(config, name, words, "")
    present = [key for key in STAGES if getattr(config, key) is not None]
    stage, dot, option = name.partition(".")
    if dot and stage in present:
        return dataclasses.replace(config, **{stage: _with_option(getattr(config, stage), option, words, f"{stage}.")})
    if dot and stage in STAGES:
        raise UserError(f"--{name}: this config has no stage {stage}; it has {', '.join(present)}.")
    own = {key: hint for key, hint in config_files.field_types(Pipeline).items() if key not in STAGES}
    if name == "no_dry_run" and not words:
        name, words = "dry_run", ["false"]
    if name in trl_options.RENAMED and trl_options.RENAMED[name].to in own:
        name = trl_options.RENAMED[name].to
    if name in own:
        return dataclasses.replace(config, **{name: config_files.value_from_words(f"--{name}", own[name], words)})
    answers = {key: found for key in present if (found := trl_options.answer(name, key))}
    takers = [f"--{key}.{name}" for key, found in answers.items() if found.kind != "refused"]
    if takers:
        raise UserError(f"--{name}: this config has {len(present)} stages, so name the stage: {' or '.join(takers)}.")
    if answers:
        key, found = list(answers.items())[-1]  # the policy's stage: what most options are about
        raise UserError(f"--{name} is refused. {found.text}")
    known = [*own, *(f"{key}.{field}" for key in present for field in config_files.field_types(STAGES[key]))]
    hint = config_files.nearest(name, known) or config_files.nearest(f"{present[-1]}.{name}", known)
    raise UserError(f"unknown option --{name}.{hint}")


def _with_option(config: StageConfig, name: str, words: Sequence[str], prefix: str) -> StageConfig:
    """One stage's config with one option set; `prefix` ('ppo.') is for messages."""
    hints = config_files.field_types(type(config))
    positive = name.removeprefix("no_")
    if name not in hints and hints.get(positive) is bool and not words:
        name, words = positive, ["false"]
    found = trl_options.answer(name, stage_name(config))
    if found is None:
        renamed = [key for key, found in trl_options.RENAMED.items() if found.to in hints]
        hint = config_files.nearest(name, [*hints, *renamed])
        raise UserError(f"unknown option --{prefix}{name}.{hint} (--config ... --help lists all.)")
    if found.kind == "refused":
        raise UserError(f"--{prefix}{name} is refused. {found.text}")
    if found.kind == "translated":
        return _with_batches(config, name, words, prefix)
    if found.kind == "renamed":
        note = f" ({found.text})" if found.text else ""
        print(f"note: --{prefix}{name} is --{prefix}{found.renamed.to} here{note}.", file=sys.stderr)
        name = found.renamed.to
        if found.renamed.values:
            words = [found.renamed.values.get(word.lower(), word) for word in (words or ["true"])]
    value = config_files.value_from_words(f"--{prefix}{name}", hints[name], words)
    return dataclasses.replace(config, **{name: value})


def _with_batches(config: StageConfig, name: str, words: Sequence[str], prefix: str) -> StageConfig:
    """TRL's steps_per_generation or generation_batch_size: another batch_size, with minibatches of the same rows."""
    count = config_files.value_from_words(f"--{prefix}{name}", int, words)
    if count < 1:
        raise UserError(f"--{prefix}{name} is {count}; it must be at least 1.")
    if config.num_mini_batches < 1 or config.batch_size % config.num_mini_batches:
        raise UserError(
            f"--{prefix}{name} keeps the rows of a minibatch, but batch_size {config.batch_size} / num_mini_batches "
            f"{config.num_mini_batches} does not come out even."
        )
    rows, batch, sum_ = config.batch_size // config.num_mini_batches, count, f"{count}"
    if name == "steps_per_generation":
        if config.micro_batch_size is None:
            raise UserError(
                f"--{prefix}{name} counts micro-batches, so it needs --{prefix}micro_batch_size (TRL's "
                "per_device_train_batch_size x devices). Or give batch_size and num_mini_batches."
            )
        batch = config.micro_batch_size * count
        sum_ = f"micro_batch_size {config.micro_batch_size} x {count} = {batch}"
    if batch % rows:
        raise UserError(
            f"--{prefix}{name} {count}: {sum_} responses an update / {rows} rows a minibatch = {batch / rows:.4g} "
            f"minibatches; it must come out even. Set the rows of a minibatch by --{prefix}batch_size and "
            f"--{prefix}num_mini_batches: their quotient is kept."
        )
    print(
        f"note: --{prefix}{name} {count} is --{prefix}batch_size {batch} --{prefix}num_mini_batches {batch // rows} "
        f"here ({sum_} responses an update, {rows} rows an optimizer step as before).",
        file=sys.stderr,
    )
    return dataclasses.replace(config, batch_size=batch, num_mini_batches=batch // rows)


# --- help


def usage() -> str:
    """What --help says when no config is named."""
    shipped = config_files.shipped_configs()
    width = max(map(len, shipped), default=0)
    lines = [f"  {name:<{width}}  {line}" for name, line in shipped.items()]
    stages = [f"  {name:<{width}}  {stage.__doc__.partition(chr(10))[0]}" for name, stage in STAGES.items()]
    return "\n".join(
        [
            f"usage: {PROG} --config CONFIG [--OPTION VALUE ...]",
            "",
            "CONFIG is a .py file with get_config(variant=None), a shipped config, either with :VARIANT behind it,",
            "or the config.json of a run. A config is of one stage, or of sft, reward and one of ppo and rloo:",
            "",
            *stages,
            "",
            "Shipped configs:",
            "",
            *lines,
            "",
            "Every field of a config is an option. To see each with its default and its meaning:",
            "",
            *(f"  {PROG} --config {name} --help" for name in shipped),
            "",
            "Options of the run itself: --run_dir FOLDER, --resume auto|must|never, --seed N, --dry_run (print the",
            "config, the batch arithmetic, the mesh and the memory of compiled programs, then stop; for TPUs that are",
            "not there with --topology v5e:4x4), --distributed auto|off|HOST:PORT (docs/scaling.md). TRL's names:",
            "docs/migrating.md.",
        ]
    )


def print_help(config: Any, prog: str) -> None:
    """Print every option of a config with its type, its default in this config, and its meaning."""
    shown = _for_help(config)
    with contextlib.suppress(SystemExit):  # whether to end the program is the caller's to say
        tyro.cli(
            type(shown),
            args=["--help"],
            default=shown,
            prog=prog,
            use_underscores=True,
            config=(tyro.conf.AvoidSubcommands,),  # a stage that a pipeline lacks is left out
        )


def _for_help(config: Any) -> Any:
    """The config with JSON text in the place of dicts, which tyro would take for options or subcommands."""
    fields, values = [], {}
    for name, hint in config_files.field_types(type(config)).items():
        value = values[name] = getattr(config, name)
        if isinstance(value, StageConfig):
            values[name] = _for_help(value)
            fields.append((name, type(values[name]), values[name]))
        elif config_files.is_dict(hint):
            values[name] = None if value is None else json.dumps(value)
            fields.append((name, typing.Annotated[str | None, tyro.conf.arg(metavar="{None}|JSON")], None))
    shown = dataclasses.make_dataclass(type(config).__name__, fields, bases=(type(config),), frozen=True)
    shown.__doc__ = type(config).__doc__
    return shown(**values)
