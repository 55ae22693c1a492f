"""Frozen kernels in int8 with a float32 scale for each output column, by qwix (the extra `int8`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.errors import UserError
from rlhf_jax.types import Array, Params


def is_int8(leaf: Any) -> bool:
    """Whether a param is an int8 kernel: a qwix.QArray, a pytree of `qvalue` int8 [..., D, F] and `scale` float32
    [..., 1, F]."""
    return hasattr(leaf, "qvalue")


def check_installed(option: str) -> None:
    """UserError, naming the option, where qwix is not installed."""
    if importlib.util.find_spec("qwix") is None:
        raise UserError(f"{option} needs the package qwix: pip install '.[int8]'; or leave it out")


def quantize_int8(params: Params, paths: Sequence[Sequence[str]]) -> Params:
    """Params with the stacked kernels [L, D, F] at some paths in int8: q = round(W / s), s = max |W| / 127 over the
    rows of a column, so that no weight is off by more than s / 2.

    Args:
      params: nested dicts, all of a model's or a part.
      paths: of the linear layers whose kernels are quantized.

    Returns:
      The same pytree with a qwix.QArray in place of each of these kernels; int8 kernels stay as they are.
    """
    import qwix

    kernels = {(*path, "kernel") for path in paths}

    def quantize(path: tuple, leaf: Any) -> Any:
        if is_int8(leaf) or tuple(entry.key for entry in path) not in kernels:
            return leaf
        leaf = leaf.astype(jnp.float32)
        return qwix.quantize(leaf, jnp.int8, channelwise_axes=(0, 2), calibration_method=f"absmax,{127.5 / 127}")

    return jax.tree_util.tree_map_with_path(quantize, params, is_leaf=is_int8)


def dequantize(kernel: Any, dtype: Any) -> Array:
    """A kernel, float or int8, in `dtype`; an int8 kernel is multiplied by its scale in float32 first."""
    if is_int8(kernel):
        import qwix

        kernel = qwix.dequantize(kernel)
    return kernel.astype(dtype)
