"""The error that the command prints as one line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlhf_jax.utils import text


class UserError(ValueError):
    """An option, a file, a row or a tensor of the user is invalid. The message names it and says what to do.

    The message is safe to print: see `text.error_message`.
    """

    status = 2  # the command's exit code

    def __init__(self, *args: Any):
        super().__init__(*(text.error_message(arg) if isinstance(arg, str) else arg for arg in args))


class MissingSplit(UserError):
    """A data set has no split of this name.

    Args:
      source: name of the data set, such as 'tldr' or a folder.
      splits: names of its splits.
    """

    def __init__(self, source: str, split: str, splits: Iterable[str]):
        super().__init__(f"{source} has no split {split!r}; it has {', '.join(splits) or 'none'}")
