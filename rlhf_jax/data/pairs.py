"""Preference pairs for a reward model: two right-padded sequences a row."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax
import numpy as np

from rlhf_jax.data import batches, row_texts
from rlhf_jax.data.batches import DataReport
from rlhf_jax.data.demonstrations import join
from rlhf_jax.data.loading import Rows, eval_sets, load_split, require_columns
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.types import Array


@flax.struct.dataclass
class PairBatch:
    """Right-padded sequences, prompt + completion + eos, both of one width."""

    chosen_tokens: Array  # [B, S] int32
    chosen_lengths: Array  # [B] int32
    rejected_tokens: Array  # [B, S] int32
    rejected_lengths: Array  # [B] int32
    margin: Array  # [B] float32, 0 without a margin column


@dataclasses.dataclass(frozen=True)
class PairData(batches.Batched[PairBatch]):
    """Pairs as tokens."""

    chosen: list[np.ndarray]
    rejected: list[np.ndarray]
    margin: np.ndarray
    """[N] float32."""
    pad_id: int
    buckets: tuple[int, ...]
    report: DataReport

    def _stores(self) -> tuple[list[np.ndarray], ...]:
        return self.chosen, self.rejected

    def _take(self, rows: np.ndarray, here: np.ndarray | slice) -> PairBatch:
        width = batches.bucket(max(len(store[i]) for store in self._stores() for i in rows), self.buckets)
        rows = rows[here]
        better, worse = [self.chosen[i] for i in rows], [self.rejected[i] for i in rows]
        lengths = batches.lengths_of(better), batches.lengths_of(worse)
        return PairBatch(
            chosen_tokens=batches.pad_right(better, width, self.pad_id),
            chosen_lengths=lengths[0],
            rejected_tokens=batches.pad_right(worse, width, self.pad_id),
            rejected_lengths=lengths[1],
            margin=self.margin[rows],
        )


def _pair_fault(row: Any, columns: tuple[str, ...], chosen: str, rejected: str, margin: str | None) -> str | None:
    fault = row_texts.text_fault(row, (*columns, chosen, rejected))
    if fault is None and row[chosen] == row[rejected]:
        return f"{chosen!r} and {rejected!r} are the same"
    if fault is None and margin is not None:
        value = row.get(margin)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"{margin!r} is {value!r}, not a number"
    return fault


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
) -> PairData:
    """Tokenises pairs as ids(prompt) + ids(completion) + eos. Without a 'prompt' column the two columns hold the whole
    texts. A pair with a sequence over `max_length` is dropped.

    Raises:
      UserError: a column is missing, a row is bad, all rows are too long, or no bucket holds the longest.
    """
    wanted = {"chosen_column": chosen_column, "rejected_column": rejected_column}
    require_columns(rows, wanted if margin_column is None else {**wanted, "margin_column": margin_column})
    whole_texts = prompt_column == "prompt" and not {"prompt", "post"} & set(rows.column_names)
    columns = () if whole_texts else row_texts.prompt_columns(rows, prompt_column)
    found = row_texts.sort_rows(
        rows, lambda row: _pair_fault(row, columns, chosen_column, rejected_column, margin_column), on_bad_row
    )
    texts = [row_texts.prompt_text(row, columns) for row in found.good]
    prompts, truncated = row_texts.fit_prompts(texts, tokenizer, query_length, query_overflow)
    answers = (tokenizer.encode_batch([row[name] for row in found.good]) for name in (chosen_column, rejected_column))
    better, worse, margins = [], [], []
    for row, prompt, *pair in zip(found.good, prompts, *answers, strict=True):
        if prompt is None:
            continue
        sequences = [np.asarray(join(prompt, answer, tokenizer.eos_id), np.int32) for answer in pair]
        if max(map(len, sequences)) > max_length:
            continue
        better.append(sequences[0])
        worse.append(sequences[1])
        margins.append(0.0 if margin_column is None else row[margin_column])
    row_texts.refuse_nothing_left(
        rows, len(better), f"max_length = {max_length} or query_length = {query_length} tokens"
    )
    buckets, report = row_texts.measure(rows, found, better, worse, length_buckets=length_buckets, truncated=truncated)
    return PairData(better, worse, np.asarray(margins, np.float32), tokenizer.pad_id, buckets, report)


def pairs_of(rows: Rows, config: Any, tokenizer: Tokenizer) -> PairData:
    """`make_pairs` by the data options of a config."""
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
    )


def load_pairs(config: Any, tokenizer: Tokenizer, dataset: Any = None, evaluation: bool = False) -> PairData | None:
    """The pairs that a reward config asks for; `dataset` is an object in place of the configured name. None: no
    evaluation data."""
    rows = load_split(config, "eval" if evaluation else "train", "pairs", dataset)
    return None if rows is None else pairs_of(rows, config, tokenizer)


def load_eval_pairs(config: Any, tokenizer: Tokenizer, given: Any = None) -> dict[str, PairData]:
    """The evaluation sets that a config asks for, by name; see `loading.eval_sets`."""
    return {name: pairs_of(rows, config, tokenizer) for name, rows in eval_sets(config, "pairs", given).items()}
