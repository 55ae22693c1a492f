"""One rollout of rollouts.py, shared by both libraries.

Standard library only: the process of transformers does not import JAX, so its memory is only its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark_case import peak_rss_mib, use_cores, write_result

WARM_UP = 4
"""Most tokens of a row in the rollout that compiles or warms up."""


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """The rollouts of a process."""

    model: str
    """Folder of a checkpoint."""
    prompts: list[list[int]]
    """[B][C] tokens, all of the same length."""
    limits: list[int]
    """[B] tokens of each response."""
    response_length: int
    """T: columns of the response."""
    decoding: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Ours: fields of `generate.Decoding`; absent: its defaults."""
    repeats: int = 1
    """Timed rollouts."""
    cores: int = 1
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        return sum(self.limits)

    def write(self, path: Path) -> None:
        """Writes the rollouts for a child process."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Rollouts:
        """Reads what `write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def child_arguments() -> tuple[Rollouts, argparse.Namespace]:
    """Rollouts and arguments (work, system, name) of a child process; restricts it to their cores."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("system")
    parser.add_argument("name")
    args = parser.parse_args()
    rollouts = Rollouts.read(args.work / f"{args.name}-case.json")
    use_cores(rollouts.cores)
    return rollouts, args


def measure(rollouts: Rollouts, generate: Callable[[list[int]], list[int]], imports_mib: float) -> dict[str, Any]:
    """Times rollouts after one of `WARM_UP` tokens a row.

    Args:
      rollouts: the rollouts.
      generate: most tokens of each row -> tokens of each response.
      imports_mib: peak memory of the process before it read weights.

    Returns:
      {"seconds": [...], "first_seconds", "peak_mib", "above_imports_mib"}.

    Raises:
      RuntimeError: a response has another length.
    """
    began = time.perf_counter()
    generate([min(limit, WARM_UP) for limit in rollouts.limits])
    first, seconds = time.perf_counter() - began, []
    for _ in range(rollouts.repeats):
        began = time.perf_counter()
        lengths = generate(rollouts.limits)
        seconds.append(time.perf_counter() - began)
        if lengths != rollouts.limits:
            raise RuntimeError(f"responses of {lengths} tokens, not {rollouts.limits}")
    peak = peak_rss_mib()
    return {"seconds": seconds, "first_seconds": first, "peak_mib": peak, "above_imports_mib": peak - imports_mib}


def write(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes a child's result for the parent."""
    write_result(args.work, args.system, args.name, result)
