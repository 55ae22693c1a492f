"""Attention: query, key and value, causal attention in blocks of queries, the same after a shared prefix.

Shape letters: B batch, P prefixes, G = B / P continuations of a prefix, Q queries, S keys, C keys of a prefix, D width,
H heads, KV heads of keys and values, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

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
    scores = jnp.einsum("bhqk,bhsk->bhqs", _scale(score, query), key, preferred_element_type=jnp.float32)
    scores = score.masked(scores, keep)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1, keepdims=True)
    return (_weighted_sum(drop(weights), value) / total).astype(value.dtype)


class Keys(NamedTuple):
    """Keys and values that queries attend to."""

    key: Array  # [N, S, KV, K]
    value: Array  # [N, S, KV, K]
    mask: Array  # bool [N, S], False for padding


def causal_attention(
    query: Array,
    keys: Keys,
    score: ScoreFunction,
    *,
    prefix: Keys | None = None,
    window: Array | int | None = None,
    drop: Callable[[Array], Array] | None = None,
    segment_ids: Array | None = None,
) -> Array:
    """Attention of the last Q of S positions to the unmasked positions up to themselves, and to a prefix of the row.

    Queries go in blocks, and a block skips the keys after its last query, which are all masked: nearly half of the work
    of long rows. The backward pass recomputes the weights from their log-sum-exp, so that none are stored (Dao et al.
    2022, arXiv:2205.14135, algorithm 4); it has no forward-mode derivative.

    Args:
      query: [B, Q, H, K]. Head h reads the keys of head h // (H / KV).
      keys: of the same B rows, S columns.
      score: the scale and soft cap of the scores.
      prefix: columns before those of `keys`, N = P: G = B / P rows continue each, row i prefix i // G. Both are in one
        softmax. Neither a prefix nor a key that several heads read is copied: their queries are grouped instead.
      window: position i sees i - W < j <= i.
      drop: takes a block's weights [B, H, Q, S'], of the first S' columns to the last Q of them. With it JAX
        differentiates the forward pass, and `prefix` is None.
      segment_ids: [B, S] int32; a position sees its own segment only. Without a prefix.

    Returns:
      [B, Q, H, K].
    """
    if prefix is None and keys.key.shape[2] != query.shape[2]:
        copies = query.shape[2] // keys.key.shape[2]
        keys = keys._replace(key=jnp.repeat(keys.key, copies, axis=2), value=jnp.repeat(keys.value, copies, axis=2))
    if drop is None:
        return _blocked(score, query, keys, prefix, window, segment_ids)
    query, key, value = (a.swapaxes(1, 2) for a in (query, keys.key, keys.value))
    out = []
    for start, stop, seen in _query_blocks(query.shape[2], key.shape[2]):
        keep = causal_mask(keys.mask, stop - start, seen, window, segment_ids)
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
    keys: int,
    carry: Any = None,
) -> tuple[Any, tuple[Array, ...]]:
    """Applies `function` to one block of queries after another.

    Up to SEGMENTS blocks are unrolled; more go into a loop for each segment of the queries. Unrolled, XLA would hold
    the scores of all blocks at once.

    Args:
      function: (carry, arrays of a block, the columns of its first query and of the first key that none of it sees) ->
        (carry, outputs [B, H, Q, n] of the block).
      arrays: [B, H, Q, n] each.
      keys: S; the queries are in the last of S columns.
      carry: of the first block.

    Returns:
      (carry, outputs [B, H, Q, n] of all blocks)
    """
    queries, outs = arrays[0].shape[2], []
    if queries <= SEGMENTS * QUERY_BLOCK:
        for start, stop, seen in _query_blocks(queries, keys):
            part = tuple(x[:, :, start:stop] for x in arrays)
            carry, out = function(carry, part, seen - stop + start, seen)
            outs.append(out)
        return carry, tuple(jnp.concatenate(parts, axis=2) for parts in zip(*outs, strict=True))
    blocks = -(-queries // QUERY_BLOCK)
    padding = blocks * QUERY_BLOCK - queries  # queries before the first column see no key

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, 0), (padding, 0), (0, 0)))
        return jnp.moveaxis(x.reshape(*x.shape[:2], blocks, QUERY_BLOCK, -1), 2, 0)

    parts = tuple(map(split, arrays))
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


def _scores(score: ScoreFunction, queries: Array, part: _Part, *, in_rows: bool = False) -> Array:
    """Scaled queries [N, KV, R, K] -> [N, KV, R, S] float32. `in_rows`: by the product of [R, K] and [S, K], which
    adds in another order."""
    if in_rows:
        equation, operands = "bhqk,bhsk->bhqs", (queries, part.key.swapaxes(2, 3))
    else:
        equation, operands = "bhkq,bhks->bhqs", (queries.swapaxes(2, 3), part.key)
    return score.masked(jnp.einsum(equation, *operands, preferred_element_type=jnp.float32), part.keep)


def _weighted_sum(weights: Array, value: Array) -> Array:
    """[B, H, Q, S] float32, [B, H, S, K] -> [B, H, Q, K] float32."""
    return jnp.einsum("bhqs,bhsk->bhqk", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)


def _sum_over_queries(weights: Array, rows: Array) -> Array:
    """[B, H, Q, S] float32, [B, H, Q, K] -> [B, H, K, S] float32: for each key the sum over queries."""
    return jnp.einsum("bhqk,bhqs->bhks", rows, weights.astype(rows.dtype), preferred_element_type=jnp.float32)


def _scale(score: ScoreFunction, query: Array) -> Array:
    return query * jnp.asarray(score.scale, query.dtype)


def group_by_prefix(x: Array, prefixes: int) -> Array:
    """[B, H, R, n] -> [P, H, G R, n], the queries of all continuations of a prefix side by side."""
    rows, heads, _, size = x.shape
    if rows == prefixes:
        return x
    x = x.reshape(prefixes, rows // prefixes, heads, -1, size).swapaxes(1, 2)
    return x.reshape(prefixes, heads, -1, size)


def ungroup(x: Array, rows: int) -> Array:
    """The inverse of `group_by_prefix`: [P, H, G R, n] -> [B, H, R, n]."""
    prefixes, heads, _, size = x.shape
    if rows == prefixes:
        return x
    x = x.reshape(prefixes, heads, rows // prefixes, -1, size).swapaxes(1, 2)
    return x.reshape(rows, heads, -1, size)


class _Part(NamedTuple):
    """Keys and values as a block of queries reads them; N is B, or P for a prefix."""

    key: Array  # [N, KV, K, S]
    value: Array  # [N, KV, K, S]
    keep: Array  # bool [N, 1, R or 1, S], by query as `group_by_prefix` has them


class _Block(NamedTuple):
    """A block of queries."""

    count: int
    first: Array | int  # its first query's column among the keys
    seen: int  # keys before this column are all that its last query sees
    shared: int  # H / KV, heads that read a key


def _parts(
    keys: Keys, prefix: Keys | None, window: Array | int | None, segment_ids: Array | None
) -> tuple[list[Array], Callable[[_Block], list[_Part]]]:
    """(key and value [N, KV, K, S] of the prefix, if there is one, and of `keys`; block -> its parts in this order)."""
    sets = [keys] if prefix is None else [prefix, keys]
    arrays = [x.transpose(0, 2, 3, 1) for keys in sets for x in (keys.key, keys.value)]

    def parts_of(block: _Block) -> list[_Part]:
        keep = causal_mask(keys.mask, block.count, block.seen, window, segment_ids, block.first)
        keep = jnp.tile(keep, (1, 1, block.shared, 1)) if block.shared > 1 else keep
        part = _Part(*(x[..., : block.seen] for x in arrays[-2:]), keep)
        if prefix is None:
            return [part]
        keep, before = prefix.mask[:, None, None, :], prefix.mask.shape[1]
        if window is not None:
            near = causal_keep(_columns(before + block.first, block.count), jnp.arange(before), window)
            copies = block.shared * (len(keys.mask) // len(prefix.mask))
            keep = keep & jnp.tile(near, (copies, 1))[None, None]
        return [_Part(*arrays[:2], keep), part]

    return arrays, parts_of


def _by_key_head(query: Array, key_heads: int) -> Array:
    """[B, H, Q, n] -> [B, KV, H / KV * Q, n], the queries of all heads that read a key side by side."""
    rows, heads, _, size = query.shape
    return query if heads == key_heads else query.reshape(rows, key_heads, -1, size)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(score, query, keys, prefix, window, segment_ids) -> Array:
    return _blocked_forward(score, query, keys, prefix, window, segment_ids)[0]


def _blocked_forward(score, query, keys, prefix, window, segment_ids) -> tuple[Array, tuple]:
    queries, key_heads = _scale(score, query).swapaxes(1, 2), keys.key.shape[2]
    _, parts_of = _parts(keys, prefix, window, segment_ids)

    def block(_: None, arrays: tuple[Array], first: Array | int, seen: int) -> tuple[None, tuple[Array, Array]]:
        (rows, heads, count, _), queries = arrays[0].shape, _by_key_head(arrays[0], key_heads)
        parts = parts_of(_Block(count, first, seen, heads // key_heads))
        out, logsumexp = _softmax_weighted_mean(score, queries, parts)
        return None, (out.reshape(rows, heads, count, -1), logsumexp.reshape(rows, heads, count, 1))

    _, (out, logsumexp) = _map_query_blocks(block, (queries,), keys.key.shape[1])
    out, logsumexp = checkpoint_name((out.swapaxes(1, 2).astype(query.dtype), logsumexp), ATTENTION)
    return out, (query, keys, prefix, window, segment_ids, out, logsumexp)


def _softmax_weighted_mean(score: ScoreFunction, queries: Array, parts: list[_Part]) -> tuple[Array, Array]:
    """Queries [B, KV, R, K] -> (mean of the values weighted by one softmax over all parts [B, KV, R, K], log-sum-exp
    [B, KV, R, 1]), float32."""
    rows = len(queries)
    in_rows = len(parts) > 1  # the queries that share a prefix are many beside its keys, and need no transposition
    scores = [_scores(score, group_by_prefix(queries, len(part.key)), part, in_rows=in_rows) for part in parts]
    peak = reduce(jnp.maximum, (ungroup(x.max(axis=-1, keepdims=True), rows) for x in scores))
    weights = [jnp.exp(x - group_by_prefix(peak, len(x))) for x in scores]
    total = reduce(jnp.add, (ungroup(x.sum(axis=-1, keepdims=True), rows) for x in weights))
    values = (part.value.swapaxes(2, 3) for part in parts)
    out = reduce(jnp.add, (ungroup(_weighted_sum(*pair), rows) for pair in zip(weights, values, strict=True)))
    return out / total, peak + jnp.log(total)


def _blocked_backward(score, residuals: tuple, d_out: Array) -> tuple[Any, ...]:
    query, keys, prefix, window, segment_ids, out, logsumexp = residuals
    key_heads = keys.key.shape[2]
    arrays, parts_of = _parts(keys, prefix, window, segment_ids)

    def block(sums: tuple[Array, ...], arrays: tuple[Array, ...], first: Array | int, seen: int):
        rows, heads, count, _ = arrays[0].shape
        arrays_by_key = [_by_key_head(x, key_heads) for x in arrays]
        d_queries, d_keys = [], []
        for part in parts_of(_Block(count, first, seen, heads // key_heads)):
            grouped = (group_by_prefix(x, len(part.key)) for x in arrays_by_key)
            d_query, *d_key_and_value = _part_gradients(score, part, *grouped)
            d_queries.append(ungroup(d_query, rows))
            d_keys += d_key_and_value
        sums = tuple(x.at[..., : d.shape[-1]].add(d) for x, d in zip(sums, d_keys, strict=True))
        return sums, (reduce(jnp.add, d_queries).reshape(arrays[0].shape),)

    rows = (_scale(score, query).swapaxes(1, 2), logsumexp, _row_dot(out, d_out), d_out.swapaxes(1, 2))
    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in arrays)
    sums, (d_query,) = _map_query_blocks(block, rows, keys.key.shape[1], zeros)
    d_query = _scale(score, d_query).swapaxes(1, 2).astype(query.dtype)
    *d_prefix, d_key, d_value = (x.transpose(0, 3, 1, 2).astype(query.dtype) for x in sums)
    return d_query, Keys(d_key, d_value, None), Keys(*d_prefix, None) if d_prefix else None, None, None


def _part_gradients(
    score: ScoreFunction, part: _Part, queries: Array, logsumexp: Array, dot: Array, d_out: Array
) -> tuple[Array, Array, Array]:
    """Gradients of queries [N, KV, R, K], key and value [N, KV, K, S] from a part, float32; queries and d_out
    [N, KV, R, K], logsumexp and dot, the products of output and d_out, [N, KV, R, 1], over all parts."""
    scores = _scores(score, queries, part)
    weights = jnp.exp(scores - logsumexp)
    d_weights = jnp.einsum("bhkq,bhks->bhqs", d_out.swapaxes(2, 3), part.value, preferred_element_type=jnp.float32)
    d_scores = weights * (d_weights - dot)
    d_scores = d_scores if score.softcap is None else d_scores * score.slope(scores)
    d_query = _weighted_sum(d_scores, part.key.swapaxes(2, 3))
    return d_query, _sum_over_queries(d_scores, queries), _sum_over_queries(weights, d_out)


def _row_dot(out: Array, d_out: Array) -> Array:
    """[B, Q, H, K] twice -> [B, H, Q, 1] float32."""
    return (out.astype(jnp.float32) * d_out).sum(axis=-1).swapaxes(1, 2)[..., None]


_blocked.defvjp(_blocked_forward, _blocked_backward)
