"""advantages.py: numbers worked out by hand, and identities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import advantages


def close(actual, wanted, tolerance=1e-6):
    np.testing.assert_allclose(np.asarray(actual), wanted, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------------- masks


def test_first_true_is_the_column_of_the_first_one_and_the_width_without_any():
    x = jnp.array([[0, 1, 1], [1, 0, 1], [0, 0, 0], [0, 0, 1]], bool)
    assert advantages.first_true(x).tolist() == [1, 0, 3, 2]


def test_a_response_ends_with_its_first_stop_token_which_counts():
    tokens = jnp.array([[0, 5, 5], [5, 0, 0], [5, 5, 0], [5, 5, 5]])
    assert advantages.response_lengths(tokens, 0).tolist() == [1, 2, 3, 3]


def test_a_response_ends_with_the_first_of_several_stop_tokens():
    tokens = jnp.array([[0, 5, 5], [5, 7, 0], [5, 5, 0], [5, 5, 5]])
    assert advantages.response_lengths(tokens, (0, 7)).tolist() == [1, 2, 3, 3]
    assert advantages.is_any(tokens, (0, 7)).tolist() == ((tokens == 0) | (tokens == 7)).tolist()


def test_masks_hold_the_stop_token_and_for_values_one_column_more():
    lengths = jnp.array([0, 1, 2, 3])
    assert advantages.response_mask(lengths, 3).astype(int).tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert advantages.value_mask(lengths, 3).astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]


# -------------------------------------------------------------------------------------------- masked statistics


def test_masked_mean_of_one_element_of_none_and_over_an_axis():
    x, mask = jnp.array([[1.0, 2.0], [4.0, 8.0]]), jnp.array([[True, False], [True, True]])
    close(advantages.masked_mean(x, mask), 13 / 3)
    close(advantages.masked_mean(x, mask, axis=1), [1.0, 6.0])
    close(advantages.masked_mean(x, jnp.zeros_like(mask)), 0.0)
    close(advantages.masked_mean(x, jnp.zeros_like(mask).at[1, 1].set(True)), 8.0)


def test_masked_var_of_one_element_or_none_is_zero_for_either_ddof():
    x, mask = jnp.array([1.0, 3.0, 8.0]), jnp.array([True, True, False])
    close(advantages.masked_var(x, mask), 2.0)
    close(advantages.masked_var(x, mask, ddof=0), 1.0)
    for ddof in (0, 1):
        close(advantages.masked_var(x, jnp.array([False, True, False]), ddof), 0.0)
        close(advantages.masked_var(x, jnp.zeros(3, bool), ddof), 0.0)


def test_whitening_by_hand_with_and_without_its_mean():
    x, mask = jnp.array([[1.0, 3.0, 99.0]]), jnp.array([[True, True, False]])
    close(advantages.masked_whiten(x, mask), [[-1 / np.sqrt(2), 1 / np.sqrt(2), 0]])
    close(advantages.masked_whiten(x, mask, ddof=0), [[-1, 1, 0]])
    close(advantages.masked_whiten(x, mask, ddof=0, shift_mean=False), [[1, 3, 0]])


def test_variances_are_over_n_minus_1_unless_told():
    x, mask = jnp.array([1.0, 2.0, 4.0]), jnp.ones(3, bool)
    close(advantages.masked_var(x, mask), 7 / 3)
    close(advantages.masked_whiten(x, mask), advantages.masked_whiten(x, mask, ddof=1))


def test_whitening_one_element_or_none_gives_zeros_and_zero_gradients():
    x = jnp.array([1.0, 2.0, 3.0])
    for mask in (jnp.zeros(3, bool), jnp.array([False, True, False])):
        close(advantages.masked_whiten(x, mask), np.zeros(3))
        close(jax.grad(lambda x, mask=mask: advantages.masked_whiten(x, mask).sum())(x), np.zeros(3))


# ------------------------------------------------------------------------------------------------ KL and scores


def test_kl_estimators_by_hand():
    logprobs, ref = jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25]))
    close(advantages.kl_penalty(logprobs, ref), [np.log(2)])
    close(advantages.kl_penalty(logprobs, ref, "k1"), [np.log(2)])
    close(advantages.kl_penalty(logprobs, ref, "k2"), [np.log(2) ** 2 / 2])
    close(advantages.kl_penalty(logprobs, ref, "k3"), [0.5 - 1 + np.log(2)])


def test_k3_of_nearly_equal_models_is_not_negative():
    gaps = np.random.default_rng(0).normal(size=(4, 5000)) * np.array([1e-6, 1e-4, 1e-2, 1.0])[:, None]
    for ref in (0.0, -1.0):  # of a token that is nearly sure the gap has all of its digits
        logprobs = np.float32(ref) - np.abs(gaps).astype(np.float32)
        assert (np.asarray(advantages.kl_penalty(logprobs, np.full_like(logprobs, ref), "k3")) >= 0).all()


def test_equal_models_have_no_kl_and_an_unknown_estimator_is_named():
    logprobs = jnp.array([[-1.0, -2.0]])
    for estimator in ("k1", "k2", "k3"):
        assert not advantages.kl_penalty(logprobs, logprobs, estimator).any()
    with pytest.raises(ValueError, match="k1, k2 or k3, not 'k4'"):
        advantages.kl_penalty(logprobs, logprobs, "k4")


def test_the_adaptive_coefficient_moves_by_a_fifth_of_n_over_horizon_at_most():
    step = functools.partial(advantages.adaptive_kl, 0.1, target=6.0, horizon=10000, n_steps=500)
    close(step(60.0), 0.1 * (1 + 0.2 * 0.05))
    close(step(0.0), 0.1 * (1 - 0.2 * 0.05))
    close(step(6.0), 0.1)
    close(step(6.6), 0.1 * (1 + 0.1 * 0.05))


def test_the_adaptive_coefficient_takes_a_mean_and_not_the_kl_of_each_response():
    with pytest.raises(AssertionError, match="rank"):
        advantages.adaptive_kl(0.1, jnp.ones(2), target=6.0, horizon=10000, n_steps=500)


def test_a_score_lands_one_column_after_eos_or_on_it():
    lengths, scores = jnp.array([0, 1, 2, 3]), jnp.array([10.0, 20.0, 30.0, 40.0])
    rewards = jnp.ones((4, 3))
    close(
        advantages.place_scores(rewards, scores, lengths),
        [[11, 1, 1], [1, 21, 1], [1, 1, 31], [1, 1, 41]],
    )
    close(
        advantages.place_scores(rewards, scores, lengths, "eos"),
        [[11, 1, 1], [21, 1, 1], [1, 31, 1], [1, 1, 41]],
    )
    with pytest.raises(ValueError, match="after_eos.*'end'"):
        advantages.place_scores(rewards, scores, lengths, "end")


# --------------------------------------------------------------------------------------------------- advantages


def test_gae_by_hand():
    rewards, values = jnp.array([[0.0, 0.0, 1.0]]), jnp.array([[0.5, 0.25, 0.5]])
    # deltas: 0.9*0.25 - 0.5 = -0.275, 0.9*0.5 - 0.25 = 0.2, 1 - 0.5 = 0.5; decay 0.45
    wanted = np.array([[-0.275 + 0.45 * 0.425, 0.2 + 0.45 * 0.5, 0.5]])
    got, returns = advantages.gae(rewards, values, gamma=0.9, lam=0.5)
    close(got, wanted)
    close(returns, wanted + np.asarray(values))


def test_gae_with_lambda_zero_is_one_temporal_difference():
    rewards, values = jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 5.0]])
    close(advantages.gae(rewards, values, gamma=1.0, lam=0.0)[0], [[1 + 5 - 3, 2 - 5]])


def test_gae_takes_a_lambda_for_each_row():
    rng = np.random.default_rng(3)
    rewards, values = rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=(3, 4)).astype(np.float32)
    lams = np.array([0.0, 0.5, 1.0], np.float32)
    got = advantages.gae(rewards, values, gamma=0.9, lam=lams)
    for row, lam in enumerate(lams):
        alone = advantages.gae(rewards[row : row + 1], values[row : row + 1], gamma=0.9, lam=float(lam))
        close([x[row] for x in got], [x[0] for x in alone])
    with pytest.raises(AssertionError):
        advantages.gae(rewards, values, gamma=0.9, lam=lams[:2])


def test_gae_by_turns_discounts_where_a_turn_ends():
    # Two turns of two tokens, a token from elsewhere between them, then the column of the score.
    mask = jnp.array([[True, True, False, True, True, True]])
    rewards, values = jnp.array([[0.0, 0, 9, 0, 0, 1]]), jnp.array([[0.5, 0.25, 9, 0.5, 0.75, 0]])
    gamma, lam = (advantages.between_turns(x, mask) for x in (0.9, 0.5))
    close(gamma, [[1, 0.9, 1, 1, 1, 1]])
    got, returns = advantages.gae(rewards, values, gamma=gamma, lam=lam, mask=mask)
    # Within the last turn: the score minus the value. At the end of the first: 0.9 * 0.5 - 0.25 = 0.2, decay 0.45.
    first = 0.2 + 0.45 * 0.5
    wanted = np.array([[0.25 - 0.5 + first, first, 0, 0.5, 0.25, 1]])
    close(got, wanted)
    close(returns, np.where(mask, wanted + np.asarray(values), 0))


def test_gae_by_turns_is_that_of_tokens_where_a_turn_has_one_token_and_undiscounted_where_there_is_one_turn():
    rng = np.random.default_rng(5)
    rewards, values = (jnp.asarray(rng.normal(size=(2, 7)), jnp.float32) for _ in range(2))
    mask = jnp.asarray([[True, False] * 3 + [True]] * 2)
    by_turns = {"gamma": advantages.between_turns(0.9, mask), "lam": advantages.between_turns(0.8, mask)}
    alone = advantages.gae(rewards[:, ::2], values[:, ::2], gamma=0.9, lam=0.8)
    close([x[:, ::2] for x in advantages.gae(rewards, values, **by_turns, mask=mask)], alone)
    whole = {"gamma": advantages.between_turns(0.9, None), "lam": advantages.between_turns(0.8, None)}
    close(advantages.gae(rewards, values, **whole), advantages.gae(rewards, values, gamma=1.0, lam=1.0))


def test_a_length_adaptive_lambda_by_hand():
    lengths = jnp.array([100, 1000, 40, 20, 10, 1, 0, -1])
    close(advantages.length_adaptive_lam(lengths, 0.05), [0.8, 0.98, 0.5, 0, 0, 0, 0, 0])
    close(advantages.length_adaptive_lam(lengths[:2], 0.5), [0.98, 0.998])


def test_leave_one_out_by_hand_with_rewards_that_are_not_kept():
    close(advantages.leave_one_out(jnp.array([1.0, 2.0, 6.0])), [1 - 4, 2 - 3.5, 6 - 1.5])
    rewards = np.array([[[1.0, 2.0, 6.0, np.nan], [np.nan, 5.0, np.nan, np.nan], [np.nan] * 4]])
    found = advantages.leave_one_out(rewards, ~np.isnan(rewards))
    close(found, [[[1 - 4, 2 - 3.5, 6 - 1.5, 0], [0] * 4, [0] * 4]])


def test_trls_own_example_of_leave_one_out():
    """docs/source/rloo_trainer.md: 3 prompts, 4 responses each; there a column is a group, here a row."""
    rewards = np.array([[1, 2, 3], [2, 3, 4], [5, 6, 7], [8, 9, 10]], np.float32).T
    wanted = np.tile([i - (16 - i) / 3 for i in (1, 2, 5, 8)], (3, 1))
    close(advantages.leave_one_out(rewards), wanted)
    close(advantages.leave_one_out(rewards, np.ones_like(rewards, bool)), wanted)


def test_a_group_of_one_has_no_baseline():
    with pytest.raises(ValueError, match="groups of 2"):
        advantages.leave_one_out(jnp.ones((3, 1)))


EQUAL = [100.3, -100.3, 1000.1, 12345.678, 1e-7, 3.3e30, 0.0]


@pytest.mark.parametrize("size", [3, 8, 1000])
def test_equal_rewards_have_neither_advantage_nor_deviation_at_any_size(size):
    rewards = np.repeat(np.array(EQUAL, np.float32)[:, None], size, axis=1)
    keep = np.ones(rewards.shape, bool)
    keep[:, ::3] = size < 4  # groups with some rewards left out
    for kept in (np.ones(rewards.shape, bool), keep):
        assert not np.asarray(jax.jit(advantages.leave_one_out)(rewards, kept)).any()
        assert not np.asarray(jax.jit(advantages.group_std)(rewards, kept)).any()
        np.testing.assert_array_equal(jax.jit(advantages.group_mean)(rewards, kept)[:, 0], rewards[:, 0])
        for row, mask in zip(rewards[:2], kept):
            assert advantages.masked_mean(row, mask) == row[0] and advantages.masked_var(row, mask) == 0
            assert not np.asarray(advantages.masked_whiten(row, mask)).any()
            assert not np.asarray(advantages.normalize(row, mask, 1e-4)[0]).any()
    assert not np.asarray(advantages.leave_one_out(rewards)).any()
    each = advantages.normalize_each_reward(rewards[..., None], np.ones((*rewards.shape, 1), bool), np.ones(1))
    assert not np.asarray(each).any()


def test_a_mean_that_is_moved_into_the_range_of_its_values_keeps_its_gradient():
    rewards = jnp.full((1, 8), 100.3)
    assert rewards.sum() / 8 != 100.3  # or nothing is moved
    grad = jax.grad(lambda x: advantages.masked_mean(x, jnp.ones((1, 8), bool)))(rewards)
    close(grad, np.full((1, 8), 1 / 8))
    jacobian = jax.jacobian(advantages.leave_one_out)(rewards)[0, :, 0]
    close(jacobian, np.where(np.eye(8), 1, -1 / 7))


# ---------------------------------------------------------------------------------------------- groups of GRPO


def test_the_mean_and_the_deviation_of_a_group_are_of_the_rewards_it_keeps():
    rewards = np.array([[1.0, 2.0, 6.0], [1.0, np.nan, 5.0], [7.0, np.nan, np.inf], [np.nan] * 3])
    keep = np.array([[1, 1, 1], [1, 0, 1], [1, 0, 0], [0, 0, 0]], bool)
    close(advantages.group_mean(rewards, keep), [[3.0], [3.0], [7.0], [0.0]])
    close(advantages.group_std(rewards, keep), [[np.sqrt(7.0)], [np.sqrt(8.0)], [0.0], [0.0]])


def test_groups_lie_in_the_last_axis_of_any_array():
    rewards = np.arange(12.0).reshape(2, 2, 3)
    keep = np.ones((2, 2, 3), bool)
    close(advantages.group_mean(rewards, keep)[..., 0], [[1.0, 4.0], [7.0, 10.0]])
    close(advantages.group_std(rewards, keep)[..., 0], np.ones((2, 2)))


def test_each_reward_is_normalized_by_its_group_then_weighted():
    rewards = np.array([[[1.0, 10.0], [3.0, np.nan], [5.0, 30.0]]])
    applies = ~np.isnan(rewards)
    found = advantages.normalize_each_reward(rewards, applies, np.array([2.0, -1.0]), eps=1.0)
    second = 10 / (np.sqrt(200) + 1)
    close(found, [[-4 / 3 + second, 0.0, 4 / 3 - second]])
    small = advantages.normalize_each_reward(1e-4 * rewards[..., :1], applies[..., :1], np.ones(1))
    close(small, [[-2 / 3, 0.0, 2 / 3]], 1e-5)


def test_the_only_reward_of_its_kind_in_a_group_adds_nothing():
    rewards = np.array([[[1.0, 4.0], [3.0, np.nan]], [[np.nan, 5.0], [np.nan, 5.0]]])
    found = advantages.normalize_each_reward(rewards, ~np.isnan(rewards), np.array([1.0, 100.0]), eps=0.0)
    close(found[0], [-np.sqrt(0.5), np.sqrt(0.5)])
    found = advantages.normalize_each_reward(rewards, ~np.isnan(rewards), np.array([1.0, 100.0]))
    close(found[1], [0.0, 0.0])  # and equal rewards add nothing either
    one = advantages.normalize_each_reward(np.full((2, 1, 1), 3.0), np.ones((2, 1, 1), bool), np.ones(1))
    close(one, [[0.0], [0.0]])


def test_combined_rewards_have_gradients_where_some_are_not_applicable():
    rewards = np.array([[1.0, np.nan], [2.0, 5.0], [np.nan, np.nan]], np.float32)
    total, applies = advantages.combine_rewards(rewards, np.array([2.0, -1.0], np.float32))
    close(total, [2.0, -1.0, 0.0])
    assert applies.tolist() == [True, True, False]
    gradient = jax.grad(lambda weights: advantages.combine_rewards(rewards, weights)[0].sum())(jnp.ones(2))
    close(gradient, [3.0, 5.0])


def test_normalised_advantages_and_the_sum_of_earlier_costs_by_hand():
    found, divisor = advantages.normalize(np.array([1.0, 3.0, np.nan]), np.array([True, True, False]), 1.0)
    close(divisor, np.sqrt(2) + 1)
    close(found, [-1 / (np.sqrt(2) + 1), 1 / (np.sqrt(2) + 1), 0])
    close(advantages.exclusive_cumsum(np.array([[1.0, 2.0, 4.0]])), [[0.0, 1.0, 3.0]])


def test_what_is_to_come_is_discounted():
    rewards = np.array([[1.0, 2.0, 4.0], [0.0, 0.0, 8.0]])
    close(advantages.return_to_go(rewards, 1.0), [[7.0, 6.0, 4.0], [8.0, 8.0, 8.0]])
    close(advantages.return_to_go(rewards, 0.5), [[3.0, 4.0, 4.0], [2.0, 4.0, 8.0]])
    close(advantages.return_to_go(rewards, 0.0), rewards)
    half = advantages.return_to_go(jnp.asarray(rewards, jnp.bfloat16), 0.5)
    assert half.dtype == jnp.float32


# ------------------------------------------------------------------------------------------------------ the rest


def test_wrong_shapes_and_dtypes_are_caught():
    with pytest.raises(AssertionError):
        advantages.gae(jnp.zeros((2, 3)), jnp.zeros((2, 4)), gamma=1.0, lam=0.95)
    with pytest.raises(AssertionError):
        advantages.masked_mean(jnp.zeros((2, 3)), jnp.ones((2, 3)))
    with pytest.raises(AssertionError):
        advantages.place_scores(jnp.zeros((2, 3)), jnp.zeros(3), jnp.zeros(2, jnp.int32))
    with pytest.raises(AssertionError):
        advantages.kl_penalty(jnp.zeros((2, 3)), jnp.zeros((2, 1)))
    with pytest.raises(AssertionError):
        advantages.group_mean(jnp.zeros((2, 3)), jnp.ones((2, 1), bool))
    with pytest.raises(AssertionError):
        advantages.return_to_go(jnp.zeros(3), 1.0)
