"""Fuzzes the readers of configs, command lines, rows, checkpoints and server answers with malformed input.

    python scripts/fuzz.py --examples 10000

Each input must be read or refused by a UserError; anything else is a finding, shown in minimized form. The tests are in
tests/robustness/test_fuzz.py, which the test suite runs with few examples.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main() -> int:
    """The command; returns pytest's exit code, 0 if there are no findings."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=10_000, help="inputs for each reader")
    parser.add_argument("--only", default="", help="only tests with this in their name: safetensors, answer, ...")
    args = parser.parse_args()
    if args.examples < 1:
        parser.error(f"--examples is {args.examples}; it must be at least 1")
    environment = {**os.environ, "RLHF_JAX_FUZZ_EXAMPLES": str(args.examples)}
    tests = [str(ROOT / "tests" / "robustness" / "test_fuzz.py"), "-k", args.only]
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--durations=0", "--tb=short", *tests]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
