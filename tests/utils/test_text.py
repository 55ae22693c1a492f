"""Text for terminals: durations, and control characters made visible."""

import pytest

from rlhf_jax.utils import text
from rlhf_jax.utils.text import duration
from tests.helpers.control_characters import EVIL


@pytest.mark.parametrize(
    "seconds, said", [(3.21, "3.2s"), (250, "4m10s"), (7500, "2h05m"), (3 * 86400 + 4 * 3600, "3d04h")]
)
def test_durations_read_as_people_say_them(seconds, said):
    assert duration(seconds) == said


@pytest.mark.parametrize(
    "count, said",
    [(0, "0.0 KiB"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (1100 << 20, "1.1 GiB"), (5 << 40, "5,120.0 GiB")],
)
def test_bytes_have_the_largest_unit_that_they_fill(count, said):
    assert text.bytes_text(count) == said


def test_what_a_terminal_would_obey_becomes_visible_and_all_else_stays():
    assert text.printable(EVIL) == ("\\x1b]0;owned\\x07\\x1b[2J\\x00\\x9b31m\\u202egnihton\\u2066\\u2028")
    assert text.printable("\ud83d \U000e0041") == "\\ud83d \\U000e0041"
    same = "caf\xe9 \u6f22 \u0627\u0644 \U0001f469\u200d\U0001f52c\n\ta"
    assert text.printable(same) == same
