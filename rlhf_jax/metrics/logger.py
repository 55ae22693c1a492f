"""Metrics of a run: JSON lines, TensorBoard, and a line in the terminal. Read one step late, so that nothing waits."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
import numpy as np

from rlhf_jax.errors import UserError
from rlhf_jax.parallel.multihost import is_main

# json.dumps escapes what is below the blank. The rest of what a terminal would obey, or what UTF-8 has no form for, is
# inside strings too, and \uXXXX is the same character there.
_OUTSIDE_JSON = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def json_value(x: Any) -> Any:
    """A number as strict JSON holds it: every digit kept; what JSON lacks becomes 'NaN', 'Infinity' or '-Infinity'.

    Args:
      x: a Python, numpy or host jax scalar, or a string; bool, int, float.

    Returns:
      bool, int, float or str. `float()` of the strings gives the number back.
    """
    if isinstance(x, (str, bool)) or x is None:
        return x
    x = np.asarray(x)
    if x.ndim:
        raise TypeError(f"a JSON number must be a scalar; this one has shape {x.shape}")
    x = x.item()
    if not isinstance(x, float) or math.isfinite(x):
        return x
    return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"


def json_text(value: Any, indent: int | None = None) -> str:
    """Strict JSON of nested dicts and lists, their numbers as `json_value` gives them.

    Args:
      value: dicts, lists, tuples and numpy arrays of scalars and strings.
      indent: as json.dumps.

    Returns:
      The text, without a line end.
    """

    def clean(x):
        if isinstance(x, dict):
            return {str(k): clean(v) for k, v in x.items()}
        if isinstance(x, np.ndarray) and x.ndim:
            x = x.tolist()
        return [clean(v) for v in x] if isinstance(x, (list, tuple)) else json_value(x)

    text = json.dumps(clean(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return _OUTSIDE_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def read_metrics(path: str) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl or timings.jsonl, 'NaN' and the infinities as floats again.

    Args:
      path: of the file.

    Returns:
      One dict a line, in order.
    """
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [with_floats(row) for row in rows]


def with_floats(row: dict[str, Any]) -> dict[str, Any]:
    """'NaN', 'Infinity' and '-Infinity' among a dict's values as floats again."""
    return {k: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()}


def peak_memory() -> dict[str, float]:
    """The most memory used so far by this process and by its fullest device.

    Returns:
      {"memory/peak_rss_mib": ...} and, where the device tells, {"memory/peak_device_mib": ...}, in MiB.
    """
    found = {}
    try:
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        found["memory/peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    except ImportError:
        pass
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(s.get("peak_bytes_in_use", 0) for s in stats)
    if peak:
        found["memory/peak_device_mib"] = peak / 2**20
    return found


def duration(seconds: float) -> str:
    """Seconds as people say them: 3.2s, 4m10s, 2h05m, 3d04h."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 60:
        return f"{minutes}m{int(seconds) % 60:02d}s"
    return f"{hours}h{minutes % 60:02d}m" if hours < 24 else f"{days}d{hours % 24:02d}h"


def short_number(x: Any) -> str:
    """A number in at most 4 significant digits, for the terminal."""
    if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
        return str(x)
    return f"{float(x):.4g}"


class MetricLogger:
    """Writes what each update found.

    `log` keeps an update's metrics on the device until the next update has been started, and only then reads them, in
    one transfer: logging never makes the device wait. Call `flush` before a checkpoint is saved, so that the line of
    its step is on disk, and at the end. Only the main process writes.
    """

    def __init__(
        self,
        folder: str,
        report_to: Sequence[str] | str = ("tensorboard",),
        logging_steps: int = 1,
        total_steps: int = 0,
        names: Sequence[str] = (),
        start_step: int = 0,
        *,
        stage: str = "",
        callback: Callable[[int, dict[str, Any]], Any] | None = None,
        watch: Any = None,
        stream: TextIO | None = None,
    ):
        """Opens the files of a run's folder for appending.

        Args:
          folder: the run's folder, cut after what an earlier process left.
          report_to: 'tensorboard' or 'all'; what else there is does not concern these files (see `trackers`).
          logging_steps: a line in the terminal every so many updates; 0: none.
          total_steps: updates of the whole run, for the time left.
          names: metrics shown in the terminal, in this order; those that an update lacks are left out.
          start_step: the step that the run continues from; TensorBoard drops what an earlier process wrote after it.
          stage: what the terminal's lines begin with.
          callback: called with (step, metrics as host numbers) once an update's have been read; on every process.
          watch: a `Watch`, which says what is written, and whether the run goes on; on every process.
          stream: where the terminal's lines go; default: what is standard output then.

        Raises:
          UserError: TensorBoard's writer is not installed.
        """
        self._names = tuple(names)
        self._every, self._total = logging_steps, total_steps
        self._stage, self._callback, self._stream = stage, callback, stream
        self._watch = watch
        self._pending: tuple[int, dict[str, Any], dict[str, float]] | None = None
        self.last: dict[str, Any] = {}
        self.texts: tuple[int, dict[str, str]] = (0, {})  # of the last step that had any
        self._updates = 0
        self._paces: deque[tuple[float, int]] = deque(maxlen=20)  # (seconds, tokens of the run so far) of updates
        self._folder = folder
        self._files: dict[str, int] = {}
        self._unwritten: dict[str, bytes] = {}
        self._failed: set[str] = set()
        self._board = None
        board = _tensorboard(report_to)
        self._clock = time.perf_counter()
        if not is_main():
            return
        os.makedirs(folder, exist_ok=True)
        for name in ("metrics", "timings"):
            path = os.path.join(folder, f"{name}.jsonl")
            self._files[name] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            self._unwritten[name] = b""
        if board is not None:
            self._board = board(os.path.join(folder, "tensorboard"), start_step)

    def log(self, step: int, metrics: dict[str, Any], timings: dict[str, float] | None = None) -> None:
        """Takes the metrics of update `step`, and reads and writes those of the update before.

        A second call for the same step (an evaluation) adds to its line; to a line of its own once that is written.

        Args:
          step: 1-based number of the update.
          metrics: scalars, on the device or not, deterministic ones only: they go to metrics.jsonl.
          timings: seconds and the like, which differ from run to run: they go to timings.jsonl.
        """
        timings = dict(timings or {})
        if self._pending is not None and self._pending[0] == step:
            self._pending[1].update(metrics)
            self._pending[2].update(timings)
            return
        now = time.perf_counter()
        self.flush()
        self._pending = (step, dict(metrics), {"time/step": now - self._clock, **timings})
        self._clock = now

    def text(self, step: int, name: str, markdown: str) -> None:
        """A text for TensorBoard's text page; nothing without TensorBoard."""
        if self._board is not None:
            self._board.text(step, name, markdown)
            if self.texts[0] != step:
                self.texts = step, {}
            self.texts[1][name] = markdown

    def take(self) -> tuple[dict[str, Any], dict[str, float]]:
        """(metrics, timings) that are held back, as host numbers, and then not written; `log` them again for that."""
        if self._pending is None:
            return {}, {}
        (_, metrics, timings), self._pending = self._pending, None
        return {name: _number(name, value) for name, value in jax.device_get(metrics).items()}, timings

    def flush(self, closing: bool = False) -> None:
        """Reads and writes what is held back. The files are complete up to the last `log` when this returns.

        Args:
          closing: the run ends, by an error perhaps, and other processes may not be here.

        Raises:
          NonFinite: the watch's, after all is written.
        """
        if self._pending is None:
            return
        (step, metrics, timings), self._pending = self._pending, None
        metrics = {name: _number(name, value) for name, value in jax.device_get(metrics).items()}
        metrics, said = self._watch.inspect(step, metrics, closing) if self._watch is not None else (metrics, [])
        timings.update(peak_memory())
        self.last = metrics
        if self._updates == 1:
            # The first update compiles, which says nothing about the time that the others need.
            self._paces.clear()
        if step:
            self._updates += 1
            self._paces.append((timings["time/step"], metrics.get("num_tokens", 0)))
        if self._files:
            self._write(step, metrics, timings)
            if self._every and (step % self._every == 0 or step == self._total):
                print(self.line(step, metrics), file=self._stream, flush=True)
            for line in said:
                print(line, file=self._stream, flush=True)
        if self._callback is not None:
            self._callback(step, metrics)
        if self._watch is not None and not closing:
            self._watch.verdict()

    def _write(self, step: int, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        rows = {"metrics": {"step": step, **metrics}, "timings": {"step": step, "wall_time": time.time(), **timings}}
        for name, row in rows.items():
            self._unwritten[name] += (json_text(row) + "\n").encode()
        self._append()
        if self._board is not None:
            for name, value in {**metrics, **timings}.items():
                self._board.scalar(step, name, value)
            self._board.flush()

    def _append(self) -> None:
        """Writes what is not on disk yet. A disk that is full costs no line: they are kept, and written once it is not.

        Whole lines in one write: a process that is killed leaves at most a torn last line.
        """
        for name, lines in self._unwritten.items():
            try:
                done = os.write(self._files[name], lines)
            except OSError as error:
                done = 0
                if name not in self._failed:
                    path = os.path.join(self._folder, f"{name}.jsonl")
                    print(
                        f"warning: {path} cannot be written to ({error.strerror}); its lines are kept for when it can",
                        file=sys.stderr,
                        flush=True,
                    )
                    self._failed.add(name)
            self._unwritten[name] = lines[done:]
            if not self._unwritten[name]:
                self._failed.discard(name)

    def line(self, step: int, metrics: dict[str, Any]) -> str:
        """The terminal's line for an update: its number, the metrics that matter, seconds an update, time left."""
        count = f"{step:>{len(str(self._total))}}/{self._total}" if self._total else str(step)
        if not step:  # an evaluation before the first update
            shown = [f"{n} {short_number(x)}" for n, x in metrics.items() if n.startswith("eval/")]
            return " | ".join([f"{self._stage} {count}".strip(), *shown])
        shown = self.shown(metrics)
        each, _ = self.pace() or (0.0, 0.0)
        left = [f"{duration(each * (self._total - step))} left"] if step < self._total else []
        return " | ".join([f"{self._stage} {count}".strip(), *shown, f"{duration(each)}/update", *left])

    def shown(self, metrics: dict[str, Any]) -> list[str]:
        """The metrics that matter, as the terminal has them."""
        return [f"{_label(n)} {short_number(metrics[n])}" for n in self._names if n in metrics]

    def pace(self) -> tuple[float, float] | None:
        """(seconds an update, tokens a second) of the last updates; no tokens (0) where they are not counted; None
        before there is one."""
        paces = list(self._paces)
        if not paces:
            return None
        seconds = [each for each, _ in paces]
        tokens = max(paces[-1][1] - paces[0][1], 0)
        return sum(seconds) / len(seconds), tokens / sum(seconds[1:]) if tokens else 0.0

    def close(self) -> None:
        """Flushes and closes the files."""
        self.flush(closing=True)
        if self._files:
            self._append()
        lost = {name: lines.count(b"\n") for name, lines in self._unwritten.items() if lines}
        for file in self._files.values():
            os.close(file)
        self._files, self._unwritten = {}, {}
        if self._board is not None:
            self._board.close()
            self._board = None
        for name, count in lost.items():
            raise UserError(
                f"{os.path.join(self._folder, name)}.jsonl lacks the last {count} lines: the disk is full or gone. "
                "Make room; the same command continues from the newest checkpoint"
            )

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _number(name: str, value: Any) -> bool | int | float:
    """A host scalar as a Python number."""
    value = np.asarray(value)
    if value.ndim:
        raise TypeError(f"metric {name} must be a scalar; it has shape {value.shape}")
    return value.item()


def _label(name: str) -> str:
    """'objective/kl' -> 'kl'; 'eval/loss' keeps its prefix, since 'loss' is another metric."""
    return name if name.startswith("eval/") else name.split("/")[-1]


def _tensorboard(report_to: Sequence[str] | str):
    """TensorBoard's writer when it is asked for, else None."""
    wanted = {report_to} if isinstance(report_to, str) else set(report_to)
    if not wanted & {"tensorboard", "all"}:
        return None
    if importlib.util.find_spec("tensorboardX") is None:
        raise UserError("--report_to tensorboard needs `pip install tensorboardX`; or give --report_to none")
    logging.getLogger("tensorboardX").setLevel(logging.ERROR)  # it tells of every NaN, which the terminal shows anyway
    return Board


class Board:
    """An event file of TensorBoard. What was written is on disk when `flush` returns.

    tensorboardX's SummaryWriter promises as much, but hands events to a thread that its flush does not wait for: a
    killed run lost those of updates that its checkpoint already held. A disk that is full costs events and no word: it
    is said of metrics.jsonl, which loses nothing.
    """

    def __init__(self, folder: str, start_step: int = 0):
        """A new file in `folder`, which has TensorBoard drop what earlier files hold after `start_step`, if above 0."""
        from tensorboardX import summary  # a second to import: only when used
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        os.makedirs(folder, exist_ok=True)
        # A name of its own for each file: the writer's own names repeat within a second.
        self._writer = EventsWriter(os.path.join(folder, "events"), f".{time.time_ns()}")
        self._summary, self._event = summary, event_pb2.Event
        if start_step:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(start_step + 1, session_log=start)

    def _write(self, step: int, **what: Any) -> None:
        with contextlib.suppress(OSError):
            self._writer.write_event(self._event(wall_time=time.time(), step=step, **what))

    def scalar(self, step: int, name: str, value: float) -> None:
        """A point of a curve."""
        self._write(step, summary=self._summary.scalar(name, value))

    def text(self, step: int, name: str, markdown: str) -> None:
        """A text of the text page."""
        self._write(step, summary=self._summary.text(name, markdown))

    def flush(self) -> None:
        """Returns when all is on disk."""
        with contextlib.suppress(OSError):
            self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        with contextlib.suppress(OSError):
            self._writer.close()
