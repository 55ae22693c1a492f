"""`rlhf-jax chat`: the answers of `load_policy(...).generate`, line by line."""

import io
import re

import numpy as np
import pytest

import rlhf_jax
from rlhf_jax import chat as chat_command
from rlhf_jax.data import synthetic
from tests.helpers.checkpoints import write_policy

TEXTS = [synthetic.make_post(np.random.default_rng(i), "test").prompt for i in range(2)] + ["i met anna."]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """RUN/ppo/policy of a pipeline's folder."""
    return write_policy(tmp_path_factory.mktemp("run") / "ppo" / "policy")


@pytest.fixture(scope="module")
def policy(checkpoint):
    return rlhf_jax.load_policy(checkpoint)


def chat(monkeypatch, capsys, typed, *arguments):
    """(exit status, standard output, standard error) of the command with these lines on its standard input."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return chat_command.main([*map(str, arguments)]), *capsys.readouterr()


def test_chat_answers_each_line_as_generate_does(monkeypatch, capsys, checkpoint, policy):
    typed = f"{TEXTS[-1]}\n\n/seed 9\n{TEXTS[-1]}\n/new\n/quit\nnever read\n"
    options = ["--max_new_tokens", 5, "--temperature", 1.0]
    status, said, told = chat(monkeypatch, capsys, typed, checkpoint.parent.parent, *options)
    answers = [policy.generate(TEXTS[-1], max_new_tokens=5, seed=seed) for seed in (0, 9)]
    assert status == 0 and said.splitlines() == answers and "each text is completed on its own" in told


def test_chat_takes_whole_posts(monkeypatch, capsys, checkpoint, policy):
    arguments = ["--model", checkpoint, "--multiline", "--max_new_tokens", 5, "--temperature", 0.0]
    status, said, told = chat(monkeypatch, capsys, f"{TEXTS[0]}\n\n\n{TEXTS[1]}", *arguments)
    assert status == 0 and said.splitlines() == policy.generate(TEXTS[:2], max_new_tokens=5, temperature=0.0)
    assert "two empty lines end an input" in told and "empty response" not in told


def test_chat_tells_an_empty_answer_from_a_hang(monkeypatch, capsys, checkpoint, policy):
    begins = policy.generate(TEXTS[-1], max_new_tokens=5, temperature=0.0)[:2]
    arguments = ["--model", checkpoint, "--max_new_tokens", 5, "--temperature", 0.0, "--stop", begins]
    status, said, told = chat(monkeypatch, capsys, f"{TEXTS[-1]}\n", *arguments)
    assert status == 0 and said == "\n" and "(empty response)" in told


def test_chat_answers_in_the_form_of_a_regular_expression(monkeypatch, capsys, checkpoint):
    arguments = ["--model", checkpoint, "--max_new_tokens", 5, "--regex", "( anna| omar){2}"]
    status, said, _ = chat(monkeypatch, capsys, f"{TEXTS[-1]}\n", *arguments)
    assert status == 0 and re.fullmatch("( anna| omar){2}\n", said)
    status, said, told = chat(monkeypatch, capsys, "i\n", *arguments[:-1], "(")
    assert said == "" and "error: '(' is no regular expression" in told


def test_chat_says_what_is_wrong(monkeypatch, capsys, checkpoint):
    status, _, told = chat(monkeypatch, capsys, "", "--model", checkpoint / "nothing")
    assert status == 2 and told.startswith("error: ")
    status, said, told = chat(monkeypatch, capsys, "i\n", "--model", checkpoint, "--max_new_tokens", 96)
    assert status == 0 and said == "" and "error: text 0 has" in told
    status, said, told = chat(monkeypatch, capsys, "i\n", "--model", checkpoint, "--image", checkpoint / "a.png")
    assert status == 2 and said == "" and told == f"error: --image {checkpoint / 'a.png'}: no such file\n"
