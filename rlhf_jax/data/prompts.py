"""Prompts for a policy, texts or conversations: left-padded batches that are pure functions of seed and step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.data import batches, chat, row_texts
from rlhf_jax.data import images as image_rows
from rlhf_jax.data.batches import DataReport
from rlhf_jax.data.loading import Rows, eval_sets, load_split
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.types import PromptBatch


@dataclasses.dataclass(frozen=True)
class PromptData(batches.Batched[PromptBatch]):
    """Tokenized prompts, with their texts and the other columns of their rows."""

    tokens: list[np.ndarray]
    """int32 each."""
    prompts: list[str]
    """The texts of `tokens`: truncated where the tokens are, conversations in the chat template."""
    raw: list[dict[str, Any]]
    """The other columns of each row."""
    pad_id: int
    buckets: tuple[int, ...]
    report: DataReport
    conversations: list[chat.Conversation] | None = None
    """The messages of each prompt; None if prompts are texts."""
    shuffle: bool = True
    """Shuffle the rows each epoch; false: keep file order."""
    images: image_rows.DataImages | None = None
    """None: the prompts are text."""

    def _sequences(self) -> tuple[list[np.ndarray], ...]:
        return (self.tokens,)

    def _make_batch(self, rows: np.ndarray, local: np.ndarray | slice) -> PromptBatch:
        """tokens [H, C] int32, lengths [H] int32, rows [B] int32 of the full batch. C is the same for all batches, so
        that each program compiles once."""
        chosen = [self.tokens[i] for i in rows[local]]
        width = batches.bucket(self.report.longest, self.buckets)
        images = None if self.images is None else self.images.batch(rows[local])
        tokens = batches.pad_left(chosen, width, self.pad_id)
        return PromptBatch(tokens, batches.lengths_of(chosen), rows.astype(np.int32), images)

    @property
    def fingerprint(self) -> str:
        """The number of rows and a sha256 of their tokens and of the columns passed to reward functions."""
        digest = hashlib.sha256(super().fingerprint.encode())
        for row in self.raw:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        if self.images is not None:
            self.images.update(digest)
        return f"{len(self)} rows, {digest.hexdigest()[:16]}"

    @property
    def conversational(self) -> bool:
        """Whether prompts are conversations."""
        return self.conversations is not None

    def texts(self, rows: Sequence[int]) -> list[str] | list[chat.Conversation]:
        """Prompts as passed to reward functions: texts, or copies of the lists of messages. As in TRL, blocks of type
        'image' have the PIL image."""
        if self.conversations is None:
            return self.display_texts(rows)
        if self.images is not None:
            read = functools.lru_cache(maxsize=None)(lambda row: self.images.filled(row, self.conversations[row]))
            return [read(row) for row in rows]
        return [[dict(message) for message in self.conversations[i]] for i in rows]

    def display_texts(self, rows: Sequence[int]) -> list[str]:
        """Prompts as the text that the policy reads, for logs and tables."""
        return [self.prompts[i] for i in rows]

    def as_completions(self, texts: Sequence[str]) -> list[str] | list[chat.Conversation]:
        """Responses as passed to reward functions: texts, or for conversations one assistant message each, as in
        TRL."""
        if self.conversations is None:
            return list(texts)
        return [[{"role": "assistant", "content": text}] for text in texts]

    def columns(self, rows: Sequence[int]) -> dict[str, list[Any]]:
        """The other columns of these rows, for reward functions."""
        names = dict.fromkeys(name for row in self.raw for name in row)
        columns = {name: [self.raw[i].get(name) for i in rows] for name in names}
        return columns if self.images is None else {**columns, **self.images.columns(rows)}


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
    processor: image_rows.ImageProcessor | None = None,
) -> PromptData:
    """Tokenizes prompts. The arguments are options of the config; `processor`: of the model, where rows have images.

    A prompt that is a list of messages {"role", "content"} is rendered by the tokenizer's chat template with its
    generation prompt. The prompts of a data set are all texts or all conversations; a row of the other kind is bad. A
    conversation that is too long is always dropped, since `query_overflow` has no rule for truncating one.

    Raises:
      UserError: a column is missing, a row is bad, all rows are too long, the longest row fits no bucket, or prompts
        are conversations and there is no chat template.
    """
    columns = row_texts.prompt_columns(rows, prompt_column)
    if processor is not None:
        return _image_prompts(
            rows,
            tokenizer,
            processor,
            columns[0],
            query_length=query_length,
            on_bad_row=on_bad_row,
            length_buckets=length_buckets,
            chat_template_kwargs=chat_template_kwargs,
            shuffle=shuffle,
        )
    conversational = len(columns) == 1 and chat.holds_conversations(rows, columns[0])
    if conversational:
        template = chat.ChatTemplate(tokenizer, chat_template_kwargs)
        split, texts = chat.render_rows(
            rows,
            lambda row: chat.conversation_fault(row, columns[0]),
            lambda row: template.render(row[columns[0]], generation_prompt=True, column=columns[0]),
            on_bad_row,
        )
    else:
        template = None
        split = row_texts.split_rows(rows, lambda row: row_texts.text_fault(row, columns), on_bad_row)
        texts = [row_texts.prompt_text(row, columns) for row in split.good]
    ids, truncated = row_texts.fit_prompts(texts, tokenizer, query_length, "drop" if conversational else query_overflow)
    kept = [i for i, tokens in enumerate(ids) if tokens is not None]
    row_texts.check_any_kept(rows, len(kept), f"query_length = {query_length} tokens")
    tokens = [np.asarray(ids[i], np.int32) for i in kept]
    texts = [texts[i] for i in kept]
    good = [split.good[i] for i in kept]
    raw = [{name: row[name] for name in row if name not in columns} for row in good]
    if truncated:
        texts = [
            tokenizer.decode(own) if len(own) < len(full) else text
            for own, full, text in zip(tokens, tokenizer.encode_batch(texts), texts, strict=True)
        ]
    dropped_not_truncated = conversational and len(kept) < len(ids) and query_overflow == "truncate"
    buckets, report = row_texts.buckets_and_report(
        rows,
        split,
        tokens,
        length_buckets=length_buckets,
        truncated=truncated,
        note="conversations are dropped, not truncated" if dropped_not_truncated else None,
        template_date=None if template is None else template.date,
    )
    conversations = [[dict(message) for message in row[columns[0]]] for row in good] if conversational else None
    return PromptData(tokens, texts, raw, tokenizer.pad_id, buckets, report, conversations, shuffle)


def _image_prompts(
    rows: Rows,
    tokenizer: Tokenizer,
    processor: image_rows.ImageProcessor,
    column: str,
    *,
    query_length: int,
    on_bad_row: str,
    length_buckets: tuple[int, ...] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    shuffle: bool,
) -> PromptData:
    """`make_prompts` of conversations with images; one that is too long is dropped, since its images cannot be cut."""
    template, folder = chat.ChatTemplate(tokenizer, chat_template_kwargs), image_rows.folder_of(rows)
    rows = image_rows.encoded(rows)

    def encode(row: Any) -> tuple[image_rows.ImageRow, str, list[int], int]:
        read = image_rows.read_row(
            row, (column,), processor, folder, lambda plain: chat.conversation_fault(plain, column)
        )
        text = template.render(read.messages[column], generation_prompt=True, column=column)
        return read, text, *processor.encode(text, read.sources, tokenizer)

    split, encoded = image_rows.split_rows(rows, encode, on_bad_row)
    kept = [i for i, (_, _, ids, _) in enumerate(encoded) if len(ids) <= query_length]
    row_texts.check_any_kept(rows, len(kept), f"query_length = {query_length} tokens, those of images included")
    tokens = [np.asarray(encoded[i][2], np.int32) for i in kept]
    left_out = {column, *image_rows.COLUMNS}
    raw = [{name: split.good[i][name] for name in split.good[i] if name not in left_out} for i in kept]
    buckets, report = row_texts.buckets_and_report(
        rows,
        split,
        tokens,
        length_buckets=length_buckets,
        truncated=0,
        note=image_rows.note_of([encoded[i][0] for i in kept]),
        template_date=template.date,
    )
    found = image_rows.DataImages(
        processor,
        [encoded[i][0].sources for i in kept],
        max(encoded[i][3] for i in kept),
        image_rows.column_of(rows),
    )
    texts = [encoded[i][1] for i in kept]
    conversations = [encoded[i][0].messages[column] for i in kept]
    return PromptData(tokens, texts, raw, tokenizer.pad_id, buckets, report, conversations, shuffle, found)


def prompts_from_rows(
    rows: Rows, config: Any, tokenizer: Tokenizer, processor: image_rows.ImageProcessor | None = None
) -> PromptData:
    """`make_prompts` with the data options of a config."""
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
        processor=processor,
    )


def load_prompts(
    config: Any,
    tokenizer: Tokenizer,
    dataset: Any = None,
    evaluation: bool = False,
    processor: image_rows.ImageProcessor | None = None,
) -> PromptData | None:
    """The prompts of a config, or of `dataset`, an object in place of the configured name.

    Synthetic prompts keep their demonstrations as column 'completion'.

    Returns:
      The data; None where the config has no evaluation data.
    """
    rows = load_split(config, "eval" if evaluation else "train", "demonstrations", dataset)
    return None if rows is None else prompts_from_rows(rows, config, tokenizer, processor)


def load_eval_prompts(
    config: Any, tokenizer: Tokenizer, dataset: Any = None, processor: image_rows.ImageProcessor | None = None
) -> dict[str, PromptData]:
    """The evaluation sets of a config, by name; see `loading.eval_sets`."""
    sets = eval_sets(config, "demonstrations", dataset)
    return {name: prompts_from_rows(rows, config, tokenizer, processor) for name, rows in sets.items()}
