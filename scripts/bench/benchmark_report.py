"""What benchmark.py makes of its measurements: ratios, phases, the text for people, the baseline that is kept."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import benchmark_work
from benchmark_case import LOOP, Case, available_cores

from rlhf_jax import UserError
from rlhf_jax.runtime.run_folder import write_atomically
from rlhf_jax.utils.strict_json import json_text

SYSTEMS = ("ours", "trl")
SLACK = 0.6
"""A stored bound is this share of the least ratio of the pairs, so that noise does not break it."""


def seconds_of(result: dict[str, Any]) -> float:
    """Median seconds of an update after the first."""
    return median(result["updates"][1:])


def peak_of(result: dict[str, Any]) -> float:
    """Peak memory in MiB: of the device where it has its own, else of the process."""
    return result.get("peak_device_mib", result["peak_rss_mib"])


def ratios(pairs: Sequence[dict[str, dict]]) -> list[dict[str, float]]:
    """Of each pair: our episodes a second over TRL's, and TRL's peak memory over ours. More is better for us."""
    found = []
    for pair in pairs:
        ours, trl = pair["ours"], pair["trl"]
        speed, memory = seconds_of(trl) / seconds_of(ours), peak_of(trl) / peak_of(ours)
        found.append({"speed": speed, "memory": memory, "first_update": trl["updates"][0] / ours["updates"][0]})
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": median(values), "low": min(values), "high": max(values)}


def phase_table(case: Case, shape: benchmark_work.Shape, pairs: list[dict], lengths: list[list[int]]) -> list[dict]:
    """A row a phase and system: seconds (median of all updates but first ones), tokens a second, FLOP/s, MFU.

    Decoding has bytes a second and their share of bandwidth too. The work is the same for both, though TRL's PPO saves
    a pass of the policy in `experience`: it keeps the logits that it sampled from.
    """
    results = [result for pair in pairs for result in pair.values()]
    peak = max(result["matmul_flops"] for result in results)
    bandwidth = max(result["bandwidth"] for result in results)
    args = (case.group, case.response_length)
    works = [benchmark_work.work(shape, prompts, *args, case.epochs, case.algo, case.frozen) for prompts in lengths]
    read = median(benchmark_work.decode_bytes(shape, prompts, *args, case.dtype) for prompts in lengths)
    found: dict[tuple[str, str, str], list[float]] = {}
    for pair in pairs:
        for system, result in pair.items():
            for line in result.get("loop", [])[1:]:
                for phase in (*LOOP, "reference", "value"):
                    if phase in line:
                        found.setdefault((phase, system, "loop"), []).append(line[phase])
            for phase, times in result.get("phases", {}).items():
                found.setdefault((phase, system, "alone"), []).append(times["seconds"])
    rows = []
    for (phase, system, where), values in found.items():
        flops, tokens = (median(work[phase][i] for work in works) for i in (0, 1))
        seconds = median(values)
        row = {"phase": phase, "system": system, "where": where, "seconds": seconds}
        row |= {"tokens_per_second": tokens / seconds, "flops_per_second": flops / seconds}
        row["mfu"] = flops / seconds / peak
        if phase == "decode":
            row |= {"bytes_per_second": read / seconds, "bandwidth_share": read / seconds / bandwidth}
        rows.append(row)
    order = (*LOOP, "prefill", "decode", "reference", "value")
    return sorted(rows, key=lambda row: (row["where"] == "alone", order.index(row["phase"]), row["system"]))


def report(case: Case, pairs: list[dict], table: list[dict]) -> str:
    """The figures for people."""
    lines = [case.name, ""]
    for number, pair in enumerate(pairs, 1):
        for system, result in pair.items():
            if "updates" not in result:
                continue
            seconds = seconds_of(result)
            said = f"pair {number} {system:4} {seconds:8.3f} s an update, {case.batch / seconds:8.3f} episodes/s, "
            said += f"first {result['updates'][0]:.2f} s, peak {peak_of(result):,.0f} MiB, micro {result['micro']}"
            compiling = result.get("compile_seconds")
            lines.append(said + (f", compiling {compiling:.2f} s" if compiling is not None else ""))
    if all(set(pair) == set(SYSTEMS) and "updates" in pair["ours"] for pair in pairs):
        each = ratios(pairs)
        lines.append("")
        for name, text in (("speed", "episodes/s, ours / TRL"), ("memory", "peak memory, TRL / ours")):
            values = [row[name] for row in each]
            found = spread(values)
            shown = ", ".join(f"{value:.2f}" for value in values)
            lines.append(f"{text}: {found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f}; pairs: {shown})")
    lines += ["", f"{'phase':11} {'system':6} {'timed':5} {'seconds':>9} {'tokens/s':>10} {'GFLOP/s':>9} {'MFU':>6}"]
    for row in table:
        share = f"  {row['bandwidth_share']:.0%} of bandwidth" if "bandwidth_share" in row else ""
        lines.append(
            f"{row['phase']:11} {row['system']:6} {row['where']:5} {row['seconds']:9.3f} "
            f"{row['tokens_per_second']:10.0f} {row['flops_per_second'] / 1e9:9.1f} {row['mfu']:6.1%}{share}"
        )
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What this runs on."""
    cpu = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        cpu = next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": cpu,
        "cores": available_cores(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
    }


def busy(about: dict[str, Any]) -> str | None:
    """A warning where other jobs took more than half a core when it began: torch's threads spin while they wait for one
    another, so that a loaded machine makes TRL on several cores many times slower, and the ratio says nothing."""
    load = about["load"][0]
    if load < 0.5:
        return None
    return f"warning: the load was {load:.1f} before anything ran: only an idle machine gives ratios worth telling"


def stored(path: Path) -> dict[str, Any]:
    """The bounds of a baseline file by case name; none where there is no file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"--baseline {path} is no JSON: {error}") from None


def below(bounds: dict[str, Any], case: Case, found: dict[str, dict[str, float]]) -> list[str]:
    """What is wrong with ratios: a line for each median below its bound.

    Raises:
      UserError: there is no bound for this case.
    """
    if case.name not in bounds:
        raise UserError(f"--baseline has no bounds for '{case.name}'; without --check it stores them")
    limits = bounds[case.name]["bounds"]
    low = {name: limit for name, limit in limits.items() if found[name]["median"] < limit}
    return [f"{name} ratio {found[name]['median']:.2f} is below its bound {limit:.2f}" for name, limit in low.items()]


def keep(path: Path, case: Case, found: dict[str, dict[str, float]], about: dict[str, Any]) -> None:
    """Stores the ratios of a case and bounds below them, in place of older ones."""
    names = ("speed", "memory")
    entry = {"bounds": {name: round(SLACK * found[name]["low"], 3) for name in names}}
    entry |= {"measured": {name: found[name] for name in names}, **about}
    write_atomically(str(path), json_text({**stored(path), case.name: entry}, indent=2) + "\n")
