"""Checkpoints in a bucket: bit for bit, complete or ignored, and a warning where they cannot be written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.runtime.bucket_checkpoints import BucketCheckpoints
from rlhf_jax.storage import bucket
from tests.helpers import buckets


@pytest.fixture(scope="module")
def store():
    with buckets.in_use("s3") as (proxy, _):
        yield proxy


@pytest.fixture
def folder(store, request, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bucket, "ATTEMPTS", 1)
    monkeypatch.setattr("asyncio.sleep", buckets.at_once)
    yield f"s3://{buckets.BUCKET}/{request.node.originalname}"
    store.faults.__init__()


def state(add=0):
    tree = {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.int32(7), "half": jnp.ones((4,), jnp.bfloat16) / 3}
    return jax.tree.map(lambda x: (x + add).astype(x.dtype), tree)


def same(one, two):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


def test_saves_and_restores_bit_for_bit_and_keeps_the_newest_and_the_best(folder, tmp_path):
    with BucketCheckpoints(folder, 1) as checkpoints:
        for step, score in ((1, 0.5), (2, 0.1), (3, 0.3)):
            assert checkpoints.save(step, state(step), {"x": step}, score)
        assert not checkpoints.save(3, state(9))
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3] and checkpoints.best() == 2
    assert bucket.names(folder) == ["2", "3"]
    assert not list(tmp_path.glob("rlhf_jax/staging/*"))
    with BucketCheckpoints(folder, 1) as checkpoints:
        assert checkpoints.best() == 2
        restored, extra, step = checkpoints.restore_newest(state())
        assert same(restored, state(3)) and extra == {"x": 3} and step == 3
        assert same(checkpoints.restore(2, state())[0], state(2))
        with pytest.raises(UserError, match="no checkpoint .*/7; existing steps: .2, 3."):
            checkpoints.restore(7, state())


def test_an_upload_that_was_cut_off_is_ignored_and_removed(folder):
    with BucketCheckpoints(folder) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.save(2, state(2))
    bucket.remove([f"{folder}/2/commit.json"])
    with BucketCheckpoints(folder) as checkpoints:
        assert checkpoints.steps() == [1] and bucket.names(folder) == ["1"]
        assert checkpoints.save(2, state(5))
        checkpoints.wait()
        assert same(checkpoints.restore(2, state())[0], state(5))


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_a_damaged_checkpoint_is_set_aside_and_an_older_one_restored(folder, damage):
    warnings = []
    folder = f"{folder}/{damage}"
    with BucketCheckpoints(folder) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.save(2, state(2))
    name = f"{folder}/2/state/w/0.0"
    if damage == "missing":
        bucket.remove([name])
    else:
        content = bucket.read(name)
        bucket.write(name, content[:-1] if damage == "short" else bytes([content[0] ^ 1]) + content[1:])
    with BucketCheckpoints(folder, warn=warnings.append) as checkpoints:
        restored, _, step = checkpoints.restore_newest(state())
        assert step == 1 and same(restored, state(1)) and checkpoints.steps() == [1]
    assert f"{folder}/2 is damaged" in warnings[0] and "2.damaged" in warnings[0]
    assert "state" in bucket.names(f"{folder}/2.damaged") and bucket.names(f"{folder}/2") == []


def test_a_bucket_that_cannot_be_read_damages_no_checkpoint(folder, store):
    with BucketCheckpoints(folder) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        store.faults.refuse = True
        with pytest.raises(UserError, match="access is refused"):
            checkpoints.restore_newest(state())
        store.faults.refuse = False
        assert checkpoints.restore_newest(state())[2] == 1


@pytest.mark.parametrize("fault", ["refuse", "failures"])
def test_a_save_that_fails_is_a_warning_and_the_next_one_succeeds(folder, store, fault):
    warnings, folder = [], f"{folder}/{fault}"
    with BucketCheckpoints(folder, warn=warnings.append) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        store.faults.refuse, store.faults.failures = fault == "refuse", -1 if fault == "failures" else 0
        checkpoints.save(2, state(2))
        checkpoints.wait()
        assert len(warnings) == 1 and f"{folder}/2 could not be written: s3://" in warnings[0]
        assert "the newest checkpoint is of update 1" in warnings[0]
        store.faults.refuse, store.faults.failures = False, 0
        assert checkpoints.save(3, state(3))
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3] and len(warnings) == 1


def test_saves_while_each_call_fails_three_times(folder, store):
    store.faults.failures = 3
    with BucketCheckpoints(folder) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        assert checkpoints.restore_newest(state())[2] == 1
