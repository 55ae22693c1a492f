"""Compares generation with transformers' `generate`: tokens a second, bytes a second of decoding, and peak memory.

    python scripts/bench/rollouts.py --model smollm2-135m pythia-70m --workload lognormal tight --json OUT.json
    python scripts/bench/rollouts.py --workload nano_vllm --device cuda --dtype bfloat16

Each measurement is a process of its own, which compiles or warms up first. A round has one of each, one after the
other, so that other load on the machine affects all, and has prompts and lengths of its own. All read the same
checkpoint of random weights, and sample from the whole distribution at one temperature. The lengths of the responses
are drawn before and forced: by `limits` in ours, by a StoppingCriteria in `generate`, which takes all rows as one
batch. Tokens behind a row's length do not count.

Workloads: lognormal and tight are lengths of responses to prompts of one length. nano_vllm is the one of nano-vllm's
bench.py, which figures of small engines use: 256 requests of 100 to 1,024 tokens in and out for Qwen3-0.6B at
temperature 0.6; the first round has its very prompts and lengths. Other --rows and lengths scale it down.

Decoding is measured against memory: the bytes that its steps have to read (the weights in each, and the keys and
values of the rows that have not ended; `rlhf_jax.stages.work.decode_bytes`), divided by its seconds, beside the rate of
a copy in the same process. Its seconds are those of the rollout less those of one with a token a row.

--short is a small case for CI: ours and `generate`. --baseline FILE stores the ratios of ours to `generate`, with
bounds at 60 % of the lowest; with --check the ratios are compared with the bounds stored there (exit code 1 if one is
lower).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import benchmark
import jax
import jax.numpy as jnp
import numpy as np
from benchmark_case import available_cores
from benchmark_report import about_this_run, bounds_of, checked_or_stored, load_warning, spread, verdict
from rollouts_child import Rollouts

from rlhf_jax import UserError, models
from rlhf_jax.generate import Decoding
from rlhf_jax.models.io import hf
from rlhf_jax.runtime.run_folder import write_atomically
from rlhf_jax.stages.work import Shape, decode_bytes
from rlhf_jax.utils.strict_json import json_text

HERE = Path(__file__).resolve().parent
SYSTEMS = {"ours": "ours", "generate": "transformers, generate"}
"""Names of the systems in tables."""
PUBLISHED = {"smollm2-135m": "SmolLM2-135M", "qwen3-0.6b": "Qwen3-0.6B"}
"""Models by their names in scripts/scaling/models.json."""
MODELS = (*PUBLISHED, "pythia-70m", "tiny")
SHORT = {"model": ["tiny"], "rows": 16, "prompt_length": 32, "response_length": 128}
SHORT |= {"rounds": 1, "repeats": 3, "cores": 1}


@dataclasses.dataclass(frozen=True)
class Workload:
    """What options that are not set are."""

    model: tuple[str, ...] = ("smollm2-135m", "pythia-70m")
    rows: int = 64
    prompt_length: int = 128
    response_length: int = 1024
    temperature: float = 1.0


WORKLOADS = {"lognormal": Workload(), "tight": Workload()}
WORKLOADS["nano_vllm"] = Workload(("qwen3-0.6b",), 256, 1024, 1024, 0.6)


@dataclasses.dataclass(frozen=True)
class Case:
    """The work of a table."""

    model: str
    workload: str
    rows: int
    prompt_length: int
    response_length: int
    cores: int
    temperature: float = 1.0
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Description; the key of a stored bound."""
        most = "up to " * (self.workload == "nano_vllm")
        size = f"{self.rows} rows, {most}{self.prompt_length} + up to {self.response_length} tokens"
        where = self.device if self.device != "cpu" else f"cpu with {self.cores} core{'s' * (self.cores > 1)}"
        return f"rollouts {self.model}, {self.workload} lengths, {size}, {self.dtype}, {where}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["lognormal", "tight"])
    parser.add_argument("--model", nargs="+", choices=MODELS, help="shapes; default: the workload's")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    counts = [("rounds", 3, "processes of each kind"), ("repeats", 1, "timed rollouts of a process")]
    counts += [("seed", 0, "of prompts and lengths"), ("cores", available_cores(), "cores of a process")]
    for name, default, text in counts:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text}; default {default}")
    sizes = [("rows", "responses of a rollout"), ("prompt_length", "tokens of a prompt; nano_vllm: at most")]
    for name, text in (*sizes, ("response_length", "most tokens of a response")):
        parser.add_argument(f"--{name}", type=int, help=f"{text}; default: the workload's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu", help="JAX's platform: cpu, cuda; default cpu")
    text = "fields of `generate.Decoding` for ours as JSON, such as '{\"shrink\": true}'; default: its defaults"
    parser.add_argument("--decoding", type=json.loads, default={}, metavar="JSON", help=text)
    parser.add_argument("--short", action="store_true", help="a small case, one core; other options still count")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="JSON file of ratios and bounds")
    parser.add_argument("--check", action="store_true", help="compare the ratios with the bounds in --baseline")
    parser.add_argument("--work", type=Path, help="folder for models and logs; default: temporary")
    args = parser.parse_args(argv)
    if args.short:
        parser.set_defaults(**SHORT, workload=["lognormal"])
        args = parser.parse_args(argv)
    return args


def check(args: argparse.Namespace) -> None:
    """UserError: an option is invalid."""
    for name in ("rounds", "repeats", "rows", "prompt_length", "response_length", "cores"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: give 1 or more")
    fields = [field.name for field in dataclasses.fields(Decoding)]
    if not isinstance(args.decoding, dict) or not set(args.decoding) <= set(fields):
        raise UserError(f"--decoding {json.dumps(args.decoding)}: give a JSON object with some of {', '.join(fields)}")
    both = {"ours", "generate"} <= set(args.systems)
    if args.check and args.baseline is None:
        raise UserError("--check needs --baseline FILE")
    if args.baseline is not None and not both:
        raise UserError("--baseline needs --systems ours generate")
    if "generate" in args.systems and not importlib.util.find_spec("torch"):
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


def nano_vllm(rows: int, vocabulary: int, prompt_length: int, response_length: int, seed: int):
    """Prompts, and tokens of each response, drawn as nano-vllm's bench.py does: lengths are uniform in 100..1,024.

    Args:
      rows: B.
      vocabulary: ids of prompts are below it and at most 10,000.
      prompt_length, response_length: most tokens; below 1,024 the fewest are fewer in proportion.
      seed: of the draw; the benchmark's is 0.
    """
    draw = random.Random(seed).randint

    def length(most: int) -> int:
        return draw(max(most * 100 // 1024, 1), most)

    most_id = min(10_000, vocabulary - 1)
    prompts = [[draw(0, most_id) for _ in range(length(prompt_length))] for _ in range(rows)]
    return prompts, [length(response_length) for _ in range(rows)]


def model_of(name: str):
    """The model of a name, with its published shape."""
    if name in PUBLISHED:
        shapes = json.loads((HERE.parent / "scaling" / "models.json").read_text(encoding="utf-8"))
        return models.Model.from_hf_config(shapes[PUBLISHED[name]]["config"], name)
    return models.pythia("70m") if name == "pythia-70m" else models.custom_shape("llama:2x128x4x2", 2048)


def prepare(name: str, work: Path) -> tuple[Path, int]:
    """Writes a checkpoint of random weights once: (its folder, vocabulary rows)."""
    model, folder = model_of(name), work / name
    if not folder.exists():
        hf.save(folder, model, jax.device_get(model.init(jax.random.key(0))), kind="causal")
    return folder, model.config.vocab_size


def rollouts_of(case: Case, folder: Path, vocabulary: int, seed: int, repeats: int, **options: Any) -> Rollouts:
    """Prompts and lengths of a round."""
    if case.workload == "nano_vllm":
        prompts, limits = nano_vllm(case.rows, vocabulary, case.prompt_length, case.response_length, seed)
    else:
        prompts = np.random.default_rng([seed, 1]).integers(vocabulary, size=(case.rows, case.prompt_length)).tolist()
        limits = drawn_lengths(case.workload, case.rows, case.response_length, seed)
    same = {name: getattr(case, name) for name in ("response_length", "cores", "temperature", "dtype", "device")}
    return Rollouts(str(folder), prompts, limits, **same, repeats=repeats, seed=seed, **options)


# --- measurements


def run_child(system: str, rollouts: Rollouts, work: Path, name: str) -> dict[str, Any]:
    """One measurement in a child process: its result.

    Raises:
      UserError: it failed; quotes the end of its log.
    """
    rollouts.write(work / f"{name}-case.json")
    env = {**benchmark.environment(rollouts), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    words = [sys.executable, str(HERE / "rollouts_child.py"), str(work), system, name]
    result = benchmark.result_of(words, env, work / f"{system}-{name}")
    if result is None:
        raise UserError(f"{system} runs out of memory")
    return result


def rates(rollouts: Rollouts, shape: Shape, result: dict[str, Any]) -> dict[str, float]:
    """Tokens a second of a rollout; and of its decode steps the seconds, the bytes of a step that have to be read, and
    bytes a second."""
    seconds = median(result["seconds"])
    decode_seconds, itemsize = seconds - result["prompt_seconds"], jnp.dtype(rollouts.dtype).itemsize
    read = decode_bytes(shape, list(map(len, rollouts.prompts)), rollouts.limits, itemsize, steps=result["steps"])
    out = {"tokens_per_second": rollouts.tokens / seconds, "decode_seconds": decode_seconds}
    return out | {"step_bytes": read / max(result["steps"], 1), "bytes_per_second": read / decode_seconds}


def measure(case: Case, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """All rounds of a case: {"case", "rounds", "rows"}."""
    folder, vocabulary = prepare(case.model, work)
    shape = Shape.of(model_of(case.model))
    rounds = []
    for number in range(args.rounds):
        rollouts = rollouts_of(case, folder, vocabulary, args.seed + number, args.repeats, decoding=args.decoding)
        results = {}
        for system in (name for name in SYSTEMS if name in args.systems):
            result = run_child(system, rollouts, work, str(number))
            results[system] = {**result, **rates(rollouts, shape, result)}
        rounds.append(results)
    return {"case": case.name, "rounds": rounds, "rows": result_rows(rounds)}


def ratios(rounds: Sequence[dict[str, dict]]) -> dict[str, dict[str, float]]:
    """Tokens a second of ours over those of `generate`, and its peak memory over ours, over the rounds."""
    pairs = [(results["ours"], results["generate"]) for results in rounds]
    speed = [ours["tokens_per_second"] / theirs["tokens_per_second"] for ours, theirs in pairs]
    return {"speed": spread(speed), "memory": spread([theirs["peak_mib"] / ours["peak_mib"] for ours, theirs in pairs])}


def result_rows(rounds: Sequence[dict[str, dict]]) -> list[dict[str, Any]]:
    """A row for each system: tokens a second, peak memory, what decoding reads; of ours the ratio to `generate`."""
    rows = []
    for system in rounds[0]:
        results = [results[system] for results in rounds]
        row: dict[str, Any] = {"name": SYSTEMS[system], "system": system}
        for name in ("tokens_per_second", "bytes_per_second"):
            row[name] = spread([result[name] for result in results])
        row["copy_share"] = spread([result["bytes_per_second"] / result["copy_rate"] for result in results])
        medians = ("first_seconds", "prompt_seconds", "decode_seconds", "steps", "step_bytes", "copy_rate")
        row |= {name: median(result[name] for result in results) for name in medians}
        row |= {name: max(result[name] for result in results) for name in ("peak_mib", "above_imports_mib")}
        rows.append(row)
    if len(rows) == len(SYSTEMS):
        rows[0]["ratio"] = ratios(rounds)["speed"]
    return rows


# --- report


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each system."""
    head = ("", "tokens/s", "peak memory", "above imports", "first rollout", "to transformers'")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [shown(row["tokens_per_second"], ",.0f"), f"{row['peak_mib']:,.0f} MiB"]
        cells += [f"{row['above_imports_mib']:,.0f} MiB", f"{row['first_seconds']:.1f} s"]
        cells += [shown(row["ratio"], ".2f") if "ratio" in row else ""]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def decode_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each system, of its decode steps."""
    head = ("decoding", "prompts", "steps", "a step", "to read a step", "read a second", "a copy", "share of the copy")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [f"{row['prompt_seconds']:.2f} s", f"{row['steps']:,.0f}"]
        cells += [f"{1e3 * row['decode_seconds'] / max(row['steps'], 1):.2f} ms", f"{row['step_bytes'] / 1e9:.3f} GB"]
        gigabytes = {name: value / 1e9 for name, value in row["bytes_per_second"].items()}
        cells += [f"{shown(gigabytes, ',.1f')} GB/s", f"{row['copy_rate'] / 1e9:,.1f} GB/s"]
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {shown(row['copy_share'], '.0%')} |")
    return "\n".join(lines)


def shown(values: dict[str, float], form: str) -> str:
    """Median and range."""
    low, high = format(values["low"], form), format(values["high"], form)
    return format(values["median"], form) + ("" if low == high else f" ({low} to {high})")


# --- command


def cases(args: argparse.Namespace) -> list[Case]:
    """What is measured: each workload with each of its models."""
    out = []
    for workload in args.workload:
        default = WORKLOADS[workload]
        names = ("rows", "prompt_length", "response_length")
        sizes = {name: getattr(args, name) or getattr(default, name) for name in names}
        rest = {"cores": args.cores, "temperature": default.temperature, "dtype": args.dtype, "device": args.device}
        out += [Case(model, workload, **sizes, **rest) for model in args.model or default.model]
    return out


def rollouts(args: argparse.Namespace, work: Path) -> int:
    """Runs the benchmark: 0, or 1 if a ratio is below its bound."""
    work.mkdir(parents=True, exist_ok=True)
    about = about_this_run()
    whole: dict[str, Any] = {**about, "options": {k: v for k, v in vars(args).items() if not isinstance(v, Path)}}
    problems = []
    whole["cases"] = []
    for case in cases(args):
        if args.check:  # before minutes of measuring
            bounds_of(args.baseline, case)
        whole["cases"].append(result := measure(case, args, work))
        tables = (table(result["rows"]), decode_table(result["rows"]))
        title = f"{case.name}; --decoding '{json.dumps(args.decoding)}'"
        print(title, *tables, sep="\n\n", end="\n\n", flush=True)
        if args.baseline:
            problems += checked_or_stored(args, case, ratios(result["rounds"]), about)
    if warning := load_warning(about["machine"]):
        print(warning, flush=True)
    if args.json:
        write_atomically(str(args.json), json_text(whole, indent=2) + "\n")
    return verdict(problems) if args.check else 0


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
