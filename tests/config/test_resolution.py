"""Defaults that depend on other options."""

import pytest

from rlhf_jax.config import Pipeline, resolve, stages_of
from rlhf_jax.config import files as config_files


@pytest.mark.parametrize("spec", config_files.shipped_configs())
def test_resolving_twice_changes_nothing(spec):
    config = resolve(config_files.load_config(spec))
    assert resolve(config) == config
    assert config.run_dir and all(stage.run_dir for stage in stages_of(config).values())


def test_a_pipelines_seed_may_be_0():
    assert {stage.seed for stage in stages_of(Pipeline(seed=0)).values()} == {0}


def test_the_home_folder_in_run_dir_is_the_users(monkeypatch):
    monkeypatch.setenv("HOME", "/home/anna")
    stages = stages_of(Pipeline(run_dir="~/runs/x"))
    assert {name: stage.run_dir for name, stage in stages.items()}["ppo"] == "/home/anna/runs/x/ppo"
    assert stages["ppo"].sft_model_path == "/home/anna/runs/x/sft/policy"
    assert resolve(Pipeline(run_dir="~no_such_user/x")).run_dir == "~no_such_user/x"  # refused later, by name
