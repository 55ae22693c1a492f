"""A stage that trains one model on a data set, one optimizer step a batch: SFT and reward models.

What is learned from a batch comes as a task (`sft.SFTTask`, `reward.RewardTask`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from rlhf_jax.algorithms import optimizer as optimizers
from rlhf_jax.config.batch_sizes import batch_arithmetic
from rlhf_jax.data.images import image_token_id_of
from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf
from rlhf_jax.parallel import sharding
from rlhf_jax.runtime.stopping import Tick, no_tick
from rlhf_jax.stages import adapters
from rlhf_jax.stages.context import (
    StageContext,
    check_context,
    exported_generation,
    inputs_of,
    open_tokenizer,
    progress_metrics,
    scratch_model,
    state_shardings,
    update_key,
)
from rlhf_jax.stages.evaluator import Completions
from rlhf_jax.types import Params, TrainState


class SupervisedStage:
    """A `base.Stage` for SFT and reward models.

    Attributes beside those of `base.Stage`:
      task: what is trained.
      context: config, mesh and weights.
      model: with its head, and the form of its adapter.
      generation: what an exported policy says of generation; None: the model has a scalar head.
      base_params: frozen params that the adapter is merged into; None: the model is trained in full.
      train_data, eval_sets: rows.
      update_step: the jitted update.
    """

    def __init__(
        self, config, task, *, train_dataset=None, eval_dataset=None, optimizer=None, weights=None, template_date=None
    ):
        # --- everything that can be refused, before a weight is read
        self.task, self.name, self.progress = task, task.name, task.progress
        self.context = context = StageContext.open(config, weights)
        self.config, self.weights, self.mesh = context.config, context.weights, context.mesh
        rows = task.load_rows(self.config, train_dataset)
        self.model, tokenizer, self.messages = open_model(context, task.head, task.has_images(self.config, rows))
        self.tokenizer = dataclasses.replace(tokenizer, template_date=template_date)
        self.generation = None
        if task.head == "causal":
            self.generation = exported_generation(self.base_model, self.config.model_revision, self.tokenizer)
        data = task.load_data(self.config, self.model, self.tokenizer, rows, eval_dataset)
        self.train_data, self.eval_sets, self.normalizing_data = data
        self.early_stopping_metric = task.early_stopping_metric(self.eval_sets)
        self.messages += [str(self.train_data.report), *task.start_messages(context)]
        self.total_steps = batch_arithmetic(self.config, self.rows).updates

        # --- params and programs
        if optimizer is None:
            optimizer = optimizers.make_optimizer(self.config, self.total_steps)
        else:
            optimizer = optimizers.user_optimizer(optimizer)
        cast = self.model.lora is not None and not self.model.lora.modules_to_save
        params = task.load_params(context, self.model, adapters.cast_base_fn(context, self.model) if cast else None)
        self.base_params = None
        if self.model.lora is not None:
            score = {name: params.pop(name) for name in ("score",) if name in params}  # trained in full
            self.base_params = adapters.cast_base(context, self.model, params)
            params = {**adapters.new_adapter(context, self.model, params, 0), **score}
        elif self.model.frozen_vision:
            params, frozen = self.model.split_frozen(params)
            self.base_params = context.cast_frozen(self.model, frozen)
        self.state = context.initial_state({"model": params}, {"model": self.model}, optimizer)
        self.update_step = jax.jit(
            self._update_fn(optimizer), donate_argnums=0, out_shardings=(state_shardings(self.state), None)
        )
        self.measure = task.build_measure(self)
        self.phase = "update"
        self._margins: dict[str, Any] = {}  # of each evaluation set of pairs, in the last evaluation

    @property
    def rows(self) -> int:
        """Rows of the training data."""
        return len(self.train_data)

    @property
    def rows_per_update(self) -> int:
        """Rows of the data that an update takes."""
        return self.config.batch_size

    @property
    def base_model(self) -> str | None:
        """What training starts from; None: random weights."""
        return None if self.config.scratch_model else self.config.model_name_or_path

    # --- an update

    def _update_fn(self, optimizer: optimizers.Optimizer):
        """(TrainState, base_params, batch) -> (TrainState, metrics), pure."""
        config, model, rows = self.config, self.model, self.rows

        def update_step(state: TrainState, base_params: Params | None, batch: Any):
            rate = None if optimizer.learning_rate is None else optimizer.learning_rate(state.step)
            state, metrics = self.task.update(
                model,
                state,
                batch,
                config=config,
                optimizer=optimizer,
                key=update_key(state.seed, state.step),
                base_params=base_params,
            )
            progress = progress_metrics(state, rate, ("learning_rate",), rows)
            return state, {**metrics, **progress, "nonfinite/in_a_row": state.nonfinite}

        return update_step

    def train_step(self, state: TrainState, step: int, tick: Tick = no_tick):
        """As `base.Stage.train_step`, of one batch of rows."""
        size = self.config.batch_size
        batch = self.train_data.batch(self.config.seed, step, size, self.context.local_rows(size))
        state, metrics = self.update_step(state, self.base_params, self.context.place_share(batch, size))
        return state, metrics, {}

    # --- between updates

    def batches(self, source, tick: Tick = no_tick) -> Iterator[tuple[Any, int]]:
        """A data set in order, in padded batches of one size: (batch on the mesh, its real rows)."""
        shards = sharding.row_shards(self.mesh)
        size = min(self.config.batch_size, -(-max(8, len(source)) // shards) * shards)
        for start in range(0, len(source), size):
            tick()
            batch = source.in_order(start, size, self.context.local_rows(size))
            yield self.context.place_share(batch, size), min(size, len(source) - start)

    def evaluate(self, state: TrainState, tick: Tick = no_tick) -> dict[str, float]:
        """The task's metrics on each evaluation set, as `eval/...`, or as `eval_NAME/...` where the sets have names."""
        metrics, self._margins = {}, {}
        for name, source in self.eval_sets.items():
            values, margins = self.measure(state.params["model"], source, tick)
            if margins is not None:
                self._margins[name] = margins
            metrics.update({eval_name(name, key): value for key, value in values.items()})
        return metrics

    def final_metrics(self, state: TrainState) -> dict[str, float]:
        """The task's metrics on the training data where it has them, as `train/...`."""
        if not self.task.measures_training_data:
            return {}
        values, _ = self.measure(state.params["model"], self.train_data, no_tick)
        return {f"train/{name}": value for name, value in values.items()}

    def samples(self, state: TrainState, tick: Tick = no_tick) -> Completions:
        """None."""
        return [], []

    def training_completions(self) -> Completions:
        """None."""
        return [], []

    def calibration(self) -> list[dict[str, Any]]:
        """As `base.Stage.calibration`: `calibration.reliability` of each set of pairs, with the set's name."""
        return [row for name, margins in self._margins.items() for row in self.task.calibration_rows(name, margins)]

    def nonfinite_rows(self, step: int) -> list[dict[str, Any]]:
        """All rows of the update's batch, since a gradient is of them all: the row of the data, or the rows of a pack,
        and its texts."""
        config, size = self.config, self.config.batch_size
        batch = self.train_data.batch(config.seed, step - 1, size)
        rows = self.train_data.rows_of(config.seed, step - 1, size)
        return [
            {**self.train_data.source_rows(int(row)), **self.task.texts(self.tokenizer, batch, i)}
            for i, row in enumerate(rows)
        ]

    # --- what the run is made of

    def inputs(self) -> dict[str, str]:
        """As `base.Stage.inputs`."""
        return inputs_of(self.context, self.train_data, self.eval_sets)

    def frozen(self) -> dict[str, Params]:
        """As `base.Stage.frozen`."""
        return {} if self.base_params is None else {"base": self.base_params}

    def trace_programs(self, build) -> None:
        """As `RolloutStage.trace_programs`: the update, on the longest rows that there may be."""
        batch = self.train_data.batch(self.config.seed, 0, self.config.batch_size)
        batch_sharding = sharding.batch_sharding(self.mesh)

        def rows(x):
            shape = (x.shape[0], self.config.max_length) if x.ndim == 2 else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=batch_sharding)

        given = self.state, self.base_params
        build("update", self.update_step, *given, jax.tree.map(rows, batch), resident=given)

    def export(self, state: TrainState, folder: str) -> dict[str, str]:
        """Writes the final model as a Hugging Face checkpoint with the tokenizer: {name: path}."""
        return self.task.export(self, state.params["model"], folder)

    def close(self) -> None:
        """Nothing to end."""


def open_model(context: StageContext, head: str, images: bool = False) -> tuple[Any, Any, list[str]]:
    """(model, tokenizer, messages), by its config alone: bad data is refused before a weight is read. `images`: whether
    it is to read them."""
    config, messages = context.config, [context.attention_message]
    if config.scratch_model:
        tokenizer = open_tokenizer(config, None, None)
        token = image_token_id_of(tokenizer) if images else None
        model = scratch_model(config, tokenizer.vocab_size, config.max_length, token)
    else:
        model = hf.load_model(config.model_name_or_path, revision=config.model_revision, images=images)
        check_context(model, config.max_length, "--max_length", config.model_name_or_path)
        tokenizer = open_tokenizer(config, config.model_name_or_path, model.config.vocab_size)
    if head == "scalar":  # the exported model's pad, which decides where transformers reads a score
        model = dataclasses.replace(model, pad_id=tokenizer.pad_id)
    path = config.scratch_model or config.model_name_or_path
    model = context.on_mesh(model, head, path, dropout=not config.disable_dropout)
    model = dataclasses.replace(model, frozen_vision=images and config.freeze_vision_tower and not config.use_peft)
    if config.freeze_vision_tower and not images:
        raise UserError("freeze_vision_tower: the training data has no images, so there is no vision tower to freeze")
    if config.use_peft:
        model = dataclasses.replace(model, lora=adapters.lora_form(config, model, head))
        messages.append(adapters.describe("a new adapter", model.lora, config))
    return model, tokenizer, messages


def export_model(stage: SupervisedStage, params: Params, folder: str, name: str) -> dict[str, str]:
    """Writes the trained model to NAME/; with adapters as `adapters.export`."""
    files = {"generation": stage.generation, "source": stage.base_model}
    if stage.model.lora is None:
        path = f"{folder}/{name}"
        params = stage.model.with_lora(stage.base_params, params)
        stage.context.save_checkpoint(path, stage.model, params, stage.tokenizer, **files)
        return {name: path}
    return adapters.export(
        stage.context,
        folder,
        name,
        stage.model,
        params,
        base=stage.base_params,
        origin=adapters.origin_of(stage.base_model, stage.config.model_revision, stage.model.reads_images),
        tokenizer=stage.tokenizer,
        **files,
    )


def eval_name(source: str, metric: str) -> str:
    """The name of an evaluation set's metric; '' is the set without a name."""
    return f"eval_{source}/{metric}" if source else f"eval/{metric}"
