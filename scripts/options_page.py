"""Prints docs/options.md: every option with its type, default and help text, from the config dataclasses.

python scripts/options_page.py > docs/options.md
"""

from __future__ import annotations

import dataclasses
import itertools
import re

from rlhf_jax.config import (
    GRPOConfig,
    Pipeline,
    PolicyConfig,
    PPOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
    StageConfig,
    values,
)
from rlhf_jax.config.dataclasses import GroupConfig
from rlhf_jax.config.help import Option, inherited, options_of
from rlhf_jax.config.presets import PRESETS
from rlhf_jax.evaluate.options import EvaluateConfig
from rlhf_jax.option import metadata

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
PAGES = (
    (StageConfig, "All stages"),
    (SFTConfig, "SFT"),
    (RewardConfig, "Reward model"),
    (PolicyConfig, "PPO, RLOO and GRPO"),
    (PPOConfig, "PPO"),
    (GroupConfig, "RLOO and GRPO"),
    (RLOOConfig, "RLOO"),
    (GRPOConfig, "GRPO"),
    (Pipeline, "Pipelines"),
    (EvaluateConfig, "Evaluation"),
)


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
    for config, title in PAGES:
        lines += [f"## {title}", "", f"`{config.__name__}`: {' '.join(config.__doc__.split())}", ""]
        for section, options in itertools.groupby(options_of(config), key=lambda option: option.section):
            lines += [f"### {title}: {section}", ""] if section else []
            names = ["option", "type", "default", *(["resume"] if issubclass(config, StageConfig) else []), "meaning"]
            lines += [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
            lines += [row(config, option) for option in options]
            lines.append("")
        lines += preset_lines() if config is GRPOConfig else []
    return "\n".join(lines).rstrip() + "\n"


def preset_lines() -> list[str]:
    """The table of GRPO's presets."""
    lines = [
        "### GRPO: presets",
        "",
        "`--preset NAME` (in a pipeline `--grpo.preset NAME`), or `rlhf_jax.config.preset(NAME, **options)`: sets the "
        "options below; other flags override them.",
        "",
        "| preset | options | what it is |",
        "|---|---|---|",
    ]
    for name, (meaning, options) in PRESETS.items():
        given = ", ".join(f"`{key} {value}`" for key, value in options.items())
        lines.append(f"| `{name}` | {given} | {meaning} |")
    return [*lines, ""]


def row(config: type, option: Option) -> str:
    """A line of a table."""
    above = inherited(config, option.name)
    meaning = option.meaning or (f"Overrides the default above: {above.meaning}" if above else "")
    kind = values.describe_type(values.field_types(config)[option.name]).partition(" (on the")[0]
    known = metadata(config, option.name)
    resume = {"fixed": "", "free": "free", "rounding": "rounding"}[known.resume] if known.in_config_json else "free"
    cells = [f"`{option.name}`", kind, default_of(config, option.name), meaning]
    cells[3:3] = [resume] if issubclass(config, StageConfig) else []
    return f"| {' | '.join(map(cell, cells))} |"


if __name__ == "__main__":
    print(page(), end="")
