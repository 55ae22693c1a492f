"""From rows to texts: which columns, which rows are bad, which prompts are too long."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.data import batches
from rlhf_jax.data.files import Malformed, Rows, kind_of
from rlhf_jax.data.loading import require_columns
from rlhf_jax.data.tldr import fit_prompt, format_post
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError

TEMPLATE_COLUMNS = ("subreddit", "title", "post")


def prompt_columns(rows: Rows, column: str) -> tuple[str, ...]:
    """The columns that prompts are made of: the named one, or, where there is no 'prompt', the template's parts."""
    if column == "prompt" and column not in rows.column_names:
        if all(part in rows.column_names for part in TEMPLATE_COLUMNS):
            return TEMPLATE_COLUMNS
    require_columns(rows, {"prompt_column": column})
    return (column,)


def prompt_text(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """The prompt of a row; "" where there are no prompt columns (pairs of full texts)."""
    if not columns:
        return ""
    return row[columns[0]] if len(columns) == 1 else format_post(*(row[column] for column in columns))


def string_fault(values: Mapping[str, Any], name: str) -> str | None:
    """What is wrong with a value that should be text; None for a good one, which may be empty."""
    value = values.get(name)
    if value is None:
        return f"{name!r} is missing" if name not in values else f"{name!r} is null"
    if not isinstance(value, str):
        return f"{name!r} is {kind_of(value)}, not text"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON may hold half of a pair, which no tokenizer takes
        code = f"\\u{ord(value[error.start]):04x}"
        return f"{name!r} holds {code} at character {error.start + 1}, a surrogate without its other half"
    return None


def text_fault(row: Any, columns: Sequence[str]) -> str | None:
    """What is wrong with a row whose `columns` should hold text; None for a good one."""
    if isinstance(row, Malformed):
        return str(row)
    for column in columns:
        fault = string_fault(row, column)
        if fault is None and not row[column].strip() and column not in ("subreddit", "title"):
            fault = f"{column!r} is empty"
        if fault is not None:
            return fault
    return None


@dataclasses.dataclass(frozen=True)
class Sorted:
    """Good rows, and what the others were."""

    good: list[Any]
    bad: int
    first_bad: str | None


def sort_rows(rows: Rows, fault: Callable[[Any], str | None], on_bad_row: str) -> Sorted:
    """Parts the good rows from the bad.

    Args:
      rows: the rows.
      fault: what is wrong with a row, or None.
      on_bad_row: 'raise' or 'skip'.

    Raises:
      UserError: a row is bad and on_bad_row is 'raise' (the first is named by file and number, all are counted), or no
        row is good.
    """
    good, bad, first = [], 0, None
    for i, row in enumerate(rows):
        wrong = fault(row)
        if wrong is None:
            good.append(row)
        else:
            bad += 1
            first = first or f"{rows.place(i)}: {wrong}"
    if bad and (on_bad_row == "raise" or not good):
        advice = "Mend it, or leave bad rows out with on_bad_row=skip." if good else "No row is usable."
        raise UserError(f"{first} ({bad} of {len(rows)} rows {'is' if bad == 1 else 'are'} bad). {advice}")
    return Sorted(good, bad, first)


def fit_prompts(
    texts: list[str], tokenizer: Tokenizer, query_length: int, query_overflow: str
) -> tuple[list[list[int] | None], int]:
    """Ids of each prompt, at most `query_length` of them: 'truncate' as OpenAI did, 'drop' as TRL does.

    Returns:
      (ids, or None for a prompt that is dropped; how many were truncated)
    """
    found: list[list[int] | None] = []
    truncated = 0
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if len(ids) > query_length:
            ids = fit_prompt(text, tokenizer.encode, ids, query_length) if query_overflow == "truncate" else None
            truncated += ids is not None
        found.append(ids)
    return found, truncated


def refuse_nothing_left(rows: Rows, kept: int, limit: str) -> None:
    """Raises where every row was too long."""
    if not kept:
        raise UserError(f"{rows.name}: all {len(rows)} rows are longer than {limit}; raise it, or give shorter texts")


def measure(
    rows: Rows,
    found: Sorted,
    *stores: list[np.ndarray],
    length_buckets: Sequence[int] | None,
    truncated: int,
    note: str | None = None,
) -> tuple[tuple[int, ...], batches.DataReport]:
    """The padded lengths for token stores of one data set (an entry a row kept, in each), and the report on its rows.

    Raises:
      UserError: no bucket holds the longest.
    """
    sizes = [len(tokens) for store in stores for tokens in store]
    buckets = tuple(length_buckets or batches.default_buckets(max(sizes)))
    batches.bucket(max(sizes), buckets)
    kept = len(stores[0])
    return buckets, batches.DataReport(
        name=rows.name,
        read=len(rows),
        kept=kept,
        bad=found.bad,
        truncated=truncated,
        dropped=len(found.good) - kept,
        longest=max(sizes),
        tokens=sum(sizes),
        first_bad=found.first_bad,
        note=note,
    )
