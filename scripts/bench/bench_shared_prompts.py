"""Compares RLOO updates that compute each prompt once per group with updates that compute it for every response.

    python scripts/bench/bench_shared_prompts.py --tokenizer PYTHIA --dataset PROMPTS.jsonl

Both start from the same weights and get the same prompts, as our side of benchmark.py. Each measurement is a process of
its own, and the two alternate, so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import benchmark
import jax
from benchmark_case import LOOP, Case, available_cores
from benchmark_report import peak_of, seconds_of

from rlhf_jax import UserError


def table(results: dict[bool, list[dict]]) -> str:
    """Seconds of each phase and of an update without and with shared prompts, their ratio, and peak memory."""
    lines = [f"{'':12} {'each':>8} {'shared':>8} {'ratio':>6}   (median seconds without first updates)"]
    for phase in LOOP:
        each, once = (median(x[phase] for result in results[s] for x in result["loop"][1:]) for s in (False, True))
        lines.append(f"{phase:12} {each:8.3f} {once:8.3f} {each / once:6.2f}")
    each, once = ([seconds_of(result) for result in results[shared]] for shared in (False, True))
    pairs = [a / b for a, b in zip(each, once)]
    spread = f"pairs {min(pairs):.2f} to {max(pairs):.2f}"
    lines.append(f"{'update':12} {median(each):8.3f} {median(once):8.3f} {median(pairs):6.2f}   {spread}")
    peaks = [median(peak_of(result) for result in results[shared]) for shared in (False, True)]
    return "\n".join([*lines, f"{'peak memory':12} {peaks[0]:8.0f} {peaks[1]:8.0f} MiB"])


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 2: wrong options or a failed process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="synthetic", help="folder with tokenizer.json, or 'synthetic'")
    parser.add_argument("--dataset", default="synthetic", help="JSON Lines file with a 'prompt' field, or 'synthetic'")
    parser.add_argument("--model", default="14m", help="a Pythia size, or LAYERSxWIDTHxHEADS")
    for name, default, text in (
        ("batch", 16, "responses an update"),
        ("generations", 4, "responses to a prompt"),
        ("iterations", 4, "update epochs"),
        ("updates", 5, "timed updates of each process"),
        ("pairs", 1, "processes of each kind"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text}; default {default}")
    args = parser.parse_args(argv)
    sizes = {"batch": args.batch, "num_generations": args.generations, "epochs": args.iterations}
    case = Case(algo="rloo", shape=args.model, tokenizer=args.tokenizer, prompts=args.dataset, **sizes)
    case = dataclasses.replace(case, updates=args.updates + 1, cores=available_cores())
    jax.config.update("jax_platforms", "cpu")
    try:
        with tempfile.TemporaryDirectory() as folder:
            works, results = {shared: Path(folder, str(shared)) for shared in (False, True)}, {False: [], True: []}
            for shared, work in works.items():
                work.mkdir()
                benchmark.prepare(dataclasses.replace(case, shared_prompts=shared), work, args.pairs)
            for pair in range(args.pairs):
                for shared, work in works.items():
                    results[shared].append(benchmark.measure("ours", case, work, pair, None))
            print(table(results))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
