"""Intervals, win rates, length control, entropy: numbers by hand, exact enumeration, planted effects."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import optimize, special, stats

from rlhf_jax import evaluate
from rlhf_jax.metrics import statistics

numbers = st.floats(-5, 5, width=32)
shares = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
quick = settings(max_examples=60, deadline=None)


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


def test_mean_and_standard_error_by_hand():
    # Variance (ddof 1) of 1, 2, 3, 4 is 5/3; over 4, the root of 5/12.
    mean, error = evaluate.mean_and_standard_error([1, 2, 3, 4])
    assert mean == 2.5 and error == pytest.approx(math.sqrt(5 / 12), rel=1e-12)


def test_one_number_has_no_standard_error():
    assert evaluate.mean_and_standard_error([3.0])[0] == 3.0
    assert math.isnan(evaluate.mean_and_standard_error([3.0])[1])
    assert math.isnan(evaluate.mean_and_standard_error([])[0])


def test_a_difference_is_taken_prompt_by_prompt():
    difference, error = evaluate.paired_difference([11, 22, 33], [10, 20, 30])
    assert difference == 2.0 and error == pytest.approx(1 / math.sqrt(3))


def test_ties_count_half_in_a_win_rate():
    # 2 wins, 1 tie, 1 loss: 2.5 / 4. The ends of Wilson's interval solve (0.625 - x)^2 = z^2 x (1 - x) / 4.
    rate, low, high = evaluate.win_rate([2, 2, 1, 0], [1, 1, 1, 1])
    assert rate == 0.625
    z2 = 1.959963984540054**2
    roots = np.roots([1 + z2 / 4, -(2 * 0.625 + z2 / 4), 0.625**2])
    np.testing.assert_allclose(sorted(roots), [low, high], rtol=1e-9)


def test_a_win_rate_of_one_keeps_its_interval_inside():
    rate, low, high = evaluate.win_rate(np.ones(100), np.zeros(100))
    assert rate == 1.0 and high == 1.0 and low == pytest.approx(100 / (100 + 3.8414588))
    assert evaluate.win_rate(np.zeros(100), np.ones(100))[1] == pytest.approx(0.0, abs=1e-15)


def test_only_pairs_are_compared():
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        evaluate.win_rate([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="at least one pair"):
        evaluate.win_rate([], [])


def test_the_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        wins = rng.random(60) < 0.7
        _, low, high = evaluate.win_rate(wins, np.full(60, 0.5))
        covered += low <= 0.7 <= high
    assert 930 <= covered <= 975


def test_unigram_entropy_by_hand():
    # Frequencies 1/2, 1/4, 1/4.
    assert evaluate.unigram_entropy([[5, 5], [7, 9]]) == pytest.approx(1.5 * math.log(2))
    assert evaluate.unigram_entropy([np.full(9, 3)]) == 0.0
    assert evaluate.unigram_entropy([]) == 0.0
    assert evaluate.unigram_entropy(iter([range(8)])) == pytest.approx(math.log(8))


def test_an_interval_over_few_numbers_is_students():
    x = [0.3, 0.5, 0.45]
    expected = stats.t.interval(0.95, 2, np.mean(x), stats.sem(x))
    np.testing.assert_allclose(statistics.student_interval(x), expected, rtol=1e-12)
    assert all(map(math.isnan, (*statistics.student_interval([1.0]), *statistics.student_interval([]))))
