"""The built-in arithmetic task: sums to be worked out step by step, imperfect demonstrations, and the exact answer.

A prompt is a sum of 3 to 8 numbers from 1 to 9. A worked solution has one step a line, so that its length grows with
the sum, and gives the answer in \\boxed{}:

    Compute 7+5-8+3:
    <think>7+5=12
    12-8=4
    4+3=7</think>\\boxed{7}

Rows have the answer in the column 'solution', as TRL's data sets of mathematics, for `exact_match_reward` and TRL's
`accuracy_reward`. Demonstrations have wrong steps and other formats at the rates below, so that RL can improve on a
policy that imitates them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rlhf_jax.data.fast_tokenizer import EOS, PAD, UNK, word_level_tokenizer
from rlhf_jax.data.splits import SPLITS, assigned_split
from rlhf_jax.errors import MissingSplit, UserError

MIN_TERMS, MAX_TERMS = 3, 8
LARGEST_TERM = 9
LARGEST_RESULT = 99
"""Of a step, wrong ones included."""
ERROR_RATE = 0.1
"""Probability that a step of a demonstration has a wrong result, from which the next step continues."""
ERRORS = (-10, -2, -1, 1, 2, 10)
"""What a wrong result is off by."""
OTHER_FORMAT_RATE = 0.25
"""Share of the demonstrations without <think>, without \\boxed{} or without steps."""
SIZES = {"train": 16384, "validation": 2048, "test": 2048}
"""Default number of rows of each split."""


class Problem(NamedTuple):
    """A sum: its terms, the first one positive, and no partial sum negative."""

    terms: tuple[int, ...]

    @property
    def expression(self) -> str:
        """As '7+5-8+3'."""
        return f"{self.terms[0]}" + "".join(f"{term:+d}" for term in self.terms[1:])

    @property
    def prompt(self) -> str:
        return f"Compute {self.expression}:\n"

    @property
    def solution(self) -> str:
        """The right answer."""
        return str(sum(self.terms))


def random_problem(rng: np.random.Generator, count: int) -> Problem:
    """A random sum of `count` numbers, about half of them subtracted."""
    sizes = rng.integers(1, LARGEST_TERM + 1, size=count).tolist()
    terms = sizes[:1]
    for size, subtract in zip(sizes[1:], (rng.random(len(sizes) - 1) < 0.5).tolist(), strict=True):
        terms.append(-size if subtract and sum(terms) >= size else size)
    return Problem(tuple(terms))


def make_problem(rng: np.random.Generator, split: str) -> Problem:
    """A random sum of a split."""
    while True:
        problem = random_problem(rng, int(rng.integers(MIN_TERMS, MAX_TERMS + 1)))
        if assigned_split(problem.expression) == split:
            return problem


def worked_steps(problem: Problem, rng: np.random.Generator) -> list[str]:
    """The steps of a solution, as ['7+5=12', '12-8=4', '4+3=7']; each is wrong with probability ERROR_RATE."""
    sums = np.cumsum(problem.terms)
    steps, offset = [], 0
    for i, term in enumerate(problem.terms[1:], 1):
        before = int(sums[i - 1]) + offset
        if rng.random() < ERROR_RATE:
            # Also with later steps right, no result is below 0 or beyond the vocabulary.
            low, high = int(sums[i:].min()) + offset, int(sums[i:].max()) + offset
            possible = [error for error in ERRORS if low + error >= 0 and high + error <= LARGEST_RESULT]
            offset += possible[int(rng.integers(len(possible)))]
        steps.append(f"{before}{term:+d}={int(sums[i]) + offset}")
    return steps


def make_solution(problem: Problem, rng: np.random.Generator) -> str:
    """A worked solution: wrong steps at ERROR_RATE, other formats at OTHER_FORMAT_RATE."""
    steps = worked_steps(problem, rng)
    work, answer = "\n".join(steps), steps[-1].partition("=")[2]
    if rng.random() >= OTHER_FORMAT_RATE:
        return f"<think>{work}</think>\\boxed{{{answer}}}"
    solutions = (f"{work}\n\\boxed{{{answer}}}", f"<think>{work}</think>{answer}", f"\\boxed{{{answer}}}")
    return solutions[int(rng.integers(len(solutions)))]


def _problems(split: str, seed: int) -> Iterator[tuple[np.random.Generator, Problem]]:
    """Infinite problems of a split, each with a random generator for its solution. Row n does not depend on the number
    of rows."""
    row = 0
    while True:
        rng = np.random.default_rng([seed, SPLITS.index(split), row])
        yield rng, make_problem(rng, split)
        row += 1


def prompts(size: int, *, split: str = "train", seed: int = 0) -> list[dict[str, str]]:
    """Rows {"prompt", "solution"}, with the problems of `demonstrations` of the same split and seed."""
    rows = zip(range(size), _problems(split, seed), strict=False)
    return [{"prompt": problem.prompt, "solution": problem.solution} for _, (_, problem) in rows]


def demonstrations(size: int, *, split: str = "train", seed: int = 0) -> list[dict[str, str]]:
    """Rows {"prompt", "completion", "solution"}; the completions are those of `make_solution`."""
    return [
        {
            "prompt": problem.prompt,
            "completion": make_solution(problem, rng),
            "solution": problem.solution,
        }
        for _, (rng, problem) in zip(range(size), _problems(split, seed), strict=False)
    ]


_MAKERS = {"prompts": prompts, "demonstrations": demonstrations}


def load_arithmetic(kind: str, split: str = "train", size: int | None = None, seed: int = 0):
    """A datasets.Dataset of the arithmetic task. Splits (train, validation, test) share no problem. Rows are a function
    of the arguments; a smaller size gives the first rows."""
    import datasets

    if split not in SIZES:
        raise MissingSplit("the arithmetic data set", split, SIZES)
    if kind not in _MAKERS:
        raise UserError(f"the arithmetic data set has no {kind}; it has {' and '.join(_MAKERS)}")
    return datasets.Dataset.from_list(_MAKERS[kind](SIZES[split] if size is None else size, split=split, seed=seed))


_PIECES = r"Compute |:\n|</?think>|\\boxed\{|\}|\d+|[-+=\n]"


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """All tokens of the task in a fixed order, eos first."""
    pieces = [EOS, PAD, UNK, "Compute ", ":\n", "<think>", "</think>", "\\boxed{", "}", "+", "-", "=", "\n"]
    return (*pieces, *map(str, range(LARGEST_RESULT + 1)))


def build_tokenizer():
    """The tokenizer of the task, a PreTrainedTokenizerFast with one token for each number from 0 to 99; eos has id
    0."""
    return word_level_tokenizer(vocabulary(), _PIECES)
