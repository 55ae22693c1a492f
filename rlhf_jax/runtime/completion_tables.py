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


def unique_prompts(rows: Sequence[Row]) -> list[Row]:
    """The first row of each prompt (TRL's log_unique_prompts)."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.get("prompt", row.get("query")), row)
    return list(first.values())


def cell(value: Any) -> str:
    """A value as a table shows it: numbers to 2 decimals, anything else as text, which `printable` makes safe."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return printable(str(value))
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def show(rows: Sequence[Row], title: str, limit: int | None = None, stream: TextIO | None = None) -> None:
    """Prints a table with rich.

    Args:
      rows: dicts of the same keys; texts of any length wrap.
      title: above the table.
      limit: rows to print; None: all.
      stream: where to; default: standard output.
    """
    if not rows:
        return
    shown = rows if limit is None else rows[:limit]
    table = Table(title=Text(printable(title)), show_lines=True, title_justify="left")
    for name in rows[0]:
        of_numbers = all(isinstance(row.get(name), (int, float)) for row in shown)
        table.add_column(
            Text(printable(name)), justify="right" if of_numbers else "left", overflow="fold", no_wrap=of_numbers
        )
    for row in shown:
        # Text, not markup: a completion may hold [brackets].
        table.add_row(*(Text(cell(row.get(name, ""))) for name in rows[0]))
    if len(shown) < len(rows):
        table.caption = f"{len(shown)} of {len(rows)} rows"
    Console(file=stream, soft_wrap=False).print(table)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, line ends, bars and HTML escaped; '' for no rows."""
    if not rows:
        return ""

    def safe(value: Any) -> str:
        # A completion's <tags> are what the model wrote: a browser would swallow them.
        text = html.escape(cell(value), quote=False)
        return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")

    names = list(rows[0])
    lines = ["| " + " | ".join(map(safe, names)) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(safe(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines)
