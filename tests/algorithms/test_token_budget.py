"""Micro-batches of a number of tokens: each item that is not absent once, in the narrowest shape, within the budget."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.algorithms import token_budget
from rlhf_jax.config import PPOConfig, RLOOConfig
from rlhf_jax.parallel import sharding

M, C, T, BUDGET = 9, 8, 16, 48
CONFIG = PPOConfig(micro_batch_tokens=BUDGET, length_buckets=(4, C))
SHAPES = token_budget.shapes_of(CONFIG, items=M, columns=C, t=T)
few = settings(max_examples=40, deadline=None, derandomize=True)


def items_of(prompts, responses, values):
    """Items whose batch is (values [M, C + T], row numbers), narrowed as rows of prompt and response."""

    def narrow(batch, there, shape):
        values, rows = batch
        return values[:, C - shape.prompt : C + shape.response], jnp.where(there, rows, -1), shape

    return token_budget.Items((values, jnp.arange(M)), prompts, responses, SHAPES, narrow, None)


@jax.jit
def run(prompts, responses, values):
    items = items_of(prompts, responses, values)
    n = token_budget.most_micro_batches(items)

    def measure(micro, index):
        rows = micro[1]
        seen = (rows[:, None] == jnp.arange(M)[None]).sum(axis=0)
        return seen, jnp.where(jnp.arange(n) == index, micro[2].items * micro[2].tokens, 0)

    (seen, tokens), used = token_budget.sum_over_micro_batches(measure, items)
    out = token_budget.map_items(lambda micro: micro[0][:, micro[2].prompt :] * 2.0, items)

    def loss(scale, micro, index):
        values, rows, _ = micro
        total = scale**2 * jnp.sum(jnp.where(rows[:, None] >= 0, values, 0.0)[:, -1])
        return total, jnp.where(jnp.arange(n) == index, jnp.min(rows), 0)

    grads, least, _ = token_budget.accumulate_gradients(loss, jnp.float32(3.0), items)
    return seen, tokens, used, out, grads, token_budget.unused_slots(least, used)


lengths = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 8, 9, 15, T]), min_size=M, max_size=M)


@few
@given(st.lists(st.integers(1, C), min_size=M, max_size=M), lengths)
def test_each_item_is_computed_once_and_absent_ones_never(prompts, responses):
    prompts, responses = np.array(prompts, np.int32), np.array(responses, np.int32)
    values = np.random.default_rng(0).normal(size=(M, C + T)).astype(np.float32)
    seen, tokens, used, out, _, least = jax.device_get(run(prompts, responses, values))
    assert (seen == (responses >= 0)).all()
    assert tokens.max() <= BUDGET and (tokens > 0).sum() == used
    for row in np.flatnonzero(responses >= 0):
        needed = max(responses[row], 0)
        np.testing.assert_array_equal(out[row, :needed], 2 * values[row, C : C + needed])
    assert not out[responses < 0].any()
    assert least.min() == (-1 if (responses < 0).all() else least[:used].min())


def test_rows_of_equal_length_are_in_one_shape_and_its_gradient_is_that_of_the_sum():
    prompts, values = np.full(M, 4, np.int32), np.ones((M, C + T), np.float32)
    seen, tokens, used, _, grads, _ = jax.device_get(run(prompts, np.full(M, 2, np.int32), values))
    assert used == 2 and tokens[:2].tolist() == [48, 40]  # 8 rows of 4 + 2 tokens, then one of 4 x (8 + 2)
    assert grads == 2 * 3 * M
    *_, used, _, grads, _ = jax.device_get(run(prompts, np.full(M, -1, np.int32), values))
    assert used == 1 and grads == 0


def test_a_last_row_that_needs_a_wide_micro_batch_shares_it_with_shorter_rows():
    responses = np.array([1, 1, T, 1, 1, 1, 1, 1, 1], np.int32)
    tokens, used = jax.device_get(run(np.full(M, 8, np.int32), responses, np.ones((M, C + T), np.float32)))[1:3]
    # Two rows of 24, then seven of 8 + 2 tokens in micro-batches of four.
    assert used == 3 and tokens[:3].tolist() == [48, 40, 40]


def test_shapes_are_the_widths_that_save_tokens():
    assert [tuple(shape) for shape in SHAPES] == [
        *((8, 4, 2, 6), (4, 8, 2, 10), (6, 4, 4, 8), (4, 8, 4, 12)),
        *((4, 4, 8, 12), (3, 8, 8, 16), (2, 4, 16, 20), (2, 8, 16, 24)),
    ]
    long = PPOConfig(micro_batch_tokens=17_408)
    found = token_budget.shapes_of(long, items=64, columns=512, t=8192)
    assert [shape[1:3] for shape in found] == [(256, 1024), (512, 1024), (512, 2048), (512, 4096), (512, 8192)]
    assert [shape.items for shape in found] == [13, 11, 6, 3, 2]
    groups = token_budget.shapes_of(RLOOConfig(micro_batch_tokens=400), items=2, columns=100, t=8, group_size=4)
    assert [tuple(shape) for shape in groups][-1] == (2, 100, 8, 132)


@pytest.mark.parametrize(("budget", "items"), [(1000, [120, 48]), (200, [24, 8])])
def test_every_device_gets_as_many_rows(monkeypatch, budget, items):
    monkeypatch.setattr(sharding, "row_shards", lambda mesh: 8)
    monkeypatch.setattr(token_budget, "RESPONSE_WIDTHS", (4, 1))
    found = token_budget.shapes_of(PPOConfig(micro_batch_tokens=budget), items=128, columns=4, t=16, mesh="8 devices")
    assert [shape.items for shape in found] == items


def test_each_shape_is_traced_once():
    traced = []

    def loss(scale, micro, _):
        traced.append(micro[2])
        return scale * jnp.sum(micro[0]), ()

    def gradient(prompts, responses, values):
        return token_budget.accumulate_gradients(loss, jnp.float32(1.0), items_of(prompts, responses, values))[0]

    row = jax.ShapeDtypeStruct((M,), jnp.int32)
    jax.jit(gradient).lower(row, row, jax.ShapeDtypeStruct((M, C + T), jnp.float32))
    assert traced[0] == SHAPES[-1]  # for the shapes of the gradients
    assert sorted(traced[1:]) == sorted(SHAPES)
