"""A sweep as a whole: tiny runs, cut off, resumed, failed."""

import csv
import os
import re
import signal

import jax
import numpy as np
import pytest

from rlhf_jax import storage, train
from rlhf_jax.config import files as config_files
from rlhf_jax.rewards.interface import RewardFailure
from rlhf_jax.runtime.callbacks import Callback
from rlhf_jax.sweep import command
from tests.helpers import buckets
from tests.helpers.runs import KillAt, Killed, sft_config

KILLED = object()


class SignalAt(KillAt):
    def on_step_end(self, step, metrics, control):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def words(tmp_path):
    """A command line without swept options, of SFT runs of two updates."""
    path = tmp_path / "sft.json"
    path.write_text(config_files.to_json(sft_config(tmp_path / "unused", max_steps=2)))
    return ["--config", str(path), "--run_dir", str(tmp_path / "sweep")]


@pytest.fixture
def run(monkeypatch):
    """Runs a sweep's command with callbacks in its runs: {number of a run that starts, from 0: a callback}; KILLED in
    place of one raises before the run."""
    original = train.run

    def run(words, callbacks=None):
        started = iter(range(100))

        def with_callbacks(config, **options):
            callback = (callbacks or {}).get(next(started))
            if callback is KILLED:
                raise Killed
            return original(config, **options, callbacks=[] if callback is None else [callback])

        monkeypatch.setattr(train, "run", with_callbacks)
        return command.main(words)

    return run


def table(printed):
    return printed[printed.index("\nlearning_rate ") :].partition("\na row for each run")[0]


@pytest.mark.runs
def test_a_sweep_killed_three_times_ends_with_the_table_of_one_that_was_not(words, run, tmp_path, capsys):
    swept = ["--learning_rate", "1e-3", "3e-3", "--seed", "0", "1", "2"]
    assert run([*words[:3], str(tmp_path / "whole"), *swept]) == 0
    whole = capsys.readouterr().out
    assert "run 3 of 6: learning_rate=1e-3, seed=2 -> " in whole

    with pytest.raises(Killed):
        run([*words, *swept], {1: KillAt(2)})  # the second run, after its first checkpoint
    capsys.readouterr()
    with pytest.raises(Killed):
        run([*words, *swept], {1: KillAt(1)})  # the second is resumed; the third, before its first checkpoint
    assert "sft: resuming after update 1 of 2" in capsys.readouterr().out
    with pytest.raises(Killed):
        run([*words, *swept], {2: KILLED})  # between the fourth and the fifth
    capsys.readouterr()
    assert run([*words, *swept]) == 0
    printed = capsys.readouterr().out
    assert printed.count("is finished; nothing to do") == 4
    assert table(printed) == table(whole)
    texts = [(tmp_path / name / "sweep.csv").read_text() for name in ("whole", "sweep")]
    assert texts[0] == texts[1] and texts[0].count("finished") == 6

    assert run([*words, *swept, "3"]) == 0  # another seed: its two runs alone
    printed = capsys.readouterr().out
    assert printed.count("is finished; nothing to do") == 6 and "run 8 of 8" in printed
    assert [line.split()[1] for line in table(printed).splitlines()[3:5]] == ["4", "4"]


def test_a_failed_run_is_reported_and_the_others_run(words, run, tmp_path, capsys):
    assert run([*words, "--max_train_samples", "4", "64"]) == 2
    printed = capsys.readouterr()
    assert "error: max_train_samples=4: " in printed.err
    rows = list(csv.DictReader((tmp_path / "sweep" / "sweep.csv").open()))
    assert [row["status"] for row in rows] == ["failed", "finished"]
    assert re.search(r"\n4 +0, 1 failed +failed", printed.out) and re.search(r"\n64 +1 +\d", printed.out)
    assert "\nfailed: max_train_samples=4: " in printed.out


def test_a_run_that_fails_within_an_update_is_run_again(words, run, tmp_path, capsys):
    swept = ["--learning_rate", "1e-3", "3e-3"]
    assert run([*words, *swept], {0: KillAt(2, RewardFailure("the reward server said no"))}) == 2
    printed = capsys.readouterr()
    assert "error: learning_rate=1e-3: the reward server said no\n" in printed.err
    assert "\nfailed: learning_rate=1e-3: the reward server said no\n" in printed.out
    assert run([*words, *swept]) == 0
    printed = capsys.readouterr().out
    assert "sft: resuming after update" in printed and printed.count("is finished; nothing to do") == 1
    assert (tmp_path / "sweep" / "sweep.csv").read_text().count("finished") == 2


def test_a_stop_ends_the_sweep_and_the_same_command_continues(words, run, tmp_path, capsys):
    swept = ["--learning_rate", "1e-3", "3e-3"]
    assert run([*words, *swept], {0: SignalAt(1)}) == 75
    assert run([*words, *swept, "--max_minutes", "1e-6"]) == 75
    printed = capsys.readouterr()
    assert "stopped by SIGTERM after update 1" in printed.err and "stopped by --max_minutes" in printed.err
    assert "run 2 of 2" not in printed.out and not (tmp_path / "sweep" / "sweep.csv").exists()
    assert run([*words, *swept]) == 0
    assert "sft: resuming after update 1 of 2" in capsys.readouterr().out
    assert run([*words, *swept, "--max_minutes", "1e-6"]) == 0  # nothing is left to run
    assert capsys.readouterr().out.count("is finished; nothing to do") == 2


@pytest.mark.runs
def test_a_sweep_in_a_bucket(words, run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with buckets.in_use("s3"):
        folder = f"s3://{buckets.BUCKET}/sweep"
        swept = [*words[:3], folder, "--run_name", "a/b", "c", "--save_steps", "0"]
        assert run(swept) == run(swept) == 0
        assert storage.list_names(folder) == ["run_name=a%2Fb", "run_name=c", "sweep.csv", "sweep.json"]
    assert capsys.readouterr().out.count("is finished; nothing to do") == 2


def test_a_run_of_another_learning_rate_or_seed_compiles_nothing(words, run, missed):
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    counts = []

    class Count(Callback):
        def close(self):
            counts.append(len(missed))

    # New numbers each time: those of an earlier session would be in its cache.
    rates, seeds = np.random.default_rng().uniform(1e-3, 2e-3, 2), np.random.default_rng().integers(2**31, size=2)
    swept = ["--learning_rate", *map(str, rates), "--seed", *map(str, seeds)]
    try:
        assert run([*words, *swept], {n: Count() for n in range(4)}) == 0
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    assert len(counts) == 4 and set(counts) == {counts[0]}


def test_a_dry_run_writes_nothing(words, run, tmp_path, capsys):
    assert run([*words, "--learning_rate", "1e-3", "3e-3", "--dry_run"]) == 0
    assert "run 2 of 2: learning_rate=3e-3" in capsys.readouterr().out and not (tmp_path / "sweep").exists()


def test_errors_in_flags_are_a_line(words, run, capsys):
    assert run([*words, "--seed", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: nothing to sweep")
    assert run([]) == 2 and "usage: rlhf-jax sweep" in capsys.readouterr().out
