"""Means, paired differences and win rates over prompts, with standard errors and confidence intervals.

Intervals of `bootstrap` are percentiles over resampled prompts (Efron 1979); all values of a prompt stay together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from scipy import special

Z95 = 1.959963984540054  # 97.5 % point of the normal distribution


def mean_and_standard_error(x: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, std(ddof=1) / sqrt(N).

    Args:
      x: [N] numbers.

    Returns:
      (mean, standard error); the error of a single number is NaN, as is the mean of none.
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
      ValueError: the lengths differ.
    """
    a, b = _paired(a, b)
    return mean_and_standard_error(a - b)


def win_rate(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """How often `a` beats `b` on the same prompt, ties counting half, with a 95 % interval.

    The interval is Wilson's score interval, with each tie as half a win. It stays inside [0, 1] and is valid for few
    rows; ties make the true interval narrower, so it is conservative.
    source: Wilson 1927, Probable Inference, the Law of Succession, and Statistical Inference.

    Args:
      a, b: [N] numbers, N >= 1; row i of both answers prompt i; higher is better.

    Returns:
      (rate, lower end, upper end), each in [0, 1].

    Raises:
      ValueError: the lengths differ, or there are no rows.
    """
    a, b = _paired(a, b)
    if a.size == 0:
        raise ValueError("a win rate needs at least one pair")
    return wilson((a > b) + 0.5 * (a == b))


def wilson(preference: Sequence[float]) -> tuple[float, float, float]:
    """`win_rate` of preferences, [N] numbers in [0, 1] with N >= 1: 1 for a win, 0.5 for a tie."""
    preference = np.asarray(preference, np.float64)
    rate, n = float(np.mean(preference)), preference.size
    middle = (rate + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(rate * (1 - rate) / n + Z95**2 / (4 * n**2))
    return rate, max(middle - half, 0.0), min(middle + half, 1.0)


def _paired(a, b) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"paired numbers must be two vectors of equal length, not {a.shape} and {b.shape}")
    return a, b


def unigram_entropy(token_lists: Iterable[Sequence[int]]) -> float:
    """Entropy of the unigram distribution: the loss of a model that knows token frequencies but no context.

    Args:
      token_lists: sequences of token ids, of any lengths.

    Returns:
      Nats per token; 0 without tokens.
    """
    counts = Counter()
    for tokens in token_lists:
        counts.update(np.asarray(tokens).ravel().tolist())
    if not counts:
        return 0.0
    p = np.asarray(list(counts.values()), np.float64)
    p /= p.sum()
    return float(-np.sum(p * np.log(p)))


def preferences(a: Sequence[float], b: Sequence[float]) -> np.ndarray:
    """1 where `a` is better, 0 where `b` is, 0.5 for a tie, NaN where either is NaN.

    Args:
      a, b: [N] numbers; row i of both answers prompt i; higher is better.

    Returns:
      [N] float64.
    """
    a, b = _paired(a, b)
    return np.where(np.isnan(a) | np.isnan(b), np.nan, (a > b) + 0.5 * (a == b))


def bootstrap(
    columns: Sequence[np.ndarray],
    statistic: Callable[..., np.ndarray],
    *,
    resamples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """A percentile bootstrap interval; rows are resampled with replacement, all columns together.

    Args:
      columns: vectors [N]; row i of each belongs to prompt i.
      statistic: of arrays [..., N], along the last axis -> [...].
      resamples: number of resamples.
      seed: of the resampling.
      confidence: level of the interval.

    Returns:
      (lower end, upper end); NaN for fewer than 2 rows.
    """
    from scipy import stats  # most of a second to import, and training does not need it

    columns = tuple(np.asarray(column, np.float64) for column in columns)
    rows = columns[0].size
    if rows < 2:
        return math.nan, math.nan
    result = stats.bootstrap(
        columns,
        lambda *sample, axis: statistic(*sample),
        n_resamples=resamples,
        batch=max(1, 2**21 // rows),  # bounds the numbers in memory per column
        vectorized=True,
        paired=True,
        axis=-1,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def mean_interval(x: Sequence[float], **options: Any) -> tuple[float, float]:
    """`bootstrap` of a mean."""
    return bootstrap([np.asarray(x, np.float64)], lambda x: np.mean(x, axis=-1), **options)


def student_interval(x: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the mean of few independent numbers, as of runs with other seeds, by Student's t.

    A bootstrap of so few is too narrow. The numbers are taken to be normally distributed.

    Args:
      x: [N] numbers.

    Returns:
      (lower end, upper end); NaN for fewer than 2.
    """
    mean, error = mean_and_standard_error(x)
    half = float(special.stdtrit(max(len(x) - 1, 1), 0.975)) * error
    return mean - half, mean + half


# --- length-controlled win rates

LENGTH_PENALTY = 0.1
"""Of the squared length coefficient: a normal prior of variance 10. It matters only if lengths separate wins."""


def length_term(a: Sequence[float], b: Sequence[float]) -> np.ndarray:
    """tanh((a - b) / std(a - b)) for lengths [N], as in AlpacaEval 2; zeros if all differences are equal."""
    a, b = _paired(a, b)
    spread = np.std(a - b)
    return np.tanh((a - b) / spread) if spread > 0 else np.zeros_like(a)


def fit_length(preference: np.ndarray, term: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logistic regression of preferences on a constant and the length term, by Newton's method.

    Maximises sum_i [p_i log s(c + w t_i) + (1 - p_i) log s(-c - w t_i)] - LENGTH_PENALTY w^2 / 2, s the sigmoid. If all
    p are 1 (or 0) there is no finite maximum: c is inf (or -inf) and w is 0.

    Args:
      preference: [..., N] in [0, 1], ties 0.5.
      term: [..., N].

    Returns:
      (c, w), each [...].
    """
    preference, term = np.broadcast_arrays(np.asarray(preference, np.float64), np.asarray(term, np.float64))
    mean = np.mean(preference, axis=-1)
    has_maximum = (mean > 0) & (mean < 1)
    constant = special.logit(np.where(has_maximum, mean, 0.5))
    weight = np.zeros_like(constant)
    for _ in range(100):
        p = special.expit(constant[..., None] + weight[..., None] * term)
        error, spread = preference - p, p * (1 - p)
        slope_c, slope_w = error.sum(-1), (error * term).sum(-1) - LENGTH_PENALTY * weight
        cc, cw = spread.sum(-1), (spread * term).sum(-1)
        ww = (spread * term**2).sum(-1) + LENGTH_PENALTY
        determinant = cc * ww - cw**2
        step_c, step_w = (ww * slope_c - cw * slope_w) / determinant, (cc * slope_w - cw * slope_c) / determinant
        size = np.maximum(np.hypot(step_c, step_w), 1e-300)
        scale = np.minimum(1.0, 2.0 / size) * has_maximum  # far from the maximum a full step may overshoot
        constant, weight = constant + scale * step_c, weight + scale * step_w
        if np.max(scale * size, initial=0.0) < 1e-10:
            break
    return np.where(has_maximum, constant, np.where(mean > 0.5, np.inf, -np.inf)), np.where(has_maximum, weight, 0.0)


def length_controlled_win_rate(
    preference: Sequence[float], lengths: Sequence[float], against: Sequence[float], **options: Any
) -> dict[str, float]:
    """The win rate if both answers to each prompt had the same length.

    `fit_length` with its length term set to 0: s(c). It is AlpacaEval 2's regression without the term for a prompt's
    difficulty, which cannot be identified from one pair of policies (Dubois et al. 2024, Length-Controlled AlpacaEval,
    section 3). The length term is scaled once, over all rows; the fit is repeated for each resample of the interval.

    Args:
      preference: [N] in [0, 1]: 1 where the policy wins, 0.5 for a tie.
      lengths, against: [N] characters of the policy's and of the other's answers.
      **options: of `bootstrap`.

    Returns:
      {"length_controlled_win_rate", its "_low" and "_high", "length_coefficient": w, of the term in (-1, 1)}
    """
    preference, term = np.asarray(preference, np.float64), length_term(lengths, against)
    constant, weight = fit_length(preference, term)
    low, high = bootstrap([preference, term], lambda p, t: special.expit(fit_length(p, t)[0]), **options)
    return {
        "length_controlled_win_rate": float(special.expit(constant)),
        "length_controlled_win_rate_low": low,
        "length_controlled_win_rate_high": high,
        "length_coefficient": float(weight),
    }
