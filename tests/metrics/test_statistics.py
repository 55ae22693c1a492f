"""Bootstrap, length control, best-of-n and calibration: numbers made by hand, exact enumeration, planted effects."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import optimize, special

from rlhf_jax import evaluate
from rlhf_jax.metrics import statistics

numbers = st.floats(-5, 5, width=32)
shares = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
quick = settings(max_examples=60, deadline=None)


# --- bootstrap


def test_a_bootstrap_interval_is_that_of_all_resamples():
    x = np.array([0.0, 0.5, 1.0, 1.0, 7.0, 2.0])
    exact = np.array([np.mean(rows) for rows in itertools.product(x, repeat=x.size)])  # 6^6, equally likely
    low, high = evaluate.mean_interval(x, resamples=40_000, seed=3)
    for end, share in ((low, 0.025), (high, 0.975)):
        assert np.quantile(exact, share - 0.004) <= end <= np.quantile(exact, share + 0.004)


def test_a_bootstrap_interval_is_the_same_for_the_same_seed_and_ends_are_in_order():
    x = np.random.default_rng(0).normal(size=50)
    first, again, other = (evaluate.mean_interval(x, seed=seed) for seed in (1, 1, 2))
    assert first == again != other and first[0] < x.mean() < first[1]


def test_rows_stay_together_in_a_resample():
    x = np.random.default_rng(0).normal(size=40)
    interval = evaluate.bootstrap([x, x + 1.5], lambda a, b: np.mean(b - a, axis=-1), seed=0)
    assert interval == pytest.approx((1.5, 1.5))


def test_a_bootstrap_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    intervals = [evaluate.mean_interval(rng.normal(size=60), resamples=400, seed=i) for i in range(300)]
    assert 270 <= sum(low <= 0 <= high for low, high in intervals) <= 296


def test_one_row_has_no_interval():
    assert all(map(math.isnan, evaluate.mean_interval([1.0])))


def test_a_preference_is_a_win_a_tie_a_loss_or_nothing():
    found = evaluate.preferences([2, 1, 1, math.nan], [1, 1, 2, 0])
    np.testing.assert_array_equal(found, [1.0, 0.5, 0.0, np.nan])


# --- length control


@quick
@given(
    st.integers(2, 12).flatmap(lambda n: st.tuples(*(arrays.arrays(float, n, elements=e) for e in (shares, numbers))))
)
def test_the_fit_is_the_maximum_that_a_general_optimiser_finds(rows):
    preference, term = rows[0], np.tanh(rows[1])
    constant, weight = evaluate.fit_length(preference, term)
    if preference.min() == preference.max() and preference[0] in (0.0, 1.0):
        assert constant == (np.inf if preference[0] else -np.inf) and weight == 0
        return

    def loss(x):
        margin = x[0] + x[1] * term
        fit = preference * np.logaddexp(0, -margin) + (1 - preference) * np.logaddexp(0, margin)
        return fit.sum() + statistics.LENGTH_PENALTY * x[1] ** 2 / 2

    best = optimize.minimize(loss, [0.0, 0.0], method="BFGS")
    assert loss([constant, weight]) <= best.fun + 1e-9
    np.testing.assert_allclose([constant, weight], best.x, atol=1e-3)


def test_length_control_recovers_a_planted_effect():
    # The truth: s(0.4 + 2 t), where the policy's answers are longer on average; without length it would win s(0.4).
    rng = np.random.default_rng(0)
    a, b = rng.integers(40, 400, 20_000), rng.integers(20, 300, 20_000)
    term = evaluate.length_term(a, b)
    wins = (rng.random(20_000) < special.expit(0.4 + 2 * term)).astype(float)
    found = evaluate.length_controlled_win_rate(wins, a, b, resamples=100)
    truth = special.expit(0.4)
    assert wins.mean() > truth + 0.05  # what length alone gives
    assert found["length_controlled_win_rate"] == pytest.approx(truth, abs=0.012)
    assert found["length_controlled_win_rate_low"] < truth < found["length_controlled_win_rate_high"]
    assert found["length_coefficient"] == pytest.approx(2.0, abs=0.1)


def test_where_length_says_nothing_both_win_rates_are_the_same():
    wins, lengths = np.array([1.0, 1, 0, 1, 0.5]), np.full(5, 30)
    found = evaluate.length_controlled_win_rate(wins, lengths + 7, lengths)
    assert found["length_controlled_win_rate"] == pytest.approx(0.7) and found["length_coefficient"] == 0.0


def test_wins_alone_are_a_length_controlled_win_rate_of_one():
    found = evaluate.length_controlled_win_rate(np.ones(9), np.arange(9), np.arange(9)[::-1])
    assert found["length_controlled_win_rate"] == found["length_controlled_win_rate_low"] == 1.0


def test_policies_that_change_places_have_the_other_share():
    rng = np.random.default_rng(1)
    wins, a, b = rng.integers(0, 3, 200) / 2, rng.integers(1, 90, 200), rng.integers(1, 60, 200)
    one, other = (evaluate.length_controlled_win_rate(p, x, y) for p, x, y in ((wins, a, b), (1 - wins, b, a)))
    name = "length_controlled_win_rate"
    assert one[name] + other[name] == pytest.approx(1.0) and one["length_coefficient"] == pytest.approx(
        other["length_coefficient"]
    )


def test_the_length_term_by_hand():
    # Differences 2, -2, 2, -2: their deviation is 2.
    found = evaluate.length_term([3, 1, 4, 1], [1, 3, 2, 3])
    np.testing.assert_allclose(found, np.tanh([1, -1, 1, -1]))


# --- best of n


@quick
@given(arrays.arrays(float, st.tuples(st.integers(1, 3), st.integers(1, 6)), elements=numbers), st.data())
def test_best_of_n_is_the_mean_over_all_subsets(rewards, data):
    n = data.draw(st.integers(1, rewards.shape[1]))
    brute = [np.mean([max(subset) for subset in itertools.combinations(row, n)]) for row in rewards]
    np.testing.assert_allclose(evaluate.best_of_n(rewards, n), brute, atol=1e-9)


@quick
@given(
    arrays.arrays(int, (2, 5), elements=st.integers(0, 2)), arrays.arrays(float, (2, 5), elements=numbers), st.data()
)
def test_the_chosen_ones_other_reward_is_told_with_ties_drawn_evenly(rewards, measured, data):
    n = data.draw(st.integers(1, 5))

    def chosen(row, other):
        means = []
        for subset in itertools.combinations(range(5), n):
            best = max(row[i] for i in subset)
            means.append(np.mean([other[i] for i in subset if row[i] == best]))
        return np.mean(means)

    brute = [chosen(row, other) for row, other in zip(rewards, measured)]
    np.testing.assert_allclose(evaluate.best_of_n(rewards, n, measured), brute, atol=1e-9)


def test_best_of_n_by_hand():
    # Of 1, 2, 4 two at a time: 2, 4, 4.
    assert evaluate.best_of_n([[1, 2, 4]], 2) == pytest.approx([10 / 3])
    assert evaluate.best_of_n([[4, 1, 2]], 1) == pytest.approx([7 / 3])
    assert evaluate.best_of_n([[4, 1, 2]], 3) == [4.0]
    with pytest.raises(ValueError, match="best of 4 needs at least 4 samples to a prompt, not 3"):
        evaluate.best_of_n([[4, 1, 2]], 4)


def test_many_samples_do_not_overflow():
    found = evaluate.best_of_n(np.arange(3000.0)[None], 1000)
    assert found == pytest.approx([3001 * 1000 / 1001 - 1])  # the mean greatest of 1000 of 1..3000, less 1


def test_the_kl_bound_by_hand_and_above_the_kl():
    assert evaluate.kl_bound(1) == 0.0 and evaluate.kl_bound(4) == pytest.approx(math.log(4) - 0.75)
    # Ten responses, ranked: the best of 4 drawn with replacement is the i-th with (i/10)^4 - ((i-1)/10)^4.
    p = np.diff((np.arange(11) / 10) ** 4)
    kl = float(np.sum(p * np.log(p / 0.1)))
    assert 0.9 * evaluate.kl_bound(4) < kl <= evaluate.kl_bound(4)


# --- calibration


def test_calibration_by_hand():
    # Confidences 0.62, 0.62, 0.95 (wrong) and a tie at 0.5: in 5 bins of width 0.1.
    logit = special.logit
    chosen = np.array([logit(0.62), logit(0.62) + 3, 0.0, 1.0])
    rejected = np.array([0.0, 3.0, logit(0.95), 1.0])
    found = evaluate.calibration(chosen, rejected, bins=5)
    assert found["pairs"] == 4 and found["accuracy"] == 0.5 and found["ties"] == 1
    counts = [(row["pairs"], row["accuracy"]) for row in found["bins"]]
    assert counts[0] == (1, 0.5) and counts[4] == (1, 0.0) and sum(n for n, _ in counts) == 4
    assert found["ece"] == pytest.approx((2 * (1 - 0.62) + 0.95) / 4)
    assert found["brier"] == pytest.approx((2 * 0.38**2 + 0.95**2 + 0.25) / 4)
    assert found["loss"] == pytest.approx(-(2 * math.log(0.62) + math.log(0.05) + math.log(0.5)) / 4)
    assert found["confidence"] == pytest.approx((0.62 + 0.62 + 0.95 + 0.5) / 4)


def test_a_model_that_is_as_sure_as_it_is_right_has_little_error_and_a_sharper_one_more():
    rng = np.random.default_rng(0)
    margin = rng.normal(0, 2, 40_000)
    flip = np.where(rng.random(40_000) < special.expit(margin), 1, -1)
    right, sharp = (evaluate.calibration(k * margin * flip, np.zeros(40_000), resamples=50) for k in (1, 4))
    assert right["ece"] < 0.01 < 0.1 < sharp["ece"] and right["accuracy"] == sharp["accuracy"]


@quick
@given(arrays.arrays(float, st.integers(1, 30), elements=numbers), st.integers(1, 12))
def test_every_pair_is_in_one_bin_and_the_error_is_a_share(margin, bins):
    found = evaluate.calibration(margin, np.zeros_like(margin), bins=bins, resamples=10)
    assert sum(row["pairs"] for row in found["bins"]) == margin.size and 0 <= found["ece"] <= 1
