"""Compares ours with TRL 1.12.0, PPO or RLOO: seconds an update and per phase, memory, and the ratios pair by pair.

    python scripts/bench/benchmark.py --algo ppo --shape 14m --prompts TLDR.jsonl --tokenizer PYTHIA \
        --pairs 3 --json OUT.json

Each measurement is a process of its own. Ours and TRL's alternate, so that other load on the machine affects both. Both
start from the same random weights and get the same batch of prompts at every update of a pair. There is no stop token:
every response has full length, so both do the same work. Ours runs `rlhf_jax.train.train`'s loop; TRL runs its own
trainer with sdpa attention, no gradient checkpointing and torch on all given cores. The seconds of an update are the
median without the first update, which compiles (ours) or warms up (TRL).

The micro-batch size is the user's choice, so each system is measured at its fastest: before the pairs, every size of
--micro and --trl_micro (default 1, 2, 4 and the whole batch) gets one process. The report lists seconds and peak memory
of every size tried, and marks the fastest, which the pairs use, and the one with the least memory. Sizes that do not
fit into memory are reported and skipped.

MFU is the work of `rlhf_jax.stages.work` divided by seconds and by the fastest matrix product that either library
reached on the machine. Padding and repeated prompts are not counted as work. TRL's RLOO scores decoded text, whose
tokens can differ from the sampled ones, and truncates a response at a sampled eos. TRL's `update` is the rest of an
update after its other phases, including logging and data.

On a GPU (`accelerate launch --mixed_precision`) both keep float32 weights and use tf32. TRL's PPO samples and evaluates
values outside of mixed precision; its frozen models are loaded in bfloat16.

--profile DIR writes a trace of one of our updates for TensorBoard or Perfetto. --baseline FILE stores the ratios, with
bounds at 60 % of the lowest; with --check the ratios are compared with the bounds stored there (exit code 1 if one is
lower).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from benchmark_case import Case, available_cores
from benchmark_report import (
    SYSTEMS,
    about_this_run,
    bounds_of,
    checked_or_stored,
    load_warning,
    peak_of,
    phase_table,
    ratios,
    report,
    seconds_of,
    spread,
    trial_table,
    verdict,
)

from rlhf_jax import UserError, data, models
from rlhf_jax.data import synthetic
from rlhf_jax.models.families.gpt_neox import PYTHIA_SHAPES
from rlhf_jax.models.io import hf
from rlhf_jax.runtime.run_folder import write_atomically
from rlhf_jax.stages.work import Shape
from rlhf_jax.utils.strict_json import json_text

HERE = Path(__file__).resolve().parent
KILLED = (-9, 137)  # by the kernel, out of memory
MICRO_BATCHES = (1, 2, 4)  # rows; the whole batch is tried too


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=("ppo", "rloo"), default="ppo")
    parser.add_argument("--shape", default="14m", help="a Pythia size, or [FAMILY:]LAYERSxWIDTHxHEADS[xKV][@ROWS]")
    counts = [("batch", 16, "responses an update"), ("epochs", 4, "update epochs over them")]
    counts += [("query_length", 512, "maximum tokens of a prompt"), ("response_length", 53, "tokens of each response")]
    counts += [("num_generations", 4, "RLOO: responses to a prompt"), ("updates", 3, "updates of each process")]
    for name, default, text in (*counts, ("pairs", 3, "measured processes of each system")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text}; default {default}")
    parser.add_argument("--lora_r", type=int, default=0, help="LoRA rank on all linear layers; 0: full training")
    text = "our value model with --lora_r; TRL always trains its value model in full"
    parser.add_argument("--lora_value", choices=("full", "own", "shared"), default="full", help=text)
    text = "micro-batch sizes to try for {}, in rows; default: 1, 2, 4 and the whole batch"
    for name, system in (("micro", "ours"), ("trl_micro", "TRL")):
        parser.add_argument(f"--{name}", type=int, nargs="+", metavar="ROWS", help=text.format(system))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of computation")
    text = "of ours: attn_implementation"
    parser.add_argument("--attn_implementation", choices=("auto", "blocked", "cudnn"), default="auto", help=text)
    parser.add_argument("--deterministic", action="store_true", help="of ours: the option of that name")
    parser.add_argument("--prompts", default="synthetic", help="JSON Lines file with a 'prompt' field, or 'synthetic'")
    parser.add_argument("--tokenizer", default="synthetic", help="folder with tokenizer.json, or 'synthetic'")
    parser.add_argument("--systems", default="ours,trl", help="comma-separated: ours, trl")
    text = "auto: a GPU where there is one; cuda: a GPU, or an error where torch sees none for TRL"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=text)
    parser.add_argument("--cores", type=int, default=available_cores(), help="cores per process")
    parser.add_argument("--profile", metavar="DIR", help="write a trace of one of our updates")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="JSON file of ratios and bounds")
    parser.add_argument("--check", action="store_true", help="compare the ratios with the bounds in --baseline")
    parser.add_argument("--predict", action="store_true", help="of ours: memory and seconds as a dry run predicts them")
    text = "folder for models, prompts and logs; models that it has of the shape are used; default: temporary"
    parser.add_argument("--work", type=Path, help=text)
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> list[str]:
    """The systems to run.

    Raises:
      UserError: an option is invalid.
    """
    systems = args.systems.split(",")
    least = {"batch": 1, "epochs": 1, "query_length": 1, "response_length": 2, "updates": 2, "pairs": 1, "cores": 1}
    for name, minimum in least.items():
        if getattr(args, name) < minimum:
            why = "; the first update is not counted" if name == "updates" else ""
            raise UserError(f"--{name} {getattr(args, name)}: give {minimum} or more{why}")
    if not set(systems) <= set(SYSTEMS):
        raise UserError(f"--systems {args.systems}: give ours, trl, or ours,trl")
    if args.algo == "rloo" and (args.num_generations < 2 or args.batch % args.num_generations):
        raise UserError(
            f"--batch {args.batch} must be a multiple of --num_generations {args.num_generations}, 2 or more"
        )
    for name in ("micro", "trl_micro"):
        for rows in getattr(args, name) or ():
            if rows < 1 or args.batch % rows:
                raise UserError(f"--{name} {rows} must divide --batch {args.batch}")
    if args.prompts != "synthetic" and args.tokenizer == "synthetic":
        raise UserError("--prompts FILE needs --tokenizer: the synthetic tokenizer has a few dozen words only")
    if args.prompts != "synthetic" and not Path(args.prompts).is_file():
        raise UserError(f"--prompts {args.prompts}: no such file")
    if args.check and (args.baseline is None or set(systems) != set(SYSTEMS)):
        raise UserError("--check needs --baseline FILE and both systems")
    if "trl" in systems and importlib.util.find_spec("trl") is None:
        raise UserError("TRL is not installed: pip install trl==1.12.0 torch, or measure only ours with --systems ours")
    return systems


def has_cuda() -> bool:
    """Whether torch sees a GPU; runs in another process, so that this one does not hold it."""
    test = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", test]).returncode == 0


# --- inputs of both systems


def model_of(shape: str, tokenizer):
    """Model of a shape: a Pythia size with its published vocabulary rows, or [FAMILY:]LAYERSxWIDTHxHEADS[xKV][@ROWS].

    Raises:
      UserError: unknown shape, or the tokenizer has more ids than the model has rows.
    """
    rows = 128 * -(-tokenizer.vocab_size // 128)
    if "@" in shape:
        shape, given = shape.rsplit("@", 1)
        if not given.isdecimal() or int(given) < rows:
            raise UserError(f"--shape ...@{given}: the tokenizer needs {rows} vocabulary rows or more")
        return models.custom_shape(shape, int(given))
    if "x" in shape:
        return models.custom_shape(shape, rows)
    if shape in PYTHIA_SHAPES and rows > PYTHIA_SHAPES[shape][3]:
        raise UserError(f"--tokenizer has {tokenizer.vocab_size} ids, more than Pythia {shape} has vocabulary rows")
    return models.pythia(shape)


def texts_of(case: Case, tokenizer) -> list[str]:
    """Prompts that fit into query_length, in order; synthetic prompts are concatenated posts."""
    if case.prompts == "synthetic":
        return synthetic_texts(case, tokenizer)
    texts = []
    with open(case.prompts, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                texts.append(json.loads(line)["prompt"])
            except (ValueError, KeyError, TypeError):
                raise UserError(f"--prompts {case.prompts}, line {number}: not a JSON object with 'prompt'") from None
    ids = tokenizer.encode_batch(texts)
    return [text for text, tokens in zip(texts, ids) if 0 < len(tokens) <= case.query_length]


def synthetic_texts(case: Case, tokenizer) -> list[str]:
    """Prompts for 4 batches, each of as many posts as fit into query_length."""
    posts = iter([row["prompt"] for row in synthetic.prompts(4096)])
    prompts: list[str] = []
    while len(prompts) < 4 * case.prompts_per_update:
        text, post = "", next(posts, None)
        while post is not None and len(tokenizer.encode(text + post)) <= case.query_length:
            text, post = text + post + "\n\n", next(posts, None)
        if post is None:
            break
        prompts += [text.rstrip()] if text else []
    return prompts


def prepare(case: Case, work: Path, pairs: int) -> tuple[models.Model, list[list[int]]]:
    """Writes case, prompts and initial models to `work`; returns (policy model, prompt lengths of each pair's batch).

    Raises:
      UserError: too few prompts fit.
    """
    tokenizer = data.load_tokenizer(case.tokenizer)
    model = model_of(case.shape, tokenizer)
    texts, count = texts_of(case, tokenizer), case.prompts_per_update
    if len(texts) < count:
        raise UserError(
            f"--prompts {case.prompts} has {len(texts)} prompts of at most {case.query_length} tokens; an update needs "
            f"{count}: raise --query_length or lower --batch"
        )
    lengths = []
    for pair in range(pairs):
        chosen = [texts[(pair * count + i) % len(texts)] for i in range(count)]
        lengths.append([len(ids) for ids in tokenizer.encode_batch(chosen)])
        lines = "".join(json.dumps({"prompt": text}) + "\n" for text in chosen)
        (work / f"prompts-{pair}.jsonl").write_text(lines, encoding="utf-8")
    case.write(work)
    mark, contents = work / "start/shape.json", json.dumps([case.shape, case.tokenizer])  # written last
    if mark.is_file() and mark.read_text(encoding="utf-8") == contents:
        return model, lengths
    ids = {"pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.eos_id}
    for seed, (folder, kind) in enumerate((("policy", "causal"), ("reward", "scalar"))):
        params = jax.device_get(model.init(jax.random.key(seed), heads=(kind,)))
        hf.save(work / "start" / folder, model, params, kind=kind, extra_config=ids)
        data.save_tokenizer(tokenizer, str(work / "start" / folder))
    mark.write_text(contents, encoding="utf-8")
    return model, lengths


# --- measurements


def command(system: str, case: Case, work: Path, pair: int, micro: int, name: str) -> list[str]:
    """Command line of a child process; TRL on a GPU runs under `accelerate launch`."""
    launch = [sys.executable]
    if system == "trl" and case.device != "cpu":
        precision = "bf16" if case.dtype == "bfloat16" else "no"
        launch += ["-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
        launch += ["--dynamo_backend", "no", "--mixed_precision", precision]
    words = [str(HERE / f"benchmark_{system}.py"), str(work), "--pair", str(pair), "--name", name]
    return [*launch, *words, "--micro", str(micro)]


def environment(case: Case) -> dict[str, str]:
    """Environment of the children: no hub, no cache of compiled programs, one thread per core."""
    env = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    paths = (str(HERE.parents[1]), env.get("PYTHONPATH"))
    env |= {"OMP_NUM_THREADS": str(case.cores), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if case.device == "cpu":
        env |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
        env["ACCELERATE_MIXED_PRECISION"] = "bf16" if case.dtype == "bfloat16" else "no"
    return env


def run_child(system: str, case: Case, work: Path, pair: int, micro: int, name: str | None = None) -> dict[str, Any]:
    """One measurement in a child process; its result, or {"out_of_memory": reason}.

    Args:
      system: 'ours' or 'trl'.
      case, work: as in `prepare`.
      pair: number of the batch of prompts.
      micro: rows of a micro-batch.
      name: of the child's files in `work`; default: the pair's number.

    Raises:
      UserError: the child failed; quotes the end of its log.
    """
    name = str(pair) if name is None else name
    result = result_of(command(system, case, work, pair, micro, name), environment(case), work / f"{system}-{name}")
    return {"out_of_memory": "killed"} if result is None else result


def result_of(words: Sequence[str], env: dict[str, str], path: Path) -> dict[str, Any] | None:
    """What a child process wrote to PATH.json, with its output in PATH.log; None: killed, out of memory.

    Raises:
      UserError: it failed; quotes the end of its log.
    """
    log, result = path.with_name(f"{path.name}.log"), path.with_name(f"{path.name}.json")
    result.unlink(missing_ok=True)
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, env=env).returncode
    if code in KILLED:
        return None
    if code or not result.exists():
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
        raise UserError(f"the process {path.name} failed with code {code}; the end of its log:\n{end}")
    return json.loads(result.read_text(encoding="utf-8"))


def sizes_to_try(system: str, case: Case, given: Sequence[int] | None) -> list[int]:
    """Micro-batch sizes: the given ones, or 1, 2, 4 and the whole batch where they divide it; ours hold whole groups.

    Raises:
      UserError: a given size splits a group of ours.
    """
    unit = case.group if system == "ours" else 1
    if given:
        for rows in given:
            if rows % unit:
                raise UserError(f"--micro {rows} must be a multiple of --num_generations {unit}")
        return sorted(set(given))
    return sorted({rows for rows in (*MICRO_BATCHES, case.batch) if not (case.batch % rows or rows % unit)})


def try_sizes(system: str, case: Case, work: Path, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """A process for each size: {"system", "micro", "seconds", "peak_mib"}, or "out_of_memory" instead of figures."""
    dataclasses.replace(case, profile=None).write(work)
    rows = []
    for micro in sizes:
        result = run_child(system, case, work, 0, micro, f"micro-{micro}")
        row = {"system": system, "micro": micro}
        if "out_of_memory" in result:
            row |= {"out_of_memory": result["out_of_memory"]}
        else:
            row |= {"seconds": seconds_of(result), "peak_mib": peak_of(result)}
        rows.append(row)
    case.write(work)
    return rows


def choose_size(system: str, trials: Sequence[dict[str, Any]]) -> int:
    """The fastest of the sizes that fit.

    Raises:
      UserError: none fits.
    """
    fitting = [row for row in trials if "seconds" in row]
    if not fitting:
        sizes = ", ".join(str(row["micro"]) for row in trials)
        raise UserError(f"{system} runs out of memory with micro-batches of {sizes}: {trials[-1]['out_of_memory']}")
    return min(fitting, key=lambda row: row["seconds"])["micro"]


def measure(system: str, case: Case, work: Path, pair: int, micro: int) -> dict[str, Any]:
    """`run_child`, with running out of memory as an error.

    Raises:
      UserError: it does not fit into memory.
    """
    result = run_child(system, case, work, pair, micro)
    if "out_of_memory" in result:
        raise UserError(f"{system} runs out of memory with micro-batches of {micro}: {result['out_of_memory']}")
    return result


# --- command


def benchmark(args: argparse.Namespace, systems: list[str], work: Path) -> int:
    """Runs the benchmark: 0, or 1 if a ratio is below its bound."""
    cuda = "trl" in systems and args.device != "cpu" and has_cuda()
    if args.device == "cuda" and "trl" in systems and not cuda:
        raise UserError("--device cuda: torch sees no GPU; install torch for CUDA, or measure with --systems ours")
    device = "cuda" if cuda else args.device
    if device == "auto":
        device = "cpu" if "trl" in systems else "default"
    profile = str(Path(args.profile).resolve()) if args.profile else None
    same = {field: getattr(args, field) for field in Case.__dataclass_fields__ if field in vars(args)}
    case = Case(**{**same, "device": device, "profile": profile})
    if args.check:
        bounds_of(args.baseline, case)  # before minutes of measuring
    work.mkdir(parents=True, exist_ok=True)
    about = about_this_run()
    model, lengths = prepare(case, work, args.pairs)
    shape = Shape.of(model)
    given, trials, micro, pairs = {"ours": args.micro, "trl": args.trl_micro}, [], {}, []
    for name in systems:
        sizes = sizes_to_try(name, case, given[name])
        if len(sizes) == 1:
            (micro[name],) = sizes
        else:
            trials += (tried := try_sizes(name, case, work, sizes))
            micro[name] = choose_size(name, tried)
    if trials:
        print(trial_table(trials) + "\n", flush=True)
    for pair in range(args.pairs):
        pairs.append({name: measure(name, case, work, pair, micro[name]) for name in systems})
        kinds = {result["device"] for result in pairs[-1].values()}
        if len(kinds) > 1:
            raise UserError(
                f"the systems ran on {' and '.join(sorted(kinds))}: use --device cpu, or install both for one"
            )
    table = phase_table(case, shape, pairs, lengths)
    print("\n".join(filter(None, (report(case, pairs, table), load_warning(about["machine"])))), flush=True)
    each = ratios(pairs) if set(systems) == set(SYSTEMS) else []
    ratio = {name: spread([row[name] for row in each]) for name in (each[0] if each else ())}
    if args.json:
        whole = {"case": case.name, "options": vars(case), **about, "trials": trials, "pairs": pairs}
        whole |= {"phases": table, "prompt_tokens": lengths, "ratios": each, "ratio": ratio}
        write_atomically(str(args.json), json_text(whole, indent=2) + "\n")
    problems = checked_or_stored(args, case, ratio, about)
    return verdict(problems) if args.check else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 1: a ratio is below its bound; 2: wrong options or a failed process."""
    args = parse(argv)
    try:
        systems = check(args)
        jax.config.update("jax_platforms", "cpu")  # leave a GPU to the children
        if args.work is not None:
            return benchmark(args, systems, args.work.resolve())
        with tempfile.TemporaryDirectory() as folder:
            return benchmark(args, systems, Path(folder))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
