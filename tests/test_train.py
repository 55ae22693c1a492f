"""A run as a whole: its folder, its resume, its callbacks, its objects; tiny models on the built-in task."""

import dataclasses
import json
import os
import pathlib
import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax
from rlhf_jax import data, train
from rlhf_jax import report as report_of_runs
from rlhf_jax.config import Pipeline, PPOConfig, RewardConfig, RLOOConfig, SFTConfig, command_line
from rlhf_jax.errors import UserError
from rlhf_jax.metrics import catalog
from rlhf_jax.report import page
from rlhf_jax.rewards.interface import RewardFailure
from rlhf_jax.runtime.callbacks import Callback
from rlhf_jax.runtime.checkpoint import Checkpoints
from rlhf_jax.runtime.monitor import NonFinite
from rlhf_jax.runtime.stopping import Stopped, StopRequested
from rlhf_jax.stages import open_stage
from tests.helpers.golden import PPO
from tests.helpers.runs import (
    OPTIONS,
    TEXTS,
    KillAt,
    Killed,
    compilations,
    lines,
    ppo_config,
    rollout_of,
    sft_config,
    tensors,
    wordiness,
)


class StopAfter(Callback):
    def __init__(self, step):
        self.step, self.seen = step, []

    def on_step_end(self, step, metrics, control):
        self.seen.append(step)
        control.stop |= step >= self.step


@pytest.fixture(scope="module")
def sft(golden_sft):
    return golden_sft


def test_a_run_leaves_its_folder(sft):
    names = set(os.listdir(sft.run_dir))
    assert {"config.json", "metrics.jsonl", "timings.jsonl", "checkpoints", "policy", "finished.json"} <= names
    found = lines(sft.run_dir)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "learning_rate", "episode", "epoch"} <= set(found[0]) and "eval/loss" in found[-1]
    assert found[-1]["episode"] == 32 and found[0]["learning_rate"] == pytest.approx(1e-3)
    assert os.path.exists(os.path.join(sft.run_dir, "policy", "tokenizer.json"))
    assert "# " in open(os.path.join(sft.run_dir, "policy", "README.md")).read()
    with open(os.path.join(sft.run_dir, "config.json")) as file:
        assert json.load(file)["learning_rate"] == 1e-3


def test_the_update_after_a_save_says_how_long_the_run_waited_for_it(sft):
    saving = [line["time/save"] for line in lines(sft.run_dir, "timings.jsonl") if "time/save" in line]
    assert len(saving) == 4 and saving[0] == 0 and all(seconds > 0 for seconds in saving[1:])


def test_a_finished_stage_is_not_run_again(sft, capsys):
    before = os.path.getmtime(os.path.join(sft.run_dir, "policy", "model.safetensors"))
    again = train.main(["--config", os.path.join(sft.run_dir, "config.json")])
    assert again == 0 and "is finished" in capsys.readouterr().out
    assert os.path.getmtime(os.path.join(sft.run_dir, "policy", "model.safetensors")) == before


def test_a_killed_sft_run_continues_to_the_same_bits(sft, tmp_path):
    with pytest.raises(Killed):
        rlhf_jax.run(sft_config(tmp_path / "sft"), callbacks=[KillAt(2)])
    resumed = rlhf_jax.run(sft_config(tmp_path / "sft"))
    assert lines(resumed.run_dir) == lines(sft.run_dir)
    for a, b in zip(tensors(resumed.paths["policy"]), tensors(sft.paths["policy"]), strict=True):
        np.testing.assert_array_equal(a, b)


def tables_of(run):
    """{name: content} of a run's completions."""
    return {path.name: path.read_bytes() for path in pathlib.Path(run.run_dir, "completions").iterdir()}


def test_a_killed_ppo_run_continues_to_the_same_bits(sft, golden_ppo, tmp_path, capsys):
    config, whole = ppo_config(tmp_path / "cut", sft.run_dir, **PPO), golden_ppo
    with pytest.raises(Killed):
        rlhf_jax.run(config, callbacks=[KillAt(2)])
    resumed = rlhf_jax.run(config)
    printed = capsys.readouterr().out
    assert "ppo: training after update 1" in printed and "ppo: samples after update 4" in printed
    assert "1 of 8 rows" in printed
    assert lines(resumed.run_dir) == lines(whole.run_dir) and tables_of(resumed) == tables_of(whole)
    for a, b in zip(tensors(resumed.paths["policy"]), tensors(whole.paths["policy"]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_ppo_run_leaves_metrics_tables_and_models(golden_ppo):
    found, tables = lines(golden_ppo.run_dir), tables_of(golden_ppo)
    first, last = found[0], found[-1]
    for name in (
        "objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores "
        "policy/approxkl_avg policy/clipfrac_avg loss/policy_avg loss/value_avg val/clipfrac_avg policy/entropy_avg "
        "val/ratio val/ratio_var val/num_eos_tokens lr episode epoch"
    ).split():
        assert name in first, name
    assert first["val/first_ratio_error"] <= 1e-5 and first["policy/first_approxkl"] <= 1e-9
    twins = "eval_objective/kl eval_loss/policy_avg eval_completions/mean_length eval/scores eval/scores_se eval/kl"
    assert set(twins.split()) <= set(last)
    assert 0 < first["num_tokens"] < last["num_tokens"]
    names = [*(f"training_{step}" for step in range(1, 5)), "2", "4"]
    assert {f"{name}{part}.jsonl" for name in names for part in ("", ".tokens")} == set(tables)
    moved = {}
    for name in names:  # line by line what there is to say of the tokens
        of_rows, of_tokens = (
            [json.loads(line) for line in tables[f"{name}{part}.jsonl"].splitlines()] for part in ("", ".tokens")
        )
        for row, tokens in zip(of_rows, of_tokens, strict=True):
            text = re.sub(r"<\|endoftext\|>|\[(PAD|UNK)\]", "", "".join(tokens["tokens"]))
            assert text == row.get("completion", row.get("model response"))
            assert {len(values) for values in tokens.values()} == {row.get("length", len(tokens["tokens"]))}
        moved[name] = max(abs(x) for row in of_tokens for x in row["kl"])
        assert len({x for row in of_tokens for x in row["advantages"]}) > 8
    # The reference is the policy's start: of the first update's tokens the KL is 0 but for rounding.
    assert moved["training_1"] < 1e-5 < 1e-3 < min(moved["training_4"], moved["4"])
    assert {"policy", "value"} <= set(os.listdir(golden_ppo.run_dir))


def test_an_update_without_any_score_teaches_nothing_and_says_so(sft, tmp_path):
    config = ppo_config(tmp_path / "x", sft.run_dir, total_episodes=8, dataset_test_split=None, log_completions=True)
    with pytest.warns(UserWarning, match="update 1.*score"):
        result = rlhf_jax.run(config, reward_funcs=lambda completions, **_: [None] * len(completions))
    for a, b in zip(tensors(result.paths["policy"]), tensors(sft.paths["policy"]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert result.metrics["episode"] == 8 and "loss/policy_avg" not in result.metrics


def test_each_program_of_ppo_compiles_once(sft, tmp_path):
    config = ppo_config(tmp_path / "x", sft.run_dir)
    few = [{"prompt": f"POST: i met {who}.\n\nTL;DR:"} for who in ("anna", "omar", "lena")]
    stage = open_stage(config, reward_funcs=[wordiness], eval_dataset=few)
    state = stage.state
    for step in range(3):
        state, _, seconds = stage.train_step(state, step)
    stage.evaluate(state)
    assert len(stage.samples(state)[0]) == 3
    assert compilations(stage) == {"generate": 1, "experience": 1, "update": 1}
    assert set(seconds) == {"generate", "score", "experience", "update", "reward/wordiness"}
    assert set(stage._next_prompts) == {3}  # prepared while the last update ran
    np.testing.assert_array_equal(stage._next_prompts[3].tokens, stage.train_data.batch(config.seed, 3, 8).tokens)


def test_frozen_models_are_kept_in_the_compute_dtype_and_judge_the_same(sft, tmp_path):
    stage = open_stage(ppo_config(tmp_path / "x", sft.run_dir, dtype="bfloat16"), reward_funcs=[wordiness])
    policy = stage.state.params["policy"]
    assert {x.dtype for x in jax.tree.leaves(policy)} == {jnp.dtype("float32")}
    matrices = [x for x in jax.tree.leaves(stage.models.reference.params) if x.ndim > 1 and x.shape[-1] > 1]
    assert jnp.dtype("bfloat16") in {x.dtype for x in matrices}
    size = sum(x.nbytes for x in jax.tree.leaves(stage.models.reference.params))
    assert size < 0.52 * sum(x.nbytes for x in jax.tree.leaves(policy))
    prompts = stage.train_data.batch(0, 0, 8)
    rollout = rollout_of(stage, prompts)
    # The reference is the policy's start: were it rounded otherwise than the forward pass rounds, a KL would show.
    np.testing.assert_array_equal(stage.programs.token_kl(policy, rollout), 0)


def test_frozen_models_wait_in_host_memory_when_asked_and_nothing_else_changes(sft, golden_reward, tmp_path):
    path, updates = golden_reward.paths["reward_model"], []
    for where in ("none", "pinned_host"):
        config = ppo_config(tmp_path / where, sft.run_dir, reward_model_path=path, offload_frozen=where)
        stage = open_stage(config)
        waiting = {
            x.sharding.memory_kind
            for x in jax.tree.leaves((stage.models.reference.params, stage.scorer.models[0].params))
        }
        assert waiting == {"device" if where == "none" else "pinned_host"}
        state = stage.state
        for step in range(2):
            state, metrics, _ = stage.train_step(state, step)
        updates.append((jax.device_get(state.params), jax.device_get(metrics)))
        assert stage.programs.jitted.experience._cache_size() == stage.programs.jitted.update._cache_size() == 1
        assert {x.sharding.memory_kind for x in jax.tree.leaves(stage.models.reference.params)} == waiting
    jax.tree.map(np.testing.assert_array_equal, *updates)


def test_a_callback_sees_every_update_and_may_stop(tmp_path):
    stopper = StopAfter(2)
    result = rlhf_jax.run(sft_config(tmp_path / "sft", max_steps=20), callbacks=[stopper])
    # Metrics are read one update late: the stop asked for at 2 takes effect after 3.
    assert stopper.seen == [1, 2, 3] and len(lines(result.run_dir)) == 3
    assert os.path.exists(result.paths["policy"])


def test_early_stopping_ends_at_a_plateau(tmp_path):
    config = sft_config(tmp_path / "sft", max_steps=30, eval_steps=1, early_stopping_patience=2, learning_rate=0.0)
    result = rlhf_jax.run(config)
    assert len(lines(result.run_dir)) == 3


def test_several_evaluation_sets_have_names_and_the_first_is_watched(tmp_path, capsys):
    sets = {"near": "synthetic", "far": [{"prompt": "r/family sad", "completion": " lost keys"}] * 3}
    config = sft_config(tmp_path / "sft", max_steps=30, eval_steps=1, early_stopping_patience=1, learning_rate=0.0)
    found = lines(rlhf_jax.run(config, eval_dataset=sets).run_dir)
    printed = capsys.readouterr().out
    assert len(found) == 2 and "without a better eval_near/loss" in printed
    assert re.search(r"sft: compiled in parallel: update [\d.]+ s\nsft: the first update took", printed)
    assert {name for name in found[-1] if name.startswith("eval")} == {
        f"eval_{name}/{metric}" for name in sets for metric in ("loss", "perplexity")
    }
    assert found[-1]["eval_near/loss"] != found[-1]["eval_far/loss"]


def test_a_reward_run_counts_the_tokens_of_the_whole_run_across_a_kill(tmp_path, monkeypatch):
    """As if 2^32 tokens more, which the device's uint32 cannot hold, had been counted before the kill."""
    options = {**OPTIONS, **TEXTS, "model_name_or_path": None, "scratch_model": "1x16x2", "max_steps": 3}
    config = RewardConfig(run_dir=str(tmp_path / "reward"), dataset_test_split=None, **options)
    with pytest.raises(Killed):
        rlhf_jax.run(config, callbacks=[KillAt(2)])
    restore = Checkpoints.restore_newest

    def restore_with_more_tokens(self, like):
        state, extra, step = restore(self, like)
        return state, {**extra, "num_tokens": extra["num_tokens"] + 2**32}, step

    monkeypatch.setattr(Checkpoints, "restore_newest", restore_with_more_tokens)
    found = lines(rlhf_jax.run(config).run_dir)
    pairs = data.load(data.PairData, config, data.load_tokenizer("synthetic"))
    batches = [pairs.batch(config.seed, step, config.batch_size) for step in range(3)]
    tokens = [int(batch.chosen_lengths.sum() + batch.rejected_lengths.sum()) for batch in batches]
    before = [line["num_tokens"] < 2**32 for line in found].count(True)
    assert 0 < before < 3
    assert [line["num_tokens"] for line in found] == [
        count + (step >= before) * 2**32 for step, count in enumerate(np.cumsum(tokens).tolist())
    ]


def test_the_function_takes_objects_in_place_of_paths(tmp_path):
    rows = [{"prompt": f"r/family {word}", "completion": " lost keys"} for word in ["sad", "happy"] * 8]
    result = rlhf_jax.run(sft_config(tmp_path / "sft", dataset_test_split=None, max_steps=2), train_dataset=rows)
    assert len(lines(result.run_dir)) == 2


def test_an_optimizer_of_ones_own_is_used(tmp_path):
    import optax

    still = rlhf_jax.run(sft_config(tmp_path / "a", max_steps=2), optimizer=optax.sgd(0.0))
    start = open_stage(sft_config(tmp_path / "b")).state.params["model"]
    for a, b in zip(tensors(still.paths["policy"]), jax.tree.leaves(start), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(lines(still.run_dir)) == 2


def test_a_ppo_run_killed_in_the_critics_warm_up_continues_to_the_same_bits(sft, tmp_path):
    options = {
        "critic_warmup_steps": 2,
        "value_learning_rate": 3e-3,
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 1},
        "kl_loss_coef": 0.1,
        "dual_clip": 3.0,
        "num_sample_generations": 0,
        "dataset_test_split": None,
        "eval_steps": 0,
    }
    whole = rlhf_jax.run(ppo_config(tmp_path / "whole", sft.run_dir, **options), reward_funcs=wordiness)
    cut = ppo_config(tmp_path / "cut", sft.run_dir, **options)
    with pytest.raises(Killed):
        rlhf_jax.run(cut, reward_funcs=wordiness, callbacks=[KillAt(1)])
    resumed = rlhf_jax.run(cut, reward_funcs=wordiness)
    found = lines(whole.run_dir)
    assert lines(resumed.run_dir) == found
    for a, b in zip(tensors(resumed.paths["policy"]), tensors(whole.paths["policy"]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [line["policy/approxkl_avg"] > 1e-9 for line in found] == [False, False, True, True]
    peak = cut.learning_rate
    for line in found:
        assert line["critic_lr"] / 3e-3 == pytest.approx(line["lr"] / peak)
    assert {"loss/kl_avg", "policy/clipfrac_lower_avg"} <= found[0].keys()


@pytest.mark.parametrize(("name", "value"), [("value_learning_rate", 0.0), ("critic_warmup_steps", 2)])
def test_an_option_of_adamw_for_the_critic_is_refused_beside_another_optimizer(tmp_path, name, value):
    import optax

    config = PPOConfig(run_dir=str(tmp_path / "ppo"), scratch_model="1x16x2", **{name: value})
    with pytest.raises(UserError, match=f"{name} {value:g} is an option of the built-in AdamW"):
        rlhf_jax.run(config, optimizer=optax.sgd(0.1))


def test_a_pipeline_runs_three_stages_and_compares(tmp_path, capsys):
    shared = dict(OPTIONS)
    small = Pipeline(
        run_dir=str(tmp_path / "run"),
        sft=SFTConfig(**shared, **TEXTS, model_name_or_path=None, scratch_model="1x16x2", max_steps=2),
        reward=dataclasses.replace(
            RewardConfig(**shared, **TEXTS, max_steps=2, normalize_dataset_name="synthetic", normalize_samples=8),
            model_name_or_path="{run_dir}/sft/policy",
        ),
        ppo=PPOConfig(
            **shared,
            sft_model_path="{run_dir}/sft/policy",
            reward_model_path="{run_dir}/reward/reward_model",
            length_buckets=(64,),
            total_episodes=8,
            response_length=4,
            num_ppo_epochs=1,
        ),
    )
    assert train.finished_metrics(small) is None
    result = rlhf_jax.run(small, recipe=command_line.Recipe("mine.py", dataclasses.replace(small, run_dir="elsewhere")))
    assert train.finished_metrics(small).keys() == result.metrics.keys()
    out = capsys.readouterr().out
    assert set(result.stages) == {"sft", "reward", "ppo"} and "win rate" in out and "held-out" in out
    assert "reward: before the export: the mean score of at most 8 texts of synthetic is computed" in out
    report = json.load(open(tmp_path / "run" / "ppo" / "comparison.json"))
    assert [row["name"] for row in report["rows"]] == ["demonstrations", "SFT", "PPO"]
    assert len(report["samples"]) == 3
    reward = lines(tmp_path / "run" / "reward")
    assert {
        "accuracy",
        "margin",
        "min_reward",
        "mean_reward",
        "max_reward",
        "num_tokens",
        "loss",
        "learning_rate",
    } <= set(reward[0])
    assert "eval/accuracy" in reward[-1]
    assert result.stages["reward"].metrics.keys() == {name for line in reward for name in line} - {"step"}

    # The same pipeline with RLOO at its end: what is finished is not run again, and RLOO's policy is compared.
    options = {key: value for key, value in vars(small.ppo).items() if key in vars(RLOOConfig()) and key != "run_dir"}
    rloo = RLOOConfig(**{**options, "max_grad_norm": 1.0, "num_generations": 4})
    again = rlhf_jax.run(dataclasses.replace(small, ppo=None, rloo=rloo))
    out = capsys.readouterr().out
    assert "sft: " in out and out.count("is finished") == 2 and "RLOO - SFT in gold reward" in out
    assert again.paths == {"policy": str(tmp_path / "run" / "rloo" / "policy")}
    compared = {name: json.load(open(tmp_path / "run" / name / "comparison.json")) for name in ("ppo", "rloo")}
    assert [row["name"] for row in compared["rloo"]["rows"]] == ["demonstrations", "SFT", "RLOO"]
    assert compared["ppo"] == report  # which is kept
    found = lines(tmp_path / "run" / "rloo")[-1]
    assert {"reward", "rewards/reward_model/mean", "kl", "entropy", "clip_ratio/region_mean", "eval_reward"} <= set(
        found
    )
    assert "- rloo" in open(tmp_path / "run" / "rloo" / "policy" / "README.md").read()

    # What the folders have for a report, and that one can be made of them.
    recipe = json.load(open(tmp_path / "run" / "ppo" / "recipe.json"))
    assert recipe["config"] == "mine.py" and recipe["options"]["sft_model_path"] == "elsewhere/sft/policy"
    bins = [json.loads(line) for line in open(tmp_path / "run" / "reward" / "calibration" / "2.jsonl")]
    assert sum(bin["pairs"] for bin in bins) == 8
    error = sum(bin["pairs"] * abs(bin["confidence"] - bin["accuracy"]) for bin in bins) / 8
    assert reward[-1]["eval/calibration_error"] == pytest.approx(error)
    for stage in ("sft", "reward", "ppo", "rloo"):
        for file in ("metrics.jsonl", "timings.jsonl"):
            names = {name for line in lines(tmp_path / "run" / stage, file) for name in line}
            assert names and not [name for name in names if catalog.explain(name) is None]
    _, groups = report_of_runs.read([str(tmp_path / "run")])
    assert [group.label for group in groups] == ["run/sft", "run/reward", "run/ppo", "run/rloo"]
    assert not [note for group in groups for run in group.runs for note in run.notes]
    text = page.render_page(groups, "run")
    assert all(f'id="tab-{tab}"' in text for tab in ("policy", "reward", "sft")) and "demonstrations" in text


@pytest.mark.runs
def test_the_quickstart_of_verifiable_rewards_trains_by_functions_and_shows_them(tmp_path, capsys):
    flags = ["--run_dir", str(tmp_path / "run"), "--sft.max_steps", "2", "--sft.scratch_model", "qwen2:1x16x2x1"]
    flags += ["--sft.max_eval_samples", "8", "--sft.eval_steps", "0"]
    for name in ("grpo", "ppo"):
        short = {"total_episodes": 16, "batch_size": 16, "max_eval_samples": 8, "num_sample_generations": 1}
        more = [word for option, value in short.items() for word in (f"--{name}.{option}", str(value))]
        assert train.main(["--config", f"quickstart_math.py:{name}", *flags, *more]) == 0
        out = capsys.readouterr().out
        assert "means with 95 % intervals" in out and f"{name.upper()} - SFT in score, mean over prompts" in out
        report = json.load(open(tmp_path / "run" / name / "comparison.json"))
        assert [row["name"] for row in report["rows"]] == ["SFT", name.upper()] and len(report["samples"]) == 3
        for row in report["rows"]:
            assert list(row["rewards"]) == ["exact_match_reward", "boxed_format_reward"] and row["samples"] == 8
            assert {"length", "entropy", "eos_rate"} <= set(row) and 0 < row["entropy"] <= np.log(113)
        assert {"rewards/exact_match_reward/mean", "rewards/boxed_format_reward/mean"} <= set(
            lines(tmp_path / "run" / name)[-1]
        )
    assert (tmp_path / "run" / "ppo" / "value").is_dir()  # from the SFT policy, with a new head
    (tmp_path / "alone.py").write_text(
        "import dataclasses\nfrom configs import quickstart_math\ndef get_config(variant=None):\n"
        "    return dataclasses.replace(quickstart_math.get_config('grpo'), sft=None)\n"
    )
    flags = ["--run_dir", str(tmp_path / "alone"), "--sft_model_path", str(tmp_path / "run" / "sft" / "policy")]
    short = [word for option, value in short.items() for word in (f"--{option}", str(value))]
    assert train.main(["--config", str(tmp_path / "alone.py"), *flags, *short]) == 0
    assert "GRPO - before in score, mean over prompts" in capsys.readouterr().out
    _, groups = report_of_runs.read([str(tmp_path / "run")])
    assert [group.label for group in groups] == ["run/sft", "run/ppo", "run/grpo"]
    text = page.render_page(groups, "run")
    assert '<th scope="col">exact_match_reward</th>' in text and '<th scope="col">entropy</th>' in text


@pytest.mark.runs
@pytest.mark.parametrize(("variant", "name"), [("boxes", "grpo"), ("guess_ppo", "ppo")])
def test_the_quickstart_of_tools_trains_by_turns_and_records_its_calls(tmp_path, capsys, variant, name):
    flags = ["--run_dir", str(tmp_path / "run"), "--sft.max_steps", "40", "--sft.scratch_model", "qwen2:1x32x2x1"]
    flags += ["--sft.learning_rate", "0.01", "--sft.max_eval_samples", "8"]
    short = {"total_episodes": 32, "batch_size": 16, "max_eval_samples": 8, "num_sample_generations": 1}
    more = [word for option, value in short.items() for word in (f"--{name}.{option}", str(value))]
    assert train.main(["--config", f"quickstart_tools.py:{variant}", *flags, *more]) == 0
    assert f"{name.upper()} - SFT in score, mean over prompts" in capsys.readouterr().out
    metrics = lines(tmp_path / "run" / name)
    assert len(metrics) == 2 and {"tools/call_frequency", "tools/failure_frequency"} <= set(metrics[0])
    calls = [json.loads(line) for line in (tmp_path / "run" / name / "tools.jsonl").read_text().splitlines()]
    assert ("open_box" if variant == "boxes" else "guess") in {call["name"] for call in calls}


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    for spec in ("quickstart.py", "quickstart_math.py", "quickstart_tools.py:guess_ppo"):
        code = train.main(["--config", spec, "--run_dir", str(tmp_path / "run"), "--dry_run", "true"])
        out = capsys.readouterr().out
        assert code == 0 and not (tmp_path / "run").exists()
        assert "parameters" in out and "mesh: data 1 x fsdp 1 x tensor 1" in out


@pytest.mark.parametrize(
    ("handled", "raised", "cause"),
    [
        (StopRequested(), Stopped("stopped by SIGTERM", together=True), None),
        (KeyError("a"), Stopped("stopped by SIGTERM"), None),
        (StopRequested(), NonFinite("update 2", 2, whole=True), None),
        (RewardFailure("reward function f"), NonFinite("update 2", 2, whole=True), RewardFailure),
        (RewardFailure("reward function f"), Stopped("stopped by SIGTERM"), RewardFailure),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_an_error_of_a_run_from_python_is_one_error_with_its_cause(monkeypatch, handled, raised, cause):
    def stage(config, **_):
        try:
            raise handled
        except BaseException:
            raise raised  # noqa: B904

    monkeypatch.setattr(train, "train_stage", stage)
    with pytest.raises(type(raised)) as error:
        train.run(SFTConfig(model_name_or_path=None, scratch_model="1x16x2", tokenizer_name_or_path="synthetic"))
    text = "".join(traceback.format_exception(error.value))
    assert "During handling" not in text and text.count("Traceback") == 1 + (cause is not None)
    assert type(error.value.__cause__) is (cause or type(None))


def test_the_cause_that_an_error_names_stays(monkeypatch):
    def stage(config, **_):
        try:
            raise KeyError("a")
        except KeyError as error:
            raise UserError("no such file") from error

    monkeypatch.setattr(train, "train_stage", stage)
    with pytest.raises(UserError) as error:
        train.run(SFTConfig(model_name_or_path=None, scratch_model="1x16x2", tokenizer_name_or_path="synthetic"))
    assert isinstance(error.value.__cause__, KeyError)
