"""What decoders are made of, as functions of arrays: rotary embedding, GELU, attention, dropout keyed per row.

Shape letters: B batch, P prefixes, S keys, C keys of a prefix, Q queries, H heads, K head size, R rotated dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models.quantization import dequantize, is_int8
from rlhf_jax.parallel.sharding import Layout, constrain
from rlhf_jax.types import Array

# Queries a block of causal attention; measured best on CPU for 512 + 53 tokens (64 and 256 are slower backward).
QUERY_BLOCK = 128


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def product(
    layout: Layout | None, names: tuple[str | None, ...], dtype: Any, x: Array, kernel: Array, bias: Array | None
) -> Array:
    """x @ kernel + bias, computed in x's dtype; the gradients of kernel and bias are summed over rows in float32.

    x [..., D], kernel [D, F] and bias [F] of any dtype -> [..., F] in `dtype`. `names` are those of the kernel's axes:
    what `fsdp` splits is gathered here, forward and again backward, so that the whole kernel is never kept, and its
    gradient is reduced straight into its shards.
    """
    return _product_forward(layout, names, dtype, x, kernel, bias)[0]


def _gathered(layout: Layout | None, names: tuple[str | None, ...], x: Array, kernel: Any) -> Array:
    names = tuple(None if name == "fsdp" else name for name in names)
    if is_int8(kernel):  # sent as int8
        return dequantize(jax.tree.map(lambda part: constrain(layout, part, *names), kernel), x.dtype)
    return constrain(layout, kernel.astype(x.dtype), *names)


def _product_forward(layout, names, dtype, x, kernel, bias):
    out = jnp.einsum("...d,df->...f", x, _gathered(layout, names, x, kernel), preferred_element_type=dtype)
    if bias is not None:
        out = out + bias.astype(dtype).reshape((1,) * (out.ndim - 1) + bias.shape)
    return out, (x, kernel, bias)


def _product_backward(layout, names, dtype, kept, upstream):
    x, kernel, bias = kept
    narrow = upstream.astype(x.dtype)
    to_x = jnp.einsum("...f,df->...d", narrow, _gathered(layout, names, x, kernel))
    to_kernel = _to_kernel(layout, names, x, narrow).astype(kernel.dtype)
    if bias is None:
        return to_x, to_kernel, None
    to_bias = upstream.astype(jnp.float32).sum(axis=tuple(range(upstream.ndim - 1)))
    return to_x, to_kernel, to_bias.astype(bias.dtype)


def _to_kernel(layout, names, x: Array, upstream: Array) -> Array:
    """[..., D], [..., F] -> [D, F] float32, summed over rows."""
    rows, columns = (a.reshape(-1, a.shape[-1]) for a in (x, upstream))
    if columns.shape[1] < rows.shape[1] // 8:
        # A CPU makes a tall and narrow product six times slower than the same transposed.
        found = jnp.einsum("rd,rf->fd", rows, columns, preferred_element_type=jnp.float32).T
    else:
        found = jnp.einsum("rd,rf->df", rows, columns, preferred_element_type=jnp.float32)
    return constrain(layout, found, *names)


product.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def frozen_product(
    layout: Layout | None, names: tuple[str | None, ...], dtype: Any, x: Array, kernel: Any, bias: Array | None
) -> Array:
    """As `product`, of a kernel (`quantize_int8` or not) and a bias that get no gradient: x is not kept for one."""
    return _product_forward(layout, names, dtype, x, kernel, bias)[0]


def _frozen_forward(layout, names, dtype, x, kernel, bias):
    # A scalar keeps x's dtype.
    return _product_forward(layout, names, dtype, x, kernel, bias)[0], (jnp.zeros((), x.dtype), kernel)


def _frozen_backward(layout, names, dtype, kept, upstream):
    narrow, kernel = kept
    upstream = upstream.astype(narrow.dtype)
    return jnp.einsum("...f,df->...d", upstream, _gathered(layout, names, narrow, kernel)), None, None


frozen_product.defvjp(_frozen_forward, _frozen_backward)


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


@jax.custom_jvp
def gelu(x: Array) -> Array:
    """Exact GELU, x Phi(x) by erf (`jax.nn.gelu` is the tanh form by default). Hendrycks & Gimpel, arXiv:1606.08415."""
    return x * _normal_cdf(x)


def _normal_cdf(x: Array) -> Array:
    return 0.5 * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


@gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # One array is kept for the backward pass, the slope, where the formula's own derivative would keep four.
    (x,), (tangent,) = primals, tangents
    cdf = _normal_cdf(x)
    return x * cdf, (cdf + x * jnp.exp(-0.5 * x * x) * (2 * math.pi) ** -0.5) * tangent


def attend(query: Array, key: Array, value: Array, keep: Array, drop: Callable[[Array], Array]) -> Array:
    """Scaled dot-product attention, softmax in float32. Vaswani et al. 2017, arXiv:1706.03762, equation 1.

    query [B, H, Q, K], key and value [B, H, S, K], keep bool [B, 1, Q or 1, S] -> [B, H, Q, K].
    The sum is divided after the product with the values: [Q, K] divisions rather than [Q, S].
    A query that may see no key gets the mean of the values rather than NaN; such rows are padding.
    """
    scores = _scores(_scaled(query), key, keep, _KEYS_IN_ROWS)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1, keepdims=True)
    return (_weighted(drop(weights), value) / total).astype(value.dtype)


def causal_attention(
    query: Array, key: Array, value: Array, mask: Array, drop: Callable[[Array, int], Array] | None = None
) -> Array:
    """Attention of the last Q of S positions to the unmasked positions up to themselves.

    query [B, Q, H, K], key and value [B, S, H, K], mask [B, S] bool of keys -> [B, Q, H, K]. Queries go in blocks, and
    a block never multiplies the keys behind it, which would all be masked: nearly half of the work of long rows.
    `drop` gets a block's weights [B, H, Q, S'] and its first query. Without it the backward pass computes the weights
    again from their log-sum-exp, so that none are kept (Dao et al. 2022, arXiv:2205.14135, algorithm 4); it has no
    forward-mode derivative.
    """
    if drop is None:
        return _causal(query, key, value, mask)
    query, key, value = (a.swapaxes(1, 2) for a in (query, key, value))
    out = []
    for start, stop, seen in _query_blocks(query.shape[2], key.shape[2]):
        keep = _causal_keep(mask, stop - start, seen)
        part = (query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen], keep)
        out.append(attend(*part, lambda weights, start=start: drop(weights, start)))
    return jnp.concatenate(out, axis=2).swapaxes(1, 2)


def _query_blocks(queries: int, keys: int) -> list[tuple[int, int, int]]:
    """(first query, end, end of the keys that the last of them sees) of each block."""
    # Long rows take larger blocks, so that the program stays small.
    block = max(QUERY_BLOCK, -(-queries // 8))
    ends = [(start, min(start + block, queries)) for start in range(0, queries, block)]
    return [(start, stop, stop + keys - queries) for start, stop in ends]


def _causal_keep(mask: Array, queries: int, seen: int) -> Array:
    causal = jnp.arange(seen - queries, seen)[:, None] >= jnp.arange(seen)[None, :]
    return mask[:, None, None, :seen] & causal[None, None]


# Matrix products that end in a short K are slow on CPU when they sum over the longer of the first operand's axes: a
# third of the speed of the same product transposed. So scores come from [K, Q] and [K, S], and the gradients of keys
# and values are made as [K, S].


def _scores(query: Array, key: Array, keep: Array, equation: str = "bhkq,bhks->bhqs") -> Array:
    """[B, H, K, Q] scaled, [B, H, K, S], keep -> [B, H, Q, S] float32; `equation` for other layouts."""
    scores = jnp.einsum(equation, query, key, preferred_element_type=jnp.float32)
    return jnp.where(keep, scores, jnp.finfo(jnp.float32).min)


# A cache lies as [S, K]; to transpose it for each token that is decoded would cost more than the product.
_KEYS_IN_ROWS = "bhqk,bhsk->bhqs"


def _weighted(weights: Array, value: Array) -> Array:
    """[B, H, Q, S] float32, [B, H, S, K] -> [B, H, Q, K] float32."""
    return jnp.einsum("bhqs,bhsk->bhqk", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)


def _to_columns(weights: Array, rows: Array) -> Array:
    """[B, H, Q, S] float32, [B, H, Q, K] -> [B, H, K, S] float32: what each key receives from the queries."""
    return jnp.einsum("bhqk,bhqs->bhks", rows, weights.astype(rows.dtype), preferred_element_type=jnp.float32)


def _scaled(query: Array) -> Array:
    return query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)


def _softmax_mean(scores: Array, value: Array) -> tuple[Array, Array]:
    """[B, H, Q, S], [B, H, S, K] -> (weighted mean of the values [B, H, Q, K], log-sum-exp [B, H, Q, 1]), float32."""
    peak = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    return _weighted(weights, value) / total, peak + jnp.log(total)


def _score_gradient(scores: Array, logsumexp: Array, upstream: Array, value: Array, dot: Array) -> tuple[Array, Array]:
    """(weights, gradient of the scores), both [B, H, Q, S] float32; upstream [B, H, K, Q], value [B, H, K, S], dot
    [B, H, Q, 1] the products of output and upstream."""
    weights = jnp.exp(scores - logsumexp)
    of_weights = jnp.einsum("bhkq,bhks->bhqs", upstream, value, preferred_element_type=jnp.float32)
    return weights, weights * (of_weights - dot)


def _columns(x: Array) -> Array:
    return x.transpose(0, 2, 3, 1)  # [B, S, H, K] -> [B, H, K, S]


@jax.custom_vjp
def _causal(query: Array, key: Array, value: Array, mask: Array) -> Array:
    return _causal_forward(query, key, value, mask)[0]


def _causal_forward(query: Array, key: Array, value: Array, mask: Array) -> tuple[Array, tuple]:
    queries, keys, values = _columns(_scaled(query)), _columns(key), value.swapaxes(1, 2)
    outs, sums = [], []
    for start, stop, seen in _query_blocks(query.shape[1], key.shape[1]):
        scores = _scores(queries[..., start:stop], keys[..., :seen], _causal_keep(mask, stop - start, seen))
        out, logsumexp = _softmax_mean(scores, values[:, :, :seen])
        outs.append(out)
        sums.append(logsumexp)
    out = jnp.concatenate(outs, axis=2).swapaxes(1, 2).astype(value.dtype)
    return out, (query, key, value, mask, out, jnp.concatenate(sums, axis=2))


def _causal_backward(kept: tuple, upstream: Array) -> tuple[Array, Array, Array, None]:
    query, key, value, mask, out, logsumexp = kept
    rows, keys, values = _scaled(query).swapaxes(1, 2), _columns(key), _columns(value)
    queries, key_rows = rows.swapaxes(2, 3), key.swapaxes(1, 2)
    dot = _dot(out, upstream)
    upstream = upstream.swapaxes(1, 2)
    upstreams = upstream.swapaxes(2, 3)
    to_query = []
    to_key = to_value = jnp.zeros(keys.shape, jnp.float32)
    for start, stop, seen in _query_blocks(query.shape[1], key.shape[1]):
        scores = _scores(queries[..., start:stop], keys[..., :seen], _causal_keep(mask, stop - start, seen))
        part = (logsumexp[:, :, start:stop], upstreams[..., start:stop], values[..., :seen], dot[:, :, start:stop])
        weights, of_scores = _score_gradient(scores, *part)
        to_query.append(_weighted(of_scores, key_rows[:, :, :seen]))
        to_key = to_key.at[..., :seen].add(_to_columns(of_scores, rows[:, :, start:stop]))
        to_value = to_value.at[..., :seen].add(_to_columns(weights, upstream[:, :, start:stop]))
    to_query = _scaled(jnp.concatenate(to_query, axis=2)).swapaxes(1, 2).astype(query.dtype)
    to_key, to_value = (x.transpose(0, 3, 1, 2).astype(key.dtype) for x in (to_key, to_value))
    return to_query, to_key, to_value, None


def _dot(out: Array, upstream: Array) -> Array:
    """[B, Q, H, K] twice -> [B, H, Q, 1] float32."""
    return (out.astype(jnp.float32) * upstream).sum(axis=-1).swapaxes(1, 2)[..., None]


_causal.defvjp(_causal_forward, _causal_backward)


def _side_by_side(x: Array, prefixes: int) -> Array:
    """[B, H, Q, n] -> [P, H, G Q, n], the queries of a prefix's continuations beside each other."""
    _, heads, queries, size = x.shape
    x = x.reshape(prefixes, -1, heads, queries, size).swapaxes(1, 2)
    return x.reshape(prefixes, heads, -1, size)


def _apart(x: Array, rows: int) -> Array:
    """The inverse of `_side_by_side`: [P, H, G Q, n] -> [B, H, Q, n]."""
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
    for its continuations: their queries are laid side by side instead. The backward pass is as `causal_attention`'s.
    """
    return _after_prefix_forward(query, key, value, keep, prefix_key, prefix_value, prefix_keep)[0]


def _after_prefix_forward(query, key, value, keep, prefix_key, prefix_value, prefix_keep):
    rows, prefixes = query.shape[0], prefix_key.shape[0]
    scaled = _scaled(query)
    before = _scores(_side_by_side(scaled, prefixes), prefix_key, prefix_keep[:, None, None, :], _KEYS_IN_ROWS)
    own = _scores(scaled, key, keep, _KEYS_IN_ROWS)
    peak = jnp.maximum(_apart(before.max(axis=-1, keepdims=True), rows), own.max(axis=-1, keepdims=True))
    before, own = jnp.exp(before - _side_by_side(peak, prefixes)), jnp.exp(own - peak)
    total = _apart(before.sum(axis=-1, keepdims=True), rows) + own.sum(axis=-1, keepdims=True)
    out = (_apart(_weighted(before, prefix_value), rows) + _weighted(own, value)) / total
    out = out.astype(value.dtype)
    kept = (query, key, value, keep, prefix_key, prefix_value, prefix_keep, out, peak + jnp.log(total))
    return out, kept


def _after_prefix_backward(kept, upstream):
    query, key, value, keep, prefix_key, prefix_value, prefix_keep, out, logsumexp = kept
    rows, prefixes = query.shape[0], prefix_key.shape[0]
    scaled = _scaled(query)
    dot = (out.astype(jnp.float32) * upstream).sum(axis=-1, keepdims=True)
    together, upstreams = _side_by_side(scaled, prefixes), _side_by_side(upstream, prefixes)

    def part(queries, upstream, logsumexp, dot, key, value, keep):
        scores = _scores(queries.swapaxes(2, 3), key.swapaxes(2, 3), keep)
        weights, of_scores = _score_gradient(scores, logsumexp, upstream.swapaxes(2, 3), value.swapaxes(2, 3), dot)
        to_key, to_value = _to_columns(of_scores, queries), _to_columns(weights, upstream)
        return _weighted(of_scores, key), to_key.swapaxes(2, 3), to_value.swapaxes(2, 3)

    logsumexps, dots = _side_by_side(logsumexp, prefixes), _side_by_side(dot, prefixes)
    prefix = (prefix_key, prefix_value, prefix_keep[:, None, None, :])
    from_before, to_prefix_key, to_prefix_value = part(together, upstreams, logsumexps, dots, *prefix)
    from_own, to_key, to_value = part(scaled, upstream, logsumexp, dot, key, value, keep)
    to_query = _scaled(_apart(from_before, rows) + from_own)
    found = (to_query, to_key, to_value, None, to_prefix_key, to_prefix_value, None)
    return tuple(None if x is None else x.astype(query.dtype) for x in found)


attend_after_prefix.defvjp(_after_prefix_forward, _after_prefix_backward)


def row_dropout(x: Array, rate: float, keys: Array, *data: int | Array) -> Array:
    """Dropout keyed per row: x [B, ...], keys [B] typed PRNG keys, data folded into each in turn. Returns x's shape.

    A row's mask depends on its key and not on the rows beside it. Kept entries are scaled by 1 / (1 - rate).
    """
    for number in data:
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[1:]))(keys)
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))
