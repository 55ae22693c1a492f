"""The trainer of PPO, RLOO, GRPO and algorithms of users: policy gradients on sampled responses.

`make_experience` turns a scored rollout into advantages, `update` trains on them. An algorithm is an `Objective`: the
function from rewards to advantages, and the loss of a micro-batch. Rows of a group are adjacent: row i answers prompt
i // G. A row of length -1 is absent: it pads a batch and is in no mean. Shapes: B = P * G rows, C prompt columns, T
response columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax.algorithms import microbatch, nonfinite
from rlhf_jax.algorithms.groups import (
    group_rollout,
    group_rows,
    narrow,
    sampled_mask,
    split_groups,
    without_absent,
)
from rlhf_jax.algorithms.metrics import objective_metrics, reward_metrics, sampling_metrics
from rlhf_jax.algorithms.microbatch import MicroBatches, Tally, loss_scale, value_and_gradient
from rlhf_jax.algorithms.networks import Models
from rlhf_jax.algorithms.optimizer import Optimizer
from rlhf_jax.algorithms.optimizer_options import OptimizerOptions
from rlhf_jax.algorithms.options import BatchOptions, PolicyGradientOptions
from rlhf_jax.algorithms.response_logprobs import response_logprobs
from rlhf_jax.algorithms.rloo_options import GroupOptions
from rlhf_jax.types import Array, Experience, Metrics, Params, Rollout, ScoredRollout, TrainState


class Rewards(NamedTuple):
    """What advantages are made of. Rows without a score have scores of 0."""

    scores: Array  # [B] float32, dense rewards and the missing-eos penalty included
    response_scores: Array  # [B] float32, without dense rewards
    raw: Array  # [B] float32, as the rewards returned them, dense ones included
    dense: Array  # [B, T] float32, rewards of tokens, 0 where none was sampled
    each: Array | None  # [B, F] float32, of `ScoredRollout`
    weights: tuple[float, ...] | None  # [F]
    kl: Array  # [B, T] float32, to the reference, 0 where a token is not trained on
    kl_coef: Array  # [] float32, where a controller adapts it
    values: Array | None  # [B, T] float32, undefined outside the response
    present: Array  # [B] bool
    scorable: Array  # [B] bool
    masked: Array  # [B] bool, truncated responses that give no gradient
    trained_mask: Array  # [B, T] bool, tokens that are trained on
    lengths: Array  # [B] int32
    group_size: int
    sampled: Array | None = None  # [B, T] bool, of `Rollout`


class Advantages(NamedTuple):
    """What an objective makes of `Rewards`."""

    advantages: Array  # [B] or [B, T] float32
    scores: Array  # [B] float32, for the metrics: what the KL penalty is subtracted from
    penalty: Array  # [B] float32, the KL penalty in the reward
    values: Array | None = None  # [B, T] float32 of the critic before the update; so are returns
    returns: Array | None = None
    value_mask: Array | None = None  # [B, T] bool, positions that the critic is trained on


class Needs(NamedTuple):
    """What an objective needs of a rollout."""

    logprobs: bool = True  # of the behavior policy, in the loss
    ref_logprobs: bool = False  # in the loss
    sampler_logprobs: bool = False  # in the loss
    values: bool = False  # of a critic
    scores: bool = False  # of every row: one without a score is absent


class Counts(NamedTuple):
    """Counts over the minibatch of an optimizer step, which the losses of its micro-batches are divided by."""

    rows: Array  # [] float32, responses that are present
    tokens: Array  # [] float32, tokens that are trained on
    selected: Array  # [] float32, those of them that `Experience.selected` has
    values: Array  # [] float32, positions that the critic is trained on
    batch_tokens: Array  # [] float32, tokens of the whole batch that are trained on, over the number of minibatches
    size: int  # rows, absent ones included
    micro_batches: int | None


def group_metrics(rewards: Rewards, result: Advantages, config: PolicyGradientOptions) -> Metrics:
    """`reward`, `reward_std` and `frac_reward_zero_std` of a rollout."""
    optimised = result.scores - result.penalty
    return reward_metrics(rewards.raw, optimised, rewards.scorable, rewards.present, rewards.group_size)


class Objective(NamedTuple):
    """The equations of one algorithm. All are pure.

    Attributes:
      advantages: (Rewards, config) -> Advantages.
      loss: (Models, micro-batch, Counts, config, entropy coefficient or None) -> (loss [], (Tally, token arrays
        [p, G, T] by name)): a micro-batch's share of the minibatch's loss, and what its metrics are made of.
        `ratio_error` in Tally.greatest is the largest |ratio - 1| of a token.
      step_metrics: (Tally of a minibatch, config) -> metrics of an optimizer step. target_kl reads
        `policy/approxkl_avg`.
      needs: config -> Needs.
      rollout_metrics: (Rewards, Advantages, config) -> metrics of a rollout, beside `objective/...`.
      select: (Models, minibatch, config) -> [p, G, T] bool, the tokens that the policy's loss is of; None: all.
      control: (entropy control [2], Tally, config) -> the control of the next optimizer step; None: none.
      mask_gradients: (gradients, number of the update [] int32, config) -> gradients.
    """

    advantages: Callable
    loss: Callable
    step_metrics: Callable = lambda tally, config: tally.sums
    needs: Callable[[Any], Needs] = lambda config: Needs()
    rollout_metrics: Callable = group_metrics
    select: Callable = lambda models, minibatch, config: None
    control: Callable | None = None
    mask_gradients: Callable = lambda grads, update, config: grads


# --- experience


def make_experience(
    models: Models,
    scored: ScoredRollout,
    *,
    config: PolicyGradientOptions,
    objective: Objective,
    kl_coef: Array | float = 0.0,
) -> tuple[Experience, Metrics]:
    """Log-probabilities, values, KL, rewards and advantages of a rollout (TRL ppo_trainer.py:693-798,
    rloo_trainer.py:1503-1606).

    Args:
      models: with whole params; reference None where there is no KL.
      scored: B rows, groups of `group_size` adjacent. A row without a score is in no baseline and gives no gradient.
      kl_coef: [] float32, of the controller.

    Returns:
      (Experience, metrics, each [] float32).
    """
    needs, rollout, group_size = objective.needs(config), scored.rollout, scored.group_size
    scorable = jnp.ones_like(rollout.ended) if scored.scorable is None else scored.scorable
    ended = jnp.sum(rollout.ended & (rollout.lengths >= 0))
    if needs.scores:
        rollout = rollout.replace(lengths=jnp.where(scorable, rollout.lengths, -1))
        scorable &= rollout.lengths >= 0
    present = rollout.lengths >= 0
    response_mask = sampled_mask(rollout)
    masked = jnp.zeros_like(present)
    if config.mask_truncated_completions:  # TRL leaves their KL out too
        masked = ~rollout.ended & present
    trained_mask = response_mask & ~masked[:, None]

    experience = group_rollout(
        rollout, group_size, trained_mask=trained_mask, images=scored.images, automaton=models.policy.automaton
    )
    logprobs, ref_logprobs, values = compute_logprobs(models, experience, config, needs)
    if config.old_logprobs == "sampler" or logprobs is None:
        logprobs = rollout.logprobs
    logprobs = jnp.where(response_mask, logprobs, 0.0)
    ref_logprobs = logprobs if ref_logprobs is None else jnp.where(response_mask, ref_logprobs, 0.0)
    kl = jnp.where(trained_mask, adv.kl_penalty(logprobs, ref_logprobs, config.kl_estimator), 0.0)

    raw = jnp.where(scorable, scored.scores, 0.0)
    dense = jnp.zeros_like(kl)
    if scored.token_rewards is not None:
        dense = jnp.where(response_mask, scored.token_rewards, 0.0)
    response_scores = penalize_missing_eos(raw, rollout, scored.eos_ids, config)
    rewards = Rewards(
        scores=response_scores + dense.sum(axis=1),
        response_scores=response_scores,
        raw=raw + dense.sum(axis=1),
        dense=dense,
        each=scored.each_reward,
        weights=scored.reward_weights,
        kl=kl,
        kl_coef=jnp.float32(kl_coef),
        values=values,
        present=present,
        scorable=scorable,
        masked=masked,
        trained_mask=trained_mask,
        lengths=rollout.lengths,
        sampled=rollout.sampled,
        group_size=group_size,
    )
    result = objective.advantages(rewards, config)

    def grouped(x: Array | None, needed: bool = True) -> Array | None:
        return group_rows(x, group_size) if needed and x is not None else None

    experience = experience.replace(
        logprobs=grouped(logprobs, needs.logprobs),
        advantages=grouped(result.advantages),
        values=grouped(result.values),
        returns=grouped(result.returns),
        value_mask=grouped(result.value_mask),
        ref_logprobs=grouped(ref_logprobs, needs.ref_logprobs),
        sampler_logprobs=grouped(jnp.where(response_mask, rollout.logprobs, 0.0), needs.sampler_logprobs),
    )
    metrics = objective_metrics(
        rollout, logprobs=logprobs, kl=kl, scores=result.scores, penalty=result.penalty, scorable=scorable
    )
    metrics["val/num_eos_tokens"] = ended.astype(jnp.float32)
    metrics |= objective.rollout_metrics(rewards, result, config)
    if config.old_logprobs == "forward" and not needs.sampler_logprobs:  # else the loss logs it
        metrics |= sampling_metrics(logprobs, rollout.logprobs, response_mask)
    if models.reference is None:
        del metrics["objective/kl"]
    return experience, metrics


def penalize_missing_eos(
    scores: Array, rollout: Rollout, eos_ids: tuple[int, ...], config: PolicyGradientOptions
) -> Array:
    """Scores with the penalty for a response without eos subtracted (TRL) or in place of its score (N+).

    Returns:
      [B] float32.
    """
    if config.missing_eos_penalty is None:
        return scores
    has_eos = jnp.any(adv.is_any(rollout.response, eos_ids) & sampled_mask(rollout), axis=1)
    if config.eos_penalty_mode == "replace":
        return jnp.where(has_eos, scores, -config.missing_eos_penalty)
    return jnp.where(has_eos, scores, scores - config.missing_eos_penalty)


def compute_logprobs(
    models: Models, experience: Experience, config: PolicyGradientOptions, needs: Needs
) -> tuple[Array | None, Array | None, Array | None]:
    """Forward passes of policy, reference and critic, `microbatch.forward_batch_size` rows or micro_batch_tokens tokens
    at a time.

    Args:
      models: with whole params.
      experience: of `group_rollout`.
      needs: logprobs, values.

    Returns:
      (log-probabilities, the reference's, values), each [B, T] float32, undefined outside the response, or None.
    """
    rows = experience if config.computes_groups else split_groups(experience)
    (groups, size), t = rows.lengths.shape, rows.response.shape[2]

    def forward(rows: Experience) -> tuple[Array | None, Array | None, Array | None]:
        logprobs = ref_logprobs = values = None
        if needs.logprobs or needs.values:
            critic = models.critic if needs.values else None
            logprobs, _, values = response_logprobs(models.policy, rows, config, critic=critic)
        if models.reference is not None:
            ref_logprobs, _, _ = response_logprobs(models.reference, rows, config)
        return logprobs, ref_logprobs, values

    if not (needs.logprobs or needs.values or models.reference is not None):
        return None, None, None
    columns = rows.lengths
    if needs.values:  # a value may follow the response
        columns = jnp.where(columns < 0, -1, jnp.minimum(columns + 1, t))
    rows_at_once = microbatch.forward_batch_size(config, groups * size)
    parts = micro_batches(rows, config, models.mesh, size=rows_at_once, columns=columns)
    logprobs, ref_logprobs, values = jax.tree.map(lambda x: x.reshape(-1, t), parts.map(forward))
    return logprobs, ref_logprobs, values


def micro_batches(
    rows: Experience, config: PolicyGradientOptions, mesh: Any, *, size: int | None, columns: Array, sort: bool = True
) -> MicroBatches:
    """Rows in micro-batches of micro_batch_tokens tokens, where the config has it, else of `size` responses.

    Args:
      rows: P groups of G.
      config: micro_batch_tokens, length_buckets.
      mesh: rows are sharded over it; None: one device.
      size: responses of a micro-batch, at least one group; None: all.
      columns: [P, G] int32, response columns that are computed; -1: the row is absent.
      sort: whether groups are sorted by prompt length.
    """
    (groups, group_size), t, c = rows.lengths.shape, rows.response.shape[2], rows.prompt_tokens.shape[1]
    if config.micro_batch_tokens is not None:
        shapes = microbatch.token_shapes(config, items=groups, columns=c, t=t, group_size=group_size, mesh=mesh)
        return MicroBatches.by_tokens(
            rows,
            prompts=rows.prompt_lengths,
            responses=jnp.max(columns, axis=1),
            shapes=shapes,
            narrow=lambda rows, present, shape: without_absent(narrow(rows, shape.prompt, shape.response), present),
            mesh=mesh,
        )
    return MicroBatches.by_rows(
        rows,
        microbatch.groups_per_chunk(size, group_size, groups),
        lengths=rows.prompt_lengths,
        widths=microbatch.prompt_widths(config, c),
        narrow=lambda rows, width: narrow(rows, width, t),
        sort=sort,
        mesh=mesh,
    )


# --- update


class Trained(NamedTuple):
    """What optimizer steps change."""

    params: Params
    opt_state: Any
    ref_params: Params | None = None  # where the reference moves
    entropy_control: Array | None = None  # where the entropy coefficient is adaptive
    enabled: Array | bool = True  # [] bool, False once a step was skipped


def update(
    models: Models,
    state: TrainState,
    experience: Experience,
    *,
    config: PolicyGradientOptions,
    objective: Objective,
    optimizer: Optimizer,
    key: Array,
    causes: Array | None = None,
) -> tuple[TrainState, Metrics]:
    """All epochs on one batch of episodes: a scan over optimizer steps.

    Args:
      models: without trained params, which are the state's.
      state: donate it. With sync_ref_model its ref_params move too, with use_adaptive_entropy its entropy_control.
      experience: from `make_experience`.
      key: typed key of this update; it draws the order of the groups in each epoch, and dropout.
      causes: [] int32, of the scores, by `nonfinite.find_causes`; None: all are finite.

    Returns:
      (state after B episodes, metrics averaged over optimizer steps as TRL averages its stats arrays). Once something
      is not finite, or target_kl is passed, that step and all later ones are skipped, and the reference does not move
      (see `nonfinite`).
    """
    groups, size = experience.lengths.shape
    orders = permutations(key, config.epochs_per_update, groups, config.reshuffle)
    dropout_key = jax.random.fold_in(key, _DROPOUT) if uses_dropout(models, config) else None
    if not (shares_prompts(models, config) and config.computes_groups):
        experience = split_groups(experience)
        orders = (orders[:, :, None] * size + jnp.arange(size)[None, None]).reshape(config.epochs_per_update, -1)
        groups, size = groups * size, 1
    causes = jnp.int32(0) if causes is None else causes
    causes |= experience_causes(experience)
    batch_tokens = jnp.sum(experience.trained_mask).astype(jnp.float32) / config.num_mini_batches
    steps, groups_per_step = steps_per_update(config), groups // config.num_mini_batches

    def step(trained: Trained, item: tuple[Array, Array]) -> tuple[Trained, Metrics]:
        rows, number = item
        minibatch = microbatch.sorted_by(rows, experience)
        if dropout_key is not None:
            keys = microbatch.row_keys(jax.random.fold_in(dropout_key, number), groups_per_step)
            # A row's key is chosen by its place among the rows sorted by prompt length.
            places = jnp.argsort(jnp.argsort(minibatch.prompt_lengths)) if sorts(config) else jnp.arange(len(keys))
            minibatch = minibatch.replace(dropout_keys=keys[places])
        trained, metrics, _ = optimizer_step(
            models,
            trained,
            minibatch,
            config=config,
            objective=objective,
            optimizer=optimizer,
            update_number=state.step,
            step=state.step * steps + number,
            batch_tokens=batch_tokens,
        )
        return trained, metrics

    rows = orders[:, : groups_per_step * config.num_mini_batches].reshape(steps, groups_per_step)
    enabled = nonfinite.updates_enabled(state, causes, config)
    trained = Trained(state.params, state.opt_state, state.ref_params, state.entropy_control, enabled)
    trained, stats = jax.lax.scan(step, trained, (rows, jnp.arange(steps)))

    errors = stats.pop("ratio_error", None)
    metrics = nonfinite.mean_over_steps(stats, config)
    metrics["nonfinite/causes"] |= causes
    if errors is not None:  # of the first step: before it the ratio is 1 but for rounding
        metrics["val/first_ratio_error"] = errors[0]
        metrics["policy/first_approxkl"] = stats["policy/approxkl_avg"][0]
        metrics["val/ratio_var"] = jnp.var(stats["val/ratio"], ddof=1) if steps > 1 else jnp.float32(0.0)
    fields = ("params", "opt_state", "ref_params", "entropy_control")
    state = nonfinite.finish_update(
        state,
        metrics["nonfinite/causes"],
        config,
        trained={name: getattr(trained, name) for name in fields},
        counts={"step": 1, "episodes": groups * size},
    )
    return state, metrics


def optimizer_step(
    models: Models,
    trained: Trained,
    minibatch: Experience,
    *,
    config: PolicyGradientOptions,
    objective: Objective,
    optimizer: Optimizer,
    update_number: Array,
    step: Array,
    batch_tokens: Array,
) -> tuple[Trained, Metrics, dict[str, Array]]:
    """One optimizer step on a minibatch.

    Args:
      models: without trained params.
      trained: before the step.
      minibatch: p groups.
      config, objective, optimizer: as in `update`.
      update_number, step: [] int32, updates and optimizer steps of the run before this one.
      batch_tokens: [] float32, of `Counts`.

    Returns:
      (after the step, metrics of the step, token arrays [p, G, T] by name). A step that is not finite, or passes
      target_kl, is skipped.
    """
    grads, tally, tokens = minibatch_gradients(
        models,
        trained.params,
        minibatch,
        config=config,
        objective=objective,
        batch_tokens=batch_tokens,
        entropy_coef=applied_entropy_coef(trained.entropy_control, config),
    )
    grads = objective.mask_gradients(grads, update_number, config)
    trained, metrics = take_step(
        trained, grads, tally, config=config, objective=objective, optimizer=optimizer, step=step
    )
    return trained, metrics, tokens


def minibatch_gradients(
    models: Models,
    params: Params,
    minibatch: Experience,
    *,
    config: PolicyGradientOptions,
    objective: Objective,
    batch_tokens: Array,
    entropy_coef: Array | None = None,
) -> tuple[Params, Tally, dict[str, Array]]:
    """Gradients of the objective on a minibatch, accumulated over its micro-batches.

    Args:
      models: without trained params.
      params: trained params.
      minibatch, config, objective, batch_tokens: as in `optimizer_step`.
      entropy_coef: [] float32, the adaptive coefficient; None: it is the config's.

    Returns:
      (gradients, tally of the minibatch, token arrays [p, G, T] by name).
    """
    selected = objective.select(models.with_trained(params), minibatch, config)
    minibatch = minibatch.replace(selected=selected)
    parts, counts = update_parts(models, minibatch, config, batch_tokens)

    def loss(params: Params, micro: Experience) -> tuple[Array, tuple[Tally, dict[str, Array]]]:
        return objective.loss(models.with_trained(params), micro, counts, config, entropy_coef)

    return parts.gradients(loss, params, loss_scale(config.dtype, minibatch.response.size))


def update_parts(
    models: Models, minibatch: Experience, config: PolicyGradientOptions, batch_tokens: Array | None = None
) -> tuple[MicroBatches, Counts]:
    """The micro-batches of a minibatch, and its counts; `batch_tokens` None: the minibatch is the whole batch."""
    read, t = minibatch.trained_mask, minibatch.response.shape[2]
    if minibatch.value_mask is not None:
        read = read | minibatch.value_mask
    last = jnp.max(jnp.where(read, jnp.arange(1, t + 1), 0), axis=2)
    columns = jnp.where(minibatch.lengths < 0, -1, last)
    parts = micro_batches(
        minibatch, config, models.mesh, size=config.micro_batch_size, columns=columns, sort=sorts(config)
    )

    def count(mask: Array | None) -> Array:
        return jnp.float32(0.0) if mask is None else jnp.sum(mask).astype(jnp.float32)

    tokens = count(minibatch.trained_mask)
    return parts, Counts(
        rows=jnp.maximum(count(minibatch.lengths >= 0), 1.0),
        tokens=tokens,
        selected=tokens if minibatch.selected is None else count(minibatch.selected),
        values=count(minibatch.value_mask),
        batch_tokens=tokens if batch_tokens is None else batch_tokens,
        size=minibatch.lengths.size,
        micro_batches=parts.count,
    )


def take_step(
    trained: Trained,
    grads: Params,
    tally: Tally,
    *,
    config: PolicyGradientOptions,
    objective: Objective,
    optimizer: Optimizer,
    step: Array,
) -> tuple[Trained, Metrics]:
    """An optimizer step, or none, with the gradients of a minibatch.

    Args:
      trained: before the step.
      grads, tally: of `minibatch_gradients`.
      config, objective, optimizer, step: as in `optimizer_step`.

    Returns:
      (after the step, its metrics, with `ratio_error` where the tally has it).
    """
    metrics = objective.step_metrics(tally, config)
    approxkl = metrics.get("policy/approxkl_avg", jnp.float32(0.0))
    params, opt_state, enabled, applied = nonfinite.apply_if_finite(
        optimizer,
        trained.params,
        trained.opt_state,
        grads,
        step=step,
        loss=[value for name, value in metrics.items() if name.startswith("loss")],
        steps_enabled=trained.enabled,
        allowed=nonfinite.below_target_kl(approxkl, config),
    )
    ref_params, control = trained.ref_params, trained.entropy_control
    if ref_params is not None:
        due = enabled & ((step + 1) % config.ref_model_sync_steps == 0)
        ref_params = mix_reference(ref_params, params["policy"], due, config.ref_model_mixup_alpha)
    if control is not None:
        control = jnp.where(enabled, objective.control(control, tally, config), control)
        metrics = {**metrics, "entropy_coef": control[0]}
    if "ratio_error" in tally.greatest:
        metrics = {**metrics, "ratio_error": tally.greatest["ratio_error"]}
    return Trained(params, opt_state, ref_params, control, enabled), {**metrics, **applied}


def token_count(mask: Array, minibatch_tokens: Array, counts: Counts, config: PolicyGradientOptions) -> Array:
    """The tokens that a micro-batch's sum is divided by, at least 1: the minibatch's; or with token_mean_micro (TRL),
    for a mean of micro-batch means, its own times the number of micro-batches.

    Args:
      mask: bool, tokens of the micro-batch that the sum is over.
      minibatch_tokens: [] float32, those of the minibatch.
      config: loss_aggregation, as depends_on_micro_batching.
    """
    if config.depends_on_micro_batching:
        return jnp.maximum(mask.sum(), 1) * float(counts.micro_batches)
    return jnp.maximum(minibatch_tokens, 1.0)


def epsilon_high(config: GroupOptions) -> float:
    """The upper clip range; default: the lower one."""
    return config.epsilon if config.epsilon_high is None else config.epsilon_high


def steps_per_update(config: PolicyGradientOptions) -> int:
    """Optimizer steps of an update."""
    return config.epochs_per_update * config.num_mini_batches


def sorts(config: BatchOptions) -> bool:
    """Whether rows are sorted by prompt length before they are cut into micro-batches: not where the result depends on
    which rows share one."""
    return not config.depends_on_micro_batching


def uses_dropout(models: Models, config: OptimizerOptions) -> bool:
    """Whether updates apply dropout: the policy's, or that of its adapter."""
    rates, lora = models.policy.model.config, models.policy.model.lora
    rates = (rates.hidden_dropout, rates.attention_dropout, 0.0 if lora is None else lora.dropout)
    return not config.disable_dropout and max(rates) > 0


def shares_prompts(models: Models, config: PolicyGradientOptions) -> bool:
    """Whether updates compute each prompt once for its G responses; with dropout each row has a mask of its own."""
    return config.shared_prompts and not uses_dropout(models, config)


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
    weight = jnp.where(due, alpha, 0.0)
    return jax.tree.map(lambda r, p: jnp.where(due, weight * p + (1 - weight) * r, r), ref_params, params)


def applied_entropy_coef(control: Array | None, config: PolicyGradientOptions) -> Array | None:
    """The adaptive coefficient, 0 while the entropy of the last optimizer step is above entropy_target: [] float32;
    None where it is not adaptive."""
    return None if control is None else jnp.where(control[1] <= config.entropy_target, control[0], 0.0)


def experience_causes(experience: Experience) -> Array:
    """`nonfinite.find_causes` of an experience, inside its masks: [] int32."""
    trained = experience.trained_mask

    def inside(x: Array | None, mask: Array | None = trained) -> Array | tuple[()]:
        if x is None:
            return ()
        return jnp.where(mask, x, 0.0) if x.ndim == 3 else x

    return nonfinite.find_causes(
        logprob=[inside(experience.logprobs), inside(experience.ref_logprobs)],
        value=inside(experience.values, experience.value_mask),
        advantage=inside(experience.advantages),
        **{"return": inside(experience.returns, experience.value_mask)},
    )


# --- evaluation


def eval_metrics(
    models: Models, experience: Experience, *, config: PolicyGradientOptions, objective: Objective
) -> Metrics:
    """The metrics of the loss without an update, for evaluation.

    Args:
      models: with whole params.
      experience: from `make_experience`.

    Returns:
      The metrics of one step of `update`, without those that need an optimizer step; each [] float32.
    """
    together = shares_prompts(models, config) and config.computes_groups
    experience = experience if together else split_groups(experience)
    experience = experience.replace(selected=objective.select(models, experience, config))
    parts, counts = update_parts(models, experience, config)
    tally = parts.sum(lambda micro: objective.loss(models, micro, counts, config, None)[1][0])
    metrics = objective.step_metrics(tally, config)
    return {name: x for name, x in metrics.items() if name not in ("val/ratio_error", "entropy_coef")}


# --- inspection


def row_measures(
    models: Models, params: Params, experience: Experience, *, config: PolicyGradientOptions, objective: Objective
) -> dict[str, Any]:
    """What each response of a batch adds to the loss of the batch, if the batch is one minibatch, without dropout.

    Args:
      models: without trained params.
      params: trained params, before the update.
      experience: from `make_experience`, B responses.

    Returns:
      {"loss": [B] float32, "gradient_norm": [B] float32, by all trained params; "gradients": of the batch, as `params`}
    """
    rows = split_groups(experience)
    rows = rows.replace(selected=objective.select(models.with_trained(params), rows, config))
    _, counts = update_parts(models, rows, config)

    def loss(params: Params, row: Experience) -> tuple[Array, Any]:
        return objective.loss(models.with_trained(params), row, counts, config, None)[0], ()

    gradient = value_and_gradient(loss, loss_scale(config.dtype, rows.response.size))

    def measured(row: Experience) -> tuple[Tally, dict[str, Array]]:
        (value, _), grads = gradient(params, row)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(grads)))
        return Tally(sums=grads), {"loss": value[None], "gradient_norm": norm[None]}

    tally, by_row = MicroBatches.by_rows(rows, 1).fold(measured)
    return {**by_row, "gradients": tally.sums}


def current_logprobs(
    models: Models, experience: Experience, *, config: PolicyGradientOptions
) -> tuple[Array, Array | None]:
    """Log-probabilities of the responses by the policy, and the critic's values, with the params that `models` has.

    Returns:
      ([B, T] float32, [B, T] float32 or None), undefined outside the response.
    """
    needs = Needs(logprobs=True, values=experience.values is not None)
    logprobs, _, values = compute_logprobs(models.replace(reference=None), experience, config, needs)
    assert logprobs is not None
    return logprobs, values
