"""Reward functions: correctness of answers, format, length and repetition.

Functions of TRL 1.12 (`trl.rewards`), with its arguments, defaults and results. Where TRL takes a completion as a list
of one message, these take its text too. TRL has no `exact_match_reward`, no `reasoning_gym_reward` and no
`boxed_format_reward`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_jax.data import reasoning_gym as gym
from rlhf_jax.errors import UserError
from rlhf_jax.rewards import math_verification
from rlhf_jax.utils.text import written_forms

Completion = str | list[dict[str, Any]]


def completion_text(completion: Completion) -> str:
    """The text of a completion: a text, or the last message of a list, which is the answer after calls of tools."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


# --- correctness


def accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str],
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs,
) -> list[float | None]:
    """1 if the completion's answer equals the solution as mathematics, 0 if not, None if the solution is not parsable.

    The answer must be LaTeX: the content of \\boxed{}, several boxes being a set, or else a formula after the word
    "answer". What exceeds the time limits of `math_verification` counts as not parsable or not equal.

    Args:
      completions: B texts, or lists of messages, whose last message is read.
      solution: B texts; of another value, its text (`written_forms`).
      log_extra: receives the columns solution, gold_parsed and answer_parsed.
      **kwargs: not read.

    Returns:
      B numbers or None.

    Raises:
      UserError: math_verify is not installed.
      ValueError: the numbers of completions and solutions differ.
    """
    math_verification.check_installed("accuracy_reward")
    return _compare([completion_text(completion) for completion in completions], solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs,
) -> list[float | None]:
    """`accuracy_reward` of the text after the reasoning; 0 for a completion whose reasoning does not end.

    Args:
      completions: B texts, or lists of messages, whose last message is read.
      solution: B texts.
      reasoning_delimiters: strings that end the reasoning, default ['</think>']. The first of them that is in the
        completion counts, where it occurs last.
      log_extra: as `accuracy_reward`.
      **kwargs: not read.

    Returns:
      B numbers or None.

    Raises:
      UserError: math_verify is not installed.
      ValueError: the numbers of completions and solutions differ.
    """
    math_verification.check_installed("reasoning_accuracy_reward")
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    texts = [completion_text(completion) for completion in completions]
    answers = [next((text.rpartition(end)[2] for end in delimiters if end in text), None) for text in texts]
    return _compare(answers, solution, log_extra)


def _compare(
    answers: Sequence[str | None], solution: Sequence[str], log_extra: Callable[[str, list], None] | None
) -> list[float | None]:
    """Rewards of B answers; an answer of None is incomplete reasoning."""
    solution = [written_forms(gold)[-1] for gold in solution]
    incomplete = math_verification.Verdict(False, "[incomplete reasoning]", "[incomplete reasoning]")
    verdicts = [
        incomplete if answer is None else math_verification.shared.verify(gold, answer)
        for answer, gold in zip(answers, solution, strict=True)
    ]
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [verdict.gold for verdict in verdicts])
        log_extra("answer_parsed", ["[skipped]" if verdict.correct is None else verdict.answer for verdict in verdicts])
    return [None if verdict.correct is None else float(verdict.correct) for verdict in verdicts]


_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def exact_match_reward(completions: Sequence[Completion], solution: Sequence[str], **kwargs) -> list[float | None]:
    """1 if the completion has one \\boxed{} whose content is the solution, character by character, 0 if not, None if
    there is no solution.

    A solution that is a number or a truth value is compared as text: 7 is '7', 7.0 is '7' or '7.0', True is 'True' or
    'true'.

    Needs no package, unlike `accuracy_reward`, which compares answers as mathematics. Several boxes give 0.

    Args:
      completions: B texts, or lists of messages, whose last message is read.
      solution: B texts, or other values.
      **kwargs: not read.

    Returns:
      B numbers or None.

    Raises:
      ValueError: the numbers of completions and solutions differ.
    """
    pairs = zip(map(completion_text, completions), solution, strict=True)
    return [
        None if answer is None else float(_BOXED.findall(text) in [[form] for form in written_forms(answer)])
        for text, answer in pairs
    ]


def reasoning_gym_reward(
    completions: Sequence[Completion],
    reasoning_gym: Sequence[str | None],
    log_extra: Callable[[str, list], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs,
) -> list[float | None]:
    """The score that the verifier of the row's task in reasoning-gym gives, from 0 to 1 for most tasks.

    The name of the data set says which part of a completion is its answer, and whether scores below 1 are kept
    (`data.reasoning_gym.Source`). A completion without an answer, and one whose verification takes too long, get 0.

    Args:
      completions: B texts, or lists of messages, whose last message is read.
      reasoning_gym: B records of the data set, or None.
      log_extra: receives the column answer.
      log_metric: receives accuracy/TASK, the share of the scores that are 1.
      **kwargs: not read.

    Returns:
      B numbers or None.

    Raises:
      UserError: reasoning-gym is not installed, or its version makes other rows than those in the data.
    """
    scored = [
        None if record is None else gym.score(record, completion_text(completion))
        for completion, record in zip(completions, reasoning_gym, strict=True)
    ]
    if log_extra is not None:
        log_extra("answer", [None if row is None else row.answer for row in scored])
    if log_metric is not None:
        for row in filter(None, scored):
            log_metric(f"accuracy/{row.task}", float(row.score >= 1))
    return [None if row is None else row.score for row in scored]


@dataclasses.dataclass(frozen=True)
class _CosineScaledReward:
    max_len: int
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float
    __name__ = "cosine_scaled_reward"  # of its metrics, as in TRL

    def __call__(
        self,
        completions: Sequence[Completion],
        solution: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **kwargs,
    ) -> list[float | None]:
        def scaled(correct: float | None, length: int) -> float | None:
            if correct is None:
                return None
            shortest, longest = self.min_value_wrong, self.max_value_wrong
            if correct:
                shortest, longest = self.max_value_correct, self.min_value_correct
            # The cosine rises again beyond max_len.
            share = (1.0 + math.cos(min(length / self.max_len, 1.0) * math.pi)) / 2.0
            return longest + (shortest - longest) * share

        math_verification.check_installed(self.__name__)
        rewards = accuracy_reward(completions, solution)
        return [scaled(reward, len(ids)) for reward, ids in zip(rewards, completion_ids, strict=True)]


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """`accuracy_reward` scaled by length: short correct completions get most, short wrong ones least.

    With s = (1 + cos(π min(length / max_len, 1))) / 2, which falls from 1 to 0, a correct completion gets
    min_value_correct + (max_value_correct - min_value_correct) s, a wrong one
    max_value_wrong + (min_value_wrong - max_value_wrong) s.

    Source: Yeo et al. 2025 (arXiv 2502.03373), appendix C.1.

    Args:
      max_len: tokens.
      min_value_wrong: reward of the shortest wrong completion.
      max_value_wrong: reward of a wrong one of max_len tokens.
      min_value_correct: reward of a correct one of max_len tokens.
      max_value_correct: reward of the shortest correct completion.

    Returns:
      function of (completions, solution, completion_ids); None where the solution is not parsable

    Raises:
      UserError: max_len is below 1.
    """
    if max_len < 1:
        raise UserError(f"max_len is {max_len}; it must be at least 1")
    return _CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)


# --- format


def think_format_reward(completions: Sequence[Completion], **kwargs) -> list[float]:
    """1 if the completion begins with <think>, has no other <think>, and has </think> after it; else 0.

    A chat template that puts <think> into the prompt leaves every completion with 0.

    Args:
      completions: B texts, or lists of messages, whose last message is read.
      **kwargs: not read.

    Returns:
      B numbers.
    """
    rewards = []
    for text in map(completion_text, completions):
        begin, rest = text[: len("<think>")], text[len("<think>") :]
        rewards.append(float(begin == "<think>" and "<think>" not in rest and "</think>" in rest))
    return rewards


_THINK_THEN_BOXED = re.compile(r"<think>(.*)</think>\s*\\boxed\{[^{}]+\}\s*", re.DOTALL)


def boxed_format_reward(completions: Sequence[Completion], **kwargs) -> list[float]:
    """1 if the completion is <think>...</think> and then one \\boxed{...}, with nothing but white space around the box;
    else 0.

    Stricter than `think_format_reward`: no tag and no box may occur twice, and no text may follow the box.

    Args:
      completions: B texts, or lists of messages, whose last message is read.
      **kwargs: not read.

    Returns:
      B numbers.
    """
    rewards = []
    for text in map(completion_text, completions):
        match = _THINK_THEN_BOXED.fullmatch(text)
        work = match[1] if match else None
        rewards.append(float(work is not None and not any(x in work for x in ("<think>", "</think>", "\\boxed{"))))
    return rewards


# --- length and repetition


@dataclasses.dataclass(frozen=True)
class _SoftOverlongPunishment:
    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"  # of its metrics, as in TRL

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs) -> list[float]:
        rewards = []
        for length in map(len, completion_ids):
            excess = length - (self.max_completion_len - self.soft_punish_cache)
            if excess <= 0:
                rewards.append(0.0)
            else:
                rewards.append(-1.0 if length > self.max_completion_len else -excess / self.soft_punish_cache)
        return rewards


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """0 up to max_completion_len - soft_punish_cache tokens, then linear down to -1 at max_completion_len, then -1.

    Source: DAPO, Yu et al. 2025 (arXiv 2503.14476), equation 13.

    Args:
      max_completion_len: tokens.
      soft_punish_cache: tokens before it in which the reward falls.

    Returns:
      function of completion_ids

    Raises:
      UserError: soft_punish_cache is below 0.
    """
    if soft_punish_cache < 0:
        raise UserError(f"soft_punish_cache is {soft_punish_cache}; it must be at least 0")
    return _SoftOverlongPunishment(max_completion_len, soft_punish_cache)


@dataclasses.dataclass(frozen=True)
class _RepetitionPenaltyReward:
    ngram_size: int
    max_penalty: float
    __name__ = "repetition_penalty_reward"  # of its metrics, as in TRL

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs) -> list[float]:
        rewards = []
        for ids in completion_ids:
            ngrams = [tuple(ids[i : i + self.ngram_size]) for i in range(len(ids) - self.ngram_size + 1)]
            repeated = 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
            rewards.append(repeated * self.max_penalty if repeated else 0.0)
        return rewards


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """max_penalty times the share of n-grams of token ids that repeat an earlier one; 0 below ngram_size tokens.

    Source: Yeo et al. 2025 (arXiv 2502.03373), appendix C.2.

    Args:
      ngram_size: token ids of an n-gram.
      max_penalty: the reward where all repeat, at most 0.

    Returns:
      function of completion_ids

    Raises:
      UserError: max_penalty is above 0, or ngram_size below 1.
    """
    if max_penalty > 0:
        raise UserError(f"max_penalty is {max_penalty}; it must be at most 0")
    if ngram_size < 1:
        raise UserError(f"ngram_size is {ngram_size}; it must be at least 1")
    return _RepetitionPenaltyReward(ngram_size, max_penalty)
