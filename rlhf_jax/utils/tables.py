"""Tables of text: in the terminal, by rich, and as Markdown for TensorBoard."""

from __future__ import annotations

import html
import io
import shutil
from collections.abc import Sequence
from typing import Any, TextIO

from rich.box import Box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhf_jax.utils.text import printable

Row = dict[str, Any]
MOST_CHARACTERS = 80
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


_RULED = Box("    \n    \n -- \n    \n    \n    \n    \n    \n")
"""Only a rule, below the header."""
_COLUMNS = Box("    \n  | \n -+ \n  | \n    \n    \n  | \n    \n")
"""A rule below the header, and bars between columns."""


def plain_table(cells: Sequence[Sequence[str]]) -> str:
    """A table in plain text: header, rule, rows; the first column left-aligned, the others right-aligned.

    Args:
      cells: [rows][columns], header first.

    Returns:
      Lines without a final newline.
    """
    table = Table(box=_RULED, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for number, head in enumerate(cells[0]):
        table.add_column(Text(head), justify="right" if number else "left", no_wrap=True)
    for row in cells[1:]:
        table.add_row(*map(Text, row))
    return _as_text(table, 10_000)


def side_by_side(samples: Sequence[dict[str, Any]], width: int | None = None) -> str:
    """Samples in plain text: each post followed by its responses in columns, with their gold rewards.

    Args:
      samples: {"post": str, "responses": [{"name": str, "text": str, "gold": float, "note": str}, ...]} each; "note"
        and "gold" are optional, and are printed after the name.
      width: of a line in characters; default: the terminal's.

    Returns:
      Lines without a final newline.
    """
    width = max(width or shutil.get_terminal_size((100, 24)).columns, 40)
    blocks = []
    for number, sample in enumerate(samples, 1):
        table = Table(box=_COLUMNS, show_edge=False, pad_edge=False, expand=True)
        for response in sample["responses"]:
            gold = response.get("gold")
            note = response.get("note") or ("" if gold is None else f"gold {gold:.2f}")
            name = f"{response['name']} ({note})" if note else response["name"]
            table.add_column(Text(printable(name)), ratio=1, overflow="fold")
        texts = (printable(" ".join(response["text"].split())) for response in sample["responses"])
        table.add_row(*(Text(text or "(empty)") for text in texts))
        post = Text(printable(sample["post"]))
        blocks.append(_as_text(Group(Text(f"== Sample {number}"), post, Text(), table), width))
    return "\n\n".join(blocks)


def _as_text(content: RenderableType, width: int) -> str:
    """Lines of at most `width` characters without spaces at their ends."""
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None, highlight=False).print(content)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
