"""load_policy and generate: the same responses whatever the batch, stops, errors; and scripts/chat.py on top."""

import importlib.util
import io

import jax
import numpy as np
import pytest

import rlhf_jax
from rlhf_jax import data, inference, models
from rlhf_jax.data import synthetic
from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf
from rlhf_jax.stages import ALGORITHMS
from tests.helpers.paths import ROOT


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """RUN/ppo/policy of a pipeline's folder."""
    folder = tmp_path_factory.mktemp("run") / "ppo" / "policy"
    tokenizer = data.load_tokenizer("synthetic")
    model = models.custom_shape("1x16x2", vocab_size=tokenizer.vocab_size, max_positions=96)
    params = jax.tree.map(lambda x: 3 * x, model.init(jax.random.key(0), heads=("causal",)))
    hf.save(folder, model, jax.device_get(params), kind="causal")
    data.save_tokenizer(tokenizer, str(folder))
    return folder


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


def test_a_runs_folder_has_its_policy_found(checkpoint, policy):
    for path in (checkpoint.parent, checkpoint.parent.parent):
        assert rlhf_jax.load_policy(str(path)).path == str(checkpoint)


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


# --- scripts/chat.py


def chat(monkeypatch, capsys, typed, *arguments):
    """(exit status, standard output, standard error) of the script with these lines on its standard input."""
    spec = importlib.util.spec_from_file_location("chat", ROOT / "scripts" / "chat.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script.compile_cache, "enable", lambda: None)  # the tests have a cache of their own
    monkeypatch.setattr("sys.argv", ["chat.py", *map(str, arguments)])
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return script.main(), *capsys.readouterr()


def test_chat_answers_each_line_as_generate_does(monkeypatch, capsys, checkpoint, policy):
    typed = f"{TEXTS[-1]}\n\n/seed 9\n{TEXTS[-1]}\n/new\n/quit\nnever read\n"
    options = ["--max_new_tokens", 5, "--temperature", 1.0]
    status, said, told = chat(monkeypatch, capsys, typed, "--model", checkpoint.parent.parent, *options)
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


def test_chat_says_what_is_wrong(monkeypatch, capsys, checkpoint):
    status, _, told = chat(monkeypatch, capsys, "", "--model", checkpoint / "nothing")
    assert status == 2 and told.startswith("error: ")
    status, said, told = chat(monkeypatch, capsys, "i\n", "--model", checkpoint, "--max_new_tokens", 96)
    assert status == 0 and said == "" and "error: text 0 has" in told


@pytest.mark.parametrize("stage", [*ALGORITHMS, "sft"])
def test_the_policy_of_a_pipeline_is_that_of_its_last_stage(tmp_path, stage):
    for name in {"sft", stage}:
        folder = tmp_path / name / "policy"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    assert inference.policy_folder(str(tmp_path)) == str(tmp_path / stage / "policy")
