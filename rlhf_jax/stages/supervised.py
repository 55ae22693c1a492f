"""What the two supervised stages share: one model, one optimizer step a batch, and any number of evaluation sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from rlhf_jax.config.batch_sizes import batch_arithmetic
from rlhf_jax.metrics import calibration
from rlhf_jax.models.io import hf
from rlhf_jax.parallel import sharding
from rlhf_jax.stages import adapters, base
from rlhf_jax.types import Array, Metrics, Params, TrainState


class SupervisedStage(base.Stage):
    """Data, params and one update of a model; what is learned from a batch comes from a subclass."""

    head = ""
    """Which head a model from scratch is made with: 'causal' or 'scalar'."""

    def __init__(self, config, *, train_dataset=None, eval_dataset=None, optimizer=None, weights=None):
        super().__init__(config, optimizer=optimizer, weights=weights)
        self._open_model()
        self._load_data(train_dataset, eval_dataset)
        self.report.append(str(self.train_data.report))
        self.total_steps = batch_arithmetic(config, self.rows).updates
        rules = base.state_rules({"model": self.model})
        self.state = self.initial_state({"model": self._starting_params()}, rules, config.seed)
        self._update = jax.jit(self._pure_update, donate_argnums=0, out_shardings=(self.state_shardings(), None))
        self._compile()
        self.margins: Any = None  # of the pairs that `measure` has seen last, where there are pairs
        self._judged: dict[str, Any] = {}  # those of each evaluation set

    # --- to be defined by each stage

    def _load_data(self, train_dataset, eval_dataset) -> None:
        """Sets `train_data` and `eval_sets`, a dict by name."""
        raise NotImplementedError

    def _starting_params(self) -> Params:
        """The params to start from, on the mesh."""
        raise NotImplementedError

    def _compile(self) -> None:
        """Wraps what evaluation needs."""
        raise NotImplementedError

    def learn(
        self, state: TrainState, beneath: Params | None, batch: Any, key: Array, rate: Array
    ) -> tuple[TrainState, Metrics]:
        """(state, metrics) after one batch, adapters on `beneath`; pure."""
        raise NotImplementedError

    def shown(self, batch: Any, row: int) -> dict[str, Any]:
        """The texts of a row of a batch on the host."""
        raise NotImplementedError

    def measure(self, params: Params, source: Any) -> dict[str, float]:
        """Metrics of a model on a whole data set."""
        raise NotImplementedError

    # --- shared

    def _open_model(self):
        """Config and tokenizer only: data that can be refused is, before a weight is read."""
        c = self.config
        if c.scratch_model:
            self.tokenizer = base.open_tokenizer(c, None, None)
            self.model = base.scratch_model(c, self.tokenizer.vocab_size, c.max_length)
        else:
            self.model = hf.load_model(c.model_name_or_path, revision=c.model_revision)
            base.check_context(self.model, c.max_length, "--max_length", c.model_name_or_path)
            self.tokenizer = base.open_tokenizer(c, c.model_name_or_path, self.model.config.vocab_size)
        self.model = self.lay(self.model, self.head)
        if c.use_peft:
            self.model = dataclasses.replace(self.model, lora=adapters.form_of(c, self.model, self.head))
            self.report.append(adapters.told("a new adapter", self.model.lora, c))

    def _write_adapted(self, folder: str, name: str, params: Params, kind: str) -> dict[str, str]:
        """`adapters.write` of the model."""
        origin = adapters.origin_of(self.base_model, self.config.model_revision)
        return adapters.write(self, folder, name, self.model, params, kind, self.beneath, origin)

    def _adapt(self, params: Params) -> Params:
        """Sets `base` to params and gives those that are trained: the params themselves without adapters."""
        if self.model.lora is None:
            return params
        self.base = {"model": adapters.beneath(self, self.model, params)}
        return adapters.fresh(self, self.model, params, 0)

    def _load_params(self, kind: str) -> Params:
        """Params from the config's model, read as `kind`, or fresh ones."""
        c = self.config
        if c.scratch_model:
            return self.weights.init(self.model, jax.random.key(c.seed), (self.head,))
        adapted = self.model.lora is not None and not self.model.lora.modules_to_save
        as_read = adapters.as_base(self, self.model) if adapted else None
        return self.weights.load(self.model, c.model_name_or_path, kind, c.model_revision, as_read)

    @property
    def beneath(self) -> Params | None:
        """The params that the model's adapters stand on."""
        return self.base["model"] if self.base else None

    def _pure_update(self, state, beneath, batch):
        rate = self.rate(state.step)
        state, metrics = self.learn(state, beneath, batch, self.key(state.seed, state.step), rate)
        return state, {**metrics, **self.clock_metrics(state, rate), "nonfinite/in_a_row": state.nonfinite}

    def programs(self, build) -> None:
        """The program of an update, as `PolicyStage.programs`: of the longest rows that there may be."""
        batch = self.train_data.batch(self.config.seed, 0, self.config.batch_size)

        def rows(x):
            shape = (x.shape[0], self.config.max_length) if x.ndim == 2 else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self.batch_sharding)

        given = self.state, self.beneath
        build("update", self._update, *given, jax.tree.map(rows, batch), resident=given)

    def train_step(self, state, step):
        """One batch of rows."""
        size = self.config.batch_size
        batch = self.train_data.batch(self.config.seed, step, size, self.here(size))
        state, metrics = self._update(state, self.beneath, self.place_share(batch, size))
        return state, metrics, {}

    def offenders(self, step):
        """All rows of the batch, as a gradient is of them all: {"row": of the data, and what `shown` tells}."""
        c, size = self.config, self.config.batch_size
        batch = self.train_data.batch(c.seed, step - 1, size)
        rows = self.train_data.rows_of(c.seed, step - 1, size)
        return [{"row": int(row), **self.shown(batch, i)} for i, row in enumerate(rows)]

    def calibration(self):
        """`calibration.reliability` of each evaluation set of pairs: {"set": its name, ...} each."""
        sets = {name: margins for name, margins in self._judged.items() if margins is not None}
        return [
            {"set": name, **row}
            for name, margins in sets.items()
            for row in calibration.reliability(margins)
            if row["pairs"]
        ]

    def in_batches(self, source) -> Iterator[tuple[Any, int]]:
        """A data set in order, in batches of one size: (batch on the mesh, its real rows); what is past them fills."""
        part = sharding.row_shards(self.mesh)
        size = min(self.config.batch_size, -(-max(8, len(source)) // part) * part)
        for start in range(0, len(source), size):
            self.tick()
            batch = self.place_share(source.in_order(start, size, self.here(size)), size)
            yield batch, min(size, len(source) - start)

    def evaluate(self, state):
        """`measure` on each evaluation set, as `eval/...`, or as `eval_NAME/...` where the sets have names."""
        found, self._judged = {}, {}
        for name, source in self.eval_sets.items():
            values = self.measure(state.params["model"], source)
            self._judged[name] = self.margins
            found.update({eval_name(name, key): value for key, value in values.items()})
        return found


def eval_name(source: str, metric: str) -> str:
    """What a metric of an evaluation set is called; '' is the set without a name."""
    return f"eval_{source}/{metric}" if source else f"eval/{metric}"
