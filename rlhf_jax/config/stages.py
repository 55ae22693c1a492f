"""The config of each stage, and Pipeline. Names are TRL's. Every field is a flag of the same name.

A config inherits the options of the packages that the stage uses; rules between options of two packages are checked
here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from rlhf_jax.algorithms.grpo_options import GRPOOptions
from rlhf_jax.algorithms.optimizer_options import OptimizerOptions
from rlhf_jax.algorithms.options import (
    BatchOptions,
    PolicyGradientOptions,
    RewardModelOptions,
    SFTOptions,
    SupervisedOptions,
)
from rlhf_jax.algorithms.ppo_options import PPOOptions
from rlhf_jax.algorithms.rloo_options import GroupOptions, RLOOOptions
from rlhf_jax.data.options import DataOptions, DemonstrationOptions, PairOptions, PromptOptions, SequenceOptions
from rlhf_jax.errors import UserError
from rlhf_jax.metrics.alarms import ALARMS, thresholds
from rlhf_jax.metrics.options import AlarmOptions
from rlhf_jax.models.options import AdapterOptions, ComputeOptions, ModelOptions
from rlhf_jax.option import Seed, nearest, option
from rlhf_jax.parallel.options import MeshOptions
from rlhf_jax.rewards.options import RewardOptions
from rlhf_jax.runtime.options import CommandOptions, RunOptions, SampleOptions
from rlhf_jax.tools.options import ToolOptions
from rlhf_jax.utils.text import has_password

SFT_EXPORT = "{run_dir}/sft/policy"
"""Where the SFT stage of a pipeline exports its policy."""
REWARD_EXPORT = "{run_dir}/reward/reward_model"
"""Where the reward stage of a pipeline exports its model."""


@dataclasses.dataclass(frozen=True)
class StageConfig(
    RunOptions,
    ModelOptions,
    AdapterOptions,
    BatchOptions,
    OptimizerOptions,
    ComputeOptions,
    DataOptions,
    MeshOptions,
):
    """Options of every stage: run folder, model, data, batches, optimizer, devices."""

    # Where a stage has no options of these names.
    num_sample_generations = 0
    kl_coef = 0.0
    policy_loss = "clipped"

    def problems(self) -> Iterator[str]:
        """No model, no tokenizer, no evaluation data, a password in a URL."""
        yield from super().problems()
        for name, value in vars(self).items():
            parts = value if type(value) is tuple else (value,)
            paths = [part.get("path") if isinstance(part, dict) else part for part in parts]
            if any(isinstance(path, str) and has_password(path) for path in paths):
                yield (
                    f"{name} is a URL with a user name or a password, which config.json and the model card would "
                    "contain. Remove it; a reward server's token is read from the environment "
                    "(reward_server_token_env)."
                )
        if self.eval_steps and self.eval_dataset_name is None:
            if self.datasets is not None:
                yield f"eval_steps is {self.eval_steps:g}, but datasets has no evaluation data: give eval_dataset_name."
            elif self.dataset_test_split is None:
                yield f"eval_steps is {self.eval_steps:g}, but dataset_test_split is None: there is no evaluation data."
        start, name = self.starting_model, "sft_model_path" if "sft_model_path" in vars(self) else "model_name_or_path"
        if start is None and self.scratch_model is None:
            yield f"{name} and scratch_model are both None: there is no model to start from."
        if start is None and self.tokenizer_name_or_path is None:
            yield f"{name} and tokenizer_name_or_path are both None: there is no tokenizer."


@dataclasses.dataclass(frozen=True)
class SupervisedConfig(SupervisedOptions, SequenceOptions, StageConfig):
    """Options that SFT and reward models share."""

    # --- models
    model_name_or_path: str | None = option("EleutherAI/pythia-1b-deduped", path=True)
    """Model to start from, for a reward model usually the SFT model: Hub name or folder. A reward model gets a new
    scalar head."""

    @property
    def starting_model(self) -> str | None:
        """model_name_or_path."""
        return self.model_name_or_path

    @property
    def tokens_per_row(self) -> int:
        """max_length."""
        return self.max_length


@dataclasses.dataclass(frozen=True)
class SFTConfig(SFTOptions, DemonstrationOptions, SupervisedConfig):
    """Supervised fine-tuning on demonstrations."""

    def problems(self) -> Iterator[str]:
        """Patience without evaluations."""
        yield from super().problems()
        if self.early_stopping_patience and not self.eval_steps:
            yield (
                f"early_stopping_patience {self.early_stopping_patience} needs eval_steps above 0 to count evaluations."
            )


@dataclasses.dataclass(frozen=True)
class RewardConfig(RewardModelOptions, PairOptions, SupervisedConfig):
    """A reward model from preference pairs: Bradley-Terry, -log sigmoid(chosen - rejected)."""

    @property
    def tokens_per_row(self) -> int:
        """Of a pair: two sequences."""
        return 2 * self.max_length


@dataclasses.dataclass(frozen=True)
class PolicyConfig(
    PolicyGradientOptions, RewardOptions, ToolOptions, PromptOptions, AlarmOptions, SampleOptions, StageConfig
):
    """Options that PPO, RLOO and GRPO share: policy, reference, rewards, rollouts."""

    # --- models
    sft_model_path: str | None = option("cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr", path=True)
    """Policy to start from."""
    ref_model_path: str | None = option(None, path=True)
    """Reference model; default: a frozen copy of the policy."""
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
    offload_frozen: Literal["none", "pinned_host"] = option(
        "none",
        rare=True,
        resume="rounding",
        lowers={"loading": 5, "generate": 5, "score": 4, "experience": 4, "update": 8},
    )
    """Where frozen reference and reward models are kept while not in use: on the device, or in pinned host memory
    (copied to the device at each use)."""

    # Where an algorithm has no options of these names.
    value_model = "separate"

    @property
    def value_model_path(self) -> str | None:
        """None: the critic starts from the reward model or the policy."""
        return None

    @property
    def starting_model(self) -> str | None:
        """sft_model_path."""
        return self.sft_model_path

    def problems(self) -> Iterator[str]:
        """Two references; alarms that are unknown or off."""
        yield from super().problems()
        if self.use_peft and self.ref_adapter_name is not None and self.ref_model_path is not None:
            yield "ref_adapter_name and ref_model_path both set the reference: remove one of them."
        if self.stop_token_ids == "generation_config" and self.scratch_model is not None:
            yield (
                "stop_token_ids 'generation_config' with scratch_model: random weights have no generation_config.json. "
                "Give the ids."
            )
        limits = thresholds(self, dtype=self.dtype, batch_size=self.batch_size)
        for name in self.early_stop:
            if name not in ALARMS:
                choices = ", ".join(ALARMS)
                yield f"early_stop: {name!r} is not an alarm; choose from {choices}.{nearest(name, ALARMS)}"
            elif limits[name] is None:
                yield f"early_stop: the alarm {name} is disabled (alarm_{name} is None, or the batch has one row)."


@dataclasses.dataclass(frozen=True)
class PPOConfig(PPOOptions, PolicyConfig):
    """PPO against a reward model (or reward functions), with TRL's numerics."""

    # --- the value model
    value_model_path: str | None = option(None, path=True)
    """Value model to start from, with its score head if it has one; default: the reward model, or the policy."""
    value_model: Literal["separate", "shared_backbone"] = "separate"
    """A separate network (TRL), or a second head on the policy."""
    lora_value: Literal["full", "own", "shared"] = option("full", rare=True)
    """With use_peft, which params of the value model are trained: full: all (TRL); own: an adapter and a
    head on its own params, which are the reward model's if it starts from it (no copy); shared: both on the policy's
    params."""

    def problems(self) -> Iterator[str]:
        """Value models that would not be used."""
        yield from super().problems()
        if self.value_model == "shared_backbone" and self.value_model_path is not None:
            yield (
                f"value_model 'shared_backbone' is a head on the policy, so value_model_path {self.value_model_path!r} "
                "would not be used. Remove one of them."
            )
        if not self.use_peft or self.lora_value == "full":
            return
        if self.value_model == "shared_backbone":
            yield (
                f"lora_value {self.lora_value!r} with value_model 'shared_backbone': the value model is a head on "
                "the policy and has no adapter of its own. Remove one of them."
            )
        if self.lora_value == "own" and self.reward_model_path is None and self.value_model_path is None:
            yield "lora_value 'own' needs value_model_path or reward_model_path as the base model of its adapter."
        if self.lora_value == "shared" and self.value_model_path is not None:
            yield (
                f"lora_value 'shared' uses the policy's params, so value_model_path {self.value_model_path!r} would "
                "not be used. Remove it, or give lora_value 'own'."
            )


@dataclasses.dataclass(frozen=True)
class GroupConfig(GroupOptions, PolicyConfig):
    """Options that RLOO and GRPO share."""

    def problems(self) -> Iterator[str]:
        """A reference that cannot move."""
        yield from super().problems()
        if self.use_peft and self.sync_ref_model:
            yield (
                "sync_ref_model with use_peft is not supported (nor by TRL): the reference is the policy's frozen base "
                "params. Remove one of them."
            )


@dataclasses.dataclass(frozen=True)
class RLOOConfig(RLOOOptions, GroupConfig):
    """RLOO: REINFORCE with a leave-one-out baseline over several responses per prompt, with TRL's numerics."""


@dataclasses.dataclass(frozen=True)
class GRPOConfig(GRPOOptions, GroupConfig):
    """GRPO and its relatives (Dr. GRPO, DAPO, GSPO, REINFORCE++): baseline, scale and loss are independent options."""

    sft_model_path: str | None = None
    """Policy to start from."""


@dataclasses.dataclass(frozen=True)
class Pipeline(CommandOptions):
    """Several stages in order, each in a subfolder of the run folder: RUN/sft, RUN/reward (if the pipeline has them),
    then RUN/ppo, RUN/rloo or RUN/grpo. It ends with a comparison of the policy before and after the last stage.

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
    sft: SFTConfig | None = SFTConfig()
    """Supervised fine-tuning; exports its policy to RUN/sft/policy. None: the policy starts from sft_model_path."""
    reward: RewardConfig | None = RewardConfig(model_name_or_path=SFT_EXPORT)
    """Reward model; exported to RUN/reward/reward_model. None: rewards are functions or a server."""
    ppo: PPOConfig | None = PPOConfig(sft_model_path=SFT_EXPORT, reward_model_path=REWARD_EXPORT)
    """PPO; exports policy and value model to RUN/ppo/policy and RUN/ppo/value. None: use rloo or grpo."""
    rloo: RLOOConfig | None = None
    """RLOO instead of PPO; exports its policy to RUN/rloo/policy."""
    grpo: GRPOConfig | None = None
    """GRPO instead of PPO; exports its policy to RUN/grpo/policy."""

    def with_stage(self, name: str, stage: StageConfig) -> Pipeline:
        """The pipeline with another config of a stage."""
        changed: dict[str, Any] = {name: stage}
        return dataclasses.replace(self, **changed)


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
    registered_type = STAGES.setdefault(name, config_type)
    if registered_type.__qualname__ != config_type.__qualname__:  # a config file may be read twice
        raise UserError(f"algorithm {name!r}: the stage of that name has the config {registered_type.__name__}")
    STAGES[name] = config_type


def config_types() -> dict[str, type]:
    """Config dataclass by the name that config.json has under 'stage'."""
    return {**STAGES, "pipeline": Pipeline}


def stage_name(config: Config) -> str:
    """'sft', 'reward', 'ppo', 'rloo', 'grpo' or 'pipeline': the name in config.json and of the default run folder."""
    return next(name for name, kind in config_types().items() if type(config) is kind)
