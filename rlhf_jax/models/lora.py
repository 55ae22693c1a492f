"""Low-rank adapters: a small pytree beside frozen params. Hu et al. 2021, arXiv:2106.09685.

A linear layer of weight W computes x W + s (x A) B, with A [D, r], B [r, F] and s = alpha / r, or alpha / sqrt(r) with
rslora (Kalajdzievski 2023, arXiv:2312.03732). Adapters are params like others, stacked over layers, [L, D, r] and
[L, r, F], at the paths of the kernels that they belong to, beside the modules that are trained in full. The model
computes with `with_lora`: the base with the adapters put into it, without a copy.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.errors import UserError
from rlhf_jax.models.quantization import dequantize, is_quantized
from rlhf_jax.types import Array, Params

A, B = "lora_a", "lora_b"
ALL_LINEAR = "all-linear"


@dataclasses.dataclass(frozen=True)
class Lora:
    """Configuration of an adapter: hashable, static under jit. Names and defaults are PEFT's and TRL's.

    Attributes:
      r: rank.
      alpha: the scale's numerator.
      dropout: rate of dropout on adapter inputs in training.
      target_modules: the linear layers with an adapter, by the names of the checkpoint.
      use_rslora: scale by alpha / sqrt(r).
      modules_to_save: modules that are trained in full, by the names of the checkpoint.
    """

    r: int = 16
    alpha: float = 32
    dropout: float = 0.05
    target_modules: tuple[str, ...] = ("query_key_value",)
    use_rslora: bool = False
    modules_to_save: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """s."""
        return self.alpha / math.sqrt(self.r) if self.use_rslora else self.alpha / self.r


def resolve_targets(model: Any, names: Sequence[str] | None, option: str) -> tuple[str, ...]:
    """The linear layers that `names` stand for, in the family's order.

    Args:
      model: that the adapter is for.
      names: as PEFT's target_modules: the ends of modules' names; or one regular expression, which whole names match,
        such as 'model.layers.0.self_attn.q_proj'; or 'all-linear'. None: PEFT's default for the family.
      option: the option that errors name.

    Raises:
      UserError: a name or pattern that is no linear layer, or that is one in some of the layers only.
    """
    family = model.family
    choices = f"{', '.join(family.linears)}, or {ALL_LINEAR!r}"
    if names is None:
        if not family.lora_targets:
            raise UserError(f"{option}: PEFT has no default for {family.name}; name layers of {choices}.")
        return family.lora_targets
    if ALL_LINEAR in names:
        return tuple(family.linears)
    if not names:
        raise UserError(f"{option} names no layer; there are {choices}.")
    linears, other_modules = _module_names(model)
    of_name = {
        name: [module for module, (kind, _) in linears.items() if kind == name or f".{module}".endswith(f".{name}")]
        for name in names
    }
    if len(names) == 1 and not of_name[names[0]]:
        of_name[names[0]] = _matches(names[0], linears, other_modules, option)
    if unknown := [name for name in names if not of_name[name]]:
        raise UserError(
            f"{option}: {unknown[0]!r} is no linear layer of {family.name}, nor alone a regular expression of whole "
            f"names such as {next(iter(linears))}; there are {choices} for all of them (the head is none of these: see "
            "modules_to_save)."
        )
    layers: dict[str, set[int]] = {}
    for module in {module for modules in of_name.values() for module in modules}:
        linear, layer = linears[module]
        layers.setdefault(linear, set()).add(layer)
    for linear, has in layers.items():
        every = {layer for name, layer in linears.values() if name == linear}
        if missing := sorted(every - has):
            raise UserError(
                f"{option}: {', '.join(names)} is {linear} in {len(has)} of {len(every)} layers "
                f"(not in layer {missing[0]}); adapters are stacked over layers, so all layers have the same ones."
            )
    return tuple(linear for linear in family.linears if linear in layers)


def _module_names(model: Any) -> tuple[dict[str, tuple[str, int]], list[str]]:
    """({a linear layer's name in the checkpoint: (its name in `Family.linears`, layer)}, names of other modules)."""
    family, paths = model.family, {path: name for name, path in model.family.linears.items()}
    linears: dict[str, tuple[str, int]] = {}
    other_modules = [name for name, path in family.modules.items() if path[0] != "backbone"]
    for tensor in family.tensors(model.config):
        module, path = f"{family.prefix}{tensor.name.rpartition('.')[0]}", tensor.path[:-1]
        if path in paths:
            linears[module] = paths[path], tensor.layer
        else:
            other_modules.append(module)
    return linears, other_modules


def _matches(pattern: str, linears: Iterable[str], other_modules: Iterable[str], option: str) -> list[str]:
    """The linear layers whose whole names match a regular expression."""
    try:
        expression = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"{option}: {pattern!r} is neither a layer nor a regular expression ({error}).") from None
    if wrong := [module for module in other_modules if module != "score" and expression.fullmatch(module)]:
        raise UserError(
            f"{option}: {pattern!r} also matches {wrong[0]}, which gets no adapter here: see modules_to_save."
        )
    return [module for module in linears if expression.fullmatch(module)]


def resolve_modules_to_save(family: Any, names: Sequence[str] | None, option: str) -> tuple[str, ...]:
    """`names` of modules that are trained in full, in the family's order; UserError for one that cannot be."""
    if unknown := [name for name in names or () if name not in family.modules]:
        raise UserError(f"{option}: {unknown[0]!r} cannot be trained in full; these can: {', '.join(family.modules)}.")
    return tuple(name for name in family.modules if name in (names or ()))


def get_path(tree: Params, path: Sequence[str]) -> Any:
    """The entry of nested dicts at a path."""
    for key in path:
        tree = tree[key]
    return tree


def set_path(tree: Params, path: Sequence[str], value: Any) -> None:
    """Sets the entry of nested dicts at a path, creating the dicts on the way."""
    *parents, last = path
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = value


def init(model: Any, key: Array, base: Params) -> Params:
    """A new adapter; the model initially equals the base model (B = 0).

    A is uniform in +-1/sqrt(D), as PEFT draws it (kaiming_uniform_ with a = sqrt(5)).

    Args:
      model: with `lora`.
      base: params of the base, for shapes and for copies of the modules that are trained in full.

    Returns:
      Adapters, float32.
    """
    lora, family = model.lora, model.family
    adapters: Params = {}
    for number, name in enumerate(family.linears):
        if name not in lora.target_modules:
            continue
        path = ("backbone", *family.linears[name])
        layers, rows, columns = get_path(base, path)["kernel"].shape
        bound = 1.0 / math.sqrt(rows)
        shape = (layers, rows, lora.r)
        a_LxDxr = jax.random.uniform(jax.random.fold_in(key, number), shape, jnp.float32, -bound, bound)
        set_path(adapters, path, {A: a_LxDxr, B: jnp.zeros((layers, lora.r, columns), jnp.float32)})
    for name in lora.modules_to_save:
        path = family.modules[name]
        set_path(adapters, path, jax.tree.map(lambda x: x.astype(jnp.float32), get_path(base, path)))
    return adapters


def with_lora(lora: Lora, base: Params, adapters: Params) -> Params:
    """The base with adapters put into it, as the model takes them: A and scale * B beside their kernel, and modules
    that are trained in full in place of the base's.

    Args:
      adapters: as `init`.

    Returns:
      Params; gradients flow to the adapters.
    """
    return _overlay(base, adapters, lora.scale)


def _overlay(base: Any, new: Any, scale: float) -> Any:
    if not isinstance(new, dict):
        return new
    params = dict(base) if isinstance(base, dict) else {}
    for key, value in new.items():
        params[key] = scale * value if key == B else _overlay(params.get(key), value, scale)
    return params


def merge_lora(params: Params, dtype: Any = jnp.float32) -> Params:
    """Params of `with_lora` as plain params: kernel + A B, added in float32 and returned in the kernel's dtype, or in
    `dtype` where the kernel is quantized."""
    if A in params:
        rest = {key: value for key, value in params.items() if key not in (A, B)}
        a, b = params[A].astype(jnp.float32), params[B].astype(jnp.float32)
        delta = jnp.einsum("...dr,...rf->...df", a, b, preferred_element_type=jnp.float32)
        kernel = params["kernel"]
        dtype = dtype if is_quantized(kernel) else kernel.dtype
        return {**rest, "kernel": (dequantize(kernel, jnp.float32) + delta).astype(dtype)}
    merged = {key: merge_lora(value, dtype) if isinstance(value, dict) else value for key, value in params.items()}
    return {key: dequantize(value, dtype) if is_quantized(value) else value for key, value in merged.items()}
