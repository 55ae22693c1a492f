"""Does ours learn as TRL's does? PPO and RLOO of both, from one SFT policy and one reward model, over several seeds.

    python scripts/parity/learning_parity.py all --work runs/parity --seeds 5 --picture docs/learning_parity.png

The task is the quickstart's. `prepare` trains SFT policy and reward model, `run` is one run of one system, `evaluate`
samples from every final policy on the same held-out prompts, `report` prints Markdown and draws the curves, `all` does
whatever of these is missing, one process at a time. Finished runs are lines of WORK/runs.jsonl, figures of their
policies lines of WORK/evaluations.jsonl; what is there is not done again.

Needs trl==1.12.0 (with torch and requests) for TRL's runs and matplotlib for the picture. What differs still: the order
of prompts and minibatches (RLOO: TRL shuffles rows, ours groups), and where the score of a batch's longest response
lands (TRL has no column after it).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

import jax
import numpy as np

from rlhf_jax import UserError, evaluate
from rlhf_jax.config import PolicyConfig, StageConfig, stages_of
from rlhf_jax.config import files as config_files
from rlhf_jax.metrics import logger
from rlhf_jax.runtime.run_folder import write_atomically
from rlhf_jax.utils.strict_json import json_text

SYSTEMS, TRAINERS = ("ours", "trl"), ("ppo", "rloo")
NAMES = {"ours": "rlhf_jax", "trl": "TRL", "ppo": "PPO", "rloo": "RLOO"}
QUICKSTART = {"ppo": "quickstart.py", "rloo": "quickstart_rloo.py"}
MARGIN, CONFIDENCE = 0.15, 0.9  # of TRL's gain; of the interval
UPDATES, PROMPTS = 48, 4096  # the quickstart's; held out

# Options that TRL has by our names, and those that it says otherwise.
ADAM = ("learning_rate", "lr_scheduler_type", "warmup_steps", "adam_beta1", "adam_beta2", "adam_epsilon")
SAME = (*ADAM, "weight_decay", "temperature")
OTHERWISE = ("batch_size", "num_mini_batches", "total_episodes", "max_grad_norm", "response_length")
OWN = {
    "ppo": ("num_ppo_epochs", "kl_coef", "kl_estimator", "cliprange", "cliprange_value", "vf_coef", "gamma", "lam")
    + ("whiten_rewards", "stop_token"),
    "rloo": ("num_generations", "num_iterations", "beta", "epsilon", "normalize_advantages"),
}


class Run(NamedTuple):
    """Which run."""

    trainer: str
    system: str
    seed: int
    updates: int

    @property
    def name(self) -> str:
        """Of its folder and its lines."""
        return f"{self.trainer}-{self.system}-{self.updates}updates-seed{self.seed}"


def quickstart(trainer: str, work: Path) -> dict[str, StageConfig]:
    """The quickstart's stages by name, with its models in WORK/start."""
    return stages_of(dataclasses.replace(config_files.load_config(QUICKSTART[trainer]), run_dir=str(work / "start")))


def settings(trainer: str, updates: int) -> dict[str, Any]:
    """The hyper-parameters of both systems, by our names: the quickstart's, but for length and clipping.

    TRL's PPO never clips gradients, whatever it is told, so ours does not; its RLOO does, and so does ours.
    """
    stage = quickstart(trainer, Path())[trainer]
    values = {name: getattr(stage, name) for name in (*SAME, *OTHERWISE, "missing_eos_penalty", *OWN[trainer])}
    clip = None if trainer == "ppo" else 1.0
    return {**values, "total_episodes": updates * stage.batch_size, "max_grad_norm": clip}


def our_config(run: Run, work: Path) -> PolicyConfig:
    """Our config of a run: the settings, and those choices of ours that are TRL's behaviour."""
    # A minibatch is one micro-batch, so TRL's mean of micro-batch means is the mean over all tokens.
    ppo = {"loss_aggregation": "token_mean_micro", "whiten_ddof": 1, "score_position": "after_eos"}
    rloo = {"lr_scheduler_unit": "optimizer_step", "reshuffle": "once", "policy_loss": "clipped"}
    own = {**(ppo if run.trainer == "ppo" else rloo), "eos_penalty_mode": "subtract", "metrics": "trl"}
    # `evaluate` looks at all policies in one way; a run itself only learns.
    quiet = {"dataset_test_split": None, "num_sample_generations": 0, "save_steps": 0, "report_to": ()}
    folder = str(work / "runs" / run.name)
    values = {**settings(run.trainer, run.updates), **own, **quiet, "seed": run.seed, "run_dir": folder}
    return dataclasses.replace(quickstart(run.trainer, work)[run.trainer], **values)


def trl_options(run: Run, scratch: str) -> dict[str, Any]:
    """Arguments of TRL's PPOConfig or RLOOConfig that say what `settings` does.

    A minibatch is one micro-batch: with accumulation TRL's PPO would make one optimizer step an epoch.
    """
    v = settings(run.trainer, run.updates)
    quiet = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [], "save_strategy": "no"}
    quiet |= {"output_dir": scratch, "logging_steps": 1, "disable_tqdm": True}
    options = {name: v[name] for name in (*SAME, *OWN[run.trainer])}
    options |= {**quiet, "seed": run.seed, "gradient_accumulation_steps": 1}
    if run.trainer == "ppo":
        names = ("num_mini_batches", "total_episodes", "response_length", "missing_eos_penalty")
        sizes = ("per_device_train_batch_size", "local_rollout_forward_batch_size")
        options |= {**{name: v[name] for name in names}, **dict.fromkeys(sizes, v["batch_size"])}
        return {**options, "num_sample_generations": 0}
    minibatches, steps = v["num_mini_batches"], run.updates * v["num_iterations"] * v["num_mini_batches"]
    sizes = {"per_device_train_batch_size": v["batch_size"] // minibatches, "steps_per_generation": minibatches}
    renamed = {"max_grad_norm": v["max_grad_norm"], "max_completion_length": v["response_length"]}
    return {**options, **sizes, **renamed, "max_steps": steps}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, none where there is no file; a torn last line is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Writes all objects or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(str(path), "".join(json_text(line) + "\n" for line in lines))


def finished(work: Path, run: Run) -> dict[str, Any] | None:
    """The line of a run that was finished with today's settings; None: it is to be done."""
    now = json.loads(json_text(settings(run.trainer, run.updates)))
    lines = lines_of(work / "runs.jsonl")
    return next((line for line in lines if line["name"] == run.name and line["settings"] == now), None)


def planned(seeds: int, updates: int) -> list[Run]:
    """All runs, ours and TRL's in turn, seed by seed: what else happens on the machine hits both."""
    return [Run(trainer, s, seed, updates) for seed in range(seeds) for trainer in TRAINERS for s in SYSTEMS]


def prepare(work: Path) -> None:
    """Trains the SFT policy and the reward model by the quickstart's config; finished ones stay as they are."""
    from rlhf_jax import train

    for name in ("sft", "reward"):
        train.run(quickstart("ppo", work)[name])


def run_one(work: Path, run: Run, cores: int) -> None:
    """One run in this process; then its curve and its line."""
    if finished(work, run) is not None:
        return print(f"{run.name} is finished; nothing to do")
    if not (work / "start/reward/reward_model/config.json").exists():
        raise UserError(f"{work}/start has no SFT policy and reward model: run `learning_parity.py prepare` first")
    jax.config.update("jax_platforms", "cpu")  # where TRL's runs are
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
    record(work, run, (run_ours if run.system == "ours" else run_trl)(work, run))


def record(work: Path, run: Run, curve: list[dict[str, float]]) -> None:
    """Writes a finished run's curve and its line, in place of those of an earlier run of this name."""
    seconds = [p["seconds"] for p in curve]
    line = {"name": run.name, **run._asdict(), "settings": settings(run.trainer, run.updates)}
    line |= {"seconds": sum(seconds), "update_seconds": median(seconds)}
    write_lines(work / "runs" / run.name / "curve.jsonl", curve)
    # Figures of the earlier run are not this policy's.
    for name, new in (("evaluations.jsonl", []), ("runs.jsonl", [line])):
        write_lines(work / name, [old for old in lines_of(work / name) if old["name"] != run.name] + new)


def point(update: int, reward: float, kl: float, seconds: float) -> dict[str, float]:
    """A point of a curve: reward after the penalty for a missing eos, KL in nats a response."""
    return {"update": update, "reward": reward, "kl": kl, "seconds": seconds}


def run_ours(work: Path, run: Run) -> list[dict[str, float]]:
    """Our run; the points of its curve. Its policy goes to WORK/runs/NAME/policy."""
    from rlhf_jax import train

    folder = train.run(our_config(run, work)).run_dir
    found, clock = (logger.read_metrics(f"{folder}/{name}.jsonl") for name in ("metrics", "timings"))
    seconds = {line["step"]: line["step_time"] for line in clock}
    return [point(f["step"], f["objective/scores"], f["objective/kl"], seconds[f["step"]]) for f in found]


def run_trl(work: Path, run: Run) -> list[dict[str, float]]:
    """TRL's run, on the CPU in float32; returns and leaves what `run_ours` does."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # its PPO asks accelerate, not use_cpu
    import torch
    from datasets import Dataset
    from transformers import GPTNeoXForCausalLM, GPTNeoXForSequenceClassification
    from trl import RLOOConfig, RLOOTrainer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    from rlhf_jax.data import load_tokenizer, synthetic

    folder = work / "runs" / run.name
    tokenizer = load_tokenizer(str(work / "start/sft/policy"))
    tokenizer.hf.padding_side = "left"
    prompts = [row["prompt"] for row in synthetic.prompts(synthetic.SIZES["train"])]
    options, values = trl_options(run, str(folder / "trl")), settings(run.trainer, run.updates)
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    np.random.seed(run.seed)  # TRL's PPO shuffles by numpy and does not seed it
    logs, ends = [], []

    def policy():
        return GPTNeoXForCausalLM.from_pretrained(work / "start/sft/policy", dtype=torch.float32)

    def reward():
        return GPTNeoXForSequenceClassification.from_pretrained(work / "start/reward/reward_model", dtype=torch.float32)

    def keeping(base):
        class Keeping(base):
            def log(self, entries, *args):
                super().log(entries, *args)
                if "train_runtime" not in entries:  # the summary at the end is no step
                    logs.append(dict(entries))
                    ends.append(time.perf_counter())

        return Keeping

    trained, steps = policy(), 1
    if run.trainer == "ppo":
        rows = Dataset.from_dict({"input_ids": tokenizer.encode_batch(prompts)})
        models = {"ref_model": policy(), "reward_model": reward(), "value_model": reward()}
        data = {"train_dataset": rows, "eval_dataset": rows.select(range(8)), "processing_class": tokenizer.hf}
        trainer = keeping(PPOTrainer)(args=PPOConfig(**options), model=trained, **models, **data)
    else:
        steps = values["num_iterations"] * values["num_mini_batches"]
        score = token_reward(reward(), tokenizer, values["missing_eos_penalty"])
        data = {"train_dataset": Dataset.from_dict({"prompt": prompts}), "processing_class": tokenizer.hf}
        trainer = keeping(RLOOTrainer)(args=RLOOConfig(**options), model=trained, reward_funcs=[score], **data)
    start = time.perf_counter()
    trainer.train()
    trained.save_pretrained(folder / "policy")
    return trl_curve(run.trainer, logs, [start, *ends], steps)


def trl_curve(trainer: str, logs: Sequence[dict], ends: Sequence[float], steps: int) -> list[dict[str, float]]:
    """TRL's log as points; RLOO logs each of an update's `steps`, and with the first of them what it sampled.

    RLOO's `kl` is a mean over tokens; times the mean length it is the mean over responses of sums, as PPO's.
    """
    seconds = [ends[i + steps] - ends[i] for i in range(0, len(logs), steps)]
    found = list(enumerate(zip(logs[::steps], seconds), 1))
    if trainer == "ppo":
        return [point(i, log["objective/scores"], log["objective/kl"], s) for i, (log, s) in found]
    return [point(i, log["reward"], log["kl"] * log["completions/mean_length"], s) for i, (log, s) in found]


def token_reward(model, tokenizer, penalty: float) -> Callable[..., list[float]]:
    """A reward function for TRL's RLOO that scores the sampled ids at the last of them, eos included, as PPO does.

    TRL itself would give the reward model text without eos, on which it was not trained.
    """
    import torch

    def learned_reward(prompts, completion_ids, **kwargs):
        rows = [torch.tensor(head + tail) for head, tail in zip(tokenizer.encode_batch(prompts), completion_ids)]
        last = torch.tensor([len(row) - 1 for row in rows])
        with torch.inference_mode():  # padding comes after all that is read
            hidden = model.gpt_neox(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)).last_hidden_state
            scores = model.score(hidden[torch.arange(len(rows)), last])[:, 0].tolist()
        return [s - (0.0 if tokenizer.eos_id in tail else penalty) for s, tail in zip(scores, completion_ids)]

    return learned_reward


def evaluate_all(work: Path, updates: int, prompts: int) -> None:
    """Samples from the SFT policy and every final policy, on the same held-out prompts with the same keys."""
    from rlhf_jax.data import synthetic
    from rlhf_jax.stages import open_stage

    names = [line["name"] for line in lines_of(work / "runs.jsonl") if line["updates"] == updates]
    folders = {"sft": work / "start/sft/policy", **{name: work / "runs" / name / "policy" for name in names}}
    path, config = work / "evaluations.jsonl", our_config(Run("ppo", "ours", 0, 1), work)
    config = dataclasses.replace(config, dataset_test_split="validation", max_eval_samples=prompts)
    stage = open_stage(config)
    try:
        for name, folder in folders.items():
            if any(line["name"] == name and line["prompts"] == prompts for line in lines_of(path)):
                continue
            params = stage.weights.load(stage.opened.policy, str(folder), "causal", None)
            found = stage.evaluator.complete(params, stage.evaluator.held_out, prompts, config.temperature)
            reward = found["scores"] - config.missing_eos_penalty * ~found["ended"]
            gold = synthetic.gold_reward(found["prompts"], found["completions"])
            given = {key: found[key] for key in ("kl", "lengths", "ended")}
            row = evaluate.summarize(name, score=reward, gold=gold, **given)
            write_lines(path, [*lines_of(path), {**row, "prompts": prompts}])
            print(evaluate.comparison_table([row]), flush=True)
    finally:
        stage.close()


def welch(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Mean of a - mean of b, and the ends of its interval; variances may differ, a and b have 2 numbers or more.

    source: Welch 1947, The generalization of Student's problem; degrees of freedom by Satterthwaite 1946.
    """
    from scipy import special  # jax needs it too

    if min(len(a), len(b)) < 2:
        raise UserError(f"an interval needs 2 runs or more of each system, not {len(a)} and {len(b)}: more --seeds")
    va, vb = (float(np.var(x, ddof=1)) / len(x) for x in (a, b))
    difference = float(np.mean(a) - np.mean(b))
    if va + vb == 0:
        return difference, difference, difference
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    half = float(special.stdtrit(freedom, (1 + confidence) / 2)) * (va + vb) ** 0.5
    return difference, difference - half, difference + half


def within(low: float, high: float, gain: float) -> bool:
    """Whether the interval lies within ± MARGIN of TRL's gain, all of it; never where TRL gained nothing."""
    return gain > 0 and -MARGIN * gain <= low and high <= MARGIN * gain


def report(work: Path, updates: int, prompts: int, picture: Path | None) -> None:
    """Prints the tables as Markdown and draws the picture."""
    found = {line["name"]: line for line in lines_of(work / "evaluations.jsonl") if line["prompts"] == prompts}
    if "sft" not in found:
        raise UserError(f"{work}/evaluations.jsonl has no SFT policy on {prompts} prompts: run `evaluate` first")
    runs: dict[tuple[str, str], list[dict]] = {(t, s): [] for t in TRAINERS for s in SYSTEMS}
    for line in sorted(lines_of(work / "runs.jsonl"), key=lambda line: line["seed"]):
        run = Run(*(line[name] for name in Run._fields))
        if run.updates == updates and line == finished(work, run) and run.name in found:
            curve = lines_of(work / "runs" / run.name / "curve.jsonl")
            runs[run.trainer, run.system].append({**line, **found[run.name], "curve": curve})
    print(f"{updates} updates; {prompts:,} held-out prompts; ± is the standard deviation over seeds.\n")
    print("| | seeds | final reward | gold reward | KL | length | seconds in all | an update |\n" + "|---" * 8 + "|")
    columns = ("score", "gold_reward", "kl", "length")
    print("| SFT | | " + " | ".join(f"{found['sft'][key]:.3f}" for key in columns) + " | | |")
    for (trainer, system), rows in runs.items():
        if len(rows) > 1:
            several = [[row[key] for row in rows] for key in columns]
            cells = [f"{mean(values):.3f} ± {stdev(values):.3f}" for values in several]
            cells += [f"{median(r['seconds'] for r in rows):.0f}", f"{median(r['update_seconds'] for r in rows):.2f}"]
            print(f"| {NAMES[trainer]}, {NAMES[system]} | {len(rows)} | {' | '.join(cells)} |")
    for kind, key in (("reward", "score"), ("gold reward", "gold_reward")):
        head = f"TRL's gain over SFT | ours - TRL | {CONFIDENCE:.0%} interval | of TRL's gain | within ±{MARGIN:.0%}"
        print(f"\n| {kind} | {head} |\n" + "|---" * 6 + "|")
        for trainer in TRAINERS:
            print(f"| {NAMES[trainer]} | {verdict(runs, trainer, key, found['sft'][key])} |")
    if picture is not None:
        draw(runs, picture)


def verdict(runs: dict[tuple[str, str], list[dict]], trainer: str, key: str, sft: float) -> str:
    """Five cells of the table: gain, difference, interval, its share of the gain, yes or no."""
    ours, trl = ([row[key] for row in runs[trainer, system]] for system in SYSTEMS)
    if min(len(ours), len(trl)) < 2:
        return f"too few seeds: {len(ours)} of ours, {len(trl)} of TRL | | | |"
    gain, (difference, low, high) = mean(trl) - sft, welch(ours, trl)
    share = f"{low / gain:+.1%} to {high / gain:+.1%}" if gain > 0 else "no gain"
    answer = "yes" if within(low, high, gain) else "no"
    return f"{gain:.3f} | {difference:+.3f} | {low:+.3f} to {high:+.3f} | {share} | {answer}"


def draw(runs: dict[tuple[str, str], list[dict]], path: Path) -> None:
    """Curves of reward and KL, mean and one standard deviation over seeds, as a PNG."""
    try:
        from matplotlib.figure import Figure
        from PIL import Image  # matplotlib needs it too
    except ImportError:
        raise UserError("the picture needs matplotlib: pip install matplotlib, or leave --picture away") from None
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    looks = {"ours": {"color": "#0b61a4", "linestyle": "-"}, "trl": {"color": "#d1600a", "linestyle": "--"}}
    for i, (key, label) in enumerate({"reward": "reward (reward model)", "kl": "KL to SFT, nats a response"}.items()):
        axes[i, 0].set_ylabel(label)
        for axis, trainer in zip(axes[i], TRAINERS):
            for system, look in looks.items():
                curves = np.array([[p[key] for p in run["curve"]] for run in runs[trainer, system]])
                if len(curves):
                    x, y = np.arange(1, curves.shape[1] + 1), curves.mean(axis=0)
                    spread = curves.std(axis=0, ddof=min(1, len(curves) - 1))
                    axis.plot(x, y, **look, linewidth=1.8, label=f"{NAMES[system]}, {len(curves)} seeds")
                    axis.fill_between(x, y - spread, y + spread, color=look["color"], alpha=0.2, linewidth=0)
                    axis.legend(loc="lower right")
            axis.set(title=f"{NAMES[trainer]}: {key if key == 'reward' else 'KL'}", xlabel="update" if i else "")
            axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    with Image.open(path) as drawn:  # a palette is a third of the file
        drawn.convert("RGB").quantize(128).save(path, optimize=True)


def run_all(args: argparse.Namespace) -> None:
    """Whatever is missing, one process at a time; a line a run."""

    def child(label: str, *words: Any) -> None:
        log = args.work / "logs" / f"{label}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, *map(str, words), "--work", str(args.work)]
        with log.open("w", encoding="utf-8") as file:
            if subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode:
                raise UserError(f"{label} failed; {log} says why. The same command goes on from here")

    child("prepare", "prepare")
    runs = planned(args.seeds, args.updates)
    for number, run in enumerate(runs, 1):
        if finished(args.work, run) is None:
            which = ("--trainer", run.trainer, "--system", run.system, "--seed", run.seed)
            child(run.name, "run", *which, "--updates", run.updates, "--cores", args.cores)
        line, curve = finished(args.work, run), lines_of(args.work / "runs" / run.name / "curve.jsonl")
        rewards = f"reward {curve[0]['reward']:+.2f} to {curve[-1]['reward']:+.2f}, KL {curve[-1]['kl']:.2f}"
        print(f"[{number}/{len(runs)}] {run.name}: {line['seconds']:.0f} s, {rewards}", flush=True)
    child("evaluate", "evaluate", "--updates", args.updates, "--prompts", args.prompts)
    report(args.work, args.updates, args.prompts, args.picture)


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 when done, 2 with an explanation when something the user gave is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("prepare", "run", "evaluate", "report", "all"))
    parser.add_argument("--work", type=Path, required=True, help="folder of models, runs and figures")
    parser.add_argument("--system", choices=SYSTEMS, default="ours", help="run: whose")
    parser.add_argument("--trainer", choices=TRAINERS, default="ppo", help="run: which")
    numbers = (("seed", 0, "run: its seed"), ("seeds", 5, "all: runs of each trainer and system"))
    numbers += (("updates", UPDATES, "of a run"), ("cores", 1, "that a run may use"))
    for name, default, text in (*numbers, ("prompts", PROMPTS, "held-out prompts of the evaluation")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text}; default {default}")
    parser.add_argument("--picture", type=Path, help="report, all: PNG to draw")
    args = parser.parse_args(argv)
    run = Run(args.trainer, args.system, args.seed, args.updates)
    figures = (args.work, args.updates, args.prompts)
    commands = {"prepare": (prepare, args.work), "run": (run_one, args.work, run, args.cores), "all": (run_all, args)}
    commands |= {"evaluate": (evaluate_all, *figures), "report": (report, *figures, args.picture)}
    function, *given = commands[args.command]
    try:
        function(*given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
