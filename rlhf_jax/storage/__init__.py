"""Files of runs, models and data, local or in a bucket (s3://BUCKET/KEY, gs://BUCKET/KEY): the one owner of such paths.

Local files are written under another name and renamed. An object of a bucket appears whole or not at all; what
consists of several objects is complete once its last object, a marker, exists. Paths in a bucket are joined and split
by os.path.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from rlhf_jax.storage import bucket
from rlhf_jax.storage.bucket import StorageError, is_remote
from rlhf_jax.storage.copies import cache_folder, local_copy, upload_folder
from rlhf_jax.storage.paths import absolute, from_here, located, working_folder

__all__ = [
    "StorageError",
    "MARKER",
    "absolute",
    "cache_folder",
    "complete_folders",
    "exists",
    "from_here",
    "is_dir",
    "is_file",
    "is_remote",
    "list_names",
    "local_copy",
    "located",
    "make_dir",
    "read_text",
    "remove",
    "remove_tree",
    "upload_folder",
    "working_folder",
    "write_atomically",
]

MARKER = "commit.json"
"""The object that makes several objects in a folder of a bucket complete."""


def exists(path: str) -> bool:
    """Whether there is a file or folder; a folder in a bucket exists while it contains an object."""
    return bucket.kind_of(path) is not None if is_remote(path) else os.path.exists(located(path))


def is_file(path: str) -> bool:
    """Whether there is a file."""
    return bucket.kind_of(path) == "file" if is_remote(path) else os.path.isfile(located(path))


def is_dir(path: str) -> bool:
    """Whether there is a folder."""
    return bucket.kind_of(path) == "folder" if is_remote(path) else os.path.isdir(located(path))


def list_names(folder: str) -> list[str]:
    """Names in a folder; in a bucket none where there is no folder."""
    return bucket.names(folder) if is_remote(folder) else os.listdir(located(folder))


def complete_folders(folder: str) -> list[str]:
    """Names of the folders in a folder of a bucket that have the marker, which is written last."""
    return [name for name in bucket.names(folder) if MARKER in bucket.names(f"{folder}/{name}")]


def make_dir(folder: str) -> None:
    """Creates a folder with its parents; nothing to do in a bucket."""
    if not is_remote(folder):
        os.makedirs(located(folder), exist_ok=True)


def read_text(path: str, *, errors: str = "strict", newline: str | None = None) -> str:
    """The text of a file in UTF-8.

    Args:
      errors, newline: as `open`.

    Raises:
      OSError: it does not exist or cannot be read.
      UnicodeDecodeError: it is not UTF-8, unless `errors` says otherwise.
    """
    if not is_remote(path):
        with open(located(path), encoding="utf-8", errors=errors, newline=newline) as file:
            return file.read()
    return bucket.read(path).decode("utf-8", errors)


def write_atomically(path: str, text: str) -> None:
    """Writes a whole file or nothing: a reader sees the old text or the new one, even after a kill.

    Args:
      path: of the file; its folder must exist.
    """
    if is_remote(path):
        bucket.write(path, text.encode())
        return
    path = located(path)
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def remove(path: str) -> None:
    """Deletes a file."""
    if is_remote(path):
        bucket.remove([path])
    else:
        os.remove(located(path))


def remove_tree(folder: str, **options: Any) -> None:
    """Deletes a folder with all that is in it; `options` as shutil.rmtree, for local ones."""
    if is_remote(folder):
        bucket.remove([f"{folder}/{name}" if name else folder for name in bucket.find(folder)])
    else:
        shutil.rmtree(located(folder), **options)
