"""What became of every option that TRL has or had: the tables that the command line and docs/migrating.md read."""

from __future__ import annotations

import dataclasses

from rlhf_jax.config import STAGES


@dataclasses.dataclass(frozen=True)
class Renamed:
    """Another name for the same option; `values` translates its values where they differ."""

    to: str
    note: str = ""
    values: dict[str, str] | None = None


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
        "gradient_accumulation_steps eval_strategy eval_steps eval_on_start save_strategy save_steps save_total_limit "
        "load_best_model_at_end metric_for_best_model greater_is_better resume_from_checkpoint logging_steps seed bf16 "
        "gradient_checkpointing remove_unused_columns dataloader_* group_by_length report_to push_to_hub "
        "hub_model_id use_liger_kernel torch_compile neftune_noise_alpha label_smoothing_factor deepspeed fsdp",
    ),
    "RLOOConfig until 0.21": (
        ("ppo", "rloo"),
        "exp_name reward_model_path num_ppo_epochs whiten_rewards kl_coef cliprange rloo_k normalize_reward "
        "reward_clip_range normalize_advantage token_level_kl ds3_gather_for_generation",
    ),
    "OnPolicyConfig until 0.21": (
        ("ppo", "rloo"),
        "logging_steps bf16 run_name dataset_num_proc num_mini_batches total_episodes "
        "local_rollout_forward_batch_size num_sample_generations response_length stop_token stop_token_id temperature "
        "missing_eos_penalty sft_model_path world_size num_total_batches micro_batch_size local_batch_size batch_size "
        "local_mini_batch_size mini_batch_size push_to_hub",
    ),
    "RLOOConfig since 0.22": (
        ("ppo", "rloo"),
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

# --- the same option under another name, in the stages that have that name

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
    "lora_modules_to_save": Renamed("modules_to_save", "PEFT's name"),
    "max_completion_length": Renamed("response_length"),
    "max_prompt_length": Renamed("query_length"),
    # PPO by RLOO's names
    "beta": Renamed("kl_coef"),
    "epsilon": Renamed("cliprange", "one range for both sides of the ratio"),
    "num_iterations": Renamed("num_ppo_epochs"),
    # RLOO by its names until 0.21
    "rloo_k": Renamed("num_generations"),
    "kl_coef": Renamed("beta"),
    "cliprange": Renamed("epsilon"),
    "num_ppo_epochs": Renamed("num_iterations"),
    "normalize_advantage": Renamed("normalize_advantages", "until 0.21 advantage_epsilon was 1e-8"),
}

# --- flags that set other options, once all flags are known

TRANSLATED: dict[str, str] = {
    "steps_per_generation": (
        "A flag that becomes batch_size = micro_batch_size x steps_per_generation; minibatches keep their rows and "
        "num_mini_batches follows. In a config file give these."
    ),
    "generation_batch_size": (
        "A flag that becomes batch_size; minibatches keep their rows and num_mini_batches follows. "
        "In a config file give these."
    ),
}

# --- refused

_OUTPUT = "TRL computes it and overwrites what you give."
_QUANTISED = "There are no weights of 4 bits; load_in_8bit keeps those that adapters stand on in int8."
_PLAIN = "Adapters are plain LoRA: use_peft, lora_r, lora_alpha, lora_dropout, lora_target_modules, use_rslora."
_VLLM = "Generation is in-process, on the mesh that trains: there is no vLLM engine to set up."
_SHARDS = (
    "There is no DeepSpeed or FSDP engine: mesh_fsdp shards params and optimizer state, mesh_tensor splits layers."
)
_LOADER = "Batches are a function of the seed and the step: there is no data loader to tune."
_REF = "PPO's reference model stays as it was loaded (ref_model_path); moving it is an option of rloo."
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
    "warmup_ratio": "Give warmup_steps = warmup_ratio x the steps of the schedule (--dry_run prints how many).",
    "dataset_num_proc": "Rows are tokenised in one process, by the tokenizer's own threads.",
    **dict.fromkeys(("use_dora", "lora_target_parameters"), _PLAIN),
    "lora_task_type": "It follows from the stage: SEQ_CLS of a reward or value model, else CAUSAL_LM.",
    **dict.fromkeys(("load_in_4bit", "bnb_4bit_quant_*", "use_bnb_nested_quant"), _QUANTISED),
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
    "eval_strategy": (
        "Give eval_steps: every so many updates, or below 1 such a share of the run; 0: only at the end. "
        "dataset_test_split None: never."
    ),
    "save_strategy": "Give save_steps: every so many updates, or below 1 such a share of the run; 0: only at the end.",
    "resume_from_checkpoint": "The same run_dir goes on by itself; resume auto, must (fail without one) or never.",
    "overwrite_output_dir": "resume never refuses a used folder; delete it or take another run_dir.",
    "remove_unused_columns": "Columns are kept for reward functions and named by prompt_column and its like.",
    **dict.fromkeys(("dataloader_*", "group_by_length"), _LOADER),
    "exp_name": _NAME,
    "logging_dir": "Everything of a run lies in run_dir: metrics.jsonl and tensorboard/ in it.",
    "model_init_kwargs": "Give model_revision and dtype; the shape comes from the checkpoint's config.json.",
    "trust_remote_code": "No code from a repository is ever run: model families are part of this package.",
    "router_aux_loss_coef": "Mixture-of-experts models are not supported.",
    "pad_to_multiple_of": "Batches are padded to length_buckets: give the lengths themselves.",
    "chat_template_path": "The template is the tokenizer's: tokenizer_name_or_path names one that has it.",
    "cache_implementation": "There is one key-value cache, of a fixed shape.",
    **dict.fromkeys(("use_vllm", "vllm_*"), _VLLM),
    "log_multimodal": "Prompts and completions are text.",
    **dict.fromkeys(
        ("use_transformers_*", "transformers_continuous_batching_config"), "Generation is in-process, in JAX."
    ),
    "eos_token": "The end token is the tokenizer's; PPO and RLOO can stop at another by stop_token_id.",
    "pad_token": "The pad token is the tokenizer's; without one, [PAD] takes an unused row, as in TRL.",
    "activation_offloading": "gradient_checkpointing saves activation memory; offloading is not supported.",
    "fp16": "float16 needs loss scaling and is not supported; dtype is float32 or bfloat16.",
    "use_cpu": "Set the environment variable JAX_PLATFORMS=cpu.",
}

# What one stage says in place of the above, or where another stage has the option.
REFUSED_IN: dict[str, dict[str, str]] = {
    "ppo": {
        "max_steps": "PPO counts episodes: total_episodes = max_steps x batch_size.",
        **dict.fromkeys(("rloo_k", "num_generations", "num_generations_eval"), "PPO takes one response to a prompt."),
        **dict.fromkeys(
            ("normalize_advantage", "normalize_advantages"), "PPO whitens advantages always; it is an option of rloo."
        ),
        "token_level_kl": "PPO's KL penalty is per token always; it is an option of rloo.",
        "mask_truncated_completions": "An option of rloo; missing_eos_penalty lowers the score of such responses.",
        "epsilon_high": "The policy ratio is clipped to 1 - cliprange .. 1 + cliprange: one range for both sides.",
        **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), _REF),
        "disable_dropout": "PPO always runs without dropout, as TRL's does.",
    },
    "rloo": {
        "max_steps": (
            "RLOO counts episodes: total_episodes = max_steps x batch_size / (num_iterations x num_mini_batches), "
            "for optimizer steps as TRL counts them."
        ),
        "whiten_rewards": "TRL's RLOO accepted it and never read it; normalize_reward brings scores to deviation 1.",
        "value_model*": "RLOO has no value model: its baseline is the mean of the prompt's other responses.",
        **dict.fromkeys(("gamma", "lam"), "RLOO has no value model and no discount: a response has one return."),
        "local_batch_size": (
            f"{_OUTPUT} Batches here are global: batch_size = local_batch_size x devices "
            "(until 0.21 local_batch_size has num_mini_batches in it already)."
        ),
        "per_device_train_batch_size": f"{_PER_DEVICE} Until 0.21 TRL's batch is x num_mini_batches as well.",
        "gradient_accumulation_steps": f"{_PER_DEVICE} Until 0.21 TRL's batch is x num_mini_batches as well.",
    },
}

# --- the same name, and what is worth knowing

NOTES: dict[str, str] = {
    "batch_size": "an input here: rows or episodes an update, over all devices",
    "micro_batch_size": "an input here: rows a forward and backward pass, over all devices; never changes the result",
    "num_mini_batches": "optimizer steps an epoch (TRL's PPO since 0.17 makes one, whatever it says)",
    "stop_token": "default eos",
    "stop_token_id": "0 is a token like any other; give `--stop_token None` with it",
    "num_train_epochs": "PPO and RLOO read it when total_episodes is not given",
    "num_sample_generations": "written to RUN/completions",
    "kl_estimator": "k2 as well",
    "top_k": "0: all tokens",
    "logging_steps": "whole updates; the file metrics.jsonl gets every update",
    "gradient_checkpointing": "default false; it works in PPO too",
    "max_grad_norm": "default None; when given, PPO clips too (TRL's PPO never does)",
    "weight_decay": "see weight_decay_on for the weights that it acts on",
    "lr_scheduler_type": "linear, cosine or constant, each after warmup_steps",
    "warmup_steps": "whole updates",
    "max_steps": "-1: num_train_epochs decides",
    "eval_steps": "updates, or below 1 a share of the run; 0: only at the end",
    "save_steps": "the whole train state, optimizer and keys included; below 1 a share of the run; 0: only at the end",
    "save_total_limit": "default 2; the best one by metric_for_best_model stays beside them",
    "metric_for_best_model": "any metric by its whole name, as eval/loss; greater_is_better is false unless given",
    "load_best_model_at_end": "exports it; the run's last checkpoint stays",
    "seed": "the data order and the minibatches too",
    "report_to": "tensorboard, wandb, trackio, all or none; metrics.jsonl is always written",
    "run_name": "in W&B and trackio; default: the folder",
    "max_length": "longer pairs are dropped, which is what TRL's code does",
    "dataset_test_split": "default validation; None: no evaluation",
    "dataset_streaming": "only false: batches are a function of seed and step, a stream is not",
    "dtype": "compute precision; master weights and reductions stay float32",
    "sft_model_path": "default: the published 1b checkpoint",
    "reward_model_path": "default: the published 1b checkpoint; None: only functions or a server",
    "reward_funcs": "'module:function' or 'file.py:function'; rlhf_jax.run(config, reward_funcs=...) takes objects",
    "reward_weights": "models, then functions, then the server",
    "generation_kwargs": "JSON; temperature, top_k, top_p, min_p, repetition_penalty",
    "chat_template_kwargs": "JSON; for prompts that are conversations",
    "num_completions_to_print": "default 5; the files hold all",
    "use_peft": "in every stage (docs/lora.md)",
    "load_in_8bit": "with use_peft; weights only, a scale for each column: no outliers apart, as bitsandbytes has them",
    "lora_target_modules": "query_key_value, dense, dense_h_to_4h, dense_4h_to_h, or all-linear",
    "lora_dropout": "PPO runs without dropout, as TRL's does",
    "model_adapter_name": "a name of the option adapters, NAME=PATH, or default: the adapter at sft_model_path",
    "ref_adapter_name": "the same; base: none of them",
}

NOTES_IN: dict[str, dict[str, str]] = {
    "sft": {"learning_rate": "default 3e-6"},
    "reward": {"learning_rate": "default 3e-6 (TRL: 1e-4)"},
    "ppo": {"learning_rate": "default 3e-6", "temperature": "default 0.7"},
    "rloo": {
        "learning_rate": "default 1e-6",
        "temperature": "default 1.0 (until 0.21: 0.7)",
        "response_length": "default 512 (until 0.21: 53)",
        "max_grad_norm": "default 1.0 (until 0.21 TRL never clipped)",
        "num_mini_batches": "optimizer steps a pass over the batch",
        "warmup_steps": "optimizer steps; with lr_scheduler_unit update, updates",
        "num_generations": "batch_size counts responses, all of a prompt's",
        "reward_clip_range": "LOW HIGH; one number X is -X X. Until 0.21 it acted only with normalize_reward",
        "normalize_reward": "over the batch of all devices, before clipping and KL",
        "token_level_kl": "works (TRL's did nothing)",
        "beta": "0: no reference model",
        "kl_estimator": "k1 is TRL's; k2 and k3 as well",
        "mask_truncated_completions": "see baseline_excludes_truncated",
        "disable_dropout": "default false; until 0.21 always",
        "ref_model_sync_steps": "optimizer steps",
    },
}
