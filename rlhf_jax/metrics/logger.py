"""Metrics of a run, read from the device one step late so that logging never waits, and handed to sinks."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rlhf_jax import storage
from rlhf_jax.metrics import tensorboard
from rlhf_jax.metrics.sinks import Callback, Entry, JsonLines, Sink, Uploads
from rlhf_jax.parallel.multihost import is_main
from rlhf_jax.storage.mirror import Mirror
from rlhf_jax.utils import output
from rlhf_jax.utils.strict_json import with_floats


def read_metrics(path: str) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl or timings.jsonl, with NaN and the infinities as floats.

    Returns:
      One dict a line, in order.
    """
    rows = [json.loads(line) for line in io.StringIO(storage.read_text(path))]
    return [with_floats(row) for row in rows]


def peak_memory() -> dict[str, float]:
    """Peak memory so far of this process, and of its device that used most.

    Returns:
      {"memory/peak_rss_mib": ...} and, where the device reports it, {"memory/peak_device_mib": ...}, in MiB.
    """
    peaks = {}
    try:
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        peaks["memory/peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    except ImportError:
        pass
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(s.get("peak_bytes_in_use", 0) for s in stats)
    if peak:
        peaks["memory/peak_device_mib"] = peak / 2**20
    return peaks


class MetricLogger:
    """Hands the metrics of each update to its sinks.

    `log` keeps an update's metrics on the device until the next update has been started, and only then reads them, in
    one transfer: logging never makes the device wait. Call `flush` before a checkpoint is saved, so that the line of
    its step is on disk, and at the end.

    Attributes:
      last: metrics of the newest entry.
      tokens: of the run so far. Devices count them in uint32, and `num_tokens` is this count.
    """

    def __init__(
        self,
        sinks: Sequence[Sink] = (),
        *,
        monitor: Any = None,
        tokens: int = 0,
        throughput: Callable[[int, int, dict[str, Any]], dict[str, float]] | None = None,
    ):
        """
        Args:
          sinks: get each entry, in this order.
          tokens: of the updates that a resume has behind it.
          throughput: (step, tokens of the update, timings) -> more timings.
          monitor: see `runtime.monitor`: may replace metrics, adds messages and ends the run; on every process.
        """
        self._sinks, self._monitor, self._throughput = list(sinks), monitor, throughput
        self._pending: tuple[int, dict[str, Any], dict[str, float]] | None = None
        self._rows: dict[str, Any] | None = None  # of the pending update
        self.last: dict[str, Any] = {}
        self.tokens = tokens
        self._restored: tuple[int, dict[str, Any]] = (-1, {})  # step, and what the monitor added to its line
        self._clock = time.perf_counter()  # when the last update ended
        self._logged_at: float | None = None  # when the pending update was logged, until its end is known
        self._output_lost = False

    @classmethod
    def open(
        cls,
        folder: str,
        *,
        report_to: Sequence[str] | str = (),
        start_step: int = 0,
        terminal: Sink | None = None,
        callback: Callable[[int, dict[str, Any]], Any] | None = None,
        monitor: Any = None,
        tokens: int = 0,
        throughput: Callable[[int, int, dict[str, Any]], dict[str, float]] | None = None,
        records_rows: bool = False,
        mirror: Mirror | None = None,
        ensure_held: Callable[[], None] = lambda: None,
    ) -> MetricLogger:
        """A logger with the files of a run's folder. Only the main process writes and prints.

        Args:
          folder: the run's folder, cut after what an earlier process left.
          report_to: 'tensorboard' or 'all' write TensorBoard's files; for other names see `runtime.trackers`.
          start_step: the step that the run resumes from; TensorBoard drops what an earlier process wrote after it.
          terminal: the sink that prints.
          callback: called with (step, metrics as host numbers) for each update; on every process.
          monitor, tokens, throughput: as `MetricLogger`.
          records_rows: whether updates have rows for rows.jsonl.
          mirror: of a folder in a bucket.
          ensure_held: called before a bucket is written; raises if another run took the folder over.

        Raises:
          UserError: tensorboardX is not installed.
        """
        with_tensorboard, sinks = tensorboard.is_requested(report_to), []
        files = ("metrics", "timings", "rows") if records_rows else ("metrics", "timings")
        if mirror is not None:
            sinks.append(Uploads(mirror, ensure_held))
        if is_main():
            if mirror is not None:
                mirror.download([f"{name}.jsonl" for name in files])
                folder = mirror.local
            sinks.append(JsonLines(folder, files))
            if with_tensorboard:
                sinks.append(tensorboard.TensorBoard(os.path.join(folder, "tensorboard"), start_step))
            if terminal is not None:
                sinks.append(terminal)
        if callback is not None:
            sinks.append(Callback(callback))
        return cls(sinks, monitor=monitor, tokens=tokens, throughput=throughput)

    def log(
        self,
        step: int,
        metrics: dict[str, Any],
        timings: dict[str, float] | None = None,
        rows: dict[str, Any] | None = None,
    ) -> None:
        """Takes the metrics of update `step`, and reads and writes those of the update before.

        A second call for the same step (an evaluation) adds to its line; once that is written, it gets its own line.

        Args:
          step: 1-based number of the update.
          metrics: scalars, on the device or not, deterministic ones only: they go to metrics.jsonl.
          timings: seconds and the like, which differ from run to run: they go to timings.jsonl.
          rows: arrays and values that identify the rows of the update (`RolloutStage.row_record`), for rows.jsonl.
        """
        timings = dict(timings or {})
        if self._pending is not None and self._pending[0] == step:
            self._pending[1].update(metrics)
            self._pending[2].update(timings)
            return
        now = time.perf_counter()
        self.flush()
        self._pending, self._rows, self._logged_at = (step, dict(metrics), timings), rows, now

    def wait(self) -> None:
        """Waits until the pending update has ended, and takes its time: what comes next belongs to the next update."""
        if self._pending is None or self._logged_at is None:
            return
        _, metrics, timings = self._pending
        computed = all(x.is_ready() for x in metrics.values() if isinstance(x, jax.Array))
        jax.block_until_ready(metrics)
        end = self._logged_at if computed else time.perf_counter()
        timings.setdefault("time/step", end - self._clock)
        self._clock, self._logged_at = end, None

    def text(self, step: int, name: str, markdown: str) -> None:
        """A text for the sinks that show texts (TensorBoard)."""
        for sink in self._sinks:
            if hasattr(sink, "text"):
                sink.text(step, name, markdown)

    def restore(self, step: int, metrics: dict[str, Any], timings: dict[str, float]) -> None:
        """Takes back the line of an update that an earlier process wrote, for `log` to add to; what the monitor added
        to it stays as it is, at its end."""
        added = {name: value for name, value in metrics.items() if name.startswith(("alarm/", "nonfinite/"))}
        metrics = {name: value for name, value in metrics.items() if name not in added}
        self._pending, self._restored = (step, metrics, dict(timings)), (step, added)
        self._rows = None  # they are in their file

    def flush(self, closing: bool = False) -> None:
        """Reads and writes the pending entry. The files are complete up to the last `log` when this returns.

        Args:
          closing: the run ends, by an error perhaps, and other processes may not be here.

        Raises:
          NonFinite: from the monitor, after all is written.
        """
        if self._pending is None:
            return
        self.wait()
        (step, metrics, timings), self._pending = self._pending, None
        tokens_before = self.tokens
        values, rows = jax.device_get((metrics, self._rows))
        metrics, messages = self._with_all_tokens(_numbers(values)), []
        if step == self._restored[0]:
            metrics |= self._restored[1]
        elif self._monitor is not None:
            metrics, messages = self._monitor.inspect(step, metrics, closing)
        if self._throughput is not None:
            timings.update(self._throughput(step, self.tokens - tokens_before, timings))
        timings.update(peak_memory())
        if (lost := output.is_lost()) or self._output_lost:
            timings["alarm/output_lost"] = float(lost)
        self._output_lost = lost
        self.last = metrics
        for sink in self._sinks:
            sink.write(Entry(step, metrics, timings, None if rows is None else _lists(rows), messages))
        if self._monitor is not None and not closing:
            self._monitor.raise_error()

    def _with_all_tokens(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """`num_tokens`, of evaluations too, as the count nearest to the last that the device's uint32 stands for."""
        counts = [name for name in metrics if name.rsplit("/", 1)[-1] == "num_tokens"]
        for name in counts:
            self.tokens += (int(metrics[name]) - self.tokens + 2**31) % 2**32 - 2**31
        return metrics | {name: type(metrics[name])(self.tokens) for name in counts}

    def sync(self) -> bool:
        """Flushes. Returns whether all that was logged is stored, where a sink buffers it (in a bucket)."""
        self.flush()
        stored = [sink.sync() for sink in self._sinks if hasattr(sink, "sync")]
        return all(stored)

    def close(self) -> None:
        """Flushes, and closes the sinks."""
        self.flush(closing=True)
        sinks, self._sinks = self._sinks, []
        for sink in reversed(sinks):  # JsonLines and Uploads last: they raise where lines were lost
            sink.close()

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Scalars on the host as Python numbers."""
    values = {name: np.asarray(value) for name, value in metrics.items()}
    for name, value in values.items():
        if value.ndim:
            raise TypeError(f"metric {name} must be a scalar; it has shape {value.shape}")
    return {name: value.item() for name, value in values.items()}


def _lists(tree: dict[str, Any]) -> dict[str, Any]:
    """A dict of arrays on the host as JSON values: float32 by its shortest digits."""

    def values(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: values(value) for name, value in x.items()}
        if not isinstance(x, np.ndarray):
            return x
        return [float(str(value)) for value in x] if x.dtype == np.float32 else x.tolist()

    return values(tree)
