"""What a rollout leaves for later ones: how long responses were, and which are unfinished.

Shapes: P prompts of a batch, G responses to each, B = P * G.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.config import PolicyConfig
from rlhf_jax.parallel import sharding
from rlhf_jax.types import Array, PartialResponses, Rollout, RolloutState, Unfinished


def initial(config: PolicyConfig, prompts: int, width: int, *, tools: bool = False) -> RolloutState | None:
    """The state that the first rollout of a run starts with, as numpy arrays; None: rollouts do not depend on earlier
    ones.

    Args:
      prompts: rows of the data set.
      width: P.
      tools: whether the policy calls tools.
    """
    lengths: Any = None
    unfinished = None
    if config.decode_slots is not None and config.decode_longest_first:
        lengths = np.full(prompts, -1, np.float32)
    if config.rollout_max_steps is not None:
        shape = (config.batch_size, config.response_length)
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        arrays: dict[str, Any] = {
            "rows": np.zeros(width, np.int32),
            "held": np.zeros(width, bool),
            "response": np.zeros(shape, np.int32),
            "logprobs": np.zeros(shape, np.float32),
            "lengths": np.zeros(shape[0], np.int32),
            "ended": np.zeros(shape[0], bool),
            "keys": np.zeros((shape[0], *key.shape), np.uint32),
            "taken": np.int32(0),
        }
        if tools:
            arrays |= {"began": np.zeros(width, np.int32), "sampled": np.ones(shape, bool)}
        unfinished = Unfinished(**arrays)
    return None if lengths is None and unfinished is None else RolloutState(lengths, unfinished)


def layout(state: RolloutState, mesh) -> Any:
    """The sharding of each array: those of rows over the rows' axes, the others replicated."""
    where = jax.tree.map(lambda x: sharding.replicated(mesh), state)
    if state.unfinished is None:
        return where
    names = ["response", "logprobs", "lengths", "ended", "keys"]
    if state.unfinished.sampled is not None:
        names.append("sampled")
    rows = dict.fromkeys(names, sharding.batch_sharding(mesh))
    return where.replace(unfinished=where.unfinished.replace(**rows))


def expected_lengths(response_lengths: Array, rows: Array, most: int) -> Array:
    """Expected lengths of the responses to prompts `rows` [P]: the mean at their last visit, `most` for a new prompt.
    [P] float32."""
    lengths = response_lengths[rows]
    return jnp.where(lengths < 0, jnp.float32(most), lengths)


def by_response(values: Any, count: int) -> Any:
    """Values [P] of prompts, numpy or JAX, for each of `count` responses."""
    return values.repeat(count // len(values))


def row_keys(key: Array, rows: Array, unfinished: Unfinished) -> Array:
    """Typed keys of rows [B]: those of this rollout; responses that go on have the keys that they started with."""
    fresh = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
    row_mask = by_response(unfinished.held, len(rows))
    data = jnp.where(row_mask[:, None], unfinished.keys, jax.random.key_data(fresh))
    return jax.random.wrap_key_data(data)


def begun(unfinished: Unfinished) -> PartialResponses:
    """The responses that go on; the others begin."""
    row_mask = by_response(unfinished.held, len(unfinished.lengths))
    return PartialResponses(
        response=unfinished.response,
        logprobs=unfinished.logprobs,
        lengths=jnp.where(row_mask, unfinished.lengths, 0),
        ended=unfinished.ended,
    )


def keep(
    state: RolloutState, rollout: Rollout, prompt_rows: Array, keys: Array | None, step: Array, mesh
) -> tuple[Rollout, RolloutState]:
    """Splits a rollout into what the update trains on and what later rollouts need.

    Args:
      state: before.
      rollout: B rows.
      prompt_rows: [P] int32, rows of the data set.
      keys: [B] typed, of the rows; None without `state.unfinished`.
      step: [] int32, of the update.

    Returns:
      (the rollout, in which rows of unfinished groups have length -1; the state after)
    """
    lengths, before = rollout.lengths, state.unfinished
    finished = jnp.ones(prompt_rows.shape, bool)
    if before is not None:
        row_finished = rollout.ended | (lengths >= rollout.response.shape[1])
        finished = jnp.all(row_finished.reshape(len(before.held), -1), axis=1)
        # Places without unfinished responses took a new prompt each.
        taken = before.taken + jnp.sum(~before.held).astype(jnp.int32)
        unfinished = Unfinished(
            rows=before.rows,
            held=~finished,
            response=rollout.response,
            logprobs=rollout.logprobs,
            lengths=lengths,
            ended=rollout.ended,
            keys=jax.random.key_data(keys),
            taken=taken,
            began=None if before.began is None else jnp.where(before.held, before.began, step),
            sampled=before.sampled,
        )
        state = state.replace(unfinished=unfinished)
        rollout = rollout.replace(lengths=jnp.where(by_response(finished, len(lengths)), lengths, -1))
    if state.response_lengths is not None:
        mean = lengths.reshape(len(prompt_rows), -1).astype(jnp.float32).mean(axis=1)
        rows = jnp.where(finished, prompt_rows, len(state.response_lengths))  # past the end: dropped
        state = state.replace(response_lengths=state.response_lengths.at[rows].set(mean, mode="drop"))
    return rollout, jax.lax.with_sharding_constraint(state, layout(state, mesh))


def rows_of_update(train_data, seed: int, unfinished: Unfinished) -> np.ndarray:
    """The prompt of each place of an update, on the host: the one that goes on, or else the next one of the data set.

    Args:
      seed: of their order.
      unfinished: numpy arrays rows [P], held [P], taken [].

    Returns:
      [P] int32.
    """
    group_mask, width = unfinished.held, len(unfinished.held)
    rows = unfinished.rows.copy()
    numbers = int(unfinished.taken) + np.arange(int((~group_mask).sum()))
    orders = {step: train_data.rows_of(seed, step, width) for step in np.unique(numbers // width).tolist()}
    rows[~group_mask] = [orders[number // width][number % width] for number in numbers.tolist()]
    return np.asarray(rows, np.int32)
