"""Paths of a run whose folder may have been renamed or moved, or that is resumed from another working folder."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from rlhf_jax import storage


@dataclasses.dataclass(frozen=True)
class Relocation:
    """From the paths that a run's config.json holds to where their files are.

    Attributes:
      run_dir: as config.json has it.
      folder: that config.json is in.
    """

    run_dir: str
    folder: str

    def find(self, path: str) -> str:
        """The absolute place of a path: what was within the run's folder, or the folder around it (that of a pipeline),
        has moved with it, unless it is only where it was. A name on the hub becomes a path without a file."""
        path, old, new = self._absolute(path), self._absolute(self.run_dir), storage.absolute(self.folder)
        for _ in range(2):
            if path == old or path.startswith(f"{old}/"):
                moved = new + path[len(old) :]
                return path if moved != path and storage.exists(path) and not storage.exists(moved) else moved
            old, new = os.path.dirname(old), os.path.dirname(new)
            if old in ("", "/") or old.endswith(":"):
                break
        return path

    def _absolute(self, path: str) -> str:
        if storage.is_remote(path):
            return storage.absolute(path)
        return os.path.normpath(os.path.join(self._working_folder, os.path.expanduser(path)))

    @property
    def _working_folder(self) -> str:
        """The one that the run began in, as far as that can be told: unless the run has moved, its folder ends with its
        relative run_dir."""
        run_dir, folder = os.path.normpath(self.run_dir), storage.absolute(self.folder)
        relative = not (storage.is_remote(self.run_dir) or self.run_dir.startswith(("/", "~")) or run_dir[:2] == "..")
        return folder.removesuffix(run_dir) if relative and folder.endswith(f"/{run_dir}") else storage.working_folder()


def same_files(old: Any, new: Any, old_paths: Relocation, new_paths: Relocation) -> bool:
    """Whether the values of an option, of JSON types, name the same files: paths, NAME=PATH or FILE.py:FUNCTION, or
    lists and dicts of them. What is no file, as a name on the hub, must be the same text."""
    if old == new:
        return True
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return all(same_files(*pair, old_paths, new_paths) for pair in zip(old, new))
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return all(same_files(old[key], new[key], old_paths, new_paths) for key in old)
    if not (isinstance(old, str) and isinstance(new, str)):
        return False
    return _places(old, old_paths) == _places(new, new_paths)


def _places(text: str, paths: Relocation) -> str:
    """The text with each path in it as the file that it names."""
    if not _is_path(text, paths):
        if "=" in text and "," in text:
            return ",".join(_places(part, paths) for part in text.split(","))
        name, equals, path = text.partition("=")
        if equals:
            return name + equals + _places(path, paths)
        file, colon, function = text.rpartition(":")
        return _places(file, paths) + colon + function if file.endswith(".py") else text
    place = paths.find(text)
    return place if storage.is_remote(place) else os.path.realpath(place)


def _is_path(text: str, paths: Relocation) -> bool:
    """Whether a text names a file rather than something on the hub, as `hf.resolve` takes it."""
    if "=" in text or text.rpartition(":")[0].endswith(".py"):
        return not storage.is_remote(text) and os.path.exists(paths.find(text))
    explicit = storage.is_remote(text) or text.startswith((".", "/", "~")) or text.endswith("/") or text.count("/") > 1
    return explicit or os.path.exists(paths.find(text))
