"""Calls of tools, as TRL's GRPOTrainer makes them: an exception is a result that the policy reads."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_jax.data.chat import Conversation
from rlhf_jax.errors import UserError
from rlhf_jax.rewards.interface import function_name, is_async, load_function
from rlhf_jax.tools.records import Place, RecordedCall, ToolRecords
from rlhf_jax.utils.bounded_calls import Call, Caller, Hang


@dataclasses.dataclass
class Results:
    """What the calls of some rows returned.

    Attributes:
      calls: of each row, in their order.
    """

    calls: list[list[RecordedCall]]

    @property
    def messages(self) -> list[Conversation]:
        """Of role 'tool', one a call: those of plain functions first, then those of async ones."""
        return [
            [
                {"role": "tool", "name": call["name"], "content": call["content"]}
                for call in sorted(row, key=lambda call: call["last"])
            ]
            for row in self.calls
        ]

    @property
    def failures(self) -> int:
        """Calls that failed."""
        return sum(map(failures, self.calls))


def failures(calls: Sequence[RecordedCall]) -> int:
    """How many of the calls failed."""
    return sum(call["failed"] for call in calls)


class Toolbox:
    """Tools by name. Plain functions run one after another, in the order of rows and calls; then all async ones run at
    the same time.

    Args:
      timeout: seconds of one call.

    Raises:
      UserError: a function has no JSON schema, or two have one name.
    """

    def __init__(self, functions: Sequence[Callable], timeout: float):
        self._timeout, self._caller = timeout, Caller("tools")
        self._functions: dict[str, Callable] = {}
        self.schemas: list[dict[str, Any]] = []
        for function in functions:
            schema = tool_schema(function)
            name = schema["function"]["name"]
            if name in self._functions:
                raise UserError(f"tools: two functions have the name {name!r}; a policy calls tools by their names")
            self._functions[name] = function
            self.schemas.append(schema)

    def call(
        self,
        rows: Sequence[Sequence[dict[str, Any]]],
        methods: Sequence[Mapping[str, Callable]] | None = None,
        *,
        records: ToolRecords | None = None,
        places: Sequence[tuple[str, int, int]] = (),
    ) -> Results:
        """Makes the calls of rows.

        Args:
          rows: the calls of each, as `ToolCalls.parse` returns them under 'tool_calls'.
          methods: further tools of each row: the methods of its environment.
          records: functions whose calls are recorded are not called again; methods of environments are. The others are
            recorded.
          places: `at`, `row` and `turn` of each row in the records.

        Raises:
          UserError: a result is not text, or not the one that is recorded.
        """
        results: list[list[RecordedCall]] = [[{} for _ in calls] for calls in rows]
        together: list[tuple[int, int, Call]] = []

        def ended(row: int, number: int, call: Call) -> None:
            result = results[row][number]
            result["content"], result["failed"] = self._answer(call)
            if records is not None:
                records.add(Place(*places[row], number), result)

        for row, calls in enumerate(rows):
            row_methods = methods[row] if methods is not None else {}
            for number, function in enumerate(call.get("function", call) for call in calls):
                name, arguments = function["name"], function["arguments"]
                recorded = None if records is None else records.find(Place(*places[row], number), function)
                if records is not None and recorded is not None and name not in row_methods:
                    results[row][number] = recorded
                    records.add(Place(*places[row], number), recorded)
                    continue
                call, last = self._prepared({**self._functions, **row_methods}, name, copy.deepcopy(arguments))
                results[row][number] = {"name": name, "arguments": arguments, "last": last}
                if last:
                    together.append((row, number, call))
                else:
                    self._caller.call(call)
                    ended(row, number, call)
        with self._caller.together([call for *_, call in together]) as wait:
            wait()
        for row, number, call in together:
            ended(row, number, call)
        return Results(results)

    def _prepared(self, functions: Mapping[str, Callable], name: str, arguments: Any) -> tuple[Call, bool]:
        """(the call, whether it runs on the event loop)"""
        function = functions.get(name)
        if function is None:
            function = _raising(ValueError(f"Tool {name} not found."))
        elif is_async(function):
            try:
                coroutine = function(**arguments)
            except Exception as error:  # arguments that it does not take: it has not begun
                function = _raising(error, function.__module__)
            else:
                return Call(name, lambda: coroutine, self._timeout), True
        else:
            return Call(name, function, self._timeout, arguments), False
        return Call(name, function, self._timeout), False

    def _answer(self, call: Call) -> tuple[str, bool]:
        """(what the policy reads, whether the call failed)"""
        outcome = call.outcome
        assert outcome is not None
        error = outcome.error
        if isinstance(error, KeyboardInterrupt):
            raise error
        if error is None:
            try:
                text = _text(call.title, outcome.result)
            except UserError:
                raise
            except Exception as raised:  # a result's own __str__
                error = raised
        if isinstance(error, Hang):
            text = str({"error": f"{call.title} {error}"})
        elif error is not None:
            text = str({"error": _without_hash(str(error), call.function)})
        # No tokenizer takes lone surrogates.
        return text.encode("utf-8", "replace").decode(), error is not None

    def close(self) -> None:
        """Ends the threads of tools."""
        self._caller.close()


def open_toolbox(specs: Sequence[str], functions: Sequence[Callable], timeout: float) -> Toolbox:
    """The tools of the option `tools` and functions beside them. Raises as `load_function` and `Toolbox`."""
    return Toolbox([*(load_function(spec, "tool") for spec in specs), *functions], timeout)


def _raising(error: Exception, module: str = __name__) -> Callable:
    """A function of a module that raises an error."""

    def function() -> None:
        raise error

    function.__module__ = module
    return function


def tool_schema(function: Callable) -> dict[str, Any]:
    """The JSON schema of a tool, with transformers' rules."""
    from transformers.utils import get_json_schema  # which takes seconds to import

    advice = "A tool is a function with type hints and a Google docstring that describes each argument (docs/tools.md)"
    if not callable(function) or not hasattr(function, "__name__"):
        raise UserError(f"tool {function!r:.80} is of type {type(function).__name__}. {advice}")
    try:
        return get_json_schema(function)
    except Exception as error:  # transformers' own, and what annotations of the user raise
        reason = " ".join(str(error).split())
        raise UserError(f"tool {function_name(function)}: {reason.rstrip('.')}. {advice}") from error


def _text(name: str, result: Any) -> str:
    """A result as the policy reads it: blocks of text joined, anything else as `str` writes it."""
    is_blocks = isinstance(result, list) and result and all(isinstance(x, dict) and "type" in x for x in result)
    if not is_blocks:
        return str(result)
    for block in result:
        if block["type"] != "text" or not isinstance(block.get("text"), str):
            raise UserError(
                f"tool {name} returned a block of type {block['type']!r}: results are text, or blocks of type 'text'"
            )
    return "".join(block["text"] for block in result)


def _without_hash(text: str, function: Callable | None) -> str:
    """An error's text without the part of a module's name that `load_function` makes of the path of its file."""
    module = getattr(function, "__module__", None) or ""
    stem, _, digest = module.rpartition("_")
    return text.replace(f"{module}.", f"{stem}.") if re.fullmatch("[0-9a-f]{8}", digest) else text
