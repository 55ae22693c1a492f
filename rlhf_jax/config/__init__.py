"""Frozen dataclasses, one per stage. Names are TRL's. Every field is a flag of the same name."""

from rlhf_jax.config.presets import preset
from rlhf_jax.config.resolution import resolve, stages_of
from rlhf_jax.config.stages import (
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
    "stage_name",
    "stages_of",
]
