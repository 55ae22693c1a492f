"""Compares learning with the options for long and uneven responses on and off: GRPO of sums whose worked solutions
differ in length.

    python scripts/bench/uneven_learning.py --work runs/uneven --seeds 3

The task is quickstart_math's with sums of 3 to 28 numbers, few of them long: 3 plus a geometric number of terms with
mean 4. For each seed SFT makes a policy, from which four runs of GRPO start: `off`; `same tokens`, with slots, a
shrinking batch, the longest prompts first and drafts; `int8`, which also has an int8 cache with the correction for the
sampler, and micro-batches of tokens; `partial`, which has partial rollouts in place of the int8 cache. The runs of a
seed take turns, one process at a time. A last run, `partial` of seed 0, is killed --kills times at random moments and
resumed; its models and metrics must equal those of the first.

Finished runs are kept in WORK, so that an interrupted call resumes. Prints a table; exit code 1 if the first update of
`same tokens` differs from that of `off`, or the killed run from the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_jax import UserError
from rlhf_jax.config import StageConfig, stages_of
from rlhf_jax.config import files as config_files
from rlhf_jax.data import arithmetic
from rlhf_jax.metrics import logger, statistics
from rlhf_jax.utils.strict_json import json_text

MOST_TERMS, MEAN_MORE_TERMS = 28, 4
QUERY, RESPONSE = 60, 176
SAME_TOKENS: dict[str, Any] = {"decode_slots": 32, "decode_shrink": True, "draft": "ngram"}
TOKENS: dict[str, Any] = {**SAME_TOKENS, "micro_batch_size": None, "micro_batch_tokens": 8 * (QUERY + RESPONSE)}
INT8 = {
    "kv_cache_dtype": "int8",
    "importance_sampling_correction": True,
    "importance_sampling_mode": "token_truncate",
}
# Partial rollouts learn from the sampler's log-probabilities, with which there is nothing to correct for int8.
SIDES: dict[str, dict[str, Any]] = {
    "off": {"decode_shrink": False},
    "same tokens": SAME_TOKENS,
    "int8": {**TOKENS, **INT8},
    "partial": {**TOKENS, "old_logprobs": "sampler", "rollout_max_steps": 192},
}
ACCURACY, LENGTH = "eval_rewards/exact_match_reward/mean", "eval_completions/mean_length"
HELD_OUT = 1024
SPLITS = ("train", "validation")
FIRST = ("off", "same_tokens")
COMPARED = ("metrics.jsonl", "policy/model.safetensors")


# --- the task


def uneven_problem(rng: np.random.Generator, split: str) -> arithmetic.Problem:
    """A sum of 3 to MOST_TERMS numbers of a split, whose partial sums are words of the tokenizer, with wrong steps
    too."""
    while True:
        count = min(arithmetic.MIN_TERMS - 1 + int(rng.geometric(1 / (1 + MEAN_MORE_TERMS))), MOST_TERMS)
        problem = arithmetic.random_problem(rng, count)
        small = max(np.cumsum(problem.terms)) < arithmetic.LARGEST_RESULT - 2 * max(arithmetic.ERRORS)
        if small and arithmetic.assigned_split(problem.expression) == split:
            return problem


def write_split(folder: Path, split: str, size: int) -> None:
    """SPLIT.jsonl, JSON lines {"prompt", "completion", "solution"}. Splits share no sum."""
    rows = []
    for number in range(size):
        rng = np.random.default_rng([SPLITS.index(split), number])
        problem = uneven_problem(rng, split)
        completion = arithmetic.make_solution(problem, rng)
        rows.append({"prompt": problem.prompt, "completion": completion, "solution": problem.solution})
    (folder / f"{split}.jsonl").write_text("".join(json_text(row) + "\n" for row in rows), encoding="utf-8")


# --- runs


def run(words: list[str], log: Path) -> None:
    """A process.

    Raises:
      UserError: it failed; quotes the end of its log.
    """
    with log.open("a", encoding="utf-8") as file:
        code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        end = "\n".join(log.read_text(encoding="utf-8").splitlines()[-12:])
        raise UserError(f"a run ended with code {code}; the end of {log}:\n{end}")


def command(config: StageConfig, run_dir: Path) -> list[str]:
    """`rlhf_jax.train` with a config, which is written beside the run's folder."""
    path = run_dir.with_name(f"{run_dir.name}.config.json")
    path.write_text(config_files.to_json(dataclasses.replace(config, run_dir=str(run_dir))), encoding="utf-8")
    return [sys.executable, "-m", "rlhf_jax.train", "--config", str(path)]


def configs(args: argparse.Namespace, seed: int) -> tuple[StageConfig, dict[str, StageConfig]]:
    """SFT of a seed, and GRPO of each side."""
    stages, length = stages_of(config_files.load_config("quickstart_math.py")), QUERY + RESPONSE
    data = {"dataset_name": str(args.work / "data"), "seed": seed, "query_length": QUERY}
    sizes = {"max_length": length, "length_buckets": (64, 96, length), "max_steps": args.sft_updates}
    sft = dataclasses.replace(stages["sft"], **data, **sizes)
    grpo = dataclasses.replace(
        stages["grpo"],
        **data,
        sft_model_path=str(args.work / f"sft{seed}" / "policy"),
        length_buckets=(QUERY,),
        response_length=RESPONSE,
        total_episodes=128 * args.updates,
        max_eval_samples=HELD_OUT,
        save_steps=20,
        log_completions=True,
        logging_steps=1,
    )
    return sft, {side: dataclasses.replace(grpo, **options) for side, options in SIDES.items()}


def killed_run(words: list[str], log: Path, kills: int, seconds: float) -> int:
    """Runs a command to its end, killed up to `kills` times before, after random parts of `seconds`: the kills."""
    moments, hits = random.Random(0), 0
    for _ in range(kills):
        with log.open("a", encoding="utf-8") as file:
            process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
            try:
                process.wait(timeout=moments.uniform(0.2, 0.6) * seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                hits += 1
    run(words, log)
    return hits


# --- results


def first_update(folder: Path) -> tuple[list[str], dict[str, float]]:
    """The logged responses of the first update, and its metrics."""
    rows = [json.loads(line) for line in (folder / "completions" / "training_1.jsonl").read_text().splitlines()]
    return [row["completion"] for row in rows], logger.read_metrics(str(folder / "metrics.jsonl"))[0]


def differences(off: Path, on: Path) -> list[str]:
    """How the first updates of two runs differ: other responses, metrics by more than 1e-4."""
    (texts, metrics), (other_texts, other_metrics) = first_update(off), first_update(on)
    found = [] if texts == other_texts else ["other responses"]
    for name in sorted(metrics.keys() & other_metrics.keys()):
        # How far the sampler's log-probabilities are from the learner's is rounding itself: 1e-4 nats there.
        least = 1.0 if name.startswith("sampling/sampling_logp_difference") else 0.01
        if abs(metrics[name] - other_metrics[name]) > 1e-4 * max(abs(metrics[name]), least):
            found.append(f"{name}: {metrics[name]} and {other_metrics[name]}")
    return found


def result(folder: Path) -> dict[str, float]:
    """Accuracy of the final policy on the held-out sums, its mean response, seconds of all updates but compiling."""
    metrics = json.loads((folder / "finished.json").read_text())["metrics"]
    clocks = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    seconds = [clock["time/step"] - clock["time/compile"] for clock in clocks]
    return {
        "accuracy": metrics[ACCURACY],
        "length": metrics[LENGTH],
        "rollouts": sum(clock["time/generate"] for clock in clocks),
        "updates": sum(seconds),
    }


def table(results: dict[tuple[int, str], dict[str, float]]) -> list[str]:
    """Results of each seed and side, with Wilson's interval of the accuracy."""
    lines = ["| seed | | accuracy | length | seconds of rollouts | of updates |", "|---|---|---|---|---|---|"]
    for (seed, side), row in results.items():
        right = round(row["accuracy"] * HELD_OUT)
        rate, low, high = statistics.wilson([1.0] * right + [0.0] * (HELD_OUT - right))
        numbers = f"{row['length']:.1f} | {row['rollouts']:.0f} | {row['updates']:.0f}"
        lines.append(f"| {seed} | {side} | {rate:.3f} ({low:.3f} to {high:.3f}) | {numbers} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of data and runs")
    parser.add_argument("--seeds", type=int, default=3, help="seeds, from 0; default 3")
    parser.add_argument("--updates", type=int, default=60, help="of GRPO, 128 responses each; default 60")
    parser.add_argument("--sft_updates", type=int, default=1000, help="of SFT; default 1000")
    parser.add_argument("--kills", type=int, default=3, help="of the last run; default 3")
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    data = args.work / "data"
    if not data.exists():
        data.mkdir()
        write_split(data, "train", 16384)
        write_split(data, "validation", HELD_OUT)
    faults: list[str] = []
    try:
        results = {}
        for seed in range(args.seeds):
            sft, grpo = configs(args, seed)
            run(command(sft, args.work / f"sft{seed}"), args.work / "sft.log")
            for side, config in grpo.items():
                folder = args.work / f"{side.replace(' ', '_')}{seed}"
                run(command(config, folder), args.work / "grpo.log")
                results[seed, side] = result(folder)
                print(table(results)[-1], flush=True)
            faults += [f"seed {seed}: {line}" for line in differences(*(args.work / f"{s}{seed}" for s in FIRST))]
        if args.kills:
            whole, killed = args.work / "partial0", args.work / "killed0"
            seconds = sum(result(whole)[part] for part in ("rollouts", "updates"))
            hits = killed_run(
                command(configs(args, 0)[1]["partial"], killed), args.work / "kill.log", args.kills, seconds
            )
            print(f"killed {hits} times")
            same = (name for name in COMPARED if (whole / name).read_bytes() == (killed / name).read_bytes())
            faults += [f"the killed run has another {name}" for name in sorted(set(COMPARED) - set(same))]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([*table(results), *faults]))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
