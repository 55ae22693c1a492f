"""Bytes that a compiled program sends between devices and moves in memory, from its HLO text, with loop trip counts."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "f32": 4}
BYTES |= {"s64": 8, "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1}
ALL = 0
"""Size of a group of all devices, whose number is not in the text: (n - 1) / n counts as 1."""
CUDNN_ATTENTION = "__cudnn$fmha"
"""What the targets of calls of cuDNN's attention begin with."""
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Instructions that move no data.
_NAMES = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "iota")
_NAMES += ("after-all", "partition-id", "replica-id", "optimization-barrier", "domain")
_OP = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"(pred|[a-z]+\d+(?:e\d+m\d+(?:fn)?)?)\[([\d,]*)\](?:\{([^{}]*)\})?")


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction: `shape` is its type, `rest` the text after its opening parenthesis."""

    name: str
    shape: str
    kind: str
    rest: str
    root: bool

    @property
    def operands(self) -> list[str]:
        """Names of its operands."""
        depth, end = 1, len(self.rest)
        for i, letter in enumerate(self.rest):
            depth += (letter == "(") - (letter == ")")
            if depth == 0:
                end = i
                break
        return re.findall(r"%([\w.\-]+)", self.rest[:end])

    @property
    def source(self) -> str:
        """XLA's op_name: the JAX operation that it was made from; '' if unknown."""
        note = re.search(r'op_name="([^"]*)"', self.rest)
        return note[1] if note else ""

    def called(self, *attributes: str) -> list[str]:
        """Names of the computations in these attributes."""
        names = []
        for attribute in attributes:
            for match in re.finditer(rf"\b{attribute}=(\{{.*?\}}|%?[\w.\-]+)", self.rest):
                names += [name.strip().lstrip("%") for name in match[1].strip("{}").split(",")]
        return names


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction: how often it runs in the program, and the bytes that a device sends in each run."""

    kind: str
    shape: str
    group: int
    times: int
    sent: float
    """Bytes per run of a ring algorithm: (n - 1) / n of the whole array, twice that for all-reduce."""
    op: str
    """XLA's op_name: the source of the instruction."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """One instruction, a fusion counts as one: how often it runs in the program, and what it computes and moves."""

    op: str
    """XLA's op_name: the source of the instruction."""
    times: int
    flops: float
    """Of the matrix products in it, per run."""
    bytes: float
    """That it reads from and writes to the device's memory, per run."""
    cudnn_attention: bool = False
    """Whether it is a call of cuDNN's attention."""


def computations(text: str) -> tuple[dict[str, list[Op]], str]:
    """Instructions by computation, and the name of the entry."""
    module: dict[str, list[Op]] = {}
    entry = current = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            current = line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%")
            entry = current if line.startswith("ENTRY") else entry
            module[current] = []
        elif current and (match := _OP.match(line)):
            root, name, shape, kind, rest = match.groups()
            module[current].append(Op(name, shape, kind, rest, bool(root)))
    return module, entry


def shape_bytes(shape: str, in_memory: bool = False) -> int:
    """Bytes of an HLO type, tuples summed; `in_memory`: without arrays in a chip's fast memory."""
    total = 0
    for kind, dims, layout in _ARRAY.findall(shape):
        if in_memory and re.search(r"S\([1-9]", layout):
            continue
        total += BYTES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n)
    return total


def _trips(op: Op, module: dict[str, list[Op]], unknown: int) -> int:
    """Trip count of a loop: XLA's known count, else the loop bound over the counter's step, else `unknown`."""
    if match := re.search(r'known_trip_count"?:\{"n":"(\d+)"', op.rest):
        return int(match[1])
    condition, body = ({x.name: x for x in module[op.called(part)[0]]} for part in ("condition", "body"))
    root = next(x for x in condition.values() if x.root)
    bounds = [value for name in root.operands if (value := _constant(condition.get(name))) is not None]
    if root.kind != "compare" or "direction=LT" not in root.rest or not bounds:
        return unknown
    counters = [condition[name] for name in root.operands if condition[name].kind == "get-tuple-element"]
    step = 1
    if counters and (index := re.search(r"index=(\d+)", counters[0].rest)):
        grown = next(x for x in body.values() if x.root).operands
        added = body.get(grown[int(index[1])]) if int(index[1]) < len(grown) else None
        steps = [_constant(body.get(name)) for name in added.operands] if added else []
        step = next((value for value in steps if value), 1)
    return -(-bounds[0] // step)


def _constant(op: Op | None) -> int | None:
    """Value of a constant instruction; None for others."""
    if op is None or op.kind != "constant" or not (match := re.match(r"(\d+)\)", op.rest)):
        return None
    return int(match[1])


def _walk(module: dict[str, list[Op]], name: str, unknown: int, inside: bool, times: int = 1) -> Iterator[tuple]:
    """(operation, times, its computation) of everything that runs; of a conditional, the branch that sends most, or
    computes most if none sends.

    `inside`: include the operations of fusions.
    """
    for op in module.get(name, ()):
        yield op, times, name
        if op.kind == "while":
            turns = times * _trips(op, module, unknown)
            for part in op.called("body", "condition"):
                yield from _walk(module, part, unknown, inside, turns)
        elif op.kind == "conditional":
            branches = op.called("branch_computations", "true_computation", "false_computation")
            ran = [list(_walk(module, branch, unknown, inside, times)) for branch in branches]
            yield from max(ran, key=lambda part: (_sent_by(part), _computed_by(part, module, inside)))
        elif op.kind in ("call", "async-start") or (inside and op.kind == "fusion"):
            for part in op.called("to_apply", "calls", "called_computation"):
                yield from _walk(module, part, unknown, inside, times)


def _sent_by(ran: list[tuple]) -> float:
    return sum(c.sent * c.times for c in _collectives(ran))


def _computed_by(ran: list[tuple], module: dict[str, list[Op]], inside: bool) -> float:
    """FLOPs of the products of a branch; `inside`: it lists the operations of fusions by themselves."""
    shapes = {place: {op.name: op.shape for op in module[place]} for place in {place for _, _, place in ran}}
    counted = (each for each in ran if not (inside and each[0].kind == "fusion"))
    return sum(times * _flops(op, shapes[place], module) for op, times, place in counted)


def collectives(text: str, unknown_trips: int = 1) -> list[Collective]:
    """Every collective of a compiled program.

    Args:
      text: `compiled.as_text()`.
      unknown_trips: trip count of loops for which XLA knows none (decoding stops when all rows have ended).

    Returns:
      One entry per instruction and place; of a conditional, those of the branch that sends most.
    """
    module, entry = computations(text)
    return _collectives(_walk(module, entry, unknown_trips, inside=True))


def _collectives(ran) -> list[Collective]:
    out: dict[tuple, Collective] = {}
    for op, times, place in ran:
        kind = op.kind.removesuffix("-start")
        if kind not in KINDS or op.kind.endswith("-done"):
            continue
        # An asynchronous collective appears in every fusion and loop that it passes through, with one channel id. It
        # runs as often as the outermost of them.
        channel = re.search(r"channel_id=(\d+)", op.rest)
        mark = (channel[1],) if channel else (place, op.name)
        if mark not in out or times < out[mark].times:
            collective = _collective(kind, op, times)
            if kind == "all-reduce" and place.startswith("all-reduce-scatter"):
                # On a TPU a reduce-scatter is a fusion of that name, which sums and keeps a shard.
                collective = dataclasses.replace(collective, kind="reduce-scatter", sent=collective.sent / 2)
            out[mark] = collective
    return list(out.values())


def _collective(kind: str, op: Op, times: int) -> Collective:
    group, shape = _group(op.rest), op.shape
    if op.kind.endswith("-start") and kind != "all-reduce":
        # An asynchronous start returns its operands and its results: (operands, results, ...).
        arrays = [match[0] for match in _ARRAY.finditer(shape) if shape_bytes(match[0]) > 8]
        half = len(arrays) // 2
        shape = " ".join(arrays[half : 2 * half]) if half else shape
    size = shape_bytes(shape)
    full_size = size * group if kind == "reduce-scatter" else size
    return Collective(kind, shape, group, times, _sent(kind, full_size, group), op.source)


def _group(rest: str) -> int:
    """Number of participating devices: XLA writes a mesh and its axes, a shape, or a list."""
    if match := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        # Part of an axis is written 'name':(stride)size.
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(match[2])
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(match[1].split(","))
    if "replica_groups={}" in rest:
        return ALL
    return 2 if "source_target_pairs" in rest else 1


def _sent(kind: str, full_size: int, group: int) -> float:
    if kind == "collective-permute":
        return float(full_size)
    share = 1.0 if group == ALL else (group - 1) / group
    return full_size * share * (2 if kind == "all-reduce" else 1)


def largest_array(text: str) -> tuple[int, str]:
    """Bytes, and name and type, of the largest array that an instruction creates on a device."""
    producers = (op for ops in computations(text)[0].values() for op in ops if op.kind not in _NAMES)
    sizes = (
        (shape_bytes(match[0]), f"{op.name} {match[0]}") for op in producers for match in _ARRAY.finditer(op.shape)
    )
    return max(sizes, default=(0, ""))


def costs(text: str, unknown_trips: int = 1) -> list[Cost]:
    """What each instruction of a program computes, and moves: operands and results.

    A slice counts with its own size, not that of its operand. Arrays in a chip's fast memory do not count.

    Args:
      text: `compiled.as_text()`.
      unknown_trips: as in `collectives`.

    Returns:
      One entry per instruction and place that does anything; of a conditional, those of the branch that sends most, or
      computes most if none sends.
    """
    module, entry = computations(text)
    shapes = {name: {op.name: op.shape for op in ops} for name, ops in module.items()}
    sent = _collectives(_walk(module, entry, unknown_trips, inside=True))
    entries = [Cost(c.op, c.times, 0.0, float(shape_bytes(c.shape, True))) for c in sent]
    for op, times, place in _walk(module, entry, unknown_trips, inside=False):
        moved, flops = _moved(op, shapes[place], module), _flops(op, shapes[place], module)
        if moved or flops:
            entries.append(Cost(op.source, times, flops, moved, CUDNN_ATTENTION in op.rest))
    return entries


def traffic(text: str, unknown_trips: int = 1) -> float:
    """Bytes that a program reads from and writes to a device's memory; arguments as of `costs`."""
    return sum(cost.times * cost.bytes for cost in costs(text, unknown_trips))


def _moved(op: Op, shapes: dict[str, str], module: dict[str, list[Op]]) -> float:
    """Bytes that an instruction reads and writes; `shapes`: of the instructions of its computation."""
    if op.kind in _NAMES or op.kind.endswith("-done") or op.kind.removesuffix("-start") in KINDS:
        return 0.0
    if op.kind.endswith("-start"):
        # A copy reads and writes its array once; the type contains source and target.
        sizes = [shape_bytes(match[0]) for match in _ARRAY.finditer(op.shape)]
        moved = min((size for size in sizes if size > 8), default=0)
        return float(moved * (1 if "S(1)" in op.shape else 2))
    reads = [shape_bytes(shapes.get(name, ""), True) for name in op.operands]
    writes = shape_bytes(op.shape, True)
    if op.kind in ("dynamic-slice", "slice", "gather"):
        reads = [writes]
    elif op.kind == "dynamic-update-slice":
        reads = [shape_bytes(shapes.get(op.operands[1], ""), True)]
        writes = reads[0]
    elif op.kind == "fusion":
        reads, writes = [_fused(module[op.called("calls")[0]], reads)], 0
    return float(sum(reads) + writes)


def _flops(op: Op, shapes: dict[str, str], module: dict[str, list[Op]]) -> float:
    """FLOPs of the matrix products in an instruction; of cuBLAS's and cuDNN's calls by their configuration. On TPUs
    products are convolutions."""
    if op.kind == "fusion":
        called = module[op.called("calls")[0]]
        inner = {inside.name: inside.shape for inside in called}
        return sum(_flops(inside, inner, module) for inside in called)
    if op.kind == "custom-call" and CUDNN_ATTENTION in op.rest:
        return _cudnn_flops(op, shapes)
    if op.kind == "convolution":
        return _convolution_flops(op, shapes)
    named = re.search(
        r'"lhs_contracting_dimensions":\[([^\]]*)\]' if op.kind == "custom-call" else _CONTRACTED, op.rest
    )
    if op.kind not in ("dot", "custom-call") or named is None:
        return 0.0
    left, result = _dims(shapes.get(op.operands[0], "")), _dims(op.shape)
    return 2.0 * math.prod(result) * math.prod(left[int(n)] for n in re.findall(r"\d+", named[1]))


def _cudnn_flops(op: Op, shapes: dict[str, str]) -> float:
    """FLOPs of cuDNN's attention or of its gradient: two products of queries, keys and head size, or five. Among as
    many keys as queries a causal mask leaves half of the pairs."""
    heads = _dims(shapes.get(op.operands[0], ""))  # [B, H, Q, K] or [B, Q, H, K]
    scores = re.search(r'"intermediate_tensor_shape":\s*\{[^{}]*?"dimensions":\s*\[([^\]]*)\]', op.rest)
    if not heads or scores is None:
        return 0.0
    *_, queries, keys = sizes = [int(n) for n in re.findall(r"\d+", scores[1])]
    causal = "CAUSAL" in op.rest and queries == keys
    return (5 if "Backward" in op.rest else 2) * 2.0 * math.prod(sizes) * heads[-1] / (2 if causal else 1)


def _convolution_flops(op: Op, shapes: dict[str, str]) -> float:
    """FLOPs of a convolution: of each spatial axis the pairs of a result and an entry of the window that meet an entry
    of the first operand, which is dilated and padded."""
    left, right, result = (_dims(shape) for shape in (*(shapes.get(name, "") for name in op.operands[:2]), op.shape))
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.rest)
    attribute = re.search(r"\bwindow=\{([^}]*)\}", op.rest)
    if labels is None or not left or not right:
        return 0.0
    window = dict(word.split("=") for word in attribute[1].split()) if attribute else {}
    total = 2.0 * result[labels[3].index("b")] * result[labels[3].index("f")] * right[labels[2].index("i")]
    for axis, size in enumerate(window["size"].split("x") if window else ()):

        def axis_value(name: str, axis: int = axis) -> int:
            return int(window[name].split("x")[axis].split("_")[0]) if name in window else 1

        stride, spread, apart = (axis_value(name) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        before = axis_value("pad") if "pad" in window else 0
        last = (left[labels[1].index(str(axis))] - 1) * spread
        outputs = range(result[labels[3].index(str(axis))])
        places = (output * stride + entry * apart - before for output in outputs for entry in range(int(size)))
        total *= sum(0 <= place <= last and place % spread == 0 for place in places)
    return total


def _dims(shape: str) -> list[int]:
    """Sizes of the first array of an HLO type."""
    match = _ARRAY.search(shape)
    return [int(n) for n in match[2].split(",") if n] if match else []


def _fused(ops: list[Op], reads: list[int]) -> int:
    """Bytes that a fusion reads of operands of these sizes, and writes.

    Of operands that it slices or updates only the slices count, behind bitcasts too. Arrays that only pass through do
    not count.
    """
    by_name, root = {op.name: op for op in ops}, next(op for op in ops if op.root)
    total = 0
    for op in [by_name[name] for name in root.operands] if root.kind == "tuple" else [root]:
        while op.kind == "bitcast":
            op = by_name[op.operands[0]]
        if op.kind == "dynamic-update-slice":
            total += shape_bytes(by_name[op.operands[1]].shape)
        elif not _passes(op):
            total += shape_bytes(op.shape, True)
    for op in ops:
        number = re.match(r"(\d+)\)", op.rest) if op.kind == "parameter" else None
        if number is None or int(number[1]) >= len(reads):
            continue
        names = {op.name}  # and bitcasts of it, which come after what they read
        for each in ops:
            if each.kind == "bitcast" and each.operands[0] in names:
                names.add(each.name)
        users = [user for user in ops if names & {*user.operands} and user.name not in names]
        users = [user for user in users if not _passes(user) and user.kind != "tuple"]
        if all(user.kind in _CUTS and user.operands[0] in names for user in users):
            slices = [user for user in users if user.kind != "dynamic-update-slice"]
            total += min(reads[int(number[1])], sum(shape_bytes(user.shape) for user in slices))
        else:
            total += reads[int(number[1])]
    return total


_CONTRACTED = r"lhs_contracting_dims=\{([\d,]*)\}"
_CUTS = ("dynamic-slice", "slice", "gather", "dynamic-update-slice")


def _passes(op: Op) -> bool:
    return op.kind in ("parameter", "get-tuple-element", "custom-call", *KINDS)
