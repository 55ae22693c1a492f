"""How long a policy takes to answer: loading, the first text, and texts that differ in one thing from it.

    XDG_CACHE_HOME=$(mktemp -d) python scripts/bench/first_answer.py MODEL
    python scripts/bench/first_answer.py MODEL --transformers

A second call with the same XDG_CACHE_HOME has the compiled programs of the first. With `--transformers` that library
answers, in float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

TEXT = "Once upon a time there was a dragon who"
CASES: dict[str, dict[str, Any]] = {
    "first": {},
    "the same": {},
    "longer": {"text": TEXT + " flew and" * 20},
    "sampled, 64 tokens": {"temperature": 0.7, "max_new_tokens": 64},
    "temperature 0.9, 30 tokens": {"temperature": 0.9, "max_new_tokens": 30},
}
"""What differs from 48 tokens of greedy decoding, by its name."""


def ours(path: str) -> Callable[..., str]:
    import rlhf_jax

    policy = rlhf_jax.load_policy(path)
    return policy.generate


def of_transformers(path: str) -> Callable[..., str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path, dtype="float32")

    def answer(text: str, *, temperature: float, max_new_tokens: int) -> str:
        prompt = tokenizer(text, return_tensors="pt")
        options = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        tokens = model.generate(**prompt, max_new_tokens=max_new_tokens, **options)
        return tokenizer.decode(tokens[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)

    return answer


def measured(path: str, load: Callable[[str], Callable[..., str]] = ours) -> Iterator[tuple[str, float]]:
    """(what, seconds) of importing the library and loading a policy, and of each of CASES."""
    began = time.perf_counter()
    answer = load(path)
    yield "import and load", time.perf_counter() - began
    for name, case in CASES.items():
        options = {"text": TEXT, "temperature": 0.0, "max_new_tokens": 48, **case}
        began = time.perf_counter()
        answer(options.pop("text"), **options)
        yield name, time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint's folder or hub name")
    parser.add_argument("--transformers", action="store_true", help="transformers answers")
    args = parser.parse_args()
    for name, seconds in measured(args.model, of_transformers if args.transformers else ours):
        print(f"{name:<28}{seconds:8.2f} s", flush=True)
