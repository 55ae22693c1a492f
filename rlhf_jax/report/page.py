"""One HTML page that needs nothing else: no network, no other file. Everything from a run's folder is escaped."""

from __future__ import annotations

import base64
import hashlib
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.report import charts, html_parts, overoptimization, samples, table_data
from rlhf_jax.report.html_parts import e
from rlhf_jax.report.series import Group
from rlhf_jax.runtime.run_folder import write_atomically
from rlhf_jax.utils.strict_json import json_text

_HERE = pathlib.Path(__file__).parent
_STYLES = ("uplot/uPlot.min.css", "page.css")
_SCRIPTS = ("uplot/uPlot.iife.min.js", "plots.js", "samples.js", "page.js")


def in_script(value: Any) -> str:
    """JSON that may stand in a script element: no `<`, so that no text can end it."""
    return json_text(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def tab(name: str, groups: Sequence[Group]) -> tuple[dict[str, Any], str]:
    """What a tab's charts and tables are made of, and its HTML.

    Args:
      name: of charts.PAGES.
      groups: of its stages, at least one.

    Returns:
      (data for the page's script, HTML)
    """
    runs = [run for group in groups for run in group.runs]
    curves = charts.Curves(groups)
    drawn = charts.sections(curves)
    shown = samples.collect(runs)
    calibrated = table_data.calibration(runs)
    gold = overoptimization.frontier(curves) if name == "policy" else None
    score = "objective/scores" if any("objective/scores" in group.names() for group in groups) else "reward"
    data = {
        "tab": name,
        "groups": [{"label": group.label, "seeds": len(group.runs)} for group in groups],
        "runs": [run.name for run in runs],
        "sections": drawn,
        "clocks": charts.clocks(curves),
        "frontier": {
            "train": charts.against(curves, "objective/kl", score, root=True),
            "eval": charts.against(curves, "eval/kl", "eval/scores", root=True),
        },
        "measured": gold,
        "lengths": {
            "train": charts.against(curves, "val/response_length", score),
            "eval": charts.against(curves, "eval/response_length", "eval/scores"),
        },
        "calibration": calibrated,
        "samples": shown,
        "curves": curves.drawn,
        "grids": curves.grids,
    }
    data["metrics"] = table_data.tooltips([*curves.drawn])
    body = [html_parts.runs(groups, name), html_parts.alarms(runs), html_parts.comparisons(runs)]
    body += [f'<div class="sections" data-sections="{e(name)}"></div>']
    if name == "policy":
        body += [
            '<h2>Trade-offs</h2><div class="grid">'
            '<figure class="card"><figcaption>Reward against √KL <small>the frontier</small></figcaption>'
            f'<div class="plot" data-scatter="frontier" data-tab="{e(name)}"></div></figure>'
            f"{html_parts.measured(gold, name)}"
            '<figure class="card"><figcaption>Reward against length <small>does it pay to be long?</small></figcaption>'
            f'<div class="plot" data-scatter="lengths" data-tab="{e(name)}"></div></figure></div>',
            html_parts.fits(gold, groups),
        ]
    body.append(html_parts.calibration(name, calibrated))
    if name == "policy":
        body.append(html_parts.samples(name, shown))
    body.append(html_parts.config(groups))
    return data, "\n".join(body)


def page(groups: Sequence[Group], title: str, made: float | None = None) -> str:
    """The whole page.

    Args:
      groups: of all stages.
      title: of the page.
      made: seconds since 1970; None: now.

    Returns:
      HTML.
    """
    made = time.time() if made is None else made
    tabs = {name: [g for g in groups if g.stage in stages] for name, stages in charts.PAGES.items()}
    tabs = {name: members for name, members in tabs.items() if members}
    contents = {name: tab(name, members) for name, members in tabs.items()}
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(made))
    count = sum(len(group.runs) for group in groups)
    buttons = "".join(
        f'<button role="tab" id="button-{n}" aria-controls="tab-{n}">{e(charts.TITLES[n])}</button>' for n in tabs
    )
    sections = "".join(
        f'<section class="tab" role="tabpanel" id="tab-{n}" aria-labelledby="button-{n}">{html}</section>'
        for n, (_, html) in contents.items()
    )
    style, script = ("\n".join((_HERE / file).read_text(encoding="utf-8") for file in f) for f in (_STYLES, _SCRIPTS))
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'"
    whole = {"tabs": [data for data, _ in contents.values()]}
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta http-equiv="Content-Security-Policy" content="{e(policy)}; form-action 'none'">
<title>{e(title)}</title>
<style>{style}</style>
</head>
<body>
<header>
<div><h1>{e(title)}</h1>
<p class="quiet">{count} {"run" if count == 1 else "runs"}, as of {e(when)}</p></div>
<div class="tools">
<label>x <select id="across"><option value="step">update</option><option value="episode">episodes</option>
<option value="hours">hours</option></select></label>
<label>smooth <input id="smooth" type="range" min="0" max="0.98" step="0.02" value="0"></label>
<button id="theme" title="light or dark">◐</button>
</div>
</header>
<nav role="tablist"{" hidden" if len(tabs) < 2 else ""}>{buttons}</nav>
<noscript><p class="note">The charts and the samples need JavaScript; tables and configs are below.</p></noscript>
<main>{sections}</main>
<footer class="quiet">Made by python -m rlhf_jax.report. What each metric is: the ? of a chart, or docs/metrics.md.
Charts by uPlot (MIT, © Leon Sorokin).</footer>
<script type="application/json" id="data">{in_script(whole)}</script>
<script>{script}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode() + "'"


def save(path: str, text: str) -> None:
    """Writes a page whole, or not at all: it may be open in a browser.

    Raises:
      UserError: the file cannot be written.
    """
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}). Give another --out") from error
