"""The lock of a folder in a bucket: one holder, which is named; taken over from one that has ended or is silent."""

import json
import os
import subprocess
import sys
import time

import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.runtime import lease
from rlhf_jax.runtime.lease import Lease
from rlhf_jax.storage import bucket
from tests.helpers import buckets


@pytest.fixture(scope="module")
def store():
    with buckets.in_use("s3") as (proxy, _):
        yield proxy


@pytest.fixture
def folder(store, request, monkeypatch):
    monkeypatch.setattr(lease, "LEASE", 1.0)
    monkeypatch.setattr(lease, "RENEW", 0.1)
    monkeypatch.setattr(bucket, "ATTEMPTS", 1)
    yield f"s3://{buckets.BUCKET}/{request.node.originalname}"
    store.faults.__init__()


def held_elsewhere(folder, **holder):
    """A lock of a process on another machine."""
    content = {"host": "other", "pid": 7, "since": "today", "machine": "other", "renewed": time.time(), **holder}
    bucket.write(f"{folder}/.lock/00000003", json.dumps(content).encode())


def test_a_second_run_is_refused_at_once_and_the_holder_named(folder):
    with_lock = Lease(folder)
    with_lock.take()
    for refused in (Lease(folder).take, Lease(folder).check):
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} on .*, since 20"):
            refused()
    with_lock.release()
    Lease(folder).check()
    again = Lease(folder)
    again.take()
    assert bucket.names(f"{folder}/.lock") == ["00000002"]
    again.release()


def test_the_lock_of_a_process_that_was_killed_is_taken_at_once(folder):
    code = f"from rlhf_jax.runtime.lease import Lease; import os; Lease({folder!r}).take(); os.kill(os.getpid(), 9)"
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -9
    started = time.monotonic()
    taken = Lease(folder)
    taken.take()
    assert time.monotonic() - started < 0.9  # no lease was waited for
    taken.release()


def test_a_lock_of_another_machine_is_taken_once_it_is_not_renewed(folder, capsys):
    held_elsewhere(folder)
    started = time.monotonic()
    taken = Lease(folder)
    taken.check()
    taken.take()
    assert 1.0 <= time.monotonic() - started < 1.9  # waited once
    assert "process 7 on other" in capsys.readouterr().err
    taken.release()


def test_a_lock_of_another_machine_that_is_renewed_is_refused(folder, monkeypatch):
    held_elsewhere(folder)
    monkeypatch.setattr(lease.time, "sleep", lambda _: held_elsewhere(folder))
    with pytest.raises(UserError, match="in use by process 7 on other"):
        Lease(folder).take()


def test_a_lock_from_long_ago_is_taken_at_once(folder):
    held_elsewhere(folder, renewed=time.time() - 3600)
    started = time.monotonic()
    taken = Lease(folder)
    taken.take()
    assert time.monotonic() - started < 0.9
    taken.release()


def test_a_holder_renews_its_lock_and_notices_that_it_was_taken_over(folder):
    mine = Lease(folder)
    mine.take()
    path = f"{folder}/.lock/00000001"
    first = bucket.read(path)
    time.sleep(0.4)
    assert bucket.read(path) != first
    mine.ensure_held()
    held_elsewhere(folder)
    time.sleep(0.4)
    with pytest.raises(UserError, match="taken over by process 7 on other"):
        mine.ensure_held()
    mine.release()
    assert "other" in bucket.read(f"{folder}/.lock/00000003").decode()  # not the other's lock


def test_a_lock_that_could_not_be_released_is_taken_by_the_same_process(folder, store):
    mine = Lease(folder)
    mine.take()
    store.faults.refuse = True
    mine.release()
    store.faults.refuse = False
    again = Lease(folder)
    again.take()
    again.release()


def test_a_holder_outlives_a_bucket_that_does_not_answer(folder, store):
    mine = Lease(folder)
    mine.take()
    store.faults.refuse = True
    time.sleep(1.2)
    mine.ensure_held()
    store.faults.refuse = False
    time.sleep(0.3)
    mine.ensure_held()
    with pytest.raises(UserError, match="in use"):
        Lease(folder).check()
    mine.release()
