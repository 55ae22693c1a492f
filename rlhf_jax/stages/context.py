"""What all stages are built with: the config, the mesh, and params placed on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data, models
from rlhf_jax.algorithms.optimizer import Optimizer
from rlhf_jax.config import batch_sizes
from rlhf_jax.data import check_tokenizer_fits_model, images, load_tokenizer, save_tokenizer
from rlhf_jax.errors import UserError
from rlhf_jax.inference import open_processor, processor_folder
from rlhf_jax.models import attention_kernels, quantization
from rlhf_jax.models.io import generation_config, hf
from rlhf_jax.models.placement import Weights
from rlhf_jax.parallel import local_rows, multihost, sharding
from rlhf_jax.runtime.run_folder import TEMPLATE_DATE
from rlhf_jax.types import Array, Params, TrainState


@dataclasses.dataclass(frozen=True)
class StageContext:
    """A stage's config and the mesh that its params are placed on.

    Attributes:
      config: with its micro_batch_size set.
      weights: makes and reads params in their shards; knows the mesh.
    """

    config: Any
    weights: Weights

    @classmethod
    def open(cls, config, weights: Weights | None = None) -> StageContext:
        """A context on `weights`' mesh; None: real weights on the config's mesh."""
        if config.load_in_8bit:
            quantization.check_installed("load_in_8bit")
        if weights is None:
            weights = Weights(sharding.make_mesh(config.mesh_data, config.mesh_fsdp, config.mesh_tensor))
        platform = weights.mesh.devices.flat[0].platform
        return cls(batch_sizes.with_micro_batch(config, sharding.row_shards(weights.mesh), platform), weights)

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

    def on_mesh(self, model, head: str, path: str, *, dropout: bool = False):
        """The model on the mesh, with the config's attention.

        Args:
          model: without params.
          head: causal or scalar.
          path: where the model comes from, for errors.
          dropout: whether it is trained with its dropout.

        Raises:
          UserError: a dimension does not divide, or attn_implementation does not support the model or the devices.
        """
        model = model.on(self.mesh)
        self.weights.shardings(model, jax.eval_shape(lambda key: model.init(key, heads=(head,)), jax.random.key(0)))
        name, config = self.attn_implementation, model.family.decoder_config(model.config)
        platform = self.mesh.devices.flat[0].platform
        if reason := attention_kernels.unsupported(name, config, self.config.dtype, platform, dropout=dropout):
            raise UserError(
                f"--attn_implementation {name} cannot compute the attention of {path}: {reason}. "
                f"Give --attn_implementation auto"
            )
        return dataclasses.replace(model, attn_implementation=name)

    @property
    def attn_implementation(self) -> str:
        """That of every model of the run: `auto` is blocked, as long as no kernel is measured to be faster."""
        name = self.config.attn_implementation
        return "blocked" if name == "auto" else name

    @property
    def attention_message(self) -> str:
        """A line on the attention of the run."""
        return f"attention over whole rows: {self.attn_implementation}"

    def place_params(self, model, params: Params) -> Params:
        """Params on the host onto the mesh by the family's rules."""
        return self.weights.place(params, self.weights.shardings(model, params))

    def new_score_head(self, model, std: float | None = None) -> Params:
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

    def load_scalar(
        self,
        model,
        path: str,
        revision: str | None,
        cast_on_load: Callable[[Params], Params] | None = None,
        std: float | None = None,
    ) -> Params:
        """A checkpoint's params with its scalar head, or with a new one where it has none.

        Args:
          model, path, revision, cast_on_load: as `Weights.load`.
          std: of a new head, as `new_score_head`.
        """
        if self.weights.has_scalar_head(path, revision):
            return self.weights.load(model, path, "scalar", revision, cast_on_load)
        backbone = self.weights.load(model, path, "backbone", revision, cast_on_load)
        return {**backbone, "score": self.new_score_head(model, std)}

    def score_head_message(self, path: str, revision: str | None) -> str:
        """A line on the head of `load_scalar`."""
        kept = self.weights.has_scalar_head(path, revision)
        return f"the score head is that of {path}" if kept else f"the score head is new: {path} has none"

    def save_checkpoint(
        self, path: str, model, params: Params, kind: str, tokenizer, source: str | None = None
    ) -> None:
        """Writes a Hugging Face checkpoint with the tokenizer: the first process does, the others wait. `source`: the
        checkpoint whose image processor is copied, for a model that reads images."""
        ids = {"pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id}
        hf.save(path, model, params, kind=kind, extra_config=ids)
        if multihost.is_main():
            save_tokenizer(tokenizer, path)
            if kind == "causal":
                save_stop_ids(tokenizer, path)
            if model.reads_images and source is not None:
                images.copy_processor(processor_folder(source, self.config.model_revision), path)
            elif model.reads_images:
                open_processor(model, tokenizer, None, None).hf.save_pretrained(path)
        multihost.wait_for_all("export")

    def initial_state(self, params: Params, models_by_role: dict[str, Any], optimizer: Optimizer) -> TrainState:
        """A fresh TrainState of placed params; the optimizer state is created in its shards.

        Args:
          params: {role: params}, what is trained.
          models_by_role: {role: model}, whose sharding rules the optimizer state follows too.
          optimizer: of the run.
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
            "kl_coef": jnp.float32(getattr(self.config, "kl_coef", 0.0)),
            "tokens": jnp.uint32(0),
            "nonfinite": jnp.int32(0),
        }
        scalars = self.weights.place(scalars, sharding.replicated(self.mesh))
        return TrainState(params=params, opt_state=opt_state, **scalars)

    # --- batches

    def place_batch(self, batch: Any) -> Any:
        """A host batch onto the mesh, rows over the data axes; each process gives the whole batch."""
        return sharding.shard_batch(batch, self.mesh)

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


def save_stop_ids(tokenizer, folder: str) -> None:
    """Writes the ids of stop_token_ids beside a policy, if the option is given."""
    if tokenizer.stop_ids is not None:
        generation_config.write(folder, tokenizer.stop_ids, tokenizer.pad_id)


def inputs_of(
    context: StageContext,
    train_data: Any,
    eval_sets: dict[str, Any],
    template_date: str | None = None,
    stop_ids: tuple[int, ...] | None = None,
) -> dict[str, str]:
    """The fingerprint of every data set and starting checkpoint of a run, by what it is; the date that its chat
    templates print, if they do, and the ids of stop_token_ids, which a file may hold.

    Args:
      context, train_data, eval_sets: of the stage.
      template_date: printed by the template of a reward model.
      stop_ids: of the tokenizer.
    """
    sets = {"training data": train_data}
    sets |= {f"evaluation data {name}".rstrip(): source for name, source in eval_sets.items()}
    fingerprints = {name: source.fingerprint for name, source in sets.items()}
    for path, revision in context.weights.loaded:
        fingerprints[f"model {path}"] = hf.fingerprint(path, revision=revision)
    for date in (template_date, *(source.report.template_date for source in sets.values())):
        if date is not None:
            fingerprints[TEMPLATE_DATE] = date
    if stop_ids is not None:
        fingerprints["stop_token_ids"] = ", ".join(map(str, stop_ids))
    return fingerprints


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


def reads_images(path: str | None, revision: str | None, scratch: str | None = None) -> bool:
    """Whether a model is of images and text; the arguments are those of `wants_images`."""
    if scratch is not None:
        return scratch.partition(":")[0].lower() in models.IMAGE_FAMILIES
    return not hf.is_text_model(processor_folder(path, revision))


def wants_images(
    path: str | None, revision: str | None, rows: data.Rows, columns: Sequence[str], scratch: str | None = None
) -> bool:
    """Whether a run trains a model that reads images: its checkpoint is of images and text, and its data has images.

    Args:
      path, revision: of the checkpoint.
      rows: training data.
      columns: of its conversations.
      scratch: scratch_model, in place of a checkpoint.

    Raises:
      UserError: the data has images, but the checkpoint is of text.
    """
    if not images.holds_images(rows, columns):
        return False
    if reads_images(path, revision, scratch):
        return True
    if images.holds_decoded(rows, columns):
        raise UserError(
            f"{rows.name} has images, but {scratch or path} reads text alone: remove them from the "
            "data, or give a model that reads images"
        )
    return False  # a column of this name that reward functions read


def scratch_model(config, tokenizer_rows: int, max_positions: int, image_token_id: int | None = None):
    """A model with random weights from `scratch_model`: a Pythia size or LAYERSxWIDTHxHEADS.

    Args:
      config: scratch_model.
      tokenizer_rows: ids of the tokenizer, its pad included; rounded up to a multiple of 128 (Pythia: 50,304).
      max_positions: longest sequence of the run.
      image_token_id: of a model that is to read images; None: it reads text.

    Returns:
      models.Model.
    """
    rows = 128 * math.ceil(tokenizer_rows / 128)
    if "x" in config.scratch_model:
        options = {} if image_token_id is None else {"image_token_id": image_token_id}
        # Rotary positions cost nothing: as much context as Pythia, so that later stages may use longer texts.
        model = models.custom_shape(config.scratch_model, rows, max(2048, max_positions), **options)
    else:
        model = models.pythia(config.scratch_model, vocab_size=rows)
    # GPT-NeoX's "small init" (Nguyen and Salazar 2019), which Pythia was trained from: transformers' 0.02 needs twice
    # the updates at width 128.
    small = math.sqrt(2 / (5 * model.config.hidden_size))
    return dataclasses.replace(model, config=dataclasses.replace(model.config, initializer_range=small))


def check_context(model, needed: int, option: str, path: str) -> None:
    """Refuses a run whose sequences are longer than the model's context.

    Raises:
      UserError: with the arithmetic.
    """
    limit = model.config.max_position_embeddings
    if needed > limit:
        raise UserError(f"{option} = {needed} tokens, but {path} has a context of {limit}. Shorten one of them")
