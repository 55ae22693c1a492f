"""Conversion of rows to texts and token ids: columns, bad rows, prompts that are too long."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.data import batches
from rlhf_jax.data.files import MalformedRow, Rows, type_with_article
from rlhf_jax.data.loading import require_columns
from rlhf_jax.data.ragged import lengths_of
from rlhf_jax.data.tldr import fit_prompts as fit_prompts_by_post
from rlhf_jax.data.tldr import format_post
from rlhf_jax.data.tokenized import Tokenized
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError

TEMPLATE_COLUMNS = ("subreddit", "title", "post")


def prompt_columns(rows: Rows, column: str) -> tuple[str, ...]:
    """The columns of prompts: `column`, or the parts of the TL;DR template where there is no 'prompt'."""
    if column == "prompt" and column not in rows.column_names:
        if all(part in rows.column_names for part in TEMPLATE_COLUMNS):
            return TEMPLATE_COLUMNS
    require_columns(rows, {"prompt_column": column})
    return (column,)


def prompt_text(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """The prompt of a row; "" without prompt columns (pairs of full texts)."""
    if not columns:
        return ""
    return row[columns[0]] if len(columns) == 1 else format_post(*(row[column] for column in columns))


def string_fault(values: Mapping[str, Any], name: str) -> str | None:
    """Why a value is not valid text; None if it is (it may be empty)."""
    value = values.get(name)
    if value is None:
        return f"{name!r} is missing" if name not in values else f"{name!r} is null"
    if not isinstance(value, str):
        return f"{name!r} is {type_with_article(value)}, not text"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON allows lone surrogates, tokenizers do not
        code = f"\\u{ord(value[error.start]):04x}"
        return f"{name!r} holds {code} at character {error.start + 1}, a lone surrogate"
    return None


def text_fault(row: Any, columns: Sequence[str]) -> str | None:
    """Why `columns` of a row do not hold text; None if they do."""
    if isinstance(row, MalformedRow):
        return str(row)
    for column in columns:
        fault = string_fault(row, column)
        if fault is None and not row[column].strip() and column not in ("subreddit", "title"):
            fault = f"{column!r} is empty"
        if fault is not None:
            return fault
    return None


class FittedPrompt(NamedTuple):
    """A prompt of at most `query_length` tokens."""

    ids: list[int]
    """They begin with the tokenizer's `start_ids`, once, unless a chat template rendered the text."""
    text: str | None
    """None where only the last ids of the prompt are left."""
    truncated: bool
    begun: bool
    """Whether the text begins with `start_ids` itself."""


def _split_start(
    ids: list[list[int]], tokenizer: Tokenizer, rendered: bool
) -> tuple[list[int], list[list[int]], list[bool]]:
    """(what comes before texts, the ids of each without it, whether they began with it)"""
    return ([], ids, [False] * len(ids)) if rendered else (tokenizer.start_ids(), *tokenizer.without_start(ids))


def fit_prompts(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    query_length: int | None,
    query_overflow: str,
    *,
    rendered: bool = False,
) -> list[FittedPrompt | None]:
    """The tokens of each prompt, at most `query_length` unless it is None: 'truncate' as OpenAI did, 'drop' as TRL
    does; None for one that is dropped. `rendered`: a chat template made the texts."""
    start, ids, begun = _split_start(tokenizer.encode_batch(texts), tokenizer, rendered)
    room = sys.maxsize if query_length is None else query_length - len(start)
    long = [len(prompt_ids) > room for prompt_ids in ids]
    if query_overflow == "truncate":
        fitted = fit_prompts_by_post(texts, tokenizer.encode_batch, ids, room)
    else:
        fitted = [None if is_long else pair for *pair, is_long in zip(ids, texts, long, strict=True)]
    return [
        None if pair is None else FittedPrompt([*start, *pair[0]], pair[1], *flags)
        for pair, *flags in zip(fitted, long, begun, strict=True)
    ]


def join_completions(
    prompts: Sequence[FittedPrompt | None], completions: Sequence[str], tokenizer: Tokenizer, *, rendered: bool = False
) -> list[FittedPrompt | None]:
    """The tokens of prompt + completion + eos, without a second eos where a completion ends with one; None where the
    prompt is. As in TRL they are those of the joined text, which need not begin with those of the prompt. Where only
    the last ids of a prompt are left, those of the completion follow them. `rendered` as `fit_prompts`.
    """
    texts = [
        completion if prompt is None or prompt.text is None else prompt.text + completion
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    ids = tokenizer.encode_batch(texts)
    start, stripped, begun = _split_start(ids, tokenizer, rendered)
    joined: list[FittedPrompt | None] = []
    for prompt, text, apart, stripped_ids, has in zip(prompts, texts, ids, stripped, begun, strict=True):
        if prompt is None:
            joined.append(None)
            continue
        joined_ids = prompt.ids + apart if prompt.text is None else start + stripped_ids
        end = [] if apart and apart[-1] == tokenizer.eos_id else [tokenizer.eos_id]
        joined.append(
            FittedPrompt(joined_ids + end, text, prompt.truncated, prompt.begun or (has and prompt.text is not None))
        )
    return joined


def begun_note(tokenized: Tokenized, tokenizer: Tokenizer) -> str | None:
    """A remark about the rows with the flag 'begun', if there are any."""
    rows = tokenized.count("begun")
    mark = repr(tokenizer.decode(tokenizer.start_ids())) if rows else ""
    which = "1 row begins" if rows == 1 else f"{rows} rows begin"
    return f"{which} with {mark}, which is not added again" if rows else None


def identity(tokenizer: Tokenizer, template: Any, *options: Any) -> Any:
    """The identity of an encoder (see `tokenized.Encoder`) with a tokenizer, a chat template (or None) and options of
    JSON types; None if that of a part cannot be told."""
    parts = [tokenizer.identity(), None if template is None else template.identity()]
    return None if parts[0] is None or (template is not None and parts[1] is None) else [*parts, *options]


def buckets_and_report(
    tokenized: Tokenized,
    *sequences: Sequence[np.ndarray],
    length_buckets: Sequence[int] | None,
    limit: str,
    note: str | None,
    template: Any,
) -> tuple[tuple[int, ...], batches.DataReport]:
    """The length buckets of a data set and the report on its rows.

    Args:
      *sequences: token sequences of the kept rows, one list for each column.
      length_buckets: as configured; None: `default_buckets`.
      limit: the options that limit lengths and their values, for the message.
      template: a `chat.ChatTemplate`; None: the rows are texts.

    Raises:
      UserError: every row is too long, or the longest sequence fits no bucket.
    """
    read, usable_count = len(tokenized.rows), len(tokenized.usable_rows)
    if not usable_count:
        raise UserError(
            f"{tokenized.rows.name}: all {read} rows are longer than {limit}; raise it, or use shorter texts"
        )
    sizes = [lengths_of(column) for column in sequences]
    longest = int(max(lengths.max() for lengths in sizes))
    buckets = tuple(length_buckets or batches.default_buckets(longest))
    batches.bucket(longest, buckets)
    return buckets, batches.DataReport(
        name=tokenized.rows.name,
        read=read,
        kept=usable_count,
        bad=tokenized.bad,
        truncated=tokenized.count("truncated"),
        dropped=read - tokenized.bad - usable_count,
        longest=longest,
        tokens=int(sum(lengths.sum() for lengths in sizes)),
        first_bad=tokenized.first_bad,
        note="; ".join(filter(None, (tokenized.rows.note, note))) or None,
        template_date=None if template is None else template.date,
    )
