"""Help texts of options, from the config dataclasses: `--help` in groups with a line each, `--help_all` in full."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_jax.config.stages import STAGES, Pipeline, PolicyConfig, StageConfig
from rlhf_jax.option import Options, describe_type, field_ranges, field_types, metadata

TITLES = {"sft": "SFT", "reward": "Reward model", "ppo": "PPO", "rloo": "RLOO", "grpo": "GRPO"}
_FLAG_WIDTH = 40


@dataclasses.dataclass(frozen=True)
class Option:
    """An option in the source: the section that it is in, its name and its help text."""

    section: str
    name: str
    meaning: str


@functools.cache
def declared_options(config: type) -> tuple[Option, ...]:
    """The options that a class itself defines, in order; without a help text if it only changes a default."""
    try:
        source = textwrap.dedent(inspect.getsource(config))
    except (OSError, TypeError):  # a class of the user's without a file
        return tuple(Option("", name, "") for name in config.__annotations__)
    sections = {n: line.strip()[5:].strip() for n, line in enumerate(source.splitlines(), 1) if "# --- " in line}
    options = []
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    for node, after in zip(definition.body, [*definition.body[1:], None]):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            section = next((sections[n] for n in sorted(sections, reverse=True) if n < node.lineno), "")
            documented = after.value if isinstance(after, ast.Expr) else None
            text = str(documented.value) if isinstance(documented, ast.Constant) else ""
            options.append(Option(section, node.target.id, " ".join(text.split())))
    return tuple(options)


def owners(config_type: type) -> list[type]:
    """The classes that an options dataclass is made of, itself first."""
    return [owner for owner in config_type.__mro__ if dataclasses.is_dataclass(owner)]


def meaning(config_type: type, name: str) -> str:
    """The help text of an option, from the nearest class that has one: a class that only changes a default has none."""
    options = (option for owner in owners(config_type) for option in declared_options(owner))
    text = next((option.meaning for option in options if option.name == name and option.meaning), "")
    like = metadata(config_type, name).like
    return text if text or like is None else meaning(like, name)


def groups(config_type: type) -> dict[str, list[Option]]:
    """Options by section, those of the class itself first; each once, in the section where it is declared."""
    by_section: dict[str, list[Option]] = {}
    declared = {option.name: owner for owner in owners(config_type) for option in declared_options(owner)}
    for owner in owners(config_type):
        for option in declared_options(owner):
            if declared[option.name] is owner:
                text = meaning(config_type, option.name)
                by_section.setdefault(option.section, []).append(Option(option.section, option.name, text))
    return by_section


def text(config: Options, usage: str, everything: bool = False) -> str:
    """The help of a config: every option with its value in it.

    Args:
      config: a stage's config, a Pipeline, or another dataclass with options.
      usage: the first line, without 'usage: '.
      everything: all options with type and whole meaning; else a line for each that is not rare.
    """
    lines = [f"usage: {usage}", "", *textwrap.wrap(" ".join((type(config).__doc__ or "").split()), _width()), ""]
    if isinstance(config, Pipeline):
        lines += _pipeline(config, everything)
    else:
        for section, options in groups(type(config)).items():
            lines += _group(_heading(section), options, config, "", everything)
    shortened = not everything and (isinstance(config, Pipeline) or any(_hidden(config, n) for n in vars(config)))
    more = " --help_all lists all, in full." if shortened else ""
    lines += [f"Each option is shown with its value here.{more} Lists: a b or a,b. Dicts: JSON."]
    return "\n".join(lines)


def _pipeline(config: Pipeline, everything: bool) -> Iterator[str]:
    """The options of a pipeline: its own, the policy's, and those of the other stages that only they have or that the
    config sets."""
    stages = {name: stage for name in STAGES if (stage := getattr(config, name)) is not None}
    policy = next((name for name, stage in stages.items() if isinstance(stage, PolicyConfig)), [*stages][-1])
    pipeline_options = [
        option for options in groups(Pipeline).values() for option in options if option.name not in STAGES
    ]
    yield from _group("The run", pipeline_options, config, "", everything)
    of_all = {option.name for option in pipeline_options}  # of every stage at once
    for name in [policy, *(name for name in stages if name != policy)]:
        stage = stages[name]
        mine = set(field_types(type(stage))) - set(field_types(StageConfig))
        for section, options in groups(type(stage)).items():
            if not everything:
                options = [option for option in options if option.name not in of_all]
            if not (everything or name == policy):
                options = [option for option in options if option.name in mine or _differs(stage, option.name)]
            title = f"{TITLES.get(name, name)}: {section}" if section else TITLES.get(name, name)
            yield from _group(title, options, stage, f"{name}.", everything)
    if not everything:
        yield f"Options of {policy}. that every stage has exist for the other stages too, as --sft.learning_rate."
        yield ""


def _heading(section: str) -> str:
    return section[:1].upper() + section[1:]


def _group(heading: str, options: Sequence[Option], config: Options, prefix: str, everything: bool) -> Iterator[str]:
    shown = [option for option in options if everything or not _hidden(config, option.name)]
    if shown:
        yield from filter(None, [heading])
        for option in shown:
            yield from _lines(option, config, prefix, everything)
        yield ""


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


def _differs(config: Options, name: str) -> bool:
    field = type(config).__dataclass_fields__[name]
    return field.default is not dataclasses.MISSING and getattr(config, name) != field.default


def _hidden(config: Options, name: str) -> bool:
    return metadata(type(config), name).rare and not _differs(config, name)


def _lines(option: Option, config: Options, prefix: str, everything: bool) -> Iterator[str]:
    flag = f"  --{prefix}{option.name} {value_text(getattr(config, option.name))}"
    if not everything:
        sentence = re.split(r"(?<!al\.)(?<=\.) ", option.meaning, maxsplit=1)[0].removesuffix(".")
        room = _width() - max(len(flag), _FLAG_WIDTH) - 2
        yield f"{flag:<{_FLAG_WIDTH}}  {_clipped(sentence, room)}" if room >= 12 else flag
        return
    kind = describe_type(field_types(type(config))[option.name])
    allowed = field_ranges(type(config)).get(option.name)
    kind += f", {allowed.description}" if allowed else ""
    yield flag
    yield from textwrap.wrap(
        f"{option.meaning} [{kind}]",
        _width(),
        initial_indent=" " * 6,
        subsequent_indent=" " * 6,
        break_long_words=False,
    )


def _clipped(sentence: str, room: int) -> str:
    """A sentence of at most `room` characters: one that is longer ends at a clause, with ' ...'."""
    if len(sentence) <= room:
        return sentence
    for mark in ("; ", ": ", ", ", " ("):
        end = sentence.rfind(mark, room // 3, room - 4)
        if end > 0:
            return sentence[:end] + " ..."
    return textwrap.shorten(sentence, room, placeholder=" ...")


def value_text(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value).removesuffix(".0")
