"""Attention over whole rows by an implementation that `attn_implementation` names, and what each of them supports.

blocked is `attention.causal_attention`; cudnn and splash are kernels of jax, for NVIDIA GPUs and TPUs. Shape letters as
in `attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from rlhf_jax.models.attention import ATTENTION, causal_attention, causal_mask
from rlhf_jax.models.decoder_context import Context, DecoderConfig, ScoreFunction
from rlhf_jax.parallel import xla_flags
from rlhf_jax.parallel.sharding import Layout, fitting_axes
from rlhf_jax.types import Array

PLATFORMS = {"cudnn": "gpu", "splash": "tpu"}
"""The platform of the devices that a kernel is for; blocked runs on all."""
SPLASH_BLOCKS = (512, 256, 128)  # largest first; rows are padded to a multiple of the smallest
CUDNN_MULTIPLE = 8  # of the tokens of a row: jax refuses odd lengths in cuDNN's backward pass


def resolved(implementation: str, config: DecoderConfig, dtype: Any, device: jax.Device, *, dropout: bool) -> str:
    """What `auto` is on a device: the fastest that is measured (docs/benchmarks.md) and computes the model's attention.

    Args:
      implementation: auto, or one of the implementations that it chooses from, which is returned unchanged.
      config, dtype, dropout: as in `unsupported`.
      device: may be a described one.

    Returns:
      blocked, or cudnn on NVIDIA GPUs of compute capability 9 (Hopper).
    """
    if implementation != "auto":
        return implementation
    hopper = device.platform == "gpu" and str(getattr(device, "compute_capability", "")).startswith("9.")
    if hopper and unsupported("cudnn", config, dtype, device.platform, dropout=dropout) is None:
        return "cudnn"
    return "blocked"


def unsupported(
    implementation: str, config: DecoderConfig, dtype: Any, platform: str, *, dropout: bool = False
) -> str | None:
    """Why an implementation cannot compute a model's attention; None: it can.

    Args:
      implementation: blocked, cudnn or splash.
      platform: of the devices: cpu, gpu or tpu.
      dropout: whether the model is trained with its dropout.
    """
    if implementation == "blocked":
        return None
    target = PLATFORMS[implementation]
    if platform != target:
        return f"it is for devices of the platform {target}, and the mesh has devices of the platform {platform}"
    if dropout and config.attention_dropout > 0:
        return f"it has no dropout, and the model's attention_dropout is {config.attention_dropout:g}"
    if implementation == "splash":
        windows = set(config.layer_window)
        return "it takes one window for all layers, and the model's layers have several" if len(windows) > 1 else None
    if config.attention_softcap is not None:
        return f"it has no soft cap of the scores, and the model's attention_softcap is {config.attention_softcap:g}"
    if xla_flags.are_deterministic():
        return "XLA fails to compile its gradient among deterministic kernels (--deterministic or XLA_FLAGS)"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it computes in float16 and bfloat16, and --dtype is {jnp.dtype(dtype).name}"
    return _refused_by_jax(config)


def _refused_by_jax(config: DecoderConfig) -> str | None:
    """Why jax refuses to trace cuDNN's attention and its gradient: no cuDNN, or the head size. None: it does not."""
    query = jax.ShapeDtypeStruct((1, CUDNN_MULTIPLE, config.num_attention_heads, config.head_dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, CUDNN_MULTIPLE, config.num_key_value_heads, config.head_dim), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((1, CUDNN_MULTIPLE), jnp.bool_)

    def gradients(query: Array, key: Array, value: Array, mask: Array) -> Any:
        out, pull = jax.vjp(lambda *qkv: cudnn_attention(*qkv, mask, config.score_function), query, key, value)
        return pull(out)

    try:
        jax.eval_shape(gradients, query, key, key, mask)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        hint = ""
        if config.head_dim > 128:
            hint = "; heads of more than 128 need a GPU of compute capability 9.0 in this machine, for a dry run too"
        return f"jax refuses it: {str(error).splitlines()[0].rstrip('.')}{hint}"
    return None


def row_attention(
    context: Context,
    query: Array,
    key: Array,
    value: Array,
    mask: Array,
    *,
    window: Array | int | None = None,
    drop: Callable[[Array], Array] | None = None,
    segment_ids: Array | None = None,
    start_at_0: bool = False,
) -> Array:
    """`attention.causal_attention` by the context's `attn_implementation`.

    Arguments and result as there. `start_at_0`: the unmasked columns of each row are its first. Options that the
    implementation does not support were refused when the models were opened; an unsupported argument that reaches this
    function raises an error of the kernel.
    """
    score = context.config.score_function
    if context.attn_implementation == "blocked":
        options = {"window": window, "drop": drop, "segment_ids": segment_ids}
        return causal_attention(query, key, value, mask, score, **options)
    assert drop is None, f"{context.attn_implementation} has no dropout"
    if context.attn_implementation == "cudnn":
        traced = window if isinstance(window, jax.Array) else None
        if start_at_0 and query.shape[1] == key.shape[1] and traced is None:
            mask = None

        def cudnn(query: Array, key: Array, value: Array, mask: Any, segment_ids: Any, traced: Any) -> Array:
            size = window if traced is None else traced
            return cudnn_attention(query, key, value, mask, score, window=size, segment_ids=segment_ids)

        return _on_each_device(context.layout, cudnn, (query, key, value), (mask, segment_ids), (traced,))

    def splash(query: Array, key: Array, value: Array, mask: Array, segment_ids: Any) -> Array:
        return splash_attention(query, key, value, mask, score, window=window, segment_ids=segment_ids)

    return _on_each_device(context.layout, splash, (query, key, value), (mask, segment_ids), ())


def _on_each_device(
    layout: Layout | None,
    attend: Callable[..., Array],
    heads: tuple[Array, ...],
    rows: tuple[Array | None, ...],
    replicated: tuple[Any, ...],
) -> Array:
    """`attend(*heads, *rows, *replicated)`, each device computing its rows and heads: XLA cannot split a kernel itself.

    Args:
      attend: of query, key and value, and the others.
      heads: query, key and value [B, ., heads, K].
      rows: arrays [B, ...] or None.
      replicated: what no device splits.
    """
    if layout is None or layout.mesh.size == 1:
        return attend(*heads, *rows, *replicated)
    batch, _, key_heads, _ = heads[1].shape
    split_rows = fitting_axes(layout, "rows", batch) or None
    split = P(split_rows, None, fitting_axes(layout, "tensor", key_heads) or None)
    specs = (split,) * len(heads) + (P(split_rows),) * len(rows) + (P(),) * len(replicated)
    # Pallas does not say over which axes the outputs of a kernel vary.
    mapped = jax.shard_map(attend, mesh=layout.mesh, in_specs=specs, out_specs=split, check_vma=False)
    return mapped(*heads, *rows, *replicated)


def _pad_left(x: Array | None, length: int) -> Array | None:
    """[B, S, ...] with zeros in front, [B, length, ...]."""
    if x is None or x.shape[1] == length:
        return x
    return jnp.pad(x, ((0, 0), (length - x.shape[1], 0), *[(0, 0)] * (x.ndim - 2)))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def cudnn_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    score: ScoreFunction,
    *,
    window: Array | int | None = None,
    segment_ids: Array | None = None,
    implementation: str = "cudnn",
) -> Array:
    """`attention.causal_attention` by cuDNN's flash attention, `jax.nn.dot_product_attention`.

    Padding, segments and window are one mask [B, 1, Q, S]: cuDNN takes no smaller one, and before 9.10.2 no window
    beside a mask. It skips the keys after a query where queries and keys are as many. A query that may see no key
    gets a finite value without meaning.

    Args:
      query, key, value, score, window, segment_ids: as in `causal_attention`; bfloat16, no soft cap.
      mask: as there; None: Q = S, and a query sees all columns up to itself within a static window, which is right
        where padding follows the tokens.
      implementation: of `jax.nn.dot_product_attention`.

    Returns:
      [B, Q, H, K].
    """
    queries, keys = query.shape[1], key.shape[1]
    padded_queries, padded_keys = _round_up(queries, CUDNN_MULTIPLE), _round_up(keys, CUDNN_MULTIPLE)
    options = {"scale": score.scale, "is_causal": queries == keys, "implementation": implementation}
    if mask is None:
        size = None if window is None else (window - 1, 0)
        padded = (jnp.pad(x, ((0, 0), (0, padded_keys - keys), (0, 0), (0, 0))) for x in (query, key, value))
        return jax.nn.dot_product_attention(*padded, local_window_size=size, **options)[:, :queries]
    query = _pad_left(query, padded_queries)
    key, value, mask, segment_ids = (_pad_left(x, padded_keys) for x in (key, value, mask, segment_ids))
    out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=causal_mask(mask, padded_queries, padded_keys, window, segment_ids),
        **options,
    )
    return out[:, padded_queries - queries :]


def splash_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array,
    score: ScoreFunction,
    *,
    window: int | None = None,
    segment_ids: Array | None = None,
    interpret: bool = False,
) -> Array:
    """`attention.causal_attention` by the TPU kernel of `jax.experimental.pallas.ops.tpu.splash_attention`.

    Padding is a segment of its own. Blocks of keys after a query's block or before its window are skipped. A query
    that may see no key gets a finite value without meaning.

    Args:
      query, key, value, mask, score: as in `causal_attention`.
      window: static.
      segment_ids: at least 0.
      interpret: run Pallas' interpreter, on any platform.

    Returns:
      [B, Q, H, K].
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    (_, queries, heads, _), keys = query.shape, key.shape[1]
    ids = jnp.where(mask, jnp.zeros(mask.shape, jnp.int32) if segment_ids is None else segment_ids, -1)
    padded_queries, padded_keys = _round_up(queries, SPLASH_BLOCKS[-1]), _round_up(keys, SPLASH_BLOCKS[-1])
    # Padding on the left: every query has a key at its own position.
    key, value = _pad_left(key, padded_keys), _pad_left(value, padded_keys)
    query = _pad_left(query * jnp.asarray(score.scale, query.dtype), padded_queries)
    ids = jnp.pad(ids, ((0, 0), (padded_keys - keys, 0)), constant_values=-1)
    query_ids = jnp.where(jnp.arange(padded_queries) < padded_queries - queries, -1, ids[:, -padded_queries:])
    shape, offset = (padded_queries, padded_keys), padded_keys - padded_queries
    seen = splash_attention_mask.LocalMask(shape, (None if window is None else window - 1, 0), offset)
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([seen] * heads),
        block_sizes=_splash_blocks(splash_attention_kernel, padded_queries, padded_keys),
        attn_logits_soft_cap=score.softcap,
        residual_checkpoint_name=ATTENTION,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    segments = splash_attention_kernel.SegmentIds(query_ids, ids)
    out = jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (query, key, value)), segments)
    return out.swapaxes(1, 2)[:, padded_queries - queries :]


def _splash_blocks(kernel: Any, queries: int, keys: int) -> Any:
    """The largest blocks that divide the padded lengths, for the forward and the backward pass."""
    rows, columns = (next(block for block in SPLASH_BLOCKS if length % block == 0) for length in (queries, keys))
    return kernel.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
