"""The options of a recorded TRL run, in our own words. What a replay cannot honour is refused by name."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from rlhf_jax.config import GRPOConfig, PPOConfig, RLOOConfig

# Ours under the same name and with the same meaning.
SAME = (
    "num_ppo_epochs",
    "response_length",
    "temperature",
    "kl_coef",
    "kl_estimator",
    "learning_rate",
    "stop_token",
    "stop_token_id",
    "missing_eos_penalty",
    "vf_coef",
    "cliprange",
    "cliprange_value",
    "gamma",
    "lam",
    "whiten_rewards",
)
# Read below, each in its own way.
READ = (
    "num_mini_batches",
    "micro",
    "accum",
    "batch",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "local_rollout_forward_batch_size",
    "parallel",
    "adam",
    "adam_epsilon",
    "adam_beta1",
    "adam_beta2",
    "weight_decay",
    "lr_scheduler",
    "lr_scheduler_type",
    "warmup",
    "warmup_steps",
    "warmup_ratio",
)
# They decide what is sampled, saved or shown, which a replay reads from the record; or TRL's PPO ignores them.
IRRELEVANT = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_steps",
    "total_episodes",
    "num_train_epochs",
    "seed",
    "data_seed",
    "num_sample_generations",
    "max_grad_norm",
    "gradient_checkpointing",
    "attn_implementation",
    "use_cpu",
    "report_to",
    "save_strategy",
    "logging_steps",
    "output_dir",
)
# Of adapters, by TRL's names, PEFT's, and in a dict of their own: see `tests.parity.adapters`.
NESTED = ("peft_config", "lora_config", "peft", "lora")
ADAPTERS = (
    "use_peft",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_modules_to_save",
    "lora_task_type",
    "use_rslora",
    "use_dora",
    "target_modules",
    "modules_to_save",
    "load_in_8bit",
    "load_in_4bit",
    "model_adapter_name",
    "ref_adapter_name",
    *NESTED,
)
PPO_DEFAULTS = {
    "num_ppo_epochs": 4,
    "stop_token": None,
    "temperature": 0.7,
    "learning_rate": 3e-6,
    "response_length": 53,
}
FORWARD_BATCH = 64  # TRL's default local_rollout_forward_batch_size


class Refused(Exception):
    """This record cannot be replayed; the message says which option or file is in the way."""


def micro_and_accum(options: dict[str, Any], where: str) -> tuple[int, int]:
    """(rows a micro-batch, micro-batches an optimizer step)."""
    micro = options.get("micro", options.get("per_device_train_batch_size"))
    if micro is None:
        raise Refused(f"{where}: option micro (per_device_train_batch_size) is missing")
    return micro, options.get("accum", options.get("gradient_accumulation_steps", 1))


@dataclasses.dataclass(frozen=True)
class Stepping:
    """How TRL's PPO cut an epoch into micro-batches and when it stepped."""

    micro: int  # rows a micro-batch
    micros: int  # micro-batches an epoch
    accum: int  # micro-batches an optimizer step

    @property
    def steps(self) -> int:
        """Optimizer steps an epoch."""
        return self.micros // self.accum

    def stepped(self, every: bool) -> tuple[int, int]:
        """(optimizer steps an epoch, divisor of gradients); `every`: after every micro-batch, as on a pass's last."""
        return (self.micros, self.accum) if every else (self.steps, 1)


def stepping(options: dict[str, Any], where: str) -> Stepping:
    """TRL's arithmetic of batches; Refused where its own defect would decide (register row 1)."""
    micro, accum = micro_and_accum(options, where)
    minibatches = options.get("num_mini_batches", 1)
    batch = micro * accum
    if options.get("batch", batch) != batch:
        raise Refused(f"{where}: option batch is {options['batch']}, but micro {micro} x accum {accum} is {batch}")
    if minibatches > 1 and accum > 1:
        raise Refused(
            f"{where}: option num_mini_batches={minibatches} with accum={accum}: TRL's PPO then makes one optimizer "
            "step an epoch, whatever num_mini_batches says, and averages metrics over empty slots (register row 1)"
        )
    if batch % minibatches:
        raise Refused(f"{where}: option num_mini_batches: {batch} episodes are not a multiple of {minibatches}")
    return Stepping(batch // minibatches if minibatches > 1 else micro, minibatches * accum, accum)


def _schedule(options: dict[str, Any], updates: int, where: str) -> dict[str, Any]:
    name = str(options.get("lr_scheduler", options.get("lr_scheduler_type", "linear"))).split(".")[-1].lower()
    warmup = float(options.get("warmup", options.get("warmup_steps", 0)) or 0)
    ratio = float(options.get("warmup_ratio") or 0)
    if not warmup and ratio:
        warmup = ratio
    if 0 < warmup < 1:
        warmup = math.ceil(updates * warmup)
    known = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    if name not in known:
        raise Refused(f"{where}: option lr_scheduler={name!r} is not replayed; known: {', '.join(known)}")
    return {"lr_scheduler_type": known[name], "warmup_steps": 0 if name == "constant" else int(warmup)}


def _adam(options: dict[str, Any]) -> dict[str, Any]:
    adam = options.get("adam", {})
    return {
        "adam_beta1": adam.get("beta1", options.get("adam_beta1", 0.9)),
        "adam_beta2": adam.get("beta2", options.get("adam_beta2", 0.999)),
        "adam_epsilon": adam.get("eps", options.get("adam_epsilon", 1e-8)),
        "weight_decay": adam.get("weight_decay", options.get("weight_decay", 0.0)),
        "max_grad_norm": None,  # TRL's PPO never clips
    }


def ppo_config(options: dict[str, Any], updates: int, where: str) -> PPOConfig:
    """The PPOConfig that does what TRL 1.12.0 did with `options`; one that is not listed has TRL's default.

    Args:
      options: `options` of case.json.
      updates: updates of the run, which the schedule needs.
      where: what messages call the case.

    Raises:
      Refused: it names the option.
    """
    refuse_unknown(options, (*SAME, *READ, *IRRELEVANT, *ADAPTERS), where)
    if options.get("kl_estimator", "k1") not in ("k1", "k3"):
        raise Refused(f"{where}: option kl_estimator={options['kl_estimator']!r}; TRL has k1 and k3")
    if options.get("stop_token") not in (None, "eos"):
        raise Refused(f"{where}: option stop_token={options['stop_token']!r}; TRL has 'eos' and None")
    cut = stepping(options, where)
    values = {**PPO_DEFAULTS, **{name: options[name] for name in SAME if name in options}}
    return PPOConfig(
        **values,
        **_adam(options),
        **_schedule(options, updates, where),
        batch_size=cut.micro * cut.micros,
        num_mini_batches=cut.steps,
        micro_batch_size=cut.micro,
        loss_aggregation="token_mean_micro",
        whiten_ddof=1,
        score_position="after_eos",
        eos_penalty_mode="subtract",
        old_logprobs="forward",
    )


def refuse_unknown(options: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    """Refused for an option that no one reads."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise Refused(f"{where}: option {unknown[0]}={options[unknown[0]]!r} is not known to this replay")


# --- RLOO

RLOO_SAME = (
    "num_generations",
    "num_iterations",
    "beta",
    "epsilon",
    "epsilon_high",
    "learning_rate",
    "temperature",
    "normalize_advantages",
    "mask_truncated_completions",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
)
RLOO_READ = (
    "max_completion_length",
    "reward_clip_range",
    "reward_weights",
    "steps_per_generation",
    "generation_batch_size",
    "max_grad_norm",
    "disable_dropout",
    *(name for name in READ if name != "num_mini_batches"),
)
# They decide what is sampled or shown, or how wide it is padded.
RLOO_IRRELEVANT = (
    "shuffle_dataset",
    "remove_unused_columns",
    "num_generations_eval",
    "pad_to_multiple_of",
    "log_completions",
    "num_completions_to_print",
    "log_unique_prompts",
)
# Read by `tool_turns`.
TOOLS = ("reward_names", "versions", "max_tool_calling_iterations", "chat_template_kwargs")
LEGACY_RENAMED = {
    "rloo_k": "num_generations",
    "num_ppo_epochs": "num_iterations",
    "kl_coef": "beta",
    "cliprange": "epsilon",
    "normalize_advantage": "normalize_advantages",
}
LEGACY_SAME = (
    "num_mini_batches",
    "response_length",
    "temperature",
    "learning_rate",
    "missing_eos_penalty",
    "normalize_reward",
)


def rloo_config(options: dict[str, Any], steps: int, rows: int, where: str) -> RLOOConfig:
    """The RLOOConfig that does what TRL 1.12.0's RLOOTrainer did with `options`.

    Args:
      options: `options` of case.json.
      steps: optimizer steps of the run, which the schedule needs.
      rows: responses of a generation batch.
      where: what messages call the case.

    Raises:
      Refused: it names the option.
    """
    refuse_unknown(options, (*RLOO_SAME, *RLOO_READ, *IRRELEVANT, *RLOO_IRRELEVANT, *ADAPTERS), where)
    micro, accum = micro_and_accum(options, where)
    if rows % micro:
        raise Refused(f"{where}: option micro: {rows} rows a generation are no multiple of {micro}")
    values = {name: options[name] for name in RLOO_SAME if name in options}
    clip = options.get("reward_clip_range")
    clipped = options.get("adam", {}).get("max_grad_norm", options.get("max_grad_norm", 1.0))
    # A norm of 0 is TRL's way to say: never.
    adam = {**_adam(options), "max_grad_norm": clipped or None}
    return RLOOConfig(
        **values,
        **adam,
        **_schedule(options, steps, where),
        response_length=options.get("max_completion_length", 512),
        reward_clip_range=None if clip is None else tuple(clip),
        batch_size=rows,
        micro_batch_size=micro,
        disable_dropout=True,
        shared_prompts=False,  # TRL runs prompt and response through the model side by side
    )


GRPO_RENAMED = {
    "max_completion_length": "response_length",
    "vllm_importance_sampling_mode": "importance_sampling_mode",
    "vllm_importance_sampling_clip_max": "importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min": "importance_sampling_clip_min",
}
GRPO_SAME = (
    *(name for name in RLOO_SAME if name != "normalize_advantages"),
    "delta",
    "loss_type",
    "importance_sampling_level",
    "multi_objective_aggregation",
    "use_bias_correction_kl",
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
    "entropy_coef_min",
    "entropy_coef_max",
    "entropy_coef_delta",
    "entropy_target",
    "off_policy_mask_threshold",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)


def grpo_config(options: dict[str, Any], steps: int, rows: int, accum: int, where: str) -> GRPOConfig:
    """The GRPOConfig that does what TRL 1.12.0's GRPOTrainer did with `options`.

    Args:
      options: `options` of case.json.
      steps: optimizer steps of the run, which the schedule needs.
      rows: responses of a generation batch.
      accum: micro-batches of an optimizer step.
      where: what messages call the case.

    Raises:
      Refused: it names the option.
    """
    own = ("algorithm", "scale_rewards", *GRPO_RENAMED, *GRPO_SAME)
    read = (name for name in RLOO_READ if name != "reward_clip_range")
    refuse_unknown(options, (*own, *read, *IRRELEVANT, *RLOO_IRRELEVANT, *ADAPTERS, *TOOLS), where)
    micro, _ = micro_and_accum(options, where)
    if rows % micro:
        raise Refused(f"{where}: option micro: {rows} rows a generation are no multiple of {micro}")
    values = {name: options[name] for name in GRPO_SAME if name in options}
    values |= {ours: options[name] for name, ours in GRPO_RENAMED.items() if name in options}
    scale = options.get("scale_rewards", "group")
    clipped = options.get("adam", {}).get("max_grad_norm", options.get("max_grad_norm", 1.0))
    return GRPOConfig(
        **{"num_generations": 8, **values},
        **{**_adam(options), "max_grad_norm": clipped or None},
        **_schedule(options, steps, where),
        scale_rewards={True: "group", False: "none"}.get(scale, scale),
        loss_aggregation="token_mean_micro",
        batch_size=rows,
        num_mini_batches=max(rows // (micro * accum), 1),
        micro_batch_size=micro,
        disable_dropout=True,
        shared_prompts=False,  # TRL runs prompt and response through the model side by side
    )


def legacy_stepping(options: dict[str, Any], where: str) -> Stepping:
    """TRL 0.17.0's arithmetic of RLOO's batches: num_mini_batches multiplies the batch."""
    micro, accum = micro_and_accum(options, where)
    minibatches = options.get("num_mini_batches", 1)
    batch = micro * accum * minibatches
    if options.get("batch", batch) not in (batch, micro * accum):
        raise Refused(
            f"{where}: option batch is {options['batch']}, but micro {micro} x accum {accum} x num_mini_batches "
            f"{minibatches} is {batch}"
        )
    return Stepping(micro, minibatches * accum, accum)


def legacy_rloo_config(options: dict[str, Any], updates: int, where: str) -> RLOOConfig:
    """The RLOOConfig that does what TRL 0.17.0's RLOOTrainer did with `options`; token_level_kl changed nothing there.

    Args:
      options: `options` of case.json.
      updates: updates of the run.
      where: what messages call the case.

    Raises:
      Refused: it names the option.
    """
    known = (*LEGACY_RENAMED, *LEGACY_SAME, *READ, *IRRELEVANT, *ADAPTERS, "stop_token", "stop_token_id")
    refuse_unknown(options, (*known, "token_level_kl", "reward_clip_range", "whiten_rewards"), where)
    cut = legacy_stepping(options, where)
    values = {"num_generations": 2, "num_iterations": 4, "beta": 0.05, "learning_rate": 5e-5, "temperature": 0.7}
    values |= {"response_length": 53}
    values |= {
        LEGACY_RENAMED.get(name, name): options[name] for name in (*LEGACY_RENAMED, *LEGACY_SAME) if name in options
    }
    clip = options.get("reward_clip_range", 10.0)
    return RLOOConfig(
        **values,
        **_adam(options),
        **_schedule(options, updates, where),
        reward_clip_range=(clip,) if values.get("normalize_reward") else None,
        advantage_epsilon=1e-8,
        batch_size=cut.micro * cut.micros,
        micro_batch_size=cut.micro,
        lr_scheduler_unit="update",
        reshuffle="per_epoch",
        disable_dropout=True,
        shared_prompts=False,  # TRL runs prompt and response through the model side by side
    )


def check_parts(folder: Path, parts: tuple[str, ...]) -> None:
    """Refused if a part of a record is missing."""
    for part in parts:
        if not (folder / part).exists():
            raise Refused(f"{folder}: {part} is missing")


def check_folder(folder: Path) -> None:
    """Refused if the folder is no record."""
    if not (folder / "case.json").is_file():
        raise Refused(f"{folder} has no case.json: not a recorded run")


def check_ppo_folder(folder: Path) -> None:
    """Refused if a part of a PPO record is missing; with an adapter the reference may be the policy without it."""
    ref = () if (folder / "adapter").exists() else ("ref",)
    parts = ("trace.npz", "policy", *ref, "value", "reward", "tokenizer", "final_policy", "final_value")
    check_parts(folder, parts)
