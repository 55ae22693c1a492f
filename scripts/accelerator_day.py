"""What a new accelerator computes and how fast, in a quarter of an hour: one GPU, one TPU host, or this machine's CPU.

    python scripts/accelerator_day.py --out day.json [--write docs/benchmarks.md] [--wheels DIR]
        [--prompts FILE --tokenizer DIR] [--model DIR]

Nothing is downloaded: weights are random, of the published shapes. The parts run one after another, each in a process
of its own. After each its result is in --out, and its tables in the same name with .md and, with --write, in that page:
below the lines `<!-- day SECTION -->`, in blocks of this day; blocks of other days and all other text stay. A part
whose packages are missing is skipped; packages can come from a folder of wheels (--wheels), which are installed into
--work. Without TRL only TRL's side of a comparison is skipped.

Run the command again to continue: complete parts are not repeated, what a part had measured when it was cut off
counts, and parts that failed come last. --again NAME repeats a part; --minutes 0 only writes the tables. --out is all
that another machine needs to continue; the folder --work beside it has models and logs.

The parts, in order; a part that needs more time than is left is passed over:

    environment           devices, versions, the rate of matrix products, the bandwidth of a copy
    attention_410m, _1b   every implementation of attention: alone, and in a policy's gradient for whole rows (PPO) and
                          after shared prompts (RLOO); memory as compiled and as measured; seconds of compilation
    ppo_410m_32, rloo_410m_32, ppo_410m_16, rloo_410m_16
                          updates with micro-batches of 32 and 16 rows in bfloat16 (scripts/bench/benchmark.py), with
                          memory and seconds as compiled and predicted; after each, the same with _trl: TRL's
    difference            |difference| of log-probabilities in bfloat16, between sampler and learner (Pythia-160m)
    resume                a run that is killed continues with the same bytes
    ppo_1b_16, rloo_1b_32 as above, of 1b; each with _trl
    decoding              rollouts of uneven lengths (scripts/bench/rollouts.py --workload nano_vllm)
    chat                  a chat model (--model) learns sums with RLOO
    numbers               logits, log-probabilities and gradients against torch on the CPU: float32 in its highest
                          precision, float32 as the device multiplies by default, bfloat16
    greedy                the same tokens as on the CPU, greedy and sampled
    replay                recorded TRL runs, in float32 of the highest precision
    resume_deterministic  as resume, with --deterministic
    deterministic         ppo_410m_16 with --deterministic
    ppo_410m_8, _64       as ppo_410m_16, with micro-batches of other sizes; each with _trl

--small runs every part with toy sizes, which is how it is tested on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parent / "bench"))

from accelerator_tables import SECTIONS, filled, markdown, place, verdicts  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
CASES = ("ppo_small", "rloo_small", "lora_small", "ppo_options", "rloo_options")


class Part(NamedTuple):
    """One measurement."""

    name: str
    words: tuple[str, ...]  # its command, after python
    seconds: float = 20.0  # that it needs on an H100, roughly: with less time left it is not begun
    needs: tuple[str, ...] = ()  # packages
    lacks: str = ""  # why it cannot run
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def json_file(self) -> Path | None:
        """The file that its --json names; None: its output is the result."""
        return Path(self.words[self.words.index("--json") + 1]) if "--json" in self.words else None


def updates(args: argparse.Namespace, algo: str, shape: str, micro: int, *also: str, name: str = "") -> list[Part]:
    """Parts of the benchmark: updates of ours, and of TRL unless `also` has options of ours."""
    name, script = name or f"{algo}_{shape}_{micro}", str(ROOT / "scripts/bench/benchmark.py")
    words = [script, "--algo", algo, "--pairs", "1", "--predict", "--work", str(args.work / f"benchmark_{shape}")]
    if args.small:
        words += ["--shape", "1x32x2", "--batch", "4", "--query_length", "64", "--response_length", "8"]
        words += ["--epochs", "1", "--updates", "2", "--micro", "4", "--trl_micro", "4", "--cores", "1"]
    else:
        words += ["--shape", shape, "--dtype", "bfloat16", "--batch", "64", "--epochs", "4", "--updates", "3"]
        words += ["--micro", str(micro), "--trl_micro", str(micro)]
    if args.prompts:
        words += ["--prompts", args.prompts, "--tokenizer", args.tokenizer]
    # Optimizer and params of 1b, for two models, are half of 80 GB.
    memory, seconds = (("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92"),), 90 if shape == "1b" else 60

    def part(name: str, *more: str, needs: tuple[str, ...] = ()) -> Part:
        words_of_part = (*words, "--json", str(args.work / f"{name}.json"), *more)
        return Part(name, words_of_part, seconds, needs, environment=memory)

    # On the CPU of a GPU's machine TRL would take hours.
    trl = ("--systems", "trl", "--device", "auto" if args.small else "cuda")
    return [part(name, "--systems", "ours", *also), *([] if also else [part(f"{name}_trl", *trl, needs=("trl",))])]


def parts_of(args: argparse.Namespace) -> list[Part]:
    """All parts, in order."""
    small = ("--small",) if args.small else ()
    scripts, work = ROOT / "scripts/bench", str(args.work)

    def own(name: str, seconds: float, *more: str, part: str = "", needs: tuple[str, ...] = ()) -> Part:
        places = ("--folder", work, "--json", f"{work}/{name}.json")
        words = (str(scripts / "accelerator_parts.py"), part or name, *places, *small, *more)
        return Part(name, words, seconds, needs)

    cases = [str(ROOT / "tests/parity/cases" / case) for case in (CASES[:1] if args.small else CASES)]
    highest = (("JAX_DEFAULT_MATMUL_PRECISION", "highest"), ("JAX_PLATFORMS", args.platform))
    sizes = ("2x64x4", "4", "16", "8") if args.small else ("pythia-160m", "16", "512", "53")
    options = zip(("--model", "--rows", "--prompt", "--response"), sizes, strict=True)
    difference = (str(scripts / "difference.py"), *itertools.chain(*options))
    decoding = (str(scripts / "rollouts.py"), "--workload", "nano_vllm", "--systems", "ours", "--rounds", "1")
    decoding += ("--short",) if args.small else ("--device", args.platform or "cuda", "--dtype", "bfloat16")
    chat = ("-m", "rlhf_jax.train", "--config", "quickstart_smollm2.py:rloo", "--run_dir", f"{work}/chat")
    chat += ("--rloo.sft_model_path", str(args.model), "--rloo.report_to", "none")
    chat += ("--rloo.total_episodes", "128", "--rloo.max_eval_samples", "16") if args.small else ()
    return [
        own("environment", 10),
        own("attention_410m", 30, "--shape", "410m", part="attention"),
        own("attention_1b", 30, "--shape", "1b", part="attention"),
        *updates(args, "ppo", "410m", 32),
        *updates(args, "rloo", "410m", 32),
        *updates(args, "ppo", "410m", 16),
        *updates(args, "rloo", "410m", 16),
        Part("difference", (*difference, "--json", f"{work}/difference.json"), 90),
        own("resume", 40),
        *updates(args, "ppo", "1b", 16),
        *updates(args, "rloo", "1b", 32),
        Part("decoding", (*decoding, "--json", f"{work}/decoding.json"), 90),
        Part("chat", chat, 120, ("reasoning_gym",), "" if args.model else "give --model DIR"),
        own("numbers", 30, needs=("torch",)),
        own("greedy", 30),
        Part("replay", ("-m", "tests.parity.replay", *cases), 60, environment=highest),
        own("resume_deterministic", 40),
        *updates(args, "ppo", "410m", 16, "--deterministic", name="deterministic"),
        *updates(args, "ppo", "410m", 8),
        *updates(args, "ppo", "410m", 64),
    ]


def environment_of(part: Part, args: argparse.Namespace) -> dict[str, str]:
    """Of a part's process: the repository, the installed wheels, no hub."""
    paths = [str(ROOT), *([str(args.work / "site")] if args.wheels else []), os.environ.get("PYTHONPATH", "")]
    fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **fixed, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **dict(part.environment)}


def install(args: argparse.Namespace) -> None:
    """Installs the wheels into their folder, once, and lets this process see them; SystemExit if that fails."""
    site = args.work / "site"
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


def run_part(part: Part, args: argparse.Namespace, limit: float, before: dict[str, Any] | None) -> dict[str, Any]:
    """Runs a part: {"status": done, skipped, failed or cut, ...}, with the "result" as far as it was measured.

    Args:
      limit: seconds after which it is cut off.
      before: what it returned when it was cut off, on another machine perhaps; None: it starts anew.
    """
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing or part.lacks:
        return {"status": "skipped", "why": part.lacks or f"not installed: {', '.join(missing)}"}
    args.work.mkdir(parents=True, exist_ok=True)
    if part.json_file is not None and before is None:
        part.json_file.unlink(missing_ok=True)
    elif part.json_file is not None and "result" in before and not part.json_file.exists():
        part.json_file.write_text(json.dumps(before["result"]), encoding="utf-8")
    log, began = args.work / f"{part.name}.log", time.monotonic()
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
            code = None
        finally:  # of an interrupted command too
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    outcome: dict[str, Any] = {"status": "done", "seconds": round(time.monotonic() - began, 1)}
    if part.json_file is not None and part.json_file.exists():
        outcome["result"] = json.loads(part.json_file.read_text(encoding="utf-8"))
    if code is None:
        return {**outcome, "status": "cut", "why": f"the time was up after {limit:.0f} s"}
    lines, out_of_memory = text.splitlines(), code and "runs out of memory with" in text
    if part.json_file is None or out_of_memory:
        outcome["result"] = {"out_of_memory": lines[-1]} if out_of_memory else text[-12_000:]
    if code and not (out_of_memory or verdicts(text)):  # a run that does not replay is a result too
        return {**outcome, "status": "failed", "why": "\n".join(lines[-25:])}
    return {**outcome, "text": "\n".join(verdicts(text)) or text}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("accelerator_day.json"), help="JSON file of all results")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page that gets the tables, docs/benchmarks.md")
    parser.add_argument("--minutes", type=float, default=15.0, help="all parts are stopped after this many; default 15")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these parts, in this order")
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME", help="repeat these parts")
    parser.add_argument("--wheels", metavar="DIR", help="folder of wheels to install first")
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder for models and logs; default: beside --out")
    parser.add_argument("--prompts", help="JSON Lines file with a 'prompt' field; default: built-in posts")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json; with --prompts")
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint of a chat model, for the part chat")
    parser.add_argument("--platform", default="", help="JAX's, of replay and decoding; default: the accelerator's")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    args = parser.parse_args(argv)
    args.work = (args.work or args.out.with_suffix("")).resolve()
    args.model = args.model and args.model.resolve()
    names = [part.name for part in parts_of(args)]
    for name in (*(args.only or ()), *args.again):
        if name not in names:
            parser.error(f"no part is called {name}; the parts are {', '.join(names)}")
    if (args.prompts is None) != (args.tokenizer is None):
        parser.error("--prompts and --tokenizer go together")
    if args.write is not None:
        page = args.write.read_text(encoding="utf-8") if args.write.is_file() else ""
        if missing := [place(section) for section in SECTIONS if place(section) not in page]:
            parser.error(f"--write {args.write}: no such page, or it lacks the lines {', '.join(missing)}")
    return args


def write(day: dict[str, Any], args: argparse.Namespace) -> None:
    """Writes the results and their tables."""
    temporary = args.out.with_suffix(".part")
    temporary.write_text(json.dumps(day, indent=1) + "\n", encoding="utf-8")
    temporary.replace(args.out)
    args.out.with_suffix(".md").write_text(markdown(day["parts"]), encoding="utf-8")
    if args.write is not None:
        page = args.write.read_text(encoding="utf-8")
        args.write.write_text(filled(page, day["parts"], day["began"]), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0, or 1 if a part failed."""
    args = parse(argv)
    end = time.monotonic() + 60 * args.minutes
    if args.wheels:
        install(args)
    day = {"began": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "parts": {}}
    if args.out.exists():
        day = json.loads(args.out.read_text(encoding="utf-8"))
    else:
        for path in args.work.glob("*.json"):  # of another day
            path.unlink()
    results, parts, passed = day["parts"], {part.name: part for part in parts_of(args)}, []
    write(day, args)
    for name in sorted(args.only or parts, key=lambda name: results.get(name, {}).get("status") == "failed"):
        before = None if name in args.again else results.get(name, {})
        if before is not None and before.get("status") == "done":
            continue
        left = end - time.monotonic()
        if left < parts[name].seconds:
            passed.append(name)
            continue
        results[name] = outcome = run_part(parts[name], args, left, before)
        write(day, args)
        print(f"{name}: {outcome['status']}, {outcome.get('seconds', 0)} s", flush=True)
        print(outcome.get("text", outcome.get("why", "")).rstrip(), flush=True)
        if args.write is not None:
            print(f"to commit: git commit -m 'Measured: {name}' {args.write}", flush=True)
        print(flush=True)
    if passed:
        print(f"no time is left for {', '.join(passed)}; run the command again")
    return int(any(outcome["status"] == "failed" for outcome in results.values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the part that runs, as Ctrl-C does
    sys.exit(main())
