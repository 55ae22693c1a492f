"""losses.py: numbers worked out by hand, and identities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import losses


def close(actual, wanted, tolerance=1e-6):
    np.testing.assert_allclose(np.asarray(actual), wanted, rtol=tolerance, atol=tolerance)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# -------------------------------------------------------------------------------------------- log-probabilities


def test_logprobs_by_hand():
    logits = jnp.log(jnp.array([[[1.0, 3.0], [4.0, 4.0]]]))
    close(losses.logprobs_from_logits(logits, jnp.array([[1, 0]])), [[np.log(0.75), np.log(0.5)]])


def test_logprobs_survive_extreme_logits():
    logits = jnp.array([[1e4, -1e4, 0.0], [-3e38, 0.0, -jnp.inf], [88.0, 89.0, -1e30]])
    got = losses.logprobs_from_logits(logits, jnp.array([0, 1, 0]))
    close(got, [0.0, 0.0, -1 - np.log1p(np.exp(-1))], 1e-5)
    close(losses.logprobs_from_logits(logits[:1], jnp.array([1])), [-2e4])


def test_entropy_is_that_of_a_uniform_of_a_sure_and_of_a_cut_distribution():
    close(losses.entropy_from_logits(jnp.zeros(8)), np.log(8))
    close(losses.entropy_from_logits(jnp.array([1e4, 0.0, 0.0])), 0.0)
    close(losses.entropy_from_logits(jnp.full(8, 1e6)), np.log(8))
    close(losses.entropy_from_logits(jnp.array([2.0, 2.0, -jnp.inf])), np.log(2))
    gradient = jax.grad(losses.entropy_from_logits)(jnp.array([2.0, 1.0, -jnp.inf]))
    assert np.isfinite(gradient).all()


# ---------------------------------------------------------------------------------------------------------- PPO


def test_policy_losses_by_hand_with_an_upper_clip_of_their_own_and_a_bound_of_the_ratio():
    ratio = np.array([1.5, 0.5, 1.5, 0.5, 1.1])
    advantages = np.array([1.0, 1.0, -1.0, -1.0, 2.0])

    def terms(**options):
        return losses.policy_loss_terms(np.log(ratio) - 3, np.full(5, -3.0), advantages, **options)

    got, clipped, r = terms(cliprange=0.2)
    close(got, [-1.2, -0.5, 1.5, 0.8, -2.2], 1e-5)
    assert clipped.tolist() == [True, False, False, True, False]
    close(r, ratio, 1e-5)
    close(terms(cliprange=0.2, cliprange_high=0.3)[0], [-1.3, -0.5, 1.5, 0.8, -2.2], 1e-5)
    got, clipped, r = terms(cliprange=0.2, cliprange_high=0.3, delta=1.4)
    close(got, [-1.3, -0.5, 1.4, 0.8, -2.2], 1e-5)
    assert clipped.tolist() == [True, False, False, True, False]
    close(r, ratio, 1e-5)
    # A bound below the clip bounds that side too.
    got, clipped, _ = terms(cliprange=0.2, cliprange_high=0.3, delta=1.25)
    close(got, [-1.25, -0.5, 1.3, 0.8, -2.2], 1e-5)
    assert clipped.tolist() == [False, False, True, True, False]


def test_one_ratio_a_row_meets_the_advantages_of_its_tokens_and_one_advantage_the_ratios_of_its_row():
    ratio, advantages = np.array([[1.1], [0.9]]), np.array([[1.0, 2.0], [3.0, 4.0]])
    terms = functools.partial(losses.policy_loss_terms, cliprange=0.2)
    found, _, ratios = terms(np.log(ratio), np.zeros((2, 1)), advantages)
    close(found, [[-1.1, -2.2], [-2.7, -3.6]])
    close(ratios, ratio)
    found, _, _ = terms(np.log(np.broadcast_to(ratio, (2, 2))), np.zeros((2, 2)), advantages[:, :1])
    close(found, [[-1.1, -1.1], [-2.7, -2.7]])


def test_a_bounded_ratio_has_no_gradient_beyond_its_bound():
    def loss(logprobs):
        return losses.policy_loss_terms(logprobs, np.zeros(3), -np.ones(3), cliprange=0.2, delta=1.4)[0].sum()

    close(jax.grad(loss)(np.log([0.5, 1.3, 1.5])), [0.0, 1.3, 0.0])


def test_a_dual_clip_bounds_the_loss_of_negative_advantages_alone():
    ratio = np.array([5.0, 5.0, 5.0, 0.1, 2.0, 5.0])
    advantages = np.array([1.0, -1.0, -0.5, -1.0, -1.0, 0.5])

    def terms(logprobs):
        plain, _, _ = losses.policy_loss_terms(logprobs, np.zeros(6), advantages, cliprange=0.2)
        return losses.dual_clip_terms(plain, advantages, dual_clip=3.0)

    got, clipped = terms(np.log(ratio))
    close(got, [-1.2, 3.0, 1.5, 0.8, 2.0, -0.6], 1e-5)
    assert clipped.tolist() == [False, True, True, False, False, False]
    gradient = jax.grad(lambda x: terms(x)[0].sum())(jnp.log(ratio))
    close(gradient, [0.0, 0.0, 0.0, 0.0, 2.0, 0.0], 1e-5)  # a bounded loss has no gradient
    _, clipped = losses.dual_clip_terms(jnp.array([3.0]), jnp.array([-1.0]), dual_clip=3.0)
    assert clipped.tolist() == [False]  # at the bound nothing is taken off


def test_clipped_tokens_have_no_policy_gradient_and_the_others_minus_a_times_r():
    logprobs, advantages = np.log([1.5, 0.5, 1.1]), np.array([1.0, -1.0, 2.0])
    mask = np.ones(3, bool)
    gradient = jax.grad(losses.clipped_policy_loss)(logprobs, np.zeros(3), advantages, mask, cliprange=0.2)
    close(gradient, np.array([0.0, 0.0, -2.2]) / 3)


def test_an_importance_ratio_is_bounded_and_a_clipped_one_has_gradient_zero_however_large():
    """e^90 is infinite in float32, and 0 * inf is nan."""
    x = jnp.array([-90.0, 0.0, 1.5, 80.0, 90.0, 1000.0])
    ratio, slope = jax.vmap(jax.value_and_grad(losses.importance_ratio))(x)
    wanted = np.exp(np.minimum(x.astype(np.float64), 80.0))
    np.testing.assert_allclose(ratio, wanted, rtol=1e-5, atol=1e-38)
    np.testing.assert_allclose(slope, wanted, rtol=1e-5, atol=1e-38)

    def loss(x, advantage, delta):
        return losses.policy_loss_terms(x, jnp.float32(0), jnp.float32(advantage), cliprange=0.2, delta=delta)[0]

    for advantage, delta, value in ((1.0, None, -1.2), (1.0, 4.0, -1.2), (-1.0, 4.0, 4.0)):
        found, gradient = jax.value_and_grad(loss)(jnp.float32(90.0), advantage, delta)
        np.testing.assert_allclose(found, value, rtol=1e-6)
        assert gradient == 0
    assert jax.grad(loss)(jnp.float32(90.0), -1.0, None) > 1e34  # not clipped: the gradient's norm ends the run


def test_at_ratio_one_the_gradient_is_that_of_the_plain_policy_gradient():
    logprobs, advantages, mask = normal(0, 2, 3), normal(1, 2, 3), np.array([[1, 1, 0], [1, 0, 0]], bool)
    gradient = jax.grad(losses.clipped_policy_loss)(logprobs, logprobs, advantages, mask, cliprange=0.2)
    close(gradient, -advantages * mask / 3)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [0.1, -0.3])
def test_on_the_edge_of_the_clip_the_policy_gradient_lies_between_those_of_its_sides(gap, advantage):
    """Both branches of the maximum are equal there, so that it is a convention: torch takes -A r whole, JAX a part.
    Nothing is clipped yet, and no ratio but a made-up one falls on the edge."""
    ratio = float(losses.importance_ratio(gap))

    def loss(new):
        clip = abs(ratio - 1)  # exact, for the ratio is between 1/2 and 2
        terms, clipped, _ = losses.policy_loss_terms(new, 0.0, advantage, cliprange=clip)
        return terms, clipped

    (value, clipped), gradient = jax.value_and_grad(loss, has_aux=True)(gap)
    close(value, -advantage * ratio)
    assert not clipped and 0 < gradient / (-advantage * ratio) <= 1 + 1e-6


def test_the_loss_of_reinforce_by_hand():
    logprobs, advantages = np.array([-1.0, -0.5]), np.array([2.0, -3.0])
    close(losses.reinforce_loss_terms(logprobs, advantages), [2.0, -1.5])
    close(jax.grad(lambda x: losses.reinforce_loss_terms(x, advantages).sum())(logprobs), [-2.0, 3.0])


def test_value_loss_by_hand():
    # inside the clip; clipped, and worse for it; clipped, and better for it (then the clip is ignored)
    values, old, returns = np.array([0.1, 1.0, 1.0]), np.zeros(3), np.array([1.0, 2.0, 0.0])
    got, clipped = losses.value_loss_terms(values, old, returns, cliprange_value=0.2)
    close(got, [0.5 * 0.81, 0.5 * 1.8**2, 0.5])
    assert clipped.tolist() == [False, True, False]
    close(losses.clipped_value_loss(values, old, returns, np.ones(3, bool), cliprange_value=0.2), np.mean(got))


def test_clipped_values_have_no_gradient():
    values, old, returns = np.array([0.1, 1.0, 1.0]), np.zeros(3), np.array([1.0, 2.0, 0.0])
    gradient = jax.grad(losses.clipped_value_loss)(values, old, returns, np.ones(3, bool), cliprange_value=0.2)
    close(gradient, np.array([-0.9, 0.0, 1.0]) / 3)


@pytest.mark.parametrize("side", [1.0, -1.0])
@pytest.mark.parametrize("target", [3.0, -3.0])
def test_on_the_edge_of_the_clip_the_value_gradient_lies_between_those_of_its_sides(side, target):
    value = 1.0 + 0.25 * side
    loss = functools.partial(losses.value_loss_terms, cliprange_value=0.25)
    (found, clipped), gradient = jax.value_and_grad(loss, has_aux=True)(value, 1.0, target)
    close(found, 0.5 * (value - target) ** 2)
    assert not clipped and 0 < gradient / (value - target) <= 1 + 1e-6


def test_an_empty_mask_costs_nothing():
    x, mask = normal(0, 2, 3), np.zeros((2, 3), bool)
    assert float(losses.clipped_policy_loss(x, x, x, mask, cliprange=0.2)) == 0
    assert float(losses.clipped_value_loss(x, x, x, mask, cliprange_value=0.2)) == 0


# --------------------------------------------------------------------------------------------- group policy gradients

VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}


def test_a_sequence_ratio_is_the_geometric_mean_of_its_tokens_and_one_for_an_empty_row():
    ratios, mask = (
        np.array([[2.0, 8.0, 7.0], [9.0, 9.0, 9.0], [3.0, 3.0, 9.0]]),
        np.array([[1, 1, 0], [0] * 3, [1] * 3]),
    )
    found = losses.sequence_log_ratio(np.log(ratios), mask.astype(bool))
    close(np.exp(found), [[4.0], [1.0], [81 ** (1 / 3)]], 1e-5)


def test_a_capped_ratio_weights_the_log_probability_and_has_no_gradient():
    logprobs, ratio = np.array([-1.0, -2.0, -0.5]), np.array([0.5, 6.0, 6.0])
    advantages = np.array([2.0, 1.0, -4.0])
    terms = functools.partial(losses.cispo_loss_terms, epsilon_high=5.0)
    close(terms(logprobs, ratio, advantages), [1.0, 10.0, -10.0])
    of_logprobs, of_ratio = jax.grad(lambda *x: terms(*x, advantages).sum(), argnums=(0, 1))(logprobs, ratio)
    close(of_logprobs, [-1.0, -5.0, 20.0])
    close(of_ratio, [0.0, 0.0, 0.0])
    # A ratio of a whole response weights all of its tokens; half precision is widened.
    of_rows = terms(jnp.full((1, 3), -1.0, jnp.bfloat16), jnp.full((1, 1), 2.0), jnp.full((1, 1), 3.0))
    assert of_rows.dtype == jnp.float32
    close(of_rows, [[6.0, 6.0, 6.0]])


def test_the_soft_gate_by_hand():
    temperatures = {"temperature_pos": 2.0, "temperature_neg": 4.0}
    ratio, advantages = np.array([1.0, 1.0, 1.5, 0.0]), np.array([1.0, -1.0, 3.0, 0.0])
    wanted = [-1.0, 0.5, -6 / (1 + np.exp(-1.0)), 0.0]
    close(losses.sapo_loss_terms(ratio, advantages, **temperatures), wanted)
    slope = jax.grad(lambda a: losses.sapo_loss_terms(1.5, a, **temperatures))(0.0)
    close(slope, -1 / (1 + np.exp(-2.0)))  # at 0 the gate is that of negative advantages


def test_the_soft_gate_is_the_policy_gradient_at_ratio_one_and_nothing_far_off():
    ratio, advantages = np.array([1.0, 1.0, 1e4, 1e4]), np.array([2.0, -3.0, 2.0, -3.0])

    def terms(ratio):
        return losses.sapo_loss_terms(ratio, advantages, temperature_pos=1.0, temperature_neg=1.05)

    close(jax.grad(lambda ratio: terms(ratio).sum())(ratio), [-2.0, 3.0, 0.0, 0.0], 1e-5)
    close(terms(ratio)[2:], [-8.0, 12 / 1.05], 1e-5)


def vespo_weight(log_ratio, advantage=1.0, sampler_ratio=None, **options):
    log_ratio = np.atleast_2d(log_ratio).astype(np.float32)
    sampler_ratio = None if sampler_ratio is None else np.atleast_2d(sampler_ratio).astype(np.float32)
    mask = np.ones(log_ratio.shape, bool)
    found = losses.vespo_weights(
        log_ratio, np.array([[advantage]]), mask, sampler_ratio=sampler_ratio, **{**VESPO, **options}
    )
    assert found.shape == (1, 1)
    return float(found[0, 0])


def test_vespo_weights_by_hand():
    close(vespo_weight([0.0, 0.0]), 1.0)
    close(vespo_weight([0.0, 0.0], -1.0), 1.0)
    two = np.log([4.0, 0.5])  # the whole response is twice as probable
    close(vespo_weight(two), 4 * np.exp(3 - 6.0), 1e-5)
    close(vespo_weight(two, 0.0), 4 * np.exp(3 - 6.0), 1e-5)
    close(vespo_weight(two, -1.0), 8 * np.exp(2 - 4.0), 1e-5)
    close(vespo_weight([0.0, 0.0], sampler_ratio=[4.0, 0.5]), 4 * np.exp(3 - 6.0), 1e-5)


def test_vespo_weights_of_extreme_ratios():
    slow = {"k_pos": 0.1, "lambda_pos": 1.0}
    # Each log-ratio is within 20 of 0, their sum within ln 1e-8 and 20.
    close(vespo_weight([30.0, -20.0]), 1.0)
    close(vespo_weight([20.0, -30.0]), 1.0)
    close(vespo_weight([-15.0, -15.0], **slow), np.e * 10**-0.8, 1e-5)
    assert vespo_weight([15.0, 15.0]) == 0
    small = {"k_pos": 0.5, "lambda_pos": 0.0}
    close(vespo_weight([15.0, 15.0], k_pos=2425.8, lambda_pos=0.0), np.exp(48516 - 1e-4 * np.expm1(20)), 0.02)
    # So is the sampler's ratio of each token.
    close(
        vespo_weight([18.0, 0.0], sampler_ratio=[0.0, 1.0], **slow), vespo_weight([18 + np.log(1e-8), 0], **slow), 1e-5
    )
    close(vespo_weight([-20.0, 0.0], sampler_ratio=[np.exp(25.0), 1.0]), 1.0, 1e-5)
    # A decay of 0 counts as 1e-4, and what is not finite as 0.
    close(vespo_weight([np.log(2.0)], **small), np.sqrt(2) * np.exp(-1e-4), 1e-6)
    assert vespo_weight([10.0], k_pos=100.0, lambda_pos=0.0) == 0
    assert vespo_weight([np.nan]) == 0


def test_vespo_weights_read_nothing_masked_out_and_have_no_gradient():
    log_ratio, mask = np.array([[np.log(2.0), np.nan], [5.0, 5.0]]), np.array([[True, False], [False, False]])
    advantages, ratio = np.array([[1.0], [-1.0]]), np.ones((2, 2))
    found = losses.vespo_weights(log_ratio, advantages, mask, **VESPO)
    close(found, [[4 * np.exp(-3.0)], [1.0]], 1e-5)
    gradients = jax.grad(
        lambda x, r: losses.vespo_weights(x, advantages, mask, sampler_ratio=r, **VESPO).sum(), argnums=(0, 1)
    )(np.zeros((2, 2)), ratio)
    assert not any(np.asarray(x).any() for x in gradients)
    by_token = losses.vespo_weights(log_ratio, np.array([[1.0, -1.0], [0.0, 0.0]]), mask, **VESPO)
    close(by_token, [[4 * np.exp(-3.0), 8 * np.exp(-2.0)], [1.0, 1.0]], 1e-5)


def test_a_response_is_off_policy_where_its_advantage_is_negative_and_its_mean_log_ratio_above_the_threshold():
    sampler = np.array([[0.5, 0.5, 9.0], [0.5, 0.5, 9.0], [0.25, 0.25, np.nan], [1.0, -0.5, 0.25], [9.0, 9.0, 9.0]])
    mask = np.array([[1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0]], bool)
    advantages = np.array([[0.0], [-1.0], [-1.0], [-1.0], [-1.0]])
    keep = losses.off_policy_mask(advantages, np.zeros((5, 3)), sampler, mask, threshold=0.25)
    assert keep.tolist() == [[True], [False], [True], [True], [True]]  # at the threshold it is kept
    one = np.array([[True, False, False]])
    assert not losses.off_policy_mask(
        -np.ones((1, 1)), np.zeros((1, 3)), np.full((1, 3), 0.4), one, threshold=0.25
    ).any()
    keep = losses.off_policy_mask(advantages * [1.0, 0.0], np.zeros((5, 3)), sampler, mask, threshold=0.25)
    assert keep[1].tolist() == [False, True]


def test_high_entropies_are_those_from_a_quantile_on():
    entropy, every = np.array([[3.0, 1.0, 5.0], [2.0, 4.0, 9.0]]), np.ones((2, 3), bool)
    mask = np.array([[True, True, True], [True, True, False]])
    for quantile, least in ((0.0, 1), (0.5, 3), (0.6, 4), (0.75, 4), (0.76, 5), (1.0, 5)):
        found = losses.high_entropy_mask(entropy, mask, quantile=quantile)
        assert found.tolist() == (mask & (entropy >= least)).tolist(), quantile
    assert losses.high_entropy_mask(entropy, every, quantile=0.75).sum() == 2
    assert losses.high_entropy_mask(np.ones((2, 3)), mask, quantile=0.9).tolist() == mask.tolist()  # all are equal


def test_high_entropies_of_one_token_of_none_and_of_infinite_ones():
    entropy, one = np.array([1.0, np.nan, np.inf]), np.array([True, False, False])
    assert losses.high_entropy_mask(entropy, one, quantile=0.3).tolist() == [True, False, False]
    assert not losses.high_entropy_mask(entropy, ~one & False, quantile=0.3).any()
    assert losses.high_entropy_mask(np.array([np.inf, np.inf, 1.0]), np.ones(3, bool), quantile=0.5).tolist() == [
        True,
        True,
        False,
    ]


def test_sampler_ratios_by_hand():
    learner, mask = np.log([[2.0, 4.0, 9.0], [0.5, 0.25, 1.0]]), np.array([[1, 1, 0], [1, 1, 1]], bool)

    def ratio(mode, low=None, high=None):
        found = losses.sampler_ratio(learner, np.zeros((2, 3)), mask, mode=mode, clip_min=low, clip_max=high)
        return np.asarray(found)

    close(ratio("token_truncate"), [[2, 4, 1], [0.5, 0.25, 1]], 1e-5)
    close(ratio("token_truncate", 0.4, 3.0), [[2, 3, 1], [0.5, 0.4, 1]], 1e-5)
    close(ratio("token_mask", 0.4, 3.0), [[2, 0, 1], [0.5, 0, 1]], 1e-5)
    close(ratio("token_mask", 0.4), [[2, 4, 1], [0.5, 0, 1]], 1e-5)
    close(ratio("token_mask", None, 3.0), [[2, 0, 1], [0.5, 0.25, 1]], 1e-5)
    close(ratio("token_mask"), [[2, 4, 1], [0.5, 0.25, 1]], 1e-5)
    close(ratio("sequence_truncate", 0.2, 7.0), [[7], [0.2]], 1e-5)
    close(ratio("sequence_truncate"), [[8], [0.125]], 1e-5)
    close(ratio("sequence_mask", 0.2, 9.0), [[8], [0]], 1e-5)
    close(ratio("sequence_mask", 0.1, 7.0), [[0], [0.125]], 1e-5)
    close(ratio("token_mask", 1.0, 1.0), [[0, 0, 1], [0, 0, 1]])  # the bounds themselves are kept


@pytest.mark.parametrize("mode", ["", "token", "mask", "sequence_clip", "tokens_mask", "token-mask"])
def test_an_unknown_mode_of_the_sampler_ratio_is_named(mode):
    with pytest.raises(ValueError, match=f"token_truncate, token_mask.* not '{mode}'"):
        losses.sampler_ratio(np.zeros((1, 1)), np.zeros((1, 1)), np.ones((1, 1), bool), mode=mode)


# ---------------------------------------------------------------------------------- reward model and fine-tuning


def test_pairwise_loss_by_hand_with_margin_and_centring():
    chosen, rejected = jnp.array([2.0, 0.0]), jnp.array([1.0, 0.0])
    plain = np.array([np.log1p(np.exp(-1.0)), np.log(2)])
    close(losses.pairwise_reward_loss(chosen, rejected), plain)
    close(losses.pairwise_reward_loss(chosen, rejected, jnp.array([1.0, 0.0])), [np.log(2), np.log(2)])
    close(losses.pairwise_reward_loss(chosen, rejected, center_coefficient=0.1), plain + [0.9, 0.0])


def test_cross_entropy_by_hand_and_zero_where_masked_out():
    logits = jnp.log(jnp.array([[1.0, 3.0], [4.0, 4.0], [1.0, 1.0]]))
    mask = jnp.array([True, True, False])
    close(losses.cross_entropy(logits, jnp.array([1, 0, -100]), mask), [-np.log(0.75), np.log(2), 0])


def test_cross_entropy_reads_nothing_where_masked_out():
    logits, labels, mask = jnp.full((2, 3), jnp.nan).at[0].set(1.0), jnp.array([1, -100]), jnp.array([True, False])
    gradient = jax.grad(lambda x: losses.cross_entropy(x, labels, mask).sum())(logits)
    close(gradient, [[1 / 3, -2 / 3, 1 / 3], [0, 0, 0]])


def test_wrong_shapes_and_dtypes_are_caught():
    x = jnp.zeros((2, 3))
    with pytest.raises(AssertionError):
        losses.logprobs_from_logits(jnp.zeros((2, 3, 5)), jnp.zeros((2, 4), jnp.int32))
    with pytest.raises(AssertionError):
        losses.logprobs_from_logits(jnp.zeros((2, 5)), jnp.zeros(2))
    with pytest.raises(AssertionError):
        losses.clipped_policy_loss(x, x, x, jnp.ones((2, 3)), cliprange=0.2)
    with pytest.raises(AssertionError):
        losses.clipped_value_loss(x, x, x[:1], jnp.ones((2, 3), bool), cliprange_value=0.2)
    with pytest.raises(AssertionError):
        losses.pairwise_reward_loss(jnp.zeros(2), jnp.zeros(3))
    with pytest.raises(AssertionError):
        losses.cross_entropy(jnp.zeros((2, 5)), jnp.zeros(2, jnp.int32), jnp.ones(2))
    with pytest.raises(AssertionError):
        losses.sequence_log_ratio(jnp.zeros(3), jnp.ones(3, bool))
    with pytest.raises(AssertionError):
        losses.high_entropy_mask(x, jnp.ones((2, 1), bool), quantile=0.5)


def test_a_log_probability_has_forward_and_second_derivatives():
    logits, tokens = normal(0, 2, 5), jnp.array([1, 4])

    def chosen(logits):
        return losses.logprobs_from_logits(logits, tokens).sum()

    def formula(logits):
        return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1).sum()

    np.testing.assert_allclose(jax.jacfwd(chosen)(logits), jax.grad(formula)(logits), atol=1e-6)
    np.testing.assert_allclose(jax.hessian(chosen)(logits), jax.hessian(formula)(logits), atol=1e-6)
