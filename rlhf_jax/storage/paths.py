"""Where a path leads: relative ones from the working folder that the command or the call began in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from rlhf_jax.errors import UserError
from rlhf_jax.storage.bucket import is_remote

_began_in: list[str] = []


@contextlib.contextmanager
def from_here() -> Iterator[None]:
    """Within it, or in a function that it decorates, relative paths start at the working folder in which it began, even
    if a reward function or a callback changes to another one.

    Raises:
      UserError: the working folder no longer exists.
    """
    _began_in.append(_current())
    try:
        yield
    finally:
        _began_in.pop()


def working_folder() -> str:
    """The folder that relative paths start at.

    Raises:
      UserError: it no longer exists.
    """
    return _began_in[-1] if _began_in else _current()


def _current() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # transformers cannot even be imported there
        raise UserError("the working folder no longer exists: change to one that does") from None


def absolute(path: str) -> str:
    """The path from the root, `~` resolved; in a bucket without slashes at its end."""
    if is_remote(path):
        scheme, _, key = path.partition("://")
        return f"{scheme}://" + "/".join(part for part in key.split("/") if part)
    path = os.path.expanduser(path)
    return os.path.normpath(path if os.path.isabs(path) else os.path.join(working_folder(), path))


def located(path: str) -> str:
    """A path as the system finds it: as it is spelled, unless it begins with `~` or the working folder has changed."""
    if is_remote(path) or os.path.isabs(path):
        return path
    try:
        moved = bool(_began_in) and _began_in[-1] != os.getcwd()
    except FileNotFoundError:
        moved = True
    return absolute(path) if moved or path.startswith("~") else path
