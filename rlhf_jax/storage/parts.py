"""Files that grow in a bucket, where no object can be appended to: a folder of parts that reads as one file.

FILE/00000001.part, FILE/00000002.part, ... hold what was appended, in order. FILE/00000064.whole holds everything up to
part 64: it takes the place of the parts before it at once, which are deleted afterwards.
"""

from __future__ import annotations

import contextlib
import re

from rlhf_jax.storage import bucket

NAME = re.compile(r"(\d{8})\.(part|whole)")
MERGE = 64
"""Parts after which a file is merged into one object."""


def _layout(names: list[str]) -> tuple[list[str], int]:
    """(Objects that hold the file, in order; the highest number)."""
    numbers = sorted((int(match[1]), match[2]) for name in names if (match := NAME.fullmatch(name)))
    merged_number = max((number for number, kind in numbers if kind == "whole"), default=0)
    current = [f"{merged_number:08d}.whole"] if merged_number else []
    current += [f"{number:08d}.part" for number, kind in numbers if kind == "part" and number > merged_number]
    return current, numbers[-1][0] if numbers else 0


def read(path: str) -> bytes:
    """The file's content.

    Raises:
      FileNotFoundError: it has no parts.
    """
    for last_try in (False, False, False, True):
        current, _ = _layout(bucket.names(path))
        if not current:
            break
        try:
            return b"".join(bucket.read(f"{path}/{name}") for name in current)
        except FileNotFoundError:  # its writer merged the parts meanwhile
            if last_try:
                raise
    raise FileNotFoundError(f"{path} does not exist")


def replace(path: str, data: bytes) -> None:
    """Gives the file a new content, at once."""
    names = bucket.names(path)
    bucket.write(f"{path}/{_layout(names)[1] + 1:08d}.whole", data)
    bucket.remove([f"{path}/{name}" for name in names if NAME.fullmatch(name)])


class Appender:
    """Appends to a file, one object a call. Another writer's parts are never overwritten."""

    def __init__(self, path: str):
        """`path`: of the file, existing or not."""
        self.path = path
        current, self._last = _layout(bucket.names(path))
        self._count = len(current)

    def append(self, data: bytes, *, attempts: int | None = None) -> None:
        """Appends bytes.

        Raises:
          StorageError: they could not be written; or another process appends to the file too.
        """
        if not bucket.create(f"{self.path}/{self._last + 1:08d}.part", data, attempts=attempts):
            scheme, _, key = self.path.partition("://")
            raise bucket.StorageError(
                f"{scheme}://{key.partition('/')[0]}: cannot append to {key.partition('/')[2]}: another process writes "
                "to it"
            )
        self._last += 1
        self._count += 1
        if self._count > MERGE:
            self._last += 1  # whether or not it is known that the merged object was written
            with contextlib.suppress(bucket.StorageError):  # the parts are still there
                replace(self.path, read(self.path))
                self._count = 1
