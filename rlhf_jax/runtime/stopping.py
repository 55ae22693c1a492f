"""Stopping a run from outside, by a signal or a time limit, without losing work.

The first SIGTERM or SIGINT requests a stop: the run saves at its next safe point, between the phases of an update. A
second one ends the process at once. A thread receives them, so that the second works while a long program runs.

So do the signals of a terminal that goes and of schedulers, unless the process ignores or handles them already.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rlhf_jax.parallel import multihost
from rlhf_jax.utils.forks import undone_in_children

RESUMABLE = 75
"""Exit code of a run that was stopped from outside and can be resumed; EX_TEMPFAIL of sysexits.h."""
RESUME_HINT = "rerun the command to resume"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
FROM_OUTSIDE = ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Of a terminal that goes, and of SLURM, SGE and LSF at the end of a job's time; by name, since not all systems have
them."""
MARGIN = 1.5  # the next update may take this many times as long as the longest one so far


def _stop_signals() -> list[int]:
    """The signals that stop a run: of those from outside the ones that end the process."""
    outside = (getattr(signal, name) for name in FROM_OUTSIDE if hasattr(signal, name))
    return [*SIGNALS, *(number for number in outside if signal.getsignal(number) == signal.SIG_DFL)]


class Stopped(KeyboardInterrupt):
    """A run was stopped from outside. Its work is saved; rerunning the command resumes it."""

    status = RESUMABLE

    def __init__(self, message: str, together: bool = False):
        """`together`: all processes of the run stop at this point."""
        super().__init__(message)
        self.together = together


class StopRequested(BaseException):
    """Unwinds an update or evaluation that is abandoned at a safe point; the loop then saves the last whole update."""


class Stops:
    """Requests to stop a run. As a context manager it handles signals, if the main thread enters it.

    Outside the training loop there is nothing to save, and the first signal ends the run at once, as Ctrl-C does.
    """

    def __init__(self, max_minutes: float | None = None, began: float | None = None):
        """
        Args:
          max_minutes: of wall time, after which the run stops; None: no limit.
          began: time.monotonic() at its start; None: now.
        """
        self._limit = None if max_minutes is None else 60 * max_minutes
        self._began = time.monotonic() if began is None else began
        self._longest_save = 0.0
        self._longest_update = 0.0
        self._signal: int | None = None
        self._reason: str | None = None
        self._in_loop = False
        self._old_handlers: dict[int, Any] = {}
        self._reads = self._pipe = -1
        self._old_wakeup_fd: int | None = None
        self._forks = contextlib.ExitStack()

    # --- signals

    def __enter__(self) -> Stops:
        if threading.current_thread() is threading.main_thread():
            # First, since another thread may fork a child at any time.
            self._forks.enter_context(undone_in_children(self._undo_in_child))
            self._reads, self._pipe = os.pipe()
            os.set_blocking(self._pipe, False)
            self._old_handlers = {number: signal.getsignal(number) for number in _stop_signals()}
            self._listen()
            threading.Thread(target=self._read_signals, args=(self._reads,), daemon=True, name="stops").start()
        return self

    def __exit__(self, *_) -> None:
        if self._pipe >= 0:
            self._restore()
            os.close(self._pipe)  # ends the thread
            self._pipe = -1
        self._forks.close()

    def _listen(self) -> None:
        """Takes the signals, and takes them back from a library that took them."""
        before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        if before != self._pipe and self._old_wakeup_fd is None:
            self._old_wakeup_fd = before
        for number in self._old_handlers:
            if signal.getsignal(number) != self._handle_in_main_thread:
                signal.signal(number, self._handle_in_main_thread)

    def _restore(self) -> None:
        for number, handler in self._old_handlers.items():
            if handler is not None:  # not set from Python, and cannot be
                signal.signal(number, handler)
        signal.set_wakeup_fd(-1 if self._old_wakeup_fd is None else self._old_wakeup_fd)
        self._old_handlers, self._old_wakeup_fd = {}, None

    def _undo_in_child(self) -> None:
        """In a forked child: its signals are its own, and the pipe is the parent's."""
        self._restore()
        for end in (self._reads, self._pipe):
            with contextlib.suppress(OSError):
                os.close(end)
        self._pipe = -1

    def _read_signals(self, reads: int) -> None:
        with open(reads, "rb", buffering=0) as pipe:
            while received := pipe.read(1):
                if received[0] in self._old_handlers:
                    self._handle_in_thread(received[0])

    def _handle_in_thread(self, number: int) -> None:
        """Runs at once, whatever the main thread does."""
        name = signal.Signals(number).name
        if self._signal is not None:
            print(f"\n{name} again: ending now; nothing more is saved", file=sys.stderr, flush=True)
            os._exit(128 + number)
        self._signal = number
        action = "saving at the next safe point, then ending" if self._in_loop else "ending"
        print(f"\n{name}: {action}; send it again to end now", file=sys.stderr, flush=True)

    def _handle_in_main_thread(self, number: int, frame: Any) -> None:
        """Outside the loop, ends the main thread as soon as it runs Python."""
        del frame
        if not self._in_loop:
            raise Stopped(f"stopped by {signal.Signals(number).name}; {RESUME_HINT}")
        descriptor = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        if descriptor != self._pipe:  # a library took it: the thread did not hear the signal
            signal.set_wakeup_fd(descriptor)
            self._handle_in_thread(number)

    # --- the loop

    def set_in_loop(self, inside: bool) -> None:
        """Enters or leaves the training loop, in which a stop first saves."""
        self._in_loop = inside

    def record_seconds(self, update: float = 0.0, saving: float = 0.0) -> None:
        """Records the seconds of an update or a save: the longest of each must fit before the time limit."""
        self._longest_update = max(self._longest_update, update)
        self._longest_save = max(self._longest_save, saving)

    def _reason_here(self, whole: bool) -> str | None:
        """Why this process would stop now; `whole`: another update must fit before the limit."""
        if self._signal is not None:
            return f"by {signal.Signals(self._signal).name}"
        if self._limit is not None:
            ahead = MARGIN * (self._longest_update * whole + self._longest_save)
            if time.monotonic() - self._began + ahead >= self._limit:
                return f"by --max_minutes {self._limit / 60:g}"
        return None

    def reason(self, whole: bool = False) -> str | None:
        """Why the run must stop, or None: the same on all processes, which must all call it at the same points.

        Args:
          whole: another update comes next.
        """
        if self._pipe >= 0 and threading.current_thread() is threading.main_thread():
            self._listen()
        if self._reason is None:
            reasons = multihost.gather_objects(self._reason_here(whole))
            self._reason = next((reason for reason in reasons if reason is not None), None)
        return self._reason

    def tick(self, whole: bool = False) -> None:
        """A safe point: raises StopRequested if the run must stop; see `reason`."""
        if self.reason(whole) is not None:
            raise StopRequested


def no_tick() -> None:
    """A safe point without a check."""


Tick = Callable[[], None]
