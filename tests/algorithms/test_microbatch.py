"""Micro-batches of rows and of tokens: each item once, in its order, as wide as needed, and summed exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax import models
from rlhf_jax.algorithms import microbatch, response_logprobs
from rlhf_jax.algorithms.microbatch import MicroBatches, Tally
from rlhf_jax.config import PPOConfig, RLOOConfig
from rlhf_jax.parallel import sharding
from tests.helpers.arrays import distance, normal

# --- by rows


@pytest.mark.parametrize("size, count", [(2, 3), (6, 1), (9, 1), (None, 1)])
def test_micro_batches_are_rows_in_order_and_sums_are_of_all(size, count):
    batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.arange(6)}
    parts = MicroBatches.by_rows(batch, size)
    assert parts.count == count

    def loss(params, micro):
        value, rows = (params * micro["x"]).sum(), micro["y"]
        tally = Tally({"value": value, "rows": rows.size}, {"y": rows.min()}, {"y": rows.max()})
        return value, (jax.tree.map(jnp.float32, tally), 2 * rows)

    grads, tally, doubled = parts.gradients(loss, jnp.float32(2.0))
    assert float(grads) == 66.0 and doubled.tolist() == [0, 2, 4, 6, 8, 10]
    assert jax.tree.map(float, tally) == Tally({"value": 132.0, "rows": 6.0}, {"y": 0.0}, {"y": 5.0})
    again = parts.sum(lambda micro: loss(jnp.float32(2.0), micro)[1][0])
    assert jax.tree.map(float, again) == jax.tree.map(float, tally)


def test_gradients_in_half_precision_are_summed_in_float32():
    parts = MicroBatches.by_rows(jnp.full((300, 1), 1.0), 1)
    grads, _, _ = parts.gradients(lambda p, x: (jnp.sum(p * x.astype(p.dtype)), (Tally(), ())), jnp.bfloat16(1.0))
    assert grads.dtype == jnp.float32 and float(grads) == 300.0


def test_the_scale_of_a_loss_is_a_power_of_two_of_its_terms_in_float16_alone():
    assert [microbatch.loss_scale("float16", terms) for terms in (1, 3, 4, 3392)] == [1.0, 2.0, 4.0, 2048.0]
    assert {microbatch.loss_scale(dtype, 3392) for dtype in ("float32", "bfloat16")} == {1.0}


def test_float16_has_gradients_nearer_to_float32_than_bfloat16_and_none_without_the_scale():
    model = models.custom_shape("llama:2x64x4x2", 512)
    params = model.init(jax.random.key(0))
    params = jax.tree.map(lambda x, y: x.astype(y.dtype), model.cast_params(params, jnp.bfloat16), params)
    tokens = jax.random.randint(jax.random.key(1), (8, 24), 0, 512)
    terms = 2**22  # a mean over so many that the gradient of one vanishes

    def gradients(dtype, scale):
        def loss(params, tokens):
            hidden = model.hidden(params, tokens, jnp.ones(tokens.shape, bool), dtype=jnp.dtype(dtype))[:, :-1]
            logprobs, _ = response_logprobs.logprobs_from_hidden(model, params, hidden, tokens[:, 1:], 0.7)
            return -jnp.sum(logprobs) / terms, (Tally({"loss": -jnp.sum(logprobs)}), ())

        parts = MicroBatches.by_rows(tokens, 4)
        grads, tally, _ = jax.jit(lambda params: parts.gradients(loss, params, scale))(params)
        return jnp.concatenate([x.ravel() for x in jax.tree.leaves(grads)]), float(tally.sums["loss"])

    exact, loss = gradients("float32", 1.0)
    half, half_loss = gradients("float16", microbatch.loss_scale("float16", terms))
    assert distance(half, exact) < 0.25 * distance(gradients("bfloat16", 1.0)[0], exact)
    assert half_loss == pytest.approx(loss, rel=1e-3)
    assert distance(gradients("float16", 1.0)[0], exact) > 0.5


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


def test_widths_are_those_of_the_config_or_half_three_quarters_and_all():
    assert microbatch.prompt_widths(PPOConfig(), 512) == (256, 384, 512)
    assert microbatch.prompt_widths(PPOConfig(), 300) == (152, 232, 300)
    assert microbatch.prompt_widths(PPOConfig(), 255) == (255,)
    assert microbatch.prompt_widths(PPOConfig(length_buckets=(8, 16, 64)), 20) == (8, 16, 20)


def test_rows_that_go_by_prompt_length_come_back_in_their_order_and_no_wider_than_needed():
    lengths = jnp.array([7, 1, 3, 8, 2, 5])
    columns = jnp.arange(8)[None, :]
    batch = jnp.where(columns >= 8 - lengths[:, None], 10 * jnp.arange(6)[:, None] + columns, 0)
    seen = []

    def function(part):
        seen.append(part.shape)
        return part.sum(axis=1), jnp.full(len(part), part.shape[1])

    def run(size, sort):
        parts = MicroBatches.by_rows(
            batch, size, lengths=lengths, widths=(4, 8), narrow=lambda part, width: part[:, -width:], sort=sort
        )
        return parts.map(function)

    run = jax.jit(run, static_argnums=(0, 1))
    sums, widths = run(2, True)
    np.testing.assert_array_equal(sums, batch.sum(axis=1))
    np.testing.assert_array_equal(widths, [8, 4, 8, 8, 4, 8])  # 1 and 2, 3 and 5, 7 and 8 went together
    assert set(seen) == {(2, 4), (2, 8)}
    sums, widths = run(2, False)  # 7 and 1, 3 and 8, 2 and 5
    np.testing.assert_array_equal(sums, batch.sum(axis=1))
    np.testing.assert_array_equal(widths, [8] * 6)
    np.testing.assert_array_equal(run(None, True)[0], sums)


def test_the_gradient_of_cut_micro_batches_is_that_of_whole_ones():
    lengths = jnp.array([1, 3, 8, 2, 4, 4])
    rows = jnp.where(jnp.arange(8)[None] >= 8 - lengths[:, None], normal(0, 6, 8), 0)
    cut = {"widths": (4, 8), "narrow": lambda part, width: part[:, -width:]}

    def loss(params, micro):
        return jnp.sum((params * micro.sum(axis=1)) ** 2), (Tally({"columns": jnp.int32(micro.shape[1])}), ())

    def gradient(rows, lengths, size, **options):
        return MicroBatches.by_rows(rows, size, lengths=lengths, **options).gradients(loss, jnp.float32(2.0))[:2]

    found, tally = gradient(rows, lengths, 2, **cut)
    wanted, _ = gradient(rows, lengths, 2, widths=(8,))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert tally.sums["columns"] == 4 + 8 + 4
    _, tally = gradient(rows[:2], lengths[:2], None, **cut)  # a single one is narrowed too
    assert tally.sums["columns"] == 4


# --- by tokens

M, C, T, BUDGET = 9, 8, 16, 48
CONFIG = PPOConfig(micro_batch_tokens=BUDGET, length_buckets=(4, C))
SHAPES = microbatch.token_shapes(CONFIG, items=M, columns=C, t=T)
few = settings(max_examples=40, deadline=None, derandomize=True)


def by_tokens(prompts, responses, values):
    """Items whose batch is (values [M, C + T], row numbers), narrowed as rows of prompt and response."""

    def narrow(batch, present, shape):
        values, rows = batch
        return values[:, C - shape.prompt : C + shape.response], jnp.where(present, rows, -1), shape

    return MicroBatches.by_tokens(
        (values, jnp.arange(M)), prompts=prompts, responses=responses, shapes=SHAPES, narrow=narrow
    )


@jax.jit
def run(prompts, responses, values):
    parts = by_tokens(prompts, responses, values)

    def measure(micro):
        rows, tokens = micro[1], micro[2].items * micro[2].tokens
        seen = (rows[:, None] == jnp.arange(M)[None]).sum(axis=0)
        return Tally({"seen": seen, "tokens": tokens, "used": 1}, {"tokens": jnp.float32(tokens)}, {})

    def as_arrays(tally):
        return jax.tree.map(jnp.asarray, tally)

    def loss(scale, micro):
        values, rows, _ = micro
        total = scale**2 * jnp.sum(jnp.where(rows[:, None] >= 0, values, 0.0)[:, -1])
        return total, (Tally({}, {}, {"tokens": jnp.float32(micro[2].items * micro[2].tokens)}), ())

    out = parts.map(lambda micro: micro[0][:, micro[2].prompt :] * 2.0)
    grads, most, _ = parts.gradients(loss, jnp.float32(3.0))
    tally = parts.sum(lambda micro: as_arrays(measure(micro)))
    return tally.sums, tally.least["tokens"], most.greatest["tokens"], out, grads


lengths = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 8, 9, 15, T]), min_size=M, max_size=M)


@few
@given(st.lists(st.integers(1, C), min_size=M, max_size=M), lengths)
def test_each_item_is_computed_once_and_excluded_ones_never(prompts, responses):
    prompts, responses = np.array(prompts, np.int32), np.array(responses, np.int32)
    values = np.random.default_rng(0).normal(size=(M, C + T)).astype(np.float32)
    sums, _, most, out, _ = jax.device_get(run(prompts, responses, values))
    assert (sums["seen"] == (responses >= 0)).all() and most <= BUDGET
    for row in np.flatnonzero(responses >= 0):
        needed = max(responses[row], 0)
        np.testing.assert_array_equal(out[row, :needed], 2 * values[row, C : C + needed])
    assert not out[responses < 0].any()


def test_rows_of_equal_length_are_in_one_shape_and_its_gradient_is_that_of_the_sum():
    prompts, values = np.full(M, 4, np.int32), np.ones((M, C + T), np.float32)
    sums, least, most, _, grads = jax.device_get(run(prompts, np.full(M, 2, np.int32), values))
    assert sums["used"] == 2 and (most, least) == (48, 40)  # 8 rows of 4 + 2 tokens, then one of 4 x (8 + 2)
    assert grads == 2 * 3 * M
    sums, *_, grads = jax.device_get(run(prompts, np.full(M, -1, np.int32), values))
    assert sums["used"] == 1 and grads == 0


def test_a_last_row_that_needs_a_wide_micro_batch_shares_it_with_shorter_rows():
    responses = np.array([1, 1, T, 1, 1, 1, 1, 1, 1], np.int32)
    sums, least, most, *_ = jax.device_get(run(np.full(M, 8, np.int32), responses, np.ones((M, C + T), np.float32)))
    # Two rows of 24, then seven of 8 + 2 tokens in micro-batches of four.
    assert sums["used"] == 3 and sums["tokens"] == 48 + 40 + 40 and (most, least) == (48, 40)


def test_shapes_are_the_widths_that_save_tokens():
    assert [tuple(shape) for shape in SHAPES] == [
        *((8, 4, 2, 6), (4, 8, 2, 10), (6, 4, 4, 8), (4, 8, 4, 12)),
        *((4, 4, 8, 12), (3, 8, 8, 16), (2, 4, 16, 20), (2, 8, 16, 24)),
    ]
    long = PPOConfig(micro_batch_tokens=17_408)
    shapes = microbatch.token_shapes(long, items=64, columns=512, t=8192)
    assert [shape[1:3] for shape in shapes] == [(256, 1024), (512, 1024), (512, 2048), (512, 4096), (512, 8192)]
    assert [shape.items for shape in shapes] == [13, 11, 6, 3, 2]
    groups = microbatch.token_shapes(RLOOConfig(micro_batch_tokens=400), items=2, columns=100, t=8, group_size=4)
    assert [tuple(shape) for shape in groups][-1] == (2, 100, 8, 132)


@pytest.mark.parametrize(("budget", "items"), [(1000, [120, 48]), (200, [24, 8])])
def test_every_device_gets_as_many_rows(monkeypatch, budget, items):
    monkeypatch.setattr(sharding, "row_shards", lambda mesh: 8)
    monkeypatch.setattr(microbatch, "RESPONSE_WIDTHS", (4, 1))
    config = PPOConfig(micro_batch_tokens=budget)
    shapes = microbatch.token_shapes(config, items=128, columns=4, t=16, mesh="8 devices")
    assert [shape.items for shape in shapes] == items


def test_each_shape_is_traced_once():
    traced = []

    def loss(scale, micro):
        traced.append(micro[2])
        return scale * jnp.sum(micro[0]), (Tally(), ())

    def gradient(prompts, responses, values):
        return by_tokens(prompts, responses, values).gradients(loss, jnp.float32(1.0))[0]

    row = jax.ShapeDtypeStruct((M,), jnp.int32)
    jax.jit(gradient).lower(row, row, jax.ShapeDtypeStruct((M, C + T), jnp.float32))
    assert traced[0] == SHAPES[-1]  # for the shapes of the gradients
    assert sorted(traced[1:]) == sorted(SHAPES)
