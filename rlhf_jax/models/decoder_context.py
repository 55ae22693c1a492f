"""What a forward pass runs with: the decoder's switches, dtype, layout on the mesh, adapters and dropout.

A `Context` is made once, where a method of `Model` enters the decoder, and is passed down to the layers as one object.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models.lora import Lora
from rlhf_jax.models.rope import Rope
from rlhf_jax.parallel.sharding import Layout
from rlhf_jax.types import Array

ALL_KEYS = 2**30
"""A window that no sequence fills."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of the decoder; a family fills it from config.json. Hashable: static under jit.

    The defaults are those of most families: RMSNorm before attention and MLP, a gated MLP, separate query, key and
    value, no biases.
    """

    vocab_size: int  # V
    hidden_size: int  # D
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    num_key_value_heads: int  # KV; divides H
    head_dim: int  # K
    intermediate_size: int  # F
    max_position_embeddings: int
    ropes: tuple[Rope, ...] = ()  # none: positions are learned
    layer_rope: tuple[int, ...] = ()  # index into `ropes` by layer; empty: the first
    layer_window: tuple[int | None, ...] = ()  # keys that a query sees, itself included, by layer; None and empty: all
    residual: str = "sequential"  # a form of `decoder.Block`
    norm: str = "rms_norm"  # of layers.NORMS
    norm_eps: float = 1e-6
    norm_offset: bool = False  # the norm multiplies by 1 + weight
    norm_in_float32: bool = False  # the norm is cast after the weight, not before it
    activation: str = "silu"  # of layers.ACTIVATIONS
    gated_mlp: bool = True
    fused_gate: bool = False  # gate and up are one linear layer, gate first
    qkv: str = "separate"  # or one linear layer, 'interleaved' by head or in 'blocks'
    query_key_value_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None  # 'head': of each head; 'width': of all heads together
    attention_scale: float | None = None  # None: K^-0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None  # rounded to the compute dtype
    padding_idx: int | None = None  # row of the embedding without a gradient as an input
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    source: str = ""  # config.json as text, for writing it back

    @property
    def score_function(self) -> ScoreFunction:
        """Of the attention."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        return ScoreFunction(scale, self.attention_softcap)


@dataclasses.dataclass(frozen=True)
class ScoreFunction:
    """Scores of attention: scale * q . k, capped smoothly at +-softcap. Hashable: static under jit."""

    scale: float
    softcap: float | None = None

    def cap(self, scores: Array) -> Array:
        """softcap * tanh(scores / softcap)."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def masked(self, scores: Array, keep: Array) -> Array:
        """Capped scores, where a query sees the key; elsewhere the least number of float32."""
        return jnp.where(keep, self.cap(scores), jnp.finfo(jnp.float32).min)

    def slope(self, capped: Array) -> Array | float:
        """Derivative of `cap` from its value; of masked scores 0."""
        return 1.0 if self.softcap is None else 1.0 - jnp.square(jnp.clip(capped / self.softcap, -1.0, 1.0))


class DropoutSite(enum.IntEnum):
    """Where dropout is applied; folded into the key, so that no two masks are the same."""

    ATTENTION = 0
    POST_ATTENTION = 1
    POST_MLP = 2
    EMBEDDING = 3
    # Inputs of adapters.
    LORA_QUERY_KEY_VALUE = 4
    LORA_ATTENTION_OUT = 5
    LORA_MLP_UP = 6
    LORA_MLP_DOWN = 7
    LORA_QUERY = 8
    LORA_KEY = 9
    LORA_VALUE = 10
    LORA_MLP_GATE = 11
    LORA_CONNECTOR = 12


@dataclasses.dataclass(frozen=True, eq=False)
class Dropout:
    """Rates by site, and a PRNG key for each row.

    A mask is a function of a row's key and of a token's position, so that it depends neither on the rows beside it nor
    on the padding around it: micro-batches are as wide as their rows need.
    """

    keys: Array  # [B] typed
    hidden: float
    attention: float
    lora: float
    positions: Array | None = None  # [B, S] int32, of the columns; None: they are the positions

    @classmethod
    def create(
        cls, config: DecoderConfig, lora: Lora | None, key: Array, rows: int, positions: Array | None = None
    ) -> Dropout:
        """From one key (the row's index is folded in) or from [B] keys, one a row."""
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)
        keys = key if key.ndim == 1 else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
        lora_rate = 0.0 if lora is None else lora.dropout
        return cls(keys, config.hidden_dropout, config.attention_dropout, lora_rate, positions)

    def __call__(self, x: Array, layer: int | Array, site: DropoutSite) -> Array:
        """x [B, S', D] of the last S' columns with entries set to 0 at the site's rate."""
        rate = self.lora if site >= DropoutSite.LORA_QUERY_KEY_VALUE else self.hidden
        if rate == 0:
            return x
        return token_dropout(x, rate, fold_in_rows(self.keys, layer, site), self._last_positions(x.shape[1]))

    def weights(self, weights: Array, layer: int | Array) -> Array:
        """Weights [B, H, Q, S'] of the first S' columns to the last Q of them, as `__call__`."""
        _, heads, queries, seen = weights.shape
        keys = fold_in_rows(self.keys, layer, DropoutSite.ATTENTION)

        def query_keys(key: Array, query: Array, positions: Array) -> Array:
            pairs = positions[None] * heads + jnp.arange(heads)[:, None]
            return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (None, 0))(jax.random.fold_in(key, query), pairs)

        positions = self._last_positions(seen) if self.positions is None else self.positions[:, :seen]
        row_keys = jax.vmap(query_keys, (None, 0, None))
        pair_keys = jax.vmap(row_keys)(keys, positions[:, seen - queries :], positions)  # [B, Q, H, S']
        bits = jax.random.key_data(pair_keys)[..., 0].astype(jnp.uint32).swapaxes(1, 2)
        keep = bits < jnp.uint32((1.0 - self.attention) * 2**32)
        return drop_entries(weights, keep, self.attention)

    def _last_positions(self, columns: int) -> Array:
        """Positions [B, S'] of the last columns."""
        if self.positions is None:
            return jnp.broadcast_to(jnp.arange(columns), (len(self.keys), columns))
        return self.positions[:, self.positions.shape[1] - columns :]


def fold_in_rows(keys: Array, *data: int | Array) -> Array:
    """Keys [B] with each of `data` folded in, in turn."""
    for number in data:
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    return keys


def token_dropout(x: Array, rate: float, keys: Array, positions: Array) -> Array:
    """Dropout keyed by row and position: x [B, S, D], keys [B] typed PRNG keys, positions [B, S]. Returns x's shape."""
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, positions)
    keep = jax.vmap(jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[2:])))(keys)
    return drop_entries(x, keep, rate)


def drop_entries(x: Array, keep: Array, rate: float) -> Array:
    """x where `keep`, scaled by 1 / (1 - rate), else 0."""
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """One forward pass; `at_layer` adds what differs from layer to layer."""

    config: DecoderConfig
    dtype: Any = jnp.float32
    layout: Layout | None = None  # None: one device
    lora: Lora | None = None  # kernels are frozen, and params may hold adapters (see `lora.with_lora`)
    attn_implementation: str = "blocked"  # of attention over whole rows: 'blocked', 'cudnn' or 'splash'
    dropout: Dropout | None = None
    layer: int | Array = 0
    last: int | None = None  # the layer returns only this many last columns; None: all

    @property
    def held_heads(self) -> int:
        """Heads of keys and values as they are attended and cached: where they are fewer than the devices on the axis
        `tensor`, or do not divide by them, copied so that each device holds those that its queries read."""
        kv_heads = self.config.num_key_value_heads
        if self.layout is None or self.layout.folded:
            return kv_heads
        return math.lcm(kv_heads, self.layout.mesh.shape["tensor"])

    def at_layer(self, layer: int | Array, last: int | None = None) -> Context:
        """The context of one layer."""
        return dataclasses.replace(self, layer=layer, last=last)

    def drop(self, x: Array, site: DropoutSite) -> Array:
        """x [B, S, D] after the site's dropout."""
        return x if self.dropout is None else self.dropout(x, self.layer, site)
