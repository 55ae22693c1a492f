"""Rewards: models and JAX functions on the device, Python functions (also TRL's, by name) and servers on the host."""

from rlhf_jax.rewards.builtin import (
    accuracy_reward,
    boxed_format_reward,
    exact_match_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

__all__ = [
    "accuracy_reward",
    "boxed_format_reward",
    "exact_match_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]
