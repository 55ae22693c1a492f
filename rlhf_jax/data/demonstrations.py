"""Demonstrations for supervised fine-tuning: prompt + completion + eos as one right-padded sequence, or a conversation
as the chat template renders it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import flax
import numpy as np

from rlhf_jax.data import batches, chat, conversation_forms, row_texts
from rlhf_jax.data import images as image_rows
from rlhf_jax.data.batches import DataReport
from rlhf_jax.data.loading import Rows, eval_sets, load_rows, require_columns, text_columns_of
from rlhf_jax.data.mixture import load_training
from rlhf_jax.data.options import DemonstrationOptions, PairOptions
from rlhf_jax.data.tokenized import Encoded, Tokenized, tokenize
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


def completion_column_of(rows: Rows, columns: tuple[str, ...], column: str) -> str:
    """The column of completions: 'summary' for OpenAI's posts that have no 'completion'."""
    if column == "completion" and column not in rows.column_names and columns == row_texts.TEMPLATE_COLUMNS:
        column = "summary"
    require_columns(rows, {"completion_column": column})
    return column


def _house_form(rows: Rows, prompt_column: str, completion_column: str) -> Rows:
    """Rows with conversations as lists of messages; ShareGPT's are 'messages' where there is nothing else."""
    pair = prompt_column, completion_column
    has_pair = set(pair) <= set(rows.column_names)
    whole = None if has_pair or completion_column != "completion" else MESSAGES
    return conversation_forms.house_form(rows, pair if has_pair else (MESSAGES,), whole=whole)


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


class ConversationEncoder:
    """The `tokenized.Encoder` of conversations; the arguments are those of `make_demonstrations`.

    Raises:
      UserError: there is no chat template, or an option of the loss does not apply.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer,
        columns: tuple[str, ...],
        *,
        max_length: int,
        query_length: int,
        query_overflow: str,
        chat_template_kwargs: Mapping[str, Any] | None,
        assistant_only_loss: bool,
        completion_only_loss: bool,
    ):
        if completion_only_loss and len(columns) == 1:
            raise UserError(
                f"completion_only_loss needs a prompt and a completion, but {rows.name} has whole conversations in "
                f"{MESSAGES!r}: use assistant_only_loss, or split them into columns 'prompt' and 'completion'"
            )
        self.tokenizer, self.row_columns = tokenizer, columns
        self.template = chat.ChatTemplate(tokenizer, chat_template_kwargs)
        if assistant_only_loss:
            self.template.check_marks_assistant()
        self.max_length, self.query_length, self.query_overflow = max_length, query_length, query_overflow
        self.assistant_only, self.completion_only = assistant_only_loss, completion_only_loss
        masks = {"mask": "mask"} if assistant_only_loss else {}
        self.columns = {"tokens": "tokens", "prompt_length": "int", "truncated": "flag", "mismatched": "flag", **masks}

    def identity(self) -> Any:
        """As `tokenized.Encoder.identity`."""
        limits = [self.max_length, self.query_length, self.query_overflow, self.assistant_only, self.completion_only]
        return row_texts.identity(self.tokenizer, self.template, self.row_columns, limits)

    def _ids(self, row: Any) -> tuple[list[int], list[int], np.ndarray | None]:
        """(prompt, all, which are the assistant's)"""
        columns, template, encode = self.row_columns, self.template.of_row(row), self.tokenizer.encode
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
        return [self.columns_of(*ids) if fault is None else fault for ids, fault in checked]

    def columns_of(self, prompt: list[int], ids: list[int], assistant: np.ndarray | None) -> Encoded:
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
            "mask": None if assistant is None else assistant[:longest],
        }


class TextEncoder:
    """The `tokenized.Encoder` of texts; the arguments are those of `make_demonstrations`."""

    columns = {"tokens": "tokens", "prompt_length": "int", "truncated": "flag", "mismatched": "flag", "begun": "flag"}

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer,
        prompt_column: str,
        completion_column: str,
        *,
        max_length: int,
        query_length: int,
        query_overflow: str,
        completion_only_loss: bool,
    ):
        self.tokenizer, self.completion_only = tokenizer, completion_only_loss
        self.prompt_columns = row_texts.prompt_columns(rows, prompt_column)
        self.completion_column = completion_column_of(rows, self.prompt_columns, completion_column)
        # A summary begins without the space that follows "TL;DR:".
        own_name = completion_column == "summary"
        self.space = " " if self.completion_column == "summary" and not own_name else ""
        self.max_length, self.query_length, self.query_overflow = max_length, query_length, query_overflow

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

    def _columns(self, prompt: row_texts.FittedPrompt | None, whole: row_texts.FittedPrompt | None) -> Encoded:
        """The columns of a row; None for one that is left out."""
        if prompt is None or len(prompt.ids) >= self.max_length:
            return None
        too_long, length = len(whole.ids) > self.max_length, len(prompt.ids)
        if too_long and self.query_overflow == "drop":
            return None
        if self.completion_only and length >= len(whole.ids):  # as TRL, no row without a loss
            return None
        return {
            "tokens": whole.ids[: self.max_length],
            "prompt_length": length,
            "truncated": too_long or whole.truncated,
            "mismatched": whole.ids[:length] != prompt.ids,
            "begun": whole.begun,
        }


def _mismatch_notes(rows: int, completion_only: bool) -> list[str]:
    """A remark about rows that do not begin with the tokens of their prompt, if there are any."""
    consequence = ", so the loss may begin at a wrong one" if completion_only else ""
    which = "1 row does" if rows == 1 else f"{rows} rows do"
    return [f"{which} not begin with the tokens of the prompt{consequence}"] if rows else []


def _data_of(
    made: Tokenized, encoder: TextEncoder | ConversationEncoder, length_buckets: Sequence[int] | None
) -> DemoData:
    """Demonstrations of their tokens."""
    limits = f"max_length = {encoder.max_length} or query_length = {encoder.query_length} tokens"
    row_texts.check_any_kept(made.rows, len(made.kept), limits)
    tokens = made.ragged("tokens")
    notes = _mismatch_notes(made.count("mismatched"), encoder.completion_only)
    if isinstance(encoder, TextEncoder) and (begun := row_texts.begun_note(made, encoder.tokenizer)) is not None:
        notes.append(begun)
    buckets, report = row_texts.buckets_and_report(
        made,
        tokens,
        length_buckets=length_buckets,
        truncated=made.count("truncated"),
        note="; ".join(notes) or None,
        template_date=encoder.template.date if isinstance(encoder, ConversationEncoder) else None,
    )
    masks = made.ragged("mask") if "mask" in encoder.columns else None
    fingerprint = made.meta.get("fingerprint")
    lengths, pad_id = made.numbers("prompt_length"), encoder.tokenizer.pad_id
    return DemoData(tokens, lengths, pad_id, buckets, report, masks, fingerprint)


def _image_demonstrations(
    rows: Rows,
    encoder: ConversationEncoder,
    processor: image_rows.ImageProcessor,
    on_bad_row: str,
    length_buckets: Sequence[int] | None,
) -> DemoData:
    """`make_demonstrations` of conversations with images, which are read and tokenized at each start. One that is too
    long is dropped, since its images cannot be cut."""
    rows, folder, tokenizer = image_rows.encoded(rows), image_rows.folder_of(rows), encoder.tokenizer
    read = functools.partial(
        image_rows.read_demo,
        encoder.template,
        processor,
        tokenizer,
        folder,
        encoder.row_columns,
        encoder.messages_fault,
    )
    split, found = image_rows.split_rows(rows, read, on_bad_row)
    made = [(one, encoder.columns_of(one.prompt, one.ids, one.is_text)) for one in found]
    kept = [(one, columns) for one, columns in made if columns is not None]
    limits = f"max_length = {encoder.max_length} or query_length = {encoder.query_length} tokens"
    row_texts.check_any_kept(rows, len(kept), limits)
    tokens = [np.asarray(columns["tokens"], np.int32) for _, columns in kept]
    mismatched = sum(columns["mismatched"] for _, columns in kept)
    buckets, report = row_texts.buckets_and_report(
        split,
        tokens,
        length_buckets=length_buckets,
        truncated=0,
        note="; ".join([image_rows.note_of([one.row for one, _ in kept]), *_mismatch_notes(mismatched, True)]),
        template_date=encoder.template.date,
    )
    tiles = max(one.tiles for one, _ in kept)
    return DemoData(
        tokens,
        np.asarray([columns["prompt_length"] for _, columns in kept], np.int32),
        tokenizer.pad_id,
        buckets,
        report,
        [columns["mask"] for _, columns in kept],
        images=image_rows.DataImages(processor, [one.row.sources for one, _ in kept], tiles, None),
    )


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
    num_proc: int | None = None,
    processor: image_rows.ImageProcessor | None = None,
) -> DemoData:
    """Tokenizes demonstrations as ids(prompt + completion) + eos. The arguments are options of the config;
    `processor`: of the model, where rows have images.

    The prompt is as many tokens as it has alone, as in TRL; rows that do not begin with those are counted.

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
    query_overflow = query_overflow if processor is None else "drop"  # cut image tokens would leave their images
    limits = {"max_length": max_length, "query_length": query_length, "query_overflow": query_overflow}
    rows = _house_form(rows if processor is None else image_rows.encoded(rows), prompt_column, completion_column)
    if conversations := conversation_columns(rows, prompt_column, completion_column):
        encoder = ConversationEncoder(
            rows,
            tokenizer,
            conversations,
            **limits,
            chat_template_kwargs=chat_template_kwargs,
            assistant_only_loss=assistant_only_loss,
            completion_only_loss=completion_only_loss,
        )
        rows = chat.noting_unread(rows, conversations, encoder.template)
        if processor is not None:
            return _image_demonstrations(rows, encoder, processor, on_bad_row, length_buckets)
    elif processor is not None:
        raise UserError(
            f"{rows.name} has images, which need conversations: give lists of messages in columns {prompt_column!r} "
            f"and {completion_column!r}, or in {MESSAGES!r}"
        )
    elif assistant_only_loss:
        raise UserError(
            f"assistant_only_loss needs conversations, but {rows.name} has texts: give lists of messages in a column "
            f"{MESSAGES!r}, or use completion_only_loss"
        )
    else:
        columns = prompt_column, completion_column
        encoder = TextEncoder(rows, tokenizer, *columns, **limits, completion_only_loss=completion_only_loss)
        rows = chat.noting_unread(rows, (), None)
    made = tokenize(
        rows,
        encoder,
        on_bad_row=on_bad_row,
        num_proc=num_proc,
        build=lambda made: _data_of(made, encoder, None),
        describe=lambda data: {"fingerprint": data.fingerprint},
    )
    return _data_of(made, encoder, length_buckets)


def demonstrations_from_rows(
    rows: Rows, config: DemonstrationOptions, tokenizer: Tokenizer, processor: image_rows.ImageProcessor | None = None
) -> DemoData:
    """`make_demonstrations` with the data options of a config."""
    return make_demonstrations(
        rows,
        tokenizer,
        prompt_column=config.prompt_column,
        completion_column=config.completion_column,
        max_length=config.max_length,
        query_length=config.query_length,
        query_overflow=config.query_overflow,
        on_bad_row=config.on_bad_row,
        length_buckets=config.length_buckets,
        chat_template_kwargs=config.chat_template_kwargs,
        assistant_only_loss=config.assistant_only_loss,
        completion_only_loss=config.completion_only_loss,
        num_proc=config.dataset_num_proc,
        processor=processor,
    )


def load_demonstrations(
    config: DemonstrationOptions,
    tokenizer: Tokenizer,
    dataset: Any = None,
    processor: image_rows.ImageProcessor | None = None,
) -> DemoData:
    """The training demonstrations of a config, or of `dataset`: an object in place of the configured names, or their
    `mixture.TrainingRows`.
    """
    lists = ("tokens", "prompt_lengths", "loss_masks")
    image_rows.check_one_dataset(config, processor)
    return load_training(
        config,
        "demonstrations",
        dataset,
        lambda rows, own: demonstrations_from_rows(rows, own, tokenizer, processor),
        *lists,
    )


def load_eval_demonstrations(
    config: DemonstrationOptions,
    tokenizer: Tokenizer,
    dataset: Any = None,
    processor: image_rows.ImageProcessor | None = None,
) -> dict[str, DemoData]:
    """The evaluation sets of a config, by name; see `loading.eval_sets`."""
    sets = eval_sets(config, "demonstrations", dataset)
    return {name: demonstrations_from_rows(rows, config, tokenizer, processor) for name, rows in sets.items()}


def load_normalization_data(config: PairOptions, tokenizer: Tokenizer) -> DemoData | None:
    """The demonstrations on which a reward model's mean score is set to 0 (N+ detail 15); None if not configured."""
    if config.normalize_dataset_name is None:
        return None
    rows = load_rows(
        config.normalize_dataset_name,
        split=config.dataset_train_split,
        kind="demonstrations",
        max_samples=config.normalize_samples,
        text_columns=text_columns_of(config),
    )
    return demonstrations_from_rows(rows, config, tokenizer)
