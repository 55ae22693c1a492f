"""RLOO as a run, and the rewards that it shares with PPO: tiny models on the built-in task."""

import collections
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax
from rlhf_jax import data, rewards, stages
from rlhf_jax.algorithms import reward_model
from rlhf_jax.config import GRPOConfig, PPOConfig, RLOOConfig
from rlhf_jax.errors import UserError
from rlhf_jax.metrics import catalog, logger
from rlhf_jax.models import custom_shape
from rlhf_jax.models.io import hf
from rlhf_jax.rewards import scorer as scoring
from rlhf_jax.rewards.python_functions import RewardFailure
from rlhf_jax.runtime import run_folder
from rlhf_jax.runtime.callbacks import Callback
from tests.helpers.chat_tokenizer import bytes_tokenizer
from tests.helpers.models_common import random_params
from tests.helpers.runs import RLOO_OPTIONS, KillAt, compilations, lines, rollout_of, tensors

# A template of words that the synthetic tokenizer knows.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}POST: {{ m.content }}\n\n{% else %}TL;DR:{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}TL;DR:{% endif %}"
)


def config(where=None, **options):
    return RLOOConfig(**{**RLOO_OPTIONS, "run_dir": str(where), "num_generations": 2, **options})


def rows_of(result, name):
    with open(os.path.join(result.run_dir, "completions", name), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def assert_same_tensors(a, b):
    for x, y in zip(tensors(a), tensors(b), strict=True):
        np.testing.assert_array_equal(x, y)


class Evaluations(Callback):
    def __init__(self):
        self.steps = []

    def on_evaluate(self, step, metrics, control):
        self.steps.append(step)


def brevity(completions, **_):
    return [-0.1 * len(text.split()) for text in completions]


@rlhf_jax.jax_reward
def early_end(tokens, lengths):
    """Dense: minus a tenth for each token inside."""
    return jnp.where(jnp.arange(tokens.shape[1])[None] < lengths[:, None], -0.1, 0.0)


class LikesA:
    """An async object that keeps quiet of some rows, logs, and remembers how it was called."""

    name = "likes_a"

    def __init__(self):
        self.calls = []

    async def __call__(self, prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
        self.calls.append((trainer_state.global_step, trainer_state.is_eval, len(prompts), sorted(columns)))
        assert [len(ids) > 0 for ids in completion_ids] == [True] * len(prompts)
        counts = [text.count("a") for text in completions]
        log_metric("a_share", sum(counts) / len(counts))
        log_extra("a_count", counts)
        return [None if i % 4 == 3 else 0.1 * count for i, count in enumerate(counts)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders: a policy with dropout, two reward models of its tokenizer, one that reads bytes."""
    path = tmp_path_factory.mktemp("models")
    tokenizer = data.load_tokenizer("synthetic")
    rows = 128 * -(-tokenizer.vocab_size // 128)
    policy = custom_shape("1x32x2", rows, 256, hidden_dropout=0.1, attention_dropout=0.1)
    hf.save(path / "policy", policy, random_params(policy), kind="causal")
    for number in (1, 2):
        model = custom_shape("1x16x2", rows, 256)
        hf.save(path / f"judge{number}", model, random_params(model, ("scalar",), number), kind="scalar")
    model, own = custom_shape("1x16x2", 384, 1024), bytes_tokenizer()
    hf.save(path / "bytes", model, random_params(model, ("scalar",), 3), kind="scalar")
    for name, its in (("policy", tokenizer), ("judge1", tokenizer), ("judge2", tokenizer), ("bytes", own)):
        data.save_tokenizer(its, str(path / name))
    return path


# ------------------------------------------------------------------------------------------------------- one long run

EVAL_SETS = {
    "near": [{"prompt": f"POST: i met {who}.\n\nTL;DR:", "who": who} for who in ("anna", "omar", "lena")],
    "far": [{"prompt": "POST: i lost keys.\n\nTL;DR:"}] * 2,
}


def long_config(models, where):
    return config(
        where,
        sft_model_path=str(models / "policy"),
        scratch_model=None,
        dataset_test_split="validation",
        total_episodes=32,
        num_iterations=2,
        num_mini_batches=2,
        num_generations_eval=4,
        sync_ref_model=True,
        ref_model_sync_steps=3,
        eval_on_start=True,
        eval_steps=0.5,
        save_steps=1,
        log_completions=True,
        num_sample_generations=2,
        num_completions_to_print=2,
        temperature=1.0,
    )


@pytest.fixture(scope="module")
def long_run(models, tmp_path_factory):
    """4 updates with dropout, a moving reference, three kinds of reward and two evaluation sets."""
    likes_a, seen = LikesA(), Evaluations()
    given = {"reward_funcs": [brevity, likes_a, early_end], "eval_dataset": EVAL_SETS}
    result = rlhf_jax.run(long_config(models, tmp_path_factory.mktemp("runs") / "long"), callbacks=[seen], **given)
    return result, likes_a, seen


def test_every_metric_of_trl_is_there_and_has_a_twin_in_evaluation(long_run):
    result, _, _ = long_run
    found = lines(result.run_dir)
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4]
    names = "reward reward_std frac_reward_zero_std entropy kl loss num_tokens a_share".split()
    names += [f"completions/{end}_{of}length" for end in ("mean", "min", "max") for of in ("", "terminated_")]
    names += ["completions/clipped_ratio"]
    names += [f"rewards/{name}/{of}" for name in ("brevity", "likes_a", "early_end") for of in ("mean", "std")]
    names += [f"clip_ratio/{name}" for name in "low_mean low_min high_mean high_max region_mean".split()]
    line = found[-1]
    assert not {*names, "grad_norm", "learning_rate", "epoch"} - set(line)
    assert not {f"eval_{of}_{name}" for of in EVAL_SETS for name in names} - set(line)
    assert {"eval/scores", "eval/kl", "eval/response_length", "eval/eos_rate"} <= set(line)
    unexplained = {name for name in line if catalog.explain(name) is None}
    assert unexplained == {"a_share", *(f"eval_{of}_a_share" for of in EVAL_SETS)}  # which a reward function logs


def assert_explained(run, own):
    line = lines(run.run_dir)[-1]
    differences = {f"sampling/sampling_logp_difference/{of}" for of in ("mean", "max")}
    assert not (own | differences) - set(line)
    assert not [name for name in line if catalog.explain(name) is None]
    assert "eval_entropy_coef" not in line


def test_every_metric_of_a_grpo_run_is_explained(golden_grpo):
    own = {"policy_loss", "entropy_coef", "kl", "clip_ratio/region_mean", "frac_reward_zero_std"}
    assert_explained(golden_grpo, own)


def test_every_metric_of_a_grpo_run_with_vespo_is_explained(tmp_path):
    options = {**RLOO_OPTIONS, "batch_size": 4, "total_episodes": 4, "num_generations": 2, "scratch_model": "1x16x2"}
    options |= {"loss_type": "vespo", "entropy_coef": 0.01, "dataset_test_split": "validation", "max_eval_samples": 2}
    options |= {"importance_sampling_correction": True, "importance_sampling_mode": "token_mask"}
    own = {f"sampling/importance_sampling_ratio/{of}" for of in ("min", "mean", "max")}
    own |= {"entropy_coef", "eval_policy_loss", "vespo/phi_seq_mean"}
    assert_explained(rlhf_jax.run(GRPOConfig(**options, run_dir=str(tmp_path / "run")), reward_funcs=[brevity]), own)


def test_sampler_and_learner_differ_in_float16_by_a_fifth_of_bfloat16_and_the_update_teaches(tmp_path):
    options = {**RLOO_OPTIONS, "batch_size": 8, "total_episodes": 8, "num_generations": 2, "dataset_test_split": None}
    options |= {"scratch_model": "llama:4x64x4x2", "num_mini_batches": 1, "learning_rate": 1e-3}
    last = {}
    for dtype in ("bfloat16", "float16"):
        run = rlhf_jax.run(GRPOConfig(**options, dtype=dtype, run_dir=str(tmp_path / dtype)), reward_funcs=[brevity])
        last[dtype] = lines(run.run_dir)[-1]
    for of in ("mean", "max"):
        name = f"sampling/sampling_logp_difference/{of}"
        assert 0 < last["float16"][name] < 0.2 * last["bfloat16"][name]
    assert last["float16"]["grad_norm"] == pytest.approx(last["bfloat16"]["grad_norm"], rel=0.1)
    assert last["float16"].get("nonfinite/updates", 0) == 0


def test_trls_step_time_is_among_the_timings(long_run):
    assert all("step_time" in line for line in lines(long_run[0].run_dir, "timings.jsonl")[1:])


def test_evaluations_come_at_the_start_and_at_each_share_of_the_run(long_run):
    result, _, seen = long_run
    assert seen.steps == [0, 2, 4]
    with_eval = [line["step"] for line in lines(result.run_dir) if "eval_near_reward" in line]
    assert with_eval == [0, 2, 4]


def test_rewards_know_where_the_run_is_and_see_only_real_rows(long_run):
    _, likes_a, _ = long_run
    training = [call for call in likes_a.calls if call[2] == 8 and call[3] == ["completion"]]
    assert [call[:2] for call in training] == [(0, False), (1, False), (2, False), (3, False)]
    others = [call for call in likes_a.calls if call not in training]
    assert sum(rows for *_, rows, columns in others if columns == ["who"]) == 3 * 3 * 4 + 2 * 3
    assert all(is_eval for _, is_eval, _, _ in others)


def test_the_rate_is_that_of_the_optimizer_step(long_run):
    rates = [line["learning_rate"] for line in lines(long_run[0].run_dir)[1:]]
    np.testing.assert_allclose(rates, 1e-3 * (1 - np.array([0, 4, 8, 12]) / 16), rtol=1e-5)


def test_rewards_add_up_in_metrics_and_tables(long_run):
    result, _, _ = long_run
    for line in lines(result.run_dir)[1:]:
        rows = rows_of(result, f"training_{line['step']}.jsonl")
        assert list(rows[0]) == ["prompt", "completion", "brevity", "likes_a", "early_end", "a_count", "advantage"]
        each = {name: np.array([float(row[name]) for row in rows]) for name in ("brevity", "likes_a", "early_end")}
        assert np.isnan(each["likes_a"]).tolist() == [False, False, False, True] * 2
        total = np.nansum(list(each.values()), axis=0)
        np.testing.assert_allclose(line["objective/scores"], total.mean(), rtol=1e-4)
        np.testing.assert_allclose(line["reward"], total.mean(), rtol=1e-4)
        np.testing.assert_allclose(line["reward_std"], total.std(ddof=1), rtol=1e-4)
        for name, values in each.items():
            np.testing.assert_allclose(line[f"rewards/{name}/mean"], np.nanmean(values), rtol=1e-4)
            np.testing.assert_allclose(line[f"rewards/{name}/std"], np.nanstd(values, ddof=1), rtol=1e-4, atol=1e-6)
        advantages = np.array([row["advantage"] for row in rows]).reshape(-1, 2)
        np.testing.assert_allclose(advantages.sum(1), 0, atol=1e-5)
        assert [row["a_count"] for row in rows] == [row["completion"].count("a") for row in rows]
        assert all(a["prompt"] == b["prompt"] for a, b in zip(rows[::2], rows[1::2]))
    samples = rows_of(result, "4.jsonl")
    assert list(samples[0]) == ["query", "model response", "score", "length", "ended"]


@pytest.mark.runs
def test_a_killed_run_continues_to_the_same_bits(long_run, models, tmp_path):
    given = {"eval_dataset": EVAL_SETS}
    with pytest.raises(KeyboardInterrupt):
        functions = [brevity, LikesA(), early_end]
        rlhf_jax.run(
            long_config(models, tmp_path / "cut"),
            reward_funcs=functions,
            callbacks=[KillAt(2, KeyboardInterrupt)],
            **given,
        )
    again = rlhf_jax.run(long_config(models, tmp_path / "cut"), reward_funcs=[brevity, LikesA(), early_end], **given)
    whole = long_run[0]
    assert lines(again.run_dir) == lines(whole.run_dir)
    assert_same_tensors(again.paths["policy"], whole.paths["policy"])
    files = sorted(os.listdir(os.path.join(whole.run_dir, "completions")))
    assert {"training_1.jsonl", "training_4.jsonl", "4.jsonl"} <= set(files)
    assert sorted(os.listdir(tmp_path / "cut" / "completions")) == files
    for name in files:
        assert rows_of(again, name) == rows_of(whole, name)


def test_a_run_that_begins_again_forgets_the_evaluation_at_its_start(tmp_path):
    run = run_folder.RunFolder.open(str(tmp_path / "run"), {"stage": "rloo"}, "auto")
    with open(run.metrics, "w", encoding="utf-8") as file:
        file.write('{"step": 0, "eval_reward": 1.0}\n')
    run.cut(0)
    assert logger.read_metrics(run.metrics) == []


# ------------------------------------------------------------------------------------------------- the stage by itself


def rloo_stage(**options):
    functions = options.pop("reward_funcs", [brevity])
    given = {name: options.pop(name) for name in ("train_dataset", "eval_dataset") if name in options}
    return stages.open_stage(config(**options), reward_funcs=functions, **given)


def test_a_column_that_is_not_of_the_rewards_type_is_said_once_at_the_start():
    rows = [{"prompt": row["prompt"], "solution": 7} for row in EVAL_SETS["near"] * 2]
    stage = rloo_stage(reward_funcs=[rewards.exact_match_reward], train_dataset=rows, eval_dataset=rows)
    (line,) = [line for line in stage.messages if "'solution' holds an int, 7" in line]
    assert "reward function exact_match_reward expects str" in line


def test_programs_compile_once_and_shared_prompts_change_nothing():
    options = {"micro_batch_size": 4, "num_iterations": 2, "eval_dataset": EVAL_SETS["near"] * 2}
    runs, tokens, policies = [], [], []
    for shared in (True, False):
        stage = rloo_stage(shared_prompts=shared, **options)
        state, prompts = stage.state, stage.train_data.batch(42, 0, 4)
        rollout = rollout_of(stage, prompts, group_size=stage.group_size)
        tokens.append(np.asarray(rollout.response))
        found = []
        for step in range(3):
            state, of_step, seconds = stage.train_step(state, step)
            found.append(jax.device_get(of_step))
            assert {"generate", "score", "experience", "update"} <= set(seconds)
            stage.evaluate(state)  # 6 prompts x 2: a whole batch, and one that is filled up
        names = ("generate", "experience", "eval_metrics", "update")
        assert compilations(stage, names) == dict.fromkeys(names, 1)
        runs.append(found)
        policies.append(state.params["policy"])
        stage.close()
    np.testing.assert_array_equal(tokens[0], tokens[1])
    for first, second in zip(*runs):
        assert set(first) == set(second)
        for name, value in first.items():
            if not name.startswith("val/ratio_") and name not in ("val/first_ratio_error", "policy/first_approxkl"):
                np.testing.assert_allclose(second[name], value, rtol=1e-3, atol=2e-5, err_msg=name)
    for a, b in zip(*map(jax.tree.leaves, policies), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)  # Adam makes rounding visible where a gradient is near 0


def test_an_evaluation_with_another_group_size_fits_any_rollout_batch():
    options = {"batch_size": 10, "rollout_batch_size": 10, "num_generations_eval": 3}
    stage = rloo_stage(**options, eval_dataset=EVAL_SETS["near"] * 4)
    assert stage.evaluate(stage.state)["eval_completions/mean_length"] > 0


def test_a_metric_that_only_some_evaluation_batches_log_is_their_mean():
    calls = []

    def now_and_then(completions, log_metric, **_):
        calls.append(len(completions))
        if len(calls) % 2:
            log_metric("odd", len(calls))
        else:
            log_metric("even", len(calls))
        return brevity(completions)

    stage = rloo_stage(reward_funcs=[now_and_then], eval_dataset=EVAL_SETS["near"] * 4)
    found = stage.evaluate(stage.state)
    assert len(calls) == 3 and found["eval_odd"] == 2 and found["eval_even"] == 2


def test_as_many_prompts_as_an_update_takes_are_enough(tmp_path):
    rows = [{"prompt": f"POST: i met {who}.\n\nTL;DR:"} for who in ("anna", "omar")]
    options = {"num_generations": 4, "total_episodes": 8}
    result = rlhf_jax.run(config(tmp_path / "run", **options), train_dataset=rows, reward_funcs=brevity)
    assert [line["epoch"] for line in lines(result.run_dir)] == [1.0]
    with pytest.raises(UserError, match="1 usable rows"):
        rlhf_jax.run(config(tmp_path / "less", **options), train_dataset=rows[:1], reward_funcs=brevity)


# ------------------------------------------------------------------------------------------------------------ rewards


def test_a_batch_without_any_score_teaches_nothing_and_the_run_goes_on(tmp_path):
    def shy(completions, trainer_state, **_):
        return [None if trainer_state.global_step != 1 else float(len(text)) for text in completions]

    with pytest.warns(UserWarning) as said:
        result = rlhf_jax.run(config(tmp_path / "run", total_episodes=24), reward_funcs=shy)
    texts = [str(warning.message) for warning in said]
    assert any("returned None for 8 of 8 rows" in text for text in texts)
    assert sum("nothing is learned from it" in text for text in texts) == 2
    found = lines(result.run_dir)
    assert [line["step"] for line in found] == [1, 2, 3] and [line["episode"] for line in found] == [8, 16, 24]
    assert np.isnan(found[0]["rewards/shy/mean"]) and "loss" in found[1] and "loss" not in found[2]
    assert found[2]["learning_rate"] == pytest.approx(1e-3 / 3)


def test_rows_that_a_function_fails_on_are_dropped_and_counted(tmp_path):
    def fragile(completions, trainer_state, **_):
        if trainer_state.global_step == 1:
            raise ZeroDivisionError("no luck")
        return [float("nan") if i in (1, 4, 5) else 0.5 * i for i in range(len(completions))]

    options = {"reward_failure": "drop", "log_completions": True, "log_unique_prompts": True, "reward_weights": (2, 1)}
    with pytest.warns(UserWarning) as said:
        result = rlhf_jax.run(config(tmp_path / "run", **options), reward_funcs=[fragile, brevity])
    texts = [str(warning.message) for warning in said]
    assert any("fragile returned nan for row 1 (and 2 more bad values)" in text for text in texts)
    assert any("fragile raised ZeroDivisionError: no luck" in text and "dropped" in text for text in texts)
    first, second = lines(result.run_dir)
    assert first["rewards/dropped"] == 3 and second["rewards/dropped"] == 8 and "loss" not in second
    kept = np.array([0, 2, 3, 6, 7])
    assert first["rewards/fragile/mean"] == pytest.approx(0.5 * kept.mean())
    table = rows_of(result, "training_1.jsonl")
    assert len(table) == len({row["prompt"] for row in table}) == 4
    by_group = [row["advantage"] for row in table]
    # Rows 1, 4 and 5 are out: row 0 is alone in its group, and of the third group nothing is left.
    assert by_group[0] == by_group[2] == 0 and by_group[1] != 0 and by_group[3] != 0


def test_a_function_that_fails_ends_the_run_by_name(tmp_path):
    def fragile(completions, **_):
        return [1.0] * (len(completions) - 1) + [float("inf")]

    with pytest.raises(RewardFailure, match="fragile.*inf.*row 7.*prompt 'SUBREDDIT"):
        rlhf_jax.run(config(tmp_path / "run"), reward_funcs=[brevity, fragile])
    with pytest.raises(UserError, match="reward_weights.*1.*2.*brevity, fragile"):
        rlhf_jax.run(config(tmp_path / "other", reward_weights=(1.0,)), reward_funcs=[brevity, fragile])


@pytest.fixture(scope="module")
def sampled():
    """A stage, a rollout of one of its batches, and the rows of that."""
    stage = rloo_stage()
    prompts = stage.train_data.batch(42, 0, 4)
    rollout = rollout_of(stage, prompts, group_size=stage.group_size)
    return stage, rollout, np.repeat(prompts.rows, stage.group_size)


def scored(sampled, functions=(), **options):
    """(names, Scored) of the same rollout by other rewards."""
    stage, rollout, rows = sampled
    c = config(**options)
    models = scoring.open_models(c, stage.tokenizer, stage.train_data.conversational)
    scorer = scoring.Scorer(c, stage.tokenizer, models, functions, stage.mesh)
    scorer.set_params([stage.weights.load(m.model, m.path, "scalar", m.revision) for m in models])
    trainer_state = stage.programs.trainer_state(0)
    return scorer.names, scorer.score(rollout, stage.train_data, rows, group=stage.group_size, state=trainer_state)


def test_an_ensemble_is_one_reward_of_its_members(models, sampled):
    pair = {"reward_model_path": str(models / "judge1"), "more_reward_models": (str(models / "judge2"),)}
    names, each = scored(sampled, **pair)
    assert names == ("judge1", "judge2")
    one, two = np.asarray(each.each_reward).T
    np.testing.assert_allclose(each.scores, one + two, rtol=1e-5)
    assert np.abs(one - two).min() > 0
    wanted = {
        "mean": (one + two) / 2,
        "min": np.minimum(one, two),
        "mean_minus_std": (one + two) / 2 - 0.5 * np.abs(one - two) / 2,
    }
    for kind, together in wanted.items():
        options = {"reward_ensemble": kind, "reward_ensemble_std_coef": 0.5, "reward_weights": (3.0, 1.0)}
        names, found = scored(sampled, [brevity], **pair, **options)
        assert names == (f"ensemble_{kind}", "brevity")
        np.testing.assert_allclose(np.asarray(found.each_reward)[:, 0], together, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            found.scores, 3 * together + np.asarray(found.each_reward)[:, 1], rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(found.metrics[f"rewards/ensemble_{kind}/mean"], together.mean(), rtol=1e-4)


@pytest.mark.parametrize("text_eos", [True, False])
def test_a_reward_model_with_another_tokenizer_reads_text(models, sampled, text_eos):
    stage, rollout, rows = sampled
    _, found = scored(sampled, reward_model_path=str(models / "bytes"), reward_text_eos=text_eos)
    own, (model, params) = bytes_tokenizer(), hf.load(str(models / "bytes"), kind="scalar")
    texts = []
    for i, prompt in enumerate(stage.train_data.display_texts(rows)):
        answer = np.asarray(rollout.response[i])[: int(rollout.lengths[i])]
        ids = own.encode(prompt + stage.tokenizer.decode(answer, skip_special_tokens=True))
        texts.append(ids + [own.eos_id] * bool(text_eos and rollout.ended[i]))
    lengths = np.array([len(ids) for ids in texts])
    tokens = np.array([ids + [0] * (lengths.max() - len(ids)) for ids in texts])
    alone = jax.jit(lambda *args: reward_model.score_texts(model, *args, dtype=jnp.float32))(params, tokens, lengths)
    np.testing.assert_allclose(found.scores, alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="tokenizer of .*bytes.*policy"):
        scored(sampled, reward_model_path=str(models / "bytes"), reward_input="ids")


def test_conversations_reach_rewards_as_messages(models, tmp_path):
    seen = []

    def polite(prompts, completions, **columns):
        seen.append((prompts, completions, columns))
        return [float(len(answer[0]["content"])) for answer in completions]

    talk = [[{"role": "user", "content": f"i met {who}."}] for who in ("anna", "omar", "lena", "igor")]
    options = {"chat_template_kwargs": {"chat_template": TEMPLATE}, "log_completions": True, "total_episodes": 8}
    options["reward_model_path"] = str(models / "judge1")  # of the same tokenizer, yet conversations go as text
    result = rlhf_jax.run(
        config(tmp_path / "run", **options, dataset_test_split="validation"),
        train_dataset=[{"prompt": messages, "id": i} for i, messages in enumerate(talk)] * 2,
        eval_dataset=[{"prompt": messages} for messages in talk[:3]],
        reward_funcs=polite,
    )
    prompts, completions, columns = seen[0]
    assert [talk[i] for i in columns["id"]] == prompts and len(prompts) == 8
    assert all(len(answer) == 1 and answer[0]["role"] == "assistant" for answer in completions)
    table = rows_of(result, "training_1.jsonl")
    assert [row["prompt"] for row in table] == [f"POST: {p[0]['content']}\n\nTL;DR:" for p in prompts]
    assert [row["completion"] for row in table] == [answer[0]["content"] for answer in completions]
    assert len(seen[1][0]) == 6 and seen[1][0][::2] == talk[:3]
    assert {"rewards/judge1/mean", "rewards/polite/mean", "eval_rewards/polite/mean"} <= set(lines(result.run_dir)[0])


def test_responses_end_with_any_id_of_the_models_generation_config(models, tmp_path):
    start = tmp_path / "start"
    shutil.copytree(models / "policy", start)
    eos = data.load_tokenizer("synthetic").eos_id
    stops = (eos, *(own for own in range(3, 60, 2) if own != eos))

    def write(ids):
        (start / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ids)}))

    class Rewarded:
        def __init__(self):
            self.ids = []

        def __call__(self, completion_ids, **_):
            self.ids += completion_ids
            return [0.0] * len(completion_ids)

    options = {"sft_model_path": str(start), "scratch_model": None, "response_length": 12, "save_steps": 1}
    options |= {"stop_token_ids": "generation_config", "missing_eos_penalty": 1.0}
    write(stops)
    reward = Rewarded()
    own = config(tmp_path / "run", **options)
    result = rlhf_jax.run(own, reward_funcs=[reward])
    ends = {ids[-1] for ids in reward.ids if ids[-1] in stops}
    assert len(ends - {eos}) > 1 and all(not set(ids[:-1]) & set(stops) for ids in reward.ids)
    ended = sum(ids[-1] in stops for ids in reward.ids[-8:])
    last = lines(result.run_dir)[-1]
    assert last["val/num_eos_tokens"] == ended
    assert last["objective/scores"] == pytest.approx(-(8 - ended) / 8)

    exported = json.loads((tmp_path / "run" / "policy" / "generation_config.json").read_text())
    assert exported["eos_token_id"] == list(stops)
    given = config(tmp_path / "given", **{**options, "stop_token_ids": stops})
    assert_same_tensors(
        *(os.path.join(rlhf_jax.run(c, reward_funcs=[Rewarded()]).run_dir, "policy") for c in (own, given))
    )

    # A list that has changed since is another run.
    (tmp_path / "run" / "finished.json").unlink()
    write(stops[:2])
    with pytest.raises(UserError, match="stop_token_ids"):
        rlhf_jax.run(own, reward_funcs=[Rewarded()])


def test_without_a_reward_model_the_value_model_starts_from_the_policy_with_a_head_of_zeros(models, tmp_path):
    options = {**RLOO_OPTIONS, "run_dir": str(tmp_path / "run"), "sft_model_path": str(models / "policy")}
    stage = stages.open_stage(PPOConfig(**{**options, "scratch_model": None}), reward_funcs=[brevity])
    policy, value = (stage.state.params[name] for name in ("policy", "value"))
    jax.tree.map(np.testing.assert_array_equal, value["backbone"], policy["backbone"])
    assert set(value) == {"backbone", "score"} and not np.any(value["score"]["kernel"])
    stage.close()


def test_ppo_takes_plain_async_and_dense_rewards(tmp_path):
    likes_a = LikesA()
    options = {**RLOO_OPTIONS, "run_dir": str(tmp_path / "run"), "value_model": "shared_backbone", "num_ppo_epochs": 2}
    options |= {"log_completions": True, "dataset_test_split": "validation", "max_eval_samples": 3}
    result = rlhf_jax.run(PPOConfig(**options), reward_funcs=[brevity, likes_a, early_end])
    assert collections.Counter(rows for _, _, rows, _ in likes_a.calls) == {8: 2, 3: 1}
    for line in lines(result.run_dir):
        rows = rows_of(result, f"training_{line['step']}.jsonl")
        total = np.nansum([[float(row[name]) for name in ("brevity", "likes_a", "early_end")] for row in rows], axis=1)
        assert np.isfinite(line["loss/policy_avg"]) and line["a_share"] >= 0
        # One reward in three ways: a dense one is no less a part of the score.
        np.testing.assert_allclose(line["objective/scores"], total.mean(), rtol=1e-4)
        rlhf_reward = total.mean() + line["objective/non_score_reward"]
        np.testing.assert_allclose(line["objective/rlhf_reward"], rlhf_reward, rtol=1e-4)
    assert line["eval_objective/scores"] == pytest.approx(line["eval/scores"], rel=1e-4)


# ------------------------------------------------------------------------------------------------ ids without a token


class Ids:
    """A reward that remembers the ids of each call."""

    def __init__(self):
        self.calls = []

    def __call__(self, completion_ids, **_):
        self.calls.append([i for ids in completion_ids for i in ids])
        return [float(len(ids)) for ids in completion_ids]


@pytest.fixture(scope="module")
def small(models, tmp_path_factory):
    """Folders of a causal and a scalar model with a row for each token of the policy's tokenizer and no more, and of a
    scalar model with one less."""
    path, tokenizer = tmp_path_factory.mktemp("small"), data.load_tokenizer("synthetic")
    for name, head, rows in (("policy", "causal", 0), ("judge", "scalar", 0), ("too_small", "scalar", -1)):
        model = custom_shape("1x16x2", tokenizer.vocab_size + rows, 256)
        hf.save(path / name, model, random_params(model, (head,), 4), kind=head)
    return path


def test_ids_without_a_token_are_counted_and_left_out_when_asked(models, tmp_path):
    unused = set(data.load_tokenizer("synthetic").unused_ids(hf.load_model(models / "policy").config.vocab_size))
    options = {"sft_model_path": str(models / "policy"), "scratch_model": None, "temperature": 1.0}
    for suppress in (False, True):
        ids = Ids()
        result = rlhf_jax.run(
            config(tmp_path / str(suppress), **options, suppress_unused_ids=suppress), reward_funcs=[ids]
        )
        for call, line in zip(ids.calls, lines(result.run_dir)):
            count = sum(i in unused for i in call)
            assert line["completions/unused_ids"] == count and (count == 0) == suppress
            assert line.get("alarm/unused_ids", 0.0) == (0.0 if suppress else 1.0)


def test_ids_that_another_model_lacks_are_never_sampled(models, small, tmp_path):
    """The reward model, the reference and the value model have fewer rows than the policy, as sizes of one family."""
    rows, fewer = (hf.load_model(folder / "policy").config.vocab_size for folder in (models, small))
    options = {"sft_model_path": str(models / "policy"), "scratch_model": None, "temperature": 1.0}
    options |= {"reward_model_path": str(small / "judge"), "ref_model_path": str(small / "policy"), "beta": 0.1}
    ids = Ids()
    result = rlhf_jax.run(config(tmp_path / "run", **options), reward_funcs=[ids])
    assert max(map(max, ids.calls)) < fewer < rows
    for line in lines(result.run_dir):
        assert np.isfinite([line["rewards/judge/mean"], line["objective/kl"]]).all()
        assert line["completions/unused_ids"] == 0

    ppo = {**RLOO_OPTIONS, "run_dir": str(tmp_path / "ppo"), **options, "value_model_path": str(small / "judge")}
    del ppo["beta"]
    stage = stages.open_stage(PPOConfig(**ppo))
    assert stage.suppress_ids == tuple(range(fewer, rows))
    names = ("the reference", "the value model", f"reward model {small / 'judge'}")
    wanted = [f"ids {fewer} to {rows - 1} are not sampled: {name} has {fewer} embedding rows" for name in names]
    assert [line for line in stage.messages if "not sampled" in line] == wanted
    stage.close()


def test_a_model_that_lacks_a_row_of_a_token_is_refused_by_name(models, small, tmp_path):
    last = data.load_tokenizer("synthetic").max_id
    options = {"sft_model_path": str(models / "policy"), "scratch_model": None}
    wrong = str(small / "too_small")
    with pytest.raises(UserError, match=f"reward model {wrong} has {last} embedding rows, but .* has id {last}"):
        stages.open_stage(config(tmp_path / "run", **options, reward_model_path=wrong))
    ppo = {**RLOO_OPTIONS, "run_dir": str(tmp_path / "ppo"), **options, "value_model_path": wrong}
    with pytest.raises(UserError, match=f"--value_model_path {wrong} has {last} embedding rows"):
        stages.open_stage(PPOConfig(**ppo), reward_funcs=[brevity])
