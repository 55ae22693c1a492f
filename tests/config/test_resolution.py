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
