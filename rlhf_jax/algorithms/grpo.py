"""GRPO and its relatives: baseline, scale, loss and aggregation by independent options.

Shao et al. 2024 (GRPO, arXiv 2402.03300) with the variants of TRL's GRPOTrainer, and REINFORCE++ (Hu et al. 2025, arXiv
2501.03262). The trainer is `policy_gradient`; here are the equations for it. A loss type is one entry of LOSSES:
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
from rlhf_jax.algorithms import metrics as measures
from rlhf_jax.algorithms import policy_gradient as pg
from rlhf_jax.algorithms.groups import group_rows
from rlhf_jax.algorithms.grpo_options import GRPOOptions
from rlhf_jax.algorithms.microbatch import Tally
from rlhf_jax.algorithms.networks import Models
from rlhf_jax.algorithms.response_logprobs import response_logprobs
from rlhf_jax.types import Array, Experience, Metrics

STD_EPSILON = 1e-4
"""Added to a standard deviation that rewards are divided by (:2780)."""

# --- rewards to advantages


def advantages(rewards: pg.Rewards, config: GRPOOptions) -> pg.Advantages:
    """(reward - baseline) / scale of each response (:2749-2800), or of each token with kl_in_reward.

    Args:
      rewards: of B responses.
    """
    keep, scores, trained = rewards.scorable, rewards.scores, rewards.trained_mask
    if config.multi_objective_aggregation == "normalize_then_sum":
        result = normalize_then_sum(rewards)
    else:
        result = subtract_baseline(rewards, config)
        if config.scale_rewards != "none":
            deviations = reward_deviations(rewards, config)
            result = result / (jnp.repeat(deviations, rewards.group_size) + STD_EPSILON)
    if config.reward_clip_range is not None:
        result = adv.clip_rewards(result, config.reward_clip_range)
    result = jnp.where(keep, result, 0.0)
    penalty = jnp.zeros_like(scores)
    if config.kl_in_reward:
        # The reward of a response is that of its last token; dense rewards are in it.
        token_rewards = adv.place_scores(-config.beta * rewards.kl, result, rewards.lengths, "eos")
        result = jnp.where(trained & keep[:, None], adv.return_to_go(token_rewards, config.gamma, rewards.sampled), 0.0)
        penalty = config.beta * rewards.kl.sum(axis=1)
    if config.whiten_advantages:
        result = result if result.ndim == 2 else jnp.broadcast_to(result[:, None], trained.shape)
        result = adv.masked_whiten(result, trained & keep[:, None], ddof=config.whiten_ddof)
    return pg.Advantages(result, scores, penalty)


def subtract_baseline(rewards: pg.Rewards, config: GRPOOptions) -> Array:
    """Rewards minus the baseline of their group: [B]; 0 with one response to a prompt, or with 'none' its reward."""
    if config.baseline == "none":
        return rewards.scores
    scores, keep = (group_rows(x, rewards.group_size) for x in (rewards.scores, rewards.scorable))
    if config.baseline == "leave_one_out" and rewards.group_size > 1:
        return adv.leave_one_out(scores, keep).reshape(-1)
    return (scores - adv.group_mean(scores, keep)).reshape(-1)


def reward_deviations(rewards: pg.Rewards, config: GRPOOptions) -> Array:
    """Standard deviation of the rewards of each group, or with scale_rewards 'batch' of the batch: [B / G]."""
    scores, keep = (group_rows(x, rewards.group_size) for x in (rewards.scores, rewards.scorable))
    if config.scale_rewards == "batch":
        return jnp.broadcast_to(jnp.sqrt(adv.masked_var(scores, keep)), scores.shape[:1])
    return adv.group_std(scores, keep)[:, 0]


def normalize_then_sum(rewards: pg.Rewards) -> Array:
    """Each reward normalized by its group, their sum by the batch (GDPO): [B]."""
    each, size = rewards.each, rewards.group_size
    weights = jnp.asarray(rewards.weights or (1.0,) * each.shape[1], jnp.float32)
    applies = ~jnp.isnan(each) & rewards.scorable[:, None]
    total = adv.normalize_each_reward(group_rows(each, size), group_rows(applies, size), weights).reshape(-1)
    normalized, _ = adv.normalize(total, rewards.scorable, STD_EPSILON)
    # Their mean is 0 up to rounding, which must not become the advantage of a group of equal rewards.
    return jnp.where(total == 0, 0.0, normalized)


def rollout_metrics(rewards: pg.Rewards, result: pg.Advantages, config: GRPOOptions) -> Metrics:
    """`reward...` of a rollout, and with kl_in_reward `kl`, the mean over tokens: [] float32 each."""
    metrics = pg.group_metrics(rewards, result, config)
    kl = config.beta and config.kl_in_reward  # else the loss logs it
    return metrics | ({"kl": adv.masked_mean(rewards.kl, rewards.trained_mask)} if kl else {})


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


def clipped_terms(actions: Actions, config: GRPOOptions) -> tuple[Array, Metrics]:
    """The clipped ratio of PPO, with the bound `delta` (:3210-3218)."""
    high = pg.epsilon_high(config)
    log_ratio, options = actions.action_log_ratio, {"cliprange": config.epsilon, "cliprange_high": high}
    terms, _, _ = losses.policy_loss_terms(
        log_ratio, jnp.zeros_like(log_ratio), actions.advantages, **options, delta=config.delta
    )
    ratio = actions.ratio if config.delta is None else jnp.minimum(actions.ratio, config.delta)
    below = (ratio < 1 - config.epsilon) & (actions.advantages < 0)
    above = (ratio > 1 + high) & (actions.advantages > 0)
    return terms, {"clip_ratio/low": below, "clip_ratio/high": above}


def cispo_terms(actions: Actions, config: GRPOOptions) -> tuple[Array, Metrics]:
    """CISPO: REINFORCE weighted by the capped ratio (:3206-3208)."""
    cap = pg.epsilon_high(config)
    terms = losses.cispo_loss_terms(actions.logprobs, actions.ratio, actions.advantages, epsilon_high=cap)
    return terms, {"cispo_clip_ratio": (actions.ratio > cap) & (actions.advantages > 0)}


def sapo_terms(actions: Actions, config: GRPOOptions) -> tuple[Array, Metrics]:
    """SAPO's soft gate (:3219-3222)."""
    temperatures = {
        "temperature_pos": config.sapo_temperature_pos,
        "temperature_neg": config.sapo_temperature_neg,
    }
    return losses.sapo_loss_terms(actions.ratio, actions.advantages, **temperatures), {}


def vespo_terms(actions: Actions, config: GRPOOptions) -> tuple[Array, Metrics]:
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


def mean_of_row_means(terms: Array, mask: Array, counts: pg.Counts, config: GRPOOptions) -> Array:
    """Mean over responses of the mean over their tokens (:3250-3254)."""
    return jnp.sum(terms.sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1)) / counts.rows


def mean_of_row_sums(terms: Array, mask: Array, counts: pg.Counts, config: GRPOOptions) -> Array:
    """Mean over responses of the sum over their tokens (:3269-3276)."""
    return jnp.sum(terms) / counts.rows


def mean_of_tokens(terms: Array, mask: Array, counts: pg.Counts, config: GRPOOptions) -> Array:
    """Mean over the tokens of the minibatch, or of micro-batches (:3255-3258)."""
    return jnp.sum(terms) / pg.token_count(mask, counts.tokens, counts, config)


def mean_over_longest(terms: Array, mask: Array, counts: pg.Counts, config: GRPOOptions) -> Array:
    """Sum over tokens divided by responses times response_length (:3259-3262)."""
    return jnp.sum(terms) / (counts.rows * config.response_length)


def mean_of_batch_tokens(terms: Array, mask: Array, counts: pg.Counts, config: GRPOOptions) -> Array:
    """Sum over tokens divided by the tokens that a minibatch has on average in this batch (:3263-3268)."""
    return jnp.sum(terms) / jnp.maximum(counts.batch_tokens, 1.0 / config.num_mini_batches)


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


def has_entropy_bonus(config: GRPOOptions) -> bool:
    """Whether the loss has an entropy bonus."""
    return config.entropy_coef != 0.0 or config.use_adaptive_entropy


def needs(config: GRPOOptions) -> pg.Needs:
    """With a single optimizer step an update the behavior policy is the policy itself: no forward pass before it."""
    single = pg.steps_per_update(config) == 1 and config.old_logprobs == "forward"
    return pg.Needs(
        logprobs=not single or config.kl_in_reward,
        ref_logprobs=config.beta != 0 and not config.kl_in_reward,
        sampler_logprobs=True,
    )


def loss_and_metrics(
    models: Models, micro: Experience, counts: pg.Counts, config: GRPOOptions, entropy_coef: Array | None = None
) -> tuple[Array, tuple[Tally, dict[str, Array]]]:
    """The loss of one micro-batch: its share of the minibatch's (:3109-3340).

    Args:
      models: with whole params.
      micro: p groups.
      entropy_coef: [] float32, the adaptive coefficient; None: config.entropy_coef.

    Returns:
      (loss [], (Tally, {"logprobs", "entropy"} [p, G, T])).
    """
    loss_type, bonus = LOSSES[config.loss_type], has_entropy_bonus(config)

    def rows(x: Array) -> Array:  # [p, G, ...] -> [b, ...] or [b, 1]
        return x.reshape(micro.lengths.size, -1)

    mask = rows(micro.trained_mask)
    new_logprobs, entropy, _ = response_logprobs(
        models.policy, micro, config, dropout_keys=micro.dropout_keys, entropy_gradient=bonus
    )
    tokens = jax.lax.stop_gradient({"logprobs": new_logprobs, "entropy": entropy})
    logprobs, entropy = (jnp.where(mask, rows(x), 0.0) for x in (new_logprobs, entropy))
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
        keep = losses.off_policy_mask(actions.advantages, logprobs, sampler_logprobs, mask, threshold=threshold)
        terms = jnp.where(keep, terms, 0.0)
    selected, n_selected = mask, counts.tokens
    if config.top_entropy_quantile < 1:
        if micro.selected is None:  # the micro-batch is what the quantile is of
            selected = losses.high_entropy_mask(
                jax.lax.stop_gradient(entropy), mask, quantile=1 - config.top_entropy_quantile
            )
            n_selected = selected.sum().astype(jnp.float32)
        else:
            selected, n_selected = rows(micro.selected), counts.selected
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
    policy_loss = loss_type.aggregate(jnp.where(mask, terms, 0.0), mask, counts, config)
    loss = policy_loss
    if bonus:
        coef = config.entropy_coef if entropy_coef is None else entropy_coef
        mean = jnp.sum(jnp.where(selected, entropy, 0.0)) / pg.token_count(selected, n_selected, counts, config)
        loss = policy_loss - coef * mean
    tally = make_tally(
        actions,
        entropy=entropy,
        selected=selected,
        sampler_difference=jnp.where(mask, jnp.abs(old - sampler_logprobs), 0.0),
        present=rows(micro.lengths) >= 0,
        measured=measured,
    )
    return loss, (tally._replace(sums={**tally.sums, "loss": loss, "policy_loss": policy_loss}), tokens)


def select(models: Models, minibatch: Experience, config: GRPOOptions) -> Array | None:
    """Tokens of the highest entropy in a minibatch: [p, G, T] bool; None without top_entropy_quantile, and with
    token_mean_micro, where the quantile is of each micro-batch.

    Args:
      models: with whole params.
      minibatch: p groups.
    """
    if config.top_entropy_quantile == 1 or config.loss_aggregation == "token_mean_micro":
        return None
    parts, _ = pg.update_parts(models, minibatch, config)
    entropy = parts.map(lambda rows: response_logprobs(models.policy, rows, config, dropout_keys=rows.dropout_keys)[1])
    return losses.high_entropy_mask(entropy, minibatch.trained_mask, quantile=1 - config.top_entropy_quantile)


def initial_entropy_control(config: GRPOOptions) -> np.ndarray | None:
    """The coefficient that training starts with, and an entropy above every target, so that the first step has no bonus
    (:839); None where the coefficient is fixed."""
    return np.array([config.entropy_coef, np.inf], np.float32) if config.use_adaptive_entropy else None


def next_entropy_control(control: Array, tally: Tally, config: GRPOOptions) -> Array:
    """The adaptive entropy coefficient for the next optimizer step (Skywork-OR1; :3311-3330).

    Args:
      control: [2], the coefficient and the entropy of the step before.
      tally: of `loss_and_metrics` in this step.
    """
    entropy = tally.sums["entropy_selected"] / jnp.maximum(tally.sums["selected"], 1.0)
    step = jnp.where(entropy <= config.entropy_target, config.entropy_coef_delta, -config.entropy_coef_delta)
    coef = control[0] + step
    bounded = jnp.where(
        step >= 0, jnp.minimum(coef, config.entropy_coef_max), jnp.maximum(coef, config.entropy_coef_min)
    )
    return jnp.stack([bounded, entropy])


# --- metrics


def make_tally(
    actions: Actions, *, entropy: Array, selected: Array, sampler_difference: Array, present: Array, measured: Metrics
) -> Tally:
    """What `step_metrics` is made of, of a micro-batch.

    Args:
      actions: of b rows.
      entropy, sampler_difference: [b, T] float32, 0 outside the response.
      selected: [b, T] bool.
      present: [b, 1] bool.
      measured: [b, T] or [b, 1] by name, of the loss type.
    """
    actions, entropy, measured = jax.lax.stop_gradient((actions, entropy, measured))
    mask = actions.mask
    sums, least, greatest = measures.ratio_tally(actions.log_ratio, entropy, mask)
    sums |= {
        "entropy_selected": jnp.sum(jnp.where(selected, entropy, 0.0)),
        "selected": jnp.sum(selected).astype(jnp.float32),
        "squared_log_ratio": jnp.sum(jnp.square(actions.log_ratio)),
        "sampling_difference": jnp.sum(sampler_difference),
    }
    greatest |= {"sampling_difference": jnp.max(sampler_difference)}
    row_tokens = mask.sum(axis=1)

    def count(name: str, value: Array, extreme_of: Callable[[Array, Array], tuple[Array, Array]]) -> None:
        value = value.astype(jnp.float32)
        counted = mask if value.shape[1] > 1 else present
        value = jnp.where(counted, value, 0.0)
        sums[f"mean/{name}"], sums[f"count/{name}"] = jnp.sum(value), jnp.sum(counted).astype(jnp.float32)
        values, included = extreme_of(value, counted)
        least[name] = jnp.min(jnp.where(included, values, jnp.inf))
        greatest[name] = jnp.max(jnp.where(included, values, -jnp.inf))

    def row_means(value: Array, counted: Array) -> tuple[Array, Array]:
        included = present[:, 0] & ((row_tokens > 0) | (value.shape[1] == 1))
        return value.sum(axis=1) / jnp.maximum(counted.sum(axis=1), 1), included

    for name, value in measured.items():
        count(name, value, row_means)
    if actions.sampler_ratio is not None:
        count("is", actions.sampler_ratio, lambda value, counted: (value, counted))
    return Tally(sums, least, greatest)


def step_metrics(tally: Tally, config: GRPOOptions) -> Metrics:
    """The metrics of one optimizer step, of the tally of `loss_and_metrics`: [] float32 each."""
    sums, least, greatest = tally
    tokens = jnp.maximum(sums["tokens"], 1.0)

    def mean(name: str) -> Array:
        return sums[f"mean/{name}"] / jnp.maximum(sums[f"count/{name}"], 1.0)

    def finite(value: Array) -> Array:
        # A minibatch without a token to train on, as where all responses are truncated, has no least or greatest value.
        return jnp.where(jnp.isfinite(value), value, 0.0)

    metrics = {
        **measures.ratio_metrics(tally),
        "loss": sums["loss"],
        "loss/policy_avg": sums["policy_loss"],
        "policy/clipfrac_avg": jnp.float32(0.0),
        "policy/approxkl_avg": 0.5 * sums["squared_log_ratio"] / tokens,
        "sampling/sampling_logp_difference/mean": sums["sampling_difference"] / tokens,
        "sampling/sampling_logp_difference/max": greatest["sampling_difference"],
    }
    if has_entropy_bonus(config):
        metrics["policy_loss"] = sums["policy_loss"]
        if not config.use_adaptive_entropy:
            metrics["entropy_coef"] = jnp.float32(config.entropy_coef)
    if "kl" in least:
        metrics["kl"] = mean("kl")
    if "clip_ratio/low" in least:
        low, high = mean("clip_ratio/low"), mean("clip_ratio/high")
        metrics |= {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "clip_ratio/low_min": finite(least["clip_ratio/low"]),
            "clip_ratio/high_max": finite(greatest["clip_ratio/high"]),
            "policy/clipfrac_avg": low + high,
        }
    if "cispo_clip_ratio" in least:
        metrics["cispo_clip_ratio"] = metrics["policy/clipfrac_avg"] = mean("cispo_clip_ratio")
    if "vespo/phi_seq" in least:
        metrics["vespo/phi_seq_mean"] = mean("vespo/phi_seq")
    if "is" in least:
        metrics |= {
            "sampling/importance_sampling_ratio/min": finite(least["is"]),
            "sampling/importance_sampling_ratio/mean": mean("is"),
            "sampling/importance_sampling_ratio/max": finite(greatest["is"]),
        }
    return metrics


OBJECTIVE = pg.Objective(
    advantages=advantages,
    loss=loss_and_metrics,
    step_metrics=step_metrics,
    needs=needs,
    rollout_metrics=rollout_metrics,
    select=select,
    control=next_entropy_control,
)
make_experience = functools.partial(pg.make_experience, objective=OBJECTIVE)
update = functools.partial(pg.update, objective=OBJECTIVE)
eval_metrics = functools.partial(pg.eval_metrics, objective=OBJECTIVE)
