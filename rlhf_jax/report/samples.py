"""Samples of runs for the page, up to a size limit, with each prompt stored once."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from rlhf_jax.report.read_run import Run, parse_number, read_json_lines
from rlhf_jax.report.series import rounded
from rlhf_jax.utils.tables import THUMBNAILS
from rlhf_jax.utils.text import printable

MAX_CHARACTERS = 1_500_000
"""Approximate limit for all samples of a page."""
MAX_TEXT_LENGTH = 20_000
"""Maximum number of characters of a text."""
_THUMBNAIL = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]{1,40000}")
_TEXTS = ("prompt", "query", "completion", "model response")
_KINDS = (("samples", r"(\d+)\.jsonl"), ("training", r"training_(\d+)\.jsonl"))


def collect_samples(runs: Sequence[Run], max_characters: int = MAX_CHARACTERS) -> dict[str, Any]:
    """The data of the table of samples.

    Args:
      max_characters: approximate limit for texts and numbers. Beyond it files are left out evenly, keeping the first
        and the last.

    Returns:
      {"prompts": texts, "files": [{"run", "step", "kind", "rows"}], "left_out": number of files}; a row is {"p": index
      of its prompt, "text", "score", "length", "ended", "tokens", "kl", "advantages", "advantage",
      "images": thumbnails, "more": the other columns}, without absent keys.
    """
    prompts: dict[str, int] = {}
    tables, left_out = [], 0
    sources = [
        (i, run, kind, run.files("completions", pattern)) for i, run in enumerate(runs) for kind, pattern in _KINDS
    ]
    sources = [source for source in sources if source[3]]
    for i, run, kind, files in sources:
        budget, tables_by_index = max_characters / len(sources), {}
        for index in _bisection_order(len(files)):
            step, path = files[index]
            if budget <= 0:
                left_out += 1
                continue
            rows = _rows(run, path, prompts)
            budget -= sum(_size(row) for row in rows)
            tables_by_index[index] = {"run": i, "step": step, "kind": kind, "rows": rows}
        tables += [tables_by_index[index] for index in sorted(tables_by_index)]
    return {"prompts": list(prompts), "files": tables, "left_out": left_out}


def _bisection_order(n: int) -> list[int]:
    """0 to n - 1 in the order: last, first, then the middle of each remaining interval."""
    order, intervals = [n - 1, *([0] if n > 1 else [])], [(0, n - 1)]
    while intervals:
        halves = []
        for low, high in intervals:
            if high - low > 1:
                middle = (low + high) // 2
                order.append(middle)
                halves += [(low, middle), (middle, high)]
        intervals = halves
    return order


def _size(row: dict[str, Any]) -> int:
    """Approximate number of characters of a row in JSON."""
    return sum(
        len(value) * (6 if isinstance(value, list) else 1) for value in row.values() if hasattr(value, "__len__")
    ) + sum(map(len, row.get("images", ())))


def _text(value: Any) -> str:
    """A value as printable text, without its middle beyond MAX_TEXT_LENGTH."""
    text = printable(value if isinstance(value, str) else str(value))
    if len(text) <= MAX_TEXT_LENGTH:
        return text
    return text[: MAX_TEXT_LENGTH // 2] + " … " + text[-MAX_TEXT_LENGTH // 2 :]


def _rows(run: Run, path: str, prompts: dict[str, int]) -> list[dict[str, Any]]:
    rows = run.rows(path)
    token_rows = [*read_json_lines(path.removesuffix(".jsonl") + ".tokens.jsonl")][: len(rows)]
    samples = []
    for i, row in enumerate(rows):
        prompt = _text(row.get("prompt", row.get("query", "")))
        sample = {
            "p": prompts.setdefault(prompt, len(prompts)),
            "text": _text(row.get("completion", row.get("model response", ""))),
        }
        numbers = {name: parse_number(value) for name, value in row.items() if name not in _TEXTS}
        for name in ("score", "length", "advantage"):
            if numbers.get(name) is not None:
                sample[name] = rounded(numbers[name])
        if isinstance(row.get("ended"), bool):
            sample["ended"] = row["ended"]
        if images := _thumbnails(row.get(THUMBNAILS)):
            sample["images"] = images
        apart = (*_TEXTS, THUMBNAILS, "score", "length", "advantage", "ended")
        extras = {n: v for n, v in row.items() if n not in apart}
        more = {
            n: rounded(x) if (x := numbers[n]) is not None and math.isfinite(x) else _text(v) for n, v in extras.items()
        }
        if more:
            sample["more"] = {_text(name): value for name, value in more.items() if value is not None}
        samples.append(sample | _token_columns(token_rows[i] if i < len(token_rows) else None))
    return samples


def _thumbnails(value: Any) -> list[str]:
    """The thumbnails of a row, without anything that is none."""
    images = value if isinstance(value, list) else []
    return [image for image in images if isinstance(image, str) and _THUMBNAIL.fullmatch(image)]


def _token_columns(row: dict[str, Any] | None) -> dict[str, Any]:
    """The tokens of a line of STEP.tokens.jsonl, and those of its lists that have one value for each token."""
    if row is None or not isinstance(row.get("tokens"), list):
        return {}
    columns = {"tokens": [_text(token) for token in row["tokens"]]}
    for name in ("kl", "advantages"):
        values = row.get(name)
        if isinstance(values, list) and len(values) == len(columns["tokens"]):
            columns[name] = [None if (x := parse_number(value)) is None else rounded(x, 3) for value in values]
    return columns
