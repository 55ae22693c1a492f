"""Conversations: what makes one bad, and its text by the tokenizer's own chat template.

A conversation is a list of messages {"role", "content"}, TRL's conversational format. The template is the tokenizer's
Jinja, which transformers runs in a sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_jax.data.files import Malformed, Rows, kind_of
from rlhf_jax.data.row_texts import string_fault
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError

Message = dict[str, Any]
Conversation = list[Message]

_SET_HERE = frozenset(
    "conversation add_generation_prompt continue_final_message tokenize sanitize_control_tokens padding truncation "
    "max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Arguments of apply_chat_template that are not the template's."""


class ChatTemplateError(UserError):
    """The template refused a conversation."""


def holds_conversations(rows: Rows, column: str) -> bool:
    """Whether a prompt column holds conversations: its first value that is text or a list of objects says so."""
    lists = False
    for row in rows:
        value = None if isinstance(row, Malformed) else row.get(column)
        if isinstance(value, str):
            return False
        if isinstance(value, list):
            lists = True
            if value and isinstance(value[0], Mapping):
                return True
    return lists


def conversation_fault(row: Any, column: str) -> str | None:
    """What is wrong with a row whose `column` should hold a conversation to answer; None for a good one."""
    if isinstance(row, Malformed):
        return str(row)
    value = row.get(column)
    if value is None:
        return f"{column!r} is missing" if column not in row else f"{column!r} is null"
    if isinstance(value, str):
        return f"{column!r} is text, in a data set whose prompts are conversations"
    if not isinstance(value, list):
        return f"{column!r} is {kind_of(value)}, not a list of messages"
    if not value:
        return f"{column!r} is an empty list, not a conversation"
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping):
            return f"{column!r}, message {number}: is {kind_of(message)}, not an object with 'role' and 'content'"
        fault = string_fault(message, "role") or string_fault(message, "content")
        if fault is None and not message["role"].strip():
            fault = "'role' is empty"
        if fault is not None:
            return f"{column!r}, message {number}: {fault}"
    if value[-1]["role"] == "assistant":
        return (
            f"{column!r} ends with the assistant's message, which leaves nothing to answer "
            "(a response begins a message of its own; it does not continue one)"
        )
    if not value[-1]["content"].strip():
        return f"{column!r} ends with an empty message"
    return None


class ChatTemplate:
    """A tokenizer's chat template with its arguments.

    A template that writes the date makes other tokens every day; most take it as an argument ('date_string').
    """

    def __init__(self, tokenizer: Tokenizer, kwargs: Mapping[str, Any] | None = None):
        """Args:
          tokenizer: has the template.
          kwargs: further arguments of apply_chat_template: the template's own variables, and 'chat_template', 'tools'
            and 'documents'.

        Raises:
          UserError: the tokenizer has no template and none is given, or an argument is not the user's to set.
        """
        self.tokenizer, self.kwargs = tokenizer, dict(kwargs or {})
        taken = sorted(self.kwargs.keys() & _SET_HERE)
        if taken:
            raise UserError(
                f"chat_template_kwargs: {', '.join(taken)} cannot be set; it holds variables of the chat template, "
                "and 'chat_template', 'tools' or 'documents'"
            )
        try:
            tokenizer.hf.get_chat_template(self.kwargs.get("chat_template"), self.kwargs.get("tools"))
        except ValueError as error:
            several = isinstance(tokenizer.hf.chat_template, dict)
            why = f"no default one among {', '.join(tokenizer.hf.chat_template)}" if several else "none"
            raise UserError(
                f"conversations need a chat template, and tokenizer {tokenizer.name!r} has {why}. Put it into "
                "chat_template.jinja beside its tokenizer.json, give the template"
                f"{' or its name' if several else ''} by chat_template_kwargs as 'chat_template', or give texts as "
                "prompts."
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool) -> str:
        """The text of a conversation; with `generation_prompt` the assistant's next message is begun.

        Raises:
          ChatTemplateError: the template refuses it, or writes nothing.
          UserError: transformers cannot run templates here.
        """
        # A table's rows have every key that any message has, and templates take None for a value.
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            text = self.tokenizer.hf.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation_prompt, **self.kwargs
            )
            text.encode("utf-8")
        except ImportError as error:  # Jinja is missing or too old
            raise UserError(f"conversations need Jinja: {error}") from error
        except Exception as error:  # a template may fail in any way that Python can
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ChatTemplateError(f"the chat template of {self.tokenizer.name!r} refuses it: {reason}") from error
        if not text.strip():
            raise ChatTemplateError(f"the chat template of {self.tokenizer.name!r} makes no text of it")
        return text
