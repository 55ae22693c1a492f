"""Conversations in the forms in which data sets have them, as lists of messages {"role", "content"}.

ShareGPT's {"from", "value"}, a single message in place of a list, and JSON text of messages are converted when a row is
read. Every stage does so before it looks at its columns.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_jax.data.files import MalformedRow, Rows
from rlhf_jax.utils.text import parse_json

SHAREGPT = "conversations"
"""The column of ShareGPT's conversations."""
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
    **{name: name for name in ("system", "developer")},
}
"""ShareGPT's 'from' -> role. 'function_call' is an assistant's tool call."""
_PYTHON_TEXT = re.compile(r"""\s*\[\s*\{\s*'(role|from|content|value)'\s*:""")
_FIRST = 100
"""Rows that are searched for the first value of a column."""


class FormError(Exception):
    """A message cannot be converted; the text is the reason."""


# --- one value


def _is_sharegpt(message: Any) -> bool:
    return isinstance(message, Mapping) and "from" in message and "value" in message and message.get("role") is None


def _is_message(message: Any) -> bool:
    if not isinstance(message, Mapping):
        return False
    return _is_sharegpt(message) or ("role" in message and bool({"content", "tool_calls"} & message.keys()))


def _parse_messages(text: str) -> list[Any] | None:
    """The messages of their JSON text; None for any other text."""
    if not (text.lstrip().startswith("[") and text.rstrip().endswith("]")):
        return None
    try:
        messages = parse_json(text)
    except json.JSONDecodeError:
        return None
    return messages if messages and all(map(_is_message, messages)) else None


def convertible_forms(value: Any) -> set[str]:
    """The forms of a conversation that `as_messages` converts: 'JSON text', 'ShareGPT', 'one message'; empty for
    anything else."""
    forms = set()
    if isinstance(value, str):
        value = _parse_messages(value)
        forms |= set() if value is None else {"JSON text"}
    if _is_message(value):
        value, forms = [value], {*forms, "one message"}
    if isinstance(value, list) and any(map(_is_sharegpt, value)):
        forms.add("ShareGPT")
    return forms


def as_messages(value: Any) -> Any:
    """A conversation as a list of messages with role and content; a value of no known form is returned unchanged.

    Raises:
      FormError: the speaker of a message is unknown, or a function call is no JSON.
    """
    if isinstance(value, str):
        messages = _parse_messages(value)
        value = value if messages is None else messages
    if _is_message(value):
        value = [value]
    if not isinstance(value, list):
        return value
    return [_converted(message, number) for number, message in enumerate(value, 1)]


def _converted(message: Any, number: int) -> Any:
    if not _is_sharegpt(message):
        return message
    speaker, value = message["from"], message["value"]
    more = {key: item for key, item in message.items() if key not in ("from", "value", "role", "content")}
    if speaker == "function_call":
        return {"role": "assistant", "tool_calls": _tool_calls(value, number), **more}
    if speaker not in _ROLES:
        speakers = ", ".join((*_ROLES, "function_call"))
        raise FormError(f"message {number}: 'from' is {speaker!r:.60}, which is none of {speakers}")
    return {"role": _ROLES[speaker], "content": value, **more}


def _tool_calls(value: Any, number: int) -> list[dict[str, Any]]:
    """The tool calls of a function call's text: {"name", "arguments"}, or a list of them."""
    try:
        calls = parse_json(value) if isinstance(value, str) else value
        calls = calls if isinstance(calls, list) else [calls]
        arguments = [call.get("arguments", {}) for call in calls]
        arguments = [parse_json(argument) if isinstance(argument, str) else argument for argument in arguments]
        functions = [
            {"name": call["name"], "arguments": argument} for call, argument in zip(calls, arguments, strict=True)
        ]
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError):
        reason = "is not the JSON of an object with 'name' and 'arguments'"
        raise FormError(f"message {number}: the value of the function_call {reason}: {value!r:.60}") from None
    return [{"type": "function", "function": function} for function in functions]


# --- rows


@dataclasses.dataclass(frozen=True)
class _Conversion:
    """Converts the columns of a row.

    Attributes:
      columns: column -> the column that it is converted from.
      answer: the column that the last answer of SHAREGPT is moved to; None: it stays.
    """

    columns: dict[str, str]
    answer: str | None

    def __call__(self, row: Any) -> Any:
        if not isinstance(row, Mapping):
            return row
        converted = {}
        for column, source in self.columns.items():
            try:
                messages = as_messages(row.get(source))
            except FormError as error:
                return MalformedRow(f"{source!r}, {error}")
            if self.answer is not None and source == SHAREGPT and isinstance(messages, list):
                end = len(messages)
                while end and isinstance(messages[end - 1], Mapping) and messages[end - 1].get("role") == "assistant":
                    end -= 1
                if messages[end:] and row.get(self.answer) is None:
                    converted[self.answer] = messages[end:]
                messages = messages[:end]
            if source in row:
                converted[column] = messages
        return {**row, **converted}


def house_form(
    rows: Rows,
    columns: Sequence[str],
    *,
    whole: str | None = None,
    answer: str | None = None,
) -> Rows:
    """Rows with conversations as lists of messages. A note of the rows names what was converted.

    The first value of a column decides whether its texts are JSON text of messages. If the first existing column of
    `columns` holds plain texts, JSON text in the others is not converted.

    Args:
      columns: that may hold conversations, the prompt's first.
      whole: the column that SHAREGPT becomes if no column of this name exists; None: it is not read.
      answer: the column that the assistant's last messages in SHAREGPT are moved to, since a prompt ends before them.
    """
    names = rows.column_names
    sources = {column: column for column in columns if column in names}
    if whole is not None and whole not in names and SHAREGPT in names:
        sources = {whole: SHAREGPT, **sources}
    values = {source: first_value(rows, source) for source in sources.values()}
    first = next(iter(values.values()), None)
    forms = {source: convertible_forms(value) for source, value in values.items()}
    if isinstance(first, str) and not next(iter(forms.values())):  # prompts of text
        forms = {source: kinds - {"JSON text"} for source, kinds in forms.items() if "JSON text" not in kinds}
    moves = {column for column, source in sources.items() if column != source and _is_conversation(values[source])}
    convert = {column: source for column, source in sources.items() if forms.get(source) or column in moves}
    cuts = answer is not None and SHAREGPT in convert.values()
    notes = _notes(convert, forms, cuts)
    notes += [
        f"{source!r} looks like Python's text of messages and stays text: write it as JSON (json.dumps)"
        for source, value in values.items()
        if isinstance(value, str) and _PYTHON_TEXT.match(value)
    ]
    if convert:
        conversion = _Conversion(convert, answer if cuts else None)
        added = [*convert, answer] if cuts else [*convert]
        rows = rows.mapped(conversion, added, ["conversations", convert, conversion.answer])
    return rows.noted(*notes)


def _is_conversation(value: Any) -> bool:
    return bool(convertible_forms(value)) or (isinstance(value, list) and bool(value) and _is_message(value[0]))


def first_value(rows: Rows, column: str) -> Any:
    """The first value of a column in the first rows that is not null."""
    first = (row for row in rows.slice(0, _FIRST) if isinstance(row, Mapping))
    return next((row[column] for row in first if row.get(column) is not None), None)


def _notes(convert: Mapping[str, str], forms: Mapping[str, set[str]], cuts: bool) -> list[str]:
    """What is said about converted columns, by form."""

    def named(form: str) -> str:
        return ", ".join(repr(source) for source in dict.fromkeys(convert.values()) if form in forms.get(source, ()))

    notes = []
    if text := named("JSON text"):
        notes.append(f"{text}: JSON text is read as conversations")
    if text := named("ShareGPT"):
        notes.append(f"{text}: ShareGPT's human and gpt are the roles user and assistant")
    if text := named("one message"):
        notes.append(f"{text}: one message is read as a list of one")
    for column, source in convert.items():
        if column != source:
            end = ", up to the assistant's last answer" if cuts else ""
            notes.append(f"{source!r} is read as {column!r}{end}")
    return notes
