"""The samples of runs for a page: as many as it can carry, texts that recur written once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlhf_jax.report.read_run import Run, number, objects
from rlhf_jax.report.series import number as short
from rlhf_jax.utils.text import printable

MOST_CHARACTERS = 1_500_000
"""Of all samples of a page, about."""
LONGEST = 20_000
"""Characters of a text."""
_TEXTS = ("prompt", "query", "completion", "model response")
_KINDS = (("samples", r"(\d+)\.jsonl"), ("training", r"training_(\d+)\.jsonl"))


def collect(runs: Sequence[Run], most: int = MOST_CHARACTERS) -> dict[str, Any]:
    """What a page's table of samples shows.

    Args:
      runs: of the page.
      most: characters of text and numbers, about; of more, files are left out evenly, the first and the last kept.

    Returns:
      {"prompts": texts, "files": [{"run", "step", "kind", "rows"}], "left_out": files}; a row is {"p": of prompts,
      "text", "score", "length", "ended", "tokens", "kl", "advantages", "advantage", "more": the other columns}, each
      where it is there.
    """
    prompts: dict[str, int] = {}
    found, left_out = [], 0
    files = [
        (i, run, kind, run.files("completions", pattern)) for i, run in enumerate(runs) for kind, pattern in _KINDS
    ]
    files = [item for item in files if item[3]]
    for i, run, kind, paths in files:
        room, read = most / len(files), {}
        for place in _spread(len(paths)):
            step, path = paths[place]
            if room <= 0:
                left_out += 1
                continue
            rows = _rows(run, path, prompts)
            room -= sum(_size(row) for row in rows)
            read[place] = {"run": i, "step": step, "kind": kind, "rows": rows}
        found += [read[place] for place in sorted(read)]
    return {"prompts": list(prompts), "files": found, "left_out": left_out}


def _spread(n: int) -> list[int]:
    """0 to n - 1: the last, the first, then always the middle of the longest stretch that is left."""
    order, stretches = [n - 1, *([0] if n > 1 else [])], [(0, n - 1)]
    while stretches:
        nexts = []
        for low, high in stretches:
            if high - low > 1:
                middle = (low + high) // 2
                order.append(middle)
                nexts += [(low, middle), (middle, high)]
        stretches = nexts
    return order


def _size(row: dict[str, Any]) -> int:
    return sum(
        len(value) * (6 if isinstance(value, list) else 1) for value in row.values() if hasattr(value, "__len__")
    )


def _text(value: Any) -> str:
    text = printable(value if isinstance(value, str) else str(value))
    return text if len(text) <= LONGEST else text[: LONGEST // 2] + " … " + text[-LONGEST // 2 :]


def _rows(run: Run, path: str, prompts: dict[str, int]) -> list[dict[str, Any]]:
    rows = run.rows(path)
    tokens = [*objects(path.removesuffix(".jsonl") + ".tokens.jsonl")][: len(rows)]
    found = []
    for i, row in enumerate(rows):
        prompt = _text(row.get("prompt", row.get("query", "")))
        made = {
            "p": prompts.setdefault(prompt, len(prompts)),
            "text": _text(row.get("completion", row.get("model response", ""))),
        }
        numbers = {name: number(value) for name, value in row.items() if name not in _TEXTS}
        for name in ("score", "length", "advantage"):
            if numbers.get(name) is not None:
                made[name] = short(numbers[name])
        if isinstance(row.get("ended"), bool):
            made["ended"] = row["ended"]
        others = {n: v for n, v in row.items() if n not in (*_TEXTS, "score", "length", "advantage", "ended")}
        more = {
            n: short(x) if (x := numbers[n]) is not None and math.isfinite(x) else _text(v) for n, v in others.items()
        }
        if more:
            made["more"] = {_text(name): value for name, value in more.items() if value is not None}
        found.append(made | _of_tokens(tokens[i] if i < len(tokens) else None))
    return found


def _of_tokens(row: dict[str, Any] | None) -> dict[str, Any]:
    """A line of STEP.tokens.jsonl, where its lists are as long as they must be."""
    if row is None or not isinstance(row.get("tokens"), list):
        return {}
    found = {"tokens": [_text(token) for token in row["tokens"]]}
    for name in ("kl", "advantages"):
        values = row.get(name)
        if isinstance(values, list) and len(values) == len(found["tokens"]):
            found[name] = [None if (x := number(value)) is None else short(x, 3) for value in values]
    return found
