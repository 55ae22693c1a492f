"""load_policy and generate: the same responses whatever the batch, stops, errors."""

import os
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax
from rlhf_jax import inference
from rlhf_jax.data import synthetic
from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf
from rlhf_jax.stages import ALGORITHMS
from tests.helpers.arrays import same_bits
from tests.helpers.chat_tokenizer import bytes_tokenizer
from tests.helpers.checkpoints import write_policy
from tests.helpers.paths import ROOT


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """RUN/ppo/policy of a pipeline's folder."""
    return write_policy(tmp_path_factory.mktemp("run") / "ppo" / "policy")


@pytest.fixture(scope="module")
def policy(checkpoint):
    return rlhf_jax.load_policy(checkpoint)


TEXTS = [synthetic.make_post(np.random.default_rng(i), "test").prompt for i in range(5)] + ["i met anna."]


def test_a_batch_of_any_size_gives_the_same_responses(policy):
    together = policy.generate(TEXTS, max_new_tokens=8, seed=3)
    assert together == policy.generate(TEXTS, max_new_tokens=8, seed=3, batch_size=2)
    assert len(set(together)) > 1 and together != policy.generate(TEXTS, max_new_tokens=8, seed=4)
    assert policy.generate(TEXTS[0], max_new_tokens=8, seed=3) == together[0]


def test_greedy_is_what_the_logits_say(policy):
    (found,) = policy.generate(TEXTS[-1:], max_new_tokens=3, temperature=0.0)
    ids = policy.tokenizer.encode(TEXTS[-1])
    for _ in range(3):
        tokens = np.asarray([ids], np.int32)
        hidden = policy.model.hidden(policy.params, tokens, tokens >= 0)
        ids.append(int(np.argmax(policy.model.logits(policy.params, hidden)[0, -1])))
        if ids[-1] == policy.tokenizer.eos_id:
            break
    own = ids[len(policy.tokenizer.encode(TEXTS[-1])) :]
    assert found == policy.tokenizer.decode(own, skip_special_tokens=True)


def test_weights_are_held_once_and_params_are_those_of_the_file(checkpoint):
    params = jax.tree.map(jnp.asarray, hf.load(checkpoint)[1])
    once, before = sum(x.nbytes for x in jax.tree.leaves(params)), {id(x) for x in jax.live_arrays()}

    def held() -> int:
        return sum(x.nbytes for x in jax.live_arrays() if id(x) not in before)

    policy = rlhf_jax.load_policy(checkpoint)
    first = policy.generate(TEXTS, max_new_tokens=4)
    assert held() <= once + 2**10  # keys, say
    assert same_bits(policy.params, params) and held() <= once + 2**10
    assert policy.generate(TEXTS, max_new_tokens=4) == first


def test_loading_a_policy_imports_no_packages_that_only_training_uses(checkpoint):
    code = f"import sys, rlhf_jax; rlhf_jax.load_policy({str(checkpoint)!r}); print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    assert "transformers" in packages  # of the tokenizer
    assert not packages & {"torch", "scipy", "orbax", "datasets", "pandas", "tensorboardX", "matplotlib"}


def test_a_response_ends_before_its_first_stop(policy):
    texts = TEXTS[:2]
    whole = max(policy.generate(texts, max_new_tokens=8, seed=3), key=len)
    words = whole.split()
    assert len(words) > 3
    for stops, first in (([words[3], words[2]], words[2]), ([words[1], f"{words[0]} {words[1]}"], words[0])):
        cut = policy.generate(texts, max_new_tokens=8, seed=3, stop=stops)
        assert whole[: whole.index(first)] in cut and whole not in cut
    assert whole in policy.generate(texts, max_new_tokens=8, seed=3, stop="not in it")


def test_a_response_ends_with_any_of_the_stop_token_ids(policy):
    tokenizer = policy.tokenizer
    whole = max(policy.generate(TEXTS, max_new_tokens=8, seed=3), key=len)
    ids = tokenizer.encode(whole)
    cut = policy.generate(TEXTS, max_new_tokens=8, seed=3, stop_token_ids=[tokenizer.eos_id, ids[2]])
    first = ids.index(ids[2])
    assert tokenizer.decode(ids[: first + 1]) in cut and whole not in cut


def test_other_numbers_do_not_compile_anew(checkpoint):
    """Temperatures, lengths of a class, stop ids, prompts of a width class: one program; what is off is another."""
    policy = rlhf_jax.load_policy(checkpoint)
    shared = {"max_new_tokens": 8, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
    eos = policy.tokenizer.eos_id
    for options in (
        {},
        {"temperature": 0.3},
        {"temperature": 2.0, "max_new_tokens": 13, "seed": 4},
        {"top_p": 0.5, "min_p": 0.2, "repetition_penalty": 1.5},
        {"stop_token_ids": [eos, 7, 9]},
    ):
        for text in ("i met anna.", "i met anna and bob in oslo."):
            assert len(policy.generate([text], **{**shared, **options})) == 1
    assert policy._sample._cache_size() == 1
    policy.generate(["i met anna."], **{**shared, "temperature": 0.0})
    policy.generate(["i met anna."], **{**shared, "temperature": 0.0, "min_p": None})
    assert policy._sample._cache_size() == 3


def test_ten_turns_at_three_temperatures_compile_a_program_for_each_width(checkpoint):
    policy, text, widths = rlhf_jax.load_policy(checkpoint), "i met", set()
    for turn in range(10):
        ids = policy.tokenizer.encode(text)
        widths.add(32 if len(ids) <= 32 else 64)
        answer = policy.generate(text, max_new_tokens=4, temperature=(0.3, 0.7, 1.1)[turn % 3], seed=turn)
        text = f"{text} anna and {answer}"
    assert len(widths) == policy._sample._cache_size() == 2


def test_a_response_matches_a_regular_expression(checkpoint):
    """Tables are arguments of the program: expressions of one size share it."""
    policy = rlhf_jax.load_policy(checkpoint)
    for form in (r"( met| lost)( anna| omar){2,3}\.", r"( felt| ate)( sad| soup){2,3}\."):
        for temperature in (0.0, 1.0):
            answers = policy.generate(TEXTS, regex=form, max_new_tokens=6, temperature=temperature, top_k=3)
            assert all(re.fullmatch(form, answer) for answer in answers), answers
    assert policy._sample._cache_size() == 4  # greedy or not, two widths of prompts
    alone = policy.generate(TEXTS, regex=form, max_new_tokens=6, temperature=1.0, top_k=3, batch_size=1)
    assert len(TEXTS) > 1 and alone == answers
    with pytest.raises(UserError, match="needs at least 5 tokens; a response has at most 4"):
        policy.generate(TEXTS, regex="( anna){5}", max_new_tokens=4)
    with pytest.raises(UserError, match="has a look-around"):
        policy.generate(TEXTS, regex="(?=a)", max_new_tokens=4)


def test_no_response_is_longer_than_asked(policy):
    for most in (1, 5, 9):
        responses = policy.generate(TEXTS, max_new_tokens=most, seed=3)
        assert max(len(policy.tokenizer.encode(text)) for text in responses) <= most


def test_a_runs_folder_has_its_policy_found(checkpoint, policy):
    for path in (checkpoint.parent, checkpoint.parent.parent):
        assert rlhf_jax.load_policy(str(path)).path == str(checkpoint)


def test_a_text_that_begins_with_bos_gets_no_second_one(policy, monkeypatch):
    monkeypatch.setattr(policy, "tokenizer", bytes_tokenizer())
    with pytest.warns(UserWarning, match="1 of the texts begins with '<bos>', which is not added again"):
        (first, second), _ = policy._encode(["<bos>a", "a"], 1, None)
    assert first == second == [2, *policy.tokenizer.encode("a")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert policy._encode(["a"], 1, None)[0] == [second]


def test_nothing_asked_is_nothing_answered(policy):
    assert policy.generate([]) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; it must be at least 0"),
        ({"temperature": float("nan")}, "temperature is nan; it must be a number"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5; it must be a whole number"),
        ({"max_new_tokens": 95}, "text 0 has 4 tokens, 99 with max_new_tokens 95; the model's context has 96"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"stop": ["x", ""]}, "stop is .*non-empty text"),
        ({"seed": -1}, "seed is -1"),
        ({"stop_token_ids": [99999]}, "stop_token_ids: 99999"),
        ({"stop_token_ids": "eos"}, "stop_token_ids is 'eos'"),
        ({"stop_token_ids": "generation_config"}, "stop_token_ids generation_config: .* has no generation_config.json"),
    ],
)
def test_what_cannot_be_is_refused_by_name(policy, options, said):
    with pytest.raises(UserError, match=said):
        policy.generate(["i met anna."], **options)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "text 1: it is null. Give a text, or a conversation: a list of"),
        (7, "text 1: it is an int, not text. Give"),
        ([1, 2], "text 1: it is a list, not text. Give"),
        ([None], "text 1: it is a list, not text. Give"),
        ("half \ud83d", r"text 1: it holds \\ud83d at character 6, a lone surrogate"),
    ],
)
def test_what_is_neither_text_nor_conversation_is_named(policy, text, said):
    with pytest.raises(UserError, match=said):
        policy.generate(["i met anna.", text])


def test_an_empty_text_and_no_chat_template_are_refused(policy):
    with pytest.raises(UserError, match="text 1 is empty"):
        policy.generate(["i", ""])
    with pytest.raises(UserError, match="chat template"):
        policy.generate([[{"role": "user", "content": "hello"}]])


def test_conversations_go_through_the_chat_template(policy):
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    messages = [[{"role": "user", "content": TEXTS[-1]}]]
    found = policy.generate(messages, max_new_tokens=5, chat_template_kwargs=template)
    assert found == policy.generate(TEXTS[-1:], max_new_tokens=5)
    with pytest.raises(UserError, match="text 0: it, message 1: 'role' is missing"):
        policy.generate([[{"content": "x"}]], chat_template_kwargs=template)


@pytest.mark.parametrize("stage", [name for name in ALGORITHMS if name != "reward"])
def test_the_policy_of_a_pipeline_is_that_of_its_last_stage(tmp_path, stage):
    for name in {"sft", stage}:
        folder = tmp_path / name / "policy"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    assert inference.policy_folder(str(tmp_path)) == str(tmp_path / stage / "policy")
