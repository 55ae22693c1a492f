"""Forked children of the process: what they must not inherit, and how they are kept from continuing in the code of a
run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

_undo: list[Callable[[], None]] = []


@contextlib.contextmanager
def undone_in_children(undo: Callable[[], None]) -> Iterator[None]:
    """Within it a child calls `undo` as soon as it exists, in the thread that forked it; the latest first."""
    _undo.append(undo)
    try:
        yield
    finally:
        _undo.remove(undo)


_masks = threading.local()  # of signals, of the thread that forks


def _before() -> None:
    for stream in (sys.stdout, sys.stderr):  # a child would write what is in the buffers a second time
        _flush(stream)
    # A signal to a child that has not undone anything yet waits until it has.
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()) if _undo else None


def _in_parent() -> None:
    if _masks.before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _in_child() -> None:
    while _undo:
        _undo.pop()()
    handler = signal.getsignal(signal.SIGINT)
    if handler == signal.default_int_handler:  # Python loses a KeyboardInterrupt that is raised here
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _in_parent()
    if handler == signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)


def _flush(stream: Any) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


@contextlib.contextmanager
def no_child_leaves() -> Iterator[None]:
    """Ends a child that was forked within it and leaves it: with 0, the code of a SystemExit, or 1 and a traceback.

    A child that returned into the run would go on training, write the run's files, or close them.
    """
    process = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() == process:
            raise
        _end(error)
    if os.getpid() != process:
        _end(None)


def _end(error: BaseException | None) -> None:
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        _flush(stream)
    os._exit(code)
