"""Prints docs/options.md: every option with its type, default and help text, from the config dataclasses.

python scripts/options_page.py > docs/options.md
"""

from __future__ import annotations

import dataclasses
import itertools
import re

from rlhf_jax.algorithms.grpo_options import GRPOOptions
from rlhf_jax.config import STAGES, Pipeline, StageConfig
from rlhf_jax.config.help import Option, declared_options, meaning, owners
from rlhf_jax.config.presets import PRESETS
from rlhf_jax.evaluate.options import EvaluateConfig
from rlhf_jax.option import describe_type, field_types, metadata

INTRODUCTION = """# Options

Every option of `rlhf-jax train` and `rlhf-jax evaluate`. On the command line `--name value` (in a pipeline
`--ppo.name value`), in a config file `PPOConfig(name=value)`. `--config CONFIG --help_all` prints them with the values
of that config, `--help` those that are used often, in a line each. Booleans are `--name true` and `--name false`, or
`--name` and `--no_name`; lists are separated by spaces or commas; dicts are JSON. TRL's other names:
[migrating.md](migrating.md).

"resume" is what a resume may change: **free**: the option does not change what a run computes, or only what happens
when it fails; **rounding**: it changes results by rounding alone; the others need `--override_resume true`.

Written by `python scripts/options_page.py > docs/options.md`.
"""


def tables() -> dict[type, list[str]]:
    """The classes that declare options, and the configs that have them."""
    configs = {**STAGES, "pipeline": Pipeline, "evaluate": EvaluateConfig}
    ordered = [StageConfig, *configs.values()]
    classes = dict.fromkeys(owner for config in ordered for owner in owners(config) if declared_options(owner))
    return {owner: [name for name, config in configs.items() if issubclass(config, owner)] for owner in classes}


def default_of(config: type, name: str) -> str:
    """The default as written on the command line."""
    field = next(field for field in dataclasses.fields(config) if field.name == name)
    if field.default is dataclasses.MISSING:
        return "see below" if field.default_factory is not dataclasses.MISSING else "must be given"
    if dataclasses.is_dataclass(field.default):
        return "its own defaults"
    if isinstance(field.default, tuple):
        return f"`{' '.join(map(str, field.default))}`" if field.default else "none"
    return f"`{field.default}`" if field.default != "" else "empty"


def cell(text: str) -> str:
    """Text for a Markdown table: no bar, no tag."""
    return re.sub(r"<", "&lt;", text.replace("|", "\\|"))


def page() -> str:
    """The text of docs/options.md."""
    lines = [INTRODUCTION]
    for owner, configs in tables().items():
        path = owner.__module__.replace(".", "/")
        lines += [f"## {owner.__name__}", "", " ".join(owner.__doc__.split()), ""]
        lines += [f"`{path}.py`; in the config of {', '.join(configs)}.", ""]
        for section, options in itertools.groupby(declared_options(owner), key=lambda option: option.section):
            lines += (
                [f"### {section[:1].upper()}{section[1:]}", ""]
                if len({o.section for o in declared_options(owner)}) > 1
                else []
            )
            names = ["option", "type", "default", "resume", "meaning"]
            lines += [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
            lines += [row(owner, option) for option in options]
            lines.append("")
        lines += preset_lines() if owner is GRPOOptions else []
    return "\n".join(lines).rstrip() + "\n"


def preset_lines() -> list[str]:
    """The table of GRPO's presets."""
    lines = [
        "### Presets",
        "",
        "`--preset NAME` (in a pipeline `--grpo.preset NAME`), or `rlhf_jax.config.preset(NAME, **options)`: sets the "
        "options below; other flags override them.",
        "",
        "| preset | options | what it is |",
        "|---|---|---|",
    ]
    for name, (what, options) in PRESETS.items():
        given = ", ".join(f"`{key} {value}`" for key, value in options.items())
        lines.append(f"| `{name}` | {given} | {what} |")
    return [*lines, ""]


def row(config: type, option: Option) -> str:
    """A line of a table."""
    text = option.meaning or meaning(config, option.name)
    if not option.meaning and metadata(config, option.name).like is None:
        text = f"Another default: {text}"
    kind = describe_type(field_types(config)[option.name]).partition(" (on the")[0]
    known = metadata(config, option.name)
    resume = {"fixed": "", "free": "free", "rounding": "rounding"}[known.resume] if known.in_config_json else "free"
    cells = [f"`{option.name}`", kind, default_of(config, option.name), resume, text]
    return f"| {' | '.join(map(cell, cells))} |"


if __name__ == "__main__":
    print(page(), end="")
