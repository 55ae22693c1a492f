"""An update recomputed is the update of the run; a counterfactual is the run with another option."""

import dataclasses
import json
import math
import pathlib
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from rlhf_jax import train
from rlhf_jax.config import PPOConfig, RLOOConfig
from rlhf_jax.errors import UserError
from rlhf_jax.rerun import replay
from rlhf_jax.rerun.recompute import recomputing
from rlhf_jax.rerun.recorded import RecordedRun, same
from rlhf_jax.rerun.replay import ReplayOptions
from tests.helpers import rerun_cases as cases

SIX_UPDATES = {"total_episodes": 48, "save_steps": 5}
KINDS = {
    "ppo": {"kind": PPOConfig, "value_model": "shared_backbone", "num_ppo_epochs": 2},
    "rloo": {"kind": RLOOConfig},
    "grpo, slots, partial rollouts": {
        "old_logprobs": "sampler",
        "rollout_max_steps": 4,
        "decode_slots": 4,
        "epsilon_high": 0.3,
        "num_iterations": 2,
    },
}


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run_dir = cases.run(folder, **SIX_UPDATES, **KINDS[request.param])
    (folder / "wordiness.py").write_text("def wordiness(**_):\n    raise AssertionError('not called')\n")
    return run_dir


def test_every_update_recomputed_has_the_metrics_of_the_run(run):
    recorded = RecordedRun.open(run)
    with recomputing(recorded, 0) as recomputation:
        for step in range(1, 7):
            opened, line = recomputation.open(step), recorded.metrics[step]
            assert [name for name, value in opened.metrics.items() if not same(line[name], value)] == []
            assert all(name.startswith(("alarm/", "eval")) for name in line if name not in opened.metrics)
            if opened.batch is not None:  # a response has a score
                assert opened.batch.rows.tolist() == recorded.rows[step]["rows"]
        assert recomputation.step == 6


def test_the_rows_are_those_of_the_update_and_sum_to_its_loss(run):
    said, recorded = [], RecordedRun.open(run)
    (update,) = replay.replay(ReplayOptions(run_dir=run, update=4), log=said.append)
    assert "recomputing update 4 of" in said[0] and "bit by bit" in said[1]
    table = pq.read_table(pathlib.Path(run) / "replay" / "4.parquet").to_pylist()
    finished = update.batch.lengths >= 0
    assert len(table) == finished.sum()
    norms = [row["gradient_norm"] for row in table]
    assert norms == sorted(norms, reverse=True)
    by_position = {row["position"]: row for row in table}
    rewards = recorded.rows[4]["rewards"]["wordiness"]
    assert [row["reward/wordiness"] for _, row in sorted(by_position.items())] == [
        reward for reward, present in zip(rewards, finished) if present
    ]
    for row in table:
        assert len(row["tokens"]) == row["length"] == len(row["token_new_logprobs"])
        ratios = np.exp(np.subtract(row["token_new_logprobs"], row["token_logprobs"] or row["token_sampler_logprobs"]))
        np.testing.assert_allclose(row["token_ratio"], ratios, rtol=1e-6)
    norm = math.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in update.batch.gradients.values()))
    assert 0 < norm <= sum(norms) * (1 + 1e-5)
    page = (pathlib.Path(run) / "replay" / "4.html").read_text()
    assert f"{len(table)} rows" in page and "<script" not in page


COUNTERFACTUALS = {"ppo": "cliprange=0.01", "rloo": "beta=0.5", "grpo": "learning_rate=0.01"}


def test_a_counterfactual_is_the_run_resumed_with_that_option(run, tmp_path):
    recorded = RecordedRun.open(run)
    setting = COUNTERFACTUALS[recorded.stage]
    name, _, word = setting.partition("=")
    said = []
    _, other = replay.replay(ReplayOptions(run_dir=run, update=6, set=(setting,)), log=said.append)
    folder = cases.prepare(tmp_path)
    shutil.copytree(run, folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / "6")
    (folder / "run" / "finished.json").unlink()
    config = dataclasses.replace(
        recorded.config,
        run_dir=str(folder / "run"),
        reward_funcs=(f"{folder / 'wordiness.py'}:wordiness",),
        override_resume=True,
        **{name: float(word)},
    )
    train.run(config)
    line = RecordedRun.open(str(folder / "run")).metrics[6]
    assert [key for key, value in other.metrics.items() if not same(line[key], value)] == []
    assert setting in said[-1]
    changed = {key for key, value in other.metrics.items() if not same(recorded.metrics[6][key], value)}
    assert changed, "the option changes something"


def test_a_fixed_kl_coef_is_the_configs_after_a_resume(tmp_path):
    folder = tmp_path / "ppo"
    run = cases.run(folder, **SIX_UPDATES, **KINDS["ppo"], kl_coef=0.1)
    _, other = replay.replay(ReplayOptions(run_dir=run, update=6, set=("kl_coef=0.5",)), log=lambda line: None)
    assert other.metrics["objective/kl_coef"] == 0.5


@pytest.mark.parametrize(
    "setting, said",
    [
        ("temperature=0.5", "temperature may change"),
        ("batch_size=4", "batch_size may change"),
        ("reward_weights=2", "reward_weights may change"),
        ("seed=1", "seed may change"),
        ("lerning_rate=1", "Did you mean learning_rate"),
        ("learning_rate", "write OPTION=VALUE"),
        ("learning_rate=fast", "learning_rate"),
    ],
)
def test_an_option_that_changes_samples_is_refused(tmp_path, setting, said):
    cases.prepare(tmp_path)
    with pytest.raises(UserError, match=said):
        replay.changed_config(cases.config(tmp_path), [setting])


def test_an_update_that_does_not_exist_and_a_stage_without_responses_are_refused(run, golden_sft):
    with pytest.raises(UserError, match="--update 8: .* has the updates 1 to 6"):
        replay.replay(ReplayOptions(run_dir=run, update=8))
    with pytest.raises(UserError, match="is a run of sft, whose updates have no responses"):
        replay.replay(ReplayOptions(run_dir=golden_sft.run_dir))


def test_a_folder_without_rows_calls_the_rewards_and_says_so(tmp_path):
    run = pathlib.Path(cases.run(tmp_path, **SIX_UPDATES))
    (run / "rows.jsonl").unlink()
    said = []
    replay.replay(ReplayOptions(run_dir=str(run), update=6), log=said.append)
    assert "note: rows.jsonl is missing: reward functions are called" in said and "bit by bit" in "".join(said)


def test_lines_that_are_being_written_are_left_out(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    for name in ("metrics.jsonl", "rows.jsonl"):
        with open(folder / name, "a") as file:
            file.write('{"step": 7, "rew')
    recorded = RecordedRun.open(str(folder))
    assert recorded.updates == 6 and list(recorded.rows) == [1, 2, 3, 4, 5, 6]


def test_nothing_is_written_to_the_run_but_the_replay(run):
    before = {path: path.stat().st_mtime_ns for path in pathlib.Path(run).rglob("*") if "replay" not in path.parts}
    replay.replay(ReplayOptions(run_dir=run, update=5), log=lambda line: None)
    after = {path: path.stat().st_mtime_ns for path in pathlib.Path(run).rglob("*") if "replay" not in path.parts}
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed <= {pathlib.Path(run)}
    assert json.loads((pathlib.Path(run) / "finished.json").read_text())["step"] == 6
