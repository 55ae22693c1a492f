"""Log-probabilities, entropies and values of responses."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax import losses
from rlhf_jax.algorithms import groups
from rlhf_jax.algorithms.networks import Models, Network
from rlhf_jax.algorithms.options import PolicyGradientOptions
from rlhf_jax.generate import map_in_chunks
from rlhf_jax.generate.guided import Automaton
from rlhf_jax.parallel import sharding
from rlhf_jax.types import Array, Experience, Images, Params, Rollout

LOGIT_POSITIONS = 1024
"""Most positions per device whose logits are held at a time, where the vocabulary is small."""
LOGIT_ENTRIES = 50 * 2**20
"""Most logits per device at a time, 200 MiB of float32: 1,024 positions with Pythia's vocabulary, 345 with Qwen2's."""


def response_logprobs(
    network: Network,
    rows: Experience,
    config: PolicyGradientOptions,
    *,
    critic: Network | None = None,
    dropout_keys: Array | None = None,
    entropy_gradient: bool = False,
) -> tuple[Array, Array, Array | None]:
    """Log-probabilities and entropies of responses, and their values.

    Args:
      network: a causal head, with whole params.
      rows: P groups. One forward pass over a prompt serves its G responses; with G = 1 prompt and response are one
        sequence.
      config: temperature, dtype, remat.
      critic: the network with the value head; `network` itself: one forward pass for both. None: no values.
      dropout_keys: [P] typed keys, for G = 1; None: no dropout.
      entropy_gradient: whether the entropies have a gradient.

    Returns:
      (log-probabilities, entropies, values or None), each [P, G, T] float32, at `temperature`; undefined outside the
      responses. Where `rows` have states, of the tokens that the network's automaton allows.
    """
    hidden = response_hidden(network, rows, config, dropout_keys)
    response = rows.response.reshape(hidden.shape[:2])
    mask = None
    if rows.states is not None:
        left = config.response_length - 1 - jnp.arange(response.shape[1])
        mask = (network.automaton, rows.states.reshape(response.shape), jnp.broadcast_to(left, response.shape))
    logprobs, entropy = logprobs_from_hidden(
        network.model,
        network.params,
        hidden,
        response,
        config.temperature,
        entropy_gradient=entropy_gradient,
        mask=mask,
    )
    values = None
    if critic is not None:
        value_hidden = hidden if critic is network else response_hidden(critic, rows, config)
        values = critic.model.scalars(critic.params, value_hidden).reshape(rows.response.shape)
    return logprobs.reshape(rows.response.shape), entropy.reshape(rows.response.shape), values


def response_hidden(
    network: Network, rows: Experience, config: PolicyGradientOptions, dropout_keys: Array | None = None
) -> Array:
    """The final hidden states of the T positions that predict each response.

    Args:
      network: any head, with whole params.
      rows, config, dropout_keys: as in `response_logprobs`.

    Returns:
      [P * G, T, D] in the compute dtype.
    """
    p, g, t = rows.response.shape
    c, model, params = rows.prompt_tokens.shape[1], network.model, network.params
    prompt_mask = jnp.arange(c)[None, :] >= (c - rows.prompt_lengths)[:, None]
    response, mask = rows.response.reshape(p * g, t), rows.mask.reshape(p * g, t)
    options = {"dtype": jnp.dtype(config.dtype), "remat": config.remat, "images": rows.images}
    if g == 1:
        tokens = jnp.concatenate([rows.prompt_tokens, response], axis=1)
        both = jnp.concatenate([prompt_mask, mask], axis=1)
        return model.hidden(params, tokens, both, dropout_key=dropout_keys, last=t + 1, **options)[:, :-1]
    last, hidden = model.hidden_after_prompts(params, rows.prompt_tokens, prompt_mask, response, mask, **options)
    return jnp.concatenate([jnp.repeat(last, g, axis=0)[:, None], hidden[:, :-1]], axis=1)


def token_kl(models: Models, rollout: Rollout, config: PolicyGradientOptions, images: Images | None = None) -> Array:
    """log pi - log ref of each response token, the k1 estimate of its KL, for completion tables and reports.

    Args:
      models: policy and reference, with whole params.
      rollout: responses of the policy.
      config: temperature, dtype, remat.
      images: [B, ...] of the rows' prompts.

    Returns:
      [B, T] float32, 0 outside the response.
    """
    rows = groups.group_rollout(rollout, images=images, automaton=models.policy.automaton)
    logprobs, ref_logprobs = (response_logprobs(x, rows, config)[0] for x in (models.policy, models.reference))
    return jnp.where(rows.trained_mask, logprobs - ref_logprobs, 0.0)[:, 0]


def logprobs_from_hidden(
    model,
    params: Params,
    hidden: Array,
    response: Array,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    mask: tuple[Automaton, Array, Array] | None = None,
):
    """Log-probabilities of the response and the entropy of each position, at `temperature`.

    Args:
      model, params: a causal head.
      hidden: [b, T, D], the positions that predict the response.
      response: [b, T] int32.
      temperature: logits are divided by temperature + 1e-7 (TRL ppo_trainer.py:713).
      entropy_gradient: whether the entropies have a gradient.
      mask: (automaton, states [b, T], tokens that are left after each [b, T]) of guided responses: only the tokens that
        it allows have a probability; None: all.

    Returns:
      (log-probabilities [b, T] float32, entropies [b, T] float32)
    """
    automaton, *places = mask or (None,)

    def chunk_logprobs(params, rows):
        hidden, response, *places = rows
        if hidden.dtype == jnp.float32 and model.linear_logits:
            # Divides the few hidden states, not the many logits; in half precision that would round them once more.
            logits = model.logits(params, hidden / (temperature + 1e-7))
        else:
            logits = model.logits(params, hidden) / (temperature + 1e-7)
        if automaton is not None:
            # Finite, since the columns after a response may hold any token.
            logits = automaton.mask(logits, *places, excluded=-1e30)
        logprobs = losses.logprobs_from_logits(logits, response)
        return logprobs, losses.entropy_from_logits(logits if entropy_gradient else jax.lax.stop_gradient(logits))

    return map_logit_chunks(chunk_logprobs, model, params, (hidden, response, *places))


def logit_block(rows: int, positions: int, model) -> tuple[int, int]:
    """The block of [rows, positions, V] logits that is computed at a time.

    Whole rows where one row of each device fits LOGIT_ENTRIES, else parts of rows of equal length.

    Args:
      rows, positions: of a batch.
      model: its vocabulary and layout.

    Returns:
      (rows of a block, which divide `rows`; positions of a block)
    """
    # Logits are sharded over all devices of the mesh, by rows and by columns.
    layout, vocabulary = model.layout, model.config.vocab_size
    devices, unit = (1, 1) if layout is None else (layout.mesh.size, sharding.row_shards(layout.mesh))
    unit = unit if rows % unit == 0 else 1
    fitting = max(devices * LOGIT_ENTRIES // vocabulary, 1)
    most = min(devices * LOGIT_POSITIONS, fitting)
    if rows * positions <= most:
        return rows, positions
    chunk = max(r for r in range(unit, rows + 1, unit) if rows % r == 0 and (r == unit or r * positions <= most))
    parts = -(-positions // max(min(fitting // chunk, positions), 1))
    return chunk, -(-positions // parts)


@jax.named_scope("logits")
def map_logit_chunks(function, model, params: Params, rows):
    """Applies `function`, which computes logits, to one block of `logit_block` after another.

    With more than one block the backward pass recomputes the logits, so that one block is held at a time.

    Args:
      function: (params, pytree of [r, t, ...]) -> pytree of [r, t]; of params it gives all to `model.logits`, and no
        position depends on another.
      model, params: a causal head.
      rows: pytree of [b, T, ...].

    Returns:
      function(params, rows), as if called once.
    """
    b, t = jax.tree.leaves(rows)[0].shape[:2]
    chunk, block = logit_block(b, t, model)
    if (chunk, block) == (b, t):
        return function(params, rows)
    if model.config.vocab_size * LOGIT_POSITIONS > LOGIT_ENTRIES:  # a small vocabulary has few blocks
        params = model.head_by_data(params, chunk)
    one = jax.checkpoint(lambda rows: function(params, rows))
    if block == t:
        return map_in_chunks(one, rows, chunk)
    parts = -(-t // block)

    def split(x):  # [b, T, ...] -> [b * parts, block, ...]
        padding = [(0, 0), (0, parts * block - t)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, padding).reshape(b * parts, block, *x.shape[2:])

    out = map_in_chunks(one, jax.tree.map(split, rows), chunk)
    return jax.tree.map(lambda x: x.reshape(b, parts * block, *x.shape[2:])[:, :t], out)
