"""The self-contained HTML page, without network access or other files. Text from run folders is escaped."""

from __future__ import annotations

import base64
import hashlib
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.report import charts, html_parts, overoptimization, samples, table_data
from rlhf_jax.report.html_parts import e
from rlhf_jax.report.series import Group
from rlhf_jax.storage import absolute, write_atomically
from rlhf_jax.utils.strict_json import json_text

_HERE = pathlib.Path(__file__).parent
_STYLES = ("uplot/uPlot.min.css", "page.css")
_SCRIPTS = ("uplot/uPlot.iife.min.js", "plots.js", "samples.js", "page.js")
_LIVE_SCRIPT = "live.js"


def title(run_dirs: Sequence[str]) -> str:
    """The title of a page about runs."""
    names = " and ".join(os.path.basename(absolute(folder)) for folder in run_dirs[:3])
    return names + (f" and {len(run_dirs) - 3} more" if len(run_dirs) > 3 else "")


def script_json(value: Any) -> str:
    """JSON for a script element: `<` is escaped, so that no text can close the element."""
    return json_text(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def build_tab(name: str, groups: Sequence[Group]) -> tuple[dict[str, Any], str]:
    """The data and the HTML of a tab.

    Args:
      name: a key of charts.TABS.
      groups: of its stages, at least one.

    Returns:
      (data for the page's script, HTML)
    """
    runs = [run for group in groups for run in group.runs]
    curves = charts.Curves(groups)
    sections = charts.sections(curves)
    sample_data = samples.collect_samples(runs)
    calibration = table_data.calibration(runs)
    gold = overoptimization.gold_reward_chart(curves) if name == "policy" else None
    score = "objective/scores" if any("objective/scores" in group.names() for group in groups) else "reward"
    data = {
        "tab": name,
        "groups": [{"label": group.label, "seeds": len(group.runs)} for group in groups],
        "runs": [run.name for run in runs],
        "sections": sections,
        "clocks": charts.clocks(curves),
        "frontier": {
            "train": charts.scatter(curves, "objective/kl", score, square_root=True),
            "eval": charts.scatter(curves, "eval/kl", "eval/scores", square_root=True),
        },
        "measured": gold,
        "lengths": {
            "train": charts.scatter(curves, "val/response_length", score),
            "eval": charts.scatter(curves, "eval/response_length", "eval/scores"),
        },
        "calibration": calibration,
        "samples": sample_data,
        "curves": curves.data,
        "grids": curves.grids,
        "metrics": table_data.tooltips([*curves.data]),
    }
    body = [html_parts.runs(groups, name), html_parts.alarms(runs), html_parts.comparisons(groups)]
    body.append(html_parts.group_differences(groups, name))
    body.append(f'<div class="sections" data-sections="{e(name)}"></div>')
    if name == "policy":
        body += [html_parts.trade_offs(gold, name), html_parts.fits(gold, groups)]
    body.append(html_parts.calibration(name, calibration))
    if name == "policy":
        body.append(html_parts.samples(name, sample_data))
    body += [html_parts.config(groups), html_parts.environments(groups)]
    return data, "\n".join(body)


def render_page(groups: Sequence[Group], title: str, created: float | None = None, version: str | None = None) -> str:
    """The page as HTML.

    Args:
      groups: of all stages.
      created: seconds since 1970; None: now.
      version: of the runs' files, for a page that a server keeps up to date; None: a page that needs no server. Only
        the former may have no groups.
    """
    created = time.time() if created is None else created
    tabs = {name: [group for group in groups if charts.tab_of(group.stage) == name] for name in charts.TABS}
    tabs = {name: members for name, members in tabs.items() if members}
    contents = {name: build_tab(name, members) for name, members in tabs.items()}
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(created))
    count = sum(len(group.runs) for group in groups)
    buttons = "".join(
        f'<button role="tab" id="button-{n}" aria-controls="tab-{n}">{e(charts.TABS[n])}</button>' for n in tabs
    )
    sections = "".join(
        f'<section class="tab" role="tabpanel" id="tab-{n}" aria-labelledby="button-{n}">{html}</section>'
        for n, (_, html) in contents.items()
    )
    if version is not None and not tabs:
        sections = '<p class="note">No run yet: none of the folders has a config.json.</p>'
    scripts = (*(_SCRIPTS if tabs else ()), *(() if version is None else (_LIVE_SCRIPT,)))
    style, script = ("\n".join((_HERE / file).read_text(encoding="utf-8") for file in f) for f in (_STYLES, scripts))
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'"
    policy += "" if version is None else "; connect-src 'self'"
    page_data = {"tabs": [data for data, _ in contents.values()]}
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
<body{"" if version is None else f' data-version="{e(version)}"'}>
<header>
<div><h1>{e(title)}</h1>
<p class="quiet">{count} {"run" if count == 1 else "runs"}, {e(when)}</p></div>
<div class="tools">
<label>x axis <select id="across"><option value="step">update</option><option value="episode">episodes</option>
<option value="hours">hours</option></select></label>
<label>smooth <input id="smooth" type="range" min="0" max="0.98" step="0.02" value="0"></label>
<button id="theme" title="switch between light and dark">◐</button>
</div>
</header>
<nav role="tablist"{" hidden" if len(tabs) < 2 else ""}>{buttons}</nav>
<noscript><p class="note">Charts and samples need JavaScript; tables and configs do not.</p></noscript>
<main>{sections}</main>
<footer class="quiet">Created by rlhf-jax report. Metrics are explained by the ? of a chart and in
docs/metrics.md. Charts by uPlot (MIT, © Leon Sorokin).</footer>
<script type="application/json" id="data">{script_json(page_data)}</script>
<script>{script}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode() + "'"


def save(path: str, text: str) -> None:
    """Writes a page atomically, since it may be open in a browser.

    Raises:
      UserError: the file cannot be written.
    """
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}). Set another --out") from error
