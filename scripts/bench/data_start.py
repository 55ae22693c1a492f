"""How long a start takes to its first batch, and the memory that the data takes. Linux only.

    python scripts/bench/data_start.py --rows 117000 --posts TLDR/prompts_train.jsonl --tokenizer PYTHIA
    python scripts/bench/data_start.py --rows 117000 --processes 4
    python scripts/bench/data_start.py --rows 1000000 --rounds 1

Posts are those of a file of JSON lines with 'prompt' and 'completion', or of the built-in task, repeated with a number
in each. Every start is a new process. In turns: the tokenizer alone, over the same texts; a first start, with an empty
cache; a second start. Anonymous memory is what the process holds beyond that after its imports, at most and at the end;
pages of mapped files are not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmark_case import status_mib

CHUNK = 1024
"""Texts that the tokenizer alone is given at a time."""


def write_posts(path: Path, rows: int, posts: str | None) -> None:
    """Writes rows of JSON lines, each another text."""
    if posts is None:
        from rlhf_jax.data import synthetic

        source = synthetic.demonstrations(min(rows, 2000))
    else:
        with open(posts, encoding="utf-8") as lines:
            source = [json.loads(line) for line in lines]
    with open(path, "w", encoding="utf-8") as file:
        for number, row in zip(range(rows), itertools.cycle(source), strict=False):
            prompt = row["prompt"].replace("POST: ", f"POST: {number} ", 1)
            file.write(json.dumps({"prompt": prompt, "completion": row["completion"], "number": number}) + "\n")


class PeakMemory:
    """The most anonymous memory in MiB since it was made, looked up every 20 ms."""

    def __init__(self):
        self.before = self.peak = status_mib("RssAnon")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, status_mib("RssAnon"))

    def stop(self) -> dict[str, float]:
        """{"peak", "end"}: MiB more than before."""
        self._stop.set()
        self._thread.join()
        end = status_mib("RssAnon")
        return {"peak": max(self.peak, end) - self.before, "end": end - self.before}


def start(path: str, tokenizer_name: str, batch_size: int) -> dict[str, float]:
    """A start to the first batch, in this process."""
    import datasets  # noqa: F401  with what a run imports
    import pyarrow.csv
    import pyarrow.feather
    import pyarrow.parquet  # noqa: F401

    import rlhf_jax.train  # noqa: F401
    from rlhf_jax import data
    from rlhf_jax.data.options import PromptOptions

    tokenizer = data.load_tokenizer(tokenizer_name)
    calls = []
    encode_batch = data.Tokenizer.encode_batch
    data.Tokenizer.encode_batch = lambda self, texts: calls.append(len(texts)) or encode_batch(self, texts)
    memory, began, cpu = PeakMemory(), time.perf_counter(), time.process_time()
    made = data.from_rows(data.PromptData, data.load_rows(path), PromptOptions(), tokenizer)
    made.batch(42, 0, batch_size)
    made.fingerprint  # noqa: B018  which a run compares at its start
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    report = made.report
    found = {"seconds": wall, "cpu": cpu, "tokenized": sum(calls), "rows": report.kept, "tokens": report.tokens}
    return {**found, **memory.stop()}


def tokenizer_alone(path: str, tokenizer_name: str) -> dict[str, float]:
    """The tokenizer over all texts. Reading them is not counted."""
    from rlhf_jax import data

    hf = data.load_tokenizer(tokenizer_name).hf
    wall = cpu = 0.0
    rows = tokens = 0
    with open(path, encoding="utf-8") as lines:
        while texts := [json.loads(line)["prompt"] for line in itertools.islice(lines, CHUNK)]:
            began, cpu_before = time.perf_counter(), time.process_time()
            ids = hf(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
            wall, cpu = wall + time.perf_counter() - began, cpu + time.process_time() - cpu_before
            rows, tokens = rows + len(ids), tokens + sum(map(len, ids))
    return {"seconds": wall, "cpu": cpu, "rows": rows, "tokens": tokens}


# --- new processes


def processes(args: argparse.Namespace, what: str, cache: Path, count: int = 1) -> list[dict[str, float]]:
    """What `count` new processes measure at the same time."""
    command = [sys.executable, __file__, "--measure", what, str(args.path), "--tokenizer", args.tokenizer]
    command += ["--batch_size", str(args.batch_size)]
    env = os.environ | {"HF_DATASETS_CACHE": str(cache), "JAX_PLATFORMS": "cpu"}
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    outs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        sys.exit(f"error: a process that measures {what} failed")
    return [json.loads(out.splitlines()[-1]) for out in outs]


def lines(args: argparse.Namespace, work: Path) -> Iterator[str]:
    """The lines of the result, as they are measured."""
    yield f"{'':24s}{'seconds':>9s}{'CPU s':>9s}{'tokens/s':>11s}{'MiB at most':>13s}{'at end':>8s}"

    def line(name: str, found: dict[str, float]) -> str:
        speed = f"{found['tokens'] / found['seconds']:11,.0f}" if "tokenized" not in found or found["tokenized"] else ""
        memory = f"{found['peak']:13.0f}{found['end']:8.0f}" if "peak" in found else ""
        return f"{name:24s}{found['seconds']:9.2f}{found['cpu']:9.2f}{speed:11s}{memory}".rstrip()

    for number in range(args.rounds):
        cache = work / f"cache{number}"
        alone = processes(args, "tokenizer", cache)[0]
        yield line("tokenizer alone", alone)
        first = processes(args, "start", cache)[0]
        if first["tokenized"] < args.rows:
            sys.exit("error: the first start did not tokenize all rows")
        yield line("first start", first)
        second = processes(args, "start", cache)[0]
        if second["tokenized"]:
            sys.exit("error: the second start tokenized")
        yield line("second start", second)
        ratios = [first[of] / alone[of] for of in ("seconds", "cpu")]
        yield f"first start / tokenizer alone: {ratios[0]:.2f} in time, {ratios[1]:.2f} in CPU time"
        shutil.rmtree(cache)
    if args.processes > 1:
        together = processes(args, "start", work / "together", args.processes)
        for found in sorted(together, key=lambda found: -found["tokenized"]):
            yield line("of several: tokenizes" if found["tokenized"] else "of several: maps", found)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=117_000, help="of the data set; default 117000")
    parser.add_argument("--posts", metavar="FILE", help="JSON lines to repeat; default: the built-in task's")
    parser.add_argument("--tokenizer", default="synthetic", help="name or folder; default: the built-in task's")
    parser.add_argument("--rounds", type=int, default=3, help="of the three starts; default 3")
    parser.add_argument("--processes", type=int, default=1, help="also so many first starts at the same time")
    parser.add_argument("--batch_size", type=int, default=64, help="rows of the first batch; default 64")
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "PATH"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure is not None:
        what, path = args.measure
        found = (
            tokenizer_alone(path, args.tokenizer)
            if what == "tokenizer"
            else start(path, args.tokenizer, args.batch_size)
        )
        print(json.dumps(found))
        return 0
    if args.posts is not None and not Path(args.posts).is_file():
        parser.error(f"--posts {args.posts}: no such file")
    with tempfile.TemporaryDirectory(prefix="data_start_") as work:
        args.path = Path(work) / "posts.jsonl"
        write_posts(args.path, args.rows, args.posts)
        print(f"{args.rows:,} rows, {args.path.stat().st_size / 2**20:,.0f} MiB of JSON lines", flush=True)
        for line in lines(args, Path(work)):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
