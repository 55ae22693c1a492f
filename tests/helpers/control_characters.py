"""Text that would act on a terminal."""

from rlhf_jax.utils import text

EVIL = "\x1b]0;owned\x07\x1b[2J\x00\x9b31m\u202egnihton\u2066\u2028"


def obeyed(shown: str) -> list[str]:
    """Characters that a terminal would act on, or that turn the direction of reading."""
    return [c for c in shown if text.printable(c) != c or (c != "\n" and ord(c) < 32)]
