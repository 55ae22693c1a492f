"""What TRL's trainers with a stop token make of sampled ids: where a response ends, and who lacks an eos."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import advantages as adv
from rlhf_jax.types import Rollout


def truncated(response: np.ndarray, stop: int | None, pad: int) -> np.ndarray:
    """Everything after the first stop token becomes pad, TRL's truncate_response.

    Args:
      response: [B, T] ids.
      stop: the stop token; None: nothing is cut.
      pad: the id that takes the place.

    Returns:
      [B, T].
    """
    if stop is None:
        return response
    kept = np.asarray(adv.response_mask(adv.response_lengths(response, stop), response.shape[1]))
    return np.where(kept, response, pad)


def rollout_of(prompts: np.ndarray, response: np.ndarray, stop: int | None, pad: int) -> Rollout:
    """TRL's samples as ours.

    Masks come from ids, as in TRL: a pad that was sampled ends its row and is not attended, eos that fills a row is.

    Args:
      prompts: [B, C] ids, left-padded.
      response: [B, T] ids as sampled.
      stop: the stop token, or None.
      pad: id.

    Returns:
      A Rollout of B rows.
    """
    cut = truncated(response, stop, pad)
    return Rollout(
        prompt_tokens=jnp.asarray(prompts, jnp.int32),
        prompt_lengths=jnp.asarray((prompts != pad).sum(1), jnp.int32),
        response=jnp.asarray(response, jnp.int32),
        lengths=jnp.asarray(adv.first_true(cut == pad)),
        ended=jnp.asarray((cut == stop).any(1)) if stop is not None else jnp.zeros(len(cut), bool),
        logprobs=jnp.zeros(response.shape, jnp.float32),
        response_mask=jnp.asarray(response != pad),
    )


def credited(
    scores: jax.Array, rollout: Rollout, penalty: float | None, stop: int | None, eos: int, pad: int
) -> jax.Array:
    """Scores that come out as TRL's once the trainer has taken off its missing-eos penalty.

    TRL looks for eos in all of the truncated row, we in the response: they disagree where a pad was sampled first.

    Args:
      scores: [B], of the reward model.
      rollout: the samples.
      penalty: missing_eos_penalty.
      stop, eos, pad: ids.

    Returns:
      [B].
    """
    if penalty is None:
        return scores
    response = np.asarray(rollout.response)
    theirs = (truncated(response, stop, pad) == eos).any(1)
    inside = np.asarray(adv.response_mask(rollout.lengths, response.shape[1]))
    ours = ((response == eos) & inside).any(1)
    return scores + penalty * jnp.asarray(theirs & ~ours, jnp.float32)
