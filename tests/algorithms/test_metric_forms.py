"""Metrics in both forms, masked and as TRL reports them; test_ppo.py and test_rloo.py hold them to TRL's."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.algorithms.metric_forms import FORMS


def test_the_variance_of_one_ratio_is_nan_to_trl_and_0_to_us():
    one, three = jnp.array([1.5]), jnp.array([1.0, 2.0, 4.0])
    assert np.isnan(FORMS["trl"].ratio_variance(one)) and FORMS["correct"].ratio_variance(one) == 0
    for metrics in ("trl", "correct"):
        assert float(FORMS[metrics].ratio_variance(three)) == pytest.approx(7 / 3)
