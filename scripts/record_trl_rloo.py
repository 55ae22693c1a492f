"""Records a small RLOO run of the real TRL (1.12.0, on CPU, float32) for tests/parity/replay.py.

    python scripts/record_trl_rloo.py FOLDER --options '{"num_iterations": 2, "epsilon_high": 0.3}'

Needs torch, trl==1.12.0, requests and rich: none of them is needed by the package itself. A tiny GPT-NeoX with random
weights learns from random prompts and `--functions` reward functions, the second of which scores only some responses.
FOLDER gets the starting policy and reward model, a tokenizer, case.json, trace.npz and the final policy.

trace.npz, for generation batch G: prompt_ids_G, prompt_mask_G, completion_ids_G, completion_mask_G [B, ...],
old_logps_G, advantages_G [B], rewards_per_func_G [B, functions] (NaN: None); for micro-batch J after TRL's shuffle:
stepJ_prompt_ids and so on, stepJ_loss.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from record_trl import make_models, make_tokenizer
from trl import RLOOConfig, RLOOTrainer

KEPT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "old_logps", "advantages")


def even_share(completion_ids, **kwargs):
    """Share of even ids, with a little for length: rarely equal."""
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) + 0.1 * len(ids) for ids in completion_ids]


def low_ids(completion_ids, **kwargs):
    """Share of ids below 8, of responses that begin with an id above 4 only."""
    return [sum(i < 8 for i in ids) / len(ids) if ids and ids[0] > 4 else None for ids in completion_ids]


def sometimes(completion_ids, **kwargs):
    """1 for responses of more than 3 tokens; others are not judged."""
    return [1.0 if len(ids) > 3 else None for ids in completion_ids]


FUNCTIONS = {"even_share": even_share, "low_ids": low_ids, "sometimes": sometimes}


class Recorder(RLOOTrainer):
    """TRL's trainer, with its log, its generation batches and its micro-batches kept."""

    def __init__(self, *args, **kwargs):
        self.logged, self.trace, self.generations, self.micros = [], {}, 0, 0
        super().__init__(*args, **kwargs)

    def log(self, logs, *args, **kwargs):
        super().log(logs, *args, **kwargs)
        self.logged.append({name: float(x) for name, x in logs.items() if x is not None and name != "epoch"})

    def _calculate_rewards(self, *args, **kwargs):
        rewards = super()._calculate_rewards(*args, **kwargs)
        self.trace[f"rewards_per_func_{self.generations}"] = rewards.numpy().copy()
        return rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        for name in KEPT:
            self.trace[f"{name}_{self.generations}"] = output[name].numpy().copy()
        self.generations += 1
        return output

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        for name in KEPT:
            self.trace[f"step{self.micros}_{name}"] = inputs[name].numpy().copy()
        self.trace[f"step{self.micros}_loss"] = loss.detach().numpy().copy()
        self.micros += 1
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--options", type=json.loads, default={}, help="TRL's own options, as JSON")
    parser.add_argument("--functions", nargs="+", default=["even_share"], choices=list(FUNCTIONS))
    for name, default in (("steps", 4), ("micro", 8), ("accum", 1), ("prompts", 64), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("layers", 2), ("width", 16), ("heads", 2), ("vocab", 24)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--init_std", type=float, default=0.2)
    parser.add_argument("--sequential", action="store_true", help="no parallel residual")
    args = parser.parse_args()
    args.eos_fill = False
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    defaults = {"max_completion_length": 8, "learning_rate": 1e-3, "adam_epsilon": 1e-5, "temperature": 0.9}
    options = {**defaults, **args.options}
    tokenizer, models = make_tokenizer(args.vocab), make_models(args)
    shutil.rmtree(args.folder, ignore_errors=True)
    for name in ("policy", "reward"):
        models[name].save_pretrained(args.folder / name)
    tokenizer.save_pretrained(args.folder / "tokenizer")
    # TRL reads its reference again from where the policy came from.
    policy = type(models["policy"]).from_pretrained(args.folder / "policy")
    rng = np.random.default_rng(args.seed)
    lengths = rng.integers(2, 7, size=args.prompts)
    prompts = [" ".join(f"w{i}" for i in rng.integers(1, args.vocab - 1, size=n)) for n in lengths]
    with tempfile.TemporaryDirectory() as scratch:
        config = RLOOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            gradient_checkpointing=False,
            seed=args.seed,
            per_device_train_batch_size=args.micro,
            gradient_accumulation_steps=args.accum,
            max_steps=args.steps,
            **options,
        )
        trainer = Recorder(
            model=policy,
            args=config,
            reward_funcs=[FUNCTIONS[name] for name in args.functions],
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
        )
        trainer.train()
        done = trainer.args
    policy.save_pretrained(args.folder / "final_policy")
    recorded = {
        **options,
        "micro": args.micro,
        "accum": args.accum,
        "parallel": not args.sequential,
        "adam": {
            "beta1": done.adam_beta1,
            "beta2": done.adam_beta2,
            "eps": done.adam_epsilon,
            "weight_decay": done.weight_decay,
            "max_grad_norm": done.max_grad_norm,
        },
        "lr_scheduler": str(done.lr_scheduler_type),
    }
    logs = trainer.logged
    (args.folder / "case.json").write_text(json.dumps({"options": recorded, "logs": logs}, indent=1) + "\n")
    np.savez_compressed(args.folder / "trace.npz", **trainer.trace)


if __name__ == "__main__":
    main()
