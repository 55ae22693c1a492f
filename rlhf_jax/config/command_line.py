"""The command line: `--config` names a config, every other flag one of its fields.

tyro prints the help. Flags are parsed here, since tyro accepts no `--flag true` in addition to `--flag`, no `a,b` for
lists, no JSON for dicts and no `none`, and its errors are boxes that do not know TRL's options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from rlhf_jax.config import trl_options
from rlhf_jax.config.dataclasses import STAGES, Config, Pipeline, StageConfig, stage_name
from rlhf_jax.config.files import load_config, shipped_configs
from rlhf_jax.config.presets import PRESETS, with_preset
from rlhf_jax.config.values import field_types, is_json, nearest, value_from_words
from rlhf_jax.errors import UserError

PROG = "python -m rlhf_jax.train"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The config file that a run started from.

    Attributes:
      name: as given to `--config`.
      config: without flags.
    """

    name: str
    config: Config


def parse(argv: Sequence[str]) -> Config:
    """The config of `parse_recipe`, flags included."""
    return parse_recipe(argv)[0]


def parse_recipe(argv: Sequence[str]) -> tuple[Config, Recipe]:
    """The config of a command line (the file's values, overridden by the flags from left to right), and the file alone.

    TRL's other names are accepted with a note on stderr if they mean the same, else refused with the reason.

    Raises:
      SystemExit: 0 after printing the help for --help; 2 after the usage if there are no arguments.
      UserError: the config or a flag is wrong.
    """
    flags = split_flags(argv)
    wants_help = any(name in ("help", "h") for name, _ in flags)
    specs = [words for name, words in flags if name == "config"]
    if not specs:
        if wants_help or not argv:
            print(usage())
            raise SystemExit(0 if wants_help else 2)
        raise UserError(f"--config is missing. Shipped: {', '.join(shipped_configs())}.")
    if len(specs[-1]) != 1:
        raise UserError(f"--config takes one config, got {len(specs[-1])}: {' '.join(specs[-1])}.")
    recipe = Recipe(specs[-1][0], load_config(specs[-1][0]))
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
            raise UserError(f"{word!r} comes before any flag. Did you mean --config {word}?")
    return flags


def with_flags(config: Config, flags: Sequence[tuple[str, list[str]]]) -> Config:
    """The config with all flags applied, left to right: presets first, flags that set several options last and once."""

    def is_translated(flag: str) -> bool:
        stage, _, option = flag.rpartition(".")
        return option in trl_options.TRANSLATED and hasattr(STAGES.get(stage or stage_name(config)), "num_mini_batches")

    for name, words in flags:
        if name.rpartition(".")[2] == "preset":
            config = _with_preset(config, name, words)
    flags = [flag for flag in flags if flag[0].rpartition(".")[2] != "preset"]
    translated = {name: words for name, words in flags if is_translated(name)}
    if len({name.rpartition(".")[0] for name in translated}) < len(translated):
        given = " and ".join(f"--{name}" for name in translated)
        raise UserError(f"{given} exclude each other: both set the number of responses per update.")
    for name, words in [*(flag for flag in flags if flag[0] not in translated), *translated.items()]:
        config = with_flag(config, name, words)
    return config


def _with_preset(config: Config, name: str, words: Sequence[str]) -> Config:
    """The config with a preset of GRPO; in a pipeline of its stage grpo, by `--preset` or `--grpo.preset`."""
    stage = name.rpartition(".")[0] or ("grpo" if isinstance(config, Pipeline) else "")
    if len(words) != 1:
        raise UserError(f"--{name} takes one of {', '.join(PRESETS)}.")
    if not stage:
        return with_preset(config, words[0])
    if not isinstance(config, Pipeline) or getattr(config, stage, None) is None:
        raise UserError(f"--{name}: this config has no stage {stage}.")
    return dataclasses.replace(config, **{stage: with_preset(getattr(config, stage), words[0])})


def with_flag(config: Config, name: str, words: Sequence[str]) -> Config:
    """The config with one flag applied; `name` may be a field, `no_` and a boolean field, TRL's name, or STAGE.name."""
    if not isinstance(config, Pipeline):
        return _with_option(config, name, words, "")
    present = [key for key in STAGES if getattr(config, key, None) is not None]
    stage, dot, option = name.partition(".")
    if dot and stage in present:
        return dataclasses.replace(config, **{stage: _with_option(getattr(config, stage), option, words, f"{stage}.")})
    if dot and stage in STAGES:
        raise UserError(f"--{name}: this config has no stage {stage}; it has {', '.join(present)}.")
    own = {key: hint for key, hint in field_types(Pipeline).items() if key not in STAGES}
    name, words = positive(name, words, own)
    if name in trl_options.RENAMED and trl_options.RENAMED[name].to in own:
        name = trl_options.RENAMED[name].to
    if name in own:
        return dataclasses.replace(config, **{name: value_from_words(f"--{name}", own[name], words)})
    answers = {key: answer for key in present if (answer := trl_options.answer(name, key))}
    candidates = [f"--{key}.{name}" for key, answer in answers.items() if answer.kind != "unsupported"]
    if candidates:
        stages = f"this config has {len(present)} stages, so name the stage"
        raise UserError(f"--{name}: {stages}: {' or '.join(candidates)}.")
    if answers:
        reason = [*answers.values()][-1].text  # of the policy's stage, which most options are about
        raise UserError(f"--{name} is not supported. {reason}")
    known = [*own, *(f"{key}.{field}" for key in present for field in field_types(STAGES[key]))]
    raise UserError(f"unknown option --{name}.{nearest(name, known) or nearest(f'{present[-1]}.{name}', known)}")


def positive(name: str, words: Sequence[str], hints: dict[str, Any]) -> tuple[str, Sequence[str]]:
    """(field, ['false']) for the flag `no_` and a boolean field; any other flag as it is."""
    field = name.removeprefix("no_")
    negated = name not in hints and hints.get(field) is bool and not words
    return (field, ["false"]) if negated else (name, words)


def _with_option(config: StageConfig, name: str, words: Sequence[str], prefix: str) -> StageConfig:
    """One stage's config with one option set; `prefix` ('ppo.') is for messages."""
    hints = field_types(type(config))
    name, words = positive(name, words, hints)
    answer = trl_options.answer(name, stage_name(config))
    if answer is None:
        renamed = [key for key, row in trl_options.RENAMED.items() if row.to in hints]
        hint = nearest(name, [*hints, *renamed])
        raise UserError(f"unknown option --{prefix}{name}.{hint} (--config ... --help lists all.)")
    if answer.kind == "unsupported":
        raise UserError(f"--{prefix}{name} is not supported. {answer.text}")
    if answer.kind == "translated":
        return _with_batches(config, name, words, prefix)
    translations = trl_options.VALUES.get(name, {})
    if answer.renamed:
        note = f" ({answer.text})" if answer.text else ""
        print(f"note: --{prefix}{name} is --{prefix}{answer.renamed.to} here{note}.", file=sys.stderr)
        name, translations = answer.renamed.to, answer.renamed.values or {}
    if translations:
        words = [translations.get(word.lower(), word) for word in (words or ["true"])]
    try:
        value = value_from_words(f"--{prefix}{name}", hints[name], words)
    except UserError as error:
        raise (UserError(f"{error} Note: {answer.text}.") if answer.kind == "same" and answer.text else error) from None
    return dataclasses.replace(config, **{name: value})


def _with_batches(config: StageConfig, name: str, words: Sequence[str], prefix: str) -> StageConfig:
    """TRL's steps_per_generation or generation_batch_size: another batch_size, with minibatches of the same rows."""
    count = value_from_words(f"--{prefix}{name}", int, words)
    if count < 1:
        raise UserError(f"--{prefix}{name} is {count}; it must be at least 1.")
    if config.num_mini_batches < 1 or config.batch_size % config.num_mini_batches:
        raise UserError(
            f"--{prefix}{name} keeps the rows of a minibatch, but batch_size {config.batch_size} / num_mini_batches "
            f"{config.num_mini_batches} is not a whole number."
        )
    rows, batch, product = config.batch_size // config.num_mini_batches, count, f"{count}"
    if name == "steps_per_generation":
        if config.micro_batch_size is None:
            raise UserError(
                f"--{prefix}{name} counts micro-batches, so it needs --{prefix}micro_batch_size (TRL's "
                "per_device_train_batch_size x devices). Or give batch_size and num_mini_batches."
            )
        batch = config.micro_batch_size * count
        product = f"micro_batch_size {config.micro_batch_size} x {count} = {batch}"
    if batch % rows:
        raise UserError(
            f"--{prefix}{name} {count}: {product} responses per update / {rows} rows per minibatch = "
            f"{batch / rows:.4g} minibatches; it must be a whole number. Set the rows per minibatch by "
            f"--{prefix}batch_size and --{prefix}num_mini_batches: their quotient is kept."
        )
    print(
        f"note: --{prefix}{name} {count} is --{prefix}batch_size {batch} --{prefix}num_mini_batches {batch // rows} "
        f"here ({product} responses per update, {rows} rows per optimizer step as before).",
        file=sys.stderr,
    )
    return dataclasses.replace(config, batch_size=batch, num_mini_batches=batch // rows)


# --- help


def usage() -> str:
    """The help without a config."""
    shipped = shipped_configs()
    width = max(map(len, shipped), default=0)
    stages = {name: stage.__doc__.partition("\n")[0] for name, stage in STAGES.items()}
    tables = ["\n".join(f"  {name:<{width}}  {line}" for name, line in rows.items()) for rows in (stages, shipped)]
    commands = "\n".join(f"  {PROG} --config {name} --help" for name in shipped)
    return f"""usage: {PROG} --config CONFIG [--OPTION VALUE ...]

CONFIG is a .py file with get_config(variant=None) or a shipped config, either optionally followed by :VARIANT,
or the config.json of a run. A config has one stage, or the stages sft, reward and one of ppo, rloo and grpo:

{tables[0]}

Shipped configs:

{tables[1]}

Every field of a config is an option. To list them with defaults and help texts:

{commands}

Options of the run itself: --run_dir FOLDER, --resume auto|must|never, --seed N, --dry_run (print the config, the
batch arithmetic, the mesh and the memory of compiled programs, then exit; with --topology v5e:4x4 or h100:8 for
TPUs or GPUs you do not have), --distributed auto|off|HOST:PORT (docs/scaling.md). TRL's names: docs/migrating.md.

--preset {"|".join(PRESETS)} sets options of grpo (docs/options.md); other
flags override it."""


_HELP_TYPES = tyro.constructors.ConstructorRegistry()


@_HELP_TYPES.primitive_rule
def _json_dict(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """A dict is JSON text in the help; by default tyro makes options or subcommands of it."""
    if not is_json(info.type):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{None}|JSON",
        instance_from_str=lambda words: json.loads(words[0]),
        is_instance=lambda value: value is None or isinstance(value, dict | tuple),
        str_from_instance=lambda value: ["None" if value is None else json.dumps(value)],
    )


def print_help(config: Any, prog: str) -> None:
    """Print every option of a config with its type, its default in this config, and its help text."""
    with contextlib.suppress(SystemExit):  # the caller decides whether to exit
        tyro.cli(
            type(config),
            args=["--help"],
            default=config,
            prog=prog,
            use_underscores=True,
            config=(tyro.conf.AvoidSubcommands,),  # leaves out a stage that a pipeline lacks
            registry=_HELP_TYPES,
        )
