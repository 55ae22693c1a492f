"""Attention of new tokens to cached keys and values, of which only the segments that hold tokens are read.

A cache's columns are split into segments that double in size, each an array of its own: an array is read where it is,
while a slice of one would be copied first. The softmax is online over segments (Milakov and Gimelshein 2018,
arXiv:1805.02867; Rabe and Staats 2021, arXiv:2112.05682), in float32 and in their order. A segment in which a row sees
no key adds exact zeros to it, so a row's result does not depend on how many segments the rows beside it need.

Shape letters as in `attention`: B batch, P prefixes, G = B / P continuations of a prefix, Q new tokens of a row, S
columns, H heads, KV heads of keys and values, K head size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from rlhf_jax.models.attention import group_by_prefix, ungroup
from rlhf_jax.models.decoder_context import ScoreFunction
from rlhf_jax.types import Array, Params

BLOCK = 128
"""Columns of the first segment, or an eighth of all if that is more: so there are at most four."""
SCALES = {"k": "k_scale", "v": "v_scale"}
"""Names of the scales of keys and values in int8."""


def segment_sizes(columns: int, block: int | None = None) -> tuple[int, ...]:
    """The segments of a cache: `block`, `block`, 2 `block`, 4 `block`, ... columns; None: see `BLOCK`."""
    block = max(BLOCK, -(-columns // 8)) if block is None else block
    sizes = [min(block, columns)]
    while (total := sum(sizes)) < columns:
        sizes.append(min(total, columns - total))
    return tuple(sizes)


class Segment(NamedTuple):
    """Keys and values that queries may see."""

    layer: Params  # "k" [N, KV, K, S], "v" [N, KV, S, K]; in int8 with SCALES [N, KV, S]
    keep: Array  # bool [N or 1, G or 1, Q or 1, S], which of them each query sees; of own keys G is 1
    read: Array | bool  # [] bool, whether any query sees one


class _Softmax(NamedTuple):
    """Of the segments so far, float32."""

    peak: Array  # [N, KV, R, 1]
    total: Array  # [N, KV, R, 1]
    out: Array  # [N, KV, R, K], not divided by the total


def attend_cached(query: Array, prefix: Segment, response_segments: list[Segment], score: ScoreFunction) -> Array:
    """Attention of new tokens to the prefix of their row and to what the row has cached, in one softmax.

    Args:
      query: [B, Q, H, K]; row i continues prefix i // G. Head h reads the keys of head h // (H / KV).
      prefix: its N is P.
      response_segments: their N is B.

    Returns:
      [B, Q, H, K] in the query's dtype. Neither a prefix nor a key that several heads read is copied: their queries
      are grouped instead.
    """
    rows, queries, heads, size = query.shape
    prefixes, own_heads = prefix.layer["k"].shape[:2]
    shared = heads // own_heads
    scaled = query * jnp.asarray(score.scale, query.dtype)
    scaled = scaled.reshape(rows, queries, own_heads, shared, size).transpose(0, 2, 3, 1, 4)
    scaled = scaled.reshape(rows, own_heads, shared * queries, size)
    state = _add(group_by_prefix(scaled, prefixes), None, prefix, (rows // prefixes, shared, queries), score)
    state = jax.tree.map(lambda x: ungroup(x, rows), state)
    for segment in response_segments:
        if segment.read is True:
            state = _add(scaled, state, segment, (1, shared, queries), score)
        else:
            state = jax.lax.cond(
                segment.read,
                lambda scaled, state, segment: _add(scaled, state, segment, (1, shared, queries), score),
                lambda scaled, state, segment: state,
                *(scaled, state, segment),
            )
    out = (state.out / state.total).astype(query.dtype)
    return out.reshape(rows, own_heads, shared, queries, size).transpose(0, 3, 1, 2, 4).reshape(query.shape)


def _add(
    query: Array, state: _Softmax | None, segment: Segment, order: tuple[int, int, int], score: ScoreFunction
) -> _Softmax:
    """The softmax with a segment added, or of it alone; query [N, KV, R, K], R being the product of `order`:
    continuations, query heads of a head, new tokens."""
    layer, keep, dtype = segment.layer, segment.keep, query.dtype
    if keep.shape[1:3] != (1, 1):
        keep = jnp.broadcast_to(keep[:, :, None], (len(keep), *order, keep.shape[-1]))
        keep = keep.reshape(len(keep), 1, -1, keep.shape[-1])
    scores = jnp.einsum("nhqk,nhks->nhqs", query, layer["k"].astype(dtype), preferred_element_type=jnp.float32)
    if SCALES["k"] in layer:
        scores = scores * layer[SCALES["k"]][:, :, None]
    scores = score.masked(scores, keep)
    peak = scores.max(axis=-1, keepdims=True)
    peak = peak if state is None else jnp.maximum(state.peak, peak)
    weights = jnp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    if SCALES["v"] in layer:
        weights = weights * layer[SCALES["v"]][:, :, None]
    weights, value = weights.astype(dtype), layer["v"].astype(dtype)
    out = jnp.einsum("nhqs,nhsk->nhqk", weights, value, preferred_element_type=jnp.float32)
    if state is None:
        return _Softmax(peak, total, out)
    before = jnp.exp(state.peak - peak)
    return _Softmax(peak, state.total * before + total, state.out * before + out)


def quantize_rows(x: Array) -> tuple[Array, Array]:
    """[..., K] -> (int8 [..., K], scales [...] float32), x being about their product: absmax / 127 of each row."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127.0
    return jnp.round(x / jnp.where(scale > 0, scale, 1.0)[..., None]).astype(jnp.int8), scale


def empty_segments(shape: tuple[int, int, int], sizes: tuple[int, ...], dtype, int8: bool) -> list[Params]:
    """A layer's cache, zero: for each of `sizes` the arrays of `Segment.layer`; shape is (B, KV, K)."""
    rows, heads, size = shape
    segments = []
    for columns in sizes:
        cache_dtype = jnp.int8 if int8 else dtype
        segment = {"k": jnp.zeros((rows, heads, size, columns), cache_dtype)}
        segment["v"] = jnp.zeros((rows, heads, columns, size), cache_dtype)
        if int8:
            segment |= dict.fromkeys(SCALES.values(), jnp.zeros((rows, heads, columns), jnp.float32))
        segments.append(segment)
    return segments


_COLUMNS_AXIS = {"k": 3, "v": 2, **dict.fromkeys(SCALES.values(), 2)}


def column_count(segment: Params) -> int:
    """Columns of a segment."""
    return segment["v"].shape[2]


def write(
    segments: list[Params],
    key: Array,
    value: Array,
    index: Array,
    *,
    ring: bool = False,
    active: Array | None = None,
) -> list[Params]:
    """A layer's cache with Q new tokens of each row.

    Args:
      segments: of `empty_segments`, S columns together.
      key, value: [B, Q, KV, K].
      index: [] or [B] int32, position of the first of the tokens. Positions from S on are dropped.
      ring: position p is column p mod S instead.
      active: [B] bool, the rows that are written; None: all.
    """
    new = {"k": key, "v": value}
    if SCALES["k"] in segments[0]:
        for name, scale in SCALES.items():
            new[name], new[scale] = quantize_rows(new[name])
    rows, queries = key.shape[:2]
    total, start, out = sum(map(column_count, segments)), 0, []
    together = index.ndim == 0 and queries == 1 and active is None
    columns = index if together else jnp.broadcast_to(index, (rows,))[:, None] + jnp.arange(queries)[None]
    columns = jnp.mod(columns, total) if ring else columns
    for segment in segments:
        size = column_count(segment)
        place = _write_column if together else _scatter
        offsets = columns - start
        if active is not None:
            offsets = jnp.where(active[:, None], offsets, size)
        out.append(
            {name: place(x, new[name].astype(x.dtype), offsets, _COLUMNS_AXIS[name]) for name, x in segment.items()}
        )
        start += size
    return out


def _write_column(x: Array, new: Array, column: Array, axis: int) -> Array:
    """x with `new` [B, 1, KV, ...] at one column of all rows; as it is where the column is not its own."""
    new = jnp.moveaxis(new, 1, axis)
    size = x.shape[axis]
    at = jnp.clip(column, 0, size - 1)
    old = jax.lax.dynamic_slice_in_dim(x, at, 1, axis)
    x = jax.lax.dynamic_update_slice_in_dim(x, jnp.where((column >= 0) & (column < size), new, old), at, axis)
    return jax.lax.platform_dependent(x, tpu=lambda x: _columns_first(x, axis), default=lambda x: x)


def _columns_first(x: Array, axis: int) -> Array:
    """x in memory as [S, KV, B, K]: a column is one piece. Where each head has a query of its own XLA for TPUs would
    otherwise keep rows last, padded to 128, and copy all values into another layout in each step."""
    order = (axis, 1, 0, *({2, 3} - {axis} if x.ndim == 4 else ()))
    return with_layout_constraint(x, Layout(order))


def _scatter(x: Array, new: Array, columns: Array, axis: int) -> Array:
    """x with `new` [B, Q, KV, ...] at `columns` [B, Q]; others than its own are dropped."""
    size, row = x.shape[axis], jnp.arange(len(x))[:, None]
    columns = jnp.where(columns >= 0, columns, size)  # a negative index would count from the end
    where = (row, slice(None), slice(None), columns) if axis == 3 else (row, slice(None), columns)
    return x.at[where].set(new, mode="drop")


def newest_positions(columns: Array, last: Array, size: int) -> Array:
    """The position that each column of a ring of `size` columns holds after position `last` was written: columns [s],
    last [...] -> [..., s]; negative: none yet."""
    last = jnp.expand_dims(last, -1)
    return last - jnp.mod(last - jnp.expand_dims(columns, range(last.ndim - 1)), size)
