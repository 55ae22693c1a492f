"""The case that benchmark.py measures, shared by both systems.

Standard library only: the process of TRL does not import JAX, so its memory is only TRL's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOP = ("generate", "reward", "experience", "update")
"""Timed phases of the training loop. experience: log-probabilities of policy and reference, values, advantages."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The work and device of a measurement. Lengths are in tokens."""

    algo: str = "ppo"
    shape: str = "14m"
    batch: int = 16
    epochs: int = 4
    query_length: int = 512
    response_length: int = 53
    num_generations: int = 4
    shared_prompts: bool = True
    """Ours, RLOO: the option of that name."""
    attn_implementation: str = "auto"
    """Ours: the option of that name."""
    deterministic: bool = False
    """Ours: the option of that name."""
    lora_r: int = 0
    """LoRA rank of the policy, on all linear layers; 0: full training."""
    lora_value: str = "full"
    """Ours: the option of that name. TRL always trains its value model in full."""
    dtype: str = "float32"
    prompts: str = "synthetic"
    tokenizer: str = "synthetic"
    updates: int = 3
    cores: int = 1
    device: str = "cpu"
    profile: str | None = None
    predict: bool = False
    """Ours: whether memory and seconds are predicted too."""

    @property
    def group(self) -> int:
        """Responses to a prompt."""
        return self.num_generations if self.algo == "rloo" else 1

    @property
    def frozen(self) -> tuple[str, ...]:
        """Models whose matrices get no gradient."""
        return () if not self.lora_r else ("policy",) if self.lora_value == "full" else ("policy", "value")

    @property
    def prompts_per_update(self) -> int:
        """Prompts in a batch."""
        return self.batch // self.group

    @property
    def name(self) -> str:
        """Description of work and device; the key of a stored bound."""
        size = f"{self.algo} {self.shape}, batch {self.batch}, {self.epochs} epochs"
        if self.lora_r:
            size += f", LoRA of rank {self.lora_r}" + (f" (value {self.lora_value})" if self.algo == "ppo" else "")
        if self.group > 1:
            size += f", {self.group} responses a prompt"
        if self.deterministic:
            size += ", deterministic"
        where = self.device if self.device != "cpu" else f"cpu with {self.cores} core{'s' * (self.cores > 1)}"
        words = f"{self.query_length} + {self.response_length} tokens, {self.dtype}, {Path(self.prompts).name} prompts"
        return f"{size}, {words}, {where}"

    def write(self, work: Path) -> None:
        """Writes the case for the child processes."""
        (work / "case.json").write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, work: Path) -> Case:
        """Reads what `write` wrote."""
        return cls(**json.loads((work / "case.json").read_text(encoding="utf-8")))


def child_arguments() -> tuple[Case, argparse.Namespace]:
    """Case and arguments (work, pair, name, micro) of a child process; restricts it to the case's cores."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--pair", type=int, default=0)
    parser.add_argument("--name", help="of the result's file; default: the pair's number")
    parser.add_argument("--micro", type=int)
    args = parser.parse_args()
    args.name = str(args.pair) if args.name is None else args.name
    case = Case.read(args.work)
    use_cores(case.cores)
    return case, args


# Hyper-parameters of both systems, under the names that they share.
SAME = {
    "learning_rate": 3e-6,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "temperature": 0.7,
    "seed": 42,
}
OWN = {
    "ppo": {
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 0.1,
        "gamma": 1.0,
        "lam": 0.95,
        "whiten_rewards": False,
    },
    "rloo": {"beta": 0.05, "epsilon": 0.2, "normalize_advantages": False},
}


def settings(case: Case) -> dict[str, Any]:
    """Options of both systems, under our names.

    Without a stop token every response has full length. TRL's PPO never clips gradients.
    """
    passes = {"num_ppo_epochs": case.epochs}
    if case.algo == "rloo":
        passes = {"num_iterations": case.epochs, "num_generations": case.num_generations}
    sizes = {"batch_size": case.batch, "num_mini_batches": 1, "total_episodes": case.batch * case.updates}
    rest = {"response_length": case.response_length, "max_grad_norm": None if case.algo == "ppo" else 1.0}
    return {**SAME, **OWN[case.algo], **passes, **sizes, **rest}


def our_options(case: Case, work: Path, micro: int | None, run_dir: str) -> dict[str, Any]:
    """Fields of our PPOConfig or RLOOConfig: the settings, and nothing but training.

    Padded lengths are those of a data set with prompts up to query_length, not of this batch's prompts.
    """
    quiet = {"dataset_test_split": None, "num_sample_generations": 0, "save_steps": 0, "report_to": ()}
    quiet |= {"run_dir": run_dir, "resume": "never"}
    models = {"sft_model_path": str(work / "start/policy"), "reward_model_path": str(work / "start/reward")}
    quarters = (2, 3, 4) if case.query_length >= 256 else (4,)
    buckets = tuple(-(-case.query_length * part // 32) * 8 for part in quarters)
    data = {"query_length": case.query_length, "length_buckets": buckets, "shuffle_dataset": False}
    rest = {"dtype": case.dtype, "micro_batch_size": micro, "stop_token": None}
    rest |= {"attn_implementation": case.attn_implementation, "deterministic": case.deterministic}
    if case.algo == "rloo":
        rest["shared_prompts"] = case.shared_prompts
    if case.lora_r:
        rest |= {"use_peft": True, "lora_target_modules": ("all-linear",), **lora(case)}
        rest |= {"lora_value": case.lora_value} if case.algo == "ppo" else {}
    return {**settings(case), **quiet, **models, **data, **rest}


def lora(case: Case) -> dict[str, Any]:
    """Adapter options, under the names that both share; no dropout, which TRL's PPO always disables."""
    return {"lora_r": case.lora_r, "lora_alpha": 2 * case.lora_r, "lora_dropout": 0.0}


def trl_options(case: Case, scratch: str, micro: int | None) -> dict[str, Any]:
    """Arguments of TRL's PPOConfig or RLOOConfig equivalent to `settings`, without what makes TRL slower.

    Gradients of micro-batches are accumulated, so that both take one optimizer step an epoch.
    """
    values = settings(case)
    micro = micro or case.batch
    parts = case.batch // micro
    options = {name: values[name] for name in (*SAME, *OWN[case.algo])}
    options |= {"output_dir": scratch, "report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    options |= {"per_device_train_batch_size": micro, "gradient_accumulation_steps": parts}
    options |= {"gradient_checkpointing": False, "use_cpu": case.device == "cpu", "bf16": case.dtype == "bfloat16"}
    if case.device != "cpu":
        options["tf32"] = True  # XLA's default
    if case.algo == "ppo":
        same = ("num_ppo_epochs", "num_mini_batches", "total_episodes", "response_length")
        options |= {name: values[name] for name in same}
        return {**options, "local_rollout_forward_batch_size": case.batch, "num_sample_generations": 0}
    options |= {"max_grad_norm": values["max_grad_norm"], "max_completion_length": values["response_length"]}
    options |= {"num_generations": case.num_generations, "num_iterations": case.epochs, "shuffle_dataset": False}
    options |= {"steps_per_generation": parts, "max_steps": case.updates * case.epochs}
    kwargs = {"dtype": "float32", "attn_implementation": "sdpa"}
    return {**options, "model_init_kwargs": kwargs, "generation_kwargs": {"eos_token_id": None}}


# --- shared by both child processes


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_cores(count: int) -> None:
    """Restricts this process to its first `count` cores; call it before any thread starts."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def status_mib(field: str) -> float:
    """A field of Linux's /proc/self/status, such as VmRSS, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) / 1024


def peak_rss_mib() -> float:
    """Peak resident memory of this process, in MiB.

    Linux's VmHWM starts at zero with the program; getrusage of a child includes its parent's peak.
    """
    try:
        return status_mib("VmHWM")
    except (OSError, StopIteration):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def best_rate(attempts: list[tuple[float, Callable[[], float]]], repeats: int = 3, patience: float = 1.0) -> float:
    """Work per second of the fastest run: the machine's peak rate.

    Args:
      attempts: (work, function that does it and returns its seconds), smallest first.
      repeats: timed runs of each, after one warm-up.
      patience: once a run takes more seconds, larger ones are skipped.
    """
    best = 0.0
    for work, run in attempts:
        run()
        seconds = min(run() for _ in range(repeats))
        best = max(best, work / seconds)
        if seconds > patience:
            break
    return best


def matrix_sizes(device: str) -> tuple[int, ...]:
    """Sizes of the square matrices whose product is timed."""
    return (1024, 2048) if device == "cpu" else (4096, 8192)


def rows_of(work: Path, pair: int) -> list[dict[str, Any]]:
    """The prompts of a pair, {"prompt"}: one batch, the same for both systems."""
    lines = (work / f"prompts-{pair}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def write_result(work: Path, system: str, name: str, result: dict[str, Any]) -> None:
    """Writes a child's result to a file for the parent and to its log."""
    text = json.dumps({"system": system, **result})
    (work / f"{system}-{name}.json").write_text(text, encoding="utf-8")
    print(text, flush=True)
