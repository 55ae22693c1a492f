"""Drafts of the next tokens from text that is there already (prompt lookup; Saxena 2023, and Yang et al. 2023,
arXiv:2304.04487)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.types import Array

NGRAM = 2
"""Tokens that must be equal for a draft."""


def ngram_drafts(prompt: Array, response: Array, siblings: Array, lengths: Array, t: Array, count: int) -> Array:
    """What followed the last `NGRAM` tokens where they occurred before: last in the row itself, else in another
    response to its prompt.

    Args:
      prompt: [S, C] int32, left-padded.
      response: [S, T] int32, the row's response.
      siblings: [S, G, T] int32, responses to the same prompt.
      lengths: [S, G] int32, their tokens so far.
      t: [S] int32, tokens of the row's response so far.
      count: drafts of a row.

    Returns:
      [S, count] int32; without an occurrence tokens of no meaning.
    """
    columns = prompt.shape[1]
    text = jnp.concatenate([prompt, response], axis=1)
    ends = columns + t
    tail = jnp.take_along_axis(text, ends[:, None] - NGRAM + jnp.arange(NGRAM)[None], axis=1)
    own_end = _last_occurrence(text, tail, ends)
    everywhere = siblings.reshape(len(siblings), -1)
    in_others = _last_occurrence(siblings, tail[:, None], lengths)
    # Of several siblings the last; places count in the concatenation of their responses.
    offset = jnp.arange(siblings.shape[1]) * siblings.shape[2]
    other_end = jnp.max(jnp.where(in_others >= 0, in_others + offset[None], -1), axis=1)
    ahead = jnp.arange(count)[None]
    from_own = jnp.take_along_axis(text, jnp.minimum(own_end[:, None] + ahead, text.shape[1] - 1), axis=1)
    from_other = jnp.take_along_axis(
        everywhere, jnp.clip(other_end[:, None] + ahead, 0, everywhere.shape[1] - 1), axis=1
    )
    return jnp.where((own_end >= 0)[:, None], from_own, from_other)


def _last_occurrence(text: Array, tail: Array, ends: Array) -> Array:
    """The place after the last occurrence of `tail` [..., n] that ends before the last token of `text` [..., S], of
    `ends` [...] tokens; -1: there is none."""
    n, size = tail.shape[-1], text.shape[-1]
    places = jnp.expand_dims(n + jnp.arange(size - n + 1), range(ends.ndim))
    equal = jnp.stack(
        [jax.lax.slice_in_dim(text, i, size - n + 1 + i, axis=-1) == tail[..., i : i + 1] for i in range(n)]
    )
    matches = jnp.all(equal, axis=0) & (places < ends[..., None])
    return jnp.max(jnp.where(matches, places, -1), axis=-1)
