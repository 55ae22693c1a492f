"""The cache: what is written where, which segments are read, and attention to it as the plain formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.models import attention, cached_attention
from rlhf_jax.models.cached_attention import Segment, empty_segments, newest_positions, segment_sizes, write
from rlhf_jax.models.decoder_context import ScoreFunction
from tests.helpers.arrays import distance, normal

SIZE = 8
SCORE = ScoreFunction(SIZE**-0.5)


@pytest.mark.parametrize(
    "columns, block, sizes",
    [
        (1000, None, (128, 128, 256, 488)),
        (8000, None, (1000, 1000, 2000, 4000)),
        (53, None, (53,)),
        (128, None, (128,)),
        (129, None, (128, 1)),
        (40, 8, (8, 8, 16, 8)),
        (3, 1, (1, 1, 1)),
        (7, 1000, (7,)),
    ],
)
def test_segments_double_up_to_all_columns(columns, block, sizes):
    assert segment_sizes(columns, block) == sizes


@given(columns=st.integers(1, 10**5))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_by_default_there_are_at_most_four_segments_of_all_columns(columns):
    sizes = segment_sizes(columns)
    assert sum(sizes) == columns and len(sizes) <= 4 and min(sizes) > 0


def test_a_ring_holds_the_newest_position_of_each_column():
    # Position p is in column p mod 4; after 6 was written: columns 0 to 3 hold 4, 5, 6 and still 3.
    assert newest_positions(jnp.arange(4), jnp.int32(6), 4).tolist() == [4, 5, 6, 3]
    assert newest_positions(jnp.arange(4), jnp.array([[1], [3], [4]]), 4)[:, 0].tolist() == [
        [0, 1, -2, -1],
        [0, 1, 2, 3],
        [4, 1, 2, 3],
    ]


# --- write

ROWS, HEADS, SIZES = 3, 2, (2, 2, 3)


def tokens_of(first, queries):
    """Keys and values [ROWS, Q, HEADS, 1] that are 10 row + first + place, values 100 more; heads differ by 0.5."""
    new = 10.0 * jnp.arange(ROWS)[:, None, None] + first + jnp.arange(queries)[None, :, None]
    new = (new + 0.5 * jnp.arange(HEADS)[None, None])[..., None]
    return new, 100 + new


@functools.partial(jax.jit, static_argnames="ring")
def jitted_write(segments, key, value, index, ring=False, active=None):
    return write(segments, key, value, index, ring=ring, active=active)


def contents(segments):
    """[ROWS, columns] of the first head's keys, which the second's and the values agree with."""
    keys = np.concatenate([x["k"][:, :, 0] for x in segments], axis=2)
    values = np.concatenate([x["v"][..., 0] for x in segments], axis=2)
    written = keys != -1
    np.testing.assert_array_equal(values, np.where(written, keys + 100, -1))
    np.testing.assert_array_equal(keys[:, 1], np.where(written[:, 1], keys[:, 0] + 0.5, -1))
    return keys[:, 0].tolist()


def unwritten():
    segments = empty_segments((ROWS, HEADS, 1), SIZES, jnp.float32, int8=False)
    return jax.tree.map(lambda x: x - 1, segments)


def test_a_token_of_each_row_goes_into_one_column():
    found = jitted_write(unwritten(), *tokens_of(1, 1), jnp.int32(3))
    assert contents(found) == [[-1, -1, -1, 1 + 10 * row, -1, -1, -1] for row in range(ROWS)]
    assert contents(jitted_write(unwritten(), *tokens_of(1, 1), jnp.int32(7))) == [[-1] * 7] * ROWS


def test_tokens_go_to_each_rows_own_columns_across_segments_and_past_the_end_nowhere():
    found = jitted_write(unwritten(), *tokens_of(1, 3), jnp.array([1, 5, 7]))
    assert contents(found) == [
        [-1, 1, 2, 3, -1, -1, -1],
        [-1, -1, -1, -1, -1, 11, 12],
        [-1] * 7,
    ]


def test_a_row_that_is_not_active_is_not_written():
    active = jnp.array([True, False, True])
    assert contents(jitted_write(unwritten(), *tokens_of(1, 1), jnp.int32(2), active=active)) == [
        [-1, -1, 1, -1, -1, -1, -1],
        [-1] * 7,
        [-1, -1, 21, -1, -1, -1, -1],
    ]


def test_in_a_ring_position_p_is_column_p_modulo_its_size():
    found = jitted_write(unwritten(), *tokens_of(1, 3), jnp.array([6, 8, 0]), ring=True)
    assert contents(found) == [
        [2, 3, -1, -1, -1, -1, 1],
        [-1, 11, 12, 13, -1, -1, -1],
        [21, 22, 23, -1, -1, -1, -1],
    ]
    assert contents(jitted_write(unwritten(), *tokens_of(1, 1), jnp.int32(9), ring=True))[0][2] == 1


@given(
    index=st.lists(st.integers(0, 20), min_size=ROWS, max_size=ROWS),
    active=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    queries=st.sampled_from([1, 2, 4]),
    ring=st.booleans(),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_writes_equal_a_loop_over_rows_and_tokens(index, active, queries, ring):
    total = sum(SIZES)
    wanted = np.full((ROWS, total), -1.0)
    for row in range(ROWS):
        for place in range(queries):
            column = (index[row] + place) % total if ring else index[row] + place
            if active[row] and column < total:
                wanted[row, column] = 10 * row + 1 + place
    found = jitted_write(unwritten(), *tokens_of(1, queries), jnp.array(index), ring, jnp.array(active))
    assert contents(found) == wanted.tolist()


def test_int8_rows_keep_their_absolute_maximum_and_zeros():
    x = jnp.array([[1.0, -4.0, 2.0], [0.0, 0.0, 0.0], [1e-3, 5e-4, 0.0]])
    kept, scale = cached_attention.quantize_rows(x)
    assert kept.tolist() == [[32, -127, 64], [0, 0, 0], [127, 64, 0]]
    np.testing.assert_allclose(scale, [4 / 127, 0, 1e-3 / 127], rtol=1e-6)


# --- attention

COLUMNS, CONTEXT, PROMPTS, GROUP = 14, 5, 2, 3
BATCH = PROMPTS * GROUP


@functools.partial(jax.jit, static_argnames=("block", "int8", "score", "shared"))
def cached(query, key, value, prefix, prefix_keep, filled, block, int8, score, shared=True):
    """The last tokens of `key` and `value` [B, S, KV, K], `filled` of them cached before, attend to both."""
    queries = query.shape[1]
    sizes = segment_sizes(COLUMNS, block)
    segments = empty_segments((BATCH, key.shape[2], SIZE), sizes, jnp.float32, int8)
    segments = write(segments, key, value, jnp.zeros(BATCH, jnp.int32))
    places = filled[:, None] + jnp.arange(queries)[None]
    keep = prefix_keep[:, None, None]
    own, start, end = [], 0, jnp.max(places) + 1
    for segment, size in zip(segments, sizes):
        seen = (jnp.arange(start, start + size)[None, None] <= places[..., None])[:, None]
        own.append(Segment(segment, seen, end > start if start else True))
        start += size
    if not shared:
        prefix, keep = jax.tree.map(lambda x: jnp.repeat(x, GROUP, axis=0), (prefix, keep))
    return cached_attention.attend_cached(query, Segment(prefix, keep, True), own, score)


@functools.partial(jax.jit, static_argnames="score")
def plain(query, key, value, prefix, prefix_keep, filled, score):
    _, queries, heads, _ = query.shape
    places = filled[:, None] + jnp.arange(queries)[None]
    seen = jnp.arange(COLUMNS)[None, None] <= places[..., None]
    before = jnp.broadcast_to(jnp.repeat(prefix_keep, GROUP, axis=0)[:, None], (BATCH, queries, CONTEXT))
    pairs = ((prefix["k"].swapaxes(2, 3), key), (prefix["v"], value))
    both = (jnp.concatenate([jnp.repeat(x, GROUP, axis=0), y.swapaxes(1, 2)], axis=2) for x, y in pairs)
    keys, values = (jnp.repeat(x, heads // key.shape[2], axis=1) for x in both)
    keep = jnp.concatenate([before, seen], axis=2)[:, None]
    return attention.attend(query.swapaxes(1, 2), keys, values, keep, lambda x: x, score).swapaxes(1, 2)


def inputs(seed, heads, own_heads, queries):
    query = normal(seed, BATCH, queries, heads, SIZE)
    key, value = (normal(seed + i, BATCH, COLUMNS, own_heads, SIZE) for i in (1, 2))
    prefix = {
        "k": normal(seed + 3, PROMPTS, own_heads, SIZE, CONTEXT),
        "v": normal(seed + 4, PROMPTS, own_heads, CONTEXT, SIZE),
    }
    return query, key, value, prefix


@pytest.mark.parametrize("block, shared", [(2, True), (None, False)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("heads, own_heads, queries", [(4, 4, 1), (4, 2, 1), (4, 2, 3), (4, 1, 4)])
def test_attention_to_a_cache_in_segments_is_attention_after_a_prefix(
    heads, own_heads, queries, softcap, block, shared
):
    score = ScoreFunction(SIZE**-0.5, softcap)

    @given(
        seed=st.integers(0, 99),
        filled=st.lists(st.integers(0, COLUMNS - queries), min_size=BATCH, max_size=BATCH),
        padding=st.lists(st.integers(0, CONTEXT - 1), min_size=PROMPTS, max_size=PROMPTS),
    )
    @settings(max_examples=8, deadline=None, derandomize=True)
    def check(seed, filled, padding):
        prefix_keep = jnp.arange(CONTEXT)[None] >= jnp.array(padding)[:, None]
        given = (*inputs(seed, heads, own_heads, queries), prefix_keep, jnp.array(filled))
        assert distance(cached(*given, block, False, score, shared), plain(*given, score)) < 1e-6

    check()


def test_columns_past_a_rows_tokens_and_segments_that_nobody_reads_change_no_bit():
    query, key, value, prefix = inputs(0, 4, 2, 1)
    keep, filled = jnp.ones((PROMPTS, CONTEXT), bool), jnp.full(BATCH, 2)
    alone = cached(query, key, value, prefix, keep, filled, 4, False, SCORE)
    # What lies past their tokens is other, and one row beside them reads all segments.
    junk = jnp.where(jnp.arange(COLUMNS)[None, :, None, None] > 2, 1e4, 1.0)
    beside = cached(query, key * junk, value * junk, prefix, keep, filled.at[-1].set(COLUMNS - 1), 4, False, SCORE)
    np.testing.assert_array_equal(alone[:-1], beside[:-1])


@pytest.mark.parametrize("queries", [1, 3])
def test_an_int8_cache_is_near(queries):
    given = (*inputs(0, 4, 2, queries), jnp.ones((PROMPTS, CONTEXT), bool), jnp.full(BATCH, COLUMNS - queries))
    assert 1e-4 < distance(cached(*given, 4, True, SCORE), plain(*given, SCORE)) < 0.01
