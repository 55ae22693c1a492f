"""Kills runs in a bucket by SIGKILL and resumes them with the same command, against object stores on this machine.

    python scripts/chaos/buckets.py --store s3 --kills 20
    python scripts/chaos/buckets.py --store gs --kills 20

The run is the quickstart (SFT, reward model, PPO), a few updates a stage, in s3://BUCKET or gs://BUCKET; the stores are
those of the tests (moto, gcp-storage-emulator), which keep objects in this process. Half of the kills come while a
checkpoint is uploaded, the others at random moments. Each run is killed several times; then it must be the same as an
uninterrupted one in another store: models, metrics, completions and the rest byte for byte (see chaos_compare.py).

Each kill is a line; exit code 1: a run ended differently.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

import chaos_compare

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.helpers import buckets  # noqa: E402
from tests.helpers.children import QUICK  # noqa: E402

CUT = "--sft.max_steps 3 --reward.max_steps 3 --ppo.total_episodes 32 --ppo.batch_size 16 --ppo.max_eval_samples 8"
CUT += " --sft.max_eval_samples 8 --reward.max_eval_samples 8 --sft.scratch_model 1x32x2"
STAGES = ("sft", "reward", "ppo")
CUT += "".join(f" --{stage}.save_steps 1" for stage in STAGES)
PATIENCE = 600  # seconds for a run


class Run:
    """The quickstart in a store, started again and again with the same command.

    Args:
      kind: s3 or gs.
      folder: of its log, cache and copies.
      compiled: the compilation cache, shared by all runs.
    """

    def __init__(self, kind: str, folder: pathlib.Path, compiled: pathlib.Path):
        self.folder, self.stack = folder, contextlib.ExitStack()
        self.folder.mkdir(parents=True)
        environment, self.proxy = self.stack.enter_context(buckets.STORES[kind]())
        self.address = f"{kind}://{buckets.BUCKET}/run"
        self.env = {**os.environ, **environment, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK}
        self.env |= {"XDG_CACHE_HOME": str(folder / "cache"), "JAX_COMPILATION_CACHE_DIR": str(compiled)}
        self.env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"

    def start(self, *arguments: str, module: str = "rlhf_jax.train") -> subprocess.Popen:
        """Begins the command."""
        command = [sys.executable, "-m", module, *arguments]
        if module == "rlhf_jax.train":
            command += ["--config", "quickstart.py", "--run_dir", self.address, *CUT.split()]
        self.proxy.faults.calls.clear()
        with open(self.folder / "log.txt", "a", encoding="utf-8") as log:
            return subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=log, stderr=subprocess.STDOUT)

    def finish(self) -> str | None:
        """Runs to the end, with a report. Returns what went wrong."""
        report = ("--no_png", self.address)
        for start in (self.start, lambda: self.start(*report, module="rlhf_jax.report")):
            if (code := start().wait(PATIENCE)) != 0:
                return f"exit status {code}: {self.folder / 'log.txt'}"
        return None

    def kill(self, moment: float | int) -> tuple[bool, int]:
        """Starts it and kills it: after seconds (a float), or when so many objects of checkpoints were uploaded (an
        int). Returns (whether it was still running, the number of objects of checkpoints that it uploaded)."""
        process, began = self.start(), time.monotonic()
        while process.poll() is None:
            reached = self.uploads() if isinstance(moment, int) else time.monotonic() - began
            if reached >= moment:
                break
            time.sleep(0.005)
        running = process.poll() is None
        process.send_signal(signal.SIGKILL)
        return process.wait() == -signal.SIGKILL and running, self.uploads()

    def uploads(self) -> int:
        """Objects of checkpoints that were uploaded since the start."""
        calls = list(self.proxy.faults.calls)
        return sum(
            method in ("PUT", "POST") and "/checkpoints/" in urllib.parse.unquote(path) for method, path in calls
        )

    def copy(self) -> pathlib.Path:
        """The local copy of all files."""
        code = f"from rlhf_jax import storage; print(storage.local_copy({self.address!r}))"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=self.env, capture_output=True, check=True)
        return pathlib.Path(done.stdout.decode().strip())


def differences(whole: pathlib.Path, other: pathlib.Path) -> list[str]:
    """Differences of the stages' folders, a line each."""
    found = []
    for stage in STAGES:
        for folder in (whole, other):  # with the holder's process
            for lock in (folder / stage / ".lock").glob("*"):
                lock.unlink()
        found += [f"{stage}: {line}" for line in chaos_compare.differences(whole / stage, other / stage)]
    names = [sorted(path.name for path in folder.iterdir()) for folder in (whole, other)]
    return found + ([] if names[0] == names[1] else [f"the folder holds {names[1]}, not {names[0]}"])


def campaign(options: argparse.Namespace, folder: pathlib.Path) -> int:
    """All kills. Returns the number of runs that ended differently."""
    rng, compiled, wrong, kills, case = random.Random(options.seed), folder / "compiled", 0, 0, 0
    for name in ("compiling", "whole"):
        whole = Run(options.store, folder / name, compiled)
        with whole.stack:
            began = time.monotonic()
            if problem := whole.finish():
                raise SystemExit(f"buckets: it fails without a kill: {problem}")
            seconds, expected = time.monotonic() - began, whole.copy()
    print(f"{options.store}: {seconds:.0f} s uninterrupted, with a report", flush=True)
    uploads, at = whole_uploads(expected), {"saving": 0, "any": 0}
    while kills < options.kills:
        run = Run(options.store, folder / f"cases/{case}", compiled)
        with run.stack:
            for _ in range(min(options.each, options.kills - kills)):
                kind = "saving" if at["saving"] <= at["any"] else "any"
                left = max(uploads // (options.each + 1), 2)
                moment: Any = rng.randint(1, left) if kind == "saving" else rng.uniform(2, seconds)
                hit, done = run.kill(moment)
                if not hit:
                    break
                kills, at[kind] = kills + 1, at[kind] + 1
                print(f"{kills}/{options.kills} case {case} {kind}: {done} objects uploaded", flush=True)
            problem = run.finish()
            found = [problem] if problem else differences(expected, run.copy())
            wrong += bool(found)
            print(f"case {case}: {f'DIFFERENT: {found[:3]}' if found else 'identical'}", flush=True)
            case += 1
    print(f"{options.store}: {kills} kills ({at['saving']} while saving), {case - wrong} of {case} runs identical")
    return wrong


def whole_uploads(copy: pathlib.Path) -> int:
    """About how many objects of checkpoints a run uploads: those kept, and those of deleted steps."""
    kept = sum(len(list((copy / stage / "checkpoints").rglob("*"))) for stage in STAGES)
    return kept // 2


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 1: a run ended differently."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=sorted(buckets.STORES), default="s3", help="kind of store")
    parser.add_argument("--kills", type=int, default=20, help="number of kills")
    parser.add_argument("--each", type=int, default=4, help="kills of a run at most")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=pathlib.Path, help="for logs and copies, new; default: a temporary one")
    options = parser.parse_args(argv)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it would print a line for each request
    if options.folder is not None:
        return 1 if campaign(options, options.folder.absolute()) else 0
    with tempfile.TemporaryDirectory(prefix="chaos-buckets-") as folder:
        return 1 if campaign(options, pathlib.Path(folder)) else 0


if __name__ == "__main__":
    sys.exit(main())
