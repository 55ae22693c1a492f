"""The page of one update: its metrics, and its rows with their tokens."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from rlhf_jax.report import page as report_page
from rlhf_jax.report.html_parts import e

_TOKEN_COLUMNS = {
    "token_logprobs": "log-probability",
    "token_new_logprobs": "after the update",
    "token_ratio": "ratio",
    "token_clipped": "clipped",
    "token_kl": "KL",
    "token_advantages": "advantage",
    "token_values": "value",
    "token_returns": "return",
}
_STYLE = """
table { border-collapse: collapse; font-size: 13px; } td, th { padding: 2px 8px; text-align: right; }
td.text { text-align: left; white-space: pre-wrap; } details { margin: 8px 0; }
summary { cursor: pointer; } .scroll { overflow-x: auto; }
"""


def write(path: str, title: str, metrics: dict[str, Any], table: Sequence[dict[str, Any]]) -> None:
    """Writes the page, without scripts.

    Args:
      metrics: of the update.
      table: of `replay.rows_of`, in order.

    Raises:
      UserError: the file cannot be written.
    """
    style = (pathlib.Path(report_page.__file__).parent / "page.css").read_text(encoding="utf-8") + _STYLE
    lines = "".join(f"<tr><td class=text>{e(name)}</td><td>{_cell(value)}</td></tr>" for name, value in metrics.items())
    rows = "\n".join(map(_row, table))
    report_page.save(
        path,
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark"><title>{e(title)}</title><style>{style}</style></head>
<body><header><h1>{e(title)}</h1></header>
<details><summary>Metrics</summary><div class=scroll><table>{lines}</table></div></details>
<h2>{len(table)} rows</h2>
{rows}
<footer class="quiet">Created by rlhf-jax replay. Columns are explained in docs/what_happened.md.</footer>
</body></html>
""",
    )


def _row(row: dict[str, Any]) -> str:
    numbers = ("score", "kl", "advantage", "loss", "gradient_norm", "moved", "clipped")
    summary = ", ".join(f"{name} {_cell(row[name])}" for name in numbers if row[name] is not None)
    columns = {name: title for name, title in _TOKEN_COLUMNS.items() if row[name] is not None}
    head = "".join(f"<th>{e(title)}</th>" for title in ("token", *columns.values()))
    body = "".join(
        f"<tr><td class=text>{e(token)}</td>{''.join(f'<td>{_cell(row[name][i])}</td>' for name in columns)}</tr>"
        for i, token in enumerate(row["tokens"])
    )
    return (
        f"<details><summary>row {row['row']}: {summary}<br><small>{e(row['completion'][:200])}</small></summary>"
        f"<p class=quiet>{e(row['prompt'])}</p><div class=scroll><table><tr>{head}</tr>{body}</table></div></details>"
    )


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:.4g}" if isinstance(value, float) else e(str(value))
