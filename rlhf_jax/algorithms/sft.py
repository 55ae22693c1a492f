"""Supervised fine-tuning: next-token cross-entropy on demonstrations."""

from __future__ import annotations

import jax.numpy as jnp

from rlhf_jax import losses
from rlhf_jax.algorithms import microbatch, nonfinite, response_logprobs
from rlhf_jax.algorithms.microbatch import MicroBatches, Tally
from rlhf_jax.algorithms.networks import Network
from rlhf_jax.algorithms.optimizer import Optimizer
from rlhf_jax.algorithms.options import SFTOptions
from rlhf_jax.types import Array, Images, Metrics, Params, TrainState


def label_mask(
    lengths: Array, prompt_lengths: Array, s: int, completion_only: bool, loss_mask: Array | None = None
) -> Array:
    """Which tokens are trained on: position i + 1 is the label of position i.

    In packed rows prompt lengths are 0, and `loss_mask` leaves out prompts and the first token of each segment.

    Args:
      lengths: [B] int32, prompt + completion + eos.
      prompt_lengths: [B] int32.
      s: S.
      completion_only: leave out the prompt's tokens.
      loss_mask: [B, S] bool, tokens to train on; None: all.

    Returns:
      [B, S - 1] bool.
    """
    label = jnp.arange(1, s)[None, :]
    mask = label < lengths[:, None]
    if completion_only:
        mask = mask & (label >= prompt_lengths[:, None])
    return mask if loss_mask is None else mask & loss_mask[:, 1:]


def token_losses(
    model,
    params: Params,
    tokens: Array,
    lengths: Array,
    *,
    dtype,
    remat="none",
    dropout_key=None,
    segment_ids=None,
    images: Images | None = None,
) -> Array:
    """Cross-entropy of every next token.

    Args:
      model, params: a causal head.
      tokens: [B, S] int32, right-padded.
      lengths: [B] int32.
      remat: recompute activations in the backward pass.
      dropout_key: [B] typed keys, or None for no dropout.
      segment_ids: [B, S] int32 of packed rows; None: a row is one sequence.
      images: [B, ...] of the rows; None: they are text.

    Returns:
      [B, S - 1] float32, to be masked.
    """
    s = tokens.shape[1]
    mask = jnp.arange(s)[None, :] < lengths[:, None]
    options = {"dtype": dtype, "remat": remat, "dropout_key": dropout_key, "segment_ids": segment_ids}
    hidden = model.hidden(params, tokens, mask, images=images, **options)

    def logprobs(params, rows):
        return losses.logprobs_from_logits(model.logits(params, rows[0]), rows[1])

    return -response_logprobs.map_logit_chunks(logprobs, model, params, (hidden[:, :-1], tokens[:, 1:]))


def update(
    network: Network, state: TrainState, batch, *, config: SFTOptions, optimizer: Optimizer, key: Array
) -> tuple[TrainState, Metrics]:
    """One optimizer step on a batch of demonstrations: the mean loss over all their trained tokens.

    Args:
      network: with a causal head, and its base; state.params["model"] are trained.
      state: donate it.
      batch: with tokens [B, S], prompt_lengths [B], lengths [B], loss_mask and segment_ids [B, S] or None, images.
      key: typed key of this step's dropout.

    Returns:
      (state, {"loss", "grad_norm", "num_tokens" [] uint32 of the run so far} and the metrics of
      `nonfinite.apply_if_finite`). If something is not finite, params and optimizer state are unchanged.
    """
    s = batch.tokens.shape[1]
    mask = label_mask(batch.lengths, batch.prompt_lengths, s, config.completion_only_loss, batch.loss_mask)
    count = jnp.maximum(jnp.sum(mask).astype(jnp.float32), 1.0)
    dropout_keys = microbatch.row_keys(key, batch.lengths.shape[0])
    rows = (batch.tokens, batch.lengths, mask, dropout_keys, batch.segment_ids, batch.images)
    parts = MicroBatches.by_rows(rows, config.micro_batch_size)

    def loss_fn(params, micro):
        tokens, lengths, mask, dropout_keys, segment_ids, images = micro
        per_token = token_losses(
            network.model,
            network.with_trained(params["model"]).params,
            tokens,
            lengths,
            dtype=jnp.dtype(config.dtype),
            remat=config.remat,
            dropout_key=None if config.disable_dropout else dropout_keys,
            segment_ids=segment_ids,
            images=images,
        )
        loss = jnp.sum(jnp.where(mask, per_token, 0.0)) / count
        return loss, (Tally({"loss": loss}), ())

    grads, tally, _ = parts.gradients(loss_fn, state.params, microbatch.loss_scale(config.dtype, batch.tokens.size))
    state, step_metrics = nonfinite.single_step_update(
        optimizer,
        state,
        grads,
        loss=tally.sums["loss"],
        config=config,
        counts={"step": 1, "episodes": batch.lengths.shape[0], "tokens": jnp.sum(batch.lengths)},
    )
    return state, {**tally.sums, "num_tokens": state.tokens, **step_metrics}


def evaluate(model, params: Params, batch, config: SFTOptions) -> tuple[Array, Array]:
    """Summed loss and number of trained tokens of an evaluation batch.

    Args:
      model, params: a causal head.
      batch: as in `update`; rows of length 0 are ignored.

    Returns:
      (sum [] float32, count [] float32)
    """
    s = batch.tokens.shape[1]
    mask = label_mask(batch.lengths, batch.prompt_lengths, s, config.completion_only_loss, batch.loss_mask)
    dtype = jnp.dtype(config.dtype)
    options = {"dtype": dtype, "segment_ids": batch.segment_ids, "images": batch.images}
    per_token = token_losses(model, params, batch.tokens, batch.lengths, **options)
    return jnp.sum(jnp.where(mask, per_token, 0.0)), jnp.sum(mask).astype(jnp.float32)
