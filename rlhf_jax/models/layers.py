"""Layers that decoders are made of: linear layer with an adapter, norm, activation, MLP.

Shape letters: B batch, S sequence, D width, F hidden units.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from rlhf_jax.models.decoder_context import Context, DropoutSite
from rlhf_jax.models.initializers import normal
from rlhf_jax.models.linear import (
    COLUMN_PARALLEL,
    ROW_PARALLEL,
    TransposedKernel,
    frozen_product,
    product,
    transposed_product,
)
from rlhf_jax.models.lora import A, B
from rlhf_jax.models.quantization import is_quantized
from rlhf_jax.parallel.sharding import constrain
from rlhf_jax.types import Array


class Dense(nn.Module):
    """x @ kernel + bias by `linear.product`. With `context.lora` the kernel is frozen, and where the params hold an
    adapter it adds dropout(x) A B."""

    context: Context
    features: int
    names: tuple[str, str]  # of the kernel's axes
    bias: bool
    site: DropoutSite  # of the adapter's input

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x [..., D] -> [..., F]."""
        context, dtype = self.context, jnp.dtype(self.context.dtype)
        std = context.config.initializer_range
        kernel = self.get_variable("params", "kernel")
        transposed = isinstance(kernel, TransposedKernel)
        if not transposed and not is_quantized(kernel):  # Linen compares the shape of the first array with the kernel's
            kernel = self.param("kernel", functools.partial(normal, std=std), (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,)) if self.bias else None
        x = x.astype(dtype)
        if transposed:
            return transposed_product(context.layout, self.names, dtype, x, kernel.kernel_FxD, bias)
        multiply = product if context.lora is None else frozen_product
        out = multiply(context.layout, self.names, dtype, x, kernel, bias)
        if not self.has_variable("params", A):
            return out
        a_Dxr, b_rxF = (self.get_variable("params", name) for name in (A, B))
        x = context.drop(x, self.site)
        low_rank = product(context.layout, (self.names[0], None), dtype, x, a_Dxr, None)
        return out + product(context.layout, (None, self.names[1]), dtype, low_rank, b_rxF, None)


def _layer_norm(context: Context, name: str | None) -> nn.Module:
    # Linen reduces in float32 whatever the dtype; the fast variance E[x^2] - E[x]^2 would lose digits.
    return nn.LayerNorm(epsilon=context.config.norm_eps, dtype=context.dtype, use_fast_variance=False, name=name)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale, computed in float32. Zhang & Sennrich 2019, arXiv:1910.07467.

    The families differ in where they cast to the compute dtype, before the weight or after it, and in whether the
    weight is stored as its difference from 1.
    """

    context: Context

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x [..., n] -> [..., n] in the compute dtype."""
        config, dtype = self.context.config, self.context.dtype
        start = nn.initializers.zeros_init() if config.norm_offset else nn.initializers.ones_init()
        scale = self.param("scale", start, (x.shape[-1],)).astype(jnp.float32)
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + config.norm_eps)
        scale = (1.0 + scale if config.norm_offset else scale).reshape((1,) * (x.ndim - 1) + scale.shape)
        return (x * scale).astype(dtype) if config.norm_in_float32 else x.astype(dtype) * scale.astype(dtype)


NORMS: dict[str, Callable[[Context, str | None], nn.Module]] = {
    "layer_norm": _layer_norm,
    "rms_norm": lambda context, name: RMSNorm(context, name=name),
}


def norm(context: Context, name: str | None = None) -> nn.Module:
    """The norm of the config's kind."""
    return NORMS[context.config.norm](context, name)


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


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
}


class MLP(nn.Module):
    """D -> F -> activation -> D; gated: activation(gate) * up."""

    context: Context

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x [..., D] -> [..., D]."""
        context, config = self.context, self.context.config
        units, bias, act = config.intermediate_size, config.mlp_bias, ACTIVATIONS[config.activation]

        def hidden(name: str, features: int, site: DropoutSite) -> Array:
            return Dense(context, features, COLUMN_PARALLEL, bias, site, name=name)(x)

        def by_units(h: Array) -> Array:
            return constrain(context.layout, h, "rows", *[None] * (x.ndim - 2), "tensor")

        if config.fused_gate:
            gate, up = jnp.split(hidden("gate_up", 2 * units, DropoutSite.LORA_MLP_UP), 2, axis=-1)
            up = act(by_units(gate)) * by_units(up)
        elif config.gated_mlp:
            gate = by_units(hidden("gate", units, DropoutSite.LORA_MLP_GATE))
            up = act(gate) * by_units(hidden("dense_h_to_4h", units, DropoutSite.LORA_MLP_UP))
        else:
            up = act(by_units(hidden("dense_h_to_4h", units, DropoutSite.LORA_MLP_UP)))
        down_site = DropoutSite.LORA_MLP_DOWN
        return Dense(context, config.hidden_size, ROW_PARALLEL, bias, down_site, name="dense_4h_to_h")(up)
