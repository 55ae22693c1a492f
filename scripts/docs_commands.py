"""The commands in README and docs/, for the test that reads them and for `try_docs.py`, which runs them."""

from __future__ import annotations

import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```[^\n]*\n.*?^```", re.M | re.S)
STANDS_FOR = {"$COMMON": "", "CONFIG": "quickstart.py", "my_ppo.py": "tldr_ppo.py"}
"""What a command leaves to the reader, and what may stand there."""


def text_of(page: pathlib.Path) -> str:
    """A page."""
    return page.read_text(encoding="utf-8")


def words_of(text: str) -> list[list[str]]:
    """The words of each command in shell text; one that is inside quotes comes by itself, after the one around it."""
    found, line = [], ""
    for part in re.split(r"\n|&&", re.sub(r"(^|\s)#.*", "", text.replace("\\\n", " "))):
        line = f"{line} && {part}" if line else part
        try:
            words = shlex.split(line)
        except ValueError:  # within quotes, which end further on
            continue
        found += [words, *(inner for word in words if " " in word for inner in words_of(word))]
        line = ""
    return found


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every command of ours in a block of the docs."""
    found = []
    for page in PAGES:
        for block in FENCE.findall(text_of(page)):
            if not re.match(r"```(?!bash|sh|$)\w", block):
                found += [(page.name, words) for words in words_of(block.strip("`\n")) if is_ours(words)]
    return found


def is_ours(words: list[str]) -> bool:
    """Whether a command is of this package or of scripts/."""
    modules = {"rlhf_jax.train", "rlhf_jax.evaluate", "rlhf_jax.report"}
    return bool(modules & {*words}) or any(re.match(r"(\S*/)?scripts/\w", word) for word in words)
