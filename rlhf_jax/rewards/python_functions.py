"""Python reward functions on the host, called as TRL's RLOOTrainer calls them; results are validated, time is bounded.

A function gets keywords: prompts, completions, completion_ids, every other column of the data set (each a list with one
entry a row), trainer_state, log_extra and log_metric; without **kwargs, only those that it names. It returns one finite
number a row, or None where it does not apply. `async def` functions run concurrently on an event loop.
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

from rlhf_jax.data import reasoning_gym
from rlhf_jax.errors import UserError
from rlhf_jax.rewards import math_verification
from rlhf_jax.rewards.interface import (  # noqa: F401 - re-exported
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
    type_note,
    unique_names,
    unscored_warning,
    unwrap_partial,
)
from rlhf_jax.utils.forks import no_child_leaves

_GRACE = 1.0  # seconds for a cancelled coroutine to clean up


# --- one function in one call


class _Hang(Exception):
    """The function did not return in time."""


@dataclasses.dataclass(frozen=True)
class _Outcome:
    result: Any
    error: BaseException | None
    seconds: float


@dataclasses.dataclass(eq=False)
class _Run:
    """One function in one call. A function that hangs keeps its _Run, so what it logs later is ignored."""

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
        return f"did not return within {self.timeout:g} s"

    @property
    def failed(self) -> bool:
        """Whether it ended with an exception."""
        return self.outcome is not None and self.outcome.error is not None

    def log_extra(self, column: str, values: Sequence) -> None:
        """Adds a column to the table of completions: B values."""
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, list | tuple) or len(values) != self.rows:
            got = f"{len(values)} values" if isinstance(values, list | tuple) else quoted(values)
            raise RewardFailure(f"reward function {self.name}: log_extra({column!r}) got {got} for {self.rows} rows")
        self.extra[str(column)] = list(values)

    def log_metric(self, name: str, value: float) -> None:
        """Logs a finite number; the values of one name are averaged."""
        with contextlib.suppress(ValueError):
            if not math.isnan(number := as_number(value)):
                self.metrics.append((str(name), number))
                return
        raise RewardFailure(
            f"reward function {self.name}: log_metric({name!r}) got {quoted(value)}; it must be a finite number"
        )

    def in_thread(self) -> None:
        """Runs a plain function and stores its result or exception."""
        start = time.perf_counter()
        result = error = None
        try:
            with no_child_leaves():
                result = self.function(**self.keywords)
            if inspect.iscoroutine(result):
                result.close()
                raise RewardFailure(f"reward function {self.name} returned a coroutine: declare it with async def")
        except BaseException as raised:
            error = raised
        self.outcome = _Outcome(result, error, time.perf_counter() - start)
        self.ended.set()

    async def on_loop(self) -> None:
        """Runs an async function within its timeout and stores its result or exception."""
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
                self.outcome = _Outcome(result, error, time.perf_counter() - start)

        task = asyncio.ensure_future(call())
        try:
            ended, _ = await asyncio.wait({task}, timeout=self.timeout)
            if not ended:
                self.outcome = _Outcome(None, _Hang(self.too_late), time.perf_counter() - start)
        finally:
            abandoned = True
            task.cancel()
            await asyncio.wait({task}, timeout=_GRACE)

    def validate(self, prompts: Sequence, completions: Sequence) -> tuple[np.ndarray, np.ndarray, str]:
        """(rewards [B] float32, failed [B] bool, the problem or '')."""
        rewards, failed = np.full(self.rows, np.nan, np.float32), np.ones(self.rows, bool)
        error, who = self.outcome.error, f"reward function {self.name}"
        if isinstance(error, RewardFailure):
            return rewards, failed, str(error)
        if isinstance(error, _Hang):
            return rewards, failed, f"{who} {error}. {describe_row(0, prompts, completions)}"
        if error is not None:
            return rewards, failed, f"{who} raised {describe_error(error)}"
        expected = "Return one finite number a row, or None where it does not apply"
        try:
            entries = _entries(self.outcome.result, self.rows)
        except Exception as error:  # array types of other libraries raise errors of their own
            return rewards, failed, f"{who} returned {error} for {self.rows} rows. {expected}"
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
        problem = f"{who} returned {quoted(entries[first])} for row {first}{more}. {expected}"
        return rewards, failed, f"{problem}. {describe_row(first, prompts, completions)}"


def _entries(result: Any, rows: int) -> list:
    """One entry a row.

    Raises:
      ValueError: describes what was returned instead.
    """
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


def _next_wait(deadline: float) -> float:
    """Seconds until `deadline`, at most 0.2: a Ctrl-C that comes just before a wait is seen only after it."""
    return min(max(deadline - time.monotonic(), 0.0), 0.2)


class _Worker:
    """A daemon thread that runs one job after another; it is abandoned when a job hangs."""

    def __init__(self):
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.put = self._jobs.put
        threading.Thread(target=self._work, daemon=True, name="reward functions").start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """Ends the thread after its current job."""
        self._jobs.put(None)


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="async reward functions").start()

    def start(self, runs: Sequence[_Run], fail_fast: bool) -> tuple[concurrent.futures.Future, threading.Event]:
        """Starts all runs.

        Returns:
          (future, done when all runs are, or with `fail_fast` when one failed; event, set when none is running)
        """
        ended = threading.Event()

        async def run_all() -> None:
            tasks = {asyncio.ensure_future(run.on_loop()): run for run in runs}
            try:
                pending = set(tasks)
                while pending:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    if fail_fast and any(tasks[task].failed for task in done):
                        return
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=2 * _GRACE)
                ended.set()

        return asyncio.run_coroutine_threadsafe(run_all(), self._loop), ended

    def close(self) -> None:
        """Cancels all tasks and ends the thread."""

        def end() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.call_later(0.1, self._loop.stop)

        self._loop.call_soon_threadsafe(end)


# --- all functions


class HostRewards:
    """Calls reward functions, validates their results and bounds their time.

    Plain functions run one after another in a worker thread; async ones (also objects with an async __call__) run at
    the same time, concurrently on an event loop in another thread. Both threads are kept from call to call.

    Args:
      functions: F callables. An attribute `own_timeout`, in seconds, replaces `timeout` for that function.
      failure: 'raise': a failing function raises a RewardFailure. 'drop': its bad rows are dropped, or all rows if it
        raises, hangs or returns a wrong number of rewards.
      timeout: seconds of one function in one call.
      names: of the functions; default: `unique_names`.

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
        """Raises a UserError if a function requires a keyword that is not a column, or if none of its `any_of_columns`
        is one."""
        offered = {*KEYWORDS, *columns}
        for name, function, signature in zip(self.names, self.functions, self._signatures):
            any_of = getattr(unwrap_partial(function), "any_of_columns", ())
            if any_of and offered.isdisjoint(any_of):
                raise UserError(
                    f"reward function {name} reads {', '.join(any_of)}, none of which is a data column. There are "
                    f"{', '.join(sorted(offered))}"
                )
            for missing in sorted(signature.required - offered):
                near = difflib.get_close_matches(missing, sorted(offered), n=1)
                has = f"Did you mean {near[0]}?" if near else f"There are {', '.join(sorted(offered))}"
                raise UserError(f"reward function {name} requires {missing!r}, which is not a data column. {has}")

    def type_notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """A line for each function with a column of another type than it expects; see `interface.type_note`."""
        notes = (type_note(name, function, rows) for name, function in zip(self.names, self.functions))
        return [note for note in notes if note is not None]

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
          trainer_state: passed to the functions.

        Raises:
          RewardFailure: a function failed (failure='raise').
          UserError: see `check_columns`.
        """
        self.check_columns(columns)
        results = FunctionResults(
            np.full((len(prompts), len(self.names)), np.nan, np.float32), np.zeros(len(prompts), bool)
        )
        if not len(prompts) or not self.names:
            return results
        offered = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        runs = [self._run(i, offered, trainer_state) for i in range(len(self.names))]
        concurrent_runs = [run for run in runs if is_async(run.function)]
        future = ended = None

        def take(run: _Run) -> None:
            if isinstance(run.outcome.error, KeyboardInterrupt):
                raise run.outcome.error
            rewards, failed, problem = run.validate(prompts, completions)
            if problem and self._failure == "raise":
                raise RewardFailure(problem) from run.outcome.error
            results.rewards[:, runs.index(run)] = rewards
            results.failed |= failed
            results.problems += [problem] if problem else []

        try:
            if concurrent_runs:
                self._loop = self._loop or _Loop()
                deadline = time.monotonic() + max(run.timeout for run in concurrent_runs) + 4 * _GRACE
                future, ended = self._loop.start(concurrent_runs, fail_fast=self._failure == "raise")
            for run in runs:
                if run not in concurrent_runs:
                    self._in_thread(run)
                    take(run)
            if concurrent_runs:
                self._await(future, concurrent_runs, deadline)
                for run in concurrent_runs:
                    if run.outcome is not None:  # None: cancelled since another one failed
                        take(run)
        except BaseException:
            if future is not None and self._loop is not None:
                future.cancel()
                ended.wait(2 * _GRACE)
            raise
        self._merge(results, runs)
        return results

    def _run(self, index: int, offered: Mapping[str, Any], trainer_state: TrainerState) -> _Run:
        name, function = self.names[index], self.functions[index]
        timeout = float(getattr(unwrap_partial(function), "own_timeout", self._timeout))
        run = _Run(name, function, timeout, len(offered["prompts"]))
        # Copies, so that a function that changes its lists does not affect the others.
        run.keywords = {key: list(values) for key, values in offered.items() if key not in KEYWORDS[2:]}
        run.keywords["completion_ids"] = [list(ids) for ids in offered["completion_ids"]]
        run.keywords |= {"trainer_state": trainer_state, "log_extra": run.log_extra, "log_metric": run.log_metric}
        if (accepts := self._signatures[index].accepts) is not None:
            run.keywords = {key: value for key, value in run.keywords.items() if key in accepts}
        return run

    def _in_thread(self, run: _Run) -> None:
        self._worker = self._worker or _Worker()
        self._worker.put(run.in_thread)
        try:
            deadline = time.monotonic() + run.timeout
            while not run.ended.wait(_next_wait(deadline)) and time.monotonic() < deadline:
                pass
        finally:  # also when Ctrl-C ends the wait
            if not run.ended.is_set():
                self._worker.close()
                self._worker = None
        if run.outcome is None:
            run.outcome = _Outcome(None, _Hang(run.too_late), run.timeout)

    def _await(self, future: concurrent.futures.Future, runs: Sequence[_Run], deadline: float) -> None:
        try:
            while not concurrent.futures.wait([future], _next_wait(deadline)).done and time.monotonic() < deadline:
                pass
            future.result(0)
        except TimeoutError:
            self._loop.close()
            self._loop = None
            late = [run for run in runs if run.outcome is None]
            names = ", ".join(run.name for run in late)
            for run in late:
                why = f"{run.too_late} and the event loop is blocked (unfinished: {names}; one of them blocks it)"
                run.outcome = _Outcome(None, _Hang(why), run.timeout)

    def _merge(self, results: FunctionResults, runs: Sequence[_Run]) -> None:
        values = collections.defaultdict(list)
        for run in runs:
            results.seconds[run.name] = run.outcome.seconds
            results.extra.update(run.extra)
            for name, value in run.metrics:
                values[name].append(value)
        results.metrics.update({name: sum(logged) / len(logged) for name, logged in values.items()})

    def close(self) -> None:
        """Ends the threads, and the processes of math_verify and reasoning-gym; threads of hanging functions end with
        this process. A later call starts new ones."""
        for thread in (self._worker, self._loop):
            if thread is not None:
                thread.close()
        self._worker = self._loop = None
        math_verification.shared.close()
        reasoning_gym.close()
