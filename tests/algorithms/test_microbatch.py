"""Micro-batches: split in order, summed exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.algorithms import microbatch
from rlhf_jax.config import PPOConfig, RLOOConfig
from tests.helpers.arrays import normal


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


# --- micro-batches of prompts of similar length


def test_widths_are_those_of_the_config_or_half_three_quarters_and_all():
    assert microbatch.prompt_widths(PPOConfig(), 512) == (256, 384, 512)
    assert microbatch.prompt_widths(PPOConfig(), 300) == (152, 232, 300)
    assert microbatch.prompt_widths(PPOConfig(), 255) == (255,)
    assert microbatch.prompt_widths(PPOConfig(length_buckets=(8, 16, 64)), 20) == (8, 16, 20)
    chosen = microbatch.narrowest_width(jnp.array([[1, 8], [9, 3], [16, 17], [20, 20]]), (8, 16, 20))
    np.testing.assert_array_equal(chosen, [0, 1, 2, 2])


def test_rows_are_sorted_unless_it_matters_which_share_a_micro_batch():
    lengths = jnp.array([5, 2, 9, 2])
    np.testing.assert_array_equal(microbatch.sort_by_prompt_length(lengths, PPOConfig()), [1, 3, 0, 2])
    for options in ({"metrics": "trl"}, {"loss_aggregation": "token_mean_micro"}):
        np.testing.assert_array_equal(microbatch.sort_by_prompt_length(lengths, PPOConfig(**options)), np.arange(4))
    np.testing.assert_array_equal(microbatch.sort_by_prompt_length(lengths, RLOOConfig()), [1, 3, 0, 2])


def test_rows_that_go_by_prompt_length_come_back_in_their_order_and_no_wider_than_needed():
    lengths = jnp.array([7, 1, 3, 8, 2, 5])
    columns = jnp.arange(8)[None, :]
    batch = jnp.where(columns >= 8 - lengths[:, None], 10 * jnp.arange(6)[:, None] + columns, 0)
    seen = []

    def function(part):
        seen.append(part.shape)
        return part.sum(axis=1), jnp.full(len(part), part.shape[1])

    def cut(part, width):
        return part[:, -width:]

    run = jax.jit(
        lambda rows: microbatch.map_by_prompt_length(
            function, batch, lengths=lengths, rows=rows, narrow=cut, widths=(4, 8)
        ),
        static_argnums=0,
    )
    sums, widths = run(2)
    np.testing.assert_array_equal(sums, batch.sum(axis=1))
    np.testing.assert_array_equal(widths, [8, 4, 8, 8, 4, 8])  # 1 and 2, 3 and 5, 7 and 8 went together
    assert set(seen) == {(2, 4), (2, 8)}
    np.testing.assert_array_equal(run(None)[0], sums)


def test_the_gradient_of_cut_micro_batches_is_that_of_whole_ones():
    lengths = jnp.array([[1, 3], [8, 2], [4, 4]])
    micros = jnp.where(jnp.arange(8)[None, None] >= 8 - lengths[:, :, None], normal(0, 3, 2, 8), 0)
    seen = []

    def loss(params, micro, index):
        seen.append(micro.shape)
        return jnp.sum((params * micro.sum(axis=1)) ** 2) * (index + 1), {"columns": jnp.int32(micro.shape[1])}

    cuts = microbatch.WidthBuckets(
        tuple(lambda x, w=w: x[:, -w:] for w in (4, 8)), microbatch.narrowest_width(lengths, (4, 8))
    )
    found, metrics = jax.jit(lambda p: microbatch.accumulate_gradients(loss, p, micros, cuts))(jnp.float32(2.0))
    wanted, _ = microbatch.accumulate_gradients(loss, jnp.float32(2.0), micros)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert metrics["columns"] == 4 + 8 + 4 and (2, 4) in seen
    alone, metrics = microbatch.accumulate_gradients(
        loss, jnp.float32(2.0), micros[:1], microbatch.WidthBuckets(cuts.narrow, cuts.choice[:1])
    )
    assert metrics["columns"] == 4
