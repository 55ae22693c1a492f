"""What decoders are made of, as functions of arrays: rotary embedding, GELU, attention, dropout keyed per row.

Shape letters: B batch, P prefixes, S keys, C keys of a prefix, Q queries, H heads, K head size, R rotated dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rlhf_jax.types import Array

# Queries a block of causal attention; measured best on CPU for 512 + 53 tokens (64 and 256 are slower backward).
QUERY_BLOCK = 128


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


def gelu(x: Array) -> Array:
    """Exact GELU, x Phi(x) by erf (`jax.nn.gelu` is the tanh form by default). Hendrycks & Gimpel, arXiv:1606.08415."""
    return 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


def attend(
    query: Array, key: Array, value: Array, keep: Array, drop: Callable[[Array], Array] = lambda weights: weights
) -> Array:
    """Scaled dot-product attention, softmax in float32. Vaswani et al. 2017, arXiv:1706.03762, equation 1.

    query [B, H, Q, K], key and value [B, H, S, K], keep bool [B, 1, Q or 1, S] -> [B, H, Q, K].
    The sum is divided after the product with the values: [Q, K] divisions rather than [Q, S].
    A query that may see no key gets the mean of the values rather than NaN; such rows are padding.
    """
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    scores = jnp.einsum("bhqk,bhsk->bhqs", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(keep, scores, jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1, keepdims=True)
    weights = drop(weights).astype(value.dtype)
    out = jnp.einsum("bhqs,bhsk->bhqk", weights, value, preferred_element_type=jnp.float32)
    return (out / total).astype(value.dtype)


def causal_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array,
    drop: Callable[[Array, int], Array] = lambda weights, start: weights,
) -> Array:
    """Attention of every position to the unmasked positions up to itself.

    query, key, value [B, S, H, K], mask [B, S] bool of keys -> [B, S, H, K]. Queries go in blocks, and a block never
    multiplies the keys behind it, which would all be masked: nearly half of the work of long rows.
    `drop` gets a block's weights [B, H, Q, S'] and its first query.
    """
    length = query.shape[1]
    # Long rows take larger blocks, so that the program stays small.
    block = max(QUERY_BLOCK, -(-length // 8))
    query, key, value = (a.swapaxes(1, 2) for a in (query, key, value))
    out = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        causal = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :]
        keep = mask[:, None, None, :stop] & causal[None, None]
        part = (query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], keep)
        out.append(attend(*part, lambda weights, start=start: drop(weights, start)))
    return (out[0] if len(out) == 1 else jnp.concatenate(out, axis=2)).swapaxes(1, 2)


def attend_after_prefix(
    query: Array, key: Array, value: Array, keep: Array, prefix_key: Array, prefix_value: Array, prefix_keep: Array
) -> Array:
    """Attention of continuations to themselves and to the prefix that G of them share, in one softmax.

    Row i continues prefix i // G, G = B / P. query [B, H, Q, K], key and value [B, H, S, K], keep bool [B or 1, 1, Q or
    1, S], prefix_key and prefix_value [P, H, C, K], prefix_keep [P, C] bool -> [B, H, Q, K]. The prefix is never copied
    for its continuations: their queries are laid side by side instead.
    """
    (rows, heads, queries, size), prefixes = query.shape, prefix_key.shape[0]
    group = rows // prefixes
    query = query * jnp.asarray(size**-0.5, query.dtype)

    def side_by_side(x: Array) -> Array:
        x = x.reshape(prefixes, group, heads, queries, x.shape[-1]).swapaxes(1, 2)
        return x.reshape(prefixes, heads, group * queries, x.shape[-1])

    def apart(x: Array) -> Array:
        x = x.reshape(prefixes, heads, group, queries, x.shape[-1]).swapaxes(1, 2)
        return x.reshape(rows, heads, queries, x.shape[-1])

    lowest = jnp.finfo(jnp.float32).min
    before = jnp.einsum("phqk,phck->phqc", side_by_side(query), prefix_key, preferred_element_type=jnp.float32)
    before = jnp.where(prefix_keep[:, None, None, :], before, lowest)
    own = jnp.einsum("bhqk,bhsk->bhqs", query, key, preferred_element_type=jnp.float32)
    own = jnp.where(keep, own, lowest)
    peak = jnp.maximum(apart(before.max(axis=-1, keepdims=True)), own.max(axis=-1, keepdims=True))
    peak = jax.lax.stop_gradient(peak)
    before, own = jnp.exp(before - side_by_side(peak)), jnp.exp(own - peak)
    total = apart(before.sum(axis=-1, keepdims=True)) + own.sum(axis=-1, keepdims=True)
    before, own = before.astype(value.dtype), own.astype(value.dtype)
    out = jnp.einsum("phqc,phck->phqk", before, prefix_value, preferred_element_type=jnp.float32)
    out = apart(out) + jnp.einsum("bhqs,bhsk->bhqk", own, value, preferred_element_type=jnp.float32)
    return (out / total).astype(value.dtype)


def row_dropout(x: Array, rate: float, keys: Array, *data: int | Array) -> Array:
    """Dropout keyed per row: x [B, ...], keys [B] typed PRNG keys, data folded into each in turn. Returns x's shape.

    A row's mask depends on its key and not on the rows beside it. Kept entries are scaled by 1 / (1 - rate).
    """
    for number in data:
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[1:]))(keys)
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))
