"""Skips optimizer steps that are not finite, so that no NaN or infinity reaches params or optimizer state.

A step is taken or skipped as a whole, over all params: 0 times NaN is NaN. No copy of the params before the update is
kept, since that would cost 12 bytes a param: the steps before a skipped one stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.algorithms.optimizer import Optimizer, apply_gradients
from rlhf_jax.algorithms.optimizer_options import OptimizerOptions
from rlhf_jax.algorithms.options import PolicyGradientOptions
from rlhf_jax.types import Array, Metrics, Params, TrainState

CAUSES = ("score", "logprob", "value", "advantage", "return", "loss", "gradient", "optimizer")
"""What may be not finite, in the order in which it spreads. The index of a name is its bit."""


def max_in_a_row(config: OptimizerOptions) -> int:
    """Number of nonfinite updates in a row that ends the run: 1 with on_nonfinite 'stop', else max_nonfinite."""
    return 1 if config.on_nonfinite == "stop" else config.max_nonfinite


def cause_names(causes: int) -> list[str]:
    """The names of the bits of `causes`."""
    return [name for bit, name in enumerate(CAUSES) if causes >> bit & 1]


def is_finite(tree: Any) -> Array:
    """Whether every number in a pytree is finite: [] bool. Integers and bools are."""
    parts = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack(parts)) if parts else jnp.bool_(True)


def find_causes(**trees: Any) -> Array:
    """Which of the named pytrees of arrays are not finite; the names are those of CAUSES.

    Returns:
      [] int32, a bit for each name.
    """
    causes = jnp.int32(0)
    for name, tree in trees.items():
        causes |= jnp.where(is_finite(tree), 0, 1 << CAUSES.index(name))
    return causes


def updates_enabled(state: TrainState, causes: Array, config: OptimizerOptions) -> Array:
    """Whether an update may take its first optimizer step.

    Args:
      state: before the update.
      causes: [] int32, of the experience, by `find_causes`.
      config: on_nonfinite, max_nonfinite.

    Returns:
      [] bool.
    """
    return (causes == 0) & (state.nonfinite < max_in_a_row(config))


def below_target_kl(approxkl: Array, config: PolicyGradientOptions) -> Array | bool:
    """Whether a step may be taken at a minibatch's approxkl ([] float32): up to 1.5 target_kl, as in OpenAI's
    spinning-up and TRL's PPO until 0.11; always where target_kl is None."""
    # Written so that NaN passes: apply_if_finite skips and counts it.
    return True if config.target_kl is None else ~(approxkl > 1.5 * config.target_kl)


@jax.named_scope("optimizer")
def apply_if_finite(
    optimizer: Optimizer,
    params: Params,
    opt_state: Any,
    grads: Params,
    *,
    step: Array,
    loss: Any,
    steps_enabled: Array | bool,
    allowed: Array | bool = True,
) -> tuple[Params, Any, Array, Metrics]:
    """Takes an optimizer step if loss and gradient are finite and no step of the update was skipped before.

    A gradient whose norm overflows counts as not finite: AdamW squares it, and clipping divides by the norm. An
    optimizer that does not keep params finite (`Optimizer.keeps_finite`) has its result checked too, which needs
    memory for a second set of params and optimizer state.

    Args:
      optimizer, params, opt_state, grads, step: as in `apply_gradients`.
      loss: pytree of the step's losses.
      steps_enabled: [] bool, from `updates_enabled` or the step before.
      allowed: [] bool, False skips the step without counting it as nonfinite (`below_target_kl`).

    Returns:
      (params, opt_state, steps_enabled, {"grad_norm" [] float32, "nonfinite/causes" [] int32,
      "nonfinite/steps_applied" [] int32})
    """
    old, norm = (params, opt_state), optax.tree.norm(grads)
    causes = find_causes(loss=loss, gradient=norm)

    def apply(old, grads):
        return apply_gradients(optimizer, *old, grads, step)

    if optimizer.keeps_finite:
        causes = jnp.where(steps_enabled, causes, 0)
        steps_enabled = steps_enabled & (causes == 0) & allowed
        params, opt_state = _apply_if(steps_enabled, apply, old, grads)
    else:
        new = apply(old, grads)
        causes = jnp.where(steps_enabled, causes | find_causes(optimizer=new), 0)
        steps_enabled = steps_enabled & (causes == 0) & allowed
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(steps_enabled, a, b), new, old)
    applied = steps_enabled.astype(jnp.int32)
    metrics = {"grad_norm": norm, "nonfinite/causes": causes, "nonfinite/steps_applied": applied}
    return params, opt_state, steps_enabled, metrics


def _apply_if(enabled: Array, apply: Callable, old: Any, grads: Params) -> Any:
    """apply(old, grads) where enabled, else old.

    By XLA's account a branch keeps params and moments twice on GPUs, 8 bytes a param more than a select, and a select
    takes 2 to 4 bytes more on CPUs. On TPUs they are equal (docs/scaling.md).
    """

    def branch(enabled: Array, old: Any, grads: Params) -> Any:
        return jax.lax.cond(enabled, apply, lambda old, grads: old, old, grads)

    def select(enabled: Array, old: Any, grads: Params) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(enabled, a, b), apply(old, grads), old)

    return jax.lax.platform_dependent(enabled, old, grads, cuda=select, rocm=select, default=branch)


def single_step_update(
    optimizer: Optimizer,
    state: TrainState,
    grads: Params,
    *,
    loss: Any,
    config: OptimizerOptions,
    counts: dict[str, Any],
) -> tuple[TrainState, Metrics]:
    """An update of one optimizer step, as in SFT and reward modelling.

    Args:
      state: before.
      grads: of state.params.
      loss: pytree of the step's losses.
      config: on_nonfinite, max_nonfinite.
      counts: what is added to the state's counts.

    Returns:
      (TrainState, the metrics of `apply_if_finite`). If something is not finite, params and optimizer state are
      unchanged.
    """
    params, opt_state, _, metrics = apply_if_finite(
        optimizer,
        state.params,
        state.opt_state,
        grads,
        step=state.step,
        loss=loss,
        steps_enabled=updates_enabled(state, jnp.int32(0), config),
    )
    trained = {"params": params, "opt_state": opt_state}
    return finish_update(state, metrics["nonfinite/causes"], config, trained=trained, counts=counts), metrics


def finish_update(
    state: TrainState, causes: Array, config: OptimizerOptions, *, trained: dict[str, Any], counts: dict[str, Any]
) -> TrainState:
    """The state after an update.

    A nonfinite update adds 1 to `nonfinite`, a finite one sets it to 0. Once the count reaches its limit the run ends:
    no count changes any more, and updates that were started before the host read the metrics change nothing.

    Args:
      state: before.
      causes: [] int32, of the whole update, by `find_causes`.
      config: on_nonfinite, max_nonfinite.
      trained: fields of the state after the optimizer steps.
      counts: what is added to the state's counts.

    Returns:
      TrainState.
    """
    ended = state.nonfinite >= max_in_a_row(config)
    in_a_row = jnp.where(ended, state.nonfinite, jnp.where(causes != 0, state.nonfinite + 1, 0)).astype(jnp.int32)
    state = state.replace(**trained, nonfinite=in_a_row)
    return add_counts(state, config, **counts)


def add_counts(state: TrainState, config: OptimizerOptions, **counts: Any) -> TrainState:
    """Adds to counts of the state unless the run has reached its limit of nonfinite updates (see `finish_update`)."""
    ended = state.nonfinite >= max_in_a_row(config)
    added = {name: jnp.where(ended, 0, jnp.asarray(n)).astype(getattr(state, name).dtype) for name, n in counts.items()}
    return state.replace(**{name: getattr(state, name) + n for name, n in added.items()})


def mean_over_steps(stats: Metrics, config: PolicyGradientOptions) -> Metrics:
    """Metrics of an update from those of its optimizer steps: means, and sums of `nonfinite/...`.

    With target_kl the means are over the steps up to and including the first that was skipped, and `policy/steps_done`
    is the share of steps that were taken.

    Args:
      stats: [steps] each.
      config: target_kl.

    Returns:
      Each [].
    """
    sums = {name: jnp.sum(x) for name, x in stats.items() if name.startswith("nonfinite/")}
    applied = stats["nonfinite/steps_applied"]
    values = {name: x for name, x in stats.items() if name not in sums}
    if config.target_kl is None:
        return {name: jnp.mean(x) for name, x in values.items()} | sums
    reached = jnp.concatenate([jnp.ones(1, bool), applied[:-1] > 0])
    means = {name: jnp.sum(jnp.where(reached, x, 0.0)) / jnp.sum(reached) for name, x in values.items()}
    return means | sums | {"policy/steps_done": jnp.mean(applied.astype(jnp.float32))}
