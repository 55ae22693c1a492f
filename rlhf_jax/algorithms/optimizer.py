"""AdamW as torch has it, its learning-rate schedule, and the record of an optimizer that updates take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.algorithms.optimizer_options import OptimizerOptions
from rlhf_jax.types import Array, Params


class Optimizer(NamedTuple):
    """An optax transformation and what an update must know of it.

    Attributes:
      transformation: its `update` takes `step`, the number of the optimizer step, beside optax's own arguments.
      learning_rate: [] int32 number of an optimizer step -> [] float32, for the metrics; None: the transformation is
        the user's and keeps its own.
      keeps_finite: a gradient with a finite norm gives finite params and a finite state, so that the result needs no
        check.
      value_learning_rate: the same as learning_rate for the critic; None: it has learning_rate.
      peaks: the largest learning rate of the policy, and of the critic or None. A program takes them as arguments, so
        that another learning rate does not compile it again; the user's transformation has none.
      remake: (peaks) -> the same optimizer with them.
    """

    transformation: optax.GradientTransformationExtraArgs
    learning_rate: Callable[[Array], Array] | None = None
    keeps_finite: bool = False
    value_learning_rate: Callable[[Array], Array] | None = None
    peaks: tuple[Any, ...] = ()
    remake: Callable[..., Optimizer] | None = None

    def with_peaks(self, peaks: tuple[Any, ...]) -> Optimizer:
        """The same optimizer with other peaks, such as arguments of the program."""
        return self if self.remake is None else self.remake(*peaks)

    def init(self, params: Params) -> Any:
        """The optimizer state of params."""
        return self.transformation.init(params)


def user_optimizer(transformation: optax.GradientTransformation) -> Optimizer:
    """A transformation of the user's, with its own learning rate and sign, used as it is."""
    return Optimizer(optax.with_extra_args_support(transformation))


def make_optimizer(config: OptimizerOptions, total_updates: int, steps_per_update: int = 1) -> Optimizer:
    """AdamW with its learning-rate schedule.

    Args:
      total_updates: updates of the whole run.
      steps_per_update: optimizer steps of an update.
    """

    def make(peak: float | Array, value_peak: float | Array | None) -> Optimizer:
        rate, value_rate = make_schedule(config, total_updates, steps_per_update, peak), None
        if value_peak is not None:
            value_rate = make_schedule(config, total_updates, steps_per_update, value_peak)
        scaled = scale_by_learning_rate(rate, value_rate)
        transformation = optax.chain(scale_by_adamw(config, steps_per_update), scaled)
        return Optimizer(transformation, rate, True, value_rate, peaks=(peak, value_peak), remake=make)

    return make(config.learning_rate, config.value_learning_rate)


def scale_by_adamw(config: OptimizerOptions, steps_per_update: int = 1) -> optax.GradientTransformation:
    """AdamW without its learning rate.

    Clipping, when `max_grad_norm` is set, is by one norm over everything trained, as torch's clip_grad_norm_. With
    `critic_warmup_steps` policy and critic have one AdamW each, since its bias correction counts steps.
    """
    parts = []
    if config.max_grad_norm is not None:
        parts.append(optax.clip_by_global_norm(config.max_grad_norm))
    mu_dtype = jnp.dtype(config.adam_mu_dtype)
    adamw = [scale_by_adam(config.adam_beta1, config.adam_beta2, config.adam_epsilon, mu_dtype)]
    if config.weight_decay:
        which = config.weight_decay_on
        adamw.append(optax.add_decayed_weights(config.weight_decay, mask=lambda p: _decayed(p, which)))
    warmup = config.critic_warmup_steps
    if warmup:
        late = start_at(optax.chain(*adamw), warmup * steps_per_update)
        adamw = [optax.partition({"policy": late, "critic": optax.chain(*adamw)}, _labels)]
    return optax.chain(*parts, *adamw)


def start_at(transformation: optax.GradientTransformation, first_step: int) -> optax.GradientTransformationExtraArgs:
    """The transformation from optimizer step `first_step` on; before it updates are 0 and its state stays."""

    def update(updates, state, params=None, *, step, **_):
        return jax.lax.cond(
            step < first_step,
            lambda: (jax.tree.map(jnp.zeros_like, updates), state),
            lambda: transformation.update(updates, state, params),
        )

    return optax.GradientTransformationExtraArgs(transformation.init, update)


def is_critic(path: tuple[Any, ...]) -> bool:
    """Whether a leaf of the trained params, by its path, is of the value model or of the value head on the policy."""
    keys = tuple(key.key for key in path[:2])
    return keys[0] == "value" or keys == ("policy", "score")


def _labels(params: Params) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "critic" if is_critic(path) else "policy", params)


def make_schedule(
    config: OptimizerOptions, total_updates: int, steps_per_update: int = 1, peak: float | Array | None = None
) -> Callable[[Array], Array]:
    """`learning_rate` as a function of the optimizer step's number.

    The rate changes from update to update, as in TRL's PPO; with lr_scheduler_unit 'optimizer_step' it changes from
    optimizer step to optimizer step, as in its RLOO.
    """
    if config.lr_scheduler_unit == "update":
        return lambda step: learning_rate(config, step // steps_per_update, total_updates, peak)
    return lambda step: learning_rate(config, step, total_updates * steps_per_update, peak)


def learning_rate(config: OptimizerOptions, step: Array, total_steps: int, peak: float | Array | None = None) -> Array:
    """The rate of step `step` (0-based) of `total_steps`: Hugging Face's schedules.

    linear: lr * (total - step) / (total - warmup); cosine: lr * (1 + cos(pi * 2 num_cycles * progress)) / 2;
    cosine_with_min_lr: the same between lr and the minimum; each after `warmup_steps` steps of lr * step / warmup.
    warmup_stable_decay: see `_warmup_stable_decay`. optax's own schedules round the warmup differently.

    Args:
      config: learning_rate, lr_scheduler_type, lr_scheduler_kwargs, warmup_steps.
      step: [] int32.
      peak: in place of config.learning_rate, with the same ratio to it at every step.

    Returns:
      [] float32.
    """
    step = step.astype(jnp.float32)
    warmup, kind = config.warmup_steps, config.lr_scheduler_type
    kwargs = {name: value for name, value in (config.lr_scheduler_kwargs or {}).items() if value is not None}
    peak = config.learning_rate if peak is None else peak
    if kind == "warmup_stable_decay":
        return peak * _warmup_stable_decay(step, warmup, total_steps, **kwargs)
    progress = jnp.clip((step - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
    if kind == "linear":
        factor = 1.0 - progress
    elif kind in ("cosine", "cosine_with_min_lr"):
        factor = 0.5 * (1.0 + jnp.cos(jnp.pi * 2 * kwargs.get("num_cycles", 0.5) * progress))
        if kind == "cosine_with_min_lr":
            lowest = kwargs["min_lr"] / config.learning_rate if "min_lr" in kwargs else kwargs["min_lr_rate"]
            factor = factor * (1.0 - lowest) + lowest
    else:
        factor = jnp.float32(1.0)
    if warmup > 0:
        factor = jnp.where(step < warmup, step / warmup, factor)
    return peak * factor


def _warmup_stable_decay(
    step: Array,
    warmup: int,
    total_steps: int,
    *,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Array:
    """From min_lr_ratio to 1 in `warmup` steps, 1 for `num_stable_steps` (default: what the other two leave of the
    run), to min_lr_ratio in `num_decay_steps`, and min_lr_ratio from there on: [] float32."""
    stable = total_steps - warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    decay_start = warmup + stable

    def between(factor):
        return factor * (1.0 - min_lr_ratio) + min_lr_ratio

    rise = jnp.clip(step / max(warmup, 1), 0.0, 1.0)
    rise = {
        "linear": lambda: rise,
        "cosine": lambda: 0.5 * (1.0 - jnp.cos(jnp.pi * rise)),
        "1-sqrt": lambda: 1.0 - jnp.sqrt(1.0 - rise),
    }[warmup_type]()
    fall = jnp.clip((step - decay_start) / max(num_decay_steps, 1), 0.0, 1.0)
    fall = {
        "linear": lambda: 1.0 - fall,
        "cosine": lambda: 0.5 * (1.0 + jnp.cos(jnp.pi * 2 * num_cycles * fall)),
        "1-sqrt": lambda: 1.0 - jnp.sqrt(fall),
    }[decay_type]()
    after = jnp.where(step < decay_start + num_decay_steps, between(fall), min_lr_ratio)
    return jnp.where(step < warmup, between(rise), jnp.where(step < decay_start, 1.0, after))


def scale_by_learning_rate(
    rate: Callable[[Array], Array], value_rate: Callable[[Array], Array] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by -rate(step), those of the critic by -value_rate(step) if that is given.

    optax.scale_by_schedule counts the steps that were taken. A step that is skipped because something was not finite
    is counted here too, so `step` comes from the caller.
    """

    def update(updates, state, params=None, *, step, **_):
        del params
        scale = -rate(step)
        if value_rate is None:
            return jax.tree.map(lambda u: scale * u, updates), state
        value_scale = -value_rate(step)
        scaled = jax.tree_util.tree_map_with_path(
            lambda path, u: (value_scale if is_critic(path) else scale) * u, updates
        )
        return scaled, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def scale_by_adam(b1: float, b2: float, eps: float, mu_dtype: Any = jnp.float32) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2015, algorithm 1), eps outside the root, as torch.

    optax's own computes 1 - b2**count in float32, which is 1e-5 off in the first steps; expm1 keeps every digit, as
    torch's float64 does. The state is optax's.

    Args:
      b1, b2: decays of the two moments, in [0, 1).
      eps: added to the root of the second moment.
      mu_dtype: dtype in which the first moment is stored; it is computed in float32.

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
        stored = jax.tree.map(lambda m: m.astype(mu_dtype), mu)
        return updates, optax.ScaleByAdamState(count=count, mu=stored, nu=nu)

    return optax.GradientTransformation(init, update)


def _one_minus_power(b: float, count: Array) -> Array:
    return jnp.float32(1.0) if b == 0 else -jnp.expm1(count * math.log(b))


def _decayed(params: Params, which: str) -> Any:
    """True for params that weight decay acts on. 'matrices' is Hugging Face's rule: no biases, no norms."""

    def rule(path, _):
        names = "/".join(str(k.key) for k in path)
        return which == "all" or not (names.endswith("/bias") or "norm" in names)

    return jax.tree_util.tree_map_with_path(rule, params)


def apply_gradients(
    optimizer: Optimizer, params: Params, opt_state: Any, grads: Params, step: Array
) -> tuple[Params, Any]:
    """One optimizer step.

    Args:
      optimizer: its transformation.
      params, opt_state, grads: pytrees of the same structure as at init.
      step: [] int32, number of the optimizer step since the run began.

    Returns:
      (params, opt_state)
    """
    updates, opt_state = optimizer.transformation.update(grads, opt_state, params, step=step)
    return optax.apply_updates(params, updates), opt_state
