"""Adapters in PEFT's form, in and out: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlhf_jax.errors import UserError
from rlhf_jax.models import lora
from rlhf_jax.models.io.safetensors import Source, open_file, read_json, write_file
from rlhf_jax.models.io.shards import FileParam, HostParam, LoraParam, gather_to_host, read_all
from rlhf_jax.models.lora import Lora
from rlhf_jax.parallel.multihost import is_main
from rlhf_jax.types import Params

CONFIG, WEIGHTS, OLD_WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
TASKS = {"causal": "CAUSAL_LM", "scalar": "SEQ_CLS"}

_PREFIX = "base_model.model."
_MODULES = {"embed_out": "lm_head"}  # of transformers 5, by the names of the checkpoint
# What would make another function of the same tensors, or of more of them.
_REFUSED = ("use_dora", "fan_in_fan_out", "lora_bias", "rank_pattern", "alpha_pattern", "layers_to_transform")
_REFUSED += ("layer_replication", "target_parameters", "trainable_token_indices", "use_qalora", "arrow_config")
_REFUSED += ("alora_invocation_tokens", "kasa_config", "monteclora_config", "use_bdlora")
# Starts that PEFT takes off the base, again whenever it loads the adapter.
_REBASED = ("pissa", "olora", "corda", "loftq")


@dataclasses.dataclass(frozen=True)
class Config:
    """What an adapter_config.json says."""

    folder: Path
    base: str | None
    """The checkpoint that it was trained on, a folder or a hub name."""
    revision: str | None
    r: int
    alpha: float
    dropout: float
    rslora: bool


def read_config(folder: Path) -> Config:
    """adapter_config.json of a folder; UserError, naming the key, for what is not plain LoRA."""
    path = folder / CONFIG
    found = read_json(path)
    if found.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {found.get('peft_type')!r}; only LORA is supported.")
    for key in _REFUSED:
        if found.get(key):
            raise UserError(f"{path}: {key} is {found[key]!r}, which is not supported; merge the adapter first.")
    if found.get("bias", "none") != "none":
        raise UserError(f"{path}: bias is {found['bias']!r}; only adapters with bias 'none' are supported.")

    if str(start := found.get("init_lora_weights")).lower().startswith(_REBASED):
        raise UserError(
            f"{path}: init_lora_weights is {start!r}, which changes the base too; save the adapter as plain LoRA "
            "(path_initial_model_for_weight_conversion of PEFT's save_pretrained), or merge it."
        )

    def number(key: str, default: float, least: float) -> float:
        value = found.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 2**31:
            raise UserError(f"{path}: {key} is {value!r}; it must be a number of at least {least:g}.")
        return value

    r, dropout = number("r", 8, 1), number("lora_dropout", 0.0, 0.0)
    if r != int(r) or dropout >= 1:
        raise UserError(f"{path}: r is {r!r} and lora_dropout {dropout!r}; r is whole, and the dropout below 1.")
    for key in ("base_model_name_or_path", "revision"):
        if not isinstance(found.get(key), str | None):
            raise UserError(f"{path}: {key} is {found[key]!r}; it must be text.")
    base, revision = found.get("base_model_name_or_path"), found.get("revision")
    alpha = number("lora_alpha", 8, 0.0)
    return Config(folder, base, revision, int(r), alpha, float(dropout), found.get("use_rslora") is True)


def read(config: Config, model: Any) -> tuple[Lora, Params]:
    """An adapter's form and its numbers.

    Args:
      config: of its folder.
      model: that it belongs on.

    Returns:
      (Lora with the targets and the modules that the file holds, adapters as float32 numpy arrays)

    Raises:
      UserError: names the tensor that is missing, extra or misshapen.
    """
    file = next((config.folder / name for name in (WEIGHTS, OLD_WEIGHTS) if (config.folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{config.folder} has an {CONFIG}, but neither {WEIGHTS} nor {OLD_WEIGHTS}.")
    sources = {_plain(name, model.family): source for name, source in open_file(file).items()}
    wanted = _names(model)
    if unknown := sorted(set(sources) - set(wanted)):
        raise UserError(f"{file}: tensor {sources[unknown[0]].name} belongs to no layer of the model it is meant for.")
    holds = {wanted[name][0] for name in sources}
    targets = tuple(name for name in model.family.linears if name in holds)
    saved = tuple(name for name in model.family.modules if name in holds)
    if not holds:
        raise UserError(f"{file} holds no tensor.")
    form = Lora(config.r, config.alpha, config.dropout, targets, config.rslora, saved)
    shapes = jax.eval_shape(lambda key: model.init(key, heads=("causal", "scalar")), jax.random.key(0))
    whole = dataclasses.replace(model, lora=form)
    shapes = jax.eval_shape(lambda key, base: lora.init(whole, key, base), jax.random.key(0), shapes)
    found: Params = {}
    for name, (module, path, layer) in wanted.items():
        if module not in holds:
            continue
        if name not in sources:
            raise UserError(f"{file}: tensor {_PREFIX}{name} is missing.")
        leaf = lora.get_path(shapes, path)
        shape = leaf.shape[1:] if layer is not None else leaf.shape
        array = _array(sources[name], shape, transpose=path[-1] in (lora.A, lora.B, "kernel"))
        if layer is None:
            lora.set_path(found, path, array)
        else:
            lora.set_path(found, (*path, layer), array)
    return form, _stacked(found)


def _array(source: Source, shape: tuple[int, ...], transpose: bool) -> np.ndarray:
    """A tensor as [in, out], float32; UserError, naming it, where it has another shape."""
    source.check(shape[::-1] if transpose else shape, CONFIG)
    return read_all(FileParam((source,), transpose))


def _stacked(tree: Any) -> Any:
    """Dicts by layer as stacks [L, ...]."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return np.stack([tree[layer] for layer in sorted(tree)])
    return {key: _stacked(value) for key, value in tree.items()}


def _plain(name: str, family: Any) -> str:
    """A tensor's name without what PEFT's versions and task types put before and into it."""
    name = re.sub(r"\.(lora_[AB])\.[^.]+\.weight$", r".\1.weight", name.removeprefix(_PREFIX))
    name = re.sub(r"\.modules_to_save(\.[^.]+)?\.(weight|bias)$", r".\2", name)
    for ours, theirs in _MODULES.items():
        name = f"{ours}.weight" if name == f"{theirs}.weight" else name
    inside = name.startswith(("layers.", "embed_in.", "final_layer_norm."))
    return f"{family.prefix}{name}" if inside else name


def _names(model: Any) -> dict[str, tuple[str, tuple[str, ...], int | None]]:
    """Every tensor that an adapter of the model may hold: its name to (module, path in the adapters, layer)."""
    prefix, found = model.family.prefix, {}
    for module, (layers, *rest) in model.family.linears.items():
        for layer in range(model.config.num_hidden_layers):
            for theirs, ours in (("lora_A", lora.A), ("lora_B", lora.B)):
                name = f"{prefix}{layers}.{layer}.{'.'.join(rest)}.{theirs}.weight"
                found[name] = module, ("backbone", layers, *rest, ours), layer
    for module, path in model.family.modules.items():
        inside = prefix if path[0] == "backbone" else ""
        leaves = {"embed_in": {"weight": "embedding"}, "final_layer_norm": {"weight": "scale", "bias": "bias"}}
        for theirs, ours in leaves.get(module, {"weight": "kernel"}).items():
            found[f"{inside}{module}.{theirs}"] = module, (*path, ours), None
    return found


def merged_into(leaves: Params, form: Lora, adapters: Params) -> Params:
    """A checkpoint's leaves, not yet read, with an adapter added as they are read, and its own modules in place of
    theirs.

    Args:
      leaves: of `hf.load`.
      form: of the adapter.
      adapters: from `read`.
    """

    def over(leaf: Any, new: Any) -> Any:
        if isinstance(new, np.ndarray):
            return HostParam(new)
        if lora.A in new:
            return {**leaf, "kernel": LoraParam(leaf["kernel"], new[lora.A], np.float32(form.scale) * new[lora.B])}
        return {**leaf, **{key: over(leaf.get(key, {}), value) for key, value in new.items()}}

    heads = [key for key in ("embed_out", "score") if key in adapters and key not in leaves]
    return over(leaves, {key: value for key, value in adapters.items() if key not in heads})


# --- out


def save(
    path: str | Path,
    model: Any,
    adapters: Params,
    *,
    kind: str,
    base: str | None,
    revision: str | None = None,
    norm: Params | None = None,
) -> None:
    """Writes an adapter as PEFT does. With several processes every one must call it; the first writes.

    Args:
      path: folder.
      model: with `lora`.
      adapters: of numpy or JAX arrays in any shards.
      kind: 'causal' or 'scalar'; heads of the other kind are left out.
      base: the checkpoint that they belong on.
      revision: its, on the hub.
      norm: the last layer norm, where the adapter is to hold it.
    """
    form, others = model.lora, {"causal": "score", "scalar": "embed_out"}[kind]
    tree = adapters
    if norm is not None:
        tree = {**adapters, "backbone": {**adapters["backbone"], "final_layer_norm": norm}}
    tensors, modules = {}, []
    whole: dict[tuple[str, ...], np.ndarray] = {}
    for name, (module, where, layer) in _names(model).items():
        try:
            leaf = lora.get_path(tree, where)
        except KeyError:
            continue
        if module == others:
            continue
        if where not in whole:
            whole[where] = np.asarray(gather_to_host(leaf), np.float32)
        array = whole[where] if layer is None else whole[where][layer]
        transpose = where[-1] in (lora.A, lora.B, "kernel")
        name = name.replace(module, _MODULES.get(module, module)) if layer is None else name
        tensors[_PREFIX + name] = np.ascontiguousarray(array.T if transpose else array)
        if layer is None and _MODULES.get(module, module) not in modules:
            modules.append(_MODULES.get(module, module))
    if not is_main():
        return
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": TASKS[kind],
        "base_model_name_or_path": base,
        "revision": revision,
        "r": form.r,
        "lora_alpha": form.alpha,
        "lora_dropout": form.dropout,
        "target_modules": list(form.target_modules),
        "use_rslora": form.use_rslora,
        "modules_to_save": modules or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_file(folder / WEIGHTS, tensors)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
