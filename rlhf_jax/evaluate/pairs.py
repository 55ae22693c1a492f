"""Evaluation of a reward model on preference pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data
from rlhf_jax.algorithms import reward_model
from rlhf_jax.config import RewardConfig
from rlhf_jax.errors import UserError
from rlhf_jax.evaluate.answers import iterate_batches, prompts_per_batch
from rlhf_jax.evaluate.options import EvaluateConfig
from rlhf_jax.metrics.calibration import calibration
from rlhf_jax.models.placement import Weights
from rlhf_jax.parallel import sharding
from rlhf_jax.rewards import scorer
from rlhf_jax.runtime.run_folder import template_date
from rlhf_jax.stages import open_models


class PairEvaluation:
    """Evaluates a reward model on preference pairs. The constructor loads the model's config, tokenizer and data; `run`
    loads its weights.

    Args:
      reward_config: model and data of the pairs.
      config: options of the command.
      weights: loader of params.
    """

    def __init__(self, reward_config: RewardConfig, config: EvaluateConfig, weights: Weights):
        path, revision = reward_config.model_name_or_path, reward_config.model_revision
        model = scorer.open_model(path, revision)
        self.model = open_models.on_mesh(model, weights, "scalar", path, dtype=reward_config.dtype)
        if config.pairs is not None and config.max_length is None:
            max_length = self.model.config.max_position_embeddings
            reward_config = dataclasses.replace(reward_config, max_length=max_length)
        self.reward_config, self.weights = reward_config, weights
        self.bins, self.batch_size = config.calibration_bins, config.batch_size
        open_models.check_context(self.model, reward_config.max_length, "--max_length", path)
        source, rows = open_models.Source(path, revision), self.model.config.vocab_size
        tokenizer = open_models.open_tokenizer(reward_config.tokenizer_name_or_path, source, rows)
        if reward_config.run_dir is not None:
            tokenizer = dataclasses.replace(tokenizer, template_date=template_date(reward_config.run_dir))
        if config.pairs is None:
            sets = data.load_eval(data.PairData, reward_config, tokenizer)
            if not sets:
                raise UserError(f"--run_dir {config.run_dir}: the reward stage has no evaluation data; set --pairs")
            self.source = next(iter(sets.values()))
            return
        rows = data.load_rows(
            reward_config.dataset_name,
            split=reward_config.dataset_test_split,
            split_option="--pairs_split",
            kind="pairs",
            max_samples=reward_config.max_eval_samples,
            label="pairs",
            text_columns=data.text_columns_of(reward_config),
        )
        self.source = data.from_rows(data.PairData, rows, reward_config, tokenizer)

    def run(self, bootstrap_options: dict[str, Any], log: Callable[[str], None]) -> dict[str, Any]:
        """The metrics of the reward model for evaluation.json."""
        log(str(self.source.report))
        path = self.reward_config.model_name_or_path
        params = self.weights.load(self.model, path, "scalar", self.reward_config.model_revision)
        dtype = jnp.dtype(self.reward_config.dtype)
        pair_scores = jax.jit(lambda params, batch: reward_model.pair_scores(self.model, params, batch, dtype=dtype))
        size = prompts_per_batch(self.batch_size, 1, len(self.source), sharding.row_shards(self.weights.mesh))
        scores = []
        for batch, real in iterate_batches(self.source, size):
            placed = sharding.shard_batch(batch, self.weights.mesh)
            scores.append([x[:real] for x in sharding.fetch(pair_scores(params, placed))])
        chosen, rejected = map(np.concatenate, zip(*scores, strict=True))
        if not (np.isfinite(chosen).all() and np.isfinite(rejected).all()):
            raise UserError(f"reward model {path} gives scores that are not finite")
        return {"data": self.source.report.name} | calibration(chosen, rejected, self.bins, **bootstrap_options)
