"""Rows by the prompts that they answer: [B, ...] to [P, G, ...] and back. Rows of a group are adjacent."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax.generate.guided import Automaton
from rlhf_jax.types import Array, Experience, Images, Rollout


def group_rows(x: Array, group_size: int) -> Array:
    """[B, ...] -> [B / G, G, ...]."""
    return x.reshape((x.shape[0] // group_size, group_size) + x.shape[1:])


def sampled_mask(rollout: Rollout) -> Array:
    """[B, T] bool: the tokens of the responses that the policy sampled."""
    inside = adv.response_mask(rollout.lengths, rollout.response.shape[1])
    return inside if rollout.sampled is None else inside & rollout.sampled


def group_rollout(
    rollout: Rollout,
    group_size: int = 1,
    *,
    trained_mask: Array | None = None,
    images: Images | None = None,
    automaton: Automaton | None = None,
) -> Experience:
    """The rows of a rollout by groups, with the sampler's log-probabilities and without advantages.

    Args:
      rollout: B = P * G rows.
      group_size: G.
      trained_mask: [B, T] bool; None: all tokens of the response that were sampled.
      images: [P, ...] of the prompts.
      automaton: of guided responses whose log-probabilities are of the tokens that it allows.
    """
    if trained_mask is None:
        trained_mask = sampled_mask(rollout)
    states = None
    if automaton is not None:
        states = group_rows(automaton.states(rollout.start, rollout.response)[:, :-1], group_size)
    return Experience(
        prompt_tokens=rollout.prompt_tokens[::group_size],
        prompt_lengths=rollout.prompt_lengths[::group_size],
        response=group_rows(rollout.response, group_size),
        mask=group_rows(rollout.response_mask, group_size),
        trained_mask=group_rows(trained_mask, group_size),
        lengths=group_rows(rollout.lengths, group_size),
        logprobs=group_rows(rollout.logprobs, group_size),
        states=states,
        images=images,
    )


def split_groups(experience: Experience) -> Experience:
    """The same with G = 1: every response gets its own copy of the prompt, so that rows can be shuffled one by one."""
    group_size = experience.lengths.shape[1]
    if group_size == 1:
        return experience
    rows = experience.replace(prompt_tokens=None, prompt_lengths=None, images=None)
    rows = jax.tree.map(lambda x: x.reshape((-1, 1) + x.shape[2:]), rows)
    return rows.replace(
        prompt_tokens=jnp.repeat(experience.prompt_tokens, group_size, axis=0),
        prompt_lengths=jnp.repeat(experience.prompt_lengths, group_size),
        images=jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), experience.images),
    )


def narrow(rows: Experience, prompt: int, response: int) -> Experience:
    """The same with the last `prompt` columns of the prompts and the first `response` of the responses."""
    rows = jax.tree.map(lambda x: x[:, :, :response] if x.ndim == 3 else x, rows)
    return rows.replace(prompt_tokens=rows.prompt_tokens[:, -prompt:])


def without_absent(rows: Experience, present: Array) -> Experience:
    """The same where rows that are not present [P] bool have length -1 and are in no mask."""

    def masked(x: Array | None) -> Array | None:
        return None if x is None else jnp.where(present.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

    return rows.replace(
        lengths=jnp.where(present[:, None], rows.lengths, -1),
        trained_mask=masked(rows.trained_mask),
        value_mask=masked(rows.value_mask),
        selected=masked(rows.selected),
        advantages=masked(rows.advantages),
    )
