"""Compares generation with transformers' `generate` and its continuous batching: tokens a second and peak memory.

    python scripts/bench/rollouts.py --model smollm2-135m pythia-70m --lengths lognormal tight --json OUT.json

Each measurement is a process of its own, which compiles or warms up first. A round has one of each, one after the
other, so that other load on the machine affects all, and has prompts and lengths of its own. All read the same
checkpoint of random weights, in float32, and sample from the whole distribution at temperature 1. The lengths of the
responses are drawn before and forced: by `limits` in ours, by a StoppingCriteria in `generate`, which takes all rows
as one batch, by each request's max_new_tokens in continuous batching. Tokens behind a row's length do not count.

Without flash attention, which needs a GPU, continuous batching attends over the rows of a batch as one sequence under
a mask. Its time depends on the tokens that a batch may have: before the rounds, every size of --batch_tokens gets one
process with at most 16 tokens a row, and the rounds use the fastest. Its errors are shown in its row.

--short is a small case for CI: ours and `generate`. --baseline FILE stores the ratios of ours to `generate`, with
bounds at 60 % of the lowest; with --check the ratios are compared with the bounds stored there (exit code 1 if one is
lower).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import benchmark
import jax
import numpy as np
from benchmark_case import available_cores
from benchmark_report import below_bounds, load_warning, machine, read_bounds, spread, store_bounds
from rollouts_case import Rollouts

from rlhf_jax import UserError, models
from rlhf_jax.generate import Decoding
from rlhf_jax.models.io import hf
from rlhf_jax.runtime.run_folder import write_atomically
from rlhf_jax.utils.strict_json import json_text

HERE = Path(__file__).resolve().parent
SYSTEMS = {
    "ours": "ours",
    "generate": "transformers, generate",
    "continuous": "transformers, continuous batching",
}
"""Names of the systems in tables."""
MODELS = ("smollm2-135m", "pythia-70m", "tiny")
LENGTHS = ("lognormal", "tight")
SHORT = {"model": ["tiny"], "lengths": ["lognormal"], "rows": 16, "prompt_length": 32, "response_length": 128}
SHORT |= {"rounds": 1, "repeats": 3, "cores": 1, "systems": ["ours", "generate"]}
TRIAL_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """The work of a table."""

    model: str
    lengths: str
    rows: int
    prompt_length: int
    response_length: int
    slots: int | None
    cores: int

    @property
    def name(self) -> str:
        """Description; the key of a stored bound."""
        slots = "" if self.slots is None else f" in {self.slots} slots"
        size = f"{self.rows} rows{slots}, {self.prompt_length} + up to {self.response_length} tokens"
        return (
            f"rollouts {self.model}, {self.lengths} lengths, {size}, float32, cpu with {self.cores} "
            f"core{'s' * (self.cores > 1)}"
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS[:2]))
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS), help="of the responses")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    counts = [("rounds", 3, "processes of each kind"), ("repeats", 1, "timed rollouts of a process")]
    counts += [("rows", 64, "responses of a rollout"), ("prompt_length", 128, "tokens of each prompt")]
    counts += [("response_length", 1024, "most tokens of a response"), ("seed", 0, "of prompts and lengths")]
    for name, default, text in (*counts, ("cores", available_cores(), "cores of a process")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text}; default {default}")
    text = "rows that ours and continuous batching decode at a time; default: all"
    parser.add_argument("--slots", type=int, help=text)
    text = "fields of `generate.Decoding` for ours as JSON, such as '{\"shrink\": true}'; default: its defaults"
    parser.add_argument("--decoding", type=json.loads, default={}, metavar="JSON", help=text)
    text = "most tokens of a batch of continuous batching; of several the fastest is used; default: 128 256 512"
    parser.add_argument("--batch_tokens", type=int, nargs="+", default=[128, 256, 512], metavar="TOKENS", help=text)
    parser.add_argument("--short", action="store_true", help="a small case, one core; other options still count")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="JSON file of ratios and bounds")
    parser.add_argument("--check", action="store_true", help="compare the ratios with the bounds in --baseline")
    parser.add_argument("--work", type=Path, help="folder for models and logs; default: temporary")
    args = parser.parse_args(argv)
    if args.short:
        parser.set_defaults(**SHORT)
        args = parser.parse_args(argv)
    return args


def check(args: argparse.Namespace) -> None:
    """UserError: an option is invalid."""
    for name in ("rounds", "repeats", "rows", "prompt_length", "response_length", "cores"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: give 1 or more")
    if args.slots is not None and not 1 <= args.slots <= args.rows:
        raise UserError(f"--slots {args.slots}: give 1 to --rows {args.rows}")
    fields = [field.name for field in dataclasses.fields(Decoding)]
    if not isinstance(args.decoding, dict) or not set(args.decoding) <= set(fields):
        raise UserError(f"--decoding {json.dumps(args.decoding)}: give a JSON object with some of {', '.join(fields)}")
    if min(args.batch_tokens) < 1:
        raise UserError(f"--batch_tokens {min(args.batch_tokens)}: give 1 or more")
    both = {"ours", "generate"} <= set(args.systems)
    if args.check and args.baseline is None:
        raise UserError("--check needs --baseline FILE")
    if args.baseline is not None and not both:
        raise UserError("--baseline needs --systems ours generate")
    if set(args.systems) & {"generate", "continuous"} and not importlib.util.find_spec("torch"):
        raise UserError("torch is not installed: pip install torch, or measure only ours with --systems ours")


# --- the work


def drawn_lengths(kind: str, rows: int, most: int, seed: int) -> list[int]:
    """Tokens of each response: lognormal of sigma 0.8 and mean 0.225 T, or normal of mean T / 2 and deviation T / 10.

    Args:
      kind: 'lognormal' or 'tight'.
      rows: B.
      most: T; lengths are clipped to 1..T.
      seed: of the draw.
    """
    random = np.random.default_rng(seed)
    if kind == "lognormal":
        sigma = 0.8
        drawn = random.lognormal(np.log(0.225 * most) - sigma**2 / 2, sigma, rows)
    else:
        drawn = random.normal(most / 2, most / 10, rows)
    return np.clip(np.rint(drawn), 1, most).astype(int).tolist()


def model_of(name: str):
    """The model of a name, with its published shape."""
    if name == "smollm2-135m":
        shapes = json.loads((HERE.parent / "scaling" / "models.json").read_text(encoding="utf-8"))
        return models.Model.from_hf_config(shapes["SmolLM2-135M"]["config"], name)
    return models.pythia("70m") if name == "pythia-70m" else models.custom_shape("llama:2x128x4x2", 2048)


def prepare(name: str, work: Path) -> tuple[Path, int]:
    """Writes a checkpoint of random weights once: (its folder, vocabulary rows)."""
    model, folder = model_of(name), work / name
    if not folder.exists():
        hf.save(folder, model, jax.device_get(model.init(jax.random.key(0))), kind="causal")
    return folder, model.config.vocab_size


def rollouts_of(case: Case, folder: Path, vocabulary: int, seed: int, repeats: int, **options: Any) -> Rollouts:
    """Prompts and lengths of a round."""
    prompts = np.random.default_rng([seed, 1]).integers(vocabulary, size=(case.rows, case.prompt_length)).tolist()
    limits = drawn_lengths(case.lengths, case.rows, case.response_length, seed)
    sizes = {"response_length": case.response_length, "slots": case.slots, "cores": case.cores}
    return Rollouts(str(folder), prompts, limits, **sizes, repeats=repeats, seed=seed, **options)


# --- measurements


def run_child(system: str, rollouts: Rollouts, work: Path, name: str) -> dict[str, Any]:
    """One measurement in a child process: its result, or {"error": reason} if it is transformers'.

    Raises:
      UserError: ours failed; quotes the end of its log.
    """
    script = "rollouts_ours.py" if system == "ours" else "rollouts_transformers.py"
    rollouts.write(work / f"{name}-case.json")
    log, result = work / f"{system}-{name}.log", work / f"{system}-{name}.json"
    result.unlink(missing_ok=True)
    with log.open("w", encoding="utf-8") as file:
        words = [sys.executable, str(HERE / script), str(work), system, name]
        env = {**benchmark.environment(rollouts), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, env=env).returncode
    if code in benchmark.KILLED:
        return {"error": "killed, out of memory"}
    if code or not result.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        if system != "ours":
            return {"error": lines[-1] if lines else f"code {code}"}
        end = "\n".join(lines[-12:])
        raise UserError(f"the process of {system} failed with code {code}; the end of its log:\n{end}")
    return json.loads(result.read_text(encoding="utf-8"))


def try_batch_tokens(rollouts: Rollouts, sizes: Sequence[int], work: Path) -> list[dict[str, Any]]:
    """Seconds of continuous batching with few tokens a row, for each size of its batches."""
    short = dataclasses.replace(rollouts, limits=[min(limit, TRIAL_TOKENS) for limit in rollouts.limits], repeats=1)
    rows = []
    for size in sizes:
        result = run_child("continuous", dataclasses.replace(short, batch_tokens=size), work, f"trial-{size}")
        rows.append({"batch_tokens": size, **result})
    return rows


def measure(case: Case, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """All rounds of a case: {"case", "trials", "rounds", "rows"}."""
    folder, vocabulary = prepare(case.model, work)
    systems = [name for name in SYSTEMS if name in args.systems]
    trials, chosen = [], args.batch_tokens[0]
    if len(args.batch_tokens) > 1 and "continuous" in systems:
        rollouts = rollouts_of(case, folder, vocabulary, args.seed, 1)
        trials = try_batch_tokens(rollouts, args.batch_tokens, work)
        if fitting := [row for row in trials if "seconds" in row]:
            chosen = min(fitting, key=lambda row: median(row["seconds"]))["batch_tokens"]
    options = {"decoding": args.decoding if args.slots is None else {**args.decoding, "slots": args.slots}}
    rounds = []
    for number in range(args.rounds):
        rollouts = rollouts_of(
            case, folder, vocabulary, args.seed + number, args.repeats, batch_tokens=chosen, **options
        )
        results = {}
        for system in systems:
            result = run_child(system, rollouts, work, str(number))
            if "seconds" in result:
                result["tokens_per_second"] = rollouts.tokens / median(result["seconds"])
            results[system] = {**result, "tokens": rollouts.tokens}
        rounds.append(results)
    whole = {"case": case.name, "batch_tokens": chosen, "trials": trials}
    return {**whole, "rounds": rounds, "rows": result_rows(rounds)}


def ratios_to(name: str, other: str, rounds: Sequence[dict[str, dict]]) -> dict[str, float] | None:
    """Tokens a second of one over those of the other, in each round: median, lowest, highest; None: one failed."""
    pairs = [(results[name], results[other]) for results in rounds]
    if not all("seconds" in result for pair in pairs for result in pair):
        return None
    return spread([one["tokens_per_second"] / two["tokens_per_second"] for one, two in pairs])


def result_rows(rounds: Sequence[dict[str, dict]]) -> list[dict[str, Any]]:
    """A row for each system: tokens a second, peak memory, ratios to the better of transformers'."""
    rows = []
    for system in rounds[0]:
        row: dict[str, Any] = {"name": SYSTEMS[system], "system": system}
        results = [results[system] for results in rounds]
        errors = [result["error"] for result in results if "error" in result]
        if errors:
            rows.append({**row, "error": errors[0]})
            continue
        row["tokens_per_second"] = spread([result["tokens_per_second"] for result in results])
        row["first_seconds"] = median(result["first_seconds"] for result in results)
        row |= {name: max(result[name] for result in results) for name in ("peak_mib", "above_imports_mib")}
        rows.append(row)
    theirs = [row for row in rows if row["system"] != "ours" and "error" not in row]
    best = max(theirs, key=lambda row: row["tokens_per_second"]["median"], default=None)
    for row in rows if best else ():
        if "error" not in row:
            row["ratio"] = ratios_to(row["system"], best["system"], rounds)
    return rows


# --- report


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each system."""
    head = ("", "tokens/s", "peak memory", "above imports", "first rollout", "to the better of transformers'")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        if "error" in row:
            cells = [f"failed: {row['error'].splitlines()[0].replace('|', '/')}", *[""] * (len(head) - 2)]
        else:
            cells = [shown(row["tokens_per_second"], ",.0f"), f"{row['peak_mib']:,.0f} MiB"]
            cells += [f"{row['above_imports_mib']:,.0f} MiB", f"{row['first_seconds']:.1f} s"]
            cells += [shown(row["ratio"], ".2f") if "ratio" in row else ""]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(values: dict[str, float], form: str) -> str:
    """Median and range."""
    low, high = format(values["low"], form), format(values["high"], form)
    return format(values["median"], form) + ("" if low == high else f" ({low} to {high})")


def trial_line(result: dict[str, Any]) -> str:
    """The sizes of batches that were tried for continuous batching."""
    texts = [
        f"{row['batch_tokens']}: " + (f"{median(row['seconds']):.1f} s" if "seconds" in row else row["error"])
        for row in result["trials"]
    ]
    return f"continuous batching, tokens of a batch: {', '.join(texts)}; {result['batch_tokens']} used\n"


# --- command


def rollouts(args: argparse.Namespace, work: Path) -> int:
    """Runs the benchmark: 0, or 1 if a ratio is below its bound."""
    work.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine(), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    about["command"] = shlex.join([Path(sys.executable).name, *sys.argv])
    whole: dict[str, Any] = {**about, "options": {k: v for k, v in vars(args).items() if not isinstance(v, Path)}}
    problems = []
    whole["cases"] = []
    for model, kind in itertools.product(args.model, args.lengths):
        case = Case(model, kind, args.rows, args.prompt_length, args.response_length, args.slots, args.cores)
        if args.check:  # before minutes of measuring
            below_bounds(read_bounds(args.baseline), case, dict.fromkeys(("speed", "memory"), {"median": 1e9}))
        whole["cases"].append(result := measure(case, args, work))
        print(f"{case.name}\n\n{table(result['rows'])}\n", flush=True)
        if result["trials"]:
            print(trial_line(result), flush=True)
        if args.check:
            problems += below_bounds(read_bounds(args.baseline), case, bounded_ratios(result))
        elif args.baseline:
            store_bounds(args.baseline, case, bounded_ratios(result), about)
    if warning := load_warning(about["machine"]):
        print(warning, flush=True)
    if args.json:
        write_atomically(str(args.json), json_text(whole, indent=2) + "\n")
    if args.check:
        print("\n".join(problems) or "no ratio is below its bound")
    return int(bool(problems))


def bounded_ratios(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Tokens a second of ours over those of `generate`, and its peak memory over ours.

    Raises:
      UserError: `generate` failed.
    """
    rounds = result["rounds"]
    speed = ratios_to("ours", "generate", rounds)
    if speed is None:
        raise UserError(f"transformers' generate failed: {rounds[0]['generate'].get('error')}")
    memory = [results["generate"]["peak_mib"] / results["ours"]["peak_mib"] for results in rounds]
    return {"speed": speed, "memory": spread(memory)}


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 1: a ratio is below its bound; 2: wrong options or a failed process."""
    args = parse(argv)
    try:
        check(args)
        jax.config.update("jax_platforms", "cpu")
        if args.work is not None:
            return rollouts(args, args.work.resolve())
        with tempfile.TemporaryDirectory() as folder:
            return rollouts(args, Path(folder))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
