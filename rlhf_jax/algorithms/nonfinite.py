"""What is not finite reaches neither params nor optimizer state: whether an optimizer step is taken, and who says so.

A step is taken or not, over the whole trees: 0 times NaN is NaN. Nobody keeps a copy of the params of before the
update, which would cost 12 bytes a param: what steps before the bad one have learned stays.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.algorithms import microbatch
from rlhf_jax.types import Array, Metrics, Params, TrainState

CAUSES = ("score", "logprob", "value", "advantage", "return", "loss", "gradient", "optimizer")
"""What may be not finite, in the order in which it spreads; the place of a name is its bit."""


def limit(config) -> int:
    """Bad updates in a row that end the run: 1 with on_nonfinite 'stop', else max_nonfinite."""
    return 1 if config.on_nonfinite == "stop" else config.max_nonfinite


def names(causes: int) -> list[str]:
    """The names of the bits of `causes`."""
    return [name for place, name in enumerate(CAUSES) if causes >> place & 1]


def finite(tree: Any) -> Array:
    """Whether every number in a pytree is finite: [] bool. Integers and bools are."""
    parts = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack(parts)) if parts else jnp.bool_(True)


def causes(**trees: Any) -> Array:
    """Which of the named pytrees of arrays, names of CAUSES, are not finite.

    Returns:
      [] int32, a bit each.
    """
    found = jnp.int32(0)
    for name, tree in trees.items():
        found |= jnp.where(finite(tree), 0, 1 << CAUSES.index(name))
    return found


def may_learn(state: TrainState, found: Array, config) -> Array:
    """Whether an update may take its first step.

    Args:
      state: before the update.
      found: [] int32, `causes` of what the update learns from.
      config: on_nonfinite, max_nonfinite.

    Returns:
      [] bool.
    """
    return (found == 0) & (state.nonfinite < limit(config))


def within(approxkl: Array, config) -> Array | bool:
    """Whether a step may still be taken at a minibatch's approxkl (a [] float32): up to 1.5 target_kl, as in OpenAI's
    spinning-up and TRL's PPO until 0.11; always where target_kl is None."""
    # Not finite is for the guard to tell, which counts it: a comparison with NaN is false.
    return True if config.target_kl is None else ~(approxkl > 1.5 * config.target_kl)


def attempt(
    optimizer,
    params: Params,
    opt_state: Any,
    grads: Params,
    rate: Array,
    loss: Any,
    alive: Array,
    allowed: Array | bool = True,
) -> tuple[Params, Any, Array, Metrics]:
    """An optimizer step, taken only where loss and gradient are finite and all steps before it were taken.

    A gradient whose norm overflows counts as not finite: AdamW squares it as well, and clipping divides by the norm.
    What AdamW makes of a gradient with a finite norm is finite; of any other optimizer the outcome is looked at, which
    costs memory for a second outcome.

    Args:
      optimizer, params, opt_state, grads, rate: as `common.apply_gradients`.
      loss: pytree of the step's losses.
      alive: [] bool, from `may_learn` or of the step before.
      allowed: [] bool, False for a step that is left out without anything being wrong (`within`).

    Returns:
      (params, opt_state, alive, {"grad_norm" [] float32, "nonfinite/causes" [] int32, "nonfinite/steps_applied" []
      int32})
    """
    old, norm = (params, opt_state), optax.tree.norm(grads)
    found = causes(loss=loss, gradient=norm)

    def taken(old, grads):
        return microbatch.apply_gradients(optimizer, *old, grads, rate)[:2]

    if isinstance(optimizer, microbatch.AdamW):
        found = jnp.where(alive, found, 0)
        alive = alive & (found == 0) & allowed
        # A branch, not a select, for which XLA keeps old and new moments side by side: 2 bytes a param more on a CPU.
        params, opt_state = jax.lax.cond(alive, taken, lambda old, grads: old, old, grads)
    else:
        new = taken(old, grads)
        found = jnp.where(alive, found | causes(optimizer=new), 0)
        alive = alive & (found == 0) & allowed
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(alive, a, b), new, old)
    report = {"grad_norm": norm, "nonfinite/causes": found, "nonfinite/steps_applied": alive.astype(jnp.int32)}
    return params, opt_state, alive, report


def settle(state: TrainState, found: Array, config, trained: dict[str, Any], clock: dict[str, Any]) -> TrainState:
    """The state after an update.

    A bad update counts `nonfinite` up, a good one sets it to 0. With the update that reaches the limit the run ends:
    its clock stands still, and later updates, which may have been started before the host has heard of it, change
    nothing.

    Args:
      state: before.
      found: [] int32, `causes` of the whole update.
      config: on_nonfinite, max_nonfinite.
      trained: fields of the state as `attempt` left them.
      clock: what is added to its counts.

    Returns:
      TrainState.
    """
    over = state.nonfinite >= limit(config)
    count = jnp.where(over, state.nonfinite, jnp.where(found != 0, state.nonfinite + 1, 0)).astype(jnp.int32)
    state = state.replace(**trained, nonfinite=count)
    return tick(state, config, **clock)


def tick(state: TrainState, config, **clock: Any) -> TrainState:
    """Adds to counts of the state, but not where the run has reached its limit (see `settle`)."""
    held = state.nonfinite >= limit(config)
    added = {name: jnp.where(held, 0, jnp.asarray(n)).astype(getattr(state, name).dtype) for name, n in clock.items()}
    return state.replace(**{name: getattr(state, name) + n for name, n in added.items()})


def over_steps(stats: Metrics, config) -> Metrics:
    """Metrics of an update from those of its optimizer steps: means, and of `nonfinite/...` sums.

    With target_kl the means are over the steps up to the first that was not taken, which has seen what all others
    would see, and `policy/steps_done` is the share that was taken.

    Args:
      stats: [steps] each.
      config: target_kl.

    Returns:
      Each [].
    """
    counts = {name: jnp.sum(x) for name, x in stats.items() if name.startswith("nonfinite/")}
    taken = stats["nonfinite/steps_applied"]
    values = {name: x for name, x in stats.items() if name not in counts}
    if config.target_kl is None:
        return {name: jnp.mean(x) for name, x in values.items()} | counts
    seen = jnp.concatenate([jnp.ones(1, bool), taken[:-1] > 0])
    means = {name: jnp.sum(jnp.where(seen, x, 0.0)) / jnp.sum(seen) for name, x in values.items()}
    return means | counts | {"policy/steps_done": jnp.mean(taken.astype(jnp.float32))}
