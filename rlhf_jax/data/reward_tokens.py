"""Text for a reward model with a tokenizer of its own: prompt and completion as its ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.data import batches
from rlhf_jax.data.chat import ChatTemplate, ChatTemplateError, Conversation
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError


def _whole_texts(
    tokenizer: Tokenizer,
    prompts: Sequence[str] | Sequence[Conversation],
    completions: Sequence[str] | Sequence[Conversation],
    chat_template_kwargs: Mapping[str, Any] | None,
) -> list[str]:
    wholes = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    if not wholes or isinstance(wholes[0], str):
        return wholes
    template = ChatTemplate(tokenizer, chat_template_kwargs)
    texts = []
    for row, messages in enumerate(wholes):
        try:
            texts.append(template.render(messages, generation_prompt=False))
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
    """What a reward model reads of a batch, as TRL's RLOO tokenises it (`_calculate_rewards`): texts joined, or
    conversations in the reward tokenizer's chat template, and no special tokens added.

    Args:
      tokenizer: the reward model's.
      prompts: B texts, or B conversations.
      completions: B texts, or B lists of the assistant's messages.
      ended: [B] bool, whether a response ended by itself.
      text_eos: end the sequence of a response that ended with the tokenizer's eos, unless it ends so already (white
        space after it aside: templates close a message with a line feed). TRL adds none.
      chat_template_kwargs: for the chat template.
      max_length: tokens of the model's context.
      buckets: padded lengths; default: quarters of `max_length`. `max_length` is always one, none is longer.

    Returns:
      (tokens [B, S] int32, right-padded, S a bucket; lengths [B] int32)

    Raises:
      UserError: a text is longer than max_length, the template refuses a row, or there is no template.
    """
    texts = _whole_texts(tokenizer, prompts, completions, chat_template_kwargs)
    ids = tokenizer.encode_batch(texts)
    eos = tokenizer.hf.eos_token
    for row, (text, end) in enumerate(zip(texts, ended, strict=True)):
        if text_eos and end and not text.rstrip().endswith(eos):
            ids[row] = [*ids[row], tokenizer.eos_id]
        if len(ids[row]) > max_length:
            raise UserError(
                f"row {row} of the batch has {len(ids[row])} tokens by the reward model's tokenizer "
                f"({tokenizer.name}), and the model's context has {max_length}: {text[:60]!r}... Lower query_length or "
                "response_length, which count the policy's tokens, or take a reward model with a longer context."
            )
    sizes = batches.default_buckets(max_length) if buckets is None else buckets
    lengths = batches.lengths_of(ids)
    width = batches.bucket(int(lengths.max()), [*sizes, max_length])
    return batches.pad_right(ids, width, tokenizer.pad_id), lengths
