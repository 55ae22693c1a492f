"""python -m rlhf_jax.evaluate from end to end, with tiny models: numbers recomputed another way, refusals, judges."""

import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import data, evaluate, load_policy
from rlhf_jax.algorithms import reward_model
from rlhf_jax.config import PPOConfig, RewardConfig
from rlhf_jax.config import files as config_files
from rlhf_jax.data import batches, synthetic
from rlhf_jax.errors import UserError
from rlhf_jax.evaluate import aggregate, plan, rouge, terminal
from rlhf_jax.evaluate.__main__ import main
from rlhf_jax.evaluate.answers import Sampler
from rlhf_jax.evaluate.options import EvaluateConfig
from rlhf_jax.evaluate.run import run
from rlhf_jax.models import custom_shape, lora
from rlhf_jax.models.io import hf, peft
from tests.helpers.children import policy_checkpoints
from tests.helpers.judge_server import chat, question
from tests.helpers.made_data import make_prompts
from tests.helpers.models_common import random_params
from tests.helpers.reward_server import answers, send

POSTS = 10
TASKS = ("other posts", "every third")
SECRET = "sk-5d41402a"


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """Two policies, a reward model, posts with answers, pairs."""
    folder = tmp_path_factory.mktemp("room")
    policy_checkpoints(folder)
    posts = synthetic.demonstrations(POSTS)
    lines(folder / "posts.jsonl", [{**row, "task": TASKS[i % 3 == 0]} for i, row in enumerate(posts)])
    lines(folder / "pairs.jsonl", synthetic.preference_pairs(POSTS))
    (folder / "judges.py").write_text(
        "def shorter(prompts, completions):\n"
        "    return [0.5 if len(a) == len(b) else int(len(b) < len(a)) for a, b in completions]\n"
        "def brevity(completions, **_):\n    return [-len(text) for text in completions]\n"
    )
    return folder


def options(room, **given):
    base = {"model": room / "policy", "data": room / "posts.jsonl", "response_length": 6, "query_length": 60}
    base |= {"temperature": 1.0, "bootstrap_resamples": 100, "batch_size": 8, "num_completions_to_print": 1}
    return {name: str(v) if isinstance(v, pathlib.Path) else v for name, v in (base | given).items()}


def done(room, output, **given):
    """(evaluation.json, samples.jsonl, what was printed)."""
    told = []
    found = run(EvaluateConfig(**options(room, output_dir=output, **given)), told.append)
    written = json.loads((output / "evaluation.json").read_text())
    assert written["policies"] == json.loads(json.dumps(found["policies"]))
    rows = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    return written, rows, "\n".join(told)


@pytest.fixture(scope="module")
def whole(room, tmp_path_factory):
    """One evaluation with everything that needs no network."""
    given = {"ref_model_path": room / "sft", "reward_model_path": room / "reward", "pairs": room / "pairs.jsonl"}
    given |= {"reward_funcs": (f"{room / 'judges.py'}:brevity",), "judge_funcs": (f"{room / 'judges.py'}:shorter",)}
    output = tmp_path_factory.mktemp("whole")
    return *done(room, output, best_of_n=(1, 2, 3), num_generations=4, **given), output


def test_every_prompt_has_everyones_answers_and_their_numbers(whole):
    found, rows, told, _ = whole
    assert [row["name"] for row in found["policies"]] == ["policy", "reference", "ref_model"]
    assert len(rows) == POSTS and all(list(row["answers"]) == ["policy", "reference", "ref_model"] for row in rows)
    posts = [row["completion"] for row in synthetic.demonstrations(POSTS)]
    assert [row["answers"]["reference"][0]["text"] for row in rows] == posts
    assert all(len(row["answers"]["policy"]) == 4 and len(row["answers"]["ref_model"]) == 1 for row in rows)
    scores = np.array([[answer["score"] for answer in row["answers"]["policy"]] for row in rows])
    policy = found["policies"][0]
    assert policy["score"]["mean"] == pytest.approx(scores.mean()) and policy["responses"] == 4 * POSTS
    assert policy["score"]["se"] == pytest.approx(scores.mean(axis=1).std(ddof=1) / np.sqrt(POSTS))
    assert set(policy["rewards"]) == {"reward", "brevity"} and "== Sample 1" in told and "== Sample 2" not in told


def test_rewards_are_told_by_task(whole):
    found, rows, told, _ = whole
    policy = found["policies"][0]
    assert {task: own["prompts"] for task, own in policy["by_task"].items()} == {"every third": 4, "other posts": 6}
    own = [[answer["rewards"]["brevity"] for answer in row["answers"]["policy"]] for row in rows[::3]]
    brevity = policy["by_task"]["every third"]["rewards"]["brevity"]
    assert brevity["mean"] == pytest.approx(np.mean(own)) and brevity["low"] <= brevity["mean"] <= brevity["high"]
    assert "accuracy" not in brevity  # these rewards are below 0
    line = f"{brevity['mean']:.3f} ({brevity['low']:.3f} to {brevity['high']:.3f})"
    assert re.search(rf"every third +4 +policy +brevity +{re.escape(line)} +-", told)


def test_accuracy_is_the_share_of_the_answers_with_a_reward_of_one():
    values = np.array([[1.0, 0.5], [1.0, 1.0], [np.nan, np.nan], [0.0, 1.0]])
    found = aggregate.reward_of_task(values, resamples=100)
    assert found["mean"] == pytest.approx((0.75 + 1 + 0.5) / 3) and found["missing"] == 2
    assert found["accuracy"]["mean"] == pytest.approx((0.5 + 1 + 0.5) / 3)
    right = aggregate.reward_of_task(np.ones((20, 1)), resamples=100)["accuracy"]
    assert (right["mean"], right["high"]) == (1.0, 1.0) and right["low"] == pytest.approx(20 / (20 + 1.96**2), abs=1e-3)


def scores_of(room, pairs, eos=True):
    """[N] scores of the reward model for (prompt, answer), in one forward pass; at eos or before it."""
    model, params = hf.load(room / "reward", kind="scalar")
    tokenizer = data.load_tokenizer("synthetic")
    ids = [
        [*tokenizer.encode(prompt), *tokenizer.encode(answer), *[tokenizer.eos_id] * eos] for prompt, answer in pairs
    ]
    tokens = jnp.asarray(batches.pad_right([np.asarray(own) for own in ids], 96, tokenizer.pad_id))
    return np.asarray(reward_model.score_texts(model, params, tokens, batches.lengths_of(ids), dtype=jnp.float32))


def test_scores_are_the_reward_models_on_prompt_and_answer(room, whole):
    given = [(row["prompt"], row["answers"]["reference"][0]) for row in whole[1]]
    expected = scores_of(room, [(prompt, answer["text"]) for prompt, answer in given])
    found = [answer["rewards"]["reward"] for _, answer in given]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    for _, answer in given:
        assert answer["rewards"]["brevity"] == -len(answer["text"])
        assert answer["score"] == pytest.approx(sum(answer["rewards"].values()), rel=1e-5)


def test_the_kl_is_that_of_two_forward_passes(room, whole):
    policy, ref = (load_policy(room / name) for name in ("policy", "sft"))
    source = make_prompts(data.load_rows(str(room / "posts.jsonl")), policy.tokenizer, query_length=60)
    config = PPOConfig(response_length=6, temperature=1.0)
    sampler = Sampler(
        config, source, 4, eos_ids=policy.tokenizer.eos_ids, suppress_ids=(), seed=42, batch_size=8, ref=ref
    )
    found = sampler.answers("policy", policy, 0)
    assert found.kl[0].tolist() == [answer["kl"] for answer in whole[1][0]["answers"]["policy"]]
    rollout = found.batches[0].rollout
    row, columns = int(np.argmax(rollout.lengths)), rollout.prompt_tokens.shape[1]
    tokens = jnp.asarray(np.concatenate([rollout.prompt_tokens[row], rollout.response[row]]))[None]
    there = np.arange(tokens.shape[1])[None] >= columns - rollout.prompt_lengths[row]
    totals = []
    for one in (policy, ref):
        logits = one.model.logits(one.params, one.model.hidden(one.params, tokens, there))[0, columns - 1 : -1]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[0, columns:, None], axis=1)[:, 0]
        totals.append(float(chosen[: rollout.lengths[row]].sum()))
    assert found.kl[row // 4, row % 4] == pytest.approx(totals[0] - totals[1], abs=1e-3)
    assert all(answer["kl"] == 0.0 for row in whole[1] for answer in row["answers"]["ref_model"])


def test_win_rates_are_those_of_the_first_answers(whole):
    found, rows, told, _ = whole
    by = {(row["by"], row["against"]): row for row in found["win_rates"]}
    judges = ["score", "reward", "brevity", "shorter"]
    assert sorted(by) == sorted(itertools.product(judges, ["reference", "ref_model"]))
    for other in ("reference", "ref_model"):
        mine, others = ([row["answers"][name][0] for row in rows] for name in ("policy", other))
        lengths = [(len(a["text"]), len(b["text"])) for a, b in zip(mine, others)]
        short = np.mean([(a < b) + 0.5 * (a == b) for a, b in lengths])
        for judge in ("brevity", "shorter"):  # the same opinion, one as a reward and one of pairs
            row = by[judge, other]
            assert row["win_rate"] == pytest.approx(short) and row["wins"] + row["ties"] + row["losses"] == POSTS
            assert row["win_rate_low"] <= short <= row["win_rate_high"]
        assert by["shorter", other]["longer"] == pytest.approx(1 - short)
        expected = evaluate.length_controlled_win_rate(
            [(a < b) + 0.5 * (a == b) for a, b in lengths], *zip(*lengths), resamples=100, seed=42
        )
        assert by["shorter", other]["length_controlled_win_rate"] == expected["length_controlled_win_rate"]
        gain = np.mean([a["score"] - b["score"] for a, b in zip(mine, others)])
        assert by["score", other]["difference"]["mean"] == pytest.approx(gain)
    assert by["shorter", "reference"]["judge"]["orders_agree"] == 1.0 and "both orders agree on 100.0 %" in told


def test_best_of_n_is_the_mean_over_all_subsets_of_the_answers(whole):
    found, rows, told, _ = whole
    for row in found["best_of_n"]:
        brute = []
        for prompt in rows:
            subsets = itertools.combinations(prompt["answers"]["policy"], row["n"])
            brute += [np.mean([max(answer["score"] for answer in subset) for subset in subsets])]
        assert row["score"]["mean"] == pytest.approx(np.mean(brute)) and row["samples"] == 4
        assert row["kl_bound"] == pytest.approx(np.log(row["n"]) - (row["n"] - 1) / row["n"])
    first = found["best_of_n"][0]
    assert first["score"]["mean"] == pytest.approx(found["policies"][0]["score"]["mean"])
    assert first["brevity"]["mean"] == pytest.approx(found["policies"][0]["rewards"]["brevity"]["mean"])
    assert "KL at most" in told


def test_the_reward_model_is_measured_on_pairs(room, whole):
    found, told = whole[0]["reward_model"], whole[2]
    pairs = synthetic.preference_pairs(POSTS)
    sides = [scores_of(room, [(pair["prompt"], pair[name]) for pair in pairs]) for name in ("chosen", "rejected")]
    margins = sides[0] - sides[1]
    assert found["pairs"] == POSTS and found["margin"] == pytest.approx(np.mean(margins), rel=1e-3)
    assert found["accuracy"] == pytest.approx(np.mean(np.array(margins) > 0)) and "expected calibration error" in told


@pytest.mark.filterwarnings("ignore:.*pads with its eos")
def test_a_reward_model_that_pads_with_its_eos_is_read_before_it(room, tmp_path):
    shutil.copytree(room / "reward", tmp_path / "reward")
    tokenizer = data.load_tokenizer("synthetic")
    tokenizer.hf.pad_token = tokenizer.hf.eos_token
    data.save_tokenizer(tokenizer, str(tmp_path / "reward"))
    given = {"reward_model_path": tmp_path / "reward", "pairs": room / "pairs.jsonl", "against": ("reference",)}
    found, rows, _ = done(room, tmp_path / "out", **given)
    pairs = synthetic.preference_pairs(POSTS)
    sides = [
        scores_of(room, [(pair["prompt"], pair[name]) for pair in pairs], eos=False) for name in ("chosen", "rejected")
    ]
    assert found["reward_model"]["margin"] == pytest.approx(np.mean(sides[0] - sides[1]), rel=1e-3)
    answers = [(row["prompt"], row["answers"]["reference"][0]) for row in rows]
    expected = scores_of(room, [(prompt, answer["text"]) for prompt, answer in answers], eos=False)
    np.testing.assert_allclose([answer["rewards"]["reward"] for _, answer in answers], expected, rtol=1e-4)


def test_the_same_seed_gives_the_same_bytes_and_another_batch_the_same_texts(room, tmp_path):
    names = ("evaluation.json", "samples.jsonl")
    outputs = [tmp_path / "one", tmp_path / "two", tmp_path / "other"]
    first, _ = (done(room, output, against=("reference",)) for output in outputs[:2])
    assert (outputs[0] / names[1]).read_bytes() == (outputs[1] / names[1]).read_bytes()
    same = [(o / names[0]).read_text().replace(str(o), "") for o in outputs[:2]]
    assert same[0] == same[1]
    other = done(room, outputs[2], batch_size=3, against=())
    texts = [[row["answers"]["policy"][0]["text"] for row in found[1]] for found in (first, other)]
    assert texts[0] == texts[1]


def test_another_temperature_compiles_nothing(room, tmp_path, missed):
    # New numbers each time: those of an earlier session would be in its cache.
    for temperature in np.random.default_rng().uniform(0.5, 1.5, 2):
        missed.clear()
        found, *_ = done(room, tmp_path / "out", temperature=float(temperature), ref_model_path=room / "sft")
        assert found["sampling"]["temperature"] == temperature and found["policies"][0]["kl"]
    assert missed == []


def test_ids_that_the_reward_model_lacks_are_never_sampled(room, tmp_path):
    tokenizer = data.load_tokenizer("synthetic")
    model = custom_shape("1x16x2", vocab_size=2 * tokenizer.vocab_size, max_positions=96)  # half of its ids
    hf.save(tmp_path / "wide", model, random_params(model), kind="causal")
    data.save_tokenizer(tokenizer, str(tmp_path / "wide"))
    given = {"model": tmp_path / "wide", "reward_model_path": room / "reward", "against": ()}
    found, rows, told = done(room, tmp_path / "out", **given)
    assert f"ids {tokenizer.vocab_size} to {2 * tokenizer.vocab_size - 1} are not sampled: reward model" in told
    assert np.isfinite([row["answers"]["policy"][0]["score"] for row in rows]).all()


# --- a run's folder


def finished_run(room, root, stage="ppo", **changes):
    """A run's folder as training leaves it, as far as evaluation reads it."""
    folder = root / stage
    folder.mkdir(parents=True)
    shared = {"run_dir": str(folder), "dataset_name": "synthetic", "max_eval_samples": 6, "query_length": 60}
    if stage == "ppo":
        paths = {"sft_model_path": str(room / "sft"), "reward_model_path": str(room / "reward")}
        config = PPOConfig(**{**shared, **paths, "response_length": 6, "temperature": 0.9, **changes})
        (folder / "policy").symlink_to(room / "policy")
    else:
        config = RewardConfig(**{**shared, "model_name_or_path": str(room / "sft"), "max_length": 90, **changes})
        (folder / "reward_model").symlink_to(room / "reward")
    (folder / "config.json").write_text(config_files.to_json(config))
    (folder / "finished.json").write_text(json.dumps({"step": 1, "metrics": {}, "paths": {}}))
    return folder


def test_a_pipelines_folder_brings_policy_data_rewards_and_pairs(room, tmp_path, capsys):
    finished_run(room, tmp_path / "run")
    finished_run(room, tmp_path / "run", "reward")
    assert main(["--run_dir", str(tmp_path / "run"), "--bootstrap_resamples", "100", "--max_eval_samples", "4"]) == 0
    found = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())
    assert found["data"]["prompts"] == 4 and found["reward_model"]["pairs"] == 4
    assert found["sampling"]["temperature"] == 0.9 and found["rewards"] == ["reward"]
    assert [row["name"] for row in found["policies"]] == ["policy", "reference", "ref_model"]
    assert {row["by"] for row in found["win_rates"]} == {"reward", "gold"}
    assert "Win rate of policy" in capsys.readouterr().out


def test_options_are_the_runs_but_for_those_given(room, tmp_path):
    folder = finished_run(room, tmp_path, generation_kwargs={"top_k": 5, "top_p": 0.9}, reward_weights=(2.0,))
    made = plan.make_plan(EvaluateConfig(run_dir=str(folder), top_k=3, reward_funcs=("m:f",)))
    assert made.prompts.top_k == 3 and made.prompts.generation_kwargs == {"top_p": 0.9}
    assert made.prompts.temperature == 0.9 and made.prompts.response_length == 6
    assert made.prompts.reward_weights is None and made.prompts.reward_model_path == str(room / "reward")
    assert made.ref.path == str(room / "sft") and made.policy.path == str(folder / "policy")
    assert made.output_dir == str(folder / "evaluation") and made.pairs is None


def test_answers_of_all_policies_end_with_any_of_the_stop_token_ids(room, tmp_path):
    given = {"ref_model_path": room / "sft", "num_generations": 2, "response_length": 20}
    plain, _, _ = done(room, tmp_path / "plain", **given)
    many = tuple(range(0, data.load_tokenizer("synthetic").vocab_size, 2))
    written, _, _ = done(room, tmp_path / "several", stop_token_ids=many, **given)
    assert written["sampling"]["stop_token_ids"] == list(many) and plain["sampling"]["stop_token_ids"] is None
    lengths = [{row["name"]: row["length"] for row in each["policies"]} for each in (plain, written)]
    assert lengths[0].keys() == lengths[1].keys() and {"policy", "ref_model"} <= lengths[0].keys()
    assert all(lengths[1][name]["mean"] < lengths[0][name]["mean"] for name in ("policy", "ref_model"))
    with pytest.raises(UserError, match="stop_token_ids generation_config"):
        run(EvaluateConfig(**options(room, output_dir=tmp_path / "none", stop_token_ids="generation_config")), print)


def test_answers_of_all_policies_match_the_regular_expression(room, tmp_path):
    form = "( met| lost)( anna| omar){2,3}"
    found, rows, _ = done(room, tmp_path, ref_model_path=room / "sft", structured_outputs_regex=form)
    texts = [answer["text"] for row in rows for name in ("policy", "ref_model") for answer in row["answers"][name]]
    assert len(texts) == 2 * POSTS and all(re.fullmatch(form, text) for text in texts)
    assert found["sampling"]["structured_outputs_regex"] == form
    with pytest.raises(UserError, match="has no column 'form' .structured_outputs_regex_column.; it has completion"):
        done(room, tmp_path, structured_outputs_regex_column="form")


def test_a_run_that_was_moved_is_found_where_it_is(room, tmp_path):
    old = tmp_path / "old"
    finished_run(room, old, sft_model_path=str(old / "sft" / "policy"))
    (old / "sft").mkdir()
    (old / "sft" / "policy").symlink_to(room / "sft")
    old.rename(tmp_path / "new")
    made = plan.make_plan(EvaluateConfig(run_dir=str(tmp_path / "new")))
    assert made.ref.path == str(tmp_path / "new" / "sft" / "policy")


def test_a_run_with_adapters_is_evaluated_against_what_it_trained_from(room, tmp_path):
    """Its policy's folder is an adapter alone (export_merged false); the plan holds no option of adapters."""
    given = {
        "use_peft": True,
        "lora_value": "own",
        "load_in_8bit": True,
        "value_model": "separate",
        "lora_target_modules": ("dense",),
    }
    folder = finished_run(room, tmp_path, **given)
    (folder / "policy").unlink()
    model, base = hf.load(room / "sft", kind="causal")
    model = dataclasses.replace(model, lora=lora.Lora(r=2, alpha=4, dropout=0.0, target_modules=("dense",)))
    noise = jax.random.key(1)  # not the same number everywhere, which the layer norms would take out again
    fresh = lora.init(model, jax.random.key(0), base)
    adapter = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(noise, x.shape), fresh)
    peft.save(folder / "policy", model, jax.device_get(adapter), kind="causal", base=str(room / "sft"))
    data.save_tokenizer(data.load_tokenizer("synthetic"), str(folder / "policy"))
    made = plan.make_plan(EvaluateConfig(run_dir=str(folder)))
    assert made.policy.path == str(folder / "policy") and made.ref.path == str(room / "sft")
    assert not made.prompts.use_peft
    assert main(["--run_dir", str(folder), "--bootstrap_resamples", "100", "--max_eval_samples", "4"]) == 0
    found = json.loads((folder / "evaluation" / "evaluation.json").read_text())
    assert found["policies"][0]["kl"]["mean"] > 0.01 > 0 == found["policies"][2]["kl"]["mean"]
    named = finished_run(room, tmp_path / "named", **given, adapters=(f"old={folder}/policy",), ref_adapter_name="old")
    assert plan.make_plan(EvaluateConfig(run_dir=str(named))).ref.path == f"{folder}/policy"
    trained_on = finished_run(room, tmp_path / "on", use_peft=True, sft_model_path=f"{folder}/policy")
    assert plan.make_plan(EvaluateConfig(run_dir=str(trained_on))).ref.path == f"{folder}/policy"


def test_policies_of_runs_have_names_of_their_own(room):
    made = plan.make_plan(EvaluateConfig(**options(room, against=("a/ppo/policy", "b/ppo/policy", "org/pythia"))))
    assert [other.name for other in made.others] == ["ppo/policy", "ppo/policy'", "pythia"] and not made.reference


# --- refused before a weight is read


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": None, "data": None}, "nothing to evaluate"),
        ({"data": None}, "--model needs --data"),
        ({"best_of_n": (4,), "num_generations": 2}, "best_of_n 4 needs as many responses"),
        ({"best_of_n": (2,)}, "--best_of_n needs a reward"),
        ({"judge_url": "http://127.0.0.1:9/v1"}, "--judge_url needs --judge_model"),
        ({"judge_url": "localhost", "judge_model": "m"}, "give a URL such as http"),
        ({"judge_url": "http://u:p@h/v1", "judge_model": "m"}, "user name or a password"),
        ({"judge_url": "http://127.0.0.1:9/v1", "judge_model": "m", "judge_api_key_env": "NOT_SET"}, "NOT_SET"),
        ({"judge_url": "http://127.0.0.1:9/v1", "judge_model": "m", "judge_prompt": "/nothing"}, "cannot be read"),
        (
            {"judge_url": "http://127.0.0.1:9/v1", "judge_model": "m", "judge_kwargs": {"model": "x"}},
            "evaluation sets it",
        ),
        ({"judge_funcs": ("nothing:f",)}, "there is no module 'nothing'"),
        ({"reward_funcs": ("nothing:f",)}, "there is no module 'nothing'"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be at least 0"),
        ({"bootstrap_resamples": 1}, "at least 100"),
        ({"against": ("reference",), "completion_column": "summary_"}, "has no column 'summary_'.*it has .*completion"),
        ({"against": ("ref_model",)}, "there is no reference model; set --ref_model_path"),
        ({"against": ("nobody/there",)}, "nobody/there"),
        ({"run_dir": "/nothing"}, "there is no such folder"),
        ({"output_dir": "/proc/version/x"}, "/proc/version is not a folder"),
        ({"prompt_column": "question"}, "has no column 'question'"),
        ({"response_length": 90}, "query_length . --response_length = 150 tokens.*context of 96"),
        ({"pairs": "posts.jsonl"}, "--pairs needs --reward_model_path"),
    ],
)
def test_what_cannot_be_is_refused_before_a_weight_is_read(room, tmp_path, monkeypatch, given, said):
    def never(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(hf, "load", never)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=said):
        run(EvaluateConfig(**options(room, **{"output_dir": str(tmp_path / "out"), **given})), lambda _: None)
    assert not (tmp_path / "out").exists()


def test_what_was_given_to_run_as_an_object_is_asked_for(room, tmp_path):
    folder = finished_run(room, tmp_path, reward_model_path=None)
    finished = folder / "finished.json"

    def made(objects, **given):
        finished.write_text(json.dumps({"step": 1, "metrics": {}, "paths": {}, "objects": objects}))
        return plan.make_plan(EvaluateConfig(run_dir=str(folder), **given))

    with pytest.raises(UserError, match="argument of rlhf_jax.run.* Set --data"):
        made(["train_dataset"])
    with pytest.raises(UserError, match="Set --data"):
        made(["eval_dataset", "train_dataset"])
    assert made(["train_dataset"], data="synthetic").warnings == ()
    (warning,) = made(["reward_funcs"]).warnings
    assert "set --reward_funcs to FILE.py:FUNCTION" in warning
    assert made(["reward_funcs"], reward_funcs=("m.py:f",)).warnings == ()
    with pytest.raises(UserError, match="tools of this run was an argument of rlhf_jax.run.* Set --tools to FILE.py"):
        made(["tools"])
    assert made(["tools"], tools=("m.py:f",)).prompts.tools == ("m.py:f",)
    with pytest.raises(UserError, match="Set --environment_factory to FILE.py:CLASS"):
        made(["environment_factory"])


def test_a_runs_tools_are_those_of_its_evaluation(room, tmp_path):
    folder = finished_run(room, tmp_path, reward_model_path=None, tools=("my_tools.py:add",), tool_timeout=3.0)
    prompts = plan.make_plan(EvaluateConfig(run_dir=str(folder))).prompts
    assert prompts.tools == ("my_tools.py:add",) and prompts.tool_timeout == 3.0


def test_an_unfinished_run_is_refused(room, tmp_path):
    folder = finished_run(room, tmp_path)
    os.remove(folder / "finished.json")
    with pytest.raises(UserError, match="is not finished"):
        plan.make_plan(EvaluateConfig(run_dir=str(folder)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--modle", "x"], "unknown option --modle. Did you mean model"),
        (["--temperature", "hot"], "--temperature = 'hot'"),
        (["--judge_kwargs", "{"], "is not JSON"),
        (["--model", "x", "--dataset_name", "/nothing.jsonl"], "no such (file or )?folder|neither a local folder"),
    ],
)
def test_the_command_line_says_what_is_wrong_in_one_line(capsys, monkeypatch, words, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.match(f"error: .*({said})", error)


# --- a remote judge


@pytest.fixture
def server(server):
    server.forever = lambda handler: send(handler, 200, chat("[[A]]"))
    return server


def test_a_remote_judge_is_asked_about_every_pair_in_both_orders_and_its_key_is_nowhere(
    room, tmp_path, monkeypatch, server, capsys
):
    monkeypatch.setenv("RLHF_JAX_JUDGE_API_KEY", SECRET)
    prompts = [row["prompt"] for row in synthetic.demonstrations(3)]
    odd = lambda handler: prompts[1] in question(handler)  # noqa: E731
    server.forever = lambda h: send(h, 200, chat(f"hm, {SECRET}" if odd(h) else "Short. [[A]]"))
    url = server.url.replace("/score", "/v1")
    given = {"judge_url": url, "judge_model": "small", "max_eval_samples": 3, "against": ("reference",)}
    found, rows, told = done(room, tmp_path, **given)
    (wins,) = found["win_rates"]
    assert wins["by"] == "judge small" and wins["prompts"] == 2 and wins["left_out"] == 1 and wins["win_rate"] == 0.5
    assert wins["judge"]["unparsable"] == 2 and wins["judge"]["first_place"] == 1.0
    assert "1 prompts left out (2 unparsable replies, 0 questions without a reply)" in told
    assert rows[0]["verdicts"]["judge small against reference"]["said"] == ["Short. [[A]]"] * 2
    assert len(server.requests) == 1 + 6  # the trial question first
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {SECRET}"}
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert written and not any(SECRET in text for text in [*written, told, *capsys.readouterr()])


def test_a_judge_that_is_not_there_is_known_before_a_weight_is_read(room, tmp_path, monkeypatch, server):
    monkeypatch.setattr(hf, "load", lambda *_, **__: pytest.fail("weights were read"))
    server.forever = answers(401, {"error": "no key"})
    given = {"judge_url": server.url, "judge_model": "small", "judge_retries": 0}
    with pytest.raises(UserError, match="status 401.*test question"):
        run(EvaluateConfig(**options(room, output_dir=str(tmp_path / "out"), **given)), lambda _: None)


def test_a_judge_that_fails_in_the_middle_leaves_the_answers(room, tmp_path, server):
    server.script.append(answers(200, chat("[[C]]")))
    server.forever = answers(403, {"error": "quota"})
    given = {"judge_url": server.url, "judge_model": "small", "judge_retries": 0, "against": ("reference",)}
    with pytest.raises(UserError, match="status 403.*quota"):
        run(EvaluateConfig(**options(room, output_dir=str(tmp_path), max_eval_samples=3, **given)), lambda _: None)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and rows[0]["answers"]["policy"][0]["text"] and not (tmp_path / "evaluation.json").exists()


# --- ROUGE


def test_rouge_by_hand():
    pytest.importorskip("rouge_score")
    # 'the cat sat' of 'the cat ran home': 2 of 3 and 2 of 4 words, one of 2 and of 3 pairs, a common row of 2.
    found = rouge.scores(["the cat ran home", "dogs"], ["the cat sat", "dog"])
    np.testing.assert_allclose(found["rouge1"], [2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4), 1.0])
    np.testing.assert_allclose(found["rouge2"], [2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3), 0.0])
    np.testing.assert_allclose(found["rougeL"], [4 / 7, 1.0])


def test_rouge_that_is_missing_is_said_before_anything_is_done(room, monkeypatch):
    monkeypatch.setattr(rouge.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install '.\\[rouge\\]'"):
        run(EvaluateConfig(**options(room, rouge=True)), lambda _: None)


def test_rouge_is_of_the_first_answers(room, tmp_path):
    pytest.importorskip("rouge_score")
    found, rows, told = done(room, tmp_path, rouge=True, max_eval_samples=3)
    pairs = [(row["answers"]["reference"][0]["text"], row["answers"]["policy"][0]["text"]) for row in rows]
    expected = rouge.scores(*map(list, zip(*pairs)))
    assert found["policies"][0]["rouge1"]["mean"] == pytest.approx(expected["rouge1"].mean()) and "ROUGE-L" in told
    assert "rouge1" not in found["policies"][1]


# --- greedy


def test_greedy_answers_have_no_kl(room, tmp_path):
    given = {"temperature": 0.0, "ref_model_path": room / "sft", "max_eval_samples": 3, "against": ()}
    found, rows, _ = done(room, tmp_path, **given)
    assert "kl" not in found["policies"][0] and found["sampling"]["temperature"] == 0.0 and found["win_rates"] == []
    again, more, _ = done(room, tmp_path, seed=9, **given)
    assert [row["answers"] for row in rows] == [row["answers"] for row in more]


def test_a_length_controlled_rate_that_extrapolates_is_said_to():
    row = {"by": "x", "policy": "policy", "against": "other", "left_out": 0, "longer": 0.97}
    (line,) = terminal._notes([row, row | {"by": "y"}])
    assert line.startswith("against other: 97 % of policy's answers are longer")
    assert not [*terminal._notes([row | {"longer": 0.6}])]


def test_a_win_on_every_prompt_is_shown_with_wilsons_interval():
    base = {"policy": "policy", "against": "other", "ties": 0, "losses": 0}
    rates = {"win_rate": 1.0, "win_rate_low": 1.0, "win_rate_high": 1.0, "wilson_low": 0.84, "wilson_high": 1.0}
    rates |= dict.fromkeys((f"length_controlled_win_rate{end}" for end in ("", "_low", "_high")), 1.0)
    text = terminal._win_rates_table([{**base, **rates, "by": "x", "wins": 20}])
    assert "100.0 % (84.0 to 100.0)" in text and "(100.0 to" not in text
