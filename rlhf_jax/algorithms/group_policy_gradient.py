"""Policy gradients with several responses to each prompt and no critic: what RLOO, GRPO and their relatives share.

`make_experience` turns scored groups into advantages, `update` trains on them. An algorithm is an `Objective`: the
function from rewards to advantages, and the loss. Rows of a group are adjacent: row i answers prompt i // G. A row of
length -1 is absent: it pads a batch and is in no mean. Shapes: B = P * G rows, T response columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax.algorithms import microbatch, nonfinite, token_budget
from rlhf_jax.algorithms.actor_critic import Models, group_logprobs
from rlhf_jax.algorithms.metric_forms import FORMS
from rlhf_jax.algorithms.optimizer import Optimizer
from rlhf_jax.algorithms.rollout_metrics import (
    group_rows,
    objective_metrics,
    penalize_missing_eos,
    reward_metrics,
    sampling_metrics,
    split_groups,
)
from rlhf_jax.parallel import sharding
from rlhf_jax.types import Array, GroupExperience, Metrics, Params, Rollout, ScoredRollout, TrainState


class Rewards(NamedTuple):
    """What advantages are made of. Rows without a score have scores of 0."""

    scores: Array  # [B] float32, dense rewards and the missing-eos penalty included
    dense: Array  # [B, T] float32, rewards of tokens, 0 outside the response
    each: Array | None  # [B, F] float32, of `ScoredRollout`
    weights: tuple[float, ...] | None  # [F]
    kl: Array  # [B, T] float32, to the reference, 0 where a token is not trained on
    scorable: Array  # [B] bool
    masked: Array  # [B] bool, truncated responses that give no gradient
    trained_mask: Array  # [B, T] bool, tokens that are trained on
    lengths: Array  # [B] int32
    group_size: int


class Advantages(NamedTuple):
    """What an objective makes of `Rewards`."""

    advantages: Array  # [B] or [B, T] float32
    scores: Array  # [B] float32, for the metrics: what the KL penalty is subtracted from
    penalty: Array  # [B] float32, the KL penalty in the reward
    deviations: Array | None = None  # [B / G] float32, the standard deviations of `MetricForm.zero_std_groups`


class Needs(NamedTuple):
    """Which log-probabilities the loss of an objective reads from the experience."""

    logprobs: bool = True
    ref_logprobs: bool = False
    sampler_logprobs: bool = False


class Batch(NamedTuple):
    """Counts over the rows that one optimizer step, or the whole batch, is a mean over: each [] float32."""

    rows: Array  # responses of the minibatch
    tokens: Array  # response tokens of the minibatch that are trained on
    selected: Array  # those of them that `GroupExperience.selected` has
    share: Array  # response tokens of the whole batch that are trained on, over the number of minibatches
    micro_batches: int  # of the minibatch


class Objective(NamedTuple):
    """The equations of one algorithm.

    Attributes:
      advantages: (Rewards, config) -> Advantages.
      loss: (Models, micro-batch, Batch, config, dropout keys, entropy coefficient or None) -> (loss [], (sums,
        extremes)), a micro-batch's share of the minibatch's loss.
      step_metrics: (sums [N] each, extremes [N] each, T, config) -> metrics of an optimizer step.
      needs: config -> Needs.
      selects: config -> whether `select` must see the whole minibatch before the loss.
      select: (Models, minibatch, config, dropout keys) -> [p, G, T] bool, the tokens that the policy's loss is of.
      control: (entropy control [2], sums of a step [N] each, config) -> the control of the next step; None: none.
    """

    advantages: Callable
    loss: Callable
    step_metrics: Callable
    needs: Callable[[Any], Needs] = lambda config: Needs()
    selects: Callable[[Any], bool] = lambda config: False
    select: Callable | None = None
    control: Callable | None = None


# --- experience


def make_experience(
    models: Models, scored: ScoredRollout, *, config, objective: Objective, kl_coef: Array | None = None
) -> tuple[GroupExperience, Metrics]:
    """Log-probabilities, KL, rewards and advantages of a rollout (rloo_trainer.py:1503-1606 of TRL 1.12.0).

    Args:
      models: with whole params; reference None where beta is 0.
      scored: B rows, groups of `group_size` adjacent. A row without a score is in no baseline and gives no gradient.
      config: a GroupConfig.
      objective: of the algorithm.
      kl_coef: not read: the coefficient is config.beta.

    Returns:
      (GroupExperience, metrics, each [] float32). With one row a group (an evaluation) the advantage is 0, or with
      baseline 'none' the reward.
    """
    del kl_coef
    needs = objective.needs(config)
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
    experience = experience.replace(images=scored.images)

    logprobs, ref_logprobs = compute_logprobs(
        models, experience, config, policy=needs.logprobs, lengths=group_rows(rollout.lengths, group_size)
    )
    if config.old_logprobs == "sampler" or logprobs is None:
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
    made = objective.advantages(
        Rewards(
            scores=scores,
            dense=dense,
            each=scored.each_reward,
            weights=scored.reward_weights,
            kl=kl,
            scorable=scorable,
            masked=masked,
            trained_mask=trained_mask,
            lengths=rollout.lengths,
            group_size=group_size,
        ),
        config,
    )
    experience = experience.replace(
        logprobs=group_rows(logprobs, group_size) if needs.logprobs else None,
        advantages=group_rows(made.advantages, group_size),
    )
    if needs.ref_logprobs:
        experience = experience.replace(ref_logprobs=group_rows(ref_logprobs, group_size))
    if needs.sampler_logprobs:
        sampler_logprobs = jnp.where(response_mask, rollout.logprobs, 0.0)
        experience = experience.replace(sampler_logprobs=group_rows(sampler_logprobs, group_size))

    rewards = made.scores - made.penalty
    metrics = {
        **reward_metrics(raw, rewards, scorable, present, group_size, config, made.deviations),
        **objective_metrics(
            rollout,
            logprobs=logprobs,
            kl=kl,
            scores=made.scores,
            penalty=made.penalty,
            scorable=scorable,
            eos_ids=scored.eos_ids,
            config=config,
        ),
    }
    if config.old_logprobs == "forward" and not needs.sampler_logprobs:  # else the loss logs it
        metrics |= sampling_metrics(logprobs, rollout.logprobs, response_mask)
    if models.reference is None:
        del metrics["objective/kl"]
    elif not needs.ref_logprobs:  # else the loss logs it
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


def compute_logprobs(
    models: Models, experience: GroupExperience, config, policy: bool = True, lengths: Array | None = None
) -> tuple[Array | None, Array | None]:
    """Forward passes of policy and reference, `microbatch.forward_batch_size` rows or micro_batch_tokens tokens at a
    time.

    Args:
      models: with whole params.
      experience: of `to_groups`.
      config: a GroupConfig.
      policy: whether the policy's are computed.
      lengths: [P, G] int32, of the responses, with those of truncated ones; None: those of the experience.

    Returns:
      (log-probabilities or None, the reference's or None), each [B, T] float32, undefined outside the response.
    """
    networks = [models.policy if policy else None, models.reference]
    if networks == [None, None]:
        return None, None
    experience = experience if lengths is None else experience.replace(lengths=lengths)
    rows = experience if config.computes_groups else split_groups(experience)
    (groups, size), t = rows.lengths.shape, rows.response.shape[2]

    def forward_rows(rows: GroupExperience):
        return [group_logprobs(network.model, network.params, rows, config)[0] for network in networks if network]

    if config.micro_batch_tokens is not None:
        computed = token_budget.map_items(
            lambda item: forward_rows(item[0]), token_items(rows, config, mesh=models.mesh)
        )
    else:
        computed = microbatch.map_by_prompt_length(
            forward_rows,
            rows,
            lengths=rows.prompt_lengths,
            rows=microbatch.groups_per_chunk(microbatch.forward_batch_size(config, groups * size), size, groups),
            narrow=narrow_prompts,
            widths=microbatch.prompt_widths(config, rows.prompt_tokens.shape[1]),
            mesh=models.mesh,
        )
    computed = iter([x.reshape(-1, t) for x in computed])
    logprobs, ref_logprobs = (next(computed) if network else None for network in networks)
    return logprobs, ref_logprobs


def narrow_prompts(rows: GroupExperience, width: int) -> GroupExperience:
    """The same with the last `width` columns of the prompts."""
    return rows.replace(prompt_tokens=rows.prompt_tokens[:, -width:])


def token_items(rows: GroupExperience, config, *, mesh: Any, dropout_keys: Array | None = None) -> token_budget.Items:
    """Groups for micro-batches of micro_batch_tokens tokens.

    Args:
      rows: P groups.
      config: a GroupConfig.
      mesh: rows are sharded over it; None: one device.
      dropout_keys: [P] typed keys; None: no dropout.

    Returns:
      Items of which a micro-batch is (GroupExperience, dropout keys or None).
    """
    (groups, size), t, c = rows.lengths.shape, rows.response.shape[2], rows.prompt_tokens.shape[1]
    shapes = token_budget.shapes_of(config, items=groups, columns=c, t=t, group_size=size, mesh=mesh)

    def narrow(item, there, shape):
        rows, keys = item
        responses = jax.tree.map(lambda x: x[:, :, : shape.response] if x.ndim == 3 else x, rows)
        zero = jnp.where(there.reshape(-1, *[1] * (rows.advantages.ndim - 1)), responses.advantages, 0.0)
        absent = responses.replace(lengths=jnp.where(there[:, None], rows.lengths, -1), advantages=zero)
        return narrow_prompts(absent, shape.prompt), keys

    return token_budget.Items(
        (rows, dropout_keys), rows.prompt_lengths, jnp.max(rows.lengths, axis=1), shapes, narrow, mesh
    )


def clip_range(given: tuple[float, ...]) -> tuple[float, float]:
    """(low, high) of `reward_clip_range`: a single number is symmetric, as in TRL before 0.22."""
    return (-given[0], given[0]) if len(given) == 1 else (given[0], given[1])


def epsilon_high(config) -> float:
    """The upper clip range; default: the lower one."""
    return config.epsilon if config.epsilon_high is None else config.epsilon_high


# --- update


def update(
    models: Models,
    state: TrainState,
    experience: GroupExperience,
    *,
    config,
    objective: Objective,
    optimizer: Optimizer,
    key: Array,
    causes: Array | None = None,
    orders: Array | None = None,
) -> tuple[TrainState, Metrics]:
    """All epochs on one batch of groups: scans over optimizer steps and micro-batches.

    Args:
      models: without trained params, which are the state's.
      state: donate it. With sync_ref_model its ref_params move too, with use_adaptive_entropy its entropy_control.
      experience: from `make_experience`.
      config: a GroupConfig.
      objective: of the algorithm.
      optimizer: see `Optimizer`.
      key: typed key of this update; it draws the order of the groups in each epoch, and dropout.
      causes: [] int32, `nonfinite.causes_of` the scores; None: all are finite.
      orders: [num_iterations, P] int32, the order of the groups in each epoch, in place of those that `key` draws.

    Returns:
      (state, metrics averaged over optimizer steps). Once something is not finite, or target_kl is passed, that step
      and all later ones are skipped, and the reference does not move (see `nonfinite`).
    """
    state, stats = update_steps(
        models,
        state,
        experience,
        config=config,
        objective=objective,
        optimizer=optimizer,
        key=key,
        causes=causes,
        orders=orders,
    )
    return state, mean_over_steps(stats, config)


def update_steps(
    models: Models,
    state: TrainState,
    experience: GroupExperience,
    *,
    config,
    objective: Objective,
    optimizer: Optimizer,
    key: Array,
    causes: Array | None = None,
    orders: Array | None = None,
    share: Array | None = None,
) -> tuple[TrainState, Metrics]:
    """As `update`, with the metrics of each optimizer step: [steps] each.

    `share` is that of `by_micro_batch`, for an experience that is not the whole batch; None: it is.
    """
    (groups, size), t = experience.lengths.shape, experience.response.shape[2]
    orders = permutations(key, config.num_iterations, groups, config.reshuffle) if orders is None else orders
    dropout_key = jax.random.fold_in(key, _DROPOUT) if uses_dropout(models, config) else None
    if not (shares_prompts(models, config) and config.computes_groups):
        experience = split_groups(experience)
        orders = (orders[:, :, None] * size + jnp.arange(size)[None, None]).reshape(config.num_iterations, -1)
        groups, size = groups * size, 1
    groups_per_step = groups // config.num_mini_batches
    steps = steps_per_update(config)
    causes = jnp.int32(0) if causes is None else causes
    causes |= experience_causes(experience)
    share = trained_tokens(experience) / config.num_mini_batches if share is None else share

    def optimizer_step(carry, item):
        params, opt_state, ref_params, control, steps_enabled = carry
        rows, number = item
        minibatch = jax.tree.map(lambda x: x[rows], experience)
        dropout_keys = None
        if dropout_key is not None:
            dropout_keys = microbatch.row_keys(jax.random.fold_in(dropout_key, number), groups_per_step)
        grads, (sums, extremes) = minibatch_gradients(
            models,
            params,
            minibatch,
            config=config,
            objective=objective,
            share=share,
            entropy_coef=None if control is None else applied_entropy_coef(control, config),
            dropout_keys=dropout_keys,
        )
        metrics = objective.step_metrics(sums, extremes, t, config)
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
        if control is not None:
            control = jnp.where(steps_enabled, objective.control(control, sums, config), control)
            metrics["entropy_coef"] = control[0]
        return (params, opt_state, ref_params, control, steps_enabled), {**metrics, **applied}

    rows = orders[:, : groups_per_step * config.num_mini_batches].reshape(steps, groups_per_step)
    enabled = nonfinite.updates_enabled(state, causes, config)
    carry = (state.params, state.opt_state, state.ref_params, state.entropy_control, enabled)
    carry, stats = jax.lax.scan(optimizer_step, carry, (rows, jnp.arange(steps)))
    params, opt_state, ref_params, control, _ = carry
    # At most one step, or what came before them all, sets these bits: their sum is their union.
    stats["nonfinite/causes"] = stats["nonfinite/causes"].at[0].add(causes)
    trained = {"params": params, "opt_state": opt_state, "ref_params": ref_params, "entropy_control": control}
    state = nonfinite.finish_update(
        state,
        jnp.sum(stats["nonfinite/causes"]),
        config,
        trained=trained,
        counts={"step": 1, "episodes": groups * size},
    )
    return state, stats


def minibatch_gradients(
    models: Models,
    params: Params,
    minibatch: GroupExperience,
    *,
    config,
    objective: Objective,
    share: Array,
    entropy_coef: Array | None,
    dropout_keys: Array | None,
) -> tuple[Params, tuple[Metrics, Metrics]]:
    """Gradients of the objective on a minibatch, accumulated over its micro-batches.

    Args:
      models: without trained params.
      params: trained params.
      minibatch: p groups.
      config, objective, share, entropy_coef: as `by_micro_batch`.
      dropout_keys: [p] typed keys, in the order of the micro-batches' rows; None: no dropout.

    Returns:
      (gradients, (sums, extremes)) as `objective.step_metrics` takes them.
    """
    keys = dropout_keys
    if keys is not None and (objective.selects(config) or config.micro_batch_tokens is not None):
        # Keys of the rows in their order: `by_micro_batch` sorts the rows before the loss gives them their keys.
        keys = keys[jnp.argsort(microbatch.sort_by_prompt_length(minibatch.prompt_lengths, config))]
    if objective.selects(config):
        selected = objective.select(models.with_trained(params), minibatch, config, keys)
        minibatch = minibatch.replace(selected=selected)
    options = {"objective": objective, "share": share, "entropy_coef": entropy_coef}
    if config.micro_batch_tokens is not None:
        loss_fn, items = by_tokens(models, minibatch, config, dropout_keys=keys, **options)
        grads, (sums, extremes), used = token_budget.accumulate_gradients(loss_fn, params, items)
        return grads, (sums, jax.tree.map(lambda x: token_budget.unused_slots(x, used), extremes))
    loss_fn, micros, buckets = by_micro_batch(models, minibatch, config, **options)
    if dropout_keys is not None:
        dropout_keys = dropout_keys.reshape(micros.lengths.shape[0], -1)
    return microbatch.accumulate_gradients(loss_fn, params, (micros, dropout_keys), buckets)


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


def trained_tokens(experience: GroupExperience) -> Array:
    """Response tokens that are trained on: [] float32."""
    return jnp.sum(jnp.maximum(experience.lengths, 0)).astype(jnp.float32)


_DROPOUT = 1 << 16
"""Folded into an update's key for dropout: beyond the small numbers that splitting the key for the orders folds in."""


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


def applied_entropy_coef(control: Array, config) -> Array:
    """The adaptive coefficient, 0 while the entropy of the last optimizer step is above entropy_target: [] float32."""
    return jnp.where(control[1] <= config.entropy_target, control[0], 0.0)


def by_micro_batch(
    models: Models,
    minibatch: GroupExperience,
    config,
    *,
    objective: Objective,
    share: Array | None = None,
    entropy_coef: Array | None = None,
):
    """The loss of a minibatch in parts that can be summed.

    Args:
      models: without trained params.
      minibatch: p groups.
      config: a GroupConfig.
      objective: of the algorithm.
      share: [] float32, `Batch.share`, or [N], that of each micro-batch; None: the minibatch is the whole batch.
      entropy_coef: [] float32, the adaptive coefficient; None: it is the config's.

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
    loss_fn = loss_of_micro_batch(models, minibatch, config, n, objective=objective, share=share, coef=entropy_coef)

    def narrow(item, width):
        micro, dropout_keys = item
        return narrow_prompts(micro, width), dropout_keys

    widths = microbatch.prompt_widths(config, micros.prompt_tokens.shape[2])
    functions = tuple(functools.partial(narrow, width=width) for width in widths)
    choice = microbatch.narrowest_width(micros.prompt_lengths, widths)
    return loss_fn, micros, microbatch.WidthBuckets(functions, choice)


def by_tokens(
    models: Models,
    minibatch: GroupExperience,
    config,
    *,
    objective: Objective,
    share: Array | None = None,
    entropy_coef: Array | None = None,
    dropout_keys: Array | None = None,
):
    """`by_micro_batch` for micro-batches of micro_batch_tokens tokens.

    Args:
      models, minibatch, config, objective, share, entropy_coef: as there.
      dropout_keys: [p] typed keys; None: no dropout.

    Returns:
      (that function, items of the minibatch)
    """
    items = token_items(minibatch, config, mesh=models.mesh, dropout_keys=dropout_keys)
    n = token_budget.most_micro_batches(items)
    options = {"objective": objective, "share": share, "coef": entropy_coef}
    return loss_of_micro_batch(models, minibatch, config, n, **options), items


def loss_of_micro_batch(
    models: Models,
    minibatch: GroupExperience,
    config,
    n: int,
    *,
    objective: Objective,
    share: Array | None,
    coef: Array | None,
) -> Callable:
    """The function that `by_micro_batch` returns, for at most `n` micro-batches; `coef` is `entropy_coef` there."""
    tokens = trained_tokens(minibatch)
    batch = Batch(
        rows=jnp.maximum(jnp.sum(minibatch.lengths >= 0), 1).astype(jnp.float32),
        tokens=tokens,
        selected=tokens if minibatch.selected is None else jnp.sum(minibatch.selected).astype(jnp.float32),
        share=tokens if share is None else share,
        micro_batches=n,
    )

    def loss_fn(params, item, index):
        micro, dropout_keys = item
        whole = models if params is None else models.with_trained(params)
        of_micro = batch if batch.share.ndim == 0 else batch._replace(share=batch.share[index])
        loss, (sums, extremes) = objective.loss(whole, micro, of_micro, config, dropout_keys, coef)
        # Extremes and means of means cannot be summed: each micro-batch writes into its own slot.
        slot = jnp.arange(n) == index
        return loss, jax.tree.map(lambda x: jnp.where(slot, x, 0.0), (sums, extremes))

    return loss_fn


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
    t, advantages, logprobs = experience.response.shape[2], experience.advantages, experience.logprobs
    response_mask = adv.response_mask(experience.lengths.reshape(-1), t).reshape(experience.response.shape)
    advantages = jnp.where(response_mask, advantages, 0.0) if advantages.ndim == 3 else advantages
    logprobs = () if logprobs is None else jnp.where(response_mask, logprobs, 0.0)
    return nonfinite.causes_of(logprob=logprobs, advantage=advantages)


# --- evaluation


def eval_metrics(models: Models, experience: GroupExperience, *, config, objective: Objective) -> Metrics:
    """The metrics of the loss without an update, for evaluation.

    Args:
      models: with whole params.
      experience: from `make_experience`.
      config: a GroupConfig.
      objective: of the algorithm.

    Returns:
      As `update`'s of one step, without grad_norm and entropy_coef; each [] float32.
    """
    together = shares_prompts(models, config) and config.computes_groups
    experience = experience if together else split_groups(experience)
    if objective.selects(config):
        experience = experience.replace(selected=objective.select(models, experience, config, None))
    if config.micro_batch_tokens is not None:
        loss_fn, items = by_tokens(models, experience, config, objective=objective)
        (sums, extremes), used = token_budget.sum_over_micro_batches(
            lambda item, index: loss_fn(None, item, index)[1], items
        )
        extremes = jax.tree.map(lambda x: token_budget.unused_slots(x, used), extremes)
    else:
        loss_fn, micros, _ = by_micro_batch(models, experience, config, objective=objective)
        sums, extremes = microbatch.sum_over_micro_batches(
            lambda micro, index: loss_fn(None, (micro, None), index)[1], micros
        )
    metrics = objective.step_metrics(sums, extremes, experience.response.shape[2], config)
    unused = ("ratios", "val/ratio_error", "entropy_coef")
    return {name: x for name, x in metrics.items() if name not in unused}
