"""Arrow files in a folder of the datasets cache: written once on a machine, then memory-mapped by every process.

An entry is KEY.arrow and KEY.json, which is written last and has the size and checksum of the other file: without it,
or where they differ, the entry is rebuilt. KEY.lock is locked by the process that makes it; the others wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import filelock

from rlhf_jax.errors import UserError

MINIMUM_BYTES = 2**18
"""Smaller data sets are not cached: to read them again takes a fraction of a second."""
_PATIENCE = 10.0  # seconds that a process waits for another before it says so
_POLL = 0.25  # seconds between two looks at a lock
_SETTLED = 10.0  # seconds after its last change from which a file's times identify its content
_unusable: set[str] = set()


class _Unusable(Exception):
    """The cache cannot be written; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A memory-mapped table and what was written beside it."""

    table: Any
    """A datasets.Dataset."""
    meta: dict[str, Any]


def folder() -> str:
    """The folder of the cache: rlhf_jax/ in HF_DATASETS_CACHE (default: ~/.cache/huggingface/datasets)."""
    import datasets

    return os.path.join(datasets.config.HF_DATASETS_CACHE, "rlhf_jax")


def entry_key(parts: Any) -> str:
    """The key of an entry made from `parts`, of JSON types, by the code of this version."""
    return hashlib.sha256(json.dumps([_code(), parts], sort_keys=True).encode()).hexdigest()[:32]


def _code() -> list[str]:
    """Identifies the code that makes an entry: that of this package, and the versions of the libraries that tokenize
    text."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    names = ("tokenizers", "transformers", "jinja2", "pyarrow", "datasets")
    return [digest.hexdigest(), *(importlib.metadata.version(name) for name in names)]


def cached(key: str, name: str, write: Callable[[str], dict[str, Any]]) -> Entry | None:
    """The entry of a key. If there is none, the first process that asks for it makes it, and the others wait.

    Args:
      name: of the data set, for messages.
      write: called with an empty folder, in which it writes table.arrow (Arrow's stream format); returns what to keep
        beside it, of JSON types. It may raise a UserError.

    Returns:
      The entry; None where the folder cannot be written or is full, after a warning that names it.
    """
    try:
        return _open(key, name) or _make(key, name, write)
    except _Unusable as error:
        if folder() not in _unusable:
            warnings.warn(
                f"{name}: the token cache {folder()} cannot be written ({error}). Tokens are kept in memory and made "
                "again at every start. Set HF_DATASETS_CACHE to a folder with space",
                stacklevel=2,
            )
        _unusable.add(folder())
        return None


@contextlib.contextmanager
def _errors_of_the_disk() -> Iterator[None]:
    try:
        yield
    except (OSError, NotImplementedError) as error:  # filelock raises the latter for a file system without locks
        raise _Unusable(" ".join(str(error).split()) or type(error).__name__) from error


def _make(key: str, name: str, write: Callable[[str], dict[str, Any]]) -> Entry:
    path = os.path.join(folder(), key)
    work = f"{path}.building"
    with _locked(f"{path}.lock", name):
        if (entry := _open(key, name)) is not None:
            return entry
        with _errors_of_the_disk():
            shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
            os.makedirs(work)
        try:
            with _errors_of_the_disk():
                meta = write(work)
                table = os.path.join(work, "table.arrow")
                meta = {"meta": meta, "bytes": os.path.getsize(table), "checksum": _checksum(table)}
                _replace_json(f"{path}.json", None)
                os.replace(table, f"{path}.arrow")
                _replace_json(f"{path}.json", meta)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        entry = _open(key, name)
    if entry is None:
        raise _Unusable("what was written reads differently")
    return entry


@contextlib.contextmanager
def _locked(path: str, name: str) -> Iterator[None]:
    """Holds the lock file; says so where another process has it for long."""
    lock = filelock.FileLock(path)
    with _errors_of_the_disk():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            lock.acquire(timeout=_PATIENCE, poll_interval=_POLL)
        except filelock.Timeout:
            print(f"{name}: waiting for another process, which prepares it ({path})", file=sys.stderr, flush=True)
            lock.acquire(poll_interval=_POLL)
    try:
        yield
    finally:
        lock.release()


def _open(key: str, name: str) -> Entry | None:
    """The entry of a key; None if there is none, or it is damaged."""
    import datasets

    path = os.path.join(folder(), key)
    try:
        with open(f"{path}.json", encoding="utf-8") as file:
            written = json.load(file)
        arrow = f"{path}.arrow"
        if written["bytes"] != os.path.getsize(arrow) or written["checksum"] != _checksum(arrow):
            raise ValueError("its size or checksum differs")
        return Entry(datasets.Dataset.from_file(arrow), written["meta"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:  # pyarrow's and json's are among them
        warnings.warn(f"{name}: the token cache {path}.arrow is damaged ({error}); rebuilding it", stacklevel=2)
        return None


def _replace_json(path: str, value: Any) -> None:
    """Writes a JSON file at once, or with None removes it."""
    if value is None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        return
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def _checksum(path: str) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def file_fingerprint(path: str) -> str | None:
    """Identifies the content of a file: its checksum, which is cached with the file's size and times, so that an
    unchanged file is not read again. None where the cache cannot be written."""
    stat = os.stat(path)
    identity = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]
    memo = os.path.join(folder(), "files", hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:32] + ".json")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(memo, encoding="utf-8") as file:
            entry = json.load(file)
        if entry["identity"] == identity:
            return entry["checksum"]
    try:
        checksum = _checksum(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    # A file that changes again within the clock's resolution would keep its times.
    if time.time() - max(stat.st_mtime, stat.st_ctime) > _SETTLED:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(memo), exist_ok=True)
            _replace_json(memo, {"identity": identity, "checksum": checksum})
    return checksum
