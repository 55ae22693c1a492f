"""Frozen kernels in fewer bits: int8 with a float32 scale for each output column, by qwix (the extra `int8`), and 4-bit
NormalFloat (NF4) with a float32 scale for each block of a column. Dettmers et al. 2023 (QLoRA), arXiv:2305.14314."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.errors import UserError
from rlhf_jax.types import Array, Params

Kind = Literal["int8", "nf4"]

BLOCK_SIZE = 64
"""Weights that share a scale in NF4, as QLoRA's and bitsandbytes' default."""

# QLoRA, appendix E.
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("qvalue", "scale"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class NF4Kernel:
    """A kernel [..., D, F] in NF4, with b = `block_size(D)`: a pytree of two arrays.

    Two codes are packed in a byte, since an array of uint4 takes a byte an element in collectives of CPUs, and is
    refused by orbax. A byte holds two rows of one block, so that unpacking moves no data between devices.

    Attributes:
      qvalue: uint8 [..., D/2, F]; row i b/2 + j has the code of row i b + j in its low 4 bits and that of row
        i b + b/2 + j in its high ones.
      scale: float32 [..., D/b, F], the largest |W| of each block.
    """

    qvalue: Array
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., D, F]."""
        *layers, half, columns = self.qvalue.shape
        return (*layers, 2 * half, columns)


def is_quantized(leaf: Any) -> bool:
    """Whether a param is a kernel in int8 or NF4: an `NF4Kernel`, or a qwix.QArray, a pytree of `qvalue` int8
    [..., D, F] and `scale` float32 [..., 1, F]."""
    return hasattr(leaf, "qvalue")


def check_installed(option: str) -> None:
    """UserError, naming the option, where qwix is not installed."""
    if importlib.util.find_spec("qwix") is None:
        raise UserError(f"{option} needs the package qwix: pip install '.[int8]'; or leave it out")


def quantize(params: Params, paths: Sequence[Sequence[str]], kind: Kind) -> Params:
    """Params with the stacked kernels [L, D, F] at some paths in int8 or NF4.

    Args:
      params: nested dicts, all of a model's or a part.
      paths: of the linear layers whose kernels are quantized.

    Returns:
      The same pytree with a qwix.QArray or an NF4Kernel in place of each of these kernels; quantized kernels stay as
      they are.
    """
    kernels = {(*path, "kernel") for path in paths}
    function: Callable[[Array], Any] = {"int8": quantize_int8, "nf4": quantize_nf4}[kind]

    def quantize_leaf(path: tuple, leaf: Any) -> Any:
        if is_quantized(leaf) or tuple(entry.key for entry in path) not in kernels:
            return leaf
        return function(leaf.astype(jnp.float32))

    return jax.tree_util.tree_map_with_path(quantize_leaf, params, is_leaf=is_quantized)


def quantize_int8(kernel: Array) -> Any:
    """q = round(W / s), s = max |W| / 127 over the rows of a column, so that no weight is off by more than s / 2.

    [L, D, F] float32 -> qwix.QArray.
    """
    import qwix

    return qwix.quantize(kernel, jnp.int8, channelwise_axes=(0, 2), calibration_method=f"absmax,{127.5 / 127}")


def block_size(rows: int) -> int:
    """Rows of a block of NF4: the largest power of two that divides D, at most 64. It does not depend on the mesh, and
    so neither do the weights.

    Raises:
      UserError: D is odd.
    """
    if rows % 2:
        raise UserError(
            f"load_in_4bit: a kernel has {rows} rows, and an odd number cannot be stored two in a byte; leave the "
            "option out or give load_in_8bit"
        )
    return math.gcd(rows, BLOCK_SIZE)


def quantize_nf4(kernel: Array) -> NF4Kernel:
    """The nearest of s `NF4_VALUES`, s = max |W| over the b rows of a block of a column. No weight is off by more than
    0.152 s, half of the widest gap. Codes are those of qwix's `nf4`, which needs memory for two more kernels.

    [..., D, F] float32 -> NF4Kernel.
    """
    *layers, rows, columns = kernel.shape
    size = block_size(rows)
    blocks = kernel.reshape(*layers, rows // size, size, columns)
    scale = jnp.abs(blocks).max(axis=-2, keepdims=True)
    scale = jnp.where(scale == 0, 1.0, scale)
    values = np.array(NF4_VALUES)
    unit = blocks / scale
    codes = jnp.zeros(blocks.shape, jnp.uint8)
    for middle in ((values[1:] + values[:-1]) / 2).astype(np.float32):
        codes += (unit > middle).astype(jnp.uint8)
    low, high = jnp.split(codes, 2, axis=-2)
    return NF4Kernel((low | high << 4).reshape(*layers, rows // 2, columns), scale.squeeze(-2))


def _dequantize_nf4(kernel: NF4Kernel) -> Array:
    """[..., D, F] float32."""
    *layers, blocks, columns = kernel.scale.shape
    packed = kernel.qvalue.reshape(*layers, blocks, -1, columns)
    # The gradient of a scan moves what does not depend on the layer out of the loop, such as constants broadcast to the
    # kernel's shape. Behind the barrier they depend on it.
    constants = [jnp.float32(value) for value in NF4_VALUES], [jnp.uint8(1 << bit) for bit in range(8)]
    packed, (values, bits) = jax.lax.optimization_barrier((packed, constants))
    values = jnp.concatenate([_lookup(packed, bits[:4], values), _lookup(packed, bits[4:], values)], axis=-2)
    return (values * jnp.expand_dims(kernel.scale, -2)).reshape(kernel.shape)


def _lookup(packed: Array, bits: Sequence[Array], values: Sequence[Array]) -> Array:
    """The values whose numbers are in four bits of each byte, by a tree of selects: it fuses, where a gather is slow on
    TPUs."""
    for bit in bits:
        is_set = (packed & bit).astype(bool)
        values = [jnp.where(is_set, high, low) for low, high in zip(values[::2], values[1::2])]
    return values[0]


def dequantize(kernel: Any, dtype: Any) -> Array:
    """A kernel, float or quantized, in `dtype`; a quantized one is multiplied by its scale in float32 first."""
    if isinstance(kernel, NF4Kernel):
        return _dequantize_nf4(kernel).astype(dtype)
    if is_quantized(kernel):
        import qwix

        kernel = qwix.dequantize(kernel)
    return kernel.astype(dtype)
