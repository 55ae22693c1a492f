"""The stages that sample from a policy: what PPO and RLOO share, and what each has of its own."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from rlhf_jax.config.stage import StageConfig


@dataclasses.dataclass(frozen=True)
class PolicyConfig(StageConfig):
    """Policy, reference, rewards, rollouts: everything but the algorithm."""

    # --- models
    sft_model_path: str | None = "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr"
    """Policy to start from."""
    ref_model_path: str | None = None
    """Reference model; default: a frozen copy of the policy."""
    ref_model_revision: str = "main"
    """Hub revision of the reference model."""
    start_adapter: Literal["auto", "merge", "continue"] = "auto"
    """With use_peft, where sft_model_path is an adapter: merge it and train a new one, or train on with it; auto: PPO
    merges, RLOO trains on with a frozen copy of it as the reference (TRL)."""
    adapters: tuple[str, ...] = ()
    """With use_peft: adapters on the policy's base, NAME=PATH each; that of sft_model_path is called default."""
    model_adapter_name: str | None = None
    """The adapter that is trained on with; None: as start_adapter says, or a new one."""
    ref_adapter_name: str | None = None
    """The adapter whose frozen copy is the reference; base: none of them; None: the base, or as start_adapter says."""

    # --- rewards
    reward_model_path: str | None = "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr"
    """Reward model; None: only functions or a server."""
    reward_model_revision: str = "main"
    """Hub revision of the reward model."""
    more_reward_models: tuple[str, ...] = ()
    """Further reward models, scored beside the first (see reward_ensemble)."""
    reward_ensemble: Literal["sum", "mean", "min", "mean_minus_std"] = "sum"
    """Several reward models: each a reward with its own weight, or one reward by their mean, minimum, mean - std."""
    reward_ensemble_std_coef: float = 1.0
    """Weight of the standard deviation in mean_minus_std."""
    reward_input: Literal["auto", "ids", "text"] = "auto"
    """What reward models read: the sampled ids, or the text by their own tokenizer; auto: ids where the two agree."""
    reward_text_eos: bool = True
    """End a text that a reward model reads with its eos where the response ended (TRL's RLOO leaves it out)."""
    reward_funcs: tuple[str, ...] = ()
    """Reward functions, 'module:function' or 'file.py:function': plain, async, or rlhf_jax.jax_reward."""
    reward_timeout: float = 600.0
    """Most seconds that one call of a Python reward function may take."""
    reward_server: str | None = None
    """URL of a reward server: POST of prompts and completions, scores back."""
    reward_server_timeout: float = 60.0
    """Most seconds of one request to the server."""
    reward_server_total_timeout: float = 600.0
    """Most seconds for all requests and retries of one batch."""
    reward_server_retries: int = 5
    """Tries again after a lost connection, 429 or a 5xx status."""
    reward_server_batch_size: int = 64
    """Rows a request."""
    reward_server_concurrency: int = 4
    """Requests at a time."""
    reward_server_token_env: str = "RLHF_JAX_REWARD_TOKEN"
    """Environment variable with the server's bearer token, where it needs one."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward: models, functions, server, in this order; default: 1 each."""
    reward_failure: Literal["raise", "drop"] = "raise"
    """A reward function or server that fails: end with an error, or leave its rows out and count them."""

    # --- rollout
    total_episodes: int | None = None
    """Episodes in all; default: num_train_epochs passes over the prompts."""
    num_train_epochs: float = 3.0
    """Passes over the prompts when total_episodes is not given."""
    rollout_batch_size: int | None = None
    """Rows generated and scored at a time, over all devices; default: batch_size. Log-probabilities and values go
    micro_batch_size at a time, if that is less."""
    offload_frozen: Literal["none", "pinned_host"] = "none"
    """Where reference and reward models wait between the phases that need them: on the device, or in the host's memory
    (a copy over the bus each time)."""
    shuffle_dataset: bool = True
    """Take the prompts in a new order each pass; false: as they come."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the tokenizer's chat template, where prompts are conversations."""
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
    generation_kwargs: dict[str, Any] | None = None
    """Sampling options by Hugging Face's names, over those above; log-probabilities keep `temperature`."""
    stop_token: Literal["eos"] | None = "eos"
    """Stop a response at the tokenizer's eos; None with no stop_token_id: always response_length tokens."""
    stop_token_id: int | None = None
    """Stop at this token id; not together with stop_token."""
    missing_eos_penalty: float | None = None
    """Taken off the score of a response without eos (see eos_penalty_mode)."""
    eos_penalty_mode: Literal["subtract", "replace"] = "subtract"
    """subtract: score - penalty (TRL); replace: the score becomes -penalty (N+)."""
    old_logprobs: Literal["forward", "sampler"] = "forward"
    """Behaviour log-probabilities: from a forward pass, or the sampler's own."""

    # --- when to stop
    target_kl: float | None = None
    """End an update's optimizer steps once policy/approxkl of a minibatch is over 1.5 times this; None: never."""
    early_stop: tuple[str, ...] = ()
    """Alarms that end the run, with its checkpoint and exports: kl_below, kl_above, first_ratio, reward_std, eos_share,
    length_growth, length_collapse."""
    alarm_kl_below: float | None = 1.0
    """Alarm when objective/kl is below minus this; None: never, as in all alarms."""
    alarm_kl_above: float | None = 200.0
    """Alarm when objective/kl is above this."""
    alarm_first_ratio: float | None = 0.01
    """Alarm when val/first_ratio_error is above this, with dtype float32."""
    alarm_first_ratio_bfloat16: float | None = 0.5
    """The same with dtype bfloat16."""
    alarm_reward_std: float | None = 1e-6
    """Alarm when the standard deviation of a batch's scores is at most this."""
    alarm_eos_share: float | None = 0.5
    """Alarm when fewer responses end by themselves than this share of those of the start (means of 5 updates)."""
    alarm_length_growth: float | None = 3.0
    """Alarm when responses are longer than this times those of the start (means of 5 updates)."""
    alarm_length_collapse: float | None = 0.25
    """Alarm when responses are shorter than this times those of the start (means of 5 updates)."""

    # --- looking at it
    num_sample_generations: int = 10
    """Times in a run that sample completions are shown and written; 0: never."""
    log_completions: bool = False
    """Show and write the responses of the training batches too, every logging_steps updates."""
    num_completions_to_print: int | None = 5
    """Rows of a table in the terminal; None: all. The files hold all."""
    log_unique_prompts: bool = False
    """Only one row a prompt in these tables."""
    metrics: Literal["correct", "trl"] = "correct"
    """trl: metrics that TRL leaves unmasked or takes after the KL, as TRL logs them."""

    @property
    def depends_on_micro_batching(self) -> bool:
        """With TRL's metrics, whose variance is over micro-batches."""
        return self.metrics == "trl"


@dataclasses.dataclass(frozen=True)
class PPOConfig(PolicyConfig):
    """PPO against a reward model (or reward functions), with TRL's numerics."""

    # --- the value model
    value_model_path: str | None = None
    """Value model to start from; default: the reward model."""
    value_model_revision: str = "main"
    """Hub revision of the value model."""
    value_model: Literal["separate", "shared_backbone"] = "separate"
    """A network of its own (TRL's), or a second head on the policy."""
    lora_value: Literal["full", "own", "shared"] = "full"
    """With use_peft the value model is trained in full (TRL); or by an adapter and a head: on its own params, which
    are those of the reward model where it starts from it (no copy), or on those of the policy."""

    # --- the algorithm
    batch_size: int = 512
    """Episodes an update, over all devices."""
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
    loss_aggregation: Literal["token_mean", "token_mean_micro", "seq_mean"] = "token_mean"
    """Mean over all tokens of the minibatch; mean of micro-batch means (TRL's); mean over rows of token means."""

    @property
    def depends_on_micro_batching(self) -> bool:
        """With TRL's metrics, and with a mean of micro-batch means."""
        return super().depends_on_micro_batching or self.loss_aggregation == "token_mean_micro"


@dataclasses.dataclass(frozen=True)
class RLOOConfig(PolicyConfig):
    """RLOO: REINFORCE with a leave-one-out baseline over several responses to each prompt, with TRL's numerics."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    max_grad_norm: float | None = 1.0
    """Clip the gradient to this global norm; None: never."""
    lr_scheduler_unit: Literal["optimizer_step", "update"] = "optimizer_step"
    """What the schedule counts, warmup_steps too: optimizer steps (TRL), or updates (its trainer before 0.22)."""
    response_length: int = 512
    """Most tokens of a response."""
    temperature: float = 1.0
    """Sampling temperature; log-probabilities are taken at it."""

    # --- groups
    num_generations: int = 2
    """Responses to each prompt, at least 2; batch_size counts responses."""
    num_generations_eval: int | None = None
    """Responses to each evaluation prompt; default: num_generations."""
    shared_prompts: bool = True
    """Compute a prompt once for all its responses; false: for each. The result is the same."""

    # --- rewards to advantages
    normalize_reward: bool = False
    """Bring scores to mean 0 and deviation 1 over the batch, before clipping and KL."""
    reward_clip_range: tuple[float, ...] | None = None
    """Clip scores to LOW HIGH, before the KL; a single number is -X X."""
    beta: float = 0.05
    """Weight of the KL penalty in the reward; 0: no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the per-token KL (Schulman, Approximating KL Divergence)."""
    token_level_kl: bool = False
    """Tokens are the actions: a token is not charged for the KL before it, and ratio and clip are per token."""
    normalize_advantages: bool = False
    """Bring advantages to mean 0 and deviation 1 over the batch."""
    advantage_epsilon: float = 1e-4
    """Added to that deviation (TRL before 0.22: 1e-8)."""
    mask_truncated_completions: bool = False
    """Responses without an end give no gradient."""
    baseline_excludes_truncated: bool = False
    """With mask_truncated_completions: they are left out of the baseline too."""

    # --- the update
    num_iterations: int = 1
    """Passes over each batch of episodes."""
    num_mini_batches: int = 1
    """Optimizer steps a pass."""
    reshuffle: Literal["once", "per_epoch"] = "once"
    """Order of the groups: the same in every pass over a batch (TRL), or new (its trainer before 0.22)."""
    policy_loss: Literal["clipped", "reinforce"] = "clipped"
    """Clipped ratio (TRL), or -A log pi without ratio or clip (Ahmadian et al. 2024)."""
    epsilon: float = 0.2
    """Clip of the ratio below 1, and above where epsilon_high is not given."""
    epsilon_high: float | None = None
    """Clip of the ratio above 1; default: epsilon."""
    disable_dropout: bool = False
    """Turn off the policy's dropout."""
    sync_ref_model: bool = False
    """Move the reference towards the policy now and then (TR-DPO)."""
    ref_model_mixup_alpha: float = 0.6
    """Share of the policy in the moved reference."""
    ref_model_sync_steps: int = 512
    """Optimizer steps between two moves."""
