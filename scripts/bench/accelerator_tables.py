"""The tables of docs/benchmarks.md, "On a GPU", from the results of scripts/accelerator_day.py."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from typing import Any

KINDS = ("float32, highest", "float32, default", "bfloat16")
PHASES = {"generate": "generate", "reward": "score", "experience": "experience", "update": "update"}
"""Phases of an update, and the programs of a dry run."""
HEAD = "| | generate | reward | log-probabilities and values | update"
PRINTED = ("difference", "decoding")
"""Parts whose output has their tables."""

Results = dict[str, Any]


def markdown(parts: dict[str, Results]) -> str:
    """All sections, and the parts that are not complete; `parts` are what the script writes of each."""
    texts = list(sections(parts).values())
    missing = {name: part for name, part in parts.items() if part["status"] != "done"}
    reasons = [f"{name} ({part['status']}: {part['why'].rpartition(chr(10))[2]})" for name, part in missing.items()]
    return "\n\n".join([*texts, *([f"Not complete: {'; '.join(reasons)}."] if reasons else [])]) + "\n"


def sections(parts: dict[str, Results]) -> dict[str, str]:
    """The text of each of `SECTIONS` that has one; of a part that was cut off what it measured."""
    measured = {name: part["result"] for name, part in parts.items() if part["status"] != "failed" and "result" in part}
    measured |= {name: parts[name].get("text", "") for name in PRINTED if name in measured}
    texts = {name: "\n".join(section(measured)).strip() for name, section in SECTIONS.items()}
    return {name: text for name, text in texts.items() if text}


def place(section: str) -> str:
    """The line of a page above a section's blocks, one of each day."""
    return f"<!-- day {section} -->"


def filled(page: str, parts: dict[str, Results], began: str) -> str:
    """A page, which has the line `place` of each section, with the sections of the day that began then (YYYY-MM-DD
    HH:MM) in place of those that it had of this day."""
    kind = parts.get("environment", {}).get("result", {}).get("kind", "this device")
    date = datetime.datetime.strptime(began, "%Y-%m-%d %H:%M")
    for name, text in sections(parts).items():
        begin, end = f"<!-- day {name} of {began} -->", f"<!-- end of day {name} of {began} -->"
        block = f"{begin}\n\n{kind}, {date.day} {date:%B %Y}, by `scripts/accelerator_day.py`:\n\n{text}\n\n{end}"
        old = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if old.search(page):
            page = old.sub(lambda _, block=block: block, page)
        else:
            page = page.replace(place(name), f"{place(name)}\n\n{block}", 1)
    return page


def verdicts(text: str) -> list[str]:
    """The lines of a replay that say whether a recorded run replays."""
    return [line for line in text.splitlines() if line.endswith((" replays", "DOES NOT REPLAY"))]


def _machine(measured: Results) -> Iterator[str]:
    environment = measured.get("environment")
    if environment is None:
        return
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    yield f"{len(environment['devices'])} x {environment['kind']}: {versions}."
    rates = environment["flops_per_second"]
    yield from ("", "| products of matrices, TFLOP/s | copy, GB/s |", "|---|---|")
    products = [(name, rate / 1e12) for name, rate in rates.items() if name != "bandwidth"]
    yield f"| {', '.join(f'{name} {rate:.1f}' for name, rate in products)} | {rates['bandwidth'] / 1e9:,.0f} |"


def _attention(measured: Results) -> Iterator[str]:
    for case, each in ((x["case"], x["measured"]) for name, x in measured.items() if name.startswith("attention")):
        head = "recomputes | alone, forward and backward | policy's gradient | arrays as compiled, as measured"
        yield f"| {case} | {head} | compilation: trace, lower, XLA |"
        yield "|" + "---|" * 6
        for label, gradient in each.items():
            form, name, remat = label.split(", ")
            if remat == "alone":
                continue
            alone = each.get(f"{form}, {name}, alone", {})
            cells = [f"{x['ms']:.2f} ms" if "ms" in x else x.get("error", "–") for x in (alone, gradient)]
            if "ms" in gradient:
                cells.append(f"{gradient['MiB']:,.0f}, {_number(gradient['measured MiB'], '{:,.0f}')} MiB")
                cells.append(", ".join(f"{part:.1f}" for part in gradient["trace, lower, XLA s"]) + " s")
            yield f"| {form}, `{name}` | {remat} | {' | '.join([*cells, '–', '–'][:4])} |"
        yield ""


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _cases(measured: Results) -> Iterator[tuple[str, dict[str, Results], dict[tuple[str, str], Results]]]:
    """Of each size of the benchmark: its name, what a process of ours and of TRL measured, and rows by phase and
    system."""
    for name in dict.fromkeys(name.removesuffix("_trl") for name in measured):
        both = {"ours": measured.get(name, {}), "trl": measured.get(f"{name}_trl", {})}
        done = {system: each for system, each in both.items() if isinstance(each, dict) and "pairs" in each}
        if done:
            options = next(iter(done.values()))["options"]
            systems = {system: each["pairs"][0][system] if system in done else each for system, each in both.items()}
            rows = {(row["phase"], row["system"]): row for each in done.values() for row in each["phases"]}
            label = f"{options['algo'].upper()} {options['shape']}, {systems[next(iter(done))]['micro']} rows"
            yield label + (", `--deterministic`" if options["deterministic"] else ""), systems, rows


def _beside_trl(measured: Results) -> Iterator[str]:
    if not (cases := list(_cases(measured))):
        return
    yield "| micro-batch | ours, s an update | TRL's | episodes/s, ours / TRL's | peak memory, ours | TRL's |"
    yield "|" + "---|" * 6
    for label, systems, _ in cases:
        seconds = [each.get("updates", [])[1:] for each in systems.values()]
        cells = [", ".join(f"{value:.2f}" for value in values) for values in seconds]
        cells = [
            cell or ("out of memory" if "out_of_memory" in each else "–")
            for cell, each in zip(cells, systems.values(), strict=True)
        ]
        ours, trl = (sum(values) / max(len(values), 1) for values in seconds)
        cells.append(f"{trl / ours:.2f}" if ours and trl else "–")
        peaks = [each.get("peak_device_mib", each.get("peak_rss_mib")) for each in systems.values()]
        yield f"| {label} | {' | '.join((*cells, *(_number(peak, '{:,.0f} MiB') for peak in peaks)))} |"
    yield from ("", "Seconds by phase, ours and TRL's, and their shares of the peak matrix rate:", "", f"{HEAD} |")
    yield "|" + "---|" * 5
    for label, systems, rows in cases:
        peak = max(each.get("matmul_flops", 0) for each in systems.values())
        for title, field, form, unit in (
            (label, "seconds", "{:.3f}", 1),
            ("share of the peak", "flops_per_second", "{:.0f} %", peak / 100),
        ):
            values = [[rows.get((phase, system), {}).get(field) for system in systems] for phase in PHASES]
            cells = [", ".join(_number(x and x / unit, form) for x in pair) for pair in values]
            yield f"| {title} | {' | '.join(cells)} |"


def _predicted(measured: Results) -> Iterator[str]:
    cases = [case for case in _cases(measured) if "predicted" in case[1]["ours"]]
    if cases:
        yield f"{HEAD} | all | peak MiB as compiled, measured | load, first update, of it compiling |"
        yield "|" + "---|" * 8
    for label, systems, rows in cases:
        ours, programs = systems["ours"], systems["ours"]["predicted"]
        predicted = [programs[name]["seconds"] for name in PHASES.values()]
        seconds = [rows[phase, "ours"]["seconds"] for phase in PHASES]
        predicted.append(None if None in predicted else sum(predicted))
        cells = [f"{_number(x, '{:.3f}')}, {y:.3f}" for x, y in zip(predicted, (*seconds, sum(seconds)), strict=True)]
        peaks = max(program["peak_mib"] for program in programs.values()), ours.get("peak_device_mib")
        cells.append(", ".join(_number(peak, "{:,.0f}") for peak in peaks))
        cells.append(f"{ours['load_seconds']:.1f}, {ours['updates'][0]:.1f}, {ours['compile_seconds']:.1f} s")
        yield f"| {label}: predicted, measured, s | {' | '.join(cells)} |"


def _numbers(measured: Results) -> Iterator[str]:
    yield from (*measured.get("difference", "").splitlines(), "")
    if "numbers" in measured:
        result = measured["numbers"]
        yield f"| {result['shape']}, relative to torch in float32 on the CPU | {' | '.join(KINDS)} |"
        yield "|" + "---|" * (1 + len(KINDS))
        for quantity in result[KINDS[0]]:
            yield f"| {quantity} | {' | '.join(f'{result[kind][quantity]:.1e}' for kind in KINDS)} |"
        yield ""
    for name, part in measured.get("greedy", {}).items():
        if isinstance(part, dict):
            equal, rows, tokens = part["equal tokens"], part["equal rows"], measured["greedy"]["tokens"]
            yield f"- {name}: {equal:.0%} of {tokens} tokens and {rows:.0%} of the rows are those of the CPU."
    for name in ("resume", "resume_deterministic"):
        if name in measured:
            updates, different = measured[name]["killed after updates"], measured[name]["different"]
            verdict = f"{len(different)} differences: {', '.join(different)}" if different else "no file differs"
            yield f"- {name}: a run was killed after {updates} updates and continued; {verdict}."
    if "replay" in measured:
        yield f"- Recorded runs, float32 in its highest precision: {'; '.join(verdicts(measured['replay']))}."


def _chat(measured: Results) -> Iterator[str]:
    if comparison := re.search(r"\d+ held-out prompts.*? in score.*?\n", measured.get("chat", ""), re.DOTALL):
        yield from ("```", *comparison[0].splitlines(), "```")


SECTIONS: dict[str, Callable[[Results], Iterator[str]]] = {
    "machine": _machine,
    "attention": _attention,
    "beside_trl": _beside_trl,
    "predicted": _predicted,
    "numbers": _numbers,
    "decoding": lambda measured: iter(measured.get("decoding", "").splitlines()),
    "chat": _chat,
}
"""What writes the lines of each section."""
