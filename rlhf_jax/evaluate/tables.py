"""How policies compare on held-out prompts, as text: tables, and samples side by side."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax.metrics.statistics import mean_and_standard_error, win_rate
from rlhf_jax.runtime.run_folder import write_atomically
from rlhf_jax.utils.strict_json import json_text
from rlhf_jax.utils.text import printable


def summarize(
    name: str,
    *,
    gold: Sequence[float] | None = None,
    score: Sequence[float] | None = None,
    kl: Sequence[float] | None = None,
    lengths: Sequence[int] | None = None,
    ended: Sequence[bool] | None = None,
    against: Sequence[float] | None = None,
) -> dict[str, Any]:
    """One policy's row of the comparison. What is not given is left out.

    Args:
      name: of the policy.
      gold: [N] gold rewards of its responses.
      score: [N] reward-model scores.
      kl: [N] KL to the reference, summed over each response, nats.
      lengths: [N] response lengths in tokens.
      ended: [N] whether each response came to its eos.
      against: [N] gold rewards of the policy that it is compared with, same prompts.

    Returns:
      {"name", "samples", "gold_reward", "gold_reward_se", "score", "score_se", "kl", "kl_se", "length", "length_se",
      "eos_rate", "win_rate", "win_rate_low", "win_rate_high"}
    """
    row: dict[str, Any] = {"name": name}
    columns = {"gold_reward": gold, "score": score, "kl": kl, "length": lengths}
    for column, values in columns.items():
        if values is not None:
            row.setdefault("samples", len(values))
            row[column], row[f"{column}_se"] = mean_and_standard_error(values)
    if ended is not None:
        row["eos_rate"] = float(np.mean(np.asarray(ended, np.float64)))
    if against is not None and gold is not None:
        row["win_rate"], row["win_rate_low"], row["win_rate_high"] = win_rate(gold, against)
    return row


def comparison_table(rows: Sequence[dict[str, Any]]) -> str:
    """The comparison as a table in plain text.

    Args:
      rows: from `summarize`. A column that no row has is left out; an empty cell is a dash.

    Returns:
      Lines without a final line end.
    """

    def spread(key, digits):
        return lambda r: f"{r[key]:.{digits}f} ± {r[f'{key}_se']:.{digits}f}" if r.get(key) is not None else "-"

    def wins(r):
        if r.get("win_rate") is None:
            return "-"
        return f"{100 * r['win_rate']:.1f} % ({100 * r['win_rate_low']:.1f} to {100 * r['win_rate_high']:.1f})"

    columns = {
        "": ("name", lambda r: r["name"]),
        "gold reward": ("gold_reward", spread("gold_reward", 3)),
        "reward model": ("score", spread("score", 3)),
        "KL to reference": ("kl", spread("kl", 2)),
        "length": ("length", spread("length", 1)),
        "eos": ("eos_rate", lambda r: f"{100 * r['eos_rate']:.1f} %" if r.get("eos_rate") is not None else "-"),
        "win rate (95 %)": ("win_rate", wins),
    }
    columns = {head: cell for head, (key, cell) in columns.items() if any(r.get(key) is not None for r in rows)}
    return aligned([list(columns)] + [[cell(row) for cell in columns.values()] for row in rows])


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """A table in plain text: the head, a rule, the rows; the first column to the left, the others to the right.

    Args:
      cells: [rows][columns], the head first.

    Returns:
      Lines without a final line end.
    """
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]

    def align(line):
        first, *others = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        return "  ".join([first, *others]).rstrip()

    return "\n".join([align(cells[0]), "-" * (sum(widths) + 2 * (len(widths) - 1)), *map(align, cells[1:])])


def side_by_side(samples: Sequence[dict[str, Any]], width: int | None = None) -> str:
    """Samples in plain text: each post, and under it the responses in columns, with their gold rewards.

    Args:
      samples: {"post": str, "responses": [{"name": str, "text": str, "gold": float or absent, "note": what else stands
        behind the name, or absent}, ...]} each.
      width: characters a line; default: the terminal's.

    Returns:
      Lines without a final line end.
    """
    width = max(width or shutil.get_terminal_size((100, 24)).columns, 40)
    blocks = []
    for number, sample in enumerate(samples, 1):
        responses = sample["responses"]
        each = (width - 3 * (len(responses) - 1)) // max(len(responses), 1)
        heads, texts = [], []
        for response in responses:
            gold = response.get("gold")
            note = response.get("note") or ("" if gold is None else f"gold {gold:.2f}")
            heads.append(printable(f"{response['name']} ({note})" if note else response["name"]))
            texts.append(textwrap.wrap(printable(" ".join(response["text"].split())), each) or ["(empty)"])
        heads = _same_height([textwrap.wrap(head, each) for head in heads])
        columns = _same_height([[*head, "-" * each, *text] for head, text in zip(heads, texts)])
        lines = [" | ".join(cell.ljust(each) for cell in line).rstrip() for line in zip(*columns)]
        post = [
            part for line in printable(sample["post"]).splitlines() for part in (textwrap.wrap(line, width) or [""])
        ]
        blocks.append("\n".join([f"== Sample {number}", *post, "", *lines]))
    return "\n\n".join(blocks)


def _same_height(columns: list[list[str]]) -> list[list[str]]:
    """Columns of lines, the shorter ones filled with empty lines."""
    height = max(map(len, columns), default=0)
    return [column + [""] * (height - len(column)) for column in columns]


def print_comparison(
    rows: Sequence[dict[str, Any]], samples: Sequence[dict[str, Any]] = (), *, title: str = "", stream=None
) -> None:
    """Prints the samples side by side and then the table, so that the table is what the eye meets last.

    Args:
      rows: from `summarize`.
      samples: as `side_by_side` takes them.
      title: a line above the table.
      stream: where to; default: standard output.
    """
    stream = stream or sys.stdout
    if samples:
        print(side_by_side(samples) + "\n", file=stream)
    print("\n".join(filter(None, [title, comparison_table(rows)])), file=stream, flush=True)


def write_comparison(
    path: str, rows: Sequence[dict[str, Any]], samples: Sequence[dict[str, Any]] = (), **facts
) -> None:
    """Writes comparison.json: {"rows", "samples", **facts}, with every digit.

    Args:
      path: of the file; its folder exists.
      rows, samples: as `print_comparison`.
      **facts: anything else worth keeping, of values that JSON has.
    """
    write_atomically(path, json_text({"rows": list(rows), "samples": list(samples), **facts}, indent=2) + "\n")
