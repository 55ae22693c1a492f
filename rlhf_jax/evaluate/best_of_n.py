"""Best-of-n: what is gained by drawing n responses and keeping the best, and how far from the policy that goes."""

from __future__ import annotations

import math

import numpy as np


def weights(samples: int, n: int) -> np.ndarray:
    """Probability that each of N ranked samples is the greatest of n drawn without replacement.

    C(i - 1, n - 1) / C(N, n) for rank i = 1..N, the least first.

    Args:
      samples: N.
      n: 1..N.

    Returns:
      [N] float64, of sum 1.

    Raises:
      ValueError: n is not in 1..N.
    """
    if not 1 <= n <= samples:
        raise ValueError(f"best of {n} needs at least {n} samples to a prompt, not {samples}")
    return np.asarray([math.comb(i, n - 1) / math.comb(samples, n) for i in range(samples)])


def best_of_n(rewards: np.ndarray, n: int, measured: np.ndarray | None = None) -> np.ndarray:
    """The expected reward of the best of n responses to each prompt, from N samples of each, without bias.

    The mean over all subsets of n of the N samples: of N independent samples it is unbiased for n independent ones.
    With `measured` the best by `rewards` is chosen and the other reward of the chosen one is told; samples of equal
    reward are equally likely to be it.

    Args:
      rewards: [P, N], finite: what is chosen by.
      n: 1..N.
      measured: [P, N]; None: `rewards`.

    Returns:
      [P] float64.

    Raises:
      ValueError: n is not in 1..N, or the shapes differ.
    """
    rewards = np.asarray(rewards, np.float64)
    measured = rewards if measured is None else np.asarray(measured, np.float64)
    if rewards.ndim != 2 or measured.shape != rewards.shape:
        raise ValueError(
            f"rewards must be [prompts, samples], twice the same, not {rewards.shape} and {measured.shape}"
        )
    chance, order = weights(rewards.shape[1], n), np.argsort(rewards, axis=1, kind="stable")
    ranked, values = np.take_along_axis(rewards, order, 1), np.take_along_axis(measured, order, 1)
    if measured is rewards:
        return ranked @ chance
    found = np.zeros(len(rewards))
    for row, (of, value) in enumerate(zip(ranked, values)):
        _, tie = np.unique(of, return_inverse=True)
        found[row] = (np.bincount(tie, chance) * np.bincount(tie, value) / np.bincount(tie)).sum()
    return found


def kl_bound(n: int) -> float:
    """log n - (n - 1) / n in nats: the KL from the policy to its best of n is never more.

    An upper bound, reached where no two responses score the same and none is likely (Beirami et al. 2024, Theoretical
    Guarantees on the Best-of-n Alignment Policy, theorem 3.1); often quoted as the KL itself.

    Args:
      n: at least 1.
    """
    return math.log(n) - (n - 1) / n
