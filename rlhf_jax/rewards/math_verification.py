"""Answers compared with solutions by math_verify, in a process of its own: math_worker.py.

math_verify limits its time by signal.alarm, which works in a process's main thread alone. Reward functions are called
in other threads, so a child process runs math_verify in its main thread. Messages are lines of JSON.
"""

from __future__ import annotations

import dataclasses
import pathlib
from importlib.util import find_spec
from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.utils.json_worker import JsonWorker, NotStarted

UNPARSEABLE = "[unparseable]"


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


class Verifier(JsonWorker):
    """Runs math_verify in a child process, for any number of threads, one row at a time.

    Args:
      parse_seconds, verify_seconds: time limits, as TRL's, of parsing a solution or a completion and of comparing two
        expressions. What exceeds them counts as not parsed, or not equal.
    """

    def __init__(self, parse_seconds: int = 10, verify_seconds: int = 5):
        script = pathlib.Path(__file__).with_name("math_worker.py")
        super().__init__(script, str(parse_seconds), str(verify_seconds))

    def verify(self, solution: Any, completion: Any) -> Verdict:
        """Compares the answer in a completion with a solution, both texts.

        Raises:
          UserError: math_verify cannot be imported.
        """
        try:
            replies = self.ask([solution, completion], lambda replies: replies == [False] or len(replies) == 3)
        except NotStarted as error:
            raise UserError(
                "math_verify cannot be imported; the error is printed above. pip install '.[math]'"
            ) from error
        if not replies or not replies[0]:
            return Verdict(None)
        correct = len(replies) > 1 and replies[1]
        gold, answer = replies[2] if len(replies) > 2 else ("[too slow]", "[too slow]")
        return Verdict(correct, gold, UNPARSEABLE if answer is None else answer)


shared = Verifier()
"""The verifier of all reward functions of this process."""
