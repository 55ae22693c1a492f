"""What a compiled decode loop does to the caches that it carries, read from its HLO text."""

from __future__ import annotations

import math
import re

from rlhf_jax.dry_run import hlo

# Instructions that hand an array on, or write into it where it is.
_PASSED_ON = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "opt-barrier"}
_PASSED_ON |= {"optimization-barrier", "copy-done", "after-all", "async-start", "async-update", "async-done"}
_IN_PLACE = {"dynamic-update-slice", "scatter"}
_LOOP = ("body", "condition")
_CALLED = ("to_apply", "calls", "called_computation", *_LOOP)
_CALLED += ("branch_computations", "true_computation", "false_computation")


def made_in_loops(text: str, sizes: set[int]) -> list[str]:
    """Instructions inside loops that make an array of as many numbers as a segment of a cache, copies above all: what
    a program that updates its cache in place and reads it where it is does not have.

    Arrays in a TPU's fast memory do not count: there a segment is read through it, and may be written in it and moved
    back.

    Args:
      text: `compiled.as_text()`.
      sizes: numbers of elements of the caches' arrays; nothing else in the loop may have as many.

    Returns:
      "computation: name = type kind(operands)" of each.
    """
    found, _ = hlo.computations(text)
    todo = [name for ops in found.values() for op in ops if op.kind == "while" for name in op.called(*_LOOP)]
    inside = set()
    while todo:
        name = todo.pop()
        if name not in inside:
            inside.add(name)
            # A fusion makes what its root does; its other instructions are never in memory.
            todo += [called for op in found[name] if op.kind != "fusion" for called in op.called(*_CALLED)]
    out = []
    for name in sorted(inside):
        for op in found[name]:
            if op.kind not in _PASSED_ON | _IN_PLACE and sizes & set(_made(op, found)):
                out.append(f"{name}: {op.name} = {op.shape} {op.kind}({op.rest[:160]}")
    return out


def _made(op: hlo.Op, found: dict[str, list[hlo.Op]]) -> list[int]:
    """Numbers of elements of the arrays that an instruction makes in main memory; of a fusion those that it does not
    write in place."""
    if op.kind.endswith("-start"):
        # (target, source, context): one of them in fast memory is a read or a move.
        arrays = _arrays(op.shape)
        return [] if any(fast for _, fast in arrays) else [size for size, _ in arrays]
    results = [op.shape]
    if op.kind == "fusion":
        ops = {inner.name: inner for inner in found[op.called("calls")[0]]}
        root = next(inner for inner in ops.values() if inner.root)
        made = [ops[name] for name in root.operands] if root.kind == "tuple" else [root]
        shapes = re.findall(r"[a-z]+[0-9a-z]*\[[\d,]*\](?:\{[^{}]*\})?", op.shape)
        results = [shape for shape, part in zip(shapes, made, strict=True) if not _in_place(part, ops)]
    return [size for shape in results for size, fast in _arrays(shape) if not fast]


def _in_place(op: hlo.Op, ops: dict[str, hlo.Op]) -> bool:
    while op.kind == "bitcast":
        op = ops[op.operands[0]]
    return op.kind in _IN_PLACE | {"parameter"}


def _arrays(shape: str) -> list[tuple[int, bool]]:
    """(number of elements, whether it is in fast memory) of each array of an HLO type."""
    found = re.findall(r"[a-z]+[0-9a-z]*\[([\d,]*)\](?:\{([^{}]*)\})?", shape)
    return [(math.prod(int(n) for n in dims.split(",") if n), "S(1)" in layout) for dims, layout in found]
