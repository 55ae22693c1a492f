"""Demonstrations for supervised fine-tuning: prompt, completion and eos in one right-padded sequence."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax
import numpy as np

from rlhf_jax.data import batches, row_texts
from rlhf_jax.data.batches import DataReport
from rlhf_jax.data.loading import Rows, eval_sets, load_rows, load_split, require_columns
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.types import Array


@flax.struct.dataclass
class DemoBatch:
    """Right-padded sequences."""

    tokens: Array  # [B, S] int32; prompt, completion, eos
    prompt_lengths: Array  # [B] int32
    lengths: Array  # [B] int32, 0 for a row that only fills the batch


@dataclasses.dataclass(frozen=True)
class DemoData(batches.Batched[DemoBatch]):
    """Demonstrations as tokens."""

    tokens: list[np.ndarray]
    """int32 each: prompt, completion, eos."""
    prompt_lengths: np.ndarray
    """[N] int32."""
    pad_id: int
    buckets: tuple[int, ...]
    report: DataReport

    def _stores(self) -> tuple[list[np.ndarray], ...]:
        return (self.tokens,)

    def _take(self, rows: np.ndarray, here: np.ndarray | slice) -> DemoBatch:
        width = batches.bucket(max(len(self.tokens[i]) for i in rows), self.buckets)
        rows = rows[here]
        chosen = [self.tokens[i] for i in rows]
        return DemoBatch(
            batches.pad_right(chosen, width, self.pad_id), self.prompt_lengths[rows], batches.lengths_of(chosen)
        )

    def in_order(self, start: int, count: int, here: np.ndarray | slice = slice(None)) -> DemoBatch:
        """Rows start .. start + count - 1; past the end rows of length 0, so that shapes stay. `here` as `batch`."""
        taken = super().in_order(start, count, here)
        real = (np.arange(start, start + count) < len(self))[here]
        return taken.replace(lengths=np.where(real, taken.lengths, 0).astype(np.int32))


def join(prompt: list[int], completion: list[int], eos_id: int) -> list[int]:
    """prompt + completion + eos; a completion that brings its eos along keeps that one."""
    return prompt + completion + ([] if completion and completion[-1] == eos_id else [eos_id])


def completion_column_of(rows: Rows, columns: tuple[str, ...], column: str) -> str:
    """The column with completions. OpenAI's posts come with a 'summary', which the template puts a space before."""
    if column == "completion" and column not in rows.column_names and columns == row_texts.TEMPLATE_COLUMNS:
        column = "summary"
    require_columns(rows, {"completion_column": column})
    return column


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
) -> DemoData:
    """Tokenises demonstrations as ids(prompt) + ids(completion) + eos. What is over `max_length` is cut at the end,
    without an eos that was not there (query_overflow='truncate'), or dropped ('drop'); a row with no room for a token
    of its completion is dropped.

    Raises:
      UserError: a column is missing, a row is bad, all rows are too long, or no bucket holds the longest.
    """
    columns = row_texts.prompt_columns(rows, prompt_column)
    answer = completion_column_of(rows, columns, completion_column)
    space = " " if answer == "summary" and completion_column != "summary" else ""
    found = row_texts.sort_rows(rows, lambda row: row_texts.text_fault(row, (*columns, answer)), on_bad_row)
    texts = [row_texts.prompt_text(row, columns) for row in found.good]
    prompts, _ = row_texts.fit_prompts(texts, tokenizer, query_length, query_overflow)
    completions = tokenizer.encode_batch([space + row[answer] for row in found.good])
    tokens, prompt_lengths, truncated = [], [], 0
    for text, prompt, completion in zip(tokenizer.encode_batch(texts), prompts, completions, strict=True):
        if prompt is None or len(prompt) >= max_length:
            continue
        whole = join(prompt, completion, tokenizer.eos_id)
        if len(whole) > max_length and query_overflow == "drop":
            continue
        truncated += len(whole) > max_length or len(prompt) < len(text)
        tokens.append(np.asarray(whole[:max_length], np.int32))
        prompt_lengths.append(len(prompt))
    row_texts.refuse_nothing_left(
        rows, len(tokens), f"max_length = {max_length} or query_length = {query_length} tokens"
    )
    buckets, report = row_texts.measure(rows, found, tokens, length_buckets=length_buckets, truncated=truncated)
    return DemoData(tokens, np.asarray(prompt_lengths, np.int32), tokenizer.pad_id, buckets, report)


def _make(rows: Rows, config: Any, tokenizer: Tokenizer) -> DemoData:
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
    )


def load_demonstrations(
    config: Any, tokenizer: Tokenizer, dataset: Any = None, evaluation: bool = False
) -> DemoData | None:
    """The demonstrations that a config asks for; `dataset` is an object in place of the configured name. None: no
    evaluation data."""
    rows = load_split(config, "eval" if evaluation else "train", "demonstrations", dataset)
    return None if rows is None else _make(rows, config, tokenizer)


def load_eval_demonstrations(config: Any, tokenizer: Tokenizer, given: Any = None) -> dict[str, DemoData]:
    """The evaluation sets that a config asks for, by name; see `loading.eval_sets`."""
    sets = eval_sets(config, "demonstrations", given)
    return {name: _make(rows, config, tokenizer) for name, rows in sets.items()}


def load_normalization_data(config: Any, tokenizer: Tokenizer) -> DemoData | None:
    """The demonstrations whose mean score a reward config makes 0 (N+ detail 15); None where it names none."""
    if config.normalize_dataset_name is None:
        return None
    rows = load_rows(
        config.normalize_dataset_name,
        split=config.dataset_train_split,
        kind="demonstrations",
        max_samples=config.normalize_samples,
    )
    return _make(rows, config, tokenizer)
