"""Completions as tables: in the terminal, and as Markdown for TensorBoard."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_jax.utils.text import printable

Row = dict[str, Any]
MOST_CHARACTERS = 120
"""Of a cell in the terminal."""
THUMBNAILS = "thumbnails"
"""The column of small images, as data addresses, which only files have."""


def unique_prompts(rows: Sequence[Row]) -> list[Row]:
    """The first row of each prompt (TRL's log_unique_prompts)."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.get("prompt", row.get("query")), row)
    return list(first.values())


def without_thumbnails(rows: Sequence[Row]) -> list[Row]:
    """Rows for tables of text."""
    return [{name: value for name, value in row.items() if name != THUMBNAILS} for row in rows]


def cell(value: Any) -> str:
    """A value for a table: floats with 2 decimals, anything else as `printable` text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return printable(str(value))
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def short_cell(value: Any) -> str:
    """`cell` for the terminal: line ends as \\n, the middle cut beyond MOST_CHARACTERS."""
    text = cell(value).replace("\n", "\\n")
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half].rstrip()} ... {text[-half:].lstrip()}"


def show(rows: Sequence[Row], title: str, limit: int | None = None, stream: TextIO | None = None) -> None:
    """Prints a table with rich, its texts cut as by `short_cell`.

    Args:
      rows: dicts of the same keys.
      title: above the table.
      limit: rows to print; None: all.
      stream: default: standard output.
    """
    if not rows:
        return
    printed = rows if limit is None else rows[:limit]
    table = Table(title=Text(printable(title)), show_lines=True, title_justify="left")
    for name in rows[0]:
        is_numeric = all(isinstance(row.get(name), (int, float)) for row in printed)
        table.add_column(
            Text(printable(name)), justify="right" if is_numeric else "left", overflow="fold", no_wrap=is_numeric
        )
    for row in printed:
        # Text, since a completion may contain rich's markup in [brackets].
        table.add_row(*(Text(short_cell(row.get(name, ""))) for name in rows[0]))
    if len(printed) < len(rows):
        table.caption = f"{len(printed)} of {len(rows)} rows"
    Console(file=stream, soft_wrap=False).print(table)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, with line ends, bars and HTML escaped; '' for no rows."""
    if not rows:
        return ""

    def escape(value: Any) -> str:
        # A browser would hide the <tags> of a completion.
        text = html.escape(cell(value), quote=False)
        return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")

    names = list(rows[0])
    lines = ["| " + " | ".join(map(escape, names)) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(escape(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines)
