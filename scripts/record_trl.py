"""Records a small PPO run of the real TRL (1.12.0, on CPU, float32) for tests/parity/replay.py.

    python scripts/record_trl.py FOLDER --options '{"kl_estimator": "k3", "whiten_rewards": true}'

Needs torch, trl==1.12.0, requests and rich: none of them is needed by the package itself. A tiny GPT-NeoX with random
weights learns from random prompts. FOLDER gets the starting weights (policy, ref, value, reward), a tokenizer,
case.json (options, logged metrics), trace.npz (what was sampled, shuffled, scored and whitened) and the final weights.

trace.npz, for update U: query_responses_U [B, C + T], context_length_U, gen_logits_U [B, T, V] (divided by the
temperature); in the order of the calls: get_reward_N [B] (value model, then reward model), permutation_N [B],
whiten_in_N, whiten_mask_N, whiten_out_N [B, T].
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

EOS = 0


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Word-level, <eos> first and <pad> last."""
    words = {"<eos>": EOS, **{f"w{i}": i for i in range(1, vocab - 1)}, "<pad>": vocab - 1}
    inner = Tokenizer(WordLevel(words, unk_token="w1"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", padding_side="left", model_max_length=64
    )


def make_models(args) -> dict[str, torch.nn.Module]:
    """Policy, reference, value and reward model: random, and not alike."""
    # Without a pad in the policy's config, generation fills ended rows with eos.
    pad = None if args.eos_fill else args.vocab - 1
    config = GPTNeoXConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=2 * args.width,
        max_position_embeddings=64,
        rotary_pct=0.5,
        use_parallel_residual=not args.sequential,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=pad,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        initializer_range=args.init_std,
    )
    score_config = GPTNeoXConfig(**{**config.to_dict(), "num_labels": 1, "pad_token_id": args.vocab - 1})
    policy, ref = GPTNeoXForCausalLM(config), GPTNeoXForCausalLM(config)
    value, reward = (GPTNeoXForSequenceClassification(score_config) for _ in range(2))
    for model in (policy, value, reward):
        jitter(model, 0.1)  # biases and norms start at 0 and 1, where a mistake in them would not show
    # A reference near the policy, so that the KL is neither 0 nor huge.
    ref.load_state_dict(policy.state_dict())
    jitter(ref, 0.02)
    return {"policy": policy, "ref": ref, "value": value, "reward": reward}


def jitter(model: torch.nn.Module, std: float) -> None:
    """Adds noise to every weight."""
    with torch.no_grad():
        for weight in model.parameters():
            weight += std * torch.randn_like(weight)


class Recorder(PPOTrainer):
    """TRL's trainer, with its log kept."""

    logged: list[dict[str, float]]

    def log(self, logs, start_time=None):
        self.logged.append({name: float(x) for name, x in logs.items() if name != "epoch"})


def listen(trace: dict[str, np.ndarray], batch: int) -> None:
    """Wraps the functions of TRL whose inputs or outputs a replay needs."""
    counts = {"update": 0, "reward": 0, "shuffle": 0, "whiten": 0}

    def tick(name: str) -> int:
        counts[name] += 1
        return counts[name] - 1

    generation, get_reward = ppo_trainer.batch_generation, ppo_trainer.get_reward
    permutation, whiten = np.random.permutation, ppo_trainer.masked_whiten

    def recorded_generation(model, queries, *rest):
        sequences, logits = generation(model, queries, *rest)
        update = tick("update")
        trace[f"query_responses_{update}"] = sequences.numpy()
        trace[f"context_length_{update}"] = np.asarray(queries.shape[1])
        trace[f"gen_logits_{update}"] = logits.float().numpy()
        return sequences, logits

    def recorded_reward(*rest):
        out = get_reward(*rest)
        trace[f"get_reward_{tick('reward')}"] = out[1].detach().numpy().copy()
        return out

    def recorded_permutation(n):
        order = permutation(n)
        if n == batch:
            trace[f"permutation_{tick('shuffle')}"] = order
        return order

    def recorded_whiten(values, mask, shift_mean=True):
        out = whiten(values, mask, shift_mean)
        call = tick("whiten")
        for name, x in (("in", values), ("mask", mask), ("out", out)):
            trace[f"whiten_{name}_{call}"] = x.numpy().copy()
        return out

    ppo_trainer.batch_generation, ppo_trainer.get_reward = recorded_generation, recorded_reward
    np.random.permutation, ppo_trainer.masked_whiten = recorded_permutation, recorded_whiten


def train(args, options: dict, models: dict, tokenizer, scratch: str) -> tuple[Recorder, dict[str, np.ndarray]]:
    """The run itself."""
    batch = args.micro * args.accum
    config = PPOConfig(
        output_dir=scratch,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        num_sample_generations=0,
        seed=args.seed,
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=args.accum,
        total_episodes=batch * args.updates,
        **options,
    )
    rng = np.random.default_rng(args.seed)
    prompts = [rng.integers(1, args.vocab - 1, size=rng.integers(2, 7)).tolist() for _ in range(args.prompts)]
    trace: dict[str, np.ndarray] = {}
    listen(trace, batch)
    trainer = Recorder(
        args=config,
        processing_class=tokenizer,
        model=models["policy"],
        ref_model=models["ref"],
        reward_model=models["reward"],
        value_model=models["value"],
        train_dataset=Dataset.from_dict({"input_ids": prompts}),
        eval_dataset=Dataset.from_dict({"input_ids": prompts[: config.per_device_eval_batch_size]}),
    )
    trainer.logged = []
    np.random.seed(args.seed)
    trainer.train()
    return trainer, trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--options", type=json.loads, default={}, help="TRL's own options, as JSON")
    for name, default in (("updates", 2), ("micro", 8), ("accum", 1), ("prompts", 64), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("layers", 2), ("width", 16), ("heads", 2), ("vocab", 24)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--init_std", type=float, default=0.2)
    parser.add_argument("--sequential", action="store_true", help="no parallel residual")
    parser.add_argument("--eos_fill", action="store_true", help="no pad in the policy's config")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    defaults = {"response_length": 8, "learning_rate": 1e-3, "adam_epsilon": 1e-5, "num_ppo_epochs": 2}
    options = {**defaults, "stop_token": "eos", **args.options}
    tokenizer, models = make_tokenizer(args.vocab), make_models(args)
    shutil.rmtree(args.folder, ignore_errors=True)
    for name, model in models.items():
        model.save_pretrained(args.folder / name)
    tokenizer.save_pretrained(args.folder / "tokenizer")
    with tempfile.TemporaryDirectory() as scratch:
        trainer, trace = train(args, options, models, tokenizer, scratch)
    models["policy"].save_pretrained(args.folder / "final_policy")
    models["value"].save_pretrained(args.folder / "final_value")
    done = trainer.args
    recorded = {
        **options,
        "micro": args.micro,
        "accum": args.accum,
        "batch": args.micro * args.accum,
        "parallel": not args.sequential,
        "adam": {
            "beta1": done.adam_beta1,
            "beta2": done.adam_beta2,
            "eps": done.adam_epsilon,
            "weight_decay": done.weight_decay,
            "max_grad_norm": done.max_grad_norm,
        },
        "lr_scheduler": str(done.lr_scheduler_type),
        "warmup": str(done.warmup_steps),
    }
    case = {"options": recorded, "logs": trainer.logged}
    (args.folder / "case.json").write_text(json.dumps(case, indent=1) + "\n")
    np.savez_compressed(args.folder / "trace.npz", **trace)


if __name__ == "__main__":
    main()
