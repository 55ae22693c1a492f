"""TensorBoard's files: the same numbers, what a resume cuts, what a killed process leaves."""

import pathlib
import time

import jax.numpy as jnp

from rlhf_jax.metrics.logger import MetricLogger
from tests.helpers.tensorboard import events


def test_tensorboard_gets_the_same_numbers_and_forgets_what_was_cut(folder):
    with MetricLogger.open(folder.path, report_to="tensorboard") as logger:
        logger.log(1, {"loss": 1.0})
    with MetricLogger.open(folder.path, report_to="tensorboard", start_step=1) as logger:
        logger.log(2, {"loss": jnp.float32(0.5), "eval/accuracy": 0.75})
    found, starts = scalars(folder.path + "/tensorboard")
    assert found["loss"] == [(1, 1.0), (2, 0.5)] and found["eval/accuracy"] == [(2, 0.75)]
    assert "memory/peak_rss_mib" in found
    # TensorBoard drops what earlier files hold from this step on.
    assert starts == [2]


def test_a_flushed_update_is_in_tensorboards_file_even_if_the_process_dies_then(folder, monkeypatch):
    from tensorboardX import event_file_writer

    write = event_file_writer.EventsWriter.write_event
    # A slow disk: what another thread would write is not there yet.
    monkeypatch.setattr(event_file_writer.EventsWriter, "write_event", lambda *args: (time.sleep(0.01), write(*args)))
    with MetricLogger.open(folder.path, report_to="tensorboard") as logger:
        for step in (1, 2):
            logger.log(step, {"a": 1.0, "b": 2.0})
            logger.flush()
            found, _ = scalars(folder.path + "/tensorboard")
            assert [found[name][-1][0] for name in ("a", "b", "memory/peak_rss_mib")] == [step] * 3


def scalars(path):
    """Scalars by name, and the steps at which sessions start."""
    from tensorboardX.proto.event_pb2 import SessionLog

    found, starts = {}, []
    for event in events(pathlib.Path(path)):
        if event.session_log.status == SessionLog.START:
            starts.append(event.step)
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found, starts
