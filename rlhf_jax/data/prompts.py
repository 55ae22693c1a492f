"""Prompts for a policy, texts or conversations: left-padded batches that are pure functions of seed and step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.data import batches, chat, row_texts
from rlhf_jax.data.batches import DataReport
from rlhf_jax.data.loading import Rows, eval_sets, load_split
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.types import PromptBatch


@dataclasses.dataclass(frozen=True)
class PromptData(batches.Batched[PromptBatch]):
    """Prompts as tokens, with their texts and the other columns of their rows."""

    tokens: list[np.ndarray]
    """int32 each."""
    prompts: list[str]
    """What the tokens say: a truncated prompt is truncated here too, a conversation is in its chat template."""
    raw: list[dict[str, Any]]
    """The other columns."""
    pad_id: int
    buckets: tuple[int, ...]
    report: DataReport
    conversations: list[chat.Conversation] | None = None
    """The messages of each prompt; None where prompts are texts."""
    shuffle: bool = True
    """A new order each pass; false: as they come."""

    def _stores(self) -> tuple[list[np.ndarray], ...]:
        return (self.tokens,)

    def _take(self, rows: np.ndarray, here: np.ndarray | slice) -> PromptBatch:
        """tokens [H, C] int32 with C the same for all batches, so that a run has one program; lengths [H] int32; rows
        [B] int32, of the whole batch."""
        chosen = [self.tokens[i] for i in rows[here]]
        width = batches.bucket(self.report.longest, self.buckets)
        return PromptBatch(
            batches.pad_left(chosen, width, self.pad_id), batches.lengths_of(chosen), rows.astype(np.int32)
        )

    @property
    def fingerprint(self) -> str:
        """How many rows there are, and a sha256 of their tokens and of the columns that reward functions see."""
        digest = hashlib.sha256(super().fingerprint.encode())
        for row in self.raw:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return f"{len(self)} rows, {digest.hexdigest()[:16]}"

    @property
    def conversational(self) -> bool:
        """Whether prompts are conversations."""
        return self.conversations is not None

    def texts(self, rows: Sequence[int]) -> list[str] | list[chat.Conversation]:
        """Prompts of these rows as reward functions get them: texts, or lists of messages (copies)."""
        if self.conversations is None:
            return self.display_texts(rows)
        return [[dict(message) for message in self.conversations[i]] for i in rows]

    def display_texts(self, rows: Sequence[int]) -> list[str]:
        """Prompts of these rows as text for people: what the policy reads."""
        return [self.prompts[i] for i in rows]

    def as_completions(self, texts: Sequence[str]) -> list[str] | list[chat.Conversation]:
        """Responses as reward functions get them: texts, or for conversations one assistant's message each, as TRL
        gives them."""
        if self.conversations is None:
            return list(texts)
        return [[{"role": "assistant", "content": text}] for text in texts]

    def columns(self, rows: Sequence[int]) -> dict[str, list[Any]]:
        """The data set's other columns at these rows, for reward functions."""
        names = dict.fromkeys(name for row in self.raw for name in row)
        return {name: [self.raw[i].get(name) for i in rows] for name in names}


def _write_conversations(
    rows: Rows, column: str, template: chat.ChatTemplate, on_bad_row: str
) -> tuple[row_texts.Sorted, list[str]]:
    """(good and bad rows, the text of each good one up to where the assistant's answer begins)."""
    texts: list[str] = []

    def fault(row: Any) -> str | None:
        wrong = chat.conversation_fault(row, column)
        if wrong is None:
            try:
                texts.append(template.render(row[column], generation_prompt=True))
            except chat.ChatTemplateError as error:
                return f"{column!r}: {error}"
        return wrong

    return row_texts.sort_rows(rows, fault, on_bad_row), texts


def make_prompts(
    rows: Rows,
    tokenizer: Tokenizer,
    *,
    prompt_column: str = "prompt",
    query_length: int = 512,
    query_overflow: str = "truncate",
    on_bad_row: str = "raise",
    length_buckets: tuple[int, ...] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    shuffle: bool = True,
) -> PromptData:
    """Tokenises prompts; the options are those of the config.

    A prompt that is a list of messages {"role", "content"} goes through the tokenizer's chat template, up to where the
    assistant's answer begins. All prompts of a data set are texts or all are conversations: a row of the other kind is
    bad. A conversation that is too long is dropped whatever `query_overflow` says: there is no rule for cutting one.

    Raises:
      UserError: a column is missing, a row is bad, all rows are too long, no bucket holds the longest, or there are
        conversations and no chat template.
    """
    columns = row_texts.prompt_columns(rows, prompt_column)
    conversational = len(columns) == 1 and chat.holds_conversations(rows, columns[0])
    if conversational:
        template = chat.ChatTemplate(tokenizer, chat_template_kwargs)
        found, texts = _write_conversations(rows, columns[0], template, on_bad_row)
    else:
        found = row_texts.sort_rows(rows, lambda row: row_texts.text_fault(row, columns), on_bad_row)
        texts = [row_texts.prompt_text(row, columns) for row in found.good]
    ids, truncated = row_texts.fit_prompts(texts, tokenizer, query_length, "drop" if conversational else query_overflow)
    kept = [i for i, tokens in enumerate(ids) if tokens is not None]
    row_texts.refuse_nothing_left(rows, len(kept), f"query_length = {query_length} tokens")
    tokens = [np.asarray(ids[i], np.int32) for i in kept]
    texts = [texts[i] for i in kept]
    good = [found.good[i] for i in kept]
    raw = [{name: row[name] for name in row if name not in columns} for row in good]
    if truncated:
        texts = [
            tokenizer.decode(part) if len(part) < len(whole) else text
            for part, whole, text in zip(tokens, tokenizer.encode_batch(texts), texts, strict=True)
        ]
    cut_was_asked = conversational and len(kept) < len(ids) and query_overflow == "truncate"
    buckets, report = row_texts.measure(
        rows,
        found,
        tokens,
        length_buckets=length_buckets,
        truncated=truncated,
        note="conversations are dropped, not truncated" if cut_was_asked else None,
    )
    conversations = [[dict(message) for message in row[columns[0]]] for row in good] if conversational else None
    return PromptData(tokens, texts, raw, tokenizer.pad_id, buckets, report, conversations, shuffle)


def prompts_of(rows: Rows, config: Any, tokenizer: Tokenizer) -> PromptData:
    """`make_prompts` by the data options of a config."""
    return make_prompts(
        rows,
        tokenizer,
        prompt_column=config.prompt_column,
        query_length=config.query_length,
        query_overflow=config.query_overflow,
        on_bad_row=config.on_bad_row,
        length_buckets=config.length_buckets,
        chat_template_kwargs=getattr(config, "chat_template_kwargs", None),
        shuffle=getattr(config, "shuffle_dataset", True),
    )


def load_prompts(config: Any, tokenizer: Tokenizer, dataset: Any = None, evaluation: bool = False) -> PromptData | None:
    """The prompts that a config asks for; `dataset` is an object in place of the configured name. None: no evaluation
    data. The synthetic prompts come with their demonstrations, as column 'completion'."""
    rows = load_split(config, "eval" if evaluation else "train", "demonstrations", dataset)
    return None if rows is None else prompts_of(rows, config, tokenizer)


def load_eval_prompts(config: Any, tokenizer: Tokenizer, given: Any = None) -> dict[str, PromptData]:
    """The evaluation sets that a config asks for, by name; see `loading.eval_sets`."""
    return {
        name: prompts_of(rows, config, tokenizer) for name, rows in eval_sets(config, "demonstrations", given).items()
    }
