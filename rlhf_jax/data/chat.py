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
      columns: their names.
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
        fault = string_fault(message, "role") or string_fault(message, "content")
        if fault is None and not message["role"].strip():
            fault = "'role' is empty"
        if fault is not None:
            return f"{column!r}, message {number}: {fault}"
    return f"{column!r} ends with an empty message" if not value[-1]["content"].strip() else None


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
          tokenizer: provides the template.
          kwargs: further arguments of apply_chat_template: variables of the template, 'chat_template', 'tools' and
            'documents'.

        Raises:
          UserError: the tokenizer has no template and `kwargs` has none, or an argument is reserved.
        """
        self.tokenizer, self.kwargs = tokenizer, dict(kwargs or {})
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
        own = "date_string" in self.kwargs and "date_string" in self._text
        self._text = self.kwargs["chat_template"] = pinned
        return None if own else date

    def identity(self) -> Any:
        """Everything that its texts depend on beside the conversation and the tokenizer, of JSON types; None if that
        cannot be told: the template prints the time, or an argument is no plain value."""
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
          messages: the conversation.
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
          messages: the conversation.
          column: where the messages come from, for errors.

        Returns:
          (S ids, mask [S] bool)

        Raises:
          ChatTemplateError: as `render`; or no token is the assistant's.
          UserError: as `render`.
        """
        found = self._apply(
            messages,
            column,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        mask = np.asarray(found["assistant_masks"], bool)
        if not mask.any():
            raise ChatTemplateError(
                f"{_in(column)}the chat template of {self.tokenizer.name!r} marks no token as the assistant's"
            )
        return found["input_ids"], mask

    def _apply(self, messages: Sequence[Mapping[str, Any]], column: str, **options: Any) -> Any:
        """apply_chat_template with the template's arguments."""
        # Rows of a table have the keys of all messages, with None for absent ones; a template would render the None.
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            rendered = self.tokenizer.hf.apply_chat_template(messages, **options, **self.kwargs)
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
