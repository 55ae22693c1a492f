"""Every metric that a run can log, explained: the source of docs/metrics.md and of a report's tooltips.

python -m rlhf_jax.metrics.catalog > docs/metrics.md
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re

from rlhf_jax.metrics.catalog_tables import SECTIONS

EVAL = re.compile(r"(?:eval|train)(?:_(?P<set>[^/]+?))?(?P<by>[/_])(?P<name>.+)")
INTRODUCTION = """# Metrics

What a run writes to `metrics.jsonl` (a line an update, deterministic) and `timings.jsonl` (clocks and memory), and what
`python -m rlhf_jax.report` draws. Names are TRL's where TRL has the metric; [numerics.md](numerics.md) says how each is
computed. Ranges are those of runs that learn; a run may leave one for a while and recover, so look at where a curve
goes. In a name `*` stands for anything. Evaluations log the same names behind `eval_` (`eval_NAME_` where there are
several sets) or, in SFT and reward models, behind `eval/` (`eval_NAME/`), and reward models those of all training pairs
behind `train/` in `finished.json`. What a reward function logs by itself has the name that it gives.

Written by `python -m rlhf_jax.metrics.catalog > docs/metrics.md`.
"""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What there is to know of a metric.

    Attributes:
      name: as logged, or a pattern with `*`.
      meaning: what it is, with its unit.
      healthy: where it should be.
      action: what to do where it is not.
    """

    name: str
    meaning: str
    healthy: str
    action: str


@functools.cache
def explanations() -> dict[str, Explanation]:
    """All of them by name, in the order of the page."""
    rows = [row for _, _, rows in SECTIONS for row in rows]
    return {name: Explanation(name, *said) for names, *said in rows for name in names.split()}


def explain(name: str) -> Explanation | None:
    """The explanation of a metric as it stands in metrics.jsonl or timings.jsonl.

    Args:
      name: with or without the prefix of an evaluation.

    Returns:
      Its explanation; of an evaluation's metric that of its own name, or else that of the same metric in training.
      None: not ours, as what a reward function logs.
    """
    match = EVAL.fullmatch(name)
    if (found := _known(name)) or match is None:
        return found
    # eval_NAME_metric, where a name may have any characters: the longest metric that the whole ends in.
    whole = f"{match['set']}{match['by']}{match['name']}" if match["set"] else match["name"]
    starts = [i for i in range(len(whole)) if i == 0 or whole[i - 1] in "_/"]
    for rest in (
        *(whole[i:] for i in starts if "/" in whole[i:]),
        f"eval/{match['name']}",
        *(whole[i:] for i in starts),
    ):
        if found := _known(rest):
            return found
    return None


def _known(name: str) -> Explanation | None:
    """The explanation of just this name."""
    known = explanations()
    patterns = (pattern for pattern in known if "*" in pattern and fnmatch.fnmatchcase(name, pattern))
    return known.get(name) or known.get(next(patterns, ""))


def page() -> str:
    """docs/metrics.md."""
    lines = [INTRODUCTION]
    for title, words, rows in SECTIONS:
        lines += [f"## {title}", "", *([words, ""] if words else [])]
        lines += ["| metric | what it is | healthy | what to do |", "|---|---|---|---|"]
        for names, *said in rows:
            shown = ", ".join(f"`{name}`" for name in names.split())
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (shown, *said)) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
