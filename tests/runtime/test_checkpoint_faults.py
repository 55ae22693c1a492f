"""Checkpoints when the disk fails: the run goes on, the one before stays, and nothing damaged is ever used."""

import contextlib
import os
import pathlib
import random
import resource
import shutil
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.parallel import sharding
from rlhf_jax.runtime import checkpoint
from rlhf_jax.runtime.checkpoint import Checkpoints, Damaged
from rlhf_jax.runtime.checksums import checksums


def state_of(seed, width=1 << 16):
    state = {"a": jax.random.normal(jax.random.key(seed), (width,)), "b": {"c": jax.numpy.arange(7) + seed}}
    return sharding.place(state, sharding.replicated(sharding.make_mesh(devices=jax.devices()[:1])))


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@contextlib.contextmanager
def files_of_at_most(size):
    """The system refuses to write more into a file, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


class Hung:
    """A write that never ends."""

    def result(self, timeout=None):
        time.sleep(timeout)
        raise TimeoutError("the write does not end")


def test_a_write_that_hangs_is_given_up_after_its_time_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SAVE_TIMEOUT", 1)
    said, folder, handler = [], tmp_path / "c", ocp.StandardCheckpointHandler
    with Checkpoints(str(folder), warn=said.append) as checkpoints:
        assert checkpoints.save(1, state_of(1))
        checkpoints.wait()
        whole = handler.async_save

        async def hangs(self, *args, **kwargs):
            return [*(await whole(self, *args, **kwargs) or ()), Hung()]

        with monkeypatch.context() as patch:
            patch.setattr(handler, "async_save", hangs)
            began = time.monotonic()
            checkpoints.save(2, state_of(2))
            assert time.monotonic() - began < 1  # it is waited for in the background
        assert checkpoints.save(3, state_of(3))
        checkpoints.wait()
        assert len(said) == 1 and said[0].startswith(f"checkpoint {folder / '2'} could not be written: ")
        assert checkpoints.steps() == [1, 3]
        assert same(checkpoints.restore(3, state_of(0))[0], state_of(3))


def test_a_write_that_fails_costs_a_warning_and_no_older_checkpoint(tmp_path):
    said, folder = [], tmp_path / "c"
    with Checkpoints(str(folder), keep=1, warn=said.append) as checkpoints:
        assert checkpoints.save(1, state_of(1))
        checkpoints.wait()
        with files_of_at_most(1 << 16):
            checkpoints.save(2, state_of(2))
            checkpoints.wait()
        assert len(said) == 1
        assert said[0].startswith(f"checkpoint {folder / '2'} could not be written: ")
        assert said[0].endswith("The run continues; the newest checkpoint is of update 1")
        assert checkpoints.steps() == [1]
        end = time.monotonic() + 20
        while os.listdir(folder) != ["1"] and time.monotonic() < end:  # nothing half written takes room for long
            time.sleep(0.1)
        assert os.listdir(folder) == ["1"]
        assert checkpoints.save(3, state_of(3))
        checkpoints.wait()
        assert checkpoints.steps() == [3] and len(said) == 1
        assert same(checkpoints.restore(3, state_of(0))[0], state_of(3))


def test_too_little_room_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    said = []
    with Checkpoints(str(tmp_path), warn=said.append) as checkpoints:
        checkpoints.save(1, state_of(1))
        checkpoints.wait()
        usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        assert not checkpoints.save(2, state_of(2))
        assert "it needs up to 1.3 MiB, but only 97.7 KiB are free" in said[0]
        monkeypatch.undo()
        assert checkpoints.save(2, state_of(2))


@pytest.mark.parametrize("case", ["gone", "a file"])
def test_a_folder_that_vanishes_does_not_end_the_run(tmp_path, case):
    said, folder = [], tmp_path / "c"
    with Checkpoints(str(folder), warn=said.append) as checkpoints:
        checkpoints.save(1, state_of(1))
        checkpoints.wait()
        shutil.rmtree(folder)
        if case == "gone":
            assert checkpoints.save(2, state_of(2))  # it is made again
        else:
            folder.write_text("")
            assert not checkpoints.save(2, state_of(2)) and "could not be written" in said[0]
            folder.unlink()
            assert checkpoints.save(3, state_of(3))
        checkpoints.wait()
        assert checkpoints.latest() == (2 if case == "gone" else 3)


def test_an_older_checkpoint_that_cannot_be_removed_is_said_and_the_new_one_counts(tmp_path, monkeypatch):
    said = []
    with Checkpoints(str(tmp_path), keep=1, warn=said.append) as checkpoints:
        checkpoints.save(1, state_of(1))
        checkpoints.wait()
        deleter = type(checkpoints._manager._checkpoint_deleter)

        def refused(*_):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(deleter, "delete_steps", refused)
        checkpoints.save(2, state_of(2))
        checkpoints.wait()
        assert "checkpoint 2" in said[0] and "Permission denied" in said[0]
        monkeypatch.undo()
        assert checkpoints.latest() == 2
        checkpoints.save(3, state_of(3))
        checkpoints.wait()
        assert checkpoints.steps() == [3]


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << (place % 8)
    path.write_bytes(data)


def test_a_flipped_bit_anywhere_is_noticed_or_harmless(tmp_path):
    """Two places in every file of a checkpoint, and forty more in the one that holds the numbers."""
    source, state = tmp_path / "whole", state_of(5, width=4096)
    with Checkpoints(str(source)) as checkpoints:
        checkpoints.save(3, state_of(3, width=4096))
        checkpoints.save(5, state)
    pick = random.Random(0)
    files = [path.relative_to(source) for path in sorted((source / "5").rglob("*")) if path.stat().st_size]
    files = [name for name in files if (source / name).is_file()]
    largest = max(files, key=lambda name: (source / name).stat().st_size)
    cases = [(name, pick.randrange((source / name).stat().st_size)) for name in [*files * 2, *[largest] * 40]]
    noticed = 0
    for number, (name, place) in enumerate(cases):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        flip(folder / name, place)
        with Checkpoints(str(folder), warn=lambda _: None) as checkpoints:
            restored, _, step = checkpoints.restore_newest(state)
        assert step in (3, 5), (name, place)
        assert same(restored, state if step == 5 else state_of(3, width=4096)), (name, place)
        noticed += step == 3
        shutil.rmtree(folder)
    assert noticed >= 40


def test_a_checksum_sees_order_and_every_bit_and_no_mesh():
    x = jax.random.normal(jax.random.key(0), (8, 4))
    whole = np.asarray(checksums({"x": x}))
    assert not np.array_equal(whole, np.asarray(checksums({"x": x[::-1]})))
    assert not np.array_equal(whole, np.asarray(checksums({"x": x.at[3, 1].set(-x[3, 1])})))
    for dtype in (jax.numpy.bfloat16, jax.numpy.int32, jax.numpy.uint8, bool):
        small = jax.numpy.arange(6).astype(dtype)
        assert not np.array_equal(checksums({"x": small}), checksums({"x": small[::-1]})), dtype
    words = np.asarray(x).view(np.uint32).ravel()
    weights = np.arange(words.size, dtype=np.uint32) * np.uint32(2654435769) | np.uint32(1)
    assert np.array_equal(whole[0], [words.sum(dtype=np.uint32), (words * weights).sum(dtype=np.uint32)])


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path):
    scores = {1: 3.0, 2: 1.0, 3: 2.0, 4: float("nan"), 5: None}
    with Checkpoints(str(tmp_path), keep=1) as checkpoints:
        for step, score in scores.items():
            checkpoints.save(step, state_of(step, width=8), score=score)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5] and checkpoints.best() == 2
    with Checkpoints(str(tmp_path), keep=1, greater_is_better=True) as checkpoints:
        assert checkpoints.best() == 2  # the only score that is left
        checkpoints.save(6, state_of(6, width=8), score=1.5)
        checkpoints.wait()
        assert checkpoints.steps() == [6] and checkpoints.best() == 6


def test_what_a_kill_left_over_the_limit_goes_at_the_next_start(tmp_path):
    with Checkpoints(str(tmp_path)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(step, width=8))
    shutil.rmtree(tmp_path / "1" / "state")  # killed in the middle of its removal
    with Checkpoints(str(tmp_path), keep=1) as checkpoints:
        assert checkpoints.steps() == [3] and os.listdir(tmp_path) == ["3"]
        assert same(checkpoints.restore(3, state_of(0, width=8))[0], state_of(3, width=8))


def test_a_run_never_begins_anew_without_a_word(tmp_path):
    with Checkpoints(str(tmp_path)) as checkpoints:
        assert checkpoints.restore_newest(state_of(0)) is None
        checkpoints.save(1, state_of(1))
    for path in pathlib.Path(tmp_path / "1").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with Checkpoints(str(tmp_path)) as checkpoints:
        with pytest.raises(Damaged):
            checkpoints.restore(1, state_of(0))
        with pytest.raises(UserError, match="No other checkpoint"):
            checkpoints.restore_newest(state_of(0))
        assert checkpoints.steps() == [1]  # left where it is
