"""PPO as pure functions: `make_experience` turns a scored rollout into advantages, `update` trains on them.

The algorithm is that of Stiennon et al. (2020) as TRL and the N+ study (Huang et al. 2024) describe it; options
whose names are not the papers' are TRL's. Shapes: B rows, C prompt columns, T response columns.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax import losses
from rlhf_jax.algorithms import microbatch, nonfinite, token_budget
from rlhf_jax.algorithms.actor_critic import (
    Models,
    evaluate_actor_critic,
    full_sequence,
    response_hidden,
    response_logprobs,
)
from rlhf_jax.algorithms.metric_forms import FORMS
from rlhf_jax.algorithms.optimizer import Optimizer, is_critic
from rlhf_jax.algorithms.rollout_metrics import penalize_missing_eos, sampling_metrics
from rlhf_jax.losses import INVALID_LOGPROB
from rlhf_jax.parallel import sharding
from rlhf_jax.types import Array, Experience, Metrics, Params, ScoredRollout, TrainState

# --- experience


def make_experience(models: Models, scored: ScoredRollout, *, config, kl_coef: Array) -> tuple[Experience, Metrics]:
    """Log-probabilities, values, rewards and advantages of a rollout (TRL ppo_trainer.py:693-798).

    Args:
      models: with whole params.
      scored: the rollout and its scores. A row without a score gets length -1, which takes it out of every mask:
        neither statistics nor gradient include it.
      config: a PPOConfig.
      kl_coef: [] float32.

    Returns:
      (Experience, metrics `objective/...`, `val/num_eos_tokens` and lengths; each [] float32)
    """
    form = FORMS[config.metrics]
    rollout, token_rewards = scored.rollout, scored.token_rewards
    tokens, mask = full_sequence(rollout)
    t = rollout.response.shape[1]
    lengths, scores = rollout.lengths, scored.scores
    if scored.scorable is not None:
        rollout = rollout.replace(lengths=jnp.where(scored.scorable, lengths, -1))
        scores = jnp.where(scored.scorable, scores, 0.0)
    present = rollout.lengths >= 0
    response_mask = adv.response_mask(rollout.lengths, t)
    value_mask = adv.value_mask(rollout.lengths, t)

    logprobs, ref_logprobs, values = compute_logprobs_and_values(
        models, tokens, mask, t, config, lengths=rollout.lengths
    )
    if config.old_logprobs == "sampler":
        logprobs = rollout.logprobs
    # The same fill on both sides: KL 0 and ratio 1 outside the response.
    logprobs = jnp.where(response_mask, logprobs, INVALID_LOGPROB)
    ref_logprobs = jnp.where(response_mask, ref_logprobs, INVALID_LOGPROB)
    values = jnp.where(value_mask, values, 0.0)

    scores = penalize_missing_eos(scores, rollout, scored.eos_ids, config)
    kl = adv.kl_penalty(logprobs, ref_logprobs, config.kl_estimator)
    non_score_reward = -kl_coef * kl
    rewards = non_score_reward
    if token_rewards is not None:
        rewards = non_score_reward + jnp.where(response_mask, token_rewards, 0.0)
    rewards = adv.place_scores(rewards, scores, rollout.lengths, config.score_position)
    # With the score on eos nothing follows the response: the value there is 0, not the critic's estimate.
    value_targets = value_mask if config.score_position == "after_eos" else response_mask
    values = jnp.where(value_targets, values, 0.0)
    if config.whiten_rewards:
        rewards = adv.masked_whiten(rewards, value_targets, shift_mean=False, ddof=config.whiten_ddof)
        rewards = jnp.where(value_targets, rewards, 0.0)
    advantages, returns = advantages_and_returns(rewards, values, rollout.lengths, config)
    advantages = adv.masked_whiten(advantages, response_mask, ddof=config.whiten_ddof)
    advantages = jnp.where(response_mask, advantages, 0.0)

    experience = Experience(
        tokens=tokens,
        mask=mask,
        lengths=rollout.lengths,
        logprobs=logprobs,
        values=values,
        advantages=advantages,
        returns=returns,
        ref_logprobs=ref_logprobs if config.kl_loss_coef else None,
    )
    mean_non_score = adv.masked_mean(jnp.sum(non_score_reward, axis=1), present)
    if token_rewards is not None:
        scores = scores + jnp.sum(jnp.where(response_mask, token_rewards, 0.0), axis=1)
    mean_score = adv.masked_mean(scores, present)
    surprise = jnp.sum(jnp.where(response_mask, -logprobs, 0.0), axis=1)
    metrics = {
        "objective/kl": adv.masked_mean(jnp.sum(kl, axis=1), present),
        "objective/entropy": adv.masked_mean(surprise, present),
        "objective/non_score_reward": mean_non_score,
        "objective/rlhf_reward": mean_non_score + mean_score,
        "objective/scores": mean_score,
        "objective/scores_std": jnp.sqrt(adv.masked_var(scores, present, ddof=0)),
        "objective/kl_coef": kl_coef,
        "val/num_eos_tokens": form.eos_count(rollout, lengths >= 0, scored.eos_ids).astype(jnp.float32),
        "val/response_length": adv.masked_mean(lengths.astype(jnp.float32), lengths >= 0),
        "val/explained_variance": explained_variance(values, returns, value_targets),
    }
    if config.old_logprobs == "forward":
        metrics |= sampling_metrics(logprobs, rollout.logprobs, response_mask)
    return experience, metrics


def advantages_and_returns(rewards: Array, values: Array, lengths: Array, config) -> tuple[Array, Array]:
    """GAE of advantages and of the returns that the critic learns from, each with its own lambda (VAPO).

    Args:
      rewards, values: [B, T] float32.
      lengths: [B] int32, of the responses.
      config: gamma, lam, value_lam, adaptive_lam_alpha.

    Returns:
      (advantages, returns), each [B, T] float32.
    """
    adaptive, lam = config.adaptive_lam_alpha is not None, config.lam
    if adaptive:
        lam = adv.length_adaptive_lam(lengths, config.adaptive_lam_alpha)
    advantages, returns = adv.gae(rewards, values, gamma=config.gamma, lam=lam)
    if adaptive or config.value_lam is not None:
        value_lam = config.lam if config.value_lam is None else config.value_lam
        _, returns = adv.gae(rewards, values, gamma=config.gamma, lam=value_lam)
    return advantages, returns


def compute_logprobs_and_values(
    models: Models, tokens: Array, mask: Array, t: int, config, *, lengths: Array
) -> tuple[Array, Array, Array]:
    """Forward passes of policy, reference and value model, `microbatch.forward_batch_size` rows or micro_batch_tokens
    tokens at a time.

    Args:
      models: with whole params.
      tokens, mask: [B, C + T], of `full_sequence`.
      t: T.
      config: a PPOConfig.
      lengths: [B] int32, of the responses.

    Returns:
      (log-probabilities, the reference's, values), each [B, T] float32, undefined outside the response.
    """
    reference = models.reference

    def forward_rows(rows, t=t):
        tokens, mask = rows
        logprobs, _, values = evaluate_actor_critic(models, tokens, mask, t, config)
        ref_hidden = response_hidden(reference.model, reference.params, tokens, mask, t, config)
        ref_logprobs, _ = response_logprobs(
            reference.model, reference.params, ref_hidden, tokens[:, -t:], config.temperature
        )
        return logprobs, ref_logprobs, values

    if config.micro_batch_tokens is not None:
        c = tokens.shape[1] - t

        def narrow(rows, there, shape):
            return response_columns(rows, c, shape), shape.response

        items = token_items((tokens, mask), prompt_lengths(mask, t), lengths, t, config, narrow, models.mesh)
        return token_budget.map_items(lambda item: forward_rows(*item), items)
    return microbatch.map_by_prompt_length(
        forward_rows,
        (tokens, mask),
        lengths=prompt_lengths(mask, t),
        rows=microbatch.forward_batch_size(config, tokens.shape[0]),
        narrow=lambda rows, width: last_columns(rows, width + t),
        widths=microbatch.prompt_widths(config, tokens.shape[1] - t),
        mesh=models.mesh,
    )


def prompt_lengths(mask: Array, t: int) -> Array:
    """Tokens of the prompts in mask [B, C + T]: [B] int32."""
    return jnp.sum(mask[:, :-t], axis=1)


def last_columns(rows: Any, width: int) -> Any:
    """The last `width` columns of each array of a pytree [b, S]."""
    return jax.tree.map(lambda x: x[:, -width:], rows)


def response_columns(rows: Any, c: int, shape: token_budget.Shape) -> Any:
    """The columns of a shape, of a pytree [b, C + T]: the last of the prompt's and the first of the response's."""
    return jax.tree.map(lambda x: x[:, c - shape.prompt : c + shape.response], rows)


def token_items(
    batch: Any, prompts: Array, lengths: Array, t: int, config, narrow: Any, mesh: Any
) -> token_budget.Items:
    """Rows for micro-batches of micro_batch_tokens tokens.

    Args:
      batch: pytree [B, ...], whose first leaf is [B, C + T].
      prompts, lengths: [B] int32, of prompts and responses.
      t: T.
      config: a PPOConfig.
      narrow, mesh: see `token_budget.Items`.
    """
    rows, width = jax.tree.leaves(batch)[0].shape
    # One column more than the response: with the score after eos a value follows it.
    columns = jnp.where(lengths < 0, -1, jnp.minimum(lengths + 1, t))
    shapes = token_budget.shapes_of(config, items=rows, columns=width - t, t=t, mesh=mesh)
    return token_budget.Items(batch, prompts, columns, shapes, narrow, mesh)


def explained_variance(values: Array, returns: Array, mask: Array) -> Array:
    """1 - Var[returns - values] / Var[returns] over the mask: the share of the returns that the critic predicts.

    Args:
      values, returns: [B, T] float32.
      mask: [B, T] bool.

    Returns:
      [] float32.
    """
    return 1.0 - adv.masked_var(returns - values, mask, ddof=0) / (adv.masked_var(returns, mask, ddof=0) + 1e-8)


# --- update


def update(
    models: Models,
    state: TrainState,
    experience: Experience,
    *,
    config,
    optimizer: Optimizer,
    key: Array,
    causes: Array | None = None,
    orders: Array | None = None,
) -> tuple[TrainState, Metrics]:
    """All epochs of PPO on one batch of episodes: scans over epochs, minibatches and micro-batches.

    Args:
      models: without trained params, which are the state's.
      state: donate it.
      experience: from `make_experience`.
      config: a PPOConfig.
      optimizer: see `Optimizer`.
      key: typed key of this update; it draws the order of the rows in each epoch.
      causes: [] int32, `nonfinite.causes_of` the scores; None: all are finite.
      orders: [num_ppo_epochs, B] int32, the order of the rows in each epoch, in place of those that `key` draws.

    Returns:
      (state after B episodes, metrics averaged over optimizer steps as TRL averages its stats arrays). Once something
      is not finite, or target_kl is passed, that step and all later ones are skipped (see `nonfinite`).
    """
    form = FORMS[config.metrics]
    b, t = experience.logprobs.shape
    minibatch_size = b // config.num_mini_batches
    orders = permutations(key, config.num_ppo_epochs, b) if orders is None else orders
    causes = jnp.int32(0) if causes is None else causes
    causes |= experience_causes(experience, config)
    prompts = prompt_lengths(experience.mask, t)
    steps = steps_per_update(config)

    def optimizer_step(carry, item):
        params, opt_state, steps_enabled = carry
        rows, number = item
        grads, (metrics, ratio_errors, ratios) = minibatch_gradients(
            models, params, experience, rows, prompts=prompts, config=config
        )
        if config.critic_warmup_steps:
            grads = critic_gradients(grads, state.step < config.critic_warmup_steps)
        *carry, step_metrics = nonfinite.apply_if_finite(
            optimizer,
            params,
            opt_state,
            grads,
            step=state.step * steps + number,
            loss=[value for name, value in metrics.items() if name.startswith("loss/")],
            steps_enabled=steps_enabled,
            allowed=nonfinite.below_target_kl(metrics["policy/approxkl_avg"], config),
        )
        ratios = form.ratio_samples(metrics["val/ratio"], ratios)
        return tuple(carry), ({**metrics, **step_metrics}, jnp.max(ratio_errors), ratios)

    rows = orders[:, : minibatch_size * config.num_mini_batches].reshape(steps, minibatch_size)
    carry = (state.params, state.opt_state, nonfinite.updates_enabled(state, causes, config))
    (params, opt_state, _), (stats, ratio_errors, ratios) = jax.lax.scan(
        optimizer_step, carry, (rows, jnp.arange(steps))
    )
    metrics = nonfinite.mean_over_steps(stats, config)
    metrics["nonfinite/causes"] |= causes
    metrics["val/ratio_var"] = form.ratio_variance(ratios.reshape(-1))
    # Of the first optimizer step: before it the ratio is 1 but for rounding.
    metrics["val/first_ratio_error"] = ratio_errors[0]
    metrics["policy/first_approxkl"] = stats["policy/approxkl_avg"][0]
    state = nonfinite.finish_update(
        state,
        metrics["nonfinite/causes"],
        config,
        trained={"params": params, "opt_state": opt_state},
        counts={"step": 1, "episodes": b},
    )
    return state, metrics


def minibatch_gradients(
    models: Models, params: Params, experience: Experience, rows: Array, *, prompts: Array, config
) -> tuple[Params, tuple[Metrics, Array, Array]]:
    """Gradients of PPO's loss on a minibatch, accumulated over its N micro-batches.

    Args:
      models: without trained params.
      params: trained params.
      experience: of the whole batch of B rows.
      rows: [M] int32, those of the minibatch.
      prompts: [B] int32, lengths of the prompts.
      config: a PPOConfig.

    Returns:
      (gradients, (metrics of the minibatch, first_ratio_error of each micro-batch [N], mean ratio of each [N]))
    """
    t = experience.logprobs.shape[1]

    def loss_of(params, micro, scale, index, n):
        loss, (metrics, ratio_error) = loss_and_metrics(models.with_trained(params), micro, scale, config)
        # Maxima and the ratios of micro-batches cannot be summed: each micro-batch writes into its own slot.
        slot = jnp.arange(n) == index
        return loss, (metrics, jnp.where(slot, ratio_error, 0.0), jnp.where(slot, metrics["val/ratio"], 0.0))

    if config.micro_batch_tokens is not None:
        batch, prompts = jax.tree.map(lambda x: x[rows], (experience, prompts))
        items, weights = loss_items(models, batch, prompts, config)
        n = token_budget.most_micro_batches(items)
        grads, of_micros, _ = token_budget.accumulate_gradients(
            lambda params, item, index: loss_of(params, item[0], item[1] | weights, index, n), params, items
        )
        return grads, of_micros

    def narrow(micro, width):
        micro, scale = micro
        tokens, mask = last_columns((micro.tokens, micro.mask), width + t)
        return micro.replace(tokens=tokens, mask=mask), scale

    rows = rows[microbatch.sort_by_prompt_length(prompts[rows], config)]
    batch, prompts = jax.tree.map(lambda x: x[rows], (experience, prompts))
    micros, prompts = microbatch.split_micro((batch, prompts), config.micro_batch_size)
    micros = sharding.spread_rows(micros, models.mesh, axis=1)
    widths = microbatch.prompt_widths(config, experience.tokens.shape[1] - t)
    buckets = microbatch.WidthBuckets(
        tuple(functools.partial(narrow, width=width) for width in widths), microbatch.narrowest_width(prompts, widths)
    )
    weights = loss_weights(micros.lengths, t, config)
    n = micros.lengths.shape[0]
    return microbatch.accumulate_gradients(
        lambda params, item, index: loss_of(params, *item, index, n), params, (micros, weights), buckets
    )


def loss_items(models: Models, batch: Experience, prompts: Array, config) -> tuple[token_budget.Items, dict]:
    """A minibatch for micro-batches of micro_batch_tokens tokens.

    Args:
      models: their mesh.
      batch: the minibatch, M rows.
      prompts: [M] int32, lengths of the prompts.
      config: a PPOConfig.

    Returns:
      (items of which a micro-batch is an Experience and the weights {"policy", "value"} of its tokens; {"count",
      "micros"}, [] each: the rest of `loss_weights`)
    """
    t = batch.logprobs.shape[1]
    c = batch.tokens.shape[1] - t
    weights = jax.tree.map(lambda x: x[0], loss_weights(batch.lengths[None], t, config))
    by_token = {name: weights.pop(name) for name in ("policy", "value")}

    def narrow(item, there, shape):
        rows, scale = item
        tokens, mask = response_columns((rows.tokens, rows.mask), c, shape)
        lengths = jnp.where(there, rows.lengths, -1)
        of_response = (rows.replace(tokens=None, mask=None, lengths=None), scale)
        rows, scale = jax.tree.map(lambda x: x[:, : shape.response], of_response)
        return rows.replace(tokens=tokens, mask=mask, lengths=lengths), scale

    return token_items((batch, by_token), prompts, batch.lengths, t, config, narrow, models.mesh), weights


def steps_per_update(config) -> int:
    """Optimizer steps of an update."""
    return config.num_ppo_epochs * config.num_mini_batches


def permutations(key: Array, epochs: int, rows: int) -> Array:
    """The order of an update's episodes in each epoch.

    Returns:
      [epochs, rows] int32.
    """
    return jax.vmap(lambda k: jax.random.permutation(k, rows))(jax.random.split(key, epochs))


def critic_gradients(grads: Any, warming_up: Array) -> Any:
    """Gradients of the trained params, with 0 for all but the critic's while `warming_up` ([] bool)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, g: g if is_critic(path) else jnp.where(warming_up, jnp.zeros_like(g), g), grads
    )


def loss_and_metrics(models: Models, micro: Experience, scale: dict[str, Array], config):
    """PPO's loss of one micro-batch: clipped policy loss + vf_coef * clipped value loss, and if their coefficients are
    set, + kl_loss_coef * KL to the reference - entropy_coef * entropy.

    Args:
      models: with whole params.
      micro: an Experience of m rows.
      scale: {"policy", "value"}: weights [m, T] that turn per-token losses into this micro-batch's share of the
        minibatch's loss; {"count"}: response tokens of the whole minibatch; {"micros"}: micro-batches in it.
      config: a PPOConfig.

    Returns:
      (loss [], (metrics to be summed over the micro-batches of a minibatch, largest |ratio - 1| []))
    """
    form = FORMS[config.metrics]
    t = micro.logprobs.shape[1]
    response_mask = adv.response_mask(micro.lengths, t)
    value_mask = adv.value_mask(micro.lengths, t) if config.score_position == "after_eos" else response_mask
    logprobs, entropy, values = evaluate_actor_critic(models, micro.tokens, micro.mask, t, config)
    logprobs = jnp.where(response_mask, logprobs, INVALID_LOGPROB)
    values = jnp.where(value_mask, values, 0.0)

    policy_losses, policy_clipped, ratio = losses.policy_loss_terms(
        logprobs,
        micro.logprobs,
        micro.advantages,
        cliprange=config.cliprange,
        cliprange_high=config.epsilon_high,
    )
    if config.dual_clip is not None:
        policy_losses, lower_clipped = losses.dual_clip_terms(
            policy_losses, micro.advantages, dual_clip=config.dual_clip
        )
    value_losses, value_clipped = losses.value_loss_terms(
        values, micro.values, micro.returns, cliprange_value=config.cliprange_value
    )
    policy_loss = jnp.sum(jnp.where(response_mask, policy_losses, 0.0) * scale["policy"])
    value_loss = jnp.sum(jnp.where(value_mask, value_losses, 0.0) * scale["value"])

    log_ratio = jax.lax.stop_gradient(logprobs - micro.logprobs)
    ratio = jax.lax.stop_gradient(ratio)
    metrics = {
        "policy/approxkl_avg": form.token_mean(0.5 * jnp.square(log_ratio), response_mask, scale),
        "policy/entropy_avg": form.token_mean(entropy, response_mask, scale),
        "val/ratio": form.token_mean(ratio, response_mask, scale),
        "policy/clipfrac_avg": jnp.sum(jnp.where(response_mask, policy_clipped, 0.0) * scale["policy"]),
        "val/clipfrac_avg": jnp.sum(jnp.where(value_mask, value_clipped, 0.0) * scale["value"]),
        "loss/policy_avg": policy_loss,
        "loss/value_avg": value_loss,
    }
    loss = policy_loss + config.vf_coef * value_loss

    def policy_mean(x):
        return jnp.sum(jnp.where(response_mask, x, 0.0) * scale["policy"])

    if config.dual_clip is not None:
        metrics["policy/clipfrac_lower_avg"] = policy_mean(lower_clipped)
    if config.kl_loss_coef:
        kl = adv.kl_penalty(logprobs, micro.ref_logprobs, config.kl_loss_estimator)
        metrics["loss/kl_avg"] = policy_mean(kl)
        loss = loss + config.kl_loss_coef * metrics["loss/kl_avg"]
    if config.entropy_coef:
        loss = loss - config.entropy_coef * policy_mean(entropy)
    ratio_error = jnp.max(jnp.where(response_mask, jnp.abs(ratio - 1.0), 0.0))
    return loss, (metrics, ratio_error)


def loss_weights(lengths: Array, t: int, config) -> dict[str, Array]:
    """The weight of each token in the loss of its minibatch, for all micro-batches.

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
    response_mask = adv.response_mask(flat, t)
    value_mask = adv.value_mask(flat, t) if config.score_position == "after_eos" else response_mask

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

    count = jnp.maximum(jnp.sum(response_mask).astype(jnp.float32), 1.0)
    return {
        "policy": weights(response_mask),
        "value": weights(value_mask),
        "count": jnp.full((n,), count),
        "micros": jnp.full((n,), float(n)),
    }


def experience_causes(experience: Experience, config) -> Array:
    """`nonfinite.causes_of` an experience, inside its masks: [] int32."""
    t = experience.logprobs.shape[1]
    response_mask = adv.response_mask(experience.lengths, t)
    value_mask = adv.value_mask(experience.lengths, t) if config.score_position == "after_eos" else response_mask
    logprobs = [x for x in (experience.logprobs, experience.ref_logprobs) if x is not None]
    return nonfinite.causes_of(
        logprob=[jnp.where(response_mask, x, 0.0) for x in logprobs],
        value=jnp.where(value_mask, experience.values, 0.0),
        advantage=jnp.where(response_mask, experience.advantages, 0.0),
        **{"return": jnp.where(value_mask, experience.returns, 0.0)},
    )


def adapt_kl_coef(state: TrainState, metrics: Metrics, config) -> TrainState:
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


# --- evaluation


def eval_metrics(models: Models, experience: Experience, *, config) -> Metrics:
    """The metrics of the loss without an update, for evaluation.

    Args:
      models: with whole params.
      experience: from `make_experience`.
      config: a PPOConfig.

    Returns:
      As `update`'s, without those that need an optimizer step; each [] float32.
    """
    if config.micro_batch_tokens is not None:
        items, weights = loss_items(
            models, experience, prompt_lengths(experience.mask, experience.logprobs.shape[1]), config
        )
        return token_budget.sum_over_micro_batches(
            lambda item, index: loss_and_metrics(models, item[0], item[1] | weights, config)[1][0], items
        )[0]
    micros = microbatch.split_micro(experience, config.micro_batch_size)
    micros = sharding.spread_rows(micros, models.mesh, axis=1)
    weights = loss_weights(micros.lengths, experience.logprobs.shape[1], config)

    def metrics_of(item, index):
        micro, scale = item
        return loss_and_metrics(models, micro, scale, config)[1][0]

    return microbatch.sum_over_micro_batches(metrics_of, (micros, weights))
