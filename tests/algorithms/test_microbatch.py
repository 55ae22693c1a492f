"""Micro-batches: split in order, summed exactly."""

import jax
import jax.numpy as jnp
import pytest

from rlhf_jax.algorithms import microbatch


def test_micro_batches_are_rows_in_order_and_sums_are_of_all():
    batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.arange(6)}
    micros = microbatch.split_micro(batch, 2)
    assert micros["x"].shape == (3, 2, 2) and micros["y"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert microbatch.split_micro(batch, None)["y"].shape == microbatch.split_micro(batch, 9)["y"].shape == (1, 6)

    def loss(params, micro, index):
        value = (params * micro["x"]).sum()
        return value, {"value": value, "slot": jnp.where(jnp.arange(3) == index, 1.0, 0.0) * micro["y"].sum()}

    grads, found = microbatch.accumulate_gradients(loss, jnp.float32(2.0), micros)
    assert float(grads) == 66.0 and float(found["value"]) == 132.0 and found["slot"].tolist() == [1.0, 5.0, 9.0]
    whole, _ = microbatch.accumulate_gradients(loss, jnp.float32(2.0), microbatch.split_micro(batch, None))
    assert float(whole) == 66.0
    again = microbatch.sum_over_micro_batches(lambda micro, index: loss(jnp.float32(2.0), micro, index)[1], micros)
    assert jax.tree.map(jnp.array_equal, again, found) == {"value": True, "slot": True}


@pytest.mark.parametrize(
    "rows, group, groups, wanted",
    [(None, 4, 8, None), (8, 4, 8, 2), (12, 4, 8, 1), (2, 4, 8, 1), (64, 4, 6, 2), (24, 4, 6, 6)],
)
def test_chunks_of_groups_hold_at_most_so_many_rows_and_divide_the_batch(rows, group, groups, wanted):
    assert microbatch.groups_per_chunk(rows, group, groups) == wanted


def test_dropout_keys_belong_to_rows():
    keys = microbatch.row_keys(jax.random.key(1), 4)
    assert jnp.array_equal(
        jax.random.key_data(keys)[:2], jax.random.key_data(microbatch.row_keys(jax.random.key(1), 2))
    )
    assert len({tuple(k) for k in jax.random.key_data(keys).tolist()}) == 4
