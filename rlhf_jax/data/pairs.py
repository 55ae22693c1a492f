"""Preference pairs for a reward model: two right-padded sequences a row, of texts or of conversations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax
import numpy as np

from rlhf_jax.data import batches, chat, conversation_forms, row_texts
from rlhf_jax.data.batches import DataReport
from rlhf_jax.data.loading import Rows, require_columns
from rlhf_jax.data.options import PairOptions
from rlhf_jax.data.tokenized import LEFT_OUT, Encoded, Tokenized
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError
from rlhf_jax.types import Array


class PairBatch(flax.struct.PyTreeNode):
    """Right-padded sequences, prompt + completion + eos, both padded to the same width."""

    chosen_tokens: Array  # [B, S] int32
    chosen_lengths: Array  # [B] int32
    rejected_tokens: Array  # [B, S] int32
    rejected_lengths: Array  # [B] int32
    margin: Array  # [B] float32, 0 without a margin column


@dataclasses.dataclass(frozen=True)
class PairData(batches.Batched[PairBatch]):
    """Tokenized pairs."""

    chosen: Sequence[np.ndarray]
    rejected: Sequence[np.ndarray]
    margin: np.ndarray
    """[N] float32."""
    pad_id: int
    buckets: tuple[int, ...]
    report: DataReport
    known_fingerprint: str | None = None
    shares: batches.Order | None = None

    source = "pairs"
    per_row = ("chosen", "rejected", "margin")

    @staticmethod
    def encoder(
        rows: Rows, options: PairOptions, tokenizer: Tokenizer, processor: None = None
    ) -> tuple[Rows, PairEncoder]:
        """As `Batched.encoder`."""
        columns = chosen, rejected = options.chosen_column, options.rejected_column
        required = {"chosen_column": chosen, "rejected_column": rejected}
        if options.margin_column is not None:
            required["margin_column"] = options.margin_column
        require_columns(rows, required)
        rows = _house_form(rows, options.prompt_column, *columns)
        full_texts = options.prompt_column == "prompt" and not {"prompt", "post"} & set(rows.column_names)
        prompt_columns = () if full_texts else row_texts.prompt_columns(rows, options.prompt_column)
        template = None
        if chat.holds_conversations(rows, chosen):
            if prompt_columns and not chat.holds_conversations(rows, prompt_columns[0]):
                raise UserError(
                    f"{rows.name}: {chosen!r} holds conversations, but {prompt_columns[0]!r} does not. Make it lists "
                    f"of messages, or remove it if {chosen!r} and {rejected!r} are whole conversations"
                )
            template = chat.ChatTemplate(tokenizer, options.chat_template_kwargs)
        rows = chat.noting_unread(rows, (*prompt_columns, *columns), template)
        return rows, PairEncoder(tokenizer, prompt_columns, template, options)

    def _sequences(self) -> tuple[Sequence[np.ndarray], ...]:
        return self.chosen, self.rejected

    def _make_batch(self, rows: np.ndarray, local: np.ndarray | slice) -> PairBatch:
        width = batches.bucket(max(len(tokens[i]) for tokens in self._sequences() for i in rows), self.buckets)
        rows = rows[local]
        chosen, rejected = [self.chosen[i] for i in rows], [self.rejected[i] for i in rows]
        return PairBatch(
            chosen_tokens=batches.pad_right(chosen, width, self.pad_id),
            chosen_lengths=batches.lengths_of(chosen),
            rejected_tokens=batches.pad_right(rejected, width, self.pad_id),
            rejected_lengths=batches.lengths_of(rejected),
            margin=self.margin[rows],
        )


def _pair_fault(row: Any, fault: str | None, chosen: str, rejected: str, margin: str | None) -> str | None:
    """Why a row is not a pair: `fault`, or if that is None, equal texts or a margin that is no number; None if it is a
    pair."""
    if fault is None and row[chosen] == row[rejected]:
        return f"{chosen!r} and {rejected!r} are the same"
    if fault is None and margin is not None:
        value = row.get(margin)
        if not math.isfinite(_number(value)):
            return f"{margin!r} is {value!r}, not a number"
    return fault


def _number(value: Any) -> float:
    """A number, or the text of one, such as 3.10 in a .csv file; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


class PairEncoder:
    """The `tokenized.Encoder` of pairs: ids(prompt + completion) + eos.

    Without a prompt column, the two completion columns hold the full texts. A pair is dropped if either sequence is
    longer than `max_length`.

    Conversations, as in TRL: both completion columns are lists of messages {"role", "content"}, whole conversations or,
    with a prompt column of messages, what follows it. They are what the chat template renders, which ends them; no eos
    is added. A pair is also dropped if its prompt, with its generation prompt, has more than `query_length` tokens,
    since `query_overflow` has no rule for truncating one.
    """

    columns = {"chosen": "tokens", "rejected": "tokens", "margin": "float", "truncated": "flag", "begun": "flag"}

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_columns: tuple[str, ...],
        template: chat.ChatTemplate | None,
        options: PairOptions,
    ):
        self.tokenizer, self.template = tokenizer, template
        self.prompt_columns = prompt_columns
        self.completion_columns = options.chosen_column, options.rejected_column
        self.margin_column = options.margin_column
        self.max_length, self.query_length = options.max_length, options.query_length
        self.query_overflow = options.query_overflow

    def identity(self) -> Any:
        """As `tokenized.Encoder.identity`."""
        columns = [self.prompt_columns, self.completion_columns, self.margin_column]
        limits = [self.max_length, self.query_length, self.query_overflow]
        return row_texts.identity(self.tokenizer, self.template, columns, limits)

    def _text_fault(self, row: Any) -> str | None:
        columns = (*self.prompt_columns, *self.completion_columns)
        return _pair_fault(row, row_texts.text_fault(row, columns), *self.completion_columns, self.margin_column)

    def _chat_fault(self, row: Any) -> str | None:
        columns = (*self.prompt_columns, *self.completion_columns)
        fault = chat.messages_fault(row, columns, "pairs")
        return _pair_fault(row, fault, *self.completion_columns, self.margin_column)

    def _render(self, row: Any) -> tuple[str, str, str]:
        """Prompt with its generation prompt, chosen and rejected conversation. The prompt is "" without a prompt
        column: only the explicit one is known to end before a response."""
        columns, template = self.prompt_columns, self.template.for_row(row)
        prompt = chat.text_messages([message for column in columns for message in row[column]])
        text = template.render(prompt, generation_prompt=True, column=columns[0]) if prompt else ""
        chosen, rejected = (
            template.render([*prompt, *chat.text_messages(row[column])], generation_prompt=False, column=column)
            for column in self.completion_columns
        )
        return text, chosen, rejected

    def fault(self, row: Any) -> str | None:
        """As `tokenized.Encoder.fault`."""
        if self.template is None:
            return self._text_fault(row)
        return chat.rendered_or_fault(row, self._chat_fault, self._render)[1]

    def data(self, tokenized: Tokenized, length_buckets: Sequence[int] | None) -> PairData:
        """As `tokenized.Encoder.data`."""
        chosen, rejected = tokenized.ragged("chosen"), tokenized.ragged("rejected")
        buckets, report = row_texts.buckets_and_report(
            tokenized,
            chosen,
            rejected,
            length_buckets=length_buckets,
            limit=f"max_length = {self.max_length} or query_length = {self.query_length} tokens",
            note=row_texts.begun_note(tokenized, self.tokenizer),
            template=self.template,
        )
        fingerprint = tokenized.meta.get("fingerprint")
        margin, pad_id = tokenized.numbers("margin"), self.tokenizer.pad_id
        return PairData(chosen, rejected, margin, pad_id, buckets, report, fingerprint)

    def encode(self, rows: list[Any]) -> list[Encoded]:
        """As `tokenized.Encoder.encode`."""
        encode = self.tokenizer.encode
        if self.template is not None:
            encoded: list[Encoded] = []
            for row in rows:
                rendered, fault = chat.rendered_or_fault(row, self._chat_fault, self._render)
                if fault is not None:
                    encoded.append(fault)
                elif rendered[0] and len(encode(rendered[0])) > self.query_length:
                    encoded.append(None)
                else:
                    encoded.append(self._columns(row, [*map(encode, rendered[1:])], False))
            return encoded
        faults = [self._text_fault(row) for row in rows]
        good = [row for row, fault in zip(rows, faults, strict=True) if fault is None]
        texts = [row_texts.prompt_text(row, self.prompt_columns) for row in good]
        prompts = row_texts.fit_prompts(texts, self.tokenizer, self.query_length, self.query_overflow)
        sequences = (
            row_texts.join_completions(prompts, [row[name] for row in good], self.tokenizer)
            for name in self.completion_columns
        )
        encoded_rows = iter(map(self._joined, good, *sequences))
        return [next(encoded_rows) if fault is None else fault for fault in faults]

    def _joined(self, row: Any, *sequences: row_texts.FittedPrompt | None) -> Encoded:
        if sequences[0] is None:
            return None
        begun = any(sequence.begun for sequence in sequences)
        return self._columns(row, [sequence.ids for sequence in sequences], sequences[0].truncated, begun)

    def _columns(self, row: Any, pair: list[list[int]], cut: bool, begun: bool = False) -> Encoded:
        """The columns of a row; None for one that is left out."""
        if max(map(len, pair)) > self.max_length:
            return {LEFT_OUT: True, "truncated": cut}
        margin = 0.0 if self.margin_column is None else _number(row[self.margin_column])
        return {"chosen": pair[0], "rejected": pair[1], "margin": margin, "truncated": cut, "begun": begun}


def _house_form(rows: Rows, prompt_column: str, chosen_column: str, rejected_column: str) -> Rows:
    """Rows with conversations as lists of messages; those of ShareGPT are prompts where the completions follow them."""
    columns = prompt_column, chosen_column, rejected_column
    converted = conversation_forms.house_form(rows, columns)
    if prompt_column != "prompt" or {"prompt", "post"} & set(rows.column_names):
        return converted
    chosen = conversation_forms.first_value(converted, chosen_column)
    if isinstance(chosen, list) and chosen and isinstance(chosen[0], Mapping) and chosen[0].get("role") == "assistant":
        return conversation_forms.house_form(rows, columns, whole=prompt_column)
    return converted
