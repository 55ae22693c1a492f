"""The arithmetic task: right answers, noise at its rates, disjoint splits, a tokenizer that round-trips."""

import re
import types

import numpy as np
import pytest

from rlhf_jax import data, rewards
from rlhf_jax.data import arithmetic
from rlhf_jax.data.arithmetic import Problem
from rlhf_jax.errors import UserError

PROBLEM = Problem((7, 5, -8, 3))
SOLUTION = "<think>7+5=12\n12-8=4\n4+3=7</think>\\boxed{7}"


def test_a_problem_by_hand():
    assert PROBLEM.prompt == "Compute 7+5-8+3:\n" and PROBLEM.solution == "7"
    without_errors = types.SimpleNamespace(random=lambda: 1.0)
    assert arithmetic.worked_steps(PROBLEM, without_errors) == ["7+5=12", "12-8=4", "4+3=7"]
    assert arithmetic.make_solution(PROBLEM, without_errors) == SOLUTION


def test_answers_are_right_and_no_sum_leaves_the_vocabulary():
    for row in arithmetic.prompts(500, seed=1):
        expression = re.fullmatch(r"Compute ([1-9](?:[-+][1-9])+):\n", row["prompt"])[1]
        assert eval(expression) == int(row["solution"])
        terms = [int(term) for term in re.findall(r"[-+]?\d", expression)]
        assert arithmetic.MIN_TERMS <= len(terms) <= arithmetic.MAX_TERMS
        assert min(np.cumsum(terms)) >= 0 and max(np.cumsum(terms)) <= arithmetic.LARGEST_RESULT


def test_a_solution_without_noise_is_exact_and_in_form(monkeypatch):
    monkeypatch.setattr(arithmetic, "ERROR_RATE", 0.0)
    monkeypatch.setattr(arithmetic, "OTHER_FORMAT_RATE", 0.0)
    rows = arithmetic.demonstrations(300)
    texts = [row["completion"] for row in rows]
    assert set(rewards.exact_match_reward(texts, [row["solution"] for row in rows])) == {1.0}
    assert set(rewards.boxed_format_reward(texts)) == {1.0}
    assert all(eval(step.replace("=", "==")) for text in texts for step in text[7:].split("</think>")[0].split("\n"))


def test_noise_has_its_rates_and_goes_on_from_a_wrong_step():
    rows = arithmetic.demonstrations(3000)
    wrong = steps = 0
    for row in rows:
        work = row["completion"].partition("</think>")[0].partition("\n\\boxed")[0].removeprefix("<think>").split("\n")
        if "=" in work[0]:
            parts = [re.fullmatch(r"(\d+)([-+]\d)=(\d+)", step).groups() for step in work]
            assert all(before[2] == after[0] for before, after in zip(parts, parts[1:]))
            wrong += sum(int(a) + int(b) != int(c) for a, b, c in parts)
            steps += len(parts)
            assert re.search(r"\d+", row["completion"].replace("\n".join(work), ""))[0] == parts[-1][2]
    assert wrong / steps == pytest.approx(arithmetic.ERROR_RATE, abs=0.01)
    in_form = np.mean(rewards.boxed_format_reward([row["completion"] for row in rows]))
    assert in_form == pytest.approx(1 - arithmetic.OTHER_FORMAT_RATE, abs=0.025)


def test_lengths_are_uneven(monkeypatch):
    monkeypatch.setattr(arithmetic, "OTHER_FORMAT_RATE", 0.0)
    tokenizer = data.load_tokenizer("arithmetic")
    lengths = [len(tokenizer.encode(row["completion"])) for row in arithmetic.demonstrations(500)]
    assert (min(lengths), max(lengths)) == (16, 46) and np.std(lengths) > 8


def test_splits_are_disjoint_over_seeds_and_the_held_out_one_is_large():
    seen = {
        split: {row["prompt"] for seed in (0, 7) for row in arithmetic.prompts(1500, split=split, seed=seed)}
        for split in arithmetic.SIZES
    }
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not seen[one] & seen[other]
    assert len({row["prompt"] for row in arithmetic.prompts(2048, split="validation")}) > 1500


def test_rows_are_a_function_of_split_and_seed():
    assert arithmetic.demonstrations(20, seed=3) == arithmetic.demonstrations(30, seed=3)[:20]
    assert arithmetic.demonstrations(20, seed=3) != arithmetic.demonstrations(20, seed=4)
    for row, prompt in zip(arithmetic.demonstrations(20), arithmetic.prompts(20), strict=True):
        assert {name: row[name] for name in prompt} == prompt


def test_load_arithmetic_gives_data_sets_and_names_what_it_has():
    rows = data.load_rows("arithmetic", split="test", kind="demonstrations", max_samples=5)
    assert set(rows.column_names) == {"prompt", "completion", "solution"} and len(rows) == 5
    with pytest.raises(UserError, match="'dev'.*train, validation, test"):
        arithmetic.load_arithmetic("prompts", "dev")
    with pytest.raises(UserError, match="arithmetic data set has no pairs; it has prompts and demonstrations"):
        data.load_rows("arithmetic", kind="pairs")


def test_the_tokenizer_round_trips_and_loads_by_auto_tokenizer(tmp_path):
    tokenizer = data.load_tokenizer("arithmetic")
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (0, 1, len(arithmetic.vocabulary()))
    data.save_tokenizer(tokenizer, str(tmp_path))
    from transformers import AutoTokenizer

    auto = AutoTokenizer.from_pretrained(str(tmp_path))
    for row in arithmetic.demonstrations(100):
        text = row["prompt"] + row["completion"]
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and 2 not in ids
        assert auto(text)["input_ids"] == ids and auto.decode(ids) == text
        assert tokenizer.encode(row["prompt"]) + tokenizer.encode(row["completion"]) == ids
    assert tokenizer.token_texts(tokenizer.encode(SOLUTION))[:6] == ["<think>", "7", "+", "5", "=", "12"]
