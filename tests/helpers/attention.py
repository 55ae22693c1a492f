"""Attention as its formula, differentiated by JAX; and kernels of accelerators on CPUs.

Splash runs in Pallas' interpreter, Tokamax's function in its form for XLA. In place of cuDNN's two kernels are their
formulas, with NaN wherever cuDNN promises nothing.
"""

import functools
import math

import jax
import jax.numpy as jnp

from rlhf_jax.models import attention_kernels, cudnn

splash = functools.partial(attention_kernels.splash_attention, interpret=True)
tokamax = functools.partial(attention_kernels.tokamax_attention, implementation="xla")


def use_kernels_on_cpu(setattr=setattr):
    """Makes CPUs the platform of the kernels."""
    setattr(attention_kernels, "PLATFORMS", dict.fromkeys(attention_kernels.PLATFORMS, "cpu"))
    setattr(attention_kernels, "splash_attention", splash)
    setattr(attention_kernels, "tokamax_attention", tokamax)
    setattr(cudnn, "refusal", lambda *_: None)
    setattr(cudnn, "forward", cudnn_forward)
    setattr(cudnn, "backward", cudnn_backward)


def _scores(form, query, part):
    """[N, H, Q, S], and which queries are no padding [N, Q]."""
    key, _, keep, lengths = part
    (rows, queries, heads, _), keys = query.shape, key.shape[1]
    scores = form.scale * jnp.einsum("nqhd,nshd->nhqs", query, jnp.repeat(key, heads // key.shape[2], axis=2))
    columns, seen = jnp.arange(keys)[None], jnp.ones((rows, 1, queries, keys), bool)
    if form.causal:
        behind = jnp.arange(queries)[:, None] - columns
        seen &= ((behind >= 0) & (behind < (keys if form.window is None else form.window)))[None, None]
    real = jnp.ones((rows, queries), bool)
    if lengths is not None:
        seen &= (columns < lengths.keys[:, None])[:, None, None]
        real = jnp.arange(queries)[None] < lengths.queries[:, None]
    if keep is not None:
        assert queries % 2 == keys % 2 == 0 and keep.shape[-2:] == (queries, keys)
        scores = jnp.where(keep, scores, 0.7 * jnp.finfo(jnp.float32).min)
    return jnp.where(seen, scores, -jnp.inf), real


def cudnn_forward(form, query, part):
    scores, real = _scores(form, query, part)
    value = jnp.repeat(part.value, query.shape[2] // part.value.shape[2], axis=2)
    logsumexp = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("nhqs,nshd->nqhd", jnp.exp(scores - logsumexp[..., None]), value)
    return jnp.where(real[..., None, None], out, jnp.nan), jnp.where(real[:, None], logsumexp, jnp.nan)


def cudnn_backward(form, query, part, out, logsumexp, d_out):
    (scores, real), (key, value, _, lengths) = _scores(form, query, part), part
    shared = query.shape[2] // key.shape[2]
    out, d_out = (jnp.where(real[..., None, None], x, 0) for x in (out, d_out))
    weights = jnp.where(real[:, None, :, None], jnp.exp(scores - logsumexp[..., None]), 0)
    d_weights = jnp.einsum("nqhd,nshd->nhqs", d_out, jnp.repeat(value, shared, axis=2))
    d_scores = form.scale * weights * (d_weights - (out * d_out).sum(axis=-1).swapaxes(1, 2)[..., None])
    d_query = jnp.einsum("nhqs,nshd->nqhd", d_scores, jnp.repeat(key, shared, axis=2))
    of_heads = (jnp.einsum("nhqs,nqhd->nshd", *pair) for pair in ((d_scores, query), (weights, d_out)))
    d_keys = (x.reshape(*key.shape[:3], shared, -1).sum(axis=3) for x in of_heads)
    if lengths is not None:
        columns = (jnp.arange(key.shape[1])[None] < lengths.keys[:, None])[..., None, None]
        d_keys = (jnp.where(columns, x, jnp.nan) for x in d_keys)
    return jnp.where(real[..., None, None], d_query, jnp.nan), *d_keys


def plain_attention(query, key, value, keep):
    """[B, H, Q, K], [B, H, S, K], keep [B, 1, Q, S]."""
    scores = jnp.einsum("bhqk,bhsk->bhqs", query, key) / math.sqrt(query.shape[-1])
    return jnp.einsum("bhqs,bhsk->bhqk", jax.nn.softmax(jnp.where(keep, scores, -1e9), axis=-1), value)


def plain_causal(query, key, value, mask):
    length = mask.shape[1]
    keep = mask[:, None, None, :] & (jnp.arange(length)[:, None] >= jnp.arange(length)[None, :])[None, None]
    return plain_attention(*(x.swapaxes(1, 2) for x in (query, key, value)), keep).swapaxes(1, 2)
