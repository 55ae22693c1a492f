"""The metrics that TRL leaves unmasked or dilutes, in both forms: `metrics=correct` and `metrics=trl`.

The algorithms compute sums; a form makes the reported metric of them. Line numbers are those of TRL 1.12.0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax.types import Array, Metrics, Rollout


class MetricForm:
    """metrics=correct: means over the tokens, rows and actions that count."""

    @staticmethod
    def eos_count(rollout: Rollout, present: Array, eos_ids: tuple[int, ...]) -> Array:
        """Responses that ended by a stop token; `present` [B] is False for an absent row."""
        return jnp.sum(rollout.ended & present)

    @staticmethod
    def token_mean(x: Array, inside: Array, scale: dict[str, Array]) -> Array:
        """A micro-batch's share of the mean of x [m, T] over a minibatch (`scale` as in `ppo.loss_and_metrics`)."""
        return jnp.sum(jnp.where(inside, x, 0.0)) / scale["count"]

    @staticmethod
    def ratio_samples(mean_ratio: Array, by_micro_batch: Array) -> Array:
        """The ratios of an optimizer step whose variance over the update is val/ratio_var."""
        return mean_ratio[None]

    @staticmethod
    def ratio_variance(ratios: Array) -> Array:
        """Variance of ratios [N] over optimizer steps, with N - 1 in the denominator as torch's; 0 for N = 1."""
        return jnp.float32(0.0) if ratios.shape[0] == 1 else jnp.var(ratios, ddof=1)

    @staticmethod
    def zero_masked_rows(advantages: Array, masked: Array) -> Array:
        """RLOO advantages [B] with those of masked rows 0, so that the reported loss leaves them out too.

        These rows give no gradient in either form.
        """
        return jnp.where(masked, 0.0, advantages)

    @staticmethod
    def zero_std_groups(
        raw: Array, rewards: Array, scorable: Array, group_size: int, deviations: Array | None
    ) -> Array:
        """Groups whose scores are all equal, or whose rewards as they enter the baseline are: [P] bool.

        Args:
          raw, rewards, scorable: [P, G]: the scores, the rewards that are optimised, and whether a row has a score.
          group_size: G.
          deviations: [P], the standard deviations that rewards are divided by, NaN for that of a single reward; None:
            those of `rewards`.
        """
        both = jnp.stack([raw, rewards])
        top = jnp.max(jnp.where(scorable, both, -jnp.inf), axis=2)
        return jnp.any(~(top > jnp.min(jnp.where(scorable, both, jnp.inf), axis=2)), axis=0)

    @staticmethod
    def surprise(logprobs: Array, lengths: Array) -> Array:
        """Sum of -log-probabilities of a response: [B]; `logprobs` [B, T] are 0 outside of it."""
        return jnp.sum(-logprobs, axis=1)

    @staticmethod
    def ratio_of_sums(sums: Array, counts: Array) -> Array:
        """The mean over a minibatch from its micro-batches' sums and counts, [N] each."""
        return jnp.sum(sums) / jnp.maximum(jnp.sum(counts), 1.0)

    @staticmethod
    def least(minima: Array) -> Array:
        """The least value of a minibatch from those of its micro-batches, [N]."""
        return jnp.min(minima)

    @staticmethod
    def greatest(maxima: Array) -> Array:
        """The greatest value of a minibatch from those of its micro-batches, [N]."""
        return jnp.max(maxima)

    @staticmethod
    def policy_loss(by_micro_batch: Array, of_batch_tokens: bool) -> Array:
        """GRPO's loss of a minibatch without the entropy bonus, from its micro-batches' shares of it, [N].

        `of_batch_tokens`: whether it is divided by the tokens of the whole batch.
        """
        return jnp.sum(by_micro_batch)

    @staticmethod
    def token_step(sums: dict[str, Array], totals: Metrics, t: int) -> Metrics:
        """Entropy and ratio of one optimizer step of RLOO or GRPO.

        Args:
          sums: by micro-batch, [N] each, of the loss.
          totals: sums over the micro-batches.
          t: T.
        """
        tokens = jnp.maximum(totals["tokens"], 1.0)
        entropy = totals["entropy"] / tokens
        return {"entropy": entropy, "policy/entropy_avg": entropy, "ratios": (totals["ratio"] / tokens)[None]}


class TRLMetricForm(MetricForm):
    """metrics=trl: as TRL reports them, over padding too and as means of micro-batch means."""

    @staticmethod
    def eos_count(rollout: Rollout, present: Array, eos_ids: tuple[int, ...]) -> Array:
        """Every eos, those that fill up after the end too."""
        return jnp.sum(adv.is_any(rollout.response, eos_ids) & present[:, None])

    @staticmethod
    def token_mean(x: Array, inside: Array, scale: dict[str, Array]) -> Array:
        """Over all T columns, and a mean of micro-batch means (ppo_trainer.py:857-868)."""
        return jnp.mean(x) / scale["micros"]

    @staticmethod
    def ratio_samples(mean_ratio: Array, by_micro_batch: Array) -> Array:
        """One ratio a micro-batch."""
        return by_micro_batch * by_micro_batch.shape[0]

    @staticmethod
    def ratio_variance(ratios: Array) -> Array:
        """NaN for N = 1, as torch."""
        return jnp.float32(jnp.nan) if ratios.shape[0] == 1 else jnp.var(ratios, ddof=1)

    @staticmethod
    def zero_masked_rows(advantages: Array, masked: Array) -> Array:
        """Unchanged: their advantages count in the reported loss."""
        return advantages

    @staticmethod
    def zero_std_groups(
        raw: Array, rewards: Array, scorable: Array, group_size: int, deviations: Array | None
    ) -> Array:
        """RLOO: after the KL penalty, so nearly always False (rloo_trainer.py:1585, 1608). GRPO: of the batch where the
        batch is what rewards are scaled by (grpo_trainer.py:2781, 2795)."""
        if deviations is not None:
            return deviations <= 1e-8
        deviations = jax.vmap(lambda x, keep: jnp.sqrt(adv.masked_var(x, keep)))(rewards, scorable)
        return (deviations <= 1e-8) & ((scorable.sum(axis=1) > 1) | (group_size == 1))

    @staticmethod
    def surprise(logprobs: Array, lengths: Array) -> Array:
        """Each column outside the response counts as -1."""
        return jnp.sum(-logprobs, axis=1) - jnp.sum(~adv.response_mask(lengths, logprobs.shape[1]), axis=1)

    @staticmethod
    def ratio_of_sums(sums: Array, counts: Array) -> Array:
        """The mean of micro-batch means."""
        return jnp.mean(sums / jnp.maximum(counts, 1.0))

    @staticmethod
    def least(minima: Array) -> Array:
        """The mean of the micro-batches' minima."""
        return jnp.mean(minima)

    @staticmethod
    def greatest(maxima: Array) -> Array:
        """The mean of the micro-batches' maxima."""
        return jnp.mean(maxima)

    @staticmethod
    def policy_loss(by_micro_batch: Array, of_batch_tokens: bool) -> Array:
        """A mean over micro-batches: of their shares, not of their losses, with `of_batch_tokens`
        (grpo_trainer.py:3263-3268, 3306)."""
        return jnp.mean(by_micro_batch) if of_batch_tokens else jnp.sum(by_micro_batch)

    @staticmethod
    def token_step(sums: dict[str, Array], totals: Metrics, t: int) -> Metrics:
        """Means of micro-batch means; ratio and policy/entropy_avg over padding too."""
        rows = jnp.maximum(jnp.sum(sums["rows"]), 1.0)
        return {
            "entropy": jnp.mean(sums["entropy"] / jnp.maximum(sums["tokens"], 1.0)),
            "policy/entropy_avg": totals["entropy_all"] / (rows * t),
            "ratios": sums["ratio_all"] / (jnp.maximum(sums["rows"], 1.0) * t),
        }


FORMS = {"correct": MetricForm, "trl": TRLMetricForm}
"""By the option `metrics`."""
