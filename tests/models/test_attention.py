"""Attention: the plain formula's values and gradients, with less kept for the backward pass."""

import math

import jax
import jax.numpy as jnp
import pytest

from rlhf_jax.models import attention
from rlhf_jax.models.attention import Keys
from rlhf_jax.models.decoder_context import ScoreFunction
from tests.helpers.arrays import distance, normal, value_and_vjp
from tests.helpers.attention import plain_attention, plain_causal

SCORE = ScoreFunction(8**-0.5)  # of head size 8


@pytest.mark.parametrize("length", [1, 5, 128, 300, 1100])
def test_causal_attention_is_the_formula_in_value_and_gradient(length):
    shape = (3, length, 2, 8)
    arguments = [normal(i, *shape) for i in range(3)]
    # A full row, a left-padded and a right-padded one; nothing comes from rows of padding.
    columns = jnp.arange(length)[None, :]
    mask = (columns >= jnp.array([0, length // 3, 0])[:, None]) & (
        columns < jnp.array([length, length, -(-length * 2 // 3)])[:, None]
    )
    upstream = jnp.where(mask[:, :, None, None], normal(9, *shape), 0)
    ours = value_and_vjp(
        lambda query, *kv: attention.causal_attention(query, Keys(*kv, mask), SCORE), arguments, upstream
    )
    wanted = value_and_vjp(lambda *args: plain_causal(*args, mask), arguments, upstream)
    keep = mask[:, :, None, None]
    assert distance(jnp.where(keep, ours[0], 0), jnp.where(keep, wanted[0], 0)) < 1e-6
    for found, gradient in zip(ours[1], wanted[1]):
        # A single key has weight 1 whatever it is: the gradient of query and key is 0 there.
        assert jnp.abs(found - gradient).max() < 1e-6 if length == 1 else distance(found, gradient) < 2e-6


@pytest.mark.parametrize(("drops", "length"), [(False, 300), (True, 300), (False, 1100)])
def test_rows_of_several_segments_are_their_segments_in_value_and_gradient(drops, length):
    first, shape = 130, (2, length, 2, 8)
    arguments, upstream = [normal(i, *shape) for i in range(3)], normal(9, *shape)
    mask = jnp.ones((2, length), bool).at[1, 140:150].set(False)
    upstream = jnp.where(mask[:, :, None, None], upstream, 0)
    ids = jnp.broadcast_to((jnp.arange(length) >= first).astype(jnp.int32) + 5, (2, length))
    drop = (lambda weights: weights) if drops else None  # attention with dropout is differentiated by JAX

    def packed(query, *kv):
        return attention.causal_attention(query, Keys(*kv, mask), SCORE, segment_ids=ids, drop=drop, window=90)

    def apart(*args):
        parts = [
            attention.causal_attention(args[0][:, cut], Keys(*(x[:, cut] for x in (*args[1:], mask))), SCORE, window=90)
            for cut in (slice(first), slice(first, length))
        ]
        return jnp.concatenate(parts, axis=1)

    ours, wanted = value_and_vjp(packed, arguments, upstream), value_and_vjp(apart, arguments, upstream)
    keep = mask[:, :, None, None]
    assert distance(jnp.where(keep, ours[0], 0), jnp.where(keep, wanted[0], 0)) < 1e-6
    for found, gradient in zip(ours[1], wanted[1], strict=True):
        assert distance(found, gradient) < 2e-6


def test_causal_attention_keeps_no_weights_for_the_backward_pass():
    length, mask = 300, jnp.ones((2, 300), bool)

    def kept(attend):
        arguments = [jnp.zeros((2, length, 2, 8))] * 3
        residuals = jax.eval_shape(lambda *args: jax.vjp(attend, *args)[1], *arguments)
        return max(math.prod(x.shape) for x in jax.tree.leaves(residuals))

    assert kept(lambda query, *kv: attention.causal_attention(query, Keys(*kv, mask), SCORE)) == 2 * length * 2 * 8
    assert kept(lambda *args: plain_causal(*args, mask)) == 2 * 2 * length * length


@pytest.mark.parametrize("after_prefix", [False, True])
def test_memory_of_attention_is_linear_in_the_length(after_prefix):
    def attend(query, key, value, mask):
        keys = Keys(key, value, mask)
        prefix = Keys(*(x[:, :8] for x in keys)) if after_prefix else None
        return attention.causal_attention(query, keys, SCORE, prefix=prefix)

    def temporary(length):
        rows = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        gradient = jax.grad(lambda *args: jnp.sum(attend(*args)), (0, 1, 2))
        program = jax.jit(gradient).lower(rows, rows, rows, jax.ShapeDtypeStruct((1, length), bool)).compile()
        return program.memory_analysis().temp_size_in_bytes

    short, long = temporary(2048), temporary(8192)
    assert long < 5 * short
    assert short < 2 * 2048 * 2048 * 4  # the scores of both heads


def test_attention_in_bfloat16_stays_close_to_float32():
    arguments, mask = [normal(i, 2, 140, 2, 16) for i in range(3)], jnp.ones((2, 140), bool)
    upstream = normal(4, 2, 140, 2, 16)
    half = [x.astype(jnp.bfloat16) for x in arguments]
    ours = value_and_vjp(
        lambda query, *kv: attention.causal_attention(query, Keys(*kv, mask), ScoreFunction(0.25)),
        half,
        upstream.astype(jnp.bfloat16),
    )
    wanted = value_and_vjp(
        lambda query, *kv: attention.causal_attention(query, Keys(*kv, mask), ScoreFunction(0.25)), arguments, upstream
    )
    assert {x.dtype for x in jax.tree.leaves(ours)} == {jnp.dtype(jnp.bfloat16)}
    for found, exact in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted)):
        assert distance(found, exact) < 1e-2  # 8 bits of mantissa: 4e-3 a rounding


@pytest.mark.parametrize(
    ("length", "group", "window"), [(5, 1, None), (5, 3, 3), (130, 3, None), (300, 3, 90), (1100, 3, 90)]
)
def test_attention_after_a_shared_prefix_is_the_formula_in_value_and_gradient(length, group, window):
    prefixes, heads, key_heads, before, size = 2, 4, 2, 20, 8
    rows = prefixes * group
    query, upstream = normal(0, rows, length, heads, size), normal(8, rows, length, heads, size)
    key, value = (normal(i, rows, length, key_heads, size) for i in (1, 2))
    prefix_key, prefix_value = (normal(i, prefixes, before, key_heads, size) for i in (3, 4))
    prefix_mask = jnp.arange(before)[None, :] >= jnp.array([0, 4])[:, None]
    mask = jnp.arange(length)[None, :] < jnp.linspace(0, length, rows).astype(jnp.int32)[:, None]
    columns = jnp.arange(before + length)
    keep = attention.causal_keep(before + jnp.arange(length), columns, window)[None, None]
    keep &= jnp.concatenate([jnp.repeat(prefix_mask, group, axis=0), mask], axis=1)[:, None, None, :]

    def ours(query, key, value, *prefix):
        keys, prefix = Keys(key, value, mask), Keys(*prefix, prefix_mask)
        out = attention.causal_attention(query, keys, SCORE, prefix=prefix, window=window)
        return jnp.where(mask[..., None, None], out, 0)

    def plain(query, key, value, prefix_key, prefix_value):
        pairs = ((prefix_key, key), (prefix_value, value))
        both = (jnp.concatenate([jnp.repeat(x, group, axis=0), y], axis=1) for x, y in pairs)
        keys, values = (jnp.repeat(x, heads // key_heads, axis=2).swapaxes(1, 2) for x in both)
        out = plain_attention(query.swapaxes(1, 2), keys, values, keep).swapaxes(1, 2)
        return jnp.where(mask[..., None, None], out, 0)

    arguments = (query, key, value, prefix_key, prefix_value)
    found, wanted = value_and_vjp(ours, arguments, upstream), value_and_vjp(plain, arguments, upstream)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert distance(one, other) < 2e-6
