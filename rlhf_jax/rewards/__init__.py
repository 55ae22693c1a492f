"""Rewards: models and JAX functions on the device, Python functions (also TRL's, by name) and servers on the host."""

from rlhf_jax.rewards.builtin import (
    accuracy_reward,
    boxed_format_reward,
    exact_match_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    reasoning_gym_reward,
    think_format_reward,
)
from rlhf_jax.rewards.instructions import (
    bullet_count_reward,
    end_reward,
    forbidden_words_reward,
    instruction_reward,
    json_object_reward,
    keywords_reward,
    letter_case_reward,
    script_reward,
    sentence_count_reward,
    start_reward,
    word_count_reward,
)

__all__ = [
    "accuracy_reward",
    "boxed_format_reward",
    "bullet_count_reward",
    "end_reward",
    "exact_match_reward",
    "forbidden_words_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "instruction_reward",
    "json_object_reward",
    "keywords_reward",
    "letter_case_reward",
    "reasoning_accuracy_reward",
    "reasoning_gym_reward",
    "script_reward",
    "sentence_count_reward",
    "start_reward",
    "think_format_reward",
    "word_count_reward",
]
