"""The sink that writes metrics and texts to TensorBoard's event files."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.metrics.sinks import Entry


def is_requested(report_to: Sequence[str] | str) -> bool:
    """Whether `--report_to` names TensorBoard.

    Raises:
      UserError: it does and tensorboardX is not installed.
    """
    names = {report_to} if isinstance(report_to, str) else set(report_to)
    if not names & {"tensorboard", "all"}:
        return False
    if importlib.util.find_spec("tensorboardX") is None:
        raise UserError("--report_to tensorboard needs `pip install tensorboardX`; or pass --report_to none")
    return True


class TensorBoard:
    """An event file of TensorBoard. What was written is on disk when `write` returns.

    tensorboardX's SummaryWriter hands events to a thread that its flush does not wait for: a killed run lost events of
    updates that its checkpoint already held. So this uses the EventsWriter below it. Events that do not fit on a full
    disk are dropped without a warning: metrics.jsonl warns and loses nothing.
    """

    def __init__(self, folder: str, start_step: int = 0):
        """Opens a new file in `folder`; above 0, `start_step` has TensorBoard drop later steps of earlier files."""
        from tensorboardX import summary  # takes a second to import: only when used
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        logging.getLogger("tensorboardX").setLevel(logging.ERROR)  # it warns of every NaN
        os.makedirs(folder, exist_ok=True)
        # Each file needs its own name: the writer's own names repeat within a second.
        self._writer = EventsWriter(os.path.join(folder, "events"), f".{time.time_ns()}")
        self._summary, self._event = summary, event_pb2.Event
        if start_step:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(start_step + 1, session_log=start)

    def _write(self, step: int, **what: Any) -> None:
        with contextlib.suppress(OSError):
            self._writer.write_event(self._event(wall_time=time.time(), step=step, **what))

    def write(self, entry: Entry) -> None:
        """A point on the curve of each metric and timing."""
        for name, value in {**entry.metrics, **entry.timings}.items():
            self._write(entry.step, summary=self._summary.scalar(name, value))
        with contextlib.suppress(OSError):
            self._writer.flush()

    def text(self, step: int, name: str, markdown: str) -> None:
        """A text for the text page; on disk after the next `write`."""
        self._write(step, summary=self._summary.text(name, markdown))

    def close(self) -> None:
        """Flushes and closes the file."""
        with contextlib.suppress(OSError):
            self._writer.close()
