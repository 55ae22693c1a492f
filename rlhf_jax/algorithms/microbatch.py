"""Micro-batches: how batches are split, narrowed to their longest prompt and summed over, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.parallel import sharding
from rlhf_jax.types import Array, Params


def row_keys(key: Array, rows: int) -> Array:
    """One key per row, so that dropout does not depend on how a batch is split into micro-batches.

    Returns:
      [rows] typed keys.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))


def split_micro(batch: Any, micro: int | None) -> Any:
    """[M, ...] -> [M / micro, micro, ...], rows in order."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    micro = rows if micro is None else min(micro, rows)
    return jax.tree.map(lambda x: x.reshape((rows // micro, micro) + x.shape[1:]), batch)


def groups_per_chunk(rows: int | None, group_size: int, groups: int) -> int | None:
    """The number of groups that hold at most `rows` rows and divide `groups`; None: no limit."""
    return None if rows is None else math.gcd(groups, max(rows // group_size, 1))


class WidthBuckets(NamedTuple):
    """The widths that micro-batches may be narrowed to, and the width of each micro-batch."""

    narrow: tuple[Callable, ...]  # one per width: micro-batch -> micro-batch with fewer columns of padding
    choice: Array  # [N] int32, index into `narrow` of each micro-batch


def switch(choice: Array, branches: Sequence[Callable], *operands: Any) -> Any:
    """`lax.switch`; a plain call where there is one branch."""
    return branches[0](*operands) if len(branches) == 1 else jax.lax.switch(choice, branches, *operands)


def prompt_widths(config, columns: int) -> tuple[int, ...]:
    """The widths that prompts may be narrowed to, ascending; the last is C.

    Args:
      config: length_buckets; None: half, three quarters and all of C where C is 256 or more. Each width is compiled
        separately within the step, which does not pay for short prompts.
      columns: C.
    """
    widths = config.length_buckets
    if widths is None:
        widths = [-(-columns * quarters // 32) * 8 for quarters in (2, 3)] if columns >= 256 else ()
    return (*sorted({width for width in widths if width < columns}), columns)


def narrowest_width(lengths: Array, widths: Sequence[int]) -> Array:
    """Index of the least width that holds all prompts of a micro-batch: lengths [N, m] -> [N] int32."""
    return jnp.searchsorted(jnp.array(widths), jnp.max(lengths, axis=1)).astype(jnp.int32)


def sort_by_prompt_length(lengths: Array, config) -> Array:
    """An order of rows by prompt length, so that micro-batches can be narrow.

    The order is unchanged where results depend on which rows share a micro-batch.

    Args:
      lengths: [M] int32.
      config: a PolicyConfig.

    Returns:
      [M] int32.
    """
    if config.depends_on_micro_batching:
        return jnp.arange(lengths.shape[0])
    return jnp.argsort(lengths)


def map_by_prompt_length(
    function: Callable,
    batch: Any,
    *,
    lengths: Array,
    rows: int | None,
    narrow: Callable,
    widths: Sequence[int],
    mesh: Any | None = None,
) -> Any:
    """Applies `function` to chunks of `rows` rows, sorted by prompt length and narrowed to their longest prompt.

    Args:
      function: pytree [b, ...] -> pytree [b, ...].
      batch: pytree [B, ...].
      lengths: [B] int32, of the prompts.
      rows: b; divides B. None: all.
      narrow: (pytree [b, ...], width) -> the same with prompts of that many columns.
      widths: ascending; the last is that of `batch`.
      mesh: rows are sharded over it; None: one device.

    Returns:
      function(batch), as if called once.
    """
    count = lengths.shape[0]
    rows = count if rows is None else min(rows, count)
    if rows == count:
        return function(batch)
    order = jnp.argsort(lengths)
    parts = sharding.spread_rows(split_micro(jax.tree.map(lambda x: x[order], batch), rows), mesh, axis=1)
    choice = narrowest_width(lengths[order].reshape(-1, rows), widths)

    def apply_to_chunk(item):
        branches = [lambda part, width=width: function(narrow(part, width)) for width in widths]
        return switch(item[0], branches, item[1])

    out = jax.lax.map(apply_to_chunk, (choice, parts))
    inverse = jnp.argsort(order)
    return sharding.spread_rows(jax.tree.map(lambda x: x.reshape((count,) + x.shape[2:])[inverse], out), mesh)


def forward_batch_size(config, rows: int) -> int | None:
    """Rows per forward pass of a batch of `rows`: the lesser of rollout_batch_size and micro_batch_size."""
    sizes = [size for size in (config.rollout_batch_size, config.micro_batch_size) if size and rows % size == 0]
    return min(sizes, default=None)


def sum_over_micro_batches(function: Callable, micro_batches: Any) -> Any:
    """Sums a function's pytree over micro-batches by `lax.scan`, as `accumulate_gradients`, without gradients.

    Args:
      function: (micro_batch, index) -> pytree.
      micro_batches: pytree [N, m, ...].

    Returns:
      The pytree, summed over N.
    """
    n = jax.tree.leaves(micro_batches)[0].shape[0]
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], micro_batches), jnp.int32(0))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(carry, item):
        index, micro = item
        return jax.tree.map(jnp.add, carry, function(micro, index)), None

    return jax.lax.scan(body, zeros, (jnp.arange(n), micro_batches))[0]


def accumulate_gradients(
    loss_fn: Callable, params: Params, micro_batches: Any, buckets: WidthBuckets | None = None
) -> tuple[Params, Any]:
    """Sums gradients and metrics of `loss_fn` over micro-batches by `lax.scan`, in float32.

    `loss_fn` divides by counts of the whole minibatch itself, so that the sum is the minibatch's own gradient.

    Args:
      loss_fn: (params, micro_batch, index) -> (loss [], metrics pytree).
      params: what to differentiate.
      micro_batches: pytree [N, m, ...].
      buckets: how each micro-batch is narrowed before `loss_fn`; its backward pass is as narrow.

    Returns:
      (gradients, metrics summed over N)
    """
    n = jax.tree.leaves(micro_batches)[0].shape[0]
    grad_fn = jax.grad(loss_fn, has_aux=True)
    buckets = buckets or WidthBuckets((lambda micro: micro,), jnp.zeros(n, jnp.int32))

    def gradient(choice, params, micro, index):
        # The gradient is taken within each branch: the gradient of a switch keeps the residuals of all its branches.
        branches = [lambda params, micro, index, f=f: grad_fn(params, f(micro), index) for f in buckets.narrow]
        return switch(choice, branches, params, micro, index)

    if n == 1:
        return gradient(buckets.choice[0], params, jax.tree.map(lambda x: x[0], micro_batches), jnp.int32(0))

    def body(carry, item):
        index, choice, micro = item
        grads, metrics = gradient(choice, params, micro, index)
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry, (grads, metrics)), None

    shapes = jax.eval_shape(grad_fn, params, jax.tree.map(lambda x: x[0], micro_batches), jnp.int32(0))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)), shapes)
    sums, _ = jax.lax.scan(body, zeros, (jnp.arange(n), buckets.choice, micro_batches))
    return sums
