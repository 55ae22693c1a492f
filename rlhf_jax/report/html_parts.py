"""The sections of the page as HTML. Text from run folders is escaped."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_jax.report import charts, differences, read_run, table_data
from rlhf_jax.report.read_run import Run
from rlhf_jax.report.series import Group
from rlhf_jax.utils.text import duration, printable


def e(value: Any) -> str:
    """Escapes text for HTML elements and quoted attributes. Marks that change the reading direction are escaped too."""
    text = value if isinstance(value, str) else str(value)
    return html.escape(printable(text).replace("\0", "\\x00"), quote=True)


def _number(value: float | int | None, digits: int = 4) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table of HTML cells; the first cell of a row is its header."""
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    lines = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    table = f'<table class="{e(kind)}"><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def runs(groups: Sequence[Group], tab: str) -> str:
    """The table of runs: status, progress, latest metrics, time and memory."""
    headlines = [{item["metric"]: item for item in table_data.headlines(group, tab)} for group in groups]
    columns = {metric: item["label"] for items in headlines for metric, item in items.items()}
    rows = [
        _run_row(_group_button(i, group, tab), group, items, [*columns])
        for i, (group, items) in enumerate(zip(groups, headlines))
    ]
    note = "Values are means over the last tenth of the updates (at most 20)"
    if any(len(group.runs) > 1 for group in groups):
        note += (
            ", for several seeds the mean over seeds ± half the width of its 95 % interval (Student's t), for one "
            "seed the held-out score ± its standard error over prompts; bands show minimum and maximum"
        )
    heads = ["run", "state", *map(e, columns.values()), "time", "memory"]
    singles = [Group(run.name, [run]) for group in groups if len(group.runs) > 1 for run in group.runs]
    single_rows = [
        _run_row(e(one.label), one, {item["metric"]: item for item in table_data.headlines(one, tab)}, [*columns])
        for one in singles
    ]
    details = (
        f"<details><summary>Single runs</summary>{_table(heads, single_rows, 'runs')}</details>" if singles else ""
    )
    problems = [f"{run.name}: {problem}" for group in groups for run in group.runs for problem in run.notes]
    problems_html = "".join(f'<p class="note">{e(line)}</p>' for line in problems)
    return f'<h2>Runs</h2>{_table(heads, rows, "runs")}<p class="quiet">{e(note)}.</p>{details}{problems_html}'


def _group_button(i: int, group: Group, tab: str) -> str:
    """A group's name, which shows and hides its curves."""
    return (
        f'<button class="run" data-group="{i}" data-tab="{e(tab)}" aria-pressed="true" title="show or hide">'
        f'<i class="dot" data-colour="{i}"></i>{e(group.label)}</button>'
    )


def _run_row(head: str, group: Group, headlines: dict[str, Any], metrics: Sequence[str]) -> list[str]:
    """Cells of a group in the table of runs: its HTML `head`, and `headlines` by metric."""
    statuses = [table_data.status(run) for run in group.runs]
    states = sorted({status["state"] for status in statuses})
    updates, total = min(status["updates"] for status in statuses), statuses[0]["total"]
    progress = f"{updates:,}" + (f" of {total:,}" if total else "")
    cells = [
        head,
        f'<span class="state {e(states[0].split()[0])}">{e(", ".join(states))}</span>'
        f"<br><small>{progress} updates</small>",
    ]
    for metric in metrics:
        item = headlines.get(metric)
        if item is None:
            cells.append("–")
            continue
        spread = "" if item["spread"] is None else f" <small>± {_number(item['spread'], 2)}</small>"
        first = "" if metric.startswith("eval/") else f"<br><small>from {_number(item['first'], 3)}</small>"
        cells.append(f"{_number(item['value'])}{spread}{first}")
    seconds, medians, memory = (
        [status[key] for status in statuses if status[key] is not None] for key in ("seconds", "median", "memory")
    )
    time_cell = e(duration(sum(seconds) / len(seconds))) if seconds else "–"
    time_cell += f"<br><small>{_number(medians[0], 3)} s per update</small>" if medians else ""
    return [*cells, time_cell, f"{max(memory):,.0f} MiB" if memory else "–"]


def alarms(runs: Sequence[Run]) -> str:
    """The list of alarms, non-finite updates and metrics with non-finite values."""
    items = [item for run in runs for item in _alarm_items(run)]
    if not items:
        return '<h2>Alarms</h2><p class="fine">No alarm was raised, and all values are finite.</p>'
    return f'<h2>Alarms <span class="count">{len(items)}</span></h2><ul class="alarms">{"".join(items)}</ul>'


def _alarm_items(run: Run) -> Iterator[str]:
    for alarm in read_run.alarm_periods(run):
        about = (table_data.explain(alarm["name"]) or table_data.explain("alarm/kl_above")).meaning
        until = "still raised" if alarm["last"] is None else f"until update {alarm['last']:,}"
        yield (
            f'<li class="alarm"><b>{e(alarm["name"].removeprefix("alarm/"))}</b> {e(run.name)}: from update '
            f"{alarm['first']:,}, {until}. <small>{e(about)}</small></li>"
        )
    events, metrics = read_run.nonfinite_events(run)
    for event in events:
        causes = ", ".join(event["causes"]) or "see the rows"
        applied = f"; the {event['applied']} steps before it were applied" if event["applied"] else ""
        rows = "".join(f"<li><code>{e(json.dumps(row, ensure_ascii=False)[:600])}</code></li>" for row in event["rows"])
        details = f"<details><summary>rows</summary><ul>{rows}</ul></details>" if rows else ""
        yield (
            f'<li class="bad"><b>non-finite</b> {e(run.name)}, update {event["step"]:,}: '
            f"{e(causes)}{applied}.{details}</li>"
        )
    if metrics:
        counts = ", ".join(f"{name} ({n:,}, first at {first:,})" for name, (n, first) in [*metrics.items()][:12])
        yield f'<li class="odd"><b>gaps</b> {e(run.name)}: updates with a non-finite metric: {e(counts)}</li>'


def comparisons(groups: Sequence[Group]) -> str:
    """The table of the comparisons at the end of pipelines; pipelines that differ in their seed are one."""
    runs = [run for group in groups for run in group.runs]
    pipelines = table_data.comparisons(runs) if any(charts.tab_of(run.stage) == "policy" for run in runs) else []
    if not pipelines:
        return ""
    merged = table_data.seed_comparisons(groups, pipelines)
    title = "<h2>Final policies on held-out prompts</h2>"
    if len(merged) == len(pipelines):
        return title + _comparison_table(pipelines)
    note = "Pipelines of several seeds: mean over seeds ± half the width of its 95 % interval (Student's t)"
    if any(pipeline["count"] == 1 for pipeline in merged):
        note += "; of single pipelines ± is a standard error over prompts"
    single = "Single pipelines, ± standard errors over prompts"
    details = f"<details><summary>{single}</summary>{_comparison_table(pipelines)}</details>"
    return f'{title}{_comparison_table(merged)}<p class="quiet">{note}.</p>{details}'


def _comparison_table(pipelines: Sequence[dict[str, Any]]) -> str:
    """A table with the rows of pipelines."""
    start = "SFT" if any(row["name"] == "SFT" for pipeline in pipelines for row in pipeline["rows"]) else "before"
    columns = {
        "gold_reward": "gold reward", "score": "reward model", "kl": "KL", "length": "length", "entropy": "entropy",
        "eos_rate": "eos rate", "win_rate": f"win rate over {start}",
    }  # fmt: skip
    keys = dict.fromkeys(key for pipeline in pipelines for row in pipeline["rows"] for key in row)
    rewards = [key for key in keys if key.startswith("rewards/") and f"{key}_se" in keys]
    columns = {**{key: e(key.removeprefix("rewards/")) for key in rewards}, **columns}
    columns = {key: label for key, label in columns.items() if key in keys}
    rows = []
    for pipeline in pipelines:
        for number, row in enumerate(pipeline["rows"]):
            cells = [e(pipeline["name"]) if number == 0 else "", e(row["name"])]
            for key in columns:
                error = f" <small>± {_number(float(row[f'{key}_se']), 2)}</small>" if f"{key}_se" in row else ""
                cells.append(_number(float(row[key])) + error if key in row else "–")
            rows.append(cells)
    return _table(["pipeline", "policy", *columns.values()], rows)


def group_differences(groups: Sequence[Group], tab: str) -> str:
    """The table of paired differences between groups; nothing without pairs."""
    data = differences.differences(groups, tab)
    if not data:
        return ""
    rows = []
    for row in data:
        names = [
            f'<i class="dot" data-colour="{row[side]}"></i>{e(groups[row[side]].label)}' for side in ("left", "right")
        ]
        updates = [", ".join(f"{update:,}" for update in steps) for steps in row["updates"]]
        error = f"± {_number(row['error'], 2)}" + (" (95 %)" if row["unit"] == "seeds" else " (standard error)")
        rows.append(
            [
                " − ".join(names),
                e(row["metric"]),
                f"{_number(row['mean'])} <small>{error}</small>",
                f"{row['pairs']:,} {row['unit']}",
                updates[0] if updates[0] == updates[1] else " against ".join(updates),
            ]
        )
    note = (
        "Seeds: final values of the runs with the same seed are paired; ± is half the width of the 95 % t interval of "
        "the mean difference. Few seeds say little: the interval of two is wide, and many comparisons differ somewhere "
        "by chance. Prompts: scores of the last samples of the same prompts are paired, means over the seeds of a "
        "group; ± is the standard error over prompts, which says nothing about other seeds."
    )
    if len(groups) > differences.MAX_GROUPS:
        note += " With so many groups each is compared with the first alone."
    table = _table(["groups", "metric", "difference", "pairs", "update"], rows)
    return f'<h2>Differences between groups</h2>{table}<p class="quiet">{e(note)}</p>'


def trade_offs(gold: dict[str, Any] | None, tab: str) -> str:
    """The charts of reward against √KL and against length."""
    gold_chart = ""
    if gold is not None:
        gold_chart = (
            f'<figure class="card"><figcaption>{e(gold["name"])} against √KL <small>measured, not trained on</small>'
            f'</figcaption><div class="plot" data-scatter="measured" data-tab="{e(tab)}"></div></figure>'
        )
    return (
        '<h2>Trade-offs</h2><div class="grid">'
        '<figure class="card"><figcaption>Reward against √KL</figcaption>'
        f'<div class="plot" data-scatter="frontier" data-tab="{e(tab)}"></div></figure>'
        f"{gold_chart}"
        '<figure class="card"><figcaption>Reward against length</figcaption>'
        f'<div class="plot" data-scatter="lengths" data-tab="{e(tab)}"></div></figure></div>'
    )


def calibration(tab: str, rows: Sequence[dict[str, Any]]) -> str:
    """The reliability diagram of reward models, or a note why there is none."""
    if tab == "sft":
        return ""
    if rows:
        return (
            '<h2>Calibration</h2><p class="quiet">Accuracy of the reward model on held-out pairs against its '
            "confidence, sigmoid(|margin|). On the line it is calibrated; below the line it is overconfident. Bars are "
            'standard errors.</p><div class="grid"><figure class="card"><figcaption>Reliability '
            f'<select data-bins="{e(tab)}"></select></figcaption>'
            f'<div class="plot" data-calibration="{e(tab)}"></div></figure></div>'
        )
    if tab == "reward":
        reason = "no evaluation on pairs yet, or the run has no calibration/ folder"
    else:
        reason = (
            "a run of a policy has scores, but no preference labels to compare them with. The run of the reward model "
            "has them: see its tab, or add its folder"
        )
    return f'<h2>Calibration</h2><p class="note">No data: {e(reason)}.</p>'


def samples(tab: str, data: dict[str, Any]) -> str:
    """The table of samples, which the page's script fills, or a note why there is none."""
    if not data["files"]:
        reason = "completions/ is empty: no samples yet, or num_sample_generations is 0"
        return f'<h2>Samples</h2><p class="note">{e(reason)}.</p>'
    left_out = f" {data['left_out']:,} files were left out to limit the page's size." if data["left_out"] else ""
    return f"""<h2>Samples</h2>
<p class="quiet">Samples are almost greedy responses to the same prompts; training rows are responses that were trained
on. Open a prompt to see it in full, and responses of other updates to it.{e(left_out)}</p>
<div class="samples" data-samples="{e(tab)}">
<div class="filters">
<label>run <select class="of-run"></select></label>
<label>rows <select class="of-kind"></select></label>
<label>update <select class="of-step"></select></label>
<label>colour <select class="of-colour"><option value="kl">KL to the reference</option>
<option value="advantages">advantage</option><option value="">none</option></select></label>
<label>ended <select class="of-end"><option value="">all</option><option value="yes">complete</option>
<option value="no">truncated</option></select></label>
<label>score ≥ <input class="of-least" type="number" step="any"></label>
<label>score ≤ <input class="of-most" type="number" step="any"></label>
<label>sort <select class="of-order"><option value="">as written</option><option value="score">score</option>
<option value="-score">score, descending</option><option value="-length">length</option>
<option value="-kl">KL</option></select></label>
<label class="wide">search <input class="of-text" type="search" placeholder="in prompts and responses"></label>
</div>
<p class="legend" aria-live="polite"></p>
<div class="rows"></div>
<p class="pages"><button class="before">‹ previous</button> <span class="where"></span>
<button class="after">next ›</button></p>
</div>"""


def fits(gold: dict[str, Any] | None, groups: Sequence[Group]) -> str:
    """The table of the fits of the gold reward."""
    if gold is None or not gold["fits"]:
        return ""
    rows = [
        [f'<i class="dot" data-colour="{fit["group"]}"></i>{e(groups[fit["group"]].label)}']
        + [_number(fit[name], 3) for name in ("alpha", "beta", "peak")]
        for fit in gold["fits"]
    ]
    heads = ["fit of R(0) + d (α − β log d), d = √KL", "α", "β", "maximum at d"]
    return f"<h3>{e(gold['name'])}: fits</h3>{_table(heads, rows)}"


def config(groups: Sequence[Group]) -> str:
    """The table of options, with the recipe's values and the defaults."""
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
        cells += [f"<td><code>{_distinct(values)}</code></td>" for values in (row["recipes"], row["defaults"])]
        hidden = "" if changed or row["differs"] or row["unusual"] else " hidden"
        name = f'<th scope="row" title="{e(row["about"])}">{e(row["name"])}</th>'
        lines.append(
            f'<tr class="{classes}" data-usual="{"" if row["unusual"] else "1"}"{hidden}>{name}{"".join(cells)}</tr>'
        )
    names = [
        f"{group.label}: {recipe['config'] if recipe else 'none (no config file); compared with the defaults'}"
        for group, recipe in zip(groups, recipes, strict=True)
    ]
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    bold = "; bold: runs differ" if several else ""
    differs = '<option value="differs">options in which runs differ</option>' if several else ""
    return f"""<h2>Config</h2>
<p class="quiet">Recipe: {e("; ".join(names))}. Marked: differs from the recipe{bold}.</p>
<div class="filters"><label>show <select class="of-options"><option value="unusual">changed from the default</option>
<option value="changed">changed from the recipe</option>{differs}
<option value="all">all options</option></select></label>
<label class="wide">search <input class="of-option" type="search" placeholder="name, description, value"></label></div>
<div class="scroll"><table class="config"><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>"""


def environments(groups: Sequence[Group]) -> str:
    """The table of versions, devices and settings of jax; open where they differ."""
    rows = table_data.environments(groups)
    if not rows:
        return ""
    cells = [
        [e(row["name"]), *(", then ".join(e(value) or "–" for value in values) for values in row["values"])]
        for row in rows
    ]
    cells = [
        [f"<b>{cell}</b>" for cell in line] if row["differs"] else line for row, line in zip(rows, cells, strict=True)
    ]
    heads = ["", *(e(group.label) if len(groups) > 1 else "value" for group in groups)]
    is_open = " open" if any(row["differs"] for row in rows) else ""
    return f"""<details{is_open}><summary>Versions, devices, settings of JAX and XLA</summary>
<p class="quiet">They may change the rounding of numbers. Bold: runs, or processes of a run, differ.</p>
{_table(heads, cells, "config")}</details>"""


def _value(value: str | None) -> str:
    return "–" if value is None else "None" if value == "null" else e(re.sub(r'^"(.*)"$', r"\1", value))


def _distinct(values: Sequence[str | None]) -> str:
    """The distinct values."""
    return " | ".join(_value(value) for value in dict.fromkeys(values))
