"""Compares SFT of packed and unpacked rows: tokens a second without padding, in turns, one process.

    python scripts/bench/packing.py --lengths lognormal --rounds 5

Random demonstrations of at most --max_length tokens, with lengths as in rollouts.py. An unpacked batch has four
length buckets (the default) and as many rows as have the tokens of a packed one on average.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import numpy as np
from rollouts import LENGTHS, drawn_lengths

from rlhf_jax import data, models
from rlhf_jax.algorithms import optimizer as optimizers
from rlhf_jax.algorithms import sft
from rlhf_jax.algorithms.networks import Network
from rlhf_jax.config import SFTConfig
from rlhf_jax.data.demonstrations import DemoData
from rlhf_jax.types import TrainState


def demonstrations(kind: str, rows: int, longest: int, vocabulary: int) -> DemoData:
    """Random demonstrations."""
    random = np.random.default_rng(0)
    lengths = [max(size, 2) for size in drawn_lengths(kind, rows, longest, 0)]
    tokens = [random.integers(0, vocabulary, size).astype(np.int32) for size in lengths]
    report = data.DataReport("random", rows, rows, longest=max(lengths), tokens=sum(lengths))
    return DemoData(tokens, np.zeros(rows, np.int32), 0, data.default_buckets(longest), report)


def make_step(model: models.Model, config: SFTConfig) -> Callable[[Any], Any]:
    """Batch -> the results of one update, always of the same fresh state."""
    optimizer = optimizers.make_optimizer(config, 1000)
    params = {"model": model.init(jax.random.key(0))}
    zeros = dict.fromkeys(("step", "episodes", "tokens", "nonfinite"), np.int32(0))
    state = TrainState(
        params=params, opt_state=optimizer.init(params), seed=np.uint32(0), kl_coef=np.float32(0), **zeros
    )
    update = jax.jit(
        lambda state, batch: sft.update(
            Network(model), state, batch, config=config, optimizer=optimizer, key=jax.random.key(1)
        )
    )
    return lambda batch: jax.block_until_ready(update(state, batch))


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", choices=LENGTHS, default=LENGTHS[0], help="of the demonstrations")
    parser.add_argument("--model", default="14m", help="Pythia size; default 14m")
    counts = [("max_length", 512, "tokens of a row"), ("batch_size", 8, "packed rows of an update")]
    for name, default, text in (*counts, ("steps", 8, "updates of a round"), ("rounds", 5, "of each")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text}; default {default}")
    args = parser.parse_args(argv)
    model = models.pythia(args.model)
    rows = demonstrations(args.lengths, 4096, args.max_length, model.config.vocab_size)
    packed = data.pack(rows, args.max_length, False)
    print(packed.report)
    per_pack = round(len(rows) / len(packed))
    sources = {"unpacked": (rows, per_pack), "packed": (packed, 1)}
    steps = {}
    for name, (_, times) in sources.items():
        sizes = {"batch_size": args.batch_size * times, "micro_batch_size": 4 * times}
        steps[name] = make_step(model, SFTConfig(**sizes, max_length=args.max_length, dtype="float32"))
    rates: dict[str, list[float]] = {name: [] for name in sources}
    for number in range(args.rounds + 1):  # the first one compiles
        for name, (source, times) in sources.items():
            batches = [source.batch(0, step, args.batch_size * times) for step in range(args.steps)]
            began = time.perf_counter()
            for batch in batches:
                steps[name](batch)
            seconds = time.perf_counter() - began
            if number:
                rates[name].append(sum(int(batch.lengths.sum()) for batch in batches) / seconds)
    ratios = [new / old for old, new in zip(rates["unpacked"], rates["packed"], strict=True)]
    for name, values in rates.items():
        print(f"{name}: {median(values):,.0f} tokens/s ({min(values):,.0f} to {max(values):,.0f})")
    print(f"packed / unpacked: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
