"""Where the metrics of a run go: the entry that each sink gets, JSON lines, and calls of a function."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlhf_jax.errors import UserError
from rlhf_jax.utils.strict_json import json_text


@dataclasses.dataclass(frozen=True)
class Entry:
    """Host numbers of one update, as sinks get them."""

    step: int
    """1-based; 0: an evaluation before the first update."""
    metrics: dict[str, Any]
    """Deterministic ones: they go to metrics.jsonl."""
    timings: dict[str, Any]
    """Seconds, memory and the like, which differ from run to run: they go to timings.jsonl."""
    messages: Sequence[str] = ()
    """Lines for the terminal."""


class Sink(Protocol):
    """Where entries go: `JsonLines`, `Callback`, `tensorboard.TensorBoard`, `progress.TerminalLines`."""

    def write(self, entry: Entry) -> None:
        """Takes an update's numbers."""

    def close(self) -> None:
        """Called once, after the last `write`."""


class JsonLines:
    """metrics.jsonl and timings.jsonl of a run's folder.

    Lines that a full disk refuses are kept and written once it takes them.
    """

    def __init__(self, folder: str):
        """Opens both files for appending."""
        os.makedirs(folder, exist_ok=True)
        self._paths = {name: os.path.join(folder, f"{name}.jsonl") for name in ("metrics", "timings")}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._files = {name: os.open(path, flags, 0o666) for name, path in self._paths.items()}
        self._unwritten = dict.fromkeys(self._paths, b"")
        self._failed: set[str] = set()

    def write(self, entry: Entry) -> None:
        """Appends a line to each file."""
        step = {"step": entry.step}
        rows = {"metrics": {**step, **entry.metrics}, "timings": {**step, "wall_time": time.time(), **entry.timings}}
        for name, row in rows.items():
            self._unwritten[name] += (json_text(row) + "\n").encode()
        self._append()

    def _append(self) -> None:
        # Whole lines in one write: a process that is killed leaves at most a torn last line.
        for name, lines in self._unwritten.items():
            try:
                written = os.write(self._files[name], lines)
            except OSError as error:
                written = 0
                if name not in self._failed:
                    print(
                        f"warning: cannot write to {self._paths[name]} ({error.strerror}); its lines are kept in "
                        "memory until it is writable",
                        file=sys.stderr,
                        flush=True,
                    )
                    self._failed.add(name)
            self._unwritten[name] = lines[written:]
            if not self._unwritten[name]:
                self._failed.discard(name)

    def close(self) -> None:
        """Closes the files.

        Raises:
          UserError: lines could not be written.
        """
        self._append()
        for file in self._files.values():
            os.close(file)
        for name, lines in self._unwritten.items():
            if lines:
                lost = lines.count(b"\n")
                raise UserError(
                    f"{self._paths[name]} lacks the last {lost} lines: the disk is full or gone. Free some space, then "
                    "rerun the command to resume from the newest checkpoint"
                )


class Callback:
    """Calls a function of (step, metrics)."""

    def __init__(self, function: Callable[[int, dict[str, Any]], Any]):
        self._function = function

    def write(self, entry: Entry) -> None:
        """Calls it."""
        self._function(entry.step, entry.metrics)

    def close(self) -> None:
        """Nothing to close."""
