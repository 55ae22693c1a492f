"""Tool calls of a policy: how they are read from its responses, and the tokens that its chat template puts after them
for the results.

A conversation is tokenized once: the tokens of earlier turns are kept, and only what follows the end of the policy's
message is rendered, with messages of role 'tool'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_jax.data.chat import ChatTemplate, ChatTemplateError, Conversation, Message
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError

_END = "<end>"
"""Stands for the tokens that end responses in the patterns below."""
_JSON_IN_TAGS = {
    "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
    "tool_calls": {
        "open": "<tool_call>",
        "close_pattern": r"</tool_call>\s*",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
}
"""Qwen2.5, Qwen3, SmolLM3 and Hermes: {"name": ..., "arguments": {...}} between <tool_call> and </tool_call>."""
_BARE_JSON = {
    "tool_calls": {
        "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
        "close_pattern": rf"\}}{_END}\s*",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
}
"""Llama 3: {"name": ..., "parameters": {...}} alone, up to the end of the message."""
_FORMS = (("<tool_call>", _JSON_IN_TAGS), ('"parameters": ', _BARE_JSON))
"""What a chat template that shows this form to the policy contains."""
_QUESTION = {"role": "user", "content": "dummy"}
_PRIVATE = 0x10F000
"""First of the characters that stand for special tokens in the text of a result while it is rendered."""
_ADVICE = (
    "Give another chat template: 'chat_template' in chat_template_kwargs, or chat_template.jinja beside tokenizer.json"
)


class ToolCalls:
    """How a policy calls tools, by its chat template.

    Attributes:
      response_template: how transformers parses a response: the tokenizer's own, or that of a known form.
    """

    def __init__(self, tokenizer: Tokenizer, schemas: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any] | None):
        """Args:
          tokenizer: the policy's.
          schemas: JSON schemas of the tools.
          kwargs: further arguments of the chat template.

        Raises:
          UserError: the chat template does not show tools to the policy, leaves out their results, does not end the
            policy's message with a token that ends responses, or has no known form of calls.
        """
        self.tokenizer, self._template = tokenizer, ChatTemplate(tokenizer, kwargs)
        added = tokenizer.hf.added_tokens_decoder.items()
        self._special = {token.content: number for number, token in added if token.special}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "$^")
        self._who = f"tools: the chat template of tokenizer {tokenizer.name!r}"
        self._ends_before: dict[str, int] = {}  # by the name of a tool
        self._check_tools(schemas, kwargs or {})
        self.response_template = getattr(tokenizer.hf, "response_template", None) or self._response_template()
        self._check_results()

    def _check_tools(self, schemas: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> None:
        template = ChatTemplate(self.tokenizer, {**kwargs, "tools": list(schemas)})
        shown = template.render([_QUESTION], generation_prompt=True)
        for name in (schema["function"]["name"] for schema in schemas):
            if name not in shown:
                raise UserError(f"{self._who} does not show tool {name!r} to the policy. {_ADVICE}")

    def _check_results(self) -> None:
        result = {"role": "tool", "name": "dummy", "content": "a result"}
        try:
            self.suffix([result])
            text = self._template.render([*_called("dummy"), result], generation_prompt=True)
        except ChatTemplateError as error:
            raise UserError(f"tools: {error}. {_ADVICE}") from error
        if result["content"] not in text:
            raise UserError(f"{self._who} leaves out the results of tools. {_ADVICE}")

    def _response_template(self) -> dict[str, Any]:
        fields = next((fields for marker, fields in _FORMS if marker in self._template.text), None)
        if fields is None:
            raise UserError(
                f"{self._who} shows no form of calls that is known here: JSON in <tool_call> as Qwen and SmolLM3, or "
                "JSON with 'name' and 'parameters' as Llama 3. Put a 'response_template' (see transformers) into "
                f"tokenizer_config.json. {_ADVICE}"
            )
        header = self._template.render([_QUESTION], generation_prompt=True)
        header = header.removeprefix(self._template.render([_QUESTION], generation_prompt=False))
        ends = "|".join(re.escape(self.tokenizer.hf.convert_ids_to_tokens(i)) for i in self.tokenizer.eos_ids)
        fields = {**fields, "content": {"close_pattern": rf"{_END}\s*", "content": "text"}}

        def with_ends(field: Mapping[str, Any]) -> dict[str, Any]:
            return {**field, "close_pattern": field["close_pattern"].replace(_END, f"(?:{ends})")}

        fields = {name: with_ends(field) for name, field in fields.items()}
        return {"defaults": {"role": "assistant"}, "start_anchor": header, "fields": fields}

    # --- responses

    def parse(self, ids: Sequence[int], prefix: str) -> Message:
        """The message of a response, with its calls under 'tool_calls' as transformers has them.

        Args:
          ids: of one turn.
          prefix: the text before them, at least from the start of the policy's message.

        Returns:
          {"role": "assistant", "content": text, ...}; a response that cannot be parsed is its text, without calls.
        """
        hf = self.tokenizer.hf
        try:
            message = hf.parse_response(self.tokenizer.decode(ids), schema=self.response_template, prefix=prefix)
            content = message.get("content")
            message["content"] = content.removesuffix(hf.eos_token) if isinstance(content, str) else ""
            if "tool_calls" in message:
                message["tool_calls"] = [_checked(call) for call in message["tool_calls"]]
        except (ValueError, TypeError, AttributeError):
            return {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}
        return message

    # --- results

    def suffix(self, messages: Conversation) -> tuple[list[int], str]:
        """What follows the policy's message: results, and the start of its next message.

        Args:
          messages: of role 'tool'. Special tokens in their content are encoded as text.

        Returns:
          (ids, their text)

        Raises:
          ChatTemplateError: the template failed.
          UserError: the template does not end the policy's message with a token that ends responses.
        """
        name = messages[0]["name"]
        before = _called(name)
        if name not in self._ends_before:
            self._ends_before[name] = len(self._ends(self._ids(self._template.render(before, generation_prompt=False))))
            if not self._ends_before[name]:
                eos = ", ".join(map(repr, self.tokenizer.hf.convert_ids_to_tokens(self.tokenizer.eos_ids)))
                raise UserError(
                    f"{self._who} does not end the policy's message with a token that ends responses, {eos}. Give the "
                    "one that does as stop_token_ids."
                )
        hidden = {token: chr(_PRIVATE + number) for number, token in enumerate(self._special)}
        results = [
            {**message, "content": self._special_pattern.sub(lambda token: hidden[token[0]], message["content"])}
            for message in messages
        ]
        text = self._template.render([*before, *results], generation_prompt=True)
        ids = self._ids(text, None if results == messages else {hidden[token]: token for token in hidden})
        ids = ids[self._ends(ids)[self._ends_before[name] - 1] + 1 :]
        return ids, self.tokenizer.decode(ids)

    def _ends(self, ids: Sequence[int]) -> list[int]:
        """The places of tokens that end responses."""
        return [place for place, token in enumerate(ids) if token in self.tokenizer.eos_ids]

    def _ids(self, text: str, shown: Mapping[str, str] | None = None) -> list[int]:
        """Ids of a rendered text. `shown`: the characters in it that stand for special tokens of results, which are
        encoded as text."""
        if shown is None:
            return self.tokenizer.encode(text)
        ids: list[int] = []
        place = 0
        for token in (*self._special_pattern.finditer(text), None):
            part = text[place:] if token is None else text[place : token.start()]
            ids += self.tokenizer.encode_as_text("".join(shown.get(character, character) for character in part))
            if token is not None:
                ids.append(self._special[token[0]])
                place = token.end()
        return ids


def _called(name: str) -> Conversation:
    """A conversation that ends with a call of a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    return [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _checked(call: Any) -> dict[str, Any]:
    """A call that names a tool; absent arguments are none. Raises a ValueError for anything else."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{call!r} names no tool")
    if function.get("arguments") is None:
        function["arguments"] = {}
    return call
