"""Metrics in both forms, masked and as TRL reports them; test_ppo.py and test_rloo.py hold them to TRL's."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.algorithms.metric_forms import FORMS
from rlhf_jax.types import Rollout


def test_a_response_that_ends_by_any_stop_id_is_counted():
    response = jnp.array([[4, 7, 7, 7], [4, 4, 9, 7], [4, 4, 4, 4], [7, 7, 7, 7]])
    tokens = jnp.zeros((4, 2), jnp.int32)
    rollout = Rollout(
        prompt_tokens=tokens,
        prompt_lengths=jnp.full(4, 2),
        response=response,
        lengths=jnp.array([2, 3, 4, -1]),
        ended=jnp.array([True, True, False, True]),
        logprobs=jnp.zeros((4, 4)),
        response_mask=jnp.ones((4, 4), bool),
    )
    present = rollout.lengths >= 0
    assert FORMS["correct"].eos_count(rollout, present, (7, 9)) == 2
    assert FORMS["trl"].eos_count(rollout, present, (7, 9)) == 3 + 2
    assert FORMS["trl"].eos_count(rollout, present, (7,)) == 3 + 1


def test_the_variance_of_one_ratio_is_nan_to_trl_and_0_to_us():
    one, three = jnp.array([1.5]), jnp.array([1.0, 2.0, 4.0])
    assert np.isnan(FORMS["trl"].ratio_variance(one)) and FORMS["correct"].ratio_variance(one) == 0
    for metrics in ("trl", "correct"):
        assert float(FORMS[metrics].ratio_variance(three)) == pytest.approx(7 / 3)


def test_trl_reports_the_share_of_one_micro_batch_where_the_loss_is_divided_by_the_tokens_of_the_batch():
    shares = jnp.array([1.0, 3.0])
    assert FORMS["trl"].policy_loss(shares, True) == 2
    assert {float(FORMS[form].policy_loss(shares, count)) for form, count in (("trl", False), ("correct", True))} == {4}
