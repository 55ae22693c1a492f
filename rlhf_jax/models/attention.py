"""Attention: rotary embedding, causal attention in blocks of queries, attention after a shared prefix.

Shape letters: B batch, P prefixes, G = B / P continuations of a prefix, Q queries, S keys, C keys of a prefix, D width,
H heads, K head size, R rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from rlhf_jax.models.context import Context, DropoutSite
from rlhf_jax.models.layers import Dense
from rlhf_jax.models.linear import COLUMN_PARALLEL, ROW_PARALLEL
from rlhf_jax.parallel.sharding import constrain
from rlhf_jax.types import Array

# Queries a block of causal attention; measured best on CPU for 512 + 53 tokens (64 and 256 are slower backward).
QUERY_BLOCK = 128


def last_columns(columns: Any, last: int | None) -> Any:
    """The last columns of each [B, S, ...]; None: all of them, of any array."""
    return columns if last is None else jax.tree.map(lambda x: x[:, x.shape[1] - last :], columns)


class Attention(nn.Module):
    """QKV (interleaved per head: H, 3, K), rotary embedding, `attend_fn`, output projection."""

    context: Context

    @nn.compact
    def __call__(self, x: Array, rope: tuple[Array, Array], attend_fn: Callable) -> tuple[Array, Any]:
        """x [..., D] -> ([..., D], the second output of attend_fn).

        `attend_fn` takes query, key and value, each [..., H, K]. With `context.last` = Q only the last Q columns of
        x [B, S, D] are queries, and the output is [B, Q, D].
        """
        context, config = self.context, self.context.config
        width, bias = config.num_attention_heads * config.head_dim, config.attention_bias
        qkv_site, out_site = DropoutSite.LORA_QUERY_KEY_VALUE, DropoutSite.LORA_ATTENTION_OUT
        qkv = Dense(context, 3 * width, COLUMN_PARALLEL, bias, qkv_site, name="query_key_value")(x)
        qkv = qkv.reshape(*x.shape[:-1], config.num_attention_heads, 3, config.head_dim)
        qkv = constrain(context.layout, qkv, "rows", *[None] * (x.ndim - 2), "tensor")
        query, key, value = (qkv[..., i, :] for i in range(3))
        query, query_rope = last_columns((query, rope), context.last)
        out, extra = attend_fn(rotate(query, query_rope), rotate(key, rope), value)
        out = out.reshape(*out.shape[:-2], width)
        return Dense(context, config.hidden_size, ROW_PARALLEL, bias, out_site, name="dense")(out), extra


def rotary_angles(positions: Array, ndims: int, base: float) -> tuple[Array, Array]:
    """Cosine and sine of the rotary angles, position * base^(-2i/R), i < R/2. Su et al. 2021, arXiv:2104.09864.

    positions [...] int32, R = ndims -> two float32 arrays [..., 1, R/2]; the 1 broadcasts over heads.
    """
    inverse_frequency = base ** -(jnp.arange(0, ndims, 2, dtype=jnp.float32) / max(ndims, 1))
    inverse_frequency = inverse_frequency.reshape((1,) * (positions.ndim + 1) + inverse_frequency.shape)
    angles = positions[..., None, None].astype(jnp.float32) * inverse_frequency
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, rope: tuple[Array, Array]) -> Array:
    """Rotate the first R dimensions of each head, dimension i paired with i + R/2 (transformers' `rotate_half`).

    x [..., H, K], rope two arrays [..., 1, R/2] -> [..., H, K] in x's dtype; computed in float32.
    """
    cos, sin = rope
    half = cos.shape[-1]
    if half == 0:
        return x
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)


def attend(query: Array, key: Array, value: Array, keep: Array, drop: Callable[[Array], Array]) -> Array:
    """Scaled dot-product attention, softmax in float32. Vaswani et al. 2017, arXiv:1706.03762, equation 1.

    query [B, H, Q, K], key and value [B, H, S, K], keep bool [B, 1, Q or 1, S] -> [B, H, Q, K].
    The sum is divided after the product with the values: [Q, K] divisions rather than [Q, S].
    A query that may see no key gets the mean of the values rather than NaN; such rows are padding.
    """
    scores = _scores(_scale(query), key, keep, _KEYS_IN_ROWS)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1, keepdims=True)
    return (_weighted_sum(drop(weights), value) / total).astype(value.dtype)


def causal_attention(
    query: Array, key: Array, value: Array, mask: Array, drop: Callable[[Array, int], Array] | None = None
) -> Array:
    """Attention of the last Q of S positions to the unmasked positions up to themselves.

    query [B, Q, H, K], key and value [B, S, H, K], mask [B, S] bool of keys -> [B, Q, H, K]. Queries go in blocks, and
    a block skips the keys after its last query, which are all masked: nearly half of the work of long rows.
    `drop` takes a block's weights [B, H, Q, S'] and its first query. Without it the backward pass recomputes the
    weights from their log-sum-exp, so that none are kept (Dao et al. 2022, arXiv:2205.14135, algorithm 4); it has no
    forward-mode derivative.
    """
    if drop is None:
        return _causal(query, key, value, mask)
    query, key, value = (a.swapaxes(1, 2) for a in (query, key, value))
    out = []
    for start, stop, seen in _query_blocks(query.shape[2], key.shape[2]):
        keep = _causal_mask(mask, stop - start, seen)
        part = (query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen], keep)
        out.append(attend(*part, lambda weights, start=start: drop(weights, start)))
    return jnp.concatenate(out, axis=2).swapaxes(1, 2)


def _query_blocks(queries: int, keys: int) -> list[tuple[int, int, int]]:
    """(first query, end, end of the keys that the last of them sees) of each block."""
    # Long rows take larger blocks, so that the program stays small.
    block = max(QUERY_BLOCK, -(-queries // 8))
    ends = [(start, min(start + block, queries)) for start in range(0, queries, block)]
    return [(start, stop, stop + keys - queries) for start, stop in ends]


def _causal_mask(mask: Array, queries: int, seen: int) -> Array:
    causal = jnp.arange(seen - queries, seen)[:, None] >= jnp.arange(seen)[None, :]
    return mask[:, None, None, :seen] & causal[None, None]


# Matrix products that end in a short K are slow on CPU when they sum over the longer of the first operand's axes: a
# third of the speed of the same product transposed. So scores come from [K, Q] and [K, S], and the gradients of keys
# and values are made as [K, S].


def _scores(query: Array, key: Array, keep: Array, equation: str = "bhkq,bhks->bhqs") -> Array:
    """[B, H, K, Q] scaled, [B, H, K, S], keep -> [B, H, Q, S] float32; `equation` for other layouts."""
    scores = jnp.einsum(equation, query, key, preferred_element_type=jnp.float32)
    return jnp.where(keep, scores, jnp.finfo(jnp.float32).min)


# A cache is stored as [S, K]; transposing it for each decoded token would cost more than the product.
_KEYS_IN_ROWS = "bhqk,bhsk->bhqs"


def _weighted_sum(weights: Array, value: Array) -> Array:
    """[B, H, Q, S] float32, [B, H, S, K] -> [B, H, Q, K] float32."""
    return jnp.einsum("bhqs,bhsk->bhqk", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)


def _sum_over_queries(weights: Array, rows: Array) -> Array:
    """[B, H, Q, S] float32, [B, H, Q, K] -> [B, H, K, S] float32: for each key the sum over queries."""
    return jnp.einsum("bhqk,bhqs->bhks", rows, weights.astype(rows.dtype), preferred_element_type=jnp.float32)


def _scale(query: Array) -> Array:
    return query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)


def _softmax_weighted_mean(scores: Array, value: Array) -> tuple[Array, Array]:
    """[B, H, Q, S], [B, H, S, K] -> (weighted mean of the values [B, H, Q, K], log-sum-exp [B, H, Q, 1]), float32."""
    peak = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    return _weighted_sum(weights, value) / total, peak + jnp.log(total)


def _score_gradient(scores: Array, logsumexp: Array, d_out: Array, value: Array, dot: Array) -> tuple[Array, Array]:
    """(weights, gradient of the scores), both [B, H, Q, S] float32; d_out [B, H, K, Q], value [B, H, K, S], dot
    [B, H, Q, 1] the products of output and d_out."""
    weights = jnp.exp(scores - logsumexp)
    d_weights = jnp.einsum("bhkq,bhks->bhqs", d_out, value, preferred_element_type=jnp.float32)
    return weights, weights * (d_weights - dot)


def _keys_last(x: Array) -> Array:
    return x.transpose(0, 2, 3, 1)  # [B, S, H, K] -> [B, H, K, S]


@jax.custom_vjp
def _causal(query: Array, key: Array, value: Array, mask: Array) -> Array:
    return _causal_forward(query, key, value, mask)[0]


def _causal_forward(query: Array, key: Array, value: Array, mask: Array) -> tuple[Array, tuple]:
    queries, keys, values = _keys_last(_scale(query)), _keys_last(key), value.swapaxes(1, 2)
    outs, sums = [], []
    for start, stop, seen in _query_blocks(query.shape[1], key.shape[1]):
        scores = _scores(queries[..., start:stop], keys[..., :seen], _causal_mask(mask, stop - start, seen))
        out, logsumexp = _softmax_weighted_mean(scores, values[:, :, :seen])
        outs.append(out)
        sums.append(logsumexp)
    out = jnp.concatenate(outs, axis=2).swapaxes(1, 2).astype(value.dtype)
    return out, (query, key, value, mask, out, jnp.concatenate(sums, axis=2))


def _causal_backward(residuals: tuple, d_out: Array) -> tuple[Array, Array, Array, None]:
    query, key, value, mask, out, logsumexp = residuals
    query_rows, keys, values = _scale(query).swapaxes(1, 2), _keys_last(key), _keys_last(value)
    queries, key_rows = query_rows.swapaxes(2, 3), key.swapaxes(1, 2)
    dot = _row_dot(out, d_out)
    d_out_rows = d_out.swapaxes(1, 2)
    d_outs = d_out_rows.swapaxes(2, 3)
    d_query = []
    d_key = d_value = jnp.zeros(keys.shape, jnp.float32)
    for start, stop, seen in _query_blocks(query.shape[1], key.shape[1]):
        scores = _scores(queries[..., start:stop], keys[..., :seen], _causal_mask(mask, stop - start, seen))
        part = (logsumexp[:, :, start:stop], d_outs[..., start:stop], values[..., :seen], dot[:, :, start:stop])
        weights, d_scores = _score_gradient(scores, *part)
        d_query.append(_weighted_sum(d_scores, key_rows[:, :, :seen]))
        d_key = d_key.at[..., :seen].add(_sum_over_queries(d_scores, query_rows[:, :, start:stop]))
        d_value = d_value.at[..., :seen].add(_sum_over_queries(weights, d_out_rows[:, :, start:stop]))
    d_query = _scale(jnp.concatenate(d_query, axis=2)).swapaxes(1, 2).astype(query.dtype)
    d_key, d_value = (x.transpose(0, 3, 1, 2).astype(key.dtype) for x in (d_key, d_value))
    return d_query, d_key, d_value, None


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


@jax.custom_vjp
def attend_after_prefix(
    query: Array, key: Array, value: Array, keep: Array, prefix_key: Array, prefix_value: Array, prefix_keep: Array
) -> Array:
    """Attention of continuations to themselves and to the prefix that G of them share, in one softmax.

    Row i continues prefix i // G, G = B / P. query [B, H, Q, K], key and value [B, H, S, K], keep bool [B or 1, 1, Q or
    1, S], prefix_key and prefix_value [P, H, C, K], prefix_keep [P, C] bool -> [B, H, Q, K]. The prefix is never copied
    for its continuations: their queries are grouped instead. The backward pass is as that of `causal_attention`.
    """
    return _after_prefix_forward(query, key, value, keep, prefix_key, prefix_value, prefix_keep)[0]


def _after_prefix_forward(query, key, value, keep, prefix_key, prefix_value, prefix_keep):
    rows, prefixes = query.shape[0], prefix_key.shape[0]
    scaled = _scale(query)
    grouped, prefix_mask = _group_by_prefix(scaled, prefixes), prefix_keep[:, None, None, :]
    prefix_scores = _scores(grouped, prefix_key, prefix_mask, _KEYS_IN_ROWS)
    own_scores = _scores(scaled, key, keep, _KEYS_IN_ROWS)
    prefix_peak = _ungroup(prefix_scores.max(axis=-1, keepdims=True), rows)
    peak = jnp.maximum(prefix_peak, own_scores.max(axis=-1, keepdims=True))
    prefix_weights = jnp.exp(prefix_scores - _group_by_prefix(peak, prefixes))
    own_weights = jnp.exp(own_scores - peak)
    total = _ungroup(prefix_weights.sum(axis=-1, keepdims=True), rows) + own_weights.sum(axis=-1, keepdims=True)
    out = (_ungroup(_weighted_sum(prefix_weights, prefix_value), rows) + _weighted_sum(own_weights, value)) / total
    out = out.astype(value.dtype)
    residuals = (query, key, value, keep, prefix_key, prefix_value, prefix_keep, out, peak + jnp.log(total))
    return out, residuals


def _after_prefix_backward(residuals, d_out):
    query, key, value, keep, prefix_key, prefix_value, prefix_keep, out, logsumexp = residuals
    rows, prefixes = query.shape[0], prefix_key.shape[0]
    scaled = _scale(query)
    dot = (out.astype(jnp.float32) * d_out).sum(axis=-1, keepdims=True)
    grouped, grouped_d_out = _group_by_prefix(scaled, prefixes), _group_by_prefix(d_out, prefixes)

    def gradients(queries, d_out, logsumexp, dot, key, value, keep):
        scores = _scores(queries.swapaxes(2, 3), key.swapaxes(2, 3), keep)
        weights, d_scores = _score_gradient(scores, logsumexp, d_out.swapaxes(2, 3), value.swapaxes(2, 3), dot)
        d_key, d_value = _sum_over_queries(d_scores, queries), _sum_over_queries(weights, d_out)
        return _weighted_sum(d_scores, key), d_key.swapaxes(2, 3), d_value.swapaxes(2, 3)

    logsumexps, dots = _group_by_prefix(logsumexp, prefixes), _group_by_prefix(dot, prefixes)
    prefix = (prefix_key, prefix_value, prefix_keep[:, None, None, :])
    d_query_prefix, d_prefix_key, d_prefix_value = gradients(grouped, grouped_d_out, logsumexps, dots, *prefix)
    d_query_own, d_key, d_value = gradients(scaled, d_out, logsumexp, dot, key, value, keep)
    d_query = _scale(_ungroup(d_query_prefix, rows) + d_query_own)
    d_inputs = (d_query, d_key, d_value, None, d_prefix_key, d_prefix_value, None)
    return tuple(None if x is None else x.astype(query.dtype) for x in d_inputs)


attend_after_prefix.defvjp(_after_prefix_forward, _after_prefix_backward)
