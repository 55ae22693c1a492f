"""How long a policy takes to answer: loading, the first text, and texts that differ in one thing from it.

    XDG_CACHE_HOME=$(mktemp -d) python scripts/bench/first_answer.py MODEL

A second call with the same XDG_CACHE_HOME has the compiled programs of the first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

TEXT = "What is the capital of France?"
CASES = {
    "first": {},
    "the same": {},
    "longer": {"text": TEXT + " Please explain it." * 8},
    "sampled, 64 tokens": {"temperature": 0.7, "max_new_tokens": 64},
    "temperature 0.9, 30 tokens": {"temperature": 0.9, "max_new_tokens": 30},
}
"""What differs from 48 tokens of greedy decoding, by its name."""


def measured(path: str) -> Iterator[tuple[str, float]]:
    """(what, seconds) of importing the package and loading a policy, and of each of CASES."""
    began = time.perf_counter()
    import rlhf_jax

    policy = rlhf_jax.load_policy(path)
    yield "import and load", time.perf_counter() - began
    for name, options in CASES.items():
        options = {"text": TEXT, "temperature": 0.0, "max_new_tokens": 48, **options}
        began = time.perf_counter()
        policy.generate([options.pop("text")], **options)
        yield name, time.perf_counter() - began


if __name__ == "__main__":
    for name, seconds in measured(sys.argv[1]):
        print(f"{name:<28}{seconds:8.2f} s", flush=True)
