"""Local copies of what is in a bucket, for libraries that read local files alone, in ~/.cache/rlhf_jax (or in
XDG_CACHE_HOME). Only what changed is downloaded again."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from typing import Any

import filelock

from rlhf_jax.errors import UserError
from rlhf_jax.storage import bucket
from rlhf_jax.storage.paths import located


def cache_folder(name: str) -> str:
    """A folder of this name in the cache; not created."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "rlhf_jax", name)


def staging_folder(folder: str, name: str) -> str:
    """An empty local folder for files that go to a folder in a bucket. Deletes what a killed process left there."""
    digest = hashlib.sha256(folder.encode()).hexdigest()[:16]
    local = os.path.join(cache_folder("staging"), f"{digest}-{name}")
    shutil.rmtree(local, ignore_errors=True)
    os.makedirs(local)
    return local


def _copy_of(path: str) -> str:
    """Where the copy of a path is: the bucket and the key are part of it, for messages that name a file."""
    scheme, _, key = path.partition("://")
    # A bucket behind another endpoint may have the same name.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = endpoint if scheme == "s3" else os.environ.get("STORAGE_EMULATOR_HOST")
    store = re.sub(r"[^\w.]+", "-", f"{scheme}-{endpoint}") if endpoint else scheme
    return os.path.join(cache_folder("buckets"), store, *components(key, path))


def components(name: str, path: str) -> list[str]:
    """The components of an object's name.

    Raises:
      UserError: one of them leads out of its folder.
    """
    path_parts = [part for part in name.split("/") if part]
    if any(part in (".", "..") or "\\" in part or "\0" in part for part in path_parts):
        raise UserError(f"{path}: the object {name!r} has a name that is no path below its folder")
    return path_parts


def local_copy(path: str, patterns: Sequence[str] = ("*",)) -> str:
    """The local path of an up-to-date copy of a file or folder in a bucket. Local paths are returned as `located` has
    them, and names of nothing as they are.

    Args:
      path: in a bucket, or local.
      patterns: names below a folder that are copied, with * for any characters.

    Raises:
      UserError: there is no such file or folder, or it cannot be read.
    """
    if not bucket.is_remote(path):
        return place if os.path.exists(place := located(path)) else path
    path = path.rstrip("/")
    objects = bucket.find(path)
    if not objects:
        raise UserError(f"{path}: there is no such file or folder")
    local = _copy_of(path)
    os.makedirs(os.path.dirname(local), exist_ok=True)
    mark = hashlib.sha256(local.encode()).hexdigest()[:16]
    state = os.path.join(cache_folder("buckets"), f"{mark}.json")
    with filelock.FileLock(f"{state}.lock"):  # processes of a machine share the copy
        old = _read_state(state)
        versions = {name: f"{size} {version}" for name, (size, version) in objects.items()}
        new = _update(path, local, versions, patterns, old)
        with open(f"{state}.tmp", "w", encoding="utf-8") as file:
            json.dump(new, file)
        os.replace(f"{state}.tmp", state)
    return local


def _read_state(path: str) -> dict[str, str]:
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError):
        return {}


def _update(path: str, local: str, files: dict[str, str], patterns: Sequence[str], old: dict[str, str]) -> dict:
    """Downloads what is missing or changed and deletes what is gone. Returns the versions of the local files."""
    downloads: dict[str, str] = {}
    current: dict[str, str] = {}
    for name, version in files.items():
        place = os.path.join(local, *components(name, path)) if name else local
        if old.get(name) == version and os.path.isfile(place):
            current[name] = version
        elif not name or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            downloads[name] = place
    for name in set(old) - set(files):
        with contextlib.suppress(OSError):
            os.remove(os.path.join(local, *components(name, path)))
    _make_room(list(downloads.values()))
    bucket.download({f"{path}/{name}" if name else path: place for name, place in downloads.items()})
    return current | {name: files[name] for name in downloads}


def _make_room(places: Sequence[str]) -> None:
    """Removes folders that an earlier copy left where a file must be."""
    for place in places:
        if os.path.isdir(place):
            shutil.rmtree(place)


def upload_folder(local: str, path: str) -> None:
    """Uploads all files of a local folder under a path in a bucket."""
    bucket.upload(dict(pairs_below(local, path)))


def pairs_below(local: str, path: str) -> list[tuple[str, str]]:
    """(local file, path in the bucket) of all files below a folder, sorted."""
    pairs: list[tuple[str, Any]] = []
    for parent, _, names in os.walk(local):
        for name in names:
            file = os.path.join(parent, name)
            pairs.append((file, f"{path}/{os.path.relpath(file, local).replace(os.sep, '/')}"))
    return sorted(pairs)
