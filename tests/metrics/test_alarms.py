"""Alarms are functions of the metrics so far: when each is raised, and that a resume finds them again."""

import json
import math

import pytest

from rlhf_jax.config import PPOConfig, RLOOConfig
from rlhf_jax.metrics.alarms import ALARMS, Alarms, readings, thresholds
from rlhf_jax.utils.strict_json import json_text, with_floats

FINE = {
    "objective/kl": 1.0,
    "val/first_ratio_error": 1e-6,
    "objective/scores_std": 1.0,
    "completions/clipped_ratio": 0.2,
    "completions/mean_length": 20.0,
    "completions/unused_ids": 0.0,
}
BAD = {  # in one update
    "kl_below": {"objective/kl": -1.5},
    "kl_above": {"objective/kl": 201.0},
    "first_ratio": {"val/first_ratio_error": 0.02},
    "reward_std": {"objective/scores_std": 0.0},
    "unused_ids": {"completions/unused_ids": 0.05 * 512 + 1},
}
RUNNING = {  # in the mean of the last five
    "eos_share": {"completions/clipped_ratio": 0.9},
    "length_growth": {"completions/mean_length": 90.0},
    "length_collapse": {"completions/mean_length": 3.0},
}


def limits(config):
    return thresholds(config, dtype=config.dtype, batch_size=config.batch_size)


def alarms_of(config, lines=()):
    return Alarms(config.early_stop, limits(config), lines)


def run(config, *updates):
    """(what each update adds to its line, the words of each, the Alarms)"""
    alarms = alarms_of(config)
    found, words = zip(*[alarms.update(step, {**FINE, **update}) for step, update in enumerate(updates, 1)])
    return list(found), list(words), alarms


@pytest.mark.parametrize("name", BAD)
def test_an_alarm_is_raised_at_once_told_once_and_ends(name):
    found, words, alarms = run(PPOConfig(), {}, BAD[name], BAD[name], {}, {}, BAD[name])
    assert found == [{}, {f"alarm/{name}": 1.0}, {f"alarm/{name}": 1.0}, {f"alarm/{name}": 0.0}, {}, found[1]]
    assert [len(lines) for lines in words] == [0, 1, 0, 0, 0, 1] and words[1][0].startswith(f"alarm {name}: ")
    assert alarms.raised == {name} and alarms.stop_step is None


@pytest.mark.parametrize("name", RUNNING)
def test_what_runs_away_is_held_against_the_start(name):
    updates = [{}] * 5 + [RUNNING[name]] * 5
    found, words, _ = run(PPOConfig(), *updates)
    raised = [name in "".join(line) for line in found]
    assert raised[:6] == [False] * 6 and raised[9]  # one update is noise; five are not
    assert sum(map(len, words)) == 1
    # A run that begins so has nothing to be held against.
    assert run(PPOConfig(), *[RUNNING[name]] * 10)[0] == [{}] * 10


def test_the_words_have_the_numbers():
    _, words, _ = run(PPOConfig(), *[{}] * 5, *[{**RUNNING["eos_share"], **RUNNING["length_growth"]}] * 5)
    (eos,), (length,) = ([w for w in sum(words, []) if name in w] for name in ("eos_share", "length_growth"))
    assert "at the start 80.0% did" in eos and "at the start 20" in length
    _, words, _ = run(PPOConfig(), BAD["kl_below"])
    assert words == [["alarm kl_below: objective/kl -1.5 is below -1"]]


@pytest.mark.parametrize("name", ALARMS)
def test_none_switches_an_alarm_off(name):
    config = PPOConfig(**{f"alarm_{name}": None})
    assert limits(config)[name] is None and limits(PPOConfig())[name] is not None
    updates = [{}] * 5 + [{**BAD, **RUNNING}[name]] * 6
    assert run(config, *updates)[0] == [{}] * 11
    assert run(PPOConfig(), *updates)[0][-1] == {f"alarm/{name}": 1.0}


def test_thresholds_are_themselves_no_alarm_and_batches_of_one_have_no_deviation():
    at = {"objective/kl": -1.0, "val/first_ratio_error": 0.01}
    assert run(PPOConfig(), at, {"objective/kl": 200.0})[0] == [{}, {}]
    assert run(PPOConfig(batch_size=1), BAD["reward_std"])[0] == [{}]


def test_bfloat16_has_a_threshold_of_its_own():
    config = PPOConfig(dtype="bfloat16")
    assert run(config, BAD["first_ratio"], {"val/first_ratio_error": 0.6})[0] == [{}, {"alarm/first_ratio": 1.0}]


def test_rloo_reads_its_own_names_and_groups_of_equal_scores():
    line = {"reward_std": 0.0, "objective/scores_std": 1.0, "completions/mean_length": 5.0}
    assert readings(line)["std"] == 0.0 and "kl" not in readings(line)
    assert readings({**line, "reward_std": 2.0, "frac_reward_zero_std": 1.0})["std"] == 0.0
    assert readings({**line, "reward_std": 2.0, "frac_reward_zero_std": 0.5})["std"] == 2.0
    found, _, _ = run(RLOOConfig(), {"reward_std": 0.0})
    assert found == [{"alarm/reward_std": 1.0}]


def test_what_is_no_number_raises_nothing_and_evaluations_change_nothing():
    assert run(PPOConfig(), dict.fromkeys(FINE, math.nan))[0] == [{}]
    alarms = alarms_of(PPOConfig())
    assert alarms.update(0, {"eval/scores": 1.0, "eval_objective/kl": -9.0}) == ({}, [])


def test_a_resume_finds_the_alarms_of_a_run_that_never_stopped():
    config = PPOConfig(early_stop=("kl_above", "eos_share"))
    updates = [{}] * 4 + [BAD["kl_below"]] + [RUNNING["eos_share"]] * 4 + [BAD["reward_std"]] * 2 + [{}]
    updates = [{**update, "objective/kl": update.get("objective/kl", 1 / 3)} for update in updates]
    whole, _, at_end = run(config, *updates)
    assert at_end.stop_step == 8 and sum(map(bool, whole)) > 4
    for cut in range(len(updates)):
        rows = [{"step": i, **FINE, **a, **b} for i, (a, b) in enumerate(zip(updates[:cut], whole), 1)]
        again = alarms_of(config, [with_floats(json.loads(json_text(row))) for row in rows])
        rest = [again.update(step, {**FINE, **updates[step - 1]})[0] for step in range(cut + 1, len(updates) + 1)]
        assert rest == whole[cut:] and again.stop_step == at_end.stop_step and again.raised == at_end.raised
