"""Calibration of a reward model: numbers by hand, bins that hold every pair."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import special

from rlhf_jax import evaluate

numbers = st.floats(-5, 5, width=32)
quick = settings(max_examples=60, deadline=None)


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


def test_reliability_by_hand():
    low, high = evaluate.reliability([0.0, math.log(2), -math.log(9), math.log(19)], bins=2)
    # A tie and one of 2 to 1 that is right; one of 9 to 1 that is wrong and one of 19 to 1 that is right.
    assert low == {"low": 0.5, "high": 0.75, "pairs": 2, "confidence": pytest.approx(7 / 12), "accuracy": 0.75}
    assert high == {"low": 0.75, "high": 1.0, "pairs": 2, "confidence": pytest.approx(0.925), "accuracy": 0.5}
    assert evaluate.calibration_error([low, high]) == pytest.approx((abs(0.75 - 7 / 12) + 0.425) / 2)
    assert [row["pairs"] for row in evaluate.reliability([])] == [0] * 10
    assert evaluate.calibration_error(evaluate.reliability([])) == 0


def test_a_calibrated_model_has_no_calibration_error_and_a_sure_one_that_guesses_has_a_half():
    draw = np.random.default_rng(1)
    sure = draw.uniform(0, 4, 200_000)
    right = draw.random(len(sure)) < 1 / (1 + np.exp(-sure))
    assert evaluate.calibration_error(evaluate.reliability(np.where(right, sure, -sure))) < 0.01
    guesses = evaluate.reliability(np.where(draw.random(10_000) < 0.5, 50.0, -50.0))
    assert evaluate.calibration_error(guesses) == pytest.approx(0.5, abs=0.02)
