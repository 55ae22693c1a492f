"""Applies layers whose params are stacked, [L, ...], one after the other.

By default a `lax.scan` over the params. Where the first or the last layer runs outside the scan, a scan over the
numbers of the other layers, which slices their params: `lax.scan` over a part of the stacks would hold a copy of that
part, for Pythia-70m 72 MiB beside the 305 MiB of a forward and backward pass of 2 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from rlhf_jax.models.attention import ATTENTION
from rlhf_jax.types import Array, Params


@jax.custom_vjp
def _with_gradient(stack: Array, part: Array, index: Array) -> tuple[Array, Array]:
    """(stack, part), where `part` is stack[index], sliced without a gradient. The gradient of `part` is written into
    that of `stack` in place; a slice's own gradient would be a stack of zeros for each layer."""
    return stack, part


def _with_gradient_forward(stack: Array, part: Array, index: Array) -> tuple[tuple[Array, Array], Array]:
    return (stack, part), index


def _with_gradient_backward(index: Array, gradients: tuple[Array, Array]) -> tuple[Array, None, None]:
    d_stack, d_part = gradients
    return jax.lax.dynamic_update_index_in_dim(d_stack, d_part, index, 0), None, None


_with_gradient.defvjp(_with_gradient_forward, _with_gradient_backward)

try:
    # What slices the params: in a stack without a gradient `_with_gradient` is still a call. No public policy can leave
    # slices out of what is saved: one by `checkpoint_name` saves the array that was given the name.
    SLICING = (primitives.dynamic_slice_p, primitives.squeeze_p, primitives.custom_vjp_call_p)
except AttributeError:  # renamed in another version of jax
    SLICING = None


def _save_all_but_params(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive not in SLICING


_PRODUCTS_AND_ATTENTION = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, jax.checkpoint_policies.save_only_these_names(ATTENTION)
)
_SAVED = {
    "none": _save_all_but_params,
    "dots": _PRODUCTS_AND_ATTENTION,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def scan_layers(
    layer: Callable[[Any, Params, Array, bool], Any],
    x: Any,
    stack: Params,
    remat: str,
    *,
    first: bool = False,
    last: bool = False,
) -> Any:
    """x after all layers.

    Args:
      layer: x, a layer's params, its number, whether it is the last one and outside the scan -> x, whose shape may
        change only then.
      x: pytree.
      stack: params of all layers, [L, ...].
      remat: what the backward pass recomputes: 'none', 'dots' (all but the results of matrix products and of attention)
        or 'full' (all within a layer).
      first: run the first layer outside the scan. Where nothing before it is trained, its backward pass then ends at
        its own params.
      last: run the last layer outside the scan.
    """
    count = jax.tree.leaves(stack)[0].shape[0]
    if not (first or last) or SLICING is None:

        def scanned(x: Any, row: tuple[Params, Array]) -> tuple[Any, None]:
            return layer(x, *row, False), None

        if remat != "none":
            scanned = jax.checkpoint(scanned, policy=_SAVED[remat], prevent_cse=False)
        return jax.lax.scan(scanned, x, (stack, jnp.arange(count)))[0]

    frozen = jax.lax.stop_gradient(stack)

    def step(state: tuple[Params, Any], index: Array, *, is_last: bool) -> tuple[Params, Any]:
        stack, x = state
        parts = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), frozen)
        pairs = jax.tree.map(lambda leaf, part: _with_gradient(leaf, part, index), stack, parts)
        stack, params = jax.tree.transpose(jax.tree.structure(frozen), None, pairs)
        return stack, layer(x, params, index, is_last)

    def checkpointed(is_last: bool, prevent_cse: bool) -> Callable:
        return jax.checkpoint(partial(step, is_last=is_last), policy=_SAVED[remat], prevent_cse=prevent_cse)

    state = (stack, x)
    start, stop = int(first), count - int(last and count > first)
    # Outside a loop XLA would merge what is recomputed with what was computed.
    if first:
        state = checkpointed(last and count == 1, remat != "none")(state, jnp.int32(0))
    if start < stop:
        within = checkpointed(False, False)
        state, _ = jax.lax.scan(lambda state, index: (within(state, index), None), state, jnp.arange(start, stop))
    if stop < count:
        state = checkpointed(True, remat != "none")(state, jnp.int32(stop))
    return state[1]
