"""The config dataclasses, one per stage, and Pipeline. Names are TRL's. Every field is a flag of the same name.

A field's type includes its range (`PositiveInt`, `Annotated[int, Range(...)]`), the string below it is its help text.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, Literal

from rlhf_jax.config.values import (
    Decay,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    StepsOrFraction,
    field_types,
)
from rlhf_jax.errors import UserError
from rlhf_jax.option import Metadata, metadata, option

Seed = Annotated[int, Range("at least 0 and below 2^32", lambda v: 0 <= v < 2**32)]
MaxSteps = Annotated[int, Range("-1 (use num_train_epochs) or at least 1", lambda v: v == -1 or v >= 1)]
TopP = Annotated[float, Range("above 0 and at most 1", lambda v: 0 < v <= 1)]
NumGenerations = Annotated[
    int, Range("at least 2, since a baseline needs at least 2 responses per prompt", lambda v: v >= 2)
]
EntropyQuantile = Annotated[float, Range("above 0 and at most 1", lambda v: 0 < v <= 1)]
LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
SFT_EXPORT = "{run_dir}/sft/policy"
"""Where the SFT stage of a pipeline exports its policy."""
REWARD_EXPORT = "{run_dir}/reward/reward_model"
"""Where the reward stage of a pipeline exports its model."""


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """Options of every stage: run folder, model, data, batches, optimizer, devices."""

    # --- the run
    run_dir: str | None = option(None, resume="free")
    """Run folder, local or in a bucket (s3://, gs://; docs/scaling.md); default: runs/<stage>."""
    resume: Literal["auto", "must", "never"] = option("auto", resume="free")
    """auto: resume from the newest checkpoint if there is one; must: fail without one; never: refuse a used folder."""
    override_resume: bool = option(False, rare=True, resume="free")
    """Resume even if options, data or starting models have changed since the run began; the changes are printed."""
    max_minutes: PositiveFloat | None = option(None, resume="free")
    """Save and exit with code 75 before this many minutes of wall time have passed; rerun to resume. None: no limit."""
    deterministic: bool = option(False, rare=True, resume="rounding")
    """Use only deterministic kernels, none chosen by timing, on GPUs too; slower there. Other devices always do so."""
    dry_run: bool = option(False, resume="free")
    """Print the resolved config, the batch arithmetic, the mesh and the memory of compiled programs, then exit."""
    topology: str | None = option(None, in_config_json=False)
    """With dry_run: compile for TPUs or GPUs you do not have: a slice such as v5e:4x4 (extra tpu-aot), or a100,
    a100_40gb, a6000, h100 or h200 and their number (extra gpu-aot): h100:8, or h100:8x4 for four machines of eight."""
    seed: Seed = 42
    """Random seed; every key is a function of the seed, the step and the row."""
    report_to: tuple[str, ...] = option(("tensorboard",), resume="free")
    """Trackers besides metrics.jsonl: tensorboard, wandb and trackio (if installed), all of them, or none."""
    run_name: str | None = option(None, rare=True, resume="free")
    """Run name in W&B and trackio; default: the run folder."""
    project: str | None = option(None, rare=True, resume="free")
    """Project in W&B and trackio; default: WANDB_PROJECT in the environment, or rlhf_jax."""
    push_to_hub: bool = option(False, resume="free")
    """Upload the final model (policy/ or reward_model/) with tokenizer and model card to the Hugging Face Hub."""
    hub_model_id: str | None = option(None, rare=True, resume="free")
    """Hub repository, NAME or OWNER/NAME; default: the run folder's name; the default owner is the token's user."""
    hub_private_repo: bool | None = option(None, rare=True, resume="free")
    """Whether a new Hub repository is private; None: the owner's default."""
    logging_steps: PositiveInt = option(1, resume="free")
    """Updates between progress lines (metrics.jsonl gets every update)."""
    save_steps: StepsOrFraction = option(500, resume="free")
    """Updates between checkpoints; below 1: that fraction of the run; 0: only at the end."""
    save_minutes: PositiveFloat | None = option(None, rare=True, resume="free")
    """Also save a checkpoint when the last one is this many minutes old; None: never."""
    save_total_limit: PositiveInt | None = option(2, rare=True, resume="free")
    """Number of newest checkpoints to keep, besides the best one; None: keep all."""
    metric_for_best_model: str | None = option(None, rare=True, resume="free")
    """Metric that selects the best checkpoint, which is kept besides the newest, as eval/loss; None: none is kept."""
    greater_is_better: bool = option(False, rare=True, resume="free")
    """Whether a larger metric_for_best_model is better."""
    load_best_model_at_end: bool = option(False, rare=True, resume="free")
    """Export the best checkpoint by metric_for_best_model instead of the last."""
    eval_steps: StepsOrFraction = 0
    """Updates between evaluations; below 1: that fraction of the run; 0: only at the end."""
    eval_on_start: bool = option(False, rare=True)
    """Also evaluate before the first update."""

    # --- model and tokenizer
    model_revision: str = option("main", rare=True)
    """Hub revision of the starting model."""
    scratch_model: str | None = None
    """Start from random weights of this shape: a Pythia size ('14m'), 'LAYERSxWIDTHxHEADS' of GPT-NeoX ('4x128x4'), or
    'FAMILY:LAYERSxWIDTHxHEADS[xKV]' ('qwen2:4x128x4x2')."""
    tokenizer_name_or_path: str | None = option(None, path=True)
    """Tokenizer, if not the model's own; 'synthetic', 'arithmetic' and 'shapes' are those of the built-in tasks."""
    dtype: Literal["float32", "bfloat16"] = option(
        "float32", lowers={"loading": 3, "generate": 6, "score": 5, "experience": 5, "update": 5, "evaluation": 5}
    )
    """Compute dtype; master weights and reductions stay float32."""
    attn_implementation: Literal["auto", "blocked", "cudnn", "splash"] = option("auto", rare=True, resume="rounding")
    """Attention over whole rows: blocked: in blocks of queries, compiled by XLA, on every device; cudnn: cuDNN's flash
    attention, on NVIDIA GPUs in bfloat16; splash: jax's Pallas kernel, on TPUs; auto: blocked, until another is
    measured to be faster. Decoding is the same with all."""
    gradient_checkpointing: bool = option(False, resume="rounding", lowers={"update": 3})
    """Recompute activations in the backward pass to save memory."""
    gradient_checkpointing_policy: Literal["full", "dots"] = option("full", rare=True, resume="rounding")
    """What gradient_checkpointing recomputes: full: everything within a layer; dots: everything but the outputs of
    matrix multiplications, which is faster and uses more memory."""

    # --- adapters
    use_peft: bool = False
    """Train low-rank adapters (LoRA) and freeze the base params."""
    lora_r: PositiveInt = 16
    """Rank of a new adapter."""
    lora_alpha: PositiveFloat = 32
    """A new adapter's output is scaled by lora_alpha / lora_r."""
    use_rslora: bool = option(False, rare=True)
    """Scale by lora_alpha / sqrt(lora_r) instead."""
    lora_dropout: Decay = option(0.05, rare=True)
    """Dropout on adapter inputs (PPO: none, since it trains without dropout)."""
    lora_target_modules: tuple[str, ...] | None = None
    """Layers that get an adapter, by the checkpoint's names (q_proj v_proj); or all-linear; or one regular expression
    of whole module names ('.*[qv]_proj'). Default: PEFT's for the family."""
    modules_to_save: tuple[str, ...] | None = option(None, rare=True)
    """Modules to train in full besides the adapters, by the checkpoint's names: embed_tokens, norm, lm_head (Pythia:
    embed_in, final_layer_norm, embed_out); score heads always are."""
    load_in_8bit: bool = option(False, lowers={"loading": 6, "generate": 7, "update": 9})
    """With use_peft: keep the layers' frozen kernels in int8, with one scale per column (needs the extra int8)."""
    load_in_4bit: bool = option(False, lowers={"loading": 7, "generate": 8, "update": 10})
    """With use_peft: keep the layers' frozen kernels in 4 bits (NF4, as QLoRA), with one scale per 64 rows of a
    column."""
    export_merged: bool = option(True, rare=True)
    """Also export the model with its adapter merged, as a checkpoint that needs no PEFT."""
    freeze_vision_tower: bool = False
    """Of a model that reads images, without use_peft: train its connector and its text model, not its vision
    transformer."""

    # --- data
    dataset_name: str = option("trl-lib/tldr", path=True)
    """Hub name, file or folder (jsonl, json and csv, also compressed as .gz, .bz2 or .zst, parquet, arrow; local or in
    a bucket), or a built-in task: 'synthetic' (summaries and preferences), 'arithmetic' (sums with worked solutions) or
    'shapes' (pictures and questions)."""
    datasets: tuple[dict[str, Any], ...] | None = option(None, path=True)
    """Several datasets to train on, in place of dataset_name: a list of dicts with path, and name, revision, split,
    weight or fraction, max_train_samples, format and columns of their own (docs/tutorial.md)."""
    dataset_config: str | None = option(None, rare=True)
    """Configuration of the dataset on the Hub."""
    dataset_revision: str | None = option(None, rare=True)
    """Hub revision of the dataset."""
    dataset_train_split: str = "train"
    """Split to train on."""
    dataset_test_split: str | None = "validation"
    """Split to evaluate on; None: no evaluation."""
    eval_dataset_name: str | None = option(None, path=True)
    """Another dataset (or file) to evaluate on; several as NAME=SOURCE,NAME=SOURCE."""
    dataset_streaming: bool = option(False, rare=True)
    """Not supported: batches are a function of the seed and the step, and a stream has no random access. Rows are read
    from files on the disk, not held in memory, in any case."""
    dataset_num_proc: PositiveInt | None = option(None, resume="free")
    """Processes that tokenize the rows of a dataset, once; None: one, with the tokenizer's own threads. Chat templates
    are rendered by one thread a process."""
    max_train_samples: PositiveInt | None = None
    """Use only this many rows, the first, of the training split."""
    max_eval_samples: PositiveInt | None = option(256, rare=True)
    """Use only this many rows, the first, of the evaluation split."""
    prompt_column: str = "prompt"
    """Column with the prompt: texts, or conversations (lists of messages with role and content)."""
    chat_template_kwargs: dict[str, Any] | None = option(None, rare=True)
    """Keyword arguments of the tokenizer's chat template, for conversations."""
    on_bad_row: Literal["raise", "skip"] = option("raise", rare=True)
    """On a row with a missing, empty or wrongly typed field: stop and name the row, or skip and count it."""
    query_length: PositiveInt = 512
    """Maximum number of prompt tokens."""
    query_overflow: Literal["truncate", "drop"] = option("truncate", rare=True)
    """Prompts of more than query_length tokens: truncate drops the last paragraphs of a TL;DR post, as OpenAI did,
    keeps the last query_length tokens of another text, and drops the row if the prompt is a conversation; drop drops
    the row, as TRL's scripts do."""
    length_buckets: tuple[int, ...] | None = option(None, rare=True, lowers={"update": 4})
    """Lengths to pad rows to. SFT and reward model: one per batch; default: quarters of the maximum. PPO, RLOO and
    GRPO: one per micro-batch for its prompts, within one program; default: half, three quarters and all of the
    maximum."""

    # --- batches and optimizer
    batch_size: PositiveInt = option(64, lowers={"evaluation": 4})
    """Rows (PPO: episodes) per update, over all devices."""
    micro_batch_size: PositiveInt | None = option(
        None, resume="rounding", lowers={"score": 2, "experience": 2, "update": 1, "evaluation": 2}
    )
    """Rows per forward and backward pass, over all devices; default: as many as make 2,048 tokens on a CPU, 16,384 on
    another device. Never changes the result."""
    learning_rate: NonNegativeFloat = 3e-6
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "warmup_stable_decay"
    ] = "linear"
    """Schedule after the warm-up: linear decay to 0, cosine decay to 0, constant (constant_with_warmup is the same),
    cosine decay to a minimum, or constant until a decay at the end (see lr_scheduler_kwargs)."""
    lr_scheduler_kwargs: dict[str, Any] | None = option(None, rare=True)
    """Parameters of the schedule by transformers' names. cosine: num_cycles; cosine_with_min_lr: min_lr or min_lr_rate,
    num_cycles; warmup_stable_decay: num_decay_steps, num_stable_steps, warmup_type, decay_type, min_lr_ratio,
    num_cycles. Steps have the unit of warmup_steps."""
    warmup_steps: NonNegativeInt = 0
    """Updates of linear warm-up."""
    adam_beta1: Decay = option(0.9, rare=True)
    """AdamW beta1."""
    adam_beta2: Decay = option(0.999, rare=True)
    """AdamW beta2."""
    adam_epsilon: PositiveFloat = option(1e-8, rare=True)
    """AdamW epsilon (N+ uses 1e-5)."""
    adam_mu_dtype: Literal["float32", "bfloat16"] = option("float32", rare=True, lowers={"loading": 4, "update": 7})
    """Dtype of AdamW's first moment; bfloat16 saves 2 bytes per param."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    weight_decay_on: Literal["matrices", "all"] = option("matrices", rare=True)
    """Params that decay: all but biases and norms (Hugging Face, TRL), or all (torch's AdamW, N+)."""
    max_grad_norm: PositiveFloat | None = None
    """Clip the gradient to this global norm; None: no clipping."""

    # --- non-finite numbers
    on_nonfinite: Literal["stop", "skip"] = option("stop", resume="free")
    """On a non-finite loss, gradient or reward, which never reaches the params: stop the run, or skip and continue."""
    max_nonfinite: PositiveInt = option(5, rare=True, resume="free")
    """With on_nonfinite skip: stop the run after this many such updates in a row."""

    # --- devices
    mesh_data: Annotated[
        int, Range("-1 (all devices that the other axes leave) or at least 1", lambda v: v == -1 or v >= 1)
    ] = option(-1, resume="rounding")
    """Devices on the data axis; -1: all that the other axes leave."""
    mesh_fsdp: PositiveInt = option(1, resume="rounding", lowers={"loading": 1, "generate": 3, "update": 6})
    """Devices that shard params and optimizer state."""
    mesh_tensor: PositiveInt = option(1, resume="rounding", lowers={"loading": 2, "generate": 4})
    """Devices that split attention heads and hidden units."""

    # --- processes
    distributed: str = option("auto", in_config_json=False)
    """How processes connect: auto (TPU pods, SLURM, Open MPI, Kubernetes), off, or the HOST:PORT of process 0."""
    num_processes: int | None = option(None, rare=True, in_config_json=False)
    """With HOST:PORT: number of processes; default: JAX_NUM_PROCESSES in the environment."""
    process_id: int | None = option(None, rare=True, in_config_json=False)
    """With HOST:PORT: index of this process, from 0; default: JAX_PROCESS_ID in the environment."""

    # What is an option of some stages alone is neutral in the others.
    num_mini_batches = num_generations = 1
    response_length = 1
    early_stopping_patience = num_sample_generations = critic_warmup_steps = 0
    kl_coef = 0.0
    disable_dropout = True
    shared_prompts = assistant_only_loss = completion_only_loss = importance_sampling_correction = False
    completion_column = "completion"
    lr_scheduler_unit, policy_loss, start_adapter, lora_value = "update", "clipped", "auto", "full"

    @property
    def micro_batch_tokens(self) -> int | None:
        """None: micro-batches are of rows."""

    @property
    def rollout_batch_size(self) -> int | None:
        """None: there are no rollouts."""

    @property
    def value_learning_rate(self) -> float | None:
        """None: there is no critic with a rate of its own."""

    @property
    def starting_model(self) -> str | None:
        """The checkpoint that training starts from, where it is not scratch_model."""

    @property
    def computes_groups(self) -> bool:
        """Whether log-probs and updates compute a prompt once for all responses to it."""
        return False

    @property
    def remat(self) -> str:
        """What the backward pass recomputes: 'none', 'dots' or 'full'."""
        return self.gradient_checkpointing_policy if self.gradient_checkpointing else "none"

    @property
    def depends_on_micro_batching(self) -> bool:
        """Whether the loss depends on which rows share a micro-batch."""
        return False


@dataclasses.dataclass(frozen=True)
class SFTConfig(StageConfig):
    """Supervised fine-tuning on demonstrations."""

    model_name_or_path: str | None = option("EleutherAI/pythia-1b-deduped", path=True)
    """Model to start from: Hub name or folder."""
    completion_column: str = "completion"
    """Column with the demonstration; a column 'messages' may hold whole conversations instead."""
    completion_only_loss: bool = False
    """Compute the loss on the completion only; default: on prompt and completion, as N+."""
    assistant_only_loss: bool = False
    """Compute the loss on the assistant's messages only, which generation blocks of the chat template must mark."""
    max_length: PositiveInt = 562
    """Maximum number of tokens of prompt and completion together; with packing, of a row."""
    packing: bool = False
    """Pack several demonstrations into rows of max_length tokens (best-fit decreasing). Positions and attention restart
    at each, so the loss of a token is what it is unpacked; batch_size then counts packed rows."""
    eval_packing: bool | None = option(None, rare=True)
    """Pack evaluation sets too; None: as packing."""
    num_train_epochs: PositiveFloat = 1.0
    """Epochs over the data."""
    max_steps: MaxSteps = -1
    """Number of updates, if above 0; overrides num_train_epochs."""
    early_stopping_patience: NonNegativeInt = option(0, rare=True)
    """Stop after this many evaluations without a lower validation loss; 0: never."""
    disable_dropout: bool = False
    """Disable the model's dropout."""

    @property
    def starting_model(self) -> str | None:
        """model_name_or_path."""
        return self.model_name_or_path


@dataclasses.dataclass(frozen=True)
class RewardConfig(StageConfig):
    """A reward model from preference pairs: Bradley-Terry, -log sigmoid(chosen - rejected)."""

    model_name_or_path: str | None = option("EleutherAI/pythia-1b-deduped", path=True)
    """Model to start from (usually the SFT model): Hub name or folder; it gets a new scalar head."""
    dataset_name: str = "trl-lib/tldr-preference"
    """Preference pairs: Hub name, local file or folder, or 'synthetic'."""
    chosen_column: str = "chosen"
    """Column with the chosen completion, or the whole text or conversation where there is no prompt column."""
    rejected_column: str = "rejected"
    """Column with the rejected completion."""
    margin_column: str | None = option(None, rare=True)
    """Column with the margin by which the chosen score must exceed the rejected one."""
    max_length: PositiveInt = 638
    """Maximum number of tokens of prompt and completion together; longer pairs are dropped and counted."""
    num_train_epochs: PositiveFloat = 1.0
    """Epochs over the pairs."""
    max_steps: MaxSteps = -1
    """Number of updates, if above 0; overrides num_train_epochs."""
    center_rewards_coefficient: NonNegativeFloat | None = None
    """Weight of the auxiliary loss mean((chosen + rejected)^2), which centers rewards at 0."""
    normalize_dataset_name: str | None = option(None, path=True)
    """Demonstrations (prompt, completion) whose mean score is shifted to 0 after training; None: no shift."""
    normalize_samples: PositiveInt = option(512, rare=True)
    """Number of demonstrations in that mean."""
    score_init_std: PositiveFloat | None = option(None, rare=True)
    """Standard deviation of a new score head; default: 1/sqrt(D + 1), as N+. Refused where the model has a head."""
    disable_dropout: bool = True
    """Disable the model's dropout."""

    @property
    def starting_model(self) -> str | None:
        """model_name_or_path."""
        return self.model_name_or_path


@dataclasses.dataclass(frozen=True)
class PolicyConfig(StageConfig):
    """Options that PPO, RLOO and GRPO share: policy, reference, rewards, rollouts."""

    # --- models
    sft_model_path: str | None = option("cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr", path=True)
    """Policy to start from."""
    ref_model_path: str | None = option(None, path=True)
    """Reference model; default: a frozen copy of the policy."""
    ref_model_revision: str = option("main", rare=True)
    """Hub revision of the reference model."""
    start_adapter: Literal["auto", "merge", "continue"] = option("auto", rare=True)
    """With use_peft, if sft_model_path is an adapter: merge it and train a new one, or continue training it; auto: PPO
    merges, RLOO and GRPO continue with a frozen copy of it as the reference (TRL)."""
    adapters: tuple[str, ...] = option((), rare=True, path=True)
    """With use_peft: named adapters on the policy's base model, each NAME=PATH; sft_model_path's is named default."""
    model_adapter_name: str | None = option(None, rare=True)
    """Name of the adapter to continue training; None: see start_adapter, or a new one."""
    ref_adapter_name: str | None = option(None, rare=True)
    """Name of the adapter whose frozen copy is the reference; base: the base model; None: the base model, or see
    start_adapter."""

    # --- rewards
    reward_model_path: str | None = option(None, path=True)
    """Reward model; None: only reward functions or a server."""
    reward_model_revision: str = option("main", rare=True)
    """Hub revision of the reward model."""
    more_reward_models: tuple[str, ...] = option((), path=True)
    """More reward models (see reward_ensemble)."""
    reward_ensemble: Literal["sum", "mean", "min", "mean_minus_std"] = "sum"
    """How to combine reward models: sum: each with its own weight; mean, min, mean - std: as one reward."""
    reward_ensemble_std_coef: NonNegativeFloat = option(1.0, rare=True)
    """Weight of the standard deviation in mean_minus_std."""
    reward_input: Literal["auto", "ids", "text"] = option("auto", rare=True)
    """What reward models read: sampled ids, or text in their own tokenization; auto: ids if both tokenizers agree."""
    reward_text_eos: bool = option(True, rare=True)
    """Append the reward model's eos to the text of a response that ended (TRL's RLOO leaves it out)."""
    reward_funcs: tuple[str, ...] = option((), path=True)
    """Reward functions: 'module:function', 'file.py:function', 'package.module.function', a name of TRL's
    (accuracy_reward, reasoning_accuracy_reward, think_format_reward, get_soft_overlong_punishment), exact_match_reward
    or boxed_format_reward."""
    reward_timeout: PositiveFloat = option(600.0, rare=True)
    """Timeout of one call of a Python reward function, in seconds."""
    reward_server: str | None = None
    """URL of a reward server: it receives prompts and completions by POST and returns scores."""
    reward_server_timeout: PositiveFloat = option(60.0, rare=True)
    """Timeout of one request to the reward server, in seconds."""
    reward_server_total_timeout: PositiveFloat = option(600.0, rare=True)
    """Timeout of all requests and retries of one batch, in seconds."""
    reward_server_retries: NonNegativeInt = option(5, rare=True)
    """Retries after a lost connection, status 429 or 5xx."""
    reward_server_batch_size: PositiveInt = option(64, rare=True)
    """Rows per request."""
    reward_server_concurrency: PositiveInt = option(4, rare=True)
    """Concurrent requests."""
    reward_server_token_env: str = option("RLHF_JAX_REWARD_TOKEN", rare=True)
    """Environment variable with the reward server's bearer token, if it needs one."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward, in the order models, functions, server; default: 1 each."""
    reward_failure: Literal["raise", "drop"] = option("raise", rare=True)
    """When a reward function or server fails: stop with an error, or drop its rows and count them."""

    # --- rollout
    total_episodes: PositiveInt | None = None
    """Total number of episodes; default: num_train_epochs epochs over the prompts."""
    num_train_epochs: PositiveFloat = 3.0
    """Epochs over the prompts, if total_episodes is not given."""
    rollout_batch_size: PositiveInt | None = option(
        None, resume="rounding", lowers={"generate": 1, "score": 1, "experience": 1, "evaluation": 1}
    )
    """Rows generated and scored at a time, over all devices; default: batch_size. Log-probs and values are computed
    micro_batch_size rows at a time, if that is smaller."""
    decode_slots: PositiveInt | None = option(None, rare=True, lowers={"generate": 2})
    """Rows decoded at a time, over all devices: a response that ends makes room for the next one of the batch
    (continuous batching). None: all rows of rollout_batch_size, which wait for the longest."""
    decode_longest_first: bool = option(True, rare=True)
    """With decode_slots: decode the prompts first whose responses were longest at their last visit."""
    decode_shrink: bool | None = option(None, rare=True, resume="rounding")
    """Go on with half of the rows when the other half have ended; each size is compiled. None: on CPUs, for responses
    of 128 tokens and more."""
    draft: Literal["ngram"] | None = option(None, rare=True, resume="rounding")
    """ngram: speculative decoding by prompt lookup, without a draft model. It proposes the tokens that followed an
    earlier occurrence of the last two tokens, in the prompt, the response or other responses to the prompt, and
    verifies them in one step. It does not change what is sampled."""
    draft_tokens: PositiveInt = option(4, rare=True, resume="rounding")
    """Tokens that draft proposes in a step."""
    kv_cache_dtype: Literal["auto", "int8"] = option("auto", rare=True)
    """Keys and values of responses during generation: in dtype, or in int8, which samples from another distribution
    (GRPO, with importance_sampling_correction)."""
    rollout_max_steps: PositiveInt | None = option(None, rare=True)
    """Decode steps of a rollout, after which unfinished responses go on in the next update (partial rollouts, Kimi
    k1.5). Needs old_logprobs sampler. None: no limit."""
    micro_batch_tokens: PositiveInt | None = option(
        None, rare=True, resume="rounding", lowers={"score": 3, "experience": 3, "update": 2, "evaluation": 3}
    )
    """Tokens per forward and backward pass, padding included, over all devices, in place of micro_batch_size rows. Rows
    of like length share a pass, so that short responses are not padded to the longest. Log-probs and values are
    computed so many tokens at a time too. Never changes the result."""
    offload_frozen: Literal["none", "pinned_host"] = option(
        "none",
        rare=True,
        resume="rounding",
        lowers={"loading": 5, "generate": 5, "score": 4, "experience": 4, "update": 8},
    )
    """Where frozen reference and reward models are kept while not in use: on the device, or in pinned host memory
    (copied to the device at each use)."""
    shuffle_dataset: bool = option(True, rare=True)
    """Shuffle the prompts each epoch; false: keep their order."""
    response_length: PositiveInt = 53
    """Maximum number of response tokens."""
    temperature: PositiveFloat = 0.7
    """Sampling temperature; log-probs are computed at it too."""
    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens; 0: all."""
    top_p: TopP = 1.0
    """Sample from the most likely tokens whose total probability reaches top_p; 1: all."""
    min_p: Fraction | None = option(None, rare=True)
    """Exclude tokens less likely than min_p times the most likely one."""
    repetition_penalty: PositiveFloat = option(1.0, rare=True)
    """Divide positive and multiply negative logits of tokens that already occurred by this; 1: off."""
    suppress_unused_ids: bool = option(False, rare=True)
    """Never sample ids that no token has: most checkpoints have more embedding rows than tokens. Log-probs stay those
    of all ids."""
    generation_kwargs: dict[str, Any] | None = option(None, rare=True)
    """Sampling options by their Hugging Face names, which override those above; log-probs keep `temperature`."""
    stop_token: Literal["eos"] | None = "eos"
    """Stop a response at the tokenizer's eos; None without stop_token_id: always response_length tokens."""
    stop_token_id: NonNegativeInt | None = option(None, rare=True)
    """Stop at this token id; not together with stop_token."""
    stop_token_ids: tuple[int, ...] | Literal["generation_config"] | None = None
    """Stop at any of these token ids, which count as eos in place of the tokenizer's; generation_config: those of the
    policy's generation_config.json. None: see stop_token."""
    missing_eos_penalty: (
        Annotated[float, Range("at least 0, since it is subtracted from the score", lambda v: v >= 0)] | None
    ) = None
    """Penalty on the score of a response without eos (see eos_penalty_mode)."""
    eos_penalty_mode: Literal["subtract", "replace"] = option("subtract", rare=True)
    """subtract: score - penalty (TRL); replace: the score becomes -penalty (N+)."""
    old_logprobs: Literal["forward", "sampler"] = option("forward", rare=True)
    """Behavior-policy log-probs: from a forward pass, or from the sampler."""

    # --- early stopping and alarms
    target_kl: PositiveFloat | None = None
    """Skip the rest of an update's optimizer steps once policy/approxkl of a minibatch exceeds 1.5 times this; None:
    never."""
    early_stop: tuple[str, ...] = option((), resume="free")
    """Alarms that end the run, with a checkpoint and exports: kl_below, kl_above, first_ratio, reward_std, eos_share,
    unused_ids, length_growth, length_collapse."""
    alarm_kl_below: NonNegativeFloat | None = option(1.0, rare=True, resume="free")
    """Alarm if objective/kl is below minus this; None disables an alarm, here and below."""
    alarm_kl_above: NonNegativeFloat | None = option(200.0, rare=True, resume="free")
    """Alarm if objective/kl is above this."""
    alarm_first_ratio: PositiveFloat | None = option(0.01, rare=True, resume="free")
    """Alarm if val/first_ratio_error is above this, with dtype float32."""
    alarm_first_ratio_bfloat16: PositiveFloat | None = option(0.5, rare=True, resume="free")
    """The same with dtype bfloat16."""
    alarm_reward_std: NonNegativeFloat | None = option(1e-6, rare=True, resume="free")
    """Alarm if the standard deviation of a batch's scores is at most this."""
    alarm_eos_share: Fraction | None = option(0.5, rare=True, resume="free")
    """Alarm if the fraction of responses that end by themselves is below this times its initial value (means of 5
    updates)."""
    alarm_unused_ids: NonNegativeFloat | None = option(0.05, rare=True, resume="free")
    """Alarm if more sampled ids per response than this are ids that no token has (completions/unused_ids over
    batch_size)."""
    alarm_length_growth: Annotated[float, Range("at least 1", lambda v: v >= 1)] | None = option(
        3.0, rare=True, resume="free"
    )
    """Alarm if the response length is above this times its initial value (means of 5 updates)."""
    alarm_length_collapse: Fraction | None = option(0.25, rare=True, resume="free")
    """Alarm if the response length is below this times its initial value (means of 5 updates)."""

    # --- samples and metrics
    num_sample_generations: NonNegativeInt = 10
    """Number of times during a run that sample completions are written; 0: never. The first, the last and two between
    are printed."""
    log_completions: bool = False
    """Also print and write the responses of training batches, every logging_steps updates."""
    log_multimodal: bool = True
    """In the files of sample and training completions, also write thumbnails of the prompts' images."""
    num_completions_to_print: PositiveInt | None = option(3, rare=True, resume="free")
    """Rows of a completion table in the terminal, where long texts are cut; None: all. The files have all."""
    log_unique_prompts: bool = option(False, rare=True)
    """Show only one row per prompt in these tables."""

    # Not fields: what the trainer does where an algorithm has no option of this name.
    kl_estimator = "k1"
    mask_truncated_completions = False
    reshuffle = "per_epoch"

    @property
    def starting_model(self) -> str | None:
        """sft_model_path."""
        return self.sft_model_path

    @property
    def epochs_per_update(self) -> int:
        """Epochs over each batch of episodes."""
        return 1


@dataclasses.dataclass(frozen=True)
class PPOConfig(PolicyConfig):
    """PPO against a reward model (or reward functions), with TRL's numerics."""

    # --- the value model
    value_model_path: str | None = option(None, path=True)
    """Value model to start from, with its score head if it has one; default: the reward model, or the policy."""
    value_model_revision: str = option("main", rare=True)
    """Hub revision of the value model."""
    value_model: Literal["separate", "shared_backbone"] = "separate"
    """A separate network (TRL), or a second head on the policy."""
    lora_value: Literal["full", "own", "shared"] = option("full", rare=True)
    """With use_peft, which params of the value model are trained: full: all (TRL); own: an adapter and a
    head on its own params, which are the reward model's if it starts from it (no copy); shared: both on the policy's
    params."""
    value_learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of the critic, on the policy's schedule; with value_model shared_backbone, of the value head
    alone. None: learning_rate."""
    critic_warmup_steps: NonNegativeInt = option(0, rare=True)
    """Number of first updates in which only the critic learns (with value_model shared_backbone, only the value head).
    The policy's learning-rate schedule counts these updates too."""

    # --- the algorithm
    batch_size: PositiveInt = 512
    """Episodes per update, over all devices."""
    num_ppo_epochs: PositiveInt = 4
    """Epochs over each batch of episodes."""
    num_mini_batches: PositiveInt = 1
    """Optimizer steps per epoch."""
    kl_coef: NonNegativeFloat = 0.05
    """Coefficient of the KL penalty in the reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the per-token KL (Schulman, Approximating KL Divergence)."""
    kl_target: PositiveFloat | None = None
    """Target KL per response of the adaptive controller; None: kl_coef stays fixed."""
    kl_horizon: PositiveInt = option(10000, rare=True)
    """Horizon of the adaptive controller, in episodes."""
    kl_loss_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL to the reference as a term of the loss, per token; 0: none."""
    kl_loss_estimator: Literal["k1", "k2", "k3"] = option("k3", rare=True)
    """Estimator of that KL. The gradient of k1 has mean 0 under the policy itself."""
    cliprange: PositiveFloat = 0.2
    """Clip range of the policy ratio below 1, and above 1 if epsilon_high is not given."""
    epsilon_high: PositiveFloat | None = None
    """Clip range of the policy ratio above 1 (DAPO's clip-higher); default: cliprange."""
    dual_clip: Annotated[float, Range("above 1", lambda v: v > 1)] | None = option(None, rare=True)
    """Upper bound of a token's loss, in multiples of -advantage, where the advantage is below 0 (dual-clip PPO, Ye et
    al. 2020); None: none."""
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus in the loss: entropy of the next-token distribution, in nats per token; 0: no
    bonus."""
    vf_coef: NonNegativeFloat = 0.1
    """Coefficient of the value loss."""
    cliprange_value: PositiveFloat = 0.2
    """Clip range of the value around its old prediction."""
    gamma: Fraction = 1.0
    """Discount factor."""
    lam: Fraction = 0.95
    """GAE lambda."""
    value_lam: Fraction | None = option(None, rare=True)
    """GAE lambda of the returns that the critic learns from (VC-PPO and VAPO: 1.0); None: lam."""
    adaptive_lam_alpha: PositiveFloat | None = option(None, rare=True)
    """GAE lambda of the advantages by the response's length l in tokens: 1 - 1 / (adaptive_lam_alpha * l), at least 0
    (VAPO: 0.05); None: lam."""
    whiten_rewards: bool = False
    """Divide rewards by their standard deviation; the mean is kept."""
    whiten_ddof: Literal[0, 1] = option(1, rare=True)
    """Variance divides by n - 1 (TRL) or n (OpenAI, N+)."""
    score_position: Literal["after_eos", "eos"] = option("after_eos", rare=True)
    """Position of the score: one token after eos (OpenAI, TRL) or eos itself."""
    loss_aggregation: Literal["token_mean", "token_mean_micro", "seq_mean"] = option("token_mean", rare=True)
    """Mean over all tokens of the minibatch; mean of micro-batch means (TRL); mean over rows of token means."""

    @property
    def epochs_per_update(self) -> int:
        """num_ppo_epochs."""
        return self.num_ppo_epochs

    @property
    def depends_on_micro_batching(self) -> bool:
        """With a mean of micro-batch means."""
        return self.loss_aggregation == "token_mean_micro"


@dataclasses.dataclass(frozen=True)
class GroupConfig(PolicyConfig):
    """Options that RLOO and GRPO share: several responses to each prompt and no critic, with TRL's numerics."""

    learning_rate: NonNegativeFloat = 1e-6
    """Peak learning rate of AdamW."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip the gradient to this global norm; None: no clipping."""
    lr_scheduler_unit: Literal["optimizer_step", "update"] = option("optimizer_step", rare=True)
    """Unit of the schedule and of warmup_steps: optimizer steps (TRL), or updates (TRL before 0.22)."""
    response_length: PositiveInt = 512
    """Maximum number of response tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probs are computed at it too."""

    # --- groups
    num_generations: NumGenerations = 2
    """Responses per prompt, at least 2; batch_size counts responses."""
    num_generations_eval: PositiveInt | None = option(None, rare=True)
    """Responses per evaluation prompt; default: num_generations."""
    shared_prompts: bool = option(True, rare=True)
    """Compute each prompt once for all its responses; false: once per response. The result is the same. With
    micro_batch_tokens the update does so only if response_length is at most query_length."""

    # --- rewards to advantages
    reward_clip_range: tuple[float, ...] | None = None
    """Clip scores to LOW HIGH, before the KL; a single number X means -X X."""
    beta: NonNegativeFloat = 0.05
    """Coefficient of the KL penalty in the reward; 0: no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the per-token KL (Schulman, Approximating KL Divergence)."""
    mask_truncated_completions: bool = False
    """Mask truncated responses: they give no gradient."""

    # --- the update
    num_iterations: PositiveInt = 1
    """Epochs over each batch of episodes."""
    num_mini_batches: PositiveInt = 1
    """Optimizer steps per epoch."""
    reshuffle: Literal["once", "per_epoch"] = option("once", rare=True)
    """Shuffle the groups once per batch (TRL), or anew each epoch (TRL before 0.22)."""
    epsilon: PositiveFloat = 0.2
    """Clip range of the ratio below 1, and above 1 if epsilon_high is not given."""
    epsilon_high: PositiveFloat | None = None
    """Clip range of the ratio above 1; default: epsilon."""
    disable_dropout: bool = False
    """Disable the policy's dropout."""
    sync_ref_model: bool = option(False, rare=True)
    """Periodically move the reference towards the policy (TR-DPO)."""
    ref_model_mixup_alpha: Fraction = option(0.6, rare=True)
    """Weight of the policy in the updated reference."""
    ref_model_sync_steps: PositiveInt = option(512, rare=True)
    """Optimizer steps between reference updates."""

    @property
    def computes_groups(self) -> bool:
        """Whether log-probs and updates compute a prompt once for all responses to it: shared_prompts, but not by
        micro_batch_tokens where responses may be longer than prompts. A group is as wide as the longest of its
        responses; single rows are not."""
        apart = self.micro_batch_tokens is not None and self.response_length > self.query_length
        return self.shared_prompts and not apart

    @property
    def epochs_per_update(self) -> int:
        """num_iterations."""
        return self.num_iterations


@dataclasses.dataclass(frozen=True)
class RLOOConfig(GroupConfig):
    """RLOO: REINFORCE with a leave-one-out baseline over several responses per prompt, with TRL's numerics."""

    normalize_reward: bool = False
    """Normalize scores to mean 0 and standard deviation 1 over the batch, before clipping and KL."""
    token_level_kl: bool = False
    """Treat tokens as actions: a token's return has no KL of earlier tokens, and ratio and clip are per token."""
    normalize_advantages: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over the batch."""
    advantage_epsilon: NonNegativeFloat = option(1e-4, rare=True)
    """Added to that standard deviation (TRL before 0.22: 1e-8)."""
    baseline_excludes_truncated: bool = option(False, rare=True)
    """With mask_truncated_completions: exclude truncated responses from the baseline too."""
    policy_loss: Literal["clipped", "reinforce"] = "clipped"
    """Clipped ratio (TRL), or -A log pi without ratio or clip (Ahmadian et al. 2024)."""


@dataclasses.dataclass(frozen=True)
class GRPOConfig(GroupConfig):
    """GRPO and its relatives (Dr. GRPO, DAPO, GSPO, REINFORCE++): baseline, scale and loss are independent options."""

    sft_model_path: str | None = None
    """Policy to start from."""
    num_generations: NumGenerations = 8
    """Responses per prompt, at least 2; batch_size counts responses."""

    # --- rewards to advantages
    baseline: Literal["group_mean", "leave_one_out", "none"] = "group_mean"
    """What is subtracted from a response's reward: the mean of its group (TRL), of the others of its group, or 0."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What the difference is divided by: the group's standard deviation, the batch's, or 1 (Dr. GRPO)."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize", rare=True
    )
    """Several reward functions: add, then normalize; or normalize each by its group, add, normalize by the batch."""
    reward_clip_range: tuple[float, ...] | None = None
    """Clip rewards minus their baseline to LOW HIGH (OpenRLHF); a single number X means -X X."""
    beta: NonNegativeFloat = 0.0
    """Coefficient of the KL to the reference, in the loss (see kl_in_reward); 0: no reference model is loaded."""
    use_bias_correction_kl: bool = option(True, rare=True)
    """Multiply the KL in the loss by the ratio of policy and behavior policy, for an unbiased gradient."""
    kl_in_reward: bool = False
    """Subtract beta times the KL of each token from its reward (REINFORCE++) in place of the KL in the loss."""
    gamma: Fraction = 1.0
    """Discount factor of the return-to-go of a token, with kl_in_reward."""
    whiten_advantages: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over all tokens of the batch (REINFORCE++)."""
    whiten_ddof: Literal[0, 1] = option(1, rare=True)
    """The variance in whiten_advantages divides by n - 1 (verl) or n (OpenRLHF)."""

    # --- the loss
    loss_type: LossType = "dapo"
    """Loss of a token and its mean, as in TRL: grpo: mean over rows of means over tokens; bnpo: mean over the tokens
    of the minibatch; dr_grpo: divided by rows times response_length; dapo: mean over the tokens of the batch; luspo:
    mean over rows of sums; cispo: log-probs weighted by the ratio, capped at epsilon_high, mean as dapo; sapo: a soft
    gate in place of the clip, mean as grpo; vespo: weights of whole responses, mean as dapo."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or of the response, with the mean of its log-ratios (GSPO)."""
    delta: PositiveFloat | None = option(None, rare=True)
    """Upper bound of the ratio where the clip does not apply (INTELLECT-2); None: no bound."""
    loss_aggregation: Literal["token_mean", "token_mean_micro"] = option("token_mean", rare=True)
    """What bnpo, the entropy quantile and the entropy bonus are normalized by: the minibatch, so that micro-batches
    never change the result; or each micro-batch (TRL)."""
    sapo_temperature_pos: PositiveFloat = option(1.0, rare=True)
    """sapo: temperature for positive advantages."""
    sapo_temperature_neg: PositiveFloat = option(1.05, rare=True)
    """sapo: temperature for negative advantages."""
    vespo_k_pos: NonNegativeFloat = option(2.0, rare=True)
    """vespo: exponent of the ratio for advantages of at least 0."""
    vespo_lambda_pos: NonNegativeFloat = option(3.0, rare=True)
    """vespo: decay in the ratio for advantages of at least 0."""
    vespo_k_neg: NonNegativeFloat = option(3.0, rare=True)
    """vespo: exponent of the ratio for negative advantages."""
    vespo_lambda_neg: NonNegativeFloat = option(2.0, rare=True)
    """vespo: decay in the ratio for negative advantages."""

    # --- which tokens are trained on
    top_entropy_quantile: EntropyQuantile = 1.0
    """Train only on this fraction of tokens, those of the highest entropy (0.2: Beyond the 80/20 rule); 1: on all.
    Below 1 with several micro-batches, one more forward pass for each optimizer step."""
    off_policy_mask_threshold: PositiveFloat | None = option(None, rare=True)
    """Mask responses of negative advantage whose mean log-ratio of sampler to policy is above this (DeepSeek-V3.2)."""

    # --- entropy bonus
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus."""
    use_adaptive_entropy: bool = option(False, rare=True)
    """After each optimizer step, change entropy_coef by entropy_coef_delta: up while the entropy is at most
    entropy_target, else down; the bonus applies only while it is at most entropy_target (Skywork-OR1)."""
    entropy_coef_min: NonNegativeFloat = option(0.0, rare=True)
    """Lower bound of the adaptive entropy_coef."""
    entropy_coef_max: NonNegativeFloat = option(1.0, rare=True)
    """Upper bound of the adaptive entropy_coef."""
    entropy_coef_delta: NonNegativeFloat = option(0.005, rare=True)
    """Step of the adaptive entropy_coef."""
    entropy_target: NonNegativeFloat = option(0.2, rare=True)
    """Entropy per token that the adaptive entropy_coef aims at, in nats."""

    # --- sampler and learner
    importance_sampling_correction: bool = False
    """Weight the loss by the ratio of the learner's probabilities to the sampler's, where the two differ: dtype
    bfloat16, top_k, top_p, another temperature."""
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = option(
        "sequence_mask", rare=True
    )
    """That ratio of tokens or of whole responses, clipped to the bounds (truncate), or 0 outside of them (mask)."""
    importance_sampling_clip_min: PositiveFloat | None = option(None, rare=True)
    """Lower bound of that ratio; None: no bound."""
    importance_sampling_clip_max: PositiveFloat | None = option(3.0, rare=True)
    """Upper bound of that ratio; None: no bound."""

    @property
    def depends_on_micro_batching(self) -> bool:
        """With TRL's means over micro-batches."""
        return self.loss_aggregation == "token_mean_micro"


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Several stages in order, each in a subfolder of the run folder: RUN/sft, RUN/reward (if there is a reward
    model), then RUN/ppo, RUN/rloo or RUN/grpo.

    `{run_dir}` in a text option of a stage stands for the pipeline's folder.
    """

    run_dir: str | None = option(None, resume="free")
    """Run folder, local or in a bucket, with one subfolder per stage; default: runs/pipeline."""
    seed: Seed | None = None
    """Seed of every stage; None: each stage's own."""
    resume: Literal["auto", "must", "never"] | None = option(None, resume="free")
    """resume of every stage (auto, must, never); None: each stage's own."""
    override_resume: bool = option(False, rare=True, resume="free")
    """Resume every stage even if options, data or starting models have changed since it began."""
    max_minutes: float | None = option(None, resume="free")
    """Save and exit with code 75 before this many minutes of wall time have passed; rerun to resume. None: no limit."""
    deterministic: bool = option(False, rare=True, resume="rounding")
    """Use only deterministic kernels, none chosen by timing, on GPUs too; slower there. Other devices always do so."""
    dry_run: bool = option(False, resume="free")
    """Print the resolved configs, the batch arithmetic, the mesh and the memory of compiled programs, then exit."""
    topology: str | None = option(None, in_config_json=False)
    """With dry_run: compile for TPUs or GPUs you do not have: a slice such as v5e:4x4 (extra tpu-aot), or a100,
    a100_40gb, a6000, h100 or h200 and their number (extra gpu-aot): h100:8, or h100:8x4 for four machines of eight."""
    distributed: str = option("auto", in_config_json=False)
    """How processes connect: auto (TPU pods, SLURM, Open MPI, Kubernetes), off, or the HOST:PORT of process 0."""
    num_processes: int | None = option(None, rare=True, in_config_json=False)
    """With HOST:PORT: number of processes; default: JAX_NUM_PROCESSES in the environment."""
    process_id: int | None = option(None, rare=True, in_config_json=False)
    """With HOST:PORT: index of this process, from 0; default: JAX_PROCESS_ID in the environment."""
    sft: SFTConfig = SFTConfig()
    """Supervised fine-tuning; exports its policy to RUN/sft/policy."""
    reward: RewardConfig | None = RewardConfig(model_name_or_path=SFT_EXPORT)
    """Reward model; exported to RUN/reward/reward_model. None: rewards are functions or a server."""
    ppo: PPOConfig | None = PPOConfig(sft_model_path=SFT_EXPORT, reward_model_path=REWARD_EXPORT)
    """PPO; exports policy and value model to RUN/ppo/policy and RUN/ppo/value. None: use rloo or grpo."""
    rloo: RLOOConfig | None = None
    """RLOO instead of PPO; exports its policy to RUN/rloo/policy."""
    grpo: GRPOConfig | None = None
    """GRPO instead of PPO; exports its policy to RUN/grpo/policy."""


Config = StageConfig | Pipeline
STAGES: dict[str, type[StageConfig]] = {
    "sft": SFTConfig,
    "reward": RewardConfig,
    "ppo": PPOConfig,
    "rloo": RLOOConfig,
    "grpo": GRPOConfig,
}


def register_stage(name: str, config_type: type[StageConfig]) -> None:
    """Makes a stage's config known to config files, flags and run folders; see `stages.register_algorithm`.

    Raises:
      UserError: the name has another config.
    """
    known = STAGES.setdefault(name, config_type)
    if known.__qualname__ != config_type.__qualname__:  # a config file may be read twice
        raise UserError(f"algorithm {name!r}: the stage of that name has the config {known.__name__}")
    STAGES[name] = config_type
    options_metadata.cache_clear()


def config_types() -> dict[str, type]:
    """Config dataclass by the name that config.json has under 'stage'."""
    return {**STAGES, "pipeline": Pipeline}


@functools.cache
def options_metadata() -> dict[str, Metadata]:
    """The metadata of every option of every config, by its name."""
    known: dict[str, Metadata] = {}
    for config_type in config_types().values():
        for name in field_types(config_type):
            known.setdefault(name, metadata(config_type, name))
    return known


def stage_name(config: Config) -> str:
    """'sft', 'reward', 'ppo', 'rloo', 'grpo' or 'pipeline': the name in config.json and of the default run folder."""
    return next(name for name, kind in config_types().items() if type(config) is kind)
