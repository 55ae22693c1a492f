"""Times decoding alone: seconds of a rollout of 2 and of 64 tokens, and what a token between them takes.

    python scripts/bench/decode.py --shape llama:30x576x9x3 --prompts 2 --responses 4
    python scripts/bench/decode.py --regex "[0-9a-z]{1,300}"     # in turns with responses that match it

Weights are random, every response has full length, float32. With --regex token i is i in base 36.
"""

from __future__ import annotations

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.generate import Sampling, generate
from rlhf_jax.generate.guided import Guide, token_automaton
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
    parser.add_argument("--regex", help="of guided responses, beside others")
    parser.add_argument("--rounds", type=int, default=3, help="rollouts of each length")
    options = parser.parse_args()
    model = custom_shape(options.shape, options.vocabulary)
    params = model.init(jax.random.key(0))
    shape = options.prompts, options.query_length
    tokens = jax.random.randint(jax.random.key(1), shape, 0, options.vocabulary)
    prompts = PromptBatch(tokens, jnp.full(shape[0], shape[1], jnp.int32), jnp.arange(shape[0]))

    def rollout(params, prompts, key, guide, length):
        sampling = Sampling(max_new_tokens=length, stop_ids=(0,))
        return generate(model, params, prompts, key, sampling, group=options.responses, guide=guide)

    guides = {"": None}
    if options.regex is not None:
        guides["guided"] = _guide(options.regex, options.vocabulary, options.prompts * options.responses)
    programs = {length: jax.jit(functools.partial(rollout, length=length)) for length in LENGTHS}
    for number in range(-1, options.rounds):
        for name, guide in guides.items():
            seconds = []
            for program in programs.values():
                start = time.perf_counter()
                jax.block_until_ready(program(params, prompts, jax.random.key(2), guide))
                seconds.append(time.perf_counter() - start)
            token = (seconds[1] - seconds[0]) / (LENGTHS[1] - LENGTHS[0])
            if number >= 0:  # the first compiles
                times = [f"{length} tokens {second:.2f} s" for length, second in zip(LENGTHS, seconds)]
                print(*times, f"a token {1e3 * token:.2f} ms", name, sep="  ", flush=True)


def _guide(regex: str, vocabulary: int, rows: int) -> Guide:
    spelled = [np.base_repr(i, 36).lower().encode() for i in range(vocabulary)]
    automaton, starts = token_automaton([regex], spelled, stop_ids=[0], most_tokens=LENGTHS[0])
    return jax.tree.map(jnp.asarray, Guide(automaton, np.repeat(starts, rows)))


if __name__ == "__main__":
    main()
