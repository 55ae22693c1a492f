"""Answers compared with solutions by math_verify, in a process of its own: math_worker.py.

math_verify limits its time by signal.alarm, which works in a process's main thread alone. Reward functions are called
in other threads, so a child process runs math_verify in its main thread. Messages are lines of JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import threading
from importlib.util import find_spec
from typing import Any

from rlhf_jax.errors import UserError

UNPARSEABLE = "[unparseable]"
_ENVIRONMENT = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT")


def check_installed(function: str) -> None:
    """UserError, naming the reward function, if math_verify is not installed."""
    if find_spec("math_verify") is None:
        raise UserError(f"{function} needs the package math-verify: pip install '.[math]'")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What math_verify says of a solution and a completion."""

    correct: bool | None
    """None: the solution cannot be parsed."""
    gold: str = UNPARSEABLE
    """The parsed solution."""
    answer: str = UNPARSEABLE
    """The parsed answer of the completion."""


class Verifier:
    """Runs math_verify in a child process, for any number of threads, one row at a time.

    The process starts with the first row, starts again after it ended, and ends with `close` or with its parent.

    Args:
      parse_seconds, verify_seconds: time limits, as TRL's, of parsing a solution or a completion and of comparing two
        expressions. What exceeds them counts as not parsed, or not equal.
    """

    def __init__(self, parse_seconds: int = 10, verify_seconds: int = 5):
        self._limits = (parse_seconds, verify_seconds)
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def verify(self, solution: Any, completion: Any) -> Verdict:
        """Compares the answer in a completion with a solution, both texts.

        Raises:
          UserError: math_verify cannot be imported.
        """
        request = json.dumps([solution, completion]) + "\n"
        with self._lock:
            try:
                replies, status = self._ask(request)
                if status < 0:  # killed: by its limit on memory, or by somebody
                    replies, status = self._ask(request)
            except BaseException:  # its replies to this row would be taken for those to the next one
                self._stop()
                raise
        if not replies or not replies[0]:
            return Verdict(None)
        correct = len(replies) > 1 and replies[1]
        gold, answer = replies[2] if len(replies) > 2 else ("[too slow]", "[too slow]")
        return Verdict(correct, gold, UNPARSEABLE if answer is None else answer)

    def _ask(self, request: str) -> tuple[list, int]:
        """(the replies to a row, fewer than the row has if the process ended; its exit status, 0 if it runs)."""
        if self._process is None:
            self._start()
        replies: list = []
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(request)
            self._process.stdin.flush()
        while replies != [False] and len(replies) < 3:
            if not (line := self._process.stdout.readline()).endswith("\n"):
                self._process.wait()
                return replies, self._stop()
            replies.append(json.loads(line))
        return replies, 0

    def _start(self) -> None:
        script = str(pathlib.Path(__file__).with_name("math_worker.py"))
        environment = {  # no credentials: what it parses was written by a model
            **{name: value for name, value in os.environ.items() if name in _ENVIRONMENT},
            "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
            "PYTHONHASHSEED": "0",  # the order of SymPy's sets, and so its verdict, is the same in a resumed run
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", script, *map(str, self._limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="ascii",
            env=environment,
        )
        if not self._process.stdout.readline():
            raise UserError("math_verify cannot be imported; the error is printed above. pip install '.[math]'")

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
        """Ends the process, after the row that it is at."""
        with self._lock:
            self._stop()


shared = Verifier()
"""The verifier of all reward functions of this process."""
