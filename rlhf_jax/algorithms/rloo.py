"""RLOO as pure functions: `make_experience` turns scored groups into advantages, `update` trains on them.

REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv 2402.14740; Kool et al. 2019), in the forms of
TRL's trainer, of its trainer before 0.22, and of the paper. Rows of a group are adjacent: row i answers prompt i // G.
A row of length -1 is absent: it pads a batch and is in no mean. Shapes: B = P * G rows, T response columns. Line
numbers are those of `trl/trainer/rloo_trainer.py` in TRL 1.12.0.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax import losses
from rlhf_jax.algorithms import microbatch, nonfinite
from rlhf_jax.algorithms.actor_critic import Models, group_logprobs
from rlhf_jax.algorithms.metric_forms import FORMS
from rlhf_jax.algorithms.optimizer import Optimizer
from rlhf_jax.algorithms.rollout_metrics import (
    group_rows,
    objective_metrics,
    penalize_missing_eos,
    reward_metrics,
    split_groups,
)
from rlhf_jax.parallel import sharding
from rlhf_jax.types import Array, GroupExperience, Metrics, Rollout, ScoredRollout, TrainState

# --- experience


def make_experience(
    models: Models, scored: ScoredRollout, *, config, kl_coef: Array | None = None
) -> tuple[GroupExperience, Metrics]:
    """Log-probabilities, KL, rewards and advantages of a rollout (rloo_trainer.py:1503-1606).

    Args:
      models: with whole params; reference None where beta is 0.
      scored: B rows, groups of `group_size` adjacent. A row without a score is in no baseline and gives no gradient.
      config: an RLOOConfig.
      kl_coef: not read: RLOO's is config.beta.

    Returns:
      (GroupExperience, metrics, each [] float32). With one row a group the advantage is 0 (an evaluation with G = 1).
    """
    del kl_coef
    form = FORMS[config.metrics]
    rollout, group_size = scored.rollout, scored.group_size
    t = rollout.response.shape[1]
    response_mask = adv.response_mask(rollout.lengths, t)
    present = rollout.lengths >= 0
    scorable = jnp.ones_like(present) if scored.scorable is None else scored.scorable
    masked = jnp.zeros_like(present)
    if config.mask_truncated_completions:  # TRL leaves their KL out too
        masked = ~rollout.ended & present
    trained_mask = response_mask & ~masked[:, None]
    experience = to_groups(rollout, group_size, lengths=jnp.where(masked, 0, rollout.lengths))

    logprobs, ref_logprobs = compute_logprobs(models, experience, config)
    if config.old_logprobs == "sampler":
        logprobs = rollout.logprobs
    logprobs = jnp.where(response_mask, logprobs, 0.0)
    ref_logprobs = logprobs if ref_logprobs is None else jnp.where(response_mask, ref_logprobs, 0.0)
    kl = jnp.where(trained_mask, adv.kl_penalty(logprobs, ref_logprobs, config.kl_estimator), 0.0)

    raw = jnp.where(scorable, scored.scores, 0.0)
    dense = jnp.zeros_like(kl)
    if scored.token_rewards is not None:
        dense = jnp.where(response_mask, scored.token_rewards, 0.0)
    scores = penalize_missing_eos(raw, rollout, scored.eos_ids, config) + dense.sum(axis=1)
    raw = raw + dense.sum(axis=1)
    if config.normalize_reward:
        scores, _ = adv.normalize(scores, scorable, 1e-8)
    if config.reward_clip_range is not None:
        low, high = clip_range(config.reward_clip_range)
        scores = jnp.clip(scores, low, high)
    penalty = config.beta * kl.sum(axis=1)
    rewards = scores - penalty

    keep = scorable
    if config.baseline_excludes_truncated:
        keep = keep & ~masked
    if group_size > 1:
        advantages = adv.leave_one_out(group_rows(rewards, group_size), group_rows(keep, group_size)).reshape(-1)
        keep = keep & (jnp.repeat(group_rows(keep, group_size).sum(axis=1), group_size) > 1)
    else:
        advantages = jnp.zeros_like(rewards)
    divisor = jnp.float32(1.0)
    if config.normalize_advantages:
        advantages, divisor = adv.normalize(advantages, keep, config.advantage_epsilon)
    advantages = form.zero_masked_rows(advantages, masked)
    if config.token_level_kl:
        # Dense rewards that were normalised or clipped with the score are no longer a sum over tokens.
        in_score = config.normalize_reward or config.reward_clip_range is not None
        earlier = adv.exclusive_cumsum((0.0 if in_score else dense) - config.beta * kl) / divisor
        advantages = jnp.where(trained_mask & keep[:, None], advantages[:, None] - earlier, 0.0)
    experience = experience.replace(
        logprobs=group_rows(logprobs, group_size), advantages=group_rows(advantages, group_size)
    )

    metrics = {
        **reward_metrics(raw, rewards, scorable, present, group_size, config),
        **objective_metrics(
            rollout,
            logprobs=logprobs,
            kl=kl,
            scores=scores,
            penalty=penalty,
            scorable=scorable,
            eos_ids=scored.eos_ids,
            config=config,
        ),
    }
    if models.reference is None:
        del metrics["objective/kl"]
    else:
        metrics["kl"] = adv.masked_mean(kl, trained_mask)
    return experience, metrics


def to_groups(rollout: Rollout, group_size: int, lengths: Array) -> GroupExperience:
    """The rows of a rollout by groups, with `lengths` [B] in place of the rollout's and advantages 0."""
    return GroupExperience(
        prompt_tokens=rollout.prompt_tokens[::group_size],
        prompt_lengths=rollout.prompt_lengths[::group_size],
        response=group_rows(rollout.response, group_size),
        mask=group_rows(rollout.response_mask, group_size),
        lengths=group_rows(lengths, group_size),
        logprobs=group_rows(rollout.logprobs, group_size),
        advantages=group_rows(jnp.zeros(lengths.shape, jnp.float32), group_size),
    )


def compute_logprobs(models: Models, experience: GroupExperience, config) -> tuple[Array, Array | None]:
    """Forward passes of policy and reference, `microbatch.forward_batch_size` rows at a time.

    Args:
      models: with whole params.
      experience: of `to_groups`.
      config: an RLOOConfig.

    Returns:
      (log-probabilities, the reference's or None), each [B, T] float32, undefined outside the response.
    """
    rows = experience if config.shared_prompts else split_groups(experience)
    (groups, size), t = rows.lengths.shape, rows.response.shape[2]
    policy, reference = models.policy, models.reference

    def forward_rows(rows: GroupExperience):
        logprobs, _ = group_logprobs(policy.model, policy.params, rows, config)
        if reference is None:
            return logprobs, logprobs
        return logprobs, group_logprobs(reference.model, reference.params, rows, config)[0]

    logprobs = microbatch.map_by_prompt_length(
        forward_rows,
        rows,
        lengths=rows.prompt_lengths,
        rows=microbatch.groups_per_chunk(microbatch.forward_batch_size(config, groups * size), size, groups),
        narrow=narrow_prompts,
        widths=microbatch.prompt_widths(config, rows.prompt_tokens.shape[1]),
        mesh=models.mesh,
    )
    logprobs, ref_logprobs = (x.reshape(-1, t) for x in logprobs)
    return logprobs, None if reference is None else ref_logprobs


def narrow_prompts(rows: GroupExperience, width: int) -> GroupExperience:
    """The same with the last `width` columns of the prompts."""
    return rows.replace(prompt_tokens=rows.prompt_tokens[:, -width:])


def clip_range(given: tuple[float, ...]) -> tuple[float, float]:
    """(low, high) of `reward_clip_range`: a single number is symmetric, as in TRL before 0.22."""
    return (-given[0], given[0]) if len(given) == 1 else (given[0], given[1])


# --- update


def update(
    models: Models,
    state: TrainState,
    experience: GroupExperience,
    *,
    config,
    optimizer: Optimizer,
    key: Array,
    causes: Array | None = None,
    orders: Array | None = None,
) -> tuple[TrainState, Metrics]:
    """All epochs of RLOO on one batch of groups: scans over optimizer steps and micro-batches.

    Args:
      models: without trained params, which are the state's.
      state: donate it. With sync_ref_model its ref_params move too.
      experience: from `make_experience`.
      config: an RLOOConfig.
      optimizer: see `Optimizer`.
      key: typed key of this update; it draws the order of the groups in each epoch, and dropout.
      causes: [] int32, `nonfinite.causes_of` the scores; None: all are finite.
      orders: [num_iterations, P] int32, the order of the groups in each epoch, in place of those that `key` draws.

    Returns:
      (state, metrics averaged over optimizer steps). Once something is not finite, or target_kl is passed, that step
      and all later ones are skipped, and the reference does not move (see `nonfinite`).
    """
    state, stats = update_steps(
        models, state, experience, config=config, optimizer=optimizer, key=key, causes=causes, orders=orders
    )
    return state, mean_over_steps(stats, config)


def update_steps(
    models: Models,
    state: TrainState,
    experience: GroupExperience,
    *,
    config,
    optimizer: Optimizer,
    key: Array,
    causes: Array | None = None,
    orders: Array | None = None,
) -> tuple[TrainState, Metrics]:
    """As `update`, with the metrics of each optimizer step: [steps] each."""
    (groups, size), t = experience.lengths.shape, experience.logprobs.shape[2]
    orders = permutations(key, config.num_iterations, groups, config.reshuffle) if orders is None else orders
    dropout_key = jax.random.fold_in(key, 1) if uses_dropout(models, config) else None
    if not shares_prompts(models, config):
        experience = split_groups(experience)
        orders = (orders[:, :, None] * size + jnp.arange(size)[None, None]).reshape(config.num_iterations, -1)
        groups, size = groups * size, 1
    groups_per_step = groups // config.num_mini_batches
    steps = steps_per_update(config)
    causes = jnp.int32(0) if causes is None else causes
    causes |= experience_causes(experience)

    def optimizer_step(carry, item):
        params, opt_state, ref_params, steps_enabled = carry
        rows, number = item
        minibatch = jax.tree.map(lambda x: x[rows], experience)
        loss_fn, micros, buckets = by_micro_batch(models, minibatch, config)
        dropout_keys = None
        if dropout_key is not None:
            dropout_keys = microbatch.row_keys(jax.random.fold_in(dropout_key, number), groups_per_step)
            dropout_keys = dropout_keys.reshape(micros.lengths.shape[0], -1)
        grads, (sums, extremes) = microbatch.accumulate_gradients(loss_fn, params, (micros, dropout_keys), buckets)
        metrics = step_metrics(sums, extremes, t, config)
        params, opt_state, steps_enabled, applied = nonfinite.apply_if_finite(
            optimizer,
            params,
            opt_state,
            grads,
            step=state.step * steps + number,
            loss=metrics["loss"],
            steps_enabled=steps_enabled,
            allowed=nonfinite.below_target_kl(metrics["policy/approxkl_avg"], config),
        )
        if config.sync_ref_model:
            due = steps_enabled & ((state.step * steps + number + 1) % config.ref_model_sync_steps == 0)
            ref_params = mix_reference(ref_params, params["policy"], due, config.ref_model_mixup_alpha)
        return (params, opt_state, ref_params, steps_enabled), {**metrics, **applied}

    rows = orders[:, : groups_per_step * config.num_mini_batches].reshape(steps, groups_per_step)
    carry = (state.params, state.opt_state, state.ref_params, nonfinite.updates_enabled(state, causes, config))
    (params, opt_state, ref_params, _), stats = jax.lax.scan(optimizer_step, carry, (rows, jnp.arange(steps)))
    # At most one step, or what came before them all, sets these bits: their sum is their union.
    stats["nonfinite/causes"] = stats["nonfinite/causes"].at[0].add(causes)
    state = nonfinite.finish_update(
        state,
        jnp.sum(stats["nonfinite/causes"]),
        config,
        trained={"params": params, "opt_state": opt_state, "ref_params": ref_params},
        counts={"step": 1, "episodes": groups * size},
    )
    return state, stats


def steps_per_update(config) -> int:
    """Optimizer steps of an update."""
    return config.num_iterations * config.num_mini_batches


def uses_dropout(models: Models, config) -> bool:
    """Whether updates apply dropout: the policy's, or that of its adapter."""
    rates, lora = models.policy.model.config, models.policy.model.lora
    rates = (rates.hidden_dropout, rates.attention_dropout, 0.0 if lora is None else lora.dropout)
    return not config.disable_dropout and max(rates) > 0


def shares_prompts(models: Models, config) -> bool:
    """Whether updates compute each prompt once for its G responses; with dropout each row has a mask of its own."""
    return config.shared_prompts and not uses_dropout(models, config)


def permutations(key: Array, epochs: int, groups: int, reshuffle: str) -> Array:
    """The order of an update's groups in each epoch: one order for all ('once'), or one each ('per_epoch').

    Returns:
      [epochs, groups] int32.
    """
    if reshuffle == "once":
        return jnp.tile(jax.random.permutation(key, groups)[None], (epochs, 1))
    return jax.vmap(lambda k: jax.random.permutation(k, groups))(jax.random.split(key, epochs))


def mix_reference(ref_params, params, due: Array, alpha: float):
    """alpha * params + (1 - alpha) * ref_params where `due` (TR-DPO, arXiv 2404.09656; TRL's sync_ref_model)."""
    alpha = jnp.where(due, alpha, 0.0)
    return jax.tree.map(lambda r, p: jnp.where(due, alpha * p + (1 - alpha) * r, r), ref_params, params)


def by_micro_batch(models: Models, minibatch: GroupExperience, config):
    """The loss of a minibatch in parts that can be summed.

    Args:
      models: without trained params.
      minibatch: p groups.
      config: an RLOOConfig.

    Returns:
      (function of (trained params, (micro-batch, dropout keys or None), index) -> (loss, sums and extremes [N] in the
      micro-batch's slot), micro-batches [N, ...], their WidthBuckets)
    """
    groups, size = minibatch.lengths.shape
    order = microbatch.sort_by_prompt_length(minibatch.prompt_lengths, config)
    minibatch = jax.tree.map(lambda x: x[order], minibatch)
    micros = microbatch.split_micro(minibatch, microbatch.groups_per_chunk(config.micro_batch_size, size, groups))
    micros = sharding.spread_rows(micros, models.mesh, axis=1)
    n = micros.lengths.shape[0]
    rows = jnp.maximum(jnp.sum(minibatch.lengths >= 0), 1).astype(jnp.float32)

    def loss_fn(params, item, index):
        micro, dropout_keys = item
        whole = models if params is None else models.with_trained(params)
        loss, (sums, extremes) = loss_and_metrics(whole, micro, rows, config, dropout_keys)
        # Extremes and means of means cannot be summed: each micro-batch writes into its own slot.
        slot = jnp.arange(n) == index
        return loss, jax.tree.map(lambda x: jnp.where(slot, x, 0.0), (sums, extremes))

    def narrow(item, width):
        micro, dropout_keys = item
        return narrow_prompts(micro, width), dropout_keys

    widths = microbatch.prompt_widths(config, micros.prompt_tokens.shape[2])
    functions = tuple(functools.partial(narrow, width=width) for width in widths)
    choice = microbatch.narrowest_width(micros.prompt_lengths, widths)
    return loss_fn, micros, microbatch.WidthBuckets(functions, choice)


def loss_and_metrics(models: Models, micro: GroupExperience, rows: Array, config, dropout_keys=None):
    """RLOO's loss of one micro-batch: its share of the mean over the responses of a minibatch.

    One action a response: max(-A r, -A clip(r)) with r = exp(sum of log-ratios). With token_level_kl the tokens are
    the actions: the same for each token, summed over the response. policy_loss='reinforce': -A log pi instead.

    Args:
      models: with whole params.
      micro: p groups.
      rows: [] float32, responses of the whole minibatch.
      config: an RLOOConfig.
      dropout_keys: [p] typed keys (G = 1 only); None: no dropout.

    Returns:
      (loss [], (sums over this micro-batch that metrics are made of, its extremes {"low", "high": clipping, "error":
        largest |ratio - 1| of a token}))
    """
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
    loss = jnp.sum(terms) / rows

    log_ratio, ratio = jax.lax.stop_gradient((log_ratio, ratio))
    present = micro.lengths >= 0
    counted = response_mask if token_level else present
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
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
    metrics = FORMS[config.metrics].rloo_step(sums, extremes, totals, t)
    low, high = totals["low"] / actions, totals["high"] / actions
    return {
        "loss": totals["loss"],
        **metrics,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "loss/policy_avg": totals["loss"],
        "policy/approxkl_avg": 0.5 * totals["squared_log_ratio"] / rows,
        "policy/clipfrac_avg": totals["clipped"] / actions,
        "val/clipfrac_avg": jnp.float32(0.0),
        "val/ratio": jnp.mean(metrics["ratios"]),
        "val/ratio_error": jnp.max(extremes["error"]),
    }


def mean_over_steps(stats: Metrics, config) -> Metrics:
    """The metrics of an update from those of its optimizer steps: means, and the variance of the ratio over them.

    Args:
      stats: of `update_steps`, [steps] each.
      config: metrics, target_kl.

    Returns:
      Each []; `val/first_ratio_error` and `policy/first_approxkl` are of the first step, before which nothing
      was trained.
    """
    ratios = stats["ratios"].reshape(-1)
    metrics = nonfinite.mean_over_steps({name: x for name, x in stats.items() if name != "ratios"}, config)
    metrics["val/ratio_var"] = FORMS[config.metrics].ratio_variance(ratios)
    metrics["val/first_ratio_error"] = stats["val/ratio_error"][0]
    metrics["policy/first_approxkl"] = stats["policy/approxkl_avg"][0]
    return metrics


def experience_causes(experience: GroupExperience) -> Array:
    """`nonfinite.causes_of` an experience, inside its mask: [] int32."""
    t, advantages = experience.logprobs.shape[2], experience.advantages
    response_mask = adv.response_mask(experience.lengths.reshape(-1), t).reshape(experience.logprobs.shape)
    advantages = jnp.where(response_mask, advantages, 0.0) if advantages.ndim == 3 else advantages
    return nonfinite.causes_of(logprob=jnp.where(response_mask, experience.logprobs, 0.0), advantage=advantages)


# --- evaluation


def eval_metrics(models: Models, experience: GroupExperience, *, config) -> Metrics:
    """The metrics of the loss without an update, for evaluation.

    Args:
      models: with whole params.
      experience: from `make_experience`.
      config: an RLOOConfig.

    Returns:
      As `update`'s of one step, without grad_norm; each [] float32.
    """
    experience = experience if shares_prompts(models, config) else split_groups(experience)
    loss_fn, micros, _ = by_micro_batch(models, experience, config)
    sums, extremes = microbatch.sum_over_micro_batches(
        lambda micro, index: loss_fn(None, (micro, None), index)[1], micros
    )
    metrics = step_metrics(sums, extremes, experience.logprobs.shape[2], config)
    return {name: x for name, x in metrics.items() if name not in ("ratios", "val/ratio_error")}
