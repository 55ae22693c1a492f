"""One run per folder: a run holds a lock that the operating system releases when its process ends, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import platform
import time

import filelock

from rlhf_jax.errors import UserError

NAME = ".lock"


class Lock:
    """The lock of a folder, FOLDER/.lock; the file names its holder."""

    def __init__(self, folder: str):
        """`folder`: of a run; it must exist when `take` is called."""
        self._folder, self._path = folder, pathlib.Path(folder, NAME)
        # No soft lock where a file system has no locks: it would outlive a killed run.
        self._lock = filelock.FileLock(self._path, blocking=False, thread_local=False, fallback_to_soft=False)

    def take(self) -> None:
        """Takes the lock.

        Raises:
          UserError: another run is in the folder; names its host, process and start.
        """
        self._acquire()
        holder = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self._path.write_text(json.dumps(holder) + "\n", encoding="utf-8")

    def check(self) -> None:
        """Raises as `take` where another run is in the folder; neither keeps the lock nor creates its file."""
        if self._path.exists():
            self._acquire()
            self._lock.release()

    def ensure_held(self) -> None:
        """Does nothing: the operating system takes no lock away (see `lease.Lease`)."""

    def release(self) -> None:
        """Releases the lock, if held."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):  # the folder may be gone
                self._path.write_text("", encoding="utf-8")
            self._lock.release()

    def _acquire(self) -> None:
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise UserError(
                f"--run_dir {self._folder} is in use by {self._holder()}: choose another folder, or end that run first"
            ) from None
        except (OSError, NotImplementedError):
            pass  # a file system without locks, as some network ones: a second run is not noticed there

    def _holder(self) -> str:
        try:
            holder = json.loads(self._path.read_text(encoding="utf-8"))
            return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"
