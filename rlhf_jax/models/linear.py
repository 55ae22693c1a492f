"""Matrix products of linear layers, with their gradients: kernels split over the mesh, frozen and quantized kernels.

Shape letters: B batch, D input features, F output features.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models.quantization import dequantize, is_quantized
from rlhf_jax.parallel.sharding import Layout, constrain
from rlhf_jax.types import Array

# Names of a kernel's axes (see `sharding.Layout`): to heads or hidden units, and back.
COLUMN_PARALLEL, ROW_PARALLEL = ("fsdp", "tensor"), ("tensor", "fsdp")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def product(
    layout: Layout | None, names: tuple[str | None, ...], dtype: Any, x: Array, kernel: Array, bias: Array | None
) -> Array:
    """x @ kernel + bias, computed in x's dtype; the gradients of kernel and bias are summed over rows in float32.

    x [..., D], kernel [D, F] and bias [F] of any dtype -> [..., F] in `dtype`. `names` are those of the kernel's axes.
    A kernel that `fsdp` splits is gathered here and again in the backward pass, so that the full kernel is never kept,
    and its gradient is reduced straight into its shards.
    """
    return _product_forward(layout, names, dtype, x, kernel, bias)[0]


def _gather_fsdp(layout: Layout | None, names: tuple[str | None, ...], kernel: Any, dtype: Any) -> Array:
    names = tuple(None if name == "fsdp" else name for name in names)
    if is_quantized(kernel):  # gathered as it is stored
        return dequantize(jax.tree.map(lambda part: constrain(layout, part, *names), kernel), dtype)
    return constrain(layout, kernel.astype(dtype), *names)


def _product_forward(layout, names, dtype, x, kernel, bias):
    kernel_DxF = _gather_fsdp(layout, names, kernel, x.dtype)
    out = jnp.einsum("...d,df->...f", x, kernel_DxF, preferred_element_type=dtype)
    if bias is not None:
        out = out + bias.astype(dtype).reshape((1,) * (out.ndim - 1) + bias.shape)
    return out, (x, kernel, bias)


def _product_backward(layout, names, dtype, residuals, d_out):
    x, kernel, bias = residuals
    d_out_cast = d_out.astype(x.dtype)
    d_x = jnp.einsum("...f,df->...d", d_out_cast, _gather_fsdp(layout, names, kernel, x.dtype))
    d_kernel = _kernel_gradient(layout, names, x, d_out_cast).astype(kernel.dtype)
    if bias is None:
        return d_x, d_kernel, None
    d_bias = d_out.astype(jnp.float32).sum(axis=tuple(range(d_out.ndim - 1)))
    return d_x, d_kernel, d_bias.astype(bias.dtype)


def _kernel_gradient(layout, names, x: Array, d_out: Array) -> Array:
    """[..., D], [..., F] -> [D, F] float32, summed over rows."""
    x_RxD, d_out_RxF = (a.reshape(-1, a.shape[-1]) for a in (x, d_out))
    if d_out_RxF.shape[1] < x_RxD.shape[1] // 8:
        # A CPU computes a tall, narrow product six times slower than its transpose.
        d_kernel = jnp.einsum("rd,rf->fd", x_RxD, d_out_RxF, preferred_element_type=jnp.float32).T
    else:
        d_kernel = jnp.einsum("rd,rf->df", x_RxD, d_out_RxF, preferred_element_type=jnp.float32)
    return constrain(layout, d_kernel, *names)


product.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def frozen_product(
    layout: Layout | None, names: tuple[str | None, ...], dtype: Any, x: Array, kernel: Any, bias: Array | None
) -> Array:
    """`product` without gradients of kernel (float or quantized) and bias; x is not kept for the backward pass."""
    return _product_forward(layout, names, dtype, x, kernel, bias)[0]


def _frozen_forward(layout, names, dtype, x, kernel, bias):
    # A scalar keeps x's dtype.
    return _product_forward(layout, names, dtype, x, kernel, bias)[0], (jnp.zeros((), x.dtype), kernel)


def _frozen_backward(layout, names, dtype, residuals, d_out):
    scalar, kernel = residuals
    d_out = d_out.astype(scalar.dtype)
    return jnp.einsum("...f,df->...d", d_out, _gather_fsdp(layout, names, kernel, scalar.dtype)), None, None


frozen_product.defvjp(_frozen_forward, _frozen_backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransposedKernel:
    """A kernel [D, F] stored as [F, D], for `transposed_product`."""

    kernel_FxD: Array


# With more rows both forms of the product take the same time on a CPU.
_FEW_ROWS = 32


def transposed_product(
    layout: Layout | None,
    names: tuple[str | None, ...],
    dtype: Any,
    x: Array,
    kernel_FxD: Array,
    bias: Array | None = None,
) -> Array:
    """x @ kernel_FxD.T + bias, as `product` computes it, for the few rows of a decoding step on a CPU.

    A CPU reads the weights up to twice as fast where they are the left factor and the result is [F, rows]. The
    barrier keeps XLA from turning the product and the transpose after it back into x times the kernel.

    x [..., D], kernel_FxD [F, D] of any dtype, bias [F] -> [..., F] in `dtype`. `names` are those of the axes D and F.
    """
    kernel_FxD = constrain(layout, kernel_FxD.astype(x.dtype), *reversed(names))
    x_RxD = x.reshape(-1, x.shape[-1])
    if 1 < len(x_RxD) <= _FEW_ROWS:
        out_FxR = jnp.einsum("fd,rd->fr", kernel_FxD, x_RxD, preferred_element_type=dtype)
        out = jax.lax.optimization_barrier(out_FxR).T.reshape(*x.shape[:-1], -1)
    else:
        out = jnp.einsum("...d,fd->...f", x, kernel_FxD, preferred_element_type=dtype)
    return out if bias is None else out + bias.astype(dtype).reshape((1,) * (out.ndim - 1) + bias.shape)
