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


def _arguments(form: Form, keep: Array | None, lengths: Lengths | None, dtype: Any) -> tuple[tuple, dict[str, Any]]:
    """What both kernels take after query, key and value: (operands, parameters)."""
    absent = jnp.zeros(0, dtype)
    bias = absent if keep is None else jnp.where(keep, 0, kernels.get_large_negative_number(dtype)).astype(dtype)
    operands = (bias, *([absent] * 2 if lengths is None else lengths), *[absent] * 4)
    padding = "NO_MASK" if lengths is None else "PADDING"
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


def forward(
    form: Form, query: Array, key: Array, value: Array, keep: Array | None, lengths: Lengths | None
) -> tuple[Array, Array]:
    """Attention of queries to keys.

    Args:
      query: [N, Q, H, K] bfloat16.
      key, value: [N, S, KV, K]. Head h of the queries reads head h // (H / KV).
      keep: bool [N, 1, Q, S], the keys that each query sees; even numbers of queries and keys. None: all.
      lengths: None: all columns.

    Returns:
      (output [N, Q, H, K], log-sum-exp of the scores [N, H, Q] float32). The log-sum-exp of padding has no meaning.
    """
    operands, parameters = _arguments(form, keep, lengths, query.dtype)
    out, logsumexp = kernels._dot_product_attention_fwd_p_wrapper.bind(
        query, key, value, *operands, **parameters, is_training=True
    )
    return out, logsumexp


def backward(
    form: Form,
    query: Array,
    key: Array,
    value: Array,
    keep: Array | None,
    lengths: Lengths | None,
    out: Array,
    logsumexp: Array,
    d_out: Array,
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value, in their shapes and dtype.

    The weights are exp(scores - logsumexp): where `out` and `logsumexp` are of a softmax over more keys than `key`, so
    are the gradients.

    Args:
      form, query, key, value, keep, lengths: as in `forward`.
      out, d_out: the output and its gradient [N, Q, H, K].
      logsumexp: [N, H, Q] float32.
    """
    operands, parameters = _arguments(form, keep, lengths, query.dtype)
    return tuple(
        kernels._dot_product_attention_bwd_p_wrapper.bind(
            query, key, value, *operands, logsumexp, out, d_out, **parameters
        )
    )
