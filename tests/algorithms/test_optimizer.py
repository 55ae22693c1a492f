"""AdamW as torch has it, at the learning rates of transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from transformers import get_scheduler

from rlhf_jax.algorithms import optimizer
from rlhf_jax.config import PPOConfig, RLOOConfig
from tests.helpers.optional import optional

torch = optional("torch")


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
def test_the_learning_rate_is_that_of_transformers(name, warmup):
    steps, peak = 11, 3e-3
    weight = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([weight], lr=peak)
    theirs_name = "constant_with_warmup" if name == "constant" else name
    scheduler = get_scheduler(theirs_name, sgd, num_warmup_steps=warmup, num_training_steps=steps)
    wanted = []
    for _ in range(steps):
        wanted.append(scheduler.get_last_lr()[0])
        sgd.step()
        scheduler.step()
    config = PPOConfig(learning_rate=peak, lr_scheduler_type=name, warmup_steps=warmup)
    ours = [float(optimizer.learning_rate(config, jnp.int32(step), steps)) for step in range(steps)]
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("decayed", ["matrices", "all"])
@pytest.mark.parametrize("norm", [None, 0.5])
def test_steps_are_those_of_torchs_adamw(decayed, norm):
    """Ten steps with decay and clipping; norms and biases decay only where all do."""
    rng = np.random.default_rng(0)
    start = {"dense": {"kernel": rng.normal(size=(3, 4)), "bias": rng.normal(size=4)}, "norm": {"scale": np.ones(4)}}
    grads = [jax.tree.map(lambda x: rng.normal(size=x.shape), start) for _ in range(10)]
    config = PPOConfig(
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_epsilon=1e-6,
        weight_decay=0.1,
        weight_decay_on=decayed,
        max_grad_norm=norm,
        learning_rate=1e-2,
    )
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), start)
    adamw = optimizer.make_optimizer(dataclasses.replace(config, lr_scheduler_type="constant"), 10)
    state = adamw.init(params)
    leaves = {k: torch.nn.Parameter(torch.tensor(x)) for k, x in jax.tree_util.tree_leaves_with_path(start)}

    def decays(path):
        return decayed == "all" or path[-1].key == "kernel"

    kinds = [
        {"params": [x for k, x in leaves.items() if decays(k) == own], "weight_decay": 0.1 * own} for own in (1, 0)
    ]
    theirs = torch.optim.AdamW([k for k in kinds if k["params"]], lr=1e-2, betas=(0.8, 0.95), eps=1e-6)
    for grad in grads:
        own = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), grad)
        params, state = optimizer.apply_gradients(adamw, params, state, own, jnp.int32(0))
        for path, x in jax.tree_util.tree_leaves_with_path(grad):
            leaves[path].grad = torch.tensor(x)
        torch.nn.utils.clip_grad_norm_(leaves.values(), norm or 1e9)
        theirs.step()
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        np.testing.assert_allclose(x, leaves[path].detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_first_moment_in_bfloat16_is_rounded_only_where_it_is_kept():
    grads = [jnp.float32([0.1, -3.0, 7e-4]), jnp.float32([0.2, 1.0, -1e-4])]
    whole, half = optimizer.scale_by_adam(0.9, 0.999, 1e-8), optimizer.scale_by_adam(0.9, 0.999, 1e-8, jnp.bfloat16)
    states = [adam.init(grads[0]) for adam in (whole, half)]
    assert states[1].mu.dtype == jnp.bfloat16 and states[1].nu.dtype == jnp.float32
    first = [adam.update(grads[0], state) for adam, state in zip((whole, half), states)]
    np.testing.assert_array_equal(first[0][0], first[1][0])
    second = [adam.update(grads[1], state)[0] for adam, (_, state) in zip((whole, half), first)]
    assert 0 < np.abs(second[0] - second[1]).max() < 2**-7


def test_the_schedule_counts_updates_or_optimizer_steps():
    common = {"learning_rate": 1.0, "lr_scheduler_type": "linear", "warmup_steps": 0}
    by_update = optimizer.make_schedule(PPOConfig(**common), 2, 4)
    assert [float(by_update(jnp.int32(step))) for step in range(8)] == [1.0] * 4 + [0.5] * 4
    by_step = optimizer.make_schedule(RLOOConfig(**common), 2, 4)
    assert [float(by_step(jnp.int32(step))) for step in range(8)] == [1 - step / 8 for step in range(8)]


def test_a_users_transformation_is_used_as_it_is():
    params, grads = {"w": jnp.arange(3.0)}, {"w": jnp.ones(3)}
    given = optimizer.user_optimizer(optax.sgd(0.25))
    after, _ = optimizer.apply_gradients(given, params, given.init(params), grads, jnp.int32(7))
    np.testing.assert_array_equal(after["w"], [-0.25, 0.75, 1.75])
    assert given.learning_rate is None and not given.keeps_finite
