"""GRPO and its relatives: baseline, scale, loss and aggregation by independent options.

Shao et al. 2024 (GRPO, arXiv 2402.03300) with the variants of TRL's GRPOTrainer, and REINFORCE++ (Hu et al. 2025, arXiv
2501.03262). The trainer is `group_policy_gradient`; here are the equations for it. A loss type is one entry of LOSSES:
the loss of each action, and how the losses of tokens become one number. Line numbers are those of
`trl/trainer/grpo_trainer.py` in TRL 1.12.0. Shapes: b rows of a micro-batch, T response columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import advantages as adv
from rlhf_jax import losses
from rlhf_jax.algorithms import group_policy_gradient as gpg
from rlhf_jax.algorithms import microbatch, token_budget
from rlhf_jax.algorithms.actor_critic import Models, group_logprobs
from rlhf_jax.algorithms.metric_forms import FORMS
from rlhf_jax.algorithms.rollout_metrics import group_rows
from rlhf_jax.types import Array, GroupExperience, Metrics

STD_EPSILON = 1e-4
"""Added to a standard deviation that rewards are divided by (:2780)."""

# --- rewards to advantages


def advantages(rewards: gpg.Rewards, config) -> gpg.Advantages:
    """(reward - baseline) / scale of each response (:2749-2800), or of each token with kl_in_reward.

    Args:
      rewards: of B responses.
      config: a GRPOConfig.
    """
    keep, scores, trained = rewards.scorable, rewards.scores, rewards.trained_mask
    if config.multi_objective_aggregation == "normalize_then_sum":
        result, deviations = normalize_then_sum(rewards)
    else:
        deviations = reward_deviations(rewards, config)
        result = subtract_baseline(rewards, config)
        if config.scale_rewards != "none":
            result = result / (jnp.repeat(deviations, rewards.group_size) + STD_EPSILON)
    if config.reward_clip_range is not None:
        result = jnp.clip(result, *gpg.clip_range(config.reward_clip_range))
    result = jnp.where(keep, result, 0.0)
    penalty = jnp.zeros_like(scores)
    if config.kl_in_reward:
        # The reward of a response is that of its last token; dense rewards are in it.
        token_rewards = adv.place_scores(-config.beta * rewards.kl, result, rewards.lengths, "eos")
        result = jnp.where(trained & keep[:, None], adv.return_to_go(token_rewards, config.gamma), 0.0)
        penalty = config.beta * rewards.kl.sum(axis=1)
    if config.whiten_advantages:
        result = result if result.ndim == 2 else jnp.broadcast_to(result[:, None], trained.shape)
        result = adv.masked_whiten(result, trained & keep[:, None], ddof=config.whiten_ddof)
    return gpg.Advantages(result, scores, penalty, reported_deviations(deviations, rewards, config))


def subtract_baseline(rewards: gpg.Rewards, config) -> Array:
    """Rewards minus the baseline of their group: [B]; 0 with one response to a prompt, or with 'none' its reward."""
    if config.baseline == "none":
        return rewards.scores
    scores, keep = (group_rows(x, rewards.group_size) for x in (rewards.scores, rewards.scorable))
    if config.baseline == "leave_one_out" and rewards.group_size > 1:
        return adv.leave_one_out(scores, keep).reshape(-1)
    return (scores - adv.group_mean(scores, keep)).reshape(-1)


def reward_deviations(rewards: gpg.Rewards, config) -> Array:
    """Standard deviation of the rewards of each group, or with scale_rewards 'batch' of the batch: [B / G]."""
    scores, keep = (group_rows(x, rewards.group_size) for x in (rewards.scores, rewards.scorable))
    if config.scale_rewards == "batch":
        return jnp.broadcast_to(jnp.sqrt(adv.masked_var(scores, keep)), scores.shape[:1])
    return adv.group_std(scores, keep)[:, 0]


def reported_deviations(deviations: Array, rewards: gpg.Rewards, config) -> Array:
    """The same with NaN for those of a single reward among several rows, as torch's: [B / G]."""
    keep = group_rows(rewards.scorable, rewards.group_size)
    of_batch = config.scale_rewards == "batch" or config.multi_objective_aggregation == "normalize_then_sum"
    count, rows = (keep.sum(), keep.size) if of_batch else (keep.sum(axis=1), keep.shape[1])
    return jnp.where((count > 1) | (rows == 1), deviations, jnp.nan)


def normalize_then_sum(rewards: gpg.Rewards) -> tuple[Array, Array]:
    """Each reward normalized by its group, their sum by the batch (GDPO): [B], and that sum's deviation: [B / G]."""
    each, size = rewards.each, rewards.group_size
    weights = jnp.asarray(rewards.weights or (1.0,) * each.shape[1], jnp.float32)
    applies = ~jnp.isnan(each) & rewards.scorable[:, None]
    total = adv.normalize_each_reward(group_rows(each, size), group_rows(applies, size), weights).reshape(-1)
    normalized, divisor = adv.normalize(total, rewards.scorable, STD_EPSILON)
    # Their mean is 0 up to rounding, which must not become the advantage of a group of equal rewards.
    result = jnp.where(total == 0, 0.0, normalized)
    return result, jnp.broadcast_to(divisor - STD_EPSILON, (each.shape[0] // size,))


# --- loss


class Actions(NamedTuple):
    """What the loss of a micro-batch is made of. Sequence level has one ratio a row: [b, 1]."""

    logprobs: Array  # [b, T]
    log_ratio: Array  # [b, T], policy over behavior policy
    action_log_ratio: Array  # [b, T] or [b, 1]
    ratio: Array  # exp(action_log_ratio)
    advantages: Array  # [b, 1] or [b, T]
    mask: Array  # [b, T] bool
    sampler_ratio: Array | None  # [b, T] or [b, 1], learner over sampler; None: not corrected


class Loss(NamedTuple):
    """One loss type.

    Attributes:
      terms: (Actions, config) -> (losses [b, T] or [b, 1], metrics {name: [b, T] or [b, 1]}).
      aggregate: (losses [b, T], mask [b, T], Batch, config) -> [], the micro-batch's share of the minibatch's loss.
      corrects_sampler: whether `terms` has the sampler's ratio in it already.
    """

    terms: Callable
    aggregate: Callable
    corrects_sampler: bool = False


def clipped_terms(actions: Actions, config) -> tuple[Array, Metrics]:
    """The clipped ratio of PPO, with the bound `delta` (:3210-3218)."""
    high = gpg.epsilon_high(config)
    log_ratio, options = actions.action_log_ratio, {"cliprange": config.epsilon, "cliprange_high": high}
    terms, _, _ = losses.policy_loss_terms(
        log_ratio, jnp.zeros_like(log_ratio), actions.advantages, **options, delta=config.delta
    )
    ratio = actions.ratio if config.delta is None else jnp.minimum(actions.ratio, config.delta)
    low = (ratio < 1 - config.epsilon) & (actions.advantages < 0)
    high = (ratio > 1 + high) & (actions.advantages > 0)
    return terms, {"clip_ratio/low": low, "clip_ratio/high": high}


def cispo_terms(actions: Actions, config) -> tuple[Array, Metrics]:
    """CISPO: REINFORCE weighted by the capped ratio (:3206-3208)."""
    cap = gpg.epsilon_high(config)
    terms = losses.cispo_loss_terms(actions.logprobs, actions.ratio, actions.advantages, epsilon_high=cap)
    return terms, {"cispo_clip_ratio": (actions.ratio > cap) & (actions.advantages > 0)}


def sapo_terms(actions: Actions, config) -> tuple[Array, Metrics]:
    """SAPO's soft gate (:3219-3222)."""
    temperatures = {
        "temperature_pos": config.sapo_temperature_pos,
        "temperature_neg": config.sapo_temperature_neg,
    }
    return losses.sapo_loss_terms(actions.ratio, actions.advantages, **temperatures), {}


def vespo_terms(actions: Actions, config) -> tuple[Array, Metrics]:
    """VESPO: REINFORCE weighted by a function of the ratio of the whole response (:3223-3235)."""
    weights = losses.vespo_weights(
        actions.log_ratio,
        actions.advantages,
        actions.mask,
        k_pos=config.vespo_k_pos,
        lambda_pos=config.vespo_lambda_pos,
        k_neg=config.vespo_k_neg,
        lambda_neg=config.vespo_lambda_neg,
        sampler_ratio=actions.sampler_ratio,
    )
    weighted = jnp.broadcast_to(weights * actions.advantages, actions.logprobs.shape)
    return losses.reinforce_loss_terms(actions.logprobs, weighted), {"vespo/phi_seq": weights}


def mean_of_row_means(terms: Array, mask: Array, batch: gpg.Batch, config) -> Array:
    """Mean over responses of the mean over their tokens (:3250-3254)."""
    return jnp.sum(terms.sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1)) / batch.rows


def mean_of_row_sums(terms: Array, mask: Array, batch: gpg.Batch, config) -> Array:
    """Mean over responses of the sum over their tokens (:3269-3276)."""
    return jnp.sum(terms) / batch.rows


def mean_of_tokens(terms: Array, mask: Array, batch: gpg.Batch, config) -> Array:
    """Mean over the tokens of the minibatch, or of micro-batches (:3255-3258)."""
    return jnp.sum(terms) / token_count(mask, batch.tokens, batch, config)


def mean_over_longest(terms: Array, mask: Array, batch: gpg.Batch, config) -> Array:
    """Sum over tokens divided by responses times response_length (:3259-3262)."""
    return jnp.sum(terms) / (batch.rows * config.response_length)


def mean_of_batch_tokens(terms: Array, mask: Array, batch: gpg.Batch, config) -> Array:
    """Sum over tokens divided by the tokens that a minibatch has on average in this batch (:3263-3268)."""
    return jnp.sum(terms) / jnp.maximum(batch.share, 1.0 / config.num_mini_batches)


LOSSES: dict[str, Loss] = {
    "grpo": Loss(clipped_terms, mean_of_row_means),
    "bnpo": Loss(clipped_terms, mean_of_tokens),
    "dr_grpo": Loss(clipped_terms, mean_over_longest),
    "dapo": Loss(clipped_terms, mean_of_batch_tokens),
    "luspo": Loss(clipped_terms, mean_of_row_sums),
    "cispo": Loss(cispo_terms, mean_of_batch_tokens),
    "sapo": Loss(sapo_terms, mean_of_row_means),
    "vespo": Loss(vespo_terms, mean_of_batch_tokens, corrects_sampler=True),
}
"""By `loss_type`."""


def token_count(mask: Array, of_minibatch: Array, batch: gpg.Batch, config) -> Array:
    """The tokens that a micro-batch's sum is divided by, at least 1: the minibatch's, or TRL's (token_mean_micro), its
    own times the number of micro-batches."""
    if config.loss_aggregation == "token_mean_micro":
        return jnp.maximum(mask.sum(), 1) * float(batch.micro_batches)
    return jnp.maximum(of_minibatch, 1.0)


def has_entropy_bonus(config) -> bool:
    """Whether the loss has an entropy bonus."""
    return config.entropy_coef != 0.0 or config.use_adaptive_entropy


def needs(config) -> gpg.Needs:
    """With a single optimizer step an update the behavior policy is the policy itself: no forward pass before it."""
    single = gpg.steps_per_update(config) == 1 and config.old_logprobs == "forward"
    return gpg.Needs(
        logprobs=not single or config.kl_in_reward,
        ref_logprobs=config.beta != 0 and not config.kl_in_reward,
        sampler_logprobs=True,
    )


def loss_and_metrics(
    models: Models,
    micro: GroupExperience,
    batch: gpg.Batch,
    config,
    dropout_keys: Array | None = None,
    entropy_coef: Array | None = None,
):
    """The loss of one micro-batch: its share of the minibatch's (:3109-3340).

    Args:
      models: with whole params.
      micro: p groups.
      batch: counts of the whole minibatch.
      config: a GRPOConfig.
      dropout_keys: [p] typed keys (G = 1 only); None: no dropout.
      entropy_coef: [] float32, the adaptive coefficient; None: config.entropy_coef.

    Returns:
      (loss [], (sums over this micro-batch that metrics are made of, its extremes))
    """
    policy, loss_type = models.policy, LOSSES[config.loss_type]
    p, g, t = micro.response.shape

    def rows(x: Array) -> Array:
        return x.reshape(p * g, -1)

    mask = adv.response_mask(micro.lengths.reshape(-1), t)
    bonus = has_entropy_bonus(config)
    logprobs, entropy = group_logprobs(policy.model, policy.params, micro, config, dropout_keys, entropy_gradient=bonus)
    logprobs, entropy_all = jnp.where(mask, rows(logprobs), 0.0), rows(entropy)
    entropy = jnp.where(mask, entropy_all, 0.0)
    old = jax.lax.stop_gradient(logprobs) if micro.logprobs is None else jnp.where(mask, rows(micro.logprobs), 0.0)
    sampler_logprobs = jnp.where(mask, rows(micro.sampler_logprobs), 0.0)
    log_ratio = logprobs - old
    is_sequence = config.importance_sampling_level == "sequence"
    action_log_ratio = losses.sequence_log_ratio(log_ratio, mask) if is_sequence else log_ratio
    ratio = losses.importance_ratio(action_log_ratio)
    sampler_ratio = None
    if config.importance_sampling_correction:
        sampler_ratio = losses.sampler_ratio(
            old,
            sampler_logprobs,
            mask,
            mode=config.importance_sampling_mode,
            clip_min=config.importance_sampling_clip_min,
            clip_max=config.importance_sampling_clip_max,
        )
    actions = Actions(logprobs, log_ratio, action_log_ratio, ratio, rows(micro.advantages), mask, sampler_ratio)

    terms, measured = loss_type.terms(actions, config)
    if config.off_policy_mask_threshold is not None:
        threshold = config.off_policy_mask_threshold
        kept = losses.off_policy_mask(actions.advantages, logprobs, sampler_logprobs, mask, threshold=threshold)
        terms = jnp.where(kept, terms, 0.0)
    selected, n_selected = mask, batch.tokens
    if config.top_entropy_quantile < 1:
        if micro.selected is None:  # the micro-batch is what the quantile is of
            selected = losses.high_entropy_mask(
                jax.lax.stop_gradient(entropy), mask, quantile=1 - config.top_entropy_quantile
            )
            n_selected = selected.sum().astype(jnp.float32)
        else:
            selected, n_selected = rows(micro.selected), batch.selected
        terms = jnp.where(selected, terms, 0.0)
    if sampler_ratio is not None and not loss_type.corrects_sampler:
        terms = jnp.where(sampler_ratio == 0, 0.0, terms * sampler_ratio)
    if micro.ref_logprobs is not None:
        ref_logprobs = jnp.where(mask, rows(micro.ref_logprobs), 0.0)
        kl = adv.kl_penalty(logprobs, ref_logprobs, "k3")
        if config.use_bias_correction_kl:
            kl = kl * ratio
        terms = terms + config.beta * kl
        measured = {**measured, "kl": kl}
    policy_loss = loss_type.aggregate(jnp.where(mask, terms, 0.0), mask, batch, config)
    loss = policy_loss
    if bonus:
        coef = config.entropy_coef if entropy_coef is None else entropy_coef
        mean = jnp.sum(jnp.where(selected, entropy, 0.0)) / token_count(selected, n_selected, batch, config)
        loss = policy_loss - coef * mean
    return loss, metric_sums(
        actions,
        entropy=entropy,
        entropy_all=entropy_all,
        selected=selected,
        sampler_logprobs=sampler_logprobs,
        old=old,
        lengths=micro.lengths,
        measured=measured,
        loss=loss,
        policy_loss=policy_loss,
    )


def select(models: Models, minibatch: GroupExperience, config, dropout_keys: Array | None) -> Array:
    """Tokens of the highest entropy in a minibatch: [p, G, T] bool.

    Args:
      models: with whole params.
      minibatch: p groups.
      config: a GRPOConfig.
      dropout_keys: [p] typed keys; None: no dropout.
    """
    groups, size = minibatch.lengths.shape
    mask = adv.response_mask(minibatch.lengths.reshape(-1), minibatch.response.shape[2])

    def entropies(item):
        rows, keys = item
        return group_logprobs(models.policy.model, models.policy.params, rows, config, keys)[1]

    if config.micro_batch_tokens is not None:
        items = gpg.token_items(minibatch, config, mesh=models.mesh, dropout_keys=dropout_keys)
        entropy = token_budget.map_items(entropies, items)
    else:
        entropy = microbatch.map_by_prompt_length(
            entropies,
            (minibatch, dropout_keys),
            lengths=minibatch.prompt_lengths,
            rows=microbatch.groups_per_chunk(config.micro_batch_size, size, groups),
            narrow=lambda item, width: (gpg.narrow_prompts(item[0], width), item[1]),
            widths=microbatch.prompt_widths(config, minibatch.prompt_tokens.shape[1]),
            mesh=models.mesh,
        )
    mask = mask.reshape(entropy.shape)
    return losses.high_entropy_mask(entropy, mask, quantile=1 - config.top_entropy_quantile)


def selects(config) -> bool:
    """Whether the entropy quantile is over the minibatch (with token_mean_micro it is over each micro-batch)."""
    return config.top_entropy_quantile < 1 and config.loss_aggregation == "token_mean"


def initial_entropy_control(config) -> np.ndarray | None:
    """The coefficient that training starts with, and an entropy above every target, so that the first step has no bonus
    (:839); None where the coefficient is fixed."""
    return np.array([config.entropy_coef, np.inf], np.float32) if config.use_adaptive_entropy else None


def next_entropy_control(control: Array, sums: dict[str, Array], config) -> Array:
    """The adaptive entropy coefficient for the next optimizer step (Skywork-OR1; :3311-3330).

    Args:
      control: [2], the coefficient and the entropy of the step before.
      sums: of `loss_and_metrics` in this step, by micro-batch.
      config: a GRPOConfig.
    """
    entropy = jnp.sum(sums["entropy_selected"]) / jnp.maximum(jnp.sum(sums["selected"]), 1.0)
    step = jnp.where(entropy <= config.entropy_target, config.entropy_coef_delta, -config.entropy_coef_delta)
    coef = control[0] + step
    bounded = jnp.where(
        step >= 0, jnp.minimum(coef, config.entropy_coef_max), jnp.maximum(coef, config.entropy_coef_min)
    )
    return jnp.stack([bounded, entropy])


# --- metrics


def metric_sums(
    actions, *, entropy, entropy_all, selected, sampler_logprobs, old, lengths, measured, loss, policy_loss
):
    """Sums and extremes over a micro-batch, from which `step_metrics` computes the metrics; they have no gradient."""
    actions, entropy, entropy_all, measured = jax.lax.stop_gradient((actions, entropy, entropy_all, measured))
    mask, present = actions.mask, lengths.reshape(-1) >= 0
    tokens = jnp.sum(mask).astype(jnp.float32)
    ratio = jnp.exp(actions.log_ratio)
    difference = jnp.where(mask, jnp.abs(jax.lax.stop_gradient(old) - sampler_logprobs), 0.0)
    sums = {
        "loss": loss,
        "policy_loss": policy_loss,
        "entropy": jnp.sum(entropy),
        "entropy_all": jnp.sum(jnp.where(present[:, None], entropy_all, 0.0)),
        "entropy_selected": jnp.sum(jnp.where(selected, entropy, 0.0)),
        "selected": jnp.sum(selected).astype(jnp.float32),
        "ratio": jnp.sum(jnp.where(mask, ratio, 0.0)),
        "ratio_all": jnp.sum(jnp.where(present[:, None], ratio, 0.0)),
        "rows": jnp.sum(present).astype(jnp.float32),
        "tokens": tokens,
        "squared_log_ratio": jnp.sum(jnp.square(actions.log_ratio)),
        "sampling_difference": jnp.sum(difference),
    }
    extremes = {
        "error": jnp.max(jnp.where(mask, jnp.abs(ratio - 1.0), 0.0)),
        "sampling_difference": jnp.max(difference),
    }
    row_tokens = mask.sum(axis=1)
    for name, value in measured.items():
        value = value.astype(jnp.float32)
        counted = mask if value.shape[1] > 1 else present[:, None]
        value = jnp.where(counted, value, 0.0)
        sums[f"mean/{name}"], sums[f"count/{name}"] = jnp.sum(value), jnp.sum(counted).astype(jnp.float32)
        of_rows = value.sum(axis=1) / jnp.maximum(counted.sum(axis=1), 1)
        there = present & ((row_tokens > 0) | (value.shape[1] == 1))
        extremes[f"min/{name}"] = jnp.min(jnp.where(there, of_rows, jnp.inf))
        extremes[f"max/{name}"] = jnp.max(jnp.where(there, of_rows, -jnp.inf))
    if actions.sampler_ratio is not None:
        weights = actions.sampler_ratio
        counted = mask if weights.shape[1] > 1 else present[:, None]
        sums["mean/is"] = jnp.sum(jnp.where(counted, weights, 0.0))
        sums["count/is"] = jnp.sum(counted).astype(jnp.float32)
        extremes["min/is"] = jnp.min(jnp.where(counted, weights, jnp.inf))
        extremes["max/is"] = jnp.max(jnp.where(counted, weights, -jnp.inf))
    return sums, extremes


def step_metrics(sums: dict[str, Array], extremes: dict[str, Array], t: int, config) -> Metrics:
    """The metrics of one optimizer step from the sums of its micro-batches.

    Args:
      sums, extremes: of `loss_and_metrics`, [N] each, by micro-batch.
      t: T.
      config: a GRPOConfig.

    Returns:
      Each [] float32; "ratios" [N] or [1], whose variance over steps is val/ratio_var.
    """
    form = FORMS[config.metrics]
    totals = {name: jnp.sum(x) for name, x in sums.items()}
    tokens = jnp.maximum(totals["tokens"], 1.0)

    def mean(name: str) -> Array:
        return form.ratio_of_sums(sums[f"mean/{name}"], sums[f"count/{name}"])

    def extreme(of_micro_batches: Callable, name: str) -> Array:
        # A minibatch without a token to train on, as where all responses are truncated, has no least or greatest value.
        value = of_micro_batches(extremes[name])
        return jnp.where(jnp.isfinite(value), value, 0.0)

    metrics = {
        "loss": totals["loss"],
        "loss/policy_avg": totals["policy_loss"],
        "policy/clipfrac_avg": jnp.float32(0.0),
        "policy/approxkl_avg": 0.5 * totals["squared_log_ratio"] / tokens,
        "val/clipfrac_avg": jnp.float32(0.0),
        "val/ratio_error": jnp.max(extremes["error"]),
        "sampling/sampling_logp_difference/mean": totals["sampling_difference"] / tokens,
        "sampling/sampling_logp_difference/max": jnp.max(extremes["sampling_difference"]),
        **form.token_step(sums, totals, t),
    }
    metrics["val/ratio"] = jnp.mean(metrics["ratios"])
    if has_entropy_bonus(config):
        of_batch_tokens = LOSSES[config.loss_type].aggregate is mean_of_batch_tokens
        metrics["policy_loss"] = form.policy_loss(sums["policy_loss"], of_batch_tokens)
        if not config.use_adaptive_entropy:
            metrics["entropy_coef"] = jnp.float32(config.entropy_coef)
    if "mean/kl" in sums:
        metrics["kl"] = mean("kl")
    if "mean/clip_ratio/low" in sums:
        low, high = mean("clip_ratio/low"), mean("clip_ratio/high")
        metrics |= {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "clip_ratio/low_min": extreme(form.least, "min/clip_ratio/low"),
            "clip_ratio/high_max": extreme(form.greatest, "max/clip_ratio/high"),
            "policy/clipfrac_avg": low + high,
        }
    if "mean/cispo_clip_ratio" in sums:
        metrics["cispo_clip_ratio"] = metrics["policy/clipfrac_avg"] = mean("cispo_clip_ratio")
    if "mean/vespo/phi_seq" in sums:
        metrics["vespo/phi_seq_mean"] = mean("vespo/phi_seq")
    if "mean/is" in sums:
        metrics |= {
            "sampling/importance_sampling_ratio/min": extreme(form.least, "min/is"),
            "sampling/importance_sampling_ratio/mean": mean("is"),
            "sampling/importance_sampling_ratio/max": extreme(form.greatest, "max/is"),
        }
    return metrics


OBJECTIVE = gpg.Objective(
    advantages=advantages,
    loss=loss_and_metrics,
    step_metrics=step_metrics,
    needs=needs,
    selects=selects,
    select=select,
    control=next_entropy_control,
)
make_experience = functools.partial(gpg.make_experience, objective=OBJECTIVE)
by_micro_batch = functools.partial(gpg.by_micro_batch, objective=OBJECTIVE)
update = functools.partial(gpg.update, objective=OBJECTIVE)
update_steps = functools.partial(gpg.update_steps, objective=OBJECTIVE)
eval_metrics = functools.partial(gpg.eval_metrics, objective=OBJECTIVE)
