"""RLOO, as pure functions: `make_experience` judges a rollout of groups, `update` learns from it.

REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv 2402.14740; Kool et al. 2019), in the forms of
TRL's trainer, of its trainer before 0.22, and of the paper. Rows of a group are adjacent: row i answers prompt i // G.
A row of length -1 is absent: it fills a batch up, and is in no mean. Line numbers are those of
`trl/trainer/rloo_trainer.py` in TRL 1.12.0.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax import losses
from rlhf_jax.algorithms import microbatch, nonfinite
from rlhf_jax.algorithms.actor_critic import Networks, group_logprobs
from rlhf_jax.algorithms.rollout_metrics import apart, grouped, objective_metrics, penalize_missing_eos, reward_metrics
from rlhf_jax.parallel import sharding
from rlhf_jax.types import Array, GroupExperience, Metrics, Params, Rollout, TrainState


def make_experience(
    nets: Networks,
    params: Params,
    ref_params: Params | None,
    rollout: Rollout,
    scores: Array,
    scorable: Array,
    config,
    eos_id: int,
    token_rewards: Array | None = None,
    *,
    group: int | None = None,
) -> tuple[GroupExperience, Metrics]:
    """Log-probabilities, KL, rewards and advantages of a rollout (rloo_trainer.py:1503-1606).

    Args:
      nets: the models.
      params: {"policy": ...}.
      ref_params: the reference policy; None where beta is 0.
      rollout: B rows, groups adjacent.
      scores: [B] float32, one a response.
      scorable: [B] bool; a row without a score is nobody's baseline and gives no gradient.
      config: an RLOOConfig.
      eos_id: the tokenizer's eos, for the missing-eos penalty.
      token_rewards: [B, T] float32 dense rewards; None: only the score.
      group: G; default: config.num_generations.

    Returns:
      (GroupExperience, metrics, each [] float32). One row of a group gives advantage 0 (an evaluation with G = 1).
    """
    group = config.num_generations if group is None else group
    t = rollout.response.shape[1]
    inside = adv.response_mask(rollout.lengths, t)
    # A response without an end teaches nothing by option; TRL then leaves its KL out too.
    present = rollout.lengths >= 0
    masked = jnp.zeros_like(present)
    if config.mask_truncated_completions:
        masked = ~rollout.ended & present
    learned = inside & ~masked[:, None]
    parts = GroupExperience(
        prompt_tokens=rollout.prompt_tokens[::group],
        prompt_lengths=rollout.prompt_lengths[::group],
        response=grouped(rollout.response, group),
        mask=grouped(rollout.response_mask, group),
        lengths=grouped(jnp.where(masked, 0, rollout.lengths), group),
        logprobs=grouped(rollout.logprobs, group),
        advantages=grouped(jnp.zeros_like(scores), group),
    )
    looked = parts if config.shared_prompts else apart(parts)
    groups, size = looked.lengths.shape

    def look(rows: GroupExperience):
        logprobs, _ = group_logprobs(nets.policy, params["policy"], rows, config)
        if ref_params is None:
            return logprobs, logprobs
        return logprobs, group_logprobs(nets.ref, ref_params, rows, config)[0]

    at_once = microbatch.groups_at_once(microbatch.rows_judged(config, groups * size), size, groups)
    widths = microbatch.prompt_widths(config, looked.prompt_tokens.shape[1])
    found = microbatch.by_prompt_length(look, looked, looked.prompt_lengths, at_once, cut_prompts, widths, nets.mesh)
    logprobs, ref_logprobs = (x.reshape(-1, t) for x in found)
    if config.old_logprobs == "sampler":
        logprobs = rollout.logprobs
    logprobs = jnp.where(inside, logprobs, 0.0)
    ref_logprobs = jnp.where(inside, ref_logprobs, 0.0) if ref_params is not None else logprobs
    kl = jnp.where(learned, adv.kl_penalty(logprobs, ref_logprobs, config.kl_estimator), 0.0)

    raw = jnp.where(scorable, scores, 0.0)
    dense = jnp.zeros_like(kl) if token_rewards is None else jnp.where(inside, token_rewards, 0.0)
    scores = penalize_missing_eos(raw, rollout, eos_id, config) + dense.sum(axis=1)
    raw = raw + dense.sum(axis=1)
    if config.normalize_reward:
        scores, _ = adv.normalize(scores, scorable, 1e-8)
    if config.reward_clip_range is not None:
        low, high = clip_range(config.reward_clip_range)
        scores = jnp.clip(scores, low, high)
    penalty = config.beta * kl.sum(axis=1)
    rewards = scores - penalty
    keep = scorable
    if config.baseline_excludes_truncated:
        keep = keep & ~masked
    if group > 1:
        advantages = adv.leave_one_out(grouped(rewards, group), grouped(keep, group)).reshape(-1)
        keep = keep & (jnp.repeat(grouped(keep, group).sum(axis=1), group) > 1)
    else:
        advantages = jnp.zeros_like(rewards)
    divisor = jnp.float32(1.0)
    if config.normalize_advantages:
        advantages, divisor = adv.normalize(advantages, keep, config.advantage_epsilon)
    if config.metrics == "correct":
        # No gradient comes from these rows either way; so the loss that is reported leaves them out as well.
        advantages = jnp.where(masked, 0.0, advantages)
    if config.token_level_kl:
        # Dense rewards that were normalised or clipped with the score are no sum of tokens any more.
        whole = config.normalize_reward or config.reward_clip_range is not None
        gone = adv.paid_before((0.0 if whole else dense) - config.beta * kl) / divisor
        advantages = jnp.where(learned & keep[:, None], advantages[:, None] - gone, 0.0)
    experience = parts.replace(logprobs=grouped(logprobs, group), advantages=grouped(advantages, group))

    found = {
        **reward_metrics(raw, rewards, scorable, present, group, config),
        **objective_metrics(rollout, logprobs, kl, learned, scores, penalty, scorable, eos_id, config),
    }
    if ref_params is None:
        del found["objective/kl"]
    else:
        found["kl"] = adv.masked_mean(kl, learned)
    return experience, found


def cut_prompts(rows: GroupExperience, width: int) -> GroupExperience:
    """The same with the last `width` columns of the prompts."""
    return rows.replace(prompt_tokens=rows.prompt_tokens[:, -width:])


def clip_range(given: tuple[float, ...]) -> tuple[float, float]:
    """(low, high) of `reward_clip_range`: a single number is symmetric, as in TRL before 0.22."""
    return (-given[0], given[0]) if len(given) == 1 else (given[0], given[1])


def permutations(key: Array, epochs: int, groups: int, reshuffle: str) -> Array:
    """The order of an update's groups in each epoch: one order for all ('once'), or one each ('per_epoch').

    Returns:
      [epochs, groups] int32.
    """
    if reshuffle == "once":
        return jnp.tile(jax.random.permutation(key, groups)[None], (epochs, 1))
    return jax.vmap(lambda k: jax.random.permutation(k, groups))(jax.random.split(key, epochs))


def loss_and_metrics(nets: Networks, params: Params, micro: GroupExperience, rows: Array, config, keys=None):
    """RLOO's loss of one micro-batch: its share of the mean over the responses of a minibatch.

    One action a response: max(-A r, -A clip(r)) with r = exp(sum of log-ratios). With token_level_kl the tokens are
    the actions: the same a token, summed over the response. policy_loss='reinforce': -A log pi instead.

    Args:
      nets, params: the trained models.
      micro: p groups.
      rows: [] float32, responses of the whole minibatch.
      config: an RLOOConfig.
      keys: [p] typed dropout keys (G = 1 only); None: no dropout.

    Returns:
      (loss [], (sums over this micro-batch of what becomes metrics, its extremes {"low", "high": clipping, "error": of
        the tokens' ratio from 1}))
    """
    p, g, t = micro.response.shape
    inside = adv.response_mask(micro.lengths.reshape(-1), t).reshape(p, g, t)
    logprobs, entropy = group_logprobs(nets.policy, params["policy"], micro, config, keys)
    logprobs = jnp.where(inside, logprobs, 0.0)
    old = jnp.where(inside, micro.logprobs, 0.0)
    clip = {"cliprange": config.epsilon, "cliprange_high": config.epsilon_high}
    gap = logprobs - old
    of_tokens = config.token_level_kl
    action = gap if of_tokens else jnp.sum(gap, axis=2)
    terms, clipped, ratio = losses.policy_loss_terms(action, jnp.zeros_like(action), micro.advantages, **clip)
    if config.policy_loss == "reinforce":
        action_logprobs = logprobs if of_tokens else jnp.sum(logprobs, axis=2)
        terms = losses.reinforce_loss_terms(action_logprobs, micro.advantages)
        clipped = jnp.zeros_like(clipped)
    if of_tokens:
        terms = jnp.sum(jnp.where(inside, terms, 0.0), axis=2)
    loss = jnp.sum(terms) / rows

    gap, ratio = jax.lax.stop_gradient((gap, ratio))
    present = micro.lengths >= 0
    counted = inside if of_tokens else present
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    clipping = config.policy_loss == "clipped"
    low = (ratio < 1 - config.epsilon) & (micro.advantages < 0) & counted & clipping
    high = (ratio > 1 + high) & (micro.advantages > 0) & counted & clipping
    sums = {
        "loss": loss,
        "entropy": jnp.sum(jnp.where(inside, entropy, 0.0)),
        "entropy_all": jnp.sum(jnp.where(present[:, :, None], entropy, 0.0)),
        "ratio": jnp.sum(jnp.where(inside, jnp.exp(gap), 0.0)),
        "ratio_all": jnp.sum(jnp.where(present[:, :, None], jnp.exp(gap), 0.0)),
        "rows": jnp.sum(present).astype(jnp.float32),
        "tokens": jnp.sum(inside).astype(jnp.float32),
        "squared_gap": jnp.sum(jnp.square(jnp.sum(gap, axis=2))),
        "clipped": jnp.sum(clipped & counted).astype(jnp.float32),
        "low": jnp.sum(low).astype(jnp.float32),
        "high": jnp.sum(high).astype(jnp.float32),
        "actions": jnp.sum(counted).astype(jnp.float32),
    }
    ends = {
        "low": jnp.min(jnp.where(counted, low, True).astype(jnp.float32)),
        "high": jnp.max(high.astype(jnp.float32)),
        "error": jnp.max(jnp.where(inside, jnp.abs(jnp.exp(gap) - 1.0), 0.0)),
    }
    return loss, (sums, ends)


def step_metrics(sums: dict[str, Array], ends: dict[str, Array], t: int, config) -> Metrics:
    """The metrics of one optimizer step from the sums of its micro-batches.

    With metrics=trl entropy is a mean of micro-batch means, and the least and largest clipping means over them; ratio
    and policy/entropy_avg are over all columns, fill and all.

    Args:
      sums: of `loss_and_metrics`, [N] each, by micro-batch.
      ends: its extremes, [N] each.
      t: T.
      config: metrics.

    Returns:
      Each [] float32; "ratios" [N] or [1], whose variance over steps is val/ratio_var.
    """
    trl = config.metrics == "trl"
    total = {name: jnp.sum(x) for name, x in sums.items()}
    rows = jnp.maximum(jnp.sum(sums["rows"]), 1.0)
    tokens = jnp.maximum(total["tokens"], 1.0)
    actions = jnp.maximum(total["actions"], 1.0)
    entropy = jnp.mean(sums["entropy"] / jnp.maximum(sums["tokens"], 1.0)) if trl else total["entropy"] / tokens
    ratios = sums["ratio_all"] / (jnp.maximum(sums["rows"], 1.0) * t) if trl else (total["ratio"] / tokens)[None]
    low, high = total["low"] / actions, total["high"] / actions
    return {
        "loss": total["loss"],
        "entropy": entropy,
        "clip_ratio/low_mean": low,
        "clip_ratio/low_min": jnp.mean(ends["low"]) if trl else jnp.min(ends["low"]),
        "clip_ratio/high_mean": high,
        "clip_ratio/high_max": jnp.mean(ends["high"]) if trl else jnp.max(ends["high"]),
        "clip_ratio/region_mean": low + high,
        "loss/policy_avg": total["loss"],
        "policy/approxkl_avg": 0.5 * total["squared_gap"] / rows,
        "policy/clipfrac_avg": total["clipped"] / actions,
        "policy/entropy_avg": total["entropy_all"] / (rows * t) if trl else entropy,
        "val/clipfrac_avg": jnp.float32(0.0),
        "val/ratio": jnp.mean(ratios),
        "val/ratio_error": jnp.max(ends["error"]),
        "ratios": ratios,
    }


def by_micro_batch(nets: Networks, minibatch: GroupExperience, config, base: Params | None = None):
    """The loss of a minibatch in parts that can be summed.

    Args:
      nets: the models.
      minibatch: p groups.
      config: an RLOOConfig.
      base: what adapters stand on (see `Networks`); None: the policy is trained in full.

    Returns:
      (function of (params, (micro-batch, dropout keys or None), index) -> (loss, sums and extremes [N] in its slot),
      micro-batches [N, ...], how each is cut)
    """
    groups, size = minibatch.lengths.shape
    order = microbatch.together_by_length(minibatch.prompt_lengths, config)
    minibatch = jax.tree.map(lambda x: x[order], minibatch)
    micros = microbatch.split_micro(minibatch, microbatch.groups_at_once(config.micro_batch_size, size, groups))
    micros = sharding.spread_rows(micros, nets.mesh, axis=1)
    n = micros.lengths.shape[0]
    rows = jnp.maximum(jnp.sum(minibatch.lengths >= 0), 1).astype(jnp.float32)

    def loss_fn(params, micro, index):
        micro, keys = micro
        loss, (sums, ends) = loss_and_metrics(nets, nets.whole(base, params), micro, rows, config, keys)
        # Each micro-batch reports into its own slot: extremes and means of means cannot be summed.
        own = jnp.arange(n) == index
        return loss, jax.tree.map(lambda x: jnp.where(own, x, 0.0), (sums, ends))

    def cut(item, width):
        micro, keys = item
        return cut_prompts(micro, width), keys

    widths = microbatch.prompt_widths(config, micros.prompt_tokens.shape[2])
    functions = tuple(functools.partial(cut, width=width) for width in widths)
    return loss_fn, micros, microbatch.Cuts(functions, microbatch.narrowest(micros.prompt_lengths, widths))


def look(nets: Networks, params: Params, experience: GroupExperience, config) -> Metrics:
    """The metrics of the loss where nothing is learned: an evaluation's.

    Args:
      nets, params: the trained models.
      experience: from `make_experience`.
      config: an RLOOConfig.

    Returns:
      As `update`'s of one step, without grad_norm; each [] float32.
    """
    loss_fn, micros, _ = by_micro_batch(nets, experience, config)
    sums, ends = microbatch.total(lambda micro, index: loss_fn(params, (micro, None), index)[1], micros)
    stats = step_metrics(sums, ends, experience.logprobs.shape[2], config)
    return {name: x for name, x in stats.items() if name not in ("ratios", "val/ratio_error")}


def steps_of(config) -> int:
    """Optimizer steps of an update."""
    return config.num_iterations * config.num_mini_batches


def update(
    nets: Networks,
    optimizer,
    state: TrainState,
    experience: GroupExperience,
    shuffles: Array,
    rates: Array,
    config,
    dropout_key: Array | None = None,
    causes: Array | None = None,
    base: Params | None = None,
) -> tuple[TrainState, Metrics]:
    """All epochs of RLOO on one batch of groups: scans over optimizer steps and micro-batches.

    Args:
      nets: the models.
      optimizer: from `common.make_optimizer`.
      state: what is trained; donate it. With sync_ref_model its ref_params move too.
      experience: from `make_experience`, or `apart` of it.
      shuffles: [num_iterations, P] int32, the order of the groups in each epoch.
      rates: [steps] float32, the learning rate of each optimizer step.
      config: an RLOOConfig.
      dropout_key: key of this update; None: no dropout. Needs G = 1.
      causes: [] int32, of `guard.causes`: what was found to be not finite before; None: nothing.
      base: as `by_micro_batch`.

    Returns:
      (state, metrics [steps] each; see `averaged`). Where something is not finite, or target_kl is passed, neither that
      step nor a later one is taken, nor does the reference move (see `guard`).
    """
    (groups, size), t = experience.lengths.shape, experience.logprobs.shape[2]
    if dropout_key is not None and size > 1:
        raise ValueError("a dropout mask belongs to a row: give `apart` of the experience with dropout_key")
    part = groups // config.num_mini_batches
    steps = steps_of(config)
    causes = jnp.int32(0) if causes is None else causes
    inside = adv.response_mask(experience.lengths.reshape(-1), t).reshape(experience.logprobs.shape)
    advantages = experience.advantages
    advantages = jnp.where(inside, advantages, 0.0) if advantages.ndim == 3 else advantages
    causes |= nonfinite.causes(logprob=jnp.where(inside, experience.logprobs, 0.0), advantage=advantages)

    def step(carry, item):
        params, opt_state, ref, alive = carry
        chosen, rate, number = item
        loss_fn, micros, cuts = by_micro_batch(nets, jax.tree.map(lambda x: x[chosen], experience), config, base)
        keys = None
        if dropout_key is not None:
            keys = microbatch.row_keys(jax.random.fold_in(dropout_key, number), part)
            keys = keys.reshape(micros.lengths.shape[0], -1)
        grads, (sums, ends) = microbatch.accumulate(loss_fn, params, (micros, keys), cuts)
        found = step_metrics(sums, ends, t, config)
        allowed = nonfinite.within(found["policy/approxkl_avg"], config)
        params, opt_state, alive, report = nonfinite.attempt(
            optimizer, params, opt_state, grads, rate, found["loss"], alive, allowed
        )
        if config.sync_ref_model:
            due = alive & ((state.step * steps + number + 1) % config.ref_model_sync_steps == 0)
            alpha = jnp.where(due, config.ref_model_mixup_alpha, 0.0)
            ref = jax.tree.map(lambda r, p: jnp.where(due, alpha * p + (1 - alpha) * r, r), ref, params["policy"])
        return (params, opt_state, ref, alive), {**found, **report}

    chosen = shuffles[:, : part * config.num_mini_batches].reshape(steps, part)
    carry = (state.params, state.opt_state, state.ref_params, nonfinite.may_learn(state, causes, config))
    (params, opt_state, ref, _), stats = jax.lax.scan(step, carry, (chosen, rates, jnp.arange(steps)))
    # Only one of an update's steps, or what came before them, is told to be bad: the sum of these bits is their union.
    stats["nonfinite/causes"] = stats["nonfinite/causes"].at[0].add(causes)
    trained = {"params": params, "opt_state": opt_state, "ref_params": ref}
    clock = {"step": 1, "episodes": groups * size}
    return nonfinite.settle(state, jnp.sum(stats["nonfinite/causes"]), config, trained, clock), stats


def averaged(stats: Metrics, config) -> Metrics:
    """The metrics of an update from those of its optimizer steps: means, and the variance of the ratio over them.

    Args:
      stats: from `update`, [steps] each.
      config: metrics, target_kl.

    Returns:
      Each []; `val/first_ratio_error` and `policy/first_approxkl` are of the first step, before which nothing
      was learned.
    """
    ratios = stats["ratios"].reshape(-1)
    found = nonfinite.over_steps({name: x for name, x in stats.items() if name != "ratios"}, config)
    found["val/ratio_var"] = microbatch.ratio_variance(ratios, config.metrics)
    found["val/first_ratio_error"] = stats["val/ratio_error"][0]
    found["policy/first_approxkl"] = stats["policy/approxkl_avg"][0]
    return found
