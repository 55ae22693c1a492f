"""The process that runs math_verify: a script that imports nothing of this package, and so no jax.

python -P math_worker.py PARSE_SECONDS VERIFY_SECONDS

It reads lines of JSON, [solution, completion], and writes up to three lines for each: whether the solution can be
parsed; if so, whether the completion's answer equals it; and the parsed forms of both as text. math_verify limits its
time by signal.alarm. An operation that does not return to Python, where signals are handled, ends the process instead.
"""

import faulthandler
import json
import logging
import os
import signal
import sys

GRACE = 1  # second of an operation after its alarm


def as_text(parsed: list) -> str:
    """A list of SymPy expressions as text."""
    try:
        return str(parsed)
    except Exception:  # an integer of more digits than Python converts
        return "[unprintable]"


def main(parse_seconds: int, verify_seconds: int) -> None:
    """Serves requests until stdin ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group; the parent decides what to do
        signal.signal(number, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w")
    null = open(os.devnull, "w")
    os.dup2(null.fileno(), 1)  # so that what libraries print does not mix with the replies

    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.core import random

    logging.disable()  # math_verify warns of each timeout
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )

    def limit(seconds: int) -> None:
        # A thread in C that needs no lock of Python: the only limit on an operation that never returns to Python.
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=null)

    def reply(value) -> None:
        print(json.dumps(value), file=replies, flush=True)

    reply("ready")
    for line in sys.stdin:
        solution, completion = json.loads(line)
        random.seed(0)  # SymPy compares at random points: the verdict on a row must not depend on the rows before it
        limit(parse_seconds)
        gold = parse(solution, parsing_timeout=parse_seconds)
        reply(bool(gold))
        if gold:
            limit(parse_seconds)
            answer = parse(
                completion, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=parse_seconds
            )
            limit(verify_seconds * len(gold) * max(len(answer), 1))  # each pair has its own alarm
            reply(bool(verify(gold, answer, timeout_seconds=verify_seconds)))
            limit(parse_seconds)
            reply([as_text(gold), as_text(answer) if answer else None])
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
