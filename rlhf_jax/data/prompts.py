"""Prompts for a policy, texts or conversations: left-padded batches that are pure functions of seed and step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.data import batches, chat, conversation_forms, row_texts
from rlhf_jax.data import images as image_rows
from rlhf_jax.data.batches import DataReport
from rlhf_jax.data.files import Rows
from rlhf_jax.data.options import PromptOptions
from rlhf_jax.data.ragged import Lazy
from rlhf_jax.data.tokenized import Encoded, Kind, Tokenized
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.types import PromptBatch

NO_PROMPT = [{"role": "user", "content": "\u200b"}]
"""Stands for the prompt of a row that has none, until its environment is reset. Its content is not empty, as that of a
prompt must not be."""


def _without_prompt(row: Any) -> Any:
    return {**row, "prompt": NO_PROMPT} if isinstance(row, Mapping) else row


@dataclasses.dataclass(frozen=True)
class PromptData(batches.Batched[PromptBatch]):
    """Tokenized prompts, with their texts and the other columns of their rows."""

    tokens: Sequence[np.ndarray]
    """int32 each."""
    prompts: Sequence[str]
    """The texts of `tokens`: truncated where the tokens are, conversations in the chat template."""
    raw: Sequence[dict[str, Any]]
    """The other columns of each row."""
    pad_id: int
    buckets: tuple[int, ...]
    report: DataReport
    conversations: Sequence[chat.Conversation] | None = None
    """The messages of each prompt; None if prompts are texts."""
    shuffle: bool = True
    """Shuffle the rows each epoch; false: keep file order."""
    known_fingerprint: str | None = None
    known_columns: tuple[str, ...] | None = None
    """The names of the other columns, where they are known without reading all rows."""
    shares: batches.Order | None = None
    images: image_rows.DataImages | None = None
    """None: the prompts are text."""
    starts: np.ndarray | None = None
    """int32 of each row: where its responses start (`generate.guided`); None: responses are not guided."""

    per_row = ("tokens", "prompts", "raw", "conversations")

    @staticmethod
    def encoder(
        rows: Rows, options: PromptOptions, tokenizer: Tokenizer, processor: image_rows.ImageProcessor | None = None
    ) -> tuple[Rows, PromptEncoder]:
        """As `Batched.encoder`. Synthetic prompts keep their demonstrations as column 'completion'."""
        column = options.prompt_column
        is_post = set(row_texts.TEMPLATE_COLUMNS) <= set(rows.column_names)
        messages_column = column if column == "prompt" and not is_post else None
        if options.environment_factory and messages_column is not None and messages_column not in rows.column_names:
            rows = rows.mapped(_without_prompt, [messages_column], "no prompt")
        rows = rows if processor is None else image_rows.encoded(rows)
        rows = conversation_forms.house_form(rows, (column,), whole=messages_column, answer="completion")
        columns = row_texts.prompt_columns(rows, column)
        if processor is not None:
            template = chat.ChatTemplate(tokenizer, options.chat_template_kwargs)
            fault = functools.partial(chat.conversation_fault, column=columns[0])
            reader = image_rows.RowReader(columns[:1], processor, image_rows.data_folder(rows), fault)
            encoder = ImagePromptEncoder(tokenizer, columns[:1], template, options, reader)
            return chat.noting_unread(rows, columns[:1], template), encoder
        conversational = len(columns) == 1 and chat.holds_conversations(rows, columns[0])
        template = chat.ChatTemplate(tokenizer, options.chat_template_kwargs) if conversational else None
        return chat.noting_unread(rows, columns, template), PromptEncoder(tokenizer, columns, template, options)

    def _sequences(self) -> tuple[Sequence[np.ndarray], ...]:
        return (self.tokens,)

    def _make_batch(self, rows: np.ndarray, local: np.ndarray | slice) -> PromptBatch:
        """tokens [H, C] int32, lengths [H] int32, rows [B] int32 of the full batch. C is the same for all batches, so
        that each program compiles once."""
        chosen = [self.tokens[i] for i in rows[local]]
        images = None if self.images is None else self.images.batch(rows[local])
        tokens = batches.pad_left(chosen, self.widest, self.pad_id)
        start = None if self.starts is None else self.starts[rows[local]]
        return PromptBatch(tokens, batches.lengths_of(chosen), rows.astype(np.int32), images, start)

    @property
    def fingerprint(self) -> str:
        """The number of rows and a sha256 of their tokens and of the columns passed to reward functions."""
        return self.known_fingerprint or self._digest(lambda row: None)

    def _digest(self, look: Callable[[dict[str, Any]], None]) -> str:
        """The fingerprint; `look` is called with the other columns of each row."""
        digest = hashlib.sha256(super().fingerprint.encode())
        for row in self.raw:
            look(row)
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        if self.images is not None:
            self.images.update(digest)
        return f"{len(self)} rows, {digest.hexdigest()[:16]}"

    def describe(self) -> dict[str, Any]:
        """As `Batched.describe`, by one reading of all rows."""
        names: dict[str, None] = {}
        return {"fingerprint": self._digest(lambda row: names.update(dict.fromkeys(row))), "columns": list(names)}

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
        read = [self.raw[i] for i in rows]
        columns = {name: [row.get(name) for row in read] for name in self.column_names}
        return columns if self.images is None else {**columns, **self.images.columns(rows)}

    def some_raw(self) -> list[dict[str, Any]]:
        """The other columns of at most 100 rows, from all parts of the data."""
        return [self.raw[i] for i in np.unique(np.linspace(0, len(self) - 1, 100, dtype=np.int64)).tolist()]

    @functools.cached_property
    def column_names(self) -> tuple[str, ...]:
        """The names of the other columns, in order of first appearance."""
        if self.known_columns is not None:
            return self.known_columns
        return tuple(dict.fromkeys(name for row in self.raw for name in row))


class PromptEncoder:
    """The `tokenized.Encoder` of prompts, at most `query_length` tokens.

    A prompt that is a list of messages {"role", "content"} is rendered by the tokenizer's chat template with its
    generation prompt. The prompts of a data set are all texts or all conversations; a row of the other kind is bad. A
    conversation that is too long is always dropped, since `query_overflow` has no rule for truncating one.
    """

    columns: Mapping[str, Kind] = {"tokens": "tokens", "text": "text", "truncated": "flag", "begun": "flag"}

    def __init__(
        self, tokenizer: Tokenizer, columns: tuple[str, ...], template: chat.ChatTemplate | None, options: PromptOptions
    ):
        self.tokenizer, self.prompt_columns, self.template = tokenizer, columns, template
        self.query_length, self.query_overflow = options.query_length, options.query_overflow
        self.shuffle = options.shuffle_dataset

    @property
    def _limits(self) -> tuple[int, str]:
        return self.query_length, self.query_overflow if self.template is None else "drop"

    def identity(self) -> Any:
        """As `tokenized.Encoder.identity`."""
        return row_texts.identity(self.tokenizer, self.template, self.prompt_columns, self._limits)

    def _text(self, row: Any) -> tuple[str | None, str | None]:
        """(the prompt, why the row is bad)"""
        columns = self.prompt_columns
        if (template := self.template) is not None:
            return chat.rendered_or_fault(
                row,
                lambda row: chat.conversation_fault(row, columns[0]),
                lambda row: template.for_row(row).render(
                    chat.text_messages(row[columns[0]]), generation_prompt=True, column=columns[0]
                ),
            )
        fault = row_texts.text_fault(row, columns)
        return (row_texts.prompt_text(row, columns), None) if fault is None else (None, fault)

    def fault(self, row: Any) -> str | None:
        """As `tokenized.Encoder.fault`."""
        return self._text(row)[1]

    def encode(self, rows: list[Any]) -> list[Encoded]:
        """As `tokenized.Encoder.encode`; 'text' is None where it is a column of the row."""
        texts = [self._text(row) for row in rows]
        good = [text for text, _ in texts if text is not None]
        rendered = self.template is not None
        fitted = row_texts.fit_prompts(good, self.tokenizer, *self._limits, rendered=rendered)
        encoded = iter(zip(good, fitted, strict=True))
        start = len(self.tokenizer.start_ids())

        def one() -> Encoded:
            text, prompt = next(encoded)
            if prompt is None:
                return None
            stored_text = text if rendered else None
            if prompt.truncated:
                stored_text = self.tokenizer.decode(prompt.ids[start:]) if prompt.text is None else prompt.text
            return {"tokens": prompt.ids, "text": stored_text, "truncated": prompt.truncated, "begun": prompt.begun}

        return [fault if fault is not None else one() for _, fault in texts]

    def _note(self, tokenized: Tokenized, dropped: int) -> str | None:
        """A remark for the report; `dropped`: rows that are too long."""
        if self.template is not None and dropped and self.query_overflow == "truncate":
            return "conversations are dropped, not truncated"
        return row_texts.begun_note(tokenized, self.tokenizer)

    def _conversation(self, row: Any) -> chat.Conversation:
        """The messages of a good row."""
        return [dict(message) for message in row[self.prompt_columns[0]]]

    def data(self, tokenized: Tokenized, length_buckets: Sequence[int] | None) -> PromptData:
        """As `tokenized.Encoder.data`; texts and columns are read when they are needed."""
        table, columns, row_indices = tokenized.rows.table, self.prompt_columns, tokenized.usable_rows
        tokens = tokenized.ragged("tokens")
        buckets, report = row_texts.buckets_and_report(
            tokenized,
            tokens,
            length_buckets=length_buckets,
            limit=self._limit,
            note=self._note(tokenized, len(tokenized.table) - tokenized.bad - len(row_indices)),
            template=self.template,
        )

        def row(index: int) -> dict[str, Any]:
            return table[int(row_indices[index])]

        def text(index: int) -> str:
            stored_text = tokenized.text(index)
            return row_texts.prompt_text(row(index), columns) if stored_text is None else stored_text

        def raw(index: int) -> dict[str, Any]:
            values = row(index)
            return {name: values[name] for name in values if name not in self._unlisted}

        return PromptData(
            tokens,
            Lazy(len(row_indices), text),
            Lazy(len(row_indices), raw),
            self.tokenizer.pad_id,
            buckets,
            report,
            None if self.template is None else Lazy(len(row_indices), lambda index: self._conversation(row(index))),
            self.shuffle,
            tokenized.meta.get("fingerprint"),
            tuple(tokenized.meta["columns"]) if "columns" in tokenized.meta else None,
            images=self._images(tokenized),
        )

    @property
    def _limit(self) -> str:
        return f"query_length = {self.query_length} tokens"

    @property
    def _unlisted(self) -> tuple[str, ...]:
        """Columns that reward functions do not get as such."""
        return self.prompt_columns

    def _images(self, tokenized: Tokenized) -> image_rows.DataImages | None:
        return None


class ImagePromptEncoder(image_rows.ImageEncoder, PromptEncoder):
    """The `tokenized.Encoder` of conversations with images. One that is too long is dropped, since its images cannot be
    cut."""

    columns = {**PromptEncoder.columns, **image_rows.COUNTS}

    def __init__(
        self,
        tokenizer: Tokenizer,
        columns: tuple[str, ...],
        template: chat.ChatTemplate,
        options: PromptOptions,
        reader: image_rows.RowReader,
    ):
        super().__init__(tokenizer, columns, template, options)
        self.reader = reader

    def _with_images(self, row: Any, read: image_rows.ImageRow) -> tuple[dict[str, Any] | None, int]:
        (column,) = self.prompt_columns
        text = self.template.for_row(row).render(read.messages[column], generation_prompt=True, column=column)
        ids, tiles = self.reader.processor.encode(text, read.sources, self.tokenizer)
        if len(ids) > self.query_length:
            return None, tiles
        return {"tokens": ids, "text": text, "truncated": False, "begun": False}, tiles

    def _note(self, tokenized: Tokenized, dropped: int) -> str:
        return image_rows.image_note(tokenized)

    def _conversation(self, row: Any) -> chat.Conversation:
        return self.reader.read(row).messages[self.prompt_columns[0]]

    @property
    def _limit(self) -> str:
        return f"{super()._limit}, those of images included"

    @property
    def _unlisted(self) -> tuple[str, ...]:
        return (*self.prompt_columns, *image_rows.COLUMNS)

    def _images(self, tokenized: Tokenized) -> image_rows.DataImages:
        return self.reader.images(tokenized, image_rows.image_column(tokenized.rows))
