"""Tokenization of prompts and completions for a reward model with another tokenizer than the policy's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.data import batches
from rlhf_jax.data.chat import ChatTemplate, ChatTemplateError, Conversation, text_messages
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError


def _full_texts(
    tokenizer: Tokenizer,
    prompts: Sequence[str] | Sequence[Conversation],
    completions: Sequence[str] | Sequence[Conversation],
    chat_template_kwargs: Mapping[str, Any] | None,
) -> list[str]:
    """prompt + completion of each row as one text."""
    joined = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    if not joined or isinstance(joined[0], str):
        return joined
    template = ChatTemplate(tokenizer, chat_template_kwargs)
    texts = []
    for row, messages in enumerate(joined):
        try:
            texts.append(template.render(text_messages(messages), generation_prompt=False))
        except ChatTemplateError as error:
            raise UserError(f"row {row} of the batch cannot be scored: {error}: {messages!r:.200}") from error
    return texts


def reward_tokens(
    tokenizer: Tokenizer,
    prompts: Sequence[str] | Sequence[Conversation],
    completions: Sequence[str] | Sequence[Conversation],
    ended: Sequence[bool] | np.ndarray,
    *,
    text_eos: bool,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_length: int,
    buckets: Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a batch for a reward model, as in TRL's RLOO (`_calculate_rewards`): prompt and completion texts
    concatenated, or conversations in the reward tokenizer's chat template, without special tokens.

    Args:
      tokenizer: the reward model's.
      prompts: B texts, or B conversations.
      completions: B texts, or B lists of assistant messages.
      ended: [B] bool, whether the response ended with eos.
      text_eos: append the tokenizer's eos to responses that ended, unless the text ends with it already (ignoring
        white space: templates close a message with a line feed). TRL appends none.
      max_length: context length of the model.
      buckets: padded lengths; default: quarters of `max_length`. `max_length` is always a bucket, and the largest.

    Returns:
      (tokens [B, S] int32, right-padded to a bucket S; lengths [B] int32)

    Raises:
      UserError: a text is longer than max_length, or the template is missing or fails for a row.
    """
    texts = _full_texts(tokenizer, prompts, completions, chat_template_kwargs)
    ids = tokenizer.encode_batch(texts)
    eos = tokenizer.hf.eos_token
    for row, (text, end) in enumerate(zip(texts, ended, strict=True)):
        if text_eos and end and not text.rstrip().endswith(eos):
            ids[row] = [*ids[row], tokenizer.eos_id]
        if len(ids[row]) > max_length:
            raise UserError(
                f"row {row} of the batch has {len(ids[row])} tokens in the reward model's tokenizer "
                f"({tokenizer.name}), but the model's context has {max_length}: {text[:60]!r}... Lower query_length or "
                "response_length, which count the policy's tokens, or use a reward model with a longer context."
            )
    sizes = batches.default_buckets(max_length) if buckets is None else buckets
    lengths = batches.lengths_of(ids)
    width = batches.bucket(int(lengths.max()), [*sizes, max_length])
    return batches.pad_right(ids, width, tokenizer.pad_id), lengths
