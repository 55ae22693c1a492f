"""When samples are taken and when they are printed."""

from types import SimpleNamespace

import pytest

from rlhf_jax.runtime import loop


@pytest.mark.parametrize("total", [1, 2, 7, 48, 53, 1000])
@pytest.mark.parametrize("number", [1, 2, 3, 10, 100])
def test_the_first_and_the_last_samples_are_printed_and_at_most_two_between(total, number):
    config = SimpleNamespace(num_sample_generations=number)
    due = [step for step in range(1, total + 1) if loop.samples_due(config, step, total, step == total)]
    printed = [step for step in due if loop.samples_printed(config, step, total, step == total)]
    assert {due[0], total} <= set(printed) and len(printed) <= 4
    assert len(printed) >= min(3, len(due) - 1)


def test_printed_samples_are_spread_over_the_run():
    config = SimpleNamespace(num_sample_generations=10)
    printed = [step for step in range(4, 49, 4) if loop.samples_printed(config, step, 48, step == 48)]
    assert printed == [4, 16, 32, 48]
