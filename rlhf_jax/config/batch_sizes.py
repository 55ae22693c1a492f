"""What a config adds up to: whether it is possible, how its rows spread over devices, and how many updates it makes."""

from __future__ import annotations

import dataclasses
import math

from rlhf_jax.config import Config, Pipeline, PolicyConfig, RewardConfig, RLOOConfig, StageConfig, stages_of
from rlhf_jax.config.validation import RANGES, chain, combinations, out_of_range, sampling_options
from rlhf_jax.errors import UserError

__all__ = ["RANGES", "Arithmetic", "batch_arithmetic", "batch_lines", "check", "check_devices", "check_devices_of"]
__all__ += ["check_rows", "sampling_options", "updates_between", "with_micro_batch"]


def check(config: Config) -> None:
    """Raise UserError, with the arithmetic, for what cannot work. Needs no model and no data.

    Says every problem at once, one a line; in a pipeline each begins with its stage.
    """
    problems = []
    for name, stage in stages_of(config).items():
        found = [*out_of_range(stage)] or [*combinations(stage)]  # arithmetic on wild numbers would only confuse
        problems += [f"{name}: {p}" if isinstance(config, Pipeline) else p for p in found]
    if isinstance(config, Pipeline):
        problems += chain(config)
    if "://" in (config.run_dir or ""):
        problems.append(
            f"run_dir is {config.run_dir!r}; it must be a folder. Mount the bucket (docs/scaling.md) and give its path."
        )
    if problems:
        raise UserError("\n".join(problems))


def check_devices_of(config: Config, n_devices: int) -> None:
    """`check_devices` for every stage of a config."""
    for name, stage in stages_of(config).items():
        try:
            check_devices(stage, n_devices)
        except UserError as error:
            raise UserError(f"{name}: {error}" if isinstance(config, Pipeline) else str(error)) from None


def check_devices(config: StageConfig, n_devices: int) -> None:
    """Raise UserError when the mesh does not use `n_devices`, or rows (with shared_prompts: prompts) do not spread
    evenly over its data devices."""
    fsdp, tensor = config.mesh_fsdp, config.mesh_tensor
    data = max(n_devices // (fsdp * tensor), 1) if config.mesh_data == -1 else config.mesh_data
    if data * fsdp * tensor != n_devices:
        raise UserError(
            f"mesh_data {data} x mesh_fsdp {fsdp} x mesh_tensor {tensor} = {data * fsdp * tensor} devices, "
            f"but there are {n_devices}."
        )
    sums = batch_arithmetic(config)
    rows = {"micro_batch_size": sums.micro_batch}
    if isinstance(config, PolicyConfig):
        rows["rollout_batch_size"] = sums.rollout_batch
    # With shared prompts the devices divide prompts: a prompt and all its responses lie on one.
    group = sums.generations if getattr(config, "shared_prompts", False) else 1
    for name, count in rows.items():
        if count % (group * data * fsdp):
            prompts = f" / num_generations {group}" if group > 1 else ""
            raise UserError(
                f"{name}: {count} rows{prompts} / (mesh_data {data} x mesh_fsdp {fsdp}) = "
                f"{count / (group * data * fsdp):.4g} {'prompts' if prompts else 'rows'} a device; it must come out "
                f"even{', or --shared_prompts false' if prompts and count % (data * fsdp) == 0 else ''}."
            )


# --- what a run adds up to


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Counts of a stage, all global (over all devices). None where the number of rows is needed but not known."""

    batch: int  # rows (episodes) an update
    minibatch: int  # rows an optimizer step
    micro_batch: int  # rows a forward and backward pass
    rollout_batch: int  # rows generated and scored at a time (PPO, RLOO)
    epochs: int  # passes over each batch (PPO: num_ppo_epochs, RLOO: num_iterations)
    updates: int | None
    requested: int | None  # rows or episodes asked for, before rounding up to whole updates
    generations: int = 1  # responses to each prompt (RLOO: num_generations)

    @property
    def prompts(self) -> int:
        """Prompts (PPO: as many as episodes) an update."""
        return self.batch // self.generations

    @property
    def rows(self) -> int | None:
        """Rows (episodes) that the run takes: updates x batch."""
        return None if self.updates is None else self.updates * self.batch

    @property
    def optimizer_steps(self) -> int | None:
        """Optimizer steps in all."""
        return None if self.updates is None else self.updates * self.epochs * (self.batch // self.minibatch)


def batch_arithmetic(config: StageConfig, n_rows: int | None = None) -> Arithmetic:
    """The counts of a stage that trains on `n_rows` prompts, pairs or demonstrations (None: not known yet).

    PPO and RLOO round up, as TRL does: ceil(total_episodes / batch_size), with num_train_epochs * n_rows episodes
    (RLOO: times num_generations) where total_episodes is None. The other stages leave out an epoch's incomplete batch:
    max_steps updates, or ceil(num_train_epochs * (n_rows // batch_size)), at least 1.
    """
    batch, epochs, is_policy = config.batch_size, 1, isinstance(config, PolicyConfig)
    minibatch, generations = batch, getattr(config, "num_generations", 1)
    if is_policy:
        minibatch = batch // config.num_mini_batches
        epochs = config.num_iterations if isinstance(config, RLOOConfig) else config.num_ppo_epochs
        asked = config.total_episodes
    else:
        asked = config.max_steps * batch if config.max_steps > 0 else None
    if asked is None and n_rows is not None:
        passes = config.num_train_epochs
        asked = (
            int(passes * n_rows * generations) if is_policy else max(1, math.ceil(passes * (n_rows // batch))) * batch
        )
    return Arithmetic(
        batch=batch,
        minibatch=minibatch,
        micro_batch=config.micro_batch_size or minibatch,
        rollout_batch=(config.rollout_batch_size or batch) if is_policy else batch,
        epochs=epochs,
        updates=None if asked is None else math.ceil(asked / batch),
        requested=asked,
        generations=generations,
    )


MICRO_TOKENS = {"cpu": 2048}
OTHER_MICRO_TOKENS = 16384
"""Padded tokens of an automatic micro-batch on a device: of a CPU (whose caches like few), of any other."""


def with_micro_batch(config: StageConfig, row_shards: int, platform: str) -> StageConfig:
    """The config with a micro_batch_size: the most rows that divide the minibatch, spread over the devices and have no
    more tokens than MICRO_TOKENS allows. What is given stays; so does the whole minibatch where the size of its
    micro-batches changes the loss (loss_aggregation token_mean_micro) or the metrics (metrics trl).

    Args:
      config: a stage's.
      row_shards: devices that rows are spread over.
      platform: of the devices, 'cpu', 'gpu' or 'tpu'.
    """
    if config.micro_batch_size is not None or config.depends_on_micro_batching:
        return config
    width = config.query_length + config.response_length if isinstance(config, PolicyConfig) else config.max_length
    # A pair is two sequences; a group goes through together.
    width *= 2 if isinstance(config, RewardConfig) else 1
    unit = row_shards * getattr(config, "num_generations", 1)
    most = MICRO_TOKENS.get(platform, OTHER_MICRO_TOKENS) * row_shards // width
    minibatch = batch_arithmetic(config).minibatch
    fitting = [rows for rows in range(unit, minibatch + 1, unit) if minibatch % rows == 0 and rows <= max(most, unit)]
    return dataclasses.replace(config, micro_batch_size=max(fitting, default=minibatch))


def updates_between(steps: float, total_updates: int) -> int:
    """eval_steps or save_steps in updates: below 1 it is a share of the run, at least one update (transformers).

    Args:
      steps: the option.
      total_updates: of the whole run.

    Returns:
      Updates between two of them; 0: none but the last.
    """
    if 0 < steps < 1:
        return max(1, math.ceil(steps * total_updates))
    return int(steps)


def check_rows(config: StageConfig, n_rows: int) -> list[str]:
    """Raise UserError when `n_rows` rows make no update.

    Returns:
      Warnings: a warm-up that outlasts the run, off-policy steps without a ratio.
    """
    sums = batch_arithmetic(config, n_rows)
    if not sums.updates or not n_rows:
        raise UserError(f"num_train_epochs {config.num_train_epochs:g} x {n_rows} rows = nothing to train on.")
    warnings = []
    per_step = getattr(config, "lr_scheduler_unit", "update") == "optimizer_step"
    length, unit = (sums.optimizer_steps, "optimizer steps") if per_step else (sums.updates, "updates")
    if config.warmup_steps and config.warmup_steps >= length:
        warnings.append(
            f"warning: warmup_steps {config.warmup_steps} >= {length} {unit}: the learning rate never reaches "
            f"{config.learning_rate:g}"
        )
    steps = sums.epochs * (sums.batch // sums.minibatch)
    if getattr(config, "policy_loss", "clipped") == "reinforce" and steps > 1:
        warnings.append(
            f"warning: policy_loss reinforce with {steps} optimizer steps an update (num_iterations {sums.epochs} x "
            f"num_mini_batches {sums.batch // sums.minibatch}): without a ratio later steps are off-policy"
        )
    return warnings


def batch_lines(config: StageConfig, n_rows: int | None = None) -> list[str]:
    """The batch arithmetic in words, for --dry_run and the start of a run."""
    sums = batch_arithmetic(config, n_rows)
    is_policy = isinstance(config, PolicyConfig)
    unit = "episodes" if is_policy else "rows"
    groups = f" = {sums.prompts:,} prompts x {sums.generations} responses" if sums.generations > 1 else ""
    lines = [f"update: {sums.batch:,} {unit}{groups}"]
    if is_policy:
        rounds = sums.batch // sums.rollout_batch
        lines.append(f"rollout: {rounds:,} x {sums.rollout_batch:,} episodes generated and scored at a time")
        passes = "iterations" if isinstance(config, RLOOConfig) else "epochs"
        lines.append(
            f"optimizer: {sums.epochs} {passes} x {sums.batch // sums.minibatch} minibatches of {sums.minibatch:,} "
            f"= {sums.epochs * (sums.batch // sums.minibatch)} steps an update"
        )
    passes = sums.minibatch // sums.micro_batch
    lines.append(f"gradient: {passes:,} micro-batches of {sums.micro_batch:,} rows a step")
    if sums.updates is None:
        lines.append(f"run: num_train_epochs {config.num_train_epochs:g} passes over the data (not read yet)")
        return lines
    rounded = " (rounded up)" if sums.rows != sums.requested else ""
    asked = f"{sums.requested:,} {unit} / {sums.batch:,}"
    if not is_policy and config.max_steps < 1:
        passes = f"{n_rows:,} rows / {sums.batch:,} = {n_rows // sums.batch:,} updates an epoch"
        asked = f"{passes}, num_train_epochs {config.num_train_epochs:g}"
    lines.append(
        f"run: {asked} = {sums.updates:,} updates, {sums.optimizer_steps:,} optimizer steps, "
        f"{sums.rows:,} {unit}{rounded}"
    )
    if n_rows:
        what = "prompts" if sums.generations > 1 else "rows"
        lines.append(f"data: {n_rows:,} {what}, {sums.rows / (sums.generations * n_rows):.3g} passes")
    return lines
