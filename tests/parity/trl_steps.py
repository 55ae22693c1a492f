"""Optimizer steps in TRL's order, by the functions of training, and the forms in which TRL reports their metrics.

TRL takes the loss of each micro-batch by itself and averages, so that a micro-batch is a minibatch here. It averages
metrics over micro-batches too, some of them over the columns after a response. Line numbers are those of TRL 1.12.0.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import advantages as adv
from rlhf_jax.algorithms import grpo
from rlhf_jax.algorithms import policy_gradient as pg
from rlhf_jax.algorithms.groups import group_rows
from rlhf_jax.algorithms.microbatch import Tally
from rlhf_jax.types import Array, Experience, Metrics, Rollout, TrainState


def single(config):
    """The config of a micro-batch that is a minibatch by itself."""
    aggregation = {"loss_aggregation": "token_mean"} if hasattr(config, "loss_aggregation") else {}
    return dataclasses.replace(config, micro_batch_size=None, **aggregation)


def step(
    models,
    state: TrainState,
    micros: Experience,
    *,
    config,
    objective: pg.Objective,
    optimizer,
    number: Array,
    batch_tokens: Array,
) -> tuple[TrainState, Metrics, Metrics, dict[str, Array]]:
    """One optimizer step with the mean of the gradients of its micro-batches.

    Args:
      models: without trained params.
      state: before.
      micros: [N, m, 1, ...], rows of one response in TRL's order.
      config: of the run.
      objective, optimizer: as training's.
      number: [] int32, optimizer steps before.
      batch_tokens: [N], of `Counts`.

    Returns:
      (state, metrics of the step as training reports them; of each micro-batch [N]; token arrays [N, m, T])
    """
    config = single(config)
    trained = pg.Trained(state.params, state.opt_state, state.ref_params, state.entropy_control, jnp.bool_(True))
    coef = pg.applied_entropy_coef(trained.entropy_control, config)

    def micro_batch(total, item):
        rows, tokens = item
        grads, tally, arrays = pg.minibatch_gradients(
            models,
            trained.params,
            rows,
            config=config,
            objective=objective,
            batch_tokens=tokens,
            entropy_coef=coef,
        )
        return jax.tree.map(jnp.add, total, grads), (tally, arrays)

    zeros = jax.tree.map(jnp.zeros_like, trained.params)
    grads, (tallies, arrays) = jax.lax.scan(micro_batch, zeros, (micros, batch_tokens))
    grads = jax.tree.map(lambda g: g / batch_tokens.shape[0], grads)
    folds = (jnp.sum, jnp.min, jnp.max)
    tally = Tally(*(jax.tree.map(lambda x, f=f: f(x, axis=0), part) for f, part in zip(folds, tallies)))
    trained, metrics = pg.take_step(
        trained, grads, tally, config=config, objective=objective, optimizer=optimizer, step=number
    )
    fields = ("params", "opt_state", "ref_params", "entropy_control")
    state = state.replace(**{name: getattr(trained, name) for name in fields})
    each = jax.vmap(lambda tally: objective.step_metrics(tally, config))(tallies)
    return state, metrics, each, {name: x[:, :, 0] for name, x in arrays.items()}


def update(
    models, state: TrainState, experience: Experience, orders: Array, *, steps: int, config, objective, optimizer
) -> tuple[TrainState, Metrics]:
    """All epochs of PPO, or of RLOO before TRL 0.22, on one batch.

    Args:
      models, config, objective, optimizer: as in `step`.
      state: before.
      experience: [B, 1, ...].
      orders: [epochs, B] int32.
      steps: optimizer steps an epoch.

    Returns:
      (state, metrics as TRL reports them: over all T columns where it does not mask, ppo_trainer.py:857-884)
    """
    epochs, b = orders.shape
    micro = min(config.micro_batch_size or b, b // steps)
    rows = orders.reshape(epochs * steps, -1, micro)
    batch_tokens = jnp.ones(rows.shape[1])  # of `Counts`, which no loss here reads

    def one(state: TrainState, item: tuple[Array, Array]):
        order, number = item
        micros = jax.tree.map(lambda x: x[order], experience)
        options = {"config": config, "objective": objective, "optimizer": optimizer, "batch_tokens": batch_tokens}
        after, _, each, tokens = step(models, state, micros, number=state.step * epochs * steps + number, **options)
        mask = micros.trained_mask[:, :, 0]
        log_ratio = jnp.where(mask, tokens["logprobs"] - micros.logprobs[:, :, 0], 0.0)
        each["policy/entropy_avg"] = tokens["entropy"].mean(axis=(1, 2))
        each["val/ratio"] = jnp.exp(log_ratio).mean(axis=(1, 2))
        if "values" in tokens:  # PPO, which averages over all columns here too
            each["policy/approxkl_avg"] = 0.5 * jnp.square(log_ratio).mean(axis=(1, 2))
        return after, each

    state, each = jax.lax.scan(one, state, (rows, jnp.arange(epochs * steps)))
    metrics = {name: x.mean() for name, x in each.items()}
    ratios = each["val/ratio"].reshape(-1)
    metrics["val/ratio_var"] = jnp.var(ratios, ddof=1) if ratios.size > 1 else jnp.float32(jnp.nan)
    return state.replace(step=state.step + 1, episodes=state.episodes + b), metrics


def eos_count(rollout: Rollout, eos: int) -> float:
    """val/num_eos_tokens: every eos, those that fill up after the end too."""
    return float(jnp.sum(rollout.response == eos))


def surprise(experience: Experience) -> float:
    """objective/entropy of RLOO before 0.22: each column outside the response counts as -1."""
    logprobs = np.where(experience.trained_mask, experience.logprobs, 1.0)
    return float(-logprobs.sum(axis=2).mean())


def unmasked(objective: pg.Objective) -> pg.Objective:
    """RLOO's equations where truncated responses keep their advantages: they count in the reported loss, and give no
    gradient."""

    def advantages(rewards: pg.Rewards, config) -> pg.Advantages:
        return objective.advantages(rewards._replace(masked=jnp.zeros_like(rewards.masked)), config)

    return objective._replace(advantages=advantages)


def with_zero_std(objective: pg.Objective) -> pg.Objective:
    """An objective whose frac_reward_zero_std is TRL's: RLOO's of rewards after the KL penalty (rloo_trainer.py:1585,
    1608), GRPO's of what rewards are divided by (grpo_trainer.py:2781, 2795)."""

    def metrics(rewards: pg.Rewards, made: pg.Advantages, config) -> Metrics:
        scorable = group_rows(rewards.scorable, rewards.group_size)
        if objective.loss is grpo.loss_and_metrics:
            equal = grpo_deviations(rewards, config) <= 1e-8
        else:
            optimised = group_rows(made.scores - made.penalty, rewards.group_size)
            deviations = jax.vmap(lambda x, keep: jnp.sqrt(adv.masked_var(x, keep)))(optimised, scorable)
            equal = (deviations <= 1e-8) & ((scorable.sum(axis=1) > 1) | (rewards.group_size == 1))
        return {
            **objective.rollout_metrics(rewards, made, config),
            "frac_reward_zero_std": equal.astype(jnp.float32).mean(),
        }

    return objective._replace(rollout_metrics=metrics)


def grpo_deviations(rewards: pg.Rewards, config) -> Array:
    """The standard deviation that the rewards of each group are divided by, NaN for that of a single reward: [P]."""
    keep, size = group_rows(rewards.scorable, rewards.group_size), rewards.group_size
    count, rows = keep.sum(axis=1), size
    if config.multi_objective_aggregation == "normalize_then_sum":
        weights = jnp.asarray(rewards.weights, jnp.float32)
        applies = group_rows(~jnp.isnan(rewards.each) & rewards.scorable[:, None], size)
        total = adv.normalize_each_reward(group_rows(rewards.each, size), applies, weights)
        deviations = jnp.broadcast_to(jnp.sqrt(adv.masked_var(total, keep)), keep.shape[:1])
        count, rows = keep.sum(), keep.size
    else:
        deviations = grpo.reward_deviations(rewards, config)
        if config.scale_rewards == "batch":
            count, rows = keep.sum(), keep.size
    return jnp.where((count > 1) | (rows == 1), deviations, jnp.nan)


def mean_of_micro_batches(each: dict[str, Any], config) -> dict[str, float]:
    """Metrics of an optimizer step of TRL's RLOO or GRPO from those of its micro-batches, [N] each."""
    metrics = {name: float(np.mean(x)) for name, x in each.items()}
    if getattr(config, "loss_type", None) in ("dapo", "cispo", "vespo") and "policy_loss" in metrics:
        metrics["policy_loss"] /= len(each["policy_loss"])  # a share of the step's (grpo_trainer.py:3263-3268, 3306)
    return metrics
