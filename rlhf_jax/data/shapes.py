"""The built-in task with pictures: shapes drawn on the fly, a question about them, and the exact answer.

A picture of 32 x 32 pixels has 1 to 4 shapes of one kind and one color on a noisy ground. A prompt is a conversation
with the picture and one of three questions:

    user: [picture] What color?
    assistant: \\boxed{red}

Rows have the answer in the column 'solution', for `exact_match_reward`. Demonstrations have another answer of the same
question, or no \\boxed{}, at the rates below, so that RL can improve on a policy that imitates them.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.data.fast_tokenizer import EOS, PAD, UNK, word_level_tokenizer
from rlhf_jax.errors import MissingSplit, UserError

SIZE = 32
"""Pixels on a side."""
COLORS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 230), "yellow": (230, 210, 40)}
SHAPES = ("circle", "square", "cross")
COUNTS = ("1", "2", "3", "4")
QUESTIONS = {"What color?": tuple(COLORS), "What shape?": SHAPES, "How many?": COUNTS}
"""The questions and their answers."""
ERROR_RATE = 0.25
"""Share of the demonstrations with another answer."""
OTHER_FORMAT_RATE = 0.15
"""Share of the demonstrations without \\boxed{}."""
SIZES = {"train": 8192, "validation": 512, "test": 512}
"""Default number of rows of each split."""
IMAGE, FAKE, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for block in message['content'] %}"
    "{% if block['type'] == 'image' %}<image>{% else %}{{ block['text'] }}{% endif %}{% endfor %}"
    "{% if message['role'] == 'assistant' %}" + EOS + "{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_PIECES = r"<image>|<fake_token_around_image>|<global-img>|user: |assistant: |\\boxed\{|\}|\n|[\w ]+\??"


class Problem(NamedTuple):
    """A picture and a question about it."""

    color: str
    shape: str
    count: int
    question: str

    @property
    def solution(self) -> str:
        """The right answer."""
        return {"What color?": self.color, "What shape?": self.shape}.get(self.question, str(self.count))


def random_problem(rng: np.random.Generator) -> Problem:
    """All kinds are as frequent."""
    color, shape, question = (list(names)[rng.integers(len(names))] for names in (COLORS, SHAPES, QUESTIONS))
    return Problem(color, shape, int(rng.integers(1, 5)), question)


def draw(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """The picture: [SIZE, SIZE, 3] uint8."""
    picture = rng.integers(0, 60, (SIZE, SIZE, 3)).astype(np.uint8)
    cells = rng.permutation(4)[: problem.count]
    rows, columns = np.mgrid[:SIZE, :SIZE]
    for cell in cells:
        radius = int(rng.integers(4, 7))
        top, left = (SIZE // 2 * int(part) + 8 + int(rng.integers(-1, 2)) for part in divmod(cell, 2))
        y, x = np.abs(rows - top), np.abs(columns - left)
        inside = {
            "circle": y**2 + x**2 <= radius**2,
            "square": np.maximum(y, x) < radius,
            "cross": (np.maximum(y, x) <= radius) & (np.minimum(y, x) < 2),
        }[problem.shape]
        picture[inside] = COLORS[problem.color]
    return picture


def make_answer(problem: Problem, rng: np.random.Generator) -> str:
    """An answer: wrong at ERROR_RATE, in another format at OTHER_FORMAT_RATE."""
    answer = problem.solution
    if rng.random() < ERROR_RATE:
        wrong_answers = [choice for choice in QUESTIONS[problem.question] if choice != answer]
        answer = wrong_answers[rng.integers(len(wrong_answers))]
    return answer if rng.random() < OTHER_FORMAT_RATE else f"\\boxed{{{answer}}}"


def _problems(split: str, seed: int) -> Iterator[tuple[np.random.Generator, Problem]]:
    """Infinite problems of a split, each with a random generator for its picture and answer. Row n does not depend on
    the number of rows."""
    row = 0
    while True:
        rng = np.random.default_rng([seed, list(SIZES).index(split), row])
        yield rng, random_problem(rng)
        row += 1


def prompts(size: int, *, split: str = "train", seed: int = 0) -> list[dict[str, Any]]:
    """Rows {"prompt", "image", "solution"}, with the problems of `demonstrations` of the same split and seed."""
    rows = demonstrations(size, split=split, seed=seed)
    return [{name: row[name] for name in ("prompt", "image", "solution")} for row in rows]


def demonstrations(size: int, *, split: str = "train", seed: int = 0) -> list[dict[str, Any]]:
    """Rows {"prompt", "completion", "image", "solution"}; the image is a PNG, as `datasets` keeps it."""
    rows = []
    for _, (rng, problem) in zip(range(size), _problems(split, seed), strict=False):
        picture = draw(problem, rng)
        answer = make_answer(problem, rng)
        rows.append(
            {
                "prompt": [{"role": "user", "content": problem.question}],
                "completion": [{"role": "assistant", "content": answer}],
                "image": {"bytes": _png(picture), "path": None},
                "solution": problem.solution,
            }
        )
    return rows


def _png(picture: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


_MAKERS = {"prompts": prompts, "demonstrations": demonstrations}


def load_shapes(kind: str, split: str = "train", size: int | None = None, seed: int = 0):
    """A datasets.Dataset of the task. Rows are a function of the arguments; a smaller size gives the first rows."""
    import datasets

    if split not in SIZES:
        raise MissingSplit("the shapes data set", split, SIZES)
    if kind not in _MAKERS:
        raise UserError(f"the shapes data set has no {kind}; it has {' and '.join(_MAKERS)}")
    try:
        rows = _MAKERS[kind](SIZES[split] if size is None else size, split=split, seed=seed)
    except ImportError as error:
        raise UserError("the shapes data set draws pictures with Pillow: pip install 'rlhf_jax[vision]'") from error
    table = datasets.Dataset.from_list(rows)
    return table.cast_column("image", datasets.Image(decode=False))


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """All tokens of the task in a fixed order, eos first."""
    pieces = [EOS, PAD, UNK, IMAGE, FAKE, GLOBAL, "user: ", "assistant: ", "\\boxed{", "}", "\n"]
    return (*pieces, *QUESTIONS, *COLORS, *SHAPES, *COUNTS)


def build_tokenizer():
    """The tokenizer of the task, a PreTrainedTokenizerFast with its chat template."""
    tokenizer = word_level_tokenizer(vocabulary(), _PIECES)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
