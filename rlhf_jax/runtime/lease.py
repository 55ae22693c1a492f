"""One run per folder of a bucket: a lock made by conditional creation, which expires unless its holder renews it.

FOLDER/.lock/NUMBER names the holder; the highest number counts. A run takes the lock by creating the next number, which
only one of several can, once the present holder has released it, has ended, or has not renewed it for LEASE seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import sys
import threading
import time
from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.storage import StorageError, bucket
from rlhf_jax.utils.text import parse_json

NAME = ".lock"
LEASE = 60.0
"""Seconds without a renewal after which a lock may be taken over."""
RENEW = 10.0
"""Seconds between renewals."""
_LONG_AGO = 900.0  # seconds by two machines' clocks, which may differ by minutes
_expired: dict[str, bytes] = {}  # by folder: the lock that was seen to expire, so that one start waits once
_released: set[str] = set()  # ids of locks that this process gave up, perhaps while the bucket could not be written


class Lease:
    """The lock of a folder in a bucket."""

    def __init__(self, folder: str):
        """`folder`: of a run, existing or not."""
        self._folder = folder
        self._number: int | None = None
        self._holder: dict[str, Any] = {}
        self._lost: str | None = None
        self._renewed = 0.0
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Takes the lock and renews it in a thread until `release`. Waits up to LEASE seconds for a lock to expire.

        Raises:
          UserError: another run is in the folder; names its host, process and start.
        """
        number = self._check()
        self._holder = {
            "host": platform.node(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": _machine(),
            "started": _start_of(os.getpid()),
            "id": secrets.token_hex(8),
        }
        if not bucket.create(self._path(number + 1), self._content()):
            raise self._in_use(self._newest()[1])
        self._number, self._renewed = number + 1, time.monotonic()
        with contextlib.suppress(StorageError):
            self._remove_older()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="lease")
        self._thread.start()

    def check(self) -> None:
        """Raises as `take` where another run is in the folder; takes nothing."""
        self._check()

    def ensure_held(self) -> None:
        """Raises a UserError if another run has taken the lock over, as after a long loss of the network."""
        if self._number is not None and self._lost is None and time.monotonic() - self._renewed > LEASE:
            self._renew_once()
        if self._lost is not None:
            raise UserError(
                f"--run_dir {self._folder} was taken over by {self._lost}, since this process could not renew its lock "
                f"for {LEASE:.0f} seconds. It stops here, so that the two do not mix their files"
            )

    def release(self) -> None:
        """Releases the lock, if held."""
        if self._number is None:
            return
        self._ending.set()
        self._thread.join()
        number, self._number = self._number, None
        _released.add(self._holder["id"])
        if self._lost is None:
            with contextlib.suppress(StorageError):
                bucket.write(self._path(number), b"{}\n", attempts=1)

    # --- the present holder

    def _path(self, number: int) -> str:
        return f"{self._folder}/{NAME}/{number:08d}"

    def _newest(self) -> tuple[int, bytes]:
        """(the highest number, 0 without a lock; its content)."""
        for _ in range(10):
            number = self._highest()
            if number == 0:
                return 0, b""
            with contextlib.suppress(FileNotFoundError):  # a later one took its place meanwhile
                return number, bucket.read(self._path(number))
        raise StorageError(f"{self._folder}: its lock changes all the time")

    def _highest(self) -> int:
        names = bucket.names(f"{self._folder}/{NAME}")
        return max((int(name) for name in names if name.isdigit()), default=0)

    def _check(self) -> int:
        """The number of the present lock, whose holder has ended.

        Raises:
          UserError: it has not.
        """
        number, content = self._newest()
        holder = _parse(content)
        if not holder or _expired.get(self._folder) == content:
            return number
        ended = _has_ended(holder)
        if ended is None and time.time() - holder.get("renewed", 0) < _LONG_AGO:
            self._wait(content)
        elif ended is False:
            raise self._in_use(content)
        _expired[self._folder] = content
        return number

    def _wait(self, content: bytes) -> None:
        """Returns once a lock has not been renewed for LEASE seconds; raises a UserError when it is."""
        print(
            f"--run_dir {self._folder}: waiting up to {LEASE:.0f} seconds to see whether {_describe(content)} still "
            "renews its lock",
            file=sys.stderr,
            flush=True,
        )
        end = time.monotonic() + LEASE
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(RENEW / 4, left))
            newest = self._newest()[1]
            if not _parse(newest):
                return  # released
            if newest != content:
                raise self._in_use(newest)

    def _in_use(self, content: bytes) -> UserError:
        return UserError(
            f"--run_dir {self._folder} is in use by {_describe(content)}: choose another folder, or end that run first"
        )

    # --- renewal

    def _content(self) -> bytes:
        return (json.dumps({**self._holder, "renewed": time.time()}) + "\n").encode()

    def _renew(self) -> None:
        while not self._ending.wait(RENEW) and self._lost is None:
            self._renew_once()

    def _renew_once(self) -> None:
        with contextlib.suppress(StorageError):  # tried again
            if self._highest() > self._number:
                self._lost = _describe(self._newest()[1])
                return
            bucket.write(self._path(self._number), self._content(), attempts=1)
            self._renewed = time.monotonic()

    def _remove_older(self) -> None:
        names = bucket.names(f"{self._folder}/{NAME}")
        older = [name for name in names if name.isdigit() and int(name) < self._number]
        bucket.remove([f"{self._folder}/{NAME}/{name}" for name in older])


def _parse(content: bytes) -> dict[str, Any]:
    """The holder that a lock names; {} for a released or damaged one."""
    try:
        holder = parse_json(content.decode())
        return holder if isinstance(holder, dict) and isinstance(holder.get("pid"), int) else {}
    except ValueError:
        return {}


def _describe(content: bytes) -> str:
    holder = _parse(content)
    if not holder:
        return "another process"
    return f"process {holder['pid']} on {holder.get('host')}, since {holder.get('since')}"


def _machine() -> str | None:
    """Names this machine and its table of processes, of which a container has its own; None if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _start_of(pid: int) -> str | None:
    """The start of a process, in ticks since boot; 'ended' for one that has; None if unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return "ended" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None


def _has_ended(holder: dict[str, Any]) -> bool | None:
    """Whether the holder has ended or given the lock up; None if it is on another machine, or does not renew it."""
    if holder.get("id") in _released:
        return True
    if holder.get("machine") is None or holder["machine"] != _machine():
        return None
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return None
    start = _start_of(holder["pid"])
    if start is None or time.time() - holder.get("renewed", 0) > LEASE:
        return None
    return start != holder.get("started")
