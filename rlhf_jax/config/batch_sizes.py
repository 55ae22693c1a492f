"""Batch arithmetic: how rows spread over devices, and how many updates a config makes."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeVar

from rlhf_jax.algorithms.options import SupervisedOptions
from rlhf_jax.config.resolution import stages_of
from rlhf_jax.config.stages import Config, Pipeline, PolicyConfig, StageConfig
from rlhf_jax.errors import UserError


def check_devices_of(config: Config, n_devices: int) -> None:
    """`check_devices` for every stage of a config."""
    for name, stage in stages_of(config).items():
        try:
            check_devices(stage, n_devices)
        except UserError as error:
            raise UserError(f"{name}: {error}" if isinstance(config, Pipeline) else str(error)) from None


def check_devices(config: StageConfig, n_devices: int) -> None:
    """Raise UserError if the mesh does not use all `n_devices`, or rows (with shared_prompts: prompts) do not divide
    evenly among its data devices."""
    fsdp, tensor = config.mesh_fsdp, config.mesh_tensor
    data = max(n_devices // (fsdp * tensor), 1) if config.mesh_data == -1 else config.mesh_data
    if data * fsdp * tensor != n_devices:
        raise UserError(
            f"mesh_data {data} x mesh_fsdp {fsdp} x mesh_tensor {tensor} = {data * fsdp * tensor} devices, "
            f"but there are {n_devices}."
        )
    counts = batch_arithmetic(config)
    rows = {"micro_batch_size": counts.micro_batch}
    if isinstance(config, PolicyConfig):
        rows["rollout_batch_size"] = counts.rollout_batch
        _check_tokens(config, data * fsdp)
    # With shared prompts a prompt and all its responses are on one device, so devices divide prompts.
    group = counts.generations if config.shared_prompts else 1
    for name, count in rows.items():
        if count % (group * data * fsdp):
            prompts = f" / num_generations {group}" if group > 1 else ""
            unshared = ", or give --shared_prompts false" if prompts and count % (data * fsdp) == 0 else ""
            raise UserError(
                f"{name}: {count} rows{prompts} / (mesh_data {data} x mesh_fsdp {fsdp}) = "
                f"{count / (group * data * fsdp):.4g} {'prompts' if prompts else 'rows'} per device; "
                f"it must be a whole number{unshared}."
            )


def _check_tokens(config: PolicyConfig, row_shards: int) -> None:
    """Raise UserError if micro_batch_tokens are fewer than one row, or one group of responses, of each device."""
    if config.micro_batch_tokens is None:
        return
    together = config.computes_groups
    group = config.num_generations if together else 1
    needed = row_shards * (config.query_length + group * config.response_length)
    if config.micro_batch_tokens >= needed:
        return
    what = f"num_generations {group} x response_length" if together else "response_length"
    unshared = ", or give --shared_prompts false" if together else ""
    raise UserError(
        f"micro_batch_tokens {config.micro_batch_tokens} is less than (query_length {config.query_length} + {what} "
        f"{config.response_length}) x {row_shards} (mesh_data x mesh_fsdp) = {needed}: give at least that{unshared}."
    )


# --- counts of a run


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Counts of a stage, all global (over all devices). None where the number of rows is needed but not known."""

    batch: int  # rows (episodes) per update
    minibatch: int  # rows per optimizer step
    micro_batch: int  # rows per forward and backward pass
    rollout_batch: int  # rows generated and scored at a time (PPO, RLOO, GRPO)
    epochs: int  # epochs over each batch (PPO: num_ppo_epochs, RLOO and GRPO: num_iterations)
    updates: int | None
    requested: int | None  # rows or episodes, before rounding up to whole updates
    generations: int = 1  # responses per prompt (RLOO, GRPO: num_generations)

    @property
    def prompts(self) -> int:
        """Prompts per update (PPO: as many as episodes)."""
        return self.batch // self.generations

    @property
    def rows(self) -> int | None:
        """Rows (episodes) of the run: updates x batch."""
        return None if self.updates is None else self.updates * self.batch

    @property
    def optimizer_steps(self) -> int | None:
        """Optimizer steps of the run."""
        return None if self.updates is None else self.updates * self.epochs * (self.batch // self.minibatch)


def batch_arithmetic(config: StageConfig, n_rows: int | None = None) -> Arithmetic:
    """The counts of a stage that trains on `n_rows` prompts, pairs or demonstrations (None: not known yet).

    Updates are rounded up, as TRL does: ceil(requested rows / batch_size); see `requested_rows` of the options.
    """
    batch = config.batch_size
    requested = config.requested_rows(n_rows)
    return Arithmetic(
        batch=batch,
        minibatch=batch // config.num_mini_batches,
        micro_batch=config.micro_batch_size or batch // config.num_mini_batches,
        rollout_batch=config.rollout_batch_size or batch,
        epochs=config.epochs_per_update,
        updates=None if requested is None else math.ceil(requested / batch),
        requested=requested,
        generations=config.num_generations,
    )


ConfigT = TypeVar("ConfigT", bound=StageConfig)
MICRO_TOKENS = {"cpu": 2048}
OTHER_MICRO_TOKENS = 16384
"""Padded tokens per device of an automatic micro-batch: on a CPU (few, for its caches), on any other device."""


def leaves_micro_batches_open(config: StageConfig) -> bool:
    """Whether the options say nothing of micro-batches, and any size has the same loss."""
    sizes = config.micro_batch_size, config.micro_batch_tokens
    return sizes == (None, None) and not config.depends_on_micro_batching


def even_sizes(config: StageConfig, row_shards: int) -> list[int]:
    """The micro-batch sizes that cut a minibatch into whole groups and spread evenly over `row_shards` devices,
    ascending; the whole minibatch alone if none do."""
    unit = row_shards * config.num_generations  # a group stays in one micro-batch
    minibatch = batch_arithmetic(config).minibatch
    return [rows for rows in range(unit, minibatch + 1, unit) if minibatch % rows == 0] or [minibatch]


def for_devices(config: ConfigT, row_shards: int, platform: str) -> ConfigT:
    """The config with what its devices decide where it is None.

    micro_batch_size: the largest of `even_sizes` with at most MICRO_TOKENS tokens; a run on GPUs or TPUs has set it by
    memory before (`dry_run.micro_batches`). It stays None (the whole minibatch) with micro_batch_tokens, or if it would
    change the loss (loss_aggregation token_mean_micro).

    gradient_checkpointing: policy dots on GPUs, where writing and reading what a scan saves of each layer takes longer
    than computing most of it again; on CPUs and TPUs it does not (docs/benchmarks.md, "Predicted beside measured").

    Args:
      row_shards: devices that rows are sharded over.
      platform: of the devices: 'cpu', 'gpu' or 'tpu'.
    """
    if config.gradient_checkpointing is None:
        policy = config.gradient_checkpointing_policy or "dots"
        config = dataclasses.replace(
            config, gradient_checkpointing=platform == "gpu", gradient_checkpointing_policy=policy
        )
    if not leaves_micro_batches_open(config):
        return config
    most = MICRO_TOKENS.get(platform, OTHER_MICRO_TOKENS) * row_shards // config.tokens_per_row
    sizes = even_sizes(config, row_shards)
    return dataclasses.replace(config, micro_batch_size=max((n for n in sizes if n <= most), default=sizes[0]))


def check_rows(config: StageConfig, n_rows: int) -> list[str]:
    """Raise UserError if `n_rows` rows make no update.

    Returns:
      Warnings: a warm-up or a schedule longer than the run, off-policy steps without a ratio.
    """
    counts = batch_arithmetic(config, n_rows)
    if not counts.updates or not counts.optimizer_steps or not n_rows:
        raise UserError(f"num_train_epochs {config.num_train_epochs:g} x {n_rows} rows = no data to train on.")
    warnings = []
    per_step = config.lr_scheduler_unit == "optimizer_step"
    length, unit = (counts.optimizer_steps, "optimizer steps") if per_step else (counts.updates, "updates")
    if config.warmup_steps and config.warmup_steps >= length:
        warnings.append(
            f"warning: warmup_steps {config.warmup_steps} >= {length} {unit}: the learning rate never reaches "
            f"{config.learning_rate:g}"
        )
    kwargs = config.lr_scheduler_kwargs or {}
    phases = {"warmup_steps": config.warmup_steps}
    phases |= {name: kwargs[name] for name in ("num_stable_steps", "num_decay_steps") if kwargs.get(name)}
    if len(phases) > 1 and sum(phases.values()) > length:
        total = " + ".join(f"{name} {steps}" for name, steps in phases.items())
        warnings.append(
            f"warning: {total} = {sum(phases.values())} > {length} {unit}: the schedule is longer than the run"
        )
    warmup = config.critic_warmup_steps
    if warmup and warmup >= counts.updates:
        warnings.append(f"warning: critic_warmup_steps {warmup} >= {counts.updates} updates: the policy never learns")
    steps = counts.epochs * (counts.batch // counts.minibatch)
    if config.policy_loss == "reinforce" and steps > 1:
        warnings.append(
            f"warning: policy_loss reinforce with {steps} optimizer steps per update (num_iterations {counts.epochs} x "
            f"num_mini_batches {counts.batch // counts.minibatch}): without a ratio later steps are off-policy"
        )
    return warnings


def batch_lines(config: StageConfig, n_rows: int | None = None) -> list[str]:
    """The batch arithmetic as text, for --dry_run and the start of a run."""
    counts = batch_arithmetic(config, n_rows)
    is_policy = isinstance(config, PolicyConfig)
    unit = "episodes" if is_policy else "rows"
    groups = f" = {counts.prompts:,} prompts x {counts.generations} responses" if counts.generations > 1 else ""
    lines = [f"update: {counts.batch:,} {unit}{groups}"]
    if is_policy:
        rounds = counts.batch // counts.rollout_batch
        lines.append(f"rollout: {rounds:,} x {counts.rollout_batch:,} episodes generated and scored at a time")
        epochs = "iterations" if "num_iterations" in vars(config) else "epochs"
        lines.append(
            f"optimizer: {counts.epochs} {epochs} x {counts.batch // counts.minibatch} minibatches of "
            f"{counts.minibatch:,} = {counts.epochs * (counts.batch // counts.minibatch)} steps per update"
        )
    if is_policy and config.micro_batch_tokens is not None:
        lines.append(
            f"gradient: micro-batches of at most {config.micro_batch_tokens:,} tokens, as many as a step needs"
        )
    else:
        micro_batches = counts.minibatch // counts.micro_batch
        lines.append(f"gradient: {micro_batches:,} micro-batches of {counts.micro_batch:,} rows per step")
    if counts.updates is None:
        lines.append(f"run: num_train_epochs {config.num_train_epochs:g} over the data (not read yet)")
        return lines
    rounded = " (rounded up)" if counts.rows != counts.requested else ""
    requested = f"{counts.requested:,} {unit} / {counts.batch:,}"
    if isinstance(config, SupervisedOptions) and config.max_steps < 1 and n_rows is not None:
        updates = f"{n_rows:,} rows / {counts.batch:,} = {n_rows // counts.batch:,} updates per epoch"
        requested = f"{updates}, num_train_epochs {config.num_train_epochs:g}"
    lines.append(
        f"run: {requested} = {counts.updates:,} updates, {counts.optimizer_steps:,} optimizer steps, "
        f"{counts.rows:,} {unit}{rounded}"
    )
    if n_rows and counts.rows:
        inputs = "prompts" if counts.generations > 1 else "rows"
        lines.append(f"data: {n_rows:,} {inputs}, {counts.rows / (counts.generations * n_rows):.3g} epochs")
    return lines
