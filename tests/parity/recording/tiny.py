"""Tiny models, a tokenizer, prompts and crafted responses: what a recorded run of TRL starts from.

Nothing here needs more than torch and transformers, so that it runs in the environments of old TRL releases too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    PreTrainedTokenizerFast,
)

EOS = 0
# Of every recorded run; an option that is given takes their place.
LEARNING = {"learning_rate": 1e-3, "adam_epsilon": 1e-5}


@dataclasses.dataclass
class Setting:
    """A run's size and surroundings: all that is not an option of TRL's."""

    folder: Path
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # TRL's own
    updates: int = 2  # optimizer steps for TRL's present RLOO
    micro: int = 8  # per_device_train_batch_size
    accum: int = 1  # gradient_accumulation_steps
    prompts: int = 64
    seed: int = 0
    family: str = "gpt_neox"  # model_type; width, heads and sequential are GPT-NeoX's
    layers: int = 2
    width: int = 16
    heads: int = 2
    vocab: int = 24
    init_std: float = 0.2
    sequential: bool = False  # no parallel residual
    eos_fill: bool = False  # no pad in the policy's config: generation fills ended rows with eos
    crafted: bool = False  # responses as `crafted_responses` has them, not sampled
    functions: tuple[str, ...] = ("even_share",)  # reward functions (TRL's present RLOO)

    @property
    def pad(self) -> int:
        """The id of <pad>."""
        return self.vocab - 1


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Word-level, <eos> first and <pad> last."""
    words = {"<eos>": EOS, **{f"w{i}": i for i in range(1, vocab - 1)}, "<pad>": vocab - 1}
    inner = Tokenizer(WordLevel(words, unk_token="w1"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", padding_side="left", model_max_length=64
    )


def make_models(setting: Setting) -> dict[str, torch.nn.Module]:
    """Policy, reference, value and reward model: random, and not alike."""
    ids = {"vocab_size": setting.vocab, "bos_token_id": EOS, "eos_token_id": EOS}
    pad = {"pad_token_id": None if setting.eos_fill else setting.pad}
    shared = {**ids, "num_hidden_layers": setting.layers, "initializer_range": setting.init_std}

    def make(kind: str, **fields: Any) -> torch.nn.Module:
        if setting.family == "gpt_neox":
            return make_gpt_neox(setting, kind, {**shared, **fields})
        # Their classes are not in the environments of old TRL releases.
        from tests.parity.recording import families

        return families.make(setting.family, kind, {**shared, **fields})

    policy, ref = make("causal", **pad), make("causal", **pad)
    value, reward = (make("scalar", pad_token_id=setting.pad) for _ in range(2))
    for model in (policy, value, reward):
        jitter(model, 0.1)  # biases and norms start at 0 and 1, where a mistake in them would not show
    # A reference near the policy, so that the KL is neither 0 nor huge.
    ref.load_state_dict(policy.state_dict())
    jitter(ref, 0.02)
    return {"policy": policy, "ref": ref, "value": value, "reward": reward}


def make_gpt_neox(setting: Setting, kind: str, fields: dict[str, Any]) -> torch.nn.Module:
    """A GPT-NeoX model: kind 'causal' or 'scalar'."""
    config = GPTNeoXConfig(
        hidden_size=setting.width,
        num_attention_heads=setting.heads,
        intermediate_size=2 * setting.width,
        max_position_embeddings=64,
        rotary_pct=0.5,
        use_parallel_residual=not setting.sequential,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **fields,
        **({"num_labels": 1} if kind == "scalar" else {}),
    )
    return GPTNeoXForSequenceClassification(config) if kind == "scalar" else GPTNeoXForCausalLM(config)


def jitter(model: torch.nn.Module, std: float) -> None:
    """Adds noise to every weight."""
    with torch.no_grad():
        for weight in model.parameters():
            weight += std * torch.randn_like(weight)


def make_prompts(setting: Setting) -> list[list[int]]:
    """Random prompts of 2 to 6 tokens."""
    rng = np.random.default_rng(setting.seed)
    return [rng.integers(1, setting.pad, size=rng.integers(2, 7)).tolist() for _ in range(setting.prompts)]


def crafted_responses(rng: np.random.Generator, rows: int, width: int, setting: Setting, after: str) -> np.ndarray:
    """Responses with the ends that samplers seldom give: eos last, eos first, a pad first, a pad before eos, no end.

    Args:
      rng: what the other tokens are drawn from.
      rows, width: their shape.
      setting: vocabulary and pad.
      after: what follows the first eos: "pad", "eos" or "junk" (a sampler that does not stop).

    Returns:
      [rows, width] int64.
    """
    ids = rng.integers(1, setting.pad, size=(rows, width))
    kinds = np.arange(rows) % 8
    ends = np.where(kinds == 1, width - 1, rng.integers(1, width - 1, size=rows))
    ends = np.where(kinds == 2, 0, ends)
    ids[kinds == 3, 0] = setting.pad
    ids[kinds == 4, np.maximum(ends[kinds == 4] - 1, 0)] = setting.pad
    ids[kinds == 6, -1] = setting.pad
    open_ended = (kinds == 5) | (kinds == 6)
    ids[~open_ended, ends[~open_ended]] = EOS
    if after != "junk":
        fill = setting.pad if after == "pad" else EOS
        ids = np.where((np.arange(width)[None] > ends[:, None]) & ~open_ended[:, None], fill, ids)
    return ids


def start(setting: Setting, names: tuple[str, ...]) -> tuple[PreTrainedTokenizerFast, dict[str, torch.nn.Module]]:
    """Seeds torch, makes the models, and begins the record with their weights and the tokenizer."""
    torch.manual_seed(setting.seed)
    torch.set_num_threads(1)
    tokenizer, models = make_tokenizer(setting.vocab), make_models(setting)
    shutil.rmtree(setting.folder, ignore_errors=True)
    for name in names:
        models[name].save_pretrained(setting.folder / name)
    tokenizer.save_pretrained(setting.folder / "tokenizer")
    return tokenizer, models


def finish(
    setting: Setting, args, options: dict[str, Any], logs: list[dict], trace: dict[str, np.ndarray], batch: int | None
) -> None:
    """Writes case.json and trace.npz.

    Args:
      setting: of the run.
      args: TRL's config after the run.
      options: what was given to it.
      logs: what it logged.
      trace: arrays by name.
      batch: episodes of an update; None where the trainer has none.
    """
    recorded = {
        **options,
        "micro": setting.micro,
        "accum": setting.accum,
        **({} if batch is None else {"batch": batch}),
        **({"parallel": not setting.sequential} if setting.family == "gpt_neox" else {}),
        "adam": {
            "beta1": args.adam_beta1,
            "beta2": args.adam_beta2,
            "eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
            "max_grad_norm": args.max_grad_norm,
        },
        "lr_scheduler": str(args.lr_scheduler_type),
        "warmup": str(args.warmup_steps),
    }
    case = {"options": recorded, "logs": logs}
    (setting.folder / "case.json").write_text(json.dumps(case, indent=1) + "\n")
    np.savez_compressed(setting.folder / "trace.npz", **trace)


def quiet(setting: Setting, scratch: str) -> dict[str, Any]:
    """The options of a run that writes nothing and logs to nobody."""
    return {
        "output_dir": scratch,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": setting.seed,
        "per_device_train_batch_size": setting.micro,
        "gradient_accumulation_steps": setting.accum,
    }


def reset_accelerate() -> None:
    """accelerate keeps state for the whole process: a run must not see the one before it."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
