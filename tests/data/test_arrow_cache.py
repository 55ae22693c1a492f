import errno
import json
import os
import pathlib
import threading
import time

import datasets
import pytest

from rlhf_jax.data import arrow_cache
from rlhf_jax.data.files import write_table
from rlhf_jax.errors import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_cache, "folder", lambda: str(tmp_path / "cache"))
    monkeypatch.setattr(arrow_cache, "_unusable", set())
    return tmp_path / "cache"


class Writer:
    """Writes a table of two rows, and counts."""

    def __init__(self, error=None):
        self.calls, self.error = 0, error

    def __call__(self, folder):
        self.calls += 1
        assert os.listdir(folder) == []
        write_table(datasets.Dataset.from_dict({"a": [1, 2]}), folder)
        if self.error is not None:
            raise self.error
        return {"more": [self.calls]}


def read(write, key="k"):
    entry = arrow_cache.cached(key, "posts", write)
    return entry and (entry.table["a"][:], entry.meta)


def test_an_entry_is_written_once_and_its_files_alone_are_left(folder):
    write = Writer()
    assert read(write) == read(write) == ([1, 2], {"more": [1]})
    assert write.calls == 1
    assert sorted(os.listdir(folder)) == ["k.arrow", "k.json", "k.lock"]
    assert read(write, "other") == ([1, 2], {"more": [2]})


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["k.arrow", "k.json"])
@pytest.mark.parametrize("damage", [cut, flip, lambda path: path.write_bytes(b""), lambda path: path.write_text("3")])
def test_a_damaged_entry_is_named_and_made_again(folder, name, damage):
    write = Writer()
    read(write)
    damage(folder / name)
    with pytest.warns(UserWarning, match=r"posts: the token cache .*k\.arrow is damaged"):
        assert read(write) == ([1, 2], {"more": [2]})
    assert read(write) == ([1, 2], {"more": [2]})


@pytest.mark.parametrize("name", ["k.arrow", "k.json"])
def test_an_entry_without_one_of_its_files_is_made_again(folder, name):
    write = Writer()
    read(write)
    (folder / name).unlink()
    assert read(write) == ([1, 2], {"more": [2]})


def test_what_a_killed_process_left_is_removed(folder):
    (folder / "k.building").mkdir(parents=True)
    (folder / "k.building" / "table.arrow").write_bytes(b"half")
    (folder / "k.lock").touch()
    assert read(Writer()) == ([1, 2], {"more": [1]})
    assert sorted(os.listdir(folder)) == ["k.arrow", "k.json", "k.lock"]


def test_an_error_of_the_data_leaves_no_entry(folder):
    with pytest.raises(UserError, match="row 3 is bad"):
        read(Writer(UserError("row 3 is bad")))
    assert os.listdir(folder) == ["k.lock"]
    assert read(Writer()) == ([1, 2], {"more": [1]})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_cannot_be_written_is_named_and_no_entry_is_given(folder, number):
    with pytest.warns(UserWarning, match=rf"{folder} cannot be written .*{os.strerror(number)}.*HF_DATASETS_CACHE"):
        assert read(Writer(OSError(number, os.strerror(number)))) is None
    assert read(Writer(OSError(number, os.strerror(number)))) is None  # said once
    assert os.listdir(folder) == ["k.lock"]


def test_a_folder_that_cannot_be_made_is_named(folder):
    folder.write_text("a file in its place")
    with pytest.warns(UserWarning, match="cannot be written"):
        assert read(Writer()) is None
    assert arrow_cache.file_fingerprint(str(folder))


def test_others_wait_for_the_first(folder, monkeypatch, capsys):
    monkeypatch.setattr(arrow_cache, "_PATIENCE", 0.01)
    write, found = Writer(), []

    def slow(target):
        time.sleep(0.2)
        return write(target)

    threads = [threading.Thread(target=lambda: found.append(read(slow))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "posts: waiting for another process" in capsys.readouterr().err
    assert found == [([1, 2], {"more": [1]})] * 3 and write.calls == 1


def test_a_key_is_of_its_parts_and_of_the_code(monkeypatch):
    keys = {arrow_cache.entry_key(parts) for parts in (["a", 1], ["a", 2], ["a", [1]], ["a", None])}
    assert len(keys) == 4 and arrow_cache.entry_key(["a", 1]) in keys
    monkeypatch.setattr(arrow_cache, "_code", lambda: ["another version"])
    assert arrow_cache.entry_key(["a", 1]) not in keys


def test_the_content_of_a_file_identifies_it(folder, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    first = arrow_cache.file_fingerprint(str(path))
    stat = path.stat()
    path.write_text("two")  # within the resolution of the clock
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert arrow_cache.file_fingerprint(str(path)) != first
    path.write_text("one")
    assert arrow_cache.file_fingerprint(str(path)) == first


def test_an_unchanged_file_is_not_read_again(folder, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    monkeypatch.setattr(arrow_cache, "_SETTLED", -1.0)
    first = arrow_cache.file_fingerprint(str(path))
    with monkeypatch.context() as patch:
        patch.setattr(arrow_cache, "_checksum", lambda path: pytest.fail("it is read again"))
        assert arrow_cache.file_fingerprint(str(path)) == first
    (memo,) = pathlib.Path(folder, "files").iterdir()
    memo.write_text(json.dumps([]))
    assert arrow_cache.file_fingerprint(str(path)) == first
