"""Results of an evaluation as text for the terminal: samples side by side, then tables, most important last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_jax.utils.tables import plain_table, side_by_side


def blocks(results: dict[str, Any], samples: Sequence[dict[str, Any]], limit: int | None) -> Iterator[str]:
    """The texts to print, one for each table.

    Args:
      results: content of evaluation.json.
      samples: rows of samples.jsonl.
      limit: maximum number of samples; None: all.
    """
    printed = samples if limit is None else samples[:limit]
    if printed:
        yield "\n" + side_by_side([_sample(row) for row in printed])
    if "reward_model" in results:
        yield "\n" + _reward_model_table(results["reward_model"])
    if "policies" in results:
        yield "\n" + _policies_table(results)
        if any("by_task" in row for row in results["policies"]):
            yield "\n" + _tasks_table(results["policies"])
    if "best_of_n" in results:
        yield "\n" + _best_of_n_table(results["best_of_n"])
    if results.get("win_rates"):
        yield "\n" + _win_rates_table(results["win_rates"])
        yield from _notes(results["win_rates"])


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    """A row of samples.jsonl as `side_by_side` takes it: the first answer of each policy."""
    responses = []
    for name, answers in row["answers"].items():
        first = answers[0]
        notes = [f"{key} {first[key]:.2f}" for key in ("score", "gold") if key in first]
        responses.append({"name": name, "text": first["text"], "note": ", ".join(notes)})
    return {"post": row["prompt"], "responses": responses}


def _mean(value: dict[str, Any] | None, digits: int = 3, percent: bool = False) -> str:
    """'mean ± se' of a `mean_of`; '-' for None."""
    if value is None or value["mean"] is None:
        return "-"
    scale = 100.0 if percent else 1.0
    text = f"{scale * value['mean']:.{digits}f}"
    if value["se"] is not None:
        text += f" ± {scale * value['se']:.{digits}f}"
    return f"{text} %" if percent else text


def _policies_table(results: dict[str, Any]) -> str:
    rows, rewards = results["policies"], results["rewards"]
    columns: dict[str, Any] = {"": lambda r: r["name"]}
    if any("score" in row for row in rows):
        columns[rewards[0] if len(rewards) == 1 else "score"] = lambda r: _mean(r.get("score"))
    if len(rewards) > 1:
        for name in rewards:
            columns[name] = lambda r, name=name: _mean(r.get("rewards", {}).get(name))
    for key, head, digits, percent in (
        ("gold", "gold reward", 3, False),
        ("kl", "KL", 2, False),
        ("length", "tokens", 1, False),
        ("characters", "characters", 1, False),
        ("eos_rate", "eos", 1, True),
        ("rouge1", "ROUGE-1", 1, True),
        ("rouge2", "ROUGE-2", 1, True),
        ("rougeL", "ROUGE-L", 1, True),
    ):
        if any(key in row for row in rows):
            columns[head] = lambda r, key=key, digits=digits, percent=percent: _mean(r.get(key), digits, percent)
    for key, head, digits in (("call_frequency", "calls", 2), ("failure_frequency", "failed calls", 3)):
        if any(f"tools/{key}" in row for row in rows):
            columns[head] = lambda r, key=f"tools/{key}", digits=digits: f"{r[key]:.{digits}f}" if key in r else "-"
    sampling = results["sampling"]
    title = f"{results['data']['prompts']} prompts of {results['data']['name']}, "
    title += f"temperature {sampling['temperature']:g}"
    title += f", {sampling['samples']} responses to each" if sampling["samples"] > 1 else ""
    missing = [row for row in rows if row.get("score", {}).get("missing")]
    lines = [title, plain_table([list(columns), *([cell(row) for cell in columns.values()] for row in rows)])]
    lines += [f"{row['name']}: {row['score']['missing']} answers without a score are left out" for row in missing]
    return "\n".join(lines)


def _tasks_table(policies: Sequence[dict[str, Any]]) -> str:
    """A line for each task, policy and reward; accuracy where some rewards are between 0 and 1."""
    head = ["task", "prompts", "policy", "reward", "mean (95 %)", "accuracy (95 %)"]
    cells = []
    for task in policies[0]["by_task"]:
        for row in policies:
            of_task = row.get("by_task", {}).get(task, {"prompts": 0, "rewards": {}})
            for name, summary in of_task["rewards"].items():
                mean = f"{summary['mean']:.3f} ({summary['low']:.3f} to {summary['high']:.3f})"
                accuracy = summary.get("accuracy")
                share = "-" if accuracy is None else _rate(accuracy["mean"], accuracy["low"], accuracy["high"])
                cells.append([task, str(of_task["prompts"]), row["name"], name, mean, share])
    return "\n".join(["By task (accuracy: the share of answers with a reward of 1)", plain_table([head, *cells])])


def _rate(rate: float | None, low: float | None, high: float | None) -> str:
    """'rate % (low to high)'; '-' for None."""
    if rate is None:
        return "-"
    return f"{100 * rate:.1f} %" + (f" ({100 * low:.1f} to {100 * high:.1f})" if low < high else "")


def _win_rates_table(rows: Sequence[dict[str, Any]]) -> str:
    head = [
        "judged by",
        "against",
        "wins",
        "ties",
        "losses",
        "win rate (95 %)",
        "length-controlled (95 %)",
        "difference",
    ]
    cells = [head]
    for row in rows:
        name = "length_controlled_win_rate"
        # The bootstrap interval of a rate of 0 or 1 is a point; Wilson's is not.
        interval = "win_rate" if row["win_rate"] not in (0.0, 1.0) else "wilson"
        cells.append(
            [
                *(row["by"], row["against"], str(row["wins"]), str(row["ties"]), str(row["losses"])),
                _rate(row["win_rate"], row[f"{interval}_low"], row[f"{interval}_high"]),
                _rate(row[name], row[f"{name}_low"], row[f"{name}_high"]),
                _mean(row.get("difference")),
            ]
        )
    return "\n".join([f"Win rate of {rows[0]['policy']}", plain_table(cells)])


_MIN_LENGTH_SHARE = 0.05
"""Length control extrapolates if fewer answers than this share are longer (or shorter) than the opponent's."""


def _notes(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Notes on win rates: extrapolated length control, prompts left out, agreement of a judge in both orders."""
    for other in dict.fromkeys(row["against"] for row in rows):
        longer = next((row["longer"] for row in rows if row["against"] == other and row["longer"] is not None), 0.5)
        if min(longer, 1 - longer) < _MIN_LENGTH_SHARE:
            comparative, share = ("longer", longer) if longer > 0.5 else ("shorter", 1 - longer)
            yield (
                f"against {other}: {100 * share:.0f} % of {rows[0]['policy']}'s answers are {comparative}, so the "
                "length-controlled win rate is an extrapolation"
            )
    for row in rows:
        comparison = f"{row['by']} against {row['against']}"
        judge = row.get("judge")
        if row["left_out"]:
            reason = "no score for one of the answers"
            if judge is not None:
                reason = f"{judge['unparsable']} unparsable replies, {judge['unanswered']} questions without a reply"
            yield f"{comparison}: {row['left_out']} prompts left out ({reason})"
        if judge is not None and judge["orders_agree"] is not None:
            yield (
                f"{comparison}: both orders agree on {100 * judge['orders_agree']:.1f} % of prompts; the first answer "
                f"wins {100 * judge['first_place']:.1f} %"
            )


def _best_of_n_table(rows: Sequence[dict[str, Any]]) -> str:
    reward_names = [name for name in rows[0] if name not in ("n", "samples", "prompts", "kl_bound", "score")]
    cells = [["best of", "score", *reward_names, "KL at most"]]
    for row in rows:
        means = [_mean(row[name]) for name in ("score", *reward_names)]
        cells.append([str(row["n"]), *means, f"{row['kl_bound']:.3f}"])
    title = f"Best of n by score, from {rows[0]['samples']} responses to each of {rows[0]['prompts']} prompts"
    return "\n".join([title, plain_table(cells)])


def _reward_model_table(result: dict[str, Any]) -> str:
    cells = [["confidence", "pairs", "mean confidence", "accuracy"]]
    for row in result["bins"]:
        if row["pairs"]:
            span = f"{row['low']:.2f} to {row['high']:.2f}"
            cells.append([span, str(row["pairs"]), f"{row['confidence']:.3f}", f"{row['accuracy']:.3f}"])
    accuracy = _rate(result["accuracy"], result["accuracy_low"], result["accuracy_high"])
    ties = f", {result['ties']} ties" if result["ties"] else ""
    return "\n".join(
        [
            f"Reward model {result['path']} on {result['pairs']} pairs of {result['data']}",
            plain_table(cells),
            f"accuracy {accuracy}{ties}; expected calibration error {result['ece']:.3f}; loss {result['loss']:.3f}; "
            f"margin {result['margin']:.3f}",
        ]
    )
