"""The stages: what each loads, one update of it, its evaluation and its exports.

A stage wires pure trainers to models, data and a mesh; `train.py` runs any of them.
"""

from rlhf_jax.stages.ppo import PPOStage
from rlhf_jax.stages.reward import RewardStage
from rlhf_jax.stages.rloo import RLOOStage
from rlhf_jax.stages.sft import SFTStage

STAGES = {"sft": SFTStage, "reward": RewardStage, "ppo": PPOStage, "rloo": RLOOStage}

__all__ = ["STAGES", "PPOStage", "RLOOStage", "RewardStage", "SFTStage"]
