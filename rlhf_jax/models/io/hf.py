"""Hugging Face checkpoints in and out, without torch.

In: hub names with a revision or local folders; safetensors or old .bin files, single or sharded; causal models,
`GPTNeoXForSequenceClassification` (`score`), and the N+ implementation's `ScalarModel` (`lm_backbone.*`,
`scalar_head` with a bias, and an offset `bias` in the config that is subtracted from every score; Huang et al. 2024,
arXiv:2403.17031). Out: checkpoints that transformers 4 and 5 load with the same logits.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import jax
import numpy as np
from huggingface_hub import errors as hub_errors

from rlhf_jax import storage
from rlhf_jax.errors import UserError
from rlhf_jax.models.families.hf_config import warn_once
from rlhf_jax.models.families.image_text import WRAPPERS, is_image_text, text_tensors
from rlhf_jax.models.io import peft
from rlhf_jax.models.io.safetensors import (
    DTYPES,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    Source,
    folder_fingerprint,
    open_weights,
    read_json,
    write_weights,
)
from rlhf_jax.models.io.shards import FileParam, HostParam, gather_to_host, read_all, read_shards
from rlhf_jax.models.model import HEADS, Model
from rlhf_jax.models.registry import FAMILIES
from rlhf_jax.parallel.multihost import is_main
from rlhf_jax.types import Params

CONFIG = "config.json"
KINDS = ("causal", "scalar", "backbone")
_CAUSAL_HEADS = ("embed_out.weight", "lm_head.weight")  # the published name and that of transformers 5's module
_SCORE, _SCALAR_WEIGHT, _SCALAR_BIAS = "score.weight", "scalar_head.weight", "scalar_head.bias"
# A score's bias, which transformers has no place for and warns of; it shifts all scores alike.
_SCORE_BIAS = "score.bias"
_HEAD_NAMES = (*_CAUSAL_HEADS, _SCORE, _SCORE_BIAS, _SCALAR_WEIGHT, _SCALAR_BIAS)
_SCALAR_PREFIX = "lm_backbone."


# --- resolve ---------------------------------------------------------------------------------------------------------


def resolve(
    name_or_path: str | Path, revision: str | None = None, subfolder: str | None = None, *, weights: bool = True
) -> Path:
    """The local folder of a checkpoint: the folder itself, or the hub repository downloaded to the cache.

    Downloads JSON files and, with `weights`, safetensors, or .bin files where there are no safetensors. huggingface_hub
    reads HF_ENDPOINT and HF_HUB_OFFLINE. A folder in a bucket is copied to the cache in the same way. Raises a
    UserError when it is neither a folder nor on the hub.
    """
    patterns = ("*.json", "*.safetensors", "*.bin") if weights else ("*.json",)
    path = Path(storage.local_copy(str(name_or_path), patterns))
    if path.is_dir():
        folder = path
    elif path.exists():
        raise UserError(f"{path} is a file; give the folder of the checkpoint, or a hub name.")
    else:
        folder = _download(str(name_or_path), revision, subfolder, weights)
    folder = folder / subfolder if subfolder else folder
    if not folder.is_dir():
        raise UserError(f"{name_or_path} has no folder {subfolder!r}.")
    return folder


def _download(name: str, revision: str | None, subfolder: str | None, weights: bool) -> Path:
    neither = f"{name!r} is neither a local folder nor a model on the hub"
    at = f" at revision {revision!r}" if revision else ""
    prefix = f"{subfolder}/" if subfolder else ""
    # The pattern's star also matches slashes: without a subfolder, exclude the files of every folder.
    ignore = f"{prefix}*/*"

    def snapshot(*patterns: str) -> Path:
        allow = [f"{prefix}{pattern}" for pattern in patterns]
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=allow, ignore_patterns=[ignore])
        )

    try:
        if not weights:
            return snapshot("*.json")
        folder = snapshot("*.json", "*.safetensors")
        if not any((folder / prefix).glob("*.safetensors")):
            folder = snapshot("*.json", "pytorch_model*.bin")
        return folder
    except hub_errors.HFValidationError as error:
        raise UserError(f"{neither}: no such folder here, and a hub name is OWNER/NAME.") from error
    except hub_errors.GatedRepoError as error:
        raise UserError(f"{name!r} on the hub asks you to accept its terms and log in (hf auth login).") from error
    except hub_errors.RevisionNotFoundError as error:
        raise UserError(f"{name!r} on the hub has no revision {revision!r}.") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise UserError(f"{neither}: no such folder here, no such public repository there.") from error
    except (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"{neither}{at} that can be reached: no such folder here, and the hub gave: {reason}"
        ) from error


# --- load ------------------------------------------------------------------------------------------------------------


def load_model(
    name_or_path: str | Path, *, revision: str | None = None, subfolder: str | None = None, images: bool = False
) -> Model:
    """The model of a checkpoint without params, from its config.json; of an adapter, that of its base.

    Args:
      name_or_path: a folder or a hub name.
      revision: of the hub.
      subfolder: of the repository or folder.
      images: as `load`.

    Raises:
      UserError: as `load`.
    """
    folder, adapters = resolve_base(resolve(name_or_path, revision, subfolder, weights=False), weights=False)
    return _opened(folder, adapters, images).model


def resolve_base(folder: Path, *, weights: bool = True) -> tuple[Path, list[peft.Config]]:
    """(The folder of the base model, the adapters on it in the order in which they are applied).

    Args:
      folder: of a model, or of an adapter in PEFT's format, possibly on further adapters.
      weights: as `resolve`, of the model.

    Raises:
      UserError: an adapter that is not plain LoRA, or whose base is missing.
    """
    adapters: list[peft.Config] = []
    while is_adapter(folder):
        adapter = peft.read_config(folder)
        where = folder / peft.CONFIG
        if adapter.base is None:
            raise UserError(f"{where}: base_model_name_or_path is missing, so there is no model to put it on.")
        if any(adapter.folder == other.folder for other in adapters):
            raise UserError(f"{where}: base_model_name_or_path leads back to the adapter itself.")
        adapters.insert(0, adapter)
        try:
            folder = resolve(peft.base_path(adapter), adapter.revision, weights=weights)
        except UserError as error:
            raise UserError(f"{where}: base_model_name_or_path: {error}") from error
    return folder, adapters


def is_adapter(name_or_path: str | Path, revision: str | None = None) -> bool:
    """Whether a path or hub name is an adapter in PEFT's format. UserError as `resolve`."""
    folder = resolve(name_or_path, revision, weights=False)
    return (folder / peft.CONFIG).is_file() and not (folder / CONFIG).is_file()


def is_text_model(name_or_path: str | Path, revision: str | None = None) -> bool:
    """Whether a checkpoint has no other parts than a text model. UserError as `resolve`."""
    folder = resolve(name_or_path, revision, weights=False)
    return not is_image_text(_read_config(folder / CONFIG))


def has_scalar_head(name_or_path: str | Path, revision: str | None = None, *, weights: bool = True) -> bool:
    """Whether a checkpoint has a scalar head of its own, or an adapter one in place of its base's.

    Args:
      weights: False: by the class that its configs name alone, without its weights.

    Raises:
      UserError: as `resolve`, or it has several labels.
    """
    folder, adapters = resolve_base(resolve(name_or_path, revision, weights=weights), weights=weights)
    path = folder / CONFIG
    hf = _read_config(path)
    if weights:
        has = not {_SCORE, _SCALAR_WEIGHT}.isdisjoint(open_weights(folder))
    else:
        has = _is_scalar_model(hf) or any("SequenceClassification" in name for name in _architectures(hf, path))
    if has and not _is_scalar_model(hf):
        _check_one_label(hf, path)
    return has or any(peft.holds_scalar_head(adapter, weights=weights) for adapter in adapters)


def adapter_base(name_or_path: str | Path, revision: str | None = None) -> tuple[str, str | None]:
    """(checkpoint, its revision) that an adapter was trained on."""
    folder = resolve(name_or_path, revision, weights=False)
    adapter = peft.read_config(folder)
    if adapter.base is None:
        raise UserError(f"{folder / peft.CONFIG}: base_model_name_or_path is missing.")
    return peft.base_path(adapter), adapter.revision


def load_adapter(name_or_path: str | Path, model: Model) -> tuple[Any, Params]:
    """An adapter in PEFT's format, for `model`: (its `lora.Lora`, numpy params). UserError as `peft.read`."""
    folder = resolve(name_or_path)
    if not is_adapter(folder):
        raise UserError(f"{name_or_path} is no adapter: a folder with {peft.CONFIG} and no {CONFIG}.")
    return peft.read(peft.read_config(folder), model)


def load(
    name_or_path: str | Path,
    *,
    shardings: Callable[[Model, Params], Any] | None = None,
    cast_on_load: Callable[[tuple[str, ...], jax.Array], Any] | None = None,
    **options: Any,
) -> tuple[Model, Params]:
    """A checkpoint as (model, params), params stacked numpy float32 arrays, or jax.Arrays in their shards.

    `shardings` returns a pytree of NamedShardings for the params' ShapeDtypeStructs. Each process then reads only what
    its own devices hold, one shard at a time (one full tensor at a time from a .bin file); every process must see the
    files. `cast_on_load` is then applied to each param, given its path, before the next one is read.
    `options` are those of `open_params`. A UserError names the file and the key, or the tensor that is missing, extra
    or of another shape.
    """
    model, leaves = open_params(name_or_path, **options)
    if shardings is None:
        return model, jax.tree.map(read_all, leaves)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float32), leaves)

    def load_param(path: tuple, leaf: Any, sharding: Any) -> Any:
        param = read_shards(leaf, sharding)
        return param if cast_on_load is None else cast_on_load(tuple(entry.key for entry in path), param)

    return model, jax.tree_util.tree_map_with_path(load_param, leaves, shardings(model, shapes))


def open_params(
    name_or_path: str | Path,
    *,
    kind: str = "causal",
    revision: str | None = None,
    subfolder: str | None = None,
    images: bool = False,
) -> tuple[Model, Params]:
    """A checkpoint as (model, params), params stacked and not yet read: leaves of `shards`.

    kind: 'causal', 'scalar' or 'backbone' (no head). The other heads are not opened; with 'scalar' a checkpoint without
    a scalar head is refused.
    `images`: open all of a model of images and text, not the text model alone. An adapter in PEFT's format is merged
    into its base on reading. UserError as `load`.
    """
    _check_kind(kind)
    folder, adapters = resolve_base(resolve(name_or_path, revision, subfolder))
    hf, model, offset, untied = _opened(folder, adapters, images)
    sources = _text_sources(model, hf, open_weights(folder), folder)
    loras = [peft.read(adapter, model) for adapter in adapters]
    replaced = {name for form, _ in loras for name in form.modules_to_save}
    leaves: Params = {"backbone": _backbone(model, sources, folder)}
    if kind == "causal" and not model.config.tie_word_embeddings:
        if untied:  # the base's head is its embedding
            kernel = dataclasses.replace(leaves["backbone"]["embed_in"]["embedding"], transpose=True)
        else:
            kernel = None if "embed_out" in replaced else _causal_head(model, sources, folder)
        leaves["embed_out"] = {} if kernel is None else {"kernel": kernel}
    if kind == "scalar":
        leaves["score"] = {} if "score" in replaced else _scalar_head(model, sources, folder, hf, offset)
    for form, adapter in loras:
        leaves = peft.add_to_leaves(leaves, form, adapter)
    return model, leaves


def fingerprint(name_or_path: str | Path, *, revision: str | None = None) -> str:
    """Identifies a checkpoint by its weights, whatever its name, by `folder_fingerprint`. UserError as `load`."""
    folder, adapters = resolve_base(resolve(name_or_path, revision=revision))
    return "+".join(folder_fingerprint(path) for path in (folder, *(adapter.folder for adapter in adapters)))


def load_shapes(
    name_or_path: str | Path,
    *,
    kind: str = "causal",
    revision: str | None = None,
    images: bool = False,
) -> tuple[Model, Params]:
    """What `load` would return: (model, params as ShapeDtypeStructs). UserError as `load`.

    Reads config.json. If the folder has weights, also reads their tensor names, because config.json does not say
    whether the score head has a bias.
    """
    _check_kind(kind)
    folder, adapters = resolve_base(resolve(name_or_path, revision, weights=False), weights=False)
    hf, model, *_ = _opened(folder, adapters, images)
    heads = [kind] if kind in HEADS else []
    shapes = jax.eval_shape(lambda key: model.init(key, heads=heads), jax.random.key(0))
    if kind == "scalar" and (_is_scalar_model(hf) or _has_score_bias(folder)):
        shapes["score"]["bias"] = jax.ShapeDtypeStruct((1,), np.float32)
    return model, shapes


def _has_score_bias(folder: Path) -> bool:
    """Whether the weights in a folder have a bias of the score; False where there are none."""
    present = any((folder / name).is_file() for name in (SAFETENSORS, SAFETENSORS_INDEX))
    return present and _SCORE_BIAS in open_weights(folder)


def _read_config(path: Path) -> dict[str, Any]:
    """A model's config.json."""
    if not path.is_file():
        raise UserError(
            f"{path.parent} has no {path.name}: it is no model in Hugging Face's format (the models of a run are in "
            "its folders policy, value and reward_model)."
        )
    return read_json(path)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise UserError(f"kind={kind!r} is not supported; kinds: {', '.join(KINDS)}.")


def _is_scalar_model(hf: dict[str, Any]) -> bool:
    architectures = hf.get("architectures") or []
    return "ScalarModel" in architectures or not {"base_config", "base_model"}.isdisjoint(hf)


class _Opened(NamedTuple):
    """A config.json, its model, the offset of its scores, and whether adapters have untied its embedding and head."""

    hf: dict[str, Any]
    model: Model
    offset: float
    untied: bool


def _opened(folder: Path, adapters: list[peft.Config], images: bool) -> _Opened:
    """The model of a folder with adapters on it."""
    path = folder / CONFIG
    hf = _read_config(path)
    model, offset = _model(hf, path, images)
    tied = model.config.tie_word_embeddings
    apart = [(adapter, adapter.untied_by(model.family)) for adapter in adapters if tied]
    adapter, module = next((pair for pair in apart if pair[1]), (None, None))
    if adapter is None:
        return _Opened(hf, model, offset, untied=False)
    warn_once(
        f"{adapter.folder / peft.CONFIG}: modules_to_save has {module} without ensure_weight_tying, so embedding "
        f"and head, which are one in {folder}, are two with the adapter, as in PEFT"
    )
    hf = {**hf, "tie_word_embeddings": False}
    if isinstance(hf.get("text_config"), dict):
        hf["text_config"] = {**hf["text_config"], "tie_word_embeddings": False}
    return _Opened(hf, *_model(hf, path, images), untied=True)


def _architectures(hf: dict[str, Any], path: Path) -> list[str]:
    architectures = hf.get("architectures") or []
    if isinstance(architectures, str):
        architectures = [architectures]
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise UserError(f"{path}: architectures is {architectures!r}; it must be a list of class names.")
    return architectures


def _check_one_label(hf: dict[str, Any], path: Path) -> None:
    labels = hf.get("num_labels", len(hf["id2label"]) if isinstance(hf.get("id2label"), dict) else 1)
    if labels != 1:
        raise UserError(f"{path}: num_labels is {labels}; a reward or value model has 1.")


def _model(hf: dict[str, Any], path: Path, images: bool = False) -> tuple[Model, float]:
    """The model of a config.json, and the offset subtracted from its scores (0 unless it is a ScalarModel)."""
    architectures = _architectures(hf, path)
    supported = {name for family in FAMILIES.values() for name in family.architectures}
    supported |= {wrapper.architecture for wrapper in WRAPPERS.values()}
    if unknown := [name for name in architectures if name not in supported]:
        raise UserError(
            f"{path}: architectures {unknown[0]!r} is not supported; supported: {', '.join(sorted(supported))}."
        )
    base, offset = hf, 0.0
    if _is_scalar_model(hf):
        offset = hf.get("bias") or 0.0
        if not isinstance(offset, int | float):
            raise UserError(f"{path}: bias is {offset!r}; a ScalarModel's offset must be a number.")
        nested = hf.get("base_config")
        if isinstance(nested, dict):
            family = FAMILIES.get(str(nested.get("model_type")))
            base = {**(family.nested_defaults if family else {}), **nested}
        elif hf.get("num_hidden_layers") is not None:
            outer = ("bias", "base_config", "base_model")  # of a ScalarModel's own
            base = {**{key: value for key, value in hf.items() if key not in outer}, "model_type": "gpt_neox"}
        else:
            raise UserError(f"{path}: base_config, the backbone's config of a ScalarModel, is missing.")
    return Model.from_hf_config(base, str(path), images=images), float(offset)


def _text_sources(model: Model, hf: dict[str, Any], sources: dict[str, Source], folder: Path) -> dict[str, Source]:
    """The tensors by their names in a checkpoint of the text model, where it is of images and text."""
    if not is_image_text(hf) or model.reads_images:
        return sources
    names, vision_count = text_tensors(hf, sources, model.family.prefix, model.config.tie_word_embeddings, str(folder))
    warnings.warn(
        f"{folder} is a model of images and text ({hf['model_type']}): only its text model, {model.family.name}, is "
        f"loaded and exported; {vision_count} other tensors are ignored",
        stacklevel=3,
    )
    return {standalone_name: sources[name] for name, standalone_name in names.items()}


def _prefix(model: Model, sources: dict[str, Source]) -> str:
    for prefix in (model.family.prefix, _SCALAR_PREFIX):
        if any(name.startswith(prefix) for name in sources):
            return prefix
    return ""


def _backbone(model: Model, sources: dict[str, Source], folder: Path) -> Params:
    """The backbone's params, not yet read; UserError for the first tensor that is missing, extra or misshapen."""
    prefix = _prefix(model, sources)
    specs = model.family.tensors(model.config)
    expected_names = {prefix + spec.name for spec in specs}
    ignored = re.compile("|".join(model.family.ignored))
    for name in sorted(set(sources) - expected_names - set(_HEAD_NAMES)):
        if not ignored.match(name.removeprefix(prefix)):
            raise UserError(
                f"{sources[name].file}: tensor {name} is not one that {CONFIG} gives the model a place for."
            )
    sources_by_path: dict[tuple[str, ...], dict[int | None, Source]] = {}
    backbone: Params = {}
    for spec in specs:
        layers = sources_by_path.setdefault(spec.path, {})
        layers[spec.layer] = _source(sources, prefix + spec.name, spec.shape, folder)
        *parents, leaf = spec.path
        node = backbone
        for parent in parents:
            node = node.setdefault(parent, {})
        tensors = tuple(layers[layer] for layer in sorted(layers)) if spec.layer is not None else (layers[None],)
        node[leaf] = FileParam(tensors, spec.transpose, stacked=spec.layer is not None)
    return backbone


def _source(sources: dict[str, Source], name: str, shape: tuple[int, ...], folder: Path) -> Source:
    if name not in sources:
        files = sorted({source.file.name for source in sources.values()})
        where = folder / files[0] if len(files) == 1 else f"{folder} ({len(files)} weight files)"
        raise UserError(f"{where}: tensor {name} is missing; {CONFIG} asks for it with shape {list(shape)}.")
    sources[name].check(shape, CONFIG)
    return sources[name]


def _causal_head(model: Model, sources: dict[str, Source], folder: Path) -> FileParam:
    name = next((name for name in _CAUSAL_HEADS if name in sources), None)
    if name is None:
        raise UserError(
            f"{folder} has no causal head (tensor {_CAUSAL_HEADS[0]}): it is not a language model. "
            "A policy, a reference or an SFT model needs one."
        )
    shape = (model.config.vocab_size, model.config.hidden_size)
    return FileParam((_source(sources, name, shape, folder),), transpose=True)


def _scalar_head(model: Model, sources: dict[str, Source], folder: Path, hf: dict[str, Any], offset: float) -> Params:
    shape = (1, model.config.hidden_size)
    if _SCALAR_WEIGHT in sources:
        bias = read_all(FileParam((_source(sources, _SCALAR_BIAS, (1,), folder),)))
        kernel = FileParam((_source(sources, _SCALAR_WEIGHT, shape, folder),), transpose=True)
        return {"kernel": kernel, "bias": HostParam((bias.astype(np.float64) - offset).astype(np.float32))}
    if _SCORE not in sources:
        raise UserError(
            f"{folder} has no scalar head (tensor {_SCORE}, or {_SCALAR_WEIGHT}): it is not a reward model. "
            "Train one with the reward stage, or give another path."
        )
    _check_one_label(hf, folder / CONFIG)
    head = {"kernel": FileParam((_source(sources, _SCORE, shape, folder),), transpose=True)}
    if _SCORE_BIAS in sources:
        head["bias"] = HostParam(read_all(FileParam((_source(sources, _SCORE_BIAS, (1,), folder),))))
    return head


# --- save ------------------------------------------------------------------------------------------------------------


def save(
    path: str | Path,
    model: Model,
    params: Params,
    *,
    kind: str,
    extra_config: dict[str, Any] | None = None,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json and safetensors that transformers 4 and 5 load.

    Tensors are gathered to the host one by one, and no more than one file's are held. With several processes every one
    must call it: all of them gather, the first writes. transformers' classifier has no bias, so the bias c of a scalar
    head w is folded into the final layer norm's, b + c w / |w|^2, which gives w . (b + c w / |w|^2) = w . b + c: the
    same scores. A norm without a bias has no place for it: it becomes the tensor score.bias, which `load` reads and
    transformers does not.

    Args:
      path: folder, made if it does not exist.
      model: of the params.
      params: stacked arrays, numpy or JAX in any shards; heads of the other kind are not written.
      kind: 'causal' or 'scalar'.
      extra_config: added to config.json (token ids: bos_token_id, eos_token_id, pad_token_id).
      dtype: of the file's tensors: 'float32', 'bfloat16' or 'float16'.
      max_shard_bytes: of a file.

    Raises:
      UserError: the dtype cannot be exported.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r} cannot be exported; use one of {', '.join(DTYPES)}.")
    # Both names of the dtype: transformers 4 reads torch_dtype, 5 reads dtype.
    extra = {"torch_dtype": dtype, "dtype": dtype, **(extra_config or {})}
    config = model.to_hf_config(kind, **extra)
    if model.reads_images:  # transformers reads them in the text model's
        config["text_config"] = {**config["text_config"], **extra}
    backbone = params["backbone"]
    tensors = {}  # by name: leaf, layer, whether the file has it transposed
    folds = "bias" in backbone["final_layer_norm"]
    if kind == "scalar" and "bias" in params["score"] and folds:
        backbone = {**backbone, "final_layer_norm": fold_score_bias(backbone["final_layer_norm"], params["score"])}
    for spec in model.family.tensors(model.config):
        leaf = functools.reduce(lambda node, key: node[key], spec.path, backbone)
        tensors[model.family.prefix + spec.name] = leaf, spec.layer, spec.transpose
    if kind == "scalar":
        tensors[_SCORE] = params["score"]["kernel"], None, True
        if "bias" in params["score"] and not folds:
            tensors[_SCORE_BIAS] = params["score"]["bias"], None, False
    elif not model.config.tie_word_embeddings:
        tensors[model.family.causal_head] = params["embed_out"]["kernel"], None, True

    def size(leaf, layer, _) -> int:
        return math.prod(leaf.shape if layer is None else leaf.shape[1:]) * DTYPES[dtype].itemsize

    def read(name: str) -> np.ndarray:
        leaf, layer, transpose = tensors[name]
        array = gather_to_host(leaf, layer)
        return np.ascontiguousarray((array.T if transpose else array).astype(DTYPES[dtype]))

    folder = Path(path)
    if is_main():
        folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: size(*tensor) for name, tensor in tensors.items()}
    write_weights(folder, sizes, read, max_shard_bytes, write=is_main())
    if is_main():
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def fold_score_bias(norm: Params, score: Params) -> Params:
    """The final layer norm {"scale", "bias"} [D] with the bias of the scalar head folded into its own, on the host; see
    `save`. Every process must call it."""
    kernel, bias = (gather_to_host(score[key]) for key in ("kernel", "bias"))
    weight = kernel[:, 0].astype(np.float64)
    if not weight.any():
        raise UserError("the scalar head is all zeros and has a bias, which a Hugging Face classifier cannot express.")
    offset = float(bias[0]) * weight / (weight @ weight)
    return {**norm, "bias": (gather_to_host(norm["bias"]).astype(np.float64) + offset).astype(np.float32)}
