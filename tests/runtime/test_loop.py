"""When a run evaluates, saves, takes samples and prints them."""

import pytest

from rlhf_jax.runtime import loop


@pytest.mark.parametrize("total", [1, 2, 7, 48, 53, 1000])
@pytest.mark.parametrize("number", [1, 2, 3, 10, 100])
def test_the_first_and_the_last_samples_are_printed_and_at_most_two_between(total, number):
    due = [step for step in range(1, total + 1) if loop.samples_due(number, step, total, step == total)]
    printed = [step for step in due if loop.samples_printed(number, step, total, step == total)]
    assert {due[0], total} <= set(printed) and len(printed) <= 4
    assert len(printed) >= min(3, len(due) - 1)


def test_printed_samples_are_spread_over_the_run():
    printed = [step for step in range(4, 49, 4) if loop.samples_printed(10, step, 48, step == 48)]
    assert printed == [4, 16, 32, 48]


@pytest.mark.parametrize(
    ("eval_steps", "total", "updates"),
    [(0, 100, 0), (5, 100, 5), (0.1, 100, 10), (0.25, 10, 3), (0.01, 10, 1), (1, 10, 1)],
)
def test_steps_below_1_are_a_share_of_the_run(eval_steps, total, updates):
    found = loop.updates_between(eval_steps, total)
    assert found == updates and type(found) is int
