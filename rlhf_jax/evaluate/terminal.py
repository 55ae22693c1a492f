"""An evaluation for the terminal: samples side by side, then tables, what matters most last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_jax.evaluate.tables import aligned, side_by_side


def blocks(found: dict[str, Any], samples: Sequence[dict[str, Any]], limit: int | None) -> Iterator[str]:
    """What to print, one text a table.

    Args:
      found: as evaluation.json holds it.
      samples: as samples.jsonl holds them.
      limit: prompts to show; None: all.
    """
    shown = samples if limit is None else samples[:limit]
    if shown:
        yield "\n" + side_by_side([_side(row) for row in shown])
    if "reward_model" in found:
        yield "\n" + _reward_model(found["reward_model"])
    if "policies" in found:
        yield "\n" + _policies(found)
    if "best_of_n" in found:
        yield "\n" + _best(found["best_of_n"])
    if found.get("win_rates"):
        yield "\n" + _wins(found["win_rates"])
        yield from _caveats(found["win_rates"])


def _side(row: dict[str, Any]) -> dict[str, Any]:
    responses = []
    for name, answers in row["answers"].items():
        first = answers[0]
        notes = [f"{key} {first[key]:.2f}" for key in ("score", "gold") if key in first]
        responses.append({"name": name, "text": first["text"], "note": ", ".join(notes)})
    return {"post": row["prompt"], "responses": responses}


def _number(found: dict[str, Any] | None, digits: int = 3, percent: bool = False) -> str:
    """'mean ± se' of a `mean_of`; '-' for none."""
    if found is None or found["mean"] is None:
        return "-"
    scale = 100.0 if percent else 1.0
    text = f"{scale * found['mean']:.{digits}f}"
    if found["se"] is not None:
        text += f" ± {scale * found['se']:.{digits}f}"
    return f"{text} %" if percent else text


def _policies(found: dict[str, Any]) -> str:
    rows, rewards = found["policies"], found["rewards"]
    columns: dict[str, Any] = {"": lambda r: r["name"]}
    if any("score" in row for row in rows):
        columns[rewards[0] if len(rewards) == 1 else "score"] = lambda r: _number(r.get("score"))
    if len(rewards) > 1:
        for name in rewards:
            columns[name] = lambda r, name=name: _number(r.get("rewards", {}).get(name))
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
            columns[head] = lambda r, key=key, digits=digits, percent=percent: _number(r.get(key), digits, percent)
    title = f"{found['data']['prompts']} prompts of {found['data']['name']}, temperature {_temperature(found)}"
    missing = [row for row in rows if row.get("score", {}).get("missing")]
    lines = [title, aligned([list(columns), *([cell(row) for cell in columns.values()] for row in rows)])]
    lines += [f"{row['name']}: {row['score']['missing']} answers have no score, and are left out" for row in missing]
    return "\n".join(lines)


def _temperature(found: dict[str, Any]) -> str:
    sampling = found["sampling"]
    more = f", {sampling['samples']} responses to each" if sampling["samples"] > 1 else ""
    return f"{sampling['temperature']:g}{more}"


def _share(low: float | None, high: float | None, rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{100 * rate:.1f} %" + (f" ({100 * low:.1f} to {100 * high:.1f})" if low < high else "")


def _wins(rows: Sequence[dict[str, Any]]) -> str:
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
        # Where every prompt is won resamples are all the same, and say nothing of the next prompt.
        ends = "win_rate" if row["win_rate"] not in (0.0, 1.0) else "wilson"
        cells.append(
            [
                *(row["by"], row["against"], str(row["wins"]), str(row["ties"]), str(row["losses"])),
                _share(row[f"{ends}_low"], row[f"{ends}_high"], row["win_rate"]),
                _share(row[f"{name}_low"], row[f"{name}_high"], row[name]),
                _number(row.get("difference")),
            ]
        )
    return "\n".join([f"Win rate of {rows[0]['policy']}", aligned(cells)])


_ALWAYS = 0.05
"""Share of prompts below which answers are nearly never of the other order of length."""


def _caveats(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What is missing from win rates, what they cannot tell, and whether a judge likes the first place."""
    for other in dict.fromkeys(row["against"] for row in rows):
        share = next((row["longer"] for row in rows if row["against"] == other and row["longer"] is not None), 0.5)
        if min(share, 1 - share) < _ALWAYS:
            more, count = ("longer", share) if share > 0.5 else ("shorter", 1 - share)
            yield (
                f"against {other}: {100 * count:.0f} % of {rows[0]['policy']}'s answers are {more}, so that the "
                "length-controlled win rate is an extrapolation"
            )
    for row in rows:
        who = f"{row['by']} against {row['against']}"
        judge = row.get("judge")
        if row["left_out"]:
            why = "no score on one side"
            if judge is not None:
                why = f"{judge['unparsable']} verdicts not to be read, {judge['unanswered']} questions not answered"
            yield f"{who}: {row['left_out']} prompts left out ({why})"
        if judge is not None and judge["orders_agree"] is not None:
            yield (
                f"{who}: both orders agree on {100 * judge['orders_agree']:.1f} % of prompts; the answer in the first "
                f"place gets {100 * judge['first_place']:.1f} %"
            )


def _best(rows: Sequence[dict[str, Any]]) -> str:
    others = [name for name in rows[0] if name not in ("n", "samples", "prompts", "kl_bound", "score")]
    cells = [["best of", "score", *others, "KL at most"]]
    for row in rows:
        numbers = [_number(row[name]) for name in ("score", *others)]
        cells.append([str(row["n"]), *numbers, f"{row['kl_bound']:.3f}"])
    title = f"Best of n by score, from {rows[0]['samples']} responses to each of {rows[0]['prompts']} prompts"
    return "\n".join([title, aligned(cells)])


def _reward_model(found: dict[str, Any]) -> str:
    cells = [["confidence", "pairs", "mean confidence", "right"]]
    for row in found["bins"]:
        if row["pairs"]:
            span = f"{row['low']:.2f} to {row['high']:.2f}"
            cells.append([span, str(row["pairs"]), f"{row['confidence']:.3f}", f"{row['accuracy']:.3f}"])
    accuracy = _share(found["accuracy_low"], found["accuracy_high"], found["accuracy"])
    ties = f", {found['ties']} ties" if found["ties"] else ""
    return "\n".join(
        [
            f"Reward model {found['path']} on {found['pairs']} pairs of {found['data']}",
            aligned(cells),
            f"accuracy {accuracy}{ties}; expected calibration error {found['ece']:.3f}; loss {found['loss']:.3f}; "
            f"margin {found['margin']:.3f}",
        ]
    )
