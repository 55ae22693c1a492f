"""Preference pairs for a reward model: two right-padded sequences a row."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax
import numpy as np

from rlhf_jax.data import batches, row_texts
from rlhf_jax.data.batches import DataReport
from rlhf_jax.data.demonstrations import join_with_eos
from rlhf_jax.data.loading import Rows, eval_sets, load_split, require_columns
from rlhf_jax.data.tokenizer import Tokenizer
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
    """Tokenizes pairs as ids(prompt) + ids(completion) + eos.

    Without a prompt column, the two completion columns hold the full texts. A pair is dropped if either sequence is
    longer than `max_length`.

    Raises:
      UserError: a column is missing, a row is bad, all rows are too long, or the longest row fits no bucket.
    """
    required = {"chosen_column": chosen_column, "rejected_column": rejected_column}
    require_columns(rows, required if margin_column is None else {**required, "margin_column": margin_column})
    full_texts = prompt_column == "prompt" and not {"prompt", "post"} & set(rows.column_names)
    columns = () if full_texts else row_texts.prompt_columns(rows, prompt_column)
    split = row_texts.split_rows(
        rows, lambda row: _pair_fault(row, columns, chosen_column, rejected_column, margin_column), on_bad_row
    )
    texts = [row_texts.prompt_text(row, columns) for row in split.good]
    prompts, truncated = row_texts.fit_prompts(texts, tokenizer, query_length, query_overflow)
    completions = (
        tokenizer.encode_batch([row[name] for row in split.good]) for name in (chosen_column, rejected_column)
    )
    chosen, rejected, margins = [], [], []
    for row, prompt, *pair in zip(split.good, prompts, *completions, strict=True):
        if prompt is None:
            continue
        sequences = [np.asarray(join_with_eos(prompt, ids, tokenizer.eos_id), np.int32) for ids in pair]
        if max(map(len, sequences)) > max_length:
            continue
        chosen.append(sequences[0])
        rejected.append(sequences[1])
        margins.append(0.0 if margin_column is None else row[margin_column])
    row_texts.check_any_kept(rows, len(chosen), f"max_length = {max_length} or query_length = {query_length} tokens")
    buckets, report = row_texts.buckets_and_report(
        rows, split, chosen, rejected, length_buckets=length_buckets, truncated=truncated
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
