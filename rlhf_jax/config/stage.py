"""What every stage has, and the two supervised stages."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """What every stage has: models, data, batches, optimizer, run folder."""

    # --- the run
    run_dir: str | None = None
    """Folder of the run; default runs/<stage>."""
    resume: Literal["auto", "must", "never"] = "auto"
    """auto: go on from the newest checkpoint if there is one; must: fail without one; never: refuse a used folder."""
    override_resume: bool = False
    """Go on although options, data or starting models are not those that the run began with; they are listed."""
    max_minutes: float | None = None
    """Stop, saved and resumable (exit code 75), before so many minutes of wall time are over; None: no limit."""
    deterministic: bool = False
    """On GPUs: only kernels that give the same bits each time, none chosen by timing; slower. Others always do so."""
    dry_run: bool = False
    """Print the resolved config, the batch arithmetic, the mesh and the memory of compiled programs; then stop."""
    topology: str | None = None
    """With dry_run: compile for a TPU slice that is not there, as v5e:4x4 or v5p:2x2x2 (needs the extra tpu-aot)."""
    seed: int = 42
    """Every random key is a function of the seed, the step and the row."""
    report_to: tuple[str, ...] = ("tensorboard",)
    """Where metrics go beside metrics.jsonl: tensorboard, wandb and trackio (where installed), all of them, or none."""
    run_name: str | None = None
    """Name of the run in W&B and trackio; default: its folder."""
    project: str | None = None
    """Project there; default: WANDB_PROJECT in the environment, or rlhf_jax."""
    push_to_hub: bool = False
    """Upload the final model (policy/ or reward_model/) to the Hugging Face hub, with tokenizer and model card."""
    hub_model_id: str | None = None
    """Its name there, NAME or OWNER/NAME; default: that of the run's folder; the owner is the token's user."""
    hub_private_repo: bool | None = None
    """Whether a repository that is made for it is private; None: as the owner's settings say."""
    logging_steps: int = 1
    """Print a progress line every so many updates (metrics.jsonl gets every update)."""
    save_steps: float = 500
    """Checkpoint every so many updates; below 1, every such share of the run; 0: only at the end."""
    save_minutes: float | None = None
    """Checkpoint also when the last is so many minutes old; None: never for that."""
    save_total_limit: int | None = 2
    """Newest checkpoints kept, beside the best one; None keeps all."""
    metric_for_best_model: str | None = None
    """Metric by which the best checkpoint is known, and kept beside the newest, as eval/loss; None: none is."""
    greater_is_better: bool = False
    """Whether the best value of metric_for_best_model is the greatest."""
    load_best_model_at_end: bool = False
    """Export the checkpoint that is best by metric_for_best_model in place of the last."""
    eval_steps: float = 0
    """Evaluate every so many updates; below 1, every such share of the run; 0: only at the end."""
    eval_on_start: bool = False
    """Evaluate before the first update too."""

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
    gradient_checkpointing_policy: Literal["full", "dots"] = "full"
    """What gradient_checkpointing computes again: full, all within a layer; dots, all but the outcomes of matrix
    products, which is faster and keeps more."""

    # --- adapters
    use_peft: bool = False
    """Train low-rank adapters (LoRA) beside frozen params, in place of the params."""
    lora_r: int = 16
    """Rank of a new adapter."""
    lora_alpha: float = 32
    """Its scale is lora_alpha / lora_r."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(lora_r) instead."""
    lora_dropout: float = 0.05
    """Share of a layer's input that its adapter does not see in training (PPO: none, as it has no dropout)."""
    lora_target_modules: tuple[str, ...] | None = None
    """Layers that get one: query_key_value, dense, dense_h_to_4h, dense_4h_to_h, or all-linear; default:
    query_key_value, as PEFT."""
    modules_to_save: tuple[str, ...] | None = None
    """Modules trained in full beside the adapters: embed_in, final_layer_norm, embed_out (a new score head always)."""
    load_in_8bit: bool = False
    """Keep frozen kernels of the layers, beneath adapters, in int8, a scale for each column (needs the extra int8)."""
    export_merged: bool = True
    """Write the model with its adapter merged into it too, as a checkpoint that needs no PEFT."""

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
    """Another data set (or file) to evaluate on; several as NAME=SOURCE,NAME=SOURCE."""
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
    """Padded lengths of rows. SFT and reward model: of a batch; default: quarters of the longest. PPO and RLOO: of the
    prompts of a micro-batch, in one program; default: half, three quarters and all of the longest."""

    # --- batches and optimizer
    batch_size: int = 64
    """Rows (PPO: episodes) an update, over all devices."""
    micro_batch_size: int | None = None
    """Rows a forward and backward pass, over all devices; default: as many as make 2,048 tokens on a CPU, 16,384 on
    another device. Never changes the result."""
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
    adam_mu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of AdamW's first moment; bfloat16 saves 2 bytes a param."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    weight_decay_on: Literal["matrices", "all"] = "matrices"
    """What decays: everything but biases and norms (Hugging Face, TRL), or all (torch's own AdamW, N+)."""
    max_grad_norm: float | None = None
    """Clip the gradient to this global norm; None: never."""

    # --- numbers gone bad
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss, gradient or reward that is not finite, of which nothing is learned: end the run, or go on without it."""
    max_nonfinite: int = 5
    """With skip: end the run after so many such updates in a row."""

    # --- devices
    mesh_data: int = -1
    """Devices on the data axis; -1: all that the other axes leave."""
    mesh_fsdp: int = 1
    """Devices that share params and optimizer state."""
    mesh_tensor: int = 1
    """Devices that split heads and hidden units."""

    # --- processes
    distributed: str = "auto"
    """The command joins other processes: auto (TPU pods, SLURM, Open MPI, Kubernetes), off, or number 0's HOST:PORT."""
    num_processes: int | None = None
    """With HOST:PORT: how many processes there are; default: JAX_NUM_PROCESSES in the environment."""
    process_id: int | None = None
    """With HOST:PORT: which of them this is, from 0; default: JAX_PROCESS_ID in the environment."""

    @property
    def remat(self) -> str:
        """What the backward pass computes again: 'none', 'dots' or 'full'."""
        return self.gradient_checkpointing_policy if self.gradient_checkpointing else "none"

    @property
    def depends_on_micro_batching(self) -> bool:
        """Whether it is seen in the loss or the metrics which rows share a micro-batch."""
        return False


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
