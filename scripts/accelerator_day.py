"""What a new accelerator computes and how fast, in a few minutes: one GPU, one TPU host, or this machine's CPU.

    python scripts/accelerator_day.py --out day.json [--minutes 9] [--wheels DIR] [--prompts FILE --tokenizer DIR]

Nothing is downloaded: weights are random, of the published shapes. The parts run one after another, each in a process
of its own. The result of each is written to --out at once, and the tables of docs/benchmarks.md to the same name with
.md. A part that fails is reported with the end of its log, and a part whose packages are missing is skipped. Run the
command again to continue after the last complete part; --again NAME repeats a part.

Packages that are missing can come from a folder of wheels, without a network: --wheels DIR. They are installed into a
folder beside --out.

The parts, in order:

    environment           devices, versions, the rate of matrix products, the bandwidth of a copy
    numbers               logits, log-probabilities and gradients against torch on the CPU: float32 in its highest
                          precision, float32 as the device multiplies by default, bfloat16
    replay                recorded TRL runs, in float32 of the highest precision
    greedy                the same tokens as on the CPU, greedy and sampled
    ppo_410m              an update beside TRL (scripts/bench/benchmark.py), in bfloat16 except on the CPU
    attention             variants of attention, in a policy's gradient and alone
    resume                a run that is killed continues with the same bytes
    resume_deterministic  the same with --deterministic
    rloo_410m, ppo_1b, rloo_1b    as ppo_410m
    deterministic         ppo_410m of ours with --deterministic
    ppo_410m_sizes        ppo_410m with micro-batches of several sizes

--small runs every part with toy sizes, which is how it is tested on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "bench"))

from accelerator_tables import markdown, verdicts  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PARTS_SCRIPT = ROOT / "scripts/bench/accelerator_parts.py"
BENCHMARK = ROOT / "scripts/bench/benchmark.py"
CASES = ("ppo_small", "rloo_small", "lora_small", "ppo_options", "rloo_options")
DETERMINISTIC = ("--systems", "ours", "--deterministic")
LEAST_SECONDS = 20.0  # of the time left, for another part to start


@dataclasses.dataclass(frozen=True)
class Part:
    """One measurement: its command, and the packages that it needs."""

    name: str
    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def json_file(self) -> Path | None:
        """The file that its --json names; None: its output is the result."""
        return Path(self.words[self.words.index("--json") + 1]) if "--json" in self.words else None


def benchmark_part(
    name: str, args: argparse.Namespace, algo: str, shape: str, *sizes: str, also: tuple[str, ...] = ()
) -> Part:
    """A comparison with TRL."""
    work = args.out.resolve().with_suffix("") / name
    words = [str(BENCHMARK), "--algo", algo, "--work", str(work), "--json", str(work) + ".json", "--pairs", "1", *also]
    if args.small:
        words += ["--shape", "1x32x2", "--batch", "4", "--query_length", "64", "--response_length", "8"]
        words += ["--epochs", "1", "--updates", "2", "--micro", "4", "--trl_micro", "4", "--cores", "1"]
    else:
        words += ["--shape", shape, "--dtype", "bfloat16", "--batch", "64", "--epochs", "4", "--updates", "3", *sizes]
    if args.prompts:
        words += ["--prompts", args.prompts, "--tokenizer", args.tokenizer]
    # Optimizer and params of 1b, for two models, are half of 80 GB.
    return Part(name, tuple(words), ("trl",), (("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92"),))


def parts_of(args: argparse.Namespace) -> list[Part]:
    """All parts, in order."""
    small = ("--small",) if args.small else ()
    folder = str(args.out.resolve().with_suffix(""))

    def own(name: str, *more: str, needs: tuple[str, ...] = (), environment: tuple[tuple[str, str], ...] = ()) -> Part:
        words = (str(PARTS_SCRIPT), name, "--folder", folder, "--json", f"{folder}/{name}.json", *small, *more)
        return Part(name, words, needs, environment)

    cases = [str(ROOT / "tests/parity/cases" / case) for case in (CASES[:1] if args.small else CASES)]
    highest = (("JAX_DEFAULT_MATMUL_PRECISION", "highest"), ("JAX_PLATFORMS", args.platform))
    return [
        own("environment"),
        own("numbers", needs=("torch",)),
        Part("replay", ("-m", "tests.parity.replay", *cases), (), highest),
        own("greedy"),
        benchmark_part("ppo_410m", args, "ppo", "410m", "--micro", "16", "--trl_micro", "16"),
        own("attention", "--remat", "none", "dots"),
        own("resume"),
        own("resume_deterministic"),
        benchmark_part("rloo_410m", args, "rloo", "410m", "--micro", "32", "--trl_micro", "32"),
        benchmark_part("ppo_1b", args, "ppo", "1b", "--micro", "16", "--trl_micro", "16"),
        benchmark_part("rloo_1b", args, "rloo", "1b", "--micro", "32", "--trl_micro", "32"),
        benchmark_part("deterministic", args, "ppo", "410m", "--micro", "16", also=DETERMINISTIC),
        benchmark_part(
            "ppo_410m_sizes", args, "ppo", "410m", "--micro", "8", "32", "64", "--trl_micro", "8", "32", "64"
        ),
    ]


def environment_of(part: Part, args: argparse.Namespace) -> dict[str, str]:
    """Of a part's process: the repository, the installed wheels, no hub."""
    paths = [str(ROOT), *([str(site_of(args))] if args.wheels else []), os.environ.get("PYTHONPATH", "")]
    fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **fixed, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **dict(part.environment)}


def site_of(args: argparse.Namespace) -> Path:
    """Where wheels are installed."""
    return args.out.resolve().with_suffix("") / "site"


def install(args: argparse.Namespace) -> None:
    """Installs the wheels into their folder, once, and lets this process see them; SystemExit if that fails."""
    site = site_of(args)
    wheels = sorted(str(path.resolve()) for path in Path(args.wheels).glob("*.whl"))
    if not wheels:
        sys.exit(f"--wheels {args.wheels}: no such folder, or no *.whl in it")
    mark = site / "installed.json"  # written last: an installation that was cut off is repeated
    if not mark.is_file() or json.loads(mark.read_text()) != wheels:
        shutil.rmtree(site, ignore_errors=True)
        words = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        if code := subprocess.run([*words, "--target", str(site), *wheels]).returncode:
            sys.exit(f"--wheels {args.wheels}: pip could not install them (exit code {code}, its message is above)")
        mark.write_text(json.dumps(wheels))
    sys.path.insert(0, str(site))


def run_part(part: Part, args: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Runs a part: {"status": done, skipped, failed or cut, ...}."""
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        return {"status": "skipped", "why": f"not installed: {', '.join(missing)}"}
    log = args.out.resolve().with_suffix("") / f"{part.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *part.words],
            cwd=ROOT,
            env=environment_of(part, args),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that a part that is cut off takes its children with it
        )
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            outcome = {"status": "cut", "why": f"the time was up after {limit:.0f} s"}
            if part.json_file is not None:  # what a benchmark's processes measured so far
                files = sorted(part.json_file.with_suffix("").glob("*-*.json"))
                outcome["measured"] = {path.stem: json.loads(path.read_text()) for path in files}
            return outcome
    text = log.read_text(encoding="utf-8", errors="replace")
    seconds = round(time.monotonic() - began, 1)
    if code and not (part.json_file is None and verdicts(text)):  # a run that does not replay is a result
        return {"status": "failed", "seconds": seconds, "why": "\n".join(text.splitlines()[-25:])}
    outcome = {"status": "done", "seconds": seconds}
    if part.json_file is None:
        return {**outcome, "code": code, "result": text[-12_000:]}
    return {**outcome, "result": json.loads(part.json_file.read_text()), "text": text}


def summary(name: str, outcome: dict[str, Any]) -> str:
    """What the terminal shows of a part."""
    if outcome["status"] != "done":
        measured = json.dumps(outcome["measured"], indent=1) if outcome.get("measured") else ""
        return f"{name}: {outcome['status']}: {outcome['why']}\n{measured}".rstrip()
    if "text" in outcome:
        return f"{name} ({outcome['seconds']} s)\n{outcome['text'].rstrip()}"
    shown = "\n".join(verdicts(outcome["result"])) or outcome["result"][-2000:]
    return f"{name} ({outcome['seconds']} s)\n{shown}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("accelerator_day.json"), help="JSON file of all results")
    parser.add_argument("--minutes", type=float, default=9.0, help="all parts are stopped after this many; default 9")
    parser.add_argument("--wheels", metavar="DIR", help="folder of wheels to install first")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these parts, in this order")
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME", help="repeat these parts")
    parser.add_argument("--platform", default="", help="JAX_PLATFORMS of the replay; default: the accelerator")
    parser.add_argument("--prompts", help="JSON Lines file with a 'prompt' field; default: built-in posts")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json; with --prompts")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    args = parser.parse_args(argv)
    names = [part.name for part in parts_of(args)]
    for name in (*(args.only or ()), *args.again):
        if name not in names:
            parser.error(f"no part is called {name}; the parts are {', '.join(names)}")
    if (args.prompts is None) != (args.tokenizer is None):
        parser.error("--prompts and --tokenizer go together")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0, or 1 if a part failed."""
    args = parse(argv)
    end = time.monotonic() + 60 * args.minutes
    if args.wheels:
        install(args)
    results = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    parts = {part.name: part for part in parts_of(args)}
    for name in args.only or parts:
        if results.get(name, {}).get("status") == "done" and name not in args.again:
            continue
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"{name}: no time left; run the command again", flush=True)
            break
        results[name] = run_part(parts[name], args, left)
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        args.out.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
        print(summary(name, results[name]) + "\n", flush=True)
    return int(any(outcome["status"] == "failed" for outcome in results.values()))


if __name__ == "__main__":
    sys.exit(main())
