"""A stage that trains one model on a data set, one optimizer step a batch: SFT and reward models.

What is learned from a batch comes as a record (`SupervisedAlgorithm`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import jax

from rlhf_jax.algorithms import optimizer as optimizers
from rlhf_jax.algorithms.networks import Network
from rlhf_jax.config.batch_sizes import batch_arithmetic
from rlhf_jax.config.stages import SupervisedConfig
from rlhf_jax.models import Model
from rlhf_jax.models.placement import AbstractWeights
from rlhf_jax.parallel import sharding
from rlhf_jax.parallel.compile_ahead import CompileAhead, run_program, same_structure
from rlhf_jax.runtime.stopping import Tick, no_tick
from rlhf_jax.stages import adapters, export, open_models
from rlhf_jax.stages.algorithm_registry import Algorithm
from rlhf_jax.stages.open_models import Source
from rlhf_jax.stages.stage import Rows, Stage
from rlhf_jax.stages.stage_context import (
    StageContext,
    input_fingerprints,
    progress_metrics,
    state_shardings,
    update_key,
)
from rlhf_jax.stages.work import Work
from rlhf_jax.types import Params, TrainState

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedAlgorithm(Algorithm, Generic[ConfigT]):
    """An algorithm that learns from a data set. What one need not have has a body here.

    Its update: (Network, TrainState, batch, *, config, optimizer, key) -> (TrainState, metrics).

    Attributes beside those of `Algorithm`:
      head: 'causal' or 'scalar'.
    """

    KIND_OF_CONFIG = SupervisedConfig
    head: str = "causal"

    def load_rows(self, config: ConfigT, train_dataset) -> Any:
        """Training rows, for `load_data`."""
        return train_dataset

    def has_images(self, config: ConfigT, rows) -> bool:
        """Whether the model is to read images."""
        return False

    def load_data(self, config: ConfigT, model, tokenizer, rows, eval_dataset) -> tuple[Any, dict[str, Any], Any]:
        """(training data, evaluation sets by name, demonstrations that score 0 on average after training, or None)"""
        raise NotImplementedError

    def early_stopping_metric(self, eval_sets: dict[str, Any]) -> str | None:
        """As `Stage.early_stopping_metric`."""
        return None

    def start_messages(self, context: StageContext[ConfigT]) -> list[str]:
        """Lines on what training starts from."""
        return []

    def score_std(self, config: ConfigT) -> float | None:
        """The standard deviation of a new score head; None: the default."""

    def build_measure(self, stage: SupervisedStage) -> Callable:
        """(trained params, data set, tick) -> (metrics, margins [N] of pairs or None)"""
        raise NotImplementedError

    def calibration_rows(self, name: str, margins: Any) -> list[dict[str, Any]]:
        """Rows of calibration/STEP.jsonl of an evaluation set."""
        return []

    def work(self, config: ConfigT, model: Model, tokens: int) -> Work | None:
        """The work of an update with `tokens` tokens; None if it is not known."""
        return None

    def texts(self, tokenizer, batch, row: int) -> dict[str, Any]:
        """The texts of a row of a batch on the host, by name."""
        raise NotImplementedError

    def exported(self, stage: SupervisedStage, trained: Params) -> tuple[str, Params]:
        """(name of the exported model, its trained params)"""
        raise NotImplementedError


class SupervisedStage(Stage):
    """The stage of SFT and reward models.

    Attributes beside those of `Stage`:
      algorithm: the record.
      context: config, mesh and weights.
      network: the model with its head and the form of its adapter, and the frozen base; its params are the state's.
      generation: what an exported policy says of generation; None: the model has a scalar head.
      train_data, eval_sets: rows.
      optimizer: of the run.
      update_step: the jitted update.
      run: calls it, as `run_program`.
    """

    config: SupervisedConfig
    context: StageContext[SupervisedConfig]
    run: Callable[..., Any] = staticmethod(run_program)

    def __init__(
        self,
        config: SupervisedConfig,
        algorithm: SupervisedAlgorithm,
        *,
        train_dataset=None,
        eval_dataset=None,
        optimizer=None,
        weights=None,
        template_date=None,
        compile_ahead=False,
    ):
        # --- everything that can be refused, before a weight is read
        self.algorithm, self.name, self.progress = algorithm, algorithm.name, algorithm.progress
        self.context = context = StageContext.open(config, weights)
        self.config, self.weights, self.mesh = context.config, context.weights, context.mesh
        rows = algorithm.load_rows(self.config, train_dataset)
        model, tokenizer, self.messages = self._open_model(algorithm.has_images(self.config, rows))
        self.tokenizer = dataclasses.replace(tokenizer, template_date=template_date)
        self.generation = None
        if algorithm.head == "causal":
            self.generation = export.exported_generation(self.source, self.tokenizer)
        data = algorithm.load_data(self.config, model, self.tokenizer, rows, eval_dataset)
        self.train_data, self.eval_sets, self.normalizing_data = data
        self.early_stopping_metric = algorithm.early_stopping_metric(self.eval_sets)
        self.messages += [str(self.train_data.report), *algorithm.start_messages(context)]
        self.total_steps = batch_arithmetic(self.config, self.rows).updates

        # --- params and programs
        if optimizer is None:
            self.optimizer = optimizers.make_optimizer(self.config, self.total_steps)
        else:
            self.optimizer = optimizers.user_optimizer(optimizer)
        foreseen = self._begin_to_compile(model) if compile_ahead else None
        try:
            self.network, self.state = self._load(context, model)
        except BaseException:
            self.close()
            raise
        if not same_structure(foreseen, self.state):
            self.update_step = self._jitted(self.state, self.config)
        self.measure = algorithm.build_measure(self)
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
    def source(self) -> Source:
        """What training starts from."""
        return Source(self.config.starting_model, self.config.model_revision, self.config.scratch_model)

    @property
    def base_model(self) -> str | None:
        """As `Stage.base_model`."""
        return None if self.source.shape else self.source.path

    def _open_model(self, images: bool) -> tuple[Any, Any, list[str]]:
        """(model on the mesh, tokenizer, messages), by its config alone. `images`: whether it is to read them."""
        config, context, head = self.config, self.context, self.algorithm.head
        model, tokenizer, _ = open_models.open_on_mesh(
            context,
            self.source,
            head,
            with_images=images,
            dropout=not config.disable_dropout,
            longest=config.max_length,
            option="--max_length",
        )
        messages = [open_models.attention_message(model)]
        if head == "scalar":  # the exported model's pad, which decides where transformers reads a score
            model = dataclasses.replace(model, pad_id=tokenizer.pad_id)
        model = dataclasses.replace(model, frozen_vision=open_models.freezes_tower(config, images))
        if config.use_peft:
            model = dataclasses.replace(model, lora=adapters.lora_form(config, model, head))
            messages.append(adapters.describe("a new adapter", model.lora, config))
        return model, tokenizer, messages

    def _load(self, context: StageContext[SupervisedConfig], model: Model) -> tuple[Network, TrainState]:
        """The network with its frozen base, and the train state."""
        cast = model.lora is not None and not model.lora.modules_to_save
        params = open_models.load_params(
            context,
            model,
            self.source,
            self.algorithm.head,
            cast_on_load=adapters.cast_base_fn(context, model) if cast else None,
            score_std=self.algorithm.score_std(self.config),
        )
        base = None
        if model.lora is not None:
            score = {name: params.pop(name) for name in ("score",) if name in params}  # trained in full
            base = adapters.cast_base(context, model, params)
            params = {**adapters.new_adapter(context, model, params, 0), **score}
        elif model.frozen_vision:
            params, frozen = model.split_frozen(params)
            base = context.cast_frozen(model, frozen)
        return Network(model, base=base), context.initial_state({"model": params}, {"model": model}, self.optimizer)

    def _begin_to_compile(self, model: Model) -> TrainState:
        """Begins to compile the update, for params that are not loaded yet; returns the shapes of its state."""
        context = dataclasses.replace(self.context, weights=AbstractWeights(self.mesh))
        network, state = self._load(context, model)
        self.update_step = self._jitted(state, self.config)
        arguments = state, network, self._batch_shapes(None), self.optimizer.peaks
        self.compiling = CompileAhead(lambda build: build("update", self.update_step, *arguments), self.mesh)
        self.run = self.compiling.run
        return state

    # --- an update

    def _jitted(self, state: TrainState, config: SupervisedConfig) -> Any:
        """The update, with the shardings of `state`."""
        return jax.jit(self._update_fn(config), donate_argnums=0, out_shardings=(state_shardings(state), None))

    def _update_fn(self, config: SupervisedConfig):
        """(TrainState, Network, batch, peaks of the learning rate) -> (TrainState, metrics), pure."""
        rows, with_peaks = self.rows, self.optimizer.with_peaks

        def update_step(state: TrainState, network: Network, batch: Any, peaks: tuple[Any, ...]):
            optimizer = with_peaks(peaks)
            rate = None if optimizer.learning_rate is None else optimizer.learning_rate(state.step)
            key = update_key(state.seed, state.step)
            state, metrics = self.algorithm.update(network, state, batch, config=config, optimizer=optimizer, key=key)
            progress = progress_metrics(state, rate, ("learning_rate",), rows)
            return state, {**metrics, **progress, "nonfinite/in_a_row": state.nonfinite}

        return update_step

    def train_step(self, state: TrainState, step: int, tick: Tick = no_tick):
        """As `Stage.train_step`, of one batch of rows."""
        size = self.config.batch_size
        batch = self.train_data.batch(self.config.seed, step, size, self.context.local_rows(size))
        placed = self.context.place_share(batch, size)
        state, metrics = self.run("update", self.update_step, state, self.network, placed, self.optimizer.peaks)
        return state, metrics, {}

    def work(self, step: int, tokens: int) -> dict[str, Work]:
        """As `Stage.work`."""
        update = self.algorithm.work(self.config, self.network.model, tokens)
        return {} if update is None else {"update": update}

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
        """Metrics on each evaluation set, as `eval/...`, or as `eval_NAME/...` where the sets have names."""
        metrics, self._margins = {}, {}
        for name, source in self.eval_sets.items():
            values, margins = self.measure(state.params["model"], source, tick)
            if margins is not None:
                self._margins[name] = margins
            metrics.update({eval_name(name, key): value for key, value in values.items()})
        return metrics

    def calibration(self) -> list[dict[str, Any]]:
        """As `Stage.calibration`: `calibration.reliability` of each set of pairs, with the set's name."""
        rows = (self.algorithm.calibration_rows(name, margins) for name, margins in self._margins.items())
        return [row for some in rows for row in some]

    def nonfinite_rows(self, step: int) -> list[dict[str, Any]]:
        """All rows of the update's batch, since the gradient depends on all of them: for each its row of the data, or
        the rows of a pack, and its texts."""
        config, size = self.config, self.config.batch_size
        batch = self.train_data.batch(config.seed, step - 1, size)
        rows = self.train_data.rows_of(config.seed, step - 1, size)
        return [
            {**self.train_data.source_rows(int(row)), **self.algorithm.texts(self.tokenizer, batch, i)}
            for i, row in enumerate(rows)
        ]

    # --- what the run is made of

    def inputs(self) -> dict[str, str]:
        """As `Stage.inputs`."""
        return input_fingerprints(self.context, self.train_data, self.eval_sets)

    def frozen(self) -> dict[str, Params]:
        """As `Stage.frozen`."""
        return {} if self.network.base is None else {"base": self.network.base}

    def trace_programs(self, build, *, rows: Rows = "allowed", micro_batch_size: int | None = None) -> None:
        """As `Stage.trace_programs`."""
        resident, update_step = (self.state, self.network), self.update_step
        if micro_batch_size is not None:
            update_step = self._jitted(self.state, dataclasses.replace(self.config, micro_batch_size=micro_batch_size))
        columns = self.config.max_length if rows == "allowed" else None
        batch = self._batch_shapes(self.train_data.widest if rows == "longest" else columns)
        build("update", update_step, *resident, batch, self.optimizer.peaks, resident=resident)

    def _batch_shapes(self, columns: int | None) -> Any:
        """Shapes of a batch whose rows have this many columns; None: those of the first batch."""

        def shape(x):
            rest = x.shape[1:] if columns is None or x.ndim != 2 else (columns,)
            return self.context.row_shape(x.shape[0], *rest, dtype=x.dtype)

        return jax.tree.map(shape, self.train_data.batch(self.config.seed, 0, self.config.batch_size))

    def export(self, state: TrainState, folder: str) -> dict[str, str]:
        """Writes the final model as a Hugging Face checkpoint with the tokenizer: {name: path}."""
        name, trained = self.algorithm.exported(self, state.params["model"])
        return export.export_model(
            self.context,
            folder,
            name,
            self.network,
            trained,
            self.tokenizer,
            source=self.source,
            generation=self.generation,
        )


def eval_name(source: str, metric: str) -> str:
    """The name of an evaluation set's metric; '' is the set without a name."""
    return f"eval_{source}/{metric}" if source else f"eval/{metric}"
