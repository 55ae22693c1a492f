"""scripts/parity/learning_parity.py: arithmetic of the comparison, what is skipped, equal options for both."""

import importlib.util
import json
import sys

import numpy as np
import pytest

from rlhf_jax.config.batch_sizes import batch_arithmetic
from rlhf_jax.config.check import check
from rlhf_jax.errors import UserError
from tests.helpers.paths import SCRIPTS

SCRIPT = SCRIPTS / "parity" / "learning_parity.py"
spec = importlib.util.spec_from_file_location("learning_parity", SCRIPT)
parity = sys.modules["learning_parity"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(parity)


def line_of(run, **more):
    values = json.loads(json.dumps(parity.settings(run.trainer, run.updates)))
    return {"name": run.name, **run._asdict(), "settings": values, "seconds": 60.0, "update_seconds": 2.0, **more}


def add_line(path, line):
    parity.write_lines(path, [*parity.lines_of(path), line])


def missing(work, runs):
    return [run for run in runs if parity.finished(work, run) is None]


# --- the interval and the verdict


def test_welch_interval_is_the_one_computed_by_hand():
    # Variances 1 and 1, 3 runs each: standard error sqrt(2 / 3), 4 degrees of freedom, whose 95 % point is 2.131847.
    half = 2.131847 * 0.8164966
    assert parity.welch([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]) == pytest.approx((-1.0, -1.0 - half, -1.0 + half), abs=1e-5)


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_welch_interval_is_scipys_for_unequal_sizes_and_spreads(confidence):
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    a, b = rng.normal(1.0, 0.3, size=5), rng.normal(1.2, 0.05, size=8)
    theirs = stats.ttest_ind(a, b, equal_var=False).confidence_interval(confidence)
    assert parity.welch(a, b, confidence)[1:] == pytest.approx(tuple(theirs), rel=1e-9)


def test_welch_interval_of_runs_without_spread_is_a_point():
    assert parity.welch([2.0, 2.0], [1.5, 1.5, 1.5]) == (0.5, 0.5, 0.5)


def test_welch_interval_of_a_single_run_is_refused():
    with pytest.raises(UserError, match="--seeds"):
        parity.welch([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("low", "high", "gain", "verdict"),
    [
        (-0.14, 0.14, 1.0, True),
        (-0.16, 0.14, 1.0, False),
        (-0.14, 0.16, 1.0, False),
        (0.05, 0.2, 1.0, False),
        (-0.28, 0.28, 2.0, True),
        (0.0, 0.0, 0.0, False),
        (-0.01, 0.01, -1.0, False),
    ],
)
def test_verdict_wants_the_whole_interval_within_15_percent_of_a_gain(low, high, gain, verdict):
    assert parity.within(low, high, gain) is verdict


# --- what is done already


def test_resume_skips_finished_runs_and_keeps_the_order(tmp_path):
    runs = parity.planned(seeds=2, updates=3)
    assert [(r.trainer, r.system, r.seed) for r in runs[:4]] == [
        ("ppo", "ours", 0),
        ("ppo", "trl", 0),
        ("rloo", "ours", 0),
        ("rloo", "trl", 0),
    ]
    assert parity.planned(1, 3, ["grpo"]) == [parity.Run("grpo", system, 0, 3) for system in ("ours", "trl")]
    assert missing(tmp_path, runs) == runs
    for run in (runs[5], runs[0]):
        add_line(tmp_path / "runs.jsonl", line_of(run))
    assert missing(tmp_path, runs) == [*runs[1:5], *runs[6:]]
    more = parity.planned(seeds=3, updates=3)
    assert missing(tmp_path, more) == [*runs[1:5], *runs[6:], *more[12:]]
    longer = parity.planned(seeds=1, updates=4)
    assert missing(tmp_path, longer) == longer


def test_run_with_other_settings_does_not_count_as_finished(tmp_path):
    run = parity.Run("rloo", "trl", 0, 3)
    line = line_of(run)
    line["settings"]["learning_rate"] *= 2
    add_line(tmp_path / "runs.jsonl", line)
    assert parity.finished(tmp_path, run) is None


def test_run_done_again_replaces_its_line_and_forgets_the_figures_of_the_old_policy(tmp_path):
    run, other = parity.Run("ppo", "ours", 1, 2), parity.Run("ppo", "trl", 1, 2)
    for name in ("sft", run.name, other.name):
        add_line(tmp_path / "evaluations.jsonl", {"name": name})
    add_line(tmp_path / "runs.jsonl", line_of(other))
    for seconds in (1.0, 3.0):
        parity.record(tmp_path, run, [parity.point(1, 0.0, 0.0, seconds), parity.point(2, 0.0, 0.0, seconds)])
    assert parity.finished(tmp_path, run)["seconds"] == 6.0
    assert [line["name"] for line in parity.lines_of(tmp_path / "runs.jsonl")] == [other.name, run.name]
    assert [line["name"] for line in parity.lines_of(tmp_path / "evaluations.jsonl")] == ["sft", other.name]


def test_torn_last_line_of_a_killed_process_is_left_out(tmp_path):
    path = tmp_path / "runs.jsonl"
    add_line(path, {"name": "first"})
    path.write_text(path.read_text() + '{"name": "sec')
    assert parity.lines_of(path) == [{"name": "first"}]
    add_line(path, {"name": "third"})
    assert [line["name"] for line in parity.lines_of(path)] == ["first", "third"]


# --- both systems are told the same


def both_configs(trainer, tmp_path):
    run = parity.Run(trainer, "ours", 7, 5)
    ours = parity.our_config(run, tmp_path)
    check(ours)
    if trainer == "ppo":
        config = pytest.importorskip("trl.experimental.ppo").PPOConfig
    else:
        config = getattr(pytest.importorskip("trl"), "RLOOConfig" if trainer == "rloo" else "GRPOConfig")
    return ours, config(**parity.trl_options(run._replace(system="trl"), str(tmp_path / "trl")))


def assert_equal_under_the_same_names(ours, trl, names):
    for name in names:
        assert getattr(trl, name) == getattr(ours, name), name
    assert trl.lr_scheduler_type.value == ours.lr_scheduler_type == "linear"
    assert trl.gradient_accumulation_steps == 1
    assert not trl.gradient_checkpointing


ADAM = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "warmup_steps", "seed")


def test_ppo_options_of_both_systems_say_the_same(tmp_path):
    ours, trl = both_configs("ppo", tmp_path)
    same = ("num_ppo_epochs", "kl_coef", "kl_estimator", "cliprange", "cliprange_value", "vf_coef", "gamma", "lam")
    same += ("whiten_rewards", "stop_token", "response_length", "temperature", "missing_eos_penalty", "total_episodes")
    assert_equal_under_the_same_names(ours, trl, (*ADAM, *same, "num_mini_batches"))
    assert trl.per_device_train_batch_size == ours.batch_size == 128
    assert batch_arithmetic(ours).updates == 5
    assert ours.max_grad_norm is None  # TRL's PPO never clips
    assert (ours.whiten_ddof, ours.score_position, ours.eos_penalty_mode) == (1, "after_eos", "subtract")


def test_rloo_options_of_both_systems_say_the_same(tmp_path):
    ours, trl = both_configs("rloo", tmp_path)
    same = ("num_generations", "num_iterations", "beta", "epsilon", "epsilon_high", "normalize_advantages")
    same += ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "reward_clip_range", "max_grad_norm")
    same += ("mask_truncated_completions", "sync_ref_model")
    assert_equal_under_the_same_names(ours, trl, (*ADAM, *same))
    assert ours.max_grad_norm == 1.0
    assert trl.max_completion_length == ours.response_length
    assert trl.generation_batch_size == ours.batch_size == 128
    assert trl.steps_per_generation == ours.num_mini_batches
    assert trl.per_device_train_batch_size == batch_arithmetic(ours).minibatch
    assert trl.max_steps == batch_arithmetic(ours).optimizer_steps == 20
    assert ours.lr_scheduler_unit == "optimizer_step"


def test_grpo_options_of_both_systems_say_the_same(tmp_path):
    ours, trl = both_configs("grpo", tmp_path)
    same = ("num_generations", "num_iterations", "beta", "epsilon", "epsilon_high", "loss_type", "scale_rewards")
    same += ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_grad_norm", "delta")
    same += ("mask_truncated_completions", "importance_sampling_level", "multi_objective_aggregation")
    assert_equal_under_the_same_names(ours, trl, (*ADAM, *same))
    assert trl.max_completion_length == ours.response_length
    assert trl.generation_batch_size == ours.batch_size == 128
    assert trl.steps_per_generation == ours.num_mini_batches
    assert trl.per_device_train_batch_size == batch_arithmetic(ours).minibatch
    assert trl.max_steps == batch_arithmetic(ours).optimizer_steps == 20
    assert ours.lr_scheduler_unit == "optimizer_step"


def test_rloo_of_trl_is_scored_at_the_last_id_eos_included(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import GPTNeoXConfig, GPTNeoXForSequenceClassification

    from rlhf_jax.data import load_tokenizer

    tokenizer = load_tokenizer("synthetic")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = GPTNeoXForSequenceClassification(GPTNeoXConfig(vocab_size=128, num_labels=1, **shape)).eval()
    prompts = ["POST: i met anna.\n\nTL;DR:", "POST: it was a long day. i lost keys.\n\nTL;DR:"]
    completions = [[*tokenizer.encode(" met anna"), tokenizer.eos_id], tokenizer.encode(" lost keys; met")]
    found = parity.token_reward(model, tokenizer, 1.0)(prompts=prompts, completion_ids=completions)
    alone = []
    for prompt, tail in zip(prompts, completions):
        ids = torch.tensor([tokenizer.encode(prompt) + tail])
        alone.append(model(input_ids=ids).logits[0, 0].item())  # one row, no pad: the last token's score
    assert found == pytest.approx([alone[0], alone[1] - 1.0], abs=1e-5)
    assert abs(alone[0] - alone[1]) > 1e-3


# --- curves and the report


def test_curve_with_kl_of_trl_takes_what_was_sampled_and_all_seconds_of_an_update():
    sampled = {"reward": 0.5, "kl": 0.25, "completions/mean_length": 6.0}
    logs = [{**sampled, "loss": 0.1}, {"loss": 0.0}, {**sampled, "reward": 0.75, "loss": 0.1}, {"loss": 0.0}]
    found = parity.trl_curve("rloo", logs, [10.0, 11.0, 13.0, 14.0, 15.5], steps=2)
    assert found == [parity.point(1, 0.5, 1.5, 3.0), parity.point(2, 0.75, 1.5, 2.5)]


def test_curve_of_trls_grpo_is_its_reward_and_entropy():
    logs = [{"reward": 1.0, "entropy": 0.5}, {"entropy": 0.25}, {"reward": 1.5, "entropy": 0.125}, {"entropy": 0.0}]
    found = parity.trl_curve("grpo", logs, [0.0, 1.0, 2.0, 3.0, 4.0], steps=2)
    assert found == [parity.point(1, 1.0, 0.5, 2.0, "entropy"), parity.point(2, 1.5, 0.125, 2.0, "entropy")]


def test_curve_of_trls_ppo_is_its_scores_and_kl():
    logs = [{"objective/scores": 1.0, "objective/kl": 2.0}, {"objective/scores": 3.0, "objective/kl": 4.0}]
    found = parity.trl_curve("ppo", logs, [0.0, 1.0, 3.0], steps=1)
    assert found == [parity.point(1, 1.0, 2.0, 1.0), parity.point(2, 3.0, 4.0, 2.0)]


@pytest.fixture
def work(tmp_path):
    """Three seeds each: ours is 0.05 above TRL's PPO (gain 1), 0.5 below its RLOO (gain 1) and as good as its GRPO."""
    means = {("ppo", "trl"): 1.5, ("ppo", "ours"): 1.55, ("rloo", "trl"): 1.5, ("rloo", "ours"): 1.0}
    means |= {("grpo", "trl"): 0.75, ("grpo", "ours"): 0.75}

    def figures(name, reward):
        row = {"name": name, "prompts": 64, "score": reward, "gold_reward": reward / 2, "kl": 2.0, "length": 6.0}
        row |= {"accuracy": reward, "format": reward / 2, "entropy": 1.0}
        add_line(tmp_path / "evaluations.jsonl", row)

    figures("sft", 0.5)
    figures("sft of GRPO", 0.5)
    for run in parity.planned(seeds=3, updates=4):
        add_line(tmp_path / "runs.jsonl", line_of(run))
        figures(run.name, means[run.trainer, run.system] + 0.01 * (run.seed - 1))
        second = parity.SECOND[run.trainer]
        curve = [parity.point(u, 0.3 * u + 0.1 * run.seed, 0.2 * u, 1.0, second) for u in range(1, 5)]
        for point in curve:
            (tmp_path / "runs" / run.name).mkdir(parents=True, exist_ok=True)
            add_line(tmp_path / "runs" / run.name / "curve.jsonl", point)
    return tmp_path


def test_report_gives_gain_difference_and_verdict(work, capsys):
    assert parity.main(["report", "--work", str(work), "--updates", "4", "--prompts", "64"]) == 0
    text = capsys.readouterr().out
    # Standard deviations 0.01, 3 runs each: 2.131847 * 0.01 * sqrt(2 / 3) = 0.0174 on each side.
    assert "| PPO | 1.000 | +0.050 | +0.033 to +0.067 | +3.3% to +6.7% | yes |" in text
    assert "| RLOO | 1.000 | -0.500 | -0.517 to -0.483 | -51.7% to -48.3% | no |" in text
    assert "| PPO, rlhf_jax | 3 | 1.550 ± 0.010 | 0.775 ± 0.005 |" in text
    assert "| GRPO | 0.250 | +0.000 | -0.017 to +0.017 | -7.0% to +7.0% | yes |" in text
    assert "| GRPO, TRL | 3 | 0.750 ± 0.010 | 0.375 ± 0.005 |" in text


def test_report_leaves_out_runs_of_another_length_and_says_so(work, capsys):
    assert parity.main(["report", "--work", str(work), "--updates", "5", "--prompts", "64"]) == 0
    assert "too few seeds: 0 of ours, 0 of TRL" in capsys.readouterr().out


def test_picture_of_48_noisy_updates_is_one_light_png(tmp_path):
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)

    def run(trainer):
        noise, second = rng.normal(0.0, 0.3, size=48), parity.SECOND[trainer]
        return {"curve": [parity.point(u, u / 20 + x, u / 30 + x, 1.0, second) for u, x in enumerate(noise, 1)]}

    runs = {(t, s): [run(t) for _ in range(5)] for t in parity.TRAINERS for s in parity.SYSTEMS}
    path = tmp_path / "docs" / "picture.png"
    parity.draw(runs, path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size < 150_000
