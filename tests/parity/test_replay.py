"""Recorded TRL runs replay; what cannot be replayed is refused by name; differences are seen."""

import json
import math
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity import options, replay, report, rloo, weights

CASES = Path(__file__).parent / "cases"
BASE = {"micro": 8, "accum": 1, "batch": 8, "stop_token": "eos", "adam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-5}}


# ------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("name", ["ppo_small", "ppo_options"])
def test_a_recorded_trl_run_replays(name, capsys):
    """ppo_small: TRL's defaults, pads among the samples. ppo_options: k3, whitened rewards, missing-eos penalty,
    minibatches with accumulation and the last batch of a data pass, eos fill, sequential residual, warm-up, decay."""
    status = replay.main([str(CASES / name)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "final value" in printed and "OUT" not in printed
    assert ("stepped after every micro-batch" in printed) == (name == "ppo_options")


@pytest.mark.parametrize("name", ["rloo_small", "rloo_options"])
def test_a_recorded_rloo_run_of_trl_replays(name, capsys):
    """rloo_small: one reward function that leaves rows (and a whole group) unscored, a reference that is moved.
    rloo_options: three functions with weights, iterations, steps a generation, two-sided clip, clipped rewards,
    normalised advantages, truncation masks, sequential residual."""
    status = replay.main([str(CASES / name)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    for quantity in ("old log-probabilities", "advantages", "loss", "grad_norm", "kl", "final policy, tensors"):
        assert f"{quantity} " in printed
    assert "OUT" not in printed


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
        ({"rloo_k": 4}, "trace.npz is missing"),
        ({"num_generations": 4}, "trace.npz is missing"),
        ({}, "trace.npz is missing"),
    ],
)
def test_what_is_not_replayed_is_refused_by_name_with_status_2(tmp_path, capsys, changes, message):
    assert replay.main([str(record(tmp_path / "case", **changes))]) == 2
    assert message in capsys.readouterr().err


def test_adapters_and_folders_that_are_no_record_are_refused(tmp_path, capsys):
    folder = record(tmp_path / "case")
    (folder / "adapter").mkdir()
    assert replay.main([str(folder)]) == 2
    assert "LoRA" in capsys.readouterr().err
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
    assert (config.metrics, config.loss_aggregation, config.whiten_ddof) == ("trl", "token_mean_micro", 1)


def test_each_of_trls_rloo_trainers_has_its_own_defaults():
    now = options.rloo_config({"micro": 2, "accum": 2, "num_generations": 4}, 8, 16, "case")
    assert (now.num_generations, now.num_iterations, now.beta, now.epsilon, now.temperature) == (4, 1, 0.05, 0.2, 1.0)
    assert (now.batch_size, now.num_mini_batches, now.micro_batch_size, now.response_length) == (16, 4, 2, 512)
    assert (now.max_grad_norm, now.lr_scheduler_unit, now.reshuffle) == (1.0, "optimizer_step", "once")
    old = options.legacy_rloo_config({"micro": 4, "num_mini_batches": 2, "rloo_k": 4}, 8, "case")
    assert (old.num_generations, old.num_iterations, old.beta, old.epsilon, old.temperature) == (4, 4, 0.05, 0.2, 0.7)
    assert (old.batch_size, old.num_mini_batches, old.micro_batch_size, old.response_length) == (8, 2, 4, 53)
    assert (old.max_grad_norm, old.lr_scheduler_unit, old.reshuffle) == (None, "update", "per_epoch")
    assert {now.metrics, old.metrics} == {"trl"} and old.reward_clip_range is None
    clipped = options.legacy_rloo_config({"micro": 4, "normalize_reward": True}, 8, "case")
    assert clipped.reward_clip_range == (10.0,) and clipped.num_generations == 2


@pytest.mark.parametrize(
    "read, message",
    [
        (
            lambda: options.rloo_config({"micro": 8, "use_vllm": True}, 2, 8, "case"),
            "option use_vllm=True is not known",
        ),
        (lambda: options.rloo_config({"micro": 8, "accum": 2}, 2, 24, "case"), "24 rows a generation are no multiple"),
        (lambda: options.rloo_config({}, 2, 8, "case"), "option micro .* is missing"),
        (lambda: options.legacy_rloo_config({**BASE, "rloo_k": 4, "ds3_gather": True}, 2, "case"), "ds3_gather=True"),
        (lambda: options.legacy_rloo_config({**BASE, "rloo_k": 4, "batch": 9}, 2, "case"), "option batch is 9, but"),
    ],
)
def test_what_is_not_replayed_of_an_rloo_run_is_refused_by_name(read, message):
    with pytest.raises(options.Refused, match=message):
        read()


def test_the_options_decide_which_trainer_is_replayed(tmp_path):
    assert rloo.replay_of(tmp_path, {"rloo_k": 2}).func is rloo.Legacy
    assert rloo.replay_of(tmp_path, {"num_generations": 2}).func is rloo.Current
    assert rloo.replay_of(tmp_path, BASE) is None


@pytest.mark.parametrize(
    "minibatches, micro, accum, wanted",
    [
        (1, 8, 1, (8, 1, 1, 1)),
        (2, 8, 1, (4, 2, 1, 2)),  # one step a minibatch: only without accumulation
        (1, 8, 2, (8, 2, 2, 2)),
        (2, 8, 2, (8, 2, 2, 4)),  # one step an epoch, half of the slots empty
        (4, 8, 2, (4, 4, 2, 8)),
        (2, 4, 4, (4, 4, 4, 8)),
    ],
)
def test_batches_are_cut_and_stepped_as_accelerate_does(minibatches, micro, accum, wanted):
    cut = options.stepping({"num_mini_batches": minibatches, "micro": micro, "accum": accum}, "case")
    assert (cut.micro, cut.micros, cut.accum, cut.slots) == wanted
    assert cut.micro * cut.micros == micro * accum


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
    rest, keys = weights.split_keys(bias, 2)
    assert keys.tolist() == [[2, 3], [8, 9]]
    assert rest.tolist() == [[[0, 1], [4, 5]], [[6, 7], [10, 11]]]


def test_empty_statistics_slots_dilute_means_and_variance():
    """register row 1: num_mini_batches=2 with accum=2 leaves half of the slots at 0."""
    ratios = np.array([1.1, 0.9, 1.3, 1.0])  # two epochs of two micro-batches
    fake = object.__new__(replay.Replay)
    fake.cut = options.stepping({"num_mini_batches": 2, "micro": 4, "accum": 2}, "case")
    fake.config = options.ppo_config({"micro": 4, "accum": 2, "num_mini_batches": 2, "num_ppo_epochs": 2}, 1, "case")
    metrics = dict.fromkeys(replay.STATISTICS, 1.0) | {"val/ratio": ratios.mean(), "val/ratio_var": ratios.var(ddof=1)}
    slots = np.concatenate([ratios, np.zeros(4)])
    got = fake.diluted({**metrics, "objective/kl": 1.0})
    assert got["val/ratio"] == pytest.approx(slots.mean())
    assert got["val/ratio_var"] == pytest.approx(slots.var(ddof=1))
    assert (got["loss/value_avg"], got["objective/kl"]) == (0.5, 1.0)


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
    fake.config = options.ppo_config({**BASE, "missing_eos_penalty": 2.0}, 1, "case")
    # Row 1 has eos, but after the pad that ended it: TRL does not penalise it, the trainer will.
    assert fake.credited(jnp.zeros(4), rollout).tolist() == [0, 2, 0, 0]
