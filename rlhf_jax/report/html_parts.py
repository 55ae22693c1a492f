"""The parts of a page, as HTML. Everything from a run's folder is escaped."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import Any

from rlhf_jax.report import charts, read_run, table_data
from rlhf_jax.report.read_run import Run
from rlhf_jax.report.series import Group
from rlhf_jax.utils.text import duration, printable


def e(value: Any) -> str:
    """Text for HTML, in elements and in quoted attributes; what would turn the direction of reading as an escape."""
    text = value if isinstance(value, str) else str(value)
    return html.escape(printable(text).replace("\0", "\\x00"), quote=True)


def _number(value: float | int | None, digits: int = 4) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table of HTML cells; the first of a row is its head."""
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    lines = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    table = f'<table class="{e(kind)}"><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def runs(groups: Sequence[Group], name: str) -> str:
    """How far the runs are, and their last numbers."""
    columns: dict[str, str] = {}
    rows = []
    for i, group in enumerate(groups):
        states = [table_data.status(run) for run in group.runs]
        found = {item["metric"]: item for item in table_data.headlines(group, name)}
        columns |= {metric: item["label"] for metric, item in found.items()}
        rows.append((i, group, states, found))
    heads = ["run", "state", *map(e, columns.values()), "time", "memory"]
    lines = []
    for i, group, states, found in rows:
        words = sorted({state["state"] for state in states})
        done = min(state["updates"] for state in states)
        total = states[0]["total"]
        progress = f"{done:,}" + (f" of {total:,}" if total else "")
        cells = [
            f'<button class="run" data-group="{i}" data-tab="{e(name)}" aria-pressed="true" title="show or hide">'
            f'<i class="dot" data-colour="{i}"></i>{e(group.label)}</button>',
            f'<span class="state {e(words[0].split()[0])}">{e(", ".join(words))}</span>'
            f"<br><small>{progress} updates</small>",
        ]
        for metric in columns:
            item = found.get(metric)
            if item is None:
                cells.append("–")
                continue
            spread = "" if item["spread"] is None else f" <small>± {_number(item['spread'], 2)}</small>"
            first = "" if metric.startswith("eval/") else f"<br><small>from {_number(item['first'], 3)}</small>"
            cells.append(f"{_number(item['value'])}{spread}{first}")
        seconds = [state["seconds"] for state in states if state["seconds"] is not None]
        medians = [state["median"] for state in states if state["median"] is not None]
        memory = [state["memory"] for state in states if state["memory"] is not None]
        cells += [
            (e(duration(sum(seconds) / len(seconds))) if seconds else "–")
            + (f"<br><small>{_number(medians[0], 3)} s an update</small>" if medians else ""),
            f"{max(memory):,.0f} MiB" if memory else "–",
        ]
        lines.append(cells)
    seeds = any(len(group.runs) > 1 for group in groups)
    note = "Numbers are means of the last tenth of the updates (at most 20)"
    note += (
        "; of several seeds the mean ± standard deviation, and bands are their least and greatest." if seeds else "."
    )
    notes = [f"{run.name}: {note}" for group in groups for run in group.runs for note in run.notes]
    said = "".join(f'<p class="note">{e(line)}</p>' for line in notes)
    return f'<h2>Runs</h2>{_table(heads, lines, "runs")}<p class="quiet">{e(note)}</p>{said}'


def alarms(runs: Sequence[Run]) -> str:
    """Alarms, updates in which something was not finite, and metrics that were not."""
    items = []
    for run in runs:
        for alarm in read_run.alarms(run):
            about = (table_data.explain(alarm["name"]) or table_data.explain("alarm/kl_above")).meaning
            until = "still raised" if alarm["last"] is None else f"until update {alarm['last']:,}"
            items.append(
                f'<li class="alarm"><b>{e(alarm["name"].removeprefix("alarm/"))}</b> {e(run.name)}: from update '
                f"{alarm['first']:,}, {until}. <small>{e(about)}</small></li>"
            )
        events, bad = read_run.not_finite(run)
        for event in events:
            causes = ", ".join(event["causes"]) or "see its rows"
            applied = f"; {event['applied']} steps before that stay" if event["applied"] else ""
            rows = "".join(
                f"<li><code>{e(json.dumps(row, ensure_ascii=False)[:600])}</code></li>" for row in event["rows"]
            )
            more = f"<details><summary>rows</summary><ul>{rows}</ul></details>" if rows else ""
            items.append(
                f'<li class="bad"><b>not finite</b> {e(run.name)}, update {event["step"]:,}: '
                f"{e(causes)}{applied}.{more}</li>"
            )
        if bad:
            some = ", ".join(f"{name} ({count:,}, first at {first:,})" for name, (count, first) in [*bad.items()][:12])
            items.append(
                f'<li class="odd"><b>gaps</b> {e(run.name)}: updates in which a metric is no number: {e(some)}</li>'
            )
    if not items:
        return '<h2>Alarms</h2><p class="fine">No alarm was raised, and nothing was not finite.</p>'
    return f'<h2>Alarms <span class="count">{len(items)}</span></h2><ul class="alarms">{"".join(items)}</ul>'


def comparisons(runs: Sequence[Run]) -> str:
    """The table of what pipelines end with."""
    found = table_data.comparisons(runs) if any(run.stage in charts.PAGES["policy"] for run in runs) else []
    columns = {
        "gold_reward": "gold reward", "score": "reward model", "kl": "KL", "length": "length",
        "eos_rate": "eos rate", "win_rate": "win rate over SFT",
    }  # fmt: skip
    columns = {key: label for key, label in columns.items() if any(key in row for one in found for row in one["rows"])}
    rows = []
    for one in found:
        for number, row in enumerate(one["rows"]):
            cells = [e(one["name"]) if number == 0 else "", e(row["name"])]
            for key in columns:
                error = f" <small>± {_number(float(row[f'{key}_se']), 2)}</small>" if f"{key}_se" in row else ""
                cells.append(_number(float(row[key])) + error if key in row else "–")
            rows.append(cells)
    if not rows:
        return ""
    return f"<h2>Held-out prompts at the end</h2>{_table(['pipeline', 'policy', *columns.values()], rows)}"


def calibration(name: str, found: Sequence[dict[str, Any]]) -> str:
    """The diagram of a reward model that has pairs to be held against, or why there is none."""
    if name == "sft":
        return ""
    if found:
        return (
            '<h2>Calibration</h2><p class="quiet">How often the reward model ranks held-out pairs right, against how '
            "sure it is, sigmoid(|margin|). On the line it is calibrated; below it is overconfident. Bars are standard "
            'errors.</p><div class="grid"><figure class="card"><figcaption>Reliability '
            f'<select data-bins="{e(name)}"></select></figcaption>'
            f'<div class="plot" data-calibration="{e(name)}"></div></figure></div>'
        )
    if name == "reward":
        why = "no evaluation on pairs has been made yet, or the run was made before evaluations kept their margins"
    else:
        why = (
            "a run of PPO or RLOO has scores of the policy's own responses and no judgements to hold them against. The "
            "reward model's own run has: see its tab, or give its folder too"
        )
    return f'<h2>Calibration</h2><p class="note">No data for it here: {e(why)}.</p>'


def samples(name: str, found: dict[str, Any]) -> str:
    """The table of samples, which the page's script fills, or why there is none."""
    if not found["files"]:
        why = "completions/ is empty: the first samples come with num_sample_generations, or the run began without them"
        return f'<h2>Samples</h2><p class="note">{e(why)}.</p>'
    left = (
        f" {found['left_out']:,} files between those shown were left out to keep the page small."
        if found["left_out"]
        else ""
    )
    return f"""<h2>Samples</h2>
<p class="quiet">Samples are nearly greedy answers to the same prompts; training rows are those that were learned from.
Open a row's prompt for all of it, and for what other updates answered.{e(left)}</p>
<div class="samples" data-samples="{e(name)}">
<div class="filters">
<label>run <select class="of-run"></select></label>
<label>rows <select class="of-kind"></select></label>
<label>update <select class="of-step"></select></label>
<label>colour <select class="of-colour"><option value="kl">KL to the reference</option>
<option value="advantages">advantage</option><option value="">none</option></select></label>
<label>ended <select class="of-end"><option value="">all</option><option value="yes">by itself</option>
<option value="no">cut</option></select></label>
<label>score ≥ <input class="of-least" type="number" step="any"></label>
<label>score ≤ <input class="of-most" type="number" step="any"></label>
<label>sort <select class="of-order"><option value="">as written</option><option value="score">score</option>
<option value="-score">score, falling</option><option value="-length">length</option>
<option value="-kl">KL</option></select></label>
<label class="wide">search <input class="of-text" type="search" placeholder="in prompts and responses"></label>
</div>
<p class="legend" aria-live="polite"></p>
<div class="rows"></div>
<p class="pages"><button class="before">‹ before</button> <span class="where"></span>
<button class="after">after ›</button></p>
</div>"""


def measured(gold: dict[str, Any] | None, tab: str) -> str:
    """The chart of a reward that is measured only; nothing where there is none."""
    if gold is None:
        return ""
    return (
        f'<figure class="card"><figcaption>{e(gold["name"])} against √KL <small>measured, not learned from</small>'
        f'</figcaption><div class="plot" data-scatter="measured" data-tab="{e(tab)}"></div></figure>'
    )


def fits(gold: dict[str, Any] | None, groups: Sequence[Group]) -> str:
    """The numbers of the lines of `measured`."""
    if gold is None or not gold["fits"]:
        return ""
    rows = [
        [f'<i class="dot" data-colour="{fit["group"]}"></i>{e(groups[fit["group"]].label)}']
        + [_number(fit[name], 3) for name in ("alpha", "beta", "peak")]
        for fit in gold["fits"]
    ]
    heads = ["fit of R(0) + d (α − β log d), d = √KL", "α", "β", "turns at d"]
    return f"<h3>{e(gold['name'])}: the lines</h3>{_table(heads, rows)}"


def config(groups: Sequence[Group]) -> str:
    """Options, with what the recipe and the dataclass had."""
    rows = table_data.options(groups)
    several = len(groups) > 1
    recipes = [group.runs[0].recipe for group in groups]
    heads = ["option", *(e(g.label) if several else "value" for g in groups), "recipe", "default"]
    lines = []
    for row in rows:
        changed = any(row["changed"])
        classes = " ".join(w for w, on in (("changed", changed), ("differs", row["differs"])) if on)
        cells = [
            f'<td class="{"not-recipe" if changed_here else ""}"><code>{_value(value)}</code></td>'
            for value, changed_here in zip(row["values"], row["changed"], strict=True)
        ]
        both = [_apart(row["recipes"]), _apart(row["defaults"])]
        cells += [f"<td><code>{cell}</code></td>" for cell in both]
        hidden = "" if changed or row["differs"] or row["unusual"] else " hidden"
        name = f'<th scope="row" title="{e(row["about"])}">{e(row["name"])}</th>'
        lines.append(
            f'<tr class="{classes}" data-usual="{"" if row["unusual"] else "1"}"{hidden}>{name}{"".join(cells)}</tr>'
        )
    names = [
        f"{group.label}: {recipe['config'] if recipe else 'made without a config file, so held against the defaults'}"
        for group, recipe in zip(groups, recipes, strict=True)
    ]
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    bold = "; bold: the runs differ" if several else ""
    other = '<option value="differs">where the runs differ</option>' if several else ""
    return f"""<h2>Config</h2>
<p class="quiet">Recipe: {e("; ".join(names))}. Marked: not as the recipe has it{bold}.</p>
<div class="filters"><label>show <select class="of-options"><option value="unusual">what is not the default</option>
<option value="changed">what is not the recipe's</option>{other}
<option value="all">all options</option></select></label>
<label class="wide">search <input class="of-option" type="search" placeholder="name, meaning, value"></label></div>
<div class="scroll"><table class="config"><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>"""


def _value(value: str | None) -> str:
    return "–" if value is None else "None" if value == "null" else e(re.sub(r'^"(.*)"$', r"\1", value))


def _apart(values: Sequence[str | None]) -> str:
    """A value that all have, or each of theirs."""
    return " | ".join(_value(value) for value in dict.fromkeys(values))
