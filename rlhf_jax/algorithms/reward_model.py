"""Reward models from preference pairs (Bradley and Terry 1952; Stiennon et al. 2020, section 3.4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax import losses
from rlhf_jax.algorithms import microbatch, nonfinite
from rlhf_jax.types import Array, Metrics, Params, TrainState


def last_token_scores(model, params: Params, tokens: Array, mask: Array, last: Array, *, dtype, remat="none", key=None):
    """The scalar head at one position of each row.

    Args:
      model, params: a scalar head.
      tokens, mask: [B, S].
      last: [B] int32, the position to score (that of eos).
      dtype: compute dtype.
      remat: recompute activations in the backward pass.
      key: [B] typed dropout keys, or None.

    Returns:
      [B] float32.
    """
    hidden = model.hidden(params, tokens, mask, dtype=dtype, remat=remat, dropout_key=key)
    rows = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return model.scalars(params, rows)


def score_texts(model, params: Params, tokens: Array, lengths: Array, **options) -> Array:
    """Scores right-padded texts at their last token.

    Args:
      model, params: a scalar head.
      tokens: [B, S] int32.
      lengths: [B] int32; 0 scores position 0, to be ignored.
      **options: of `last_token_scores`.

    Returns:
      [B] float32.
    """
    mask = jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]
    return last_token_scores(model, params, tokens, mask, jnp.maximum(lengths - 1, 0), **options)


def score_rollout(model, params: Params, rollout, *, dtype, group: int = 1) -> Array:
    """Scores prompt + response at the response's last token (TRL's get_reward); length 0 scores the prompt's last.

    Args:
      model, params: a scalar head.
      rollout: a Rollout.
      dtype: compute dtype.
      group: rows that share a prompt, adjacent; the prompt is computed once for them.

    Returns:
      [B] float32.
    """
    c = rollout.prompt_tokens.shape[1]
    t = rollout.response.shape[1]
    prompt_mask = jnp.arange(c)[None, :] >= (c - rollout.prompt_lengths)[:, None]
    inside = jnp.arange(t)[None, :] < rollout.lengths[:, None]
    if group > 1:
        prompts, of_prompts = rollout.prompt_tokens[::group], prompt_mask[::group]
        before, hidden = model.hidden_after_prompts(params, prompts, of_prompts, rollout.response, inside, dtype=dtype)
        last = jnp.maximum(rollout.lengths - 1, 0)[:, None, None]
        rows = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
        rows = jnp.where((rollout.lengths > 0)[:, None], rows, jnp.repeat(before, group, axis=0))
        return model.scalars(params, rows)
    tokens = jnp.concatenate([rollout.prompt_tokens, rollout.response], axis=1)
    mask = jnp.concatenate([prompt_mask, inside], axis=1)
    hidden = model.hidden(params, tokens, mask, dtype=dtype, last=t + 1)
    rows = jnp.take_along_axis(hidden, rollout.lengths[:, None, None], axis=1)[:, 0]
    return model.scalars(params, rows)


def pair_scores(model, params: Params, batch, **options) -> tuple[Array, Array]:
    """Scores of both sides in one forward pass.

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
    model, optimizer, state: TrainState, batch, key: Array, rate: Array, config, base: Params | None = None
) -> tuple[TrainState, Metrics]:
    """One optimizer step on a batch of pairs: mean of -log sigmoid(chosen - rejected - margin), centred by option.

    Args:
      model: a scalar head; its params are state.params["model"].
      optimizer: from `common.make_optimizer`.
      state: donate it.
      batch: as in `pair_scores`, with margin [B].
      key: typed key of this step's dropout.
      rate: [] float32.
      config: a RewardConfig.
      base: what the model's adapters stand on; None: it is trained in full.

    Returns:
      (state, {"loss", "accuracy", "margin", "mean_reward", "min_reward", "max_reward", "grad_norm"} [] float32
      and "num_tokens" [] uint32, of the run so far, and what `guard.attempt` reports); where something is not finite
      the params and the optimizer state are those of before
    """
    b = batch.chosen_lengths.shape[0]
    keys = microbatch.row_keys(key, b)
    micros = microbatch.split_micro((batch, keys), config.micro_batch_size)
    n = micros[1].shape[0]

    def loss_fn(params, micro, index):
        micro, keys = micro
        both_keys = jnp.concatenate([keys, jax.vmap(jax.random.fold_in, (0, None))(keys, 1)])
        chosen, rejected = pair_scores(
            model,
            model.with_lora(base, params["model"]),
            micro,
            dtype=jnp.dtype(config.dtype),
            remat=config.remat,
            key=None if config.disable_dropout else both_keys,
        )
        per_pair = losses.pairwise_reward_loss(chosen, rejected, micro.margin, config.center_rewards_coefficient)
        loss = jnp.sum(per_pair) / b
        own = jnp.arange(n)[:, None] == index
        both = jax.lax.stop_gradient(jnp.stack([chosen, rejected]))
        return loss, {"loss": loss, "scores": jnp.where(own[..., None], both[None], 0.0)}

    grads, found = microbatch.accumulate(loss_fn, state.params, micros)
    alive = nonfinite.may_learn(state, jnp.int32(0), config)
    params, opt_state, _, report = nonfinite.attempt(
        optimizer, state.params, state.opt_state, grads, rate, found["loss"], alive
    )
    chosen, rejected = found["scores"][:, 0], found["scores"][:, 1]
    clock = {"step": 1, "episodes": b, "tokens": jnp.sum(batch.chosen_lengths + batch.rejected_lengths)}
    trained = {"params": params, "opt_state": opt_state}
    state = nonfinite.settle(state, report["nonfinite/causes"], config, trained, clock)
    metrics = {
        "loss": found["loss"],
        "accuracy": jnp.mean((chosen > rejected).astype(jnp.float32)),
        "margin": jnp.mean(chosen - rejected),
        "mean_reward": jnp.mean(found["scores"]),
        "min_reward": jnp.min(found["scores"]),
        "max_reward": jnp.max(found["scores"]),
        "num_tokens": state.tokens,  # of the whole run so far, as TRL counts
        **report,
    }
    return state, metrics


def subtract_offset(params: Params, offset: Array) -> Params:
    """Makes the scalar head give score - offset, by its bias.

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
