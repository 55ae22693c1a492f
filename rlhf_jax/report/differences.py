"""Differences between groups of runs: of final metrics, paired by seed, and of scores of samples, paired by prompt."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax.metrics import statistics
from rlhf_jax.report import table_data
from rlhf_jax.report.read_run import Run, parse_number, read_json_lines
from rlhf_jax.report.series import Group, rounded
from rlhf_jax.utils.tables import THUMBNAILS

METRICS = {
    "policy": (("eval/scores", "objective/scores", "reward"), ("eval/kl",)),
    "reward": (("eval/accuracy",),),
    "sft": (("eval/loss",),),
}
"""Of each tab; of several names the first that two groups have is compared."""
MIN_PAIRS = 2
MAX_GROUPS = 6
"""Beyond this number of groups each is compared with the first alone."""
_MAX_PROMPTS = 10_000


def differences(groups: Sequence[Group], tab: str) -> list[dict[str, Any]]:
    """The paired differences, group `left` minus group `right`.

    Args:
      groups: of a tab.
      tab: a key of charts.TABS.

    Returns:
      [{"left", "right": indices of groups, "metric", "pairs": number of them, "unit": seeds or prompts, "mean",
      "error": half width of the 95 % t interval over seeds, or the standard error over prompts, "updates": (of left,
      of right) the updates with the values}], for at least MIN_PAIRS pairs.
    """
    pairs = itertools.combinations(range(len(groups)), 2)
    scores = [_prompt_scores(group) for group in groups] if len(groups) > 1 else []
    rows = []
    for left, right in pairs:
        if len(groups) > MAX_GROUPS and left > 0:
            break
        for names in METRICS[tab]:
            row = next(filter(None, (_by_seed(groups[left], groups[right], name) for name in names)), None)
            if row is not None:
                rows.append({"left": left, "right": right, **row})
        if (row := _by_prompt(scores[left], scores[right])) is not None:
            rows.append({"left": left, "right": right, **row})
    return rows


def _by_seed(left: Group, right: Group, name: str) -> dict[str, Any] | None:
    """The difference of a metric's final values, paired by seed; None for too few pairs."""
    finals = [_finals(group, name) for group in (left, right)]
    seeds = [seed for seed in finals[0] if seed in finals[1]]
    if len(seeds) < MIN_PAIRS:
        return None
    a, b = ([values[seed][0] for seed in seeds] for values in finals)
    mean, half_width = statistics.t_interval(np.subtract(a, b))
    updates = tuple(sorted({values[seed][1] for seed in seeds}) for values in finals)
    return _row(name, len(seeds), "seeds", mean, half_width, updates)


def _finals(group: Group, name: str) -> dict[int, tuple[float, int]]:
    """(final value, update) of a metric by seed."""
    finals = {}
    for run in group.runs:
        seed, value = run.config.get("seed"), table_data.final_value(run, name)
        if isinstance(seed, int) and value is not None:
            finals[seed] = (value, int(run.series[name][0][-1]))
    return finals


def _by_prompt(
    left: tuple[dict[str, float], list[int]], right: tuple[dict[str, float], list[int]]
) -> dict[str, Any] | None:
    """The difference of scores of samples, paired by prompt; None for too few pairs."""
    prompts = [prompt for prompt in left[0] if prompt in right[0]]
    if len(prompts) < MIN_PAIRS:
        return None
    a, b = ([scores[prompt] for prompt in prompts] for scores, _ in (left, right))
    mean, error = statistics.paired_difference(a, b)
    return _row("score of samples", len(prompts), "prompts", mean, error, (left[1], right[1]))


def _row(name: str, pairs: int, unit: str, mean: float, error: float, updates: tuple[list[int], ...]) -> dict[str, Any]:
    numbers = {"mean": rounded(mean, 4), "error": rounded(error, 2)}
    return {"metric": name, "pairs": pairs, "unit": unit, **numbers, "updates": updates}


def _prompt_scores(group: Group) -> tuple[dict[str, float], list[int]]:
    """The score of each prompt that all runs with samples have, mean over runs, and the updates of the samples."""
    last = [scores for run in group.runs if (scores := _last_scores(run)) is not None]
    prompts = [prompt for prompt in last[0][1] if all(prompt in scores for _, scores in last)] if last else []
    means = {prompt: float(np.mean([scores[prompt] for _, scores in last])) for prompt in prompts}
    return means, sorted({step for step, _ in last})


def _last_scores(run: Run) -> tuple[int, dict[str, float]] | None:
    """(update, mean score by prompt) of the last samples with scores of evaluation prompts."""
    for step, path in reversed(run.files("completions", r"(\d+)\.jsonl")):
        scores: dict[str, list[float]] = {}
        for row in itertools.islice(read_json_lines(path), _MAX_PROMPTS):
            score = None if row is None else parse_number(row.get("score"))
            if row is not None and isinstance(row.get("query"), str) and score is not None and math.isfinite(score):
                # Questions about different images may be the same text.
                scores.setdefault(f"{row['query']}\0{row.get(THUMBNAILS, '')}", []).append(score)
        if scores:
            return step, {prompt: float(np.mean(values)) for prompt, values in scores.items()}
    return None
