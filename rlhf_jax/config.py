"""Frozen dataclasses, one per stage. Names are TRL's. Every field is a flag of the same name."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rlhf_jax.types import UserError

SFT_EXPORT = "{run_dir}/sft/policy"  # in a pipeline: what the SFT stage exports
REWARD_EXPORT = "{run_dir}/reward/reward_model"  # and the reward stage


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """What every stage has: models, data, batches, optimizer, run folder."""

    # --- the run
    run_dir: str | None = None
    """Folder of the run; default runs/<stage>."""
    resume: Literal["auto", "must", "never"] = "auto"
    """auto: go on from the newest checkpoint if there is one; must: fail without one; never: refuse a used folder."""
    dry_run: bool = False
    """Print the resolved config, the batch arithmetic and the mesh, then stop."""
    seed: int = 42
    """Every random key is a function of the seed, the step and the row."""
    report_to: tuple[str, ...] = ("tensorboard",)
    """Where metrics go beside metrics.jsonl: 'tensorboard' or nothing."""
    logging_steps: int = 1
    """Print a progress line every so many updates (metrics.jsonl gets every update)."""
    save_steps: int = 500
    """Checkpoint every so many updates; 0: only at the end."""
    save_total_limit: int | None = 2
    """Checkpoints kept; None keeps all."""
    eval_steps: int = 0
    """Evaluate every so many updates; 0: only at the end."""

    # --- model and tokenizer
    model_revision: str = "main"
    """Hub revision of the starting model."""
    scratch_model: str | None = None
    """Start from random weights of this shape: a Pythia size ('14m') or 'LAYERSxWIDTHxHEADS' ('4x128x4')."""
    tokenizer_name_or_path: str | None = None
    """Tokenizer, when not that of the model; 'synthetic' is the built-in one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute precision; master weights and reductions stay float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    # --- data
    dataset_name: str = "trl-lib/tldr"
    """Hub name, local file or folder (jsonl, json, parquet, csv, arrow), or 'synthetic'."""
    dataset_config: str | None = None
    """Configuration of the data set on the hub."""
    dataset_revision: str | None = None
    """Hub revision of the data set."""
    dataset_train_split: str = "train"
    """Split to train on."""
    dataset_test_split: str | None = "validation"
    """Split to evaluate on; None: no evaluation."""
    eval_dataset_name: str | None = None
    """Another data set (or file) to evaluate on."""
    dataset_streaming: bool = False
    """Refused: batches are a function of seed and step, a stream is not."""
    max_train_samples: int | None = None
    """Use only the first so many rows of the training split."""
    max_eval_samples: int | None = 256
    """Use only the first so many rows of the evaluation split."""
    prompt_column: str = "prompt"
    """Column with the prompt."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """A row with a missing, mistyped or empty field: stop and name it, or skip and count it."""
    query_length: int = 512
    """Most prompt tokens."""
    query_overflow: Literal["truncate", "drop"] = "truncate"
    """Longer prompts: cut the post paragraph-wise as OpenAI did, or drop the row as TRL does."""
    length_buckets: tuple[int, ...] | None = None
    """Padded lengths that batches are rounded up to; default: quarters of the longest."""

    # --- batches and optimizer
    batch_size: int = 64
    """Rows (PPO: episodes) an update, over all devices."""
    micro_batch_size: int | None = None
    """Rows a forward and backward pass, over all devices; default: the whole minibatch. Never changes the result."""
    learning_rate: float = 3e-6
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """Schedule after the warm-up: to 0 in a line, to 0 in a half cosine, or none."""
    warmup_steps: int = 0
    """Updates of linear warm-up."""
    adam_beta1: float = 0.9
    """AdamW's first decay."""
    adam_beta2: float = 0.999
    """AdamW's second decay."""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon (N+ uses 1e-5)."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    weight_decay_on: Literal["matrices", "all"] = "matrices"
    """What decays: everything but biases and norms (Hugging Face, TRL), or all (torch's own AdamW, N+)."""
    max_grad_norm: float | None = None
    """Clip the gradient to this global norm; None: never."""

    # --- devices
    mesh_data: int = -1
    """Devices on the data axis; -1: all that the other axes leave."""
    mesh_fsdp: int = 1
    """Devices that share params and optimizer state."""
    mesh_tensor: int = 1
    """Devices that split heads and hidden units."""


@dataclasses.dataclass(frozen=True)
class SFTConfig(StageConfig):
    """Supervised fine-tuning on demonstrations."""

    model_name_or_path: str | None = "EleutherAI/pythia-1b-deduped"
    """Model to start from, hub name or folder."""
    completion_column: str = "completion"
    """Column with the demonstration."""
    completion_only_loss: bool = False
    """Learn from the completion's tokens only; default: prompt and completion, as N+."""
    max_length: int = 562
    """Most tokens of prompt and completion together."""
    num_train_epochs: float = 1.0
    """Passes over the data."""
    max_steps: int = -1
    """Updates, when above 0, in place of epochs."""
    early_stopping_patience: int = 0
    """Stop after so many evaluations without a better validation loss; 0: never."""
    disable_dropout: bool = False
    """Turn off the model's dropout."""


@dataclasses.dataclass(frozen=True)
class RewardConfig(StageConfig):
    """A reward model from preference pairs: Bradley-Terry, -log sigmoid(chosen - rejected)."""

    model_name_or_path: str | None = "EleutherAI/pythia-1b-deduped"
    """Model to start from (usually the SFT model), hub name or folder; it gets a fresh scalar head."""
    dataset_name: str = "trl-lib/tldr-preference"
    """Preference pairs: hub name, local file or folder, or 'synthetic'."""
    chosen_column: str = "chosen"
    """Column with the preferred completion."""
    rejected_column: str = "rejected"
    """Column with the other completion."""
    margin_column: str | None = None
    """Column with a margin that the preferred completion must win by."""
    max_length: int = 638
    """Most tokens of prompt and completion together; longer pairs are dropped and counted."""
    num_train_epochs: float = 1.0
    """Passes over the pairs."""
    max_steps: int = -1
    """Updates, when above 0, in place of epochs."""
    center_rewards_coefficient: float | None = None
    """Weight of mean((chosen + rejected)^2), which centres the rewards on 0."""
    normalize_dataset_name: str | None = None
    """Demonstrations (prompt, completion) whose mean score is made 0 after training; None: no offset."""
    normalize_samples: int = 512
    """Demonstrations used for that mean."""
    score_init_std: float | None = None
    """Standard deviation of the fresh head; default: 1/sqrt(D + 1), as N+."""
    disable_dropout: bool = True
    """Turn off the model's dropout."""


@dataclasses.dataclass(frozen=True)
class PPOConfig(StageConfig):
    """PPO against a reward model (or reward functions), with TRL's numerics."""

    # --- models
    sft_model_path: str | None = "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr"
    """Policy to start from."""
    reward_model_path: str | None = "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr"
    """Reward model; None: only reward functions."""
    reward_model_revision: str = "main"
    """Hub revision of the reward model."""
    ref_model_path: str | None = None
    """Reference model; default: a frozen copy of the policy."""
    ref_model_revision: str = "main"
    """Hub revision of the reference model."""
    value_model_path: str | None = None
    """Value model to start from; default: the reward model."""
    value_model_revision: str = "main"
    """Hub revision of the value model."""
    value_model: Literal["separate", "shared_backbone"] = "separate"
    """A network of its own (TRL's), or a second head on the policy."""

    # --- rollout
    total_episodes: int | None = None
    """Episodes in all; default: num_train_epochs passes over the prompts."""
    num_train_epochs: float = 3.0
    """Passes over the prompts when total_episodes is not given."""
    batch_size: int = 512
    """Episodes an update, over all devices."""
    rollout_batch_size: int | None = None
    """Rows generated and scored at a time, over all devices; default: batch_size."""
    response_length: int = 53
    """Most tokens of a response."""
    temperature: float = 0.7
    """Sampling temperature; log-probabilities are taken at it."""
    top_k: int = 0
    """Sample among the k likeliest tokens only; 0: all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that make up this probability; 1: all."""
    min_p: float | None = None
    """Leave out tokens less likely than this share of the likeliest."""
    repetition_penalty: float = 1.0
    """Divide (multiply) positive (negative) logits of tokens already seen; 1: off."""
    stop_token: Literal["eos"] | None = "eos"
    """Stop a response at the tokenizer's eos; None with no stop_token_id: always response_length tokens."""
    stop_token_id: int | None = None
    """Stop at this token id; not together with stop_token."""
    missing_eos_penalty: float | None = None
    """Taken off the score of a response without eos (see eos_penalty_mode)."""
    eos_penalty_mode: Literal["subtract", "replace"] = "subtract"
    """subtract: score - penalty (TRL); replace: the score becomes -penalty (N+)."""
    num_sample_generations: int = 10
    """Times in a run that sample completions are written; 0: never."""

    # --- the algorithm
    num_ppo_epochs: int = 4
    """Passes over each batch of episodes."""
    num_mini_batches: int = 1
    """Optimizer steps an epoch."""
    kl_coef: float = 0.05
    """Weight of the KL penalty in the reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the per-token KL (Schulman, Approximating KL Divergence)."""
    kl_target: float | None = None
    """KL a response that the adaptive controller steers to; None: kl_coef stays fixed."""
    kl_horizon: int = 10000
    """Episodes over which the adaptive controller reacts."""
    cliprange: float = 0.2
    """Clip of the policy ratio."""
    vf_coef: float = 0.1
    """Weight of the value loss."""
    cliprange_value: float = 0.2
    """Clip of the value around its old prediction."""
    gamma: float = 1.0
    """Discount."""
    lam: float = 0.95
    """Lambda of GAE."""
    whiten_rewards: bool = False
    """Divide rewards by their standard deviation, mean kept."""
    whiten_ddof: Literal[0, 1] = 1
    """Variance over n - 1 (TRL) or n (OpenAI, N+)."""
    score_position: Literal["after_eos", "eos"] = "after_eos"
    """Where the score lands: one position after eos (OpenAI, TRL) or on eos itself."""
    old_logprobs: Literal["forward", "sampler"] = "forward"
    """Behaviour log-probabilities: from a forward pass, or the sampler's own."""
    loss_aggregation: Literal["token_mean", "token_mean_micro", "seq_mean"] = "token_mean"
    """Mean over all tokens of the minibatch; mean of micro-batch means (TRL's); mean over rows of token means."""
    metrics: Literal["correct", "trl"] = "correct"
    """trl: approxkl, ratio and entropy unmasked, as TRL logs them."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The three stages in a row, each in a folder of the run's: RUN/sft, RUN/reward, RUN/ppo.

    `{run_dir}` in a text option of a stage stands for the pipeline's folder.
    """

    run_dir: str | None = None
    """Folder of the run, with one folder a stage; default runs/pipeline."""
    seed: int | None = None
    """Seed of every stage; None: each stage's own."""
    resume: Literal["auto", "must", "never"] | None = None
    """What every stage does with a used folder (auto, must, never); None: each stage's own."""
    dry_run: bool = False
    """Print the resolved configs, the batch arithmetic and the mesh, then stop."""
    sft: SFTConfig = SFTConfig()
    """Supervised fine-tuning; its policy goes to RUN/sft/policy."""
    reward: RewardConfig = RewardConfig(model_name_or_path=SFT_EXPORT)
    """Reward model; it goes to RUN/reward/reward_model."""
    ppo: PPOConfig = PPOConfig(sft_model_path=SFT_EXPORT, reward_model_path=REWARD_EXPORT)
    """PPO; policy and value model go to RUN/ppo/policy and RUN/ppo/value."""


Config = StageConfig | Pipeline
STAGES: dict[str, type[StageConfig]] = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig}


def stage_name(config: Config) -> str:
    """'sft', 'reward', 'ppo' or 'pipeline': the name in config.json and of the default run folder."""
    if isinstance(config, Pipeline):
        return "pipeline"
    return next(name for name, stage in STAGES.items() if type(config) is stage)


def resolve(config: Config) -> Config:
    """The config with its run folder named. Reads no file; doing it twice changes nothing."""
    return dataclasses.replace(config, run_dir=config.run_dir or f"runs/{stage_name(config)}")


def stages_of(config: Config) -> dict[str, StageConfig]:
    """The stages to run, in order, by name, each with a run folder: one, or a pipeline's three.

    A pipeline's own options (seed, resume, dry_run) go to every stage, and `{run_dir}` becomes its folder.
    """
    config = resolve(config)
    if not isinstance(config, Pipeline):
        return {stage_name(config): config}
    shared = {"seed": config.seed, "resume": config.resume, "dry_run": config.dry_run or None}
    shared = {name: value for name, value in shared.items() if value is not None}
    stages = {}
    for name in STAGES:
        stage, folder = getattr(config, name), f"{config.run_dir}/{name}"
        if stage.run_dir not in (None, folder):
            raise UserError(
                f"{name}.run_dir is {stage.run_dir!r}, but a pipeline's stage has its folder {folder!r}: "
                "give run_dir for the whole, or run the stage by a config of its own."
            )
        paths = {key: value for key, value in vars(stage).items() if isinstance(value, str)}
        paths = {key: value.replace("{run_dir}", config.run_dir) for key, value in paths.items()}
        stages[name] = dataclasses.replace(stage, **{**paths, **shared, "run_dir": folder})
    return stages
