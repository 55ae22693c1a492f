"""Counts the matrix products of a traced program: a scan once per iteration, a switch by the branch that is taken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass
class Products:
    """FLOPs of a program's matrix products, and bytes of their operands."""

    flops: float = 0.0
    bytes: float = 0.0

    def add(self, other: Products, times: float = 1.0) -> None:
        """Adds another program's products, `times` times."""
        self.flops += times * other.flops
        self.bytes += times * other.bytes


def product(equation) -> Products:
    """The product of one dot_general."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, right = (v.aval for v in equation.invars)
    summed = math.prod(left.shape[i] for i in contracted)
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in (left, right))
    return Products(2.0 * summed * math.prod(equation.outvars[0].aval.shape), float(size))


def count(jaxpr, shares: Sequence[float], turns: int) -> Products:
    """Products of a jaxpr and everything it calls.

    Args:
      jaxpr: of a traced program.
      shares: fraction of calls that take each branch of a switch with that many branches.
      turns: iterations of a `while_loop`.
    """
    total = Products()
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            total.add(product(equation))
        elif name == "cond":
            branches = params["branches"]
            weights = shares if len(branches) == len(shares) else [1 / len(branches)] * len(branches)
            for branch, weight in zip(branches, weights):
                total.add(count(branch.jaxpr, shares, turns), weight)
        elif name == "while":
            total.add(count(params["body_jaxpr"].jaxpr, shares, turns), turns)
        else:
            inner = [getattr(value, "jaxpr", value) for key, value in params.items() if "jvp" not in key]
            for called in inner:
                if hasattr(called, "eqns"):
                    total.add(count(called, shares, turns), params.get("length", 1) if name == "scan" else 1)
    return total


def shares_of(lengths: Sequence[int], rows: int, widths: Sequence[int]) -> list[float]:
    """Fraction of the micro-batches of `rows` sorted prompts that takes each width."""
    parts = np.sort(np.asarray(lengths)).reshape(-1, rows)
    chosen = np.searchsorted(widths, parts.max(axis=1))
    return [float(np.mean(chosen == i)) for i in range(len(widths))]
