"""The models of a stage that samples: policy, reference, value model and reward models, by the options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from rlhf_jax.algorithms.networks import Models, Network
from rlhf_jax.algorithms.optimizer import Optimizer
from rlhf_jax.config import PolicyConfig
from rlhf_jax.data import TrainingRows, same_tokenizer
from rlhf_jax.data.images import ImageProcessor
from rlhf_jax.errors import UserError
from rlhf_jax.models import Model
from rlhf_jax.models.io import hf
from rlhf_jax.models.io.generation_config import resolve_stop_ids
from rlhf_jax.parallel import sharding
from rlhf_jax.rewards import scorer as scoring
from rlhf_jax.stages import adapters, open_models
from rlhf_jax.stages.algorithm_registry import RolloutAlgorithm
from rlhf_jax.stages.open_models import Source, new_score_head
from rlhf_jax.stages.stage_context import StageContext
from rlhf_jax.types import Params, TrainState

LONGEST = "--query_length + --response_length"
"""The options of the longest sequence."""

VALUE_HEAD_STD = 0.0
"""Of a new value head: random values vary more than the rewards, and advantages would be their noise."""

# --- models without params


@dataclasses.dataclass(frozen=True)
class OpenedModels:
    """The models of a run without params.

    Attributes:
      tokenizer: the policy's.
      policy, reference: with a causal head.
      value: with a scalar head; None: there is none, or the policy carries it.
      adapters: of the policy; None: it is trained in full.
      messages: lines on what was opened.
      processor: of images; None: the data is text.
    """

    tokenizer: Any
    policy: Model
    reference: Model
    value: Model | None = None
    adapters: adapters.PolicyAdapters | None = None
    messages: tuple[str, ...] = ()
    processor: ImageProcessor | None = None


def policy_source(config: PolicyConfig) -> Source:
    """What the policy starts from."""
    return Source(config.sft_model_path, config.model_revision, config.scratch_model)


def open_policy(context: StageContext[PolicyConfig], algorithm: RolloutAlgorithm, rows: TrainingRows) -> OpenedModels:
    """Policy, reference and tokenizer, by their configs alone; `rows`: training data, which may have images."""
    config, source = context.config, policy_source(context.config)
    images = any(open_models.wants_images(source, one, (columns.prompt_column,)) for one, columns in rows.sets)
    policy, tokenizer, _ = open_models.open_on_mesh(
        context,
        source,
        "causal",
        dropout=not config.disable_dropout,
        with_images=images,
        longest=config.query_length + config.response_length,
        option=LONGEST,
    )
    messages = [open_models.attention_message(policy)]
    policy, opened = dataclasses.replace(policy, frozen_vision=open_models.freezes_tower(config, images)), None
    if config.use_peft:
        opened = adapters.open_adapters(context, policy, algorithm.continues_adapter)
        form = opened.trained[0] if opened.trained else adapters.lora_form(config, policy, "causal")
        policy = dataclasses.replace(policy, lora=form)
        messages.append(adapters.describe_policy(opened, form, config))
    elif source.shape is None and hf.is_adapter(source.path, source.revision):
        messages.append(f"{source.path} is an adapter: merged into its base, and all of it is trained")
    check_stop_token(config, policy)
    tokenizer = dataclasses.replace(tokenizer, stop_ids=_stop_ids(config, policy))
    reference = policy
    if opened is not None and opened.reference is not None:
        reference = dataclasses.replace(policy, lora=opened.reference[0])
    if config.ref_model_path is not None:
        reference = hf.load_model(config.ref_model_path, images=images)
        reference = open_models.place(context, reference, "causal", config.ref_model_path)
    check_same_ids(config, tokenizer, reference, config.ref_model_path, "ref_model_path")
    processor = None
    if images:
        check_images(config, algorithm)
        processor = open_models.open_processor(policy, tokenizer, source)
        messages.append(describe_vision(policy))
    return OpenedModels(tokenizer, policy, reference, adapters=opened, messages=tuple(messages), processor=processor)


def check_images(config: PolicyConfig, algorithm: RolloutAlgorithm) -> None:
    """Refuses what does not read images."""
    if algorithm.has_value_model:
        raise UserError(
            f"the training data has images, which {algorithm.name} does not train on, since its value model reads text "
            "alone: use rloo or grpo"
        )
    if config.reward_model_path is not None:
        raise UserError(
            f"reward_model_path {config.reward_model_path} reads text alone, but the training data has images: use "
            "reward functions (reward_funcs), which get the images"
        )
    if config.reward_server is not None:
        raise UserError(
            f"reward_server {config.reward_server} is sent text, but the training data has images: use reward "
            "functions (reward_funcs), which get the images"
        )


def describe_vision(policy: Model) -> str:
    """A line on how the policy reads images."""
    vision = policy.config.vision
    trained = "frozen" if policy.frozen_vision else "trained"
    if policy.lora is not None:
        has = any(name.startswith("vision_model.") for name in policy.lora.target_modules)
        trained = "with adapters" if has else "frozen"
    return f"reads images in tiles of {vision.image_size} pixels, {vision.tokens} tokens each; the tower is {trained}"


def open_reward_models(
    context: StageContext[PolicyConfig], tokenizer, conversational: bool
) -> list[scoring.RewardModel]:
    """The reward models on the mesh, without params."""
    config, reward_models = context.config, []
    for reader in scoring.open_models(config, tokenizer, conversational):
        reader = dataclasses.replace(reader, model=open_models.place(context, reader.model, "scalar", reader.path))
        if reader.tokenizer is None:
            check_sequence_length(config, reader.model, f"reward model {reader.path}")
        reward_models.append(reader)
    return reward_models


def open_value_model(
    context: StageContext[PolicyConfig], opened: OpenedModels, reward_models: Sequence[scoring.RewardModel]
) -> OpenedModels:
    """The same with a value model: its own, the first reward model's, or the policy's backbone, by the options."""
    config = context.config
    if config.value_model != "separate":
        return _with_line(opened, "value model: a new score head on the policy")
    first = reward_models[0] if reward_models else None
    if config.value_model_path is not None:
        source = Source(config.value_model_path)
        value = hf.load_model(config.value_model_path)
        value = open_models.place(context, value, "scalar", source.name)
        line = open_models.score_head_message(context, source)
    elif (
        first is not None
        and first.tokenizer is not None
        and not same_tokenizer(opened.tokenizer, first.path, first.revision)
    ):
        raise UserError(
            f"the value model starts from the reward model {first.path}, whose tokenizer is not the policy's, "
            "but values are for the policy's ids: set value_model_path, or value_model 'shared_backbone'"
        )
    else:
        value = opened.policy if first is None else first.model
        line = "the score head is new" if first is None else f"the score head is that of {first.path}"
    if config.lora_value == "shared":
        value, line = opened.policy, "the score head is new"
    form = None if config.lora_value == "full" else adapters.lora_form(config, value, "scalar")
    value = dataclasses.replace(value, lora=form)
    check_same_ids(config, opened.tokenizer, value, config.value_model_path, "value_model_path")
    return _with_line(dataclasses.replace(opened, value=value), f"value model: {line}")


def _with_line(opened: OpenedModels, line: str) -> OpenedModels:
    return dataclasses.replace(opened, messages=(*opened.messages, line))


def check_stop_token(config: PolicyConfig, policy: Model) -> None:
    """Refuses a stop_token_id that no response could contain."""
    rows = policy.config.vocab_size
    if config.stop_token_id is not None and config.stop_token_id >= rows:
        raise UserError(
            f"--stop_token_id {config.stop_token_id} is beyond the vocabulary of "
            f"{config.sft_model_path or config.scratch_model}: its ids are 0 to {rows - 1}. No response could end by it"
        )


def _stop_ids(config: PolicyConfig, policy: Model) -> tuple[int, ...] | None:
    """The ids of stop_token_ids."""
    path = None if config.scratch_model else config.sft_model_path
    rows = policy.config.vocab_size
    return resolve_stop_ids(config.stop_token_ids, path=path, revision=config.model_revision, rows=rows)


def check_sequence_length(config: PolicyConfig, model: Model, path: str) -> None:
    """Refuses a model whose context is shorter than prompt and response."""
    open_models.check_context(model, config.query_length + config.response_length, LONGEST, path)


def check_same_ids(config: PolicyConfig, tokenizer, model: Model, path: str | None, option: str) -> None:
    """Refuses a model, at `path` or else the policy's, that cannot read the policy's ids or its sequences."""
    path = path or policy_source(config).name
    check_sequence_length(config, model, path)
    tokenizer.check_rows(model.config.vocab_size, f"--{option} {path}")


def suppressed_ids(
    config: PolicyConfig,
    tokenizer,
    policy: Model,
    reward_models: Sequence[scoring.RewardModel],
    reference: Model | None = None,
    value: Model | None = None,
) -> tuple[tuple[int, ...], list[str]]:
    """The ids that the policy may not sample: those that another model, which reads its ids, has no embedding row for,
    and with `suppress_unused_ids` those that no token has.

    Returns:
      (ids, a line on each reason)
    """
    readers = {"the reference": reference, "the value model": value}
    readers |= {f"reward model {reader.path}": reader.model for reader in reward_models if reader.tokenizer is None}
    ids: set[int] = set()
    messages, rows = [], policy.config.vocab_size
    for name, reader in readers.items():
        reader_rows = rows if reader is None else reader.config.vocab_size
        if reader_rows < rows:
            ids |= set(range(reader_rows, rows))
            messages.append(f"ids {reader_rows} to {rows - 1} are not sampled: {name} has {reader_rows} embedding rows")
    if config.suppress_unused_ids and (unused := tokenizer.unused_ids(rows)):
        ids |= set(unused)
        messages.append(f"{len(unused)} ids that no token has are not sampled (suppress_unused_ids)")
    return tuple(sorted(ids)), messages


# --- params


class LoadedModels(NamedTuple):
    """Models and state of a run, on the mesh.

    Attributes:
      models: frozen params; trained ones are the state's.
      state: before the first update.
      reward_params: of the reward models, in order.
    """

    models: Models
    state: TrainState
    reward_params: list[Params]


def load_models(
    context: StageContext[PolicyConfig],
    algorithm: RolloutAlgorithm,
    opened: OpenedModels,
    reward_models: Sequence[scoring.RewardModel],
    optimizer: Optimizer,
) -> LoadedModels:
    """Loads every model of a run, and makes the TrainState.

    Params that are only read are cast to the compute dtype as they are loaded, unless trained float32 params start as
    a copy of them. With `offload_frozen` reference and reward models wait in host memory.
    """
    config, weights = context.config, context.weights
    copied = copied_in_float32(config, opened, reward_models)
    reward_params = [
        weights.load(
            reader.model,
            reader.path,
            "scalar",
            reader.revision,
            None if number == 0 and "reward" in copied else context.cast_frozen_fn(reader.model),
        )
        for number, reader in enumerate(reward_models)
    ]
    policy = load_policy(context, opened, cast="policy" not in copied)
    ref_params = None
    if algorithm.uses_reference(config):
        ref_params = load_reference(context, opened, policy, context.frozen_dtype)
    base = None
    if config.use_peft:
        base = {"policy": adapters.cast_base(context, opened.policy, policy)}
    elif opened.policy.frozen_vision:
        policy, frozen = opened.policy.split_frozen(policy)
        base = {"policy": context.cast_frozen(opened.policy, frozen)}
    trained = {"policy": trained_policy(context, opened, policy)}
    if algorithm.has_value_model and opened.value is None:
        trained["policy"] = {**trained["policy"], "score": new_score_head(context, opened.policy, VALUE_HEAD_STD)}
    elif algorithm.has_value_model and opened.value.lora is not None:
        trained["value"], value_base = adapted_value(context, opened, policy, reward_models, reward_params)
        if value_base is not None:
            base = {**base, "value": value_base}
            if config.value_model_path is None:  # one copy for the value model and the reward model it starts from
                reward_params[0] = value_base
    elif algorithm.has_value_model:
        trained["value"] = full_value(context, opened, policy, reward_params)
    models_by_role = {"policy": opened.policy, "value": opened.value or opened.policy}
    state = context.initial_state(trained, {role: models_by_role[role] for role in trained}, optimizer)
    control = algorithm.initial_entropy_control(config)
    if control is not None:
        state = state.replace(entropy_control=context.weights.place(control, sharding.replicated(context.mesh)))
    if algorithm.moves_reference(config):
        # Buffers of its own: an update overwrites the state's, and samples are compared with the first reference.
        state = state.replace(ref_params=load_reference(context, opened, policy, jnp.dtype(jnp.float32)))
    del policy
    if ref_params is not None:
        ref_params = offload(config, ref_params)
    reward_params = [
        offload(config, context.cast_frozen(reader.model, params))
        for reader, params in zip(reward_models, reward_params)
    ]
    models = Models(
        policy=Network(opened.policy),
        reference=None if ref_params is None else Network(opened.reference, ref_params),
        value=None if opened.value is None else Network(opened.value),
        mesh=context.mesh,
    ).with_base(base)
    return LoadedModels(models, state, reward_params)


def copied_in_float32(config: PolicyConfig, opened: OpenedModels, reward_models: Sequence[Any]) -> set[str]:
    """Of 'policy' and 'reward' those whose float32 params other trained params start as a copy of."""
    copied = set()
    form, value = opened.policy.lora, opened.value
    if form is not None and form.modules_to_save and opened.adapters.trained is None:
        copied.add("policy")
    if value is not None and (value.lora is None or value.lora.modules_to_save) and config.value_model_path is None:
        copied.add("reward" if reward_models and config.lora_value != "shared" else "policy")
    return copied


def load_policy(context: StageContext[PolicyConfig], opened: OpenedModels, cast: bool) -> Params:
    """The params that the policy starts from; with adapters those of their base, cast to the dtype in which it is
    kept."""
    config, source, cast_on_load = context.config, policy_source(context.config), None
    if config.use_peft:
        start = opened.adapters.start
        source = Source(start.path, start.revision, config.scratch_model)
        cast_on_load = adapters.cast_base_fn(context, opened.policy) if cast else None
    return open_models.load_params(context, opened.policy, source, "causal", cast_on_load=cast_on_load)


def trained_policy(context: StageContext[PolicyConfig], opened: OpenedModels, policy: Params) -> Params:
    """What is trained of the policy: its params, or a new or an earlier adapter."""
    if not context.config.use_peft:
        return policy
    if opened.adapters.trained is None:
        return adapters.new_adapter(context, opened.policy, policy, 0)
    return context.place_params(opened.policy, opened.adapters.trained[1])


def load_reference(context: StageContext[PolicyConfig], opened: OpenedModels, policy: Params, dtype) -> Params:
    """The reference's params in `dtype`: its own, or a copy of those that the policy starts from.

    A copy, since an update overwrites the policy's buffers. With adapters it is the policy's base, which costs nothing,
    or an adapter on it.
    """
    config, reference = context.config, opened.reference
    if config.ref_model_path is not None:
        cast_on_load = None if dtype == jnp.float32 else context.cast_frozen_fn(reference)
        return context.weights.load(
            reference, config.ref_model_path, "causal", revision=None, cast_on_load=cast_on_load
        )
    if config.use_peft:
        adapter = opened.adapters.reference
        return {} if adapter is None else context.place_params(reference, adapter[1])
    return context.weights.copy(reference, opened.policy.split_frozen(policy)[0], dtype)


def full_value(
    context: StageContext[PolicyConfig], opened: OpenedModels, policy: Params, reward_params: Sequence[Params]
) -> Params:
    """Params of a value model that is trained in full."""
    config, value = context.config, opened.value
    if config.value_model_path is not None:
        source = Source(config.value_model_path)
        return open_models.load_params(context, value, source, "scalar", score_std=VALUE_HEAD_STD)
    if reward_params:
        return context.weights.copy(value, reward_params[0])
    backbone = context.weights.copy(value, {"backbone": policy["backbone"]})
    return {**backbone, "score": new_score_head(context, value, VALUE_HEAD_STD)}


def value_source(config: PolicyConfig, models: Models, policy_base: Source | None) -> Source:
    """What the value model's adapter is on; `policy_base`: of the policy's."""
    if policy_base is not None and "value" not in (models.base or {}):
        return policy_base
    if config.value_model_path is not None:
        return Source(config.value_model_path)
    return Source(config.reward_model_path, config.reward_model_revision)


def adapted_value(
    context: StageContext[PolicyConfig],
    opened: OpenedModels,
    policy: Params,
    reward_models: Sequence[scoring.RewardModel],
    reward_params: Sequence[Params],
) -> tuple[Params, Params | None]:
    """(a new adapter and the head of the value model, its base params; None where they are the policy's)."""
    config, value = context.config, opened.value
    if config.lora_value == "shared":
        head = {"score": new_score_head(context, value, VALUE_HEAD_STD)}
        return {**adapters.new_adapter(context, value, policy, 1), **head}, None
    if config.value_model_path is not None:
        cast_on_load = None if value.lora.modules_to_save else adapters.cast_base_fn(context, value)
        source = Source(config.value_model_path)
        start = open_models.load_params(
            context, value, source, "scalar", cast_on_load=cast_on_load, score_std=VALUE_HEAD_STD
        )
        base = adapters.cast_base(context, value, start)
    else:
        start = reward_params[0]
        base = context.cast_frozen(reward_models[0].model, start)
    head = context.weights.copy(value, {"score": start["score"]})
    return {**adapters.new_adapter(context, value, start, 1), **head}, base


def offload(config: PolicyConfig, params: Params) -> Params:
    """Params in host memory with `offload_frozen`; else unchanged."""
    where = config.offload_frozen
    return params if where == "none" else sharding.to_host_memory(params, f"offload_frozen {where}")
