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
from rlhf_jax.data.loading import Rows, eval_sets
from rlhf_jax.data.mixture import load_training
from rlhf_jax.data.options import PromptOptions
from rlhf_jax.data.ragged import Lazy
from rlhf_jax.data.tokenized import Encoded, Tokenized, tokenize
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.types import PromptBatch

NO_PROMPT = [{"role": "user", "content": "\u200b"}]
"""Stands for the prompt of a row that has none, until its environment is reset. Its content is not empty, as that of a
prompt must not be."""


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

    def _sequences(self) -> tuple[Sequence[np.ndarray], ...]:
        return (self.tokens,)

    def _make_batch(self, rows: np.ndarray, local: np.ndarray | slice) -> PromptBatch:
        """tokens [H, C] int32, lengths [H] int32, rows [B] int32 of the full batch. C is the same for all batches, so
        that each program compiles once."""
        chosen = [self.tokens[i] for i in rows[local]]
        width = batches.bucket(self.report.longest, self.buckets)
        images = None if self.images is None else self.images.batch(rows[local])
        tokens = batches.pad_left(chosen, width, self.pad_id)
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
        """What is kept beside cached tokens, by one reading of all rows."""
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

    def some_raw(self, count: int = 100) -> list[dict[str, Any]]:
        """The other columns of at most `count` rows, from all parts of the data."""
        return [self.raw[i] for i in np.unique(np.linspace(0, len(self) - 1, count, dtype=np.int64)).tolist()]

    @functools.cached_property
    def column_names(self) -> tuple[str, ...]:
        """The names of the other columns, in order of first appearance."""
        if self.known_columns is not None:
            return self.known_columns
        return tuple(dict.fromkeys(name for row in self.raw for name in row))


class PromptEncoder:
    """The `tokenized.Encoder` of prompts; the arguments are those of `make_prompts`."""

    columns = {"tokens": "tokens", "text": "text", "truncated": "flag", "begun": "flag"}

    def __init__(
        self,
        tokenizer: Tokenizer,
        columns: tuple[str, ...],
        template: chat.ChatTemplate | None,
        query_length: int,
        query_overflow: str,
    ):
        self.tokenizer, self.prompt_columns, self.template = tokenizer, columns, template
        self.limits = query_length, query_overflow if template is None else "drop"

    def identity(self) -> Any:
        """As `tokenized.Encoder.identity`."""
        return row_texts.identity(self.tokenizer, self.template, self.prompt_columns, self.limits)

    def _text(self, row: Any) -> tuple[str | None, str | None]:
        """(the prompt, why the row is bad)"""
        columns = self.prompt_columns
        if (template := self.template) is not None:
            return chat.rendered_or_fault(
                row,
                lambda row: chat.conversation_fault(row, columns[0]),
                lambda row: template.of_row(row).render(
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
        fitted = row_texts.fit_prompts(good, self.tokenizer, *self.limits, rendered=rendered)
        encoded = iter(zip(good, fitted, strict=True))
        start = len(self.tokenizer.start_ids())

        def one() -> Encoded:
            text, prompt = next(encoded)
            if prompt is None:
                return None
            known = text if rendered else None
            if prompt.truncated:
                known = self.tokenizer.decode(prompt.ids[start:]) if prompt.text is None else prompt.text
            return {"tokens": prompt.ids, "text": known, "truncated": prompt.truncated, "begun": prompt.begun}

        return [fault if fault is not None else one() for _, fault in texts]


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
    num_proc: int | None = None,
    processor: image_rows.ImageProcessor | None = None,
    environments: bool = False,
) -> PromptData:
    """Tokenizes prompts. The arguments are options of the config; `processor`: of the model, where rows have images;
    `environments`: whether rows may have no prompt, since environments begin it.

    A prompt that is a list of messages {"role", "content"} is rendered by the tokenizer's chat template with its
    generation prompt. The prompts of a data set are all texts or all conversations; a row of the other kind is bad. A
    conversation that is too long is always dropped, since `query_overflow` has no rule for truncating one.

    Raises:
      UserError: a column is missing, a row is bad, all rows are too long, the longest row fits no bucket, or prompts
        are conversations and there is no chat template.
    """
    is_post = set(row_texts.TEMPLATE_COLUMNS) <= set(rows.column_names)
    whole = prompt_column if prompt_column == "prompt" and not is_post else None
    if environments and whole is not None and whole not in rows.column_names:
        rows = rows.mapped(_without_prompt, [whole], "no prompt")
    rows = rows if processor is None else image_rows.encoded(rows)
    rows = conversation_forms.house_form(rows, (prompt_column,), whole=whole, answer="completion")
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
    template = chat.ChatTemplate(tokenizer, chat_template_kwargs) if conversational else None
    rows = chat.noting_unread(rows, columns, template)
    encoder = PromptEncoder(tokenizer, columns, template, query_length, query_overflow)

    def build(made: Tokenized, buckets: Sequence[int] | None = None) -> PromptData:
        return _prompts_of(made, encoder, query_overflow, shuffle, buckets)

    made = tokenize(
        rows,
        encoder,
        on_bad_row=on_bad_row,
        num_proc=num_proc,
        build=build,
        describe=PromptData.describe,
    )
    return build(made, length_buckets)


def _without_prompt(row: Any) -> Any:
    return {**row, "prompt": NO_PROMPT} if isinstance(row, Mapping) else row


def _prompts_of(
    made: Tokenized, encoder: PromptEncoder, query_overflow: str, shuffle: bool, length_buckets: Sequence[int] | None
) -> PromptData:
    """Prompts of their tokens; texts and columns are read when they are needed."""
    columns, template, table = encoder.prompt_columns, encoder.template, made.rows.table
    count = len(made.kept)
    row_texts.check_any_kept(made.rows, count, f"query_length = {encoder.limits[0]} tokens")
    tokens = made.ragged("tokens")
    dropped = len(made.table) - made.bad - count
    note = row_texts.begun_note(made, encoder.tokenizer)
    if template is not None and dropped and query_overflow == "truncate":
        note = "conversations are dropped, not truncated"
    buckets, report = row_texts.buckets_and_report(
        made,
        tokens,
        length_buckets=length_buckets,
        truncated=made.count("truncated"),
        note=note,
        template_date=None if template is None else template.date,
    )

    def row(index: int) -> dict[str, Any]:
        return table[int(made.kept[index])]

    def text(index: int) -> str:
        known = made.text(index)
        return row_texts.prompt_text(row(index), columns) if known is None else known

    def raw(index: int) -> dict[str, Any]:
        own = row(index)
        return {name: own[name] for name in own if name not in columns}

    def conversation(index: int) -> chat.Conversation:
        return [dict(message) for message in row(index)[columns[0]]]

    return PromptData(
        tokens,
        Lazy(count, text),
        Lazy(count, raw),
        encoder.tokenizer.pad_id,
        buckets,
        report,
        None if template is None else Lazy(count, conversation),
        shuffle,
        made.meta.get("fingerprint"),
        tuple(made.meta["columns"]) if "columns" in made.meta else None,
    )


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
    """`make_prompts` of conversations with images, which are read and tokenized at each start. One that is too long is
    dropped, since its images cannot be cut."""
    template, folder = chat.ChatTemplate(tokenizer, chat_template_kwargs), image_rows.folder_of(rows)
    rows = chat.noting_unread(rows, (column,), template)

    def encode(row: Any) -> tuple[image_rows.ImageRow, str, list[int], int]:
        read = image_rows.read_row(
            row, (column,), processor, folder, lambda plain: chat.conversation_fault(plain, column)
        )
        text = template.of_row(row).render(read.messages[column], generation_prompt=True, column=column)
        return read, text, *processor.encode(text, read.sources, tokenizer)

    split, encoded = image_rows.split_rows(rows, encode, on_bad_row)
    kept = [i for i, (_, _, ids, _) in enumerate(encoded) if len(ids) <= query_length]
    row_texts.check_any_kept(rows, len(kept), f"query_length = {query_length} tokens, those of images included")
    tokens = [np.asarray(encoded[i][2], np.int32) for i in kept]
    left_out = {column, *image_rows.COLUMNS}
    raw = [{name: split.good[i][name] for name in split.good[i] if name not in left_out} for i in kept]
    buckets, report = row_texts.buckets_and_report(
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
    return PromptData(tokens, texts, raw, tokenizer.pad_id, buckets, report, conversations, shuffle, images=found)


def prompts_from_rows(
    rows: Rows, config: PromptOptions, tokenizer: Tokenizer, processor: image_rows.ImageProcessor | None = None
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
        chat_template_kwargs=config.chat_template_kwargs,
        shuffle=config.shuffle_dataset,
        num_proc=config.dataset_num_proc,
        processor=processor,
        environments=bool(config.environment_factory),
    )


def load_prompts(
    config: PromptOptions,
    tokenizer: Tokenizer,
    dataset: Any = None,
    processor: image_rows.ImageProcessor | None = None,
) -> PromptData:
    """The training prompts of a config, or of `dataset`: an object in place of the configured names, or their
    `mixture.TrainingRows`.

    Synthetic prompts keep their demonstrations as column 'completion'.
    """
    lists = ("tokens", "prompts", "raw", "conversations")
    image_rows.check_one_dataset(config, processor)
    return load_training(
        config, "demonstrations", dataset, lambda rows, own: prompts_from_rows(rows, own, tokenizer, processor), *lists
    )


def load_eval_prompts(
    config: PromptOptions, tokenizer: Tokenizer, dataset: Any = None, processor: image_rows.ImageProcessor | None = None
) -> dict[str, PromptData]:
    """The evaluation sets of a config, by name; see `loading.eval_sets`."""
    sets = eval_sets(config, "demonstrations", dataset)
    return {name: prompts_from_rows(rows, config, tokenizer, processor) for name, rows in sets.items()}
