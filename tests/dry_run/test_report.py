"""What --dry_run counts before anything is loaded."""

import dataclasses

import jax
import pytest

from rlhf_jax import data, models
from rlhf_jax.config import PPOConfig, RLOOConfig, stages_of
from rlhf_jax.config import files as config_files
from rlhf_jax.config.check import check
from rlhf_jax.dry_run import memory, report
from rlhf_jax.models.io import hf
from rlhf_jax.parallel import sharding
from rlhf_jax.stages import disk

SCRATCH = {"scratch_model": "1x16x2", "tokenizer_name_or_path": "synthetic", "dataset_name": "synthetic"}
SCRATCH |= {"sft_model_path": None, "reward_model_path": None, "run_dir": "nowhere/run", "dry_run": True}
SCRATCH |= {"query_length": 32, "response_length": 8, "batch_size": 16, "micro_batch_size": 8}
ROLES = [
    (RLOOConfig(**SCRATCH), "policy reference"),
    (RLOOConfig(**SCRATCH, beta=0.0), "policy"),
    (PPOConfig(**SCRATCH), "policy value reference"),
    (PPOConfig(**SCRATCH, value_model="shared_backbone"), "policy reference"),
]


@pytest.mark.parametrize(("config", "roles"), ROLES, ids=[f"{type(c).__name__}: {roles}" for c, roles in ROLES])
def test_a_dry_run_counts_the_models_that_the_stage_holds(config, roles):
    check(config)
    counted = disk.parameters(memory.abstract_stage(config, sharding.make_mesh()))
    assert [role for role, *_ in counted] == roles.split()


def test_a_dry_run_counts_every_reward_model(tmp_path):
    model, params = tiny_reward_model()
    hf.save(tmp_path / "rm", model, params, kind="scalar")
    data.save_tokenizer(data.load_tokenizer("synthetic"), str(tmp_path / "rm"))
    rewards = {"reward_model_path": str(tmp_path / "rm"), "more_reward_models": (str(tmp_path / "rm"),)}
    rloo, ppo = (
        disk.parameters(memory.abstract_stage(config(**{**SCRATCH, **rewards}), sharding.make_mesh()))
        for config in (RLOOConfig, PPOConfig)
    )
    count = sum(x.size for x in jax.tree.leaves(params))
    assert rloo[2:] == [("reward", count, False), ("reward 2", count, False)]
    assert ppo[1] == ("value", count, True)


def tiny_reward_model():
    model = models.custom_shape("1x16x2", 128)
    return model, model.init(jax.random.key(0), heads=("scalar",))


def test_a_dry_run_of_the_rloo_quickstart_waits_for_the_stages_before_it(capsys, tmp_path):
    for stage in stages_of(
        dataclasses.replace(config_files.load_config("quickstart_rloo"), run_dir=str(tmp_path))
    ).values():
        report.show(stage)
    out = capsys.readouterr().out
    assert "update: 128 episodes = 32 prompts x 4 responses" in out
    assert f"memory: unknown until {tmp_path}/sft/policy exists" in out
