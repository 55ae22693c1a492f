"""Standard output and error that never end a program: a completion may contain any character, and a terminal may go."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_python_format = warnings.formatwarning
_LONG_NAMES = {"stdout": "standard output", "stderr": "standard error"}


class Output:
    """A text stream that prints characters outside its encoding as escapes, and drops text without a reader.

    The first loss is said once on the other one of standard output and error.

    Attributes:
      loses: whether the last text was lost.
    """

    def __init__(self, stream: Any, name: str):
        """`name`: 'stdout' or 'stderr'."""
        self._stream, self._name, self._noted = stream, name, False
        self._discards, self.loses = False, False

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

    def lose_quietly(self) -> None:
        """Says nothing of a loss."""
        self._noted = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Drops output that a closed stream, a pipe without a reader, a lost terminal or a full disk does not take."""
        try:
            yield
            self.loses = self._discards
        except BrokenPipeError as error:
            discard(self._stream)
            self._discards = self.loses = True
            self._note(error)
        except (OSError, ValueError) as error:
            self.loses = True
            self._note(error)

    def _note(self, error: Exception) -> None:
        if self._noted or getattr(sys, self._name) is not self:  # a logger may have it when the run is over
            return
        self._noted = True
        other = sys.stderr if self._name == "stdout" else sys.stdout
        with contextlib.suppress(AttributeError):  # no such stream
            reason = error.strerror if isinstance(error, OSError) else error
            other.write(f"{_LONG_NAMES[self._name]} takes no more text ({reason}); going on without it\n")
            other.flush()


def show(text: str) -> None:
    """Prints the output of a command, such as its help, and ignores that the reader has gone, as in `--help | head`."""
    with guarded_output():
        if isinstance(sys.stdout, Output):
            sys.stdout.lose_quietly()
        print(text, flush=True)


def is_lost() -> bool:
    """Whether text that is printed to standard output or error is dropped."""
    return any(isinstance(stream, Output) and stream.loses for stream in (sys.stdout, sys.stderr))


def discard(stream: Any) -> None:
    """Makes a stream whose pipe has no reader write to nowhere: Python would report its rest as an error at the end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _format_warning(message: Any, category: type[Warning], filename: str, *rest: Any) -> str:
    if issubclass(category, UserWarning) and filename.startswith(_PACKAGE):
        return f"warning: {message}\n"
    return _python_format(message, category, filename, *rest)


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Within it, or in a function that it decorates, nothing printed to standard output or error raises, and a warning
    of this package is a line, without the place in its code."""
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    guarded = {name: Output(stream, name) for name, stream in streams.items() if not isinstance(stream, Output | None)}
    for name, output in guarded.items():
        setattr(sys, name, output)
    formats, warnings.formatwarning = warnings.formatwarning, _format_warning
    try:
        yield
    finally:
        warnings.formatwarning = formats
        for name, output in guarded.items():
            output.flush()  # Python's own flush at the end would report a reader that has gone
            if getattr(sys, name) is output:
                setattr(sys, name, streams[name])
