"""Adapters of a stage: their form by the options, what they start from, and their base params."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from rlhf_jax.config import PolicyConfig, StageConfig
from rlhf_jax.errors import UserError
from rlhf_jax.models import Model, lora
from rlhf_jax.models.io import hf
from rlhf_jax.models.options import AdapterOptions
from rlhf_jax.models.quantization import Kind
from rlhf_jax.stages.stage_context import StageContext
from rlhf_jax.types import Params

BASE, DEFAULT = "base", "default"
_ALIASES = {"lm_head": "embed_out"}  # transformers 5's name of GPT-NeoX's head


def lora_form(config: AdapterOptions, model: Model, kind: str) -> lora.Lora:
    """The form of a new adapter, by the options.

    Args:
      config: a stage's, with use_peft.
      model: that the adapter is for.
      kind: 'causal' or 'scalar': which head the model has.

    Raises:
      UserError: a layer or a module that the model does not have.
    """
    family = model.family
    targets = lora.resolve_targets(model, config.lora_target_modules, "lora_target_modules")
    names = []
    for module in config.modules_to_save or ():
        names.append(module if module in family.modules else _ALIASES.get(module, module))
        path = family.modules.get(names[-1])
        if path == ("embed_out",) and kind == "causal" and model.config.tie_word_embeddings:
            embedding = next(name for name, path in family.modules.items() if path == ("backbone", "embed_in"))
            raise UserError(
                f"modules_to_save: {module!r} is the embedding in this model (tie_word_embeddings); name "
                f"{embedding!r}, which trains both."
            )
        if path == ("score",) or (path == ("embed_out",) and kind == "scalar"):
            raise UserError(
                f"modules_to_save: {module!r} is no module of this stage's model; a score head is always trained in "
                "full."
            )
    saved = lora.resolve_modules_to_save(family, names, "modules_to_save")
    return lora.Lora(config.lora_r, config.lora_alpha, config.lora_dropout, targets, config.use_rslora, saved)


def adapter_paths(config: PolicyConfig) -> dict[str, str]:
    """The option `adapters` as {name: path}; UserError where an item is not NAME=PATH."""
    paths: dict[str, str] = {}
    for item in config.adapters:
        name, equals, path = item.partition("=")
        if not (name and equals and path):
            raise UserError(f"adapters: {item!r} must be NAME=PATH.")
        if name in (BASE, DEFAULT) or name in paths:
            why = "is given twice" if name in paths else "has a meaning of its own"
            raise UserError(f"adapters: the name {name!r} {why}; choose another.")
        paths[name] = path
    return paths


@dataclasses.dataclass(frozen=True)
class Start:
    """What a policy with adapters starts from.

    Attributes:
      path, revision: of the base; an adapter there is merged on load. A path of None: random weights.
      trained: name of the adapter that is trained further; None: a new one.
      reference: name of the adapter whose frozen copy is the reference; None: the base alone.
      paths: of the adapters, by their names.
    """

    path: str | None
    revision: str | None
    trained: str | None
    reference: str | None
    paths: dict[str, str]


def start_of(config: PolicyConfig, continues_adapter: bool) -> Start:
    """What the options make a policy start from.

    Args:
      config: a PolicyConfig with use_peft.
      continues_adapter: what start_adapter 'auto' does with an adapter at sft_model_path: True trains it further with
        its frozen copy as reference, False merges it.

    Raises:
      UserError: names the option.
    """
    paths = adapter_paths(config)
    path, revision = None if config.scratch_model else config.sft_model_path, config.model_revision
    is_adapter = path is not None and hf.is_adapter(path, revision)
    names = {"model_adapter_name": config.model_adapter_name, "ref_adapter_name": config.ref_adapter_name}
    if config.start_adapter == "auto":
        resumes = is_adapter and (continues_adapter or DEFAULT in names.values())
    else:
        resumes = is_adapter and config.start_adapter == "continue"
    if config.start_adapter == "continue" and not is_adapter:
        raise UserError(f"start_adapter 'continue', but sft_model_path {path} is no adapter to train further.")
    if resumes:
        paths = {DEFAULT: path, **paths}
        path, revision = hf.adapter_base(path, revision)
    for option, name in names.items():
        if name is not None and name not in paths and not (name == BASE and option == "ref_adapter_name"):
            present = ", ".join(paths) or "none"
            raise UserError(f"{option} {name!r} is no adapter of this run; there are: {present} (see adapters).")
    trained = config.model_adapter_name or (DEFAULT if resumes else None)
    reference = config.ref_adapter_name or (trained if continues_adapter else None)
    return Start(path, revision, trained, None if reference == BASE else reference, paths)


def quantized_kind(config: AdapterOptions) -> Kind | None:
    """How the layers' frozen kernels are stored; None: in the compute dtype."""
    return "int8" if config.load_in_8bit else "nf4" if config.load_in_4bit else None


def cast_base_fn(context: StageContext[StageConfig], model: Model) -> Callable[[Params], Params]:
    """Casts params to those of an adapter's frozen base; with load_in_8bit or load_in_4bit the layers' kernels
    are quantized."""
    kind = quantized_kind(context.config)
    if kind is None:
        return context.cast_frozen_fn(model)
    return lambda params: model.quantize(params, context.frozen_dtype, kind)


def cast_base(context: StageContext[StageConfig], model: Model, params: Params) -> Params:
    """Placed params by `cast_base_fn`; the same buffers where nothing changes."""
    return context.weights.transform_placed(model, cast_base_fn(context, model), params)


def new_adapter(context: StageContext[StageConfig], model: Model, base: Params, number: int) -> Params:
    """A new adapter of `model.lora`'s form on the mesh, drawn by the config's seed; `number` separates a stage's."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(context.config.seed), 8), number)
    return context.weights.init_lora(model, key, base)


def describe(what: str, form: lora.Lora, config: AdapterOptions) -> str:
    """One line on what is trained."""
    line = f"trains {what} of rank {form.r} on {', '.join(form.target_modules)}"
    if (kind := quantized_kind(config)) is not None and not config.export_merged:
        line += f"; the exported adapter is for the checkpoint, not for its {kind} form (export_merged false)"
    return line


@dataclasses.dataclass(frozen=True)
class PolicyAdapters:
    """The adapters of a policy, on the host.

    Attributes:
      start: see `Start`.
      trained, reference: (form, params) as read from their folders; None: a new adapter, and the base alone.
    """

    start: Start
    trained: tuple[lora.Lora, Params] | None
    reference: tuple[lora.Lora, Params] | None


def open_adapters(context: StageContext[PolicyConfig], policy: Model, continues_adapter: bool) -> PolicyAdapters:
    """Reads the adapters that a policy and its reference start from; they are small.

    Raises:
      UserError: names the option, or the file.
    """
    start = start_of(context.config, continues_adapter)
    if start.path is not None and start.trained is not None:
        base = hf.load_model(start.path, revision=start.revision, images=policy.reads_images)
        if base.config.tie_word_embeddings != policy.config.tie_word_embeddings:
            raise UserError(
                f"{start.paths[start.trained]} trains embedding and head apart, which are one in its base "
                f"{start.path}: give start_adapter merge."
            )
    read = {}
    for name in dict.fromkeys((start.trained, start.reference)):
        if name is not None:
            context.weights.loaded[start.paths[name], None] = None
            read[name] = hf.load_adapter(start.paths[name], policy)
    return PolicyAdapters(start, read.get(start.trained), read.get(start.reference))


def describe_policy(opened: PolicyAdapters, form: lora.Lora, config: PolicyConfig) -> str:
    """`describe` of a policy's adapter, and its reference."""
    start = opened.start
    what = f"adapter {start.trained} ({start.paths[start.trained]})" if opened.trained else "a new adapter"
    line = describe(what, form, config)
    if config.ref_model_path is None:
        line += "; the reference is " + (f"adapter {start.reference} as it is now" if start.reference else "the base")
    return line
