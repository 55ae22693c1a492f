"""From answers to numbers: what evaluation.json holds of policies, win rates and best-of-n."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax.evaluate.answers import Answers
from rlhf_jax.evaluate.best_of_n import best_of_n, kl_bound
from rlhf_jax.evaluate.judge import Judged
from rlhf_jax.metrics.statistics import (
    bootstrap,
    length_controlled_win_rate,
    mean_and_standard_error,
    mean_interval,
    preferences,
    wilson,
)


def mean_of(values: np.ndarray, **options: Any) -> dict[str, Any]:
    """The mean over prompts of each prompt's mean, with its error and interval; None where there is no number.

    Args:
      values: [P, G], NaN where there is none.
      **options: of `bootstrap`.

    Returns:
      {"mean", "se", "low", "high", "missing": numbers that are not there}
    """
    values = np.asarray(values, np.float64)
    there = ~np.isnan(values)
    some = there.any(axis=1)
    own = np.where(there, values, 0.0).sum(axis=1)[some] / there.sum(axis=1)[some]
    mean, error = mean_and_standard_error(own)
    low, high = mean_interval(own, **options)
    found = {"mean": mean, "se": error, "low": low, "high": high}
    found = {name: None if np.isnan(value) else value for name, value in found.items()}
    return found | {"missing": int((~there).sum())}


def policy_row(answers: Answers, rewards: Sequence[str], **options: Any) -> dict[str, Any]:
    """One policy.

    Args:
      answers: scored, where there are rewards.
      rewards: their names.
      **options: of `bootstrap`.

    Returns:
      {"name", "path", "prompts", "responses", "length", "characters", "eos_rate", and where there are such: "score",
      "rewards": by name, "kl", and what `more` holds}, numbers as of `mean_of`.
    """
    found: dict[str, Any] = {"name": answers.name, "path": answers.path, "prompts": len(answers.texts)}
    found["responses"] = int(answers.lengths.size)
    if answers.scores is not None:
        found["score"] = mean_of(answers.scores, **options)
        found["rewards"] = {name: mean_of(answers.each[..., i], **options) for i, name in enumerate(rewards)}
    if answers.kl is not None:
        found["kl"] = mean_of(answers.kl, **options)
    found["length"] = mean_of(answers.lengths, **options)
    found["characters"] = mean_of(characters(answers), **options)
    found["eos_rate"] = mean_of(answers.ended, **options)
    return found | {name: mean_of(values, **options) for name, values in answers.more.items()}


def characters(answers: Answers) -> np.ndarray:
    """[P, G]: how long answers are, whatever the tokenizer."""
    return np.asarray([[len(text) for text in row] for row in answers.texts])


def wins(
    by: str, preference: np.ndarray, mine: Answers, other: Answers, judged: Judged | None = None, **options: Any
) -> dict[str, Any]:
    """A win rate, of the first answers.

    Args:
      by: who judged.
      preference: [P], 1 where the policy wins, NaN where there is no verdict: that prompt is left out.
      mine, other: of the policy, and whom it is compared with.
      judged: what else there is to tell of a judge.
      **options: of `bootstrap`.

    Returns:
      {"by", "policy", "against", "prompts": with a verdict, "left_out", "wins", "ties", "losses", "win_rate" with
      "_low" and "_high" by bootstrap and "wilson_low", "wilson_high", what `length_controlled_win_rate` gives,
      "length_difference": mean characters more than the other's, "longer": share of prompts with more, and "judge"};
      rates None without a prompt. By a reward there is "difference" too, as of `mean_of`: how much more the policy
      gets on the same prompt.
    """
    there = ~np.isnan(preference)
    preference = preference[there]
    found: dict[str, Any] = {"by": by, "policy": mine.name, "against": other.name, "prompts": int(there.sum())}
    found["left_out"] = int((~there).sum())
    found |= {"wins": int((preference > 0.5).sum()), "ties": int((preference == 0.5).sum())}
    found["losses"] = int((preference < 0.5).sum())
    names = ("win_rate", "win_rate_low", "win_rate_high", "wilson_low", "wilson_high")
    names += ("length_controlled_win_rate", "length_controlled_win_rate_low", "length_controlled_win_rate_high")
    found |= dict.fromkeys((*names, "length_coefficient", "length_difference", "longer"))
    if len(preference):
        lengths = [characters(answers)[there, 0] for answers in (mine, other)]
        _, wilson_low, wilson_high = wilson(preference)
        low, high = bootstrap([preference], lambda p: p.mean(axis=-1), **options)
        found |= {"win_rate": float(preference.mean()), "win_rate_low": low, "win_rate_high": high}
        found |= {"wilson_low": wilson_low, "wilson_high": wilson_high}
        found |= length_controlled_win_rate(preference, *lengths, **options)
        found["length_difference"] = float(np.mean(lengths[0] - lengths[1]))
        found["longer"] = float(np.mean((lengths[0] > lengths[1]) + 0.5 * (lengths[0] == lengths[1])))
    if judged is not None:
        found["judge"] = judged.summary() | {"problems": judged.problems}
    return found


def score_wins(mine: Answers, other: Answers, rewards: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    """Win rates by the score, by each reward where there are several, and by the gold reward where it is there."""
    by: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if mine.scores is not None and other.scores is not None:
        by[rewards[0] if len(rewards) == 1 else "score"] = (mine.scores, other.scores)
        if len(rewards) > 1:
            by |= {name: (mine.each[..., i], other.each[..., i]) for i, name in enumerate(rewards)}
    if "gold" in mine.more and "gold" in other.more:
        by["gold"] = (mine.more["gold"], other.more["gold"])
    found = []
    for name, (a, b) in by.items():
        row = wins(name, preferences(a[:, 0], b[:, 0]), mine, other, **options)
        found.append(row | {"difference": mean_of(a[:, :1] - b[:, :1], **options)})
    return found


def best(answers: Answers, rewards: Sequence[str], ns: Sequence[int], **options: Any) -> list[dict[str, Any]]:
    """The best of n by the score: its score, and what the others rewards and the gold reward say of it.

    Args:
      answers: with N >= n answers to each prompt, scored. Prompts with an answer without a score are left out.
      rewards: their names.
      ns: each n.
      **options: of `bootstrap`.

    Returns:
      [{"n", "samples": N, "prompts", "kl_bound": log n - (n - 1) / n, "score", and by name the rewards (where there are
      several) and "gold", as of `mean_of`}]
    """
    there = ~np.isnan(answers.scores).any(axis=1)
    scores = answers.scores[there]
    measured = {}
    if len(rewards) > 1:
        measured = {name: answers.each[there, :, i] for i, name in enumerate(rewards)}
    if "gold" in answers.more:
        measured["gold"] = answers.more["gold"][there]
    rows = []
    for n in ns:
        row = {"n": n, "samples": scores.shape[1], "prompts": len(scores), "kl_bound": kl_bound(n)}
        row["score"] = mean_of(best_of_n(scores, n)[:, None], **options)
        for name, values in measured.items():
            row[name] = mean_of(best_of_n(scores, n, values)[:, None], **options)
        rows.append(row)
    return rows


def sample_rows(
    source_rows: Sequence[str], everyone: Sequence[Answers], rewards: Sequence[str], verdicts: dict[str, Judged]
) -> list[dict[str, Any]]:
    """A dict a prompt for samples.jsonl: the prompt, every policy's answers with their numbers, what judges said.

    Args:
      source_rows: [P] prompts as text.
      everyone: all Answers.
      rewards: names.
      verdicts: by 'JUDGE against NAME'.
    """

    def answer(of: Answers, row: int, i: int) -> dict[str, Any]:
        found = {"text": of.texts[row][i], "length": int(of.lengths[row, i]), "ended": bool(of.ended[row, i])}
        if of.scores is not None:
            found["score"] = float(of.scores[row, i])
            found["rewards"] = {name: float(of.each[row, i, k]) for k, name in enumerate(rewards)}
        if of.kl is not None:
            found["kl"] = float(of.kl[row, i])
        for name, values in of.more.items():
            if i < values.shape[1]:
                found[name] = float(values[row, i])
        return found

    rows = []
    for row, prompt in enumerate(source_rows):
        own: dict[str, Any] = {"row": row, "prompt": prompt}
        own["answers"] = {of.name: [answer(of, row, i) for i in range(of.lengths.shape[1])] for of in everyone}
        if verdicts:
            own["verdicts"] = {
                name: {"first_place": judged.verdicts[row, 0], "second_place": judged.verdicts[row, 1]}
                | {"said": judged.said[row]}
                for name, judged in verdicts.items()
            }
        rows.append(own)
    return rows
