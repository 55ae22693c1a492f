"""The data set of instructions: what a row asks for is what its columns say; topics of one split are in no other."""

import collections
import itertools
import json

import pytest

from rlhf_jax.data import instructions, loading
from rlhf_jax.errors import UserError
from rlhf_jax.rewards.instructions import instruction_reward

ROWS = {split: instructions.load_instructions("prompts", split, 400) for split in instructions.SIZES}


def test_splits_share_no_topic_and_there_are_300_questions():
    known = instructions.known_instructions()
    for one, other in itertools.combinations(known.values(), 2):
        assert not {asked.topic for asked in one} & {asked.topic for asked in other}
        assert not {asked.text for asked in one} & {asked.text for asked in other}
    texts = [asked.text for split in known.values() for asked in split]
    assert len(set(texts)) == len(texts) >= 300
    assert all(len(asked.words) >= 4 for split in known.values() for asked in split)


def test_rows_are_a_function_of_seed_split_and_number():
    few = instructions.load_instructions("prompts", "train", 5)
    assert few.to_list() == ROWS["train"].to_list()[:5]
    assert instructions.load_instructions("prompts", "train", 5, seed=1).to_list() != few.to_list()
    assert instructions.load_instructions("prompts", "train", 1).features == few.features


def test_every_requirement_of_a_row_is_in_its_prompt_and_every_kind_occurs():
    kinds = collections.Counter()
    for row in ROWS["train"]:
        [message] = row["prompt"]
        required = {name: row[name] for name in instructions.COLUMNS if row[name] is not None}
        assert message["role"] == "user" and required
        for name, value in required.items():
            texts = value if isinstance(value, list) else [value]
            if name == "letter_case":
                texts = ["lower case" if value == "lower" else "CAPITAL"]
            if value == 1:
                texts = ["one sentence"]
            assert all(str(text) in message["content"] for text in texts), row
            kinds[name] += 1
    assert set(kinds) == set(instructions.COLUMNS) and min(kinds.values()) >= 10


ANSWERS = {  # of rows with one requirement, by its column: an answer that meets it, and one that does not
    "min_words": (lambda n: "word " * n, lambda n: "word " * (n - 1)),
    "max_words": (lambda n: "word " * n, lambda n: "word " * (n + 1)),
    "min_sentences": (lambda n: "So it is. " * n, lambda n: ""),
    "max_sentences": (lambda n: "So it is. " * n, lambda n: "So it is. " * (n + 1)),
    "bullets": (lambda n: "- so\n" * n, lambda n: "- so\n" * (n - 1)),
    "json_keys": (lambda keys: json.dumps(dict.fromkeys(keys)), lambda keys: "{}"),
    "keywords": (lambda words: " ".join(words), lambda words: " ".join(words[1:]) + "!"),
    "forbidden_words": (lambda words: "other", lambda words: words[0].upper()),
    "letter_case": (
        lambda case: "a" if case == "lower" else "A",
        lambda case: "Ab",
    ),
    "starts_with": (lambda start: f"{start} yes", lambda start: "yes"),
    "ends_with": (lambda end: f"Yes. {end}", lambda end: f"{end} Yes."),
}


@pytest.mark.parametrize("column", instructions.COLUMNS)
def test_the_reward_is_one_for_an_answer_that_does_what_is_asked_and_zero_for_one_that_does_not(column):
    rows = [
        row
        for row in ROWS["train"]
        if row[column] is not None and sum(row[name] is not None for name in instructions.COLUMNS) == 1
    ] or [{**dict.fromkeys(instructions.COLUMNS), column: 3}]
    columns = {name: [row[name] for row in rows] for name in instructions.COLUMNS}
    for expected, answer in zip((1.0, 0.0), ANSWERS[column]):
        assert set(instruction_reward([answer(row[column]) for row in rows], **columns)) == {expected}


def test_it_is_a_data_set_by_name_and_says_what_it_has_not():
    rows = loading.load_rows("instructions", split="test", split_option="--dataset_test_split", kind="prompts")
    assert len(rows) == instructions.SIZES["test"]
    with pytest.raises(UserError, match="no preference_pairs; it has prompts"):
        instructions.load_instructions("preference_pairs")
    with pytest.raises(UserError, match="train, validation, test"):
        instructions.load_instructions("prompts", "dev")
