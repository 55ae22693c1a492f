"""Aggregation of answers into the metrics of evaluation.json: policies, win rates, best-of-n."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax.evaluate.answers import Answers
from rlhf_jax.evaluate.best_of_n import best_of_n, kl_bound
from rlhf_jax.evaluate.judge import JudgeResult
from rlhf_jax.metrics.statistics import (
    bootstrap,
    length_controlled_win_rate,
    mean_and_standard_error,
    mean_interval,
    preferences,
    wilson,
)


def mean_of(values: np.ndarray, **options: Any) -> dict[str, Any]:
    """The mean over prompts of the mean over answers, with standard error and 95 % interval; None if undefined.

    Args:
      values: [P, G], NaN where missing.
      **options: of `bootstrap`.

    Returns:
      {"mean", "se", "low", "high", "missing": number of NaN values}
    """
    values = np.asarray(values, np.float64)
    present = ~np.isnan(values)
    prompts = present.any(axis=1)
    prompt_means = np.where(present, values, 0.0).sum(axis=1)[prompts] / present.sum(axis=1)[prompts]
    mean, error = mean_and_standard_error(prompt_means)
    low, high = mean_interval(prompt_means, **options)
    summary = {"mean": mean, "se": error, "low": low, "high": high}
    summary = {name: None if np.isnan(value) else value for name, value in summary.items()}
    return summary | {"missing": int((~present).sum())}


def reward_of_task(values: np.ndarray, **options: Any) -> dict[str, Any]:
    """`mean_of` a reward from 0 to 1, with {"accuracy": the share of the answers whose reward is 1, as `mean_of`}; an
    interval of answers that are all right or all wrong is Wilson's. Other rewards have no accuracy."""
    values = np.asarray(values, np.float64)
    present = values[~np.isnan(values)]
    mean_summary = mean_of(values, **options)
    if present.size and (present.min() < 0 or present.max() > 1):
        return mean_summary
    accuracy = mean_of(np.where(np.isnan(values), np.nan, values == 1), **options)
    for summary in (mean_summary, accuracy):
        if summary["mean"] in (0.0, 1.0):
            _, summary["low"], summary["high"] = wilson(np.full((~np.isnan(values)).any(axis=1).sum(), summary["mean"]))
    return mean_summary | {"accuracy": accuracy}


def by_task(answers: Answers, rewards: Sequence[str], tasks: Sequence[str], **options: Any) -> dict[str, Any]:
    """The rewards of one policy on each task.

    Args:
      answers: of the policy, with rewards.
      rewards: names of the rewards.
      tasks: [P], of the prompts.
      **options: of `bootstrap`.

    Returns:
      {task: {"prompts": their number, "rewards": {name: `reward_of_task`}}}, tasks in alphabetical order; a reward that
      applies to none of a task's answers is left out.
    """
    results = {}
    for task in sorted(set(tasks)):
        values = answers.rewards[[other == task for other in tasks]]
        summaries = {
            name: reward_of_task(values[..., i], **options)
            for i, name in enumerate(rewards)
            if not np.isnan(values[..., i]).all()
        }
        results[task] = {"prompts": len(values), "rewards": summaries}
    return results


def policy_row(
    answers: Answers, rewards: Sequence[str], tasks: Sequence[str] | None = None, **options: Any
) -> dict[str, Any]:
    """The metrics of one policy.

    Args:
      rewards: names of the rewards.
      tasks: [P], of the prompts, or None.
      **options: of `bootstrap`.

    Returns:
      {"name", "path", "prompts", "responses", "length", "characters", "eos_rate", and if available "score", "rewards":
      by name, "kl", and the names in `extra`}, each as `mean_of`; with rewards and tasks `by_task`, with tools their
      metrics.
    """
    row: dict[str, Any] = {"name": answers.name, "path": answers.path, "prompts": len(answers.texts)}
    row["responses"] = int(answers.lengths.size)
    if answers.scores is not None:
        row["score"] = mean_of(answers.scores, **options)
        row["rewards"] = {name: mean_of(answers.rewards[..., i], **options) for i, name in enumerate(rewards)}
        if tasks is not None:
            row["by_task"] = by_task(answers, rewards, tasks, **options)
    if answers.kl is not None:
        row["kl"] = mean_of(answers.kl, **options)
    row["length"] = mean_of(answers.lengths, **options)
    row["characters"] = mean_of(character_counts(answers), **options)
    row["eos_rate"] = mean_of(answers.ended, **options)
    return row | {name: mean_of(values, **options) for name, values in answers.extra.items()} | answers.of_tools


def character_counts(answers: Answers) -> np.ndarray:
    """[P, G]: lengths of answers in characters, which do not depend on the tokenizer."""
    return np.asarray([[len(text) for text in row] for row in answers.texts])


def win_rate_row(
    by: str,
    preference: np.ndarray,
    policy: Answers,
    other: Answers,
    judge_result: JudgeResult | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The win rate of the policy's first answers over those of an opponent.

    Args:
      by: the reward or judge.
      preference: [P], 1 where the policy wins; prompts with NaN are left out.
      policy, other: answers of the policy and of its opponent.
      judge_result: of a judge.
      **options: of `bootstrap`.

    Returns:
      {"by", "policy", "against", "prompts": with a verdict, "left_out", "wins", "ties", "losses", "win_rate" with
      "_low" and "_high" by bootstrap, "wilson_low", "wilson_high", the items of `length_controlled_win_rate`,
      "length_difference": mean difference in characters, "longer": share of prompts where the policy's answer is
      longer, and "judge"}; rates are None without a prompt.
    """
    judged = ~np.isnan(preference)
    preference = preference[judged]
    row: dict[str, Any] = {"by": by, "policy": policy.name, "against": other.name, "prompts": int(judged.sum())}
    row["left_out"] = int((~judged).sum())
    row |= {"wins": int((preference > 0.5).sum()), "ties": int((preference == 0.5).sum())}
    row["losses"] = int((preference < 0.5).sum())
    names = ("win_rate", "win_rate_low", "win_rate_high", "wilson_low", "wilson_high")
    names += ("length_controlled_win_rate", "length_controlled_win_rate_low", "length_controlled_win_rate_high")
    row |= dict.fromkeys((*names, "length_coefficient", "length_difference", "longer"))
    if len(preference):
        lengths = [character_counts(answers)[judged, 0] for answers in (policy, other)]
        _, wilson_low, wilson_high = wilson(preference)
        low, high = bootstrap([preference], lambda p: p.mean(axis=-1), **options)
        row |= {"win_rate": float(preference.mean()), "win_rate_low": low, "win_rate_high": high}
        row |= {"wilson_low": wilson_low, "wilson_high": wilson_high}
        row |= length_controlled_win_rate(preference, *lengths, **options)
        row["length_difference"] = float(np.mean(lengths[0] - lengths[1]))
        row["longer"] = float(np.mean((lengths[0] > lengths[1]) + 0.5 * (lengths[0] == lengths[1])))
    if judge_result is not None:
        row["judge"] = judge_result.summary() | {"problems": judge_result.problems}
    return row


def win_rates_by_score(policy: Answers, other: Answers, rewards: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    """Win rates by the score, by each reward if there are several, and by the gold reward if available.

    Returns:
      `win_rate_row` with "difference": the mean difference on the same prompt, as `mean_of`.
    """
    by: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if policy.scores is not None and other.scores is not None:
        by[rewards[0] if len(rewards) == 1 else "score"] = (policy.scores, other.scores)
        if len(rewards) > 1:
            by |= {name: (policy.rewards[..., i], other.rewards[..., i]) for i, name in enumerate(rewards)}
    if "gold" in policy.extra and "gold" in other.extra:
        by["gold"] = (policy.extra["gold"], other.extra["gold"])
    rows = []
    for name, (a, b) in by.items():
        row = win_rate_row(name, preferences(a[:, 0], b[:, 0]), policy, other, **options)
        rows.append(row | {"difference": mean_of(a[:, :1] - b[:, :1], **options)})
    return rows


def best_of_n_rows(answers: Answers, rewards: Sequence[str], ns: Sequence[int], **options: Any) -> list[dict[str, Any]]:
    """The score, the rewards and the gold reward of the best of n answers by score.

    Args:
      answers: N >= n scored answers to each prompt. Prompts with a missing score are left out.
      rewards: names of the rewards.
      ns: values of n.
      **options: of `bootstrap`.

    Returns:
      [{"n", "samples": N, "prompts", "kl_bound": log n - (n - 1) / n, "score", and by name the rewards (if there are
      several) and "gold", each as `mean_of`}]
    """
    scored = ~np.isnan(answers.scores).any(axis=1)
    scores = answers.scores[scored]
    measured = {}
    if len(rewards) > 1:
        measured = {name: answers.rewards[scored, :, i] for i, name in enumerate(rewards)}
    if "gold" in answers.extra:
        measured["gold"] = answers.extra["gold"][scored]
    rows = []
    for n in ns:
        row = {"n": n, "samples": scores.shape[1], "prompts": len(scores), "kl_bound": kl_bound(n)}
        row["score"] = mean_of(best_of_n(scores, n)[:, None], **options)
        for name, values in measured.items():
            row[name] = mean_of(best_of_n(scores, n, values)[:, None], **options)
        rows.append(row)
    return rows


def sample_rows(
    prompts: Sequence[str],
    all_answers: Sequence[Answers],
    rewards: Sequence[str],
    judge_results: dict[str, JudgeResult],
) -> list[dict[str, Any]]:
    """Rows of samples.jsonl, one for each prompt: the answers of all policies with their metrics, verdicts of judges.

    Args:
      prompts: [P] texts.
      all_answers: of the policy and its opponents.
      rewards: names of the rewards.
      judge_results: by 'JUDGE against NAME'.
    """

    def answer_row(answers: Answers, row: int, i: int) -> dict[str, Any]:
        values = {"text": answers.texts[row][i], "length": int(answers.lengths[row, i])}
        values["ended"] = bool(answers.ended[row, i])
        if answers.scores is not None:
            values["score"] = float(answers.scores[row, i])
            values["rewards"] = {name: float(answers.rewards[row, i, k]) for k, name in enumerate(rewards)}
        if answers.kl is not None:
            values["kl"] = float(answers.kl[row, i])
        for name, metric in answers.extra.items():
            if i < metric.shape[1]:
                values[name] = float(metric[row, i])
        return values

    rows = []
    for row, prompt in enumerate(prompts):
        sample: dict[str, Any] = {"row": row, "prompt": prompt}
        sample["answers"] = {
            answers.name: [answer_row(answers, row, i) for i in range(answers.lengths.shape[1])]
            for answers in all_answers
        }
        if judge_results:
            sample["verdicts"] = {
                name: {"first_place": result.verdicts[row, 0], "second_place": result.verdicts[row, 1]}
                | {"said": result.replies[row]}
                for name, result in judge_results.items()
            }
        rows.append(sample)
    return rows
