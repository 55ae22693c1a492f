"""What a forward pass runs with: the decoder's switches, dtype, layout on the mesh, adapters and dropout.

A `Context` is made once, where a method of `Model` enters the decoder, and goes down to the layers as one object.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models.lora import Lora
from rlhf_jax.parallel.sharding import Layout
from rlhf_jax.types import Array


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of the decoder; a family fills it from its own config. Hashable: static under jit."""

    vocab_size: int  # V
    hidden_size: int  # D
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    head_dim: int  # K
    intermediate_size: int  # F
    rotary_ndims: int  # leading dimensions of a head that are rotated
    rotary_base: float
    parallel_residual: bool  # attention and MLP read the same x; else the MLP reads what the attention added to
    norm: str  # of layers.NORMS
    norm_eps: float
    activation: str  # of layers.ACTIVATIONS
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    initializer_range: float
    hidden_dropout: float
    attention_dropout: float


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


@dataclasses.dataclass(frozen=True, eq=False)
class Dropout:
    """Rates by site, and a PRNG key for each row."""

    keys: Array  # [B] typed
    hidden: float
    attention: float
    lora: float

    @classmethod
    def create(cls, config: DecoderConfig, lora: Lora | None, key: Array, rows: int) -> Dropout:
        """From one key (the row's index is folded in) or from [B] keys, one a row."""
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)
        keys = key if key.ndim == 1 else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
        return cls(keys, config.hidden_dropout, config.attention_dropout, 0.0 if lora is None else lora.dropout)

    def __call__(self, x: Array, layer: int | Array, site: DropoutSite, *data: int) -> Array:
        """x [B, ...] with entries set to 0 at the site's rate. `data` is folded into the key after layer and site."""
        rate = self.hidden
        if site == DropoutSite.ATTENTION:
            rate = self.attention
        elif site >= DropoutSite.LORA_QUERY_KEY_VALUE:
            rate = self.lora
        return x if rate == 0 else row_dropout(x, rate, self.keys, layer, int(site), *data)


def row_dropout(x: Array, rate: float, keys: Array, *data: int | Array) -> Array:
    """Dropout keyed per row: x [B, ...], keys [B] typed PRNG keys, data folded into each in turn. Returns x's shape.

    A row's mask depends on its key and not on the rows beside it. Kept entries are scaled by 1 / (1 - rate).
    """
    for number in data:
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[1:]))(keys)
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """One forward pass; `at_layer` adds what differs from layer to layer."""

    config: DecoderConfig
    dtype: Any = jnp.float32
    layout: Layout | None = None  # None: one device
    lora: Lora | None = None  # kernels are frozen, and params may hold adapters (see `lora.with_lora`)
    dropout: Dropout | None = None
    layer: int | Array = 0
    last: int | None = None  # the layer returns only so many last columns; None: all

    def at_layer(self, layer: int | Array, last: int | None = None) -> Context:
        """The context of one layer."""
        return dataclasses.replace(self, layer=layer, last=last)

    def drop(self, x: Array, site: DropoutSite, *data: int) -> Array:
        """x after the site's dropout."""
        return x if self.dropout is None else self.dropout(x, self.layer, site, *data)
