"""RLOO: REINFORCE with a leave-one-out baseline, one action a response.

Ahmadian et al. 2024 (arXiv 2402.14740), Kool et al. 2019, in the forms of TRL's trainer, of its trainer before 0.22,
and of the paper. The trainer is `policy_gradient`; here are RLOO's equations for it. Line numbers are those of
`trl/trainer/rloo_trainer.py` in TRL 1.12.0.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax import losses
from rlhf_jax.algorithms import metrics as measures
from rlhf_jax.algorithms import policy_gradient as pg
from rlhf_jax.algorithms.groups import group_rows
from rlhf_jax.algorithms.microbatch import Tally
from rlhf_jax.algorithms.networks import Models
from rlhf_jax.algorithms.response_logprobs import response_logprobs
from rlhf_jax.algorithms.rloo_options import RLOOOptions
from rlhf_jax.types import Array, Experience, Metrics


def advantages(rewards: pg.Rewards, config: RLOOOptions) -> pg.Advantages:
    """A response's reward, KL penalty included, minus the mean of the others of its group (:1567-1606).

    Args:
      rewards: of B responses.
    """
    group_size, scorable, masked = rewards.group_size, rewards.scorable, rewards.masked
    scores, kl = rewards.scores, rewards.kl
    if config.normalize_reward:
        scores, _ = adv.normalize(scores, scorable, 1e-8)
    if config.reward_clip_range is not None:
        scores = adv.clip_rewards(scores, config.reward_clip_range)
    penalty = config.beta * kl.sum(axis=1)
    penalized = scores - penalty

    keep = scorable
    if config.baseline_excludes_truncated:
        keep = keep & ~masked
    if group_size > 1:
        result = adv.leave_one_out(group_rows(penalized, group_size), group_rows(keep, group_size)).reshape(-1)
        keep = keep & (jnp.repeat(group_rows(keep, group_size).sum(axis=1), group_size) > 1)
    else:
        result = jnp.zeros_like(penalized)
    divisor = jnp.float32(1.0)
    if config.normalize_advantages:
        normalized, divisor = adv.normalize(result, keep, config.advantage_epsilon)
        # Their mean is 0 up to rounding, which must not become the advantage of a group of equal rewards.
        result = jnp.where(result == 0, 0.0, normalized)
    result = jnp.where(masked, 0.0, result)  # their gradient is 0 anyway: the loss leaves them out too
    if config.token_level_kl:
        # Dense rewards that were normalised or clipped with the score are no longer a sum over tokens.
        in_score = config.normalize_reward or config.reward_clip_range is not None
        earlier = adv.exclusive_cumsum((0.0 if in_score else rewards.dense) - config.beta * kl) / divisor
        result = jnp.where(rewards.trained_mask & keep[:, None], result[:, None] - earlier, 0.0)
    return pg.Advantages(result, scores, penalty)


def rollout_metrics(rewards: pg.Rewards, result: pg.Advantages, config: RLOOOptions) -> Metrics:
    """`reward...` of a rollout, and with a KL penalty `kl`, the mean over tokens: [] float32 each."""
    metrics = pg.group_metrics(rewards, result, config)
    return metrics | ({"kl": adv.masked_mean(rewards.kl, rewards.trained_mask)} if config.beta else {})


def loss_and_metrics(
    models: Models, micro: Experience, counts: pg.Counts, config: RLOOOptions, entropy_coef: Array | None = None
) -> tuple[Array, tuple[Tally, dict[str, Array]]]:
    """RLOO's loss of one micro-batch: its share of the mean over the responses of a minibatch.

    One action a response: max(-A r, -A clip(r)) with r = exp(sum of log-ratios). With token_level_kl the tokens are
    the actions: the same for each token, summed over the response. policy_loss='reinforce': -A log pi instead.

    Args:
      models: with whole params.
      micro: p groups.
      entropy_coef: not read: RLOO has no entropy bonus.

    Returns:
      (loss [], (Tally, {"logprobs", "entropy"} [p, G, T])).
    """
    del entropy_coef
    mask, token_level = micro.trained_mask, config.token_level_kl
    new_logprobs, entropy, _ = response_logprobs(models.policy, micro, config, dropout_keys=micro.dropout_keys)
    tokens = jax.lax.stop_gradient({"logprobs": new_logprobs, "entropy": entropy})
    logprobs, old = jnp.where(mask, new_logprobs, 0.0), jnp.where(mask, micro.logprobs, 0.0)
    log_ratio = logprobs - old
    action = log_ratio if token_level else jnp.sum(log_ratio, axis=2)
    clip = {"cliprange": config.epsilon, "cliprange_high": config.epsilon_high}
    terms, clipped, ratio = losses.policy_loss_terms(action, jnp.zeros_like(action), micro.advantages, **clip)
    if config.policy_loss == "reinforce":
        action_logprobs = logprobs if token_level else jnp.sum(logprobs, axis=2)
        terms = losses.reinforce_loss_terms(action_logprobs, micro.advantages)
        clipped = jnp.zeros_like(clipped)
    if token_level:
        terms = jnp.sum(jnp.where(mask, terms, 0.0), axis=2)
    loss = jnp.sum(terms) / counts.rows

    log_ratio, ratio = jax.lax.stop_gradient((log_ratio, ratio))
    present = micro.lengths >= 0
    counted = mask if token_level else present
    clipping = config.policy_loss == "clipped"
    low = (ratio < 1 - config.epsilon) & (micro.advantages < 0) & counted & clipping
    high = (ratio > 1 + pg.epsilon_high(config)) & (micro.advantages > 0) & counted & clipping
    sums, least, greatest = measures.ratio_tally(log_ratio, entropy, mask)
    sums |= {
        "loss": loss,
        "rows": jnp.sum(present).astype(jnp.float32),
        "squared_log_ratio": jnp.sum(jnp.square(jnp.sum(log_ratio, axis=2))),
        "clipped": jnp.sum(clipped & counted).astype(jnp.float32),
        "low": jnp.sum(low).astype(jnp.float32),
        "high": jnp.sum(high).astype(jnp.float32),
        "actions": jnp.sum(counted).astype(jnp.float32),
    }
    least |= {"low": jnp.min(jnp.where(counted, low, True).astype(jnp.float32))}
    greatest |= {"high": jnp.max(high.astype(jnp.float32))}
    return loss, (Tally(sums, least, greatest), tokens)


def step_metrics(tally: Tally, config: RLOOOptions) -> Metrics:
    """The metrics of one optimizer step, of the tally of `loss_and_metrics`: [] float32 each."""
    sums = tally.sums
    actions = jnp.maximum(sums["actions"], 1.0)
    low, high = sums["low"] / actions, sums["high"] / actions
    return {
        **measures.ratio_metrics(tally),
        "loss": sums["loss"],
        "loss/policy_avg": sums["loss"],
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "clip_ratio/low_min": jnp.where(sums["actions"] > 0, tally.least["low"], 0.0),
        "clip_ratio/high_max": tally.greatest["high"],
        "policy/approxkl_avg": 0.5 * sums["squared_log_ratio"] / jnp.maximum(sums["rows"], 1.0),
        "policy/clipfrac_avg": sums["clipped"] / actions,
    }


OBJECTIVE = pg.Objective(
    advantages=advantages, loss=loss_and_metrics, step_metrics=step_metrics, rollout_metrics=rollout_metrics
)
make_experience = functools.partial(pg.make_experience, objective=OBJECTIVE)
update = functools.partial(pg.update, objective=OBJECTIVE)
eval_metrics = functools.partial(pg.eval_metrics, objective=OBJECTIVE)
