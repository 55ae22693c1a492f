"""Conversations: validation, and rendering by the tokenizer's chat template.

A conversation is a list of messages {"role", "content"}, TRL's conversational format. Chat templates are Jinja, which
transformers runs in a sandbox.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rlhf_jax.data.files import MalformedRow, Rows, type_with_article
from rlhf_jax.data.row_texts import string_fault
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError
from rlhf_jax.utils.text import parse_json

Message = dict[str, Any]
Conversation = list[Message]
Rendered = TypeVar("Rendered")

_RESERVED_ARGUMENTS = frozenset(
    "conversation add_generation_prompt continue_final_message tokenize sanitize_control_tokens padding truncation "
    "max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Arguments of apply_chat_template that users may not set."""
_TODAY = re.compile(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""")
"""A template's call for today's date, with a literal format."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""The block that marks an assistant's tokens."""
_FIRST = 100
"""Rows that are searched for what is not rendered."""


class ChatTemplateError(UserError):
    """The chat template raised an error for a conversation, or rendered nothing."""


def holds_conversations(rows: Rows, column: str) -> bool:
    """Whether a column holds conversations, decided by its first text or list of objects."""
    any_list = False
    for row in rows:
        value = None if isinstance(row, MalformedRow) else row.get(column)
        if isinstance(value, str):
            return False
        if isinstance(value, list):
            any_list = True
            if value and isinstance(value[0], Mapping):
                return True
    return any_list


def messages_fault(row: Any, columns: Sequence[str], kind: str) -> str | None:
    """Why one of the columns of a row is not a conversation; None if all are.

    Args:
      row: of a data set whose first good row is a conversation.
      kind: what the rows are, for messages: 'prompts', 'demonstrations' or 'pairs'.
    """
    if isinstance(row, MalformedRow):
        return str(row)
    return next(filter(None, (_column_fault(row, column, kind) for column in columns)), None)


def _column_fault(row: Mapping[str, Any], column: str, kind: str) -> str | None:
    value = row.get(column)
    if value is None:
        return f"{column!r} is missing" if column not in row else f"{column!r} is null"
    if isinstance(value, str):
        return f"{column!r} is text, but the {kind} of this data set are conversations"
    if not isinstance(value, list):
        return f"{column!r} is {type_with_article(value)}, not a list of messages"
    if not value:
        return f"{column!r} is an empty list, not a conversation"
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping):
            what = type_with_article(message)
            return f"{column!r}, message {number}: is {what}, not an object with 'role' and 'content'"
        fault = string_fault(message, "role") or _content_fault(message)
        if fault is None and not message["role"].strip():
            fault = "'role' is empty"
        if fault is not None:
            return f"{column!r}, message {number}: {fault}"
    is_empty = not text_of(value[-1]).strip() and not value[-1].get("tool_calls")
    return f"{column!r} ends with an empty message" if is_empty else None


def _content_fault(message: Mapping[str, Any]) -> str | None:
    """Why the content of a message is not text; None if it is text, blocks of text, or absent beside tool calls."""
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        return f"'tool_calls' is {type_with_article(calls)}, not a list of objects"
    if content is None and calls and message["role"] == "assistant":
        return None
    if not isinstance(content, list):
        return string_fault(message, "content")
    for number, block in enumerate(content, 1):
        where = f"'content', block {number}: "
        if not isinstance(block, Mapping):
            return f"{where}is {type_with_article(block)}, not an object with 'type' and 'text'"
        if block.get("type") != "text":
            return f"{where}'type' is {block.get('type')!r:.60}; blocks of type 'text' are read here"
        if (fault := string_fault(block, "text")) is not None:
            return where + fault
    return None


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message: its blocks joined, or '' for one that only calls tools."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(block["text"] for block in content)
    return content or ""


def text_messages(messages: Sequence[Mapping[str, Any]]) -> Conversation:
    """Messages whose blocks of text are joined, since templates of models without images read text."""
    return [
        {**message, "content": text_of(message)} if isinstance(message.get("content"), list) else dict(message)
        for message in messages
    ]


def conversation_fault(row: Any, column: str) -> str | None:
    """Why `column` of a row is not a conversation to respond to; None if it is one."""
    fault = messages_fault(row, (column,), "prompts")
    if fault is None and row[column][-1]["role"] == "assistant":
        return (
            f"{column!r} ends with a message of the assistant; the last message must be one to respond to "
            "(a response is a new message, it does not continue one)"
        )
    return fault


def rendered_or_fault(
    row: Any, fault: Callable[[Any], str | None], render: Callable[[Any], Rendered]
) -> tuple[Rendered | None, str | None]:
    """What `render` makes of a row without a fault, and why the row is bad: its fault, or a ChatTemplateError of
    `render`."""
    reason = fault(row)
    if reason is not None:
        return None, reason
    try:
        return render(row), None
    except ChatTemplateError as error:
        return None, str(error)


# --- arguments of a row

TOOLS, KWARGS = "tools", "chat_template_kwargs"
"""Columns that the chat template gets, as in TRL: a list of tools, and further arguments."""


def row_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the chat template in a row: its columns TOOLS and KWARGS, or their JSON text.

    Raises:
      ChatTemplateError: a column holds something else.
    """
    tools = _argument(row, TOOLS, list, "a list of tools")
    tools = [_argument({TOOLS: tool}, TOOLS, Mapping, "a list of tools") for tool in tools or ()]
    return {**({TOOLS: tools} if tools else {}), **(_argument(row, KWARGS, Mapping, "an object") or {})}


def _argument(row: Mapping[str, Any], column: str, kind: type, what: str) -> Any:
    """A column's value, parsed if it is JSON text; None if it is null or empty text. Keys that a table fills with null
    are left out; JSON text has none of those."""
    value = row.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except json.JSONDecodeError as error:
            raise ChatTemplateError(f"{column!r} is text, but no JSON of {what}: {error.msg}") from None
    else:
        value = _without_nulls(value)
    if not isinstance(value, kind):
        raise ChatTemplateError(f"{column!r} is {type_with_article(value)}, not {what}")
    return value


def _without_nulls(value: Any) -> Any:
    """Objects without keys that hold null, also in lists and objects: rows of a table have the keys of all rows."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def noting_unread(rows: Rows, columns: Sequence[str], template: ChatTemplate | None) -> Rows:
    """Rows with remarks on what a chat template would render and does not, by the first rows.

    Args:
      columns: of its conversations.
      template: of the conversations; None: the rows are texts.
    """
    notes: dict[str, None] = {}
    for row in filter(lambda row: isinstance(row, Mapping), rows.slice(0, _FIRST)):
        present = [column for column in (TOOLS, KWARGS) if row.get(column)]
        if template is None:
            notes.update(dict.fromkeys(f"column {column!r} is not read: prompts are texts" for column in present))
            continue
        try:
            names, row_template = row_arguments(row).keys() - {"chat_template", "documents"}, template.for_row(row)
        except ChatTemplateError:  # a bad row
            continue
        unread = {f"{name!r} of the data" for name in names if not row_template.reads(name)}
        values = [row[column] for column in columns if isinstance(row.get(column), list)]
        messages = [message for value in values for message in value if isinstance(message, Mapping)]
        calls = any(message.get("tool_calls") for message in messages)
        unread |= {"'tool_calls' of messages"} if calls and not row_template.reads("tool_calls") else set()
        notes.update(
            dict.fromkeys(f"the chat template does not read {what}; give one that does" for what in sorted(unread))
        )
        if any(message.get("weight") is not None for message in messages):
            notes["'weight' of messages is not read"] = None
    return rows.noted(*notes)


class ChatTemplate:
    """A tokenizer's chat template with its arguments.

    A template that prints today's date renders different tokens every day. If the tokenizer has a `template_date`, the
    template prints that day instead, in its own format.

    Attributes:
      date: the `template_date` that the template prints; None: it prints no date, or today's, or the 'date_string' of
        `kwargs`.
    """

    def __init__(self, tokenizer: Tokenizer, kwargs: Mapping[str, Any] | None = None):
        """Args:
          kwargs: further arguments of apply_chat_template: variables of the template, 'chat_template', 'tools' and
            'documents'.

        Raises:
          UserError: the tokenizer has no template and `kwargs` has none, or an argument is reserved.
        """
        self.tokenizer, self.kwargs, self._unpinned_kwargs = tokenizer, dict(kwargs or {}), dict(kwargs or {})
        reserved = sorted(self.kwargs.keys() & _RESERVED_ARGUMENTS)
        if reserved:
            raise UserError(
                f"chat_template_kwargs: {', '.join(reserved)} cannot be set; it takes variables of the chat template, "
                "'chat_template', 'tools' and 'documents'"
            )
        try:
            self._text = tokenizer.hf.get_chat_template(self.kwargs.get("chat_template"), self.kwargs.get("tools"))
        except ValueError as error:
            several = isinstance(tokenizer.hf.chat_template, dict)
            reason = f"no default one among {', '.join(tokenizer.hf.chat_template)}" if several else "none"
            raise UserError(
                f"conversations need a chat template, but tokenizer {tokenizer.name!r} has {reason}. Put one into "
                "chat_template.jinja beside its tokenizer.json, set 'chat_template' in chat_template_kwargs to the "
                f"template{' or its name' if several else ''}, or use texts as prompts."
            ) from error
        if not isinstance(self._text, str):
            raise UserError(f"chat_template_kwargs: 'chat_template' is {self._text!r:.60}, not text")
        self.date = self._pin_date()

    def for_row(self, row: Mapping[str, Any]) -> ChatTemplate:
        """This template with the arguments of a row, which come before those of the config (see `row_arguments`).

        Raises:
          ChatTemplateError: an argument cannot be set.
        """
        arguments = row_arguments(row)
        if not arguments:
            return self
        try:
            return ChatTemplate(self.tokenizer, {**self._unpinned_kwargs, **arguments})
        except UserError as error:
            raise ChatTemplateError(str(error)) from error

    @property
    def text(self) -> str:
        """The template."""
        return self._text

    def reads(self, name: str) -> bool:
        """Whether the template's text has a variable or key of this name."""
        return re.search(rf"\b{re.escape(name)}\b", self._text) is not None

    def _pin_date(self) -> str | None:
        """Replaces the template's calls for today's date by that of the tokenizer. Returns the date that is printed."""
        date = self.tokenizer.template_date
        if date is None:
            return None
        day = datetime.date.fromisoformat(date)
        # In the text, since arguments of a template cannot be functions and many templates take no 'date_string'.
        pinned = _TODAY.sub(lambda call: f"{call[1]}{day.strftime(call[2])}{call[1]}", self._text)
        if pinned == self._text:
            return None
        date_from_kwargs = "date_string" in self.kwargs and "date_string" in self._text
        self._text = self.kwargs["chat_template"] = pinned
        return None if date_from_kwargs else date

    def identity(self) -> Any:
        """Everything that rendered texts depend on besides the conversation and the tokenizer, of JSON types; None if
        it is not known: the template prints the time, or an argument is not a plain value."""
        if "strftime_now" in self._text:
            return None
        try:
            return [self._text, json.dumps(self.kwargs, sort_keys=True)]
        except (TypeError, ValueError):
            return None

    def check_marks_assistant(self) -> None:
        """Raises a UserError if the template has no {% generation %} block, which marks the assistant's tokens."""
        if not _GENERATION.search(self._text):
            raise UserError(
                f"assistant_only_loss: the chat template of tokenizer {self.tokenizer.name!r} does not mark what the "
                "assistant says. Put {% generation %} and {% endgeneration %} around it, in chat_template.jinja beside "
                "tokenizer.json or as 'chat_template' in chat_template_kwargs; or use columns 'prompt' and "
                "'completion' with completion_only_loss"
            )

    def render(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool, column: str = "") -> str:
        """The text of a conversation, ending with the start of the assistant's message if `generation_prompt`.

        Templates write a bos themselves where the model has one: encode the text without special tokens.

        Args:
          generation_prompt: whether a response follows.
          column: where the messages come from, for errors.

        Raises:
          ChatTemplateError: the template raised an error, or rendered nothing.
          UserError: transformers cannot run templates because Jinja is missing or too old.
        """
        text = self._apply(messages, column, tokenize=False, add_generation_prompt=generation_prompt)
        if not text.strip():
            raise ChatTemplateError(f"{_in(column)}the chat template of {self.tokenizer.name!r} rendered an empty text")
        return text

    def encode_with_assistant_mask(
        self, messages: Sequence[Mapping[str, Any]], column: str = ""
    ) -> tuple[list[int], np.ndarray]:
        """Ids of a conversation, and which of them are the assistant's, by the template's {% generation %} blocks.

        Args:
          column: where the messages come from, for errors.

        Returns:
          (S ids, mask [S] bool)

        Raises:
          ChatTemplateError: as `render`; or no token is the assistant's.
          UserError: as `render`.
        """
        encoding = self._apply(
            messages,
            column,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        mask = np.asarray(encoding["assistant_masks"], bool)
        if not mask.any():
            raise ChatTemplateError(
                f"{_in(column)}the chat template of {self.tokenizer.name!r} marks no token as the assistant's"
            )
        return encoding["input_ids"], mask

    def _apply(self, messages: Sequence[Mapping[str, Any]], column: str, **options: Any) -> Any:
        """apply_chat_template with the template's arguments."""
        try:
            rendered = self.tokenizer.hf.apply_chat_template(_without_nulls(list(messages)), **options, **self.kwargs)
            if isinstance(rendered, str):
                rendered.encode("utf-8")
        except ImportError as error:  # Jinja is missing or too old
            raise UserError(f"conversations need Jinja: {error}") from error
        except Exception as error:  # a template can raise any exception
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ChatTemplateError(
                f"{_in(column)}the chat template of {self.tokenizer.name!r} failed: {reason}"
            ) from error
        return rendered


def _in(column: str) -> str:
    """The beginning of an error about a column; '' for no column."""
    return f"{column!r}: " if column else ""
