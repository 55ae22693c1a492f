"""Compares learning with TRL: PPO, RLOO and GRPO of both, from the same models, over several seeds.

    python scripts/parity/learning_parity.py all --work runs/parity --seeds 5 --picture docs/learning_parity.png

PPO and RLOO have the quickstart's task, GRPO that of quickstart_math.

`prepare` trains the SFT policies and the reward model, `run` does one run of one system, `evaluate` samples from every
final policy on the same held-out prompts, `report` prints Markdown and plots the curves, `all` does all missing steps,
one process at a time. Finished runs are lines of WORK/runs.jsonl, metrics of their policies lines of
WORK/evaluations.jsonl; neither is computed again.

Needs trl==1.12.0 (with torch and requests) for TRL's runs, and matplotlib for the picture. Remaining differences: the
order of prompts and minibatches (RLOO, GRPO: TRL shuffles rows, ours groups), and PPO's position of the score of a
batch's longest response (TRL has no column after it).
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

SYSTEMS, TRAINERS = ("ours", "trl"), ("ppo", "rloo", "grpo")
NAMES = {"ours": "rlhf_jax", "trl": "TRL", "ppo": "PPO", "rloo": "RLOO", "grpo": "GRPO"}
QUICKSTART = {"ppo": "quickstart.py", "rloo": "quickstart_rloo.py", "grpo": "quickstart_math.py"}
# Folders of the models that runs start from.
START = {"ppo": "start", "rloo": "start", "grpo": "start_math"}
COLUMNS = {"ppo": ("score", "gold_reward", "kl", "length"), "grpo": ("accuracy", "format", "entropy", "length")}
COLUMNS["rloo"] = COLUMNS["ppo"]
JUDGED = ("score", "gold_reward", "accuracy", "format")  # columns whose gains are compared
HEADS = {"score": "final reward", "gold_reward": "gold reward", "kl": "KL"}
SECOND = {"ppo": "kl", "rloo": "kl", "grpo": "entropy"}  # what a curve has beside the reward
MARGIN, CONFIDENCE = 0.15, 0.9  # fraction of TRL's gain; level of the interval
UPDATES, PROMPTS = 48, 4096  # the quickstart's; held out

# Options with the same name in TRL, and others.
ADAM = ("learning_rate", "lr_scheduler_type", "warmup_steps", "adam_beta1", "adam_beta2", "adam_epsilon")
SAME = (*ADAM, "weight_decay", "temperature")
OTHERWISE = ("batch_size", "num_mini_batches", "total_episodes", "max_grad_norm", "response_length")
OWN = {
    "ppo": ("num_ppo_epochs", "kl_coef", "kl_estimator", "cliprange", "cliprange_value", "vf_coef", "gamma", "lam")
    + ("whiten_rewards", "stop_token"),
    "rloo": ("num_generations", "num_iterations", "beta", "epsilon", "normalize_advantages"),
    "grpo": ("num_generations", "num_iterations", "beta", "epsilon", "loss_type", "scale_rewards"),
}


class Run(NamedTuple):
    """Identifies a run."""

    trainer: str
    system: str
    seed: int
    updates: int

    @property
    def name(self) -> str:
        """Name of its folder and its lines."""
        return f"{self.trainer}-{self.system}-{self.updates}updates-seed{self.seed}"


def quickstart(trainer: str, work: Path) -> dict[str, StageConfig]:
    """The quickstart's stages by name, the policy's by the trainer's, with its models in the folder of `START`."""
    config = config_files.load_config(QUICKSTART[trainer])
    return stages_of(dataclasses.replace(config, run_dir=str(work / START[trainer])))


def start_policy(trainer: str, work: Path) -> Path:
    """The folder of the policy that runs start from."""
    return work / START[trainer] / "sft/policy"


def settings(trainer: str, updates: int) -> dict[str, Any]:
    """Hyperparameters of both systems, under our names: the quickstart's, except length and clipping.

    TRL's PPO ignores max_grad_norm, so ours does not clip; with RLOO and GRPO both do.
    """
    stage = quickstart(trainer, Path())[trainer]
    values = {name: getattr(stage, name) for name in (*SAME, *OTHERWISE, "missing_eos_penalty", *OWN[trainer])}
    clip = None if trainer == "ppo" else 1.0
    return {**values, "total_episodes": updates * stage.batch_size, "max_grad_norm": clip}


def our_config(run: Run, work: Path) -> PolicyConfig:
    """Our config of a run: the settings, and the options that reproduce TRL's behaviour."""
    # A minibatch is one micro-batch, so TRL's mean of micro-batch means is the mean over all tokens.
    ppo = {"loss_aggregation": "token_mean_micro", "whiten_ddof": 1, "score_position": "after_eos"}
    rloo = {"lr_scheduler_unit": "optimizer_step", "reshuffle": "once", "policy_loss": "clipped"}
    grpo = {"lr_scheduler_unit": "optimizer_step", "reshuffle": "once", "loss_aggregation": "token_mean_micro"}
    own = {"ppo": ppo, "rloo": rloo, "grpo": grpo}[run.trainer] | {"eos_penalty_mode": "subtract"}
    # `evaluate` evaluates all policies in the same way; a run itself only trains.
    quiet = {"dataset_test_split": None, "eval_steps": 0, "num_sample_generations": 0, "save_steps": 0, "report_to": ()}
    folder = str(work / "runs" / run.name)
    values = {**settings(run.trainer, run.updates), **own, **quiet, "seed": run.seed, "run_dir": folder}
    return dataclasses.replace(quickstart(run.trainer, work)[run.trainer], **values)


def trl_options(run: Run, scratch: str) -> dict[str, Any]:
    """Arguments of TRL's PPOConfig, RLOOConfig or GRPOConfig equivalent to `settings`.

    A minibatch is one micro-batch: with accumulation TRL's PPO would take one optimizer step per epoch.
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
    """The objects of a JSON Lines file, without a torn last line; empty if there is no file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Writes all objects atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(str(path), "".join(json_text(line) + "\n" for line in lines))


def finished(work: Path, run: Run) -> dict[str, Any] | None:
    """The line of a run that finished with the current settings; None: there is none."""
    now = json.loads(json_text(settings(run.trainer, run.updates)))
    lines = lines_of(work / "runs.jsonl")
    return next((line for line in lines if line["name"] == run.name and line["settings"] == now), None)


def planned(seeds: int, updates: int, trainers: Sequence[str] = TRAINERS) -> list[Run]:
    """All runs, seed by seed; ours and TRL's alternate, so that other load on the machine affects both."""
    return [Run(trainer, s, seed, updates) for seed in range(seeds) for trainer in trainers for s in SYSTEMS]


def prepare(work: Path, trainers: Sequence[str]) -> None:
    """Trains the models that runs start from with the quickstarts' configs, unless finished."""
    from rlhf_jax import train

    for trainer in trainers:
        stages = quickstart(trainer, work)
        for name in ("sft", "reward"):
            if name in stages:
                train.run(stages[name])


def run_one(work: Path, run: Run, cores: int) -> None:
    """Does one run in this process; writes its curve and its line."""
    if finished(work, run) is not None:
        return print(f"{run.name} is finished; nothing to do")
    policy, reward = start_policy(run.trainer, work), work / START[run.trainer] / "reward/reward_model"
    needed = policy if run.trainer == "grpo" else reward
    if not (needed / "config.json").exists():
        raise UserError(f"{needed} has no model: run `learning_parity.py prepare` first")
    jax.config.update("jax_platforms", "cpu")  # as TRL's runs
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
    record(work, run, (run_ours if run.system == "ours" else run_trl)(work, run))


def record(work: Path, run: Run, curve: list[dict[str, float]]) -> None:
    """Writes a finished run's curve and line, replacing those of an earlier run of this name."""
    seconds = [p["seconds"] for p in curve]
    line = {"name": run.name, **run._asdict(), "settings": settings(run.trainer, run.updates)}
    line |= {"seconds": sum(seconds), "update_seconds": median(seconds)}
    write_lines(work / "runs" / run.name / "curve.jsonl", curve)
    # Drop the evaluation of the earlier run's policy.
    for name, new in (("evaluations.jsonl", []), ("runs.jsonl", [line])):
        write_lines(work / name, [old for old in lines_of(work / name) if old["name"] != run.name] + new)


def point(update: int, reward: float, second: float, seconds: float, name: str = "kl") -> dict[str, float]:
    """A point of a curve: reward with the penalty for a missing eos; KL in nats per response, or entropy per token."""
    return {"update": update, "reward": reward, name: second, "seconds": seconds}


def run_ours(work: Path, run: Run) -> list[dict[str, float]]:
    """Does our run; returns the points of its curve. Its policy goes to WORK/runs/NAME/policy."""
    from rlhf_jax import train

    folder = train.run(our_config(run, work)).run_dir
    found, clock = (logger.read_metrics(f"{folder}/{name}.jsonl") for name in ("metrics", "timings"))
    seconds = {line["step"]: line["step_time"] for line in clock}
    if run.trainer == "grpo":
        return [point(f["step"], f["reward"], f["entropy"], seconds[f["step"]], "entropy") for f in found]
    return [point(f["step"], f["objective/scores"], f["objective/kl"], seconds[f["step"]]) for f in found]


def run_trl(work: Path, run: Run) -> list[dict[str, float]]:
    """TRL's run, on the CPU in float32; returns and writes the same as `run_ours`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # its PPO ignores use_cpu
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, GPTNeoXForSequenceClassification
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    from rlhf_jax.data import arithmetic, load_tokenizer, synthetic
    from rlhf_jax.rewards import boxed_format_reward, exact_match_reward

    folder, start = work / "runs" / run.name, start_policy(run.trainer, work)
    tokenizer = load_tokenizer(str(start))
    tokenizer.hf.padding_side = "left"
    task = arithmetic if run.trainer == "grpo" else synthetic
    examples = task.prompts(task.SIZES["train"])
    prompts = [row["prompt"] for row in examples]
    options, values = trl_options(run, str(folder / "trl")), settings(run.trainer, run.updates)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(run.seed)
    np.random.seed(run.seed)  # TRL's PPO shuffles with numpy without seeding it
    logs, ends = [], []

    def policy():
        return AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)

    def reward():
        path = work / START[run.trainer] / "reward/reward_model"
        return GPTNeoXForSequenceClassification.from_pretrained(path, dtype=torch.float32)

    def keeping(base):
        class Keeping(base):
            def log(self, entries, *args):
                super().log(entries, *args)
                if "train_runtime" not in entries:  # skip the summary at the end
                    logs.append(dict(entries))
                    ends.append(time.perf_counter())

        return Keeping

    trained, steps = policy(), 1
    if run.trainer != "ppo":
        steps = values["num_iterations"] * values["num_mini_batches"]
    if run.trainer == "ppo":
        rows = Dataset.from_dict({"input_ids": tokenizer.encode_batch(prompts)})
        models = {"ref_model": policy(), "reward_model": reward(), "value_model": reward()}
        data = {"train_dataset": rows, "eval_dataset": rows.select(range(8)), "processing_class": tokenizer.hf}
        trainer = keeping(PPOTrainer)(args=PPOConfig(**options), model=trained, **models, **data)
    elif run.trainer == "grpo":
        columns = {name: [row[name] for row in examples] for name in ("prompt", "solution")}
        data = {"train_dataset": Dataset.from_dict(columns), "processing_class": tokenizer.hf}
        rewards = [exact_match_reward, boxed_format_reward]
        trainer = keeping(GRPOTrainer)(args=GRPOConfig(**options), model=trained, reward_funcs=rewards, **data)
    else:
        score = token_reward(reward(), tokenizer, values["missing_eos_penalty"])
        data = {"train_dataset": Dataset.from_dict({"prompt": prompts}), "processing_class": tokenizer.hf}
        trainer = keeping(RLOOTrainer)(args=RLOOConfig(**options), model=trained, reward_funcs=[score], **data)
    began = time.perf_counter()
    trainer.train()
    trained.save_pretrained(folder / "policy")
    return trl_curve(run.trainer, logs, [began, *ends], steps)


def trl_curve(trainer: str, logs: Sequence[dict], ends: Sequence[float], steps: int) -> list[dict[str, float]]:
    """TRL's log as points. RLOO and GRPO log each of an update's `steps`, the rollout's metrics with the first."""
    seconds = [ends[i + steps] - ends[i] for i in range(0, len(logs), steps)]
    updates = list(enumerate(zip(logs[::steps], seconds), 1))
    if trainer == "ppo":
        return [point(i, log["objective/scores"], log["objective/kl"], s) for i, (log, s) in updates]
    if trainer == "grpo":
        return [point(i, log["reward"], log["entropy"], s, "entropy") for i, (log, s) in updates]
    kl = [log["kl"] * log["completions/mean_length"] for log in logs[::steps]]  # TRL's is a mean over tokens
    return [point(i, log["reward"], kl[i - 1], s) for i, (log, s) in updates]


def token_reward(model, tokenizer, penalty: float) -> Callable[..., list[float]]:
    """A reward function for TRL's RLOO that scores the sampled ids at the last one, including eos, as PPO does.

    TRL itself passes text without eos, on which the reward model was not trained.
    """
    import torch

    def learned_reward(prompts, completion_ids, **kwargs):
        rows = [torch.tensor(head + tail) for head, tail in zip(tokenizer.encode_batch(prompts), completion_ids)]
        last = torch.tensor([len(row) - 1 for row in rows])
        with torch.inference_mode():  # padding follows everything that is read
            hidden = model.gpt_neox(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)).last_hidden_state
            scores = model.score(hidden[torch.arange(len(rows)), last])[:, 0].tolist()
        return [s - (0.0 if tokenizer.eos_id in tail else penalty) for s, tail in zip(scores, completion_ids)]

    return learned_reward


def evaluate_all(work: Path, updates: int, prompts: int, trainers: Sequence[str]) -> None:
    """Samples from the SFT policies and every final policy, those of a task on the same held-out prompts with the same
    keys."""
    for start in sorted({START[trainer] for trainer in trainers}):
        of_task = [trainer for trainer in trainers if START[trainer] == start]
        lines = [line for line in lines_of(work / "runs.jsonl") if line["updates"] == updates]
        names = [line["name"] for line in lines if line["trainer"] in of_task]
        folders = {sft_name(of_task[0]): start_policy(of_task[0], work)}
        evaluate_task(work, of_task[0], folders | {name: work / "runs" / name / "policy" for name in names}, prompts)


def sft_name(trainer: str) -> str:
    """The line of the SFT policy among the evaluations."""
    return "sft" if START[trainer] == "start" else f"sft of {NAMES[trainer]}"


def evaluate_task(work: Path, trainer: str, folders: dict[str, Path], prompts: int) -> None:
    """Writes a line for each policy that has none yet."""
    from rlhf_jax.data import synthetic
    from rlhf_jax.stages import open_stage

    path, config = work / "evaluations.jsonl", our_config(Run(trainer, "ours", 0, 1), work)
    config = dataclasses.replace(config, dataset_test_split="validation", max_eval_samples=prompts)
    stage = open_stage(config)
    try:
        for name, folder in folders.items():
            if any(line["name"] == name and line["prompts"] == prompts for line in lines_of(path)):
                continue
            params = stage.weights.load(stage.opened.policy, str(folder), "causal", None)
            found = stage.evaluator.complete(params, stage.evaluator.held_out, prompts, config.temperature)
            given = {key: found[key] for key in ("kl", "lengths", "ended", "entropy")}
            if trainer == "grpo":
                row = evaluate.summarize(name, rewards=found["rewards"], **given)
                means = [float(np.mean(values)) for values in found["rewards"].values()]
                row |= dict(zip(("accuracy", "format"), means))
            else:
                reward = found["scores"] - config.missing_eos_penalty * ~found["ended"]
                gold = synthetic.gold_reward(found["prompts"], found["completions"])
                row = evaluate.summarize(name, score=reward, gold=gold, **given)
            write_lines(path, [*lines_of(path), {**row, "prompts": prompts}])
            print(evaluate.comparison_table([row]), flush=True)
    finally:
        stage.close()


def welch(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Mean of a - mean of b, and its confidence interval; a and b have 2 or more values, and may differ in variance.

    source: Welch 1947, The generalization of Student's problem; degrees of freedom by Satterthwaite 1946.
    """
    from scipy import special  # jax needs it too

    if min(len(a), len(b)) < 2:
        raise UserError(f"an interval needs 2 or more runs of each system, not {len(a)} and {len(b)}: increase --seeds")
    va, vb = (float(np.var(x, ddof=1)) / len(x) for x in (a, b))
    difference = float(np.mean(a) - np.mean(b))
    if va + vb == 0:
        return difference, difference, difference
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    half = float(special.stdtrit(freedom, (1 + confidence) / 2)) * (va + vb) ** 0.5
    return difference, difference - half, difference + half


def within(low: float, high: float, gain: float) -> bool:
    """Whether the whole interval lies within ± MARGIN of TRL's gain; False if TRL gained nothing."""
    return gain > 0 and -MARGIN * gain <= low and high <= MARGIN * gain


def report(work: Path, updates: int, prompts: int, picture: Path | None, trainers: Sequence[str]) -> None:
    """Prints the tables as Markdown and writes the plot."""
    found = {line["name"]: line for line in lines_of(work / "evaluations.jsonl") if line["prompts"] == prompts}
    runs: dict[tuple[str, str], list[dict]] = {(t, s): [] for t in trainers for s in SYSTEMS}
    for line in sorted(lines_of(work / "runs.jsonl"), key=lambda line: line["seed"]):
        run = Run(*(line[name] for name in Run._fields))
        known = run.updates == updates and (run.trainer, run.system) in runs and run.name in found
        if known and line == finished(work, run):
            curve = lines_of(work / "runs" / run.name / "curve.jsonl")
            runs[run.trainer, run.system].append({**line, **found[run.name], "curve": curve})
    print(f"{updates} updates; {prompts:,} held-out prompts; ± is the standard deviation over seeds.")
    for columns in dict.fromkeys(COLUMNS[trainer] for trainer in trainers):
        of_task = [trainer for trainer in trainers if COLUMNS[trainer] == columns]
        if sft_name(of_task[0]) not in found:
            raise UserError(f"{work}/evaluations.jsonl has no SFT policy on {prompts} prompts: run `evaluate` first")
        report_task(runs, of_task, found[sft_name(of_task[0])])
    if picture is not None:
        draw(runs, picture)


def report_task(runs: dict[tuple[str, str], list[dict]], trainers: Sequence[str], sft: dict[str, Any]) -> None:
    """Prints the tables of the trainers of one task, and the verdict on the first two columns."""
    columns = COLUMNS[trainers[0]]
    heads = [HEADS.get(column, column) for column in columns]
    print(f"\n| | seeds | {' | '.join(heads)} | seconds in all | an update |\n" + "|---" * 8 + "|")
    print("| SFT | | " + " | ".join(f"{sft[key]:.3f}" for key in columns) + " | | |")
    for (trainer, system), rows in runs.items():
        if rows and trainer in trainers:
            several = [[row[key] for row in rows] for key in columns]
            cells = [
                f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "") for values in several
            ]
            cells += [f"{median(r['seconds'] for r in rows):.0f}", f"{median(r['update_seconds'] for r in rows):.2f}"]
            print(f"| {NAMES[trainer]}, {NAMES[system]} | {len(rows)} | {' | '.join(cells)} |")
    for kind, key in ((HEADS.get(key, key).replace("final ", ""), key) for key in columns if key in JUDGED):
        head = f"TRL's gain over SFT | ours - TRL | {CONFIDENCE:.0%} interval | of TRL's gain | within ±{MARGIN:.0%}"
        print(f"\n| {kind} | {head} |\n" + "|---" * 6 + "|")
        for trainer in trainers:
            print(f"| {NAMES[trainer]} | {verdict(runs, trainer, key, sft[key])} |")


def verdict(runs: dict[tuple[str, str], list[dict]], trainer: str, key: str, sft: float) -> str:
    """Five cells of the table: gain, difference, interval, as a fraction of the gain, yes or no."""
    ours, trl = ([row[key] for row in runs[trainer, system]] for system in SYSTEMS)
    if min(len(ours), len(trl)) < 2:
        return f"too few seeds: {len(ours)} of ours, {len(trl)} of TRL | | | |"
    gain, (difference, low, high) = mean(trl) - sft, welch(ours, trl)
    share = f"{low / gain:+.1%} to {high / gain:+.1%}" if gain > 0 else "no gain"
    answer = "yes" if within(low, high, gain) else "no"
    return f"{gain:.3f} | {difference:+.3f} | {low:+.3f} to {high:+.3f} | {share} | {answer}"


def draw(runs: dict[tuple[str, str], list[dict]], path: Path) -> None:
    """Plots reward and KL, mean and one standard deviation over seeds, to a PNG."""
    try:
        from matplotlib.figure import Figure
        from PIL import Image  # matplotlib needs it too
    except ImportError:
        raise UserError("--picture needs matplotlib: pip install matplotlib") from None
    trainers = list(dict.fromkeys(trainer for trainer, _ in runs))
    figure = Figure(figsize=(5 * len(trainers), 7), layout="constrained")
    axes = figure.subplots(2, len(trainers), sharex=True, squeeze=False)
    looks = {"ours": {"color": "#0b61a4", "linestyle": "-"}, "trl": {"color": "#d1600a", "linestyle": "--"}}
    labels = {"kl": "KL to the start, nats a response", "entropy": "entropy, nats a token"}
    for column, trainer in enumerate(trainers):
        reward = "accuracy + format reward" if trainer == "grpo" else "reward (reward model)"
        for i, (key, label) in enumerate({"reward": reward, SECOND[trainer]: labels[SECOND[trainer]]}.items()):
            axis = axes[i, column]
            for system, look in looks.items():
                curves = np.array([[p[key] for p in run["curve"]] for run in runs[trainer, system]])
                if len(curves):
                    x, y = np.arange(1, curves.shape[1] + 1), curves.mean(axis=0)
                    spread = curves.std(axis=0, ddof=min(1, len(curves) - 1))
                    seeds = "1 seed" if len(curves) == 1 else f"{len(curves)} seeds"
                    axis.plot(x, y, **look, linewidth=1.8, label=f"{NAMES[system]}, {seeds}")
                    axis.fill_between(x, y - spread, y + spread, color=look["color"], alpha=0.2, linewidth=0)
                    axis.legend(loc="best")
            axis.set(title=f"{NAMES[trainer]}: {'KL' if key == 'kl' else key}", xlabel="update" if i else "")
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    with Image.open(path) as drawn:  # a palette cuts the file to a third
        drawn.convert("RGB").quantize(128).save(path, optimize=True)


def run_all(args: argparse.Namespace) -> None:
    """Does all missing steps, one process at a time; prints a line per run."""

    def child(label: str, *words: Any) -> None:
        log = args.work / "logs" / f"{label}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, *map(str, words), "--work", str(args.work)]
        with log.open("w", encoding="utf-8") as file:
            if subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode:
                raise UserError(f"{label} failed, see {log}; rerun the command to resume")

    chosen = ("--trainers", *args.trainers)
    child("prepare", "prepare", *chosen)
    runs = planned(args.seeds, args.updates, args.trainers)
    for number, run in enumerate(runs, 1):
        if finished(args.work, run) is None:
            which = ("--trainer", run.trainer, "--system", run.system, "--seed", run.seed)
            child(run.name, "run", *which, "--updates", run.updates, "--cores", args.cores)
        line, curve = finished(args.work, run), lines_of(args.work / "runs" / run.name / "curve.jsonl")
        second = SECOND[run.trainer]
        rewards = f"reward {curve[0]['reward']:+.2f} to {curve[-1]['reward']:+.2f}, {second} {curve[-1][second]:.2f}"
        print(f"[{number}/{len(runs)}] {run.name}: {line['seconds']:.0f} s, {rewards}", flush=True)
    child("evaluate", "evaluate", "--updates", args.updates, "--prompts", args.prompts, *chosen)
    report(args.work, args.updates, args.prompts, args.picture, args.trainers)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 2: wrong options or a failed step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("prepare", "run", "evaluate", "report", "all"))
    parser.add_argument("--work", type=Path, required=True, help="folder of models, runs and evaluations")
    parser.add_argument("--system", choices=SYSTEMS, default="ours", help="run: system")
    parser.add_argument("--trainer", choices=TRAINERS, default="ppo", help="run: trainer")
    parser.add_argument("--trainers", choices=TRAINERS, nargs="+", default=TRAINERS, help="all but run; default: all")
    numbers = (("seed", 0, "run: seed"), ("seeds", 5, "all: number of runs per trainer and system"))
    numbers += (("updates", UPDATES, "updates of a run"), ("cores", 1, "cores of a run"))
    for name, default, text in (*numbers, ("prompts", PROMPTS, "held-out prompts of the evaluation")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text}; default {default}")
    parser.add_argument("--picture", type=Path, help="report, all: PNG of the plot")
    args = parser.parse_args(argv)
    run = Run(args.trainer, args.system, args.seed, args.updates)
    figures = (args.work, args.updates, args.prompts)
    commands = {
        "prepare": (prepare, args.work, args.trainers),
        "run": (run_one, args.work, run, args.cores),
        "all": (run_all, args),
    }
    commands |= {
        "evaluate": (evaluate_all, *figures, args.trainers),
        "report": (report, *figures, args.picture, args.trainers),
    }
    function, *given = commands[args.command]
    try:
        function(*given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
