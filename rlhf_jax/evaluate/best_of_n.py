"""Best-of-n sampling: the expected reward of the best of n responses, and a bound on its KL to the policy."""

from __future__ import annotations

import math

import numpy as np


def weights(samples: int, n: int) -> np.ndarray:
    """Probability that each of N ranked samples is the largest of n drawn without replacement.

    C(i - 1, n - 1) / C(N, n) for rank i = 1..N, smallest first.

    Args:
      samples: N.
      n: 1..N.

    Returns:
      [N] float64 with sum 1.

    Raises:
      ValueError: n is not in 1..N.
    """
    if not 1 <= n <= samples:
        raise ValueError(f"best of {n} needs at least {n} samples to a prompt, not {samples}")
    return np.asarray([math.comb(i, n - 1) / math.comb(samples, n) for i in range(samples)])


def best_of_n(rewards: np.ndarray, n: int, measured: np.ndarray | None = None) -> np.ndarray:
    """Unbiased estimate of the expected reward of the best of n responses to each prompt, from N samples.

    It is the mean over all subsets of n of the N samples. With `measured`, the best response by `rewards` is selected
    and its `measured` reward is averaged; ties are broken uniformly.

    Args:
      rewards: [P, N], finite; the reward to select by.
      n: 1..N.
      measured: [P, N], the reward to average; None: `rewards`.

    Returns:
      [P] float64.

    Raises:
      ValueError: n is not in 1..N, or the shapes differ.
    """
    rewards = np.asarray(rewards, np.float64)
    measured = rewards if measured is None else np.asarray(measured, np.float64)
    if rewards.ndim != 2 or measured.shape != rewards.shape:
        raise ValueError(
            f"rewards and measured must both be [prompts, samples], not {rewards.shape} and {measured.shape}"
        )
    probabilities, order = weights(rewards.shape[1], n), np.argsort(rewards, axis=1, kind="stable")
    ranked, values = np.take_along_axis(rewards, order, 1), np.take_along_axis(measured, order, 1)
    if measured is rewards:
        return ranked @ probabilities
    expected = np.zeros(len(rewards))
    for row, (row_rewards, row_values) in enumerate(zip(ranked, values)):
        _, tie = np.unique(row_rewards, return_inverse=True)
        expected[row] = (np.bincount(tie, probabilities) * np.bincount(tie, row_values) / np.bincount(tie)).sum()
    return expected


def kl_bound(n: int) -> float:
    """log n - (n - 1) / n in nats, an upper bound of the KL from the best-of-n policy to the policy.

    It is reached in the limit of distinct scores and unlikely responses (Beirami et al. 2024, Theoretical Guarantees on
    the Best-of-n Alignment Policy, theorem 3.1); often quoted as the KL itself.

    Args:
      n: at least 1.
    """
    return math.log(n) - (n - 1) / n
