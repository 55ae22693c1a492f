"""RLOO: REINFORCE with a leave-one-out baseline, one action a response.

Ahmadian et al. 2024 (arXiv 2402.14740), Kool et al. 2019, in the forms of TRL's trainer, of its trainer before 0.22,
and of the paper. The trainer is `group_policy_gradient`; here are RLOO's equations for it. Line numbers are those of
`trl/trainer/rloo_trainer.py` in TRL 1.12.0.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax import losses
from rlhf_jax.algorithms import group_policy_gradient as gpg
from rlhf_jax.algorithms.actor_critic import Models, group_logprobs
from rlhf_jax.algorithms.metric_forms import FORMS
from rlhf_jax.algorithms.rollout_metrics import group_rows
from rlhf_jax.types import Array, GroupExperience, Metrics


def advantages(rewards: gpg.Rewards, config) -> gpg.Advantages:
    """A response's reward, KL penalty included, minus the mean of the others of its group (:1567-1606).

    Args:
      rewards: of B responses.
      config: an RLOOConfig.
    """
    form = FORMS[config.metrics]
    group_size, scorable, masked = rewards.group_size, rewards.scorable, rewards.masked
    scores, kl = rewards.scores, rewards.kl
    if config.normalize_reward:
        scores, _ = adv.normalize(scores, scorable, 1e-8)
    if config.reward_clip_range is not None:
        low, high = gpg.clip_range(config.reward_clip_range)
        scores = jnp.clip(scores, low, high)
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
    result = form.zero_masked_rows(result, masked)
    if config.token_level_kl:
        # Dense rewards that were normalised or clipped with the score are no longer a sum over tokens.
        in_score = config.normalize_reward or config.reward_clip_range is not None
        earlier = adv.exclusive_cumsum((0.0 if in_score else rewards.dense) - config.beta * kl) / divisor
        result = jnp.where(rewards.trained_mask & keep[:, None], result[:, None] - earlier, 0.0)
    return gpg.Advantages(result, scores, penalty)


def loss_and_metrics(
    models: Models,
    micro: GroupExperience,
    batch: gpg.Batch,
    config,
    dropout_keys: Array | None = None,
    entropy_coef: Array | None = None,
):
    """RLOO's loss of one micro-batch: its share of the mean over the responses of a minibatch.

    One action a response: max(-A r, -A clip(r)) with r = exp(sum of log-ratios). With token_level_kl the tokens are
    the actions: the same for each token, summed over the response. policy_loss='reinforce': -A log pi instead.

    Args:
      models: with whole params.
      micro: p groups.
      batch: counts of the whole minibatch.
      config: an RLOOConfig.
      dropout_keys: [p] typed keys (G = 1 only); None: no dropout.
      entropy_coef: not read: RLOO has no entropy bonus.

    Returns:
      (loss [], (sums over this micro-batch that metrics are made of, its extremes {"low", "high": clipping, "error":
        largest |ratio - 1| of a token}))
    """
    del entropy_coef
    policy = models.policy
    p, g, t = micro.response.shape
    response_mask = adv.response_mask(micro.lengths.reshape(-1), t).reshape(p, g, t)
    logprobs, entropy = group_logprobs(policy.model, policy.params, micro, config, dropout_keys)
    logprobs = jnp.where(response_mask, logprobs, 0.0)
    old = jnp.where(response_mask, micro.logprobs, 0.0)
    clip = {"cliprange": config.epsilon, "cliprange_high": config.epsilon_high}
    log_ratio = logprobs - old
    token_level = config.token_level_kl
    action = log_ratio if token_level else jnp.sum(log_ratio, axis=2)
    terms, clipped, ratio = losses.policy_loss_terms(action, jnp.zeros_like(action), micro.advantages, **clip)
    if config.policy_loss == "reinforce":
        action_logprobs = logprobs if token_level else jnp.sum(logprobs, axis=2)
        terms = losses.reinforce_loss_terms(action_logprobs, micro.advantages)
        clipped = jnp.zeros_like(clipped)
    if token_level:
        terms = jnp.sum(jnp.where(response_mask, terms, 0.0), axis=2)
    loss = jnp.sum(terms) / batch.rows

    log_ratio, ratio = jax.lax.stop_gradient((log_ratio, ratio))
    present = micro.lengths >= 0
    counted = response_mask if token_level else present
    high = gpg.epsilon_high(config)
    clipping = config.policy_loss == "clipped"
    low = (ratio < 1 - config.epsilon) & (micro.advantages < 0) & counted & clipping
    high = (ratio > 1 + high) & (micro.advantages > 0) & counted & clipping
    sums = {
        "loss": loss,
        "entropy": jnp.sum(jnp.where(response_mask, entropy, 0.0)),
        "entropy_all": jnp.sum(jnp.where(present[:, :, None], entropy, 0.0)),
        "ratio": jnp.sum(jnp.where(response_mask, jnp.exp(log_ratio), 0.0)),
        "ratio_all": jnp.sum(jnp.where(present[:, :, None], jnp.exp(log_ratio), 0.0)),
        "rows": jnp.sum(present).astype(jnp.float32),
        "tokens": jnp.sum(response_mask).astype(jnp.float32),
        "squared_log_ratio": jnp.sum(jnp.square(jnp.sum(log_ratio, axis=2))),
        "clipped": jnp.sum(clipped & counted).astype(jnp.float32),
        "low": jnp.sum(low).astype(jnp.float32),
        "high": jnp.sum(high).astype(jnp.float32),
        "actions": jnp.sum(counted).astype(jnp.float32),
    }
    extremes = {
        "low": jnp.min(jnp.where(counted, low, True).astype(jnp.float32)),
        "high": jnp.max(high.astype(jnp.float32)),
        "error": jnp.max(jnp.where(response_mask, jnp.abs(jnp.exp(log_ratio) - 1.0), 0.0)),
    }
    return loss, (sums, extremes)


def step_metrics(sums: dict[str, Array], extremes: dict[str, Array], t: int, config) -> Metrics:
    """The metrics of one optimizer step from the sums of its micro-batches.

    Args:
      sums, extremes: of `loss_and_metrics`, [N] each, by micro-batch.
      t: T.
      config: metrics.

    Returns:
      Each [] float32; "ratios" [N] or [1], whose variance over steps is val/ratio_var.
    """
    totals = {name: jnp.sum(x) for name, x in sums.items()}
    rows = jnp.maximum(totals["rows"], 1.0)
    actions = jnp.maximum(totals["actions"], 1.0)
    form = FORMS[config.metrics]
    metrics = form.token_step(sums, totals, t)
    low, high = totals["low"] / actions, totals["high"] / actions
    return {
        "loss": totals["loss"],
        **metrics,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "clip_ratio/low_min": jnp.where(totals["actions"] > 0, form.least(extremes["low"]), 0.0),
        "clip_ratio/high_max": form.greatest(extremes["high"]),
        "loss/policy_avg": totals["loss"],
        "policy/approxkl_avg": 0.5 * totals["squared_log_ratio"] / rows,
        "policy/clipfrac_avg": totals["clipped"] / actions,
        "val/clipfrac_avg": jnp.float32(0.0),
        "val/ratio": jnp.mean(metrics["ratios"]),
        "val/ratio_error": jnp.max(extremes["error"]),
    }


OBJECTIVE = gpg.Objective(advantages=advantages, loss=loss_and_metrics, step_metrics=step_metrics)
make_experience = functools.partial(gpg.make_experience, objective=OBJECTIVE)
by_micro_batch = functools.partial(gpg.by_micro_batch, objective=OBJECTIVE)
update = functools.partial(gpg.update, objective=OBJECTIVE)
update_steps = functools.partial(gpg.update_steps, objective=OBJECTIVE)
eval_metrics = functools.partial(gpg.eval_metrics, objective=OBJECTIVE)
