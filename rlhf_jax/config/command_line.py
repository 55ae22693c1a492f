"""The command line: `--config` names a config, every other flag one of its fields.

Flags are parsed here, with help texts by `help`: the usual parsers accept no `--flag true` in addition to `--flag`, no
`a,b` for lists, no JSON for dicts and no `none`, and their errors do not know TRL's options.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rlhf_jax.config import help as help_texts
from rlhf_jax.config import trl_options
from rlhf_jax.config.files import load_config, shipped_configs
from rlhf_jax.config.presets import PRESETS, with_preset
from rlhf_jax.config.stages import STAGES, Config, Pipeline, StageConfig, stage_name
from rlhf_jax.errors import UserError
from rlhf_jax.option import (
    Options,
    checked_value,
    describe_type,
    field_types,
    is_json,
    list_or_word,
    nearest,
    without_none,
)
from rlhf_jax.runtime.removed_options import REMOVED
from rlhf_jax.utils.output import show
from rlhf_jax.utils.text import parse_json

PROG = "rlhf-jax train"
# Separates the items of a list; a comma in brackets belongs to a regular expression.
_COMMA = re.compile(r",(?![^][(){}]*[])}])")


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
      SystemExit: 0 after printing the help for --help or --help_all; 2 after the usage if there are no arguments.
      UserError: the config or a flag is wrong.
    """
    recipe, flags = read_flags(argv, PROG, usage)
    return with_flags(recipe.config, flags), recipe


def read_flags(argv: Sequence[str], prog: str, usage: Callable[[], str]) -> tuple[Recipe, list[tuple[str, list[str]]]]:
    """The config that `--config` names, and the other flags.

    Args:
      argv: the words after the command.
      prog: the command, for the help of a config.
      usage: gives the help without a config.

    Raises:
      SystemExit, UserError: as `parse_recipe`.
    """
    flags = split_flags(argv)
    wants_help = asks_for_help(flags)
    specs = [words for name, words in flags if name == "config"]
    if not specs:
        if wants_help or not argv:
            show(usage())
            raise SystemExit(0 if wants_help else 2)
        raise UserError(f"--config is missing. Shipped: {', '.join(shipped_configs())}.")
    if len(specs[-1]) != 1:
        raise UserError(f"--config takes one config, got {len(specs[-1])}: {' '.join(specs[-1])}.")
    recipe = Recipe(specs[-1][0], load_config(specs[-1][0]))
    if wants_help:
        everything = any(name == "help_all" for name, _ in flags)
        print_help(recipe.config, f"{prog} --config {recipe.name} [--OPTION VALUE ...]", everything)
        raise SystemExit(0)
    return recipe, [(name, words) for name, words in flags if name != "config"]


def is_flag(word: str) -> bool:
    """Whether a word names an option."""
    return word == "-h" or (word.startswith("--") and len(word) > 2)


def split_flags(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(name, words) of each flag: `--kl-coef=0.1` and `--kl_coef 0.1` are both ('kl_coef', ['0.1'])."""
    flags: list[tuple[str, list[str]]] = []
    for word in argv:
        if is_flag(word):
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
        stage_config = STAGES.get(stage or stage_name(config))
        has_minibatches = stage_config is not None and "num_mini_batches" in field_types(stage_config)
        return option in trl_options.TRANSLATED and has_minibatches

    for name, words in flags:
        if name.rpartition(".")[2] == "preset":
            config = _with_preset(config, name, words)
    flags = [flag for flag in flags if flag[0].rpartition(".")[2] != "preset"]
    translated = {name: words for name, words in flags if is_translated(name)}
    if len({name.rpartition(".")[0] for name in translated}) < len(translated):
        names = " and ".join(f"--{name}" for name in translated)
        raise UserError(f"{names} exclude each other: both set the number of responses per update.")
    for name, words in [*(flag for flag in flags if flag[0] not in translated), *translated.items()]:
        config = with_flag(config, name, words)
    return config


def _with_preset(config: Config, name: str, words: Sequence[str]) -> Config:
    """The config with a preset of GRPO; in a pipeline of its stage grpo, by `--preset` or `--grpo.preset`."""
    stage = name.rpartition(".")[0] or ("grpo" if isinstance(config, Pipeline) else "")
    if len(words) != 1:
        raise UserError(f"--{name} takes one of {', '.join(PRESETS)}.")
    if not stage and isinstance(config, StageConfig):
        return with_preset(config, words[0])
    if not isinstance(config, Pipeline) or getattr(config, stage, None) is None:
        raise UserError(f"--{name}: this config has no stage {stage}.")
    return config.with_stage(stage, with_preset(getattr(config, stage), words[0]))


def with_flag(config: Config, name: str, words: Sequence[str]) -> Config:
    """The config with one flag applied; `name` may be a field, `no_` and a boolean field, TRL's name, or STAGE.name."""
    if not isinstance(config, Pipeline):
        return _with_option(config, name, words, "")
    present = [key for key in STAGES if getattr(config, key, None) is not None]
    stage, dot, option = name.partition(".")
    if dot and stage in present:
        return config.with_stage(stage, _with_option(getattr(config, stage), option, words, f"{stage}."))
    if dot and stage in STAGES:
        raise UserError(f"--{name}: this config has no stage {stage}; it has {', '.join(present)}.")
    hints = {key: hint for key, hint in field_types(Pipeline).items() if key not in STAGES}
    name, words = positive(name, words, hints)
    if name in trl_options.RENAMED and trl_options.RENAMED[name].to in hints:
        name = trl_options.RENAMED[name].to
    if name in hints:
        return dataclasses.replace(config, **{name: value_from_words(f"--{name}", hints[name], words)})
    if len(present) == 1:
        [stage] = present
        return config.with_stage(stage, _with_option(getattr(config, stage), name, words, ""))
    answers = {key: answer for key in present if (answer := trl_options.answer(name, key))}
    candidates = [f"--{key}.{name}" for key, answer in answers.items() if answer.kind != "unsupported"]
    if candidates:
        stages = f"this config has {len(present)} stages, so name the stage"
        raise UserError(f"--{name}: {stages}: {' or '.join(candidates)}.")
    if answers:
        reason = [*answers.values()][-1].text  # of the policy's stage, which most options are about
        raise UserError(f"--{name} is not supported. {reason}")
    if name in REMOVED:
        raise UserError(f"unknown option --{name}. {REMOVED[name].reason}")
    options = [*hints, *(f"{key}.{field}" for key in present for field in field_types(STAGES[key]))]
    if like := [f"--{key}.{field}" for key in present if (field := trl_options.hint(name, field_types(STAGES[key])))]:
        raise UserError(f"unknown option --{name}. It is {' or '.join(like)} here.")
    raise UserError(f"unknown option --{name}.{nearest(name, options) or nearest(f'{present[-1]}.{name}', options)}")


def field_of(config: Config, flag: str) -> tuple[str, Any] | None:
    """The field that a flag sets, by its name here or TRL's, and its type: ('learning_rate', float), of a pipeline's
    stage ('ppo.learning_rate', float). None for flags that set no field of one value: presets, `no_` and a field, TRL's
    options that set several, unknown ones."""
    if isinstance(config, Pipeline):
        present = [key for key in STAGES if getattr(config, key, None) is not None]
        stage, dot, option = flag.rpartition(".")
        hints = {key: hint for key, hint in field_types(Pipeline).items() if key not in STAGES}
        name = trl_options.RENAMED[flag].to if flag in trl_options.RENAMED else flag
        if name in hints:
            return name, hints[name]
        if not dot and len(present) == 1:
            stage = present[0]
        field = field_of(getattr(config, stage), option) if stage in present else None
        return field and (f"{stage}.{field[0]}", field[1])
    answer = trl_options.answer(flag, stage_name(config))
    name, hints = answer.renamed.to if answer and answer.renamed else flag, field_types(type(config))
    return (name, hints[name]) if name in hints else None


def takes_list(hint: Any) -> bool:
    """Whether several words after a flag of this type are one value: a list, or JSON."""
    return typing.get_origin(without_none(hint)[0]) is tuple or is_json(hint)


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
        raise UserError(
            f"unknown option --{prefix}{name}.{_option_like(name, hints, prefix)} (--config ... --help_all lists all.)"
        )
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


def _option_like(name: str, fields: Collection[str], prefix: str) -> str:
    """' It is --lam here.' for a name of other libraries, why an option was removed, or options of nearly that name."""
    if name in REMOVED:
        return f" {REMOVED[name].reason}"
    if equivalent := trl_options.hint(name, fields):
        return f" It is --{prefix}{equivalent} here."
    return nearest(name, [*fields, *(key for key, row in trl_options.RENAMED.items() if row.to in fields)])


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
    changed: dict[str, Any] = {"batch_size": batch, "num_mini_batches": batch // rows}
    return dataclasses.replace(config, **changed)


# --- options of the other commands


def parse_options(
    argv: Sequence[str],
    config_type: type,
    prog: str,
    *,
    positional: str = "",
    aliases: Mapping[str, str] | None = None,
    empty_by_none: Collection[str] = (),
) -> Any:
    """The options of a command that has no config file, as a dataclass.

    Args:
      argv: the words after the command.
      config_type: a dataclass; every field has a default and is a flag.
      prog: the command, for the help.
      positional: the field that takes words without a flag.
      aliases: accepted names -> fields.
      empty_by_none: lists that the word none makes empty, where None means a default.

    Raises:
      SystemExit: 0 after printing the help for --help; 2 after it without any word.
      UserError: an option is unknown or has a value of a wrong type.
    """
    hints, aliases, values = field_types(config_type), aliases or {}, {}
    arguments: list[tuple[str, Sequence[str]]] = []
    count = next((n for n, word in enumerate(argv) if is_flag(word)), len(argv)) if positional else 0
    loose, flags = [*argv[:count]], split_flags(argv[count:])
    joined = {word.partition("=")[0].replace("-", "_").replace("__", "--", 1) + "=" for word in argv if "=" in word}
    if not argv or asks_for_help(flags):
        several = positional and typing.get_origin(without_none(hints[positional])[0]) is tuple
        place = f"{positional.upper().removesuffix('S')} {'... ' if several else ''}" if positional else ""
        print_help(config_type(), f"{prog} {place}[--OPTION VALUE ...]", "help_all" in [name for name, _ in flags])
        raise SystemExit(0 if argv else 2)
    words: Sequence[str]
    for flag, words in flags:
        name = aliases.get(flag, flag)
        if name != flag:
            print(f"note: --{flag} is --{name} here.", file=sys.stderr)
        name, words = positive(name, words, hints)
        if name not in hints:
            raise UserError(f"unknown option --{flag}.{nearest(flag, [*hints, *aliases])} (--help lists all.)")
        if positional and typing.get_origin(without_none(hints[name])[0]) is not tuple:  # one word, or none
            is_switch = hints[name] is bool and f"--{flag}=" not in joined
            takes = 0 if is_switch and [word.lower() for word in words[:1]] not in BOOLEANS else 1
            words, loose = words[:takes], [*loose, *words[takes:]]
        arguments.append((name, words))
    if loose:
        arguments.insert(0, (positional, loose))
    for name, words in arguments:
        empty = name in empty_by_none and [word.lower() for word in words] == ["none"]
        values[name] = () if empty else value_from_words(f"--{name}", hints[name], words)
    return config_type(**values)


BOOLEANS = (["true"], ["false"], ["1"], ["0"])


# --- help


def asks_for_help(flags: Sequence[tuple[str, list[str]]]) -> bool:
    """Whether --help, -h or --help_all is among the flags."""
    return any(name in ("help", "h", "help_all") for name, _ in flags)


def usage() -> str:
    """The help without a config."""
    shipped = shipped_configs()
    width = max(map(len, shipped), default=0)
    stages = {name: (stage.__doc__ or "").partition("\n")[0] for name, stage in STAGES.items()}
    tables = ["\n".join(f"  {name:<{width}}  {line}" for name, line in rows.items()) for rows in (stages, shipped)]
    return f"""usage: {PROG} --config CONFIG [--OPTION VALUE ...]

Trains one stage, or a pipeline of the stages sft, reward and one of ppo, rloo and grpo:

{tables[0]}

CONFIG is a shipped config, a .py file with get_config(variant=None), either optionally followed by :VARIANT, or the
config.json of a run. Shipped configs:

{tables[1]}

  {PROG} --config quickstart.py                 trains a small model in minutes on a CPU, without a network
  {PROG} --config quickstart.py --help          the options of a config, a line each; --help_all: all, in full
  rlhf-jax configs copy tldr_ppo.py my_ppo.py         a config to edit: --config my_ppo.py

Options that every config has: --run_dir FOLDER, --resume auto|must|never, --seed N, --dry_run (the config, the batch
arithmetic, the mesh and the memory of compiled programs, then exit; with --topology v5e:4x4 or h100:8 for TPUs or GPUs
you do not have), --distributed auto|off|HOST:PORT (docs/scaling.md). TRL's names of options: docs/migrating.md.
--preset {"|".join(PRESETS)} sets options of grpo (docs/options.md); other
flags override it. python -m rlhf_jax.train is the same command."""


def print_help(config: Options, usage: str, everything: bool = False) -> None:
    """Prints the options of a config with their values and meanings; see `help.text`."""
    show(help_texts.text(config, usage, everything))


# --- values


def value_from_words(name: str, hint: Any, words: Sequence[str]) -> Any:
    """The value of command-line words: `3e-6`, `None`, `true`, `a b` or `a,b` for a list, JSON for a dict."""
    inner, optional = without_none(hint)
    if typing.get_origin(inner) is tuple and not is_json(hint):
        parts = [part for word in words for part in _COMMA.split(word) if part]
        if [part.lower() for part in parts] == ["none"]:
            return None if optional else ()
        if len(parts) == 1 and parts[0] in list_or_word(hint):
            return parts[0]
        return checked_value(name, hint, [_parse(name, typing.get_args(inner)[0], part) for part in parts])
    if is_json(hint) and words:
        words = [" ".join(words)]
    if inner is bool and not words:
        return True
    if len(words) != 1:
        got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        raise UserError(f"{name} takes one value ({describe_type(hint)}), {got}.")
    return checked_value(name, hint, _parse(name, hint, words[0]))


def _parse(name: str, hint: Any, word: str) -> Any:
    """The value of one word; a word that is not of that type is returned unchanged, for `checked_value` to refuse
    it."""
    inner, optional = without_none(hint)
    if optional and word.lower() == "none":
        return None
    if is_json(hint):
        try:
            return parse_json(word)
        except json.JSONDecodeError as error:
            raise UserError(f"{name} = {word!r} is not JSON ({error}): it must be {describe_type(hint)}.") from None
    if typing.get_origin(inner) is typing.Literal:
        return {str(a): a for a in typing.get_args(inner)}.get(word, word)
    if inner is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(word.lower(), word)
    try:
        return inner(word)
    except ValueError:
        return word
