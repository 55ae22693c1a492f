"""The decoder: one block, applied to stacked params in training and to a list of layers in decoding.

Params are plain nested dicts. A layer's params are stacked over layers, [L, ...], and a training forward is
`scan_layers`; decoding slices them into a list once a rollout and unrolls the layers, which keeps the cache a list of
per-layer buffers that XLA updates in place. What a family does differently is a switch of `DecoderConfig`.

Shape letters: B batch, P prompts, S sequence, C context, T response, L layers, D width, H heads, KV heads of keys and
values, K head size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from rlhf_jax.models.attention import Attention, Keys, last_columns
from rlhf_jax.models.attention_kernels import BY_LENGTH, row_attention, take_columns
from rlhf_jax.models.cached_attention import (
    Segment,
    attend_cached,
    column_count,
    empty_segments,
    newest_positions,
    segment_sizes,
    write,
)
from rlhf_jax.models.decoder_context import ALL_KEYS, Context, DecoderConfig, Dropout, DropoutSite
from rlhf_jax.models.initializers import normal
from rlhf_jax.models.layers import MLP, norm
from rlhf_jax.models.rope import rotary_angles
from rlhf_jax.models.scan_layers import scan_layers
from rlhf_jax.parallel.sharding import constrain
from rlhf_jax.types import Array, Params


class Block(nn.Module):
    """One layer, A its attention, M its MLP and N its norms.

    sequential: y = x + A(N x), y + M(N y); parallel: x + A(N x) + M(N x); post: y = x + N A(x), y + N M(y); sandwich:
    y = x + N A(N x), y + N M(N y).
    """

    context: Context

    def setup(self) -> None:
        """Submodules; their names are those of the params."""
        residual = self.context.config.residual
        if residual != "post":
            self.input_layernorm = norm(self.context)
        self.post_attention_layernorm = norm(self.context)
        if residual == "sandwich":
            self.pre_feedforward_layernorm = norm(self.context)
        if residual in ("post", "sandwich"):
            self.post_feedforward_layernorm = norm(self.context)
        self.attention = Attention(self.context)
        self.mlp = MLP(self.context)

    def __call__(self, x: Array, rope: tuple[Array, Array] | None, attend_fn: Callable) -> tuple[Array, Any]:
        """x [..., D] -> ([..., D], the second output of attend_fn, such as keys and values); see `Attention`."""
        context, residual = self.context, self.context.config.residual
        x = constrain(context.layout, x, "rows")
        attended, extra = self.attention(x if residual == "post" else self.input_layernorm(x), rope, attend_fn)
        if residual in ("post", "sandwich"):
            attended = self.post_attention_layernorm(attended)
        attended, x = context.drop(attended, DropoutSite.POST_ATTENTION), last_columns(x, context.last)
        if residual == "parallel":
            out = x + attended + context.drop(self.mlp(self.post_attention_layernorm(x)), DropoutSite.POST_MLP)
            return out, extra
        x = x + attended
        before = {"sequential": "post_attention_layernorm", "sandwich": "pre_feedforward_layernorm"}.get(residual)
        out = self.mlp(x if before is None else getattr(self, before)(x))
        if residual != "sequential":
            out = self.post_feedforward_layernorm(out)
        return x + context.drop(out, DropoutSite.POST_MLP), extra


def init_backbone(config: DecoderConfig, key: Array) -> Params:
    """Random float32 backbone as transformers draws it: normal(initializer_range), biases 0, norms 1 and 0."""
    embed_key, layers_key = jax.random.split(key)
    tokens, context = jnp.zeros((1, 1), jnp.int32), Context(config)
    x, rope = jnp.zeros((1, 1, config.hidden_size)), _at_layer(config, _ropes(config, tokens), 0)[0]

    def init_layer(key: Array) -> Params:
        return Block(context).init(key, x, rope, lambda q, k, v: (q, None))["params"]

    layers = jax.vmap(init_layer)(jax.random.split(layers_key, config.num_hidden_layers))
    shape = (config.vocab_size, config.hidden_size)
    backbone = {
        "embed_in": {"embedding": normal(embed_key, shape, std=config.initializer_range)},
        "layers": layers,
        "final_layer_norm": norm(context).init(layers_key, x)["params"],
    }
    if not config.ropes:
        shape = (config.max_position_embeddings, config.hidden_size)
        table = normal(jax.random.fold_in(embed_key, 1), shape, std=config.initializer_range)
        backbone["embed_positions"] = {"embedding": table}
    return backbone


Ropes = tuple[tuple[Array, Array], ...]


def _ropes(config: DecoderConfig, positions: Array) -> Ropes:
    """Cosines and sines of each of the config's rotary embeddings; none where positions are learned."""
    return tuple(rotary_angles(positions, rope) for rope in config.ropes)


def _at_layer(config: DecoderConfig, ropes: Ropes, layer: int | Array) -> tuple[Any, Array | int | None]:
    """(rotary embedding, window) of a layer. What is equal in all layers is static; the rest is looked up."""
    rope = ropes[0] if ropes else None
    if len(set(config.layer_rope)) > 1:
        which = _pick(config.layer_rope, layer)
        static = isinstance(layer, int)
        rope = ropes[which] if static else tuple(jnp.stack(parts)[which] for parts in zip(*ropes, strict=True))
    elif config.layer_rope:
        rope = ropes[config.layer_rope[0]]
    windows = set(config.layer_window)
    if len(windows) < 2:
        return rope, next(iter(windows), None)
    return rope, _pick(tuple(ALL_KEYS if window is None else window for window in config.layer_window), layer)


def _window(config: DecoderConfig, layer: int) -> int | None:
    """Keys that a layer's queries see; None: all."""
    return config.layer_window[layer] if config.layer_window else None


def _pick(values: tuple[int, ...], layer: int | Array) -> int | Array:
    return values[layer] if isinstance(layer, int) else jnp.asarray(values)[layer]


def _embed(
    context: Context,
    backbone: Params,
    tokens: Array,
    positions: Array,
    *,
    sharded_table: bool = True,
    features: Array | None = None,
) -> Array:
    """Token ids and positions [B, ...] -> [B, ..., D]; `features` [B, N, D] in place of image tokens.

    With `sharded_table` `fsdp` splits the table: each device looks up its columns for all rows, which are then
    resharded; the table itself, which is larger than a layer, is never gathered.
    """
    layout = context.layout
    names = ("data", "fsdp") if sharded_table else ("rows", None)
    tokens = constrain(layout, tokens, names[0])
    table = backbone["embed_in"]["embedding"]
    # Out-of-range ids become NaN rather than somebody else's row.
    x = jnp.take(table, tokens, axis=0, mode="fill", fill_value=jnp.nan).astype(context.dtype)
    config = context.config
    if config.padding_idx is not None:  # as torch's Embedding: the gradient of this row is 0
        x = jnp.where((tokens == config.padding_idx)[..., None], jax.lax.stop_gradient(x), x)
    if config.embedding_scale is not None:
        x = x * jnp.asarray(config.embedding_scale, context.dtype)
    if features is not None:
        x = replace_image_tokens(x, tokens, config.image_token_id, features)
    x = constrain(layout, constrain(layout, x, names[0], *[None] * (x.ndim - 2), names[1]), "rows")
    if "embed_positions" in backbone:
        table = backbone["embed_positions"]["embedding"]
        x = x + jnp.take(table, positions, axis=0, mode="fill", fill_value=jnp.nan).astype(context.dtype)
    return x


def replace_image_tokens(x: Array, tokens: Array, image_token_id: int, features: Array) -> Array:
    """Embeddings [P, C, D] of tokens [P, C] with features [P, N, D] at a row's image tokens, in order."""
    is_image = tokens == image_token_id
    place = jnp.clip(jnp.cumsum(is_image, axis=1) - 1, 0, features.shape[1] - 1)
    return jnp.where(is_image[..., None], jnp.take_along_axis(features, place[..., None], axis=1).astype(x.dtype), x)


def _final_norm(context: Context, backbone: Params, x: Array) -> Array:
    return norm(context).apply({"params": backbone["final_layer_norm"]}, x)


def mask_tokens(tokens: Array, mask: Array) -> tuple[Array, Array]:
    """Tokens with 0 where masked, and rotary positions counted over unmasked tokens only; both [B, S] int32."""
    counts = mask.astype(jnp.int32)
    return jnp.where(mask, tokens, 0), jnp.cumsum(counts, axis=1) - counts


def positions_in_segments(positions: Array, segment_ids: Array) -> Array:
    """Positions [B, S] int32 of rows, counted from the first token of each segment instead."""
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return positions - jax.lax.cummax(jnp.where(starts, positions, 0), axis=1)


def _outside_scan(context: Context, last: bool) -> dict[str, bool]:
    """Whether the first and the last layer run outside the scan: only on one device. On several devices XLA would hold
    the full gradients of their kernels, of policy and value model at once."""
    one = context.layout is None or context.layout.mesh.size == 1
    return {"first": one and context.lora is not None, "last": one and last}


class _Rows(NamedTuple):
    """Rows of tokens in one layout of their columns."""

    context: Context
    tokens: Array  # [B, S] int32
    positions: Array  # [B, S] int32
    mask: Array  # [B, S] bool
    ropes: Ropes
    segment_ids: Array | None = None  # [B, S] int32
    start_at_0: bool = False  # whether each row's tokens start at column 0

    def attend(self, query: Array, key: Array, value: Array, window: Any, drop: Callable | None = None) -> Array:
        keys, options = Keys(key, value, self.mask), {"segment_ids": self.segment_ids, "start_at_0": self.start_at_0}
        return row_attention(self.context, query, keys, window=window, drop=drop, **options)


def _to_column_0(rows: _Rows) -> tuple[_Rows, Callable[[Array], Array]]:
    """The rows as their attention computes them fastest, and a function that puts [B, S, ...] back into their layout.

    Kernels for GPUs take a mask [B, 1, Q, S] and read all of it. Where a row's tokens start at column 0, they take
    its length instead, and skip what follows them.
    """
    context, mask = rows.context, rows.mask
    if context.attn_implementation not in BY_LENGTH or rows.segment_ids is not None:
        return rows, lambda x: x
    size, first = mask.shape[1], jnp.argmax(mask, axis=1)[:, None]
    columns, inverse = ((jnp.arange(size)[None] + shift) % size for shift in (first, -first))
    tokens, positions, mask = (take_columns(x, columns) for x in (rows.tokens, rows.positions, mask))
    if context.dropout is not None:
        context = dataclasses.replace(context, dropout=dataclasses.replace(context.dropout, positions=positions))
    ropes = _ropes(context.config, positions)
    return _Rows(context, tokens, positions, mask, ropes, start_at_0=True), lambda x: take_columns(x, inverse)


def hidden(
    context: Context,
    backbone: Params,
    tokens: Array,
    mask: Array,
    *,
    remat: str = "none",
    dropout_key: Array | None = None,
    last: int | None = None,
    segment_ids: Array | None = None,
    features: Array | None = None,
) -> Array:
    """Hidden states after the final norm: tokens [B, S] int32, mask [B, S] bool -> [B, S, D] in the context's dtype.

    Args:
      context: its `lora` expects params from `lora.with_lora`.
      backbone: stacked layers.
      tokens, mask: a row's unmasked columns are next to each other; masked ones return finite values without meaning.
      remat: as `scan_layers`.
      dropout_key: one key, or one a row; turns on the dropout of the config and of the adapters.
      last: return only this many last columns, [B, last, D]; on one device the last layer computes only query, key and
        value of the other columns.
      segment_ids: [B, S] int32, sequences packed into a row; None: one each.
      features: [B, N, D], of each row's images (see `vision.features`); None: the rows are text.
    """
    config = context.config
    tokens, positions = mask_tokens(tokens, mask)
    if dropout_key is not None:
        dropout = Dropout.create(config, context.lora, dropout_key, tokens.shape[0], positions)
        context = dataclasses.replace(context, dropout=dropout)
    if segment_ids is not None:
        positions = positions_in_segments(positions, segment_ids)
    padded = _Rows(context, tokens, positions, mask, _ropes(config, positions), segment_ids)
    rows, to_padded = _to_column_0(padded)
    x = _embed(context, backbone, rows.tokens, rows.positions, features=features)
    x = rows.context.at_layer(config.num_hidden_layers).drop(x, DropoutSite.EMBEDDING)
    drops_weights = dropout_key is not None and config.attention_dropout > 0

    def layer(x: Array, params: Params, index: Array, is_last: bool) -> Array:
        here, x = (padded, to_padded(x)) if is_last else (rows, x)
        rope, window = _at_layer(config, here.ropes, index)

        def drop(weights: Array) -> Array:
            return context.dropout.weights(weights, index)

        def attend_fn(query: Array, key: Array, value: Array) -> tuple[Array, None]:
            return here.attend(query, key, value, window, drop if drops_weights else None), None

        block = Block(here.context.at_layer(index, last if is_last else None))
        return block.apply({"params": params}, x, rope, attend_fn)[0]

    outside = _outside_scan(context, last is not None)
    x = scan_layers(layer, x, backbone["layers"], remat, **outside)
    x = x if outside["last"] else to_padded(x)
    return _final_norm(context, backbone, x if last is None else x[:, -last:])


def hidden_after_prompts(
    context: Context,
    backbone: Params,
    prompts: Array,
    prompt_mask: Array,
    responses: Array,
    mask: Array,
    *,
    remat: str = "none",
    features: Array | None = None,
) -> tuple[Array, Array]:
    """As `hidden`, with each prompt computed once for all of its responses; gradients flow through the prompt.

    prompts [P, C] and responses [B, T] int32, B = P * G, row i answering prompt i // G; prompt_mask [P, C] and mask
    [B, T] bool -> (the prompts' last column [P, D], responses [B, T, D]). Prompts are left-padded; a response's
    unmasked columns are its first.
    `features` [P, N, D] are those of the prompts' images.
    """
    config = context.config
    prompts, prompt_positions = mask_tokens(prompts, prompt_mask)
    responses, positions = mask_tokens(responses, mask)
    lengths = jnp.repeat(prompt_mask.sum(axis=1), responses.shape[0] // prompts.shape[0])
    positions = positions + lengths[:, None]
    padded = _Rows(context, prompts, prompt_positions, prompt_mask, _ropes(config, prompt_positions))
    rows, to_padded = _to_column_0(padded)
    ropes = _ropes(config, positions)

    def layer(streams: tuple[Array, Array], params: Params, index: Array, is_last: bool) -> tuple[Array, Array]:
        here = padded if is_last else rows
        prompt_rope, window = _at_layer(config, here.ropes, index)
        rope, _ = _at_layer(config, ropes, index)

        def attend_prompt(query: Array, key: Array, value: Array) -> tuple[Array, tuple[Array, Array]]:
            out = here.attend(query, key, value, window)
            return out, Keys(key, value, here.mask)

        prompt = to_padded(streams[0]) if is_last else streams[0]
        at_layer = context.at_layer(index, 1 if is_last else None)
        prompt, prefix = Block(at_layer).apply({"params": params}, prompt, prompt_rope, attend_prompt)

        def attend_response(query: Array, key: Array, value: Array) -> tuple[Array, None]:
            options = {"prefix": prefix, "window": window, "start_at_0": here.start_at_0}
            return row_attention(context, query, Keys(key, value, mask), **options), None

        response, _ = Block(context).apply({"params": params}, streams[1], rope, attend_response)
        return prompt, response

    prompt = _embed(context, backbone, rows.tokens, rows.positions, features=features)
    streams = (prompt, _embed(context, backbone, responses, positions))
    outside = _outside_scan(context, True)
    prompt, response = scan_layers(layer, streams, backbone["layers"], remat, **outside)
    prompt = prompt if outside["last"] else to_padded(prompt)
    return _final_norm(context, backbone, prompt[:, -1]), _final_norm(context, backbone, response)


class Prefix(NamedTuple):
    """Keys and values of prompts."""

    layers: list[Params]  # "k" [P, KV, K, C], "v" [P, KV, C, K] each; with a window W the last min(W, C) columns
    mask: Array  # [P, C] bool


def prefill(
    context: Context, backbone: Params, tokens: Array, mask: Array, features: Array | None = None
) -> tuple[Array, Prefix]:
    """Runs the prompts and keeps their keys and values.

    tokens [P, C] int32, mask [P, C] bool, `backbone["layers"]` a list -> (last column's hidden states [P, D], prefix).
    `features` [P, N, D] are those of the prompts' images.
    """
    masked, positions = mask_tokens(tokens, mask)
    config, ropes = context.config, _ropes(context.config, positions)
    x = _embed(context, backbone, masked, positions, sharded_table=False, features=features)
    layers = []
    for index, params in enumerate(backbone["layers"]):
        rope, window = _at_layer(config, ropes, index)[0], _window(config, index)
        x, layer = _prefill_layer(context, params, x, rope, mask, window=window)
        layers.append(layer)
    return _final_norm(context, backbone, x[:, -1]), Prefix(layers, mask)


@functools.partial(jax.jit, static_argnames=("context", "window"))
def _prefill_layer(
    context: Context, params: Params, x: Array, rope: Any, mask: Array, *, window: int | None
) -> tuple[Array, Params]:
    """A layer of `prefill`: (x, its keys and values). jit traces it once for all layers of a kind."""

    def to_cache(x: Array, *axes: int) -> Array:
        cached_columns = x if window is None else x[:, -min(window, x.shape[1]) :]
        return constrain(context.layout, cached_columns.transpose(axes), "rows", "tensor")

    def attend_fn(query: Array, key: Array, value: Array) -> tuple[Array, Params]:
        out = row_attention(context, query, Keys(key, value, mask), window=window)
        return out, {"k": to_cache(key, 0, 2, 3, 1), "v": to_cache(value, 0, 2, 1, 3)}

    return Block(context).apply({"params": params}, x, rope, attend_fn)


Cache = list[list[Params]]
"""Of each layer the segments of `cached_attention`."""


def empty_cache(
    context: Context, rows: int, columns: int, *, queries: int = 1, block: int | None = None, int8: bool = False
) -> Cache:
    """Room for `columns` tokens of each of `rows` responses, zero.

    A layer with a window holds a ring of it, for steps of at most `queries` tokens: those that are written first must
    not overwrite keys that the first of them sees. `block`: see `cached_attention.segment_sizes`. With `int8` keys and
    values are int8, with a scale for each.
    """
    config, layers = context.config, []
    for index in range(config.num_hidden_layers):
        window = _window(config, index)
        layer_columns = columns if window is None else min(window + queries - 1, columns)
        shape = (rows, context.held_heads, config.head_dim)
        layer = empty_segments(shape, segment_sizes(layer_columns, block), context.dtype, int8)
        layers.append(_by_rows_and_heads(context, layer))
    return layers


def _by_rows_and_heads(context: Context, layer: list[Params]) -> list[Params]:
    return jax.tree.map(lambda x: constrain(context.layout, x, "rows", "tensor"), layer)


def decode(
    context: Context,
    backbone: Params,
    prefix: Prefix,
    cache: Cache,
    tokens: Array,
    positions: Array,
    index: Array,
    *,
    end: Array | None = None,
    active: Array | None = None,
) -> tuple[Array, Cache]:
    """Q tokens a row, each of which sees the row's prompt and the tokens before it.

    Args:
      context, backbone: `backbone["layers"]` a list.
      prefix: row i answers its prompt i // (B / P).
      cache: of `empty_cache`.
      tokens, positions: [B, Q] int32; rotary positions.
      index: [] or [B] int32, the place of the first of them in the response, whose earlier tokens are cached.
      end: [] int32, the number of cached tokens of the longest row that matters, new ones included; default: of all.
      active: [B] bool, the rows that are written to the cache; None: all.

    Returns:
      (hidden states [B, Q, D], the cache with the tokens). Tokens past the cache's end are dropped.
    """
    config, ropes = context.config, _ropes(context.config, positions)
    x, new_cache = _embed(context, backbone, tokens, positions, sharded_table=False), []
    places = jnp.atleast_1d(index)[:, None] + jnp.arange(tokens.shape[1])[None]  # [1 or B, Q]
    end = jnp.max(places) + 1 if end is None else end
    for number, (params, prompt, layer_cache) in enumerate(zip(backbone["layers"], prefix.layers, cache, strict=True)):
        rope, window = _at_layer(config, ropes, number)[0], _window(config, number)
        at = {"mask": prefix.mask, "places": places, "index": index, "end": end, "active": active}
        x, layer = _decode_layer(context, params, x, rope, prompt, layer_cache, **at, window=window)
        new_cache.append(layer)
    return _final_norm(context, backbone, x), new_cache


@functools.partial(jax.jit, static_argnames=("context", "window"))
def _decode_layer(
    context: Context,
    params: Params,
    x: Array,
    rope: Any,
    prompt: Params,
    cache: list[Params],
    *,
    mask: Array,
    places: Array,
    index: Array,
    end: Array,
    active: Array | None,
    window: int | None,
) -> tuple[Array, list[Params]]:
    """A layer of `decode`: (x, its cache with the tokens). jit traces it once for all layers of a kind."""
    before = Segment(prompt, _keep_of_prompt(mask, prompt["v"].shape[2], places, window), True)
    keeps = _keep_of_cache([column_count(segment) for segment in cache], places, window)

    def attend_fn(query: Array, key: Array, value: Array) -> tuple[Array, list[Params]]:
        new = write(cache, key, value, index, ring=window is not None, active=active)
        new = _by_rows_and_heads(context, new)
        response_segments, start = [], 0
        for segment, keep in zip(new, keeps, strict=True):
            response_segments.append(Segment(segment, keep, end > start if start else True))
            start += column_count(segment)
        return attend_cached(query, before, response_segments, context.config.score_function), new

    return Block(context).apply({"params": params}, x, rope, attend_fn)


def _keep_of_prompt(mask: Array, length: int, places: Array, window: int | None) -> Array:
    """Which of the last `length` columns of [P, C] prompts each token sees: bool [P, G or 1, Q or 1, length]."""
    first = mask.shape[1] - length
    keep = mask[:, None, None, first:]
    if window is None:
        return keep
    columns = jnp.arange(first, mask.shape[1])
    seen = columns[None, None] > (mask.shape[1] + places - window)[..., None]  # [1 or B, Q, length]
    return keep & seen.reshape(min(len(places), len(keep)), -1, *seen.shape[1:])


def _keep_of_cache(sizes: list[int], places: Array, window: int | None) -> list[Array]:
    """Which columns of each segment each token sees: bool [1 or B, 1, Q, size] each."""
    keeps, total, start = [], sum(sizes), 0
    for size in sizes:
        columns = jnp.arange(start, start + size)
        if window is None:
            keep = columns[None, None] <= places[..., None]
        else:
            positions = newest_positions(columns, places[:, -1:], total)  # [1 or B, 1, size]
            keep = (positions >= 0) & (positions <= places[..., None]) & (positions > places[..., None] - window)
        keeps.append(keep[:, None])
        start += size
    return keeps
