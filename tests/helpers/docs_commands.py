"""The commands documented in README and docs/, for the tests that check them and for `scripts/try_docs.py`."""

from __future__ import annotations

import pathlib
import re
import shlex

from tests.helpers.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```[^\n]*\n.*?^```", re.M | re.S)
STANDS_FOR = {"$COMMON": "", "CONFIG": "quickstart.py", "my_ppo.py": "tldr_ppo.py"}
"""Placeholders in commands, and a value for each."""


def text_of(page: pathlib.Path) -> str:
    """Text of a page."""
    return page.read_text(encoding="utf-8")


def words_of(text: str) -> list[list[str]]:
    """The words of each command in shell text; a command inside quotes follows the one around it."""
    commands, line = [], ""
    for part in re.split(r"\n|&&", re.sub(r"(^|\s)#.*", "", text.replace("\\\n", " "))):
        line = f"{line} && {part}" if line else part
        try:
            words = shlex.split(line)
        except ValueError:  # an open quote, which ends on a later line
            continue
        commands += [words, *(inner for word in words if " " in word for inner in words_of(word))]
        line = ""
    return commands


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every command of this project in a code block of the docs."""
    commands = []
    for page in PAGES:
        for block in FENCE.findall(text_of(page)):
            if not re.match(r"```(?!bash|sh|$)\w", block):
                found = map(by_python, words_of(block.strip("`\n")))
                commands += [(page.name, words) for words in found if is_ours(words)]
    return commands


def by_python(words: list[str]) -> list[str]:
    """A command with `python -m rlhf_jax.COMMAND` in place of `rlhf-jax COMMAND`."""
    at = next((n for n, word in enumerate(words) if pathlib.PurePath(word).name == "rlhf-jax"), None)
    if at is None or at + 1 == len(words):
        return words
    command = words[at + 1]
    module = (
        [f"rlhf_jax.{command}"] if command in ("train", "evaluate", "report", "chat") else ["rlhf_jax.cli", command]
    )
    return [*words[:at], "python", "-m", *module, *words[at + 2 :]]


def programs() -> dict[str, str]:
    """{file name: text} of the config files that docs/researchers.md prints."""
    text = text_of(ROOT / "docs" / "researchers.md")
    return dict(re.findall(r"This file, `(\w+\.py)`.*?^```python\n(.*?)^```", text, re.M | re.S))


def is_ours(words: list[str]) -> bool:
    """Whether a command runs this package or a script of scripts/."""
    modules = {f"rlhf_jax.{name}" for name in ("train", "evaluate", "report", "chat", "cli")}
    return bool(modules & {*words}) or any(re.match(r"(\S*/)?scripts/\w", word) for word in words)
