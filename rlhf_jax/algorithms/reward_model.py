"""Reward models from preference pairs (Bradley and Terry 1952; Stiennon et al. 2020, section 3.4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax import losses
from rlhf_jax.algorithms import microbatch, nonfinite
from rlhf_jax.algorithms.microbatch import MicroBatches, Tally
from rlhf_jax.algorithms.networks import Network
from rlhf_jax.algorithms.optimizer import Optimizer
from rlhf_jax.algorithms.options import RewardModelOptions
from rlhf_jax.types import Array, Metrics, Params, TrainState


def scored_lengths(model, tokens: Array, lengths: Array) -> Array:
    """Lengths up to the last token that is not the pad of the model, where transformers reads a text's score.

    Args:
      model: with `pad_id`, or None for no pad.
      tokens: [B, S] int32, from column 0 on.
      lengths: [B] int32.

    Returns:
      [B] int32, 0 for a row of pads alone.
    """
    if model.pad_id is None:
        return lengths
    ends = jnp.arange(1, tokens.shape[1] + 1)[None, :]
    return jnp.max(jnp.where((ends <= lengths[:, None]) & (tokens != model.pad_id), ends, 0), axis=1).astype(jnp.int32)


def last_token_scores(model, params: Params, tokens: Array, mask: Array, last: Array, *, dtype, remat="none", key=None):
    """The scalar head at one position of each row.

    Args:
      model, params: a scalar head.
      tokens, mask: [B, S].
      last: [B] int32, the position to score (that of eos).
      remat: what the backward pass recomputes.
      key: [B] typed dropout keys, or None.

    Returns:
      [B] float32.
    """
    hidden = model.hidden(params, tokens, mask, dtype=dtype, remat=remat, dropout_key=key)
    rows = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return model.scalars(params, rows)


def score_texts(model, params: Params, tokens: Array, lengths: Array, **options) -> Array:
    """Scores right-padded texts at their last token that is not the model's pad.

    Args:
      model, params: a scalar head.
      tokens: [B, S] int32.
      lengths: [B] int32; 0 scores position 0, to be ignored.
      **options: of `last_token_scores`.

    Returns:
      [B] float32.
    """
    mask = jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]
    last = jnp.maximum(scored_lengths(model, tokens, lengths) - 1, 0)
    return last_token_scores(model, params, tokens, mask, last, **options)


def score_rollout(model, params: Params, rollout, *, dtype, group_size: int = 1) -> Array:
    """Scores prompt + response at the response's last token (TRL's get_reward); length 0 scores the prompt's last.

    A stop token that is the model's pad is not scored, but the token before it. Pads of a response that did not end
    were sampled, and are tokens like any other.

    Args:
      model, params: a scalar head.
      rollout: a Rollout.
      group_size: adjacent rows that share a prompt, which is computed once for them.

    Returns:
      [B] float32.
    """
    c = rollout.prompt_tokens.shape[1]
    t = rollout.response.shape[1]
    prompt_mask = jnp.arange(c)[None, :] >= (c - rollout.prompt_lengths)[:, None]
    response_mask = jnp.arange(t)[None, :] < rollout.lengths[:, None]
    lengths = rollout.lengths
    if model.pad_id is not None:
        lengths = jnp.where(rollout.ended, scored_lengths(model, rollout.response, lengths), lengths)
    if group_size > 1:
        prompts, prompt_mask = rollout.prompt_tokens[::group_size], prompt_mask[::group_size]
        last, hidden = model.hidden_after_prompts(
            params, prompts, prompt_mask, rollout.response, response_mask, dtype=dtype
        )
        rows = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        rows = jnp.where((lengths > 0)[:, None], rows, jnp.repeat(last, group_size, axis=0))
        return model.scalars(params, rows)
    tokens = jnp.concatenate([rollout.prompt_tokens, rollout.response], axis=1)
    mask = jnp.concatenate([prompt_mask, response_mask], axis=1)
    # [B, 1 + T, D] begins with the prompt's last column, so that a length is the column of its last token.
    hidden = model.hidden(params, tokens, mask, dtype=dtype, last=t + 1)
    rows = jnp.take_along_axis(hidden, lengths[:, None, None], axis=1)[:, 0]
    return model.scalars(params, rows)


def pair_scores(model, params: Params, batch, **options) -> tuple[Array, Array]:
    """Scores of chosen and rejected texts in one forward pass.

    Args:
      model, params: a scalar head.
      batch: with chosen_tokens, rejected_tokens [B, S], chosen_lengths, rejected_lengths [B].
      **options: of `last_token_scores`.

    Returns:
      (chosen [B], rejected [B]) float32.
    """
    tokens = jnp.concatenate([batch.chosen_tokens, batch.rejected_tokens], axis=0)
    lengths = jnp.concatenate([batch.chosen_lengths, batch.rejected_lengths], axis=0)
    scores = score_texts(model, params, tokens, lengths, **options)
    b = batch.chosen_lengths.shape[0]
    return scores[:b], scores[b:]


def update(
    network: Network, state: TrainState, batch, *, config: RewardModelOptions, optimizer: Optimizer, key: Array
) -> tuple[TrainState, Metrics]:
    """One optimizer step on a batch of pairs: mean of -log sigmoid(chosen - rejected - margin), centred by option.

    Args:
      network: with a scalar head, and its base; state.params["model"] are trained.
      state: donate it.
      batch: as in `pair_scores`, with margin [B].
      key: typed key of this step's dropout.

    Returns:
      (state, {"loss", "accuracy", "margin", "mean_reward", "min_reward", "max_reward", "grad_norm"} [] float32,
      "num_tokens" [] uint32 of the run so far, and the metrics of `nonfinite.apply_if_finite`). If something is not
      finite, params and optimizer state are unchanged.
    """
    b = batch.chosen_lengths.shape[0]
    dropout_keys = microbatch.row_keys(key, b)
    parts = MicroBatches.by_rows((batch, dropout_keys), config.micro_batch_size)

    def loss_fn(params, micro):
        micro, keys = micro
        keys = jnp.concatenate([keys, jax.vmap(jax.random.fold_in, (0, None))(keys, 1)])
        chosen, rejected = pair_scores(
            network.model,
            network.with_trained(params["model"]).params,
            micro,
            dtype=jnp.dtype(config.dtype),
            remat=config.remat,
            key=None if config.disable_dropout else keys,
        )
        per_pair = losses.pairwise_reward_loss(chosen, rejected, micro.margin, config.center_rewards_coefficient)
        loss = jnp.sum(per_pair) / b
        return loss, (Tally({"loss": loss}), jax.lax.stop_gradient((chosen, rejected)))

    grads, tally, (chosen, rejected) = parts.gradients(loss_fn, state.params, microbatch.loss_scale(config.dtype, b))
    state, step_metrics = nonfinite.single_step_update(
        optimizer,
        state,
        grads,
        loss=tally.sums["loss"],
        config=config,
        counts={"step": 1, "episodes": b, "tokens": jnp.sum(batch.chosen_lengths + batch.rejected_lengths)},
    )
    scores = jnp.stack([chosen, rejected])
    metrics = {
        **tally.sums,
        "accuracy": jnp.mean((chosen > rejected).astype(jnp.float32)),
        "margin": jnp.mean(chosen - rejected),
        "mean_reward": jnp.mean(scores),
        "min_reward": jnp.min(scores),
        "max_reward": jnp.max(scores),
        "num_tokens": state.tokens,  # of the whole run so far, as TRL counts
        **step_metrics,
    }
    return state, metrics


def subtract_offset(params: Params, offset: Array | float) -> Params:
    """Subtracts an offset from the scores, by the bias of the scalar head.

    Args:
      params: of a scalar head.
      offset: [] float32.

    Returns:
      Params with "score"/"bias" [1].
    """
    head = dict(params["score"])
    bias = head["bias"] if "bias" in head else jnp.zeros((1,), head["kernel"].dtype)
    head["bias"] = bias - offset
    return {**params, "score": head}
