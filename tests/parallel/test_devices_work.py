"""Four (forced host) devices share the work of experience and update: each computes a quarter of what one would."""

import dataclasses
import json

import pytest

from tests.helpers.children import child, last_line

ROWS, COLUMNS, T = 32, 48, 16


def flops_of(algo: str, devices: int) -> dict[str, float]:
    """FLOPs of a device in the programs of an update, by XLA's count (one turn of each loop)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rlhf_jax.algorithms import ppo, rloo
    from rlhf_jax.algorithms.optimizer import make_optimizer
    from rlhf_jax.config import PPOConfig, RLOOConfig
    from rlhf_jax.models import custom_shape
    from rlhf_jax.parallel import sharding
    from rlhf_jax.types import Rollout, TrainState
    from tests.helpers.algorithms import models_of, scored, with_params

    mesh = sharding.make_mesh(devices, 1, 1, devices=jax.devices()[:devices])
    model, options = custom_shape("2x32x4", 61, 128), {"batch_size": ROWS, "response_length": T}
    options |= {"micro_batch_size": 16, "length_buckets": (24, COLUMNS)}
    params = {"policy": model.init(jax.random.key(0)), "value": model.init(jax.random.key(1), heads=("scalar",))}
    rng, group = np.random.default_rng(0), 1 if algo == "ppo" else 2
    lengths = np.repeat(rng.integers(4, COLUMNS, ROWS // group), group).astype(np.int32)
    rollout = Rollout(
        prompt_tokens=np.repeat(rng.integers(0, 61, (ROWS // group, COLUMNS)), group, axis=0).astype(np.int32),
        prompt_lengths=lengths,
        response=rng.integers(0, 61, (ROWS, T)).astype(np.int32),
        lengths=np.full(ROWS, T, np.int32),
        ended=np.ones(ROWS, bool),
        logprobs=np.zeros((ROWS, T), np.float32),
        response_mask=np.ones((ROWS, T), bool),
    )
    rollout, scores = sharding.shard_batch((rollout, rng.normal(size=ROWS).astype(np.float32)), mesh)
    if algo == "ppo":
        config, models = PPOConfig(num_ppo_epochs=1, **options), models_of(model, model, model, mesh=mesh)
    else:
        del params["value"]
        config, models = RLOOConfig(num_generations=2, **options), models_of(model, model, mesh=mesh)
    algorithm = {"ppo": ppo, "rloo": rloo}[algo]
    optimizer = make_optimizer(dataclasses.replace(config, learning_rate=1e-3, lr_scheduler_type="constant"), 1)
    zero = jnp.uint32(0)
    state = TrainState(params, optimizer.init(params), jnp.int32(0), jnp.int32(0), zero, jnp.float32(0), zero)
    state = sharding.place(state, sharding.replicated(mesh))

    def experience_of(state, rollout, scores):
        whole = with_params(models, state.params, state.params["policy"])
        batch = scored(rollout, scores, scores < 9, eos_id=0, group_size=group)
        return algorithm.make_experience(whole, batch, config=config, kl_coef=state.kl_coef)[0]

    def update(state, experience):
        return algorithm.update(models, state, experience, config=config, optimizer=optimizer, key=jax.random.key(0))

    experience = jax.jit(experience_of).lower(state, rollout, scores).compile()
    updating = jax.jit(update).lower(state, experience(state, rollout, scores)).compile()
    programs = {"experience": experience, "update": updating}
    return {name: program.cost_analysis()["flops"] for name, program in programs.items()}


@pytest.fixture(scope="module")
def counted():
    return last_line(child("tests.parallel.test_devices_work", devices=4))


@pytest.mark.parametrize("program", ["experience", "update"])
@pytest.mark.parametrize("algo", ["ppo", "rloo"])
def test_each_of_four_devices_does_a_quarter_of_the_work(counted, algo, program):
    share = counted[algo]["4"][program] / counted[algo]["1"][program]
    assert 0.24 < share < 0.3


if __name__ == "__main__":
    print(json.dumps({algo: {str(n): flops_of(algo, n) for n in (1, 4)} for algo in ("ppo", "rloo")}))
