"""A language model of two equations for tests of algorithms, which compiles in no time, and its twin in torch.

A hidden state is tanh of a token's embedding and of the mean embedding of the tokens up to it. It stands in for a
decoder where a test is about what an algorithm makes of log-probabilities and values.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class BagModel:
    """What algorithms call of a model of `rlhf_jax.models`, on one device."""

    vocab_size: int
    width: int = 16
    layout = lora = pad_id = None
    linear_logits = True

    @property
    def config(self):
        return SimpleNamespace(vocab_size=self.vocab_size, hidden_dropout=0.0, attention_dropout=0.0)

    def init(self, key, heads=("causal",)):
        """Params with every weight random; heads of 'causal' and 'scalar'."""

        def draw(number, *shape, scale):
            return scale * jax.random.normal(jax.random.fold_in(key, number), shape)

        params = {
            "embed_in": {"embedding": draw(0, self.vocab_size, self.width, scale=0.5)},
            "mix": {"kernel": draw(1, self.width, self.width, scale=self.width**-0.5)},
        }
        if "causal" in heads:
            params["embed_out"] = {"kernel": draw(2, self.width, self.vocab_size, scale=0.5)}
        if "scalar" in heads:
            params["score"] = {"kernel": draw(3, self.width, 1, scale=0.5)}
        return params

    def with_lora(self, base, params):
        return params  # it is trained in full

    def hidden(self, params, tokens, mask, *, last=None, dtype=jnp.float32, remat="none", images=None, **_):
        """[B, S, width], or its last columns."""
        x, total, count = _sums(params, tokens, mask)
        return _mixed(params, x, total, count)[:, slice(None) if last is None else slice(-last, None)].astype(dtype)

    def hidden_after_prompts(self, params, prompts, prompt_mask, responses, mask, *, dtype=jnp.float32, **_):
        """(last column of the prompts [P, width], responses [P * G, T, width])."""
        x, total, count = _sums(params, prompts, prompt_mask)
        last = _mixed(params, x, total, count)[:, -1]
        before, counted = (jnp.repeat(a[:, -1:], len(responses) // len(prompts), axis=0) for a in (total, count))
        x, total, count = _sums(params, responses, mask)
        return last.astype(dtype), _mixed(params, x, total + before, count + counted).astype(dtype)

    def logits(self, params, hidden):
        return hidden @ params["embed_out"]["kernel"]

    def scalars(self, params, hidden):
        return (hidden @ params["score"]["kernel"])[..., 0].astype(jnp.float32)


def _sums(params, tokens, mask):
    """Embeddings, their sums up to each column, and the tokens summed."""
    x = jnp.where(mask[..., None], jnp.asarray(params["embed_in"]["embedding"])[tokens], 0.0)
    return x, jnp.cumsum(x, axis=1), jnp.cumsum(mask, axis=1)[..., None]


def _mixed(params, x, total, count):
    return jnp.tanh(x + (total / jnp.maximum(count, 1)) @ params["mix"]["kernel"])


def torch_logits(params, tokens, mask):
    """The same by torch: params as a tree of tensors, tokens and mask as arrays -> logits [B, S, V]."""
    import torch

    mask = torch.tensor(mask)[..., None]
    x = params["embed_in"]["embedding"][torch.tensor(tokens).long()] * mask
    mean = x.cumsum(1) / mask.cumsum(1).clamp(min=1)
    return torch.tanh(x + mean @ params["mix"]["kernel"]) @ params["embed_out"]["kernel"]
