"""Best of n: exact enumeration, numbers by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rlhf_jax import evaluate

numbers = st.floats(-5, 5, width=32)
quick = settings(max_examples=60, deadline=None)


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
    with pytest.raises(ValueError, match="best of 4.*3"):
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
