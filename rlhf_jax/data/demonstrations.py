"""Demonstrations for supervised fine-tuning: prompt + completion + eos as one right-padded sequence, or a conversation
as the chat template renders it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import flax
import numpy as np

from rlhf_jax.data import batches, chat, conversation_forms, row_texts
from rlhf_jax.data import images as image_rows
from rlhf_jax.data.batches import DataReport
from rlhf_jax.data.loading import Rows, load_rows, require_columns, text_columns_of
from rlhf_jax.data.options import DemonstrationOptions, PairOptions
from rlhf_jax.data.pipeline import from_rows
from rlhf_jax.data.tokenized import Encoded, Kind, Tokenized
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError
from rlhf_jax.types import Array, Images

MESSAGES = "messages"
"""The column of whole conversations, as in TRL."""


class DemoBatch(flax.struct.PyTreeNode):
    """Right-padded sequences."""

    tokens: Array  # [B, S] int32; prompt, completion, eos
    prompt_lengths: Array  # [B] int32
    lengths: Array  # [B] int32, 0 for a row that only pads the batch
    loss_mask: Array | None = None  # [B, S] bool, the tokens that are trained on; None: all
    segment_ids: Array | None = None  # [B, S] int32, the demonstration of each token of a packed row
    images: Images | None = None  # [B, ...]; None: the demonstrations are text


class DemoRows(batches.Batched[DemoBatch]):
    """Rows of demonstrations, of which those past the end have no tokens."""

    def in_order(self, start: int, count: int, local: np.ndarray | slice = slice(None)) -> DemoBatch:
        """Rows start .. start + count - 1. Past the end rows have length 0, to keep the shape. `local` as `batch`."""
        batch = super().in_order(start, count, local)
        real = (np.arange(start, start + count) < len(self))[local]
        mask = None if batch.loss_mask is None else batch.loss_mask & real[:, None]
        return batch.replace(lengths=np.where(real, batch.lengths, 0).astype(np.int32), loss_mask=mask)


@dataclasses.dataclass(frozen=True)
class DemoData(DemoRows):
    """Tokenized demonstrations."""

    tokens: Sequence[np.ndarray]
    """int32 each: prompt + completion + eos."""
    prompt_lengths: np.ndarray
    """[N] int32."""
    pad_id: int
    buckets: tuple[int, ...]
    report: DataReport
    loss_masks: Sequence[np.ndarray] | None = None
    """bool each, of the tokens: the assistant's, or all but those of images; None: all."""
    known_fingerprint: str | None = None
    shares: batches.Order | None = None
    images: image_rows.DataImages | None = None
    """None: the demonstrations are text."""

    per_row = ("tokens", "prompt_lengths", "loss_masks")

    @staticmethod
    def encoder(
        rows: Rows,
        options: DemonstrationOptions,
        tokenizer: Tokenizer,
        processor: image_rows.ImageProcessor | None = None,
    ) -> tuple[Rows, TextEncoder | ConversationEncoder]:
        """As `Batched.encoder`."""
        prompt_column, completion_column = options.prompt_column, options.completion_column
        rows = _house_form(rows if processor is None else image_rows.encoded(rows), prompt_column, completion_column)
        columns = conversation_columns(rows, prompt_column, completion_column)
        if columns:
            encoder = (
                ConversationEncoder(rows, tokenizer, columns, options)
                if processor is None
                else ImageConversationEncoder(rows, tokenizer, columns, options, processor)
            )
            return chat.noting_unread(rows, columns, encoder.template), encoder
        if processor is not None:
            raise UserError(
                f"{rows.name} has images, which need conversations: give lists of messages in columns "
                f"{prompt_column!r} and {completion_column!r}, or in {MESSAGES!r}"
            )
        if options.assistant_only_loss:
            raise UserError(
                f"assistant_only_loss needs conversations, but {rows.name} has texts: give lists of messages in a "
                f"column {MESSAGES!r}, or use completion_only_loss"
            )
        return chat.noting_unread(rows, (), None), TextEncoder(rows, tokenizer, options)

    def _sequences(self) -> tuple[Sequence[np.ndarray], ...]:
        return (self.tokens,) if self.loss_masks is None else (self.tokens, self.loss_masks)

    def _make_batch(self, rows: np.ndarray, local: np.ndarray | slice) -> DemoBatch:
        width = batches.bucket(max(len(self.tokens[i]) for i in rows), self.buckets)
        rows = rows[local]
        chosen = [self.tokens[i] for i in rows]
        loss_mask = None
        if self.loss_masks is not None:
            loss_mask = batches.pad_right([self.loss_masks[i] for i in rows], width, 0).astype(bool)
        return DemoBatch(
            batches.pad_right(chosen, width, self.pad_id),
            self.prompt_lengths[rows],
            batches.lengths_of(chosen),
            loss_mask,
            images=None if self.images is None else self.images.batch(rows),
        )

    @property
    def fingerprint(self) -> str:
        """The number of rows and a sha256 of their tokens, and of their images."""
        if self.images is None:
            return super().fingerprint
        digest = hashlib.sha256(super().fingerprint.encode())
        self.images.update(digest)
        return f"{len(self)} rows, {digest.hexdigest()[:16]}"


def find_completion_column(rows: Rows, columns: tuple[str, ...], column: str) -> str:
    """The column of completions: 'summary' for OpenAI's posts that have no 'completion'."""
    if column == "completion" and column not in rows.column_names and columns == row_texts.TEMPLATE_COLUMNS:
        column = "summary"
    require_columns(rows, {"completion_column": column})
    return column


def _house_form(rows: Rows, prompt_column: str, completion_column: str) -> Rows:
    """Rows with conversations as lists of messages; ShareGPT's are 'messages' where there is nothing else."""
    pair = prompt_column, completion_column
    has_pair = set(pair) <= set(rows.column_names)
    messages_column = None if has_pair or completion_column != "completion" else MESSAGES
    return conversation_forms.house_form(rows, pair if has_pair else (MESSAGES,), whole=messages_column)


def conversation_columns(rows: Rows, prompt_column: str, completion_column: str) -> tuple[str, ...]:
    """The columns that hold conversations: prompt and completion, or 'messages' where there is no 'completion'; () for
    demonstrations of text."""
    if prompt_column in rows.column_names and completion_column in rows.column_names:
        columns = (prompt_column, completion_column)
    elif completion_column == "completion" and MESSAGES in rows.column_names:
        columns = (MESSAGES,)
    else:
        return ()
    return columns if len(columns) == 1 or chat.holds_conversations(rows, prompt_column) else ()


class _Encoder:
    """What both encoders of demonstrations have."""

    columns: Mapping[str, Kind] = {
        "tokens": "tokens",
        "prompt_length": "int",
        "truncated": "flag",
        "mismatched": "flag",
        "begun": "flag",
    }
    template: chat.ChatTemplate | None = None

    def __init__(self, tokenizer: Tokenizer, options: DemonstrationOptions):
        self.tokenizer, self.completion_only = tokenizer, options.completion_only_loss
        self.max_length, self.query_length = options.max_length, options.query_length
        self.query_overflow = options.query_overflow

    def _notes(self, tokenized: Tokenized) -> list[str]:
        """Remarks for the report."""
        notes = _mismatch_notes(tokenized.count("mismatched"), self.completion_only)
        begun = row_texts.begun_note(tokenized, self.tokenizer)
        return notes if begun is None else [*notes, begun]

    def _images(self, tokenized: Tokenized) -> image_rows.DataImages | None:
        return None

    def data(self, tokenized: Tokenized, length_buckets: Sequence[int] | None) -> DemoData:
        """As `tokenized.Encoder.data`."""
        tokens = tokenized.ragged("tokens")
        buckets, report = row_texts.buckets_and_report(
            tokenized,
            tokens,
            length_buckets=length_buckets,
            limit=f"max_length = {self.max_length} or query_length = {self.query_length} tokens",
            note="; ".join(self._notes(tokenized)),
            template=self.template,
        )
        return DemoData(
            tokens,
            tokenized.numbers("prompt_length"),
            self.tokenizer.pad_id,
            buckets,
            report,
            tokenized.ragged("mask") if "mask" in self.columns else None,
            tokenized.meta.get("fingerprint"),
            images=self._images(tokenized),
        )


class ConversationEncoder(_Encoder):
    """The `tokenized.Encoder` of conversations, as in TRL: prompt and completion are lists of messages {"role",
    "content"}, or 'messages' holds both. They are what the chat template renders, which ends them; no eos is added.

    A prompt (with its generation prompt) of more than `query_length` tokens is dropped, since `query_overflow` has no
    rule for truncating one. A row without a token to train on is dropped too.

    Raises:
      UserError: there is no chat template, or an option of the loss does not apply.
    """

    def __init__(self, rows: Rows, tokenizer: Tokenizer, columns: tuple[str, ...], options: DemonstrationOptions):
        super().__init__(tokenizer, options)
        if self.completion_only and len(columns) == 1:
            raise UserError(
                f"completion_only_loss needs a prompt and a completion, but {rows.name} has whole conversations in "
                f"{MESSAGES!r}: use assistant_only_loss, or split them into columns 'prompt' and 'completion'"
            )
        self.row_columns, self.assistant_only = columns, options.assistant_only_loss
        self.template = chat.ChatTemplate(tokenizer, options.chat_template_kwargs)
        if self.assistant_only:
            self.template.check_marks_assistant()
            self.columns = {**self.columns, "mask": "mask"}

    def identity(self) -> Any:
        """As `tokenized.Encoder.identity`."""
        limits = [self.max_length, self.query_length, self.query_overflow, self.assistant_only, self.completion_only]
        return row_texts.identity(self.tokenizer, self.template, self.row_columns, limits)

    def _ids(self, row: Any) -> tuple[list[int], list[int], np.ndarray | None]:
        """(prompt, all, which are the assistant's)"""
        columns, template, encode = self.row_columns, self.template.for_row(row), self.tokenizer.encode
        prompt: list[int] = []
        if len(columns) == 2:
            messages = chat.text_messages(row[columns[0]])
            prompt = encode(template.render(messages, generation_prompt=True, column=columns[0]))
        messages = chat.text_messages([message for column in columns for message in row[column]])
        if self.assistant_only:
            return prompt, *template.encode_with_assistant_mask(messages, columns[-1])
        return prompt, encode(template.render(messages, generation_prompt=False, column=columns[-1])), None

    def messages_fault(self, row: Any) -> str | None:
        """Why the row holds no conversation, before it is rendered."""
        return chat.messages_fault(row, self.row_columns, "demonstrations")

    def _checked_ids(self, row: Any) -> tuple[Any, str | None]:
        return chat.rendered_or_fault(row, self.messages_fault, self._ids)

    def fault(self, row: Any) -> str | None:
        """As `tokenized.Encoder.fault`."""
        return self._checked_ids(row)[1]

    def encode(self, rows: list[Any]) -> list[Encoded]:
        """As `tokenized.Encoder.encode`."""
        checked = [self._checked_ids(row) for row in rows]
        return [self.token_columns(*ids) if fault is None else fault for ids, fault in checked]

    def token_columns(self, prompt: list[int], ids: list[int], assistant: np.ndarray | None) -> dict[str, Any] | None:
        """The columns of a row's tokens, of which `assistant` are in the loss; None for one that is left out."""
        longest = self.max_length
        if len(prompt) > self.query_length or (len(ids) > longest and self.query_overflow == "drop"):
            return None
        start = max(1, len(prompt) if self.completion_only else 0)
        in_loss = range(start, min(len(ids), longest))
        if assistant is not None:
            in_loss = np.flatnonzero(assistant[start:longest])
        if len(prompt) >= longest or not len(in_loss):  # as TRL, no row without a loss
            return None
        return {
            "tokens": ids[:longest],
            "prompt_length": len(prompt),
            "truncated": len(ids) > longest,
            "mismatched": self.completion_only and ids[: len(prompt)] != prompt,
            "begun": False,
            "mask": None if assistant is None else assistant[:longest],
        }


class ImageConversationEncoder(image_rows.ImageEncoder, ConversationEncoder):
    """The `tokenized.Encoder` of conversations with images. One that is too long is dropped, since its images cannot be
    cut. Image tokens are no labels: there is nothing to learn from them."""

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer,
        columns: tuple[str, ...],
        options: DemonstrationOptions,
        processor: image_rows.ImageProcessor,
    ):
        super().__init__(rows, tokenizer, columns, options)
        self.columns = {**self.columns, "mask": "mask", **image_rows.COUNTS}
        self.query_overflow = "drop"
        self.reader = image_rows.RowReader(columns, processor, image_rows.data_folder(rows), self.messages_fault)

    def _with_images(self, row: Any, read: image_rows.ImageRow) -> tuple[dict[str, Any] | None, int]:
        processor, columns, template = self.reader.processor, self.row_columns, self.template.for_row(row)
        prompt: list[int] = []
        if len(columns) == 2:
            messages = read.messages[columns[0]]
            text = template.render(messages, generation_prompt=True, column=columns[0])
            blocks = [block for message in messages for block in message.get("content") or ()]
            count = sum(block["type"] == "image" for block in blocks)
            prompt = processor.encode(text, read.sources[:count], self.tokenizer)[0]
        messages = [message for column in columns for message in read.messages[column]]
        text = template.render(messages, generation_prompt=False, column=columns[-1])
        ids, tiles = processor.encode(text, read.sources, self.tokenizer)
        return self.token_columns(prompt, ids, np.asarray(ids) != processor.image_token_id), tiles

    def _notes(self, tokenized: Tokenized) -> list[str]:
        return [image_rows.image_note(tokenized), *super()._notes(tokenized)]

    def _images(self, tokenized: Tokenized) -> image_rows.DataImages:
        return self.reader.images(tokenized, None)


class TextEncoder(_Encoder):
    """The `tokenized.Encoder` of texts: ids(prompt + completion) + eos.

    The prompt is as many tokens as it has alone, as in TRL; rows that do not begin with those are counted. A sequence
    longer than `max_length` is truncated at the end, which removes its eos (query_overflow 'truncate'), or dropped
    ('drop'). A row whose prompt alone fills `max_length` is dropped.
    """

    def __init__(self, rows: Rows, tokenizer: Tokenizer, options: DemonstrationOptions):
        super().__init__(tokenizer, options)
        self.prompt_columns = row_texts.prompt_columns(rows, options.prompt_column)
        self.completion_column = find_completion_column(rows, self.prompt_columns, options.completion_column)
        # A summary begins without the space that follows "TL;DR:".
        own_name = options.completion_column == "summary"
        self.space = " " if self.completion_column == "summary" and not own_name else ""

    def identity(self) -> Any:
        """As `tokenized.Encoder.identity`."""
        limits = [self.max_length, self.query_length, self.query_overflow, self.space, self.completion_only]
        return row_texts.identity(self.tokenizer, None, self.prompt_columns, self.completion_column, limits)

    def fault(self, row: Any) -> str | None:
        """As `tokenized.Encoder.fault`."""
        return row_texts.text_fault(row, (*self.prompt_columns, self.completion_column))

    def encode(self, rows: list[Any]) -> list[Encoded]:
        """As `tokenized.Encoder.encode`."""
        faults = [self.fault(row) for row in rows]
        good = [row for row, fault in zip(rows, faults, strict=True) if fault is None]
        texts = [row_texts.prompt_text(row, self.prompt_columns) for row in good]
        prompts = row_texts.fit_prompts(texts, self.tokenizer, self.query_length, self.query_overflow)
        completions = [self.space + row[self.completion_column] for row in good]
        encoded = iter(map(self._columns, prompts, row_texts.join_completions(prompts, completions, self.tokenizer)))
        return [next(encoded) if fault is None else fault for fault in faults]

    def _columns(self, prompt: row_texts.FittedPrompt | None, sequence: row_texts.FittedPrompt | None) -> Encoded:
        """The columns of a row; None for one that is left out."""
        if prompt is None or len(prompt.ids) >= self.max_length:
            return None
        too_long, length = len(sequence.ids) > self.max_length, len(prompt.ids)
        if too_long and self.query_overflow == "drop":
            return None
        if self.completion_only and length >= len(sequence.ids):  # as TRL, no row without a loss
            return None
        return {
            "tokens": sequence.ids[: self.max_length],
            "prompt_length": length,
            "truncated": too_long or sequence.truncated,
            "mismatched": sequence.ids[:length] != prompt.ids,
            "begun": sequence.begun,
        }


def _mismatch_notes(rows: int, completion_only: bool) -> list[str]:
    """A remark about rows that do not begin with the tokens of their prompt, if there are any."""
    consequence = ", so the loss may begin at a wrong one" if completion_only else ""
    which = "1 row does" if rows == 1 else f"{rows} rows do"
    return [f"{which} not begin with the tokens of the prompt{consequence}"] if rows else []


def load_normalization_data(config: PairOptions, tokenizer: Tokenizer) -> DemoData | None:
    """The demonstrations on which a reward model's mean score is set to 0 (N+ detail 15); None if not configured."""
    if config.normalize_dataset_name is None:
        return None
    rows = load_rows(
        config.normalize_dataset_name,
        split=config.dataset_train_split,
        kind=DemoData.source,
        max_samples=config.normalize_samples,
        text_columns=text_columns_of(config),
    )
    return from_rows(DemoData, rows, config, tokenizer)
