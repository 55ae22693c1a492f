"""Frozen dataclasses, one per stage. Names are TRL's. Every field is a flag of the same name."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rlhf_jax.config.policy import PolicyConfig, PPOConfig, RLOOConfig
from rlhf_jax.config.stage import RewardConfig, SFTConfig, StageConfig
from rlhf_jax.errors import UserError

__all__ = [
    "STAGES",
    "Config",
    "PPOConfig",
    "Pipeline",
    "PolicyConfig",
    "RLOOConfig",
    "RewardConfig",
    "SFTConfig",
    "StageConfig",
    "resolve",
    "stage_name",
    "stages_of",
]

SFT_EXPORT = "{run_dir}/sft/policy"  # in a pipeline: what the SFT stage exports
TOGETHER = ("distributed", "num_processes", "process_id", "topology", "max_minutes", "deterministic")
"""Options of the command, the same for all stages of a pipeline."""
REWARD_EXPORT = "{run_dir}/reward/reward_model"  # and the reward stage


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Stages in a row, each in a folder of the run's: RUN/sft, RUN/reward, then RUN/ppo or RUN/rloo.

    `{run_dir}` in a text option of a stage stands for the pipeline's folder.
    """

    run_dir: str | None = None
    """Folder of the run, with one folder a stage; default runs/pipeline."""
    seed: int | None = None
    """Seed of every stage; None: each stage's own."""
    resume: Literal["auto", "must", "never"] | None = None
    """What every stage does with a used folder (auto, must, never); None: each stage's own."""
    override_resume: bool = False
    """Every stage goes on although options, data or starting models are not those that it began with."""
    max_minutes: float | None = None
    """Stop, saved and resumable (exit code 75), before so many minutes of wall time are over; None: no limit."""
    deterministic: bool = False
    """On GPUs: only kernels that give the same bits each time, none chosen by timing; slower. Others always do so."""
    dry_run: bool = False
    """Print the resolved configs, the batch arithmetic, the mesh and the memory of compiled programs; then stop."""
    topology: str | None = None
    """With dry_run: compile for a TPU slice that is not there, as v5e:4x4 or v5p:2x2x2 (needs the extra tpu-aot)."""
    distributed: str = "auto"
    """The command joins other processes: auto (TPU pods, SLURM, Open MPI, Kubernetes), off, or number 0's HOST:PORT."""
    num_processes: int | None = None
    """With HOST:PORT: how many processes there are; default: JAX_NUM_PROCESSES in the environment."""
    process_id: int | None = None
    """With HOST:PORT: which of them this is, from 0; default: JAX_PROCESS_ID in the environment."""
    sft: SFTConfig = SFTConfig()
    """Supervised fine-tuning; its policy goes to RUN/sft/policy."""
    reward: RewardConfig = RewardConfig(model_name_or_path=SFT_EXPORT)
    """Reward model; it goes to RUN/reward/reward_model."""
    ppo: PPOConfig | None = PPOConfig(sft_model_path=SFT_EXPORT, reward_model_path=REWARD_EXPORT)
    """PPO; policy and value model go to RUN/ppo/policy and RUN/ppo/value. None: RLOO instead."""
    rloo: RLOOConfig | None = None
    """RLOO in place of PPO; its policy goes to RUN/rloo/policy."""


Config = StageConfig | Pipeline
STAGES: dict[str, type[StageConfig]] = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "rloo": RLOOConfig}


def stage_name(config: Config) -> str:
    """'sft', 'reward', 'ppo', 'rloo' or 'pipeline': the name in config.json and of the default run folder."""
    if isinstance(config, Pipeline):
        return "pipeline"
    return next(name for name, stage in STAGES.items() if type(config) is stage)


def resolve(config: Config) -> Config:
    """The config with its run folder named. Reads no file; doing it twice changes nothing."""
    return dataclasses.replace(config, run_dir=config.run_dir or f"runs/{stage_name(config)}")


def stages_of(config: Config) -> dict[str, StageConfig]:
    """The stages to run, in order, by name, each with a run folder: one, or those of a pipeline.

    A pipeline's own options (seed, resume, dry_run, and how its processes find each other) go to every stage, and
    `{run_dir}` becomes its folder.
    """
    config = resolve(config)
    if not isinstance(config, Pipeline):
        return {stage_name(config): config}
    shared = {"seed": config.seed, "resume": config.resume, "dry_run": config.dry_run or None}
    shared["override_resume"] = config.override_resume or None
    shared = {name: value for name, value in shared.items() if value is not None}
    together = {name: getattr(config, name) for name in TOGETHER}
    stages = {}
    for name in STAGES:
        stage, folder = getattr(config, name), f"{config.run_dir}/{name}"
        if stage is None:
            continue
        if stage.run_dir not in (None, folder):
            raise UserError(
                f"{name}.run_dir is {stage.run_dir!r}, but a pipeline's stage has its folder {folder!r}: "
                "give run_dir for the whole, or run the stage by a config of its own."
            )
        for option, value in together.items():
            if getattr(stage, option) not in (getattr(type(stage), option), value):
                raise UserError(
                    f"{name}.{option} is {getattr(stage, option)!r}: all stages share one command, "
                    f"so give --{option} for the whole pipeline."
                )
        paths = {key: value for key, value in vars(stage).items() if isinstance(value, str)}
        paths = {key: value.replace("{run_dir}", config.run_dir) for key, value in paths.items()}
        stages[name] = dataclasses.replace(stage, **{**paths, **shared, **together, "run_dir": folder})
    return stages
