"""Opens a model: by its configs alone, so that bad input is refused before a weight is read; then its params.

Training stages, evaluation, inference and dry runs open models here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data, models
from rlhf_jax.config import StageConfig
from rlhf_jax.data import Tokenizer, check_tokenizer_fits_model, images, load_tokenizer
from rlhf_jax.data.images import ImageProcessor
from rlhf_jax.errors import UserError
from rlhf_jax.models import Model, attention_kernels
from rlhf_jax.models.io import hf
from rlhf_jax.models.placement import Weights
from rlhf_jax.stages.stage_context import StageContext
from rlhf_jax.types import Params


class Source(NamedTuple):
    """Where a model comes from.

    Attributes:
      path, revision: a folder or hub name.
      shape: of random weights, in place of a checkpoint: a Pythia size or [FAMILY:]LAYERSxWIDTHxHEADS[xKV].
    """

    path: str | None
    revision: str | None = None
    shape: str | None = None

    @property
    def name(self) -> str:
        """Its name in messages."""
        return str(self.shape or self.path)

    @property
    def files(self) -> str:
        """The folder of a checkpoint's files; for an adapter, the folder of its base."""
        return str(hf.resolve_base(hf.resolve(str(self.path), self.revision, weights=False), weights=False)[0])

    @property
    def reads_images(self) -> bool:
        """Whether it is a model of images and text."""
        if self.shape is not None:
            return self.shape.partition(":")[0].lower() in models.IMAGE_FAMILIES
        return not hf.is_text_model(self.files)


class Opened(NamedTuple):
    """A model without params.

    Attributes:
      model: the Model.
      tokenizer: its own, or the configured one.
      processor: of images; None: it reads text.
    """

    model: Model
    tokenizer: Tokenizer
    processor: ImageProcessor | None = None


def open_model(
    source: Source, *, tokenizer: str | None = None, with_images: bool = False, longest: int = 0, option: str = ""
) -> Opened:
    """A model and its tokenizer.

    Args:
      tokenizer: a folder or hub name; None: the model's own.
      with_images: read a model of images and text with its vision tower; else as its text model.
      longest: tokens of the longest sequence.
      option: that sets `longest`, for errors.

    Raises:
      UserError: a file is missing or not supported, tokenizer and model do not fit, or the context is too short.
    """
    if source.shape is not None:
        opened_tokenizer = open_tokenizer(tokenizer, source, None)
        token = images.find_image_token_id(opened_tokenizer) if with_images else None
        return Opened(scratch_model(source.shape, opened_tokenizer.vocab_size, longest, token), opened_tokenizer)
    model = hf.load_model(str(source.path), revision=source.revision, images=with_images)
    check_context(model, longest, option, source.name)
    return Opened(model, open_tokenizer(tokenizer, source, model.config.vocab_size))


def open_tokenizer(name: str | None, source: Source, model_rows: int | None) -> Tokenizer:
    """The tokenizer of that name, else the model's.

    Args:
      name: a folder or hub name.
      model_rows: rows of its embedding; None for random weights.
    """
    path = None if source.shape is not None else source.path
    name = name or path
    if name is None:
        raise UserError("--tokenizer_name_or_path is needed with --scratch_model: there is no model to take it from")
    tokenizer = load_tokenizer(name, source.revision if name == path else None, vocab_size=model_rows)
    if path is not None and name != path:
        check_tokenizer_fits_model(tokenizer, path, source.revision)
    return tokenizer


def scratch_model(shape: str, tokenizer_rows: int, longest: int, image_token_id: int | None = None) -> Model:
    """A model for random weights.

    Args:
      shape: of `Source`.
      tokenizer_rows: ids of the tokenizer, its pad included; rounded up to a multiple of 128 (Pythia: 50,304).
      longest: tokens of the longest sequence.
      image_token_id: of a model that is to read images; None: it reads text.
    """
    rows = 128 * math.ceil(tokenizer_rows / 128)
    if "x" in shape:
        options = {} if image_token_id is None else {"image_token_id": image_token_id}
        # Rotary positions cost nothing: as much context as Pythia, so that later stages may use longer texts.
        model = models.custom_shape(shape, rows, max(2048, longest), **options)
    else:
        model = models.pythia(shape, vocab_size=rows)
    # GPT-NeoX's "small init" (Nguyen and Salazar 2019), which Pythia was trained from: transformers' 0.02 needs twice
    # the updates at width 128.
    small = math.sqrt(2 / (5 * model.config.hidden_size))
    return dataclasses.replace(model, config=dataclasses.replace(model.config, initializer_range=small))


def check_context(model: Model, needed: int, option: str, path: str) -> None:
    """Refuses a run whose sequences are longer than the model's context.

    Raises:
      UserError: with the arithmetic.
    """
    limit = model.config.max_position_embeddings
    if needed > limit:
        raise UserError(f"{option} = {needed} tokens, but {path} has a context of {limit}. Shorten one of them")


# --- images


def open_processor(model: Model, tokenizer: Tokenizer, source: Source) -> ImageProcessor:
    """The image processor of a model that reads images; for random weights an image is one tile."""
    vision = model.config.vision
    options = {"image_token_id": model.config.image_token_id, "tokens": vision.tokens, "size": vision.image_size}
    if source.shape is not None:
        return images.plain_processor(tokenizer, **options)
    return images.load_processor(source.files, tokenizer, name=source.name, **options)


def wants_images(source: Source, rows: data.Rows, columns: Sequence[str]) -> bool:
    """Whether a model is to read images: it is of images and text, and its data has images.

    Args:
      columns: of its conversations.

    Raises:
      UserError: the data has images, but the model is of text.
    """
    if not images.holds_images(rows, columns):
        return False
    if source.reads_images:
        return True
    if images.holds_decoded(rows, columns):
        raise UserError(
            f"{rows.name} has images, but {source.name} reads text alone: remove them from the "
            "data, or give a model that reads images"
        )
    return False  # a column of this name that reward functions read


# --- on the mesh


def on_mesh(
    model: Model,
    weights: Weights,
    head: str,
    name: str,
    *,
    attn_implementation: str = "auto",
    dtype: str = "float32",
    dropout: bool = False,
) -> Model:
    """The model on the mesh of `weights`.

    Args:
      model: without params.
      head: causal or scalar.
      name: of the model, for errors.
      attn_implementation, dtype: of its forward passes.
      dropout: whether it is trained with its dropout.

    Raises:
      UserError: a dimension does not divide, or dtype or attn_implementation does not support model or devices.
    """
    model = model.on(weights.mesh)
    weights.shardings(model, jax.eval_shape(lambda key: model.init(key, heads=(head,)), jax.random.key(0)))
    config, device = model.family.decoder_config(model.config), weights.mesh.devices.flat[0]
    if dtype == "float16" and device.platform == "tpu":
        raise UserError("--dtype float16: TPUs multiply in bfloat16 and float32. Give --dtype bfloat16 or float32")
    attention = attention_kernels.resolved(attn_implementation, config, dtype, device, dropout=dropout)
    if reason := attention_kernels.unsupported(attention, config, dtype, device, dropout=dropout):
        raise UserError(
            f"--attn_implementation {attention} cannot compute the attention of {name}: {reason}. "
            f"Give --attn_implementation auto"
        )
    return dataclasses.replace(model, attn_implementation=attention)


def open_on_mesh(
    context: StageContext[StageConfig], source: Source, head: str, *, dropout: bool = False, **options: Any
) -> Opened:
    """`open_model`, on the mesh of a stage, whose config may set the tokenizer; `options` are those of `open_model`."""
    config = context.config
    model, tokenizer, processor = open_model(source, tokenizer=config.tokenizer_name_or_path, **options)
    return Opened(place(context, model, head, source.name, dropout=dropout), tokenizer, processor)


def place(context: StageContext[StageConfig], model: Model, head: str, name: str, *, dropout: bool = False) -> Model:
    """`on_mesh` by a stage's options."""
    config = context.config
    return on_mesh(
        model,
        context.weights,
        head,
        name,
        attn_implementation=config.attn_implementation,
        dtype=config.dtype,
        dropout=dropout,
    )


def attention_message(model: Model) -> str:
    """A line on the attention of a stage's model, which is on the mesh."""
    return f"attention over whole rows: {model.attn_implementation}"


def freezes_tower(config: StageConfig, with_images: bool) -> bool:
    """Whether a stage trains a model without its vision tower; a UserError where freeze_vision_tower has no tower."""
    if config.freeze_vision_tower and not with_images:
        raise UserError("freeze_vision_tower: the training data has no images, so there is no vision tower to freeze")
    return with_images and config.freeze_vision_tower and not config.use_peft


# --- params


def load_params(
    context: StageContext[StageConfig],
    model: Model,
    source: Source,
    head: str,
    *,
    cast_on_load: Callable[[Params], Params] | None = None,
    score_std: float | None = None,
) -> Params:
    """The params of a source on the mesh.

    Args:
      context: of the stage; random weights are drawn by its config's seed.
      head: 'causal'; 'scalar': the checkpoint's, or a new one where it has none.
      cast_on_load: as `Weights.load`.
      score_std: of a new scalar head, as `new_score_head`.
    """
    weights = context.weights
    if source.shape is not None:
        params = weights.init(model, jax.random.key(context.config.seed), (head,))
        return {**params, "score": new_score_head(context, model, score_std)} if head == "scalar" else params
    if head == "scalar" and not weights.has_scalar_head(str(source.path), source.revision):
        backbone = weights.load(model, str(source.path), "backbone", source.revision, cast_on_load)
        return {**backbone, "score": new_score_head(context, model, score_std)}
    return weights.load(model, str(source.path), head, source.revision, cast_on_load)


def new_score_head(context: StageContext[StageConfig], model: Model, std: float | None = None) -> Params:
    """A fresh scalar head on the mesh, N(0, std) by the config's seed.

    Args:
      model: of width D.
      std: None is 1 / sqrt(D + 1) (Stiennon et al. 2020, N+ detail 11).

    Returns:
      {"kernel" [D, 1] float32}
    """
    width = model.config.hidden_size
    std = 1.0 / math.sqrt(width + 1) if std is None else std
    key = jax.random.fold_in(jax.random.key(context.config.seed), 7)
    kernel = std * jax.random.normal(key, (width, 1), jnp.float32)
    return context.place_params(model, {"score": {"kernel": np.asarray(kernel)}})["score"]


def score_head_message(context: StageContext[StageConfig], source: Source) -> str:
    """A line on the scalar head of `load_params`."""
    path = source.path
    has_head = context.weights.has_scalar_head(str(path), source.revision)
    return f"the score head is that of {path}" if has_head else f"the score head is new: {path} has none"
