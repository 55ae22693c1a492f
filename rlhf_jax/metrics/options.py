"""Options of alarms."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from rlhf_jax.option import Fraction, NonNegativeFloat, Options, PositiveFloat, Range, option


@dataclasses.dataclass(frozen=True)
class AlarmOptions(Options):
    """Alarms on the metrics of a policy."""

    # --- alarms
    early_stop: tuple[str, ...] = option((), resume="free")
    """Alarms that end the run, with a checkpoint and exports: kl_below, kl_above, first_ratio, reward_std, eos_share,
    unused_ids, length_growth, length_collapse."""
    alarm_kl_below: NonNegativeFloat | None = option(1.0, rare=True, resume="free")
    """Alarm if objective/kl is below minus this; None disables an alarm, here and below."""
    alarm_kl_above: NonNegativeFloat | None = option(200.0, rare=True, resume="free")
    """Alarm if objective/kl is above this."""
    alarm_first_ratio: PositiveFloat | None = option(0.01, rare=True, resume="free")
    """Alarm if val/first_ratio_error is above this, with dtype float32."""
    alarm_first_ratio_bfloat16: PositiveFloat | None = option(0.5, rare=True, resume="free")
    """The same with dtype bfloat16 or float16."""
    alarm_reward_std: NonNegativeFloat | None = option(1e-6, rare=True, resume="free")
    """Alarm if the standard deviation of a batch's scores is at most this."""
    alarm_eos_share: Fraction | None = option(0.5, rare=True, resume="free")
    """Alarm if the fraction of responses that end by themselves is below this times its initial value (means of 5
    updates)."""
    alarm_unused_ids: NonNegativeFloat | None = option(0.05, rare=True, resume="free")
    """Alarm if more sampled ids per response than this are ids that no token has (completions/unused_ids over
    batch_size)."""
    alarm_length_growth: Annotated[float, Range("at least 1", lambda v: v >= 1)] | None = option(
        3.0, rare=True, resume="free"
    )
    """Alarm if the response length is above this times its initial value (means of 5 updates)."""
    alarm_length_collapse: Fraction | None = option(0.25, rare=True, resume="free")
    """Alarm if the response length is below this times its initial value (means of 5 updates)."""
