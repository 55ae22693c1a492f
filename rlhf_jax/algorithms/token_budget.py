"""Micro-batches of at most `micro_batch_tokens` tokens, of rows of like length, in one compiled loop.

A micro-batch has one of a few shapes: so many rows, so many columns of prompt and of response. Rows are sorted by
length, longest first, and a `while_loop` takes as many of them at a time as fit a shape that holds them; each shape is
compiled once. An item is what micro-batches are made of: a row, or a group of responses to one prompt. Items of length
-1 are absent and in no micro-batch. Shape letters: M items, C prompt columns, T response columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import microbatch
from rlhf_jax.parallel import sharding
from rlhf_jax.types import Array, Params

RESPONSE_WIDTHS = (8, 4, 2, 1)
"""Response columns of the shapes: T over these."""
LEAST_SAVING = 1 / 6
"""A narrower prompt is a shape of its own if it saves this share of a micro-batch's tokens."""


class Shape(NamedTuple):
    """What a micro-batch holds."""

    items: int
    prompt: int  # columns
    response: int  # columns
    tokens: int  # of an item, padding included


class Items(NamedTuple):
    """A batch for micro-batches of like length.

    Attributes:
      batch: pytree [M, ...].
      prompts: [M] int32, lengths of the prompts.
      responses: [M] int32, response columns that an item needs; -1: it is absent.
      shapes: of `shapes_of`.
      narrow: (pytree [m, ...], which of its items are not absent [m] bool, Shape) -> the same with fewer columns, in
        which absent items have length -1 and add 0 to all sums.
      mesh: items are sharded over it; None: one device.
    """

    batch: Any
    prompts: Array
    responses: Array
    shapes: tuple[Shape, ...]
    narrow: Callable
    mesh: Any | None


def shapes_of(config, *, items: int, columns: int, t: int, group_size: int = 1, mesh: Any | None = None):
    """The shapes of micro-batches, the widest last.

    Args:
      config: micro_batch_tokens, length_buckets.
      items: M.
      columns: C.
      t: T.
      group_size: responses of an item.
      mesh: each device gets as many items.
    """
    shards = 1 if mesh is None else sharding.row_shards(mesh)
    found = []
    for parts in RESPONSE_WIDTHS:
        response = -(-t // parts)
        response = min(-(-response // 8) * 8, t) if t >= 64 else response
        widest = columns + group_size * response
        for prompt in microbatch.prompt_widths(config, columns):
            if prompt < columns and columns - prompt < LEAST_SAVING * widest:
                continue
            tokens = prompt + group_size * response
            most = max(config.micro_batch_tokens // (tokens * shards), 1)
            shape = Shape(min(most, -(-items // shards)) * shards, prompt, response, tokens)
            if shape not in found:
                found.append(shape)
    return tuple(found)


def most_micro_batches(items: Items) -> int:
    """The number of micro-batches that there can be."""
    return -(-items.prompts.shape[0] // min(shape.items for shape in items.shapes))


def _order(items: Items) -> tuple[Array, Array]:
    """(the items [M] int32 by response columns of their shape and prompt, longest first and absent last; how many are
    not absent [] int32)"""
    widths = jnp.array(sorted({shape.response for shape in items.shapes}))
    key = jnp.searchsorted(widths, items.responses) * (items.shapes[-1].prompt + 1) + items.prompts
    present = items.responses >= 0
    return jnp.argsort(jnp.where(present, -key, 1)), jnp.sum(present).astype(jnp.int32)


def _next_shape(start: Array, count: Array, prompts: Array, responses: Array, shapes: tuple[Shape, ...]) -> Array:
    """Index of the shape that computes the items from `start` with the fewest tokens an item: [] int32.

    Args:
      start: [] int32.
      count: [] int32, items that are not absent.
      prompts, responses: [M] int32, sorted.
      shapes: the last holds any items.
    """
    places, costs = jnp.arange(prompts.shape[0]), []
    for shape in shapes:
        fits = (prompts <= shape.prompt) & (responses <= shape.response)
        taken = (places >= start) & (places < jnp.minimum(start + shape.items, count))
        cost = shape.items * shape.tokens / jnp.maximum(jnp.sum(taken), 1)
        costs.append(jnp.where(jnp.all(fits | ~taken), cost, jnp.inf))
    return jnp.argmin(jnp.stack(costs)).astype(jnp.int32)


def _fold(function: Callable, combine: Callable, carry: Any, items: Items) -> tuple[Any, Array]:
    """Combines the results of all micro-batches; there is at least one, if of absent items alone.

    Args:
      function: (micro-batch, its items [m] int32, M in place of an absent one; index of the micro-batch [] int32) ->
        pytree whose shapes are those of every shape.
      combine: (carry, that pytree) -> carry.
      carry: pytree.
      items: M of them.

    Returns:
      (carry, number of micro-batches [] int32)
    """
    order, count = _order(items)
    total = order.shape[0]
    prompts, responses = items.prompts[order], items.responses[order]

    def of_shape(shape: Shape) -> Callable:
        def micro_batch(start: Array, index: Array) -> Any:
            places = start + jnp.arange(shape.items)
            chosen, there = order[jnp.minimum(places, total - 1)], places < count
            micro = sharding.spread_rows(jax.tree.map(lambda x: x[chosen], items.batch), items.mesh)
            return function(items.narrow(micro, there, shape), jnp.where(there, chosen, total), index)

        return micro_batch

    branches = [of_shape(shape) for shape in items.shapes]
    sizes = jnp.array([shape.items for shape in items.shapes], jnp.int32)

    def body(state: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        start, index, carry = state
        choice = _next_shape(start, count, prompts, responses, items.shapes)
        carry = combine(carry, microbatch.switch(choice, branches, start, index))
        return start + sizes[choice], index + 1, carry

    state = (jnp.int32(0), jnp.int32(0), carry)
    _, used, carry = jax.lax.while_loop(lambda state: state[0] < jnp.maximum(count, 1), body, state)
    return carry, used


def _widest(items: Items) -> Any:
    """The first micro-batch of the widest shape, for the shapes of results."""
    shape = items.shapes[-1]
    micro = jax.tree.map(lambda x: x[jnp.zeros(shape.items, jnp.int32)], items.batch)
    return items.narrow(micro, jnp.ones(shape.items, bool), shape)


def accumulate_gradients(loss_fn: Callable, params: Params, items: Items) -> tuple[Params, Any, Array]:
    """`microbatch.accumulate_gradients` over micro-batches of like length.

    Args:
      loss_fn: (params, micro-batch, index) -> (loss [], metrics pytree).
      params: what to differentiate.
      items: M of them.

    Returns:
      (gradients, sums of the metrics, number of micro-batches [] int32)
    """
    grad_fn = jax.grad(loss_fn, has_aux=True)
    shapes = jax.eval_shape(lambda params: grad_fn(params, _widest(items), jnp.int32(0)), params)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)), shapes)

    def add(sums: Any, found: Any) -> Any:
        return jax.tree.map(lambda a, x: a + x.astype(a.dtype), sums, found)

    (grads, metrics), used = _fold(lambda micro, _, index: grad_fn(params, micro, index), add, zeros, items)
    return grads, metrics, used


def sum_over_micro_batches(function: Callable, items: Items) -> tuple[Any, Array]:
    """`microbatch.sum_over_micro_batches` over micro-batches of like length.

    Args:
      function: (micro-batch, index) -> pytree.
      items: M of them.

    Returns:
      (the pytree, summed; number of micro-batches [] int32)
    """
    shapes = jax.eval_shape(lambda: function(_widest(items), jnp.int32(0)))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def add(sums: Any, found: Any) -> Any:
        return jax.tree.map(jnp.add, sums, found)

    return _fold(lambda micro, _, index: function(micro, index), add, zeros, items)


def map_items(function: Callable, items: Items) -> Any:
    """Applies `function` to micro-batches of like length.

    Args:
      function: micro-batch [m, ...] -> pytree [m, ..., response columns].
      items: M of them.

    Returns:
      function(batch) [M, ..., T], as if called once; 0 in the columns that an item does not need.
    """
    total, most = items.prompts.shape[0], max(shape.items for shape in items.shapes)
    t = items.shapes[-1].response

    def padded(micro: Any, chosen: Array, _: Array) -> tuple[Any, Array]:
        def pad(x: Array) -> Array:
            sizes = [(0, most - x.shape[0]), *[(0, 0)] * (x.ndim - 2), (0, t - x.shape[-1])]
            return jnp.pad(x, sizes)

        missing = (0, most - chosen.shape[0])
        return jax.tree.map(pad, function(micro)), jnp.pad(chosen, missing, constant_values=total)

    def write(out: Any, found: tuple[Any, Array]) -> Any:
        rows, chosen = found
        return jax.tree.map(lambda buffer, x: buffer.at[chosen].set(x, mode="drop"), out, rows)

    shapes = jax.eval_shape(lambda: function(_widest(items)))
    zeros = jax.tree.map(lambda s: jnp.zeros((total, *s.shape[1:]), s.dtype), shapes)
    return sharding.spread_rows(_fold(padded, write, zeros, items)[0], items.mesh)


def unused_slots(x: Array, used: Array) -> Array:
    """[N] by micro-batch with the first one's value in the slots of micro-batches that there were not: an extreme over
    them is that of those that there were."""
    return jnp.where(jnp.arange(x.shape[0]) < used, x, x[0])
