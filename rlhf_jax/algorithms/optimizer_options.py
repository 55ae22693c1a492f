"""Options of AdamW and its schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from rlhf_jax.errors import UserError
from rlhf_jax.option import (
    Decay,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    checked_value,
    field_ranges,
    field_types,
    nearest,
    option,
)


@dataclasses.dataclass(frozen=True)
class OptimizerOptions(Options):
    """AdamW, its schedule, and what happens to non-finite numbers."""

    # --- optimizer
    learning_rate: NonNegativeFloat = 3e-6
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "warmup_stable_decay"
    ] = "linear"
    """Schedule after the warm-up: linear decay to 0, cosine decay to 0, constant (constant_with_warmup is the same),
    cosine decay to a minimum, or constant until a decay at the end (see lr_scheduler_kwargs)."""
    lr_scheduler_kwargs: dict[str, Any] | None = option(None, rare=True)
    """Parameters of the schedule by transformers' names. cosine: num_cycles; cosine_with_min_lr: min_lr or min_lr_rate,
    num_cycles; warmup_stable_decay: num_decay_steps, num_stable_steps, warmup_type, decay_type, min_lr_ratio,
    num_cycles. Steps have the unit of warmup_steps."""
    warmup_steps: NonNegativeInt = 0
    """Updates of linear warm-up."""
    adam_beta1: Decay = option(0.9, rare=True)
    """AdamW beta1."""
    adam_beta2: Decay = option(0.999, rare=True)
    """AdamW beta2."""
    adam_epsilon: PositiveFloat = option(1e-8, rare=True)
    """AdamW epsilon (N+ uses 1e-5)."""
    adam_mu_dtype: Literal["float32", "bfloat16"] = option("float32", rare=True, lowers={"loading": 4, "update": 7})
    """Dtype of AdamW's first moment; bfloat16 saves 2 bytes per param."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    weight_decay_on: Literal["matrices", "all"] = option("matrices", rare=True)
    """Params that decay: all but biases and norms (Hugging Face, TRL), or all (torch's AdamW, N+)."""
    max_grad_norm: PositiveFloat | None = None
    """Clip the gradient to this global norm; None: no clipping."""

    # --- non-finite numbers
    on_nonfinite: Literal["stop", "skip"] = option("stop", resume="free")
    """On a non-finite loss, gradient or reward, which never reaches the params: stop the run, or skip and continue."""
    max_nonfinite: PositiveInt = option(5, rare=True, resume="free")
    """With on_nonfinite skip: stop the run after this many such updates in a row."""

    # Where an algorithm has no options of these names.
    critic_warmup_steps = 0
    lr_scheduler_unit = "update"
    disable_dropout = True

    @property
    def value_learning_rate(self) -> float | None:
        """None: there is no critic with a rate of its own."""
        return None

    def problems(self) -> Iterator[str]:
        """Parameters that the schedule has not, or that contradict each other."""
        yield from super().problems()
        kind, kwargs = self.lr_scheduler_type, self.lr_scheduler_kwargs or {}
        errors = [error for name, value in kwargs.items() if (error := _scheduler_kwarg_error(kind, name, value))]
        if errors:
            yield from errors
            return
        values = {name: value for name, value in kwargs.items() if value is not None}
        if kind == "warmup_stable_decay" and "num_decay_steps" not in values:
            yield (
                "lr_scheduler_type warmup_stable_decay needs the length of its decay: "
                "lr_scheduler_kwargs {'num_decay_steps': N}."
            )
        if kind != "cosine_with_min_lr":
            return
        if ("min_lr" in values) == ("min_lr_rate" in values):
            yield (
                "lr_scheduler_type cosine_with_min_lr needs one of min_lr (a learning rate) and min_lr_rate (a "
                "fraction of the peak) in lr_scheduler_kwargs, not "
                f"{'both' if 'min_lr' in values else 'none'}."
            )
        elif "min_lr" in values and self.learning_rate == 0:
            yield "lr_scheduler_kwargs['min_lr'] with learning_rate 0: give min_lr_rate."
        elif values.get("min_lr", 0) > self.learning_rate:
            yield (
                f"lr_scheduler_kwargs['min_lr'] {values['min_lr']:g} exceeds learning_rate {self.learning_rate:g}: "
                "the schedule would rise."
            )


_PHASES = Literal["linear", "cosine", "1-sqrt"]


@dataclasses.dataclass
class _SchedulerKwargs:
    """Parameters of transformers' schedules."""

    num_cycles: PositiveFloat | None
    min_lr: NonNegativeFloat | None
    min_lr_rate: Fraction | None
    num_decay_steps: NonNegativeInt
    num_stable_steps: NonNegativeInt | None
    warmup_type: _PHASES
    decay_type: _PHASES
    min_lr_ratio: Fraction


_KWARGS_OF_SCHEDULE: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles"),
    "warmup_stable_decay": tuple(
        "num_decay_steps num_stable_steps warmup_type decay_type min_lr_ratio num_cycles".split()
    ),
}


def _scheduler_kwarg_error(kind: str, name: str, value: Any) -> str | None:
    """What is wrong with one of lr_scheduler_kwargs by itself; None if nothing is."""
    option, allowed = f"lr_scheduler_kwargs[{name!r}]", _KWARGS_OF_SCHEDULE.get(kind, ())
    if name not in allowed:
        choice = f"choose from {', '.join(allowed)}." if allowed else "it has no parameters but warmup_steps."
        return f"{option} is not a parameter of lr_scheduler_type {kind}:{nearest(name, allowed) or ' ' + choice}"
    try:
        checked_value(option, field_types(_SchedulerKwargs)[name], value)
    except UserError as error:
        return str(error)
    limits = field_ranges(_SchedulerKwargs).get(name)
    return None if limits is None else limits.error(option, value)
