"""Frozen kernels as int8 numbers with a float32 scale for each output column, by qwix (the extra `int8`)."""

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
    """Params with the stacked kernels [L, D, F] at some paths in int8, q = round(W / s) with s = max |W| / 127 over the
    rows of a column: no number is off by more than s / 2, and what was narrowed before stays as it was.

    Args:
      params: nested dicts, whole or in part.
      paths: of the kernels' layers.

    Returns:
      The same pytree with a qwix.QArray in the place of each of these kernels, also of one that was there before.
    """
    import qwix

    kernels = {(*path, "kernel") for path in paths}

    def narrow(path: tuple, leaf: Any) -> Any:
        if is_int8(leaf) or tuple(entry.key for entry in path) not in kernels:
            return leaf
        leaf = leaf.astype(jnp.float32)
        return qwix.quantize(leaf, jnp.int8, channelwise_axes=(0, 2), calibration_method=f"absmax,{127.5 / 127}")

    return jax.tree_util.tree_map_with_path(narrow, params, is_leaf=is_int8)


def dequantize(kernel: Any, dtype: Any) -> Array:
    """A kernel of any kind in `dtype`; one of `quantize_int8`'s is multiplied with its scale in float32 first."""
    if is_int8(kernel):
        import qwix

        kernel = qwix.dequantize(kernel)
    return kernel.astype(dtype)
