"""Prompts for a policy: left-padded batches that are pure functions of seed and step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax.data import batches, fields
from rlhf_jax.data.batches import DataReport
from rlhf_jax.data.loading import Rows, load_split
from rlhf_jax.data.tokens import Tokenizer
from rlhf_jax.types import PromptBatch


@dataclasses.dataclass(frozen=True)
class PromptData:
    """Prompts as tokens, with their texts and the other columns of their rows."""

    tokens: list[np.ndarray]
    """int32 each."""
    prompts: list[str]
    """What the tokens say: a truncated prompt is truncated here too."""
    raw: list[dict[str, Any]]
    """The other columns."""
    pad_id: int
    buckets: tuple[int, ...]
    report: DataReport

    def __len__(self) -> int:
        return len(self.tokens)

    def _take(self, rows: np.ndarray) -> PromptBatch:
        chosen = [self.tokens[i] for i in rows]
        lengths = batches.lengths_of(chosen)
        width = batches.bucket(int(lengths.max()), self.buckets)
        return PromptBatch(batches.pad_left(chosen, width, self.pad_id), lengths, rows.astype(np.int32))

    def batch(self, seed: int, step: int, batch_size: int) -> PromptBatch:
        """Prompts of update `step` (0-based), numpy arrays: tokens [B, C] int32 with C a bucket, lengths [B], rows [B].
        See `batches.rows_of_step` for which rows."""
        return self._take(batches.rows_of_step(len(self), batch_size, seed, step, self.report.name))

    def in_order(self, start: int, count: int) -> PromptBatch:
        """Rows start .. start + count - 1; past the end the last row again, so that shapes stay (see `rows`)."""
        return self._take(np.minimum(np.arange(start, start + count), len(self) - 1))

    def texts(self, rows: Sequence[int]) -> list[str]:
        """Prompt texts of these rows."""
        return [self.prompts[i] for i in rows]

    def columns(self, rows: Sequence[int]) -> dict[str, list[Any]]:
        """The data set's other columns at these rows, for reward functions."""
        names = dict.fromkeys(name for row in self.raw for name in row)
        return {name: [self.raw[i].get(name) for i in rows] for name in names}

    @property
    def fingerprint(self) -> str:
        """sha256 of the tokens."""
        return batches.fingerprint(self.tokens)


def make_prompts(
    rows: Rows,
    tokenizer: Tokenizer,
    *,
    prompt_column: str = "prompt",
    query_length: int = 512,
    query_overflow: str = "truncate",
    on_bad_row: str = "raise",
    length_buckets: tuple[int, ...] | None = None,
) -> PromptData:
    """Tokenises prompts; the options are those of the config.

    Raises:
      UserError: a column is missing, a row is bad, all rows are too long, or no bucket holds the longest.
    """
    columns = fields.prompt_columns(rows, prompt_column)
    found = fields.sort_rows(rows, lambda row: fields.text_fault(row, columns), on_bad_row)
    texts = [fields.prompt_text(row, columns) for row in found.good]
    ids, truncated = fields.fit_prompts(texts, tokenizer, query_length, query_overflow)
    fields.refuse_nothing_left(rows, sum(tokens is not None for tokens in ids), f"query_length = {query_length} tokens")
    data = [
        (np.asarray(tokens, np.int32), text, {name: row[name] for name in row if name not in columns})
        for tokens, text, row in zip(ids, texts, found.good, strict=True)
        if tokens is not None
    ]
    tokens, texts, raw = (list(part) for part in zip(*data, strict=True))
    if truncated:
        texts = [
            tokenizer.decode(kept) if len(kept) < len(whole) else text
            for kept, whole, text in zip(tokens, tokenizer.encode_batch(texts), texts, strict=True)
        ]
    longest = max(map(len, tokens))
    buckets = length_buckets or batches.default_buckets(longest)
    batches.bucket(longest, buckets)
    report = DataReport(
        name=rows.name,
        read=len(rows),
        kept=len(tokens),
        bad=found.bad,
        truncated=truncated,
        dropped=len(ids) - len(tokens),
        longest=longest,
        tokens=sum(map(len, tokens)),
        first_bad=found.first_bad,
    )
    return PromptData(tokens, texts, raw, tokenizer.pad_id, tuple(buckets), report)


def load_prompts(config: Any, tokenizer: Tokenizer, dataset: Any = None, evaluation: bool = False) -> PromptData | None:
    """The prompts that a config asks for; `dataset` is an object in place of the configured name. None: no evaluation
    data. The synthetic prompts come with their demonstrations, as column 'completion'."""
    rows = load_split(config, "eval" if evaluation else "train", "demonstrations", dataset)
    if rows is None:
        return None
    return make_prompts(
        rows,
        tokenizer,
        prompt_column=config.prompt_column,
        query_length=config.query_length,
        query_overflow=config.query_overflow,
        on_bad_row=config.on_bad_row,
        length_buckets=config.length_buckets,
    )
