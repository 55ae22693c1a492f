"""A reward model on preference pairs: opened without a weight, then scored and counted."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data
from rlhf_jax.algorithms import reward_model
from rlhf_jax.config import RewardConfig
from rlhf_jax.errors import UserError
from rlhf_jax.evaluate.answers import batch_prompts, in_batches
from rlhf_jax.evaluate.options import EvaluateConfig
from rlhf_jax.metrics.calibration import calibration
from rlhf_jax.models.io import hf
from rlhf_jax.models.placement import Weights
from rlhf_jax.parallel import sharding
from rlhf_jax.stages import base


class Pairs:
    """A reward model and preference pairs. Opening them reads configs, the tokenizer and data."""

    def __init__(self, c: RewardConfig, config: EvaluateConfig, weights: Weights):
        self.c, self.bins, self.size, self.weights = c, config.calibration_bins, config.batch_size, weights
        self.model = hf.load_model(c.model_name_or_path, revision=c.model_revision).on(weights.mesh)
        if config.pairs is not None and config.max_length is None:
            self.c = c = dataclasses.replace(c, max_length=self.model.config.max_position_embeddings)
        base.check_context(self.model, c.max_length, "--max_length", c.model_name_or_path)
        tokenizer = base.open_tokenizer(c, c.model_name_or_path, self.model.config.vocab_size)
        if config.pairs is None:
            sets = data.load_eval_pairs(c, tokenizer)
            if not sets:
                raise UserError(f"--run_dir {config.run_dir}: the reward stage has no evaluation data; give --pairs")
            self.source = next(iter(sets.values()))
            return
        rows = data.load_rows(
            c.dataset_name, split=c.dataset_test_split, kind="pairs", max_samples=c.max_eval_samples, label="pairs"
        )
        self.source = data.pairs_from_rows(rows, c, tokenizer)

    def run(self, options: dict[str, Any], say) -> dict[str, Any]:
        """What evaluation.json holds of the reward model."""
        say(str(self.source.report))
        params = self.weights.load(self.model, self.c.model_name_or_path, "scalar", self.c.model_revision)
        dtype = jnp.dtype(self.c.dtype)
        pair_scores = jax.jit(lambda params, batch: reward_model.pair_scores(self.model, params, batch, dtype=dtype))
        size = batch_prompts(self.size, 1, len(self.source), sharding.row_shards(self.weights.mesh))
        parts = []
        for batch, real in in_batches(self.source, size):
            placed = sharding.shard_batch(batch, self.weights.mesh)
            parts.append([x[:real] for x in jax.device_get(pair_scores(params, placed))])
        chosen, rejected = map(np.concatenate, zip(*parts, strict=True))
        if not (np.isfinite(chosen).all() and np.isfinite(rejected).all()):
            raise UserError(f"reward model {self.c.model_name_or_path} gives scores that are not finite")
        return {"data": self.source.report.name} | calibration(chosen, rejected, self.bins, **options)
