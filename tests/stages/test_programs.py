"""What compiles a stage's programs again, and what is an argument of them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import train
from rlhf_jax.config import GRPOConfig, PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf_jax.dry_run import memory
from rlhf_jax.parallel import sharding
from rlhf_jax.stages import open_stage, programs
from rlhf_jax.types import Rollout
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


def test_a_rows_hash_is_of_its_tokens_and_not_of_their_padding():
    def hashes(prompts, responses, c, t, filler=0):
        p = np.array([[filler] * (c - len(row)) + row for row in prompts], np.int32)
        r = np.array([row[:t] + [filler] * (t - len(row)) for row in responses], np.int32)
        rollout = Rollout(
            prompt_tokens=jnp.array(p),
            prompt_lengths=jnp.array([len(row) for row in prompts]),
            response=jnp.array(r),
            lengths=jnp.array([len(row) or -1 for row in responses]),
            ended=jnp.zeros(len(responses), bool),
            logprobs=jnp.zeros((len(responses), t)),
            response_mask=jnp.ones((len(responses), t), bool),
        )
        record = programs._row_record(rollout, jnp.array([[1.0, 2.0]] * len(responses)))
        assert [x.tolist() for x in record["rewards"]] == [[1.0] * len(responses), [2.0] * len(responses)]
        return np.asarray(record["tokens"]).tolist()

    prompts, responses = [[5, 7], [5, 7], [7, 5], [5, 7], [5]], [[1, 2], [2, 1], [1, 2], [], [7, 1, 2]]
    expected = hashes(prompts, responses, 3, 4)
    assert expected[3] == 0 and len(set(expected)) == 5
    assert hashes(prompts, responses, 6, 9, filler=3) == expected
    # By hand: sum of (token + 1) times powers of two odd numbers, the prompt's counted from its end.
    before, after = 2654435761, 2246822519
    by_hand = 6 * before**2 + 8 * before + 2 * after + 3 * after**2
    assert expected[0] == by_hand % 2**32
