"""Options of GRPO and its relatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

from rlhf_jax.algorithms.rloo_options import GroupOptions, NumGenerations
from rlhf_jax.option import Fraction, NonNegativeFloat, PositiveFloat, Range, option

EntropyQuantile = Annotated[float, Range("above 0 and at most 1", lambda v: 0 < v <= 1)]
LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]


@dataclasses.dataclass(frozen=True)
class GRPOOptions(GroupOptions):
    """GRPO and its relatives, with the numerics of TRL."""

    # --- rewards to advantages
    num_generations: NumGenerations = 8
    """Responses per prompt, at least 2; batch_size counts responses."""
    baseline: Literal["group_mean", "leave_one_out", "none"] = "group_mean"
    """What is subtracted from a response's reward: the mean of its group (TRL), of the others of its group, or 0."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What the difference is divided by: the group's standard deviation, the batch's, or 1 (Dr. GRPO)."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize", rare=True
    )
    """Several reward functions: add, then normalize; or normalize each by its group, add, normalize by the batch."""
    reward_clip_range: tuple[float, ...] | None = None
    """Clip rewards minus their baseline to LOW HIGH (OpenRLHF); a single number X means -X X."""
    beta: NonNegativeFloat = 0.0
    """Coefficient of the KL to the reference, in the loss (see kl_in_reward); 0: no reference model is loaded."""
    use_bias_correction_kl: bool = option(True, rare=True)
    """Multiply the KL in the loss by the ratio of policy and behavior policy, for an unbiased gradient."""
    kl_in_reward: bool = False
    """Subtract beta times the KL of each token from its reward (REINFORCE++) in place of the KL in the loss."""
    gamma: Fraction = 1.0
    """Discount factor of the return-to-go of a token, with kl_in_reward."""
    whiten_advantages: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over all tokens of the batch (REINFORCE++)."""
    whiten_ddof: Literal[0, 1] = option(1, rare=True)
    """The variance in whiten_advantages divides by n - 1 (verl) or n (OpenRLHF)."""

    # --- the loss
    loss_type: LossType = "dapo"
    """Loss of a token and its mean, as in TRL: grpo: mean over rows of means over tokens; bnpo: mean over the tokens
    of the minibatch; dr_grpo: divided by rows times response_length; dapo: mean over the tokens of the batch; luspo:
    mean over rows of sums; cispo: log-probs weighted by the ratio, capped at epsilon_high, mean as dapo; sapo: a soft
    gate in place of the clip, mean as grpo; vespo: weights of whole responses, mean as dapo."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or of the response, with the mean of its log-ratios (GSPO)."""
    delta: PositiveFloat | None = option(None, rare=True)
    """Upper bound of the ratio where the clip does not apply (INTELLECT-2); None: no bound."""
    loss_aggregation: Literal["token_mean", "token_mean_micro"] = option("token_mean", rare=True)
    """What bnpo, the entropy quantile and the entropy bonus are normalized by: the minibatch, so that micro-batches
    never change the result; or each micro-batch (TRL)."""
    sapo_temperature_pos: PositiveFloat = option(1.0, rare=True)
    """sapo: temperature for positive advantages."""
    sapo_temperature_neg: PositiveFloat = option(1.05, rare=True)
    """sapo: temperature for negative advantages."""
    vespo_k_pos: NonNegativeFloat = option(2.0, rare=True)
    """vespo: exponent of the ratio for advantages of at least 0."""
    vespo_lambda_pos: NonNegativeFloat = option(3.0, rare=True)
    """vespo: decay in the ratio for advantages of at least 0."""
    vespo_k_neg: NonNegativeFloat = option(3.0, rare=True)
    """vespo: exponent of the ratio for negative advantages."""
    vespo_lambda_neg: NonNegativeFloat = option(2.0, rare=True)
    """vespo: decay in the ratio for negative advantages."""

    # --- which tokens are trained on
    top_entropy_quantile: EntropyQuantile = 1.0
    """Train only on this fraction of tokens, those of the highest entropy (0.2: Beyond the 80/20 rule); 1: on all.
    Below 1 with several micro-batches, one more forward pass for each optimizer step."""
    off_policy_mask_threshold: PositiveFloat | None = option(None, rare=True)
    """Mask responses of negative advantage whose mean log-ratio of sampler to policy is above this (DeepSeek-V3.2)."""

    # --- entropy bonus
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus."""
    use_adaptive_entropy: bool = option(False, rare=True)
    """After each optimizer step, change entropy_coef by entropy_coef_delta: up while the entropy is at most
    entropy_target, else down; the bonus applies only while it is at most entropy_target (Skywork-OR1)."""
    entropy_coef_min: NonNegativeFloat = option(0.0, rare=True)
    """Lower bound of the adaptive entropy_coef."""
    entropy_coef_max: NonNegativeFloat = option(1.0, rare=True)
    """Upper bound of the adaptive entropy_coef."""
    entropy_coef_delta: NonNegativeFloat = option(0.005, rare=True)
    """Step of the adaptive entropy_coef."""
    entropy_target: NonNegativeFloat = option(0.2, rare=True)
    """Entropy per token that the adaptive entropy_coef aims at, in nats."""

    # --- sampler and learner
    importance_sampling_correction: bool = False
    """Weight the loss by the ratio of the learner's probabilities to the sampler's, where the two differ: dtype
    bfloat16, top_k, top_p, another temperature."""
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = option(
        "sequence_mask", rare=True
    )
    """That ratio of tokens or of whole responses, clipped to the bounds (truncate), or 0 outside of them (mask)."""
    importance_sampling_clip_min: PositiveFloat | None = option(None, rare=True)
    """Lower bound of that ratio; None: no bound."""
    importance_sampling_clip_max: PositiveFloat | None = option(3.0, rare=True)
    """Upper bound of that ratio; None: no bound."""

    @property
    def depends_on_micro_batching(self) -> bool:
        """With TRL's means over micro-batches."""
        return self.loss_aggregation == "token_mean_micro"

    def problems(self) -> Iterator[str]:
        """Baselines, losses and corrections that exclude each other."""
        yield from super().problems()
        if self.loss_type == "cispo" and self.epsilon_high is None:
            yield (
                f"loss_type cispo caps the ratio itself at epsilon_high, which would be epsilon {self.epsilon:g}: "
                "nearly all tokens would be capped. Give epsilon_high (ScaleRL: 5)."
            )
        low, high = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            yield (
                f"importance_sampling_clip_min {low:g} must be less than importance_sampling_clip_max {high:g}: no "
                "ratio lies between them."
            )
        if self.importance_sampling_correction:
            mode = self.importance_sampling_mode
            if low is None and high is None:
                yield (
                    "importance_sampling_correction without bounds: give importance_sampling_clip_max or "
                    "importance_sampling_clip_min."
                )
            if self.loss_type == "vespo" and not mode.startswith("token"):
                yield f"loss_type vespo needs importance_sampling_mode token_truncate or token_mask, not {mode}."
            if self.old_logprobs == "sampler":
                yield (
                    "importance_sampling_correction with old_logprobs 'sampler': the ratio of learner to sampler would "
                    "always be 1. Remove one of them."
                )
        if self.baseline == "none" and self.scale_rewards == "group":
            yield (
                "baseline 'none' with scale_rewards 'group': the rewards of a group that are all equal would be "
                "divided by 1e-4. Set scale_rewards to batch or none."
            )
        if self.kl_in_reward and self.beta == 0:
            yield "kl_in_reward needs beta above 0: without it there is no KL to subtract."
        if self.gamma != 1 and not self.kl_in_reward:
            yield f"gamma {self.gamma:g} needs kl_in_reward: only there tokens have rewards of their own."
        if self.multi_objective_aggregation == "normalize_then_sum":
            if self.baseline != "group_mean" or self.scale_rewards != "group":
                yield (
                    "multi_objective_aggregation 'normalize_then_sum' normalizes each reward by its group's mean and "
                    f"standard deviation: baseline {self.baseline!r} and scale_rewards {self.scale_rewards!r} would "
                    "not be used. Leave them out."
                )
            if self.missing_eos_penalty is not None:
                yield (
                    "missing_eos_penalty with multi_objective_aggregation 'normalize_then_sum': the penalty belongs to "
                    "no reward function. Remove one of them, or give the penalty in a reward function."
                )
        if self.use_adaptive_entropy:
            if not self.entropy_coef_min <= self.entropy_coef <= self.entropy_coef_max:
                yield (
                    f"entropy_coef {self.entropy_coef:g} must lie between entropy_coef_min {self.entropy_coef_min:g} "
                    f"and entropy_coef_max {self.entropy_coef_max:g} with use_adaptive_entropy."
                )
