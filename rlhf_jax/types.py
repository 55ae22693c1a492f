"""The pytrees that travel between the rooms.

Shape letters everywhere: B batch, C context (padded prompt), T response, S = C + T, L layers, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import flax
import jax
import jax.numpy as jnp

Array = jax.Array
Params = dict[str, Any]
Metrics = dict[str, Array]


class Images(flax.struct.PyTreeNode):
    """The images of prompts, cut into tiles of one size."""

    pixels: Array  # [P, I, 3, S, S] uint8, or as the model reads them float32; rows of fewer tiles end in zeros
    # How the model reads uint8: (pixel * rescale_factor - mean) / std.
    rescale_factor: float = flax.struct.field(pytree_node=False, default=1 / 255)
    mean: tuple[float, ...] = flax.struct.field(pytree_node=False, default=(0.5, 0.5, 0.5))
    std: tuple[float, ...] = flax.struct.field(pytree_node=False, default=(0.5, 0.5, 0.5))


class PromptBatch(flax.struct.PyTreeNode):
    """Left-padded prompts: a pure function of (seed, step)."""

    tokens: Array  # [B, C] int32; the prompt ends in the last column
    lengths: Array  # [B] int32, 1..C
    rows: Array  # [B] int32, rows of the data set, for the columns that reward functions read; on the host all rows,
    # while tokens and lengths are those of the process' share
    images: Images | None = None  # of the prompts, as tokens; None: the prompts are text
    start: Array | None = None  # [B] int32, where guided responses start (generate.guided); as tokens


class Rollout(flax.struct.PyTreeNode):
    """Sampled responses and the prompts they answer."""

    prompt_tokens: Array  # [B, C] int32, left-padded
    prompt_lengths: Array  # [B] int32
    response: Array  # [B, T] int32; filled with eos after its end
    lengths: Array  # [B] int32, 0..T, the stop token included; -1: the row is absent and counts nowhere
    ended: Array  # [B] bool: a stop token was sampled (False: truncated at T)
    logprobs: Array  # [B, T] float32 of the sampler, at its temperature; 0 after the end
    response_mask: Array  # [B, T] bool: response columns that may be attended
    start: Array | None = None  # [B] int32, where guided responses start (generate.guided)
    sampled: Array | None = None  # [B, T] bool: response tokens that the policy sampled; the others came from elsewhere
    # (results of tools) and are read, but not trained on; None: all of the response


class ScoredRollout(flax.struct.PyTreeNode):
    """A rollout with its scores, from which an algorithm makes experience."""

    rollout: Rollout
    scores: Array  # [B] float32, one per response
    scorable: Array | None = None  # [B] bool, False: no reward scored the row; None: all rows have a score
    token_rewards: Array | None = None  # [B, T] float32 dense rewards, added position by position; None: none
    each_reward: Array | None = None  # [B, F] float32 of each reward without its weight, NaN where it does not apply
    # What counts as eos for the missing-eos penalty: the tokenizer's, or the stop ids in its place.
    eos_ids: tuple[int, ...] = flax.struct.field(pytree_node=False, default=(0,))
    images: Images | None = None  # [P, ...] of the prompts, P = B / group_size; None: they are text
    group_size: int = flax.struct.field(pytree_node=False, default=1)  # adjacent rows that answer the same prompt
    reward_weights: tuple[float, ...] | None = flax.struct.field(pytree_node=False, default=None)  # of `each_reward`


class Experience(flax.struct.PyTreeNode):
    """What one update of a policy trains on: G responses to each prompt, 1 with PPO.

    With G = 1 each response has its own copy of the prompt: the same numbers, more work.
    """

    prompt_tokens: Array  # [P, C] int32, left-padded
    prompt_lengths: Array  # [P] int32
    response: Array  # [P, G, T] int32
    mask: Array  # [P, G, T] bool: response columns that may be attended
    trained_mask: Array  # [P, G, T] bool: tokens that are trained on
    lengths: Array  # [P, G] int32, 0..T; -1: the row is absent
    logprobs: Array | None  # [P, G, T] float32, behavior policy; None: those of the policy in the only optimizer step
    advantages: Array | None = None  # [P, G] float32 of whole responses, or [P, G, T] of tokens
    values: Array | None = None  # [P, G, T] float32, where there is a critic; so are returns and value_mask
    returns: Array | None = None  # [P, G, T] float32
    value_mask: Array | None = None  # [P, G, T] bool: positions that the critic is trained on
    ref_logprobs: Array | None = None  # [P, G, T] float32, where the loss has the KL to the reference
    sampler_logprobs: Array | None = None  # [P, G, T] float32, where the loss compares sampler and policy
    selected: Array | None = None  # [P, G, T] bool, tokens that the policy's loss is of; None: all that are trained on
    states: Array | None = None  # [P, G, T] int32, of the automaton before each token, where log-probabilities are of
    # the tokens that a guided response may have; None: of all tokens
    dropout_keys: Array | None = None  # [P] typed keys; None: no dropout
    images: Images | None = None  # [P, ...] of the prompts; None: they are text


class PartialResponses(flax.struct.PyTreeNode):
    """Responses that a rollout begins with; those that have not ended go on."""

    response: Array  # [B, T] int32
    logprobs: Array  # [B, T] float32, of the policies that sampled each token; 0 at other tokens
    lengths: Array  # [B] int32, tokens so far; 0: the response begins
    ended: Array  # [B] bool


class Unfinished(flax.struct.PyTreeNode):
    """Responses that a rollout of `rollout_max_steps` left unfinished: they go on in the next update."""

    rows: Array  # [P] int32, rows of the data set that the batch's places answer; an update sets them
    held: Array  # [P] bool: the place's responses go on; False: it takes a new prompt
    response: Array  # [B, T] int32
    logprobs: Array  # [B, T] float32, of the policies that sampled each token
    lengths: Array  # [B] int32, tokens so far
    ended: Array  # [B] bool: a stop token was sampled
    keys: Array  # [B, K] uint32, key data of each row
    taken: Array  # [] int32, prompts taken from the data set so far
    began: Array | None = None  # [P] int32, the update that the place's responses began in; None: there are no tools
    sampled: Array | None = None  # [B, T] bool, False at results of tools; None: there are no tools


class RolloutState(flax.struct.PyTreeNode):
    """What a rollout leaves for later ones."""

    response_lengths: Array | None = None  # [rows of the data set] float32, mean length of the responses at the last
    # visit, -1 before the first; None: rollouts have no order
    unfinished: Unfinished | None = None  # None: every rollout is finished


class TrainState(flax.struct.PyTreeNode):
    """All that a run needs to resume."""

    params: Params  # {"policy": ..., "value": ...} or {"model": ...}
    opt_state: Any
    step: Array  # [] int32, updates done
    episodes: Array  # [] int32, responses trained on
    seed: Array  # [] uint32; every key is fold_in(key(seed), step)
    kl_coef: Array  # [] float32, the KL controller's current value
    tokens: Array  # [] uint32, tokens of prompts and responses seen so far, modulo 2^32 (`metrics.logger` has them all)
    ref_params: Params | None = None  # the reference policy, if training moves it
    entropy_control: Array | None = None  # [2] float32, the adaptive entropy_coef and the entropy of the last optimizer
    # step; None: the coefficient is fixed
    rollout: RolloutState | None = None  # None: a rollout needs nothing of earlier ones
    nonfinite: Array = flax.struct.field(default_factory=lambda: jnp.int32(0))  # [] int32, updates in a row in which
    # something was not finite
