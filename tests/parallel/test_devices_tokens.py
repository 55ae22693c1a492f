"""Micro-batches of tokens on eight (forced host) devices: the numbers of one device, and an eighth of its work."""

import json

import pytest

from tests.helpers.children import child, last_line

ROWS, COLUMNS, T = 32, 16, 16


def update_on(algo: str, shape: tuple[int, int, int]) -> dict:
    """Gradients of an update, log-probabilities of its experience, and the FLOPs of a device, by XLA's count."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from rlhf_jax.algorithms import microbatch, ppo, rloo
    from rlhf_jax.config import PPOConfig, RLOOConfig
    from rlhf_jax.models import custom_shape
    from rlhf_jax.parallel import sharding
    from rlhf_jax.types import Rollout, TrainState
    from tests.helpers.algorithms import at_rates, models_of, scored, with_params
    from tests.helpers.arrays import flat

    microbatch.RESPONSE_WIDTHS = (2, 1)
    data, fsdp, tensor = shape
    mesh = sharding.make_mesh(*shape, devices=jax.devices()[: data * fsdp * tensor])
    model, group = custom_shape("1x32x4", 61, 128), 1 if algo == "ppo" else 2
    # 32 tokens, or 48 of a prompt and two responses, for each of 8 devices.
    options = {"batch_size": ROWS, "response_length": T, "micro_batch_tokens": 8 * (COLUMNS + group * T)}
    params = {"policy": model.init(jax.random.key(0)), "value": model.init(jax.random.key(1), heads=("scalar",))}
    rng = np.random.default_rng(0)
    rollout = Rollout(
        prompt_tokens=np.repeat(rng.integers(0, 61, (ROWS // group, COLUMNS)), group, axis=0).astype(np.int32),
        prompt_lengths=np.repeat(rng.integers(1, COLUMNS + 1, ROWS // group), group).astype(np.int32),
        response=rng.integers(0, 61, (ROWS, T)).astype(np.int32),
        lengths=np.minimum(rng.geometric(0.2, ROWS) - 1, T).astype(np.int32),
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
    keep = optax.GradientTransformation(lambda params: params, lambda grads, _, params: (grads, grads))
    optimizer = at_rates(keep, jnp.float32(1.0))
    zero = jnp.uint32(0)
    state = TrainState(params, params, jnp.int32(0), jnp.int32(0), zero, jnp.float32(0), zero)
    state = sharding.place(state, sharding.replicated(mesh))

    def run(state, rollout, scores):
        whole = with_params(models, state.params, state.params["policy"])
        batch = scored(rollout, scores, scores < 9, eos_id=0, group_size=group)
        made, _ = algorithm.make_experience(whole, batch, config=config, kl_coef=state.kl_coef)
        options = {"config": config, "optimizer": optimizer, "key": jax.random.key(0)}
        after, metrics = algorithm.update(models, state, made, **options)
        return after.opt_state, made.logprobs, metrics["val/ratio"]

    program = jax.jit(run).lower(state, rollout, scores).compile()
    gradient, logprobs, ratio = sharding.fetch(program(state, rollout, scores))
    return {
        "gradient": flat(gradient)[::7].tolist(),
        "logprobs": np.ravel(logprobs).tolist(),
        "ratio": float(ratio),
        "flops": program.cost_analysis()["flops"],
    }


@pytest.fixture(scope="module")
def found():
    return last_line(child("tests.parallel.test_devices_tokens", devices=8))


@pytest.mark.parametrize("mesh", ["data", "mixed"])
@pytest.mark.parametrize("algo", ["ppo", "rloo"])
def test_an_update_by_tokens_is_that_of_one_device(found, algo, mesh):
    import numpy as np

    one, many = found[f"{algo} one"], found[f"{algo} {mesh}"]
    for name in ("gradient", "logprobs", "ratio"):
        a, b = np.array(many[name]), np.array(one[name])
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b), name


@pytest.mark.parametrize("algo", ["ppo", "rloo"])
def test_each_device_computes_its_part_of_each_micro_batch(found, algo):
    assert found[f"{algo} data"]["flops"] < 0.2 * found[f"{algo} one"]["flops"]


if __name__ == "__main__":
    meshes = {"one": (1, 1, 1), "data": (8, 1, 1), "mixed": (2, 2, 2)}
    print(
        json.dumps(
            {f"{algo} {name}": update_on(algo, mesh) for algo in ("ppo", "rloo") for name, mesh in meshes.items()}
        )
    )
