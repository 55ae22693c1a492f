"""The stages: each holds its models on a mesh, its data and its programs; `train.py` runs any of them."""

from __future__ import annotations

from typing import Any

from rlhf_jax.config import PolicyConfig, StageConfig, stage_name
from rlhf_jax.config.stages import SupervisedConfig
from rlhf_jax.stages.algorithm_registry import (
    ALGORITHMS,
    Algorithm,
    RolloutAlgorithm,
    policy_gradient_algorithm,
    register_algorithm,
)
from rlhf_jax.stages.reward import RewardAlgorithm
from rlhf_jax.stages.rollout import RolloutStage
from rlhf_jax.stages.sft import SFTAlgorithm
from rlhf_jax.stages.stage import Stage
from rlhf_jax.stages.supervised import SupervisedAlgorithm, SupervisedStage

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "RewardAlgorithm",
    "RolloutAlgorithm",
    "RolloutStage",
    "SFTAlgorithm",
    "Stage",
    "SupervisedAlgorithm",
    "SupervisedStage",
    "open_stage",
    "policy_gradient_algorithm",
    "register_algorithm",
]


def open_stage(config: StageConfig, **objects: Any) -> Stage:
    """The stage of a config, its data and models loaded.

    Args:
      **objects: train_dataset, eval_dataset, optimizer (optax), weights (see `StageContext.open`), template_date (see
        `data.Tokenizer`), compile_ahead (whether the first update's programs compile while weights load: see
        `CompileAhead`); reward_funcs for a stage that samples. A train_dataset without an eval_dataset or
        eval_dataset_name is not evaluated, as in TRL: dataset_name is another data set.

    Raises:
      UserError: an option, a file, a row or a tensor is wrong.
    """
    algorithm = ALGORITHMS[stage_name(config)]
    if objects.get("train_dataset") is not None and config.eval_dataset_name is None:
        objects = {"eval_dataset": {}, **objects}
    if isinstance(algorithm, RolloutAlgorithm):
        assert isinstance(config, PolicyConfig)
        return RolloutStage(config, algorithm, **objects)
    assert isinstance(algorithm, SupervisedAlgorithm) and isinstance(config, SupervisedConfig)
    return SupervisedStage(config, algorithm, **objects)
