"""The tables of docs/benchmarks.md, "On a GPU", from the results of scripts/accelerator_day.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

KINDS = ("float32, highest", "float32, default", "bfloat16")


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """One section for each part that is done, in the order of the page; names those that are not.

    Args:
      results: the JSON that the script writes.

    Returns:
      Markdown.
    """
    done = {name: part["result"] for name, part in results.items() if part["status"] == "done"}
    lines = [*_machine(done.get("environment")), *_beside_trl(done)]
    for name, section in (
        ("attention", _attention),
        ("numbers", _numbers),
        ("greedy", _greedy),
    ):
        if name in done:
            lines += ["", *section(done[name])]
    for name in ("resume", "resume_deterministic"):
        if name in done:
            updates, different = done[name]["killed after updates"], done[name]["different"]
            verdict = f"{len(different)} differences: {', '.join(different)}" if different else "no file differs"
            lines += ["", f"{name}: a run was killed after {updates} updates and continued; {verdict}."]
    if "replay" in done:
        lines += ["", f"Recorded runs, float32 in its highest precision: {'; '.join(verdicts(done['replay']))}."]
    missing = [f"{name} ({part['status']})" for name, part in results.items() if part["status"] != "done"]
    if missing:
        lines += ["", f"Not measured: {', '.join(missing)}."]
    return "\n".join(lines).strip() + "\n"


def verdicts(text: str) -> list[str]:
    """The lines of a replay that say whether a recorded run replays."""
    return [line for line in text.splitlines() if line.endswith((" replays", "DOES NOT REPLAY"))]


def _machine(environment: dict[str, Any] | None) -> Iterator[str]:
    if environment is None:
        return
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    yield f"{len(environment['devices'])} x {environment['kind']}: {versions}."
    rates = environment["flops_per_second"]
    yield from ("", "| products of matrices, TFLOP/s | copy, GB/s |", "|---|---|")
    products = [(name, rate / 1e12) for name, rate in rates.items() if name != "bandwidth"]
    yield f"| {', '.join(f'{name} {rate:.1f}' for name, rate in products)} | {rates['bandwidth'] / 1e9:,.0f} |"


def _beside_trl(done: dict[str, Any]) -> Iterator[str]:
    cases = {name: result for name, result in done.items() if isinstance(result, dict) and "pairs" in result}
    if not cases:
        return
    head = "| | rows, ours and TRL's | s an update, ours | TRL's | episodes/s, ours / TRL's | MiB, ours | TRL's |"
    yield from ("", head, "|" + "---|" * 7)
    for name, result in cases.items():
        for pair in result["pairs"]:
            yield _pair(name, pair)
    yield from ("", "| | phase | | s | share of the matrix peak |", "|" + "---|" * 5)
    for name, result in cases.items():
        for row in result["phases"]:
            yield f"| {name} | {row['phase']} | {row['system']} | {row['seconds']:.3f} | {row['mfu']:.1%} |"


def _pair(name: str, pair: dict[str, dict]) -> str:
    ours, theirs = pair.get("ours", {}), pair.get("trl", {})
    cells = [", ".join(f"{seconds:.2f}" for seconds in part.get("updates", ())[1:]) for part in (ours, theirs)]
    ratio = ""
    if all("updates" in part and len(part["updates"]) > 1 for part in (ours, theirs)):
        means = [sum(part["updates"][1:]) / len(part["updates"][1:]) for part in (ours, theirs)]
        ratio = f"{means[1] / means[0]:.2f}"
    peaks = [f"{part.get('peak_mib', part.get('peak_rss_mib', 0)):,.0f}" for part in (ours, theirs)]
    return (
        f"| {name} | {ours.get('micro')}, {theirs.get('micro')} | {' | '.join(cells)} | {ratio} | {' | '.join(peaks)} |"
    )


def _attention(result: dict[str, Any]) -> Iterator[str]:
    rows, tokens, heads, size = (result[name] for name in ("rows", "tokens", "heads", "head size"))
    yield f"Attention of {rows} rows of {tokens} tokens, {heads} heads of {size}:"
    head = "| attention | alone, forward and backward | policy's gradient | temporary arrays |"
    yield from ("", head, "|---|---|---|---|")
    for name, variant in result.items():
        if isinstance(variant, dict):
            if "policy's gradient" not in variant:
                yield f"| {name} | {variant.get('error', variant)} | | |"
                continue
            alone, gradient = variant["attention and its gradient"]["ms"], variant["policy's gradient"]["ms"]
            temporary = variant["policy's gradient"]["temporary MiB"]
            yield f"| {name} | {alone:.2f} ms | {gradient:.1f} ms | {temporary:,.1f} MiB |"


def _numbers(result: dict[str, Any]) -> Iterator[str]:
    yield f"| {result['shape']}, relative to torch in float32 on the CPU | {' | '.join(KINDS)} |"
    yield "|" + "---|" * (1 + len(KINDS))
    for quantity in result[KINDS[0]]:
        yield f"| {quantity} | {' | '.join(f'{result[kind][quantity]:.1e}' for kind in KINDS)} |"


def _greedy(result: dict[str, Any]) -> Iterator[str]:
    for name, part in result.items():
        if isinstance(part, dict):
            equal, rows = part["equal tokens"], part["equal rows"]
            yield f"- {name}: {equal:.0%} of {result['tokens']} tokens and {rows:.0%} of the rows are those of the CPU."
