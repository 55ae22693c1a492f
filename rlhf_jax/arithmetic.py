"""What can be known of a config before any model is loaded: whether it is possible, and what it adds up to."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator

from rlhf_jax.config import Config, Pipeline, PPOConfig, RewardConfig, SFTConfig, StageConfig, stages_of
from rlhf_jax.types import UserError

Rule = tuple[str, Callable[[float], bool]]
_AT_LEAST_0: Rule = ("at least 0", lambda v: v >= 0)
_AT_LEAST_1: Rule = ("at least 1", lambda v: v >= 1)
_POSITIVE: Rule = ("above 0", lambda v: v > 0)
_SHARE: Rule = ("between 0 and 1", lambda v: 0 <= v <= 1)
_DECAY: Rule = ("at least 0 and below 1", lambda v: 0 <= v < 1)

RANGES: dict[str, Rule] = {
    "seed": ("at least 0 and below 2^32", lambda v: 0 <= v < 2**32),
    **dict.fromkeys(("batch_size", "micro_batch_size", "rollout_batch_size", "num_mini_batches"), _AT_LEAST_1),
    **dict.fromkeys(("query_length", "response_length", "max_length", "total_episodes", "num_ppo_epochs"), _AT_LEAST_1),
    **dict.fromkeys(("max_train_samples", "max_eval_samples", "normalize_samples", "save_total_limit"), _AT_LEAST_1),
    **dict.fromkeys(("logging_steps", "mesh_fsdp", "mesh_tensor"), _AT_LEAST_1),
    "mesh_data": ("-1 (all that the other axes leave) or at least 1", lambda v: v == -1 or v >= 1),
    **dict.fromkeys(("save_steps", "eval_steps", "warmup_steps", "early_stopping_patience"), _AT_LEAST_0),
    **dict.fromkeys(("learning_rate", "weight_decay", "center_rewards_coefficient", "kl_coef"), _AT_LEAST_0),
    **dict.fromkeys(("vf_coef", "top_k", "num_sample_generations", "stop_token_id"), _AT_LEAST_0),
    "missing_eos_penalty": ("at least 0, as it is taken off the score", lambda v: v >= 0),
    **dict.fromkeys(("adam_epsilon", "max_grad_norm", "num_train_epochs", "score_init_std"), _POSITIVE),
    **dict.fromkeys(("temperature", "repetition_penalty", "cliprange", "cliprange_value"), _POSITIVE),
    **dict.fromkeys(("kl_target", "kl_horizon"), _POSITIVE),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _DECAY),
    **dict.fromkeys(("gamma", "lam", "min_p"), _SHARE),
    "top_p": ("above 0 and at most 1", lambda v: 0 < v <= 1),
    "max_steps": ("-1 (num_train_epochs decides) or at least 1", lambda v: v == -1 or v >= 1),
}


def check(config: Config) -> None:
    """Raise UserError, with the arithmetic, for what cannot work. Needs no model and no data.

    Says every problem at once, one a line; in a pipeline each begins with its stage.
    """
    problems = []
    for name, stage in stages_of(config).items():
        found = [*_out_of_range(stage)] or [*_combinations(stage)]  # arithmetic on wild numbers would only confuse
        problems += [f"{name}: {p}" if isinstance(config, Pipeline) else p for p in found]
    if isinstance(config, Pipeline):
        problems += _chain(config)
    if problems:
        raise UserError("\n".join(problems))


def _out_of_range(config: StageConfig) -> Iterator[str]:
    for name, value in vars(config).items():
        if name in RANGES and value is not None and not RANGES[name][1](value):
            yield f"{name} is {value}; it must be {RANGES[name][0]}."


def _combinations(config: StageConfig) -> Iterator[str]:
    if config.dataset_streaming:
        yield (
            "dataset_streaming is refused: batches are a function of the seed and the step, so that a run can resume "
            "anywhere, and a stream has no random access. Download the data set (leave the option out)."
        )
    unknown = [name for name in config.report_to if name != "tensorboard"]
    if unknown:
        yield f"report_to: {', '.join(unknown)} is not supported; 'tensorboard' or 'none' (metrics.jsonl always comes)."
    if config.eval_steps and config.dataset_test_split is None and config.eval_dataset_name is None:
        yield f"eval_steps is {config.eval_steps}, but with dataset_test_split None there is nothing to evaluate on."
    buckets = config.length_buckets
    if buckets is not None and (not buckets or buckets[0] < 1 or any(a >= b for a, b in itertools.pairwise(buckets))):
        yield f"length_buckets is {buckets}; lengths must be at least 1 and rise."
    yield from _scratch(config)
    yield from _batches(config)
    if isinstance(config, PPOConfig):
        yield from _ppo(config)
    elif isinstance(config, SFTConfig | RewardConfig):
        yield from _supervised(config)


def _scratch(config: StageConfig) -> Iterator[str]:
    shape = re.fullmatch(r"(\d+)x(\d+)x(\d+)", config.scratch_model or "")
    if shape:
        layers, width, heads = map(int, shape.groups())
        if min(layers, width, heads) < 1 or width % heads:
            yield (
                f"scratch_model {config.scratch_model}: {layers} layers of width {width} with {heads} heads; "
                "all must be at least 1 and the width a multiple of the heads."
            )
    start = config.sft_model_path if isinstance(config, PPOConfig) else getattr(config, "model_name_or_path", None)
    name = "sft_model_path" if isinstance(config, PPOConfig) else "model_name_or_path"
    if start is None and config.scratch_model is None:
        yield f"{name} is None, and so is scratch_model: there is no model to start from."
    if start is None and config.tokenizer_name_or_path is None:
        yield f"{name} is None, and so is tokenizer_name_or_path: there is no tokenizer."


def _batches(config: StageConfig) -> Iterator[str]:
    batch, minibatches = config.batch_size, getattr(config, "num_mini_batches", 1)
    if minibatches > batch:
        yield f"num_mini_batches {minibatches} is over batch_size {batch}: a minibatch would be empty."
    elif batch % minibatches:
        yield (
            f"batch_size {batch} / num_mini_batches {minibatches} = {batch / minibatches:.4g} rows a minibatch; "
            f"it must come out even (batch_size {_multiples(batch, minibatches)})."
        )
    else:
        rows, micro = batch // minibatches, config.micro_batch_size
        if micro is not None and rows % micro:
            source = f"batch_size {batch} / num_mini_batches {minibatches} = " if minibatches > 1 else "batch_size "
            yield (
                f"{source}{rows} rows a minibatch / micro_batch_size {micro} = {rows / micro:.4g} passes; "
                f"it must come out even (micro_batch_size {_divisors(rows, micro)})."
            )
    rollout = getattr(config, "rollout_batch_size", None)
    if rollout is not None and batch % rollout:
        yield (
            f"batch_size {batch} / rollout_batch_size {rollout} = {batch / rollout:.4g} rounds; "
            f"it must come out even (rollout_batch_size {_divisors(batch, rollout)})."
        )


def _multiples(total: int, part: int) -> str:
    below = total - total % part
    return f"{below} or {below + part}" if below else f"{part}"


def _divisors(total: int, near: int) -> str:
    """The divisors of `total` on both sides of `near`, in words."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    around = [d for d in divisors if d < near][-1:] + [d for d in divisors if d > near][:1]
    return " or ".join(map(str, around))


def _supervised(config: SFTConfig | RewardConfig) -> Iterator[str]:
    if config.max_length <= config.query_length:
        yield (
            f"max_length {config.max_length} - query_length {config.query_length} = "
            f"{config.max_length - config.query_length} tokens left for the completion; max_length must be larger."
        )
    if isinstance(config, SFTConfig) and config.early_stopping_patience and not config.eval_steps:
        yield f"early_stopping_patience {config.early_stopping_patience} needs eval_steps above 0: it counts these."


def _ppo(config: PPOConfig) -> Iterator[str]:
    if config.stop_token is not None and config.stop_token_id is not None:
        yield (
            f"stop_token {config.stop_token!r} and stop_token_id {config.stop_token_id} exclude each other: "
            "give one (for an id: --stop_token None --stop_token_id ID)."
        )
    if config.eos_penalty_mode == "replace" and config.missing_eos_penalty is None:
        yield "eos_penalty_mode 'replace' needs missing_eos_penalty: a response without eos then scores -penalty."
    rows = config.batch_size // config.num_mini_batches
    if config.whiten_rewards and rows < 8:
        yield (
            f"whiten_rewards needs at least 8 rows a minibatch: batch_size {config.batch_size} / "
            f"num_mini_batches {config.num_mini_batches} = {rows}."
        )
    if config.kl_target is not None and config.kl_coef == 0:
        yield f"kl_target {config.kl_target} with kl_coef 0: the controller multiplies kl_coef, which would stay 0."
    if config.value_model == "shared_backbone" and config.value_model_path is not None:
        yield (
            f"value_model 'shared_backbone' is a head on the policy; value_model_path {config.value_model_path!r} "
            "would not be used. Leave one of them out."
        )
    no_value = config.reward_model_path is None and config.value_model_path is None
    if config.value_model == "separate" and no_value and config.scratch_model is None:
        yield (
            "reward_model_path is None, and the value model starts from it: "
            "give value_model_path, or value_model 'shared_backbone'."
        )


def _chain(config: Pipeline) -> Iterator[str]:
    """A pipeline whose PPO does not start from its own stages trains them for nothing."""
    run_dir, ppo = config.run_dir or "{run_dir}", config.ppo
    for name, own in (("sft_model_path", "sft/policy"), ("reward_model_path", "reward/reward_model")):
        if getattr(ppo, name) not in (f"{{run_dir}}/{own}", f"{run_dir}/{own}"):
            yield (
                f"ppo: {name} is {getattr(ppo, name)!r}, not this pipeline's own '{{run_dir}}/{own}': write that, "
                "or run PPO by a config of its own."
            )


def check_devices_of(config: Config, n_devices: int) -> None:
    """`check_devices` for every stage of a config."""
    for name, stage in stages_of(config).items():
        try:
            check_devices(stage, n_devices)
        except UserError as error:
            raise UserError(f"{name}: {error}" if isinstance(config, Pipeline) else str(error)) from None


def check_devices(config: StageConfig, n_devices: int) -> None:
    """Raise UserError when the mesh does not use `n_devices`, or rows do not spread evenly over its data devices."""
    fsdp, tensor = config.mesh_fsdp, config.mesh_tensor
    data = max(n_devices // (fsdp * tensor), 1) if config.mesh_data == -1 else config.mesh_data
    if data * fsdp * tensor != n_devices:
        raise UserError(
            f"mesh_data {data} x mesh_fsdp {fsdp} x mesh_tensor {tensor} = {data * fsdp * tensor} devices, "
            f"but there are {n_devices}."
        )
    sums = batch_arithmetic(config)
    rows = {"micro_batch_size": sums.micro_batch}
    if isinstance(config, PPOConfig):
        rows["rollout_batch_size"] = sums.rollout_batch
    for name, count in rows.items():
        if count % (data * fsdp):
            raise UserError(
                f"{name}: {count} rows / (mesh_data {data} x mesh_fsdp {fsdp}) = {count / (data * fsdp):.4g} rows a "
                "device; it must come out even."
            )


# --- what a run adds up to


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Counts of a stage, all global (over all devices). None where the number of rows is needed but not known."""

    batch: int  # rows (episodes) an update
    minibatch: int  # rows an optimizer step
    micro_batch: int  # rows a forward and backward pass
    rollout_batch: int  # rows generated and scored at a time (PPO)
    epochs: int  # passes over each batch (PPO: num_ppo_epochs)
    updates: int | None
    requested: int | None  # rows or episodes asked for, before rounding up to whole updates

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

    PPO rounds up, as TRL does: ceil(total_episodes / batch_size), with num_train_epochs * n_rows episodes where
    total_episodes is None. The other stages leave out an epoch's incomplete batch: max_steps updates, or
    ceil(num_train_epochs * (n_rows // batch_size)), at least 1.
    """
    batch, is_ppo = config.batch_size, isinstance(config, PPOConfig)
    minibatch = batch // config.num_mini_batches if is_ppo else batch
    asked = config.total_episodes if is_ppo else (config.max_steps * batch if config.max_steps > 0 else None)
    if asked is None and n_rows is not None:
        epochs = config.num_train_epochs
        asked = int(epochs * n_rows) if is_ppo else max(1, math.ceil(epochs * (n_rows // batch))) * batch
    return Arithmetic(
        batch=batch,
        minibatch=minibatch,
        micro_batch=config.micro_batch_size or minibatch,
        rollout_batch=(config.rollout_batch_size or batch) if is_ppo else batch,
        epochs=config.num_ppo_epochs if is_ppo else 1,
        updates=None if asked is None else math.ceil(asked / batch),
        requested=asked,
    )


def check_rows(config: StageConfig, n_rows: int) -> list[str]:
    """Raise UserError when `n_rows` rows make no update. Returns warnings: of a warm-up that outlasts the run."""
    updates = batch_arithmetic(config, n_rows).updates
    if not updates or not n_rows:
        raise UserError(f"num_train_epochs {config.num_train_epochs:g} x {n_rows} rows = nothing to train on.")
    if config.warmup_steps and config.warmup_steps >= updates:
        return [
            f"warning: warmup_steps {config.warmup_steps} >= {updates} updates: the learning rate never reaches "
            f"{config.learning_rate:g}"
        ]
    return []


def batch_lines(config: StageConfig, n_rows: int | None = None) -> list[str]:
    """The batch arithmetic in words, for --dry_run and the start of a run."""
    sums = batch_arithmetic(config, n_rows)
    is_ppo = isinstance(config, PPOConfig)
    unit = "episodes" if is_ppo else "rows"
    lines = [f"update: {sums.batch:,} {unit}"]
    if is_ppo:
        rounds = sums.batch // sums.rollout_batch
        lines.append(f"rollout: {rounds:,} x {sums.rollout_batch:,} episodes generated and scored at a time")
        steps = sums.epochs * (sums.batch // sums.minibatch)
        lines.append(
            f"optimizer: {sums.epochs} epochs x {sums.batch // sums.minibatch} minibatches of {sums.minibatch:,} "
            f"= {steps} steps an update"
        )
    passes = sums.minibatch // sums.micro_batch
    lines.append(f"gradient: {passes:,} micro-batches of {sums.micro_batch:,} rows a step")
    if sums.updates is None:
        lines.append(f"run: num_train_epochs {config.num_train_epochs:g} passes over the data (not read yet)")
        return lines
    rounded = " (rounded up)" if sums.rows != sums.requested else ""
    asked = f"{sums.requested:,} {unit} / {sums.batch:,}"
    if not is_ppo and config.max_steps < 1:
        passes = f"{n_rows:,} rows / {sums.batch:,} = {n_rows // sums.batch:,} updates an epoch"
        asked = f"{passes}, num_train_epochs {config.num_train_epochs:g}"
    lines.append(
        f"run: {asked} = {sums.updates:,} updates, {sums.optimizer_steps:,} optimizer steps, "
        f"{sums.rows:,} {unit}{rounded}"
    )
    if n_rows:
        lines.append(f"data: {n_rows:,} rows, {sums.rows / n_rows:.3g} passes")
    return lines
