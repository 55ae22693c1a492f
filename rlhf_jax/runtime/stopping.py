"""Stopping a run from outside, by a signal or a time limit, without losing work.

The first SIGTERM or SIGINT requests a stop: the run saves at its next safe point, between the phases of an update. A
second one ends the process at once. A thread receives them, so that the second works while a long program runs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rlhf_jax.parallel import multihost

RESUMABLE = 75
"""Exit code of a run that was stopped from outside and can be resumed; EX_TEMPFAIL of sysexits.h."""
RESUME_HINT = "rerun the command to resume"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
MARGIN = 1.5  # the next update may take this many times as long as the longest one so far


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
        self._pipe = -1
        self._old_wakeup_fd = -1

    # --- signals

    def __enter__(self) -> Stops:
        if threading.current_thread() is threading.main_thread():
            reads, self._pipe = os.pipe()
            os.set_blocking(self._pipe, False)
            self._old_wakeup_fd = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
            for number in SIGNALS:
                self._old_handlers[number] = signal.signal(number, self._handle_in_main_thread)
            threading.Thread(target=self._read_signals, args=(reads,), daemon=True, name="stops").start()
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers = {}
        if self._pipe >= 0:
            signal.set_wakeup_fd(self._old_wakeup_fd)
            os.close(self._pipe)  # ends the thread
            self._pipe = -1

    def _read_signals(self, reads: int) -> None:
        with open(reads, "rb", buffering=0) as pipe:
            while received := pipe.read(1):
                if received[0] in SIGNALS:
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
