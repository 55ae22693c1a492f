"""Forward passes of the models of PPO and RLOO at the positions that predict a response."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax import losses
from rlhf_jax.generate import map_in_chunks
from rlhf_jax.parallel import sharding
from rlhf_jax.types import Array, GroupExperience, Params, Rollout

LOGIT_POSITIONS = 1024
"""Rows of logits at a time a device: 206 MB of float32 with Pythia's vocabulary."""


@dataclasses.dataclass(frozen=True)
class Networks:
    """The models of a run; static under jit. `value` is None when the policy carries the value head; `mesh` is where
    rows are spread, None where there is one device.

    Models with adapters stand on `base`, {role: frozen params} of "policy" and, where it is not the same, of "value";
    the params that are trained, and those of the reference, are then adapters alone."""

    policy: Any
    ref: Any
    value: Any | None
    mesh: Any | None = None

    def whole(self, base: Params | None, params: Params) -> Params:
        """The params that the models take, {role: params}, of those that are trained."""
        if base is None:
            return params
        return {
            role: getattr(self, role).with_lora(base.get(role, base["policy"]), part) for role, part in params.items()
        }

    def reference(self, base: Params | None, ref: Params | None) -> Params | None:
        """The params that the reference takes; None where there is none."""
        return ref if base is None or ref is None else self.ref.with_lora(base["policy"], ref)


def full_sequence(rollout: Rollout) -> tuple[Array, Array]:
    """Prompt and response side by side.

    Returns:
      tokens [B, C + T] int32, mask [B, C + T] bool (left padding out; response columns by `response_mask`).
    """
    c = rollout.prompt_tokens.shape[1]
    prompt_mask = jnp.arange(c)[None, :] >= (c - rollout.prompt_lengths)[:, None]
    tokens = jnp.concatenate([rollout.prompt_tokens, rollout.response], axis=1)
    return tokens, jnp.concatenate([prompt_mask, rollout.response_mask], axis=1)


def response_logprobs(model, params: Params, hidden: Array, response: Array, temperature: float):
    """Log-probabilities of the response and the entropy of each position, at `temperature`.

    Args:
      model, params: a causal head.
      hidden: [b, T, D], the positions that predict the response.
      response: [b, T] int32.
      temperature: logits are divided by temperature + 1e-7 (TRL ppo_trainer.py:713).

    Returns:
      (log-probabilities [b, T] float32, entropies [b, T] float32)
    """

    def of(rows):
        hidden, response = rows
        if hidden.dtype == jnp.float32:
            # The few hidden states rather than the many logits; in half precision that would round them once more.
            logits = model.logits(params, hidden / (temperature + 1e-7))
        else:
            logits = model.logits(params, hidden) / (temperature + 1e-7)
        return losses.logprobs_from_logits(logits, response), losses.entropy_from_logits(jax.lax.stop_gradient(logits))

    return by_positions(of, (hidden, response), model.layout)


def by_positions(function, rows, layout=None):
    """Applies `function`, which makes logits, to so many rows at a time that each device has about LOGIT_POSITIONS.

    Args:
      function: pytree of [r, T, ...] -> pytree of [r, T].
      rows: pytree of [b, T, ...]. Up to LOGIT_POSITIONS positions go at once; of more, logits are made again in the
        backward pass, so that there is never more than one chunk of them.
      layout: of the model that makes them; None: on one device.

    Returns:
      function(rows), as if called once.
    """
    b, t = jax.tree.leaves(rows)[0].shape[:2]
    # All devices of a mesh share the logits: they are split by rows and by columns.
    most, unit = (1, 1) if layout is None else (layout.mesh.size, sharding.row_shards(layout.mesh))
    most, unit = most * LOGIT_POSITIONS, unit if b % unit == 0 else 1
    if b * t <= most:
        return function(rows)
    chunk = max(r for r in range(unit, b + 1, unit) if b % r == 0 and (r == unit or r * t <= most))
    return map_in_chunks(jax.checkpoint(function), rows, chunk)


def response_hidden(model, params, tokens, mask, t, config):
    """The final hidden states of the T positions that predict the response.

    Args:
      model, params: any head.
      tokens, mask: [b, C + T].
      t: T.
      config: dtype, remat.

    Returns:
      [b, T, D] in the compute dtype.
    """
    options = {"dtype": jnp.dtype(config.dtype), "remat": config.remat}
    return model.hidden(params, tokens, mask, last=t + 1, **options)[:, :-1]


def evaluate_actor_critic(nets: Networks, params: Params, tokens: Array, mask: Array, t: int, config):
    """The trained networks on prompt and response, at response positions.

    Args:
      nets: the models.
      params: {"policy": ...} or {"policy": ..., "value": ...}.
      tokens, mask: [b, C + T].
      t: T.
      config: temperature, dtype, remat.

    Returns:
      (log-probabilities, entropies, values), each [b, T] float32.
    """
    hidden = response_hidden(nets.policy, params["policy"], tokens, mask, t, config)
    logprobs, entropy = response_logprobs(nets.policy, params["policy"], hidden, tokens[:, -t:], config.temperature)
    if nets.value is None:
        values = nets.policy.scalars(params["policy"], hidden)
    else:
        values = nets.value.scalars(
            params["value"], response_hidden(nets.value, params["value"], tokens, mask, t, config)
        )
    return logprobs, entropy, values


def group_logprobs(model, params: Params, rows: GroupExperience, config, dropout_keys: Array | None = None):
    """Log-probabilities and entropies of responses, each prompt computed once for its G responses.

    Args:
      model, params: a causal head.
      rows: p groups; with G = 1 prompt and response go through the model side by side.
      config: temperature, dtype, remat.
      dropout_keys: [p] typed keys, for G = 1; None: no dropout.

    Returns:
      (log-probabilities, entropies), each [p, G, T] float32.
    """
    p, g, t = rows.response.shape
    c = rows.prompt_tokens.shape[1]
    prompt_mask = jnp.arange(c)[None, :] >= (c - rows.prompt_lengths)[:, None]
    response, mask = rows.response.reshape(p * g, t), rows.mask.reshape(p * g, t)
    options = {"dtype": jnp.dtype(config.dtype), "remat": config.remat}
    if g == 1:
        tokens = jnp.concatenate([rows.prompt_tokens, response], axis=1)
        both = jnp.concatenate([prompt_mask, mask], axis=1)
        hidden = model.hidden(params, tokens, both, dropout_key=dropout_keys, last=t + 1, **options)[:, :-1]
    else:
        last, hidden = model.hidden_after_prompts(params, rows.prompt_tokens, prompt_mask, response, mask, **options)
        hidden = jnp.concatenate([jnp.repeat(last, g, axis=0)[:, None], hidden[:, :-1]], axis=1)
    logprobs, entropy = response_logprobs(model, params, hidden, response, config.temperature)
    return logprobs.reshape(p, g, t), entropy.reshape(p, g, t)


def token_kl(nets: Networks, params: Params, ref_params: Params, rollout: Rollout, config) -> Array:
    """log pi - log ref of each token of the responses: the k1 estimate of its KL, for looking at.

    Args:
      nets, params, ref_params: policy and reference.
      rollout: responses of the policy.
      config: a PPOConfig.

    Returns:
      [B, T] float32, 0 outside the response.
    """
    tokens, mask = full_sequence(rollout)
    t = rollout.response.shape[1]

    def logprobs(model, params):
        hidden = response_hidden(model, params, tokens, mask, t, config)
        return response_logprobs(model, params, hidden, rollout.response, config.temperature)[0]

    difference = logprobs(nets.policy, params["policy"]) - logprobs(nets.ref, ref_params)
    return jnp.where(adv.response_mask(rollout.lengths, t), difference, 0.0)
