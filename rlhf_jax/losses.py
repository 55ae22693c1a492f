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

LARGEST_LOG_RATIO = 80.0
"""e^80 is 5.5e34; float32 ends at e^88.7."""


def importance_ratio(log_ratio: Array) -> Array:
    """exp(log_ratio), at most e^80.

    The gradient is the ratio times the gradient of log_ratio, above the bound too. Where the ratio is clipped the
    gradient is 0; with an infinite ratio it would be 0 * inf = nan. An unclipped ratio of this size ends the run by its
    gradient norm.

    Args: log_ratio [...] float, logp - old, of a token or summed over a response. Returns float32 [...].
    Source: Schulman et al. 2017 (arXiv 1707.06347), section 3; the bound is ours.
    """
    log_ratio = _float(log_ratio)
    return jnp.exp(log_ratio - jax.lax.stop_gradient(jnp.maximum(log_ratio - LARGEST_LOG_RATIO, 0)))


def policy_loss_terms(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    *,
    cliprange: float,
    cliprange_high: float | None = None,
    delta: float | None = None,
) -> tuple[Array, Array, Array]:
    """max(-A min(r, delta), -A clip(r, 1 - cliprange, 1 + cliprange_high)) per action, with r = exp(logp - old).

    Args: logprobs, old_logprobs, one shape, float: of tokens, or of responses summed or averaged over their tokens;
    advantages float, a shape that broadcasts with theirs; cliprange_high: default cliprange; delta: upper bound of the
    unclipped ratio, None for none. Positions without a token hold one number on both sides. Returns (losses float32,
    clipped bool, ratio float32); clipped: the clip made the loss larger. Source: Schulman et al. 2017 (arXiv
    1707.06347), equation 7; Shao et al. 2024 (GRPO, arXiv 2402.03300), equation 3; delta: INTELLECT-2 (arXiv
    2505.07291); TRL ppo_trainer.py:841-845, grpo_trainer.py:3210-3218.
    """
    logprobs, old_logprobs, advantages = _float(logprobs), _float(old_logprobs), _float(advantages)
    chex.assert_equal_shape([logprobs, old_logprobs])
    high = cliprange if cliprange_high is None else cliprange_high
    ratio = importance_ratio(logprobs - old_logprobs)
    plain = -advantages * (ratio if delta is None else jnp.minimum(ratio, delta))
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

    Args: logprobs, old_logprobs, advantages float, mask bool, one shape (mask: `advantages.response_mask`); cliprange,
    cliprange_high as `policy_loss_terms`. Returns float32 []; 0 for an empty mask. Masked elements are never read.
    Source: as `policy_loss_terms`; TRL :846.
    """
    mask = jnp.asarray(mask)
    chex.assert_type(mask, bool)
    chex.assert_equal_shape([logprobs, old_logprobs, advantages, mask])
    logprobs, old_logprobs, advantages = (jnp.where(mask, _float(x), 0) for x in (logprobs, old_logprobs, advantages))
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

    Args: values, old_values, returns, one shape, float; cliprange_value: c. Returns (losses float32, clipped bool), the
    same shape; clipped: the clip made the loss larger. Source: OpenAI baselines `ppo2`; TRL :829-836.
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

    Args: values, old_values, returns float, mask bool, one shape (mask: `advantages.value_mask`); cliprange_value: c.
    Returns float32 []; 0 for an empty mask. Masked elements are never read. Source: as `value_loss_terms`; TRL :837.
    """
    mask = jnp.asarray(mask)
    chex.assert_type(mask, bool)
    chex.assert_equal_shape([values, old_values, returns, mask])
    values, old_values, returns = (jnp.where(mask, _float(x), 0) for x in (values, old_values, returns))
    losses, _ = value_loss_terms(values, old_values, returns, cliprange_value=cliprange_value)
    return _mean(losses, mask)


# ---------------------------------------------------------------------------------------------- group policy gradients

# Ratios r, advantages A and masks broadcast against each other: r [B, T] of tokens or [B, 1] of sequences, A [B, T] or
# [B, 1]. Line numbers are those of `trl/trainer/grpo_trainer.py` in TRL 1.12.0.


def sequence_log_ratio(log_ratio: Array, mask: Array) -> Array:
    """The mean log-ratio of a response: log of GSPO's length-normalised sequence ratio.

    Args: log_ratio [B, T] float, logp - old; mask [B, T] bool. Returns float32 [B, 1]; 0 for an empty row.
    Source: Zheng et al. 2025 (GSPO, arXiv 2507.18071), equation 7; :3186-3188.
    """
    log_ratio, mask = _float(log_ratio), jnp.asarray(mask)
    chex.assert_rank([log_ratio, mask], 2)
    total = jnp.where(mask, log_ratio, 0).sum(axis=1, keepdims=True)
    return total / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)


def cispo_loss_terms(logprobs: Array, ratio: Array, advantages: Array, *, epsilon_high: float) -> Array:
    """-stop_gradient(min(r, epsilon_high)) A log pi: REINFORCE weighted by a ratio that is capped, on one side only.

    Args: logprobs [B, T], ratio, advantages float; epsilon_high: the cap itself, not its distance from 1.
    Returns float32 of their common shape. Source: MiniMax-M1 (CISPO, arXiv 2506.13585), with the cap of ScaleRL (arXiv
    2510.13786); :3206-3208.
    """
    logprobs, ratio, advantages = _float(logprobs), _float(ratio), _float(advantages)
    return -jax.lax.stop_gradient(jnp.minimum(ratio, epsilon_high)) * advantages * logprobs


def sapo_loss_terms(ratio: Array, advantages: Array, *, temperature_pos: float, temperature_neg: float) -> Array:
    """-(4 / tau) sigmoid(tau (r - 1)) A, with tau by the sign of A: a soft gate instead of a clip.

    Args: ratio, advantages float, [B, T] or [B, 1] each; temperature_pos: tau where A > 0; temperature_neg: elsewhere.
    Returns float32 of their common shape. Source: SAPO (arXiv 2511.20347); :3219-3222.
    """
    ratio, advantages = _float(ratio), _float(advantages)
    tau = jnp.where(advantages > 0, temperature_pos, temperature_neg)
    return -jax.nn.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


def vespo_weights(
    log_ratio: Array,
    advantages: Array,
    mask: Array,
    *,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
    sampler_ratio: Array | None = None,
) -> Array:
    """phi(w) = e^lambda w^k e^(-lambda w) of a response's ratio w = prod_t r_t, without gradient; phi(1) = 1.

    ln w is the sum of log-ratios, each within 20 of 0, and lies within ln 1e-8 and 20; k and lambda by the sign of A.

    Args: log_ratio [B, T] float, logp - old; advantages [B, 1] or [B, T] float; mask [B, T] bool; sampler_ratio
    [B, T] float, old over sampler (`sampler_ratio`), multiplied into w; None: 1; k_pos, lambda_pos: k and lambda where
    A >= 0; k_neg, lambda_neg: elsewhere. Returns float32 of the shape of advantages; 0 where it is not finite.
    Source: VESPO (arXiv 2602.10693); :3061-3107.
    """
    log_ratio, advantages, mask = _float(log_ratio), _float(advantages), jnp.asarray(mask)
    lowest = jnp.log(1e-8)
    log_w = jnp.where(mask, jnp.clip(log_ratio, -20.0, 20.0), 0).sum(axis=1, keepdims=True)
    if sampler_ratio is not None:
        log_w = log_w + jnp.clip(jnp.log(_float(sampler_ratio)), lowest, 20.0).sum(axis=1, keepdims=True)
    log_w = jax.lax.stop_gradient(jnp.clip(log_w, lowest, 20.0))
    k = jnp.where(advantages >= 0, k_pos, k_neg)
    lam = jnp.maximum(jnp.where(advantages >= 0, lambda_pos, lambda_neg), 1e-4)
    weights = jnp.exp(lam + k * log_w - lam * jnp.exp(log_w))
    return jnp.where(jnp.isfinite(weights), weights, 0)


def off_policy_mask(
    advantages: Array, logprobs: Array, sampler_logprobs: Array, mask: Array, *, threshold: float
) -> Array:
    """Whether a response is kept: A >= 0, or the mean of log(sampler / policy) over its tokens is at most threshold.

    Args: advantages [B, 1] or [B, T] float; logprobs, sampler_logprobs [B, T] float; mask [B, T] bool.
    Returns bool of the shape of advantages. Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 9; :3034-3059.
    """
    mask = jnp.asarray(mask)
    kl = jnp.where(mask, _float(sampler_logprobs) - jax.lax.stop_gradient(_float(logprobs)), 0)
    mean = kl.sum(axis=1, keepdims=True) / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
    return (_float(advantages) >= 0) | (mean <= threshold)


def high_entropy_mask(entropy: Array, mask: Array, *, quantile: float) -> Array:
    """Tokens whose entropy is at least the given quantile of all tokens where mask, interpolated linearly.

    Args: entropy [...] float; mask [...] bool; quantile in [0, 1]. Returns bool [...], False outside the mask.
    Source: Wang et al. 2025 (Beyond the 80/20 rule, arXiv 2506.01939); :1409-1446.
    """
    entropy, mask = _float(entropy), jnp.asarray(mask)
    chex.assert_equal_shape([entropy, mask])
    ordered = jnp.sort(jnp.where(mask, entropy, jnp.inf).reshape(-1))
    position = quantile * jnp.maximum(mask.sum() - 1, 0).astype(entropy.dtype)
    low = jnp.floor(position).astype(jnp.int32)
    high = jnp.ceil(position).astype(jnp.int32)
    fraction = position - low
    # The upper neighbour is read with weight 0 at a whole position, where it may be infinite.
    above = jnp.where(fraction > 0, ordered[high] - ordered[low], 0)
    return mask & (entropy >= ordered[low] + fraction * above)


def sampler_ratio(
    logprobs: Array,
    sampler_logprobs: Array,
    mask: Array,
    *,
    mode: str,
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> Array:
    """The importance ratio of learner over sampler: of each token, or of the response (the product over its tokens).

    token_truncate, sequence_truncate: clipped to [clip_min, clip_max]; token_mask, sequence_mask: 0 outside of it.

    Args: logprobs, sampler_logprobs [B, T] float; mask [B, T] bool; mode; clip_min, clip_max: None for no bound.
    Returns float32 [B, T] (1 outside the mask) or [B, 1]. Raises ValueError for another mode.
    Source: truncated importance sampling (Yao et al. 2025, Your efficient RL framework secretly brings you off-policy
    RL training); masked: IcePop (arXiv 2510.18855); :2678-2722.
    """
    level, _, bound = mode.partition("_")
    if level not in ("token", "sequence") or bound not in ("truncate", "mask"):
        raise ValueError(f"mode is token_truncate, token_mask, sequence_truncate or sequence_mask, not {mode!r}")
    difference = jnp.where(jnp.asarray(mask), _float(logprobs) - _float(sampler_logprobs), 0)
    if level == "sequence":
        difference = difference.sum(axis=1, keepdims=True)
    ratio = jnp.exp(difference)
    if bound == "truncate":
        return jnp.clip(ratio, clip_min, clip_max)
    low, high = -jnp.inf if clip_min is None else clip_min, jnp.inf if clip_max is None else clip_max
    return jnp.where((ratio < low) | (ratio > high), 0, ratio)


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
