"""Where the metrics of a run go: the entry that each sink gets, JSON lines, and calls of a function."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlhf_jax import storage
from rlhf_jax.errors import UserError
from rlhf_jax.storage.mirror import Mirror
from rlhf_jax.utils.strict_json import json_text

UPLOAD_SECONDS = 60.0
"""Least time between two uploads to a bucket, other than before a checkpoint."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Host numbers of one update, as sinks get them."""

    step: int
    """1-based; 0: an evaluation before the first update."""
    metrics: dict[str, Any]
    """Deterministic ones: they go to metrics.jsonl."""
    timings: dict[str, Any]
    """Seconds, memory and the like, which differ from run to run: they go to timings.jsonl."""
    rows: dict[str, Any] | None = None
    """What identifies the rows that were trained on, for rows.jsonl; None: the stage does not record them."""
    messages: Sequence[str] = ()
    """Lines for the terminal."""


class Sink(Protocol):
    """Where entries go: `JsonLines`, `Callback`, `tensorboard.TensorBoard`, `progress.TerminalLines`."""

    def write(self, entry: Entry) -> None:
        """Takes an update's numbers."""

    def close(self) -> None:
        """Called once, after the last `write`."""


def _lines_of(entry: Entry) -> dict[str, bytes]:
    """The lines of an update by file."""
    step = {"step": entry.step}
    lines = {"metrics": {**step, **entry.metrics}, "timings": {**step, "wall_time": time.time(), **entry.timings}}
    if entry.rows is not None:
        lines["rows"] = {**step, **entry.rows}
    return {name: (json_text(line) + "\n").encode() for name, line in lines.items()}


class JsonLines:
    """metrics.jsonl, timings.jsonl and rows.jsonl of a run's folder.

    Lines that a full disk refuses are kept and written once it takes them. A file that is removed during the run is
    written again, whole.
    """

    def __init__(self, folder: str, names: Sequence[str] = ("metrics", "timings")):
        """Opens the files of these names for appending."""
        os.makedirs(folder, exist_ok=True)
        self._paths = {name: os.path.join(folder, f"{name}.jsonl") for name in names}
        self._files = {name: self._open(name) for name in self._paths}
        self._unwritten = dict.fromkeys(self._paths, b"")
        self._failed: set[str] = set()

    def write(self, entry: Entry) -> None:
        """Appends a line to each file."""
        for name, line in _lines_of(entry).items():
            self._unwritten[name] += line
        self._append()

    def _append(self) -> None:
        # Whole lines in one write: a process that is killed leaves at most a torn last line.
        for name in self._paths:
            written = 0
            try:
                self._put_back(name)
                written = os.write(self._files[name], self._unwritten[name])
            except OSError as error:
                if name not in self._failed:
                    print(
                        f"warning: cannot write to {self._paths[name]} ({error.strerror}); its lines are kept in "
                        "memory until it is writable",
                        file=sys.stderr,
                        flush=True,
                    )
                    self._failed.add(name)
            self._unwritten[name] = self._unwritten[name][written:]
            if not self._unwritten[name]:
                self._failed.discard(name)

    def _open(self, name: str) -> int:
        return os.open(self._paths[name], os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    def _put_back(self, name: str) -> None:
        """Makes a file again that was removed or moved: the open one still has its lines."""
        path, old = self._paths[name], self._files[name]
        if os.path.exists(path):
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._files[name] = self._open(name)
        self._unwritten[name] = os.pread(old, os.fstat(old).st_size, 0) + self._unwritten[name]
        os.close(old)
        print(f"warning: {path} was removed during the run; it is written again", file=sys.stderr, flush=True)

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


class Uploads:
    """Uploads what other sinks write to a mirror of a folder in a bucket: each minute, by `sync`, which comes before
    each checkpoint, and at the end. A file that cannot be uploaded is tried again."""

    def __init__(self, mirror: Mirror, ensure_held: Callable[[], None] = lambda: None):
        """`ensure_held` is called before each upload and raises if another run took the folder over."""
        self._mirror, self._ensure_held = mirror, ensure_held
        self._failed = False
        self._last = time.monotonic()

    def write(self, entry: Entry) -> None:
        """Uploads what was written before, once a minute."""
        if time.monotonic() - self._last >= UPLOAD_SECONDS:
            self._upload(attempts=1)

    def sync(self) -> bool:
        """Uploads all files. Returns whether they are in the bucket."""
        self._upload()
        return not self._failed

    def _upload(self, attempts: int | None = None) -> None:
        self._last = time.monotonic()
        self._ensure_held()
        try:
            self._mirror.upload(attempts)
            self._failed = False
        except storage.StorageError as error:
            if not self._failed:
                print(f"warning: {error}. It is kept on this machine until it can be", file=sys.stderr, flush=True)
            self._failed = True

    def close(self) -> None:
        """Uploads all files.

        Raises:
          UserError: they could not be.
        """
        if not self.sync():
            raise UserError(
                f"the bucket cannot be written: the last lines of {', '.join(self._mirror.not_uploaded())} are in "
                f"{self._mirror.local}. Rerun the command once it can, to resume from the newest checkpoint"
            )
        self._mirror.close()


class Callback:
    """Calls a function of (step, metrics)."""

    def __init__(self, function: Callable[[int, dict[str, Any]], Any]):
        self._function = function

    def write(self, entry: Entry) -> None:
        """Calls it."""
        self._function(entry.step, entry.metrics)

    def close(self) -> None:
        """Nothing to close."""
