"""Python reward functions on the host, called as TRL's RLOOTrainer calls them; results are validated, time is bounded.

A function gets keywords: prompts, completions, completion_ids, every other column of the data set (each a list with one
entry a row), trainer_state, log_extra and log_metric; without **kwargs, only those that it names. It returns one finite
number a row, or None where it does not apply. `async def` functions run concurrently on an event loop.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
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
from rlhf_jax.utils.bounded_calls import Call, Caller, Hang


@dataclasses.dataclass(eq=False)
class _Run(Call):
    """One function in one call. What one that hangs logs later is ignored."""

    name: str = ""
    rows: int = 0
    extra: dict[str, list] = dataclasses.field(default_factory=dict)
    metrics: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    misuse = RewardFailure

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

    def validate(self, prompts: Sequence, completions: Sequence) -> tuple[np.ndarray, np.ndarray, str]:
        """(rewards [B] float32, failed [B] bool, the problem or '')."""
        rewards, failed = np.full(self.rows, np.nan, np.float32), np.ones(self.rows, bool)
        error, who = self.outcome.error, f"reward function {self.name}"
        if isinstance(error, RewardFailure):
            return rewards, failed, str(error)
        if isinstance(error, Hang):
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
        self._caller = Caller("reward functions")

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

        def take(run: _Run) -> None:
            if isinstance(run.outcome.error, KeyboardInterrupt):
                raise run.outcome.error
            rewards, failed, problem = run.validate(prompts, completions)
            if problem and self._failure == "raise":
                raise RewardFailure(problem) from run.outcome.error
            results.rewards[:, runs.index(run)] = rewards
            results.failed |= failed
            results.problems += [problem] if problem else []

        with self._caller.together(concurrent_runs, fail_fast=self._failure == "raise") as wait:
            for run in runs:
                if run not in concurrent_runs:
                    self._caller.call(run)
                    take(run)
            wait()
            for run in concurrent_runs:
                if run.outcome is not None:  # None: cancelled since another one failed
                    take(run)
        self._merge(results, runs)
        return results

    def _run(self, index: int, offered: Mapping[str, Any], trainer_state: TrainerState) -> _Run:
        name, function = self.names[index], self.functions[index]
        timeout = float(getattr(unwrap_partial(function), "own_timeout", self._timeout))
        run = _Run(f"reward function {name}", function, timeout, name=name, rows=len(offered["prompts"]))
        # Copies, so that a function that changes its lists does not affect the others.
        run.keywords = {key: list(values) for key, values in offered.items() if key not in KEYWORDS[2:]}
        run.keywords["completion_ids"] = [list(ids) for ids in offered["completion_ids"]]
        run.keywords |= {"trainer_state": trainer_state, "log_extra": run.log_extra, "log_metric": run.log_metric}
        if (accepts := self._signatures[index].accepts) is not None:
            run.keywords = {key: value for key, value in run.keywords.items() if key in accepts}
        return run

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
        self._caller.close()
        math_verification.shared.close()
        reasoning_gym.close()
