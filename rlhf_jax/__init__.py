"""RLHF in JAX: SFT, reward model, PPO, RLOO and GRPO, as pure functions over pytrees.

from rlhf_jax import advantages, losses        # equations on arrays of your own
rlhf_jax.run(config, reward_funcs=...)          # a run with objects in place of paths
rlhf_jax.load_policy(path).generate(texts)      # what a policy says
"""

from typing import TYPE_CHECKING

from rlhf_jax.utils.lazy import attributes

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "GRPOConfig",
    "PPOConfig",
    "Pipeline",
    "RLOOConfig",
    "RewardConfig",
    "SFTConfig",
    "UserError",
    "jax_reward",
    "load_policy",
    "run",
]

if TYPE_CHECKING:
    from rlhf_jax.config import GRPOConfig, Pipeline, PPOConfig, RewardConfig, RLOOConfig, SFTConfig
    from rlhf_jax.errors import UserError
    from rlhf_jax.inference import load_policy
    from rlhf_jax.rewards.interface import jax_reward
    from rlhf_jax.runtime.callbacks import Callback
    from rlhf_jax.train import run

__getattr__ = attributes(
    __name__,
    {
        "Callback": "runtime.callbacks",
        "GRPOConfig": "config",
        "PPOConfig": "config",
        "Pipeline": "config",
        "RLOOConfig": "config",
        "RewardConfig": "config",
        "SFTConfig": "config",
        "UserError": "errors",
        "jax_reward": "rewards.interface",
        "load_policy": "inference",
        "run": "train",
    },
)
