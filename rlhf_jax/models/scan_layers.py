"""Layers whose params are stacked, [L, ...], run one after the other: the first and the last may differ from the rest.

The layers between are a scan over their numbers, each taking its slices of the stacks. `lax.scan` over the params
themselves could only take all of them: a part of a stack would be a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from rlhf_jax.types import Array, Params


@jax.custom_vjp
def _lent(stack: Array, part: Array, index: Array) -> tuple[Array, Array]:
    """(stack, part), where `part` is stack[index] cut out without a gradient, lent once. What comes back is written
    into the stack's gradient in place; a slice's own gradient would be a stack of zeros for each layer."""
    return stack, part


def _lent_forward(stack: Array, part: Array, index: Array) -> tuple[tuple[Array, Array], Array]:
    return (stack, part), index


def _lent_backward(index: Array, upstream: tuple[Array, Array]) -> tuple[Array, None, None]:
    to_stack, to_part = upstream
    return jax.lax.dynamic_update_index_in_dim(to_stack, to_part, index, 0), None, None


_lent.defvjp(_lent_forward, _lent_backward)


def _all_but_params(primitive: Any, *_: Any, **__: Any) -> bool:
    # What a layer is cut out by; where its stack is frozen `_lent` is still a call, which would keep it.
    return primitive not in (primitives.dynamic_slice_p, primitives.squeeze_p, primitives.custom_vjp_call_p)


_KEPT = {
    "none": _all_but_params,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def through(
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
      layer: x, a layer's params, its number, whether it is the last of which less is asked -> x; only then x may change
        its shape.
      x: pytree.
      stack: params of all layers, [L, ...].
      remat: what the backward pass makes again: 'none', 'dots' (all but the outcomes of matrix products) or 'full' (all
        within a layer). Slices of the stack are cut again in any case.
      first: run the first layer by itself. Where nothing before it is trained, its backward pass then ends at its own
        params.
      last: run the last layer by itself, and tell it so.
    """
    count = jax.tree.leaves(stack)[0].shape[0]
    frozen = jax.lax.stop_gradient(stack)

    def step(state: tuple[Params, Any], index: Array, *, ending: bool) -> tuple[Params, Any]:
        lender, x = state
        parts = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), frozen)
        pairs = jax.tree.map(lambda leaf, part: _lent(leaf, part, index), lender, parts)
        lender, params = jax.tree.transpose(jax.tree.structure(stack), None, pairs)
        return lender, layer(x, params, index, ending)

    def remade(ending: bool, prevent_cse: bool) -> Callable:
        return jax.checkpoint(partial(step, ending=ending), policy=_KEPT[remat], prevent_cse=prevent_cse)

    state = (stack, x)
    start, stop = int(first), count - int(last and count > first)
    # Outside of a loop XLA would merge what is made again with what was made.
    if first:
        state = remade(last and count == 1, remat != "none")(state, jnp.int32(0))
    if start < stop:
        within = remade(False, False)
        state, _ = jax.lax.scan(lambda state, index: (within(state, index), None), state, jnp.arange(start, stop))
    if stop < count:
        state = remade(True, remat != "none")(state, jnp.int32(stop))
    return state[1]
