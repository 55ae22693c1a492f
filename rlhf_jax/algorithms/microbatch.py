"""What the trainers share: the optimizer, its learning rate, and exact accumulation over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.parallel import sharding
from rlhf_jax.types import Array, Params


def _decayed(params: Params, which: str) -> Any:
    """True for params that weight decay acts on. 'matrices' is Hugging Face's rule: no biases, no norms."""

    def rule(path, _):
        names = "/".join(str(k.key) for k in path)
        return which == "all" or not (names.endswith("/bias") or "norm" in names)

    return jax.tree_util.tree_map_with_path(rule, params)


def scale_by_adam(b1: float, b2: float, eps: float, mu_dtype: Any = jnp.float32) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2015, algorithm 1), eps outside the root, as torch.

    optax's own takes 1 - b2**count in float32, which is 1e-5 off in the first steps; expm1 keeps every digit, as
    torch's float64 does. The state is optax's.

    Args:
      b1, b2: decays of the two moments, in [0, 1).
      eps: added to the root of the second moment.
      mu_dtype: what the first moment is kept in; it is computed in float32.

    Returns:
      An optax transformation whose updates are to be scaled by -learning_rate.
    """

    def init(params):
        first = jax.tree.map(lambda p: jnp.zeros_like(p, mu_dtype), params)
        return optax.ScaleByAdamState(count=jnp.int32(0), mu=first, nu=jax.tree.map(jnp.zeros_like, params))

    def update(grads, state, params=None):
        del params
        count = state.count + 1
        mu = jax.tree.map(lambda m, g: b1 * m.astype(g.dtype) + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.nu, grads)
        first, second = (_one_minus_power(b, count) for b in (b1, b2))
        updates = jax.tree.map(lambda m, v: (m / first) / (jnp.sqrt(v / second) + eps), mu, nu)
        kept = jax.tree.map(lambda m: m.astype(mu_dtype), mu)
        return updates, optax.ScaleByAdamState(count=count, mu=kept, nu=nu)

    return optax.GradientTransformation(init, update)


def _one_minus_power(b: float, count: Array) -> Array:
    return jnp.float32(1.0) if b == 0 else -jnp.expm1(count * math.log(b))


class AdamW(optax.GradientTransformation):
    """What `make_optimizer` makes: of a gradient with a finite norm it makes finite updates and a finite state."""


def make_optimizer(config) -> AdamW:
    """AdamW without its learning rate, which the step multiplies in (so that a schedule is a function of the step).

    Clipping, when `max_grad_norm` is set, is by one norm over everything trained, as torch's clip_grad_norm_.

    Args:
      config: a stage's config.

    Returns:
      An optax transformation whose updates are to be scaled by -learning_rate.
    """
    parts = []
    if config.max_grad_norm is not None:
        parts.append(optax.clip_by_global_norm(config.max_grad_norm))
    mu_dtype = jnp.dtype(config.adam_mu_dtype)
    parts.append(scale_by_adam(config.adam_beta1, config.adam_beta2, config.adam_epsilon, mu_dtype))
    if config.weight_decay:
        which = config.weight_decay_on
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=lambda p: _decayed(p, which)))
    return AdamW(*optax.chain(*parts))


def learning_rate(config, step: Array, total_steps: int) -> Array:
    """The rate of update `step` (0-based) of `total_steps`: Hugging Face's linear, cosine and constant schedules.

    linear: lr * (total - step) / (total - warmup); cosine: lr * (1 + cos(pi * progress)) / 2; each after
    `warmup_steps` updates of lr * step / warmup.

    Args:
      config: learning_rate, lr_scheduler_type, warmup_steps.
      step: [] int32.
      total_steps: updates of the whole run.

    Returns:
      [] float32.
    """
    step = step.astype(jnp.float32)
    warmup = config.warmup_steps
    progress = jnp.clip((step - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
    if config.lr_scheduler_type == "linear":
        factor = 1.0 - progress
    elif config.lr_scheduler_type == "cosine":
        factor = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    else:
        factor = jnp.float32(1.0)
    if warmup > 0:
        factor = jnp.where(step < warmup, step / warmup, factor)
    return config.learning_rate * factor


def apply_gradients(optimizer, params: Params, opt_state, grads: Params, rate: Array):
    """One optimizer step: params - rate * update.

    Args:
      optimizer: from `make_optimizer` (or any optax transformation that leaves the rate out).
      params, opt_state, grads: pytrees of the same structure as at init.
      rate: [] float32.

    Returns:
      (params, opt_state, gradient norm [] float32 before clipping)
    """
    norm = optax.tree.norm(grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = jax.tree.map(lambda p, u: p - rate * u.astype(p.dtype), params, updates)
    return params, opt_state, norm


def ratio_variance(ratios: Array, metrics: str) -> Array:
    """Variance of the mean ratios over optimizer steps, n - 1 in the denominator as torch's.

    Args:
      ratios: [N] float32.
      metrics: 'trl' gives nan for N = 1, as torch does; 'correct' gives 0.

    Returns:
      [] float32.
    """
    if ratios.shape[0] == 1:
        return jnp.float32(jnp.nan if metrics == "trl" else 0.0)
    return jnp.var(ratios, ddof=1)


def row_keys(key: Array, rows: int) -> Array:
    """A key a row: dropout does not depend on how a batch is cut into micro-batches.

    Returns:
      [rows] typed keys.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))


def split_micro(batch: Any, micro: int | None) -> Any:
    """[M, ...] -> [M / micro, micro, ...], rows in order."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    micro = rows if micro is None else min(micro, rows)
    return jax.tree.map(lambda x: x.reshape((rows // micro, micro) + x.shape[1:]), batch)


def groups_at_once(rows: int | None, group: int, groups: int) -> int | None:
    """How many groups make up at most `rows` rows and divide `groups`; None for no limit."""
    return None if rows is None else math.gcd(groups, max(rows // group, 1))


class Cuts(NamedTuple):
    """Ways to make a micro-batch narrower, and which of them each micro-batch takes."""

    functions: tuple[Callable, ...]  # micro-batch -> micro-batch with fewer columns of padding
    choice: Array  # [N] int32, the function of each micro-batch


def switch(choice: Array, branches: Sequence[Callable], *operands: Any) -> Any:
    """`lax.switch`, and just a call where there is one branch."""
    return branches[0](*operands) if len(branches) == 1 else jax.lax.switch(choice, branches, *operands)


def prompt_widths(config, columns: int) -> tuple[int, ...]:
    """Columns that prompts are cut to, ascending; the last is all of them.

    Args:
      config: length_buckets; None: half, three quarters and all, where prompts have 256 columns or more (each width is
        a program of its own within the step, and short prompts are not worth it).
      columns: C.
    """
    widths = config.length_buckets
    if widths is None:
        widths = [-(-columns * quarters // 32) * 8 for quarters in (2, 3)] if columns >= 256 else ()
    return (*sorted({width for width in widths if width < columns}), columns)


def narrowest(lengths: Array, widths: Sequence[int]) -> Array:
    """Which of `widths` is the least that holds all of a micro-batch's prompts: lengths [N, m] -> [N] int32."""
    return jnp.searchsorted(jnp.array(widths), jnp.max(lengths, axis=1)).astype(jnp.int32)


def together_by_length(lengths: Array, config) -> Array:
    """An order of rows in which those with prompts of like length are neighbours, so that micro-batches can be narrow.

    Rows stay as they are where it matters which of them share a micro-batch.

    Args:
      lengths: [M] int32.
      config: a PPOConfig or RLOOConfig.

    Returns:
      [M] int32.
    """
    if config.depends_on_micro_batching:
        return jnp.arange(lengths.shape[0])
    return jnp.argsort(lengths)


def by_prompt_length(
    function: Callable,
    batch: Any,
    lengths: Array,
    rows: int | None,
    cut: Callable,
    widths: Sequence[int],
    mesh: Any | None = None,
) -> Any:
    """Applies `function` to `rows` rows at a time, those with prompts of like length together and cut to their width.

    Args:
      function: pytree [b, ...] -> pytree [b, ...].
      batch: pytree [B, ...].
      lengths: [B] int32, of the prompts.
      rows: b; divides B. None: all.
      cut: (pytree [b, ...], a width) -> the same with prompts of that many columns.
      widths: ascending; the last is that of `batch`.
      mesh: over which rows are spread, or None.

    Returns:
      function(batch), as if called once.
    """
    count = lengths.shape[0]
    rows = count if rows is None else min(rows, count)
    if rows == count:
        return function(batch)
    order = jnp.argsort(lengths)
    parts = sharding.spread_rows(split_micro(jax.tree.map(lambda x: x[order], batch), rows), mesh, axis=1)
    choice = narrowest(lengths[order].reshape(-1, rows), widths)

    def of(item):
        branches = [lambda part, width=width: function(cut(part, width)) for width in widths]
        return switch(item[0], branches, item[1])

    out = jax.lax.map(of, (choice, parts))
    back = jnp.argsort(order)
    return sharding.spread_rows(jax.tree.map(lambda x: x.reshape((count,) + x.shape[2:])[back], out), mesh)


def rows_judged(config, rows: int) -> int | None:
    """Rows of a batch of `rows` that are judged at a time: rollout_batch_size, or the micro_batch_size if less."""
    sizes = [size for size in (config.rollout_batch_size, config.micro_batch_size) if size and rows % size == 0]
    return min(sizes, default=None)


def total(function: Callable, micro_batches: Any) -> Any:
    """Sums a function's pytree over micro-batches by `lax.scan`, as `accumulate` does, without gradients.

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


def accumulate(loss_fn: Callable, params: Params, micro_batches: Any, cuts: Cuts | None = None) -> tuple[Params, Any]:
    """Sums gradients and metrics of `loss_fn` over micro-batches by `lax.scan`, in float32.

    `loss_fn` divides by counts of the whole minibatch itself, so that the sum is the minibatch's own gradient.

    Args:
      loss_fn: (params, micro_batch, index) -> (loss [], metrics pytree).
      params: what to differentiate.
      micro_batches: pytree [N, m, ...].
      cuts: how each micro-batch is cut before `loss_fn` sees it; its backward pass is as narrow.

    Returns:
      (gradients, metrics summed over N)
    """
    n = jax.tree.leaves(micro_batches)[0].shape[0]
    grad_fn = jax.grad(loss_fn, has_aux=True)
    cuts = cuts or Cuts((lambda micro: micro,), jnp.zeros(n, jnp.int32))

    def gradient(choice, params, micro, index):
        # The gradient is taken within each branch: that of a switch would keep the residuals of all its branches.
        branches = [lambda params, micro, index, cut=cut: grad_fn(params, cut(micro), index) for cut in cuts.functions]
        return switch(choice, branches, params, micro, index)

    if n == 1:
        return gradient(cuts.choice[0], params, jax.tree.map(lambda x: x[0], micro_batches), jnp.int32(0))

    def body(carry, item):
        index, choice, micro = item
        grads, metrics = gradient(choice, params, micro, index)
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry, (grads, metrics)), None

    shapes = jax.eval_shape(grad_fn, params, jax.tree.map(lambda x: x[0], micro_batches), jnp.int32(0))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)), shapes)
    total, _ = jax.lax.scan(body, zeros, (jnp.arange(n), cuts.choice, micro_batches))
    return total
