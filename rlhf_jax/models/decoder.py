"""GPT-NeoX (Pythia) as a Flax Linen block over stacked params.

Params are plain nested dicts. A layer's params are stacked over layers, [L, ...], and a training forward is
`lax.scan` over them; decoding slices them into a list once a rollout and unrolls the layers, which keeps the
cache a list of per-layer buffers that XLA updates in place.

Shape letters: B batch, P prompts, S sequence, C context, T response, L layers, D width, H heads, K head size, F hidden
units, V vocabulary.

Reference: transformers' `GPTNeoXModel`; Black et al. 2022, arXiv:2204.06745; rotary embedding: Su et al. 2021,
arXiv:2104.09864.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from rlhf_jax.models.families.gpt_neox_config import LINEARS, GPTNeoXConfig
from rlhf_jax.models.initializers import normal
from rlhf_jax.models.layers import (
    attend_after_prefix,
    causal_attention,
    frozen_product,
    gelu,
    product,
    rotary_angles,
    rotate,
    row_dropout,
)
from rlhf_jax.models.lora import A, B, Lora
from rlhf_jax.models.scan_layers import through
from rlhf_jax.parallel.sharding import Layout, constrain
from rlhf_jax.types import Array, Params

# Where a block's dropout is applied; part of the key, so that no two masks are the same.
_DROP_ATTENTION, _DROP_POST_ATTENTION, _DROP_POST_MLP, _DROP_EMBEDDING = range(4)
_DROP_LORA = {name: 4 + number for number, name in enumerate(LINEARS)}  # of the input of each adapter


_WIDE, _NARROW = ("fsdp", "tensor"), ("tensor", "fsdp")  # kernels to heads or hidden units, and back


# --- the block -------------------------------------------------------------------------------------------------------


Drop = Callable[[Array, int], Array]


def _keep(x: Array, site: int) -> Array:
    return x


def _ending(columns: Any, last: int | None) -> Any:
    """The last columns of each [B, S, ...]; None: all of them, of any array."""
    return columns if last is None else jax.tree.map(lambda x: x[:, x.shape[1] - last :], columns)


class Dense(nn.Module):
    """x @ kernel + bias by `layers.product`; `names` are those of the kernel's axes. With `lora` the kernel is frozen,
    and where the params hold an adapter (see `lora.with_lora`) it adds drop(x) A B."""

    features: int
    names: tuple[str | None, ...]
    bias: bool
    std: float
    dtype: Any = jnp.float32
    layout: Layout | None = None
    lora: Lora | None = None

    @nn.compact
    def __call__(self, x: Array, drop: Drop = _keep) -> Array:
        """x [..., D] -> [..., F]."""
        kernel = self.param("kernel", functools.partial(normal, std=self.std), (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,)) if self.bias else None
        x, dtype = x.astype(self.dtype), jnp.dtype(self.dtype)
        times = product if self.lora is None else frozen_product
        out = times(self.layout, self.names, dtype, x, kernel, bias)
        if not self.has_variable("params", A):
            return out
        low, high = (self.get_variable("params", name) for name in (A, B))
        narrow = product(self.layout, (self.names[0], None), dtype, drop(x, _DROP_LORA[self.name]), low, None)
        return out + product(self.layout, (None, self.names[1]), dtype, narrow, high, None)


def _layer_norm(config: GPTNeoXConfig, dtype: Any) -> nn.LayerNorm:
    # Linen reduces in float32 whatever the dtype; the fast variance E[x^2] - E[x]^2 would lose digits.
    return nn.LayerNorm(epsilon=config.layer_norm_eps, dtype=dtype, use_fast_variance=False)


class Attention(nn.Module):
    """QKV (interleaved per head: H, 3, K), rotary embedding, `attend_fn`, output projection."""

    config: GPTNeoXConfig
    dtype: Any = jnp.float32
    layout: Layout | None = None
    lora: Lora | None = None

    @nn.compact
    def __call__(
        self, x: Array, rope: tuple[Array, Array], attend_fn: Callable, drop: Drop = _keep, last: int | None = None
    ) -> tuple[Array, Any]:
        """x [..., D] -> ([..., D], whatever attend_fn keeps). attend_fn takes query, key, value, each [..., H, K].
        `last`: of x [B, S, D] only so many last columns ask, and come out."""
        config = self.config
        shared = {
            "bias": config.attention_bias,
            "std": config.initializer_range,
            "dtype": self.dtype,
            "layout": self.layout,
            "lora": self.lora,
        }
        qkv = Dense(3 * config.hidden_size, _WIDE, name="query_key_value", **shared)(x, drop)
        qkv = qkv.reshape(*x.shape[:-1], config.num_attention_heads, 3, config.head_size)
        qkv = constrain(self.layout, qkv, "rows", *[None] * (x.ndim - 2), "tensor")
        query, key, value = (qkv[..., i, :] for i in range(3))
        query, of_query = _ending((query, rope), last)
        out, kept = attend_fn(rotate(query, of_query), rotate(key, rope), value)
        out = out.reshape(*out.shape[:-2], config.hidden_size)
        return Dense(config.hidden_size, _NARROW, name="dense", **shared)(out, drop), kept


class MLP(nn.Module):
    """D -> F -> exact GELU -> D."""

    config: GPTNeoXConfig
    dtype: Any = jnp.float32
    layout: Layout | None = None
    lora: Lora | None = None

    @nn.compact
    def __call__(self, x: Array, drop: Drop = _keep) -> Array:
        """x [..., D] -> [..., D]."""
        config = self.config
        shared = {"bias": True, "std": config.initializer_range, "dtype": self.dtype, "layout": self.layout}
        shared["lora"] = self.lora
        up = Dense(config.intermediate_size, _WIDE, name="dense_h_to_4h", **shared)(x, drop)
        up = constrain(self.layout, up, "rows", *[None] * (x.ndim - 2), "tensor")
        return Dense(config.hidden_size, _NARROW, name="dense_4h_to_h", **shared)(gelu(up), drop)


class Block(nn.Module):
    """One layer: x + attention(ln1(x)) + mlp(ln2(x)), or sequentially y = x + attention(ln1(x)), y + mlp(ln2(y))."""

    config: GPTNeoXConfig
    dtype: Any = jnp.float32
    layout: Layout | None = None
    lora: Lora | None = None

    def setup(self) -> None:
        """Submodules carry the checkpoint's names."""
        self.input_layernorm = _layer_norm(self.config, self.dtype)
        self.post_attention_layernorm = _layer_norm(self.config, self.dtype)
        self.attention = Attention(self.config, self.dtype, self.layout, self.lora)
        self.mlp = MLP(self.config, self.dtype, self.layout, self.lora)

    def __call__(
        self,
        x: Array,
        rope: tuple[Array, Array],
        attend_fn: Callable,
        drop: Drop = _keep,
        last: int | None = None,
    ) -> tuple[Array, Any]:
        """x [..., D] -> ([..., D], what attend_fn kept: keys and values, or an updated cache). `last`: of x [B, S, D]
        only so many last columns come out."""
        x = constrain(self.layout, x, "rows")
        attended, kept = self.attention(self.input_layernorm(x), rope, attend_fn, drop, last)
        attended, x = drop(attended, _DROP_POST_ATTENTION), _ending(x, last)
        if self.config.use_parallel_residual:
            out = x + attended + drop(self.mlp(self.post_attention_layernorm(x), drop), _DROP_POST_MLP)
        else:
            x = x + attended
            out = x + drop(self.mlp(self.post_attention_layernorm(x), drop), _DROP_POST_MLP)
        return out, kept


# --- the model as functions ------------------------------------------------------------------------------------------


def init_backbone(config: GPTNeoXConfig, key: Array) -> Params:
    """Random float32 backbone as transformers draws it: normal(initializer_range), biases 0, layer norms 1 and 0."""
    embed_key, layers_key = jax.random.split(key)
    tokens = jnp.zeros((1, 1), jnp.int32)
    x, rope = jnp.zeros((1, 1, config.hidden_size)), _rope(config, tokens)

    def init_layer(key: Array) -> Params:
        return Block(config).init(key, x, rope, lambda q, k, v: (v, None))["params"]

    layers = jax.vmap(init_layer)(jax.random.split(layers_key, config.num_hidden_layers))
    shape = (config.vocab_size, config.hidden_size)
    return {
        "embed_in": {"embedding": normal(embed_key, shape, std=config.initializer_range)},
        "layers": layers,
        "final_layer_norm": {"scale": jnp.ones(config.hidden_size), "bias": jnp.zeros(config.hidden_size)},
    }


def _rope(config: GPTNeoXConfig, positions: Array) -> tuple[Array, Array]:
    return rotary_angles(positions, config.rotary_ndims, config.rotary_emb_base)


def _embed(backbone: Params, tokens: Array, dtype: Any, layout: Layout | None, split: bool = True) -> Array:
    """[B, ...] -> [B, ..., D]. `split`: `fsdp` splits the table, so each device looks its columns up for the rows of
    all, and then they are dealt out; the table itself, which is larger than a layer, is never gathered."""
    names = ("data", "fsdp") if split else ("rows", None)
    tokens = constrain(layout, tokens, names[0])
    # Out-of-range ids become NaN rather than somebody else's row.
    x = jnp.take(backbone["embed_in"]["embedding"], tokens, axis=0, mode="fill", fill_value=jnp.nan).astype(dtype)
    return constrain(layout, constrain(layout, x, names[0], *[None] * (x.ndim - 2), names[1]), "rows")


def _final_norm(config: GPTNeoXConfig, backbone: Params, x: Array, dtype: Any) -> Array:
    return _layer_norm(config, dtype).apply({"params": backbone["final_layer_norm"]}, x)


def _row_keys(key: Array, rows: int) -> Array:
    """[B] typed keys from one key (row index folded in) or from [B] keys that the caller made."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    return key if key.ndim == 1 else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))


def prepare(tokens: Array, mask: Array) -> tuple[Array, Array]:
    """Tokens with 0 where masked, and rotary positions counted over unmasked tokens only; both [B, S] int32."""
    counts = mask.astype(jnp.int32)
    return jnp.where(mask, tokens, 0), jnp.cumsum(counts, axis=1) - counts


def _ends(layout: Layout | None, lora: Lora | None, asked: bool) -> dict[str, bool]:
    """Whether the first and the last layer run by themselves. On several devices none does: outside of the scan XLA
    holds whole gradients of their kernels, of policy and value model at once."""
    one = layout is None or layout.mesh.size == 1
    return {"first": one and lora is not None, "last": one and asked}


def hidden(
    config: GPTNeoXConfig,
    backbone: Params,
    tokens: Array,
    mask: Array,
    *,
    dtype: Any = jnp.float32,
    remat: str = "none",
    dropout_key: Array | None = None,
    layout: Layout | None = None,
    lora: Lora | None = None,
    last: int | None = None,
) -> Array:
    """Hidden states after the final layer norm: tokens [B, S] int32, mask [B, S] bool -> [B, S, D] in `dtype`.

    `backbone` has stacked layers; with `lora` it is `with_lora`. `remat`: what the backward pass makes again, 'none',
    'dots' (all but the outcomes of matrix products) or 'full' (all within a layer). `dropout_key` (one key, or one per
    row) turns on the dropout of the config and of `lora`. `last`: only so many last columns come out, [B, last, D]; on
    one device the last layer makes of the others no more than query, key and value. What comes out at masked positions
    is finite and means nothing.
    """
    tokens, positions = prepare(tokens, mask)
    rope = _rope(config, positions)
    keys = None if dropout_key is None else _row_keys(dropout_key, tokens.shape[0])
    x = _embed(backbone, tokens, dtype, layout)
    if keys is not None and config.hidden_dropout > 0:
        x = row_dropout(x, config.hidden_dropout, keys, config.num_hidden_layers, _DROP_EMBEDDING)
    block = Block(config, dtype, layout, lora)
    rates = {_DROP_ATTENTION: config.attention_dropout}
    rates |= dict.fromkeys(_DROP_LORA.values(), 0.0 if lora is None else lora.dropout)

    def layer(x: Array, params: Params, index: Array, ending: bool) -> Array:
        def drop(x: Array, *site: int) -> Array:
            rate = rates.get(site[0], config.hidden_dropout)
            return x if keys is None or rate == 0 else row_dropout(x, rate, keys, index, *site)

        dropping = keys is not None and config.attention_dropout > 0
        drop_weights = (lambda x, start: drop(x, _DROP_ATTENTION, start)) if dropping else None

        def attend_fn(query: Array, key: Array, value: Array) -> tuple[Array, None]:
            return causal_attention(query, key, value, mask, drop_weights), None

        return block.apply({"params": params}, x, rope, attend_fn, drop, last if ending else None)[0]

    x = through(layer, x, backbone["layers"], remat, **_ends(layout, lora, last is not None))
    return _final_norm(config, backbone, x if last is None else x[:, -last:], dtype)


def hidden_after_prompts(
    config: GPTNeoXConfig,
    backbone: Params,
    prompts: Array,
    prompt_mask: Array,
    responses: Array,
    mask: Array,
    *,
    dtype: Any = jnp.float32,
    remat: str = "none",
    layout: Layout | None = None,
    lora: Lora | None = None,
) -> tuple[Array, Array]:
    """As `hidden`, with each prompt computed once for all of its responses; gradients flow through the prompt.

    prompts [P, C] and responses [B, T] int32, B = P * G, row i answering prompt i // G; prompt_mask [P, C] and mask
    [B, T] bool -> (the prompts' last column [P, D], responses [B, T, D]) in `dtype`. Prompts are left-padded.
    """
    prompts, positions = prepare(prompts, prompt_mask)
    responses, own_positions = prepare(responses, mask)
    lengths = jnp.repeat(prompt_mask.sum(axis=1), responses.shape[0] // prompts.shape[0])
    ropes = _rope(config, positions), _rope(config, own_positions + lengths[:, None])
    columns = jnp.arange(responses.shape[1])
    keep = mask[:, None, None, :] & (columns[:, None] >= columns[None, :])[None, None]
    block = Block(config, dtype, layout, lora)

    def layer(streams: tuple[Array, Array], params: Params, index: Array, ending: bool) -> tuple[Array, Array]:
        def attend_prompt(query: Array, key: Array, value: Array) -> tuple[Array, tuple[Array, Array]]:
            return causal_attention(query, key, value, prompt_mask), (key.swapaxes(1, 2), value.swapaxes(1, 2))

        given = (ropes[0], attend_prompt, _keep, 1 if ending else None)
        prompt, (prefix_key, prefix_value) = block.apply({"params": params}, streams[0], *given)

        def attend_response(query: Array, key: Array, value: Array) -> tuple[Array, None]:
            query, key, value = (a.swapaxes(1, 2) for a in (query, key, value))
            out = attend_after_prefix(query, key, value, keep, prefix_key, prefix_value, prompt_mask)
            return out.swapaxes(1, 2), None

        response, _ = block.apply({"params": params}, streams[1], ropes[1], attend_response)
        return prompt, response

    streams = tuple(_embed(backbone, ids, dtype, layout) for ids in (prompts, responses))
    prompt, response = through(layer, streams, backbone["layers"], remat, **_ends(layout, lora, True))
    return _final_norm(config, backbone, prompt[:, -1], dtype), _final_norm(config, backbone, response, dtype)


def prefill(
    config: GPTNeoXConfig,
    backbone: Params,
    tokens: Array,
    mask: Array,
    dtype: Any = jnp.float32,
    layout: Layout | None = None,
) -> tuple[Array, list[Params]]:
    """Run the prompts and keep their keys and values.

    tokens [P, C] int32, mask [P, C] bool, `backbone["layers"]` a list -> hidden states of the last column [P, D], and
    per layer {"k", "v"} [P, H, C, K].
    """
    tokens, positions = prepare(tokens, mask)
    rope = _rope(config, positions)
    x, prefix, block = _embed(backbone, tokens, dtype, layout, split=False), [], Block(config, dtype, layout)

    def lay(x: Array) -> Array:
        return constrain(layout, x.swapaxes(1, 2), "rows", "tensor")

    def attend_fn(query: Array, key: Array, value: Array) -> tuple[Array, Params]:
        return causal_attention(query, key, value, mask), {"k": lay(key), "v": lay(value)}

    for layer in backbone["layers"]:
        x, kept = block.apply({"params": layer}, x, rope, attend_fn)
        prefix.append(kept)
    return _final_norm(config, backbone, x[:, -1], dtype), prefix


def empty_cache(
    config: GPTNeoXConfig, rows: int, slots: int, dtype: Any = jnp.float32, layout: Layout | None = None
) -> list[Params]:
    """Room for `slots` tokens of each of `rows` responses: per layer {"k", "v"} [B, H, T, K], zero."""
    shape = (rows, config.num_attention_heads, slots, config.head_size)
    empty = constrain(layout, jnp.zeros(shape, dtype), "rows", "tensor")
    return [{"k": empty, "v": empty} for _ in range(config.num_hidden_layers)]


def decode(
    config: GPTNeoXConfig,
    backbone: Params,
    prefix: list[Params],
    prefix_mask: Array,
    cache: list[Params],
    tokens: Array,
    positions: Array,
    index: Array,
    dtype: Any = jnp.float32,
    layout: Layout | None = None,
) -> tuple[Array, list[Params]]:
    """One token a row: tokens [B] and rotary positions [B] int32, written to cache slot `index` (a scalar).

    `prefix` and `prefix_mask` [P, C] are the prompts', as `prefill` left them; row i answers prompt i // (B / P). Slots
    up to `index` are attended. Returns the hidden states [B, D] and the cache with the slot filled.
    """
    rope = _rope(config, positions)
    x, new_cache, block = _embed(backbone, tokens, dtype, layout, split=False), [], Block(config, dtype, layout)
    keep = (jnp.arange(cache[0]["k"].shape[2]) <= index)[None, None, None, :]

    def write(buffer: Array, new: Array) -> Array:
        kept = jax.lax.dynamic_update_slice_in_dim(buffer, new[:, :, None].astype(buffer.dtype), index, axis=2)
        return constrain(layout, kept, "rows", "tensor")

    for layer, before, old in zip(backbone["layers"], prefix, cache, strict=True):

        def attend_fn(
            query: Array, key: Array, value: Array, before: Params = before, old: Params = old
        ) -> tuple[Array, Params]:
            kept = {"k": write(old["k"], key), "v": write(old["v"], value)}
            out = attend_after_prefix(
                query[:, :, None], kept["k"], kept["v"], keep, before["k"], before["v"], prefix_mask
            )
            return out[:, :, 0], kept

        x, kept = block.apply({"params": layer}, x, rope, attend_fn)
        new_cache.append(kept)
    return _final_norm(config, backbone, x, dtype), new_cache
