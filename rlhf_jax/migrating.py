"""TRL's options and what became of each: the same name, another name, or refused with the reason.

Three tables are the whole truth: a name that is a field here is the same option (NOTES says what differs), RENAMED
and REFUSED have the rest. The command line reads them, and `python -m rlhf_jax.migrating` prints docs/migrating.md.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Literal

from rlhf_jax.config import STAGES


@dataclasses.dataclass(frozen=True)
class Renamed:
    """Another name for the same option; `values` translates its values where they differ."""

    to: str
    note: str = ""
    values: dict[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of a name in one stage."""

    kind: Literal["same", "renamed", "refused"]
    text: str = ""
    renamed: Renamed | None = None


# --- TRL's tables, row by row (1.12.0; legacy RLOO and OnPolicyConfig of 0.21.0), and the stages that they speak of

TABLES: dict[str, tuple[tuple[str, ...], str]] = {
    "PPOConfig": (
        ("ppo",),
        "learning_rate dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size "
        "num_sample_generations response_length stop_token stop_token_id temperature missing_eos_penalty "
        "sft_model_path world_size num_total_batches micro_batch_size local_batch_size batch_size "
        "local_mini_batch_size mini_batch_size push_to_hub reward_model_path model_adapter_name ref_adapter_name "
        "num_ppo_epochs whiten_rewards kl_coef kl_estimator cliprange vf_coef cliprange_value gamma lam "
        "ds3_gather_for_generation",
    ),
    "What every TRL config adds to TrainingArguments": (
        tuple(STAGES),
        "logging_steps gradient_checkpointing bf16 lr_scheduler_kwargs use_liger_kernel torch_empty_cache_steps",
    ),
    "TrainingArguments": (
        tuple(STAGES),
        "learning_rate optim adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm lr_scheduler_type "
        "warmup_steps num_train_epochs max_steps per_device_train_batch_size per_device_eval_batch_size "
        "gradient_accumulation_steps eval_strategy eval_steps save_strategy save_steps save_total_limit "
        "load_best_model_at_end metric_for_best_model resume_from_checkpoint logging_steps seed bf16 "
        "gradient_checkpointing remove_unused_columns dataloader_* group_by_length report_to push_to_hub "
        "hub_model_id use_liger_kernel torch_compile neftune_noise_alpha label_smoothing_factor deepspeed fsdp",
    ),
    "RLOOConfig until 0.21": (
        ("ppo",),
        "exp_name reward_model_path num_ppo_epochs whiten_rewards kl_coef cliprange rloo_k normalize_reward "
        "reward_clip_range normalize_advantage token_level_kl ds3_gather_for_generation",
    ),
    "OnPolicyConfig until 0.21": (
        ("ppo",),
        "logging_steps bf16 run_name dataset_num_proc num_mini_batches total_episodes "
        "local_rollout_forward_batch_size num_sample_generations response_length stop_token stop_token_id temperature "
        "missing_eos_penalty sft_model_path world_size num_total_batches micro_batch_size local_batch_size batch_size "
        "local_mini_batch_size mini_batch_size push_to_hub",
    ),
    "RLOOConfig since 0.22": (
        ("ppo",),
        "learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout remove_unused_columns "
        "num_generations num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset "
        "pad_to_multiple_of generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs "
        "chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl "
        "vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port "
        "vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length "
        "vllm_tensor_parallel_size beta num_iterations epsilon epsilon_high reward_weights normalize_advantages "
        "reward_clip_range mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps "
        "log_completions log_multimodal num_completions_to_print log_unique_prompts "
        "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged",
    ),
    "RewardConfig": (
        ("reward",),
        "learning_rate model_init_kwargs trust_remote_code chat_template_path disable_dropout dataset_num_proc "
        "eos_token max_length pad_to_multiple_of center_rewards_coefficient activation_offloading pad_token",
    ),
    "Options of the scripts": (
        tuple(STAGES),
        "dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers "
        "model_name_or_path model_revision dtype attn_implementation use_peft lora_r lora_alpha lora_dropout "
        "lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora "
        "load_in_8bit load_in_4bit bnb_4bit_quant_type bnb_4bit_quant_storage use_bnb_nested_quant "
        "reward_model_name_or_path reward_funcs",
    ),
    "Others that commands use": (
        tuple(STAGES),
        "output_dir overwrite_output_dir logging_dir max_prompt_length warmup_ratio fp16 torch_dtype use_cpu",
    ),
}

# --- the same option under another name

_BF16 = {"true": "bfloat16", "false": "float32", "none": "float32"}
RENAMED: dict[str, Renamed] = {
    "output_dir": Renamed("run_dir"),
    "bf16": Renamed("dtype", "true is bfloat16, false float32; master weights and reductions stay float32", _BF16),
    "torch_dtype": Renamed("dtype"),
    "model_name_or_path": Renamed("sft_model_path", "the policy to start from"),
    "reward_model_name_or_path": Renamed("reward_model_path"),
    "local_rollout_forward_batch_size": Renamed(
        "rollout_batch_size", "TRL's is a device's; here it is over all devices. It changes memory, not the result"
    ),
    "max_completion_length": Renamed("response_length"),
    "max_prompt_length": Renamed("query_length"),
    "beta": Renamed("kl_coef"),
    "epsilon": Renamed("cliprange", "one range for both sides of the ratio"),
    "num_iterations": Renamed("num_ppo_epochs"),
}

# --- refused

_OUTPUT = "TRL computes it and overwrites what you give."
_RLOO = "It belongs to the RLOO trainer, which is not in this version."
_LORA = "LoRA adapters and quantised weights are not supported yet: all weights are trained."
_VLLM = "Generation is in-process, on the mesh that trains: there is no vLLM engine to set up."
_SHARDS = (
    "There is no DeepSpeed or FSDP engine: mesh_fsdp shards params and optimizer state, mesh_tensor splits layers."
)
_REPO = (
    "Nothing is uploaded. RUN/policy is a Hugging Face checkpoint with tokenizer and model card: `hf upload` takes it."
)
_LOADER = "Batches are a function of the seed and the step: there is no data loader to tune."
_NO_CHAT = "Chat templates are not applied: prompts and completions are plain text."
_COMPLETIONS = "Sample completions go to RUN/completions, num_sample_generations times in a run."
_REF = "The reference model stays as it was loaded (ref_model_path)."
_NAME = "A run is named by its folder: run_dir."
_PER_DEVICE = (
    "Batches here are global, whatever the number of devices: batch_size = per_device_train_batch_size x "
    "gradient_accumulation_steps x devices, micro_batch_size = per_device_train_batch_size x devices."
)

REFUSED: dict[str, str] = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), _PER_DEVICE),
    "per_device_eval_batch_size": "Evaluation takes the rows of training: rollout_batch_size or micro_batch_size.",
    "world_size": "Devices and processes are found at start-up; mesh_data, mesh_fsdp and mesh_tensor arrange them.",
    "num_total_batches": f"{_OUTPUT} Updates = ceil(total_episodes / batch_size); give total_episodes.",
    "local_batch_size": f"{_OUTPUT} Batches here are global: batch_size = local_batch_size x devices.",
    "mini_batch_size": f"{_OUTPUT} A minibatch has batch_size / num_mini_batches rows; give num_mini_batches.",
    "local_mini_batch_size": f"{_OUTPUT} Minibatches are global: batch_size / num_mini_batches rows over all devices.",
    "generation_batch_size": "Each update generates batch_size responses, rollout_batch_size at a time; give those.",
    "steps_per_generation": "Each update generates batch_size responses and makes num_mini_batches steps an epoch.",
    "max_steps": "PPO counts episodes: total_episodes = max_steps x batch_size.",
    "warmup_ratio": "Give warmup_steps = warmup_ratio x updates (--dry_run prints the updates).",
    "dataset_num_proc": "Rows are tokenised in one process, by the tokenizer's own threads.",
    **dict.fromkeys(("push_to_hub", "hub_model_id"), _REPO),
    **dict.fromkeys(("model_adapter_name", "ref_adapter_name", "use_peft", "lora_*", "use_rslora", "use_dora"), _LORA),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "bnb_4bit_quant_*", "use_bnb_nested_quant"), _LORA),
    **dict.fromkeys(("ds3_gather_for_generation", "deepspeed", "fsdp"), _SHARDS),
    "ignore_bias_buffers": "It works around torch's DistributedDataParallel, which is not used.",
    "optim": "The optimizer is AdamW (adam_*, weight_decay); another optax optimizer goes to rlhf_jax.run(optimizer=).",
    "lr_scheduler_kwargs": "The schedules linear, cosine and constant have no parameters but warmup_steps.",
    "use_liger_kernel": "XLA fuses the kernels; there are none to swap.",
    "torch_empty_cache_steps": "There is no torch cache; XLA plans memory at compile time.",
    "torch_compile": "Every step is compiled, by jax.jit.",
    "attn_implementation": "There is one attention, written in JAX and compiled by XLA.",
    "neftune_noise_alpha": "Noise on embeddings is not supported.",
    "label_smoothing_factor": "Label smoothing is not supported.",
    "eval_strategy": "Give eval_steps: every so many updates; 0: only at the end. dataset_test_split None: never.",
    "save_strategy": "Give save_steps: every so many updates; 0: only at the end.",
    "load_best_model_at_end": "Stages keep the last model; SFT's early_stopping_patience ends at a plateau.",
    "metric_for_best_model": "SFT's early_stopping_patience goes by the validation loss; others keep the last.",
    "resume_from_checkpoint": "The same run_dir goes on by itself; resume auto, must (fail without one) or never.",
    "overwrite_output_dir": "resume never refuses a used folder; delete it or take another run_dir.",
    "remove_unused_columns": "Columns are kept for reward functions and named by prompt_column and its like.",
    **dict.fromkeys(("dataloader_*", "group_by_length", "shuffle_dataset"), _LOADER),
    **dict.fromkeys(("exp_name", "run_name"), _NAME),
    "logging_dir": "Everything of a run lies in run_dir: metrics.jsonl and tensorboard/ in it.",
    **dict.fromkeys(("rloo_k", "num_generations", "num_generations_eval"), _RLOO),
    **dict.fromkeys(("normalize_reward", "reward_clip_range"), _RLOO),
    "token_level_kl": f"{_RLOO} PPO's KL penalty is per token.",
    **dict.fromkeys(("normalize_advantage", "normalize_advantages"), f"{_RLOO} PPO whitens advantages always."),
    "reward_weights": f"{_RLOO} PPO has one reward: weigh functions inside yours.",
    "reward_funcs": "Python rewards are objects: rlhf_jax.run(config, reward_funcs=...) takes them.",
    "mask_truncated_completions": f"{_RLOO} PPO has missing_eos_penalty for responses without an end.",
    "epsilon_high": "The policy ratio is clipped to 1 - cliprange .. 1 + cliprange: one range for both sides.",
    **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), _REF),
    "disable_dropout": "PPO always runs without dropout, as TRL's does.",
    "model_init_kwargs": "Give model_revision and dtype; the shape comes from the checkpoint's config.json.",
    "trust_remote_code": "No code from a repository is ever run: model families are part of this package.",
    "router_aux_loss_coef": "Mixture-of-experts models are not supported.",
    "pad_to_multiple_of": "Batches are padded to length_buckets: give the lengths themselves.",
    "generation_kwargs": "Give the options: temperature, top_k, top_p, min_p, repetition_penalty, stop_token.",
    **dict.fromkeys(("chat_template_kwargs", "chat_template_path"), _NO_CHAT),
    "cache_implementation": "There is one key-value cache, of a fixed shape.",
    **dict.fromkeys(("use_vllm", "vllm_*"), _VLLM),
    **dict.fromkeys(("log_completions", "num_completions_to_print", "log_unique_prompts"), _COMPLETIONS),
    "log_multimodal": "Prompts and completions are text.",
    **dict.fromkeys(
        ("use_transformers_*", "transformers_continuous_batching_config"), "Generation is in-process, in JAX."
    ),
    "eos_token": "The end token is the tokenizer's; PPO can stop at another by stop_token_id.",
    "pad_token": "The pad token is the tokenizer's; without one, [PAD] takes an unused row, as in TRL.",
    "activation_offloading": "gradient_checkpointing saves activation memory; offloading is not supported.",
    "fp16": "float16 needs loss scaling and is not supported; dtype is float32 or bfloat16.",
    "use_cpu": "Set the environment variable JAX_PLATFORMS=cpu.",
}

# --- the same name, and what is worth knowing

NOTES: dict[str, str] = {
    "learning_rate": "default 3e-6 in every stage (TRL: PPO 3e-6, RLOO 1e-6, reward 1e-4)",
    "batch_size": "an input here: rows or episodes an update, over all devices",
    "micro_batch_size": "an input here: rows a forward and backward pass, over all devices; never changes the result",
    "num_mini_batches": "optimizer steps an epoch (TRL since 0.17 makes one, whatever it says)",
    "stop_token": "default eos",
    "stop_token_id": "0 is a token like any other; give `--stop_token None` with it",
    "num_train_epochs": "PPO reads it when total_episodes is not given",
    "num_sample_generations": "written to RUN/completions",
    "kl_estimator": "k2 as well",
    "top_k": "0: all tokens",
    "temperature": "default 0.7",
    "logging_steps": "whole updates; the file metrics.jsonl gets every update",
    "gradient_checkpointing": "default false; it works in PPO too",
    "max_grad_norm": "default None; when given, PPO clips too (TRL's PPO never does)",
    "weight_decay": "see weight_decay_on for the weights that it acts on",
    "lr_scheduler_type": "linear, cosine or constant, each after warmup_steps",
    "warmup_steps": "whole updates",
    "max_steps": "-1: num_train_epochs decides",
    "eval_steps": "0: only at the end",
    "save_steps": "the whole train state, optimizer and keys included; 0: only at the end",
    "seed": "the data order and the minibatches too",
    "report_to": "tensorboard or none; metrics.jsonl is always written",
    "disable_dropout": "PPO always runs without dropout",
    "max_length": "longer pairs are dropped, which is what TRL's code does",
    "dataset_test_split": "default validation; None: no evaluation",
    "dataset_streaming": "only false: batches are a function of seed and step, a stream is not",
    "dtype": "compute precision; master weights and reductions stay float32",
    "sft_model_path": "default: the published 1b checkpoint",
    "reward_model_path": "default: the published 1b checkpoint; None with reward functions",
}


def answer(name: str, stage: str) -> Answer | None:
    """What became of TRL's option `name` in `stage` ('sft', 'reward', 'ppo'); None: never heard of."""
    fields = {key: set(config_type.__dataclass_fields__) for key, config_type in STAGES.items()}
    if name in fields[stage]:
        return Answer("same", NOTES.get(name, ""))
    renamed = RENAMED.get(name)
    if renamed and renamed.to in fields[stage]:
        return Answer("renamed", renamed.note, renamed)
    reason = next((REFUSED[key] for key in REFUSED if fnmatch.fnmatchcase(name, key)), None)
    if reason:
        return Answer("refused", reason)
    here = renamed.to if renamed else name
    owners = [key for key in STAGES if here in fields[key]]
    if owners:
        called = f"It is {here} here, " if renamed else "It is "
        return Answer("refused", f"{called}an option of {' and '.join(owners)}, not of {stage}.")
    return None


def _row(name: str, stages: tuple[str, ...]) -> str:
    """One line of the page: the answers of the table's stages, equal ones together."""
    cells: dict[str, list[str]] = {}
    for stage in stages:
        found = answer(name, stage)
        assert found is not None, f"TRL's {name} has no answer in {stage}"
        what = f"`{found.renamed.to}`" if found.renamed else found.kind
        colon = ": " if found.kind == "refused" else "; "
        cells.setdefault(what + colon + found.text if found.text else what, []).append(stage)
    if len(cells) == 1:
        return f"| `{name}` | {next(iter(cells))} |"
    return (
        f"| `{name}` | " + "; ".join(f"**{', '.join(who)}** {text.rstrip('.')}" for text, who in cells.items()) + " |"
    )


_HEAD = """# Coming from TRL

<!-- written by `python -m rlhf_jax.migrating > docs/migrating.md` from the tables that the parser reads -->

Options keep TRL's names. Each is a flag (`--kl_coef 0.1`, dashes work too) and a field of `SFTConfig`, `RewardConfig`
or `PPOConfig`; in a config of all three stages a flag names its stage (`--ppo.kl_coef 0.1`). Below is every option of
TRL 1.12.0, of its RLOO trainer before and after 0.22, and of its scripts: **same**, another name that is accepted and
told, or **refused** with the reason, which is also what the command line says.

## Batches

| TRL | here |
|---|---|
| `per_device_train_batch_size` x devices | `micro_batch_size`: rows a forward and backward pass |
| `per_device_train_batch_size` x `gradient_accumulation_steps` x devices | `batch_size`: episodes an update |
| `batch_size` / `num_mini_batches` | the same: rows an optimizer step |
| `local_rollout_forward_batch_size` x devices | `rollout_batch_size`: rows generated and scored at a time |
| `num_total_batches` | ceil(`total_episodes` / `batch_size`) updates |

The published PPO run on 8 GPUs, 16 x 4 x 8, is `--batch_size 512 --micro_batch_size 128`. All are counts over all
devices, so a run gives the same result on any number of them. `--dry_run` prints the arithmetic.
"""


def page() -> str:
    """The text of docs/migrating.md."""
    parts = [_HEAD]
    for title, (stages, names) in TABLES.items():
        rows = "\n".join(_row(name, stages) for name in names.split())
        parts.append(f"\n## {title}\n\n| TRL | here |\n|---|---|\n{rows}\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
