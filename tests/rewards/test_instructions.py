"""Rewards for requirements that a program can check: what counts as a word, a sentence, a key, a bullet."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_jax import rewards
from rlhf_jax.errors import UserError
from rlhf_jax.rewards import interface
from rlhf_jax.rewards.instructions import FUNCTIONS
from rlhf_jax.rewards.interface import TrainerState
from rlhf_jax.rewards.python_functions import HostRewards

CASES = [  # function, columns of one row, text, reward
    ("word_count_reward", {"min_words": 3, "max_words": 3}, "I don't well-know", 1.0),
    ("word_count_reward", {"min_words": 4}, "- one, two: 3", 0.0),
    ("word_count_reward", {"max_words": 0}, "...", 1.0),
    ("word_count_reward", {"min_words": None, "max_words": None}, "one", None),
    ("sentence_count_reward", {"min_sentences": 3, "max_sentences": 3}, 'Yes! "Is it?" It is 3.5 m...', 1.0),
    ("sentence_count_reward", {"max_sentences": 1}, "no end", 1.0),
    ("sentence_count_reward", {"min_sentences": 2}, "One.\n...", 0.0),
    ("keywords_reward", {"keywords": ["Rain", "hot dog"]}, "a hot dog in the rain", 1.0),
    ("keywords_reward", {"keywords": ["rain"]}, "a train, raining", 0.0),
    ("keywords_reward", {"keywords": "c++"}, "in C++ too", 1.0),
    ("keywords_reward", {"keywords": []}, "", None),
    ("forbidden_words_reward", {"forbidden_words": ["rain"]}, "a train, raining", 1.0),
    ("forbidden_words_reward", {"forbidden_words": ["sun", "rain"]}, "RAIN!", 0.0),
    ("letter_case_reward", {"letter_case": "lower"}, "it is 3, naïve", 1.0),
    ("letter_case_reward", {"letter_case": "upper"}, "IT IS i", 0.0),
    ("letter_case_reward", {"letter_case": "upper"}, "3", 0.0),
    ("json_object_reward", {"json_keys": ["a", "b"]}, ' {"b": [1], "a": null}\n', 1.0),
    ("json_object_reward", {"json_keys": ["a"]}, '```json\n{"a": 1}\n```', 1.0),
    ("json_object_reward", {"json_keys": ["a"]}, 'Here: {"a": 1}', 0.0),
    ("json_object_reward", {"json_keys": ["a"]}, '{"a": 1, "b": 2}', 0.0),
    ("json_object_reward", {"json_keys": ["a"]}, '["a"]', 0.0),
    ("json_object_reward", {"json_keys": ["a"]}, "[" * 100_000, 0.0),
    ("bullet_count_reward", {"bullets": 2}, "Well:\n- one\n  * two\n-three\n1. four", 1.0),
    ("bullet_count_reward", {"bullets": 0}, "- one", 0.0),
    ("start_reward", {"starts_with": "In short,"}, "\n in short, yes", 1.0),
    ("start_reward", {"starts_with": "In short,"}, "Yes, in short, yes", 0.0),
    ("end_reward", {"ends_with": "Good luck!"}, "So. good luck!\n", 1.0),
    ("end_reward", {"ends_with": "Good luck!"}, "Good luck", 0.0),
    ("end_reward", {"ends_with": ""}, "so", None),
    ("script_reward", {"scripts": "Cyrillic"}, "Да, 3!", 1.0),
    ("script_reward", {"scripts": ["Cyrillic"]}, "Да, ok", 0.0),
    ("script_reward", {"scripts": ["Han", "Hiragana", "Katakana"]}, "日本のコーヒー", 1.0),
    ("script_reward", {"scripts": ["Latin"]}, "123", 0.0),
]


@pytest.mark.parametrize("name, row, text, reward", CASES)
def test_by_hand(name, row, text, reward):
    columns = {column: [value] for column, value in row.items()}
    for completion in (text, [{"role": "assistant", "content": text}]):
        assert getattr(rewards, name)(completions=[completion], prompts=["p"], other=["x"], **columns) == [reward]
        assert rewards.instruction_reward(completions=[completion], **columns) == [reward]


@given(text=st.text(), words=st.lists(st.text(min_size=1), max_size=3), count=st.integers(0, 5))
def test_any_text_has_a_reward(text, words, count):
    row = {"min_words": count, "max_sentences": count, "bullets": count, "keywords": words, "forbidden_words": words}
    row |= {"letter_case": "lower", "json_keys": words, "starts_with": text, "ends_with": text, "scripts": words}
    [reward] = rewards.instruction_reward([text], **{column: [value] for column, value in row.items()})
    assert 0 <= reward <= 1
    assert rewards.json_object_reward([json.dumps(dict.fromkeys(words))], [words or None]) == [1.0 if words else None]


def test_a_share_of_the_requirements_and_its_metrics():
    columns = {"max_words": [2, 2, None, None], "letter_case": ["lower", None, "lower", None]}
    host = HostRewards([rewards.instruction_reward, rewards.word_count_reward])
    texts = ["one two THREE", "one two", "one", "one"]
    found = host.call(["p"] * 4, texts, [[1]] * 4, columns, TrainerState())
    host.close()
    assert found.rewards[:2].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert str(found.rewards[3].tolist()) == "[nan, nan]"
    assert found.metrics == {
        "instructions/words": 0.5,
        "instructions/letter_case": 0.5,
        "instructions/all": pytest.approx(2 / 3),
    }


def test_data_without_the_column_are_refused_by_name():
    host = HostRewards([rewards.keywords_reward])
    with pytest.raises(UserError, match="keywords_reward requires 'keywords'"):
        host.check_columns(["prompt"])
    for function in (rewards.word_count_reward, rewards.instruction_reward):
        with pytest.raises(UserError, match=f"{function.__name__} reads min_words, max_words.* none of which"):
            HostRewards([function]).check_columns(["prompt", "keyword"])
        HostRewards([function]).check_columns(["max_words"])
    with pytest.raises(UserError, match="min_words or max_words"):
        rewards.word_count_reward(["a"])
    with pytest.raises(UserError, match="none of the columns min_words, max_words, .* scripts"):
        rewards.instruction_reward(["a"], solution=["a"])
    with pytest.raises(UserError, match="'title'; it must be 'lower' or 'upper'"):
        rewards.letter_case_reward(["a"], ["title"])


def test_each_has_a_name_that_reward_funcs_takes():
    for function in FUNCTIONS:
        assert interface.resolve(function.__name__) is function is getattr(rewards, function.__name__)
