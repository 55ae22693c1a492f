"""The error that the command prints as one line."""

from __future__ import annotations

from typing import Any

from rlhf_jax.utils import text


class UserError(ValueError):
    """An option, a file, a row or a tensor of the user is invalid. The message names it and says what to do.

    The message is safe to print: see `text.error_message`.
    """

    status = 2  # the command's exit code

    def __init__(self, *args: Any):
        super().__init__(*(text.error_message(arg) if isinstance(arg, str) else arg for arg in args))
