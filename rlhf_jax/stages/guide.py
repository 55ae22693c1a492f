"""The tables of guided decoding for a policy and its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from rlhf_jax.data import PromptData, Tokenizer
from rlhf_jax.data.token_bytes import token_bytes
from rlhf_jax.errors import UserError
from rlhf_jax.generate.guided import Automaton, token_automaton
from rlhf_jax.generate.options import SamplingOptions


def open_guide(
    config: SamplingOptions,
    sources: Sequence[PromptData],
    tokenizer: Tokenizer,
    *,
    rows: int,
    stop_ids: Sequence[int],
    excluded_ids: Collection[int],
) -> tuple[Automaton | None, list[PromptData]]:
    """The automaton of `structured_outputs_regex` or of the column that has each row's.

    Args:
      tokenizer: the policy's.
      stop_ids, excluded_ids: as in `guided.token_automaton`.

    Returns:
      (the automaton of numpy arrays, None where responses are not guided; the prompts with the states that their
      responses start from)

    Raises:
      UserError: an expression is refused or needs more tokens than response_length; a row's expression is not text.
    """
    column, fixed = config.structured_outputs_regex_column, config.structured_outputs_regex
    if column is None and fixed is None:
        return None, list(sources)
    by_source = [[fixed] * len(source) if column is None else _expressions(source, column) for source in sources]
    expressions = list(dict.fromkeys(expression for by_row in by_source for expression in by_row))
    automaton, starts = token_automaton(
        expressions,
        token_bytes(tokenizer, rows),
        stop_ids=stop_ids,
        excluded_ids=excluded_ids,
        most_tokens=config.response_length,
    )
    start = dict(zip(expressions, starts))
    guided = [
        dataclasses.replace(source, starts=np.array([start[expression] for expression in by_row], np.int32))
        for source, by_row in zip(sources, by_source)
    ]
    return automaton, guided


def _expressions(source: PromptData, column: str) -> list[str | None]:
    """The expression of each row; None for an empty one."""

    def checked(i: int, value: Any) -> str | None:
        if value is not None and not isinstance(value, str):
            raise UserError(
                f"{source.report.name}, row {i}: column {column!r} (structured_outputs_regex_column) is {value!r:.60}; "
                "it must be a regular expression, or empty"
            )
        return value or None

    if column not in source.column_names:
        names = ", ".join(source.column_names) or "none"
        raise UserError(
            f"{source.report.name} has no column {column!r} (structured_outputs_regex_column); it has {names}"
        )
    return [checked(i, row.get(column)) for i, row in enumerate(source.raw)]
