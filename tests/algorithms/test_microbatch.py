"""What the trainers share: schedules as transformers', cuts into micro-batches, sums over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import get_scheduler

from rlhf_jax.algorithms import microbatch
from rlhf_jax.config import PPOConfig
from tests.helpers.optional import optional

torch = optional("torch")


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
def test_the_learning_rate_is_that_of_transformers(name, warmup):
    steps, peak = 11, 3e-3
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=peak)
    theirs_name = "constant_with_warmup" if name == "constant" else name
    scheduler = get_scheduler(theirs_name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    wanted = []
    for _ in range(steps):
        wanted.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    config = PPOConfig(learning_rate=peak, lr_scheduler_type=name, warmup_steps=warmup)
    ours = [float(microbatch.learning_rate(config, jnp.int32(step), steps)) for step in range(steps)]
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
    )
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), start)
    optimizer = microbatch.make_optimizer(config)
    state = optimizer.init(params)
    leaves = {k: torch.nn.Parameter(torch.tensor(x)) for k, x in jax.tree_util.tree_leaves_with_path(start)}

    def decays(path):
        return decayed == "all" or path[-1].key == "kernel"

    kinds = [
        {"params": [x for k, x in leaves.items() if decays(k) == own], "weight_decay": 0.1 * own} for own in (1, 0)
    ]
    theirs = torch.optim.AdamW([k for k in kinds if k["params"]], lr=1e-2, betas=(0.8, 0.95), eps=1e-6)
    for grad in grads:
        own = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), grad)
        params, state, found = microbatch.apply_gradients(optimizer, params, state, own, jnp.float32(1e-2))
        for path, x in jax.tree_util.tree_leaves_with_path(grad):
            leaves[path].grad = torch.tensor(x)
        total = torch.nn.utils.clip_grad_norm_(leaves.values(), norm or 1e9)
        assert float(found) == pytest.approx(float(total), rel=1e-5)  # before clipping
        theirs.step()
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        np.testing.assert_allclose(x, leaves[path].detach().numpy(), rtol=1e-5, atol=1e-6)


def test_micro_batches_are_rows_in_order_and_sums_are_of_all():
    batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.arange(6)}
    micros = microbatch.split_micro(batch, 2)
    assert micros["x"].shape == (3, 2, 2) and micros["y"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert microbatch.split_micro(batch, None)["y"].shape == microbatch.split_micro(batch, 9)["y"].shape == (1, 6)

    def loss(params, micro, index):
        value = (params * micro["x"]).sum()
        return value, {"value": value, "slot": jnp.where(jnp.arange(3) == index, 1.0, 0.0) * micro["y"].sum()}

    grads, found = microbatch.accumulate(loss, jnp.float32(2.0), micros)
    assert float(grads) == 66.0 and float(found["value"]) == 132.0 and found["slot"].tolist() == [1.0, 5.0, 9.0]
    whole, _ = microbatch.accumulate(loss, jnp.float32(2.0), microbatch.split_micro(batch, None))
    assert float(whole) == 66.0
    again = microbatch.total(lambda micro, index: loss(jnp.float32(2.0), micro, index)[1], micros)
    assert jax.tree.map(jnp.array_equal, again, found) == {"value": True, "slot": True}


@pytest.mark.parametrize(
    "rows, group, groups, wanted",
    [(None, 4, 8, None), (8, 4, 8, 2), (12, 4, 8, 1), (2, 4, 8, 1), (64, 4, 6, 2), (24, 4, 6, 6)],
)
def test_groups_at_once_hold_at_most_so_many_rows_and_divide_the_batch(rows, group, groups, wanted):
    assert microbatch.groups_at_once(rows, group, groups) == wanted


def test_the_variance_of_one_ratio_is_nan_to_trl_and_0_to_us():
    one, three = jnp.array([1.5]), jnp.array([1.0, 2.0, 4.0])
    assert np.isnan(microbatch.ratio_variance(one, "trl")) and microbatch.ratio_variance(one, "correct") == 0
    for metrics in ("trl", "correct"):
        assert float(microbatch.ratio_variance(three, metrics)) == pytest.approx(7 / 3)


def test_dropout_keys_belong_to_rows():
    keys = microbatch.row_keys(jax.random.key(1), 4)
    assert jnp.array_equal(
        jax.random.key_data(keys)[:2], jax.random.key_data(microbatch.row_keys(jax.random.key(1), 2))
    )
    assert len({tuple(k) for k in jax.random.key_data(keys).tolist()}) == 4


def test_a_first_moment_in_bfloat16_is_rounded_only_where_it_is_kept():
    grads = [jnp.float32([0.1, -3.0, 7e-4]), jnp.float32([0.2, 1.0, -1e-4])]
    whole, half = microbatch.scale_by_adam(0.9, 0.999, 1e-8), microbatch.scale_by_adam(0.9, 0.999, 1e-8, jnp.bfloat16)
    states = [optimizer.init(grads[0]) for optimizer in (whole, half)]
    assert states[1].mu.dtype == jnp.bfloat16 and states[1].nu.dtype == jnp.float32
    first = [optimizer.update(grads[0], state) for optimizer, state in zip((whole, half), states)]
    np.testing.assert_array_equal(first[0][0], first[1][0])
    second = [optimizer.update(grads[1], state)[0] for optimizer, (_, state) in zip((whole, half), first)]
    assert 0 < np.abs(second[0] - second[1]).max() < 2**-7
