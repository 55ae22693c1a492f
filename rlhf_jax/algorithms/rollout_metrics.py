"""What can be said of a rollout before anything is learned from it: its penalty for a missing eos, and its metrics."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax.types import Array, GroupExperience, Metrics, Rollout


def grouped(x: Array, group: int) -> Array:
    """[B, ...] -> [B / G, G, ...]."""
    return x.reshape((x.shape[0] // group, group) + x.shape[1:])


def apart(experience: GroupExperience) -> GroupExperience:
    """The same with G = 1: a copy of its prompt for every response, so that rows can be shuffled one by one."""
    group = experience.lengths.shape[1]

    def alone(x):
        return x.reshape((-1, 1) + x.shape[2:])

    return GroupExperience(
        prompt_tokens=jnp.repeat(experience.prompt_tokens, group, axis=0),
        prompt_lengths=jnp.repeat(experience.prompt_lengths, group),
        response=alone(experience.response),
        mask=alone(experience.mask),
        lengths=alone(experience.lengths),
        logprobs=alone(experience.logprobs),
        advantages=alone(experience.advantages),
    )


def penalize_missing_eos(scores: Array, rollout: Rollout, eos_id: int, config) -> Array:
    """The score of a response without the tokenizer's eos: less the penalty (TRL), or minus the penalty (N+).

    Returns:
      [B] float32.
    """
    if config.missing_eos_penalty is None:
        return scores
    inside = adv.response_mask(rollout.lengths, rollout.response.shape[1])
    has_eos = jnp.any((rollout.response == eos_id) & inside, axis=1)
    if config.eos_penalty_mode == "replace":
        return jnp.where(has_eos, scores, -config.missing_eos_penalty)
    return jnp.where(has_eos, scores, scores - config.missing_eos_penalty)


def length_metrics(rollout: Rollout) -> Metrics:
    """TRL's `completions/...` (rloo_trainer.py:1363-1393), and the tokens of prompts and responses.

    Args:
      rollout: rows of length -1 are absent.

    Returns:
      Each [] float32.
    """
    lengths, present = rollout.lengths.astype(jnp.float32), rollout.lengths >= 0
    ended = rollout.ended & present
    endless = jnp.where(jnp.any(ended), jnp.inf, 0.0)
    prompts = jnp.where(present, rollout.prompt_lengths, 0)
    return {
        "completions/mean_length": adv.masked_mean(lengths, present),
        "completions/min_length": jnp.min(jnp.where(present, lengths, jnp.inf)),
        "completions/max_length": jnp.max(lengths),
        "completions/clipped_ratio": 1.0 - adv.masked_mean(ended.astype(jnp.float32), present),
        "completions/mean_terminated_length": adv.masked_mean(lengths, ended),
        "completions/min_terminated_length": jnp.min(jnp.where(ended, lengths, endless)),
        "completions/max_terminated_length": jnp.max(jnp.where(ended, lengths, 0.0)),
        "val/response_length": adv.masked_mean(lengths, present),
        "rollout/tokens": jnp.sum(prompts + jnp.maximum(rollout.lengths, 0)).astype(jnp.float32),
    }


def reward_metrics(raw: Array, rewards: Array, scorable: Array, present: Array, group: int, config) -> Metrics:
    """`reward`, `reward_std`, `frac_reward_zero_std`: of the scores before penalties, clipping and KL.

    With metrics=trl the last is TRL's, taken after the KL: nearly always 0 (rloo_trainer.py:1585, 1608).

    Args:
      raw, rewards: [B] float32, scores as they came and what is optimised.
      scorable, present: [B] bool; a row of length -1 is not present.
      group: G.
      config: metrics.

    Returns:
      Each [] float32.
    """
    x, keep = grouped(rewards if config.metrics == "trl" else raw, group), grouped(scorable, group)
    if config.metrics == "trl":
        deviations = jax.vmap(lambda x, keep: jnp.sqrt(adv.masked_var(x, keep)))(x, keep)
        equal = (deviations <= 1e-8) & ((keep.sum(axis=1) > 1) | (group == 1))
    else:
        top = jnp.max(jnp.where(keep, x, -jnp.inf), axis=1)
        equal = ~(top > jnp.min(jnp.where(keep, x, jnp.inf), axis=1))
    there = jnp.any(grouped(present, group), axis=1)
    return {
        "reward": adv.masked_mean(raw, scorable),
        "reward_std": jnp.sqrt(adv.masked_var(raw, scorable)),
        "frac_reward_zero_std": adv.masked_mean(equal.astype(jnp.float32), there),
    }


def objective_metrics(rollout, logprobs, kl, learned, scores, penalty, scorable, eos_id: int, config) -> Metrics:
    """The `objective/...` metrics of TRL's trainer before 0.22, over the rows that have a score.

    Args:
      rollout: of B rows.
      logprobs, kl: [B, T] float32, 0 outside the response.
      learned: [B, T] bool.
      scores, penalty: [B] float32, what the reward is made of.
      scorable: [B] bool.
      eos_id: the tokenizer's.
      config: metrics.

    Returns:
      Each [] float32.
    """
    present = rollout.lengths >= 0
    surprise = jnp.sum(-logprobs, axis=1)
    eos = jnp.sum(rollout.ended & present)
    if config.metrics == "trl":
        # There each column outside the response counted as -1, and every eos in the fill as one more.
        surprise = surprise - jnp.sum(~adv.response_mask(rollout.lengths, kl.shape[1]), axis=1)
        eos = jnp.sum((rollout.response == eos_id) & present[:, None])
    return {
        "objective/kl": adv.masked_mean(jnp.sum(kl, axis=1), present),
        "objective/entropy": adv.masked_mean(surprise, present),
        "objective/non_score_reward": -adv.masked_mean(penalty, scorable),
        "objective/rlhf_reward": adv.masked_mean(scores - penalty, scorable),
        "objective/scores": adv.masked_mean(scores, scorable),
        "val/num_eos_tokens": eos.astype(jnp.float32),
    }
