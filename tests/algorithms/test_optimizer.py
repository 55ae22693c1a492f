"""AdamW as torch has it, at the learning rates of transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from transformers import get_scheduler

from rlhf_jax.algorithms import optimizer
from rlhf_jax.config import PPOConfig, RLOOConfig, SFTConfig
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


SCHEDULES = [
    ("constant_with_warmup", None),
    ("cosine", {"num_cycles": 1.25}),
    ("cosine_with_min_lr", {"min_lr": 1e-3}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 1.0}),
    ("warmup_stable_decay", {"num_decay_steps": 5}),
    ("warmup_stable_decay", {"num_decay_steps": 30, "min_lr_ratio": 0.2}),  # the decay begins before the run
    ("warmup_stable_decay", {"num_decay_steps": 4, "num_stable_steps": 2, "min_lr_ratio": 0.1, "num_cycles": 0.7}),
    ("warmup_stable_decay", {"num_decay_steps": 6, "warmup_type": "cosine", "decay_type": "linear"}),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 6, "warmup_type": "1-sqrt", "decay_type": "1-sqrt", "min_lr_ratio": 0.05},
    ),
]


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize(("name", "kwargs"), SCHEDULES)
def test_schedules_with_parameters_are_those_of_transformers(name, kwargs, warmup):
    steps, peak = 17, 3e-3
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(name, sgd, warmup, steps, scheduler_specific_kwargs=kwargs)
    wanted = []
    for _ in range(steps):
        wanted.append(scheduler.get_last_lr()[0])
        sgd.step()
        scheduler.step()
    config = SFTConfig(learning_rate=peak, lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, warmup_steps=warmup)
    schedule = optimizer.make_schedule(config, steps)
    np.testing.assert_allclose([float(schedule(jnp.int32(n))) for n in range(steps)], wanted, rtol=0, atol=1e-6 * peak)
    assert len(set(wanted)) > 1 or (name == "constant_with_warmup" and warmup == 0)


ACTOR_CRITIC = {
    "separate": {
        "policy": {"backbone": {"kernel": 1.0}},
        "value": {"backbone": {"kernel": 2.0}, "score": {"kernel": 3.0}},
    },
    "shared_backbone": {"policy": {"backbone": {"kernel": 1.0}, "score": {"kernel": 3.0}}},
}


def actor_critic(kind):
    return jax.tree.map(lambda x: x + jnp.arange(3, dtype=jnp.float32), ACTOR_CRITIC[kind])


def steps_of(config, params, count, steps_per_update=1):
    """(params, state) after each of `count` steps by the gradients 1 of all params."""
    adamw = optimizer.make_optimizer(config, 10, steps_per_update)
    state, found = adamw.init(params), []
    take = jax.jit(
        lambda params, state, step: optimizer.apply_gradients(
            adamw, params, state, jax.tree.map(jnp.ones_like, params), step
        )
    )
    for step in range(count):
        params, state = take(params, state, jnp.int32(step))
        found.append((params, state))
    return found


@pytest.mark.parametrize("kind", ACTOR_CRITIC)
def test_the_critic_alone_has_the_value_learning_rate_on_the_same_schedule(kind):
    config = PPOConfig(
        learning_rate=1e-3,
        warmup_steps=2,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": 1e-4},
        max_grad_norm=0.5,
        weight_decay=0.1,
    )
    own = dataclasses.replace(config, value_learning_rate=4e-3)
    made = optimizer.make_optimizer(own, 10, 2)
    for step in range(20):
        policy, critic = made.learning_rate(jnp.int32(step)), made.value_learning_rate(jnp.int32(step))
        np.testing.assert_allclose(critic, 4 * policy, rtol=1e-6)
    assert optimizer.make_optimizer(config, 10).value_learning_rate is None
    params = actor_critic(kind)
    plain, scaled = steps_of(config, params, 3)[-1][0], steps_of(own, params, 3)[-1][0]
    jax.tree.map(np.testing.assert_array_equal, scaled["policy"]["backbone"], plain["policy"]["backbone"])
    critic = (lambda tree: tree["value"]) if kind == "separate" else (lambda tree: tree["policy"]["score"])
    for before, one, four in zip(*(jax.tree.leaves(critic(tree)) for tree in (params, plain, scaled)), strict=True):
        np.testing.assert_allclose((four - before) / (one - before), 4, rtol=1e-2)
    same = steps_of(dataclasses.replace(config, value_learning_rate=1e-3), params, 3)[-1][0]
    jax.tree.map(np.testing.assert_array_equal, same, plain)


@pytest.mark.parametrize("kind", ACTOR_CRITIC)
def test_after_the_critics_warm_up_the_policys_adam_begins_as_if_new(kind):
    """Its bias correction too: without it the first steps would be three times as large."""
    config = PPOConfig(
        learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.1, weight_decay_on="all", max_grad_norm=1.0
    )
    warm = dataclasses.replace(config, critic_warmup_steps=2)
    params = actor_critic(kind)
    plain, found = steps_of(config, params, 6), steps_of(warm, params, 6, steps_per_update=2)
    backbone = [jax.tree.leaves(tree["policy"]["backbone"])[0] for tree, _ in found]
    for x in backbone[:4]:
        np.testing.assert_array_equal(x, params["policy"]["backbone"]["kernel"])
    for step in (0, 1):
        np.testing.assert_array_equal(backbone[4 + step], plain[step][0]["policy"]["backbone"]["kernel"])
    score = (lambda tree: tree["value"]["score"]) if kind == "separate" else (lambda tree: tree["policy"]["score"])
    for (ours, _), (theirs, _) in zip(found, plain, strict=True):
        jax.tree.map(np.testing.assert_array_equal, score(ours), score(theirs))
    policy = [jax.tree.leaves(state[0][1].inner_states["policy"]) for _, state in found]
    assert all(not x.any() for leaves in policy[:4] for x in leaves) and all(x.any() for x in policy[4])


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
