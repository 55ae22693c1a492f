"""Frozen dataclasses, one per stage. Names are TRL's. Every field is a flag of the same name."""

from rlhf_jax.config.dataclasses import (
    REWARD_EXPORT,
    SFT_EXPORT,
    STAGES,
    Config,
    GRPOConfig,
    Pipeline,
    PolicyConfig,
    PPOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
    StageConfig,
    register_stage,
    stage_name,
)
from rlhf_jax.config.presets import preset
from rlhf_jax.config.resolution import resolve, sampling_options, stages_of

__all__ = [
    "REWARD_EXPORT",
    "SFT_EXPORT",
    "STAGES",
    "Config",
    "GRPOConfig",
    "PPOConfig",
    "Pipeline",
    "PolicyConfig",
    "RLOOConfig",
    "RewardConfig",
    "SFTConfig",
    "StageConfig",
    "preset",
    "register_stage",
    "resolve",
    "sampling_options",
    "stage_name",
    "stages_of",
]
