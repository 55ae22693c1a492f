"""What benchmark.py measures, said once for both systems. Standard library only: the process that runs TRL imports no
JAX, so that its memory is its own.
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

PHASES = ("generate", "reference", "reward", "value", "update")
"""What --phase takes; RLOO has no value model."""
LOOP = ("generate", "reward", "experience", "update")
"""The clocks of the training loop. experience: log-probabilities of policy and reference, values, advantages."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A measurement: the work, and where it is done. Lengths are tokens."""

    algo: str = "ppo"
    shape: str = "14m"
    batch: int = 16
    epochs: int = 4
    query_length: int = 512
    response_length: int = 53
    num_generations: int = 4
    lora_r: int = 0
    """Rank of the policy's adapters, on all linear layers; 0: it is trained in full."""
    lora_value: str = "full"
    """Ours: as the option of that name. TRL's value model is always trained in full."""
    dtype: str = "float32"
    prompts: str = "synthetic"
    tokenizer: str = "synthetic"
    updates: int = 3
    cores: int = 1
    device: str = "cpu"
    phase: str | None = None
    profile: str | None = None

    @property
    def group(self) -> int:
        """Responses to a prompt."""
        return self.num_generations if self.algo == "rloo" else 1

    @property
    def frozen(self) -> tuple[str, ...]:
        """The models whose matrices get no gradient."""
        return () if not self.lora_r else ("policy",) if self.lora_value == "full" else ("policy", "value")

    @property
    def prompts_per_update(self) -> int:
        """Prompts of a batch."""
        return self.batch // self.group

    @property
    def name(self) -> str:
        """The work and the kind of machine in words: what a stored bound belongs to."""
        size = f"{self.algo} {self.shape}, batch {self.batch}, {self.epochs} epochs"
        if self.lora_r:
            size += f", LoRA of rank {self.lora_r}" + (f" (value {self.lora_value})" if self.algo == "ppo" else "")
        if self.group > 1:
            size += f", {self.group} responses a prompt"
        where = self.device if self.device != "cpu" else f"cpu with {self.cores} core{'s' * (self.cores > 1)}"
        words = f"{self.query_length} + {self.response_length} tokens, {self.dtype}, {Path(self.prompts).name} prompts"
        return f"{size}, {words}, {where}"

    def write(self, work: Path) -> None:
        """Leaves the case for the child processes."""
        (work / "case.json").write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, work: Path) -> Case:
        """What `write` left."""
        return cls(**json.loads((work / "case.json").read_text(encoding="utf-8")))


def child_arguments() -> tuple[Case, argparse.Namespace]:
    """What a child process was started with: the case, and work, pair and micro; it has only its cores from here on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--pair", type=int, default=0)
    parser.add_argument("--micro", type=int)
    args = parser.parse_args()
    case = Case.read(args.work)
    use_cores(case.cores)
    return case, args


# Hyper-parameters of both systems by our names, which are TRL's but for those of `renamed`.
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
    """The options of both systems, by our names.

    No stop token, so that every response has full length whatever is sampled. TRL's PPO never clips gradients.
    """
    passes = {"num_ppo_epochs": case.epochs}
    if case.algo == "rloo":
        passes = {"num_iterations": case.epochs, "num_generations": case.num_generations}
    sizes = {"batch_size": case.batch, "num_mini_batches": 1, "total_episodes": case.batch * case.updates}
    rest = {"response_length": case.response_length, "max_grad_norm": None if case.algo == "ppo" else 1.0}
    return {**SAME, **OWN[case.algo], **passes, **sizes, **rest}


def our_options(case: Case, work: Path, micro: int | None, run_dir: str) -> dict[str, Any]:
    """Fields of our PPOConfig or RLOOConfig: the settings, and a run that does nothing but train.

    Padded lengths are those of a whole data set with prompts up to query_length, not of the few prompts of this batch.
    """
    quiet = {"dataset_test_split": None, "num_sample_generations": 0, "save_steps": 0, "report_to": ()}
    quiet |= {"run_dir": run_dir, "resume": "never"}
    models = {"sft_model_path": str(work / "start/policy"), "reward_model_path": str(work / "start/reward")}
    quarters = (2, 3, 4) if case.query_length >= 256 else (4,)
    buckets = tuple(-(-case.query_length * part // 32) * 8 for part in quarters)
    data = {"query_length": case.query_length, "length_buckets": buckets, "shuffle_dataset": False}
    rest = {"dtype": case.dtype, "micro_batch_size": micro, "stop_token": None}
    if case.lora_r:
        rest |= {"use_peft": True, "lora_target_modules": ("all-linear",), **lora(case)}
        rest |= {"lora_value": case.lora_value} if case.algo == "ppo" else {}
    return {**settings(case), **quiet, **models, **data, **rest}


def lora(case: Case) -> dict[str, Any]:
    """The form of the adapters, by the names of both; no dropout, which TRL's PPO turns off in any case."""
    return {"lora_r": case.lora_r, "lora_alpha": 2 * case.lora_r, "lora_dropout": 0.0}


def trl_options(case: Case, scratch: str, micro: int | None) -> dict[str, Any]:
    """Arguments of TRL's PPOConfig or RLOOConfig that say what `settings` does, at TRL's fastest.

    Micro-batches are accumulated, so that both take one optimizer step a pass.
    """
    values = settings(case)
    micro = micro or case.batch
    parts = case.batch // micro
    options = {name: values[name] for name in (*SAME, *OWN[case.algo])}
    options |= {"output_dir": scratch, "report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    options |= {"per_device_train_batch_size": micro, "gradient_accumulation_steps": parts}
    options |= {"gradient_checkpointing": False, "use_cpu": case.device == "cpu", "bf16": case.dtype == "bfloat16"}
    if case.device != "cpu":
        options["tf32"] = True  # as XLA does by default
    if case.algo == "ppo":
        same = ("num_ppo_epochs", "num_mini_batches", "total_episodes", "response_length")
        options |= {name: values[name] for name in same}
        return {**options, "local_rollout_forward_batch_size": case.batch, "num_sample_generations": 0}
    options |= {"max_grad_norm": values["max_grad_norm"], "max_completion_length": values["response_length"]}
    options |= {"num_generations": case.num_generations, "num_iterations": case.epochs, "shuffle_dataset": False}
    options |= {"steps_per_generation": parts, "max_steps": case.updates * case.epochs}
    kwargs = {"dtype": "float32", "attn_implementation": "sdpa"}
    return {**options, "model_init_kwargs": kwargs, "generation_kwargs": {"eos_token_id": None}}


# --- what both children need


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_cores(count: int) -> None:
    """Holds this process to its first `count` cores; before any thread is started."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def peak_rss_mib() -> float:
    """The most memory that this process had resident, in MiB.

    getrusage would do, but a child starts with its parent's peak there; Linux's VmHWM starts anew with the program.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024
    except (OSError, StopIteration):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def best_rate(attempts: list[tuple[float, Callable[[], float]]], repeats: int = 3, patience: float = 1.0) -> float:
    """Work a second of the fastest run: what the machine can do.

    Args:
      attempts: (work, function that does it and returns its seconds), smallest first.
      repeats: runs of each, after one that is not counted.
      patience: larger ones are left out once a run took so many seconds.
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
    """Sides of the square matrices whose product is timed."""
    return (1024, 2048) if device == "cpu" else (4096, 8192)


COPY_ENTRIES = 2**26
"""float32 entries of the array that is copied to measure bandwidth: 256 MiB read and 256 MiB written."""


def rows_of(work: Path, pair: int) -> list[dict[str, Any]]:
    """The prompts of a pair, {"prompt"}: the same for both systems, and one batch."""
    lines = (work / f"prompts-{pair}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def leave(work: Path, system: str, pair: int, result: dict[str, Any]) -> None:
    """A child's result: a file for the parent and a line for its log."""
    text = json.dumps({"system": system, **result})
    (work / f"{system}-{pair}.json").write_text(text, encoding="utf-8")
    print(text, flush=True)
