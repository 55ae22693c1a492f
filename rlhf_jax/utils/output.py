"""Standard output and error that never end a program: a completion may contain any character, and a terminal may go."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class Output:
    """A text stream that prints characters outside its encoding as escapes, and drops text without a reader."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes a text. Returns its length."""
        with self._losing():
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        with self._losing():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Loses what a closed stream, a pipe without a reader, a lost terminal or a full disk does not take."""
        try:
            yield
        except BrokenPipeError:
            discard(self._stream)
        except (OSError, ValueError):
            pass


def discard(stream: Any) -> None:
    """Makes a stream whose pipe has no reader write to nowhere: Python would report its rest as an error at the end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Within it, or in a function that it decorates, nothing printed to standard output or error raises."""
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    guarded = {name: Output(stream) for name, stream in streams.items() if not isinstance(stream, Output | None)}
    for name, output in guarded.items():
        setattr(sys, name, output)
    try:
        yield
    finally:
        for name, output in guarded.items():
            if getattr(sys, name) is output:
                setattr(sys, name, streams[name])
