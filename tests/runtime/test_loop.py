"""What the loop does between updates."""

import pytest

from rlhf_jax.config import PPOConfig
from rlhf_jax.runtime.loop import samples_due, samples_printed


@pytest.mark.parametrize(
    ("total", "times", "due", "printed"),
    [
        (48, 10, list(range(4, 49, 4)), [4, 16, 32, 48]),
        (50, 10, list(range(5, 51, 5)), [5, 20, 35, 50]),
        (7, 10, list(range(1, 8)), [1, 3, 5, 7]),
        (9, 2, [4, 8, 9], [4, 8, 9]),
        (1, 10, [1], [1]),
        (9, 0, [], []),
    ],
)
def test_samples_are_printed_at_the_first_and_the_last_time_and_at_two_between(total, times, due, printed):
    config = PPOConfig(num_sample_generations=times)
    steps = [step for step in range(1, total + 1) if samples_due(config, step, total, step == total)]
    assert steps == due
    assert [step for step in steps if samples_printed(config, step, total, step == total)] == printed
