"""Reports of benchmark.py: ratios, phases, sizes tried, printed text, stored bounds."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax.numpy as jnp
from benchmark_case import LOOP, Case, available_cores

from rlhf_jax import UserError
from rlhf_jax.runtime import environment
from rlhf_jax.runtime.run_folder import write_atomically
from rlhf_jax.stages.work import Shape, Work, rollout_work
from rlhf_jax.utils.strict_json import json_text

SYSTEMS = ("ours", "trl")
SLACK = 0.6
"""A stored bound is this share of the lowest ratio of the pairs, to tolerate noise."""


def seconds_of(result: dict[str, Any]) -> float:
    """Median seconds of an update, without the first."""
    return median(result["updates"][1:])


def peak_of(result: dict[str, Any]) -> float:
    """Peak memory in MiB: of the device if it has its own memory, else of the process."""
    return result.get("peak_device_mib", result["peak_rss_mib"])


def ratios(pairs: Sequence[dict[str, dict]]) -> list[dict[str, float]]:
    """For each pair: our episodes/s over TRL's, TRL's peak memory over ours. Higher is better for ours."""
    rows = []
    for pair in pairs:
        ours, trl = pair["ours"], pair["trl"]
        speed, memory = seconds_of(trl) / seconds_of(ours), peak_of(trl) / peak_of(ours)
        rows.append({"speed": speed, "memory": memory, "first_update": trl["updates"][0] / ours["updates"][0]})
    return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": median(values), "low": min(values), "high": max(values)}


def case_work(case: Case, shape: Shape, prompts: Sequence[int]) -> dict[str, Work]:
    """The work of an update's phases, all of whose models have one shape; the benchmark calls `score` reward."""
    roles = ("policy", "reference", "reward", *(("value",) if case.algo == "ppo" else ()))
    phases = rollout_work(
        dict.fromkeys(roles, shape),
        prompts,
        case.group,
        case.response_length,
        case.epochs,
        frozen=case.frozen,
        itemsize=jnp.dtype(case.dtype).itemsize,
    )
    return {"reward" if name == "score" else name: work for name, work in phases.items()}


def phase_table(case: Case, shape: Shape, pairs: list[dict], lengths: list[list[int]]) -> list[dict]:
    """One row per phase and system: seconds (median without first updates), tokens/s, FLOP/s, MFU.

    The work is the same for both, but TRL's PPO saves a policy forward pass in `experience`: it keeps the logits that
    it sampled from.
    """
    peak = max(result["matmul_flops"] for pair in pairs for result in pair.values())
    works = [case_work(case, shape, prompts) for prompts in lengths]
    rows = []
    for phase in (*LOOP, "reference", "value"):
        for system in SYSTEMS:
            lines = [line for pair in pairs for line in pair.get(system, {}).get("loop", [])[1:]]
            if values := [line[phase] for line in lines if phase in line]:
                flops, tokens = (median(work[phase][i] for work in works) for i in (0, 1))
                row = {"phase": phase, "system": system, "seconds": (seconds := median(values))}
                row |= {"tokens_per_second": tokens / seconds, "flops_per_second": flops / seconds}
                rows.append(row | {"mfu": flops / seconds / peak})
    return rows


def trial_table(trials: Sequence[dict[str, Any]]) -> str:
    """The micro-batch sizes tried; each system's fastest and the one with the least memory are marked."""
    lines = [f"{'system':6} {'micro':>6} {'s/update':>10} {'peak MiB':>10}"]
    for row in trials:
        if "seconds" not in row:
            lines.append(f"{row['system']:6} {row['micro']:6}   out of memory")
            continue
        others = [other for other in trials if other["system"] == row["system"] and "seconds" in other]
        marks = {"seconds": "fastest", "peak_mib": "least memory"}
        marked = [text for name, text in marks.items() if row is min(others, key=lambda other: other[name])]
        line = f"{row['system']:6} {row['micro']:6} {row['seconds']:10.3f} {row['peak_mib']:10,.0f}"
        lines.append(f"{line}  {', '.join(marked)}".rstrip())
    return "\n".join(lines)


def report(case: Case, pairs: list[dict], table: list[dict]) -> str:
    """The printed figures."""
    lines = [case.name, ""]
    for number, pair in enumerate(pairs, 1):
        for system, result in pair.items():
            seconds = seconds_of(result)
            line = f"pair {number} {system:4} {seconds:8.3f} s an update, {case.batch / seconds:8.3f} episodes/s, "
            line += f"first {result['updates'][0]:.2f} s, peak {peak_of(result):,.0f} MiB, micro {result['micro']}"
            compiling = result.get("compile_seconds")
            lines.append(line + (f", compiling {compiling:.2f} s" if compiling is not None else ""))
    if all(set(pair) == set(SYSTEMS) for pair in pairs):
        each = ratios(pairs)
        lines.append("")
        for name, text in (("speed", "episodes/s, ours / TRL"), ("memory", "peak memory, TRL / ours")):
            values = [row[name] for row in each]
            over_pairs = spread(values)
            low, high = over_pairs["low"], over_pairs["high"]
            shown = ", ".join(f"{value:.2f}" for value in values)
            lines.append(f"{text}: {over_pairs['median']:.2f} ({low:.2f} to {high:.2f}; pairs: {shown})")
    lines += ["", f"{'phase':11} {'system':6} {'seconds':>9} {'tokens/s':>10} {'GFLOP/s':>9} {'MFU':>6}"]
    for row in table:
        lines.append(
            f"{row['phase']:11} {row['system']:6} {row['seconds']:9.3f} "
            f"{row['tokens_per_second']:10.0f} {row['flops_per_second'] / 1e9:9.1f} {row['mfu']:6.1%}"
        )
    return "\n".join(lines)


def about_this_run() -> dict[str, Any]:
    """The machine and its load, the time and the command."""
    cpu, _ = environment.cpu()
    about = {"cpu": cpu, "cores": available_cores(), "load": os.getloadavg(), "python": platform.python_version()}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"machine": about, "date": date, "command": shlex.join([Path(sys.executable).name, *sys.argv])}


def load_warning(about: dict[str, Any]) -> str | None:
    """A warning if other jobs used more than half a core at the start.

    Torch's threads spin while they wait for each other, so TRL on several cores is many times slower on a loaded
    machine and the ratio is meaningless.
    """
    load = about["load"][0]
    if load < 0.5:
        return None
    return f"warning: the load average was {load:.1f} at the start; only an idle machine gives meaningful ratios"


def read_bounds(path: Path) -> dict[str, Any]:
    """Bounds of a baseline file by case name; empty if there is no file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"--baseline {path} is not JSON: {error}") from None


def bounds_of(path: Path, case: Any) -> dict[str, float]:
    """The bounds of a case.

    Raises:
      UserError: there are none.
    """
    bounds = read_bounds(path)
    if case.name not in bounds:
        raise UserError(f"--baseline has no bounds for '{case.name}'; run without --check to store them")
    return bounds[case.name]["bounds"]


def below_bounds(limits: dict[str, float], ratio: dict[str, dict[str, float]]) -> list[str]:
    """A line for each ratio whose median is below its bound."""
    low = {name: limit for name, limit in limits.items() if ratio[name]["median"] < limit}
    return [f"{name} ratio {ratio[name]['median']:.2f} is below its bound {limit:.2f}" for name, limit in low.items()]


def checked_or_stored(args: argparse.Namespace, case: Any, ratio: dict[str, dict], about: dict[str, Any]) -> list[str]:
    """With --check the ratios below their bounds; else stores bounds if there is a --baseline."""
    if args.check:
        return below_bounds(bounds_of(args.baseline, case), ratio)
    if args.baseline:
        store_bounds(args.baseline, case, ratio, about)
    return []


def verdict(problems: Sequence[str]) -> int:
    """Prints the outcome of --check; returns the exit code."""
    print("\n".join(problems) or "no ratio is below its bound")
    return int(bool(problems))


def store_bounds(path: Path, case: Any, ratio: dict[str, dict[str, float]], about: dict[str, Any]) -> None:
    """Stores the ratios of a case and the bounds derived from them, replacing older ones."""
    names = ("speed", "memory")
    entry = {"bounds": {name: round(SLACK * ratio[name]["low"], 3) for name in names}}
    entry |= {"measured": {name: ratio[name] for name in names}, **about}
    write_atomically(str(path), json_text({**read_bounds(path), case.name: entry}, indent=2) + "\n")
