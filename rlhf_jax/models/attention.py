"""Attention: query, key and value, causal attention in blocks of queries, the same after a shared prefix.

Shape letters: B batch, P prefixes, G = B / P continuations of a prefix, Q queries, S keys, C keys of a prefix, D width,
H heads, KV heads of keys and values, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from rlhf_jax.models.decoder_context import Context, DropoutSite, ScoreFunction
from rlhf_jax.models.layers import Dense, norm
from rlhf_jax.models.linear import COLUMN_PARALLEL, ROW_PARALLEL
from rlhf_jax.models.rope import rotate
from rlhf_jax.parallel.sharding import constrain
from rlhf_jax.types import Array

# Queries a block of causal attention; measured best on CPU for 512 + 53 tokens (64 and 256 are slower backward).
QUERY_BLOCK = 128
ATTENTION = "attention"
"""`checkpoint_name` of outputs and log-sum-exp: all that a backward pass needs of the forward pass."""
SEGMENTS = 8
"""Parts of long rows. Each computes with the keys that its last query sees, and is in the program once."""


def last_columns(columns: Any, last: int | None) -> Any:
    """The last columns of each [B, S, ...]; None: all of them, of any array."""
    return columns if last is None else jax.tree.map(lambda x: x[:, x.shape[1] - last :], columns)


class Attention(nn.Module):
    """Query, key and value, their norms, rotary embedding, `attend_fn`, output projection."""

    context: Context

    @nn.compact
    def __call__(self, x: Array, rope: tuple[Array, Array] | None, attend_fn: Callable) -> tuple[Array, Any]:
        """x [..., D] -> ([..., D], the second output of attend_fn).

        `attend_fn` takes query [..., H, K], key and value [..., KV, K], KV being `context.held_heads`. With
        `context.last` = Q only the last Q columns of x [B, S, D] are queries, and the output is [B, Q, D].
        """
        context, config = self.context, self.context.config
        query, key, value = getattr(self, f"_{config.qkv}")(x)
        if config.qk_norm is not None:
            query, key = self._norm(query, "query_norm"), self._norm(key, "key_norm")
        query, query_rope = last_columns((query, rope), context.last)
        if rope is not None:
            query, key = rotate(query, query_rope), rotate(key, rope)
        out, extra = attend_fn(query, self._copied(key), self._copied(value))
        out = out.reshape(*out.shape[:-2], config.num_attention_heads * config.head_dim)
        out_site = DropoutSite.LORA_ATTENTION_OUT
        return self._dense(config.hidden_size, ROW_PARALLEL, config.attention_out_bias, out_site, "dense")(out), extra

    def _dense(self, features: int, names: tuple[str, str], bias: bool, site: DropoutSite, name: str) -> Dense:
        return Dense(self.context, features, names, bias, site, name=name)

    def _fused(self, x: Array) -> Array:
        config = self.context.config
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        site, bias = DropoutSite.LORA_QUERY_KEY_VALUE, config.query_key_value_bias
        return self._dense(heads * config.head_dim, COLUMN_PARALLEL, bias, site, "query_key_value")(x)

    def _interleaved(self, x: Array) -> tuple[Array, ...]:
        """One linear layer, the axis of its output (H, 3, K)."""
        config = self.context.config
        qkv = self._fused(x).reshape(*x.shape[:-1], config.num_attention_heads, 3, config.head_dim)
        qkv = constrain(self.context.layout, qkv, "rows", *[None] * (x.ndim - 2), "tensor")
        return tuple(qkv[..., i, :] for i in range(3))

    def _blocks(self, x: Array) -> tuple[Array, ...]:
        """One linear layer, the axis of its output (H + KV + KV, K)."""
        config = self.context.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = self._fused(x).reshape(*x.shape[:-1], heads + 2 * kv_heads, config.head_dim)
        return tuple(self._by_heads(part) for part in jnp.split(qkv, (heads, heads + kv_heads), axis=-2))

    def _separate(self, x: Array) -> tuple[Array, ...]:
        """Three linear layers."""
        config = self.context.config
        sizes = {"query": config.num_attention_heads, "key": config.num_key_value_heads}
        sizes["value"] = config.num_key_value_heads
        out = []
        for name, heads in sizes.items():
            site = DropoutSite[f"LORA_{name.upper()}"]
            part = self._dense(heads * config.head_dim, COLUMN_PARALLEL, config.query_key_value_bias, site, name)(x)
            out.append(self._by_heads(part.reshape(*x.shape[:-1], heads, config.head_dim)))
        return tuple(out)

    def _by_heads(self, x: Array) -> Array:
        return constrain(self.context.layout, x, "rows", *[None] * (x.ndim - 3), "tensor")

    def _copied(self, x: Array) -> Array:
        """[..., KV, K] with each head repeated as often as devices need it; the heads are gathered first, since they
        are small."""
        copies = self.context.held_heads // self.context.config.num_key_value_heads
        if copies == 1:
            return x
        all_heads = constrain(self.context.layout, x, "rows", *[None] * (x.ndim - 1))
        return self._by_heads(jnp.repeat(all_heads, copies, axis=-2))

    def _norm(self, x: Array, name: str) -> Array:
        """RMSNorm of [..., H, K] over each head or over all."""
        rows = x if self.context.config.qk_norm == "head" else x.reshape(*x.shape[:-2], -1)
        return norm(self.context, name=name)(rows).reshape(x.shape)


def attend(
    query: Array, key: Array, value: Array, keep: Array, drop: Callable[[Array], Array], score: ScoreFunction
) -> Array:
    """Scaled dot-product attention, softmax in float32. Vaswani et al. 2017, arXiv:1706.03762, equation 1.

    query [B, H, Q, K], key and value [B, H, S, K], keep bool [B, 1, Q or 1, S] -> [B, H, Q, K].
    The sum is divided after the product with the values: [Q, K] divisions rather than [Q, S].
    A query that may see no key gets the mean of the values rather than NaN; such rows are padding.
    """
    scores = _scores(score, _scale(score, query), key, keep, _KEYS_IN_ROWS)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1, keepdims=True)
    return (_weighted_sum(drop(weights), value) / total).astype(value.dtype)


def causal_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array,
    score: ScoreFunction,
    *,
    window: Array | int | None = None,
    drop: Callable[[Array], Array] | None = None,
    segment_ids: Array | None = None,
) -> Array:
    """Attention of the last Q of S positions to the unmasked positions up to themselves.

    query [B, Q, H, K], key and value [B, S, KV, K], mask [B, S] bool of keys -> [B, Q, H, K]. Head h reads key h // (H
    / KV). With `window` W position i sees i - W < j <= i; with `segment_ids` [B, S] int32 it sees its own segment only.
    Queries go in blocks, and a block skips the keys after its last query, which are all masked: nearly half of the work
    of long rows. `drop` takes a block's weights [B, H, Q, S'], of the first S' columns to the last Q of them. Without
    it the backward pass recomputes the weights from their log-sum-exp, so that none are kept (Dao et al. 2022,
    arXiv:2205.14135, algorithm 4); it has no forward-mode derivative.
    """
    if key.shape[2] != query.shape[2]:
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    if drop is None:
        return _causal(score, query, key, value, mask, window, segment_ids)
    query, key, value = (a.swapaxes(1, 2) for a in (query, key, value))
    out = []
    for start, stop, seen in _query_blocks(query.shape[2], key.shape[2]):
        keep = causal_mask(mask, stop - start, seen, window, segment_ids)
        part = (query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen], keep)
        out.append(attend(*part, drop, score))
    return jnp.concatenate(out, axis=2).swapaxes(1, 2)


def _query_blocks(queries: int, keys: int) -> list[tuple[int, int, int]]:
    """(first query, end, end of the keys that the last of them sees) of each block."""
    # Long rows take larger blocks, so that the program stays small.
    block = max(QUERY_BLOCK, -(-queries // SEGMENTS))
    ends = [(start, min(start + block, queries)) for start in range(0, queries, block)]
    return [(start, stop, stop + keys - queries) for start, stop in ends]


def _map_query_blocks(
    function: Callable[..., tuple[Any, tuple[Array, ...]]],
    arrays: tuple[Array, ...],
    axes: tuple[int, ...],
    keys: int,
    carry: Any = None,
) -> tuple[Any, tuple[Array, ...]]:
    """Applies `function` to one block of queries after another.

    Up to SEGMENTS blocks are unrolled; more go into a loop for each segment of the queries. Unrolled, XLA would hold
    the scores of all blocks at once.

    Args:
      function: (carry, arrays of a block, the columns of its first query and of the first key that none of it sees) ->
        (carry, outputs [B, H, Q, n] of the block).
      arrays: [B, H, Q, n], or with the queries on another axis.
      axes: of the queries in each array.
      keys: S; the queries are in the last of S columns.
      carry: of the first block.

    Returns:
      (carry, outputs [B, H, Q, n] of all blocks)
    """
    queries, outs = arrays[0].shape[axes[0]], []
    if queries <= SEGMENTS * QUERY_BLOCK:
        for start, stop, seen in _query_blocks(queries, keys):
            part = tuple(x[*[slice(None)] * axis, start:stop] for x, axis in zip(arrays, axes, strict=True))
            carry, out = function(carry, part, seen - stop + start, seen)
            outs.append(out)
        return carry, tuple(jnp.concatenate(parts, axis=2) for parts in zip(*outs, strict=True))
    blocks = -(-queries // QUERY_BLOCK)
    padding = blocks * QUERY_BLOCK - queries  # queries before the first column see no key

    def split(x: Array, axis: int) -> Array:
        x = jnp.pad(x, [(padding if i == axis else 0, 0) for i in range(x.ndim)])
        x = x.reshape(*x.shape[:axis], blocks, QUERY_BLOCK, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    parts = tuple(split(x, axis) for x, axis in zip(arrays, axes, strict=True))
    begin, loop = keys - blocks * QUERY_BLOCK, -(-blocks // SEGMENTS)
    for start in range(0, blocks, loop):
        stop = min(start + loop, blocks)
        first, seen = begin + QUERY_BLOCK * jnp.arange(start, stop), begin + QUERY_BLOCK * stop

        def step(carry: Any, block: tuple, seen: int = seen) -> tuple[Any, tuple[Array, ...]]:
            # Without the barrier a scan over layers would compute the masks of all blocks once, and keep them.
            return function(carry, *jax.lax.optimization_barrier(block), seen)

        carry, out = jax.lax.scan(step, carry, (tuple(x[start:stop] for x in parts), first))
        outs.append(out)
    joined = (jnp.moveaxis(jnp.concatenate(parts), 0, 2) for parts in zip(*outs, strict=True))
    return carry, tuple(x.reshape(*x.shape[:2], -1, x.shape[4])[:, :, padding:] for x in joined)


def causal_mask(
    mask: Array,
    queries: int,
    seen: int,
    window: Array | int | None,
    segment_ids: Array | None,
    first: Array | int | None = None,
) -> Array:
    """The keys before column `seen` that each of `queries` columns sees: bool [B, 1, Q, seen].

    `first` is the column of the first query, and may be traced; None: the queries are the last of these columns.
    """
    columns = _columns(seen - queries if first is None else first, queries)
    keep = causal_keep(columns, jnp.arange(seen), window)
    keep = mask[:, None, None, :seen] & keep[None, None]
    if segment_ids is None:
        return keep
    if first is None or isinstance(first, int):
        query_segment_ids = segment_ids[:, seen - queries : seen]
    else:
        query_segment_ids = jnp.take(segment_ids, columns, axis=1, mode="clip")
    return keep & (query_segment_ids[:, None, :, None] == segment_ids[:, None, None, :seen])


def _columns(first: Array | int, count: int) -> Array:
    return jnp.arange(first, first + count) if isinstance(first, int) else first + jnp.arange(count)


def causal_keep(queries: Array, keys: Array, window: Array | int | None) -> Array:
    """Which keys a query may see by their columns: [Q], [S] -> bool [Q, S]."""
    keep = queries[:, None] >= keys[None, :]
    return keep if window is None else keep & (queries[:, None] - keys[None, :] < window)


# Matrix products that end in a short K are slow on CPU when they sum over the longer of the first operand's axes: a
# third of the speed of the same product transposed. So scores come from [K, Q] and [K, S], and the gradients of keys
# and values are made as [K, S].


def _scores(score: ScoreFunction, query: Array, key: Array, keep: Array, equation: str = "bhkq,bhks->bhqs") -> Array:
    """[B, H, K, Q] scaled, [B, H, K, S], keep -> [B, H, Q, S] float32; `equation` for other layouts."""
    scores = score.cap(jnp.einsum(equation, query, key, preferred_element_type=jnp.float32))
    return jnp.where(keep, scores, jnp.finfo(jnp.float32).min)


# A cache is stored as [S, K]; transposing it for each decoded token would cost more than the product.
_KEYS_IN_ROWS = "bhqk,bhsk->bhqs"


def _weighted_sum(weights: Array, value: Array) -> Array:
    """[B, H, Q, S] float32, [B, H, S, K] -> [B, H, Q, K] float32."""
    return jnp.einsum("bhqs,bhsk->bhqk", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)


def _sum_over_queries(weights: Array, rows: Array) -> Array:
    """[B, H, Q, S] float32, [B, H, Q, K] -> [B, H, K, S] float32: for each key the sum over queries."""
    return jnp.einsum("bhqk,bhqs->bhks", rows, weights.astype(rows.dtype), preferred_element_type=jnp.float32)


def _scale(score: ScoreFunction, query: Array) -> Array:
    return query * jnp.asarray(score.scale, query.dtype)


def _softmax_weighted_mean(scores: Array, value: Array) -> tuple[Array, Array]:
    """[B, H, Q, S], [B, H, S, K] -> (weighted mean of the values [B, H, Q, K], log-sum-exp [B, H, Q, 1]), float32."""
    peak = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    return _weighted_sum(weights, value) / total, peak + jnp.log(total)


def _score_gradient(
    score: ScoreFunction, scores: Array, logsumexp: Array, d_out: Array, value: Array, dot: Array
) -> tuple[Array, Array]:
    """(weights, gradient of the scores), both [B, H, Q, S] float32; d_out [B, H, K, Q], value [B, H, K, S], dot
    [B, H, Q, 1] the products of output and d_out."""
    weights = jnp.exp(scores - logsumexp)
    d_weights = jnp.einsum("bhkq,bhks->bhqs", d_out, value, preferred_element_type=jnp.float32)
    d_scores = weights * (d_weights - dot)
    return weights, d_scores if score.softcap is None else d_scores * score.slope(scores)


def _keys_last(x: Array) -> Array:
    return x.transpose(0, 2, 3, 1)  # [B, S, H, K] -> [B, H, K, S]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _causal(score, query, key, value, mask, window, segment_ids) -> Array:
    return _causal_forward(score, query, key, value, mask, window, segment_ids)[0]


def _causal_forward(score, query, key, value, mask, window, segment_ids) -> tuple[Array, tuple]:
    queries, keys, values = _keys_last(_scale(score, query)), _keys_last(key), value.swapaxes(1, 2)

    def block(_: None, part: tuple[Array, ...], first: Array | int, seen: int) -> tuple[None, tuple[Array, Array]]:
        keep = causal_mask(mask, part[0].shape[3], seen, window, segment_ids, first)
        return None, _softmax_weighted_mean(_scores(score, part[0], keys[..., :seen], keep), values[:, :, :seen])

    _, (out, logsumexp) = _map_query_blocks(block, (queries,), (3,), key.shape[1])
    out, logsumexp = checkpoint_name((out.swapaxes(1, 2).astype(value.dtype), logsumexp), ATTENTION)
    return out, (query, key, value, mask, window, segment_ids, out, logsumexp)


def _causal_backward(score, residuals: tuple, d_out: Array) -> tuple[Array | None, ...]:
    query, key, value, mask, window, segment_ids, out, logsumexp = residuals
    query_rows, keys, values = _scale(score, query).swapaxes(1, 2), _keys_last(key), _keys_last(value)
    queries, key_rows = query_rows.swapaxes(2, 3), key.swapaxes(1, 2)
    dot = _row_dot(out, d_out)
    d_out_rows = d_out.swapaxes(1, 2)
    d_outs = d_out_rows.swapaxes(2, 3)

    def block(carry: tuple[Array, Array], part: tuple[Array, ...], first: Array | int, seen: int):
        (d_key, d_value), (queries, query_rows, logsumexp, d_outs, dot, d_out_rows) = carry, part
        keep = causal_mask(mask, queries.shape[3], seen, window, segment_ids, first)
        scores = _scores(score, queries, keys[..., :seen], keep)
        weights, d_scores = _score_gradient(score, scores, logsumexp, d_outs, values[..., :seen], dot)
        d_query = _weighted_sum(d_scores, key_rows[:, :, :seen])
        d_key = d_key.at[..., :seen].add(_sum_over_queries(d_scores, query_rows))
        d_value = d_value.at[..., :seen].add(_sum_over_queries(weights, d_out_rows))
        return (d_key, d_value), (d_query,)

    zeros = jnp.zeros(keys.shape, jnp.float32)
    arrays, axes = (queries, query_rows, logsumexp, d_outs, dot, d_out_rows), (3, 2, 2, 3, 2, 2)
    (d_key, d_value), (d_query,) = _map_query_blocks(block, arrays, axes, key.shape[1], (zeros, zeros))
    d_query = _scale(score, d_query).swapaxes(1, 2).astype(query.dtype)
    d_key, d_value = (x.transpose(0, 3, 1, 2).astype(key.dtype) for x in (d_key, d_value))
    return d_query, d_key, d_value, None, None, None


def _row_dot(out: Array, d_out: Array) -> Array:
    """[B, Q, H, K] twice -> [B, H, Q, 1] float32."""
    return (out.astype(jnp.float32) * d_out).sum(axis=-1).swapaxes(1, 2)[..., None]


_causal.defvjp(_causal_forward, _causal_backward)


def _group_by_prefix(x: Array, prefixes: int) -> Array:
    """[B, H, Q, n] -> [P, H, G Q, n], the queries of all continuations of a prefix side by side."""
    _, heads, queries, size = x.shape
    x = x.reshape(prefixes, -1, heads, queries, size).swapaxes(1, 2)
    return x.reshape(prefixes, heads, -1, size)


def _ungroup(x: Array, rows: int) -> Array:
    """The inverse of `_group_by_prefix`: [P, H, G Q, n] -> [B, H, Q, n]."""
    prefixes, heads, _, size = x.shape
    x = x.reshape(prefixes, heads, rows // prefixes, -1, size).swapaxes(1, 2)
    return x.reshape(rows, heads, -1, size)


def attend_after_prefix(
    query: Array,
    key: Array,
    value: Array,
    keep: Array,
    prefix_key: Array,
    prefix_value: Array,
    prefix_keep: Array,
    score: ScoreFunction,
    *,
    prefix_window: Array | None = None,
) -> Array:
    """Attention of continuations to themselves and to the prefix that G of them share, in one softmax.

    Row i continues prefix i // G, G = B / P. query [B, H, Q, K], key and value [B, KV, S, K], keep bool [B or 1, 1, Q
    or 1, S], prefix_key and prefix_value [P, KV, C, K], prefix_keep [P, C] bool, prefix_window [Q, C] bool or None ->
    [B, H, Q, K]. Neither a prefix nor a key that several heads read is copied: their queries are grouped instead. The
    backward pass is as that of `causal_attention`.
    """
    masks = _prefix_masks(query, key, keep, prefix_key, prefix_keep, prefix_window)
    out = _after_prefix(score, _by_key_head(query, key), key, value, masks[0], prefix_key, prefix_value, masks[1])
    return out.reshape(query.shape)


def causal_attention_after_prefix(
    query: Array,
    key: Array,
    value: Array,
    mask: Array,
    prefix_key: Array,
    prefix_value: Array,
    prefix_mask: Array,
    score: ScoreFunction,
    *,
    window: Array | int | None = None,
) -> Array:
    """`attend_after_prefix` of continuations to the prefix and to the unmasked positions up to themselves.

    query [B, H, T, K], key and value [B, KV, T, K], mask [B, T] bool, prefix_key and prefix_value [P, KV, C, K],
    prefix_mask [P, C] bool -> [B, H, T, K]. `window` and the blocks of queries are as in `causal_attention`; the
    columns of the prefix come before those of the continuations.
    """
    if query.shape[2] > QUERY_BLOCK:
        return _causal_after_prefix(score, query, key, value, mask, prefix_key, prefix_value, prefix_mask, window)
    keep, prefix_window = _causal_prefix_masks(mask, prefix_mask, window, query.shape[2], 0, query.shape[2])
    prefix = (prefix_key, prefix_value, prefix_mask, score)
    return attend_after_prefix(query, key, value, keep, *prefix, prefix_window=prefix_window)


def _causal_prefix_masks(
    mask: Array, prefix_mask: Array, window: Array | int | None, queries: int, first: Array | int, seen: int
) -> tuple[Array, Array | None]:
    """`keep` and `prefix_window` of `attend_after_prefix` for a block of queries from column `first`."""
    before = prefix_mask.shape[1]
    columns = _columns(before + first, queries)
    keep = mask[:, None, None, :seen] & causal_keep(columns, jnp.arange(before, before + seen), window)[None, None]
    return keep, None if window is None else causal_keep(columns, jnp.arange(before), window)


def _by_key_head(query: Array, key: Array) -> Array:
    """[B, H, Q, n] -> [B, KV, H / KV * Q, n], the queries of all heads that read a key side by side."""
    rows, heads, queries, size = query.shape
    shared = heads // key.shape[1]
    return query.reshape(rows, key.shape[1], shared * queries, size) if shared > 1 else query


def _prefix_masks(
    query: Array, key: Array, keep: Array, prefix_key: Array, prefix_keep: Array, prefix_window: Array | None
) -> tuple[Array, Array]:
    """`keep` of the queries as `_by_key_head` has them, and that of the prefix as `_group_by_prefix` does."""
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        keep = jnp.tile(keep, (1, 1, shared if keep.shape[2] > 1 else 1, 1))
    prefix_keep = prefix_keep[:, None, None, :]
    if prefix_window is not None:
        copies = shared * query.shape[0] // prefix_key.shape[0]
        prefix_keep = prefix_keep & jnp.tile(prefix_window, (copies, 1))[None, None]
    return keep, prefix_keep


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _after_prefix(score, query, key, value, keep, prefix_key, prefix_value, prefix_keep):
    return _after_prefix_forward(score, query, key, value, keep, prefix_key, prefix_value, prefix_keep)[0]


def _after_prefix_forward(score, query, key, value, keep, prefix_key, prefix_value, prefix_keep):
    rows, prefixes = query.shape[0], prefix_key.shape[0]
    scaled = _scale(score, query)
    grouped = _group_by_prefix(scaled, prefixes)
    prefix_scores = _scores(score, grouped, prefix_key, prefix_keep, _KEYS_IN_ROWS)
    own_scores = _scores(score, scaled, key, keep, _KEYS_IN_ROWS)
    prefix_peak = _ungroup(prefix_scores.max(axis=-1, keepdims=True), rows)
    peak = jnp.maximum(prefix_peak, own_scores.max(axis=-1, keepdims=True))
    prefix_weights = jnp.exp(prefix_scores - _group_by_prefix(peak, prefixes))
    own_weights = jnp.exp(own_scores - peak)
    total = _ungroup(prefix_weights.sum(axis=-1, keepdims=True), rows) + own_weights.sum(axis=-1, keepdims=True)
    out = (_ungroup(_weighted_sum(prefix_weights, prefix_value), rows) + _weighted_sum(own_weights, value)) / total
    out, logsumexp = checkpoint_name((out.astype(value.dtype), peak + jnp.log(total)), ATTENTION)
    return out, (query, key, value, keep, prefix_key, prefix_value, prefix_keep, out, logsumexp)


def _after_prefix_gradients(score, residuals, d_out):
    """Gradients of query, key, value, prefix_key and prefix_value, float32."""
    query, key, value, keep, prefix_key, prefix_value, prefix_keep, out, logsumexp = residuals
    rows, prefixes = query.shape[0], prefix_key.shape[0]
    scaled = _scale(score, query)
    dot = (out.astype(jnp.float32) * d_out).sum(axis=-1, keepdims=True)
    grouped, grouped_d_out = _group_by_prefix(scaled, prefixes), _group_by_prefix(d_out, prefixes)

    def gradients(queries, d_out, logsumexp, dot, key, value, keep):
        scores = _scores(score, queries.swapaxes(2, 3), key.swapaxes(2, 3), keep)
        weights, d_scores = _score_gradient(score, scores, logsumexp, d_out.swapaxes(2, 3), value.swapaxes(2, 3), dot)
        d_key, d_value = _sum_over_queries(d_scores, queries), _sum_over_queries(weights, d_out)
        return _weighted_sum(d_scores, key), d_key.swapaxes(2, 3), d_value.swapaxes(2, 3)

    logsumexps, dots = _group_by_prefix(logsumexp, prefixes), _group_by_prefix(dot, prefixes)
    prefix = (prefix_key, prefix_value, prefix_keep)
    d_query_prefix, d_prefix_key, d_prefix_value = gradients(grouped, grouped_d_out, logsumexps, dots, *prefix)
    d_query_own, d_key, d_value = gradients(scaled, d_out, logsumexp, dot, key, value, keep)
    d_query = _scale(score, _ungroup(d_query_prefix, rows) + d_query_own)
    return d_query, d_key, d_value, d_prefix_key, d_prefix_value


def _after_prefix_backward(score, residuals, d_out):
    query = residuals[0]
    gradients = (x.astype(query.dtype) for x in _after_prefix_gradients(score, residuals, d_out))
    d_query, d_key, d_value, d_prefix_key, d_prefix_value = gradients
    return d_query, d_key, d_value, None, d_prefix_key, d_prefix_value, None


_after_prefix.defvjp(_after_prefix_forward, _after_prefix_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _causal_after_prefix(score, query, key, value, mask, prefix_key, prefix_value, prefix_mask, window):
    arguments = (query, key, value, mask, prefix_key, prefix_value, prefix_mask, window)
    return _causal_after_prefix_forward(score, *arguments)[0]


def _block_after_prefix(arguments: tuple, query: Array, first: Array | int, seen: int) -> tuple:
    """The arguments of `_after_prefix` for a block of queries [B, H, Q, K]; `arguments` those of all."""
    _, key, value, mask, prefix_key, prefix_value, prefix_mask, window = arguments
    keep, prefix_window = _causal_prefix_masks(mask, prefix_mask, window, query.shape[2], first, seen)
    keep, prefix_keep = _prefix_masks(query, key, keep, prefix_key, prefix_mask, prefix_window)
    suffix_arguments = (_by_key_head(query, key), key[:, :, :seen], value[:, :, :seen], keep)
    return (*suffix_arguments, prefix_key, prefix_value, prefix_keep)


def _causal_after_prefix_forward(score, *arguments):
    query, key, value = arguments[:3]

    def block(_: None, part: tuple[Array], first: Array | int, seen: int) -> tuple[None, tuple[Array, Array]]:
        out, residuals = _after_prefix_forward(score, *_block_after_prefix(arguments, part[0], first, seen))
        logsumexp = residuals[-1]
        return None, (out.reshape(part[0].shape), logsumexp.reshape(*part[0].shape[:3], 1))

    _, parts = _map_query_blocks(block, (query,), (2,), key.shape[2])
    out, logsumexp = checkpoint_name(parts, ATTENTION)
    return out, (arguments, out, logsumexp)


def _causal_after_prefix_backward(score, residuals, d_out):
    arguments, out, logsumexp = residuals
    query, key, value, _, prefix_key, prefix_value, *_ = arguments

    def block(sums: tuple[Array, ...], part: tuple[Array, ...], first: Array | int, seen: int):
        query, *outs = part
        block_arguments = _block_after_prefix(arguments, query, first, seen)
        out, logsumexp, d_out = (_by_key_head(x, key) for x in outs)
        d_query, *gradients = _after_prefix_gradients(score, (*block_arguments, out, logsumexp), d_out)
        d_key, d_value = (x.at[:, :, :seen].add(d) for x, d in zip(sums[:2], gradients[:2], strict=True))
        return (d_key, d_value, sums[2] + gradients[2], sums[3] + gradients[3]), (d_query.reshape(query.shape),)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (key, value, prefix_key, prefix_value))
    arrays = (query, out, logsumexp, d_out)
    sums, (d_query,) = _map_query_blocks(block, arrays, (2,) * 4, key.shape[2], zeros)
    d_query, d_key, d_value, d_prefix_key, d_prefix_value = (x.astype(query.dtype) for x in (d_query, *sums))
    return d_query, d_key, d_value, None, d_prefix_key, d_prefix_value, None, None


_causal_after_prefix.defvjp(_causal_after_prefix_forward, _causal_after_prefix_backward)
