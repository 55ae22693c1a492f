"""Four (forced host) devices share the work of judging and learning: each computes a quarter of what one would."""

import json

import pytest

from tests.helpers.children import child, last_line

ROWS, COLUMNS, T = 32, 48, 16


def flops_of(algo: str, devices: int) -> dict[str, float]:
    """FLOPs of a device in the programs of an update, by XLA's count (one turn of each loop)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rlhf_jax.algorithms import actor_critic, microbatch, ppo, rloo
    from rlhf_jax.config import PPOConfig, RLOOConfig
    from rlhf_jax.models import custom_shape
    from rlhf_jax.parallel import sharding
    from rlhf_jax.types import Rollout, TrainState

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
        config, nets = PPOConfig(num_ppo_epochs=1, **options), actor_critic.Networks(model, model, model, mesh)
    else:
        del params["value"]
        config, nets = RLOOConfig(num_generations=2, **options), actor_critic.Networks(model, model, None, mesh)
    optimizer = microbatch.make_optimizer(config)
    zero = jnp.uint32(0)
    state = TrainState(params, optimizer.init(params), jnp.int32(0), jnp.int32(0), zero, jnp.float32(0), zero)
    state = sharding.place(state, sharding.replicated(mesh))

    def judge(state, rollout, scores):
        if algo == "ppo":
            given = (state.params, state.params["policy"], rollout, scores, state.kl_coef, config, 0)
            return ppo.make_experience(nets, *given)[0]
        given = (state.params, state.params["policy"], rollout, scores, scores < 9, config, 0)
        return rloo.make_experience(nets, *given)[0]

    def learn(state, experience):
        if algo == "ppo":
            order = ppo.permutations(jax.random.key(0), 1, ROWS)
            return ppo.update(nets, optimizer, state, experience, order, jnp.float32(1e-3), config)
        order = rloo.permutations(jax.random.key(0), 1, ROWS // 2, "once")
        return rloo.update(nets, optimizer, state, experience, order, jnp.full(1, 1e-3), config)

    judging = jax.jit(judge).lower(state, rollout, scores).compile()
    learning = jax.jit(learn).lower(state, judging(state, rollout, scores)).compile()
    return {name: program.cost_analysis()["flops"] for name, program in (("judge", judging), ("learn", learning))}


@pytest.fixture(scope="module")
def counted():
    return last_line(child("tests.parallel.test_devices_work", devices=4))


@pytest.mark.parametrize("program", ["judge", "learn"])
@pytest.mark.parametrize("algo", ["ppo", "rloo"])
def test_each_of_four_devices_does_a_quarter_of_the_work(counted, algo, program):
    share = counted[algo]["4"][program] / counted[algo]["1"][program]
    assert 0.24 < share < 0.3


if __name__ == "__main__":
    print(json.dumps({algo: {str(n): flops_of(algo, n) for n in (1, 4)} for algo in ("ppo", "rloo")}))
