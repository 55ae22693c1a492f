"""Prints docs/options.md: every option with its type, default and help text, from the config dataclasses.

python scripts/options_page.py > docs/options.md
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap

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
from rlhf_jax.config.presets import PRESETS
from rlhf_jax.evaluate.options import EvaluateConfig

INTRODUCTION = """# Options

Every option of `python -m rlhf_jax.train` and `python -m rlhf_jax.evaluate`. On the command line `--name value` (in a
pipeline `--ppo.name value`), in a config file `PPOConfig(name=value)`; `--config CONFIG --help` prints them with the
defaults of that config. Booleans are `--name true` and `--name false`, or `--name` and `--no_name`; lists are separated
by spaces or commas; dicts are JSON. TRL's other names: [migrating.md](migrating.md).

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


@dataclasses.dataclass(frozen=True)
class Option:
    """An option in the source: the section that it is in, its name and its help text."""

    section: str
    name: str
    meaning: str


def options_of(config: type) -> list[Option]:
    """The options that a class itself defines, in order; without a help text if it only changes a default."""
    source = textwrap.dedent(inspect.getsource(config))
    sections = {n: line.strip()[5:].strip() for n, line in enumerate(source.splitlines(), 1) if "# --- " in line}
    options = []
    body = ast.parse(source).body[0].body
    for node, after in zip(body, [*body[1:], None]):
        if isinstance(node, ast.AnnAssign):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            section = next((sections[n] for n in sorted(sections, reverse=True) if n < node.lineno), "")
            meaning = " ".join(after.value.value.split()) if documented else ""
            options.append(Option(section, node.target.id, meaning))
    return options


def inherited(config: type, name: str) -> Option | None:
    """The option of that name in a class that `config` extends."""
    bases = [base for base in config.__mro__[1:] if dataclasses.is_dataclass(base)]
    return next(
        (option for base in bases for option in options_of(base) if option.name == name and option.meaning), None
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
            lines += ["| option | type | default | meaning |", "|---|---|---|---|"]
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
    cells = (f"`{option.name}`", kind, default_of(config, option.name), meaning)
    return f"| {' | '.join(map(cell, cells))} |"


if __name__ == "__main__":
    print(page(), end="")
