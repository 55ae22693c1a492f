"""TRL's GRPOTrainer without a model: what its loss reads, and the parts of it that cannot be called alone."""

import collections
import math
import types

from tests.helpers.optional import optional

torch = optional("torch")


class OneProcess:
    """The part of accelerate's Accelerator that the loss calls, in a single process."""

    num_processes = 1
    sync_gradients = True  # whether the micro-batch is the last one of an optimizer step

    def gather(self, x):
        """All ranks' values."""
        return x

    gather_for_metrics = gather

    def reduce(self, x, reduction):
        """The sum over ranks."""
        return x

    def pad_across_processes(self, x, dim, pad_index):
        """Rows of one length on every rank."""
        return x


def sampler_ratio(old, sampling, mask, mode, low, high):
    """grpo_trainer.py:2678-2722 of TRL 1.12.0."""
    difference = torch.nan_to_num((old - sampling) * mask, nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if mode.endswith("truncate"):
        return torch.clamp(ratio, min=low, max=high)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return ratio.masked_fill((ratio < low) | (ratio > high), value=0.0)


def advantages(rewards_per_func, config, weights, group_size):
    """(advantages, is_std_zero) of rows: grpo_trainer.py:2744-2799 of TRL 1.12.0."""
    from trl.trainer.utils import nanstd

    unscorable = torch.isnan(rewards_per_func).all(dim=1)

    def std_of_all(rewards):
        return nanstd(rewards).expand_as(rewards) if rewards.numel() > 1 else torch.zeros_like(rewards)

    if config.multi_objective_aggregation == "sum_then_normalize":
        rewards = (rewards_per_func * weights[None]).nansum(dim=1)
        rewards[unscorable] = torch.nan
        mean = torch.nanmean(rewards.view(-1, group_size), dim=1).repeat_interleave(group_size, dim=0)
        if config.scale_rewards == "batch":
            std = std_of_all(rewards)
        elif group_size > 1:
            std = nanstd(rewards.view(-1, group_size), dim=1).repeat_interleave(group_size, dim=0)
        else:
            std = torch.zeros_like(rewards)
        result = rewards - mean
        if config.scale_rewards != "none":
            result = result / (std + 1e-4)
    else:
        grouped = rewards_per_func.view(-1, group_size, rewards_per_func.shape[1])
        mean = torch.nanmean(grouped, dim=1, keepdim=True)
        std = nanstd(grouped, dim=1, keepdim=True) if group_size > 1 else torch.zeros_like(mean)
        rewards = ((grouped - mean) / (std + 1e-4)).view(rewards_per_func.shape)
        rewards = (rewards * weights[None]).nansum(dim=1)
        rewards[unscorable] = torch.nan
        std = std_of_all(rewards)
        result = (rewards - torch.nanmean(rewards)) / (std + 1e-4)
    return torch.nan_to_num(result, nan=0.0), torch.isclose(std, torch.zeros_like(std))


def trainer(config, micro_batches=1):
    """A GRPOTrainer with what `_compute_loss` reads for a GRPOConfig of ours, made without a model or data.

    Its forward pass returns the inputs' "logps" and "entropies"; `_metrics["train"]` has its metrics.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    made = GRPOTrainer.__new__(GRPOTrainer)
    names = (
        "use_bias_correction_kl delta sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_lambda_pos "
        "vespo_k_neg vespo_lambda_neg entropy_target entropy_coef_delta entropy_coef_max entropy_coef_min"
    )
    made.args = types.SimpleNamespace(
        steps_per_generation=config.num_mini_batches * micro_batches,
        **{name: getattr(config, name) for name in names.split()},
    )
    names = "loss_type importance_sampling_level beta top_entropy_quantile off_policy_mask_threshold entropy_coef"
    for name in (*names.split(), "use_adaptive_entropy"):
        setattr(made, name, getattr(config, name))
    made.epsilon_low = config.epsilon
    made.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    made.max_completion_length = config.response_length
    made.use_vllm = made.vllm_importance_sampling_correction = config.importance_sampling_correction
    made.current_gradient_accumulation_steps = micro_batches
    made.aux_loss_enabled = False
    made._entropy_bonus_enabled = config.entropy_coef != 0.0 or config.use_adaptive_entropy
    made._last_world_entropy, made._entropy_window_stats = float("inf"), None
    made.accelerator, made.model = OneProcess(), types.SimpleNamespace(training=True)
    made._metrics = {"train": collections.defaultdict(list)}
    return made


def loss(made, inputs):
    """`_compute_loss` of one micro-batch, its forward pass patched out."""
    prompts = torch.zeros((inputs["logps"].shape[0], 1), dtype=torch.long)
    made._get_per_token_logps_and_entropies = lambda *_, **__: (inputs["logps"], inputs["entropies"], None)
    ids = torch.zeros(inputs["logps"].shape, dtype=torch.long)
    return made._compute_loss(
        made.model, {"prompt_ids": prompts, "prompt_mask": prompts, "completion_ids": ids, **inputs}
    )
