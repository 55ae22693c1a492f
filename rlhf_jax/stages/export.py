"""Writes trained models: Hugging Face checkpoints with their tokenizer, and adapters."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from rlhf_jax.algorithms.networks import Network
from rlhf_jax.config import StageConfig
from rlhf_jax.data import images, save_tokenizer
from rlhf_jax.models import Model, lora
from rlhf_jax.models.io import generation_config, hf, peft
from rlhf_jax.models.io.generation_config import Generation
from rlhf_jax.parallel import multihost
from rlhf_jax.stages.open_models import Source, open_processor
from rlhf_jax.stages.stage_context import StageContext
from rlhf_jax.types import Params


def exported_generation(source: Source, tokenizer) -> Generation:
    """`generation_config.exported` of a policy with this tokenizer, which starts from `source`."""
    ids = {"eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id, "stop_ids": tokenizer.stop_ids}
    return generation_config.exported(None if source.shape else source.path, source.revision, **ids)


def export_model(
    context: StageContext[StageConfig],
    folder: str,
    name: str,
    network: Network,
    trained: Params,
    tokenizer: Any,
    *,
    source: Source,
    generation: Generation | None = None,
    base: Source | None = None,
) -> dict[str, str]:
    """Writes a trained model. Every process must call it.

    A model that is trained in full goes to NAME/. Of one with adapters NAME/ has them merged and NAME_adapter/ is the
    adapter; without export_merged NAME/ is the adapter. A base that is not itself a checkpoint is written to
    NAME_base/.

    Args:
      name: 'policy', 'value' or 'reward_model'.
      network: the model and its frozen base.
      tokenizer: written beside each.
      source: what training started from, whose image processor is copied.
      generation: of a model with a causal head; None: a scalar head.
      base: what adapters are on, where it is not `source`: an adapter there was merged or is trained further.

    Returns:
      {name: path} of the model to use further, and of the others.
    """
    files = {"tokenizer": tokenizer, "generation": generation, "source": source}
    if network.model.lora is None:
        path = os.path.join(folder, name)
        save_checkpoint(context, path, network.model, network.with_trained(trained).params, **files)
        return {name: path}
    if generation is not None:
        trained = {key: value for key, value in trained.items() if key != "score"}  # a shared backbone's
    paths = {}
    origin = adapter_origin(source if base is None else base, network.model.reads_images)
    if origin is None:
        base_path = paths[f"{name}_base"] = os.path.join(folder, f"{name}_base")
        _save_base(context, base_path, network, trained, **files)
        origin = Source(f"{context.config.run_dir}/{name}_base")  # as the run spells it, wherever `folder` is
    export_merged = context.config.export_merged
    adapter = os.path.join(folder, f"{name}_adapter" if export_merged else name)
    _save_adapter(adapter, network, trained, origin, tokenizer, generation)
    if export_merged:
        paths[f"{name}_adapter"], paths[name] = adapter, os.path.join(folder, name)
        plain, dtype = dataclasses.replace(network.model, lora=None), context.frozen_dtype

        def merge(both: tuple[Params, Params]) -> Params:
            return lora.merge_lora(network.replace(base=both[0]).with_trained(both[1]).params, dtype)

        merged = context.weights.transform_placed(plain, merge, (network.base, trained))
        save_checkpoint(context, paths[name], plain, merged, **files)
    else:
        paths[name] = adapter
    return paths


def _save_base(context: StageContext[StageConfig], path: str, network: Network, trained: Params, **files: Any) -> None:
    """The base of an adapter as a checkpoint, in the compute dtype; a scalar one with the trained head."""
    plain, dtype = dataclasses.replace(network.model, lora=None), context.frozen_dtype
    wide = context.weights.transform_placed(plain, lambda base: lora.merge_lora(base, dtype), network.base)
    wide = {**wide, "score": trained["score"]} if files["generation"] is None else wide
    save_checkpoint(context, path, plain, wide, **files)


def _save_adapter(
    path: str, network: Network, trained: Params, origin: Source, tokenizer: Any, generation: Generation | None
) -> None:
    norm, kind = None, "scalar" if generation is None else "causal"
    if kind == "scalar" and "bias" in trained["score"]:
        # PEFT's classifier has no bias either: it goes into the bias of the last layer norm, if any, as in hf.save.
        norm = network.with_trained(trained).params["backbone"]["final_layer_norm"]
        norm = hf.fold_score_bias(norm, trained["score"]) if "bias" in norm else None
    peft.save(path, network.model, trained, kind=kind, base=origin.path, revision=origin.revision, norm=norm)
    if multihost.is_main():
        save_tokenizer(tokenizer, path)
        if generation is not None:
            generation.write(path)
    multihost.wait_for_all("export of adapters")


def adapter_origin(source: Source, with_images: bool = False) -> Source | None:
    """What an adapter may name as its base: the source; None for random weights, merged adapters, and, without
    `with_images`, the text model of a checkpoint of images and text, in which PEFT would look for other names."""
    path, revision = source.path, source.revision
    if source.shape is not None or path is None or hf.is_adapter(path, revision):
        return None
    return source if with_images or hf.is_text_model(path, revision) else None


def save_checkpoint(
    context: StageContext[StageConfig],
    path: str,
    model: Model,
    params: Params,
    *,
    tokenizer: Any,
    generation: Generation | None,
    source: Source,
) -> None:
    """Writes a Hugging Face checkpoint with the tokenizer: the first process does, the others wait.

    Args:
      model, params: with a causal head, or else a scalar one.
      tokenizer, generation, source: as `export_model`.
    """
    kind = "scalar" if generation is None else "causal"
    eos_id = tokenizer.eos_id if generation is None else generation.eos_token_id
    ids = {"pad_token_id": tokenizer.pad_id, "eos_token_id": eos_id}
    hf.save(path, model, params, kind=kind, extra_config=ids)
    if multihost.is_main():
        save_tokenizer(tokenizer, path)
        if generation is not None:
            generation.write(path)
        if model.reads_images and source.shape is None:
            images.copy_processor(source.files, path)
        elif model.reads_images:
            open_processor(model, tokenizer, source).hf.save_pretrained(path)
    multihost.wait_for_all("export")
