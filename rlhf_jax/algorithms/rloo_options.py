"""Options of RLOO, and those that it shares with GRPO."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

from rlhf_jax.algorithms.options import PolicyGradientOptions, divisors, multiples
from rlhf_jax.option import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Range, option

NumGenerations = Annotated[
    int, Range("at least 2, since a baseline needs at least 2 responses per prompt", lambda v: v >= 2)
]


@dataclasses.dataclass(frozen=True)
class GroupOptions(PolicyGradientOptions):
    """What RLOO and GRPO share: several responses to each prompt and no critic."""

    # --- groups
    num_generations: NumGenerations = 2
    """Responses per prompt, at least 2; batch_size counts responses."""
    num_generations_eval: PositiveInt | None = option(None, rare=True)
    """Responses per evaluation prompt; default: num_generations."""
    shared_prompts: bool = option(True, rare=True)
    """Compute each prompt once for all its responses; false: once per response. The result is the same. With
    micro_batch_tokens the update does so only if response_length is at most query_length."""

    # --- rewards to advantages
    reward_clip_range: tuple[float, ...] | None = None
    """Clip scores to LOW HIGH, before the KL; a single number X means -X X."""
    beta: NonNegativeFloat = 0.05
    """Coefficient of the KL penalty in the reward; 0: no reference model is loaded."""
    mask_truncated_completions: bool = False
    """Mask truncated responses: they give no gradient."""

    # --- the update
    num_iterations: PositiveInt = 1
    """Epochs over each batch of episodes."""
    reshuffle: Literal["once", "per_epoch"] = option("once", rare=True)
    """Shuffle the groups once per batch (TRL), or anew each epoch (TRL before 0.22)."""
    epsilon: PositiveFloat = 0.2
    """Clip range of the ratio below 1, and above 1 if epsilon_high is not given."""
    epsilon_high: PositiveFloat | None = None
    """Clip range of the ratio above 1; default: epsilon."""
    disable_dropout: bool = False
    """Disable the policy's dropout."""
    lr_scheduler_unit: Literal["optimizer_step", "update"] = option("optimizer_step", rare=True)
    """Unit of the schedule and of warmup_steps: optimizer steps (TRL), or updates (TRL before 0.22)."""
    sync_ref_model: bool = option(False, rare=True)
    """Periodically move the reference towards the policy (TR-DPO)."""
    ref_model_mixup_alpha: Fraction = option(0.6, rare=True)
    """Weight of the policy in the updated reference."""
    ref_model_sync_steps: PositiveInt = option(512, rare=True)
    """Optimizer steps between reference updates."""
    learning_rate: NonNegativeFloat = 1e-6
    max_grad_norm: PositiveFloat | None = 1.0
    response_length: PositiveInt = 512
    temperature: PositiveFloat = 1.0

    @property
    def computes_groups(self) -> bool:
        """Whether log-probs and updates compute a prompt once for all responses to it: shared_prompts, unless
        micro_batch_tokens is set and responses may be longer than prompts. A group is as wide as the longest of its
        responses; single rows are not."""
        apart = self.micro_batch_tokens is not None and self.response_length > self.query_length
        return self.shared_prompts and not apart

    @property
    def epochs_per_update(self) -> int:
        """num_iterations."""
        return self.num_iterations

    def problems(self) -> Iterator[str]:
        """Groups that a batch would split; clip ranges that are empty."""
        yield from super().problems()
        yield from self._split_groups()
        limits = self.reward_clip_range
        if limits is not None:
            low, high = (-limits[0], limits[0]) if len(limits) == 1 else limits if len(limits) == 2 else (0.0, 0.0)
            if low >= high:
                text = " ".join(f"{value:g}" for value in limits) or "empty"
                yield f"reward_clip_range is {text}; it must be LOW HIGH with LOW < HIGH, or one number above 0."
        if self.sync_ref_model and self.beta == 0:
            yield "sync_ref_model with beta 0: without a KL penalty there is no reference model to update."

    def _split_groups(self) -> Iterator[str]:
        """batch_size counts responses, and responses to the same prompt stay together from rollout to gradient."""
        batch, k = self.batch_size, self.num_generations
        if batch % k:
            yield (
                f"batch_size {batch} / num_generations {k} = {batch / k:.4g} prompts per update (batch_size counts "
                f"responses); it must be a whole number (try batch_size {multiples(batch, k)})."
            )
            return
        if batch % self.num_mini_batches:
            return
        rows, prompts = batch // self.num_mini_batches, batch // k
        if rows % k:
            yield (
                f"batch_size {batch} / num_mini_batches {self.num_mini_batches} = {rows} rows per minibatch / "
                f"num_generations {k} = {rows / k:.4g} prompts: responses to a prompt are never split between "
                f"minibatches (num_mini_batches {divisors(prompts, self.num_mini_batches)})."
            )
            return
        if not self.shared_prompts:
            return
        parts = (
            ("micro_batch_size", self.micro_batch_size, rows),
            ("rollout_batch_size", self.rollout_batch_size, batch),
        )
        for name, part, total in parts:
            if part is not None and part % k:
                sizes = divisors(total // k, part / k, k)
                yield (
                    f"{name} {part} / num_generations {k} = {part / k:.4g} prompts: with shared_prompts a prompt is "
                    f"computed once for all its responses ({name} {sizes}, or --shared_prompts false)."
                )


@dataclasses.dataclass(frozen=True)
class RLOOOptions(GroupOptions):
    """RLOO, with the numerics of TRL."""

    # --- RLOO
    normalize_reward: bool = False
    """Normalize scores to mean 0 and standard deviation 1 over the batch, before clipping and KL."""
    token_level_kl: bool = False
    """Treat tokens as actions: a token's return has no KL of earlier tokens, and ratio and clip are per token."""
    normalize_advantages: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over the batch."""
    advantage_epsilon: NonNegativeFloat = option(1e-4, rare=True)
    """Added to that standard deviation (TRL before 0.22: 1e-8)."""
    baseline_excludes_truncated: bool = option(False, rare=True)
    """With mask_truncated_completions: exclude truncated responses from the baseline too."""
    policy_loss: Literal["clipped", "reinforce"] = "clipped"
    """Clipped ratio (TRL), or -A log pi without ratio or clip (Ahmadian et al. 2024)."""

    def problems(self) -> Iterator[str]:
        """A mask that extends one that is off."""
        yield from super().problems()
        if self.baseline_excludes_truncated and not self.mask_truncated_completions:
            yield "baseline_excludes_truncated needs mask_truncated_completions: it extends that mask to the baseline."
