"""PPO: a clipped policy loss, a critic, generalized advantage estimation, and the KL penalty as a reward of each token.

Schulman et al. 2017 (arXiv 1707.06347), as Stiennon et al. 2020, TRL and the N+ study (Huang et al. 2024) use it for
language models; options whose names are not the papers' are TRL's. The trainer is `policy_gradient`; here are PPO's
equations for it. Line numbers are those of `trl/trainer/ppo_trainer.py` in TRL 1.12.0. Shapes: B rows, T response
columns; p groups of one response in a micro-batch.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax import losses
from rlhf_jax.algorithms import metrics as measures
from rlhf_jax.algorithms import policy_gradient as pg
from rlhf_jax.algorithms.microbatch import Tally
from rlhf_jax.algorithms.networks import Models
from rlhf_jax.algorithms.optimizer import is_critic
from rlhf_jax.algorithms.ppo_options import PPOOptions
from rlhf_jax.algorithms.response_logprobs import response_logprobs
from rlhf_jax.types import Array, Experience, Metrics, TrainState

# --- rewards to advantages


def advantages(rewards: pg.Rewards, config: PPOOptions) -> pg.Advantages:
    """Advantages and returns of tokens, from the score after the response, dense rewards and the KL penalty (:749-798).

    Args:
      rewards: of B responses.
    """
    t, response_mask = rewards.kl.shape[1], rewards.trained_mask
    value_mask = response_mask
    if config.score_position == "after_eos":
        value_mask = adv.value_mask(rewards.lengths, t)
    steps = None
    if rewards.sampled is not None:
        steps = rewards.sampled | ~adv.response_mask(rewards.lengths, t)
        value_mask &= steps
    # With the score on eos nothing follows the response: the value there is 0, not the critic's estimate.
    values = jnp.where(value_mask, rewards.values, 0.0)
    non_score_reward = -rewards.kl_coef * rewards.kl
    token_rewards = adv.place_scores(
        non_score_reward + rewards.dense, rewards.response_scores, rewards.lengths, config.score_position
    )
    if config.whiten_rewards:
        token_rewards = adv.masked_whiten(token_rewards, value_mask, shift_mean=False, ddof=config.whiten_ddof)
        token_rewards = jnp.where(value_mask, token_rewards, 0.0)
    lengths = rewards.lengths if steps is None else jnp.sum(response_mask, axis=1, dtype=jnp.int32)
    result, returns = advantages_and_returns(token_rewards, values, lengths, config, steps)
    result = adv.masked_whiten(result, response_mask, ddof=config.whiten_ddof)
    return pg.Advantages(
        advantages=jnp.where(response_mask, result, 0.0),
        scores=rewards.scores,
        penalty=-jnp.sum(non_score_reward, axis=1),
        values=values,
        returns=returns,
        value_mask=value_mask,
    )


def advantages_and_returns(
    rewards: Array, values: Array, lengths: Array, config: PPOOptions, mask: Array | None = None
) -> tuple[Array, Array]:
    """GAE of advantages and of the returns that the critic learns from, each with its own lambda (VAPO).

    Args:
      rewards, values: [B, T] float32.
      lengths: [B] int32, tokens of the responses that were sampled.
      config: gamma, lam, value_lam, adaptive_lam_alpha, gae_unit.
      mask: [B, T] bool, columns that are steps; None: all.

    Returns:
      (advantages, returns), each [B, T] float32.
    """
    adaptive = config.adaptive_lam_alpha is not None

    def in_unit(x: float) -> Array | float:
        return adv.between_turns(x, mask) if config.gae_unit == "turn" else x

    gamma, lam = in_unit(config.gamma), in_unit(config.lam)
    if adaptive:
        lam = adv.length_adaptive_lam(lengths, config.adaptive_lam_alpha)
    advantages, returns = adv.gae(rewards, values, gamma=gamma, lam=lam, mask=mask)
    if adaptive or config.value_lam is not None:
        value_lam = in_unit(config.lam if config.value_lam is None else config.value_lam)
        _, returns = adv.gae(rewards, values, gamma=gamma, lam=value_lam, mask=mask)
    return advantages, returns


def explained_variance(values: Array, returns: Array, mask: Array) -> Array:
    """1 - Var[returns - values] / Var[returns] over the mask: the share of the returns that the critic predicts.

    Args:
      values, returns: [B, T] float32.
      mask: [B, T] bool.

    Returns:
      [] float32.
    """
    return 1.0 - adv.masked_var(returns - values, mask, ddof=0) / (adv.masked_var(returns, mask, ddof=0) + 1e-8)


def rollout_metrics(rewards: pg.Rewards, result: pg.Advantages, config: PPOOptions) -> Metrics:
    """Metrics of a rollout that only PPO has: [] float32 each."""
    return {
        "objective/scores_std": jnp.sqrt(adv.masked_var(result.scores, rewards.present, ddof=0)),
        "objective/kl_coef": rewards.kl_coef,
        "val/explained_variance": explained_variance(result.values, result.returns, result.value_mask),
    }


# --- loss


def loss_and_metrics(
    models: Models, micro: Experience, counts: pg.Counts, config: PPOOptions, entropy_coef: Array | None = None
) -> tuple[Array, tuple[Tally, dict[str, Array]]]:
    """PPO's loss of one micro-batch: clipped policy loss + vf_coef * clipped value loss, and if their coefficients are
    set, + kl_loss_coef * KL to the reference - entropy_coef * entropy (:826-870).

    Args:
      models: with whole params.
      micro: p groups of one response.
      entropy_coef: not read: PPO's is not adaptive.

    Returns:
      (loss [], (Tally of shares of the minibatch's metrics, {"logprobs", "entropy", "values"} [p, 1, T])).
    """
    del entropy_coef
    mask, value_mask = micro.trained_mask, micro.value_mask
    new_logprobs, entropy, new_values = response_logprobs(
        models.policy, micro, config, critic=models.critic, entropy_gradient=bool(config.entropy_coef)
    )
    tokens = jax.lax.stop_gradient({"logprobs": new_logprobs, "entropy": entropy, "values": new_values})
    # The same number on both sides: KL 0 and ratio 1 outside the response.
    logprobs, old = jnp.where(mask, new_logprobs, 0.0), jnp.where(mask, micro.logprobs, 0.0)
    values = jnp.where(value_mask, new_values, 0.0)

    policy_losses, policy_clipped, ratio = losses.policy_loss_terms(
        logprobs, old, micro.advantages, cliprange=config.cliprange, cliprange_high=config.epsilon_high
    )
    if config.dual_clip is not None:
        policy_losses, lower_clipped = losses.dual_clip_terms(
            policy_losses, micro.advantages, dual_clip=config.dual_clip
        )
    value_losses, value_clipped = losses.value_loss_terms(
        values, micro.values, micro.returns, cliprange_value=config.cliprange_value
    )

    def policy_mean(x: Array) -> Array:
        return jnp.sum(jnp.where(mask, x, 0.0) * token_weights(mask, counts.tokens, counts, config))

    def value_mean(x: Array) -> Array:
        return jnp.sum(jnp.where(value_mask, x, 0.0) * token_weights(value_mask, counts.values, counts, config))

    def token_mean(x: Array) -> Array:
        return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(counts.tokens, 1.0)

    log_ratio, ratio = jax.lax.stop_gradient((logprobs - old, ratio))
    metrics = {
        "policy/approxkl_avg": token_mean(0.5 * jnp.square(log_ratio)),
        "policy/entropy_avg": token_mean(entropy),
        "val/ratio": token_mean(ratio),
        "policy/clipfrac_avg": policy_mean(policy_clipped),
        "val/clipfrac_avg": value_mean(value_clipped),
        "loss/policy_avg": policy_mean(policy_losses),
        "loss/value_avg": value_mean(value_losses),
    }
    loss = metrics["loss/policy_avg"] + config.vf_coef * metrics["loss/value_avg"]
    if config.dual_clip is not None:
        metrics["policy/clipfrac_lower_avg"] = policy_mean(lower_clipped)
    if config.kl_loss_coef:
        ref_logprobs = jnp.where(mask, micro.ref_logprobs, 0.0)
        metrics["loss/kl_avg"] = policy_mean(adv.kl_penalty(logprobs, ref_logprobs, config.kl_loss_estimator))
        loss = loss + config.kl_loss_coef * metrics["loss/kl_avg"]
    if config.entropy_coef:
        loss = loss - config.entropy_coef * policy_mean(entropy)
    return loss, (Tally(metrics, {}, {"ratio_error": measures.ratio_error(ratio, mask)}), tokens)


def token_weights(mask: Array, minibatch_tokens: Array, counts: pg.Counts, config: PPOOptions) -> Array:
    """The weight of a token in the loss of its minibatch: 1 over `policy_gradient.token_count`; with seq_mean 1 over
    (tokens of its row * rows). [] or [p, 1, 1] float32; args as there."""
    if config.loss_aggregation == "seq_mean":
        return 1.0 / (jnp.maximum(jnp.sum(mask, axis=2, keepdims=True), 1) * float(counts.size))
    return 1.0 / pg.token_count(mask, minibatch_tokens, counts, config)


def critic_gradients(grads: Any, update: Array, config: PPOOptions) -> Any:
    """Gradients of the trained params, with 0 for all but the critic's in the first critic_warmup_steps updates.

    Args:
      grads: of the trained params.
      update: [] int32, updates before this one.
      config: critic_warmup_steps.
    """
    if not config.critic_warmup_steps:
        return grads
    warming_up = update < config.critic_warmup_steps
    return jax.tree_util.tree_map_with_path(
        lambda path, g: g if is_critic(path) else jnp.where(warming_up, jnp.zeros_like(g), g), grads
    )


# --- controller


def adapt_kl_coef(state: TrainState, metrics: Metrics, config: PPOOptions) -> TrainState:
    """The adaptive KL controller's step after an update (Ziegler et al. 2019, section 2.2); none when fixed.

    Args:
      state: after the update, with the kl_coef of before.
      metrics: of `make_experience`, with `objective/kl`.
      config: kl_target, kl_horizon, batch_size.

    Returns:
      The state with its new kl_coef; unchanged if the update was skipped or the new kl_coef is not finite.
    """
    if config.kl_target is None:
        return state
    kl, options = metrics["objective/kl"], {"target": config.kl_target, "horizon": config.kl_horizon}
    new = adv.adaptive_kl(state.kl_coef, kl, n_steps=config.batch_size, **options)
    return state.replace(kl_coef=jnp.where((state.nonfinite == 0) & jnp.isfinite(new), new, state.kl_coef))


OBJECTIVE = pg.Objective(
    advantages=advantages,
    loss=loss_and_metrics,
    needs=lambda config: pg.Needs(ref_logprobs=bool(config.kl_loss_coef), values=True, scores=True),
    rollout_metrics=rollout_metrics,
    mask_gradients=critic_gradients,
)
make_experience = functools.partial(pg.make_experience, objective=OBJECTIVE)
update = functools.partial(pg.update, objective=OBJECTIVE)
eval_metrics = functools.partial(pg.eval_metrics, objective=OBJECTIVE)
