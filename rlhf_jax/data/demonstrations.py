"""Demonstrations for supervised fine-tuning: prompt + completion + eos as one right-padded sequence, or a conversation
as the chat template renders it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import flax
import numpy as np

from rlhf_jax.data import batches, chat, row_texts
from rlhf_jax.data import images as image_rows
from rlhf_jax.data.batches import DataReport
from rlhf_jax.data.loading import Rows, eval_sets, load_rows, load_split, require_columns
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError
from rlhf_jax.types import Array, Images

MESSAGES = "messages"
"""The column of whole conversations, as in TRL."""


@flax.struct.dataclass
class DemoBatch:
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

    tokens: list[np.ndarray]
    """int32 each: prompt + completion + eos."""
    prompt_lengths: np.ndarray
    """[N] int32."""
    pad_id: int
    buckets: tuple[int, ...]
    report: DataReport
    loss_masks: list[np.ndarray] | None = None
    """bool each, of the tokens: the assistant's, or all but those of images; None: all."""
    images: image_rows.DataImages | None = None
    """None: the demonstrations are text."""

    def _sequences(self) -> tuple[list[np.ndarray], ...]:
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


def join_with_eos(prompt: list[int], completion: list[int], eos_id: int) -> list[int]:
    """prompt + completion + eos; no second eos where the completion ends with one."""
    return prompt + completion + ([] if completion and completion[-1] == eos_id else [eos_id])


def completion_column_of(rows: Rows, columns: tuple[str, ...], column: str) -> str:
    """The column of completions: 'summary' for OpenAI's posts that have no 'completion'."""
    if column == "completion" and column not in rows.column_names and columns == row_texts.TEMPLATE_COLUMNS:
        column = "summary"
    require_columns(rows, {"completion_column": column})
    return column


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


def _conversations(
    rows: Rows,
    tokenizer: Tokenizer,
    columns: tuple[str, ...],
    *,
    max_length: int,
    query_length: int,
    query_overflow: str,
    on_bad_row: str,
    length_buckets: tuple[int, ...] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    assistant_only_loss: bool,
    completion_only_loss: bool,
    processor: image_rows.ImageProcessor | None,
) -> DemoData:
    """`make_demonstrations` of conversations."""
    has_prompt = len(columns) == 2
    if completion_only_loss and not has_prompt:
        raise UserError(
            f"completion_only_loss needs a prompt and a completion, but {rows.name} has whole conversations in "
            f"{MESSAGES!r}: use assistant_only_loss, or split them into columns 'prompt' and 'completion'"
        )
    template = chat.ChatTemplate(tokenizer, chat_template_kwargs)
    if assistant_only_loss:
        template.check_marks_assistant()
    if processor is not None:
        rows = image_rows.encoded(rows)

    def encode(row: Any) -> tuple[list[int], list[int], np.ndarray | None]:
        prompt: list[int] = []
        if has_prompt:
            prompt = tokenizer.encode(template.render(row[columns[0]], generation_prompt=True, column=columns[0]))
        messages = [message for column in columns for message in row[column]]
        if assistant_only_loss:
            return prompt, *template.encode_with_assistant_mask(messages, columns[-1])
        return prompt, tokenizer.encode(template.render(messages, generation_prompt=False, column=columns[-1])), None

    def fault(row: Any) -> str | None:
        return chat.messages_fault(row, columns, "demonstrations")

    found: list[image_rows.DemoImages | None] = []
    if processor is None:
        split, encoded = chat.render_rows(rows, fault, encode, on_bad_row)
        found = [None] * len(encoded)
    else:
        folder = image_rows.folder_of(rows)
        read = functools.partial(image_rows.read_demo, template, processor, tokenizer, folder, columns, fault)
        split, found = image_rows.split_rows(rows, read, on_bad_row)
        encoded = [(one.prompt, one.ids, one.is_text) for one in found]
    tokens, prompt_lengths, loss_masks, truncated, mismatched, kept_images = [], [], [], 0, 0, []
    drops = query_overflow == "drop" or processor is not None  # cut image tokens would leave their images
    for (prompt, ids, assistant), images in zip(encoded, found, strict=True):
        if len(prompt) > query_length or (len(ids) > max_length and drops):
            continue
        start = max(1, len(prompt) if completion_only_loss else 0)
        in_loss = range(start, min(len(ids), max_length))
        if assistant is not None:
            in_loss = np.flatnonzero(assistant[start:max_length])
        if len(prompt) >= max_length or not len(in_loss):  # as TRL, no row without a loss
            continue
        if assistant is not None:
            loss_masks.append(assistant[:max_length])
        truncated += len(ids) > max_length
        mismatched += completion_only_loss and ids[: len(prompt)] != prompt
        tokens.append(np.asarray(ids[:max_length], np.int32))
        prompt_lengths.append(len(prompt))
        kept_images.append(images)
    row_texts.check_any_kept(rows, len(tokens), f"max_length = {max_length} or query_length = {query_length} tokens")
    note = f"{mismatched} rows do not begin with the tokens of their prompt, so their loss may begin at a wrong one"
    buckets, report = row_texts.buckets_and_report(
        rows,
        split,
        tokens,
        length_buckets=length_buckets,
        truncated=truncated,
        note=note if mismatched else None,
        template_date=template.date,
    )
    images = None
    if processor is not None:
        tiles = max(one.tiles for one in kept_images)
        images = image_rows.DataImages(processor, [one.row.sources for one in kept_images], tiles, None)
    lengths = np.asarray(prompt_lengths, np.int32)
    return DemoData(tokens, lengths, tokenizer.pad_id, buckets, report, loss_masks or None, images)


def make_demonstrations(
    rows: Rows,
    tokenizer: Tokenizer,
    *,
    prompt_column: str = "prompt",
    completion_column: str = "completion",
    max_length: int = 562,
    query_length: int = 512,
    query_overflow: str = "truncate",
    on_bad_row: str = "raise",
    length_buckets: tuple[int, ...] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    assistant_only_loss: bool = False,
    completion_only_loss: bool = False,
    processor: image_rows.ImageProcessor | None = None,
) -> DemoData:
    """Tokenizes demonstrations as ids(prompt) + ids(completion) + eos. The arguments are options of the config;
    `processor`: of the model, where rows have images.

    A sequence longer than `max_length` is truncated at the end, which removes its eos (query_overflow='truncate'), or
    dropped ('drop'). A row whose prompt alone fills `max_length` is dropped.

    Conversations, as in TRL: prompt and completion are lists of messages {"role", "content"}, or 'messages' holds both.
    They are what the chat template renders, which ends them; no eos is added. A prompt (with its generation prompt) of
    more than `query_length` tokens is dropped, since `query_overflow` has no rule for truncating one. A row of
    which no token is left to train on is dropped.

    Raises:
      UserError: a column is missing, a row is bad, all rows are too long, the longest row fits no bucket, there is no
        chat template for conversations, or an option of the loss does not apply to the data.
    """
    if conversations := conversation_columns(rows, prompt_column, completion_column):
        return _conversations(
            rows,
            tokenizer,
            conversations,
            max_length=max_length,
            query_length=query_length,
            query_overflow=query_overflow,
            on_bad_row=on_bad_row,
            length_buckets=length_buckets,
            chat_template_kwargs=chat_template_kwargs,
            assistant_only_loss=assistant_only_loss,
            completion_only_loss=completion_only_loss,
            processor=processor,
        )
    if processor is not None:
        raise UserError(
            f"{rows.name} has images, which need conversations: give lists of messages in columns {prompt_column!r} "
            f"and {completion_column!r}, or in {MESSAGES!r}"
        )
    if assistant_only_loss:
        raise UserError(
            f"assistant_only_loss needs conversations, but {rows.name} has texts: give lists of messages in a column "
            f"{MESSAGES!r}, or use completion_only_loss"
        )
    columns = row_texts.prompt_columns(rows, prompt_column)
    completion_column_found = completion_column_of(rows, columns, completion_column)
    # A summary begins without the space that follows "TL;DR:".
    space = " " if completion_column_found == "summary" and completion_column != "summary" else ""
    text_columns = (*columns, completion_column_found)
    split = row_texts.split_rows(rows, lambda row: row_texts.text_fault(row, text_columns), on_bad_row)
    texts = [row_texts.prompt_text(row, columns) for row in split.good]
    prompts, _ = row_texts.fit_prompts(texts, tokenizer, query_length, query_overflow)
    completions = tokenizer.encode_batch([space + row[completion_column_found] for row in split.good])
    tokens, prompt_lengths, truncated = [], [], 0
    for full_prompt, prompt, completion in zip(tokenizer.encode_batch(texts), prompts, completions, strict=True):
        if prompt is None or len(prompt) >= max_length:
            continue
        sequence = join_with_eos(prompt, completion, tokenizer.eos_id)
        if len(sequence) > max_length and query_overflow == "drop":
            continue
        truncated += len(sequence) > max_length or len(prompt) < len(full_prompt)
        tokens.append(np.asarray(sequence[:max_length], np.int32))
        prompt_lengths.append(len(prompt))
    row_texts.check_any_kept(rows, len(tokens), f"max_length = {max_length} or query_length = {query_length} tokens")
    buckets, report = row_texts.buckets_and_report(
        rows, split, tokens, length_buckets=length_buckets, truncated=truncated
    )
    return DemoData(tokens, np.asarray(prompt_lengths, np.int32), tokenizer.pad_id, buckets, report)


def demonstrations_from_rows(
    rows: Rows, config: Any, tokenizer: Tokenizer, processor: image_rows.ImageProcessor | None = None
) -> DemoData:
    """`make_demonstrations` with the data options of a config."""
    return make_demonstrations(
        rows,
        tokenizer,
        prompt_column=config.prompt_column,
        completion_column=getattr(config, "completion_column", "completion"),
        max_length=config.max_length,
        query_length=config.query_length,
        query_overflow=config.query_overflow,
        on_bad_row=config.on_bad_row,
        length_buckets=config.length_buckets,
        chat_template_kwargs=config.chat_template_kwargs,
        assistant_only_loss=getattr(config, "assistant_only_loss", False),
        completion_only_loss=getattr(config, "completion_only_loss", False),
        processor=processor,
    )


def load_demonstrations(
    config: Any,
    tokenizer: Tokenizer,
    dataset: Any = None,
    evaluation: bool = False,
    processor: image_rows.ImageProcessor | None = None,
) -> DemoData | None:
    """The demonstrations of a config, or of `dataset`, an object in place of the configured name.

    Returns:
      The data; None where the config has no evaluation data.
    """
    rows = load_split(config, "eval" if evaluation else "train", "demonstrations", dataset)
    return None if rows is None else demonstrations_from_rows(rows, config, tokenizer, processor)


def load_eval_demonstrations(
    config: Any, tokenizer: Tokenizer, dataset: Any = None, processor: image_rows.ImageProcessor | None = None
) -> dict[str, DemoData]:
    """The evaluation sets of a config, by name; see `loading.eval_sets`."""
    sets = eval_sets(config, "demonstrations", dataset)
    return {name: demonstrations_from_rows(rows, config, tokenizer, processor) for name, rows in sets.items()}


def load_normalization_data(config: Any, tokenizer: Tokenizer) -> DemoData | None:
    """The demonstrations on which a reward model's mean score is set to 0 (N+ detail 15); None if not configured."""
    if config.normalize_dataset_name is None:
        return None
    rows = load_rows(
        config.normalize_dataset_name,
        split=config.dataset_train_split,
        kind="demonstrations",
        max_samples=config.normalize_samples,
    )
    return demonstrations_from_rows(rows, config, tokenizer)
