"""TRL's side of benchmark.py, in its own process: its unmodified PPOTrainer or RLOOTrainer, timed.

    python scripts/bench/benchmark_trl.py WORK --pair N [--name NAME] [--micro M]

benchmark.py prepares WORK. The result goes to WORK/trl-NAME.json; NAME is N by default. Imports no JAX.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark_case import (
    Case,
    best_rate,
    child_arguments,
    lora,
    matrix_sizes,
    peak_rss_mib,
    rows_of,
    trl_options,
    write_result,
)


class Clock:
    """Seconds of an update and of its wrapped functions; the rest of an update counts as 'update'."""

    def __init__(self, synchronize: Callable[[], None]):
        self.synchronize = synchronize
        self.updates: list[float] = []
        self.loop: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        self._began = 0.0

    def start(self) -> None:
        """Marks the start of the first update."""
        self.synchronize()
        self._now, self._began = {}, time.perf_counter()

    def end(self) -> None:
        """Marks the end of an update and the start of the next."""
        self.synchronize()
        now = time.perf_counter()
        total, parts = now - self._began, self._now
        forward = sum(parts.get(name, 0.0) for name in ("policy", "reference", "value"))
        phases = {"generate": parts.get("generate", 0.0), "reward": parts.get("reward", 0.0), "experience": forward}
        self.updates.append(total)
        self.loop.append({**parts, **phases, "update": total - sum(phases.values())})
        self._now, self._began = {}, now

    def wrap(self, function: Callable, name: Callable[..., str | None]) -> Callable:
        """The function, timed under the phase that `name` returns for its arguments; None: not timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            phase = name(*args, **kwargs)
            if phase is None:
                return function(*args, **kwargs)
            self.synchronize()
            began = time.perf_counter()
            result = function(*args, **kwargs)
            self.synchronize()
            self._now[phase] = self._now.get(phase, 0.0) + time.perf_counter() - began
            return result

        return timed


def callback(clock: Clock, steps: int, at_end: Callable[[], None]):
    """A TrainerCallback that ends an update every `steps` steps."""
    from transformers import TrainerCallback

    class Ends(TrainerCallback):
        done = 0

        def on_train_begin(self, args, state, control, **kwargs):
            clock.start()

        def on_step_end(self, args, state, control, **kwargs):
            self.done += 1
            if self.done % steps == 0:
                clock.end()
                at_end()

    return Ends()


def ppo_trainer(case: Case, work: Path, rows: list[dict], options: dict[str, Any], clock: Clock, callbacks: list):
    """TRL's PPOTrainer. Frozen models, which it leaves out of mixed precision, are loaded in half precision."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    tokenizer = tokenizer_of(work)
    frozen = torch.bfloat16 if case.dtype == "bfloat16" else torch.float32

    def load(kind, name: str, dtype=torch.float32):
        return kind.from_pretrained(work / "start" / name, dtype=dtype, attn_implementation="sdpa")

    models = {
        "model": load(AutoModelForCausalLM, "policy"),
        "ref_model": load(AutoModelForCausalLM, "policy", frozen),
        "reward_model": load(AutoModelForSequenceClassification, "reward", frozen),
        "value_model": load(AutoModelForSequenceClassification, "reward"),
    }
    ids = [tokenizer(row["prompt"], add_special_tokens=False)["input_ids"] for row in rows]
    data = Dataset.from_dict({"input_ids": ids})
    of_model = {id(models["reward_model"]): "reward", id(models["value_model"]): "value"}
    of_model |= {id(models["ref_model"]): "reference"}

    def by_model(model, *_, **__):
        return of_model.get(id(model))

    # `train` looks these up in its module. `forward` of the trained model belongs to 'update': not timed separately.
    ppo_trainer.batch_generation = clock.wrap(ppo_trainer.batch_generation, lambda *_, **__: "generate")
    ppo_trainer.forward = clock.wrap(ppo_trainer.forward, by_model)
    ppo_trainer.get_reward = clock.wrap(ppo_trainer.get_reward, by_model)
    few = data.select(range(min(2, len(rows))))
    if case.lora_r:
        models["ref_model"] = None  # the policy with its adapters disabled
    trainer = PPOTrainer(
        args=PPOConfig(**options),
        processing_class=tokenizer,
        train_dataset=data,
        eval_dataset=few,
        callbacks=callbacks,
        peft_config=adapters(case),
        **models,
    )
    if case.lora_r:
        of_model[id(trainer.model.policy)] = "reference"
    return trainer


def adapters(case: Case):
    """PEFT config of the case; None: full training."""
    if not case.lora_r:
        return None
    from peft import LoraConfig

    form = lora(case)
    return LoraConfig(r=form.pop("lora_r"), target_modules="all-linear", task_type="CAUSAL_LM", **form)


def rloo_trainer(case: Case, work: Path, rows: list[dict], options: dict[str, Any], clock: Clock, callbacks: list):
    """TRL's RLOOTrainer with the reward model, to which it passes decoded text."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from trl import RLOOConfig, RLOOTrainer

    tokenizer = tokenizer_of(work)
    frozen = torch.bfloat16 if case.dtype == "bfloat16" else torch.float32
    reward = AutoModelForSequenceClassification.from_pretrained(
        work / "start/reward", dtype=frozen, attn_implementation="sdpa"
    )
    trainer = RLOOTrainer(
        model=str(work / "start/policy"),
        reward_funcs=reward,
        args=RLOOConfig(**options),
        train_dataset=Dataset.from_dict({"prompt": [row["prompt"] for row in rows]}),
        processing_class=tokenizer,
        reward_processing_classes=tokenizer,
        callbacks=callbacks,
        peft_config=adapters(case),
    )

    def by_model(model, *_, **__):
        if torch.is_grad_enabled():
            return None
        return "reference" if model is trainer.ref_model else "policy"

    trainer._generate = clock.wrap(trainer._generate, lambda *_, **__: "generate")
    trainer._calculate_rewards = clock.wrap(trainer._calculate_rewards, lambda *_, **__: "reward")
    trainer._get_per_token_logps_and_entropies = clock.wrap(trainer._get_per_token_logps_and_entropies, by_model)
    return trainer


def tokenizer_of(work: Path):
    """Tokenizer of the initial models, padding on the left as TRL requires."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(work / "start/policy", padding_side="left")


def matmul_flops(device: str, dtype: str, synchronize: Callable[[], None]) -> float:
    """FLOP/s of the fastest large matrix product."""
    import torch

    def product(n: int) -> tuple[float, Callable[[], float]]:
        a = torch.ones((n, n), dtype=getattr(torch, dtype), device=device)

        def run() -> float:
            synchronize()
            began = time.perf_counter()
            a @ a
            synchronize()
            return time.perf_counter() - began

        return 2.0 * n**3, run

    with torch.no_grad():
        return best_rate([product(n) for n in matrix_sizes(device)])


def measure(case: Case, work: Path, pair: int, name: str, micro: int | None) -> dict[str, Any]:
    """All measurements of this process."""
    import numpy as np
    import torch
    import transformers
    import trl

    cuda = case.device != "cpu" and torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    torch.set_num_threads(case.cores)
    torch.manual_seed(0)
    np.random.seed(0)  # TRL's PPO shuffles with numpy
    clock, peak = Clock(synchronize), {}

    def record_peak() -> None:
        peak["peak_rss_mib"] = peak_rss_mib()
        if cuda:
            peak["peak_device_mib"] = torch.cuda.max_memory_allocated() / 2**20

    steps = case.epochs if case.algo == "rloo" else 1
    make = ppo_trainer if case.algo == "ppo" else rloo_trainer
    options = trl_options(case, str(work / f"trl-{name}"), micro)
    began = time.perf_counter()
    trainer = make(case, work, rows_of(work, pair), options, clock, [callback(clock, steps, record_peak)])
    loaded = time.perf_counter() - began
    trainer.train()
    result = {
        "micro": micro or case.batch,
        "load_seconds": loaded,
        "updates": clock.updates,
        "loop": clock.loop,
        **peak,
    }
    kind = torch.cuda.get_device_name() if cuda else "cpu"
    result |= {"device": device, "device_kind": kind, "threads": torch.get_num_threads()}
    result["attention"] = trainer.accelerator.unwrap_model(trainer.model).config._attn_implementation
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    del trainer
    return {**result, "versions": versions, "matmul_flops": matmul_flops(device, case.dtype, synchronize)}


def main() -> None:
    """One measurement; running out of memory is a result, not an error."""
    case, args = child_arguments()
    warnings.filterwarnings("ignore")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch

    try:
        result = measure(case, args.work, args.pair, args.name, args.micro)
    except (torch.OutOfMemoryError, MemoryError) as error:
        result = {"out_of_memory": str(error)[:300]}
    write_result(args.work, "trl", args.name, result)


if __name__ == "__main__":
    main()
