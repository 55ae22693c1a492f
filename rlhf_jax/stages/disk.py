"""Bytes that a run writes to its disk: checkpoints that it keeps, exported models, and stages that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax

from rlhf_jax.config import PPOConfig, StageConfig, stage_name
from rlhf_jax.models.quantization import is_quantized
from rlhf_jax.stages.stage import Stage

EXPORTED = 4
"""Bytes of an exported parameter: checkpoints for transformers are float32."""


def parameters(stage: Stage) -> list[tuple[str, int, bool]]:
    """(role, parameters, trained) of every model of a stage, abstract or loaded."""
    trained, frozen = stage.state.params, stage.frozen()
    leaves = lambda params: jax.tree.leaves(params, is_leaf=is_quantized)  # noqa: E731
    count = lambda params: sum(math.prod(x.shape) for x in leaves(params))  # noqa: E731
    return [(role, count(params), role in trained) for role, params in {**trained, **frozen}.items()]


def exported_bytes(stage: Stage) -> int:
    """Of the models that a stage exports: those it trains, and of adapters also the merged model."""
    counts = parameters(stage)
    trained = sum(count for _, count, is_trained in counts if is_trained)
    merged = sum(count for role, count, _ in counts if role.startswith("base")) if stage.config.export_merged else 0
    return EXPORTED * (trained + merged)


def needs(
    stage: Stage, checkpoint: int, present: Sequence[int], saves: int, later: Sequence[StageConfig]
) -> dict[str, int]:
    """What a stage and those after it still write, by what it is.

    Args:
      stage: that begins.
      checkpoint: bytes of one of its checkpoints.
      present: the updates of its checkpoints on the disk.
      saves: number of checkpoints in the whole run.
      later: stages of the pipeline after it. Their models are taken to be of this one's size, with one checkpoint each.
    """
    limit = stage.config.save_total_limit or saves
    at_once = saves if saves <= limit else limit + 1  # an old one goes when the new one is whole
    parts = {"models": exported_bytes(stage)}
    if stage.total_steps not in present:
        count = max(1, at_once - len(present))
        parts = {f"{count} checkpoint{'s' if count > 1 else ''}": count * checkpoint, **parts}
    model = EXPORTED * max(count for _, count, _ in parameters(stage))
    for config in later:
        models = 2 if isinstance(config, PPOConfig) else 1  # PPO has a value model
        state = 0 if config.use_peft else 3  # params and two moments
        parts[stage_name(config)] = models * model * (1 + state)
    return parts
