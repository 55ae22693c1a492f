"""What a compiled program sends between devices: its collectives by kind, counted and weighed, loops multiplied out."""

from __future__ import annotations

import collections
import dataclasses
import math
import re

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "f32": 4}
BYTES |= {"s64": 8, "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1}
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_OP = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"([a-z]+\d*(?:e\d+m\d+(?:fn)?)?|pred)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction: how often it runs in the program, and the bytes that each run sends from a device."""

    kind: str
    shape: str
    group: int
    times: int
    sent: float
    """Bytes a run, by the ring's count: (n - 1) / n of the whole array, twice that for all-reduce."""
    op: str
    """Which line of the program it comes from, as XLA notes it."""


def bytes_of(shape: str) -> int:
    """Bytes of an HLO type, tuples summed."""
    sizes = (BYTES[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in _SHAPE.findall(shape))
    return sum(sizes)


def computations(text: str) -> tuple[dict[str, list[re.Match]], str]:
    """Instructions by computation, and the name of the entry."""
    found: dict[str, list[re.Match]] = {}
    entry = current = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" ") and not line.startswith("HloModule"):
            current = line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%")
            entry = current if line.startswith("ENTRY") else entry
            found[current] = []
        elif current and (match := _OP.match(line)):
            found[current].append(match)
    return found, entry


def _group(rest: str) -> int:
    """Devices that take part: XLA writes them as a mesh and its axes, as a shape, or one by one."""
    if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        # A part of an axis is written 'name':(stride)size.
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(match[2])
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(match[1].split(","))
    if match := re.search(r"source_target_pairs=\{(.*?)\}\}", rest):
        return 2
    return 1


def _sent(kind: str, whole: int, group: int) -> float:
    if kind == "collective-permute":
        return float(whole)
    share = (group - 1) / group
    return whole * share * (2 if kind == "all-reduce" else 1)


def collectives(text: str, unknown_trips: int = 1) -> list[Collective]:
    """Every collective of a compiled program.

    Args:
      text: `compiled.as_text()`.
      unknown_trips: turns of loops whose number XLA does not know (decoding ends when all rows have).

    Returns:
      One entry an instruction and place; of a conditional's branches, the one that sends most.
    """
    found, entry = computations(text)

    def walk(name: str, times: int) -> list[Collective]:
        out = []
        for op in found.get(name, ()):
            _, shape, kind, rest = op.groups()
            base = kind.removesuffix("-start")
            if base in KINDS and not kind.endswith("-done"):
                out.append(_collective(base, shape, rest, times, started=kind.endswith("-start")))
            elif kind == "while":
                body = re.search(r"body=%?([\w.\-]+)", rest)[1]
                trips = re.search(r'known_trip_count"?:\{"n":"(\d+)"', rest)
                turns = times * (int(trips[1]) if trips else unknown_trips)
                out += walk(body, turns) + walk(re.search(r"condition=%?([\w.\-]+)", rest)[1], turns)
            elif kind == "conditional":
                names = re.search(r"branch_computations=\{(.*?)\}", rest)
                names = names[1].split(",") if names else re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", rest)
                branches = [walk(branch.strip().lstrip("%"), times) for branch in names]
                out += max(branches, key=lambda branch: sum(c.sent * c.times for c in branch))
            elif kind in ("call", "fusion", "async-start"):
                called = re.search(r"(?:to_apply|calls|called_computation)=%?([\w.\-]+)", rest)
                out += walk(called[1], times) if called else []
        return out

    return walk(entry, 1)


def _collective(kind: str, shape: str, rest: str, times: int, started: bool) -> Collective:
    group = _group(rest)
    size = bytes_of(shape)
    if started and kind in ("all-gather", "reduce-scatter", "collective-permute"):
        # An asynchronous start returns its operand beside its result.
        parts = [bytes_of(f"{dtype}[{dims}]") for dtype, dims in _SHAPE.findall(shape)]
        size = max(parts) if kind != "reduce-scatter" else min(parts)
    whole = size * group if kind == "reduce-scatter" else size
    note = re.search(r'op_name="([^"]*)"', rest)
    return Collective(kind, shape, group, times, _sent(kind, whole, group), note[1] if note else "")


def summary(found: list[Collective]) -> dict[str, tuple[int, float]]:
    """{kind: (runs, bytes sent from a device)}."""
    out: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for c in found:
        out[c.kind][0] += c.times
        out[c.kind][1] += c.times * c.sent
    return {kind: (int(runs), sent) for kind, (runs, sent) in sorted(out.items())}


def largest_array(text: str) -> tuple[int, str]:
    """Bytes and line of the largest array that an instruction of the program makes on a device."""
    best = (0, "")
    for instructions in computations(text)[0].values():
        for op in instructions:
            if op[3] in ("parameter", "tuple", "get-tuple-element", "while", "conditional", "call"):
                continue
            size = max((bytes_of(f"{dtype}[{dims}]") for dtype, dims in _SHAPE.findall(op[2])), default=0)
            best = max(best, (size, op[0].strip()[:200]))
    return best
