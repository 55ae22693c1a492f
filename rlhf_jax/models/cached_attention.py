"""Attention of new tokens to cached keys and values, a block of columns at a time.

The softmax is online (Milakov and Gimelshein 2018, arXiv:1805.02867; Rabe and Staats 2021, arXiv:2112.05682), in
float32, and blocks go in a fixed order. A block in which a row sees no key adds exact zeros to it, so a row's result
does not depend on how many blocks the rows beside it need.

Shape letters as in `attention`: B batch, P prefixes, G = B / P continuations of a prefix, Q new tokens of a row, S
columns of the cache, C columns of a prefix, H heads, KV heads of keys and values, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.models.context import ScoreFunction
from rlhf_jax.types import Array, Params

BLOCK = 128
"""Columns that are read at a time; measured best of 64, 128 and 256 on two cores for 64 rows of 1,024 tokens."""
SCALES = ("k_scale", "v_scale")
"""Of a cache in int8, beside "k" and "v"."""


class Columns(NamedTuple):
    """Keys and values that queries see."""

    layer: Params  # {"k", "v"} [N, KV, S, K]; in int8 with SCALES [N, KV, S]
    # columns [s] -> which of them each query sees, bool [N or 1, G or 1, Q or 1, s]; of own keys G is 1
    keep: Callable[[Array], Array]
    first: Array | int  # the first column that any query sees
    end: Array | int  # after the last


class _Softmax(NamedTuple):
    """Of the blocks so far, float32."""

    peak: Array  # [N, KV, R, 1]
    total: Array  # [N, KV, R, 1]
    out: Array  # [N, KV, R, K], not divided by the total


def attend_cached(
    query: Array, prefix: Columns | None, own: Columns, score: ScoreFunction, block: int | None = BLOCK
) -> Array:
    """Attention of new tokens to the prefix of their row and to what the row has cached, in one softmax.

    Args:
      query: [B, Q, H, K]; row i continues prefix i // G. Head h reads the keys of head h // (H / KV).
      prefix: its N is P; None: there is none.
      own: its N is B.
      score: scale and soft cap.
      block: columns at a time; None: all.

    Returns:
      [B, Q, H, K] in the query's dtype. Neither a prefix nor a key that several heads read is copied: their queries
      are grouped instead.
    """
    rows, queries, heads, size = query.shape
    own_heads = own.layer["k"].shape[1]
    shared = heads // own_heads
    scaled = query * jnp.asarray(score.scale, query.dtype)
    scaled = scaled.reshape(rows, queries, own_heads, shared, size).transpose(0, 2, 3, 1, 4)
    scaled = scaled.reshape(rows, own_heads, shared * queries, size)
    state = _Softmax(
        jnp.full((*scaled.shape[:3], 1), jnp.finfo(jnp.float32).min),
        jnp.zeros((*scaled.shape[:3], 1)),
        jnp.zeros(scaled.shape, jnp.float32),
    )
    if prefix is not None:
        prefixes = prefix.layer["k"].shape[0]
        grouped = jax.tree.map(lambda x: _group(x, prefixes), (scaled, state))
        queries_of_keep = (rows // prefixes, shared, queries)
        state = _over_blocks(*grouped, prefix, queries_of_keep, score, block)
        state = jax.tree.map(lambda x: _ungroup(x, rows), state)
    state = _over_blocks(scaled, state, own, (1, shared, queries), score, block)
    out = (state.out / state.total).astype(query.dtype)
    return out.reshape(rows, own_heads, shared, queries, size).transpose(0, 3, 1, 2, 4).reshape(query.shape)


def _group(x: Array, prefixes: int) -> Array:
    """[B, KV, R, n] -> [P, KV, G R, n], the queries of all continuations of a prefix side by side."""
    rows, heads, queries, size = x.shape
    if rows == prefixes:
        return x
    x = x.reshape(prefixes, rows // prefixes, heads, queries, size).swapaxes(1, 2)
    return x.reshape(prefixes, heads, -1, size)


def _ungroup(x: Array, rows: int) -> Array:
    """The inverse of `_group`."""
    prefixes, heads, _, size = x.shape
    if rows == prefixes:
        return x
    x = x.reshape(prefixes, heads, rows // prefixes, -1, size).swapaxes(1, 2)
    return x.reshape(rows, heads, -1, size)


def _over_blocks(
    query: Array,
    state: _Softmax,
    columns: Columns,
    order: tuple[int, int, int],
    score: ScoreFunction,
    block: int | None,
) -> _Softmax:
    """The softmax with these columns added; query [N, KV, R, K], R being the product of `order`: continuations, query
    heads of a head, new tokens."""
    size = columns.layer["k"].shape[2]
    width = size if block is None else min(block, size)

    def add(state: _Softmax, start: Array | int, unread: Array | int) -> _Softmax:
        part = {name: _slice(x, start, width) for name, x in columns.layer.items()}
        at = start + jnp.arange(width)
        keep = columns.keep(at)
        if size % width:  # the last block begins early, with columns of the block before it
            keep = keep & (at >= unread)[None, None, None]
        if keep.shape[1:3] != (1, 1):
            keep = jnp.broadcast_to(keep[:, :, None], (len(keep), *order, width)).reshape(len(keep), 1, -1, width)
        return _add_block(query, state, part, keep, score)

    if width == size:
        return add(state, 0, 0)

    def body(number: Array, state: _Softmax) -> _Softmax:
        start = number * width
        return add(state, jnp.minimum(start, size - width), start)

    return jax.lax.fori_loop(columns.first // width, -(-columns.end // width), body, state)


def _slice(x: Array, start: Array | int, width: int) -> Array:
    return x if x.shape[2] == width else jax.lax.dynamic_slice_in_dim(x, start, width, axis=2)


def _add_block(query: Array, state: _Softmax, part: Params, keep: Array, score: ScoreFunction) -> _Softmax:
    dtype = query.dtype
    scores = jnp.einsum("nhqk,nhsk->nhqs", query, part["k"].astype(dtype), preferred_element_type=jnp.float32)
    if "k_scale" in part:
        scores = scores * part["k_scale"][:, :, None]
    scores = jnp.where(keep, score.cap(scores), jnp.finfo(jnp.float32).min)
    peak = jnp.maximum(state.peak, scores.max(axis=-1, keepdims=True))
    weights, before = jnp.exp(scores - peak), jnp.exp(state.peak - peak)
    total = state.total * before + weights.sum(axis=-1, keepdims=True)
    if "v_scale" in part:
        weights = weights * part["v_scale"][:, :, None]
    added = jnp.einsum(
        "nhqs,nhsk->nhqk", weights.astype(dtype), part["v"].astype(dtype), preferred_element_type=jnp.float32
    )
    return _Softmax(peak, total, state.out * before + added)


def quantize_rows(x: Array) -> tuple[Array, Array]:
    """[..., K] -> (int8 [..., K], scales [...] float32), x being about their product: absmax / 127 of each row."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127.0
    return jnp.round(x / jnp.where(scale > 0, scale, 1.0)[..., None]).astype(jnp.int8), scale


def write(
    layer: Params, key: Array, value: Array, index: Array, *, ring: bool = False, active: Array | None = None
) -> Params:
    """A cache's layer with Q new tokens of each row.

    Args:
      layer: {"k", "v"} [B, KV, S, K]; in int8 with SCALES.
      key, value: [B, Q, KV, K].
      index: [] or [B] int32, position of the first of the tokens. Positions from S on are dropped.
      ring: position p is column p mod S instead.
      active: [B] bool, the rows that are written; None: all.
    """
    new = {"k": key, "v": value}
    if SCALES[0] in layer:
        for name, scale in zip(("k", "v"), SCALES, strict=True):
            new[name], new[scale] = quantize_rows(new[name])
    rows, queries = key.shape[:2]
    size = layer["k"].shape[2]
    if index.ndim == 0 and queries == 1 and active is None:
        return {
            name: jax.lax.dynamic_update_slice_in_dim(
                x, new[name].swapaxes(1, 2).astype(x.dtype), jnp.mod(index, size) if ring else index, axis=2
            )
            for name, x in layer.items()
        }
    columns = jnp.broadcast_to(index, (rows,))[:, None] + jnp.arange(queries)[None]
    columns = jnp.mod(columns, size) if ring else columns
    if active is not None:
        columns = jnp.where(active[:, None], columns, size)
    row = jnp.arange(rows)[:, None]
    return {name: x.at[row, :, columns].set(new[name].astype(x.dtype), mode="drop") for name, x in layer.items()}


def newest_positions(columns: Array, last: Array, size: int) -> Array:
    """The position that each column of a ring of `size` columns holds after position `last` was written: columns [s],
    last [...] -> [..., s]; negative: none yet."""
    last = jnp.expand_dims(last, -1)
    return last - jnp.mod(last - jnp.expand_dims(columns, range(last.ndim - 1)), size)


def ring_columns(window: int, queries: int, block: int, most: int) -> int:
    """Columns of a ring for `queries` tokens a step: the tokens that are written first must not overwrite keys that
    the first of them sees. A whole number of blocks, at most `most`."""
    return min(-(-(window + queries - 1) // block) * block, most)


def prefix_first(mask: Array) -> Array:
    """The first column of [P, C] bool in which any row has a token."""
    return jnp.argmax(jnp.any(mask, axis=0)).astype(jnp.int32)
