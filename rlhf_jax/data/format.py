"""New columns of texts, made of other columns of a row."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from rlhf_jax.data.files import MalformedRow, Rows
from rlhf_jax.errors import UserError


class Format:
    """New columns of texts, made of other columns: {"prompt": "Question: {question}\\nAnswer:"}.

    Raises:
      UserError: it is not a dict of texts, or a text has something other than column names in braces.
    """

    def __init__(self, columns: Any):
        if not isinstance(columns, Mapping) or not all(isinstance(text, str) for text in columns.values()):
            raise UserError(f"format is {columns!r:.100}; it must be a dict of column -> text with {{column}} in it.")
        self._parts: dict[str, list[tuple[str, str | None]]] = {}
        for name, text in columns.items():
            try:
                parts = list(string.Formatter().parse(text))
            except ValueError as error:
                raise UserError(f"format of {name!r} is {text!r}: {error}.") from error
            if any(column == "" or spec or conversion for _, column, spec, conversion in parts):
                raise UserError(f"format of {name!r} is {text!r}: write {{column}}, and braces as {{{{ and }}}}.")
            self._parts[name] = [(literal, column) for literal, column, _, _ in parts]

    @property
    def columns(self) -> set[str]:
        """The columns that they are made of."""
        return {column for parts in self._parts.values() for _, column in parts if column is not None}

    @property
    def names(self) -> list[str]:
        """The columns that are made."""
        return list(self._parts)

    def __call__(self, row: Any) -> Any:
        """The row with these columns; a `MalformedRow` where one that they need is neither text nor a number."""
        if not isinstance(row, Mapping):
            return row
        columns = {}
        for name, parts in self._parts.items():
            for _, column in parts:
                if column is not None and not isinstance(row.get(column), str | int | float):
                    what = "is missing" if column not in row else f"is {type(row[column]).__name__}, not text"
                    return MalformedRow(f"{column!r}, of which the format of {name!r} is made, {what}")
            columns[name] = "".join(literal + ("" if column is None else str(row[column])) for literal, column in parts)
        return {**row, **columns}


def formatted(rows: Rows, columns: Mapping[str, str]) -> Rows:
    """Rows with new columns; see `Format`."""
    form = Format(columns)
    return rows.mapped(form, form.names, dict(columns))
