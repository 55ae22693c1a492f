"""The built-in tasks with tools: right answers, mistakes at their rates, disjoint splits, a tokenizer for calls."""

import re

import numpy as np
import pytest

from rlhf_jax import data, rewards
from rlhf_jax.data import chat, tool_tasks
from rlhf_jax.data.loading import load_rows
from rlhf_jax.errors import UserError
from rlhf_jax.tools.environments import methods
from rlhf_jax.tools.tasks import GuessNumber, open_box
from rlhf_jax.tools.toolbox import tool_schema

TOOLS = {"boxes": open_box, "guess_number": GuessNumber().guess}
COUNT = 2000


@pytest.fixture(scope="module")
def rows():
    """The first demonstrations of each task."""
    return {name: list(load_rows(name, kind="demonstrations", max_samples=COUNT)) for name in TOOLS}


def calls_of(row):
    """[(number, result)] of a demonstration."""
    *turns, _ = row["completion"]
    numbers = [message["tool_calls"][0]["function"]["arguments"]["number"] for message in turns[::2]]
    return list(zip(numbers, [message["content"] for message in turns[1::2]], strict=True))


def test_a_box_has_the_amount_that_its_tool_tells_and_no_other_box_exists():
    assert {open_box(box) for box in tool_tasks.BOXES} == set(range(1, 10))
    for number in (999, 10_000, "1234"):
        with pytest.raises(ValueError, match=f"There is no box {number}."):
            open_box(number)


def test_a_demonstration_of_boxes_opens_them_in_order_and_makes_mistakes_at_their_rates(rows):
    wrong = unopened = 0
    for row in rows["boxes"]:
        boxes = list(map(int, re.findall(r"\d+", row["prompt"][0]["content"])))
        calls, total = calls_of(row), sum(map(open_box, boxes))
        assert row["solution"] == str(total) and [int(result) for _, result in calls] == [
            open_box(box) for box, _ in calls
        ]
        assert [box for box, _ in calls] in (boxes, boxes[:-1])
        unopened += len(calls) < len(boxes)
        wrong += len(calls) == len(boxes) and row["completion"][-1]["content"] != f"\\boxed{{{total}}}"
    assert unopened / COUNT == pytest.approx(tool_tasks.UNOPENED_RATE, abs=0.03)
    assert wrong / COUNT == pytest.approx(tool_tasks.WRONG_SUM_RATE, abs=0.03)


def test_a_demonstration_of_guesses_ends_with_the_number_and_is_imperfect(rows):
    guesses, impossible = 0, 0
    for row in rows["guess_number"]:
        low, high = 1, int(row["prompt"][0]["content"].rpartition(" ")[2])
        environment = GuessNumber()
        assert environment.reset(**row) is None
        for guess, result in calls_of(row):
            assert environment.get_reward() == 0 and environment.guess(guess) == result
            guesses, impossible = guesses + 1, impossible + (not low <= guess <= high)
            low, high = (max(low, guess + 1), high) if result == "higher" else (low, min(high, guess - 1))
        assert environment.get_reward() == 1 and row["completion"][-1]["content"] == f"\\boxed{{{row['number']}}}"
    assert 0.02 < impossible / guesses < tool_tasks.IMPOSSIBLE_RATE
    within = np.mean([len(calls_of(row)) <= 5 for row in rows["guess_number"]])
    assert 0.4 < within < 0.7  # by halving it would be 1


def test_halving_finds_every_number_within_five_guesses():
    for number in range(1, tool_tasks.LARGEST_TOP + 1):
        low, high = 1, tool_tasks.LARGEST_TOP
        for _ in range(5):
            guess = (low + high) // 2
            said = tool_tasks.answer(number, guess)
            low, high = (guess + 1, high) if said == "higher" else (low, guess - 1)
            if said == "right":
                break
        assert said == "right"


@pytest.mark.parametrize("name", TOOLS)
def test_rows_are_functions_of_the_arguments_and_splits_are_disjoint(rows, name):
    again = list(load_rows(name, kind="demonstrations", max_samples=20))
    assert again == rows[name][:20] != list(load_rows(name, kind="demonstrations", max_samples=20, seed=1))
    prompts = list(load_rows(name, max_samples=20))
    assert prompts == [{key: value for key, value in row.items() if key != "completion"} for row in again]

    def keys(split):
        found = load_rows(name, split=split, max_samples=600)
        texts = [(row["prompt"][0]["content"], row.get("number")) for row in found]
        return set(texts) if name == "guess_number" else {box for text, _ in texts for box in re.findall(r"\d+", text)}

    splits = [keys(split) for split in tool_tasks.SIZES]
    assert all(one and not one & other for one in splits for other in splits if one is not other)
    with pytest.raises(UserError, match=f"'{name}' has no split 'train2'"):
        load_rows(name, split="train2")
    with pytest.raises(UserError, match=f"'{name}' has no pairs; it has prompts and demonstrations"):
        load_rows(name, kind="pairs")


@pytest.mark.parametrize("name", TOOLS)
def test_conversations_are_tokens_of_the_vocabulary_and_the_assistants_are_marked(rows, name):
    tokenizer = data.load_tokenizer("tool_tasks")
    template = chat.ChatTemplate(tokenizer, {"tools": [tool_schema(TOOLS[name])]})
    for row in rows[name][:200]:
        messages = [*row["prompt"], *row["completion"]]
        ids, mask = template.encode_with_assistant_mask(messages)
        assert tokenizer.hf.unk_token_id not in ids
        assert tokenizer.decode(ids) == template.render(messages, generation_prompt=False)
        said = tokenizer.decode(np.asarray(ids)[mask]).split("<|endoftext|>")
        assert len(said) == 1 + sum(message["role"] == "assistant" for message in messages)
        assert said[-2:] == [row["completion"][-1]["content"], ""]


def test_the_environments_only_tool_is_guess():
    assert list(methods(GuessNumber())) == ["guess"]


def test_the_answer_after_calls_is_the_last_message(rows):
    demonstrations = rows["boxes"][:500]
    scores = rewards.exact_match_reward(
        [row["completion"] for row in demonstrations], [row["solution"] for row in demonstrations]
    )
    assert 0.6 < np.mean(scores) < 0.85
