"""What compiles a stage's programs again, and what is an argument of them."""

import dataclasses

import numpy as np
import pytest

from rlhf_jax import train
from rlhf_jax.config import GRPOConfig, PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf_jax.dry_run import memory
from rlhf_jax.parallel import sharding
from rlhf_jax.stages import open_stage
from tests.helpers import runs

TINY = {"scratch_model": "1x16x2", "tokenizer_name_or_path": "synthetic", "dataset_name": "synthetic"}
TINY |= {"batch_size": 8, "warmup_steps": 2}
POLICY = {**TINY, "sft_model_path": None, "reward_model_path": None, "query_length": 32, "response_length": 4}
STAGES = {
    "sft": SFTConfig(**TINY, model_name_or_path=None, max_steps=9, lr_scheduler_type="cosine"),
    "reward": RewardConfig(**TINY, model_name_or_path=None, max_steps=9),
    "ppo": PPOConfig(**POLICY),
    "ppo with a rate for the critic": PPOConfig(**POLICY, value_learning_rate=1e-4),
    "rloo": RLOOConfig(**POLICY, num_generations=2),
    "grpo": GRPOConfig(**POLICY, num_generations=2),
}


def lowered(config):
    """The text of each program of an update."""
    texts = {}

    def build(name, program, *args, resident=(), **arguments):
        traced = program.trace(*args, **arguments)
        texts[name] = traced.lower().as_text()
        return traced.out_info

    memory.abstract_stage(config, sharding.make_mesh(1, 1, 1)).trace_programs(build)
    return texts


@pytest.mark.parametrize("name", STAGES)
def test_another_learning_rate_is_the_same_program(name):
    config = STAGES[name]
    rates = {"learning_rate": 0.3} | ({"value_learning_rate": 0.2} if config.value_learning_rate else {})
    assert lowered(config) == lowered(dataclasses.replace(config, **rates))


def test_another_warm_up_is_another_program():
    config = STAGES["sft"]
    assert lowered(config) != lowered(dataclasses.replace(config, warmup_steps=3))


def test_a_sweep_of_learning_rates_compiles_in_its_first_run_alone(tmp_path, missed):
    # New numbers each time: those of an earlier session would be in its cache.
    for rate in np.random.default_rng().uniform(1e-4, 1e-3, 2):
        missed.clear()
        options = {**runs.RLOO_OPTIONS, "num_generations": 2, "learning_rate": float(rate)}
        run_dir = tmp_path / str(rate)
        result = train.run(RLOOConfig(run_dir=str(run_dir), **options), reward_funcs=[runs.wordiness])
        assert result.metrics["learning_rate"] == pytest.approx(rate / 2, rel=1e-6)
    assert missed == []


def test_an_evaluation_at_another_temperature_compiles_nothing():
    options = {**runs.RLOO_OPTIONS, "num_generations": 2, "temperature": 0.7}
    stage = open_stage(RLOOConfig(run_dir="", **options), reward_funcs=[runs.wordiness])
    prompts = stage.train_data.batch(0, 0, 4)
    one, other, again = (runs.rollout_of(stage, prompts, temperature=t) for t in (None, 0.01, 0.7))
    assert runs.compilations(stage, ("generate",)) == {"generate": 1}
    assert not np.array_equal(one.response, other.response)
    np.testing.assert_array_equal(one.logprobs, again.logprobs)
    runs.rollout_of(stage, prompts, temperature=0.0)
    assert runs.compilations(stage, ("generate",)) == {"generate": 2}  # greedy decoding draws nothing
