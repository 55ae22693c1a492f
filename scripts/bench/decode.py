"""Times decoding alone: seconds of a rollout of 2 and of 64 tokens, and what a token between them takes.

    python scripts/bench/decode.py --shape llama:30x576x9x3 --prompts 2 --responses 4

Weights are random, every response has full length, float32.
"""

from __future__ import annotations

import argparse
import functools
import time

import jax
import jax.numpy as jnp

from rlhf_jax.generate import Sampling, generate
from rlhf_jax.models import custom_shape
from rlhf_jax.types import PromptBatch

LENGTHS = 2, 64


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama:30x576x9x3", help="[FAMILY:]LAYERSxWIDTHxHEADS[xKV]")
    parser.add_argument("--vocabulary", type=int, default=50_304, help="rows of the embedding")
    parser.add_argument("--prompts", type=int, default=2, help="number of prompts")
    parser.add_argument("--responses", type=int, default=4, help="responses to each prompt")
    parser.add_argument("--query_length", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3, help="rollouts of each length")
    options = parser.parse_args()
    model = custom_shape(options.shape, options.vocabulary)
    params = model.init(jax.random.key(0))
    shape = options.prompts, options.query_length
    tokens = jax.random.randint(jax.random.key(1), shape, 0, options.vocabulary)
    prompts = PromptBatch(tokens, jnp.full(shape[0], shape[1], jnp.int32), jnp.arange(shape[0]))

    def rollout(params, prompts, key, length):
        return generate(model, params, prompts, key, Sampling(max_new_tokens=length), group=options.responses)

    programs = {length: jax.jit(functools.partial(rollout, length=length)) for length in LENGTHS}
    for number in range(-1, options.rounds):
        seconds = []
        for program in programs.values():
            start = time.perf_counter()
            jax.block_until_ready(program(params, prompts, jax.random.key(2)))
            seconds.append(time.perf_counter() - start)
        token = (seconds[1] - seconds[0]) / (LENGTHS[1] - LENGTHS[0])
        if number >= 0:  # the first compiles
            times = [f"{length} tokens {second:.2f} s" for length, second in zip(LENGTHS, seconds)]
            print(*times, f"a token {1e3 * token:.1f} ms", sep="  ", flush=True)


if __name__ == "__main__":
    main()
