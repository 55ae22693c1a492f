"""A script in a child process that answers requests, for libraries that need a process of their own.

Requests and replies are lines of JSON. The script's first line says that it is ready, or {"error": TEXT}.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_ENVIRONMENT = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT")


class NotStarted(Exception):
    """The script ended before it was ready; the text is its reason, or empty where it printed one itself."""


class JsonWorker:
    """Runs a script in a child process, for any number of threads, one request at a time.

    The process starts with the first request, starts again after it ended, and ends with `close` or with its parent. It
    gets no credentials, and a fixed PYTHONHASHSEED, so that the order of sets is the same in a resumed run.

    Args:
      script: a file that reads requests from stdin and writes replies to stdout.
      *arguments: of the script.
    """

    def __init__(self, script: pathlib.Path, *arguments: str):
        self._command = [sys.executable, "-P", "-W", "ignore", str(script), *arguments]
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def ask(self, request: Any, is_complete: Callable[[list], bool]) -> list:
        """The replies to a request, fewer than complete if the process ended. A request at which the process was killed
        is repeated once.

        Args:
          request: of JSON types.
          is_complete: whether these replies are all that the request has.

        Raises:
          NotStarted: the script cannot run.
        """
        line = json.dumps(request) + "\n"
        with self._lock:
            try:
                replies, status = self._ask(line, is_complete)
                if status < 0:  # killed: by its limit on memory, or by somebody
                    replies, status = self._ask(line, is_complete)
            except BaseException:  # its replies to this request would be taken for those to the next one
                self._stop()
                raise
        return replies

    def _ask(self, line: str, is_complete: Callable[[list], bool]) -> tuple[list, int]:
        """(replies; the exit status of the process, 0 if it runs)."""
        if self._process is None:
            self._start()
        replies: list = []
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()
        while not is_complete(replies):
            if not (reply := self._process.stdout.readline()).endswith("\n"):
                self._process.wait()
                return replies, self._stop()
            replies.append(json.loads(reply))
        return replies, 0

    def _start(self) -> None:
        environment = {  # no credentials: what it reads was written by a model
            **{name: value for name, value in os.environ.items() if name in _ENVIRONMENT},
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONHASHSEED": "0",
        }
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="ascii",
            env=environment,
        )
        ready = self._process.stdout.readline()
        error = json.loads(ready) if ready.endswith("\n") else {"error": ""}
        if isinstance(error, dict):
            self._stop()
            raise NotStarted(error["error"])

    def _stop(self) -> int:
        """Kills the process if it runs, and returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:  # closes its pipes and waits for it
            pass
        return process.returncode

    def close(self) -> None:
        """Ends the process, after the request that it is at."""
        with self._lock:
            self._stop()


# --- the script's side


class Requests:
    """The requests to a script, and its replies. What libraries print to stdout is dropped."""

    def __init__(self):
        for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group; the parent decides
            signal.signal(number, signal.SIG_IGN)
        self._replies = os.fdopen(os.dup(1), "w")
        self._null = open(os.devnull, "w")
        os.dup2(self._null.fileno(), 1)

    def __iter__(self) -> Iterator[Any]:
        """The requests, until stdin ends. The time limit of one ends with it."""
        for line in sys.stdin:
            yield json.loads(line)
            faulthandler.cancel_dump_traceback_later()

    def reply(self, value: Any) -> None:
        """Writes a line."""
        print(json.dumps(value), file=self._replies, flush=True)

    def limit(self, seconds: float) -> None:
        """Ends the process after this time, unless it is limited again or the next request is read before."""
        # A thread in C that needs no lock of Python: the only limit on an operation that never returns to Python.
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._null)
