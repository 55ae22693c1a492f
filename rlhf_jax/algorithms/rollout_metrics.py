"""Metrics of a rollout, its missing-eos penalty, and the regrouping of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax.algorithms.metric_forms import FORMS
from rlhf_jax.types import Array, GroupExperience, Metrics, Rollout


def group_rows(x: Array, group_size: int) -> Array:
    """[B, ...] -> [B / G, G, ...]."""
    return x.reshape((x.shape[0] // group_size, group_size) + x.shape[1:])


def split_groups(experience: GroupExperience) -> GroupExperience:
    """The same with G = 1: every response gets its own copy of the prompt, so that rows can be shuffled one by one."""
    group_size = experience.lengths.shape[1]
    of_rows = experience.replace(prompt_tokens=None, prompt_lengths=None, images=None)
    of_rows = jax.tree.map(lambda x: x.reshape((-1, 1) + x.shape[2:]), of_rows)
    return of_rows.replace(
        prompt_tokens=jnp.repeat(experience.prompt_tokens, group_size, axis=0),
        prompt_lengths=jnp.repeat(experience.prompt_lengths, group_size),
        images=jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), experience.images),
    )


def penalize_missing_eos(scores: Array, rollout: Rollout, eos_ids: tuple[int, ...], config) -> Array:
    """Scores with the penalty for a response without eos subtracted (TRL) or in place of its score (N+).

    Returns:
      [B] float32.
    """
    if config.missing_eos_penalty is None:
        return scores
    inside = adv.response_mask(rollout.lengths, rollout.response.shape[1])
    has_eos = jnp.any(adv.is_any(rollout.response, eos_ids) & inside, axis=1)
    if config.eos_penalty_mode == "replace":
        return jnp.where(has_eos, scores, -config.missing_eos_penalty)
    return jnp.where(has_eos, scores, scores - config.missing_eos_penalty)


def length_metrics(rollout: Rollout, unused_ids: Sequence[int] = ()) -> Metrics:
    """TRL's `completions/...` (rloo_trainer.py:1363-1393), the tokens of prompts and responses, and how many of a
    response no token has.

    Args:
      rollout: rows of length -1 are absent.
      unused_ids: ids that no token of the tokenizer has.

    Returns:
      Each [] float32; "rollout/tokens" [] uint32.
    """
    lengths, present = rollout.lengths.astype(jnp.float32), rollout.lengths >= 0
    ended = rollout.ended & present
    endless = jnp.where(jnp.any(ended), jnp.inf, 0.0)
    prompts = jnp.where(present, rollout.prompt_lengths, 0)
    unused = jnp.isin(rollout.response, jnp.asarray(unused_ids, jnp.int32))
    unused &= adv.response_mask(rollout.lengths, rollout.response.shape[1])
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
        "rollout/tokens": jnp.sum((prompts + jnp.maximum(rollout.lengths, 0)).astype(jnp.uint32)),
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


def reward_metrics(
    raw: Array,
    rewards: Array,
    scorable: Array,
    present: Array,
    group_size: int,
    config,
    deviations: Array | None = None,
) -> Metrics:
    """`reward`, `reward_std`, `frac_reward_zero_std`: of the scores before penalties, clipping and KL.

    Args:
      raw, rewards: [B] float32, scores as the rewards returned them and what is optimised.
      scorable, present: [B] bool; a row of length -1 is not present.
      group_size: G.
      config: metrics.
      deviations: [B / G], the standard deviations that rewards are divided by; None: those of `rewards`.

    Returns:
      Each [] float32.
    """
    form = FORMS[config.metrics]
    groups = [group_rows(x, group_size) for x in (raw, rewards, scorable)]
    equal = form.zero_std_groups(*groups, group_size, deviations)
    in_group = jnp.any(group_rows(present, group_size), axis=1)
    return {
        "reward": adv.masked_mean(raw, scorable),
        "reward_std": jnp.sqrt(adv.masked_var(raw, scorable)),
        "frac_reward_zero_std": adv.masked_mean(equal.astype(jnp.float32), in_group),
    }


def objective_metrics(
    rollout: Rollout,
    *,
    logprobs: Array,
    kl: Array,
    scores: Array,
    penalty: Array,
    scorable: Array,
    eos_ids: tuple[int, ...],
    config,
) -> Metrics:
    """The `objective/...` metrics of TRL's trainer before 0.22; those of rewards are means over the rows that have a
    score, KL and entropy over all present rows.

    Args:
      rollout: of B rows.
      logprobs, kl: [B, T] float32, 0 outside the response.
      scores, penalty: [B] float32, the two parts of the reward.
      scorable: [B] bool.
      eos_ids: as `ScoredRollout`'s.
      config: metrics.

    Returns:
      Each [] float32.
    """
    form = FORMS[config.metrics]
    present = rollout.lengths >= 0
    surprise = form.surprise(logprobs, rollout.lengths)
    eos = form.eos_count(rollout, present, eos_ids)
    return {
        "objective/kl": adv.masked_mean(jnp.sum(kl, axis=1), present),
        "objective/entropy": adv.masked_mean(surprise, present),
        "objective/non_score_reward": -adv.masked_mean(penalty, scorable),
        "objective/rlhf_reward": adv.masked_mean(scores - penalty, scorable),
        "objective/scores": adv.masked_mean(scores, scorable),
        "val/num_eos_tokens": eos.astype(jnp.float32),
    }
