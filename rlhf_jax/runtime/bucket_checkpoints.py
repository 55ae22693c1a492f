"""Checkpoints in a bucket: written to a local folder by `Checkpoints`, uploaded in the background, and complete once a
marker is there.

FOLDER/STEP/state/..., FOLDER/STEP/extra/...  the files of all processes; a shard is a file
FOLDER/STEP/uploaded.PROCESS                  the files of one process and their sizes, written after them
FOLDER/STEP/commit.json                       the marker, written by process 0 after those of all processes
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlhf_jax import storage
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import multihost
from rlhf_jax.runtime.checkpoint import (
    DAMAGED_SUFFIX,
    SAVE_TIMEOUT,
    Checkpoints,
    Damaged,
    Keep,
    reason_of,
    restore_newest,
)
from rlhf_jax.storage import bucket, copies

_UPLOADED = "uploaded"
_POLL_SECONDS = 0.5


def open_checkpoints(folder: str, keep: int | None, **options: Any) -> Checkpoints | BucketCheckpoints:
    """The checkpoints of a folder, local or in a bucket. Arguments as those of `Checkpoints`."""
    return (BucketCheckpoints if storage.is_remote(folder) else Checkpoints)(folder, keep, **options)


class BucketCheckpoints:
    """As `Checkpoints`, of a folder in a bucket.

    A kill leaves a step without its marker, which is not restored and removed by the next start. With several processes
    no file is shared: each uploads its own shards, and downloads the checkpoint to restore it.
    """

    def __init__(
        self,
        folder: str,
        keep: int | None = None,
        *,
        greater_is_better: bool = False,
        warn: Callable[[str], None] | None = None,
    ):
        """As `Checkpoints`; every process must call it.

        Raises:
          UserError: keep is below 1, or the bucket cannot be read.
        """
        self.folder = folder
        staging = copies.staging_folder(folder, str(jax.process_index()))
        saved = lambda: sorted(self._scores)  # noqa: E731
        self._local = Checkpoints(staging, None, warn=warn, shown_as=folder, saved=saved)
        self.warn = self._local.warn
        self._keep = Keep(keep, greater_is_better)
        if keep is not None and keep < 1:
            raise UserError(f"--save_total_limit {keep}: keep at least 1 checkpoint, or None for all")
        scores = multihost.from_first(self._look)
        self._scores = {int(step): np.nan if score is None else score for step, score in scores.items()}
        self._keep.scores.update(self._scores)
        self._saving: int | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._uploaded, self._abandon = threading.Event(), threading.Event()
        if multihost.is_main():
            self._delete_excess()
        self._scores = {step: self._scores[step] for step in self._keep.preserved(self.steps())}

    def _look(self) -> dict[str, float | None]:
        """{step: score} of complete steps; removes incomplete ones."""
        scores = {}
        for name in bucket.names(self.folder):
            if not name.isdigit():
                continue
            try:
                scores[name] = json.loads(bucket.read(f"{self.folder}/{name}/{storage.MARKER}"))["score"]
            except FileNotFoundError:
                storage.remove_tree(f"{self.folder}/{name}")
            except (ValueError, KeyError, TypeError):
                scores[name] = None
        return scores

    def room(self, state: Any) -> tuple[int, int | None]:
        """As `Checkpoints.room`, of the local folder."""
        return self._local.room(state)

    # --- saving

    def save(self, step: int, state: Any, extra: dict[str, Any] | None = None, score: float | None = None) -> bool:
        """As `Checkpoints.save`; the upload too continues in the background."""
        self._finish_save()
        if step in self._scores:
            return False
        if not self._local.save(step, state, extra, score):
            return False
        self._saving, self._error = step, None
        self._uploaded, self._abandon = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(step, score), daemon=True, name="checkpoint upload")
        self._thread.start()
        return True

    def _run(self, step: int, score: float | None) -> None:
        try:
            try:
                self._local.wait_for_files()
                self._upload(step)
            finally:
                self._uploaded.set()
            if multihost.is_main():
                self._commit(step, score)
        except Exception as error:  # reported by the thread that waits for the save
            self._error = error

    def _upload(self, step: int) -> None:
        """This process' files, then their list."""
        where = f"{self.folder}/{step}"
        pairs = copies.pairs_below(os.path.join(self._local.folder, str(step)), where)
        if not pairs:
            raise OSError("no file was written")
        bucket.upload(dict(pairs))
        sizes = {path.removeprefix(f"{where}/"): os.path.getsize(local) for local, path in pairs}
        bucket.write(f"{where}/{_UPLOADED}.{jax.process_index()}", json.dumps(sizes).encode())

    def _commit(self, step: int, score: float | None) -> None:
        """The marker, once all processes have uploaded; then older steps over the limit are deleted."""
        where, count = f"{self.folder}/{step}", jax.process_count()
        file_lists = {f"{_UPLOADED}.{index}" for index in range(count)}
        end = time.monotonic() + SAVE_TIMEOUT
        while count > 1 and not file_lists <= set(bucket.names(where)):
            if time.monotonic() > end:
                raise OSError(f"the other processes did not upload their shards within {SAVE_TIMEOUT} seconds")
            if self._abandon.wait(_POLL_SECONDS):
                raise OSError("another process could not upload its shards")
        content = {"score": score, "processes": count}
        bucket.write(f"{where}/{storage.MARKER}", json.dumps(content).encode())
        self._keep.scores[step] = np.nan if score is None else float(score)
        self._delete_excess(step)

    def _delete_excess(self, new: int | None = None) -> None:
        """Deletes steps over the limit, each one's marker first."""
        steps = sorted({*self._scores, *([] if new is None else [new])})
        for step in set(steps) - self._keep.preserved(steps):
            with contextlib.suppress(storage.StorageError):  # tried again after the next save
                self._delete(step)

    def _delete(self, step: int) -> None:
        bucket.remove([f"{self.folder}/{step}/{storage.MARKER}"])
        storage.remove_tree(f"{self.folder}/{step}")

    def _finish_save(self) -> None:
        """Waits for the save in progress; warns and cleans up if it failed on any process."""
        if self._saving is None:
            return
        step, self._saving = self._saving, None
        self._uploaded.wait()
        errors = multihost.gather_objects(None if self._error is None else reason_of(self._error))
        if any(errors):
            self._abandon.set()
        self._thread.join()
        mine = None if self._error is None else reason_of(self._error)
        reason = next((text for text in (*errors, *multihost.gather_objects(mine)) if text), None)
        with contextlib.suppress(Exception):  # raised in the thread too
            self._local.wait()
        self._local.forget(step)
        if reason is not None:
            newest = f"the newest checkpoint is of update {max(self._scores)}" if self._scores else "no checkpoint yet"
            self.warn(f"checkpoint {self.folder}/{step} could not be written: {reason}. The run continues; {newest}")
            if multihost.is_main():
                with contextlib.suppress(storage.StorageError):  # else the next start removes it
                    self._delete(step)
            multihost.wait_for_all("failed checkpoint")
            self._keep.scores.pop(step, None)
            return
        score = multihost.from_first(lambda: self._keep.scores[step])
        self._keep.scores[step] = self._scores[step] = np.nan if score is None else float(score)
        self._scores = {step: self._scores[step] for step in self._keep.preserved(self.steps())}

    # --- restoring

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return max(self._scores, default=None)

    def steps(self) -> list[int]:
        """All complete steps, in order."""
        return sorted(self._scores)

    def best(self) -> int | None:
        """The existing step with the best score, or None."""
        return self._keep.best(self.steps())

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """As `Checkpoints.restore`, after a download to the local folder."""
        self._finish_save()
        where = f"{self.folder}/{step}"
        if step not in self._scores:
            raise UserError(f"no checkpoint {where}; existing steps: {self.steps() or 'none'}")
        local, error = os.path.join(self._local.folder, str(step)), None
        try:
            self._download(where, local)
        except UserError as raised:
            error = raised
        damaged = any(multihost.gather_objects(isinstance(error, Damaged)))
        multihost.agree(error=error, kind=Damaged if damaged else UserError)
        self._local.reload()
        try:
            return self._local.restore(step, like)
        finally:
            self._local.forget(step)

    def _download(self, where: str, local: str) -> None:
        """A step's files.

        Raises:
          Damaged: a file is missing or has another size than was uploaded.
        """
        shutil.rmtree(local, ignore_errors=True)
        stored_files = bucket.find(where)
        try:
            count = json.loads(bucket.read(f"{where}/{storage.MARKER}"))["processes"]
            sizes: dict[str, int] = {}
            for index in range(count):
                sizes |= json.loads(bucket.read(f"{where}/{_UPLOADED}.{index}"))
            for name, size in sizes.items():
                if name not in stored_files or stored_files[name][0] != size:
                    raise ValueError(f"{name} {'is missing' if name not in stored_files else 'was cut short'}")
                copies.components(name, where)
            bucket.download({f"{where}/{name}": os.path.join(local, name) for name in sizes})
        except storage.StorageError:
            raise
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"checkpoint {where} is damaged ({type(error).__name__}: {reason_of(error)})") from error

    def restore_newest(self, like: Any) -> tuple[Any, dict[str, Any], int] | None:
        """As `Checkpoints.restore_newest`; a damaged step is copied to STEP.damaged."""
        return restore_newest(self, like)

    def set_aside(self, step: int) -> None:
        """Copies a damaged checkpoint, so that its step can be saved again and its files can be inspected."""

        def move() -> None:
            where = f"{self.folder}/{step}"
            storage.remove_tree(where + DAMAGED_SUFFIX)
            names = [name for name in bucket.find(where) if name != storage.MARKER]
            bucket.copy({f"{where}/{name}": f"{where}{DAMAGED_SUFFIX}/{name}" for name in names})
            self._delete(step)

        multihost.from_first(move)
        self._scores.pop(step)
        self._keep.scores.pop(step, None)

    # --- the end

    def wait(self) -> None:
        """Returns when the last save is in the bucket or has failed with a warning."""
        self._finish_save()

    def close(self) -> None:
        """Waits for the last save and deletes the local folder."""
        self.wait()
        self._local.close()
        shutil.rmtree(self._local.folder, ignore_errors=True)

    def __enter__(self) -> BucketCheckpoints:
        return self

    def __exit__(self, *_) -> None:
        self.close()
