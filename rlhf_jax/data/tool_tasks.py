"""Two built-in tasks of several turns, with imperfect demonstrations: 'boxes' needs a tool, 'guess_number' is an
environment. The tool and the environment are in `rlhf_jax.tools.tasks`.

    <tools>open_box<user>Add the boxes 4071 2205<|endoftext|>
    <assistant><tool_call>{"name": "open_box", "arguments": {"number": 4071}}</tool_call><|endoftext|>
    <tool>1<|endoftext|>
    <assistant><tool_call>{"name": "open_box", "arguments": {"number": 2205}}</tool_call><|endoftext|>
    <tool>3<|endoftext|>
    <assistant>\\boxed{4}<|endoftext|>

No text says what is in a box: the amount is a hash of its number, and splits share no box.

    <tools>guess<user>Guess my number from 1 to 30<|endoftext|>
    <assistant><tool_call>{"name": "guess", "arguments": {"number": 15}}</tool_call><|endoftext|>
    <tool>higher<|endoftext|>
    ...

Halving finds the number within five guesses. Demonstrations guess any number that is still possible, and sometimes one
that is not, so that RL can improve on a policy that imitates them.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from rlhf_jax.data.fast_tokenizer import EOS, PAD, UNK, word_level_tokenizer
from rlhf_jax.data.splits import SPLITS, assigned_split
from rlhf_jax.errors import MissingSplit, UserError

BOXES = range(1000, 10_000)
"""Numbers of boxes."""
MOST_BOXES = 3
LARGEST_AMOUNT = 9
SMALLEST_TOP, LARGEST_TOP = 10, 31
"""Of the range that a number is guessed in."""
WRONG_SUM_RATE, UNOPENED_RATE = 0.1, 0.2
"""Share of the demonstrations with a wrong sum, and with a last box that is not opened and counts any amount."""
IMPOSSIBLE_RATE = 0.1
"""Probability that a guess of a demonstration is one that earlier answers exclude."""
SIZES = {"train": 16_384, "validation": 1024, "test": 1024}
"""Default number of rows of each split."""


def amount(box: int) -> int:
    """The amount in a box, 1 to LARGEST_AMOUNT."""
    return zlib.crc32(f"amount {box}".encode()) % LARGEST_AMOUNT + 1


def answer(number: int, guess: int) -> str:
    """What is said of a guess: 'higher', 'lower' or 'right'."""
    return "right" if guess == number else "higher" if guess < number else "lower"


@functools.cache
def split_boxes(split: str) -> tuple[int, ...]:
    """The boxes of a split."""
    return tuple(box for box in BOXES if assigned_split(f"split {box}") == split)


def _said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _called(name: str, number: int, result: str) -> list[dict[str, Any]]:
    """A call of a tool, and its result."""
    call = {"type": "function", "function": {"name": name, "arguments": {"number": number}}}
    return [{**_said(""), "tool_calls": [call]}, {"role": "tool", "name": name, "content": result}]


def boxes_row(rng: np.random.Generator, split: str) -> dict[str, Any]:
    """{"prompt", "completion", "solution"} of 'boxes'."""
    possible = split_boxes(split)
    boxes = [possible[i] for i in rng.choice(len(possible), rng.integers(1, MOST_BOXES + 1), replace=False)]
    amounts = list(map(amount, boxes))
    opened, total = list(boxes), sum(amounts)
    kind = rng.random()
    if kind < WRONG_SUM_RATE:
        total += int(rng.choice([-1, 1]))
    elif kind < WRONG_SUM_RATE + UNOPENED_RATE:
        total += int(rng.integers(1, LARGEST_AMOUNT + 1)) - amount(opened.pop())
    calls = [message for box in opened for message in _called("open_box", box, str(amount(box)))]
    return {
        "prompt": [{"role": "user", "content": f"Add the boxes {' '.join(map(str, boxes))}"}],
        "completion": [*calls, _said(f"\\boxed{{{total}}}")],
        "solution": str(sum(amounts)),
    }


def guess_row(rng: np.random.Generator, split: str) -> dict[str, Any]:
    """{"prompt", "completion", "number"} of 'guess_number'."""
    while True:
        top = int(rng.integers(SMALLEST_TOP, LARGEST_TOP + 1))
        number = int(rng.integers(1, top + 1))
        if assigned_split(f"{top} {number}") == split:
            break
    low, high, guess, calls = 1, top, 0, []
    while guess != number:
        impossible = rng.random() < IMPOSSIBLE_RATE
        guess = int(rng.integers(1, top + 1) if impossible else rng.integers(low, high + 1))
        calls += _called("guess", guess, answer(number, guess))
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
    return {
        "prompt": [{"role": "user", "content": f"Guess my number from 1 to {top}"}],
        "completion": [*calls, _said(f"\\boxed{{{number}}}")],
        "number": number,
    }


def seeds_row(rng: np.random.Generator, split: str) -> dict[str, int]:
    """{"seed"} of 'seeds', for environments that derive everything else from it."""
    return {"seed": int(rng.integers(2**30)) * len(SIZES) + SPLITS.index(split)}


_MAKERS = {"boxes": boxes_row, "guess_number": guess_row, "seeds": seeds_row}


def _load(name: str, kind: str, split: str = "train", size: int | None = None, seed: int = 0):
    import datasets

    if split not in SIZES:
        raise MissingSplit(f"the data set {name!r}", split, SIZES)
    if kind not in ("prompts", "demonstrations"):
        raise UserError(f"the data set {name!r} has no {kind}; it has prompts and demonstrations")
    rows = []
    for row in range(SIZES[split] if size is None else size):
        columns = _MAKERS[name](np.random.default_rng([seed, SPLITS.index(split), row]), split)
        rows.append({key: value for key, value in columns.items() if kind == "demonstrations" or key != "completion"})
    return datasets.Dataset.from_list(rows)


def loader(name: str) -> Callable[..., Any]:
    """(kind, split, size, seed) -> a datasets.Dataset of 'boxes', 'guess_number' or 'seeds'. Splits (train, validation,
    test) share no box, no number of a range, or no seed. Rows are a function of the arguments; a smaller size gives the
    first rows."""
    return functools.partial(_load, name)


_CALL = ("<tool_call>", '{"name": "', '", "arguments": {"number": ', "}}", "</tool_call>")
_WORDS = ("open_box", "guess", "Add the boxes ", "Guess my number from 1 to ", "higher", "lower", "right")
_ROLES = ("<tools>", "<user>", "<assistant>", "<tool>")
_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|endoftext|>{% endgeneration %}{% else %}{{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """All tokens of the tasks in a fixed order, eos first; numbers are pairs of digits, the last one a single one where
    their number is odd."""
    digits = "0123456789"
    pairs = [a + b for a in digits for b in digits]
    return (EOS, PAD, UNK, *_ROLES, *_CALL, *_WORDS, "\\boxed{", "}", " ", *digits, *pairs)


def build_tokenizer():
    """The tokenizer of the tasks, a PreTrainedTokenizerFast with a chat template; eos has id 0. Texts of other tools
    are unknown tokens."""
    longest_first = sorted((*_ROLES, *_CALL, *_WORDS, "\\boxed{"), key=len, reverse=True)
    tokenizer = word_level_tokenizer(vocabulary(), "|".join([*map(re.escape, longest_first), r"\d\d?", r"\}", " "]))
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
