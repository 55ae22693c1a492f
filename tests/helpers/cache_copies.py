"""What a compiled decode loop does to the caches that it carries, read from its HLO text."""

from __future__ import annotations

import math

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

    Args:
      text: `compiled.as_text()`.
      sizes: numbers of elements of the caches' arrays; nothing else in the loop may have as many.

    Returns:
      "computation: name = type kind(operands)" of each.
    """
    found, _ = hlo.computations(text)
    loops = [name for ops in found.values() for op in ops if op.kind == "while" for name in op.called(*_LOOP)]
    inside, todo = set(), loops
    while todo:
        name = todo.pop()
        if name not in inside:
            inside.add(name)
            # A fusion makes what its root does; its other instructions are never in memory.
            todo += [called for op in found[name] if op.kind != "fusion" for called in op.called(*_CALLED)]
    out = []
    for name in sorted(inside):
        for op in found[name]:
            if op.kind not in _PASSED_ON | _IN_PLACE and any(n in sizes for n in _made(op, found)):
                out.append(f"{name}: {op.name} = {op.shape} {op.kind}({op.rest[:160]}")
    return out


def _made(op: hlo.Op, found: dict[str, list[hlo.Op]]) -> list[int]:
    """Numbers of elements of the arrays that an instruction makes; of a fusion those that it does not write in
    place."""
    if op.kind != "fusion":
        return _elements(op.shape)
    ops = {inner.name: inner for inner in found[op.called("calls")[0]]}
    root = next(inner for inner in ops.values() if inner.root)
    results = [ops[name] for name in root.operands] if root.kind == "tuple" else [root]
    sizes = []
    for result in results:
        while result.kind == "bitcast":
            result = ops[result.operands[0]]
        if result.kind not in _IN_PLACE | {"parameter"}:
            sizes += _elements(result.shape)
    return sizes


def _elements(shape: str) -> list[int]:
    return [math.prod(int(n) for n in dims.split(",") if n) for _, dims, _ in hlo._ARRAY.findall(shape)]
