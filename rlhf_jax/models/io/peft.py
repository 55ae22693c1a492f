"""Adapters in PEFT's format, in and out: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlhf_jax import storage
from rlhf_jax.errors import UserError
from rlhf_jax.models import lora
from rlhf_jax.models.families.image_text import WRAPPERS
from rlhf_jax.models.io.safetensors import Source, open_file, read_json, write_file
from rlhf_jax.models.io.shards import FileParam, HostParam, LoraParam, gather_to_host, read_all
from rlhf_jax.models.lora import Lora
from rlhf_jax.parallel.multihost import is_main
from rlhf_jax.storage.relocation import Relocation
from rlhf_jax.types import Params

CONFIG, WEIGHTS, OLD_WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
TASKS = {"causal": "CAUSAL_LM", "scalar": "SEQ_CLS"}

_PREFIX = "base_model.model."
_SCORE_BIAS = "score.bias"  # which PEFT ignores, as transformers does; it shifts all scores alike
# Of the text model within models of images and text.
_NESTED_PREFIXES = sorted({prefix for wrapper in WRAPPERS.values() for prefix in wrapper.prefixes})
_MODULES = {"embed_out": "lm_head"}  # of transformers 5, by the names of the checkpoint
# Options under which the same tensors are another function, or more tensors are needed.
_REFUSED = ("use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "layers_to_transform")
_REFUSED += ("layer_replication", "target_parameters", "trainable_token_indices", "use_qalora", "arrow_config")
_REFUSED += ("alora_invocation_tokens", "kasa_config", "monteclora_config", "use_bdlora")
# Initializations that PEFT subtracts from the base, again whenever it loads the adapter.
_REBASED = ("pissa", "olora", "corda", "loftq")


@dataclasses.dataclass(frozen=True)
class Config:
    """An adapter_config.json."""

    folder: Path
    base: str | None
    """The checkpoint that the adapter was trained on, a folder or a hub name."""
    revision: str | None
    r: int
    alpha: float
    dropout: float
    use_rslora: bool
    modules_to_save: tuple[str, ...] = ()
    ensure_weight_tying: bool = False
    """Whether a saved embedding is the head too, where the base ties them."""
    task: str | None = None

    def untied_by(self, family: Any) -> str | None:
        """The module of a language model, embedding or head, that this adapter trains although the base ties the two,
        so that they become two in PEFT; None: it unties nothing."""
        tied = _tied_modules(family)
        names = [name for name in self.modules_to_save if name.rpartition(".")[2] in tied]
        if not names or self.task == TASKS["scalar"]:
            return None
        # PEFT ties by these names alone, and saves the embedding that it tied by its whole name.
        ties = any("." in name or name in ("embed_tokens", "lm_head") for name in names)
        return None if self.ensure_weight_tying and ties else names[0]


def read_config(folder: Path) -> Config:
    """adapter_config.json of a folder; UserError, naming the key, for what is not plain LoRA."""
    path = folder / CONFIG
    content = read_json(path)
    if content.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {content.get('peft_type')!r}; only LORA is supported.")
    for key in _REFUSED:
        if content.get(key):
            raise UserError(f"{path}: {key} is {content[key]!r}, which is not supported; merge the adapter first.")
    if content.get("bias", "none") != "none":
        raise UserError(f"{path}: bias is {content['bias']!r}; only adapters with bias 'none' are supported.")

    if str(start := content.get("init_lora_weights")).lower().startswith(_REBASED):
        raise UserError(
            f"{path}: init_lora_weights is {start!r}, which changes the base too; save the adapter as plain LoRA "
            "(path_initial_model_for_weight_conversion of PEFT's save_pretrained), or merge it."
        )

    def number(key: str, default: float, least: float) -> float:
        value = content.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 2**31:
            raise UserError(f"{path}: {key} is {value!r}; it must be a number of at least {least:g}.")
        return value

    r, dropout = number("r", 8, 1), number("lora_dropout", 0.0, 0.0)
    if r != int(r) or dropout >= 1:
        raise UserError(f"{path}: r is {r!r} and lora_dropout {dropout!r}; r is whole, and the dropout below 1.")
    for key in ("base_model_name_or_path", "revision"):
        if not isinstance(content.get(key), str | None):
            raise UserError(f"{path}: {key} is {content[key]!r}; it must be text.")
    base, revision = content.get("base_model_name_or_path"), content.get("revision")
    saved = content.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise UserError(f"{path}: modules_to_save is {saved!r}; it must be a list of names.")
    form = int(r), number("lora_alpha", 8, 0.0), float(dropout), content.get("use_rslora") is True
    tying, task = content.get("ensure_weight_tying") is True, content.get("task_type")
    return Config(folder, base, revision, *form, tuple(saved), tying, task)


def base_path(config: Config) -> str:
    """Where an adapter's base is: at the path in adapter_config.json, or where it moved to with the adapter.

    The folder NAME_base that a run writes is beside the adapter. A relative path starts from the working folder of the
    run, and a path within its folder or pipeline has moved with it, as far as the config.json of the run tells.
    """
    beside, run = config.folder.parent / Path(config.base).name, config.folder.parent / "config.json"
    places = [beside] if beside.name.endswith("_base") else []
    with contextlib.suppress(UserError):  # a config.json of something else
        run_dir = read_json(run).get("run_dir") if run.is_file() else None
        if isinstance(run_dir, str) and not storage.is_remote(config.base):
            places.append(Path(Relocation(run_dir, str(run.parent)).find(config.base)))
    place = next((place for place in places if place.is_dir()), None)
    if place is None or (storage.exists(config.base) and place.samefile(storage.located(config.base))):
        return config.base
    return str(place)


def holds_scalar_head(config: Config, *, weights: bool = True) -> bool:
    """Whether an adapter holds a score head; without `weights` by its adapter_config.json, where PEFT lists the head of
    a classifier."""
    if not weights:
        return "score" in config.modules_to_save
    return any(re.search(r"(^|\.)score\.([^.]+\.)*weight$", name) for name in open_file(_file(config)))


def _file(config: Config) -> Path:
    file = next((config.folder / name for name in (WEIGHTS, OLD_WEIGHTS) if (config.folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{config.folder} has an {CONFIG}, but neither {WEIGHTS} nor {OLD_WEIGHTS}.")
    return file


def read(config: Config, model: Any) -> tuple[Lora, Params]:
    """An adapter's configuration and params.

    Returns:
      (Lora with the target modules and the modules to save that the file holds, adapters as float32 numpy arrays)

    Raises:
      UserError: names the tensor that is missing, extra or of another shape, or the module that cannot be tied.
    """
    file, tied = _file(config), model.config.tie_word_embeddings
    if tied and (module := config.untied_by(model.family)):
        raise UserError(
            f"{config.folder / CONFIG}: modules_to_save has {module!r} without ensure_weight_tying, so embedding and "
            "head are two, but they are one in the model that the adapter is put on; merge the adapter into its base."
        )
    sources = {_normalize_name(name, model.family): source for name, source in open_file(file).items()}
    if tied:
        sources = _without_tied_head(sources, model.family, file)
    places = _tensor_places(model)
    if unknown := sorted(set(sources) - set(places)):
        raise UserError(f"{file}: tensor {sources[unknown[0]].name} belongs to no layer of the model it is meant for.")
    holds = {places[name][0] for name in sources}
    targets = tuple(name for name in model.family.linears if name in holds)
    modules_to_save = tuple(name for name in model.family.modules if name in holds)
    if not holds:
        raise UserError(f"{file} holds no tensor.")
    form = Lora(config.r, config.alpha, config.dropout, targets, config.use_rslora, modules_to_save)
    shapes = jax.eval_shape(lambda key: model.init(key, heads=("causal", "scalar")), jax.random.key(0))
    adapted = dataclasses.replace(model, lora=form)
    shapes = jax.eval_shape(lambda key, base: lora.init(adapted, key, base), jax.random.key(0), shapes)
    adapters: Params = {}
    if _SCORE_BIAS in sources:
        shapes["score"]["bias"] = jax.ShapeDtypeStruct((1,), np.float32)
    for name, (module, path, layer) in places.items():
        if module not in holds or (name == _SCORE_BIAS and name not in sources):
            continue
        if name not in sources:
            raise UserError(f"{file}: tensor {_PREFIX}{name} is missing.")
        leaf = lora.get_path(shapes, path)
        shape = leaf.shape[1:] if layer is not None else leaf.shape
        array = _array(sources[name], shape, transpose=path[-1] in (lora.A, lora.B, "kernel"))
        if layer is None:
            lora.set_path(adapters, path, array)
        else:
            lora.set_path(adapters, (*path, layer), array)
    return form, _stack_layers(adapters)


def _array(source: Source, shape: tuple[int, ...], transpose: bool) -> np.ndarray:
    """A tensor as [in, out], float32; UserError, naming it, where it has another shape."""
    source.check(shape[::-1] if transpose else shape, CONFIG)
    return read_all(FileParam((source,), transpose))


def _stack_layers(tree: Any) -> Any:
    """Dicts {layer: array} as stacks [L, ...]."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return np.stack([tree[layer] for layer in sorted(tree)])
    return {key: _stack_layers(value) for key, value in tree.items()}


def _normalize_name(name: str, family: Any) -> str:
    """A tensor's name without the parts that depend on PEFT's version and on the task type."""
    name = re.sub(r"\.(lora_[AB])\.[^.]+\.weight$", r".\1.weight", name.removeprefix(_PREFIX))
    name = re.sub(r"\.modules_to_save(\.[^.]+)?\.(weight|bias)$", r".\2", name)
    for ours, theirs in _renamed(family).items():
        name = f"{ours}.weight" if name == f"{theirs}.weight" else name
    if not family.reads_images:
        name = re.sub(rf"^({'|'.join(map(re.escape, _NESTED_PREFIXES))})", family.prefix, name)
    in_backbone = not name.startswith((family.prefix, *(f"{module}." for module in _heads(family))))
    return f"{family.prefix}{name}" if in_backbone else name


def _without_tied_head(sources: dict[str, Source], family: Any, file: Path) -> dict[str, Source]:
    """The tensors without the head, which PEFT writes beside an embedding that it is tied to."""
    modules = {name.rpartition(".")[0].rpartition(".")[2] for name in sources}
    head, embedding = _head(family), _module(family, "backbone", "embed_in")
    if len(modules & {head, embedding}) == 1 and "score" not in modules:
        raise UserError(
            f"{file} holds one of {embedding} and {_MODULES.get(head, head)}, which are tied: PEFT writes both, or "
            "has not tied them (ensure_weight_tying); merge the adapter with PEFT."
        )
    return {name: source for name, source in sources.items() if name != f"{head}.weight"}


def _module(family: Any, *path: str) -> str:
    return next(module for module, other in family.modules.items() if other == path)


def _head(family: Any) -> str:
    return _module(family, "embed_out")


def _tied_modules(family: Any) -> set[str]:
    """Names of the embedding and of the causal head."""
    head = _head(family)
    return {_module(family, "backbone", "embed_in"), head, _MODULES.get(head, head)}


def _heads(family: Any) -> list[str]:
    return [module for module, path in family.modules.items() if path[0] != "backbone"]


def _renamed(family: Any) -> dict[str, str]:
    """Modules that transformers 5 calls otherwise than the family's checkpoints."""
    return {module: name for module, name in _MODULES.items() if module in family.modules}


def _tensor_places(model: Any) -> dict[str, tuple[str, tuple[str, ...], int | None]]:
    """Every tensor that an adapter of the model may hold: its name to (module, path in the adapters, layer)."""
    family, places = model.family, {}
    modules = {path: module for module, path in family.linears.items()}
    saved = {path[1:]: (module, path) for module, path in family.modules.items() if path[0] == "backbone"}
    for tensor in family.tensors(model.config):
        path, name = tensor.path[:-1], family.prefix + tensor.name
        if path in modules and tensor.path[-1] == "kernel":
            for theirs, ours in (("lora_A", lora.A), ("lora_B", lora.B)):
                layer = f"{name.removesuffix('.weight')}.{theirs}.weight"
                places[layer] = modules[path], ("backbone", *path, ours), tensor.layer
        elif path in saved:
            module, path = saved[path]
            places[name] = module, (*path, tensor.path[-1]), None
    for module in _heads(family):
        places[f"{module}.weight"] = module, (*family.modules[module], "kernel"), None
    places[_SCORE_BIAS] = "score", ("score", "bias"), None
    return places


def add_to_leaves(leaves: Params, form: Lora, adapters: Params) -> Params:
    """A checkpoint's leaves, not yet read, to which an adapter is added on reading; modules that the adapter holds in
    full replace those of the checkpoint.

    Args:
      leaves: of `hf.load`.
      adapters: from `read`.
    """

    def overlay(leaf: Any, new: Any) -> Any:
        if isinstance(new, np.ndarray):
            return HostParam(new)
        if lora.A in new:
            return {**leaf, "kernel": LoraParam(leaf["kernel"], new[lora.A], np.float32(form.scale) * new[lora.B])}
        return {**leaf, **{key: overlay(leaf.get(key, {}), value) for key, value in new.items()}}

    heads = [key for key in ("embed_out", "score") if key in adapters and key not in leaves]
    return overlay(leaves, {key: value for key, value in adapters.items() if key not in heads})


# --- out


def _target_modules(form: Lora, family: Any) -> list[str] | str:
    """PEFT's target_modules: the ends of modules' names; of a model that reads images, whose linear layers are named by
    their part (text_model.q_proj), a regular expression of whole names, since other parts may have the same ends."""
    if not family.reads_images:
        return list(form.target_modules)
    parts = (name.partition(".") for name in form.target_modules)
    return "|".join(rf".*\b{part}\..*\b{end}" for part, _, end in parts)


def save(
    folder: str | Path,
    model: Any,
    adapters: Params,
    *,
    kind: str,
    base: str | None,
    revision: str | None = None,
    norm: Params | None = None,
) -> None:
    """Writes an adapter in PEFT's format. With several processes every one must call it; the first writes.

    Args:
      model: with `lora`.
      adapters: of numpy or JAX arrays in any shards.
      kind: 'causal' or 'scalar'; heads of the other kind are not written.
      base: the checkpoint that the adapter was trained on.
      revision: of the base, on the hub.
      norm: a final layer norm for the adapter to hold, with the bias of the score head; None: the bias is a tensor.
    """
    form, heads = model.lora, {path: module for module, path in model.family.modules.items()}
    other_head = heads[{"causal": ("score",), "scalar": ("embed_out",)}[kind]]
    tree = adapters
    if norm is not None:
        score = {"kernel": adapters["score"]["kernel"]}
        tree = {**adapters, "backbone": {**adapters["backbone"], "final_layer_norm": norm}, "score": score}
    tensors, modules = {}, []
    gathered: dict[tuple[str, ...], np.ndarray] = {}
    for name, (module, path, layer) in _tensor_places(model).items():
        try:
            leaf = lora.get_path(tree, path)
        except KeyError:
            continue
        if module == other_head:
            continue
        if path not in gathered:
            gathered[path] = np.asarray(gather_to_host(leaf), np.float32)
        array = gathered[path] if layer is None else gathered[path][layer]
        transpose = path[-1] in (lora.A, lora.B, "kernel")
        name = name.replace(module, _renamed(model.family).get(module, module)) if layer is None else name
        tensors[_PREFIX + name] = np.ascontiguousarray(array.T if transpose else array)
        if layer is None and _renamed(model.family).get(module, module) not in modules:
            modules.append(_renamed(model.family).get(module, module))
    embedding = gathered.get(("backbone", "embed_in", "embedding"))
    tying = kind == "causal" and model.config.tie_word_embeddings and embedding is not None
    if tying:  # PEFT copies a saved module: it has to know that the head is the same one
        head = _MODULES.get(_head(model.family), _head(model.family))
        tensors[f"{_PREFIX}{head}.weight"] = embedding.copy()
        modules.append(head)
    if not is_main():
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": TASKS[kind],
        "base_model_name_or_path": base,
        "revision": revision,
        "r": form.r,
        "lora_alpha": form.alpha,
        "lora_dropout": form.dropout,
        "target_modules": _target_modules(form, model.family),
        "use_rslora": form.use_rslora,
        "modules_to_save": modules or None,
        **({"ensure_weight_tying": True} if tying else {}),
        "bias": "none",
        "fan_in_fan_out": model.family.conv1d,
        "inference_mode": True,
    }
    write_file(folder / WEIGHTS, tensors)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
