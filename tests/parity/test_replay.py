"""Recorded TRL runs replay; what cannot be replayed is refused by name; differences are seen."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.algorithms import grpo
from rlhf_jax.models import custom_shape
from tests.parity import options, replay, report, rloo, samples, weights

CASES = Path(__file__).parent / "cases"
QUANTITIES = {
    "ppo": (
        "old log-probabilities",
        "advantages after whitening",
        "objective/kl",
        "final policy, tensors",
        "final value, tensors",
    ),
    "rloo": (
        "old log-probabilities",
        "advantages",
        "losses of micro-batches",
        "loss",
        "grad_norm",
        "final policy, tensors",
    ),
    "grpo": (
        "tokens that are trained on",
        "advantages",
        "losses of micro-batches",
        "loss",
        "grad_norm",
        "entropy",
        "final policy, tensors",
    ),
    "lora": (
        "old log-probabilities",
        "advantages after whitening",
        "objective/kl",
        "final policy, tensors",
        "final value, tensors",
    ),
    "legacy": (
        "old log-probabilities",
        "reward-model scores",
        "objective/kl",
        "loss/policy_avg",
        "final policy, tensors",
    ),
}
QUANTITIES["vision"] = (
    "processing: ids",
    "processing: tiles",
    "processing: prompts of the rollout",
    "advantages",
    "losses of micro-batches",
    "grad_norm",
    "final policy, tensors",
)
# TRL's, of options whose value in a recorded run would otherwise say nothing.
DEFAULTS = {
    "num_mini_batches": 1,
    "accum": 1,
    "parallel": True,
    "stop_token_id": None,
    "missing_eos_penalty": None,
    "temperature": 1.0,
    "num_generations": 2,
    "num_iterations": 1,
    "beta": 0.05,
    "epsilon": 0.2,
    "rloo_k": 2,
    "kl_coef": 0.05,
    "cliprange": 0.2,
    "num_ppo_epochs": 4,
    "reward_clip_range": 10.0,
}
PPO_DEFAULTS = {
    "temperature": 0.7,
    "gamma": 1.0,
    "lam": 0.95,
    "vf_coef": 0.1,
    "cliprange_value": 0.2,
    "kl_estimator": "k1",
    "whiten_rewards": False,
}
GRPO_DEFAULTS = {
    "beta": 0.0,
    "num_generations": 8,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "use_bias_correction_kl": True,
    "importance_sampling_level": "token",
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
}
BASE = {"micro": 8, "accum": 1, "batch": 8, "stop_token": "eos", "adam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-5}}


# ------------------------------------------------------------------------------------------------------- whole runs


ALWAYS = """
ppo_crafted ppo_small ppo_llama rloo_crafted rloo_small rloo_qwen3
legacy_small lora_small grpo_crafted grpo_kl vision_rloo
"""
"""Cases of each trainer in the default suite; those of the other options and families are `runs`."""


def marked(name):
    return pytest.param(name, marks=() if name in ALWAYS.split() else pytest.mark.runs)


@pytest.mark.parametrize("name", [marked(name) for name in sorted(path.name for path in CASES.iterdir())])
def test_a_recorded_run_of_trl_replays(name, capsys):
    """scripts/parity/record_cases.sh says what is in which."""
    status = replay.main([str(CASES / name)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "OUT" not in printed
    for quantity in QUANTITIES[name.split("_")[0]]:
        assert f"\n{quantity} " in printed
    # With so few prompts these meet the last batch of a pass over them.
    assert ("stepped after every micro-batch" in printed) == (name in ("ppo_crafted", "legacy_crafted"))
    assert ("note: the reference is the adapter adapter/first" in printed) == (name == "lora_named_ref")


def test_the_recorded_runs_are_small():
    assert sum(file.stat().st_size for file in CASES.rglob("*") if file.is_file()) < 5.5e6


def test_the_recorded_runs_have_the_switches_of_the_families():
    """Each trainer with a family of each kind, and starting weights once for the cases of a family."""
    configs = {path.name: json.loads((path / "policy" / "config.json").read_text()) for path in CASES.iterdir()}
    recorded = {(name.split("_")[0], config["model_type"]) for name, config in configs.items()}
    assert {("rloo", "llama"), ("ppo", "llama"), ("rloo", "qwen3"), ("ppo", "gpt2")} <= recorded
    assert {("ppo", "gemma2"), ("rloo", "gemma3_text"), ("grpo", "qwen3"), ("grpo", "llama")} <= recorded
    assert configs["rloo_llama"]["rope_parameters"]["rope_type"] == "llama3"
    for part in ("policy", "tokenizer"):
        assert (CASES / "ppo_llama" / part).samefile(CASES / "rloo_llama" / part)


def test_every_option_that_changes_a_number_is_in_a_recorded_run():
    """With another value than TRL's default."""
    cases = {path.name: json.loads((path / "case.json").read_text())["options"] for path in CASES.iterdir()}
    learning = {"learning_rate", "temperature", "parallel", "accum"}
    wanted = {
        "ppo": {*options.SAME, "num_mini_batches", "local_rollout_forward_batch_size"} - {"stop_token"},
        "rloo": {*options.RLOO_SAME, "reward_weights", "reward_clip_range", "steps_per_generation"},
        "grpo": {*options.GRPO_SAME, "scale_rewards", "reward_weights", "steps_per_generation"},
        "legacy": {*options.LEGACY_RENAMED, *options.LEGACY_SAME, "token_level_kl", "reward_clip_range"},
    }
    lora = set().union(*(case for name, case in cases.items() if name.startswith("lora")))
    assert {"lora_r", "lora_alpha", "lora_target_modules", "lora_modules_to_save", "use_rslora"} <= lora
    assert "ref_adapter_name" in lora
    for trainer, names in wanted.items():
        own = [case for name, case in cases.items() if name.startswith(trainer)]
        defaults = {**DEFAULTS, **{"ppo": PPO_DEFAULTS, "grpo": GRPO_DEFAULTS}.get(trainer, {})}
        for name in names | learning:
            seen = [case[name] for case in own if name in case]
            assert any(value != defaults.get(name) for value in seen), f"{trainer}: {name} is in no recorded run"
        adam = [case["adam"] for case in own]
        for name, default in (("beta1", 0.9), ("beta2", 0.999), ("eps", 1e-8), ("weight_decay", 0.0)):
            assert any(one[name] != default for one in adam), f"{trainer}: {name}"
        assert any(case["warmup"] not in ("0", "0.0") for case in own)
        assert len({case["lr_scheduler"] for case in own}) > 1
    losses = {case.get("loss_type", "dapo") for name, case in cases.items() if name.startswith("grpo")}
    assert losses == set(grpo.LOSSES)
    for trainer in ("ppo", "legacy"):
        stops = [case.get("stop_token", "id") for name, case in cases.items() if name.startswith(trainer)]
        assert {"eos", None} <= set(stops)


def test_the_recorded_runs_have_the_hard_rows():
    def rows(name, update=0):
        trace = np.load(CASES / name / "trace.npz")
        return trace[f"query_responses_{update}"][:, int(trace[f"context_length_{update}"]) :]

    eos, pad = 0, 23
    ids = rows("ppo_crafted")
    assert (ids[:, 0] == pad).any() and (ids[:, 0] == eos).any()  # length 0, eos first
    assert (((ids == eos).sum(1) == 1) & (ids[:, -1] == eos)).any()  # eos last
    assert (~(ids == eos).any(1) & ~(ids == pad).any(1)).any()  # no end at all
    before = (ids == pad).argmax(1) < (ids == eos).argmax(1)
    assert (before & (ids == pad).any(1) & (ids[:, 0] != pad)).any()  # a pad that was sampled on the way to eos
    fill = rows("ppo_options", 1)
    ended = (fill[:, :-1] == eos).any(1)
    assert ended.any() and (fill[ended, -1] == eos).all()  # eos fills what follows an end
    after = rows("legacy_crafted")
    assert ((after == eos).any(1) & (after[:, -1] != eos) & (after[:, -1] != pad)).any()  # sampling went on
    rewards = np.load(CASES / "rloo_crafted" / "trace.npz")["rewards_per_func_0"].reshape(-1, 2)
    unscored = np.isnan(rewards).sum(1)
    assert {0, 1, 2} <= set(unscored.tolist()) and (rewards[:, 0] == rewards[:, 1]).any()


def test_a_run_that_ended_elsewhere_is_out(tmp_path, capsys):
    shutil.copytree(CASES / "ppo_small", tmp_path / "case")
    case = json.loads((tmp_path / "case" / "case.json").read_text())
    case["logs"] = case["logs"][:1]
    (tmp_path / "case" / "case.json").write_text(json.dumps(case))
    assert replay.main([str(tmp_path / "case")]) == 1
    printed = capsys.readouterr().out
    assert "DOES NOT REPLAY" in printed
    assert [line.split("  ")[0] for line in printed.splitlines() if " OUT " in line] == [
        "final policy, tensors",
        "final value, tensors",
    ]


# ---------------------------------------------------------------------------------------------------------- refusals


def record(folder, **changes):
    """A folder with nothing but a case.json."""
    folder.mkdir()
    (folder / "case.json").write_text(json.dumps({"options": {**BASE, **changes}, "logs": [{}, {}]}))
    return folder


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ds3_gather": True}, "option ds3_gather=True is not known"),
        ({"kl_estimator": "k2"}, "option kl_estimator='k2'"),
        ({"stop_token": "period"}, "option stop_token='period'"),
        ({"lr_scheduler": "SchedulerType.POLYNOMIAL"}, "option lr_scheduler='polynomial'"),
        ({"batch": 9}, "option batch is 9, but micro 8 x accum 1 is 8"),
        ({"num_mini_batches": 3}, "option num_mini_batches: 8 episodes are not a multiple of 3"),
        ({"num_mini_batches": 2, "accum": 3, "batch": 24}, "num_mini_batches=2 with accum=3"),
        ({"num_mini_batches": 2, "accum": 2, "batch": 16}, "one optimizer step an epoch"),
        ({"rloo_k": 4}, "trace.npz is missing"),
        ({"num_generations": 4}, "trace.npz is missing"),
        ({}, "trace.npz is missing"),
    ],
)
def test_what_is_not_replayed_is_refused_by_name_with_status_2(tmp_path, capsys, changes, message):
    assert replay.main([str(record(tmp_path / "case", **changes))]) == 2
    assert message in capsys.readouterr().err


def test_folders_that_are_no_record_are_refused(tmp_path, capsys):
    assert replay.main([str(tmp_path)]) == 2
    assert "has no case.json" in capsys.readouterr().err
    assert replay.main([]) == 2
    assert "CASE_DIR" in capsys.readouterr().err


def test_one_that_is_out_decides_the_status_over_a_refusal(tmp_path, monkeypatch):
    class Fake:
        def __init__(self, folder):
            if folder.name == "refused":
                raise options.Refused("no")
            self.gap = 0.0 if folder.name == "good" else 1.0

        def run(self):
            found = report.Report()
            found.add("x", self.gap, 0.5, "update 0")
            return found

    monkeypatch.setattr(replay, "open_case", Fake)
    assert replay.main(["good"]) == 0
    assert replay.main(["good", "refused"]) == 2
    assert replay.main(["bad", "refused", "good"]) == 1


# ----------------------------------------------------------------------------------------------------------- options


def test_an_option_that_is_not_listed_has_trls_default():
    config = options.ppo_config({"micro": 8}, 2, "case")
    assert (config.num_ppo_epochs, config.stop_token, config.adam_epsilon) == (4, None, 1e-8)
    assert (config.temperature, config.response_length, config.learning_rate) == (0.7, 53, 3e-6)
    assert (config.kl_coef, config.gamma, config.lam, config.cliprange, config.vf_coef) == (0.05, 1.0, 0.95, 0.2, 0.1)
    assert (config.cliprange_value, config.kl_estimator, config.whiten_rewards) == (0.2, "k1", False)
    assert (config.missing_eos_penalty, config.max_grad_norm, config.weight_decay) == (None, None, 0.0)
    assert (config.batch_size, config.num_mini_batches, config.micro_batch_size) == (8, 1, 8)
    assert (config.loss_aggregation, config.whiten_ddof) == ("token_mean_micro", 1)


def test_each_of_trls_rloo_trainers_has_its_own_defaults():
    now = options.rloo_config({"micro": 2, "accum": 2, "num_generations": 4}, 8, 16, "case")
    assert (now.num_generations, now.num_iterations, now.beta, now.epsilon, now.temperature) == (4, 1, 0.05, 0.2, 1.0)
    assert (now.batch_size, now.micro_batch_size, now.response_length) == (16, 2, 512)
    assert (now.max_grad_norm, now.lr_scheduler_unit, now.reshuffle) == (1.0, "optimizer_step", "once")
    old = options.legacy_rloo_config({"micro": 4, "num_mini_batches": 2, "rloo_k": 4}, 8, "case")
    assert (old.num_generations, old.num_iterations, old.beta, old.epsilon, old.temperature) == (4, 4, 0.05, 0.2, 0.7)
    assert (old.batch_size, old.micro_batch_size, old.response_length) == (8, 4, 53)
    assert (old.max_grad_norm, old.lr_scheduler_unit, old.reshuffle) == (None, "update", "per_epoch")
    assert old.reward_clip_range is None
    clipped = options.legacy_rloo_config({"micro": 4, "normalize_reward": True}, 8, "case")
    assert clipped.reward_clip_range == (10.0,) and clipped.num_generations == 2


def test_an_option_of_grpo_that_is_not_listed_has_trls_default():
    config = options.grpo_config({"micro": 2, "scale_rewards": False}, 8, 16, 2, "case")
    assert (config.num_generations, config.num_iterations, config.beta, config.epsilon) == (8, 1, 0.0, 0.2)
    assert (config.loss_type, config.importance_sampling_level, config.scale_rewards) == ("dapo", "token", "none")
    assert (config.use_bias_correction_kl, config.temperature, config.response_length) == (True, 1.0, 512)
    assert (config.batch_size, config.micro_batch_size, config.num_mini_batches) == (16, 2, 4)
    assert config.loss_aggregation == "token_mean_micro"


@pytest.mark.parametrize("rows, tokens", [(16, [15.0, 20.0]), (8, [30.0, 40.0])], ids=["two a generation", "one"])
def test_each_micro_batch_is_divided_by_the_tokens_of_its_own_generation(rows, tokens):
    fake = object.__new__(replay.grpo.GRPO)
    fake.folder, fake.accum, fake.micro = CASES, 2, 8
    fake.trace = {"step0_num_items_in_batch": np.int64(30), "step1_num_items_in_batch": np.int64(40)}
    fake.config = options.grpo_config({"micro": 8}, 1, rows, 2, "case")
    np.testing.assert_array_equal(fake.batch_tokens(0), tokens)


@pytest.mark.parametrize(
    "read, message",
    [
        (
            lambda: options.grpo_config({"micro": 8, "use_vllm": True}, 2, 8, 1, "case"),
            "option use_vllm=True is not known",
        ),
        (
            lambda: options.rloo_config({"micro": 8, "use_vllm": True}, 2, 8, "case"),
            "option use_vllm=True is not known",
        ),
        (lambda: options.rloo_config({"micro": 8}, 2, 20, "case"), "20 rows a generation are no multiple"),
        (lambda: options.rloo_config({}, 2, 8, "case"), "option micro .* is missing"),
        (lambda: options.legacy_rloo_config({**BASE, "rloo_k": 4, "ds3_gather": True}, 2, "case"), "ds3_gather=True"),
        (lambda: options.legacy_rloo_config({**BASE, "rloo_k": 4, "batch": 9}, 2, "case"), "option batch is 9, but"),
    ],
)
def test_what_is_not_replayed_of_an_rloo_run_is_refused_by_name(read, message):
    with pytest.raises(options.Refused, match=message):
        read()


def test_the_options_or_else_the_trace_decide_which_trainer_is_replayed(tmp_path):
    assert rloo.replay_of(tmp_path, {"rloo_k": 2}).func is rloo.Legacy
    assert rloo.replay_of(tmp_path, {"num_generations": 2}).func is rloo.Current
    assert rloo.replay_of(tmp_path, BASE) is None
    assert rloo.replay_of(CASES / "ppo_small", BASE) is None
    assert rloo.replay_of(CASES / "legacy_small", BASE).func is rloo.Legacy
    assert rloo.replay_of(CASES / "rloo_small", BASE).func is rloo.Current


def test_functions_of_one_name_are_logged_together():
    fake = object.__new__(rloo.Current)
    fake.folder, fake.trace = CASES, {"rewards_per_func_0": np.zeros((4, 2))}
    fake.logs = [{"rewards//mean": 1.0, "rewards//std": 1.0, "reward": 0.0, "completions/mean_length": 3.0}]
    fake.names = fake.function_names()
    assert fake.names == ["", ""]
    each = np.array([[1.0, np.nan], [3.0, np.nan]])
    assert fake.reward_metrics(each) == {"rewards//mean": 2.0, "rewards//std": pytest.approx(math.sqrt(2))}
    each[0, 1] = 6.0  # one number has a mean and no deviation
    assert fake.reward_metrics(each) == {"rewards//mean": 4.0, "rewards//std": pytest.approx(math.sqrt(2))}
    fake.trace = {"rewards_per_func_0": np.zeros((4, 3))}
    fake.logs[0] |= {"rewards/other/mean": 0.0, "rewards/other/std": 0.0}
    with pytest.raises(options.Refused, match="2 names for 3 functions"):
        fake.function_names()


def test_a_log_that_skips_optimizer_steps_is_refused(tmp_path, capsys):
    shutil.copytree(CASES / "rloo_small", tmp_path / "case")
    case = json.loads((tmp_path / "case" / "case.json").read_text())
    case["logs"] = case["logs"][1::2]
    (tmp_path / "case" / "case.json").write_text(json.dumps(case))
    assert replay.main([str(tmp_path / "case")]) == 2
    assert "3 entries for 6 optimizer steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, message",
    [
        ({"reward_weights": [1.0, 2.0]}, "option reward_weights: 2 for 1 functions"),
        ({"parallel": False}, "option parallel disagrees"),
    ],
)
def test_options_that_disagree_with_the_record_are_refused(tmp_path, capsys, change, message):
    shutil.copytree(CASES / "rloo_crafted", tmp_path / "case")
    case = json.loads((tmp_path / "case" / "case.json").read_text())
    case["options"] |= change
    (tmp_path / "case" / "case.json").write_text(json.dumps(case))
    assert replay.main([str(tmp_path / "case")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind, quantity", [("loss", "losses of micro-batches"), ("old_logps", "old log-probabilities")]
)
def test_a_changed_tensor_of_the_record_is_seen(tmp_path, capsys, kind, quantity):
    shutil.copytree(CASES / "rloo_crafted", tmp_path / "case")
    trace = dict(np.load(CASES / "rloo_crafted" / "trace.npz"))
    # The copies in shuffled micro-batches too, by which rows are found again.
    changed = {key: x * np.float32(1.001) for key, x in trace.items() if kind in key}
    np.savez(tmp_path / "case" / "trace.npz", **{**trace, **changed})
    assert replay.main([str(tmp_path / "case")]) == 1
    out = [line for line in capsys.readouterr().out.splitlines() if " OUT " in line]
    assert out and all(line.startswith(quantity) for line in out)


@pytest.mark.parametrize(
    "minibatches, micro, accum, wanted",
    [
        (1, 8, 1, (8, 1, 1)),
        (2, 8, 1, (4, 2, 1)),  # one step a minibatch: without accumulation
        (1, 8, 2, (8, 2, 2)),
        (1, 4, 3, (4, 3, 3)),
    ],
)
def test_batches_are_cut_and_stepped_as_accelerate_does(minibatches, micro, accum, wanted):
    given = {"num_mini_batches": minibatches, "micro": micro, "accum": accum}
    cut = options.stepping(given, "case")
    assert (cut.micro, cut.micros, cut.accum) == wanted
    assert cut.micro * cut.micros == micro * accum
    # Until 0.21 num_mini_batches multiplied RLOO's batch.
    old = options.legacy_stepping(given, "case")
    assert (old.micro, old.micros, old.accum, old.steps) == (micro, accum * minibatches, accum, minibatches)


def test_of_all_ways_to_step_the_one_that_replays_is_taken():
    """A pass over the data ends with every second update."""
    cut = options.stepping({"micro": 4, "accum": 2}, "case")
    assert (cut.stepped(False), cut.stepped(True)) == ((1, 1), (2, 2))
    tried = []

    def run(period):
        tried.append(period)
        found = report.Report()
        for update in range(4):
            wrong = report.pass_ends(update, period) != (update in (1, 3))
            found.add(f"metric {update}", 1.0 if wrong else 0.0, 0.5, f"update {update}")
        return found

    found = report.as_accelerate_stepped(run, cut, 4)
    assert found.passed and tried == [None, 1, 2] and "updates 1, 3, ..." in found.notes[0]
    tried.clear()
    without = report.as_accelerate_stepped(run, options.stepping({"micro": 4}, "case"), 4)
    assert tried == [None] and not without.passed and not without.notes

    def never(period):
        found = run(period)
        found.add("weights", 1.0, 0.5, "")
        return found

    nearest = report.as_accelerate_stepped(never, cut, 4)
    assert [name for name, row in nearest.rows.items() if not row.passed] == ["weights"]


def test_warm_up_is_read_in_steps_or_as_a_share_of_the_run():
    def schedule(**changes):
        config = options.ppo_config({**BASE, **changes}, 10, "case")
        return config.lr_scheduler_type, config.warmup_steps

    assert schedule(lr_scheduler="SchedulerType.LINEAR", warmup="0") == ("linear", 0)
    assert schedule(lr_scheduler="SchedulerType.COSINE", warmup="3") == ("cosine", 3)
    assert schedule(warmup="0.25") == ("linear", 3)
    assert schedule(warmup_ratio=0.25) == ("linear", 3)
    assert schedule(lr_scheduler="constant", warmup="3") == ("constant", 0)
    assert schedule(lr_scheduler="constant_with_warmup", warmup="3") == ("constant", 3)


# ---------------------------------------------------------------------------------------------------------- distances


def test_distances_are_relative_absolute_at_zero_and_infinite_for_nan_or_another_shape():
    assert report.distance([3.0, 4.0], [3.0, 5.0]) == pytest.approx(1 / math.sqrt(34))
    assert report.distance([0.5], [0.0]) == 0.5
    assert report.distance([1.0], [1.0, 1.0]) == math.inf
    assert report.distance([math.nan], [1.0]) == math.inf
    assert report.metric_distance(2.0, 1.0) == 1.0
    assert report.metric_distance(1e-3, 0.0) == pytest.approx(0.1)
    assert report.metric_distance(math.nan, math.nan) == 0.0
    assert report.metric_distance(math.nan, 1.0) == math.inf
    assert report.metric_distance(math.nan, None) == 0.0  # TRL writes None where all was nan
    assert report.metric_distance(1.0, None) == math.inf
    # A sum that cancels is as exact as its terms: 1e-5 of their size where metrics have 1e-4 of their own.
    assert report.metric_distance(2e-6, 0.0, terms=0.2) == pytest.approx(report.METRICS)


def test_a_kl_of_two_equal_models_is_rounding_and_a_wrong_one_is_not():
    """As TRL logged it in runs that began with B = 0: KL and entropy of three of them."""

    def passed(ours, theirs, entropy):
        found = report.Report()
        metrics = {"objective/kl": ours, "objective/entropy": entropy}
        terms = report.terms_of_kl(metrics, 0.05)
        report.compare_log(found, metrics, {"objective/kl": theirs}, "update 0", (), "", terms)
        return found.passed

    for kl, entropy in ((7.45e-7, 27.3), (2.38e-6, 209.8), (1.61e-6, 64.0)):
        assert passed(0.0, kl, entropy)
        assert not passed(0.0, kl + 2 * entropy * report.ROUNDING, entropy)
    assert not passed(0.1, 0.10002, 27.3)


def test_the_report_keeps_the_worst_of_each_quantity():
    found = report.Report()
    assert not found.passed
    for update, gap in enumerate([1e-7, 3e-6, 2e-7]):
        found.add("values", gap, 1e-5, f"update {update}")
    assert found.passed and "update 1" in found.table()
    found.add("values", math.inf, 1e-5, "update 3")
    assert not found.passed and "OUT" in found.table()


def test_the_key_part_of_a_qkv_bias_is_split_by_head():
    bias = np.arange(12)  # two heads of two, interleaved: q q k k v v
    config = custom_shape("2x4x2", 8).family.decoder_config(custom_shape("2x4x2", 8).config)
    rest, keys = weights.split_keys(bias, config)
    assert keys.tolist() == [[2, 3], [8, 9]]
    assert rest.tolist() == [[[0, 1], [4, 5]], [[6, 7], [10, 11]]]
    rest, keys = weights.split_keys(bias, dataclasses.replace(config, qkv="blocks"))
    assert keys.tolist() == [4, 5, 6, 7] and rest.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


def test_ids_decide_masks_in_a_replay_as_in_trl():
    """eos 0, pad 9, stop eos: a sampled pad ends its row, what follows it is still truncated at eos."""
    fake = object.__new__(replay.Replay)
    fake.pad, fake.eos, fake.stop, fake.widest = 9, 0, 0, 3
    sequences = np.array([[9, 5, 1, 2, 0, 9], [4, 5, 1, 9, 2, 0], [9, 9, 9, 2, 2, 2], [9, 5, 1, 0, 0, 0]])
    fake.trace = {"query_responses_0": sequences, "context_length_0": np.asarray(2)}
    rollout = fake.rollout(0)
    assert rollout.prompt_lengths.tolist() == [1, 2, 0, 1]
    assert rollout.lengths.tolist() == [3, 1, 0, 2]
    assert rollout.response_mask.astype(int).tolist() == [[1, 1, 1, 0], [1, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]
    # Row 1 has eos, but after the pad that ended it: TRL does not penalise it, the trainer will.
    assert samples.credited(jnp.zeros(4), rollout, 2.0, stop=0, eos=0, pad=9).tolist() == [0, 2, 0, 0]
    assert samples.credited(jnp.zeros(4), rollout, None, stop=0, eos=0, pad=9).tolist() == [0, 0, 0, 0]
