"""Attention over whole rows by an implementation that `attn_implementation` names, and what each of them supports.

blocked is `attention.causal_attention`; cudnn and splash are kernels of jax, for NVIDIA GPUs and TPUs; tokamax is a
kernel of the library of this name, for Hopper GPUs. Shape letters as in `attention`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from rlhf_jax.models import cudnn
from rlhf_jax.models.attention import ATTENTION, Keys, causal_attention, causal_mask
from rlhf_jax.models.decoder_context import ALL_KEYS, Context, DecoderConfig, ScoreFunction
from rlhf_jax.parallel import xla_flags
from rlhf_jax.parallel.sharding import Layout, fitting_axes
from rlhf_jax.types import Array

PLATFORMS = {"cudnn": "gpu", "tokamax": "gpu", "splash": "tpu"}
"""The platform of the devices that a kernel is for; blocked runs on all."""
BY_LENGTH = ("cudnn", "tokamax")
"""Kernels that skip padding where it follows the tokens of a row, and else read a mask."""
SPLASH_BLOCKS = (512, 256, 128)  # largest first; rows are padded to a multiple of the smallest
CUDNN_MULTIPLE, TOKAMAX_MULTIPLE = 8, 128  # of the tokens of a row


def resolved(implementation: str, config: DecoderConfig, dtype: Any, device: jax.Device, *, dropout: bool) -> str:
    """What `auto` is on a device: the fastest that is measured or predicted (docs/benchmarks.md, "Which attention auto
    is") and computes the model's attention.

    Args:
      implementation: auto, or one of the implementations that it chooses from, which is returned unchanged.
      config, dtype, dropout: as in `unsupported`.
      device: may be a described one.

    Returns:
      blocked, or cudnn on NVIDIA GPUs of compute capability 8.0 (A100) and 9 (Hopper).
    """
    if implementation != "auto":
        return implementation
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform == "gpu" and (capability == "8.0" or capability.startswith("9.")):
        if unsupported("cudnn", config, dtype, device, dropout=dropout) is None:
            return "cudnn"
    return "blocked"


def unsupported(
    implementation: str, config: DecoderConfig, dtype: Any, device: jax.Device, *, dropout: bool = False
) -> str | None:
    """Why an implementation cannot compute a model's attention; None: it can.

    Args:
      implementation: blocked, cudnn, tokamax or splash.
      device: one of those that compute it; may be a described one.
      dropout: whether the model is trained with its dropout.
    """
    if implementation == "blocked":
        return None
    target = PLATFORMS[implementation]
    if device.platform != target:
        return f"it is for devices of the platform {target}, and the mesh has devices of the platform {device.platform}"
    if dropout and config.attention_dropout > 0:
        return f"it has no dropout, and the model's attention_dropout is {config.attention_dropout:g}"
    if implementation == "splash":
        windows = set(config.layer_window)
        return "it takes one window for all layers, and the model's layers have several" if len(windows) > 1 else None
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 and float16, and --dtype is {jnp.dtype(dtype).name}"
    if implementation == "tokamax":
        return _refused_by_tokamax(config, device)
    if config.attention_softcap is not None:
        return f"it has no soft cap of the scores, and the model's attention_softcap is {config.attention_softcap:g}"
    if xla_flags.are_deterministic():
        return "XLA fails to compile its gradient among deterministic kernels (--deterministic or XLA_FLAGS)"
    return cudnn.refusal(config.head_dim, device)


def _refused_by_tokamax(config: DecoderConfig, device: jax.Device) -> str | None:
    """Why Tokamax cannot trace its kernel and the gradient for a device; None: it can."""
    if importlib.util.find_spec("tokamax") is None:
        return "it needs pip install 'rlhf_jax[tokamax]'"
    if not str(getattr(device, "compute_capability", "")).startswith("9."):
        return "its kernel is for GPUs of compute capability 9 (Hopper)"
    shape = (1, TOKAMAX_MULTIPLE, config.num_attention_heads, config.head_dim)
    query = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    key = jax.ShapeDtypeStruct((*shape[:2], config.num_key_value_heads, shape[3]), jnp.bfloat16)

    def gradients(query: Array, key: Array, value: Array) -> Any:
        keys = Keys(key, value, jnp.ones(shape[:2], bool))
        attend = partial(tokamax_attention, config.score_function, keys=keys, device=device, start_at_0=True)
        out, pull = jax.vjp(attend, query)
        return pull(out)

    try:
        jax.eval_shape(gradients, query, key, key)
    except (NotImplementedError, ValueError) as error:
        return f"tokamax refuses it: {str(error).splitlines()[0].rstrip('.')}"
    return None


def row_attention(
    context: Context,
    query: Array,
    keys: Keys,
    *,
    prefix: Keys | None = None,
    window: Array | int | None = None,
    drop: Callable[[Array], Array] | None = None,
    segment_ids: Array | None = None,
    start_at_0: bool = False,
) -> Array:
    """`attention.causal_attention` by the context's `attn_implementation`.

    Arguments and result as there. `start_at_0`: the unmasked columns of each row, and of each prefix, are its first.
    Options that the implementation does not support were refused when the models were opened; an unsupported argument
    that reaches this function raises an error of the kernel.
    """
    score, implementation = context.config.score_function, context.attn_implementation
    # Only cuDNN's two functions take the log-sum-exp of a softmax over more keys.
    if implementation == "blocked" or (implementation != "cudnn" and prefix is not None):
        prefix = padding_first(prefix) if start_at_0 and prefix is not None else prefix
        options = {"prefix": prefix, "window": window, "drop": drop, "segment_ids": segment_ids}
        return causal_attention(query, keys, score, **options)
    assert drop is None, f"{implementation} has no dropout"
    arguments = (query, keys, prefix, segment_ids, window)
    if implementation == "splash":
        return _on_each_device(context.layout, partial(splash_attention, score), *arguments)
    if implementation == "tokamax":
        device = None if context.layout is None else context.layout.mesh.devices.flat[0]
        attend = partial(tokamax_attention, score, device=device, start_at_0=start_at_0)
        return _on_each_device(context.layout, attend, *arguments)
    sizes = tuple(sorted({ALL_KEYS if size is None else size for size in context.config.layer_window}))
    attend = partial(cudnn_attention, score, sizes=sizes, start_at_0=start_at_0)
    return _on_each_device(context.layout, attend, *arguments)


def _on_each_device(
    layout: Layout | None,
    attend: Callable[..., Array],
    query: Array,
    keys: Keys,
    prefix: Keys | None,
    segment_ids: Array | None,
    window: Array | int | None,
) -> Array:
    """`attend` of the other arguments, each device computing its rows and heads: XLA cannot split a kernel itself."""
    if layout is None or layout.mesh.size == 1:
        return attend(query, keys, prefix, segment_ids, window)
    traced = window if isinstance(window, jax.Array) else None

    def on_device(query: Array, keys: Keys, prefix: Keys | None, segment_ids: Array | None, traced: Any) -> Array:
        return attend(query, keys, prefix, segment_ids, window if traced is None else traced)

    units = len((keys if prefix is None else prefix).mask)
    rows, heads = fitting_axes(layout, "rows", units), fitting_axes(layout, "tensor", keys.key.shape[2])
    of_rows, of_heads = P(rows or None), P(rows or None, None, heads or None)
    of_keys = Keys(of_heads, of_heads, of_rows)
    specs = (of_heads, of_keys, None if prefix is None else of_keys, of_rows, P())
    # Pallas does not say over which axes the outputs of a kernel vary.
    mapped = jax.shard_map(on_device, mesh=layout.mesh, in_specs=specs, out_specs=of_heads, check_vma=False)
    return mapped(query, keys, prefix, segment_ids, traced)


def _pad_left(x: Array, length: int) -> Array:
    """[B, S, ...] with zeros in front, [B, length, ...]."""
    return x if x.shape[1] == length else jnp.pad(x, ((0, 0), (length - x.shape[1], 0), *[(0, 0)] * (x.ndim - 2)))


def _pad_right(x: Array, length: int) -> Array:
    """[B, S, ...] with zeros behind, [B, length, ...]."""
    return x if x.shape[1] == length else jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))


def padding_first(keys: Keys) -> Keys:
    """Keys whose padding follows their tokens, with the padding moved before them."""
    columns, count = keys.mask.shape[1], keys.mask.sum(axis=1, keepdims=True)
    return Keys(*(take_columns(x, (jnp.arange(columns)[None] + count) % columns) for x in keys))


def take_columns(x: Array, columns: Array) -> Array:
    """The columns [B, S] of [B, S, ...], by row."""
    return jnp.take_along_axis(x, columns.reshape(*columns.shape, *[1] * (x.ndim - 2)), axis=1)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def cudnn_attention(
    score: ScoreFunction,
    query: Array,
    keys: Keys,
    prefix: Keys | None = None,
    segment_ids: Array | None = None,
    window: Array | int | None = None,
    *,
    sizes: tuple[int, ...] = (),
    start_at_0: bool = False,
) -> Array:
    """`attention.causal_attention` by cuDNN's flash attention.

    With `start_at_0` the kernels skip padding, and read no mask: rows have lengths. Otherwise padding, segments and
    window are one mask [B, 1, Q, S]. A query that may see no key gets a finite value without meaning.

    Args:
      score: without a soft cap.
      query, keys, prefix, segment_ids, window: as there; bfloat16.
      sizes: the windows that a traced `window` may be, ascending; `ALL_KEYS` for none.
      start_at_0: the unmasked columns of each row, and of each prefix, are its first.

    Returns:
      [B, Q, H, K].
    """
    rows, pad, first = _row_part(keys, query.shape[1], window, segment_ids, start_at_0, CUDNN_MULTIPLE)
    which, windows = (None, (None,)) if rows.lengths is None else _static_windows(window, sizes)
    causal = query.shape[1] == keys.mask.shape[1]
    forms, parts, queries = [tuple(cudnn.Form(score.scale, causal, size) for size in windows)], [rows], pad(query)
    if prefix is not None:
        place = jnp.arange(queries.shape[1]) - first  # of the queries, in their row
        parts = [_prefix_part(prefix, place, len(query) // len(prefix.mask), window, start_at_0), rows]
        forms = [(cudnn.Form(score.scale),), *forms]
    out = _by_parts(tuple(forms), queries, tuple(parts), which)
    return jax.lax.slice_in_dim(out, first, first + query.shape[1], axis=1)


def _row_part(
    keys: Keys, queries: int, window: Array | int | None, segment_ids: Array | None, start_at_0: bool, multiple: int
) -> tuple[cudnn.Part, Callable[[Array], Array], int]:
    """Keys whose last `queries` columns attend to them.

    Args:
      multiple: of queries and keys, to which padding is added.

    Returns:
      The keys, with lengths where padding follows the tokens and all columns are queries, else with a mask; what adds
      the padding to queries; and the column of the first of these then.
    """
    columns, lengths = keys.mask.shape[1], None
    padded_queries, padded_columns = _round_up(queries, multiple), _round_up(columns, multiple)
    if start_at_0 and queries == columns and segment_ids is None:
        pad, first, keep = _pad_right, 0, None
        count = keys.mask.sum(axis=1, dtype=jnp.int32)
        lengths = cudnn.Lengths(count, count)
    else:
        pad, first = _pad_left, padded_queries - queries
        mask, ids = (None if x is None else _pad_left(x, padded_columns) for x in (keys.mask, segment_ids))
        keep = causal_mask(mask, padded_queries, padded_columns, window, ids)
    part = cudnn.Part(pad(keys.key, padded_columns), pad(keys.value, padded_columns), keep, lengths)
    return part, partial(pad, length=padded_queries), first


def _static_windows(window: Array | int | None, sizes: tuple[int, ...]) -> tuple[Array | None, tuple[int | None, ...]]:
    """(which of them it is, or None for the only one; the windows that `window` may be)"""
    if not isinstance(window, jax.Array):
        return None, (window,)
    return jnp.searchsorted(jnp.array(sizes), window), tuple(None if size == ALL_KEYS else size for size in sizes)


def _prefix_part(prefix: Keys, place: Array, copies: int, window: Array | int | None, start_at_0: bool) -> cudnn.Part:
    """The prefix of G = `copies` rows, whose queries are at the columns `place` [Q] of these rows."""
    count, columns = prefix.mask.sum(axis=1, dtype=jnp.int32), prefix.mask.shape[1]
    padded = _round_up(columns, CUDNN_MULTIPLE)
    key, value, mask = (_pad_right(x, padded) for x in prefix)
    if window is None and start_at_0:
        return cudnn.Part(key, value, None, cudnn.Lengths(jnp.full_like(count, copies * len(place)), count))
    keep = jnp.broadcast_to(mask[:, None, :], (len(mask), len(place), padded))
    if window is not None:
        # Columns from the first token: a row follows the last one of its prefix.
        tokens = jnp.cumsum(mask, axis=1) - 1
        far = count[:, None, None] + place[None, :, None] - tokens[:, None, :]
        keep = keep & (far < window)
    return cudnn.Part(key, value, jnp.tile(keep, (1, copies, 1))[:, None], None)


def _rows_of(x: Array, rows: int) -> Array:
    """[B, Q, H, ...] as [P, G Q, H, ...] and back: the rows that continue a prefix are next to each other."""
    return x.reshape(rows, -1, *x.shape[2:])


def _by_row(logsumexp: Array, rows: int) -> Array:
    """[P, H, G Q] -> [B, H, Q]."""
    prefixes, heads, _ = logsumexp.shape
    return logsumexp.reshape(prefixes, heads, rows // prefixes, -1).swapaxes(1, 2).reshape(rows, heads, -1)


def _by_prefix(logsumexp: Array, prefixes: int) -> Array:
    """[B, H, Q] -> [P, H, G Q]."""
    rows, heads, _ = logsumexp.shape
    return logsumexp.reshape(prefixes, rows // prefixes, heads, -1).swapaxes(1, 2).reshape(prefixes, heads, -1)


def _call(kernel: Callable[..., Any], forms: tuple[cudnn.Form, ...], which: Array | None, *arguments: Any) -> Any:
    """A kernel in one of its forms."""
    if which is None:
        return kernel(forms[0], *arguments)
    return jax.lax.switch(which, [partial(kernel, form) for form in forms], *arguments)


def _no_padding(x: Array, count: Array | None) -> Array:
    """[N, S, ...] with 0 after the first `count` [N] columns."""
    if count is None:
        return x
    columns = jnp.arange(x.shape[1])[None] < count[:, None]
    return jnp.where(columns.reshape(*columns.shape, *[1] * (x.ndim - 2)), x, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_parts(
    forms: tuple[tuple[cudnn.Form, ...], ...], query: Array, parts: tuple[cudnn.Part, ...], which: Array | None
) -> Array:
    """Attention of queries [B, Q, H, K] to the keys of all parts in one softmax: [B, Q, H, K].

    Each part is a call of the kernel. Its output is weighted by its share of the sum of exponentials; in the backward
    pass its weights are those of the whole softmax (Dao et al. 2022, arXiv:2205.14135, algorithm 4).

    Args:
      forms: of each part; where there are several, `which` says which one it is.
    """
    return _by_parts_forward(forms, query, parts, which)[0]


def _by_parts_forward(forms, query, parts, which) -> tuple[Array, tuple]:
    rows, outs, logsumexps = len(query), [], []
    for part, part_forms in zip(parts, forms, strict=True):
        index = which if len(part_forms) > 1 else None
        out, logsumexp = _call(cudnn.forward, part_forms, index, _rows_of(query, len(part.key)), part)
        count = None if part.lengths is None else part.lengths.queries
        outs.append(_rows_of(_no_padding(out, count), rows))
        logsumexps.append(_by_row(logsumexp, rows))
    out, logsumexp = outs[0], logsumexps[0]
    if len(parts) > 1:
        lengths = parts[-1].lengths
        if lengths is not None:  # what a kernel says of padding may be anything
            tokens = jnp.arange(query.shape[1])[None, None] < lengths.queries[:, None, None]
            logsumexps[-1] = jnp.where(tokens, logsumexps[-1], jnp.finfo(jnp.float32).min)
        logsumexp = reduce(jnp.logaddexp, logsumexps)
        shares = (jnp.exp(x - logsumexp).swapaxes(1, 2)[..., None] for x in logsumexps)
        out = reduce(jnp.add, (share * x for share, x in zip(shares, outs, strict=True))).astype(query.dtype)
    out, logsumexp = checkpoint_name((out, logsumexp), ATTENTION)
    return out, (query, parts, which, out, logsumexp)


def _by_parts_backward(forms, residuals, d_out) -> tuple[Any, ...]:
    query, parts, which, out, logsumexp = residuals
    rows, d_queries, d_parts = len(query), [], []
    for part, part_forms in zip(parts, forms, strict=True):
        index, count = which if len(part_forms) > 1 else None, len(part.key)
        of_all_parts = (_rows_of(out, count), _by_prefix(logsumexp, count), _rows_of(d_out, count))
        gradients = _call(cudnn.backward, part_forms, index, _rows_of(query, count), part, *of_all_parts)
        of_queries, of_keys = (None, None) if part.lengths is None else part.lengths
        d_query, d_key, d_value = map(_no_padding, gradients, (of_queries, of_keys, of_keys))
        d_queries.append(_rows_of(d_query, rows))
        d_parts.append(cudnn.Part(d_key, d_value, None, None))
    return reduce(jnp.add, d_queries), tuple(d_parts), None


_by_parts.defvjp(_by_parts_forward, _by_parts_backward)


@cache
def _tokamax() -> Any:
    """The library. It would parse the words of this command as its flags, and log each shape that it has no measured
    block sizes for."""
    import tokamax
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    logging.getLogger("absl").addFilter(lambda record: not str(record.msg).startswith("Autotuning cache miss"))
    return tokamax


def tokamax_attention(
    score: ScoreFunction,
    query: Array,
    keys: Keys,
    prefix: None = None,
    segment_ids: Array | None = None,
    window: Array | int | None = None,
    *,
    device: jax.Device | None = None,
    start_at_0: bool = False,
    implementation: str = "mosaic",
) -> Array:
    """`attention.causal_attention` by Tokamax's kernel for Hopper GPUs, which is written in Pallas (Mosaic GPU).

    Its gradient is two kernels without atomic additions, so that the order of its additions is specified.

    Args:
      score, query, keys, segment_ids, window: as in `causal_attention`; bfloat16.
      prefix: not supported.
      device: that it is for, which may be a described one; None: jax's default.
      start_at_0: as in `cudnn_attention`.
      implementation: of `tokamax.dot_product_attention`.

    Returns:
      [B, Q, H, K].
    """
    tokamax = _tokamax()
    rows, pad, first = _row_part(keys, query.shape[1], window, segment_ids, start_at_0, TOKAMAX_MULTIPLE)
    options = {"scale": score.scale, "logits_soft_cap": score.softcap, "implementation": implementation}
    if rows.lengths is not None:
        keep, count = None, jnp.maximum(rows.lengths.keys, 1)
    else:
        # Every query sees its own column, padding too.
        _, _, queries, columns = rows.keep.shape
        keep, count = rows.keep | jnp.eye(queries, columns, columns - queries, dtype=bool)[None, None], None
        window = None  # the mask has it

    def attend(query: Array, key: Array, value: Array, keep: Any, count: Any, window: Any) -> Array:
        more = {} if count is None else {"is_causal": True, "key_value_seq_lengths": count}
        more |= {} if window is None else {"local_window_size": (window - 1, 0)}
        return tokamax.dot_product_attention(query, key, value, mask=keep, **options, **more)

    out = _with_default_device(device, attend, pad(query), rows.key, rows.value, (keep, count, window))
    return jax.lax.slice_in_dim(out, first, first + query.shape[1], axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_default_device(
    device: jax.Device | None, attend: Callable[..., Array], query: Array, key: Array, value: Array, others: tuple
) -> Array:
    """`attend(query, key, value, *others)`; it and its gradient are traced while `device` is jax's default, by which
    Tokamax chooses what it computes."""
    with jax.default_device(device):
        return attend(query, key, value, *others)


def _with_default_device_forward(device, attend, query, key, value, others) -> tuple[Array, Any]:
    with jax.default_device(device):
        return jax.vjp(lambda *qkv: attend(*qkv, *others), query, key, value)


def _with_default_device_backward(device, attend, pull, d_out) -> tuple[Any, ...]:
    with jax.default_device(device):
        return *pull(d_out), None


_with_default_device.defvjp(_with_default_device_forward, _with_default_device_backward)


def splash_attention(
    score: ScoreFunction,
    query: Array,
    keys: Keys,
    prefix: None = None,
    segment_ids: Array | None = None,
    window: int | None = None,
    *,
    interpret: bool = False,
) -> Array:
    """`attention.causal_attention` by the TPU kernel of `jax.experimental.pallas.ops.tpu.splash_attention`.

    Padding is a segment of its own. Blocks of keys after a query's block or before its window are skipped. A query
    that may see no key gets a finite value without meaning.

    Args:
      score, query, keys: as in `causal_attention`.
      prefix: not supported.
      window: static.
      segment_ids: at least 0.
      interpret: run Pallas' interpreter, on any platform.

    Returns:
      [B, Q, H, K].
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    (_, queries, heads, _), (key, value, mask), columns = query.shape, keys, keys.mask.shape[1]
    ids = jnp.where(mask, jnp.zeros(mask.shape, jnp.int32) if segment_ids is None else segment_ids, -1)
    padded_queries, padded_keys = _round_up(queries, SPLASH_BLOCKS[-1]), _round_up(columns, SPLASH_BLOCKS[-1])
    # Padding on the left: every query has a key at its own position.
    key, value = _pad_left(key, padded_keys), _pad_left(value, padded_keys)
    query = _pad_left(query * jnp.asarray(score.scale, query.dtype), padded_queries)
    ids = jnp.pad(ids, ((0, 0), (padded_keys - columns, 0)), constant_values=-1)
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
