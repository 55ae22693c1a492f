"""What the stages share: loading a starting model onto the mesh, the train state, and the learning-rate clock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import models
from rlhf_jax.algorithms import microbatch
from rlhf_jax.config import batch_sizes
from rlhf_jax.data import check_tokenizer_fits_model, load_tokenizer, save_tokenizer
from rlhf_jax.errors import UserError
from rlhf_jax.models import quantization
from rlhf_jax.models.io import hf
from rlhf_jax.models.placement import Weights
from rlhf_jax.parallel import local_rows, multihost, sharding
from rlhf_jax.runtime import stopping
from rlhf_jax.types import Array, Params, TrainState

Shown = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""Rows of completions, and what there is to say of the tokens of the first of them."""


class Stage:
    """One stage of training.

    Attributes:
      config: its frozen config.
      total_steps: updates of the whole run.
      progress: names of the metrics for the terminal, in order.
      state: the TrainState to start from; the loop owns it afterwards.
      base: what adapters stand on, frozen: {role: params}; None: the models are trained in full.
      phase: what an update is at: generate, score, experience or update.
      tick: is called at safe points, between the phases of an update and the batches of an evaluation; it may raise.
    """

    name = ""
    progress: tuple[str, ...] = ()
    # Lower is better for a validation loss; the quantity early stopping watches.
    watched: str | None = None
    rate_names: tuple[str, ...] = ("learning_rate",)
    """Names of the learning rate among the metrics."""

    def __init__(self, config, *, optimizer=None, weights: Weights | None = None):
        """`weights`: where params come from, and the mesh that they lie on; None: real ones on the config's mesh."""
        if config.load_in_8bit:
            quantization.check_installed("load_in_8bit")
        if weights is None:
            weights = Weights(sharding.make_mesh(config.mesh_data, config.mesh_fsdp, config.mesh_tensor))
        self.weights, self.mesh = weights, weights.mesh
        platform = self.mesh.devices.flat[0].platform
        self.config = config = batch_sizes.with_micro_batch(config, sharding.row_shards(self.mesh), platform)
        self.batch_sharding = sharding.batch_sharding(self.mesh)
        self.custom_optimizer = optimizer is not None
        self.optimizer = optimizer if self.custom_optimizer else microbatch.make_optimizer(config)
        self.total_steps = 0
        self.state: TrainState | None = None
        self.base: dict[str, Params] | None = None
        self.report: list[str] = []
        self.tick: stopping.Tick = stopping.no_tick
        self.phase = "update"

    # --- to be defined by each stage

    def train_step(self, state: TrainState, step: int) -> tuple[TrainState, dict[str, Array], dict[str, float]]:
        """One update: (state, metrics still on the device, seconds by phase where the phases wait for each other)."""
        raise NotImplementedError

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Metrics on the evaluation split, names prefixed with 'eval/'; empty without one."""
        return {}

    def final_metrics(self, state: TrainState) -> dict[str, float]:
        """Metrics worth computing once, at the end."""
        return {}

    @property
    def rows(self) -> int:
        """Rows of the training data."""
        return len(self.train_data)

    @property
    def base_model(self) -> str | None:
        """What training starts from; None: random weights."""
        return None if self.config.scratch_model else self.config.model_name_or_path

    def samples(self, state: TrainState) -> Shown:
        """Sample completions for completions/STEP.jsonl; empty when the stage has none."""
        return [], []

    def training_completions(self) -> Shown:
        """The responses of the last update, where the config asks to show them; else empty."""
        return [], []

    def calibration(self) -> list[dict[str, Any]]:
        """How far the last evaluation's confidence was right, for calibration/STEP.jsonl; empty when it has none."""
        return []

    def offenders(self, step: int) -> list[dict[str, Any]]:
        """The rows of update `step` (1-based, one of the last two), for nonfinite/STEP.jsonl; those that are not finite
        where the stage can tell. Every process must call it."""
        return []

    def close(self) -> None:
        """Ends what the stage started: threads, connections."""

    def frozen(self) -> dict[str, Params]:
        """Params of the models that are never trained, by what they are."""
        return {"base": self.base["model"]} if self.base else {}

    def inputs(self) -> dict[str, str]:
        """What a run is made of beside its options: {what: which}, of every data set and starting checkpoint."""
        sets = {"training data": self.train_data}
        sets |= {f"evaluation data {name}".rstrip(): source for name, source in self.eval_sets.items()}
        found = {what: source.fingerprint for what, source in sets.items()}
        for path, revision in self.weights.loaded:
            found[f"model {path}"] = hf.fingerprint(path, revision=revision)
        return found

    def export(self, state: TrainState, folder: str) -> dict[str, str]:
        """Writes the final models under `folder`: {what: path}."""
        raise NotImplementedError

    # --- shared

    @property
    def frozen_dtype(self):
        """Of models that are never trained: that of the forward pass."""
        return jnp.dtype(self.config.dtype)

    def as_frozen(self, model) -> Callable[[Params], Params]:
        """Rounds params to `frozen_dtype`: half the memory, and what a forward pass rounds to in any case."""
        return lambda params: model.cast_params(params, self.frozen_dtype)

    def rounded(self, model, params: Params) -> Params:
        """Placed params `as_frozen`; themselves where they are that already."""
        return self.weights.transform_placed(model, self.as_frozen(model), params)

    def save(self, path: str, model, params: Params, kind: str) -> None:
        """A Hugging Face checkpoint of placed params with the tokenizer. One process writes it, and all wait for it."""
        ids = {"pad_token_id": self.tokenizer.pad_id, "eos_token_id": self.tokenizer.eos_id}
        hf.save(path, model, params, kind=kind, extra_config=ids)
        if multihost.is_main():
            save_tokenizer(self.tokenizer, path)
        multihost.wait_for_all("export")

    def key(self, state_seed: Array, step: int | Array) -> Array:
        """The key of an update: fold_in(key(seed), step)."""
        return jax.random.fold_in(jax.random.key(state_seed), step)

    def rate(self, step: Array) -> Array:
        """Learning rate of update `step`; an optimizer given by the user brings its own, with optax's sign."""
        if self.custom_optimizer:
            return jnp.float32(-1.0)
        return microbatch.learning_rate(self.config, step, self.total_steps)

    def clock_metrics(self, state: TrainState, rate: Array) -> dict[str, Array]:
        """Where the run stands after an update: learning rate, episodes, passes over the data."""
        epoch = state.episodes.astype(jnp.float32) / self.episodes_per_pass
        return {**dict.fromkeys(self.rate_names, rate), "episode": state.episodes, "epoch": epoch}

    @property
    def rows_per_update(self) -> int:
        """Rows of the data that an update takes."""
        return self.config.batch_size

    @property
    def episodes_per_pass(self) -> int:
        """What a pass over the data adds to `episodes`."""
        return self.rows

    def lay(self, model, *heads: str):
        """The model on the stage's mesh; UserError, with the param and the numbers, where it does not divide."""
        model = model.on(self.mesh)
        self.weights.shardings(model, jax.eval_shape(lambda key: model.init(key, heads=heads), jax.random.key(0)))
        return model

    def place_params(self, model, params: Params) -> Params:
        """Params on the host onto the mesh by the family's rules."""
        return self.weights.place(params, self.weights.shardings(model, params))

    def new_score(self, model, std: float | None) -> Params:
        """A fresh scalar head on the mesh, N(0, std) by the config's seed.

        Args:
          model: of width D.
          std: None is 1 / sqrt(D + 1) (Stiennon et al. 2020, N+ detail 11).

        Returns:
          {"kernel" [D, 1] float32}
        """
        width = model.config.hidden_size
        std = 1.0 / math.sqrt(width + 1) if std is None else std
        key = jax.random.fold_in(jax.random.key(self.config.seed), 7)
        kernel = std * jax.random.normal(key, (width, 1), jnp.float32)
        return self.place_params(model, {"score": {"kernel": np.asarray(kernel)}})["score"]

    def place_batch(self, batch: Any) -> Any:
        """A host batch onto the mesh, rows over the data axes; each process gives the whole batch."""
        return sharding.shard_batch(batch, self.mesh)

    def here(self, count: int) -> np.ndarray:
        """The rows of a batch of so many that this process prepares."""
        return local_rows.here(self.mesh, count)

    def place_share(self, batch: Any, count: int) -> Any:
        """This process' rows of a batch of `count` onto the mesh, with those of the others."""
        return local_rows.place(batch, self.mesh, count)

    def initial_state(self, params: Params, rules, seed: int) -> TrainState:
        """A fresh TrainState around placed params; the optimizer state is created in its shards."""
        shapes = jax.eval_shape(self.optimizer.init, params)
        # Not strict: factored optimizers keep vectors in the place of matrices.
        where = sharding.shardings(shapes, rules, self.mesh, strict=False)
        opt_state = self.weights.run(self.optimizer.init, params, where=where)
        kl_coef = getattr(self.config, "kl_coef", 0.0)
        scalars = {
            "step": jnp.int32(0),
            "episodes": jnp.int32(0),
            "seed": jnp.uint32(seed),
            "kl_coef": jnp.float32(kl_coef),
            "tokens": jnp.uint32(0),
            "nonfinite": jnp.int32(0),
        }
        scalars = self.weights.place(scalars, sharding.replicated(self.mesh))
        return TrainState(params=params, opt_state=opt_state, **scalars)

    def state_shardings(self) -> Any:
        """Where each leaf of the train state lies: pinned as the output of every update, so that it compiles once."""
        return jax.tree.map(lambda x: x.sharding, self.state)


def state_rules(models: dict[str, Any]) -> sharding.Rules:
    """The sharding rules of a TrainState's params, {role: params}, each by those of its own model."""
    return tuple((f"^{role}.*?{rule}", spec) for role, model in models.items() for rule, spec in model.param_rules)


def open_tokenizer(config, model_path: str | None, model_rows: int | None):
    """The tokenizer of a stage: its own option, else the model's.

    Args:
      config: tokenizer_name_or_path, model_revision.
      model_path: where the model comes from.
      model_rows: rows of its embedding; None for a model from scratch.

    Returns:
      data.Tokenizer.
    """
    name = config.tokenizer_name_or_path or model_path
    if name is None:
        raise UserError("--tokenizer_name_or_path is needed with --scratch_model: there is no model to take it from")
    revision = config.model_revision if name == model_path else None
    tokenizer = load_tokenizer(name, revision, vocab_size=model_rows)
    if model_path is not None and name != model_path:
        check_tokenizer_fits_model(tokenizer, model_path, config.model_revision)
    return tokenizer


def scratch_model(config, tokenizer_rows: int, max_positions: int):
    """A model of random weights from `scratch_model`: a Pythia size or LAYERSxWIDTHxHEADS.

    Args:
      config: scratch_model.
      tokenizer_rows: ids of the tokenizer, its pad included; rounded up to a multiple of 128 (Pythia: 50,304).
      max_positions: longest sequence of the run.

    Returns:
      models.Model.
    """
    rows = 128 * math.ceil(tokenizer_rows / 128)
    if "x" in config.scratch_model:
        # Rotary positions cost nothing: as much context as Pythia, so that later stages may use longer texts.
        model = models.custom_shape(config.scratch_model, rows, max(2048, max_positions))
    else:
        model = models.pythia(config.scratch_model, vocab_size=rows)
    # GPT-NeoX's "small init" (Nguyen and Salazar 2019), which Pythia was trained from: transformers' 0.02 needs twice
    # the updates at width 128.
    small = math.sqrt(2 / (5 * model.config.hidden_size))
    return dataclasses.replace(model, config=dataclasses.replace(model.config, initializer_range=small))


def check_context(model, needed: int, what: str, path: str) -> None:
    """Refuses a run whose sequences are longer than the model's context.

    Raises:
      UserError: with the arithmetic.
    """
    limit = model.config.max_position_embeddings
    if needed > limit:
        raise UserError(f"{what} = {needed} tokens, but {path} has a context of {limit}. Shorten one of them")
