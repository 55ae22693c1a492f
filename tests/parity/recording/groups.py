"""What the records of TRL 1.12.0's trainers with several responses to a prompt share (CPU, float32).

trace.npz, for generation batch G: prompt_ids_G, prompt_mask_G, completion_ids_G, completion_mask_G [B, ...],
advantages_G [B], rewards_per_func_G [B, functions] (NaN: None) and what else the trainer keeps, where TRL makes it; for
micro-batch J after TRL's shuffle: stepJ_prompt_ids and so on, stepJ_loss.
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
from datasets import Dataset

from tests.parity.recording import peft, tiny


def even_share(completion_ids, **kwargs):
    """Share of even ids, with a little for length: rarely equal."""
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) + 0.1 * len(ids) for ids in completion_ids]


def low_ids(completion_ids, **kwargs):
    """Share of ids below 8, of responses that begin with an id above 4 only."""
    return [sum(i < 8 for i in ids) / len(ids) if ids and ids[0] > 4 else None for ids in completion_ids]


def sometimes(completion_ids, **kwargs):
    """1 for responses of more than 3 tokens; others are not judged."""
    return [1.0 if len(ids) > 3 else None for ids in completion_ids]


def hard_groups(completion_ids, **kwargs):
    """By pairs of rows: equal rewards; one row not judged; neither judged; different rewards."""
    rewards = []
    for row, ids in enumerate(completion_ids):
        kind, second = row // 2 % 4, row % 2
        unscored = kind == 2 or (kind == 1 and second)
        rewards.append(None if unscored else 0.5 if kind == 0 else 0.1 * sum(ids) / len(ids) - second)
    return rewards


FUNCTIONS = {function.__name__: function for function in (even_share, low_ids, sometimes, hard_groups)}


class Recording:
    """A mixin of TRL's trainers: its log, its generation batches and its micro-batches are kept.

    Attributes:
      kept: names of what a generation batch has; those that TRL does not make are left out.
    """

    kept: tuple[str, ...] = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")

    def __init__(self, setting: tiny.Setting, **kwargs):
        self.logged, self.trace, self.generations, self.micros = [], {}, 0, 0
        self.setting, self.rng = setting, np.random.default_rng(setting.seed + 1)
        super().__init__(**kwargs)

    def log(self, logs, *args, **kwargs):
        super().log(logs, *args, **kwargs)
        if "train_runtime" not in logs:
            kept = {name: x for name, x in logs.items() if name != "epoch"}
            self.logged.append({name: None if x is None else float(x) for name, x in kept.items()})

    def crafted(self, prompt_ids) -> list[list[int]]:
        """See `tiny.crafted_responses`."""
        ids = tiny.crafted_responses(self.rng, len(prompt_ids), self.max_completion_length, self.setting, "pad")
        ends = np.where((ids == tiny.EOS).any(1), (ids == tiny.EOS).argmax(1) + 1, ids.shape[1])
        return [row[:end].tolist() for row, end in zip(ids, ends, strict=True)]

    def _calculate_rewards(self, *args, **kwargs):
        rewards = super()._calculate_rewards(*args, **kwargs)
        self.trace[f"rewards_per_func_{self.generations}"] = rewards.numpy().copy()
        return rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        for name in filter(output.__contains__, self.kept):
            self.trace[f"{name}_{self.generations}"] = output[name].numpy().copy()
        self.generations += 1
        return output

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        for name in filter(inputs.__contains__, self.kept):
            self.trace[f"step{self.micros}_{name}"] = inputs[name].numpy().copy()
        self.trace[f"step{self.micros}_loss"] = loss.detach().numpy().copy()
        self.micros += 1
        return loss


def record(setting: tiny.Setting, trainer_type: type, config_type: type, named: dict[str, Any]) -> None:
    """Runs TRL and writes the record to setting.folder.

    Args:
      setting: of the run.
      trainer_type: a `Recording` of one of TRL's trainers.
      config_type: TRL's config of it.
      named: recorded among the options, and no option of TRL's.
    """
    options = {"max_completion_length": 8, **tiny.LEARNING, "temperature": 0.9, **setting.options}
    lora, own = peft.asked_for(options)
    tokenizer, models = tiny.start(setting, ("policy",))
    # TRL reads its reference again from where the policy came from.
    policy = type(models["policy"]).from_pretrained(setting.folder / "policy")
    prompts = [" ".join(f"w{i}" for i in prompt) for prompt in tiny.make_prompts(setting)]
    tiny.reset_accelerate()
    with tempfile.TemporaryDirectory() as scratch:
        config = config_type(
            **tiny.quiet(setting, scratch),
            logging_steps=1,
            gradient_checkpointing=False,
            max_steps=setting.updates,
            **own,
        )
        trainer = trainer_type(
            setting,
            model=policy,
            args=config,
            reward_funcs=[FUNCTIONS[name] for name in setting.functions],
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            peft_config=lora,
        )
        if lora is not None:
            peft.fill(trainer.model)
            peft.keep(trainer.model, setting.folder / "adapter")
        trainer.train()
    if lora is not None:
        peft.keep(trainer.model, setting.folder / "final_policy")
    else:
        policy.save_pretrained(setting.folder / "final_policy")
    tiny.finish(setting, config, {**named, **options}, trainer.logged, trainer.trace, None)
