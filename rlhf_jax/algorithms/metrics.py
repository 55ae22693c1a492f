"""Metrics of rollouts, of their rewards and of the ratio between policies."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax.algorithms.groups import group_rows, sampled_mask
from rlhf_jax.algorithms.microbatch import Tally
from rlhf_jax.types import Array, Metrics, Rollout


def length_metrics(rollout: Rollout, unused_ids: Sequence[int] = ()) -> Metrics:
    """TRL's `completions/...` (rloo_trainer.py:1363-1393) of the sampled tokens, the number of tokens of prompts and
    responses, and how many of a response no token has.

    Args:
      rollout: rows of length -1 are absent.
      unused_ids: ids that no token of the tokenizer has.

    Returns:
      Each [] float32; "rollout/tokens" [] uint32.
    """
    tokens = rollout.lengths
    if rollout.sampled is not None:  # tokens from elsewhere count nowhere
        tokens = jnp.where(tokens < 0, -1, jnp.sum(sampled_mask(rollout), axis=1, dtype=tokens.dtype))
    lengths, present = tokens.astype(jnp.float32), tokens >= 0
    ended = rollout.ended & present
    endless = jnp.where(jnp.any(ended), jnp.inf, 0.0)
    prompts = jnp.where(present, rollout.prompt_lengths, 0)
    unused = jnp.isin(rollout.response, jnp.asarray(unused_ids, jnp.int32))
    unused &= sampled_mask(rollout)
    return {
        "completions/mean_length": adv.masked_mean(lengths, present),
        "completions/min_length": jnp.min(jnp.where(present, lengths, jnp.inf)),
        "completions/max_length": jnp.max(lengths),
        "completions/clipped_ratio": 1.0 - adv.masked_mean(ended.astype(jnp.float32), present),
        "completions/mean_terminated_length": adv.masked_mean(lengths, ended),
        "completions/min_terminated_length": jnp.min(jnp.where(ended, lengths, endless)),
        "completions/max_terminated_length": jnp.max(jnp.where(ended, lengths, 0.0)),
        "completions/unused_ids": jnp.sum(unused).astype(jnp.float32),
        "val/response_length": adv.masked_mean(lengths, present),
        "rollout/tokens": jnp.sum((prompts + jnp.maximum(tokens, 0)).astype(jnp.uint32)),
    }


def sampling_metrics(logprobs: Array, sampler_logprobs: Array, mask: Array) -> Metrics:
    """TRL's `sampling/sampling_logp_difference/...`: |learner's - sampler's log-probability| of the sampled tokens
    (grpo_trainer.py:2881-2894). Large values show a wrong cache, window or temperature, or a coarse dtype.

    Args:
      logprobs, sampler_logprobs: [B, T] float32.
      mask: [B, T] bool, the response.

    Returns:
      Each [] float32.
    """
    difference = jnp.where(mask, jnp.abs(logprobs - sampler_logprobs), 0.0)
    return {
        "sampling/sampling_logp_difference/mean": adv.masked_mean(difference, mask),
        "sampling/sampling_logp_difference/max": jnp.max(difference),
    }


def reward_metrics(raw: Array, rewards: Array, scorable: Array, present: Array, group_size: int) -> Metrics:
    """`reward`, `reward_std`, `frac_reward_zero_std`: of the scores before penalties, clipping and KL.

    Args:
      raw, rewards: [B] float32, scores as the rewards returned them and what is optimised.
      scorable, present: [B] bool; a row of length -1 is not present.
      group_size: G.

    Returns:
      Each [] float32.
    """
    in_group = jnp.any(group_rows(present, group_size), axis=1)
    equal = groups_without_signal(*(group_rows(x, group_size) for x in (raw, rewards, scorable)))
    return {
        "reward": adv.masked_mean(raw, scorable),
        "reward_std": jnp.sqrt(adv.masked_var(raw, scorable)),
        "frac_reward_zero_std": adv.masked_mean(equal.astype(jnp.float32), in_group),
    }


def groups_without_signal(raw: Array, rewards: Array, scorable: Array) -> Array:
    """Groups whose scores are all equal, or whose rewards as they enter the baseline are: [P] bool; args [P, G]."""
    both = jnp.stack([raw, rewards])
    top = jnp.max(jnp.where(scorable, both, -jnp.inf), axis=2)
    return jnp.any(~(top > jnp.min(jnp.where(scorable, both, jnp.inf), axis=2)), axis=0)


def objective_metrics(
    rollout: Rollout, *, logprobs: Array, kl: Array, scores: Array, penalty: Array, scorable: Array
) -> Metrics:
    """The `objective/...` metrics of TRL's trainers before 0.22; those of rewards are means over the rows that have a
    score, KL and entropy over all present rows.

    Args:
      rollout: of B rows.
      logprobs, kl: [B, T] float32, 0 outside the response.
      scores, penalty: [B] float32, the two parts of the reward.
      scorable: [B] bool.

    Returns:
      Each [] float32.
    """
    present = rollout.lengths >= 0
    return {
        "objective/kl": adv.masked_mean(jnp.sum(kl, axis=1), present),
        "objective/entropy": adv.masked_mean(jnp.sum(-logprobs, axis=1), present),
        "objective/non_score_reward": -adv.masked_mean(penalty, scorable),
        "objective/rlhf_reward": adv.masked_mean(scores - penalty, scorable),
        "objective/scores": adv.masked_mean(scores, scorable),
    }


def ratio_tally(log_ratio: Array, entropy: Array, mask: Array) -> Tally:
    """What `ratio_metrics` is made of, of a micro-batch.

    Args:
      log_ratio: [..., T] float32, policy over behavior policy, 0 outside the mask.
      entropy: [..., T] float32.
      mask: [..., T] bool, tokens that are trained on.
    """
    ratio = jnp.exp(log_ratio)
    sums = {
        "entropy": jnp.sum(jnp.where(mask, entropy, 0.0)),
        "ratio": jnp.sum(jnp.where(mask, ratio, 0.0)),
        "tokens": jnp.sum(mask).astype(jnp.float32),
    }
    return Tally(jax.lax.stop_gradient(sums), {}, {"ratio_error": ratio_error(ratio, mask)})


def ratio_error(ratio: Array, mask: Array) -> Array:
    """The largest |ratio - 1| of a token: [] float32."""
    return jax.lax.stop_gradient(jnp.max(jnp.where(mask, jnp.abs(ratio - 1.0), 0.0)))


def ratio_metrics(tally: Tally) -> Metrics:
    """Entropy and ratio of an optimizer step, means over the tokens that are trained on: [] float32 each."""
    tokens = jnp.maximum(tally.sums["tokens"], 1.0)
    entropy = tally.sums["entropy"] / tokens
    return {
        "entropy": entropy,
        "policy/entropy_avg": entropy,
        "val/clipfrac_avg": jnp.float32(0.0),
        "val/ratio": tally.sums["ratio"] / tokens,
        "val/ratio_error": tally.greatest["ratio_error"],
    }
