"""What a stage with adapters has beside its models: their form, the base that they stand on, and their files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax

from rlhf_jax.data import save_tokenizer
from rlhf_jax.errors import UserError
from rlhf_jax.models import Model, lora
from rlhf_jax.models.io import hf, peft
from rlhf_jax.parallel import multihost
from rlhf_jax.types import Params

Origin = tuple[str, str | None]
"""A checkpoint and its revision on the hub."""

BASE, DEFAULT = "base", "default"
_ALIASES = {"lm_head": "embed_out"}


def form_of(config, model: Model, kind: str) -> lora.Lora:
    """The form of a new adapter, by the options.

    Args:
      config: a stage's, with use_peft.
      model: that it belongs on.
      kind: 'causal' or 'scalar': which head the model has.

    Raises:
      UserError: a layer or a module that the model does not have.
    """
    family = model.family
    targets = lora.resolve_targets(family, config.lora_target_modules, "lora_target_modules")
    names = [_ALIASES.get(name, name) for name in config.modules_to_save or ()]
    absent = {"score"} | ({"embed_out"} if kind == "scalar" or model.config.tie_word_embeddings else set())
    if wrong := [name for name in names if name in absent]:
        raise UserError(
            f"modules_to_save: {wrong[0]!r} is no module of this stage's model; a score head is always trained in full."
        )
    saved = lora.resolve_modules_to_save(family, names, "modules_to_save")
    return lora.Lora(config.lora_r, config.lora_alpha, config.lora_dropout, targets, config.use_rslora, saved)


def named(config) -> dict[str, str]:
    """The option `adapters` as {name: path}; UserError for what is none."""
    found: dict[str, str] = {}
    for item in config.adapters:
        name, equals, path = item.partition("=")
        if not (name and equals and path):
            raise UserError(f"adapters: {item!r} must be NAME=PATH.")
        if name in (BASE, DEFAULT) or name in found:
            why = "is given twice" if name in found else "has a meaning of its own"
            raise UserError(f"adapters: the name {name!r} {why}; choose another.")
        found[name] = path
    return found


@dataclasses.dataclass(frozen=True)
class Start:
    """What a policy with adapters starts from.

    Attributes:
      path, revision: of the base; an adapter there is merged as it is read. A path of None: random weights.
      trained: name of the adapter that is trained on with; None: a new one.
      reference: name of the adapter whose frozen copy is the reference; None: the base alone.
      paths: of the adapters, by their names.
    """

    path: str | None
    revision: str | None
    trained: str | None
    reference: str | None
    paths: dict[str, str]


def start_of(config, trains_on: bool) -> Start:
    """Where the options have a policy start.

    Args:
      config: a PPOConfig or RLOOConfig with use_peft.
      trains_on: what start_adapter 'auto' does with an adapter at sft_model_path: train on with it, its frozen copy the
        reference; else it is merged.

    Raises:
      UserError: names the option.
    """
    c, paths = config, named(config)
    path, revision = None if c.scratch_model else c.sft_model_path, c.model_revision
    arrived = path is not None and hf.is_adapter(path, revision)
    wanted = {"model_adapter_name": c.model_adapter_name, "ref_adapter_name": c.ref_adapter_name}
    goes_on = arrived and (trains_on if c.start_adapter == "auto" else c.start_adapter == "continue")
    if arrived and c.start_adapter == "auto":
        goes_on = goes_on or DEFAULT in wanted.values()
    if c.start_adapter == "continue" and not arrived:
        raise UserError(f"start_adapter 'continue', but sft_model_path {path} is no adapter to train on with.")
    if goes_on:
        paths = {DEFAULT: path, **paths}
        path, revision = hf.adapter_base(path, revision)
    for option, name in wanted.items():
        if name is not None and name not in paths and not (name == BASE and option == "ref_adapter_name"):
            there = ", ".join(paths) or "none"
            raise UserError(f"{option} {name!r} is no adapter of this run; there are: {there} (see adapters).")
    trained = c.model_adapter_name or (DEFAULT if goes_on else None)
    reference = c.ref_adapter_name or (trained if trains_on else None)
    return Start(path, revision, trained, None if reference == BASE else reference, paths)


def origin_of(path: str | None, revision: str | None) -> Origin | None:
    """What an adapter may name as its base: the checkpoint at `path`; None for random weights and merged adapters."""
    return None if path is None or hf.is_adapter(path, revision) else (path, revision)


def as_base(stage: Any, model: Model) -> Callable[[Params], Params]:
    """Makes of params what adapters of a stage stand on: frozen ones, with load_in_8bit the layers' kernels in int8."""
    if not stage.config.load_in_8bit:
        return stage.as_frozen(model)
    return lambda params: model.quantize_int8(params, stage.frozen_dtype)


def beneath(stage: Any, model: Model, params: Params) -> Params:
    """Placed params `as_base`; themselves where they are that already."""
    return stage.weights.transform_placed(model, as_base(stage, model), params)


def fresh(stage: Any, model: Model, base: Params, number: int) -> Params:
    """A new adapter of `model.lora`'s form on the mesh, drawn by the config's seed; `number` tells a stage's apart."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(stage.config.seed), 8), number)
    return stage.weights.init_lora(model, key, base)


def write(
    stage: Any, folder: str, name: str, model: Model, params: Params, kind: str, base: Params, origin: Origin | None
) -> dict[str, str]:
    """Writes a trained model: NAME/ with its adapter merged, and NAME_adapter/ the adapter; without export_merged NAME/
    is the adapter. A base that is no checkpoint by itself is written to NAME_base/. Every process must call it.

    Args:
      stage: config, tokenizer, save.
      folder: of the run.
      name: 'policy', 'value' or 'reward_model'.
      model: with `lora`.
      params: the adapters.
      kind: 'causal' or 'scalar'.
      base: the params that they stand on.
      origin: the checkpoint that these are; None: none by itself.

    Returns:
      {name: path} of what is to be used further, and of the others.
    """
    paths, plain, dtype = {}, dataclasses.replace(model, lora=None), stage.frozen_dtype
    if origin is None:
        path = paths[f"{name}_base"] = os.path.join(folder, f"{name}_base")
        wide = stage.weights.transform_placed(plain, lambda base: lora.merge_lora(base, dtype), base)
        stage.save(path, plain, {**wide, "score": params["score"]} if kind == "scalar" else wide, kind)
        del wide
        origin = path, None
    merged_too = stage.config.export_merged
    adapter = os.path.join(folder, f"{name}_adapter" if merged_too else name)
    norm = None
    if kind == "scalar" and "bias" in params["score"]:
        # PEFT's classifier has no bias either: it goes into the last layer norm, as in hf.save.
        norm = model.with_lora(base, params)["backbone"]["final_layer_norm"]
        norm = hf.fold_score_bias(norm, params["score"])
    peft.save(adapter, model, params, kind=kind, base=origin[0], revision=origin[1], norm=norm)
    if multihost.is_main():
        save_tokenizer(stage.tokenizer, adapter)
    multihost.wait_for_all("export of adapters")
    if merged_too:
        paths[f"{name}_adapter"], paths[name] = adapter, os.path.join(folder, name)
        merged = stage.weights.transform_placed(
            plain, lambda both: lora.merge_lora(model.with_lora(*both), dtype), (base, params)
        )
        stage.save(paths[name], plain, merged, kind)
    else:
        paths[name] = adapter
    return paths


def load(stage: Any, path: str, model: Model) -> tuple[lora.Lora, dict[str, Any]]:
    """An adapter from its folder, on the host: (its form, its params)."""
    stage.weights.loaded[path, None] = None
    return hf.load_adapter(path, model)


def told(what: str, form: lora.Lora, config) -> str:
    """What is trained, in words."""
    line = f"trains {what} of rank {form.r} on {', '.join(form.target_modules)}"
    if config.load_in_8bit and not config.export_merged:
        line += "; what is written stands on the checkpoint, not on its int8 form that is trained on (export_merged)"
    return line


def open_policy(stage: Any) -> None:
    """Gives a policy stage its `start`, its `policy` the form of its adapter, and what is read of adapters, which are
    small: `adapter` and `ref_adapter`, each (form, params on the host), None for a new one and for none."""
    stage.start = start = start_of(stage.config, stage.trains_on)
    found = {
        name: load(stage, start.paths[name], stage.policy)
        for name in dict.fromkeys((start.trained, start.reference))
        if name is not None
    }
    stage.adapter, stage.ref_adapter = found.get(start.trained), found.get(start.reference)
    form = stage.adapter[0] if stage.adapter else form_of(stage.config, stage.policy, "causal")
    stage.policy = dataclasses.replace(stage.policy, lora=form)
    what = f"adapter {start.trained} ({start.paths[start.trained]})" if stage.adapter else "a new adapter"
    line = told(what, form, stage.config)
    if stage.config.ref_model_path is None:
        line += "; the reference is " + (f"adapter {start.reference} as it is now" if start.reference else "the base")
    stage.report.append(line)


def write_policy(stage: Any, folder: str, params: Params) -> dict[str, str]:
    """`write` of the policy of a stage."""
    params = {key: value for key, value in params.items() if key != "score"}
    origin = origin_of(stage.start.path, stage.start.revision)
    return write(stage, folder, "policy", stage.policy, params, "causal", stage.base["policy"], origin)
