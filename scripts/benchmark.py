"""Ours against TRL 1.12.0, PPO or RLOO: seconds an update, seconds of each phase, memory, and the ratios pair by pair.

    python scripts/benchmark.py --algo ppo --shape 14m --prompts TLDR.jsonl --tokenizer PYTHIA --pairs 3 --json OUT.json

Each measurement is a process of its own, ours and TRL's in turns, so that what else runs on the machine hits both. Both
start from the same random weights and see the same batch of prompts at every update of a pair; with no stop token every
response has full length, so the work is the same. Ours is the loop of every run, `rlhf_jax.train.train`; TRL's is its
own trainer: sdpa attention, no gradient checkpointing, torch on all cores given, the largest micro-batch that memory
holds. An update's seconds are the median of those after the first, which compiles (ours) or warms up (TRL).

MFU is the work of `benchmark_work.work` over seconds and the fastest matrix product that either library reached on the
machine; padding, and a prompt computed again for each response, are no work. TRL's RLOO scores decoded text, whose
tokens are not exactly the sampled ones, and cuts a response at an eos that came by chance. TRL's `update` is what its
other phases leave of a whole update, logging and data included.

On a GPU (`accelerate launch --mixed_precision`) TRL's weights stay float32, as ours; tf32 is on for both. Its PPO
samples and evaluates values outside of mixed precision; its frozen models are given to it in bfloat16. The GPU commands
were not run: no such machine was at hand.

--phase NAME times one of our phases alone ('all': each, after the updates); --profile DIR writes a trace of one of our
updates for TensorBoard or Perfetto. --baseline FILE stores the ratios with bounds at 60 % of the least; with --check
the ratios are held to the bounds stored there (exit code 1 below them).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmark_work
import jax
from benchmark_case import PHASES, Case, available_cores
from benchmark_report import SYSTEMS, below, busy, keep, machine, phase_table, ratios, report, spread, stored

from rlhf_jax import UserError, data, models
from rlhf_jax.data import synthetic
from rlhf_jax.metrics import logger
from rlhf_jax.models.families.gpt_neox import PYTHIA_SHAPES
from rlhf_jax.models.io import hf
from rlhf_jax.runtime.run_folder import write_atomically

HERE = Path(__file__).resolve().parent
CONTEXT = 2048
KILLED = (-9, 137)  # by the kernel, which had no memory left


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=("ppo", "rloo"), default="ppo")
    parser.add_argument("--shape", default="14m", help="a Pythia size, or LAYERSxWIDTHxHEADS[xROWS]")
    counts = [("batch", 16, "responses an update"), ("epochs", 4, "passes of learning over them")]
    counts += [("query_length", 512, "most tokens of a prompt"), ("response_length", 53, "tokens of each response")]
    counts += [("num_generations", 4, "RLOO: responses to a prompt"), ("updates", 3, "of each process")]
    for name, default, text in (*counts, ("pairs", 3, "processes of each system")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text}; default {default}")
    parser.add_argument(
        "--lora_r", type=int, default=0, help="train adapters of this rank on all linear layers; 0: not"
    )
    text = "our value model with --lora_r; TRL's is trained in full"
    parser.add_argument("--lora_value", choices=("full", "own", "shared"), default="full", help=text)
    parser.add_argument("--micro", type=int, help="our rows a gradient pass; default: as in every run")
    parser.add_argument("--trl_micro", type=int, help="TRL's; default: the most that fit")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of computation")
    parser.add_argument("--prompts", default="synthetic", help="JSON lines with 'prompt', or 'synthetic'")
    parser.add_argument("--tokenizer", default="synthetic", help="folder with tokenizer.json, or 'synthetic'")
    parser.add_argument("--systems", default="ours,trl", help="which, with commas between")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="auto: a GPU where there is one")
    parser.add_argument("--cores", type=int, default=available_cores(), help="that a process may use")
    parser.add_argument("--phase", choices=(*PHASES, "all"), help="time our phases one by one")
    parser.add_argument("--profile", metavar="DIR", help="write a trace of one of our updates")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="JSON file of stored ratios and their bounds")
    parser.add_argument("--check", action="store_true", help="hold the ratios to the bounds of --baseline")
    parser.add_argument("--work", type=Path, help="folder for models, prompts and logs; default: a temporary one")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> list[str]:
    """The systems to run.

    Raises:
      UserError: what was asked for cannot be measured; says which option, and what to do.
    """
    systems = args.systems.split(",")
    least = {"batch": 1, "epochs": 1, "query_length": 1, "response_length": 2, "updates": 2, "pairs": 1, "cores": 1}
    for name, most in least.items():
        if getattr(args, name) < most:
            why = "; the first update is not counted" if name == "updates" else ""
            raise UserError(f"--{name} {getattr(args, name)}: give {most} or more{why}")
    if not set(systems) <= set(SYSTEMS):
        raise UserError(f"--systems {args.systems}: give ours, trl, or ours,trl")
    if args.query_length + args.response_length > CONTEXT:
        both = args.query_length + args.response_length
        raise UserError(f"--query_length + --response_length = {both}, but Pythia's context is {CONTEXT} tokens")
    if args.algo == "rloo" and (args.num_generations < 2 or args.batch % args.num_generations):
        raise UserError(
            f"--batch {args.batch} must be a multiple of --num_generations {args.num_generations}, 2 or more"
        )
    for name in ("micro", "trl_micro"):
        rows = getattr(args, name)
        if rows is not None and (rows < 1 or args.batch % rows):
            raise UserError(f"--{name} {rows} must divide --batch {args.batch}")
    if args.lora_r < 0:
        raise UserError(f"--lora_r {args.lora_r}: give a rank, or 0 to train everything")
    if args.lora_value != "full" and (args.algo == "rloo" or not args.lora_r):
        raise UserError(f"--lora_value {args.lora_value} needs --algo ppo and --lora_r")
    if args.algo == "rloo" and args.phase == "value":
        raise UserError("--phase value: RLOO has no value model")
    if args.prompts != "synthetic" and args.tokenizer == "synthetic":
        raise UserError("--prompts FILE needs --tokenizer: the synthetic one knows a few dozen words only")
    if args.prompts != "synthetic" and not Path(args.prompts).is_file():
        raise UserError(f"--prompts {args.prompts}: no such file")
    if args.check and (args.baseline is None or set(systems) != set(SYSTEMS)):
        raise UserError("--check needs --baseline FILE and both systems")
    if args.baseline is not None and args.phase not in (None, "all"):
        raise UserError(f"--baseline is of whole updates, and --phase {args.phase} makes none: leave one of them away")
    if "trl" in systems and importlib.util.find_spec("trl") is None:
        raise UserError(
            "TRL is not installed: pip install trl==1.12.0 torch, or measure ours alone with --systems ours"
        )
    return systems


def has_cuda() -> bool:
    """Whether torch sees a GPU; asked in another process, for this one is to hold none."""
    found = subprocess.run([sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"])
    return found.returncode == 0


# --- what both systems start from


def model_of(shape: str, tokenizer):
    """The model of a shape: a Pythia size with its published rows, or LAYERSxWIDTHxHEADS, the tokenizer's rows or ROWS.

    Raises:
      UserError: no such shape, or the tokenizer has more ids than rows.
    """
    rows = 128 * -(-tokenizer.vocab_size // 128)
    if shape.count("x") == 3:
        shape, given = shape.rsplit("x", 1)
        if not given.isdecimal() or int(given) < rows:
            raise UserError(f"--shape ...x{given}: the tokenizer needs {rows} rows or more")
        return models.custom_shape(shape, int(given))
    if "x" in shape:
        return models.custom_shape(shape, rows)
    if shape in PYTHIA_SHAPES and rows > PYTHIA_SHAPES[shape][3]:
        raise UserError(f"--tokenizer has {tokenizer.vocab_size} ids, more than the rows of Pythia {shape}")
    return models.pythia(shape)


def texts_of(case: Case, tokenizer) -> list[str]:
    """Prompts that fit into query_length, in order; synthetic ones are posts in a row, as many as fit."""
    if case.prompts == "synthetic":
        return synthetic_texts(case, tokenizer)
    found = []
    with open(case.prompts, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found.append(json.loads(line)["prompt"])
            except (ValueError, KeyError, TypeError):
                raise UserError(f"--prompts {case.prompts}, line {number}: no JSON object with 'prompt'") from None
    ids = tokenizer.encode_batch(found)
    return [text for text, tokens in zip(found, ids) if 0 < len(tokens) <= case.query_length]


def synthetic_texts(case: Case, tokenizer) -> list[str]:
    """4 batches of posts, one after another up to query_length."""
    posts = iter([row["prompt"] for row in synthetic.prompts(4096)])
    found: list[str] = []
    while len(found) < 4 * case.prompts_per_update:
        text, post = "", next(posts, None)
        while post is not None and len(tokenizer.encode(text + post)) <= case.query_length:
            text, post = text + post + "\n\n", next(posts, None)
        if post is None:
            break
        found += [text.rstrip()] if text else []
    return found


def prepare(case: Case, work: Path, pairs: int) -> tuple[models.Model, list[list[int]]]:
    """Writes case, prompts and starting models to `work`: (policy's model, prompt lengths of each pair's batch).

    Raises:
      UserError: too few prompts fit.
    """
    tokenizer = data.load_tokenizer(case.tokenizer)
    model = model_of(case.shape, tokenizer)
    texts, count = texts_of(case, tokenizer), case.prompts_per_update
    if len(texts) < count:
        raise UserError(
            f"--prompts {case.prompts} has {len(texts)} prompts of at most {case.query_length} tokens, an update needs "
            f"{count}: raise --query_length or lower --batch"
        )
    lengths = []
    for pair in range(pairs):
        chosen = [texts[(pair * count + i) % len(texts)] for i in range(count)]
        lengths.append([len(ids) for ids in tokenizer.encode_batch(chosen)])
        lines = "".join(json.dumps({"prompt": text}) + "\n" for text in chosen)
        (work / f"prompts-{pair}.jsonl").write_text(lines, encoding="utf-8")
    case.write(work)
    ids = {"pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.eos_id}
    for seed, (folder, kind) in enumerate((("policy", "causal"), ("reward", "scalar"))):
        params = jax.device_get(model.init(jax.random.key(seed), heads=(kind,)))
        hf.save(work / "start" / folder, model, params, kind=kind, extra_config=ids)
        data.save_tokenizer(tokenizer, str(work / "start" / folder))
    return model, lengths


# --- measurements


def command(system: str, case: Case, work: Path, pair: int, micro: int | None) -> list[str]:
    """The child's command line; TRL on a GPU goes through `accelerate launch`."""
    launch = [sys.executable]
    if system == "trl" and case.device != "cpu":
        precision = "bf16" if case.dtype == "bfloat16" else "no"
        launch += ["-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
        launch += ["--dynamo_backend", "no", "--mixed_precision", precision]
    words = [str(HERE / f"benchmark_{system}.py"), str(work), "--pair", str(pair)]
    return launch + words + ([] if micro is None else ["--micro", str(micro)])


def environment(case: Case) -> dict[str, str]:
    """Of the children: no hub, no stored programs, threads as many as cores."""
    env = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    paths = (str(HERE.parent), env.get("PYTHONPATH"))
    env |= {"OMP_NUM_THREADS": str(case.cores), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if case.device == "cpu":
        env |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
        env["ACCELERATE_MIXED_PRECISION"] = "bf16" if case.dtype == "bfloat16" else "no"
    return env


def run_child(system: str, case: Case, work: Path, pair: int, micro: int | None) -> dict[str, Any]:
    """One measurement: what the child left, or {"out_of_memory": how}.

    Raises:
      UserError: the child failed; with the end of its log.
    """
    log, left = work / f"{system}-{pair}.log", work / f"{system}-{pair}.json"
    left.unlink(missing_ok=True)
    with log.open("w", encoding="utf-8") as file:
        words = command(system, case, work, pair, micro)
        code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, env=environment(case)).returncode
    if code in KILLED:
        return {"out_of_memory": "killed"}
    if code or not left.exists():
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
        raise UserError(f"the process of {system} failed with code {code}; the end of its log:\n{end}")
    return json.loads(left.read_text(encoding="utf-8"))


def measure(system: str, case: Case, work: Path, pair: int, micros: dict[str, int | None], fixed: bool) -> dict:
    """As `run_child`, with the micro-batch halved until it fits; what fits is remembered in `micros`.

    Raises:
      UserError: nothing fits, or the given size (`fixed`) does not.
    """
    least = case.group if system == "ours" else 1
    while True:
        result = run_child(system, case, work, pair, micros[system])
        if "out_of_memory" not in result:
            return result
        rows = micros[system] or case.batch
        if fixed or rows % 2 or rows // 2 < least:
            raise UserError(f"{system} runs out of memory with micro-batches of {rows}: {result['out_of_memory']}")
        micros[system] = rows // 2
        print(f"{system}: micro-batches of {rows} do not fit; trying {rows // 2}", flush=True)


# --- the whole


def benchmark(args: argparse.Namespace, systems: list[str], work: Path) -> int:
    """Everything: 0, or 1 where a ratio is below its bound."""
    device = "cuda" if args.device == "auto" and "trl" in systems and has_cuda() else args.device
    if device == "auto":
        device = "cpu" if "trl" in systems else "default"
    profile = str(Path(args.profile).resolve()) if args.profile else None
    same = {field: getattr(args, field) for field in Case.__dataclass_fields__ if field in vars(args)}
    case = Case(**{**same, "device": device, "profile": profile})
    if args.check:
        below(stored(args.baseline), case, {name: {"median": float("inf")} for name in ("speed", "memory")})
    work.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine(), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    about["command"] = shlex.join([Path(sys.executable).name, *sys.argv])
    model, lengths = prepare(case, work, args.pairs)
    shape = benchmark_work.Shape.of(model.config)
    micros, pairs = {"ours": args.micro, "trl": args.trl_micro}, []
    fixed = {name: rows is not None for name, rows in micros.items()}
    for pair in range(args.pairs):
        pairs.append({name: measure(name, case, work, pair, micros, fixed[name]) for name in systems})
        kinds = {result["device"] for result in pairs[-1].values()}
        if len(kinds) > 1:
            raise UserError(f"the systems ran on {' and '.join(sorted(kinds))}: install both for one, or --device cpu")
    table = phase_table(case, shape, pairs, lengths)
    print("\n".join(filter(None, (report(case, pairs, table), busy(about["machine"])))), flush=True)
    both = set(systems) == set(SYSTEMS) and "updates" in pairs[0]["ours"]
    each = ratios(pairs) if both else []
    found = {name: spread([row[name] for row in each]) for name in (each[0] if each else ())}
    if args.json:
        whole = {"case": case.name, "options": vars(case), **about, "pairs": pairs, "phases": table}
        whole |= {"prompt_tokens": lengths, "ratios": each, "ratio": found}
        whole["forward_flops"] = benchmark_work.both_counts(model, case.batch, case.query_length + case.response_length)
        write_atomically(str(args.json), logger.json_text(whole, indent=2) + "\n")
    if args.check:
        problems = below(stored(args.baseline), case, found)
        print("\n".join(problems) or "no ratio is below its bound")
        return int(bool(problems))
    if args.baseline:
        keep(args.baseline, case, found, about)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 when done, 1 below a bound, 2 with an explanation when something the user gave is wrong."""
    args = parse(argv)
    try:
        systems = check(args)
        jax.config.update("jax_platforms", "cpu")  # a GPU is for the children
        if args.work is not None:
            return benchmark(args, systems, args.work.resolve())
        with tempfile.TemporaryDirectory() as folder:
            return benchmark(args, systems, Path(folder))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
