"""Reward models: a scalar head and its backbone, trained on preference pairs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data
from rlhf_jax.algorithms import reward_model
from rlhf_jax.config import RewardConfig
from rlhf_jax.errors import UserError
from rlhf_jax.models import Model
from rlhf_jax.parallel import sharding
from rlhf_jax.runtime.stopping import Tick
from rlhf_jax.stages.algorithm_registry import register_algorithm
from rlhf_jax.stages.open_models import Source, score_head_message
from rlhf_jax.stages.stage_context import StageContext
from rlhf_jax.stages.supervised import SupervisedAlgorithm, SupervisedStage
from rlhf_jax.stages.work import Shape, Work, supervised_work
from rlhf_jax.types import Params


class RewardAlgorithm(SupervisedAlgorithm[RewardConfig]):
    """A model with a scalar head that learns preference pairs."""

    def load_data(self, config: RewardConfig, model, tokenizer, train_dataset, eval_dataset):
        """(training pairs, evaluation sets by name, demonstrations that score 0 on average after training, or None)"""
        train_data = data.load(data.PairData, config, tokenizer, train_dataset)
        eval_sets = data.load_eval(data.PairData, config, tokenizer, eval_dataset)
        return train_data, eval_sets, data.load_normalization_data(config, tokenizer)

    def start_messages(self, context: StageContext[RewardConfig]) -> list[str]:
        """Lines on the head that training starts from, and on what follows training; UserError where score_init_std
        would not be used."""
        config, lines = context.config, []
        if config.normalize_dataset_name is not None:
            texts = f"at most {config.normalize_samples} texts of {config.normalize_dataset_name}"
            lines.append(f"before the export: the mean score of {texts} is computed, and subtracted from all scores")
        if config.scratch_model:
            return lines
        source = Source(config.model_name_or_path, config.model_revision)
        if config.score_init_std is not None and context.weights.has_scalar_head(source.path, source.revision):
            raise UserError(
                f"score_init_std {config.score_init_std} would not be used: {source.name} has a score head, which is "
                "trained further. Leave the option out, or start from a model without a score head."
            )
        return [score_head_message(context, source), *lines]

    def build_measure(self, stage: SupervisedStage):
        """(params, pairs, tick) -> (accuracy, margin, loss and rewards; margins [N])."""
        from rlhf_jax.metrics import calibration  # scipy, which policies do not need

        dtype = jnp.dtype(stage.config.dtype)

        @jax.jit
        def score_pairs(network, params, batch):
            return reward_model.pair_scores(network.model, network.with_trained(params).params, batch, dtype=dtype)

        def measure(params: Params, source: Any, tick: Tick):
            parts = []
            for batch, real in stage.batches(source, tick):
                scores = sharding.fetch(score_pairs(stage.network, params, batch))
                parts.append([x[:real] for x in scores])
            chosen, rejected = map(np.concatenate, zip(*parts, strict=True))
            margin = chosen - rejected
            metrics = {
                "accuracy": float(np.mean(margin > 0)),
                "margin": float(np.mean(margin)),
                "calibration_error": calibration.calibration_error(calibration.reliability(margin)),
                "loss": float(np.mean(np.logaddexp(0.0, -margin))),
                "mean_reward": float(np.mean(np.concatenate([chosen, rejected]))),
                "min_reward": float(min(chosen.min(), rejected.min())),
                "max_reward": float(max(chosen.max(), rejected.max())),
            }
            return metrics, margin

        return measure

    def calibration_rows(self, name: str, margins: Any) -> list[dict[str, Any]]:
        """`calibration.reliability` of an evaluation set's margins, without empty bins."""
        from rlhf_jax.metrics import calibration

        return [{"set": name, **row} for row in calibration.reliability(margins) if row["pairs"]]

    def work(self, config: RewardConfig, model: Model, tokens: int) -> Work:
        """The work of an update: two sequences a pair."""
        return supervised_work(Shape.of(model), 2 * config.batch_size, tokens, frozen=model.lora is not None)

    def texts(self, tokenizer, batch, row: int) -> dict[str, Any]:
        """{"chosen", "rejected", "margin"}: both texts with their prompt, of a row of a batch on the host."""
        texts = {
            "chosen": batch.chosen_tokens[row, : batch.chosen_lengths[row]],
            "rejected": batch.rejected_tokens[row, : batch.rejected_lengths[row]],
        }
        decoded = {name: tokenizer.decode(tokens) for name, tokens in texts.items()}
        return {**decoded, "margin": float(batch.margin[row])}

    def score_std(self, config: RewardConfig) -> float | None:
        """The standard deviation of a new score head."""
        return config.score_init_std

    def exported(self, stage: SupervisedStage, params: Params) -> tuple[str, Params]:
        """(name of the exported model, its trained params); the mean score of the demonstrations is subtracted by the
        head's bias."""
        if stage.normalizing_data is not None:
            params = reward_model.subtract_offset(params, mean_score(stage, params))
        return "reward_model", params


def mean_score(stage: SupervisedStage, params: Params) -> float:
    """The mean score of the demonstrations that the exported model is normalised on."""
    dtype = jnp.dtype(stage.config.dtype)

    @jax.jit
    def score_texts(network, params, tokens, lengths):
        return reward_model.score_texts(
            network.model, network.with_trained(params).params, tokens, lengths, dtype=dtype
        )

    scores = []
    for batch, real in stage.batches(stage.normalizing_data):
        scores.append(sharding.fetch(score_texts(stage.network, params, batch.tokens, batch.lengths))[:real])
    return float(np.mean(np.concatenate(scores)))


register_algorithm(
    RewardAlgorithm(
        "reward",
        RewardConfig,
        reward_model.update,
        progress=("loss", "accuracy", "eval/accuracy", "margin", "learning_rate"),
        head="scalar",
    )
)
