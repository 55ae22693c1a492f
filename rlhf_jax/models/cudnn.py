"""cuDNN's flash attention and its gradient, as two functions.

`jax.nn.dot_product_attention` is one function with one gradient, which ignores that of the log-sum-exp, and returns the
log-sum-exp in the dtype of the output. A softmax over several sets of keys needs both as they are (see
`attention_kernels`), so this calls jax's primitives of the two kernels, which have the same arguments in jax 0.10 and
0.11. It is all that knows them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as kernels

from rlhf_jax.types import Array


class Lengths(NamedTuple):
    """The first columns of a row that are no padding, int32 [N]. Others are not read and have an output of 0."""

    queries: Array
    keys: Array


class Part(NamedTuple):
    """Keys that N rows of queries attend to, and which of them each query sees."""

    key: Array  # [N, S, KV, K]; head h of H heads of queries reads head h // (H / KV)
    value: Array  # [N, S, KV, K]
    keep: Array | None  # bool [N, 1, Q, S], even numbers of queries and keys; None: all within `lengths`
    lengths: Lengths | None  # None: all columns


class Form(NamedTuple):
    """What a call computes besides the products; hashable."""

    scale: float
    causal: bool = False
    """A query sees the keys of columns up to its own."""
    window: int | None = None
    """With `causal`: and only the last `window` of these."""


def refusal(head_dim: int, device: jax.Device) -> str | None:
    """Why cuDNN cannot compute attention with heads of this size on a device, which may be a described one; None: it
    can."""
    major = int(str(getattr(device, "compute_capability", "0")).split(".")[0])
    largest = 256 if major >= 9 else 128
    if head_dim % 8 or head_dim > largest:
        return f"heads must be multiples of 8 of at most {largest} on this device, and the model's are {head_dim}"
    if major < 8:
        return "it needs a GPU of compute capability 8.0"
    try:
        kernels.check_cudnn_version()
    except RuntimeError as error:
        return f"{str(error).rstrip('.')}: pip install nvidia-cudnn-cu13"
    return None


def _arguments(form: Form, query: Array, part: Part) -> tuple[tuple, dict[str, Any]]:
    """What both kernels take: (operands, parameters)."""
    keep, dtype = part.keep, query.dtype
    absent = jnp.zeros(0, dtype)
    bias = absent if keep is None else jnp.where(keep, 0, kernels.get_large_negative_number(dtype)).astype(dtype)
    lengths = [absent] * 2 if part.lengths is None else part.lengths
    operands = (query, part.key, part.value, bias, *lengths, *[absent] * 4)
    padding = "NO_MASK" if part.lengths is None else "PADDING"
    mask = {"NO_MASK": "CAUSAL", "PADDING": "PADDING_CAUSAL"}[padding] if form.causal else padding
    return operands, {
        "scale": form.scale,
        "seed": 42,  # of dropout; jax's default
        "dropout_rate": 0.0,
        "variadic_args": (keep is not None, False),  # whether there is a bias, and a gradient of it
        "mask_type": kernels.MaskType[mask],
        "layout": kernels.AttentionLayout.BTNH.value,
        "sliding_window_length": form.window,
    }


def forward(form: Form, query: Array, part: Part) -> tuple[Array, Array]:
    """Attention of queries [N, Q, H, K], bfloat16 or float16, to the keys of a part.

    Returns:
      (output [N, Q, H, K], log-sum-exp of the scores [N, H, Q] float32). The log-sum-exp of padding has no meaning.
    """
    operands, parameters = _arguments(form, query, part)
    out, logsumexp = kernels._dot_product_attention_fwd_p_wrapper.bind(*operands, **parameters, is_training=True)
    return out, logsumexp


def backward(
    form: Form, query: Array, part: Part, out: Array, logsumexp: Array, d_out: Array
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value, in their shapes and dtype.

    The weights are exp(scores - logsumexp): where `out` and `logsumexp` are of a softmax over more keys than the
    part's, so are the gradients.

    Args:
      form, query, part: as in `forward`.
      out, d_out: the output and its gradient [N, Q, H, K].
      logsumexp: [N, H, Q] float32.
    """
    operands, parameters = _arguments(form, query, part)
    return tuple(kernels._dot_product_attention_bwd_p_wrapper.bind(*operands, logsumexp, out, d_out, **parameters))
