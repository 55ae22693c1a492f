"""Which configs can work, option by option and in combination; errors show the arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, Literal

from rlhf_jax import storage
from rlhf_jax.config.dataclasses import (
    Config,
    GroupConfig,
    GRPOConfig,
    Pipeline,
    PolicyConfig,
    PPOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
    StageConfig,
)
from rlhf_jax.config.resolution import SAMPLING, stages_of
from rlhf_jax.config.values import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    checked_types,
    checked_value,
    field_ranges,
    field_types,
    nearest,
)
from rlhf_jax.data import mixture
from rlhf_jax.errors import UserError
from rlhf_jax.metrics.alarms import ALARMS, threshold
from rlhf_jax.rewards import builtin
from rlhf_jax.rewards.interface import split_spec
from rlhf_jax.utils.text import has_password

TRACKERS = ("tensorboard", "wandb", "trackio", "all")


def check(config: Config) -> None:
    """Raise UserError for a config that cannot work, with every problem on a line of its own; in a pipeline each line
    begins with its stage. Needs no model and no data."""
    problems = []
    for name, stage in stages_of(config).items():
        errors = [*out_of_range(stage)] or [*combinations(stage)]  # arithmetic on values out of range would mislead
        problems += [f"{name}: {error}" if isinstance(config, Pipeline) else error for error in errors]
    if isinstance(config, Pipeline):
        problems += pipeline_links(config)
    problems += bucket_paths(config.run_dir or "")
    if problems:
        raise UserError("\n".join(problems))


def out_of_range(config: Any) -> Iterator[str]:
    """A line for every option of a config dataclass whose value is impossible by itself."""
    ranges = field_ranges(type(config))
    for name, value in vars(config).items():
        if type(value) is int and abs(value) >= 2**31 and name != "seed":
            yield f"{name} is {value}; it must be below 2^31, since steps, rows and tokens are 32-bit integers."
        elif name in ranges and (error := ranges[name].error(name, value)):
            yield error


def _mixture(config: StageConfig) -> Iterator[str]:
    """A line for everything that is wrong with the option datasets."""
    problems = list(mixture.faults(config))
    yield from problems
    for number, entry in enumerate(() if problems else config.datasets or (), 1):
        try:
            lines = list(out_of_range(checked_types(mixture.config_of(config, entry))))
        except UserError as error:
            lines = [str(error)]
        yield from (f"datasets, entry {number}: {line}" for line in lines)


def combinations(config: StageConfig) -> Iterator[str]:
    """A line for every set of options that exclude each other or do not divide evenly."""
    if config.dataset_streaming:
        yield (
            "dataset_streaming is not supported: batches are a function of the seed and the step, so that a run can "
            "resume anywhere, and a stream has no random access. Leave the option out: the dataset is downloaded once "
            "and mapped from the disk, so that memory does not grow with it. max_train_samples takes the first rows."
        )
    for name, value in vars(config).items():
        parts = value if type(value) is tuple else (value,)
        parts = [part.get("path") if isinstance(part, dict) else part for part in parts]
        if any(isinstance(part, str) and has_password(part) for part in parts):
            yield (
                f"{name} is a URL with a user name or a password, which config.json and the model card would contain. "
                "Remove it; a reward server's token is read from the environment (reward_server_token_env)."
            )
    unknown = [name for name in config.report_to if name not in TRACKERS]
    if unknown:
        known = ", ".join((*TRACKERS, "none"))
        yield (
            f"report_to: {', '.join(unknown)} is not supported; choose from {known} (metrics.jsonl is always written)."
        )
    if config.eval_steps and config.eval_dataset_name is None:
        if config.datasets is not None:
            yield f"eval_steps is {config.eval_steps:g}, but datasets has no evaluation data: give eval_dataset_name."
        elif config.dataset_test_split is None:
            yield f"eval_steps is {config.eval_steps:g}, but dataset_test_split is None: there is no evaluation data."
    yield from _mixture(config)
    buckets = config.length_buckets
    if buckets is not None and (not buckets or buckets[0] < 1 or any(a >= b for a, b in itertools.pairwise(buckets))):
        yield f"length_buckets is {buckets}; lengths must be at least 1 and increasing."
    yield from _scratch(config)
    yield from _batches(config)
    yield from _schedule(config)
    yield from _adapters(config)
    if isinstance(config, PolicyConfig):
        yield from _policy(config)
        yield from _decoding(config)
        yield from _rewards(config)
        yield from _generation_kwargs(config)
    if isinstance(config, PPOConfig):
        yield from _ppo(config)
    if isinstance(config, GroupConfig):
        yield from _groups(config)
        yield from _clip_range(config)
    if isinstance(config, RLOOConfig) and config.baseline_excludes_truncated and not config.mask_truncated_completions:
        yield "baseline_excludes_truncated needs mask_truncated_completions: it extends that mask to the baseline."
    elif isinstance(config, GRPOConfig):
        yield from _grpo(config)
    if isinstance(config, SFTConfig | RewardConfig):
        yield from _supervised(config)


def _scratch(config: StageConfig) -> Iterator[str]:
    shape = re.fullmatch(r"(?:\w+:)?(\d+)x(\d+)x(\d+)(?:x\d+)?", config.scratch_model or "")
    if shape:
        layers, width, heads = map(int, shape.groups())
        if min(layers, width, heads) < 1 or width % heads:
            yield (
                f"scratch_model {config.scratch_model}: {layers} layers of width {width} with {heads} heads; "
                "all must be at least 1, and the width divisible by the number of heads."
            )
    start = config.starting_model
    name = "sft_model_path" if isinstance(config, PolicyConfig) else "model_name_or_path"
    if start is None and config.scratch_model is None:
        yield f"{name} and scratch_model are both None: there is no model to start from."
    if start is None and config.tokenizer_name_or_path is None:
        yield f"{name} and tokenizer_name_or_path are both None: there is no tokenizer."


def _adapters(config: StageConfig) -> Iterator[str]:
    if not config.use_peft:
        unused = ("adapters", "model_adapter_name", "ref_adapter_name", "lora_target_modules", "modules_to_save")
        given = [name for name in (*unused, "load_in_8bit", "load_in_4bit") if vars(config).get(name)]
        given += ["start_adapter"] if config.start_adapter != "auto" else []
        given += ["lora_value"] if config.lora_value != "full" else []
        if given:
            yield f"{given[0]} {vars(config)[given[0]]!r} needs use_peft: without it there are no adapters."
        return
    if config.load_in_8bit and config.load_in_4bit:
        yield "load_in_8bit and load_in_4bit are both set: frozen kernels have one form. Remove one of them."
    if isinstance(config, PolicyConfig) and config.ref_adapter_name is not None and config.ref_model_path is not None:
        yield "ref_adapter_name and ref_model_path both set the reference: remove one of them."
    if isinstance(config, GroupConfig) and config.sync_ref_model:
        yield (
            "sync_ref_model with use_peft is not supported (nor by TRL): the reference is the policy's frozen base "
            "params. Remove one of them."
        )
    if isinstance(config, PPOConfig) and config.lora_value != "full":
        if config.value_model == "shared_backbone":
            yield (
                f"lora_value {config.lora_value!r} with value_model 'shared_backbone': the value model is a head on "
                "the policy and has no adapter of its own. Remove one of them."
            )
        if config.lora_value == "own" and config.reward_model_path is None and config.value_model_path is None:
            yield "lora_value 'own' needs value_model_path or reward_model_path as the base model of its adapter."
        if config.lora_value == "shared" and config.value_model_path is not None:
            yield (
                f"lora_value 'shared' uses the policy's params, so value_model_path {config.value_model_path!r} would "
                "not be used. Remove it, or give lora_value 'own'."
            )


def _batches(config: StageConfig) -> Iterator[str]:
    batch, minibatches = config.batch_size, config.num_mini_batches
    if minibatches > batch:
        yield f"num_mini_batches {minibatches} exceeds batch_size {batch}: minibatches would be empty."
    elif batch % minibatches:
        yield (
            f"batch_size {batch} / num_mini_batches {minibatches} = {batch / minibatches:.4g} rows per minibatch; "
            f"it must be a whole number (try batch_size {_multiples(batch, minibatches)})."
        )
    else:
        rows, micro = batch // minibatches, config.micro_batch_size
        if micro is not None and rows % micro:
            source = f"batch_size {batch} / num_mini_batches {minibatches} = " if minibatches > 1 else "batch_size "
            yield (
                f"{source}{rows} rows per minibatch / micro_batch_size {micro} = {rows / micro:.4g} micro-batches; "
                f"it must be a whole number (try micro_batch_size {_divisors(rows, micro)})."
            )
    if config.micro_batch_tokens is not None:
        if config.micro_batch_size is not None:
            yield (
                f"micro_batch_tokens {config.micro_batch_tokens} and micro_batch_size {config.micro_batch_size} both "
                "set the size of a micro-batch: remove one of them (--micro_batch_size none)."
            )
        if config.depends_on_micro_batching:
            yield (
                "micro_batch_tokens with loss_aggregation 'token_mean_micro': the result would depend on which rows "
                "share a micro-batch, and these are chosen by length. Remove one of them."
            )
    rollout = config.rollout_batch_size
    if rollout is not None and batch % rollout:
        yield (
            f"batch_size {batch} / rollout_batch_size {rollout} = {batch / rollout:.4g} rounds; "
            f"it must be a whole number (try rollout_batch_size {_divisors(batch, rollout)})."
        )


_PHASES = Literal["linear", "cosine", "1-sqrt"]


@dataclasses.dataclass
class _SchedulerKwargs:
    """Parameters of transformers' schedules."""

    num_cycles: PositiveFloat | None
    min_lr: NonNegativeFloat | None
    min_lr_rate: Fraction | None
    num_decay_steps: NonNegativeInt
    num_stable_steps: NonNegativeInt | None
    warmup_type: _PHASES
    decay_type: _PHASES
    min_lr_ratio: Fraction


_KWARGS_OF_SCHEDULE = {
    "cosine": ("num_cycles",),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles"),
    "warmup_stable_decay": tuple(
        "num_decay_steps num_stable_steps warmup_type decay_type min_lr_ratio num_cycles".split()
    ),
}


def _schedule(config: StageConfig) -> Iterator[str]:
    kind, kwargs = config.lr_scheduler_type, config.lr_scheduler_kwargs or {}
    errors = [error for name, value in kwargs.items() if (error := _scheduler_kwarg_error(kind, name, value))]
    if errors:
        yield from errors
        return
    given = {name: value for name, value in kwargs.items() if value is not None}
    if kind == "warmup_stable_decay" and "num_decay_steps" not in given:
        yield (
            "lr_scheduler_type warmup_stable_decay needs the length of its decay: "
            "lr_scheduler_kwargs {'num_decay_steps': N}."
        )
    if kind != "cosine_with_min_lr":
        return
    if ("min_lr" in given) == ("min_lr_rate" in given):
        yield (
            "lr_scheduler_type cosine_with_min_lr needs one of min_lr (a learning rate) and min_lr_rate (a fraction of "
            f"the peak) in lr_scheduler_kwargs, not {'both' if 'min_lr' in given else 'none'}."
        )
    elif "min_lr" in given and config.learning_rate == 0:
        yield "lr_scheduler_kwargs['min_lr'] with learning_rate 0: give min_lr_rate."
    elif given.get("min_lr", 0) > config.learning_rate:
        yield (
            f"lr_scheduler_kwargs['min_lr'] {given['min_lr']:g} exceeds learning_rate {config.learning_rate:g}: "
            "the schedule would rise."
        )


def _scheduler_kwarg_error(kind: str, name: str, value: Any) -> str | None:
    """What is wrong with one of lr_scheduler_kwargs by itself; None if nothing is."""
    option, known = f"lr_scheduler_kwargs[{name!r}]", _KWARGS_OF_SCHEDULE.get(kind, ())
    if name not in known:
        choice = f"choose from {', '.join(known)}." if known else "it has no parameters but warmup_steps."
        return f"{option} is not a parameter of lr_scheduler_type {kind}:{nearest(name, known) or ' ' + choice}"
    try:
        checked_value(option, field_types(_SchedulerKwargs)[name], value)
    except UserError as error:
        return str(error)
    limits = field_ranges(_SchedulerKwargs).get(name)
    return limits and limits.error(option, value)


def _multiples(total: int, part: int) -> str:
    below = total - total % part
    return f"{below} or {below + part}" if below else f"{part}"


def _divisors(total: int, near: float, times: int = 1) -> str:
    """The divisors of `total` next to `near`, each multiplied by `times`: '4 or 9'."""
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    divisors = sorted({*small, *(total // d for d in small)})
    around = [d for d in divisors if d < near][-1:] + [d for d in divisors if d > near][:1]
    return " or ".join(str(d * times) for d in around)


def _supervised(config: SFTConfig | RewardConfig) -> Iterator[str]:
    if config.max_length <= config.query_length:
        yield (
            f"max_length {config.max_length} - query_length {config.query_length} = "
            f"{config.max_length - config.query_length} tokens left for the completion; increase max_length."
        )
    if isinstance(config, SFTConfig) and config.early_stopping_patience and not config.eval_steps:
        yield f"early_stopping_patience {config.early_stopping_patience} needs eval_steps above 0 to count evaluations."


def _policy(config: PolicyConfig) -> Iterator[str]:
    if config.stop_token is not None and config.stop_token_id is not None:
        yield (
            f"stop_token {config.stop_token!r} and stop_token_id {config.stop_token_id} exclude each other: "
            "give only one (for an id: --stop_token None --stop_token_id ID)."
        )
    yield from _stop_token_ids(config)
    if config.eos_penalty_mode == "replace" and config.missing_eos_penalty is None:
        yield "eos_penalty_mode 'replace' needs missing_eos_penalty: a response without eos scores -penalty."
    for name in config.early_stop:
        if name not in ALARMS:
            known = ", ".join(ALARMS)
            yield f"early_stop: {name!r} is not an alarm; choose from {known}.{nearest(name, ALARMS)}"
        elif threshold(config, name) is None:
            yield f"early_stop: the alarm {name} is disabled (alarm_{name} is None, or the batch has one row)."


def _stop_token_ids(config: PolicyConfig) -> Iterator[str]:
    given = config.stop_token_ids
    if given is None:
        return
    if config.stop_token_id is not None:
        yield f"stop_token_ids {given} and stop_token_id {config.stop_token_id} exclude each other: give only one."
    if given == "generation_config" and config.scratch_model is not None:
        yield (
            "stop_token_ids 'generation_config' with scratch_model: random weights have no generation_config.json. "
            "Give the ids."
        )
    if given != "generation_config" and (not given or min(given) < 0):
        yield f"stop_token_ids is {given}; it must be at least one token id, each at least 0."


def _rewards(config: PolicyConfig) -> Iterator[str]:
    """A config without any reward passes: functions may come as objects, so the stage checks that."""
    models = len(config.more_reward_models)
    if models and config.reward_model_path is None:
        yield "more_reward_models needs reward_model_path, the first reward model."
    if config.reward_ensemble != "sum" and not models:
        yield f"reward_ensemble {config.reward_ensemble!r} needs more_reward_models: there is at most one model."
    server = config.reward_server
    if server is not None and not server.startswith(("http://", "https://")):
        yield f"reward_server is {server!r}; it must start with http:// or https://."
    for function in config.reward_funcs:
        module, name = split_spec(function)
        named = module and not function.endswith(".py") and all(part.isidentifier() for part in name.split("."))
        if not named and function not in builtin.BY_NAME:
            yield (
                f"reward_funcs: {function!r} must be 'module:function', 'file.py:function', 'package.module.function' "
                f"or one of {', '.join(builtin.BY_NAME)}.{nearest(function, builtin.BY_NAME)}"
            )
    models = 0 if config.reward_model_path is None else 1 + models
    rewards = (models if config.reward_ensemble == "sum" else 1) + len(config.reward_funcs) + (server is not None)
    if config.reward_weights is not None and len(config.reward_weights) < rewards:
        yield (
            f"reward_weights has {len(config.reward_weights)} weights, but the config has {rewards} rewards "
            "(models, functions, server, in this order): give one weight per reward."
        )


_INSTEAD_OF_GENERATION_KWARG = {
    **dict.fromkeys(("eos_token_id", "stop_token_ids", "stop_token_id"), "give stop_token_ids"),
    **dict.fromkeys(("stop_strings", "stop"), "responses stop at tokens: stop_token or stop_token_ids"),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), "special tokens are the tokenizer's"),
    **dict.fromkeys(("max_length", "max_tokens"), "give response_length"),
    **dict.fromkeys(("num_return_sequences", "n"), "give num_generations, an option of rloo and grpo"),
    **dict.fromkeys(("seed", "generator"), "give seed"),
}


def _generation_kwargs(config: PolicyConfig) -> Iterator[str]:
    hints, ranges = field_types(type(config)), field_ranges(type(config))
    for name, value in (config.generation_kwargs or {}).items():
        option = f"generation_kwargs[{name!r}]"
        if name in SAMPLING:
            try:
                checked_value(option, hints[name], value)
            except UserError as error:
                yield str(error)
                continue
            if error := ranges[name].error(option, value):
                yield error
        elif name == "max_new_tokens":
            if value != config.response_length:
                yield f"{option} is {value!r}, but response_length is {config.response_length}: give response_length."
        elif name == "do_sample":
            if value is not True:
                yield f"{option} is {value!r}: policy gradients need sampled responses, not greedy ones."
        elif name in _INSTEAD_OF_GENERATION_KWARG:
            yield f"{option} is not supported: {_INSTEAD_OF_GENERATION_KWARG[name]}."
        else:
            known = (*SAMPLING, "max_new_tokens", "do_sample")
            yield f"{option} is not supported:{nearest(name, known) or ' choose from ' + ', '.join(SAMPLING) + '.'}"


def _ppo(config: PPOConfig) -> Iterator[str]:
    rows = config.batch_size // config.num_mini_batches
    if config.whiten_rewards and rows < 8:
        yield (
            f"whiten_rewards needs at least 8 rows per minibatch: batch_size {config.batch_size} / "
            f"num_mini_batches {config.num_mini_batches} = {rows}."
        )
    if config.kl_target is not None and config.kl_coef == 0:
        yield f"kl_target {config.kl_target} with kl_coef 0: the controller multiplies kl_coef, so it would stay 0."
    if config.value_model == "shared_backbone" and config.value_model_path is not None:
        yield (
            f"value_model 'shared_backbone' is a head on the policy, so value_model_path {config.value_model_path!r} "
            "would not be used. Remove one of them."
        )
    if config.critic_warmup_steps:
        option = f"critic_warmup_steps {config.critic_warmup_steps}"
        if config.vf_coef == 0:
            yield f"{option} with vf_coef 0: the value loss has no gradient, so nothing would learn."
        if config.value_learning_rate == 0:
            yield f"{option} with value_learning_rate 0: the critic would not learn."
    if config.value_learning_rate and config.vf_coef == 0:
        yield f"value_learning_rate {config.value_learning_rate:g} with vf_coef 0: the value loss has no gradient."
    alpha, longest = config.adaptive_lam_alpha, config.response_length
    if alpha is not None and alpha * longest <= 1:
        yield (
            f"adaptive_lam_alpha {alpha:g} x response_length {longest} = {alpha * longest:g}: lambda = "
            "1 - 1 / (alpha x length) would be 0 for every response; increase adaptive_lam_alpha."
        )


def _decoding(config: PolicyConfig) -> Iterator[str]:
    """Options of decoding that need each other."""
    if config.decode_slots is not None:
        if config.decode_slots > config.batch_size:
            yield (
                f"decode_slots {config.decode_slots} exceeds batch_size {config.batch_size}: there are no more rows to "
                f"decode (decode_slots at most {config.batch_size})."
            )
        if config.rollout_batch_size not in (None, config.batch_size):
            yield (
                f"decode_slots {config.decode_slots} with rollout_batch_size {config.rollout_batch_size}: the rows of "
                "a batch are one queue. Remove rollout_batch_size; micro_batch_size bounds the forward passes."
            )
    if config.kv_cache_dtype == "int8" and not config.importance_sampling_correction:
        if isinstance(config, GRPOConfig):
            hint = "Add importance_sampling_correction true."
        else:
            hint = "GRPO corrects for that with importance_sampling_correction; here use kv_cache_dtype auto."
        yield f"kv_cache_dtype int8 samples from another distribution than the policy that is trained. {hint}"
    if config.rollout_max_steps is not None:
        if config.old_logprobs != "sampler":
            yield (
                f"rollout_max_steps {config.rollout_max_steps} needs old_logprobs sampler: the tokens of a response "
                "are of several policies, whose log-probabilities are known when they are sampled."
            )
        if config.rollout_batch_size not in (None, config.batch_size):
            yield (
                f"rollout_max_steps {config.rollout_max_steps} with rollout_batch_size {config.rollout_batch_size}: "
                "the steps are those of the whole batch. Remove rollout_batch_size; decode_slots bounds the memory of "
                "generation."
            )


def _groups(config: GroupConfig) -> Iterator[str]:
    """batch_size counts responses, and responses to the same prompt stay together from rollout to gradient."""
    batch, k = config.batch_size, config.num_generations
    if batch % k:
        yield (
            f"batch_size {batch} / num_generations {k} = {batch / k:.4g} prompts per update (batch_size counts "
            f"responses); it must be a whole number (try batch_size {_multiples(batch, k)})."
        )
        return
    if batch % config.num_mini_batches:
        return
    rows, prompts = batch // config.num_mini_batches, batch // k
    if rows % k:
        yield (
            f"batch_size {batch} / num_mini_batches {config.num_mini_batches} = {rows} rows per minibatch / "
            f"num_generations {k} = {rows / k:.4g} prompts: responses to a prompt are never split between "
            f"minibatches (num_mini_batches {_divisors(prompts, config.num_mini_batches)})."
        )
        return
    if not config.shared_prompts:
        return
    for name, total in (("micro_batch_size", rows), ("rollout_batch_size", batch)):
        part = getattr(config, name)
        if part is not None and part % k:
            sizes = _divisors(total // k, part / k, k)
            yield (
                f"{name} {part} / num_generations {k} = {part / k:.4g} prompts: with shared_prompts a prompt is "
                f"computed once for all its responses ({name} {sizes}, or --shared_prompts false)."
            )


def _clip_range(config: GroupConfig) -> Iterator[str]:
    limits = config.reward_clip_range
    if limits is not None:
        low, high = (-limits[0], limits[0]) if len(limits) == 1 else limits if len(limits) == 2 else (0, 0)
        if low >= high:
            given = " ".join(f"{value:g}" for value in limits) or "empty"
            yield f"reward_clip_range is {given}; it must be LOW HIGH with LOW < HIGH, or one number above 0."
    if config.sync_ref_model and config.beta == 0:
        yield "sync_ref_model with beta 0: without a KL penalty there is no reference model to update."


def _grpo(config: GRPOConfig) -> Iterator[str]:
    if config.loss_type == "cispo" and config.epsilon_high is None:
        yield (
            f"loss_type cispo caps the ratio itself at epsilon_high, which would be epsilon {config.epsilon:g}: nearly "
            "all tokens would be capped. Give epsilon_high (ScaleRL: 5)."
        )
    low, high = config.importance_sampling_clip_min, config.importance_sampling_clip_max
    if low is not None and high is not None and low >= high:
        yield (
            f"importance_sampling_clip_min {low:g} must be less than importance_sampling_clip_max {high:g}: no ratio "
            "lies between them."
        )
    if config.importance_sampling_correction:
        mode = config.importance_sampling_mode
        if low is None and high is None:
            yield (
                "importance_sampling_correction without bounds: give importance_sampling_clip_max or "
                "importance_sampling_clip_min."
            )
        if config.loss_type == "vespo" and not mode.startswith("token"):
            yield f"loss_type vespo needs importance_sampling_mode token_truncate or token_mask, not {mode}."
        if config.old_logprobs == "sampler":
            yield (
                "importance_sampling_correction with old_logprobs 'sampler': the ratio of learner to sampler would "
                "always be 1. Remove one of them."
            )
    if config.baseline == "none" and config.scale_rewards == "group":
        yield (
            "baseline 'none' with scale_rewards 'group': the rewards of a group that are all equal would be divided by "
            "1e-4. Set scale_rewards to batch or none."
        )
    if config.kl_in_reward and config.beta == 0:
        yield "kl_in_reward needs beta above 0: without it there is no KL to subtract."
    if config.gamma != 1 and not config.kl_in_reward:
        yield f"gamma {config.gamma:g} needs kl_in_reward: only there tokens have rewards of their own."
    if config.multi_objective_aggregation == "normalize_then_sum":
        if config.baseline != "group_mean" or config.scale_rewards != "group":
            yield (
                "multi_objective_aggregation 'normalize_then_sum' normalizes each reward by its group's mean and "
                f"standard deviation: baseline {config.baseline!r} and scale_rewards {config.scale_rewards!r} would "
                "not be used. Leave them out."
            )
        if config.missing_eos_penalty is not None:
            yield (
                "missing_eos_penalty with multi_objective_aggregation 'normalize_then_sum': the penalty belongs to no "
                "reward function. Remove one of them, or give the penalty in a reward function."
            )
    if config.use_adaptive_entropy:
        if not config.entropy_coef_min <= config.entropy_coef <= config.entropy_coef_max:
            yield (
                f"entropy_coef {config.entropy_coef:g} must lie between entropy_coef_min {config.entropy_coef_min:g} "
                f"and entropy_coef_max {config.entropy_coef_max:g} with use_adaptive_entropy."
            )


def bucket_paths(run_dir: str) -> Iterator[str]:
    """A line for a run_dir that is a URL and no folder of a bucket."""
    if "://" in run_dir and not re.fullmatch(r"(s3|gs)://[^/\s?#]+(/[^?#]*)?", run_dir):
        yield f"run_dir is {run_dir!r}; it must be a folder, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER."


def pipeline_links(config: Pipeline) -> Iterator[str]:
    """A line for a pipeline that has not exactly one policy stage, or whose policy stage starts from other models."""
    policies = {name: stage for name in ("ppo", "rloo", "grpo") if (stage := getattr(config, name)) is not None}
    if len(policies) != 1:
        given = " and ".join(policies) or "none"
        yield f"a pipeline has one of ppo, rloo and grpo, not {given}: set the others to None."
        return
    run_dir, (policy, stage) = config.run_dir or "{run_dir}", *policies.items()
    exports = {"sft_model_path": "sft/policy"}
    if config.reward is not None:
        exports["reward_model_path"] = "reward/reward_model"
    for name, own in exports.items():
        path = (getattr(stage, name) or "").replace("{run_dir}", run_dir)
        if storage.absolute(path) != storage.absolute(f"{run_dir}/{own}"):
            yield (
                f"{policy}: {name} is {getattr(stage, name)!r}, not this pipeline's own '{{run_dir}}/{own}': give "
                f"that, or run {policy} with its own config."
            )
    if config.reward is None:
        if stage.reward_model_path is not None:
            yield (
                f"{policy}: reward_model_path is {stage.reward_model_path!r}, but the pipeline has no reward stage "
                "(reward is None): set it to None and give reward_funcs or reward_server, or add the stage."
            )
        elif not stage.reward_funcs and stage.reward_server is None:
            yield f"{policy}: without a reward stage (reward is None) the pipeline needs reward_funcs or reward_server."
