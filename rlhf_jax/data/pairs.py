"""Preference pairs for a reward model: two right-padded sequences a row, of texts or of conversations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import flax
import numpy as np

from rlhf_jax.data import batches, chat, row_texts
from rlhf_jax.data.batches import DataReport
from rlhf_jax.data.demonstrations import join_with_eos
from rlhf_jax.data.loading import Rows, eval_sets, load_split, require_columns
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError
from rlhf_jax.types import Array


@flax.struct.dataclass
class PairBatch:
    """Right-padded sequences, prompt + completion + eos, both padded to the same width."""

    chosen_tokens: Array  # [B, S] int32
    chosen_lengths: Array  # [B] int32
    rejected_tokens: Array  # [B, S] int32
    rejected_lengths: Array  # [B] int32
    margin: Array  # [B] float32, 0 without a margin column


@dataclasses.dataclass(frozen=True)
class PairData(batches.Batched[PairBatch]):
    """Tokenized pairs."""

    chosen: list[np.ndarray]
    rejected: list[np.ndarray]
    margin: np.ndarray
    """[N] float32."""
    pad_id: int
    buckets: tuple[int, ...]
    report: DataReport

    def _sequences(self) -> tuple[list[np.ndarray], ...]:
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
    """`fault`, or what else is wrong with a row whose columns have none; None if it is a pair."""
    if fault is None and row[chosen] == row[rejected]:
        return f"{chosen!r} and {rejected!r} are the same"
    if fault is None and margin is not None:
        value = row.get(margin)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"{margin!r} is {value!r}, not a number"
    return fault


def _render_pairs(
    rows: Rows,
    template: chat.ChatTemplate,
    prompt_columns: tuple[str, ...],
    completion_columns: tuple[str, str],
    margin_column: str | None,
    on_bad_row: str,
) -> tuple[row_texts.SplitRows, list[tuple[str, str, str]]]:
    """(good and bad rows, prompt with its generation prompt, chosen and rejected conversation of each good one).

    The prompt is "" without a prompt column: only the explicit one is known to end before a response.
    """

    def fault(row: Any) -> str | None:
        reason = chat.messages_fault(row, (*prompt_columns, *completion_columns), "pairs")
        return _pair_fault(row, reason, *completion_columns, margin_column)

    def render(row: Any) -> tuple[str, str, str]:
        prompt = [message for column in prompt_columns for message in row[column]]
        text = template.render(prompt, generation_prompt=True, column=prompt_columns[0]) if prompt else ""
        chosen, rejected = (
            template.render([*prompt, *row[column]], generation_prompt=False, column=column)
            for column in completion_columns
        )
        return text, chosen, rejected

    return chat.render_rows(rows, fault, render, on_bad_row)


def make_pairs(
    rows: Rows,
    tokenizer: Tokenizer,
    *,
    prompt_column: str = "prompt",
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
    margin_column: str | None = None,
    max_length: int = 638,
    query_length: int = 512,
    query_overflow: str = "truncate",
    on_bad_row: str = "raise",
    length_buckets: tuple[int, ...] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PairData:
    """Tokenizes pairs as ids(prompt) + ids(completion) + eos. The arguments are options of the config.

    Without a prompt column, the two completion columns hold the full texts. A pair is dropped if either sequence is
    longer than `max_length`.

    Conversations, as in TRL: both completion columns are lists of messages {"role", "content"}, whole conversations or,
    with a prompt column of messages, what follows it. They are what the chat template renders, which ends them; no eos
    is added. A pair is also dropped if its prompt, with its generation prompt, has more than `query_length` tokens,
    since `query_overflow` has no rule for truncating one.

    Raises:
      UserError: a column is missing, a row is bad, all rows are too long, the longest row fits no bucket, there is no
        chat template for conversations, or the prompts beside them are texts.
    """
    required = {"chosen_column": chosen_column, "rejected_column": rejected_column}
    require_columns(rows, required if margin_column is None else {**required, "margin_column": margin_column})
    full_texts = prompt_column == "prompt" and not {"prompt", "post"} & set(rows.column_names)
    columns = () if full_texts else row_texts.prompt_columns(rows, prompt_column)
    completion_columns = chosen_column, rejected_column
    truncated, template_date = 0, None
    if chat.holds_conversations(rows, chosen_column):
        if columns and not chat.holds_conversations(rows, columns[0]):
            raise UserError(
                f"{rows.name}: {chosen_column!r} holds conversations, but {columns[0]!r} does not. Make it lists of "
                f"messages, or remove it if {chosen_column!r} and {rejected_column!r} are whole conversations"
            )
        template = chat.ChatTemplate(tokenizer, chat_template_kwargs)
        template_date = template.date
        split, rendered = _render_pairs(rows, template, columns, completion_columns, margin_column, on_bad_row)
        pairs = [
            None if prompt and len(tokenizer.encode(prompt)) > query_length else [*map(tokenizer.encode, texts)]
            for prompt, *texts in rendered
        ]
    else:
        split = row_texts.split_rows(
            rows,
            lambda row: _pair_fault(
                row, row_texts.text_fault(row, (*columns, *completion_columns)), *completion_columns, margin_column
            ),
            on_bad_row,
        )
        texts = [row_texts.prompt_text(row, columns) for row in split.good]
        prompts, truncated = row_texts.fit_prompts(texts, tokenizer, query_length, query_overflow)
        completions = (tokenizer.encode_batch([row[name] for row in split.good]) for name in completion_columns)
        pairs = [
            None if prompt is None else [join_with_eos(prompt, ids, tokenizer.eos_id) for ids in pair]
            for prompt, *pair in zip(prompts, *completions, strict=True)
        ]
    chosen, rejected, margins = [], [], []
    for row, pair in zip(split.good, pairs, strict=True):
        if pair is None:
            continue
        sequences = [np.asarray(ids, np.int32) for ids in pair]
        if max(map(len, sequences)) > max_length:
            continue
        chosen.append(sequences[0])
        rejected.append(sequences[1])
        margins.append(0.0 if margin_column is None else row[margin_column])
    row_texts.check_any_kept(rows, len(chosen), f"max_length = {max_length} or query_length = {query_length} tokens")
    buckets, report = row_texts.buckets_and_report(
        rows,
        split,
        chosen,
        rejected,
        length_buckets=length_buckets,
        truncated=truncated,
        template_date=template_date,
    )
    return PairData(chosen, rejected, np.asarray(margins, np.float32), tokenizer.pad_id, buckets, report)


def pairs_from_rows(rows: Rows, config: Any, tokenizer: Tokenizer) -> PairData:
    """`make_pairs` with the data options of a config."""
    return make_pairs(
        rows,
        tokenizer,
        prompt_column=config.prompt_column,
        chosen_column=config.chosen_column,
        rejected_column=config.rejected_column,
        margin_column=config.margin_column,
        max_length=config.max_length,
        query_length=config.query_length,
        query_overflow=config.query_overflow,
        on_bad_row=config.on_bad_row,
        length_buckets=config.length_buckets,
        chat_template_kwargs=config.chat_template_kwargs,
    )


def load_pairs(config: Any, tokenizer: Tokenizer, dataset: Any = None, evaluation: bool = False) -> PairData | None:
    """The pairs of a reward config, or of `dataset`, an object in place of the configured name.

    Returns:
      The data; None where the config has no evaluation data.
    """
    rows = load_split(config, "eval" if evaluation else "train", "pairs", dataset)
    return None if rows is None else pairs_from_rows(rows, config, tokenizer)


def load_eval_pairs(config: Any, tokenizer: Tokenizer, dataset: Any = None) -> dict[str, PairData]:
    """The evaluation sets of a config, by name; see `loading.eval_sets`."""
    return {
        name: pairs_from_rows(rows, config, tokenizer) for name, rows in eval_sets(config, "pairs", dataset).items()
    }
