"""One run a folder: who is in it holds a lock that the system takes away when its process ends, however it ends."""

from __future__ import annotations

import errno
import json
import os
import platform
import time

from rlhf_jax.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows, where two runs in a folder are not noticed
    fcntl = None

NAME = ".lock"


class Lock:
    """The lock of a folder, FOLDER/.lock, with a line that says who has it."""

    def __init__(self, folder: str):
        """`folder`: of a run; it exists by the time of `take`."""
        self.path = os.path.join(folder, NAME)
        self._file: int | None = None

    def take(self) -> None:
        """Takes the lock; one that a dead process left is free.

        Raises:
          UserError: another run is in the folder; it names the host, the process and since when.
        """
        if fcntl is None:
            return
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _lock(file):
            os.close(file)
            raise self._taken()
        who = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(file, 0)
        os.pwrite(file, (json.dumps(who) + "\n").encode(), 0)
        self._file = file

    def check(self) -> None:
        """Raises as `take` where another run is in the folder now; takes nothing and makes nothing."""
        try:
            file = os.open(self.path, os.O_RDWR)
        except OSError:  # there is none, or `take` will say that it cannot be written
            return
        if fcntl is None:
            os.close(file)
            return
        try:
            if not _lock(file):
                raise self._taken()
        finally:
            os.close(file)

    def release(self) -> None:
        """Gives the lock back; nothing where it is not held."""
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None

    def _taken(self) -> UserError:
        try:
            with open(self.path, encoding="utf-8") as file:
                who = json.load(file)
            holder = f"process {who['pid']} on {who['host']}, since {who['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            holder = "another process"
        return UserError(
            f"--run_dir {os.path.dirname(self.path)} is in use by {holder}: give another folder, or end that run first"
        )


def _lock(file: int) -> bool:
    """Whether an open file could be locked; also where the file system has no locks, as some network ones."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
