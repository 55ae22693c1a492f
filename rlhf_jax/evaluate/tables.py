"""Comparison of policies on held-out prompts: its rows, as a table and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.metrics.statistics import Z95, mean_and_standard_error, wilson, win_rate
from rlhf_jax.storage import write_atomically
from rlhf_jax.utils.strict_json import json_text
from rlhf_jax.utils.tables import plain_table, side_by_side


def summarize(
    name: str,
    *,
    gold: Sequence[float] | None = None,
    score: Sequence[float] | None = None,
    rewards: Mapping[str, Sequence[float]] | None = None,
    kl: Sequence[float] | None = None,
    lengths: Sequence[int] | None = None,
    entropy: Sequence[float] | None = None,
    ended: Sequence[bool] | None = None,
    against: Sequence[float] | None = None,
) -> dict[str, Any]:
    """One policy's row of the comparison, with the columns of the arguments that are not None.

    Args:
      gold: [N] gold rewards of its responses.
      score: [N] reward-model scores.
      rewards: [N] by the reward's name; NaN, where one does not apply, is left out.
      kl: [N] KL to the reference, summed over each response, nats.
      lengths: [N] response lengths in tokens.
      entropy: [N] entropy of each response, nats per token.
      ended: [N] whether each response ended with eos.
      against: [N] gold rewards of the opponent on the same prompts.

    Returns:
      {"name", "samples", "gold_reward", "gold_reward_se", "score", "score_se", "kl", "kl_se", "length", "length_se",
      "entropy", "entropy_se", "rewards": `_reward_row` by name, "eos_rate", "win_rate", "win_rate_low",
      "win_rate_high"}
    """
    row: dict[str, Any] = {"name": name}
    columns = {"gold_reward": gold, "score": score, "kl": kl, "length": lengths, "entropy": entropy}
    for column, values in columns.items():
        if values is not None:
            row.setdefault("samples", len(values))
            row[column], row[f"{column}_se"] = mean_and_standard_error(values)
    if rewards is not None:
        row["rewards"] = {reward: _reward_row(values) for reward, values in rewards.items()}
    if ended is not None:
        row["eos_rate"] = float(np.mean(np.asarray(ended, np.float64)))
    if against is not None and gold is not None:
        row["win_rate"], row["win_rate_low"], row["win_rate_high"] = win_rate(gold, against)
    return row


def _reward_row(values: Sequence[float]) -> dict[str, float]:
    """{"mean", "se", "low", "high"} of a reward, [N] with NaN where it does not apply: of 0 and 1 alone Wilson's 95 %
    interval, else the normal one."""
    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    mean, error = mean_and_standard_error(values)
    low, high = mean - Z95 * error, mean + Z95 * error
    if values.size and np.isin(values, (0, 1)).all():
        _, low, high = wilson(values)
    return {"mean": mean, "se": error, "low": low, "high": high}


def comparison_table(rows: Sequence[dict[str, Any]]) -> str:
    """The comparison as a table in plain text.

    With rewards by name, means have 95 % intervals in place of standard errors.

    Args:
      rows: from `summarize`. Columns without a value are omitted; an empty cell is a dash.

    Returns:
      Lines without a final newline.
    """
    rewards = dict.fromkeys(name for row in rows for name in row.get("rewards", {}))

    def mean_and_error(key, digits):
        if not rewards:
            return lambda r: f"{r[key]:.{digits}f} ± {r[f'{key}_se']:.{digits}f}" if r.get(key) is not None else "-"

        def cell(r):
            if r.get(key) is None:
                return "-"
            low, high = (r[key] + side * Z95 * r[f"{key}_se"] for side in (-1, 1))
            return f"{r[key]:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

        return cell

    def reward_and_interval(name):
        def cell(r):
            value = r.get("rewards", {}).get(name)
            return "-" if value is None else "{mean:.3f} ({low:.3f} to {high:.3f})".format(**value)

        return cell

    def win_rate_and_interval(r):
        if r.get("win_rate") is None:
            return "-"
        return f"{100 * r['win_rate']:.1f} % ({100 * r['win_rate_low']:.1f} to {100 * r['win_rate_high']:.1f})"

    columns = {
        "": ("name", lambda r: r["name"]),
        "gold reward": ("gold_reward", mean_and_error("gold_reward", 3)),
        "reward model": ("score", mean_and_error("score", 3)),
        **{name: ("rewards", reward_and_interval(name)) for name in rewards},
        "KL to reference": ("kl", mean_and_error("kl", 2)),
        "length": ("length", mean_and_error("length", 1)),
        "entropy": ("entropy", mean_and_error("entropy", 3)),
        "eos": ("eos_rate", lambda r: f"{100 * r['eos_rate']:.1f} %" if r.get("eos_rate") is not None else "-"),
        "win rate (95 %)": ("win_rate", win_rate_and_interval),
    }
    columns = {head: cell for head, (key, cell) in columns.items() if any(r.get(key) is not None for r in rows)}
    return plain_table([list(columns)] + [[cell(row) for cell in columns.values()] for row in rows])


def print_comparison(
    rows: Sequence[dict[str, Any]], samples: Sequence[dict[str, Any]] = (), *, title: str = "", stream=None
) -> None:
    """Prints the samples side by side, then the table.

    Args:
      rows: from `summarize`.
      samples: as for `side_by_side`.
      title: a line above the table.
      stream: output; default: standard output.
    """
    stream = stream or sys.stdout
    if samples:
        print(side_by_side(samples) + "\n", file=stream)
    print("\n".join(filter(None, [title, comparison_table(rows)])), file=stream, flush=True)


def write_comparison(
    path: str, rows: Sequence[dict[str, Any]], samples: Sequence[dict[str, Any]] = (), **fields
) -> None:
    """Writes comparison.json: {"rows", "samples", **fields}, in full precision.

    Args:
      path: of the file, in an existing folder.
      rows, samples: as for `print_comparison`.
      **fields: further JSON values.
    """
    write_atomically(path, json_text({"rows": list(rows), "samples": list(samples), **fields}, indent=2) + "\n")
