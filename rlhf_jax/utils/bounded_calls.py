"""Calls of the user's functions within a time limit: plain ones in a worker thread, async ones on an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from rlhf_jax.utils.forks import no_child_leaves

GRACE = 1.0
"""Seconds for a cancelled coroutine to clean up."""


class Hang(Exception):
    """The function did not return in time."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call returned or raised, and its seconds."""

    result: Any
    error: BaseException | None
    seconds: float


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a function. A function that hangs keeps its Call, so what it returns later is ignored.

    Attributes:
      title: what is called, for messages: 'reward function accuracy'.
      function: it may be `async def`.
      timeout: seconds.
      keywords: its arguments.
      outcome: None until it has ended.
    """

    title: str
    function: Callable
    timeout: float
    keywords: Any = dataclasses.field(default_factory=dict)
    outcome: Outcome | None = None
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    misuse: ClassVar[type[Exception]] = TypeError
    """Raised where a plain function returns a coroutine."""

    @property
    def too_late(self) -> str:
        """What a Hang says."""
        return f"did not return within {self.timeout:g} s"

    @property
    def failed(self) -> bool:
        """Whether it ended with an exception."""
        return self.outcome is not None and self.outcome.error is not None

    def in_thread(self) -> None:
        """Calls a plain function and stores its result or exception."""
        start = time.perf_counter()
        result = error = None
        try:
            with no_child_leaves():
                result = self.function(**self.keywords)
            if inspect.iscoroutine(result):
                result.close()
                raise self.misuse(f"{self.title} returned a coroutine: declare it with async def")
        except BaseException as raised:
            error = raised
        self.outcome = Outcome(result, error, time.perf_counter() - start)
        self.ended.set()

    async def on_loop(self) -> None:
        """Calls an async function within its timeout and stores its result or exception."""
        start = time.perf_counter()
        abandoned = False

        async def call() -> None:
            result = error = None
            try:
                with no_child_leaves():
                    result = await self.function(**self.keywords)
            except BaseException as raised:  # also KeyboardInterrupt, which would end the loop
                error = raised
            if not abandoned:
                self.outcome = Outcome(result, error, time.perf_counter() - start)

        task = asyncio.ensure_future(call())
        try:
            ended, _ = await asyncio.wait({task}, timeout=self.timeout)
            if not ended:
                self.outcome = Outcome(None, Hang(self.too_late), time.perf_counter() - start)
        finally:
            abandoned = True
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE)


class Caller:
    """A worker thread for plain functions and an event loop for async ones, kept from call to call."""

    def __init__(self, name: str):
        self._name = name
        self._worker: _Worker | None = None
        self._loop: _Loop | None = None

    def call(self, call: Call) -> None:
        """Calls a plain function and waits for its outcome. A thread whose function hangs is abandoned."""
        self._worker = self._worker or _Worker(self._name)
        self._worker.put(call.in_thread)
        try:
            deadline = time.monotonic() + call.timeout
            while not call.ended.wait(_next_wait(deadline)) and time.monotonic() < deadline:
                pass
        finally:  # also when Ctrl-C ends the wait
            if not call.ended.is_set():
                self._worker.close()
                self._worker = None
        if call.outcome is None:
            call.outcome = Outcome(None, Hang(call.too_late), call.timeout)

    @contextlib.contextmanager
    def together(self, calls: Sequence[Call], fail_fast: bool = False) -> Iterator[Callable[[], None]]:
        """Calls async functions concurrently, while the body of the `with` goes on.

        Args:
          calls: of async functions.
          fail_fast: whether the first that fails cancels the others, which then have no outcome.

        Yields:
          A function that waits for the outcomes.
        """
        if not calls:
            yield lambda: None
            return
        self._loop = self._loop or _Loop(f"async {self._name}")
        deadline = time.monotonic() + max(call.timeout for call in calls) + 4 * GRACE
        future, ended = self._loop.start(calls, fail_fast)
        try:
            yield functools.partial(self._wait, future, calls, deadline)
        except BaseException:
            if self._loop is not None:
                future.cancel()
                ended.wait(2 * GRACE)
            raise

    def _wait(self, future: concurrent.futures.Future, calls: Sequence[Call], deadline: float) -> None:
        try:
            while not concurrent.futures.wait([future], _next_wait(deadline)).done and time.monotonic() < deadline:
                pass
            future.result(0)
        except TimeoutError:
            self._loop.close()
            self._loop = None
            late = [call for call in calls if call.outcome is None]
            names = ", ".join(call.title.split()[-1] for call in late)
            for call in late:
                why = f"{call.too_late} and the event loop is blocked (unfinished: {names}; one of them blocks it)"
                call.outcome = Outcome(None, Hang(why), call.timeout)

    def close(self) -> None:
        """Ends the threads; those of functions that hang end with this process. A later call starts new ones."""
        for thread in (self._worker, self._loop):
            if thread is not None:
                thread.close()
        self._worker = self._loop = None


def _next_wait(deadline: float) -> float:
    """Seconds until `deadline`, at most 0.2: a Ctrl-C that comes just before a wait is seen only after it."""
    return min(max(deadline - time.monotonic(), 0.0), 0.2)


class _Worker:
    """A daemon thread that runs one job after another; it is abandoned when a job hangs."""

    def __init__(self, name: str):
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.put = self._jobs.put
        threading.Thread(target=self._work, daemon=True, name=name).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """Ends the thread after its current job."""
        self._jobs.put(None)


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name=name).start()

    def start(self, calls: Sequence[Call], fail_fast: bool) -> tuple[concurrent.futures.Future, threading.Event]:
        """Starts all calls.

        Returns:
          (future, done when all calls are, or with `fail_fast` when one failed; event, set when none is running)
        """
        ended = threading.Event()

        async def run_all() -> None:
            tasks = {asyncio.ensure_future(call.on_loop()): call for call in calls}
            try:
                pending = set(tasks)
                while pending:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    if fail_fast and any(tasks[task].failed for task in done):
                        return
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=2 * GRACE)
                ended.set()

        return asyncio.run_coroutine_threadsafe(run_all(), self._loop), ended

    def close(self) -> None:
        """Cancels all tasks and ends the thread."""

        def end() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.call_later(0.1, self._loop.stop)

        self._loop.call_soon_threadsafe(end)
