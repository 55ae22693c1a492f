"""From scores to advantages: one function, one equation. Arrays in, arrays out; all may be jitted and differentiated.

Shape letters: B rows, T response positions, G responses to one prompt. Reductions are float32 (float64 under x64).
`length` counts response tokens, the stop token included: TRL's `sequence_length + 1`. Line numbers are those of
`trl/experimental/ppo/ppo_trainer.py` in TRL 1.12.0 unless another file is named.
"""

from __future__ import annotations

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.types import Array


def _float(x: Array) -> Array:
    """At least float32: half precision is widened before any sum."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# ---------------------------------------------------------------------------------------------------------------- masks


def first_true(x: Array) -> Array:
    """Column of the first True in each row, T where there is none.

    Args: x [B, T] bool. Returns [B] int32. Source: TRL `first_true_indices`, experimental/utils.py:723-743.
    """
    x = jnp.asarray(x)
    chex.assert_rank(x, 2)
    chex.assert_type(x, bool)
    return jnp.where(x.any(axis=1), jnp.argmax(x, axis=1), x.shape[1]).astype(jnp.int32)


def is_any(tokens: Array, ids: Sequence[int]) -> Array:
    """Whether each token is one of `ids`, which must not be empty.

    Args: tokens [...] int; ids. Returns [...] bool.
    """
    matches = tokens == ids[0]
    for other in ids[1:]:
        matches = matches | (tokens == other)
    return matches


def response_lengths(tokens: Array, stop_token_ids: int | Sequence[int]) -> Array:
    """Number of tokens up to and including the first stop token, T where there is none.

    Args: tokens [B, T] int; stop_token_ids, one or several. Returns [B] int32, 1..T.
    Source: TRL `truncate_response`, :168-188, which keeps the stop token.
    """
    tokens = jnp.asarray(tokens)
    chex.assert_rank(tokens, 2)
    chex.assert_type(tokens, int)
    ids = (stop_token_ids,) if isinstance(stop_token_ids, int) else stop_token_ids
    return jnp.minimum(first_true(is_any(tokens, ids)) + 1, tokens.shape[1])


def response_mask(lengths: Array, length: int) -> Array:
    """Columns that hold a response token: column < lengths. Policy terms are taken here, stop token included.

    Args: lengths [B] int, 0..T; length: T. Returns [B, T] bool. Source: TRL `~padding_mask`, :763-766.
    """
    lengths = jnp.asarray(lengths)
    chex.assert_rank(lengths, 1)
    chex.assert_type(lengths, int)
    return jnp.arange(length)[None, :] < lengths[:, None]


def value_mask(lengths: Array, length: int) -> Array:
    """Columns that hold a value when the score lands after eos: column < lengths + 1.

    Args: lengths [B] int, 0..T; length: T. Returns [B, T] bool. Source: TRL `~padding_mask_p1`, :767-769.
    """
    lengths = jnp.asarray(lengths)
    return response_mask(lengths + 1, length)


# ---------------------------------------------------------------------------------------------------- masked statistics


def masked_mean(x: Array, mask: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """mean of x where mask: sum(x * mask) / max(sum(mask), 1). Masked elements are never read, even NaN.

    The mean of equal values is their value, bit for bit: deviations from it are exactly 0.

    Args: x, any shape; mask of the same shape, bool; axis to reduce (None: all). Returns float32 without `axis`; 0 for
    an empty mask. Source: TRL `masked_mean`, :237-242, which divides by 0 there.
    """
    x, mask = _float(x), jnp.asarray(mask)
    chex.assert_equal_shape([x, mask])
    chex.assert_type(mask, bool)
    mean = jnp.where(mask, x, 0).sum(axis) / jnp.maximum(mask.sum(axis), 1).astype(x.dtype)
    return _within_range(mean, x, mask, axis)


def _within_range(
    mean: Array, x: Array, mask: Array, axis: int | tuple[int, ...] | None, keepdims: bool = False
) -> Array:
    """`mean` of x where mask, moved into the range of those values, which rounding of their sum may have left: in
    float32 the sum of eight 100.3 divided by 8 is not 100.3. Its gradient is that of `mean`."""
    low = jnp.where(mask, x, jnp.inf).min(axis, keepdims=keepdims, initial=jnp.inf)
    high = jnp.where(mask, x, -jnp.inf).max(axis, keepdims=keepdims, initial=-jnp.inf)
    inside = jnp.clip(mean, low, high)
    move = (low <= high) & (inside != mean)  # an empty mask, infinities and NaN stay
    return mean + jax.lax.stop_gradient(jnp.where(move, inside - mean, 0))


def masked_var(x: Array, mask: Array, ddof: int = 1) -> Array:
    """Variance of x where mask: sum(mask * (x - mean)^2) / max(sum(mask) - ddof, 1).

    Args: x, any shape; mask of the same shape, bool; ddof: 1 (TRL's Bessel correction) or 0 (OpenAI, N+).
    Returns float32 []; 0 for a mask of one element or none. Source: TRL `masked_var`, :245-261, which is infinite or
    raises there.
    """
    x, mask = _float(x), jnp.asarray(mask)
    mean = masked_mean(x, mask)
    squares = jnp.where(mask, jnp.square(jnp.where(mask, x, mean) - mean), 0)
    return squares.sum() / jnp.maximum(mask.sum() - ddof, 1).astype(x.dtype)


def masked_whiten(x: Array, mask: Array, *, shift_mean: bool = True, ddof: int = 1, eps: float = 1e-8) -> Array:
    """(x - mean) / sqrt(var + eps) where mask, 0 elsewhere; the mean is added back unless `shift_mean`.

    Args: x, any shape; mask of the same shape, bool; ddof as in `masked_var`. Returns float32, the shape of x.
    Source: TRL `masked_whiten`, :264-270 (ddof 1); N+ and lm-human-preferences `whiten` (ddof 0).
    """
    x, mask = _float(x), jnp.asarray(mask)
    mean = masked_mean(x, mask)
    white = (jnp.where(mask, x, mean) - mean) * jax.lax.rsqrt(masked_var(x, mask, ddof) + eps)
    return jnp.where(mask, white if shift_mean else white + mean, 0)


# ------------------------------------------------------------------------------------------------------ KL and rewards


def kl_penalty(logprobs: Array, ref_logprobs: Array, estimator: str = "k1") -> Array:
    """KL(policy || reference) of a sampled token, estimated from one draw; logr = ref - logp.

    k1 = -logr (unbiased), k2 = logr^2 / 2 (biased, low variance), k3 = exp(logr) - 1 - logr (unbiased, never negative).

    Args: logprobs, ref_logprobs, one shape, float; estimator k1, k2 or k3. Returns float32, the same shape.
    Raises ValueError for another estimator. Source: Schulman, Approximating KL Divergence (2020); TRL :773-774 (no k2).
    """
    logprobs, ref_logprobs = _float(logprobs), _float(ref_logprobs)
    chex.assert_equal_shape([logprobs, ref_logprobs])
    logr = ref_logprobs - logprobs
    if estimator == "k1":
        return -logr
    if estimator == "k2":
        return jnp.square(logr) / 2
    if estimator == "k3":
        return jnp.expm1(logr) - logr
    raise ValueError(f"kl_estimator is k1, k2 or k3, not {estimator!r}")


def adaptive_kl(kl_coef: Array, kl: Array, *, target: float, horizon: float, n_steps: int) -> Array:
    """kl_coef * (1 + e * n_steps / horizon) with e = clip(kl / target - 1, -0.2, 0.2).

    Args: kl_coef, kl [] float, the mean KL per response; target: the desired KL; horizon and n_steps in episodes.
    Returns float32 []. Source: Ziegler et al. 2019, section 2.2; lm-human-preferences `AdaptiveKLController`.
    """
    kl_coef, kl = _float(kl_coef), _float(kl)
    chex.assert_rank([kl_coef, kl], 0)
    error = jnp.clip(kl / target - 1, -0.2, 0.2)
    return kl_coef * (1 + error * n_steps / horizon)


def place_scores(rewards: Array, scores: Array, lengths: Array, position: str = "after_eos") -> Array:
    """Adds the score of each response to one column of its rewards.

    after_eos: column min(length, T - 1), one past the stop token where there is room (OpenAI, TRL).
    eos: column max(length - 1, 0), the last token itself.

    Args: rewards [B, T] float; scores [B] float; lengths [B] int, 0..T. Returns float32 [B, T].
    Raises ValueError for another position. Source: TRL :777-779, `actual_end`.
    """
    rewards, scores, lengths = _float(rewards), _float(scores), jnp.asarray(lengths)
    chex.assert_rank([rewards, scores, lengths], [2, 1, 1])
    chex.assert_equal_shape_prefix([rewards, scores, lengths], 1)
    chex.assert_type(lengths, int)
    rows, steps = rewards.shape
    if position == "after_eos":
        columns = jnp.minimum(lengths, steps - 1)
    elif position == "eos":
        columns = jnp.maximum(lengths - 1, 0)
    else:
        raise ValueError(f"score_position is after_eos or eos, not {position!r}")
    return rewards.at[jnp.arange(rows), columns].add(scores.astype(rewards.dtype))


# ----------------------------------------------------------------------------------------------------------- advantages


def gae(
    rewards: Array, values: Array, *, gamma: float | Array, lam: float | Array, mask: Array | None = None
) -> tuple[Array, Array]:
    """Generalised advantage estimation over whole rows; nothing follows the last column.

    delta_t = r_t + gamma * V_{t+1} - V_t with V_T = 0,  A_t = delta_t + gamma * lam * A_{t+1},  returns_t = A_t + V_t

    Columns after the end of a response take part, so give them reward 0 and value 0. Columns outside the mask do not:
    t + 1 is the next column inside it, and their own advantages and returns are 0.

    Args: rewards, values [B, T] float; gamma in [0, 1], or [B, T] float, from each column to the next; lam the same, or
    [B] float, one of each row; mask [B, T] bool, None: all columns. Returns (advantages, returns), each float32 [B, T].
    Source: Schulman et al. 2016 (arXiv 1506.02438), equations 11, 12 and 16; TRL :787-796.
    """
    rewards, values = _float(rewards), _float(values)
    chex.assert_rank([rewards, values], 2)
    chex.assert_equal_shape([rewards, values])

    def step(carry: tuple[Array, Array], column: tuple) -> tuple[tuple[Array, Array], Array]:
        advantage, next_value = carry
        reward, value, inside, column_gamma, column_lam = column
        discount = gamma if column_gamma is None else column_gamma
        decay = lam if column_lam is None else column_lam
        delta = reward + discount * next_value - value
        here = delta + discount * decay * advantage
        if inside is None:
            return (here, value), here
        after = jnp.where(inside, here, advantage), jnp.where(inside, value, next_value)
        return after, jnp.where(inside, here, 0)

    rewards, values = (x.astype(jnp.promote_types(rewards.dtype, values.dtype)) for x in (rewards, values))
    if jnp.ndim(lam) > 0:
        lam = jnp.asarray(lam).astype(values.dtype)
        chex.assert_shape(lam, values.shape[: lam.ndim])
    if jnp.ndim(gamma) > 0:
        gamma = jnp.asarray(gamma).astype(values.dtype)
        chex.assert_shape(gamma, values.shape)
    end = jnp.zeros_like(values[:, 0])
    of_columns = (jnp.asarray(x).T if jnp.ndim(x) == 2 else None for x in (gamma, lam))
    columns = (rewards.T, values.T, None if mask is None else mask.T, *of_columns)
    _, advantages = jax.lax.scan(step, (end, end), columns, reverse=True)
    if mask is None:
        return advantages.T, advantages.T + values
    return advantages.T, jnp.where(mask, advantages.T + values, 0)


def between_turns(x: float, mask: Array | None) -> float | Array:
    """gamma or lambda that apply once a turn: `x` from the last token of a turn to the next turn, 1 within a turn.

    Args: x in [0, 1]; mask [B, T] bool, False at tokens that came from elsewhere between two turns; None: there is one
    turn. Returns float32 [B, T], or 1 for one turn.
    """
    if mask is None:
        return 1.0
    following = jnp.concatenate([mask[:, 1:], jnp.ones_like(mask[:, :1])], axis=1)
    return jnp.where(mask & ~following, x, 1.0)


def length_adaptive_lam(lengths: Array, alpha: float) -> Array:
    """lambda = 1 - 1 / (alpha * length), at least 0: longer responses get a lambda closer to 1.

    Args: lengths [B] int, 0..T, where 0 counts as 1; alpha above 0. Returns float32 [B], 0..1.
    Source: VAPO (arXiv 2504.05118), section 4.2.
    """
    lengths = jnp.asarray(lengths)
    chex.assert_rank(lengths, 1)
    chex.assert_type(lengths, int)
    return jnp.maximum(1 - 1 / (alpha * _float(jnp.maximum(lengths, 1))), 0)


def leave_one_out(rewards: Array, keep: Array | None = None) -> Array:
    """r_i minus the mean of the other rewards of its group: A_i = r_i - sum_{j != i} r_j / (G - 1).

    With `keep`, a reward that is not kept is in no baseline and has advantage 0; so has the only kept one of its
    group. Rewards that are not kept are never read, even NaN. Equal rewards have advantages of exactly 0.

    Args: rewards [..., G] float, G >= 2, a group in the last axis; keep bool, the same shape.
    Returns float32 [..., G]; each group sums to 0. Raises ValueError for G < 2.
    Source: Ahmadian et al. 2024 (arXiv 2402.14740), equation 8; rloo_trainer.py:1584-1606.
    """
    rewards = _float(rewards)
    group = rewards.shape[-1]
    if group < 2:
        raise ValueError(f"leave-one-out needs groups of 2 responses or more, not {group}")
    keep = jnp.ones(rewards.shape, bool) if keep is None else keep
    rewards = jnp.where(keep, rewards, 0)
    other_count = keep.sum(-1, keepdims=True) - 1
    baseline = (rewards.sum(-1, keepdims=True) - rewards) / jnp.maximum(other_count, 1)
    baseline = _within_range(baseline, rewards, keep, -1, keepdims=True)
    return jnp.where(keep & (other_count > 0), rewards - baseline, 0)


def group_mean(rewards: Array, keep: Array) -> Array:
    """Mean of the kept rewards of each group, each reward's own included: GRPO's baseline.

    Args: rewards [..., G] float, a group in the last axis; keep bool, the same shape. Rewards that are not kept are
    never read, even NaN. Returns float32 [..., 1]; 0 for a group without a kept reward.
    Source: Shao et al. 2024 (GRPO, arXiv 2402.03300), section 4.1.2; grpo_trainer.py:2760-2762.
    """
    return masked_mean(rewards, keep, axis=-1)[..., None]


def group_std(rewards: Array, keep: Array) -> Array:
    """Standard deviation of the kept rewards of each group, over n - 1.

    Args: rewards, keep as `group_mean`. Returns float32 [..., 1]; 0 where a group has one kept reward or none.
    Source: grpo_trainer.py:2765-2767 and `nanstd`, trainer/utils.py:859-887 (NaN for one, which becomes advantage 0).
    """
    rewards, keep = _float(rewards), jnp.asarray(keep)
    squares = jnp.square(jnp.where(keep, rewards - group_mean(rewards, keep), 0)).sum(-1, keepdims=True)
    return jnp.sqrt(squares / jnp.maximum(keep.sum(-1, keepdims=True) - 1, 1).astype(rewards.dtype))


def normalize_each_reward(rewards: Array, applies: Array, weights: Array, eps: float = 1e-4) -> Array:
    """Weighted sum over reward functions of (r_f - mean_f) / (std_f + eps), each over the responses of a group (GDPO).

    Args: rewards [P, G, F] float; applies [P, G, F] bool, False where a function returned None; weights [F] float.
    Returns float32 [P, G]. Source: GDPO (arXiv 2601.05242); grpo_trainer.py:2783-2788.
    """
    rewards, applies = (jnp.moveaxis(jnp.asarray(x), -1, 0) for x in (rewards, applies))  # [F, P, G]
    rewards = jnp.where(applies, _float(rewards), 0)
    # A single reward has no standard deviation: it adds nothing, as in TRL.
    usable = applies & (applies.sum(-1, keepdims=True) > 1)
    scaled = (rewards - group_mean(rewards, applies)) / (group_std(rewards, applies) + eps)
    return (jnp.where(usable, scaled, 0) * weights[:, None, None]).sum(axis=0)


def return_to_go(rewards: Array, gamma: float, mask: Array | None = None) -> Array:
    """G_t = r_t + gamma G_{t+1}: the discounted sum of the rewards of a token and all later ones; t + 1 is the next
    column inside the mask.

    Args: rewards [B, T] float, 0 outside the response and the mask; gamma in [0, 1]; mask [B, T] bool, None: all
    columns. Returns float32 [B, T], undefined outside the mask.
    Source: Hu et al. 2025 (REINFORCE++, arXiv 2501.03262); Sutton and Barto 2018, equation 3.9.
    """
    rewards = _float(rewards)
    chex.assert_rank(rewards, 2)

    def step(later: Array, column: tuple) -> tuple[Array, Array]:
        reward, inside = column
        here = reward + gamma * later
        return (here if inside is None else jnp.where(inside, here, later)), here

    columns = (rewards.T, None if mask is None else mask.T)
    _, returns = jax.lax.scan(step, jnp.zeros_like(rewards[:, 0]), columns, reverse=True)
    return returns.T


def normalize(x: Array, keep: Array, eps: float) -> tuple[Array, Array]:
    """(x - mean) / (std + eps) over the kept elements, 0 elsewhere; std over n - 1.

    Args: x, any shape; keep of the same shape, bool; eps. Returns (float32, the shape of x; the divisor, []).
    Source: rloo_trainer.py:1602-1603 (eps 1e-4); rloo_trainer.py@0.21:407, 440 (eps 1e-8).
    """
    x = _float(x)
    divisor = jnp.sqrt(masked_var(x, keep)) + eps
    return jnp.where(keep, (jnp.where(keep, x, 0) - masked_mean(x, keep)) / divisor, 0), divisor


def combine_rewards(rewards: Array, weights: Array) -> tuple[Array, Array]:
    """Weighted sum of several rewards of each response; NaN marks a reward that does not apply, and is left out.

    Args: rewards [B, F] float; weights [F] float. Returns (float32 [B], 0 where no reward is applicable; bool [B],
    where one is). Source: rloo_trainer.py:1549-1561.
    """
    rewards = _float(rewards)
    applies = ~jnp.isnan(rewards)
    return (jnp.where(applies, rewards, 0) * weights[None, :]).sum(axis=1), applies.any(axis=1)


def exclusive_cumsum(costs: Array) -> Array:
    """Sum of the costs of all earlier tokens, which a token cannot change.

    Args: costs [..., T] float, 0 outside the response. Returns float32 [..., T]; column 0 is 0.
    Source: the reward-to-go of Sutton et al. 2000, Policy Gradient Methods.
    """
    costs = _float(costs)
    return jnp.cumsum(costs, axis=-1) - costs


def clip_rewards(rewards: Array, bounds: Sequence[float]) -> Array:
    """Rewards clipped to (low, high); a single number c is (-c, c), as in TRL before 0.22.

    Args: rewards [...] float; bounds, one or two numbers. Returns float32 [...]. Source: TRL `reward_clip_range`.
    """
    low, high = (-bounds[0], bounds[0]) if len(bounds) == 1 else bounds
    return jnp.clip(_float(rewards), low, high)
