"""Conversations: validation, and rendering by the tokenizer's chat template.

A conversation is a list of messages {"role", "content"}, TRL's conversational format. Chat templates are Jinja, which
transformers runs in a sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_jax.data.files import MalformedRow, Rows, type_with_article
from rlhf_jax.data.row_texts import string_fault
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError

Message = dict[str, Any]
Conversation = list[Message]

_RESERVED_ARGUMENTS = frozenset(
    "conversation add_generation_prompt continue_final_message tokenize sanitize_control_tokens padding truncation "
    "max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Arguments of apply_chat_template that users may not set."""


class ChatTemplateError(UserError):
    """The chat template raised an error for a conversation, or rendered nothing."""


def holds_conversations(rows: Rows, column: str) -> bool:
    """Whether a prompt column holds conversations, decided by its first text or list of objects."""
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


def conversation_fault(row: Any, column: str) -> str | None:
    """Why `column` of a row is not a conversation to respond to; None if it is one."""
    if isinstance(row, MalformedRow):
        return str(row)
    value = row.get(column)
    if value is None:
        return f"{column!r} is missing" if column not in row else f"{column!r} is null"
    if isinstance(value, str):
        return f"{column!r} is text, but the prompts of this data set are conversations"
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
    if value[-1]["role"] == "assistant":
        return (
            f"{column!r} ends with a message of the assistant; the last message must be one to respond to "
            "(a response is a new message, it does not continue one)"
        )
    if not value[-1]["content"].strip():
        return f"{column!r} ends with an empty message"
    return None


class ChatTemplate:
    """A tokenizer's chat template with its arguments.

    A template that inserts the current date renders different tokens every day; most accept a fixed 'date_string'.
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
            tokenizer.hf.get_chat_template(self.kwargs.get("chat_template"), self.kwargs.get("tools"))
        except ValueError as error:
            several = isinstance(tokenizer.hf.chat_template, dict)
            reason = f"no default one among {', '.join(tokenizer.hf.chat_template)}" if several else "none"
            raise UserError(
                f"conversations need a chat template, but tokenizer {tokenizer.name!r} has {reason}. Put one into "
                "chat_template.jinja beside its tokenizer.json, set 'chat_template' in chat_template_kwargs to the "
                f"template{' or its name' if several else ''}, or use texts as prompts."
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool) -> str:
        """The text of a conversation, ending with the start of the assistant's message if `generation_prompt`.

        Raises:
          ChatTemplateError: the template raised an error, or rendered nothing.
          UserError: transformers cannot run templates because Jinja is missing or too old.
        """
        # Rows of a table have the keys of all messages, with None for absent ones; a template would render the None.
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            text = self.tokenizer.hf.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation_prompt, **self.kwargs
            )
            text.encode("utf-8")
        except ImportError as error:  # Jinja is missing or too old
            raise UserError(f"conversations need Jinja: {error}") from error
        except Exception as error:  # a template can raise any exception
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ChatTemplateError(f"the chat template of {self.tokenizer.name!r} failed: {reason}") from error
        if not text.strip():
            raise ChatTemplateError(f"the chat template of {self.tokenizer.name!r} rendered an empty text")
        return text
