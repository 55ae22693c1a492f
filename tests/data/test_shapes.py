"""The built-in task with pictures: rows are functions of the arguments, answers are right, one token for each word."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_jax import data
from rlhf_jax.data import shapes
from rlhf_jax.errors import UserError
from rlhf_jax.rewards.builtin import exact_match_reward


def test_rows_do_not_depend_on_their_number_and_splits_differ():
    few, many = (shapes.demonstrations(n) for n in (4, 9))
    assert few == many[:4] and shapes.demonstrations(4, seed=1) != few
    assert shapes.prompts(4, split="validation")[0]["image"] != few[0]["image"]
    assert [row["solution"] for row in shapes.prompts(4)] == [row["solution"] for row in few]


def test_the_picture_has_what_the_answers_say():
    rng = np.random.default_rng(0)
    for _ in range(40):
        problem = shapes.random_problem(rng)
        picture = shapes.draw(problem, rng)
        colored = (picture == np.array(shapes.COLORS[problem.color])).all(-1)
        cells = colored.reshape(2, 16, 2, 16).any(axis=(1, 3))
        assert cells.sum() == problem.count
        others = [color for name, color in shapes.COLORS.items() if name != problem.color]
        assert not any((picture == np.array(color)).all(-1).any() for color in others)
        assert problem.solution in shapes.QUESTIONS[problem.question]


def test_demonstrations_are_wrong_at_the_rates(monkeypatch):
    rows = shapes.demonstrations(1500)
    texts = [row["completion"][0]["content"] for row in rows]
    right = np.mean(exact_match_reward(texts, [row["solution"] for row in rows]))
    boxed = np.mean([text.startswith("\\boxed") for text in texts])
    assert abs(right - 0.75 * 0.85) < 0.05 and abs(boxed - 0.85) < 0.04
    monkeypatch.setattr(shapes, "ERROR_RATE", 0.0)
    monkeypatch.setattr(shapes, "OTHER_FORMAT_RATE", 0.0)
    perfect = shapes.demonstrations(20)
    texts = [row["completion"][0]["content"] for row in perfect]
    assert exact_match_reward(texts, [row["solution"] for row in perfect]) == [1.0] * 20


def test_each_word_is_a_token():
    tokenizer = data.load_tokenizer("shapes")
    text = "user: <image>How many?\nassistant: \\boxed{yellow}<|endoftext|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text and len(tokenizer.encode(text)) == 9
    assert tokenizer.vocab_size == len(shapes.vocabulary())


def test_other_splits_and_kinds_are_refused():
    with pytest.raises(UserError, match="no split 'dev'"):
        shapes.load_shapes("prompts", "dev")
    with pytest.raises(UserError, match="no pairs"):
        shapes.load_shapes("pairs")
