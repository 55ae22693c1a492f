"""Tasks of reasoning-gym as data sets: rows, splits, answers and their scores, and what is wrong with a name.

The tests that need the package are skipped without it: pip install '.[reasoning-gym]'.
"""

import json
from importlib.util import find_spec

import pytest

from rlhf_jax import rewards
from rlhf_jax.data import loading, reasoning_gym
from rlhf_jax.data.reasoning_gym import extracted, parse, written
from rlhf_jax.errors import UserError
from rlhf_jax.rewards import interface

SHORT = "reasoning_gym:chain_sum?min_terms=2&max_terms=3&max_digits=1&min_digits=1"
needs_package = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning-gym")


@pytest.fixture(scope="module", autouse=True)
def _no_process_left():
    yield
    reasoning_gym.close()


# --- names


def test_a_name_has_the_tasks_parameters_and_options_of_its_own():
    options = 'max_terms=3&seed=7&size=10&answer_format=boxed&partial_scores=false&operators=["+"]'
    found = parse(f"reasoning_gym:chain_sum?{options}")
    assert found.task == "chain_sum" and found.parameters == {"max_terms": 3, "operators": ["+"]}
    assert (found.seed, found.size, found.answer_format, found.partial_scores) == (7, 10, "boxed", False)
    as_json = {"max_terms": 3, "seed": 7, "system_prompt": "a & b = c"}
    assert parse(f"reasoning_gym:chain_sum?{json.dumps(as_json)}").system_prompt == "a & b = c"
    assert parse("reasoning_gym:chain_sum") == reasoning_gym.Source("chain_sum", {})


@pytest.mark.parametrize(
    "query, message",
    [
        ("max_terms", "'max_terms' is not PARAMETER=VALUE"),
        ("{1", "no JSON object"),
        ("seed=x", "seed is 'x'; it must be a whole number"),
        ("partial_scores=1", "partial_scores is 1; it must be true or false"),
        ("answer_format=xml", "answer_format is 'xml'; it must be one of tag, boxed, number, text"),
        ("size=0", "size at least 1"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(query, message):
    with pytest.raises(UserError, match=message) as failure:
        parse(f"reasoning_gym:chain_sum?{query}")
    assert "reasoning_gym:chain_sum" in str(failure.value)


def test_without_the_package_the_extra_and_the_compiler_are_named(monkeypatch):
    monkeypatch.setattr(reasoning_gym, "find_spec", lambda name: None)
    for use in (lambda: load(SHORT), lambda: interface.resolve("reasoning_gym_reward")):
        with pytest.raises(UserError, match=r"pip install '\.\[reasoning-gym\]'.* C compiler .*apt install gcc"):
            use()


# --- answers


@pytest.mark.parametrize(
    "answer_format, response, answer",
    [
        ("tag", "so <answer>1</answer>, no: <answer>\n 2 </answer>", "2"),
        ("tag", "<answer>1", None),
        ("boxed", r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", "2", None),
        ("number", "9 + 5 = 14, or 1,234.50.", "1234.50"),
        ("number", "from 3-4 to -7", "-7"),
        ("number", "3 - 4", "4"),
        ("number", "four", None),
        ("text", " a\nb\n", "a\nb"),
        ("text", "", ""),
    ],
)
def test_the_answer_in_a_response(answer_format, response, answer):
    assert extracted(response, answer_format) == answer
    assert extracted(written("12", answer_format), answer_format) == "12"


# --- rows


def load(name, split="train", size=20, kind="prompts", seed=0):
    return loading.load_rows(
        name, split=split, split_option="--dataset_train_split", kind=kind, max_samples=size, seed=seed
    ).table


@needs_package
def test_rows_are_a_function_of_seed_and_number_and_neighbouring_seeds_share_none():
    rows = load(SHORT).to_list()
    assert load(SHORT, size=5).to_list() == rows[:5]
    assert len(load(f"{SHORT}&size=7", size=None)) == 7
    hard = "reasoning_gym:chain_sum?min_terms=5&max_terms=9"
    questions = [{row["question"] for row in load(hard, size=60, seed=seed).to_list()} for seed in (0, 1)]
    assert len(questions[0]) == 60 and not questions[0] & questions[1]


@needs_package
def test_splits_share_no_question_and_the_report_counts_distinct_ones():
    train = loading.load_rows(SHORT, split="train", split_option="--x", kind="prompts", max_samples=400)
    assert train.note == f"{len(set(train.table['question']))} distinct questions"
    held_out = [set(load(SHORT, split, 40)["question"]) for split in ("validation", "test")]
    assert all(len(own) == 40 for own in held_out)
    assert not held_out[0] & held_out[1] and not set(train.table["question"]) & (held_out[0] | held_out[1])


@needs_package
def test_prompts_have_the_packages_system_prompt_or_ones_own():
    [default, user] = load(SHORT, size=1)[0]["prompt"]
    assert default["role"] == "system" and "<answer>" in default["content"]
    assert user["content"] == load(SHORT, size=1)[0]["question"]
    given = {"": None, "direct": "directly", "Be brief": "Be brief"}
    for system_prompt, text in given.items():
        prompt = load(f"reasoning_gym:chain_sum?{json.dumps({'system_prompt': system_prompt})}", size=1)[0]["prompt"]
        assert (len(prompt) == 1) if text is None else text in prompt[0]["content"]
    assert "\\boxed{}" in load(f"{SHORT}&answer_format=boxed", size=1)[0]["prompt"][0]["content"]


@needs_package
@pytest.mark.parametrize("answer_format", ["tag", "boxed", "text"])
@pytest.mark.parametrize("task", ["chain_sum", "gsm_symbolic", "spell_backward", "word_sorting", "countdown"])
def test_a_demonstration_gets_the_full_reward(task, answer_format):
    rows = load(f"reasoning_gym:{task}?answer_format={answer_format}", "test", 4, "demonstrations").to_list()
    completions = [row["completion"] for row in rows]
    logged = {}
    found = rewards.reasoning_gym_reward(
        completions, [row["reasoning_gym"] for row in rows], log_metric=lambda name, value: logged.update({name: value})
    )
    assert found == [1.0] * 4 and logged == {f"accuracy/{task}": 1.0}
    assert rewards.reasoning_gym_reward(["no answer"], [rows[0]["reasoning_gym"]])[0] < 1
    assert rewards.reasoning_gym_reward(["1"], [None]) == [None]


@needs_package
def test_partial_scores_are_kept_or_cut():
    kept, cut = load(SHORT, size=1)[0], load(f"{SHORT}&partial_scores=false", size=1)[0]
    almost = f"<answer>{kept['answer']} or so</answer>"
    assert 0 < rewards.reasoning_gym_reward([almost], [kept["reasoning_gym"]])[0] < 1
    assert rewards.reasoning_gym_reward([almost], [cut["reasoning_gym"]]) == [0.0]


@needs_package
def test_composites_curricula_and_worked_answers():
    parts = [{"name": "chain_sum", "weight": 1}, {"name": "spell_backward", "weight": 2, "config": {"level": 1}}]
    rows = load(f"reasoning_gym:composite?{json.dumps({'datasets': parts})}", size=30)
    assert set(rows["task"]) == {"chain_sum", "spell_backward"}
    assert (
        load("reasoning_gym:chain_sum?level=0", size=3)["question"]
        != load("reasoning_gym:chain_sum?level=3")["question"]
    )
    worked = load("reasoning_gym:gsm_symbolic", size=1, kind="demonstrations")[0]["completion"][0]["content"]
    assert worked.count("\n") and "####" not in worked and worked.endswith("</answer>")


@needs_package
@pytest.mark.parametrize(
    "name, message",
    [
        ("chain_sums", "no task 'chain_sums'. .*chain_sum.* Tasks: "),
        ("chain_sum?terms=3", "chain_sum has no parameter terms; it has .*min_terms"),
        ("chain_sum?min_terms=5&max_terms=3", "chain_sum: max_terms must be >= min_terms"),
        ("chain_sum?level=-1", "level is -1"),
        ("composite", "composite"),
        ('composite?{"datasets": [1]}', "datasets is a list of"),
    ],
)
def test_what_the_package_does_not_have_is_named(name, message):
    with pytest.raises(UserError, match=message):
        load(f"reasoning_gym:{name}")


@needs_package
def test_an_unknown_split_or_kind_is_named():
    with pytest.raises(UserError, match="train, validation, test"):
        load(SHORT, "dev")
    with pytest.raises(UserError, match="no preference_pairs; it has prompts and demonstrations"):
        load(SHORT, kind="preference_pairs")


@needs_package
def test_rows_of_another_version_are_refused():
    record = json.loads(load(SHORT, size=1)[0]["reasoning_gym"])
    record["row"][-1] += 1
    with pytest.raises(UserError, match="another question than the one in the data"):
        rewards.reasoning_gym_reward(["<answer>1</answer>"], [json.dumps(record)])
