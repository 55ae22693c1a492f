"""Stopping a run from outside: signals and a time limit are heard at once and obeyed where nothing is lost.

The first SIGTERM or SIGINT asks for an end: the run saves at its next safe point, between the phases of an update. A
second one ends the process on the spot. A thread hears them, so that the second works while a long program runs.
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
"""Exit code of a run that was stopped from outside: the same command continues. EX_TEMPFAIL of sysexits.h."""
RESUME_HINT = "the same command continues"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
MARGIN = 1.5  # the next update may take so much longer than the longest one so far


class Stopped(KeyboardInterrupt):
    """A run ended because it was asked to from outside; what it did is saved, and the same command continues."""

    status = RESUMABLE

    def __init__(self, message: str, together: bool = False):
        """`together`: all processes of the run stop here."""
        super().__init__(message)
        self.together = together


class StopRequested(BaseException):
    """Unwinds an update or an evaluation that is given up at a safe point; the loop saves what was done before."""


class Stops:
    """What may ask a run to end. Used as a context: signals are heard within it, if the main thread enters it.

    Outside the training loop there is nothing to save, and the first signal ends the run at once, as Ctrl-C does.
    """

    def __init__(self, max_minutes: float | None = None, began: float | None = None):
        """Hears nothing yet.

        Args:
          max_minutes: of wall time, after which the run ends; None: no limit.
          began: time.monotonic() from which they count; None: now.
        """
        self._limit = None if max_minutes is None else 60 * max_minutes
        self._began = time.monotonic() if began is None else began
        self._saving = 0.0
        self._longest = 0.0
        self._signal: int | None = None
        self._why: str | None = None
        self._loop = False
        self._old: dict[int, Any] = {}
        self._pipe = -1
        self._old_fd = -1

    # --- signals

    def __enter__(self) -> Stops:
        if threading.current_thread() is threading.main_thread():
            reads, self._pipe = os.pipe()
            os.set_blocking(self._pipe, False)
            self._old_fd = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
            for number in SIGNALS:
                self._old[number] = signal.signal(number, self._in_main_thread)
            threading.Thread(target=self._hear, args=(reads,), daemon=True, name="stops").start()
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}
        if self._pipe >= 0:
            signal.set_wakeup_fd(self._old_fd)
            os.close(self._pipe)  # the thread reads its end
            self._pipe = -1

    def _hear(self, reads: int) -> None:
        with open(reads, "rb", buffering=0) as pipe:
            while heard := pipe.read(1):
                if heard[0] in SIGNALS:
                    self._heard(heard[0])

    def _heard(self, number: int) -> None:
        """In the thread: at once, whatever the main one does."""
        name = signal.Signals(number).name
        if self._signal is not None:
            print(f"\n{name} again: ending at once; nothing more is saved", file=sys.stderr, flush=True)
            os._exit(128 + number)
        self._signal = number
        first = "saving at the next safe point, then ending" if self._loop else "ending"
        print(f"\n{name}: {first}; once more ends at once", file=sys.stderr, flush=True)

    def _in_main_thread(self, number: int, frame: Any) -> None:
        """Outside the loop the main thread ends by itself, as soon as it runs Python."""
        del frame
        if not self._loop:
            raise Stopped(f"stopped by {signal.Signals(number).name}; {RESUME_HINT}")

    # --- the loop

    def loop(self, inside: bool) -> None:
        """From now on there is something to save, or no more."""
        self._loop = inside

    def took(self, update: float = 0.0, saving: float = 0.0) -> None:
        """What an update and a save took, in seconds: the longest of them must fit before the limit."""
        self._longest, self._saving = max(self._longest, update), max(self._saving, saving)

    def _wish(self, whole: bool) -> str | None:
        """Why this process would end now; `whole`: before another update, which must fit as well."""
        if self._signal is not None:
            return f"by {signal.Signals(self._signal).name}"
        if self._limit is not None:
            ahead = MARGIN * (self._longest * whole + self._saving)
            if time.monotonic() - self._began + ahead >= self._limit:
                return f"by --max_minutes {self._limit / 60:g}"
        return None

    def asked(self, whole: bool = False) -> str | None:
        """Why the run is to end, or None: the same on all processes, which all call it at the same points.

        Args:
          whole: another update would come first.
        """
        if self._why is None:
            wishes = multihost.gather_objects(self._wish(whole))
            self._why = next((wish for wish in wishes if wish is not None), None)
        return self._why

    def tick(self, whole: bool = False) -> None:
        """A safe point: raises StopRequested where the run is to end; see `asked`."""
        if self.asked(whole) is not None:
            raise StopRequested


def no_tick() -> None:
    """A safe point at which nobody asks."""


Tick = Callable[[], None]
