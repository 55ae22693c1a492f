"""Scores of a rollout: by a reward model on the device, by Python functions on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhf_jax.types import UserError

RewardFunction = Callable[..., Sequence[float]]


def function_name(function: RewardFunction) -> str:
    """The name that messages and metrics use."""
    return getattr(function, "__name__", type(function).__name__)


def completion_ids(response: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """The tokens of each response, its stop token included, its fill left out.

    Args:
      response: [B, T] int.
      lengths: [B] int.

    Returns:
      B lists of ids.
    """
    return [row[:n].tolist() for row, n in zip(response, lengths)]


def call(
    functions: Sequence[RewardFunction],
    prompts: list[str],
    completions: list[str],
    ids: list[list[int]],
    columns: dict[str, list[Any]],
) -> np.ndarray:
    """Sums the rewards of Python functions, called with keywords as TRL calls them.

    Args:
      functions: each takes prompts, completions, completion_ids and the data set's other columns by name.
      prompts: B texts.
      completions: B texts, special tokens left out.
      ids: B lists of token ids.
      columns: the data set's other columns, B values each.

    Returns:
      [B] float32.

    Raises:
      UserError: a function returns another number of rewards than rows, or one that is not a finite number.
    """
    total = np.zeros(len(prompts), np.float32)
    for function in functions:
        name = function_name(function)
        rewards = function(prompts=prompts, completions=completions, completion_ids=ids, **columns)
        rewards = [] if rewards is None else list(rewards)
        if len(rewards) != len(prompts):
            raise UserError(f"reward function {name} returned {len(rewards)} rewards for {len(prompts)} completions")
        for row, reward in enumerate(rewards):
            if reward is None or isinstance(reward, str) or not np.isfinite(reward):
                raise UserError(
                    f"reward function {name} returned {reward!r} for row {row}: {completions[row]!r}. "
                    "Return a finite number for every completion"
                )
        total += np.asarray(rewards, np.float32)
    return total
