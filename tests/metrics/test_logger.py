"""Metrics: read one update late, every digit kept, valid JSON whatever the numbers."""

import glob
import io
import json
import math
import pathlib
import resource
import shutil
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.metrics import logger as metrics_logger
from rlhf_jax.metrics.logger import MetricLogger, read_metrics
from rlhf_jax.runtime.progress import TerminalLines
from rlhf_jax.utils.output import guarded_output
from tests.helpers.full_disk import Disk


def lines(path):
    """Strictly parsed: NaN as a bare word is an error."""

    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    with open(path, encoding="utf-8") as file:
        return [json.loads(line, parse_constant=refuse) for line in file]


def test_metrics_are_read_one_update_late(folder, monkeypatch):
    reads, told = [], []
    real = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(sorted(tree[0])) or real(tree))
    logger = MetricLogger.open(folder.path, callback=lambda step, values: told.append((step, values)))
    logger.log(1, {"a": jnp.float32(1), "b": jnp.float32(2)})
    assert reads == [] and told == [] and lines(folder.metrics) == []
    logger.log(2, {"a": jnp.float32(3)})
    # One transfer for all metrics of an update.
    assert reads == [["a", "b"]] and told == [(1, {"a": 1.0, "b": 2.0})]
    assert lines(folder.metrics) == [{"step": 1, "a": 1.0, "b": 2.0}]
    logger.flush()
    assert len(lines(folder.metrics)) == 2
    logger.flush()
    logger.log(3, {"a": jnp.float32(5)})
    logger.close()
    assert told[1:] == [(2, {"a": 3.0}), (3, {"a": 5.0})]
    assert [line["step"] for line in lines(folder.metrics)] == [1, 2, 3]


def test_the_rows_of_an_update_come_in_the_transfer_of_its_metrics(folder, monkeypatch):
    reads, real = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(tree) or real(tree))
    rows = {"rows": np.array([3, 5]), "rewards": {"a": jnp.float32([0.1, np.nan])}, "metrics": {"seen": 2.5}}
    with MetricLogger.open(folder.path, records_rows=True) as logger:
        logger.log(1, {"a": jnp.float32(1)}, rows=rows)
        logger.log(1, {"eval/a": 2.0})
        logger.log(2, {"a": jnp.float32(1)})
    assert len(reads) == 2
    # float32 by its shortest digits; one line for each update that has rows
    line = {"step": 1, "rows": [3, 5], "rewards": {"a": [0.1, "NaN"]}, "metrics": {"seen": 2.5}}
    assert lines(folder.rows) == [line] and len(lines(folder.metrics)) == 2


def test_text_that_standard_output_does_not_take_is_an_alarm_until_it_does_again(folder, monkeypatch):
    disk = Disk()
    monkeypatch.setattr(sys, "stdout", disk)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with guarded_output(), MetricLogger.open(folder.path) as logger:
        for step, full in enumerate((False, True, True, False, False), start=1):
            disk.full = full
            print("a line")
            logger.log(step, {})
            logger.flush()
    alarms = [line.get("alarm/output_lost") for line in lines(folder.timings)]
    assert alarms == [None, 1.0, 1.0, 0.0, None]
    assert "alarm/output_lost" not in "".join(map(str, lines(folder.metrics)))


def test_numbers_keep_every_digit_and_their_kind(folder):
    exact = np.float32(0.1)
    with MetricLogger.open(folder.path) as logger:
        logger.log(1, {"f32": jnp.asarray(exact), "int": jnp.int32(2**31 - 1), "python": 0.1, "np": np.float64(1 / 3)})
    (line,) = lines(folder.metrics)
    assert line == {"step": 1, "f32": float(exact), "int": 2**31 - 1, "python": 0.1, "np": 1 / 3}
    assert isinstance(line["int"], int) and np.float32(line["f32"]) == exact


def test_nan_and_infinity_are_valid_json_and_come_back(folder):
    with MetricLogger.open(
        folder.path,
        report_to="tensorboard",
        terminal=TerminalLines(total_steps=1, names=("nan", "inf"), stream=io.StringIO()),
    ) as logger:
        logger.log(1, {"nan": jnp.float32(jnp.nan), "inf": jnp.float32(jnp.inf), "minus": -math.inf, "one": 1.0})
    assert lines(folder.metrics) == [{"step": 1, "nan": "NaN", "inf": "Infinity", "minus": "-Infinity", "one": 1.0}]
    (row,) = read_metrics(folder.metrics)
    assert math.isnan(row["nan"]) and row["inf"] == math.inf and row["minus"] == -math.inf


def test_clocks_and_memory_stay_out_of_metrics_jsonl(folder):
    with MetricLogger.open(folder.path) as logger:
        logger.log(1, {"loss": 1.0}, {"rollout": 0.25})
        logger.log(2, {"loss": 0.5}, {"rollout": 0.5})
    assert lines(folder.metrics) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]
    first, second = lines(folder.timings)
    assert first["rollout"] == 0.25 and second["rollout"] == 0.5 and second["step"] == 2
    assert first["time/step"] >= 0 and first["wall_time"] > 1e9
    assert first["memory/peak_rss_mib"] > 10


def test_each_update_has_its_own_seconds_where_the_host_runs_ahead(folder):
    @jax.jit
    def update(x):
        return jax.lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x @ x), x).sum()

    x = jnp.ones((300, 300))
    update(x).block_until_ready()
    began = time.perf_counter()
    update(x).block_until_ready()
    seconds = time.perf_counter() - began
    with MetricLogger.open(folder.path) as logger:
        for step in range(1, 6):
            logger.log(step, {"loss": update(x)})
            if step == 3:
                logger.wait()
                time.sleep(2 * seconds)  # an evaluation counts for the update after it
    taken = [line["time/step"] for line in lines(folder.timings)]
    assert min(taken) > seconds / 4 and taken[3] > 2 * seconds


def test_an_evaluation_joins_the_line_of_its_update(folder):
    with MetricLogger.open(folder.path) as logger:
        logger.log(1, {"loss": jnp.float32(1)})
        logger.log(1, {"eval/loss": 0.5})
        logger.log(2, {"loss": jnp.float32(2)})
        logger.flush()
        logger.log(2, {"eval/loss": 0.25})
    assert lines(folder.metrics) == [
        {"step": 1, "loss": 1.0, "eval/loss": 0.5},
        {"step": 2, "loss": 2.0},
        {"step": 2, "eval/loss": 0.25},
    ]


class Adds:
    """A monitor that adds to every line."""

    def inspect(self, step, metrics, closing):
        return {**metrics, "nonfinite/updates": 2, "alarm/kl_above": 1.0}, []

    def raise_error(self):
        pass


def test_a_line_that_is_taken_back_is_completed_as_if_nobody_had_stopped(folder):
    update, evaluation = {"loss": jnp.float32(1), "x": float("nan")}, {"eval/loss": 0.5}
    with MetricLogger.open(folder.path, monitor=Adds()) as logger:
        logger.log(1, update)
        logger.log(1, evaluation)
    whole = pathlib.Path(folder.metrics).read_bytes()
    folder.cut(0)
    with MetricLogger.open(folder.path, monitor=Adds()) as logger:
        logger.log(1, update, {"time/step": 3.0})
    line = folder.take_line(1)
    assert pathlib.Path(folder.metrics).read_bytes() == b"" and line.timings["time/step"] == 3.0
    with MetricLogger.open(folder.path, monitor=Adds()) as logger:
        logger.restore(1, line.metrics, line.timings)
        logger.log(1, evaluation)
        logger.log(2, update)
    assert pathlib.Path(folder.metrics).read_bytes().startswith(whole)
    assert lines(folder.timings)[0]["time/step"] == 3.0


def test_counts_of_tokens_go_on_beyond_uint32(folder):
    with MetricLogger.open(folder.path, tokens=2**32 - 10) as logger:  # of the checkpoint
        for step, count in enumerate((5, 2**31, 2**32 - 1, 7), 1):
            logger.log(step, {"num_tokens": jnp.uint32(count)})
        logger.log(4, {"eval/num_tokens": 7.0})
    found = lines(folder.metrics)
    assert [line["num_tokens"] for line in found] == [2**32 + 5, 2**32 + 2**31, 2**33 - 1, 2**33 + 7]
    assert found[-1]["eval/num_tokens"] == 2**33 + 7.0


def test_a_metric_that_is_no_scalar_is_refused(folder):
    logger = MetricLogger.open(folder.path)
    logger.log(1, {"vector": jnp.ones(3)})
    with pytest.raises(TypeError, match=r"metric vector.*\(3,\)"):
        logger.flush()


def test_the_terminal_shows_the_metrics_that_matter_and_the_time_left(folder):
    stream = io.StringIO()
    names = ("objective/scores", "objective/kl", "eval/loss")
    terminal = TerminalLines(stage="ppo", total_steps=120, logging_steps=2, names=names, stream=stream)
    logger = MetricLogger.open(folder.path, terminal=terminal)
    for step in range(1, 5):
        logger.log(step, {"objective/kl": jnp.float32(0.5), "objective/scores": jnp.float32(1.25), "other": 3.0})
    logger.log(4, {"eval/loss": 2.0})
    logger.close()
    first, second = stream.getvalue().splitlines()
    assert first.startswith("ppo   2/120 | scores 1.25 | kl 0.5 | ") and first.endswith(" left")
    assert second.startswith("ppo   4/120 | scores 1.25 | kl 0.5 | eval/loss 2 | ")
    assert "other" not in stream.getvalue()


def test_the_first_update_does_not_count_for_the_time_left(folder, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics_logger.time, "perf_counter", lambda: now[0])
    stream = io.StringIO()
    logger = MetricLogger.open(folder.path, terminal=TerminalLines(stage="ppo", total_steps=102, stream=stream))
    for step, seconds in ((1, 60.0), (2, 2.0), (3, 4.0)):
        now[0] += seconds
        logger.log(step, {})
    logger.close()
    first, second, third = stream.getvalue().splitlines()
    assert first == "ppo   1/102 | 1m00s/update | 1h41m left"
    assert second == "ppo   2/102 | 2.0s/update | 3m20s left"
    assert third == "ppo   3/102 | 3.0s/update | 4m57s left"


def test_other_processes_write_and_print_nothing(folder, monkeypatch, capsys):
    monkeypatch.setattr(metrics_logger, "is_main", lambda: False)
    told = []
    with MetricLogger.open(
        folder.path,
        report_to="tensorboard",
        terminal=TerminalLines(total_steps=2, names=("loss",)),
        callback=lambda *update: told.append(update),
    ) as logger:
        logger.log(1, {"loss": 1.0})
    assert told == [(1, {"loss": 1.0})]
    assert capsys.readouterr().out == ""
    assert not glob.glob(folder.path + "/*.jsonl") and not glob.glob(folder.path + "/tensorboard*")


def test_what_others_report_needs_no_board(folder):
    with MetricLogger.open(folder.path, report_to=("wandb", "trackio")) as logger:
        logger.log(1, {"loss": 1.0})
    assert not glob.glob(folder.path + "/tensorboard*")


def test_a_full_disk_loses_no_line(tmp_path, capsys):
    """The system refuses to let the files grow, as on a full disk, and then no more."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    logger = MetricLogger.open(str(tmp_path))
    path = tmp_path / "metrics.jsonl"
    logger.log(1, {"loss": 1.0})
    logger.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, old[1]))  # a torn line at first
    try:
        for step in (2, 3):
            logger.log(step, {"loss": float(step)})
        logger.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert len(path.read_text().splitlines()) == 2
    assert capsys.readouterr().err.count(f"cannot write to {path} (File too large)") == 1
    logger.log(4, {"loss": 4.0})
    logger.close()
    assert [(line["step"], line["loss"]) for line in read_metrics(str(path))] == [(n, n) for n in range(1, 5)]


def test_a_file_that_is_removed_during_a_run_is_written_again_whole(tmp_path, capsys):
    folder = tmp_path / "run"
    logger = MetricLogger.open(str(folder))
    for step in (1, 2):
        logger.log(step, {"loss": float(step)})
    logger.flush()
    shutil.rmtree(folder)
    logger.log(3, {"loss": 3.0})
    logger.flush()
    assert capsys.readouterr().err.count(f"{folder / 'metrics.jsonl'} was removed during the run") == 1
    logger.close()
    for name in ("metrics", "timings"):
        assert [line["step"] for line in read_metrics(str(folder / f"{name}.jsonl"))] == [1, 2, 3]
    assert capsys.readouterr().err == ""


def test_lines_that_never_reach_the_disk_are_an_error(tmp_path, capsys):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    logger = MetricLogger.open(str(tmp_path))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, old[1]))
    try:
        logger.log(1, {"loss": 1.0})
        with pytest.raises(UserError, match="metrics.jsonl.*1 lines"):
            logger.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
