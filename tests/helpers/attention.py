"""Attention as its formula, differentiated by JAX; and kernels of accelerators on CPUs.

Splash runs in Pallas' interpreter; cuDNN's arguments go to XLA's attention in its place.
"""

import functools
import math

import jax
import jax.numpy as jnp

from rlhf_jax.models import attention_kernels

splash = functools.partial(attention_kernels.splash_attention, interpret=True)
cudnn = functools.partial(attention_kernels.cudnn_attention, implementation="xla")


def use_kernels_on_cpu(setattr=setattr):
    """Makes CPUs the platform of the kernels."""
    setattr(attention_kernels, "PLATFORMS", dict.fromkeys(attention_kernels.PLATFORMS, "cpu"))
    setattr(attention_kernels, "splash_attention", splash)
    setattr(attention_kernels, "cudnn_attention", cudnn)


def plain_attention(query, key, value, keep):
    """[B, H, Q, K], [B, H, S, K], keep [B, 1, Q, S]."""
    scores = jnp.einsum("bhqk,bhsk->bhqs", query, key) / math.sqrt(query.shape[-1])
    return jnp.einsum("bhqs,bhsk->bhqk", jax.nn.softmax(jnp.where(keep, scores, -1e9), axis=-1), value)


def plain_causal(query, key, value, mask):
    length = mask.shape[1]
    keep = mask[:, None, None, :] & (jnp.arange(length)[:, None] >= jnp.arange(length)[None, :])[None, None]
    return plain_attention(*(x.swapaxes(1, 2) for x in (query, key, value)), keep).swapaxes(1, 2)
