"""Supervised fine-tuning of a causal model on demonstrations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data
from rlhf_jax.algorithms import sft
from rlhf_jax.config import SFTConfig
from rlhf_jax.data import demonstrations
from rlhf_jax.errors import UserError
from rlhf_jax.models import Model
from rlhf_jax.runtime.stopping import Tick
from rlhf_jax.stages.algorithm_registry import register_algorithm
from rlhf_jax.stages.open_models import Source, open_processor, wants_images
from rlhf_jax.stages.supervised import SupervisedAlgorithm, SupervisedStage, eval_name
from rlhf_jax.stages.work import Shape, Work, supervised_work
from rlhf_jax.types import Params


def check_images(config: SFTConfig) -> None:
    """Refuses options that do not go with images.

    Raises:
      UserError: names the option.
    """
    for name, why in (
        ("packing", "a pack's images would be as many as those of its demonstrations"),
        ("eval_packing", "a pack's images would be as many as those of its demonstrations"),
        ("assistant_only_loss", "the places of the template's marks are those without image tokens (nor has TRL it)"),
    ):
        if getattr(config, name):
            raise UserError(f"{name} with images in the training data is not supported: {why}. Remove it")


class SFTAlgorithm(SupervisedAlgorithm[SFTConfig]):
    """A causal model that learns demonstrations."""

    def load_rows(self, config: SFTConfig, train_dataset) -> data.TrainingRows:
        """Training rows."""
        return data.load_training_rows(config, "demonstrations", train_dataset)

    def has_images(self, config: SFTConfig, rows: data.TrainingRows) -> bool:
        """As `open_models.wants_images`."""
        source = Source(config.model_name_or_path, config.model_revision, config.scratch_model)
        columns = [(one.prompt_column, one.completion_column, demonstrations.MESSAGES) for _, one in rows.sets]
        return any(wants_images(source, one, names) for (one, _), names in zip(rows.sets, columns, strict=True))

    def load_data(self, config: SFTConfig, model, tokenizer, rows, eval_dataset):
        """(training data, evaluation sets by name, None)"""
        processor = None
        if model.reads_images:
            check_images(config)
            source = Source(config.model_name_or_path, config.model_revision, config.scratch_model)
            processor = open_processor(model, tokenizer, source)
        eval_packing = config.packing if config.eval_packing is None else config.eval_packing

        def packed(demonstrations, packing: bool):
            if not packing:
                return demonstrations
            return data.pack(demonstrations, config.max_length, config.completion_only_loss)

        train_data = packed(data.load(data.DemoData, config, tokenizer, rows, processor), config.packing)
        eval_sets = data.load_eval(data.DemoData, config, tokenizer, eval_dataset, processor)
        return train_data, {name: packed(one, eval_packing) for name, one in eval_sets.items()}, None

    def early_stopping_metric(self, eval_sets: dict[str, Any]) -> str:
        """The loss of the first evaluation set."""
        return eval_name(next(iter(eval_sets), ""), "loss")

    def build_measure(self, stage: SupervisedStage):
        """(params, data set, tick) -> (mean loss over its tokens and perplexity, None)."""
        config = stage.config

        @jax.jit
        def evaluate(network, params, batch):
            return sft.evaluate(network.model, network.with_trained(params).params, batch, config)

        def measure(params: Params, source: Any, tick: Tick):
            total = count = jnp.float32(0)
            for batch, _ in stage.batches(source, tick):
                loss, tokens = evaluate(stage.network, params, batch)
                total, count = total + loss, count + tokens
            loss = float(total) / max(float(count), 1.0)
            return {"loss": loss, "perplexity": float(np.exp(min(loss, 50.0)))}, None

        return measure

    def work(self, config: SFTConfig, model: Model, tokens: int) -> Work:
        """The work of an update; with completion_only_loss without logits, since their number is not known."""
        logits = 0.0 if config.completion_only_loss else tokens
        return supervised_work(Shape.of(model), config.batch_size, tokens, logits=logits, frozen=model.lora is not None)

    def texts(self, tokenizer, batch, row: int) -> dict[str, Any]:
        """{"text"}: prompt and completion of a row of a batch on the host."""
        return {"text": tokenizer.decode(batch.tokens[row, : batch.lengths[row]])}

    def exported(self, stage: SupervisedStage, params: Params) -> tuple[str, Params]:
        """(name of the exported model, its trained params)"""
        return "policy", params


register_algorithm(
    SFTAlgorithm(
        "sft",
        SFTConfig,
        sft.update,
        progress=("loss", "eval/loss", "learning_rate", "grad_norm"),
    )
)
