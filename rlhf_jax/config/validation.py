"""Which configs are possible, option by option and together; what is wrong in words, with the arithmetic."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from rlhf_jax.config import Pipeline, PolicyConfig, PPOConfig, RewardConfig, RLOOConfig, SFTConfig, StageConfig
from rlhf_jax.config import files as config_files
from rlhf_jax.errors import UserError
from rlhf_jax.metrics.alarms import ALARMS, threshold
from rlhf_jax.utils.text import has_password

REPORTS = ("tensorboard", "wandb", "trackio", "all")
Rule = tuple[str, Callable[[float], bool]]
_AT_LEAST_0: Rule = ("at least 0", lambda v: v >= 0)
_AT_LEAST_1: Rule = ("at least 1", lambda v: v >= 1)
_POSITIVE: Rule = ("above 0", lambda v: v > 0)
_SHARE: Rule = ("between 0 and 1", lambda v: 0 <= v <= 1)
_DECAY: Rule = ("at least 0 and below 1", lambda v: 0 <= v < 1)
_EVERY: Rule = (
    "0 (only at the end), between 0 and 1 (a share of the run) or a whole number of updates",
    lambda v: 0 <= v < 1 or (v >= 1 and float(v).is_integer()),
)

RANGES: dict[str, Rule] = {
    "seed": ("at least 0 and below 2^32", lambda v: 0 <= v < 2**32),
    **dict.fromkeys(("batch_size", "micro_batch_size", "rollout_batch_size", "num_mini_batches"), _AT_LEAST_1),
    **dict.fromkeys(("query_length", "response_length", "max_length", "total_episodes", "num_ppo_epochs"), _AT_LEAST_1),
    **dict.fromkeys(("max_train_samples", "max_eval_samples", "normalize_samples", "save_total_limit"), _AT_LEAST_1),
    **dict.fromkeys(("logging_steps", "mesh_fsdp", "mesh_tensor"), _AT_LEAST_1),
    "mesh_data": ("-1 (all that the other axes leave) or at least 1", lambda v: v == -1 or v >= 1),
    **dict.fromkeys(("eval_steps", "save_steps"), _EVERY),
    **dict.fromkeys(("max_minutes", "save_minutes"), _POSITIVE),
    **dict.fromkeys(("warmup_steps", "early_stopping_patience"), _AT_LEAST_0),
    **dict.fromkeys(("learning_rate", "weight_decay", "center_rewards_coefficient", "kl_coef"), _AT_LEAST_0),
    **dict.fromkeys(("vf_coef", "top_k", "num_sample_generations", "stop_token_id"), _AT_LEAST_0),
    "missing_eos_penalty": ("at least 0, as it is taken off the score", lambda v: v >= 0),
    **dict.fromkeys(("adam_epsilon", "max_grad_norm", "num_train_epochs", "score_init_std"), _POSITIVE),
    **dict.fromkeys(("temperature", "repetition_penalty", "cliprange", "cliprange_value"), _POSITIVE),
    **dict.fromkeys(("kl_target", "kl_horizon"), _POSITIVE),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "lora_dropout"), _DECAY),
    "lora_r": _AT_LEAST_1,
    "lora_alpha": _POSITIVE,
    **dict.fromkeys(("gamma", "lam", "min_p"), _SHARE),
    "top_p": ("above 0 and at most 1", lambda v: 0 < v <= 1),
    # groups and rewards
    "num_generations": ("at least 2: leave-one-out needs at least 2 responses to a prompt", lambda v: v >= 2),
    **dict.fromkeys(("num_generations_eval", "num_iterations", "ref_model_sync_steps"), _AT_LEAST_1),
    **dict.fromkeys(("num_completions_to_print", "reward_server_batch_size"), _AT_LEAST_1),
    "reward_server_concurrency": _AT_LEAST_1,
    **dict.fromkeys(("beta", "advantage_epsilon", "reward_server_retries", "reward_ensemble_std_coef"), _AT_LEAST_0),
    **dict.fromkeys(("epsilon", "epsilon_high"), _POSITIVE),
    **dict.fromkeys(("reward_timeout", "reward_server_timeout", "reward_server_total_timeout"), _POSITIVE),
    "ref_model_mixup_alpha": _SHARE,
    "max_nonfinite": _AT_LEAST_1,
    **dict.fromkeys(("alarm_kl_below", "alarm_kl_above", "alarm_reward_std"), _AT_LEAST_0),
    **dict.fromkeys(("alarm_first_ratio", "alarm_first_ratio_bfloat16", "target_kl"), _POSITIVE),
    **dict.fromkeys(("alarm_eos_share", "alarm_length_collapse"), _SHARE),
    "alarm_length_growth": _AT_LEAST_1,
    "max_steps": ("-1 (num_train_epochs decides) or at least 1", lambda v: v == -1 or v >= 1),
}


def out_of_range(config: StageConfig) -> Iterator[str]:
    """A line for every option whose value is impossible by itself."""
    for name, value in vars(config).items():
        if type(value) is int and abs(value) >= 2**31 and name != "seed":
            yield f"{name} is {value}; it must be below 2^31, as steps, rows and tokens are counted in 32 bits."
        elif name in RANGES and value is not None and not RANGES[name][1](value):
            yield f"{name} is {value}; it must be {RANGES[name][0]}."


def combinations(config: StageConfig) -> Iterator[str]:
    """A line for every set of options that exclude each other or do not come out even."""
    if config.dataset_streaming:
        yield (
            "dataset_streaming is refused: batches are a function of the seed and the step, so that a run can resume "
            "anywhere, and a stream has no random access. Download the data set (leave the option out)."
        )
    for name, value in vars(config).items():
        if any(isinstance(part, str) and has_password(part) for part in (value if type(value) is tuple else (value,))):
            yield (
                f"{name} is a URL with a user name or a password in it: config.json and the model card would hold it. "
                "Take it out; a reward server's token comes from the environment (reward_server_token_env)."
            )
    unknown = [name for name in config.report_to if name not in REPORTS]
    if unknown:
        known = ", ".join((*REPORTS, "none"))
        yield f"report_to: {', '.join(unknown)} is not supported; there are {known} (metrics.jsonl always comes)."
    if config.eval_steps and config.dataset_test_split is None and config.eval_dataset_name is None:
        yield f"eval_steps is {config.eval_steps:g}, but with dataset_test_split None there is nothing to evaluate on."
    buckets = config.length_buckets
    if buckets is not None and (not buckets or buckets[0] < 1 or any(a >= b for a, b in itertools.pairwise(buckets))):
        yield f"length_buckets is {buckets}; lengths must be at least 1 and rise."
    yield from _scratch(config)
    yield from _batches(config)
    yield from _adapters(config)
    if isinstance(config, PolicyConfig):
        yield from _policy(config)
        yield from _rewards(config)
        yield from _generation_kwargs(config)
    if isinstance(config, PPOConfig):
        yield from _ppo(config)
    elif isinstance(config, RLOOConfig):
        yield from _groups(config)
        yield from _rloo(config)
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
    start = config.sft_model_path if isinstance(config, PolicyConfig) else getattr(config, "model_name_or_path", None)
    name = "sft_model_path" if isinstance(config, PolicyConfig) else "model_name_or_path"
    if start is None and config.scratch_model is None:
        yield f"{name} is None, and so is scratch_model: there is no model to start from."
    if start is None and config.tokenizer_name_or_path is None:
        yield f"{name} is None, and so is tokenizer_name_or_path: there is no tokenizer."


def _adapters(config: StageConfig) -> Iterator[str]:
    if not config.use_peft:
        idle = ("adapters", "model_adapter_name", "ref_adapter_name", "lora_target_modules", "modules_to_save")
        given = [name for name in (*idle, "load_in_8bit") if getattr(config, name, None)]
        given += ["start_adapter"] if getattr(config, "start_adapter", "auto") != "auto" else []
        given += ["lora_value"] if getattr(config, "lora_value", "full") != "full" else []
        if given:
            yield f"{given[0]} is {getattr(config, given[0])!r}, but without use_peft there are no adapters: give both."
        return
    if isinstance(config, PolicyConfig) and config.ref_adapter_name is not None and config.ref_model_path is not None:
        yield "ref_adapter_name and ref_model_path both name the reference: leave one of them out."
    if isinstance(config, RLOOConfig) and config.sync_ref_model:
        yield (
            "sync_ref_model with use_peft is refused, as by TRL: the reference is frozen params that the policy stands "
            "on. Leave one of them out."
        )
    if isinstance(config, PPOConfig) and config.lora_value != "full":
        if config.value_model == "shared_backbone":
            yield (
                f"lora_value {config.lora_value!r} with value_model 'shared_backbone': the value is a head on the "
                "policy and has no adapter of its own. Leave one of them out."
            )
        if config.lora_value == "own" and config.reward_model_path is None and config.value_model_path is None:
            yield "lora_value 'own' needs value_model_path or reward_model_path, whose params its adapter stands on."
        if config.lora_value == "shared" and config.value_model_path is not None:
            yield (
                f"lora_value 'shared' stands on the policy's params; value_model_path {config.value_model_path!r} "
                "would not be used. Leave it out, or give lora_value 'own'."
            )


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


def _divisors(total: int, near: float, times: int = 1) -> str:
    """The divisors of `total` on both sides of `near`, each `times` as much, in words."""
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    divisors = sorted({*small, *(total // d for d in small)})
    around = [d for d in divisors if d < near][-1:] + [d for d in divisors if d > near][:1]
    return " or ".join(str(d * times) for d in around)


def _supervised(config: SFTConfig | RewardConfig) -> Iterator[str]:
    if config.max_length <= config.query_length:
        yield (
            f"max_length {config.max_length} - query_length {config.query_length} = "
            f"{config.max_length - config.query_length} tokens left for the completion; max_length must be larger."
        )
    if isinstance(config, SFTConfig) and config.early_stopping_patience and not config.eval_steps:
        yield f"early_stopping_patience {config.early_stopping_patience} needs eval_steps above 0: it counts these."


def _policy(config: PolicyConfig) -> Iterator[str]:
    if config.stop_token is not None and config.stop_token_id is not None:
        yield (
            f"stop_token {config.stop_token!r} and stop_token_id {config.stop_token_id} exclude each other: "
            "give one (for an id: --stop_token None --stop_token_id ID)."
        )
    if config.eos_penalty_mode == "replace" and config.missing_eos_penalty is None:
        yield "eos_penalty_mode 'replace' needs missing_eos_penalty: a response without eos then scores -penalty."
    for name in config.early_stop:
        if name not in ALARMS:
            known = ", ".join(ALARMS)
            yield f"early_stop: {name!r} is no alarm; there are {known}.{config_files.nearest(name, ALARMS)}"
        elif threshold(config, name) is None:
            yield f"early_stop: {name} is switched off by its threshold (alarm_{name} None, or a batch of one row)."


def _rewards(config: PolicyConfig) -> Iterator[str]:
    """Whether there is any reward at all is the stage's to say: functions may come as objects."""
    models = len(config.more_reward_models)
    if models and config.reward_model_path is None:
        yield "more_reward_models needs reward_model_path: the first reward model goes there."
    if config.reward_ensemble != "sum" and not models:
        yield f"reward_ensemble {config.reward_ensemble!r} needs more_reward_models: there is one model at most."
    server = config.reward_server
    if server is not None and not server.startswith(("http://", "https://")):
        yield f"reward_server is {server!r}; it must start with http:// or https://."
    for function in config.reward_funcs:
        module, colon, name = function.rpartition(":")
        if not (module and colon and all(part.isidentifier() for part in name.split("."))):
            yield f"reward_funcs: {function!r} must be 'module:function' or 'file.py:function'."
    models = 0 if config.reward_model_path is None else 1 + models
    named = (models if config.reward_ensemble == "sum" else 1) + len(config.reward_funcs) + (server is not None)
    if config.reward_weights is not None and len(config.reward_weights) < named:
        yield (
            f"reward_weights has {len(config.reward_weights)} weights, but the config names {named} rewards "
            "(models, functions, server, in this order): give each its own."
        )


# --- sampling

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SAY_INSTEAD = {
    **dict.fromkeys(("eos_token_id", "stop_token_ids", "stop_token_id"), "give stop_token_id and stop_token None"),
    **dict.fromkeys(("stop_strings", "stop"), "responses stop at one token: stop_token or stop_token_id"),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), "special tokens are the tokenizer's"),
    **dict.fromkeys(("max_length", "max_tokens"), "give response_length"),
    **dict.fromkeys(("num_return_sequences", "n"), "give num_generations, an option of rloo"),
    **dict.fromkeys(("seed", "generator"), "give seed"),
}


def sampling_options(config: PolicyConfig) -> dict[str, Any]:
    """temperature, top_k, top_p, min_p, repetition_penalty: the options', with generation_kwargs over them."""
    given, hints = config.generation_kwargs or {}, config_files.field_types(type(config))
    found = {name: given.get(name, getattr(config, name)) for name in SAMPLING}
    return {name: config_files.checked_value(name, hints[name], value) for name, value in found.items()}


def _generation_kwargs(config: PolicyConfig) -> Iterator[str]:
    hints = config_files.field_types(type(config))
    for name, value in (config.generation_kwargs or {}).items():
        option = f"generation_kwargs[{name!r}]"
        if name in SAMPLING:
            try:
                config_files.checked_value(option, hints[name], value)
            except UserError as error:
                yield str(error)
                continue
            if value is not None and not RANGES[name][1](value):
                yield f"{option} is {value}; it must be {RANGES[name][0]}."
        elif name == "max_new_tokens":
            if value != config.response_length:
                yield f"{option} is {value!r}, but response_length is {config.response_length}: give response_length."
        elif name == "do_sample":
            if value is not True:
                yield f"{option} is {value!r}: a policy gradient needs samples; greedy responses have none."
        else:
            known = (*SAMPLING, "max_new_tokens", "do_sample")
            instead = f" {_SAY_INSTEAD[name]}." if name in _SAY_INSTEAD else config_files.nearest(name, known)
            yield f"{option} is refused:{instead or ' it may hold ' + ', '.join(SAMPLING) + '.'}"


def _ppo(config: PPOConfig) -> Iterator[str]:
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


def _groups(config: RLOOConfig) -> Iterator[str]:
    """batch_size counts responses, and the responses to a prompt stay together from rollout to gradient."""
    batch, k = config.batch_size, config.num_generations
    if batch % k:
        yield (
            f"batch_size {batch} / num_generations {k} = {batch / k:.4g} prompts an update (batch_size counts "
            f"responses); it must come out even (batch_size {_multiples(batch, k)})."
        )
        return
    if batch % config.num_mini_batches:
        return
    rows, prompts = batch // config.num_mini_batches, batch // k
    if rows % k:
        yield (
            f"batch_size {batch} / num_mini_batches {config.num_mini_batches} = {rows} rows a minibatch / "
            f"num_generations {k} = {rows / k:.4g} prompts: the responses to a prompt are never split between "
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


def _rloo(config: RLOOConfig) -> Iterator[str]:
    limits = config.reward_clip_range
    if limits is not None:
        low, high = (-limits[0], limits[0]) if len(limits) == 1 else limits if len(limits) == 2 else (0, 0)
        if low >= high:
            given = " ".join(f"{value:g}" for value in limits) or "empty"
            yield f"reward_clip_range is {given}; it must be LOW HIGH with LOW below HIGH, or one number above 0."
    if config.baseline_excludes_truncated and not config.mask_truncated_completions:
        yield "baseline_excludes_truncated needs mask_truncated_completions: it says more of the same responses."
    if config.sync_ref_model and config.beta == 0:
        yield "sync_ref_model with beta 0: without a KL penalty there is no reference model to move."


def chain(config: Pipeline) -> Iterator[str]:
    """A line for a pipeline without one policy stage, or whose policy stage does not start from its own stages."""
    given = {name: stage for name, stage in (("ppo", config.ppo), ("rloo", config.rloo)) if stage is not None}
    if len(given) != 1:
        yield f"a pipeline has one of ppo and rloo, not {'both' if given else 'none'}: set the other to None."
        return
    run_dir, (policy, stage) = config.run_dir or "{run_dir}", *given.items()
    for name, own in (("sft_model_path", "sft/policy"), ("reward_model_path", "reward/reward_model")):
        if getattr(stage, name) not in (f"{{run_dir}}/{own}", f"{run_dir}/{own}"):
            yield (
                f"{policy}: {name} is {getattr(stage, name)!r}, not this pipeline's own '{{run_dir}}/{own}': write "
                f"that, or run {policy} by a config of its own."
            )
