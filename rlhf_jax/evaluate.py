"""How two policies compare on held-out prompts: statistics and tables. Arrays and strings in, text out."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlhf_jax.folder import write_atomically
from rlhf_jax.metrics import json_text
from rlhf_jax.text import printable

Z95 = 1.959963984540054  # 97.5 % point of the normal distribution


def mean_and_standard_error(x: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, std(ddof=1) / sqrt(N).

    Args:
      x: [N] numbers.

    Returns:
      (mean, standard error); the error of a single number is NaN, and so is the mean of none.
    """
    x = np.asarray(x, np.float64)
    if x.size == 0:
        return math.nan, math.nan
    error = float(np.std(x, ddof=1) / math.sqrt(x.size)) if x.size > 1 else math.nan
    return float(np.mean(x)), error


def paired_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean of a - b over the same prompts, and its standard error.

    Args:
      a, b: [N] numbers; row i of both answers prompt i.

    Returns:
      (mean difference, standard error)

    Raises:
      ValueError: other lengths.
    """
    a, b = _paired(a, b)
    return mean_and_standard_error(a - b)


def win_rate(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """How often `a` beats `b` on the same prompt, ties counting half, with a 95 % interval.

    The interval is Wilson's score interval, with each tie as half a win. It stays inside [0, 1] and is sound at few
    rows; ties only make the true interval narrower, so it errs on the wide side.
    source: Wilson 1927, Probable Inference, the Law of Succession, and Statistical Inference.

    Args:
      a, b: [N] numbers, N >= 1; row i of both answers prompt i; more is better.

    Returns:
      (rate, lower end, upper end), each in [0, 1].

    Raises:
      ValueError: other lengths, or no rows.
    """
    a, b = _paired(a, b)
    n = a.size
    if n == 0:
        raise ValueError("a win rate needs at least one pair")
    rate = float(np.mean((a > b) + 0.5 * (a == b)))
    middle = (rate + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(rate * (1 - rate) / n + Z95**2 / (4 * n**2))
    return rate, max(middle - half, 0.0), min(middle + half, 1.0)


def _paired(a, b) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"paired numbers must be two vectors of one length, not {a.shape} and {b.shape}")
    return a, b


def unigram_entropy(token_lists: Iterable[Sequence[int]]) -> float:
    """Entropy of the distribution of single tokens: the loss of a model that knows their frequencies and no context.

    Args:
      token_lists: sequences of token ids, of any lengths.

    Returns:
      Nats a token; 0 for no tokens.
    """
    counts = Counter()
    for tokens in token_lists:
        counts.update(np.asarray(tokens).ravel().tolist())
    if not counts:
        return 0.0
    p = np.asarray(list(counts.values()), np.float64)
    p /= p.sum()
    return float(-np.sum(p * np.log(p)))


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
    cells = [list(columns)] + [[cell(row) for cell in columns.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]

    def align(line):
        first, *others = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        return "  ".join([first, *others]).rstrip()

    return "\n".join([align(cells[0]), "-" * (sum(widths) + 2 * (len(widths) - 1)), *map(align, cells[1:])])


def side_by_side(samples: Sequence[dict[str, Any]], width: int | None = None) -> str:
    """Samples in plain text: each post, and under it the responses in columns, with their gold rewards.

    Args:
      samples: {"post": str, "responses": [{"name": str, "text": str, "gold": float or absent}, ...]} each.
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
            heads.append(response["name"] if gold is None else f"{response['name']} (gold {gold:.2f})")
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
