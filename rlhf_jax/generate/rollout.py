"""Sampling: prompts in, a `Rollout` out, prefill and decoding in one compiled program.

Every row samples with its own key, `fold_in(fold_in(key, row), t)`, so samples depend neither on the other rows of the
batch, nor on slots, chunks or the number of devices.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.generate.chunks import largest_divisor, map_in_chunks
from rlhf_jax.generate.guided import Guide
from rlhf_jax.generate.sampling import Sampling, is_on, sample
from rlhf_jax.generate.slots import Decoding, Prompts, Rows, decode_rows, mark_seen, take_rows
from rlhf_jax.types import Array, Params, PartialResponses, PromptBatch, Rollout


def generate(
    model: Any,
    params: Params,
    prompts: PromptBatch,
    key: Array,
    sampling: Sampling,
    *,
    dtype: Any = jnp.float32,
    **options: Any,
) -> Rollout:
    """Samples responses to prompts. Pure; jit it with model, sampling, group, decoding and dtype static.

    Args:
      model: a `models.Model` with a causal head.
      params: its params, layers stacked; they are sliced into layers once, here.
      prompts: tokens [P, C] int32 left-padded, lengths [P] int32; each is computed once for all of its responses.
      key: typed PRNG key of this rollout.
      sampling: how tokens are drawn, and where a response ends.
      dtype: compute dtype; logits and log-probabilities are float32.
      **options: group, responses to a prompt; and further ones, see `generate_unstacked`.

    Returns:
      Rollout of B = P * group rows with T = sampling.max_new_tokens: response [B, T] int32, lengths [B] int32,
      logprobs [B, T] float32.
    """
    return generate_unstacked(model, model.unstack(params, dtype), prompts, key, sampling, dtype=dtype, **options)


def generate_unstacked(
    model,
    unstacked,
    prompts: PromptBatch,
    key: Array,
    sampling: Sampling,
    *,
    group: int = 1,
    rows: Array | None = None,
    dtype=jnp.float32,
    decoding: Decoding | None = None,
    limits: Array | None = None,
    expected: Array | None = None,
    keys: Array | None = None,
    begun: PartialResponses | None = None,
    guide: Guide | None = None,
    return_steps: bool = False,
):
    """`generate` with params from `model.unstack`, for a rollout of several chunks that unstacks only once.

    Args:
      model: a `models.Model` with a causal head.
      unstacked: its params.
      prompts: tokens [P, C] left-padded, lengths [P], images; each is computed once for all of its responses.
      key: typed PRNG key of this rollout.
      sampling: how tokens are drawn, and where a response ends.
      group: G, responses to a prompt; row i of the B = P * G answers prompt i // G.
      rows: [B] int32 index of each row in the global batch (default 0..B-1), folded into its key.
      dtype: compute dtype; logits and log-probabilities are float32.
      decoding: how rows are decoded; None: `Decoding()`.
      limits: [B] int32, most tokens of each row, 1 to T; None: T.
      expected: [B] float32, expected tokens of each row: with fewer slots than rows the longest go first.
      keys: [B] typed keys of the rows, in place of those that `key` and `rows` give.
      begun: what the B responses have already; None: nothing.
      guide: which texts each of the B rows may have; None: any.
      return_steps: whether to return what decoding took.

    Returns:
      Rollout of B rows with T = sampling.max_new_tokens; with `return_steps` (Rollout, Steps), a count of each shard of
      the rows.
    """
    prompts, decoding = jax.tree.map(jnp.asarray, prompts), decoding or Decoding()
    b, t_max = prompts.tokens.shape[0] * group, sampling.max_new_tokens
    rows = jnp.arange(b) if rows is None else rows
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows) if keys is None else keys
    limits = jnp.full(b, t_max, jnp.int32) if limits is None else jnp.minimum(limits, t_max).astype(jnp.int32)
    expected = jnp.zeros(b, jnp.float32) if expected is None else expected
    slots = decoding.slots or b
    at_once = largest_divisor(b // group, slots // group)
    token, logprob, prefix = first_tokens(
        model, unstacked, prompts, keys, sampling, group=group, at_once=at_once, dtype=dtype, guide=guide, limits=limits
    )
    queue = _rows(token, logprob, sampling, keys=keys, limits=limits, expected=expected)
    if begun is not None:
        names, goes_on = ("response", "logprobs", "lengths", "ended"), begun.lengths > 0
        queue = queue._replace(**{n: take_rows(goes_on, getattr(begun, n), getattr(queue, n)) for n in names})
    automaton = None if guide is None else guide.automaton
    if guide is not None:
        states = guide.automaton.states(guide.start, queue.response)
        queue = queue._replace(state=jnp.take_along_axis(states, queue.lengths[:, None], axis=1)[:, 0])

    def decode(model, weights, work):
        unstacked, automaton = weights
        shards = b // work[1].lengths.shape[0]
        local = dataclasses.replace(decoding, slots=max(slots // shards, 1))
        started = begun is not None
        options = {"sampling": sampling, "decoding": local, "dtype": dtype, "automaton": automaton, "started": started}
        return decode_rows(model, unstacked, *work, **options)

    work = (Prompts(prompts.tokens, prompts.lengths, prefix), queue)
    queue, steps = model.map_row_shards(decode, (unstacked, automaton), work, units=prompts.tokens.shape[0])
    rollout = Rollout(
        prompt_tokens=jnp.repeat(prompts.tokens, group, axis=0),
        prompt_lengths=jnp.repeat(prompts.lengths, group),
        response=queue.response,
        lengths=queue.lengths,
        ended=queue.ended,
        logprobs=queue.logprobs,
        response_mask=jnp.ones((b, t_max), bool),
        start=None if guide is None else guide.start,
    )
    return (rollout, steps) if return_steps else rollout


def _rows(token: Array, logprob: Array, sampling: Sampling, **by_row: Array) -> Rows:
    """The queue after the first token [B] of each row; `by_row`: keys, limits, expected."""
    b, t_max = len(token), sampling.max_new_tokens
    rows = Rows(
        response=jnp.full((b, t_max), sampling.fill_id, jnp.int32),
        logprobs=jnp.zeros((b, t_max), jnp.float32),
        lengths=jnp.ones(b, jnp.int32),
        ended=jnp.zeros(b, bool),
        state=None,
        **by_row,
    )
    rows = rows._replace(response=rows.response.at[:, 0].set(token), logprobs=rows.logprobs.at[:, 0].set(logprob))
    for stop in sampling.stop_ids:
        rows = rows._replace(ended=rows.ended | (token == stop))
    return rows


def first_tokens(
    model,
    unstacked,
    prompts: PromptBatch,
    keys: Array,
    sampling: Sampling,
    *,
    group: int,
    at_once: int,
    dtype,
    guide: Guide | None,
    limits: Array,
) -> tuple[Array, Array, Any]:
    """Prefill, and the first token of each row.

    Args:
      keys: [B] typed keys of the rows.
      at_once: prompts of a forward pass.
      Others as `generate_unstacked`.

    Returns:
      (tokens [B] int32, their log-probabilities [B] float32, keys and values of the prompts)
    """
    width = prompts.tokens.shape[1]
    prompt_mask = jnp.arange(width)[None, :] >= (width - prompts.lengths)[:, None]

    def prefill(part):
        tokens, mask, images = part
        return model.prefill(unstacked, tokens, mask, dtype, images)

    hidden, prefix = map_in_chunks(prefill, (prompts.tokens, prompt_mask, prompts.images), at_once)
    seen = None
    if is_on(sampling.repetition_penalty, 1.0):
        seen = jnp.repeat(prompt_tokens_seen(prompts.tokens, prompt_mask, model.config.vocab_size), group, axis=0)

    def first(part):
        hidden, keys, seen, start, limits = part
        mask = None if guide is None else partial(guide.automaton.mask, state=start, left=limits - 1)
        return sample(model, unstacked, hidden, keys, jnp.zeros(len(keys), jnp.int32), seen, sampling, mask=mask)

    start = (None, None) if guide is None else (guide.start, limits)
    rows = (jnp.repeat(hidden, group, axis=0), keys, seen, *start)
    token, logprob = map_in_chunks(first, rows, at_once * group)
    return token, logprob, prefix


def prompt_tokens_seen(tokens: Array, mask: Array, vocabulary: int) -> Array:
    """[P, C] tokens, those that `mask` has -> [P, V] bool."""
    # Index V is out of bounds and dropped: padding is not a seen token.
    tokens = jnp.where(mask, tokens, vocabulary)
    return mark_seen(jnp.zeros((len(tokens), vocabulary), bool), tokens)
