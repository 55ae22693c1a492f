"""What all stages are built with: the config, the mesh, and params placed on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms.optimizer import Optimizer
from rlhf_jax.config import StageConfig, batch_sizes
from rlhf_jax.models import quantization
from rlhf_jax.models.io import hf
from rlhf_jax.models.placement import Weights
from rlhf_jax.parallel import local_rows, sharding
from rlhf_jax.runtime.run_folder import MODEL, TEMPLATE_DATE
from rlhf_jax.types import Array, Params, TrainState

ConfigT = TypeVar("ConfigT", bound=StageConfig, covariant=True)
OpenedT = TypeVar("OpenedT", bound=StageConfig)


@dataclasses.dataclass(frozen=True)
class StageContext(Generic[ConfigT]):
    """A stage's config and the mesh that its params are placed on.

    Attributes:
      config: with its micro_batch_size set.
      weights: makes and reads params in their shards; knows the mesh.
    """

    config: ConfigT
    weights: Weights

    @staticmethod
    def open(config: OpenedT, weights: Weights | None = None) -> StageContext[OpenedT]:
        """A context on `weights`' mesh; None: real weights on the config's mesh."""
        if config.load_in_8bit:
            quantization.check_installed("load_in_8bit")
        if weights is None:
            weights = Weights(sharding.make_mesh(config.mesh_data, config.mesh_fsdp, config.mesh_tensor))
        platform = weights.mesh.devices.flat[0].platform
        return StageContext(batch_sizes.for_devices(config, sharding.row_shards(weights.mesh), platform), weights)

    @property
    def mesh(self):
        """The mesh of all models."""
        return self.weights.mesh

    # --- params

    @property
    def frozen_dtype(self):
        """The dtype of frozen params: the compute dtype."""
        return jnp.dtype(self.config.dtype)

    def cast_frozen_fn(self, model) -> Callable[[Params], Params]:
        """Casts params to `frozen_dtype`: less memory, and the forward pass would cast them in any case."""
        return lambda params: model.cast_params(params, self.frozen_dtype)

    def cast_frozen(self, model, params: Params) -> Params:
        """Placed params in `frozen_dtype`; the same buffers where they have it already."""
        return self.weights.transform_placed(model, self.cast_frozen_fn(model), params)

    def place_params(self, model, params: Params) -> Params:
        """Params on the host onto the mesh by the family's rules."""
        return self.weights.place(params, self.weights.shardings(model, params))

    def initial_state(self, params: Params, models_by_role: dict[str, Any], optimizer: Optimizer) -> TrainState:
        """A fresh TrainState of placed params; the optimizer state is created in its shards.

        Args:
          params: {role: params}, what is trained.
          models_by_role: {role: model}, whose sharding rules the optimizer state follows too.
        """
        shapes = jax.eval_shape(optimizer.init, params)
        rules = tuple(
            (f"^{role}.*?{rule}", spec) for role, model in models_by_role.items() for rule, spec in model.param_rules
        )
        # Not strict: factored optimizers keep vectors in place of matrices.
        shardings = sharding.shardings(shapes, rules, self.mesh, strict=False)
        opt_state = self.weights.run(optimizer.init, params, where=shardings)
        scalars = {
            "step": jnp.int32(0),
            "episodes": jnp.int32(0),
            "seed": jnp.uint32(self.config.seed),
            "kl_coef": jnp.float32(self.config.kl_coef),
            "tokens": jnp.uint32(0),
            "nonfinite": jnp.int32(0),
        }
        scalars = self.weights.place(scalars, sharding.replicated(self.mesh))
        return TrainState(params=params, opt_state=opt_state, **scalars)

    # --- batches

    def place_batch(self, batch: Any) -> Any:
        """A host batch onto the mesh, rows over the data axes; each process gives the whole batch."""
        return sharding.shard_batch(batch, self.mesh)

    def row_shape(self, *shape: int, dtype: Any = jnp.int32) -> Any:
        """A jax.ShapeDtypeStruct of an array of a batch on the mesh: [rows, ...]."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.batch_sharding(self.mesh))

    def local_rows(self, count: int) -> np.ndarray:
        """The rows of a batch of `count` that this process prepares."""
        return local_rows.held_rows(self.mesh, count)

    def place_share(self, batch: Any, count: int) -> Any:
        """This process' rows of a batch of `count` onto the mesh, with those of the others."""
        return local_rows.place(batch, self.mesh, count)


def update_key(seed: Array, step: int | Array) -> Array:
    """The key of an update: fold_in(key(seed), step)."""
    return jax.random.fold_in(jax.random.key(seed), step)


def state_shardings(state: TrainState) -> Any:
    """The sharding of each leaf of the train state: pinned as the output of every update, so that it compiles once."""
    return jax.tree.map(lambda x: x.sharding, state)


def progress_metrics(state: TrainState, rate: Array | None, names: tuple[str, ...], episodes_per_epoch: int):
    """Learning rate (by `names`; None: the optimizer is the user's), episodes and epochs after an update."""
    epoch = state.episodes.astype(jnp.float32) / episodes_per_epoch
    rates = {} if rate is None else dict.fromkeys(names, rate)
    return {**rates, "episode": state.episodes, "epoch": epoch}


def input_fingerprints(
    context: StageContext,
    train_data: Any,
    eval_sets: dict[str, Any],
    template_date: str | None = None,
    stop_ids: tuple[int, ...] | None = None,
) -> dict[str, str]:
    """The fingerprint of every data set and starting checkpoint of a run, by name; also the date that its chat
    templates print, if they print one, and the ids of stop_token_ids, which may come from a file.

    Args:
      template_date: printed by the template of a reward model.
    """
    sets = {"training data": train_data}
    sets |= {f"evaluation data {name}".rstrip(): source for name, source in eval_sets.items()}
    fingerprints = {name: source.fingerprint for name, source in sets.items()}
    for path, revision in context.weights.loaded:
        fingerprints[f"{MODEL}{path}"] = hf.fingerprint(path, revision=revision)
    for date in (template_date, *(source.report.template_date for source in sets.values())):
        if date is not None:
            fingerprints[TEMPLATE_DATE] = date
    if stop_ids is not None:
        fingerprints["stop_token_ids"] = ", ".join(map(str, stop_ids))
    return fingerprints
