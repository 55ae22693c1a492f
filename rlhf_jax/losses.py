"""Log-probabilities and losses, one function one equation. Arrays in, arrays out; all may be jitted and differentiated.

Shape letters: B rows, T positions, V vocabulary. Reductions are float32 (float64 under x64). The `*_terms` functions
return one number per token, for algorithms that sum them and divide by their own count; the `clipped_*_loss` functions
return the masked mean. Line numbers are those of `trl/experimental/ppo/ppo_trainer.py` in TRL 1.12.0 unless another
file is named.
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.types import Array

INVALID_LOGPROB = 1.0
"""Replaces the log-probability of a position without a token: on both sides, so that the ratio is 1 and the KL 0."""


def _float(x: Array) -> Array:
    """At least float32: half precision is widened before anything is summed."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _mean(x: Array, mask: Array) -> Array:
    return jnp.where(mask, x, 0).sum() / jnp.maximum(mask.sum(), 1).astype(x.dtype)


# ---------------------------------------------------------------------------------------------------- log-probabilities


def _below_largest(logits: Array) -> Array:
    """Logits minus their maximum, which the gradient treats as a constant."""
    return logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))


def logprobs_from_logits(logits: Array, tokens: Array) -> Array:
    """log softmax(logits)[token] = logits[token] - logsumexp(logits).

    Args: logits [..., V] float, already divided by the temperature; tokens [...] int, 0..V-1. Returns float32 [...].
    Source: TRL `selective_log_softmax` (trainer/utils.py), float32 branch; the maximum is subtracted first, so
    that large logits keep their precision, as in torch's log_softmax.
    """
    logits, tokens = _float(logits), jnp.asarray(tokens)
    chex.assert_type(tokens, int)
    chex.assert_shape(tokens, logits.shape[:-1])
    return _chosen(logits, tokens)


@jax.custom_jvp
def _chosen(logits: Array, tokens: Array) -> Array:
    shifted = _below_largest(logits)
    chosen = jnp.take_along_axis(shifted, tokens[..., None], axis=-1)[..., 0]
    return chosen - jnp.log(jnp.exp(shifted).sum(axis=-1))


@_chosen.defjvp
def _chosen_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    # The derivative 1[token] - softmax needs one pass over the vocabulary; autodiff of the formula needs three.
    logits, tokens = primals
    weights = jnp.exp(_below_largest(logits))
    is_token = jax.lax.broadcasted_iota(tokens.dtype, logits.shape, logits.ndim - 1) == tokens[..., None]
    slope = is_token.astype(logits.dtype) - weights / weights.sum(axis=-1, keepdims=True)
    return _chosen(logits, tokens), (slope * tangents[0]).sum(axis=-1)


def entropy_from_logits(logits: Array) -> Array:
    """H = logsumexp(z) - sum softmax(z) z of the categorical distribution; z may hold -inf for excluded tokens.

    Args: logits [..., V] float. Returns float32 [...], 0..log V. Source: TRL :855-856. The maximum is subtracted first:
    without it large logits cancel badly.
    """
    logits = _float(logits)
    shifted = _below_largest(logits)
    finite = jnp.where(jnp.isneginf(shifted), 0, shifted)
    weights = jnp.exp(shifted)
    total = weights.sum(axis=-1)
    return jnp.log(total) - (weights * finite).sum(axis=-1) / total


# ------------------------------------------------------------------------------------------------------------------ PPO


def policy_loss_terms(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    *,
    cliprange: float,
    cliprange_high: float | None = None,
) -> tuple[Array, Array, Array]:
    """max(-A r, -A clip(r, 1 - cliprange, 1 + cliprange_high)) per token, with r = exp(logp - old).

    Args: logprobs, old_logprobs, advantages, one shape, float; cliprange_high: default cliprange. Positions without a
    token hold INVALID_LOGPROB on both sides. Returns (losses float32, clipped bool, ratio float32), the same shape;
    clipped: the clip made the loss larger. Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7; TRL :841-845.
    """
    logprobs, old_logprobs, advantages = _float(logprobs), _float(old_logprobs), _float(advantages)
    chex.assert_equal_shape([logprobs, old_logprobs, advantages])
    high = cliprange if cliprange_high is None else cliprange_high
    ratio = jnp.exp(logprobs - old_logprobs)
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - cliprange, 1 + high)
    return jnp.maximum(plain, clipped), clipped > plain, ratio


def clipped_policy_loss(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    *,
    cliprange: float,
    cliprange_high: float | None = None,
) -> Array:
    """PPO's clipped policy loss: the mean of `policy_loss_terms` where mask.

    Args: logprobs, old_logprobs, advantages float, mask bool, one shape (mask: `advantages.response_mask`).
    Returns float32 []; 0 for an empty mask. Masked elements are never read. Source: as `policy_loss_terms`; TRL :846.
    """
    mask = jnp.asarray(mask)
    chex.assert_type(mask, bool)
    chex.assert_equal_shape([logprobs, old_logprobs, advantages, mask])
    logprobs, old_logprobs = (jnp.where(mask, _float(x), INVALID_LOGPROB) for x in (logprobs, old_logprobs))
    advantages = jnp.where(mask, _float(advantages), 0)
    losses, _, _ = policy_loss_terms(
        logprobs, old_logprobs, advantages, cliprange=cliprange, cliprange_high=cliprange_high
    )
    return _mean(losses, mask)


def dual_clip_terms(losses: Array, advantages: Array, *, dual_clip: float) -> tuple[Array, Array]:
    """min(loss, -dual_clip A) where A < 0, the loss itself elsewhere, per token.

    Args: losses (of `policy_loss_terms`), advantages, one shape, float; dual_clip above 1. Returns (losses float32,
    clipped bool), the same shape; clipped: the bound made the loss smaller.
    Source: Ye et al. 2020 (arXiv 1912.09729), dual-clip PPO; verl `clip_ratio_c`.
    """
    losses, advantages = _float(losses), _float(advantages)
    chex.assert_equal_shape([losses, advantages])
    bound = -dual_clip * advantages
    return jnp.where(advantages < 0, jnp.minimum(losses, bound), losses), (advantages < 0) & (losses > bound)


def reinforce_loss_terms(logprobs: Array, advantages: Array) -> Array:
    """-A log pi of an action: its gradient is REINFORCE's, without ratio or clip.

    Args: logprobs, advantages, one shape, float. Returns float32, the same shape.
    Source: Williams 1992; Ahmadian et al. 2024 (arXiv 2402.14740), equation 7, where an action is a whole response.
    """
    logprobs, advantages = _float(logprobs), _float(advantages)
    chex.assert_equal_shape([logprobs, advantages])
    return -advantages * logprobs


def value_loss_terms(
    values: Array, old_values: Array, returns: Array, *, cliprange_value: float
) -> tuple[Array, Array]:
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) per token.

    Args: values, old_values, returns, one shape, float. Returns (losses float32, clipped bool), the same shape;
    clipped: the clip made the loss larger. Source: OpenAI baselines `ppo2`; TRL :829-836.
    """
    values, old_values, returns = _float(values), _float(old_values), _float(returns)
    chex.assert_equal_shape([values, old_values, returns])
    near = jnp.clip(values, old_values - cliprange_value, old_values + cliprange_value)
    plain, clipped = jnp.square(values - returns), jnp.square(near - returns)
    return 0.5 * jnp.maximum(plain, clipped), clipped > plain


def clipped_value_loss(
    values: Array, old_values: Array, returns: Array, mask: Array, *, cliprange_value: float
) -> Array:
    """PPO's clipped value loss: the mean of `value_loss_terms` where mask, 0.5 included, vf_coef not.

    Args: values, old_values, returns float, mask bool, one shape (mask: `advantages.value_mask`).
    Returns float32 []; 0 for an empty mask. Masked elements are never read. Source: as `value_loss_terms`; TRL :837.
    """
    mask = jnp.asarray(mask)
    chex.assert_type(mask, bool)
    chex.assert_equal_shape([values, old_values, returns, mask])
    values, old_values, returns = (jnp.where(mask, _float(x), 0) for x in (values, old_values, returns))
    losses, _ = value_loss_terms(values, old_values, returns, cliprange_value=cliprange_value)
    return _mean(losses, mask)


# ----------------------------------------------------------------------------------------- reward model and fine-tuning


def pairwise_reward_loss(
    chosen: Array,
    rejected: Array,
    margin: Array | None = None,
    center_coefficient: float | None = None,
) -> Array:
    """-log sigmoid(chosen - rejected - margin) + center_coefficient * (chosen + rejected)^2, per pair.

    Args: chosen, rejected [B] float, scores of a pair; margin [B] float or None (0); center_coefficient or None (0).
    Returns float32 [B]. Source: Bradley-Terry as in Stiennon et al. 2020; margin: Llama 2 (arXiv 2307.09288),
    equation 2; centring: Eisenstein et al. 2023 (arXiv 2312.09244); reward_trainer.py:753-760.
    """
    chosen, rejected = _float(chosen), _float(rejected)
    chex.assert_rank([chosen, rejected], 1)
    chex.assert_equal_shape([chosen, rejected])
    gap = chosen - rejected
    if margin is not None:
        chex.assert_equal_shape([chosen, margin])
        gap = gap - _float(margin)
    losses = -jax.nn.log_sigmoid(gap)
    if center_coefficient is not None:
        losses = losses + center_coefficient * jnp.square(chosen + rejected)
    return losses


def cross_entropy(logits: Array, labels: Array, mask: Array) -> Array:
    """-log softmax(logits)[label] where mask, 0 elsewhere. Shift before: logits of column t predict label t.

    Args: logits [..., V] float; labels [...] int, any value where masked; mask [...] bool. Returns float32 [...];
    divide the sum by mask.sum() for the mean loss.
    """
    logits, labels, mask = jnp.asarray(logits), jnp.asarray(labels), jnp.asarray(mask)
    chex.assert_type([labels, mask], [int, bool])
    chex.assert_equal_shape([labels, mask])
    logits = jnp.where(mask[..., None], logits, 0)
    return jnp.where(mask, -logprobs_from_logits(logits, jnp.where(mask, labels, 0)), 0)
