"""The process that runs math_verify: a script, which imports no jax.

python -P math_worker.py PARSE_SECONDS VERIFY_SECONDS

A request is [solution, completion]. It has up to three replies: whether the solution can be parsed; if so, whether the
completion's answer equals it; and the parsed forms of both as text. math_verify limits its time by signal.alarm. An
operation that does not return to Python, where signals are handled, ends the process instead.
"""

import logging
import sys

from rlhf_jax.utils.json_worker import Requests

GRACE = 1  # second of an operation after its alarm


def as_text(parsed: list) -> str:
    """A list of SymPy expressions as text."""
    try:
        return str(parsed)
    except Exception:  # an integer of more digits than Python converts
        return "[unprintable]"


def main(parse_seconds: int, verify_seconds: int) -> None:
    """Serves requests until stdin ends."""
    requests = Requests()

    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.core import random

    logging.disable()  # math_verify warns of each timeout
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    requests.reply("ready")
    for solution, completion in requests:
        random.seed(0)  # SymPy compares at random points: the verdict on a row must not depend on the rows before it
        requests.limit(parse_seconds + GRACE)
        gold = parse(solution, parsing_timeout=parse_seconds)
        requests.reply(bool(gold))
        if gold:
            requests.limit(parse_seconds + GRACE)
            answer = parse(
                completion, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=parse_seconds
            )
            # Each pair has its own alarm.
            requests.limit(verify_seconds * len(gold) * max(len(answer), 1) + GRACE)
            requests.reply(bool(verify(gold, answer, timeout_seconds=verify_seconds)))
            requests.limit(parse_seconds + GRACE)
            requests.reply([as_text(gold), as_text(answer) if answer else None])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
