"""What every metric of a run means: read from catalog.toml, for docs/metrics.md and the tooltips of a report.

python -m rlhf_jax.metrics.catalog > docs/metrics.md
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import pathlib
import re
import tomllib
from typing import Any

EVAL = re.compile(r"(?:eval|train)(?:_(?P<set>[^/]+?))?(?P<by>[/_])(?P<name>.+)")


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a metric means.

    Attributes:
      names: as logged, or patterns with `*`.
      meaning: its definition and unit.
      healthy: its range in runs that learn.
      action: what to do outside that range.
    """

    names: list[str]
    meaning: str
    healthy: str = ""
    action: str = ""


@functools.cache
def _catalog() -> dict[str, Any]:
    return tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@functools.cache
def explanations() -> dict[str, Explanation]:
    """Explanations of all metrics by name, in the order of the page."""
    rows = [Explanation(**row) for section in _catalog()["section"] for row in section["metric"]]
    return {name: row for row in rows for name in row.names}


def explain(name: str) -> Explanation | None:
    """The explanation of a metric of metrics.jsonl or timings.jsonl.

    Args:
      name: with or without the prefix of an evaluation.

    Returns:
      The explanation of this name; for an evaluation's metric without one, that of the same metric in training; None
      for unknown metrics, as those that a reward function logs.
    """
    match = EVAL.fullmatch(name)
    if (explanation := _exact(name)) or match is None:
        return explanation
    # eval_NAME_metric, where NAME may contain any characters: try the longest suffix that is a metric first.
    unprefixed = f"{match['set']}{match['by']}{match['name']}" if match["set"] else match["name"]
    suffixes = [unprefixed[i:] for i in range(len(unprefixed)) if i == 0 or unprefixed[i - 1] in "_/"]
    candidates = (*(suffix for suffix in suffixes if "/" in suffix), f"eval/{match['name']}", *suffixes)
    return next((explanation for suffix in candidates if (explanation := _exact(suffix))), None)


def _exact(name: str) -> Explanation | None:
    """The explanation of this name, without evaluation prefixes."""
    entries = explanations()
    patterns = (pattern for pattern in entries if "*" in pattern and fnmatch.fnmatchcase(name, pattern))
    return entries.get(name) or entries.get(next(patterns, ""))


def page() -> str:
    """The text of docs/metrics.md."""
    lines = [_catalog()["introduction"]]
    for section in _catalog()["section"]:
        lines += [f"## {section['title']}", "", *([section["text"], ""] if "text" in section else [])]
        lines += ["| metric | what it is | healthy | what to do |", "|---|---|---|---|"]
        for row in (Explanation(**metric) for metric in section["metric"]):
            names = ", ".join(f"`{name}`" for name in row.names)
            cells = (names, row.meaning, row.healthy, row.action)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
