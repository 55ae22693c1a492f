"""PPO, as pure functions: `make_experience` judges a rollout, `update` learns from it.

The algorithm is that of Stiennon et al. (2020) as TRL and the N+ study (Huang et al. 2024) wrote it down; options
whose names are not the papers' are TRL's.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax import losses
from rlhf_jax.algorithms import microbatch, nonfinite
from rlhf_jax.algorithms.actor_critic import (
    Networks,
    evaluate_actor_critic,
    full_sequence,
    response_hidden,
    response_logprobs,
)
from rlhf_jax.algorithms.rollout_metrics import penalize_missing_eos
from rlhf_jax.losses import INVALID_LOGPROB
from rlhf_jax.parallel import sharding
from rlhf_jax.types import Array, Experience, Metrics, Params, Rollout, TrainState


def make_experience(
    nets: Networks,
    params: Params,
    ref_params: Params,
    rollout: Rollout,
    scores: Array,
    kl_coef: Array,
    config,
    eos_id: int,
    token_rewards: Array | None = None,
    scorable: Array | None = None,
) -> tuple[Experience, Metrics]:
    """Log-probabilities, values, rewards and advantages of a rollout (TRL ppo_trainer.py:693-798).

    Args:
      nets: the models.
      params: the trained params, as in TrainState.
      ref_params: the frozen reference policy.
      rollout: prompts and responses.
      scores: [B] float32, one a response.
      kl_coef: [] float32.
      config: a PPOConfig.
      eos_id: the tokenizer's eos, for the missing-eos penalty.
      token_rewards: [B, T] float32 dense rewards, added position by position; None: only the score.
      scorable: [B] bool; a row without a score gets length -1, so that it is in no mask: neither statistics nor
        gradient know of it. None: all have one.

    Returns:
      (Experience, metrics `objective/...`, `val/num_eos_tokens` and lengths; each [] float32)
    """
    tokens, mask = full_sequence(rollout)
    t = rollout.response.shape[1]
    lengths = rollout.lengths
    if scorable is not None:
        rollout = rollout.replace(lengths=jnp.where(scorable, rollout.lengths, -1))
        scores = jnp.where(scorable, scores, 0.0)
    present = rollout.lengths >= 0
    inside = adv.response_mask(rollout.lengths, t)
    valued = adv.value_mask(rollout.lengths, t)

    logprobs, ref_logprobs, values = judge(nets, params, ref_params, tokens, mask, t, config)
    if config.old_logprobs == "sampler":
        logprobs = rollout.logprobs
    # The same fill on both sides: KL 0 and ratio 1 outside the response.
    logprobs = jnp.where(inside, logprobs, INVALID_LOGPROB)
    ref_logprobs = jnp.where(inside, ref_logprobs, INVALID_LOGPROB)
    values = jnp.where(valued, values, 0.0)

    scores = penalize_missing_eos(scores, rollout, eos_id, config)
    kl = adv.kl_penalty(logprobs, ref_logprobs, config.kl_estimator)
    non_score_reward = -kl_coef * kl
    rewards = non_score_reward if token_rewards is None else non_score_reward + jnp.where(inside, token_rewards, 0.0)
    rewards = adv.place_scores(rewards, scores, rollout.lengths, config.score_position)
    # With the score on eos itself nothing lies after the response: its value there is 0, not the critic's guess.
    value_targets = valued if config.score_position == "after_eos" else inside
    values = jnp.where(value_targets, values, 0.0)
    if config.whiten_rewards:
        rewards = adv.masked_whiten(rewards, value_targets, shift_mean=False, ddof=config.whiten_ddof)
        rewards = jnp.where(value_targets, rewards, 0.0)
    advantages, returns = adv.gae(rewards, values, gamma=config.gamma, lam=config.lam)
    advantages = adv.masked_whiten(advantages, inside, ddof=config.whiten_ddof)
    advantages = jnp.where(inside, advantages, 0.0)

    experience = Experience(
        tokens=tokens,
        mask=mask,
        lengths=rollout.lengths,
        logprobs=logprobs,
        values=values,
        advantages=advantages,
        returns=returns,
    )
    mean_non_score = adv.masked_mean(jnp.sum(non_score_reward, axis=1), present)
    if token_rewards is not None:
        scores = scores + jnp.sum(jnp.where(inside, token_rewards, 0.0), axis=1)
    mean_score = adv.masked_mean(scores, present)
    eos = rollout.response == eos_id if config.metrics == "trl" else rollout.ended & (lengths >= 0)
    surprise = jnp.sum(jnp.where(inside, -logprobs, 0.0), axis=1)
    metrics = {
        "objective/kl": adv.masked_mean(jnp.sum(kl, axis=1), present),
        "objective/entropy": adv.masked_mean(surprise, present),
        "objective/non_score_reward": mean_non_score,
        "objective/rlhf_reward": mean_non_score + mean_score,
        "objective/scores": mean_score,
        "objective/scores_std": jnp.sqrt(adv.masked_var(scores, present, ddof=0)),
        "objective/kl_coef": kl_coef,
        "val/num_eos_tokens": jnp.sum(eos).astype(jnp.float32),
        "val/response_length": adv.masked_mean(lengths.astype(jnp.float32), lengths >= 0),
        "val/explained_variance": explained_variance(values, returns, value_targets),
    }
    return experience, metrics


def judge(
    nets: Networks, params: Params, ref_params: Params, tokens: Array, mask: Array, t: int, config
) -> tuple[Array, Array, Array]:
    """What the models say of prompts and responses, some rows at a time.

    Args:
      nets, params, ref_params: the trained models and the reference.
      tokens, mask: [B, C + T], of `full_sequence`.
      t: T.
      config: a PPOConfig.

    Returns:
      (log-probabilities, the reference's, values), each [B, T] float32; outside the response they mean nothing.
    """

    def look(rows):
        tokens, mask = rows
        logprobs, _, values = evaluate_actor_critic(nets, params, tokens, mask, t, config)
        ref_hidden = response_hidden(nets.ref, ref_params, tokens, mask, t, config)
        ref_logprobs, _ = response_logprobs(nets.ref, ref_params, ref_hidden, tokens[:, -t:], config.temperature)
        return logprobs, ref_logprobs, values

    return microbatch.by_prompt_length(
        look,
        (tokens, mask),
        prompt_lengths(mask, t),
        microbatch.rows_judged(config, tokens.shape[0]),
        lambda rows, width: last_columns(rows, width + t),
        microbatch.prompt_widths(config, tokens.shape[1] - t),
        nets.mesh,
    )


def prompt_lengths(mask: Array, t: int) -> Array:
    """Tokens of the prompts in mask [B, C + T]: [B] int32."""
    return jnp.sum(mask[:, :-t], axis=1)


def last_columns(rows: Any, width: int) -> Any:
    """The last `width` columns of each array of a pytree [b, S]."""
    return jax.tree.map(lambda x: x[:, -width:], rows)


def explained_variance(values: Array, returns: Array, mask: Array) -> Array:
    """1 - Var[returns - values] / Var[returns] over the mask: what the critic foresaw.

    Args:
      values, returns: [B, T] float32.
      mask: [B, T] bool.

    Returns:
      [] float32.
    """
    return 1.0 - adv.masked_var(returns - values, mask, ddof=0) / (adv.masked_var(returns, mask, ddof=0) + 1e-8)


def permutations(key: Array, epochs: int, rows: int) -> Array:
    """The shuffles of an update's episodes, one an epoch.

    Returns:
      [epochs, rows] int32.
    """
    return jax.vmap(lambda k: jax.random.permutation(k, rows))(jax.random.split(key, epochs))


def loss_and_metrics(nets: Networks, params: Params, micro: Experience, scale: dict[str, Array], config):
    """PPO's loss of one micro-batch: clipped policy loss + vf_coef * clipped value loss.

    Args:
      nets, params: the trained models.
      micro: an Experience of m rows.
      scale: {"policy", "value"}: weights [m, T] that turn per-token losses into this micro-batch's share of the
        minibatch's loss; {"count"}: response tokens of the whole minibatch; {"micros"}: micro-batches in it.
      config: a PPOConfig.

    Returns:
      (loss [], metrics to be summed over the micro-batches of a minibatch)
    """
    t = micro.logprobs.shape[1]
    inside = adv.response_mask(micro.lengths, t)
    valued = adv.value_mask(micro.lengths, t) if config.score_position == "after_eos" else inside
    logprobs, entropy, values = evaluate_actor_critic(nets, params, micro.tokens, micro.mask, t, config)
    logprobs = jnp.where(inside, logprobs, INVALID_LOGPROB)
    values = jnp.where(valued, values, 0.0)

    pg, pg_clipped, ratio = losses.policy_loss_terms(
        logprobs, micro.logprobs, micro.advantages, cliprange=config.cliprange
    )
    vf, vf_clipped = losses.value_loss_terms(
        values, micro.values, micro.returns, cliprange_value=config.cliprange_value
    )
    policy_loss = jnp.sum(jnp.where(inside, pg, 0.0) * scale["policy"])
    value_loss = jnp.sum(jnp.where(valued, vf, 0.0) * scale["value"])

    log_ratio = jax.lax.stop_gradient(logprobs - micro.logprobs)
    ratio = jax.lax.stop_gradient(ratio)
    if config.metrics == "trl":
        # Over all T columns, fill and all, averaged over micro-batches (ppo_trainer.py:857-868).
        def over_tokens(x):
            return jnp.mean(x) / scale["micros"]
    else:

        def over_tokens(x):
            return jnp.sum(jnp.where(inside, x, 0.0)) / scale["count"]

    metrics = {
        "policy/approxkl_avg": over_tokens(0.5 * jnp.square(log_ratio)),
        "policy/entropy_avg": over_tokens(entropy),
        "val/ratio": over_tokens(ratio),
        "policy/clipfrac_avg": jnp.sum(jnp.where(inside, pg_clipped, 0.0) * scale["policy"]),
        "val/clipfrac_avg": jnp.sum(jnp.where(valued, vf_clipped, 0.0) * scale["value"]),
        "loss/policy_avg": policy_loss,
        "loss/value_avg": value_loss,
    }
    ratio_error = jnp.max(jnp.where(inside, jnp.abs(ratio - 1.0), 0.0))
    return policy_loss + config.vf_coef * value_loss, (metrics, ratio_error)


def loss_weights(lengths: Array, t: int, config) -> dict[str, Array]:
    """What each token weighs in the loss of its minibatch, for all micro-batches at once.

    token_mean: 1 / tokens of the minibatch. token_mean_micro (TRL): 1 / (tokens of the micro-batch * micro-batches).
    seq_mean: 1 / (tokens of the row * rows).

    Args:
      lengths: [N, m] int32, response lengths by micro-batch.
      t: T.
      config: loss_aggregation, score_position.

    Returns:
      {"policy", "value"} [N, m, T] float32, {"count", "micros"} [N] float32.
    """
    n, m = lengths.shape
    flat = lengths.reshape(n * m)
    inside = adv.response_mask(flat, t)
    valued = adv.value_mask(flat, t) if config.score_position == "after_eos" else inside

    def weights(mask):
        mask = mask.reshape(n, m, t).astype(jnp.float32)
        if config.loss_aggregation == "token_mean":
            denominator = jnp.sum(mask, axis=(0, 1, 2), keepdims=True)
        elif config.loss_aggregation == "token_mean_micro":
            denominator = jnp.sum(mask, axis=(1, 2), keepdims=True)
        else:
            denominator = jnp.sum(mask, axis=2, keepdims=True)
        parts = {"token_mean": 1, "token_mean_micro": n, "seq_mean": n * m}[config.loss_aggregation]
        return jnp.broadcast_to(1.0 / (jnp.maximum(denominator, 1.0) * parts), (n, m, t))

    count = jnp.maximum(jnp.sum(inside).astype(jnp.float32), 1.0)
    return {
        "policy": weights(inside),
        "value": weights(valued),
        "count": jnp.full((n,), count),
        "micros": jnp.full((n,), float(n)),
    }


def look(nets: Networks, params: Params, experience: Experience, config) -> Metrics:
    """The metrics of the loss where nothing is learned: an evaluation's.

    Args:
      nets, params: the trained models.
      experience: from `make_experience`.
      config: a PPOConfig.

    Returns:
      As `update`'s, without what needs a step; each [] float32.
    """
    micros = sharding.spread_rows(microbatch.split_micro(experience, config.micro_batch_size), nets.mesh, axis=1)
    weights = loss_weights(micros.lengths, experience.logprobs.shape[1], config)

    def of(micro, index):
        part, scale = micro
        return loss_and_metrics(nets, params, part, scale, config)[1][0]

    return microbatch.total(of, (micros, weights))


def update(
    nets: Networks,
    optimizer,
    state: TrainState,
    experience: Experience,
    shuffles: Array,
    rate: Array,
    config,
    causes: Array | None = None,
    base: Params | None = None,
) -> tuple[TrainState, Metrics]:
    """All epochs of PPO on one batch of episodes: scans over epochs, minibatches and micro-batches.

    Args:
      nets: the models.
      optimizer: from `common.make_optimizer`.
      state: what is trained; donate it.
      experience: from `make_experience`.
      shuffles: [num_ppo_epochs, B] int32, the order of the rows in each epoch.
      rate: [] float32 learning rate of this update.
      config: a PPOConfig.
      causes: [] int32, of `guard.causes`: what was found to be not finite before; None: nothing.
      base: what adapters stand on (see `Networks`); None: the models are trained in full.

    Returns:
      (state after B episodes, metrics averaged over optimizer steps as TRL averages its stats arrays). Where something
      is not finite, or target_kl is passed, neither that step nor a later one is taken (see `guard`).
    """
    b = experience.lengths.shape[0]
    minibatch = b // config.num_mini_batches
    t = experience.logprobs.shape[1]

    causes = jnp.int32(0) if causes is None else causes
    causes |= not_finite(experience, config)
    of_prompts = prompt_lengths(experience.mask, t)
    widths = microbatch.prompt_widths(config, experience.tokens.shape[1] - t)

    def cut(micro, width):
        part, scale = micro
        tokens, mask = last_columns((part.tokens, part.mask), width + t)
        return part.replace(tokens=tokens, mask=mask), scale

    def minibatch_step(carry, rows):
        params, opt_state, alive = carry
        rows = rows[microbatch.together_by_length(of_prompts[rows], config)]
        batch, lengths = jax.tree.map(lambda x: x[rows], (experience, of_prompts))
        micros, lengths = microbatch.split_micro((batch, lengths), config.micro_batch_size)
        micros = sharding.spread_rows(micros, nets.mesh, axis=1)
        cuts = microbatch.Cuts(
            tuple(functools.partial(cut, width=w) for w in widths), microbatch.narrowest(lengths, widths)
        )
        weights = loss_weights(micros.lengths, t, config)
        n = micros.lengths.shape[0]

        def loss_fn(params, micro, index):
            part, scale = micro
            loss, (metrics, error) = loss_and_metrics(nets, nets.whole(base, params), part, scale, config)
            # A maximum cannot be summed: each micro-batch reports into its own slot. So does the ratio, whose
            # variance TRL takes over micro-batches.
            own = jnp.arange(n) == index
            spread = metrics["val/ratio"] * (n if config.metrics == "trl" else 1)
            return loss, (metrics, jnp.where(own, error, 0.0), jnp.where(own, spread, 0.0))

        grads, (metrics, errors, ratios) = microbatch.accumulate(loss_fn, params, (micros, weights), cuts)
        loss = metrics["loss/policy_avg"], metrics["loss/value_avg"]
        allowed = nonfinite.within(metrics["policy/approxkl_avg"], config)
        *carry, report = nonfinite.attempt(optimizer, params, opt_state, grads, rate, loss, alive, allowed)
        ratios = ratios if config.metrics == "trl" else metrics["val/ratio"][None]
        return tuple(carry), ({**metrics, **report}, jnp.max(errors), ratios)

    rows = shuffles[:, : minibatch * config.num_mini_batches].reshape(-1, minibatch)
    carry = (state.params, state.opt_state, nonfinite.may_learn(state, causes, config))
    (params, opt_state, _), (stats, errors, ratios) = jax.lax.scan(minibatch_step, carry, rows)
    metrics = nonfinite.over_steps(stats, config)
    metrics["nonfinite/causes"] |= causes
    metrics["val/ratio_var"] = microbatch.ratio_variance(ratios.reshape(-1), config.metrics)
    # Before anything was learned the ratio is 1 but for rounding: what the first optimizer step saw.
    metrics["val/first_ratio_error"] = errors[0]
    metrics["policy/first_approxkl"] = stats["policy/approxkl_avg"][0]
    trained = {"params": params, "opt_state": opt_state}
    return nonfinite.settle(state, metrics["nonfinite/causes"], config, trained, {"step": 1, "episodes": b}), metrics


def not_finite(experience: Experience, config) -> Array:
    """`guard.causes` of an experience, where it is read: [] int32."""
    t = experience.logprobs.shape[1]
    inside = adv.response_mask(experience.lengths, t)
    valued = adv.value_mask(experience.lengths, t) if config.score_position == "after_eos" else inside
    return nonfinite.causes(
        logprob=jnp.where(inside, experience.logprobs, 0.0),
        value=jnp.where(valued, experience.values, 0.0),
        advantage=jnp.where(inside, experience.advantages, 0.0),
        **{"return": jnp.where(valued, experience.returns, 0.0)},
    )


def control_kl(state: TrainState, kl: Array, config, episodes: int) -> TrainState:
    """The adaptive KL controller's move after an update (Ziegler et al. 2019, section 2.2); none when fixed.

    Args:
      state: with kl_coef.
      kl: [] float32, `objective/kl` of the update.
      config: kl_target, kl_horizon.
      episodes: episodes of the update.

    Returns:
      The state with its new kl_coef; the old one where the update was skipped or the new one would not be finite.
    """
    if config.kl_target is None:
        return state
    new = adv.adaptive_kl(state.kl_coef, kl, target=config.kl_target, horizon=config.kl_horizon, n_steps=episodes)
    return state.replace(kl_coef=jnp.where((state.nonfinite == 0) & jnp.isfinite(new), new, state.kl_coef))
