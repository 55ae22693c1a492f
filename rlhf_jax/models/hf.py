"""Hugging Face checkpoints in and out, without torch.

In: hub names with a revision or local folders; safetensors or old .bin files, single or sharded; causal models,
`GPTNeoXForSequenceClassification` (`score`), and the N+ implementation's `ScalarModel` (`lm_backbone.*`,
`scalar_head` with a bias, and an offset `bias` in the config that is taken off every score; Huang et al. 2024,
arXiv:2403.17031). Out: what transformers 4 and 5 load with the same logits.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
from huggingface_hub import errors as hub_errors

from rlhf_jax.models.family import FAMILIES, Model
from rlhf_jax.models.weight_files import DTYPES, Source, open_weights, read_json, write_weights
from rlhf_jax.types import Params, UserError

CONFIG = "config.json"
KINDS = ("causal", "scalar", "backbone", "causal+scalar")
_CAUSAL_HEADS = ("embed_out.weight", "lm_head.weight")  # the published name and that of transformers 5's module
_SCORE, _SCALAR_WEIGHT, _SCALAR_BIAS = "score.weight", "scalar_head.weight", "scalar_head.bias"
_HEAD_NAMES = (*_CAUSAL_HEADS, _SCORE, _SCALAR_WEIGHT, _SCALAR_BIAS)
_SCALAR_PREFIX = "lm_backbone."
# A nested config is saved as its difference from transformers' defaults, so these are what its absent keys mean.
_NESTED_DEFAULTS = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
}


# --- places ----------------------------------------------------------------------------------------------------------


def resolve(name_or_path: str | Path, revision: str | None = None, subfolder: str | None = None) -> Path:
    """The local folder of a checkpoint: the folder itself, or the hub repository downloaded to the cache.

    Downloads JSON files and safetensors, and .bin files only where there are no safetensors. HF_ENDPOINT and
    HF_HUB_OFFLINE are huggingface_hub's. UserError when it is neither a folder nor found on the hub.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        folder = path
    elif path.exists():
        raise UserError(f"{path} is a file; give the folder of the checkpoint, or a hub name.")
    else:
        folder = _download(str(name_or_path), revision, subfolder)
    folder = folder / subfolder if subfolder else folder
    if not folder.is_dir():
        raise UserError(f"{name_or_path} has no folder {subfolder!r}.")
    return folder


def _download(name: str, revision: str | None, subfolder: str | None) -> Path:
    neither = f"{name!r} is neither a local folder nor a model on the hub"
    at = f" at revision {revision!r}" if revision else ""
    prefix = f"{subfolder}/" if subfolder else ""
    # The pattern's star also matches slashes: without a subfolder, leave out the files of every folder.
    ignore = f"{prefix}*/*"

    def snapshot(*patterns: str) -> Path:
        allow = [f"{prefix}{pattern}" for pattern in patterns]
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=allow, ignore_patterns=[ignore])
        )

    try:
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


# --- in --------------------------------------------------------------------------------------------------------------


def load_model(name_or_path: str | Path, *, revision: str | None = None, subfolder: str | None = None) -> Model:
    """Only the shape of a checkpoint, from its config.json. UserError as `load`."""
    path = resolve(name_or_path, revision, subfolder) / CONFIG
    return _model(read_json(path), path)[0]


def load(
    name_or_path: str | Path,
    *,
    kind: str = "causal",
    revision: str | None = None,
    subfolder: str | None = None,
    new_head: bool = False,
    head_seed: int = 0,
    head_std: float | None = None,
) -> tuple[Model, Params]:
    """A checkpoint as (model, params), params stacked numpy float32 arrays.

    kind: 'causal', 'scalar', 'backbone' (no head) or 'causal+scalar'. With `new_head` the scalar head is drawn from
    normal(head_std) by `head_seed` (default std initializer_range, as transformers), whatever the checkpoint has;
    without it a checkpoint that has no scalar head is refused. Heads that were not asked for are left out.
    UserError names the file and the key, or the tensor that is missing, extra or misshapen.
    """
    if kind not in KINDS:
        raise UserError(f"kind={kind!r} is not supported; kinds: {', '.join(KINDS)}.")
    folder = resolve(name_or_path, revision, subfolder)
    hf = read_json(folder / CONFIG)
    model, offset = _model(hf, folder / CONFIG)
    sources = open_weights(folder)
    params: Params = {"backbone": _backbone(model, sources, folder)}
    heads = kind.split("+")
    if "causal" in heads and not model.config.tie_word_embeddings:
        params["embed_out"] = {"kernel": _causal_head(model, sources, folder)}
    if "scalar" in heads:
        if new_head:
            std = model.config.initializer_range if head_std is None else head_std
            noise = np.random.default_rng(head_seed).standard_normal((model.config.hidden_size, 1))
            params["score"] = {"kernel": (std * noise).astype(np.float32)}
        else:
            params["score"] = _scalar_head(model, sources, folder, hf, offset)
    return model, params


def _model(hf: dict[str, Any], path: Path) -> tuple[Model, float]:
    """The model of a config.json and the offset taken off its scores (0 but for a ScalarModel)."""
    architectures = hf.get("architectures") or []
    if isinstance(architectures, str):
        architectures = [architectures]
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise UserError(f"{path}: architectures is {architectures!r}; it must be a list of class names.")
    known = {name for family in FAMILIES.values() for name in family.architectures}
    if unknown := [name for name in architectures if name not in known]:
        raise UserError(
            f"{path}: architectures {unknown[0]!r} is not supported; supported: {', '.join(sorted(known))}."
        )
    base, offset = hf, 0.0
    if "ScalarModel" in architectures or not {"base_config", "base_model"}.isdisjoint(hf):
        offset = hf.get("bias") or 0.0
        if not isinstance(offset, int | float):
            raise UserError(f"{path}: bias is {offset!r}; a ScalarModel's offset must be a number.")
        nested = hf.get("base_config")
        if isinstance(nested, dict):
            base = {**(_NESTED_DEFAULTS if nested.get("model_type") == "gpt_neox" else {}), **nested}
        elif hf.get("num_hidden_layers") is not None:
            base = {**hf, "model_type": "gpt_neox"}
        else:
            raise UserError(f"{path}: base_config, the backbone's config of a ScalarModel, is missing.")
    return Model.from_hf_config(base, str(path)), float(offset)


def _prefix(model: Model, sources: dict[str, Source]) -> str:
    for prefix in (model.family.prefix, _SCALAR_PREFIX):
        if any(name.startswith(prefix) for name in sources):
            return prefix
    return ""


def _backbone(model: Model, sources: dict[str, Source], folder: Path) -> Params:
    """The backbone's arrays; UserError for the first missing, extra or misshapen tensor."""
    prefix = _prefix(model, sources)
    specs = model.family.tensors(model.config)
    wanted = {prefix + spec.name for spec in specs}
    ignored = re.compile("|".join(model.family.ignored))
    for name in sorted(set(sources) - wanted - set(_HEAD_NAMES)):
        if not ignored.match(name.removeprefix(prefix)):
            raise UserError(
                f"{sources[name].file}: tensor {name} is not one that {CONFIG} gives the model a place for."
            )
    backbone: Params = {}
    for spec in specs:
        array = _read(sources, prefix + spec.name, spec.shape, folder)
        array = array.T if spec.transpose else array
        *parents, leaf = spec.path
        node = backbone
        for parent in parents:
            node = node.setdefault(parent, {})
        if spec.layer is None:
            node[leaf] = array
        else:
            if leaf not in node:
                node[leaf] = np.empty((model.config.num_hidden_layers, *array.shape), np.float32)
            node[leaf][spec.layer] = array
    return backbone


def _read(sources: dict[str, Source], name: str, shape: tuple[int, ...], folder: Path) -> np.ndarray:
    if name not in sources:
        files = sorted({source.file.name for source in sources.values()})
        where = folder / files[0] if len(files) == 1 else f"{folder} ({len(files)} weight files)"
        raise UserError(f"{where}: tensor {name} is missing; {CONFIG} asks for it with shape {list(shape)}.")
    source = sources[name]
    if source.shape != shape:
        raise UserError(
            f"{source.file}: tensor {name} has shape {list(source.shape)}; {CONFIG} asks for {list(shape)}."
        )
    return source.read(name)


def _causal_head(model: Model, sources: dict[str, Source], folder: Path) -> np.ndarray:
    name = next((name for name in _CAUSAL_HEADS if name in sources), None)
    if name is None:
        raise UserError(
            f"{folder} has no causal head (tensor {_CAUSAL_HEADS[0]}): it is not a language model. "
            "A policy, a reference or an SFT model needs one."
        )
    shape = (model.config.vocab_size, model.config.hidden_size)
    return np.ascontiguousarray(_read(sources, name, shape, folder).T)


def _scalar_head(model: Model, sources: dict[str, Source], folder: Path, hf: dict[str, Any], offset: float) -> Params:
    shape = (1, model.config.hidden_size)
    if _SCALAR_WEIGHT in sources:
        bias = _read(sources, _SCALAR_BIAS, (1,), folder)
        kernel = _read(sources, _SCALAR_WEIGHT, shape, folder).T.copy()
        return {"kernel": kernel, "bias": (bias.astype(np.float64) - offset).astype(np.float32)}
    if _SCORE not in sources:
        raise UserError(
            f"{folder} has no scalar head (tensor {_SCORE}, or {_SCALAR_WEIGHT}): it is not a reward model. "
            "Train one with the reward stage, or give another path."
        )
    labels = hf.get("num_labels", len(hf["id2label"]) if isinstance(hf.get("id2label"), dict) else 1)
    if labels != 1:
        raise UserError(f"{folder / CONFIG}: num_labels is {labels}; a reward or value model has 1.")
    return {"kernel": _read(sources, _SCORE, shape, folder).T.copy()}


# --- out -------------------------------------------------------------------------------------------------------------


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
    """Write config.json and safetensors that transformers 4 and 5 load: kind 'causal' or 'scalar'.

    params: stacked arrays of numpy or JAX, addressable here; heads of the other kind are left out. `extra_config` goes
    into config.json (token ids: bos_token_id, eos_token_id, pad_token_id). dtype 'float32', 'bfloat16' or 'float16'.
    transformers' classifier has no bias, so the bias c of a scalar head w is folded into the final layer norm's,
    b + c w / |w|^2, which gives w . (b + c w / |w|^2) = w . b + c: the same scores.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r} cannot be exported; use one of {', '.join(DTYPES)}.")
    # Both names of the dtype: transformers 4 reads torch_dtype, 5 reads dtype.
    config = model.to_hf_config(kind, torch_dtype=dtype, dtype=dtype, **(extra_config or {}))
    backbone, heads = params["backbone"], {}
    if kind == "causal" and not model.config.tie_word_embeddings:
        heads[_CAUSAL_HEADS[0]] = np.asarray(params["embed_out"]["kernel"]).T
    if kind == "scalar":
        kernel = np.asarray(params["score"]["kernel"])
        heads[_SCORE] = kernel.T
        if "bias" in params["score"]:
            norm = dict(backbone["final_layer_norm"])
            norm["bias"] = _fold_bias(np.asarray(norm["bias"]), kernel[:, 0], np.asarray(params["score"]["bias"])[0])
            backbone = {**backbone, "final_layer_norm": norm}
    tensors = {}
    for spec in model.family.tensors(model.config):
        leaf = backbone
        for key in spec.path:
            leaf = leaf[key]
        array = np.asarray(leaf if spec.layer is None else leaf[spec.layer])
        tensors[model.family.prefix + spec.name] = array.T if spec.transpose else array
    tensors = {name: np.ascontiguousarray(array.astype(DTYPES[dtype])) for name, array in (tensors | heads).items()}
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, tensors, max_shard_bytes)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _fold_bias(norm_bias: np.ndarray, kernel: np.ndarray, bias: float) -> np.ndarray:
    weight = kernel.astype(np.float64)
    if not weight.any():
        raise UserError("the scalar head is all zeros and has a bias, which a Hugging Face classifier cannot express.")
    return (norm_bias.astype(np.float64) + float(bias) * weight / (weight @ weight)).astype(np.float32)
