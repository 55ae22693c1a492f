"""Python reward functions on the host, called as TRL's RLOOTrainer calls them, and never trusted.

A function takes keywords: prompts, completions, completion_ids, every other column of the data set (each a list with an
entry a row), trainer_state, log_extra and log_metric; without **kwargs only those that it names. It returns one finite
number a row, or None where it does not apply. `async def` functions run together on an event loop.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import difflib
import inspect
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rlhf_jax.errors import UserError
from rlhf_jax.rewards.interface import (  # noqa: F401 - names and marks of functions are offered here too
    KEYWORDS,
    FunctionResults,
    RewardFailure,
    RewardFunction,
    Signature,
    TrainerState,
    as_number,
    describe_error,
    describe_row,
    function_name,
    is_async,
    is_jax_reward,
    jax_reward,
    quoted,
    resolve,
    unique_names,
    unscored_warning,
    unwrap_partial,
)

_GRACE = 1.0  # seconds that a cancelled coroutine has to clean up


# --- one function in one call


class _Hang(Exception):
    """No answer in time."""


@dataclasses.dataclass(frozen=True)
class _Outcome:
    result: Any
    error: BaseException | None
    seconds: float


@dataclasses.dataclass(eq=False)
class _Run:
    """One function's work in one call. One that hangs keeps its _Run: what it still logs reaches nobody."""

    name: str
    function: RewardFunction
    timeout: float
    rows: int
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra: dict[str, list] = dataclasses.field(default_factory=dict)
    metrics: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    outcome: _Outcome | None = None
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def too_late(self) -> str:
        return f"gave no answer within {self.timeout:g} s"

    @property
    def failed(self) -> bool:
        """It ended, with an exception."""
        return self.outcome is not None and self.outcome.error is not None

    def log_extra(self, column: str, values: Sequence) -> None:
        """Adds a column to the table of completions: B values."""
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, list | tuple) or len(values) != self.rows:
            got = f"{len(values)} values" if isinstance(values, list | tuple) else quoted(values)
            raise RewardFailure(f"reward function {self.name}: log_extra({column!r}) got {got} for {self.rows} rows")
        self.extra[str(column)] = list(values)

    def log_metric(self, name: str, value: float) -> None:
        """Logs a finite number; the values given for a name are averaged."""
        with contextlib.suppress(ValueError):
            if not math.isnan(number := as_number(value)):
                self.metrics.append((str(name), number))
                return
        raise RewardFailure(
            f"reward function {self.name}: log_metric({name!r}) got {quoted(value)}; it takes a finite number"
        )

    def in_thread(self) -> None:
        """Runs a plain function; whatever it raises is kept."""
        start = time.perf_counter()
        result = error = None
        try:
            result = self.function(**self.keywords)
            if inspect.iscoroutine(result):
                result.close()
                raise RewardFailure(f"reward function {self.name} returned a coroutine: declare it with async def")
        except BaseException as raised:
            error = raised
        self.outcome = _Outcome(result, error, time.perf_counter() - start)
        self.ended.set()

    async def on_loop(self) -> None:
        """Runs an async function within its time; whatever it raises is kept."""
        start = time.perf_counter()
        given_up = False

        async def call() -> None:
            result = error = None
            try:
                result = await self.function(**self.keywords)
            except BaseException as raised:  # KeyboardInterrupt too: it would end the loop
                error = raised
            if not given_up:
                self.outcome = _Outcome(result, error, time.perf_counter() - start)

        task = asyncio.ensure_future(call())
        try:
            ended, _ = await asyncio.wait({task}, timeout=self.timeout)
            if not ended:
                self.outcome = _Outcome(None, _Hang(self.too_late), time.perf_counter() - start)
        finally:
            given_up = True
            task.cancel()
            await asyncio.wait({task}, timeout=_GRACE)

    def judge(self, prompts: Sequence, completions: Sequence) -> tuple[np.ndarray, np.ndarray, str]:
        """(rewards [B] float32, failed [B] bool, what went wrong or '')."""
        rewards, failed = np.full(self.rows, np.nan, np.float32), np.ones(self.rows, bool)
        error, who = self.outcome.error, f"reward function {self.name}"
        if isinstance(error, RewardFailure):
            return rewards, failed, str(error)
        if isinstance(error, _Hang):
            return rewards, failed, f"{who} {error}. {describe_row(0, prompts, completions)}"
        if error is not None:
            return rewards, failed, f"{who} raised {describe_error(error)}"
        wanted = "Return one finite number a row, or None where it does not apply"
        try:
            entries = _entries(self.outcome.result, self.rows)
        except Exception as wrong:  # the array type of some other library says no in its own way
            return rewards, failed, f"{who} returned {wrong} for {self.rows} rows. {wanted}"
        failed[:] = False
        for row, entry in enumerate(entries):
            try:
                rewards[row] = as_number(entry)
            except ValueError:
                failed[row] = True
        if not failed.any():
            return rewards, failed, ""
        first, count = int(np.argmax(failed)), int(failed.sum())
        more = f" (and {count - 1} more bad values)" if count > 1 else ""
        problem = f"{who} returned {quoted(entries[first])} for row {first}{more}. {wanted}"
        return rewards, failed, f"{problem}. {describe_row(first, prompts, completions)}"


def _entries(result: Any, rows: int) -> list:
    """One entry a row; ValueError says what came instead."""
    if hasattr(result, "__array__"):
        array = np.asarray(result)
        if array.ndim != 1:
            raise ValueError(f"an array of shape {list(array.shape)}")
        result = list(array)
    if not isinstance(result, Sequence) or isinstance(result, str | bytes | bytearray):
        raise ValueError("None" if result is None else f"{quoted(result)} of type {type(result).__name__}")
    if len(result) != rows:
        raise ValueError(f"{len(result)} rewards")
    return list(result)


# --- threads


def _slice_of(deadline: float) -> float:
    """Seconds of one wait of several."""
    return min(max(deadline - time.monotonic(), 0.0), 0.2)


class _Worker:
    """A daemon thread that runs one job after another, and is left to itself when a job hangs."""

    def __init__(self):
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.put = self._jobs.put
        threading.Thread(target=self._work, daemon=True, name="reward functions").start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """Ends the thread after the job in hand."""
        self._jobs.put(None)


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="async reward functions").start()

    def start(self, runs: Sequence[_Run], fail_fast: bool) -> tuple[concurrent.futures.Future, threading.Event]:
        """Starts all; the future is done when all are, or with `fail_fast` one failed; the event when none is left."""
        left = threading.Event()

        async def together() -> None:
            tasks = {asyncio.ensure_future(run.on_loop()): run for run in runs}
            try:
                pending = set(tasks)
                while pending:
                    ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    if fail_fast and any(tasks[task].failed for task in ended):
                        return
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=2 * _GRACE)
                left.set()

        return asyncio.run_coroutine_threadsafe(together(), self._loop), left

    def close(self) -> None:
        """Cancels what runs and ends the thread, when it comes to it."""

        def end() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.call_later(0.1, self._loop.stop)

        self._loop.call_soon_threadsafe(end)


# --- all functions


class HostRewards:
    """Calls reward functions, checks what they return, bounds their time.

    Plain functions run one after another in a worker thread, async ones (also objects with an async __call__)
    meanwhile and together on an event loop in another. Both threads stay the same from call to call.

    Args:
      functions: F callables. One that bounds itself says so in an attribute `own_timeout`, in seconds.
      failure: what a failing function does. 'raise': ends all with a RewardFailure. 'drop': its bad rows are left out;
        all rows, when it raises, hangs or returns another number of rewards.
      timeout: most seconds of one function in one call.
      names: of the functions, where others are numbered with them; default: `unique_names`.

    Raises:
      UserError: a function cannot be called with keywords.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        failure: Literal["raise", "drop"] = "raise",
        timeout: float = 600.0,
        names: Sequence[str] | None = None,
    ):
        self.functions = tuple(functions)
        self.names = unique_names(self.functions) if names is None else tuple(names)
        self._signatures = tuple(map(Signature.of, self.functions, self.names))
        self._failure = failure
        self._timeout = timeout
        self._worker: _Worker | None = None
        self._loop: _Loop | None = None

    def check_columns(self, columns: Iterable[str]) -> None:
        """UserError when a function must get a keyword that is no column."""
        offered = {*KEYWORDS, *columns}
        for name, signature in zip(self.names, self._signatures):
            for missing in sorted(signature.needs - offered):
                near = difflib.get_close_matches(missing, sorted(offered), n=1)
                has = f"Did you mean {near[0]}?" if near else f"There are {', '.join(sorted(offered))}"
                raise UserError(f"reward function {name} asks for {missing!r}, which is no column of the data. {has}")

    def call(
        self,
        prompts: Sequence,
        completions: Sequence,
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence],
        trainer_state: TrainerState,
    ) -> FunctionResults:
        """Rewards of B rows.

        Args:
          prompts, completions: B texts, or lists of messages.
          completion_ids: B lists of token ids.
          columns: the data set's other columns, B values each.
          trainer_state: passed on.

        Raises:
          RewardFailure: a function failed (failure='raise').
          UserError: see `check_columns`.
        """
        self.check_columns(columns)
        called = FunctionResults(
            np.full((len(prompts), len(self.names)), np.nan, np.float32), np.zeros(len(prompts), bool)
        )
        if not len(prompts) or not self.names:
            return called
        offered = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        runs = [self._run(i, offered, trainer_state) for i in range(len(self.names))]
        together = [run for run in runs if is_async(run.function)]
        future = left = None

        def take(run: _Run) -> None:
            if isinstance(run.outcome.error, KeyboardInterrupt):
                raise run.outcome.error
            rewards, failed, problem = run.judge(prompts, completions)
            if problem and self._failure == "raise":
                raise RewardFailure(problem) from run.outcome.error
            called.rewards[:, runs.index(run)] = rewards
            called.failed |= failed
            called.problems += [problem] if problem else []

        try:
            if together:
                self._loop = self._loop or _Loop()
                deadline = time.monotonic() + max(run.timeout for run in together) + 4 * _GRACE
                future, left = self._loop.start(together, fail_fast=self._failure == "raise")
            for run in runs:
                if run not in together:
                    self._in_thread(run)
                    take(run)
            if together:
                self._await(future, together, deadline)
                for run in together:
                    if run.outcome is not None:  # None: cancelled, because of another one that is about to raise
                        take(run)
        except BaseException:
            if future is not None and self._loop is not None:
                future.cancel()
                left.wait(2 * _GRACE)
            raise
        self._merge(called, runs)
        return called

    def _run(self, index: int, offered: Mapping[str, Any], trainer_state: TrainerState) -> _Run:
        name, function = self.names[index], self.functions[index]
        timeout = float(getattr(unwrap_partial(function), "own_timeout", self._timeout))
        run = _Run(name, function, timeout, len(offered["prompts"]))
        # Lists of its own, so that a function that changes them spoils nobody's.
        run.keywords = {key: list(values) for key, values in offered.items() if key not in KEYWORDS[2:]}
        run.keywords["completion_ids"] = [list(ids) for ids in offered["completion_ids"]]
        run.keywords |= {"trainer_state": trainer_state, "log_extra": run.log_extra, "log_metric": run.log_metric}
        if (takes := self._signatures[index].takes) is not None:
            run.keywords = {key: value for key, value in run.keywords.items() if key in takes}
        return run

    def _in_thread(self, run: _Run) -> None:
        self._worker = self._worker or _Worker()
        self._worker.put(run.in_thread)
        try:
            deadline = time.monotonic() + run.timeout
            # In slices: a Ctrl-C that comes just before a wait is seen only after it.
            while not run.ended.wait(_slice_of(deadline)) and time.monotonic() < deadline:
                pass
        finally:  # also when Ctrl-C ends the wait
            if not run.ended.is_set():
                self._worker.close()
                self._worker = None
        if run.outcome is None:
            run.outcome = _Outcome(None, _Hang(run.too_late), run.timeout)

    def _await(self, future: concurrent.futures.Future, runs: Sequence[_Run], deadline: float) -> None:
        try:
            while not concurrent.futures.wait([future], _slice_of(deadline)).done and time.monotonic() < deadline:
                pass
            future.result(0)
        except TimeoutError:
            self._loop.close()
            self._loop = None
            late = [run for run in runs if run.outcome is None]
            names = ", ".join(run.name for run in late)
            for run in late:
                why = f"{run.too_late}, nor let go of the event loop (unfinished: {names}; one of them blocks it)"
                run.outcome = _Outcome(None, _Hang(why), run.timeout)

    def _merge(self, called: FunctionResults, runs: Sequence[_Run]) -> None:
        values = collections.defaultdict(list)
        for run in runs:
            called.seconds[run.name] = run.outcome.seconds
            called.extra.update(run.extra)
            for name, value in run.metrics:
                values[name].append(value)
        called.metrics.update({name: sum(given) / len(given) for name, given in values.items()})

    def close(self) -> None:
        """Ends the threads; those of functions that hang end with the process. A later call starts new ones."""
        for thread in (self._worker, self._loop):
            if thread is not None:
                thread.close()
        self._worker = self._loop = None
