"""Records TRL runs with random options, replays them with ours, and counts how often they agree.

    python scripts/parity/parity_sweep.py --cases 120 --out sweep.jsonl
    python scripts/parity/parity_sweep.py --report sweep.jsonl

Each case draws options, sizes, responses (sampled or crafted) and weights from its own seed, trains with TRL, and
replays the run with tests/parity/replay.py and its tolerances. PPO and RLOO alternate; --legacy_python adds the RLOO of
TRL before 0.22, with the interpreter of an environment as described in record_trl.py.

Each line of the output is a case: trainer, seed, options, whether it replays, its largest differences. Finished cases
are not run again. Exit code 1: a case does not replay.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.parity.recording.draw import DRAW  # noqa: E402
from tests.parity.recording.tiny import Setting  # noqa: E402


def record(trainer: str, setting: Setting, legacy_python: str | None) -> None:
    """Trains with TRL; the legacy trainer runs in its own environment.

    Raises:
      RuntimeError: it failed.
    """
    if trainer != "rloo_legacy":
        # Hide TRL's output and progress bars.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            importlib.import_module(f"tests.parity.recording.{trainer}").record(setting)
        return
    flags = [
        f"--{name}={getattr(setting, name)}" for name in ("updates", "micro", "accum", "prompts", "seed", "layers")
    ]
    flags += [f"--{name}" for name in ("sequential", "crafted") if getattr(setting, name)]
    command = [legacy_python, str(ROOT / "scripts/parity/record_trl.py"), trainer, str(setting.folder), *flags]
    done = subprocess.run([*command, "--options", json.dumps(setting.options)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])


def run_case(trainer: str, seed: int, legacy_python: str | None) -> dict:
    """Runs one case; returns its line of the output."""
    import jax

    from tests.parity import replay

    began = time.time()
    with tempfile.TemporaryDirectory() as scratch:
        setting = DRAW[trainer](seed, Path(scratch) / f"{trainer}_{seed}")
        line = {"trainer": trainer, "seed": seed}
        line |= {name: x for name, x in dataclasses.asdict(setting).items() if name not in ("folder", "seed")}
        record(trainer, setting, legacy_python)
        report = replay.open_case(setting.folder).run()
    jax.clear_caches()
    rows = sorted(report.rows.values(), key=lambda row: -row.difference / (row.tolerance or 1e-30))
    return {
        **line,
        "replays": report.passed,
        "out": [row.quantity for row in rows if not row.passed],
        "worst": {row.quantity: row.difference for row in rows if row.difference > 0},
        "notes": report.notes,
        "seconds": round(time.time() - began, 1),
    }


def summary(lines: list[dict]) -> str:
    """Markdown table by trainer: number of cases and the largest difference of each kind of quantity."""
    out = ["| trainer | cases | replay | arrays and losses | metrics | final weights |", "|---|---|---|---|---|---|"]
    for trainer in DRAW:
        own = [line for line in lines if line["trainer"] == trainer]
        if not own:
            continue
        worst = {"arrays": 0.0, "metrics": 0.0, "weights": 0.0}
        for line in own:
            for name, gap in line["worst"].items():
                worst[kind(name)] = max(worst[kind(name)], gap)
        cells = [trainer, len(own), sum(line["replays"] for line in own), *(f"{x:.1e}" for x in worst.values())]
        out.append("| " + " | ".join(map(str, cells)) + " |")
    for line in lines:
        if not line["replays"]:
            out.append(f"\n{line['trainer']} seed {line['seed']} is out: {', '.join(line['out'])}")
    return "\n".join(out)


def kind(quantity: str) -> str:
    """arrays, metrics or weights."""
    if quantity.startswith("final "):
        return "weights"
    words = ("log-probabilities", "scores", "outputs", "whitening", ": mask", "advantages", "losses of micro-batches")
    of_arrays = "/" not in quantity and any(word in quantity for word in words)
    return "arrays" if of_arrays else "metrics"


def main() -> int:
    """The command. Exit code 1: a case does not replay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100, help="number over all trainers")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("sweep.jsonl"))
    parser.add_argument("--legacy_python", help="interpreter with trl==0.17.0")
    parser.add_argument("--report", type=Path, help="print the summary of this file and exit")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # TRL's PPO uses a GPU if there is one
    path = args.report or args.out
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if args.report is None:
        trainers = [name for name in DRAW if name != "rloo_legacy" or args.legacy_python]
        done = {(line["trainer"], line["seed"]) for line in lines}
        for case in range(args.cases):
            trainer, seed = trainers[case % len(trainers)], args.first_seed + case // len(trainers)
            if (trainer, seed) in done:
                continue
            line = run_case(trainer, seed, args.legacy_python)
            verdict = "replays" if line["replays"] else f"OUT: {', '.join(line['out'])}"
            print(f"{case + 1}/{args.cases} {trainer} {seed} {verdict} ({line['seconds']} s)", flush=True)
            lines.append(line)
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    print(summary(lines))
    return 0 if all(line["replays"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
