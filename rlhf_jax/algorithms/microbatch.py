"""Micro-batches: parts of a batch, by rows or by tokens, and sums, outputs and gradients over all of them.

`MicroBatches.by_rows` cuts a batch into parts of as many rows, for `lax.scan`. `MicroBatches.by_tokens` cuts it into
parts of at most `micro_batch_tokens` tokens, for `lax.while_loop`: rows of similar length share a part, and each part
has one of a few shapes, each compiled once. A micro-batch consists of items; an item is a row, or a group of responses
to one prompt. Shape letters: M items, C prompt columns, T response columns.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.options import BatchOptions, PolicyGradientOptions
from rlhf_jax.data.options import LengthOptions
from rlhf_jax.parallel import sharding
from rlhf_jax.types import Array, Metrics, Params

RESPONSE_WIDTHS = (8, 4, 2, 1)
"""Response columns of the shapes of `by_tokens`: T over these."""
LEAST_SAVING = 1 / 6
"""A narrower prompt is a shape of its own if it saves this share of a micro-batch's tokens."""


class Tally(NamedTuple):
    """What is measured over rows: [] each, by name."""

    sums: Any = {}
    least: Metrics = {}
    greatest: Metrics = {}


def merge(a: Tally, b: Tally) -> Tally:
    """The tally of the rows of both; sums in the dtype of a."""
    return Tally(
        jax.tree.map(lambda x, y: x + y.astype(x.dtype), a.sums, b.sums),
        jax.tree.map(jnp.minimum, a.least, b.least),
        jax.tree.map(jnp.maximum, a.greatest, b.greatest),
    )


def _empty(shapes: Tally) -> Tally:
    """The tally of no rows; sums are of float32 or wider."""

    def zeros(s: Any) -> Array:
        wide = jnp.issubdtype(s.dtype, jnp.inexact)
        return jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32) if wide else s.dtype)

    return Tally(
        jax.tree.map(zeros, shapes.sums),
        jax.tree.map(lambda s: jnp.full(s.shape, jnp.inf, s.dtype), shapes.least),
        jax.tree.map(lambda s: jnp.full(s.shape, -jnp.inf, s.dtype), shapes.greatest),
    )


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """A batch in parts.

    Attributes:
      fold: (function of a micro-batch [m, ...] -> (Tally, outputs [m, ...])) -> (Tally of all, outputs [M, ...] in the
        order of the batch).
      count: number of micro-batches; None: it depends on the lengths.
    """

    fold: Callable
    count: int | None

    @classmethod
    def by_rows(
        cls,
        batch: Any,
        size: int | None,
        *,
        lengths: Array | None = None,
        widths: Sequence[int] = (0,),
        narrow: Callable = lambda micro, width: micro,
        sort: bool = False,
        mesh: Any | None = None,
    ) -> MicroBatches:
        """Parts of `size` items.

        Args:
          batch: pytree [M, ...].
          size: divides M, or is larger; None: one part.
          lengths: [M] int32, of the prompts; None: parts are not narrowed.
          widths: prompt columns that a part may be narrowed to, ascending; the last holds any prompt.
          narrow: (micro-batch, width) -> the same with prompts of that many columns.
          sort: whether items are sorted by `lengths`, so that parts can be narrow.
          mesh: items are sharded over it; None: one device.
        """
        total = jax.tree.leaves(batch)[0].shape[0]
        size = total if size is None else min(size, total)
        lengths = jnp.zeros(total, jnp.int32) if lengths is None else lengths
        order = jnp.argsort(lengths) if sort else None
        parts, longest = sorted_by(order, (batch, lengths))
        parts = jax.tree.map(lambda x: x.reshape((-1, size) + x.shape[1:]), parts)
        parts = sharding.spread_rows(parts, mesh, axis=1)
        longest = jnp.max(longest.reshape(-1, size), axis=1)
        choices = jnp.searchsorted(jnp.array(widths), longest).astype(jnp.int32)

        def fold(function: Callable) -> tuple[Tally, Any]:
            branches = [lambda part, width=width: function(narrow(part, width)) for width in widths]
            first = choices[0], jax.tree.map(lambda x: x[0], parts)
            if size == total:
                tally, outputs = switch(first[0], branches, first[1])
            else:

                def body(tally: Tally, item: tuple[Array, Any]) -> tuple[Tally, Any]:
                    one, outputs = switch(item[0], branches, item[1])
                    return merge(tally, one), outputs

                empty = _empty(jax.eval_shape(lambda: switch(first[0], branches, first[1]))[0])
                tally, outputs = jax.lax.scan(body, empty, (choices, parts))
                outputs = jax.tree.map(lambda x: x.reshape((total,) + x.shape[2:]), outputs)
            inverse = None if order is None else jnp.argsort(order)
            return tally, sharding.spread_rows(sorted_by(inverse, outputs), mesh)

        return cls(fold, total // size)

    @classmethod
    def by_tokens(
        cls,
        batch: Any,
        *,
        prompts: Array,
        responses: Array,
        shapes: tuple[Shape, ...],
        narrow: Callable,
        mesh: Any | None = None,
    ) -> MicroBatches:
        """Parts of items of similar length, each of one of a few shapes.

        Args:
          batch: pytree [M, ...].
          prompts: [M] int32, lengths of the prompts.
          responses: [M] int32, response columns that an item needs; -1: the item is excluded.
          shapes: of `token_shapes`.
          narrow: (pytree [m, ...], which of its items are present [m] bool, Shape) -> the same with fewer columns, in
            which items that are not present add nothing to any tally.
          mesh: items are sharded over it; None: one device.

        The outputs of a fold are [m, ..., response columns]; they are 0 in the columns that an item does not need.
        """
        return cls(functools.partial(_fold_by_tokens, batch, prompts, responses, shapes, narrow, mesh), None)

    def map(self, function: Callable) -> Any:
        """function(batch), as if called once: pytree [m, ...] -> pytree [m, ...]."""
        return self.fold(lambda micro: (Tally(), function(micro)))[1]

    def sum(self, function: Callable) -> Tally:
        """The tally of all micro-batches, of function: micro-batch -> Tally."""
        return self.fold(lambda micro: (function(micro), ()))[0]

    def gradients(self, loss_fn: Callable, params: Params, scale: float = 1.0) -> tuple[Params, Tally, Any]:
        """Gradients of the sum of a loss over all micro-batches, accumulated in float32.

        Args:
          loss_fn: (params, micro-batch) -> (loss [], (Tally, outputs [m, ...])). It divides by counts of the whole
            batch itself, so that the sum is the batch's own gradient.
          params: what to differentiate.
          scale: of `loss_scale`.

        Returns:
          (gradients, tally, outputs [M, ...])
        """
        gradient = value_and_gradient(loss_fn, scale)

        def measured(micro: Any) -> tuple[Tally, Any]:
            # The gradient is taken within each branch: that of a switch keeps the residuals of all its branches.
            (_, (tally, outputs)), grads = gradient(params, micro)
            return tally._replace(sums=(grads, tally.sums)), outputs

        tally, outputs = self.fold(measured)
        grads, sums = tally.sums
        return grads, tally._replace(sums=sums), outputs


def loss_scale(dtype: str, terms: int) -> float:
    """What a loss is multiplied by for its gradient: 1, but in float16, where numbers below 6e-8 are 0.

    There it is a power of two of about the number of terms, so that the backward pass of a mean has the numbers of one
    term, however many there are. It is fixed: a gradient above 65,504 is not finite, and its update is skipped.

    Args:
      dtype: compute dtype.
      terms: tokens or rows that the loss is the mean of.
    """
    return 2.0 ** (terms.bit_length() - 1) if dtype == "float16" else 1.0


def value_and_gradient(loss_fn: Callable, scale: float) -> Callable:
    """`jax.value_and_grad` of (params, micro-batch) -> (loss [], auxiliary outputs), by the backward pass of `scale`
    times the loss."""
    if scale == 1.0:
        return jax.value_and_grad(loss_fn, has_aux=True)

    def scaled(params: Params, micro: Any) -> tuple[Array, Any]:
        loss, outputs = loss_fn(params, micro)
        return scale * loss, outputs

    def function(params: Params, micro: Any) -> Any:
        (loss, outputs), grads = jax.value_and_grad(scaled, has_aux=True)(params, micro)
        return (loss / scale, outputs), jax.tree.map(lambda x: x / scale, grads)

    return function


def sorted_by(order: Array | None, rows: Any) -> Any:
    """The rows of a pytree [M, ...] in an order [M] int32; None: as they are."""
    return rows if order is None else jax.tree.map(lambda x: x[order], rows)


def switch(choice: Array, branches: Sequence[Callable], *operands: Any) -> Any:
    """`lax.switch`; a plain call where there is one branch."""
    return branches[0](*operands) if len(branches) == 1 else jax.lax.switch(choice, branches, *operands)


# --- by rows


def row_keys(key: Array, rows: int) -> Array:
    """One key per row, so that dropout does not depend on how a batch is cut into micro-batches.

    Returns:
      [rows] typed keys.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))


def groups_per_chunk(rows: int | None, group_size: int, groups: int) -> int | None:
    """The number of groups that hold at most `rows` rows and divide `groups`; None: no limit."""
    return None if rows is None else math.gcd(groups, max(rows // group_size, 1))


def prompt_widths(config: LengthOptions, columns: int) -> tuple[int, ...]:
    """The widths that prompts may be narrowed to, ascending; the last is C.

    Args:
      config: length_buckets; None: half, three quarters and all of C where C is 256 or more. Each width is compiled
        separately within the step, which does not pay for short prompts.
      columns: C.
    """
    widths = config.length_buckets
    if widths is None:
        widths = tuple(-(-columns * quarters // 32) * 8 for quarters in (2, 3)) if columns >= 256 else ()
    return (*sorted({width for width in widths if width < columns}), columns)


def forward_batch_size(config: BatchOptions, rows: int) -> int | None:
    """Rows per forward pass of a batch of `rows`: the lesser of rollout_batch_size and micro_batch_size."""
    sizes = [size for size in (config.rollout_batch_size, config.micro_batch_size) if size and rows % size == 0]
    return min(sizes, default=None)


# --- by tokens


class Shape(NamedTuple):
    """What a micro-batch of tokens holds."""

    items: int
    prompt: int  # columns
    response: int  # columns
    tokens: int  # of an item, padding included


def token_shapes(
    config: PolicyGradientOptions, *, items: int, columns: int, t: int, group_size: int = 1, mesh: Any | None = None
) -> tuple[Shape, ...]:
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
    shapes: list[Shape] = []
    for parts in RESPONSE_WIDTHS:
        response = -(-t // parts)
        response = min(-(-response // 8) * 8, t) if t >= 64 else response
        widest = columns + group_size * response
        for prompt in prompt_widths(config, columns):
            if prompt < columns and columns - prompt < LEAST_SAVING * widest:
                continue
            tokens = prompt + group_size * response
            most = max(config.micro_batch_tokens // (tokens * shards), 1)
            shape = Shape(min(most, -(-items // shards)) * shards, prompt, response, tokens)
            if shape not in shapes:
                shapes.append(shape)
    return tuple(shapes)


def _fold_by_tokens(
    batch: Any,
    prompts: Array,
    responses: Array,
    shapes: tuple[Shape, ...],
    narrow: Callable,
    mesh: Any | None,
    function: Callable,
) -> tuple[Tally, Any]:
    """`MicroBatches.fold` of `MicroBatches.by_tokens`; at least one micro-batch, if of excluded items alone.

    Items are sorted by length, longest first, and each turn of the loop takes as many as the cheapest shape holds.
    """
    order, count = _longest_first(prompts, responses, shapes)
    total, t, most = order.shape[0], shapes[-1].response, max(shape.items for shape in shapes)
    prompts, responses = prompts[order], responses[order]

    def padded(x: Array) -> Array:  # outputs of one shape [m, ..., r] -> of any shape
        return jnp.pad(x, [(0, most - x.shape[0]), *[(0, 0)] * (x.ndim - 2), (0, t - x.shape[-1])])

    def branch(shape: Shape) -> Callable:
        def compute(start: Array) -> tuple[Tally, Any, Array]:
            places = start + jnp.arange(shape.items)
            present, items = places < count, order[jnp.minimum(places, total - 1)]
            micro = sharding.spread_rows(jax.tree.map(lambda x: x[items], batch), mesh)
            tally, outputs = function(narrow(micro, present, shape))
            rows = jnp.pad(jnp.where(present, items, total), (0, most - shape.items), constant_values=total)
            return tally, jax.tree.map(padded, outputs), rows

        return compute

    branches = [branch(shape) for shape in shapes]
    sizes = jnp.array([shape.items for shape in shapes], jnp.int32)

    def body(state: tuple[Array, Tally, Any]) -> tuple[Array, Tally, Any]:
        start, tally, buffers = state
        choice = _cheapest_shape(start, count, prompts, responses, shapes)
        one, outputs, rows = switch(choice, branches, start)
        buffers = jax.tree.map(lambda buffer, x: buffer.at[rows].set(x, mode="drop"), buffers, outputs)
        return start + sizes[choice], merge(tally, one), buffers

    tally, outputs, _ = jax.eval_shape(branches[-1], jnp.int32(0))
    buffers = jax.tree.map(lambda s: jnp.zeros((total, *s.shape[1:]), s.dtype), outputs)
    state = jnp.int32(0), _empty(tally), buffers
    _, tally, outputs = jax.lax.while_loop(lambda state: state[0] < jnp.maximum(count, 1), body, state)
    return tally, sharding.spread_rows(outputs, mesh)


def _longest_first(prompts: Array, responses: Array, shapes: tuple[Shape, ...]) -> tuple[Array, Array]:
    """(the items [M] int32 by response columns of their shape and prompt, excluded ones last; the number of the others
    [] int32)"""
    widths = jnp.array(sorted({shape.response for shape in shapes}))
    key = jnp.searchsorted(widths, responses) * (shapes[-1].prompt + 1) + prompts
    present = responses >= 0
    return jnp.argsort(jnp.where(present, -key, 1)), jnp.sum(present).astype(jnp.int32)


def _cheapest_shape(start: Array, count: Array, prompts: Array, responses: Array, shapes: tuple[Shape, ...]) -> Array:
    """Index of the shape that computes the items from `start` with the fewest tokens an item: [] int32.

    Args:
      start: [] int32.
      count: [] int32, items that are not excluded.
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
