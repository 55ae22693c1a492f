"""Object stores: every operation on S3 and GCS servers, errors, retries and conditional writes."""

import os
import pathlib
import sys
import threading

import pytest

from rlhf_jax import storage
from rlhf_jax.errors import UserError
from rlhf_jax.storage import bucket, copies, mirror
from tests.helpers import buckets
from tests.helpers.buckets import BUCKET


@pytest.fixture(scope="module", params=["s3", pytest.param("gs", marks=pytest.mark.runs)])
def store(request):
    """(folder in a bucket, proxy) of each kind of store."""
    with buckets.in_use(request.param) as (proxy, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "FIRST_WAIT", 0.01)
        yield f"{request.param}://{BUCKET}", proxy


@pytest.fixture
def folder(store, request, tmp_path, monkeypatch):
    """An empty folder of this test; the cache is in tmp_path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield f"{store[0]}/{request.node.originalname}"
    store[1].faults.__init__()


def test_files_are_written_read_listed_and_deleted(folder):
    assert not storage.exists(folder) and storage.list_names(folder) == []
    storage.write_atomically(f"{folder}/a.txt", "älter")
    storage.write_atomically(f"{folder}/a.txt", "é")
    storage.write_atomically(f"{folder}/below/b.txt", "b")
    assert storage.read_text(f"{folder}/a.txt") == "é"
    assert storage.list_names(folder) == ["a.txt", "below"]
    assert storage.is_file(f"{folder}/a.txt") and not storage.is_dir(f"{folder}/a.txt")
    assert storage.is_dir(folder) and not storage.is_file(folder) and storage.exists(f"{folder}/below")
    storage.remove(f"{folder}/a.txt")
    storage.remove(f"{folder}/a.txt")
    with pytest.raises(FileNotFoundError):
        storage.read_text(f"{folder}/a.txt")
    storage.remove_tree(folder)
    assert not storage.exists(folder)


def test_one_of_many_creates_an_object(folder):
    won = []
    threads = [
        threading.Thread(target=lambda i=i: bucket.create(f"{folder}/lock", str(i).encode()) and won.append(i))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and bucket.read(f"{folder}/lock") == str(won[0]).encode()


def test_a_created_object_whose_answer_was_lost_is_known_as_own(folder, store):
    store[1].faults.lose_answers = 1
    assert bucket.create(f"{folder}/lock", b"mine")
    assert not bucket.create(f"{folder}/lock", b"another's")


def test_files_that_grow_are_uploaded_whole_where_they_have_changed(folder, store):
    storage.write_atomically(f"{folder}/m.jsonl", "1\n")
    files = mirror.Mirror(folder)
    files.download(("m.jsonl", "t.jsonl"))
    assert os.listdir(files.local) == ["m.jsonl"]
    with open(os.path.join(files.local, "m.jsonl"), "a") as file:
        file.write("2\n")
    os.makedirs(os.path.join(files.local, "deep"))
    pathlib.Path(files.local, "deep", "events").write_text("x")
    files.upload()
    assert storage.read_text(f"{folder}/m.jsonl") == "1\n2\n" and storage.read_text(f"{folder}/deep/events") == "x"
    store[1].faults.calls.clear()
    files.upload()
    assert not store[1].faults.calls, "nothing has changed"
    files.close()
    assert not os.path.exists(files.local)


def test_files_that_could_not_be_uploaded_are_tried_again(folder, store, monkeypatch):
    monkeypatch.setattr("asyncio.sleep", buckets.at_once)
    monkeypatch.setattr(bucket, "ATTEMPTS", 1)
    files = mirror.Mirror(folder)
    pathlib.Path(files.local, "m.jsonl").write_text("1\n")
    store[1].faults.failures = -1
    with pytest.raises(storage.StorageError, match="cannot write"):
        files.upload()
    assert files.not_uploaded() == [f"{folder}/m.jsonl"]
    store[1].faults.failures = 0
    files.upload()
    assert files.not_uploaded() == []
    assert storage.read_text(f"{folder}/m.jsonl") == "1\n"


def test_parts_of_an_earlier_version_are_not_taken_for_a_new_file(folder):
    storage.write_atomically(f"{folder}/metrics.jsonl/00000001.part", "1\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is a folder of parts, which an earlier version wrote"):
        mirror.Mirror(folder).download(("metrics.jsonl",))


def test_a_copy_follows_the_bucket_and_downloads_what_changed(folder, store, tmp_path):
    for name in ("config.json", "model.safetensors", "deep/er/x"):
        storage.write_atomically(f"{folder}/{name}", name)
    storage.write_atomically(f"{folder}/metrics.jsonl", "1\n")
    copy = storage.local_copy(folder, ("*.json",))
    assert sorted(os.listdir(copy)) == ["config.json"]
    copy = storage.local_copy(folder)
    assert sorted(os.listdir(copy)) == ["config.json", "deep", "metrics.jsonl", "model.safetensors"]
    with open(f"{copy}/metrics.jsonl") as file:
        assert file.read() == "1\n"
    storage.write_atomically(f"{folder}/config.json", "new")
    storage.remove(f"{folder}/deep/er/x")
    store[1].faults.calls.clear()
    storage.local_copy(folder)
    with open(f"{copy}/config.json") as file:
        assert file.read() == "new"
    assert not os.path.exists(f"{copy}/deep/er/x")
    assert not any("safetensors" in call[1] for call in store[1].faults.calls if "list-type" not in call[1])
    single = storage.local_copy(f"{folder}/model.safetensors")
    with open(single) as file:
        assert file.read() == "model.safetensors"
    with pytest.raises(UserError, match="none"):
        storage.local_copy(f"{folder}/none")
    assert storage.local_copy(str(tmp_path)) == str(tmp_path)


def test_a_folder_is_uploaded(folder, tmp_path):
    (tmp_path / "policy" / "deep").mkdir(parents=True)
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "policy" / "deep" / "big").write_bytes(bytes(3_000_000))
    storage.upload_folder(str(tmp_path / "policy"), f"{folder}/policy")
    assert {name: size for name, (size, _) in bucket.find(f"{folder}/policy").items()} == {
        "config.json": 2,
        "deep/big": 3_000_000,
    }


@pytest.mark.parametrize("failures", [1, 3])
def test_calls_that_fail_at_first_are_repeated(folder, store, failures, monkeypatch):
    store[1].faults.failures = failures
    monkeypatch.setattr("asyncio.sleep", buckets.at_once)
    storage.write_atomically(f"{folder}/a", "a")
    assert storage.read_text(f"{folder}/a") == "a" and storage.list_names(folder) == ["a"]
    storage.remove_tree(folder)
    assert not storage.exists(folder)


def test_a_call_that_always_fails_names_bucket_operation_and_reason(folder, store, monkeypatch, caplog):
    monkeypatch.setattr(bucket, "ATTEMPTS", 2)
    monkeypatch.setattr("asyncio.sleep", buckets.at_once)
    store[1].faults.failures = -1
    with pytest.raises(storage.StorageError) as raised:
        storage.write_atomically(f"{folder}/a", "a")
    assert f"{store[0]}: cannot write" in str(raised.value) and "2 times" in str(raised.value)
    assert isinstance(raised.value, OSError) and "\n" not in str(raised.value)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]  # no tracebacks


def test_refused_access_is_not_repeated_and_is_one_line(folder, store):
    store[1].faults.refuse = True
    for action, word in (
        (lambda: storage.write_atomically(f"{folder}/a", "a"), "write"),
        (lambda: storage.read_text(f"{folder}/a"), "read"),
        (lambda: storage.list_names(folder), "list"),
        (lambda: storage.exists(folder), "look for"),
    ):
        store[1].faults.calls.clear()
        with pytest.raises(storage.StorageError) as raised:
            action()
        assert f"{store[0]}: cannot {word} {folder.rpartition('/')[2]}" in str(raised.value)
        assert "access is refused" in str(raised.value) and "\n" not in str(raised.value)


def test_a_bucket_that_does_not_exist_is_named(store):
    scheme = store[0].partition("://")[0]
    with pytest.raises(storage.StorageError, match="no-such-bucket.*no such bucket"):
        storage.write_atomically(f"{scheme}://no-such-bucket/a", "a")


def test_an_object_with_a_name_that_leads_out_of_its_folder_is_refused(folder):
    with pytest.raises(UserError, match="no path below"):
        copies.components("../../etc/passwd", folder)


def test_a_missing_package_is_named_by_its_extra(monkeypatch):
    bucket.filesystem.cache_clear()
    for scheme, package, extra in (("s3", "s3fs", "s3"), ("gs", "gcsfs.core", "gcs")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UserError, match=rf"pip install 'rlhf_jax\[{extra}\]'"):
            storage.exists(f"{scheme}://bucket/x")
