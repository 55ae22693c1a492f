"""The RLOO step against numbers by hand and gradients by torch, and what it must not depend on (TRL: tests/parity)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_jax.algorithms import policy_gradient as pg
from rlhf_jax.algorithms import rloo
from rlhf_jax.algorithms.groups import split_groups
from rlhf_jax.config import RLOOConfig
from rlhf_jax.models import custom_shape
from rlhf_jax.types import Rollout, TrainState
from tests.helpers.algorithms import at_rates, models_of, scored, update_in_order, with_params
from tests.helpers.arrays import distance, flat
from tests.helpers.bag_model import BagModel, torch_logits
from tests.helpers.models_common import random_params
from tests.helpers.optional import optional

torch = optional("torch")
P, G, C, T = 4, 3, 9, 6
B, EOS, V = P * G, 3, 61
MODEL = BagModel(V)
MODELS = models_of(MODEL, MODEL)
SAMPLED, REFERENCE = (MODEL.init(jax.random.key(seed)) for seed in range(2))
MOVED = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(9), x.shape), SAMPLED)
PROMPTS = np.array([9, 1, 5, 3])
LENGTHS = np.array([1, 6, 6, 3, 4, 5, 6, 2, 6, 5, 1, 6])
ENDED = np.array([1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0], bool)
INSIDE = np.arange(T)[None] < LENGTHS[:, None]
PLAIN = RLOOConfig(batch_size=B, num_generations=G, response_length=T, temperature=0.8, max_grad_norm=None)
SCORES = np.random.default_rng(5).normal(size=B).astype(np.float32)
ALL = np.ones(B, bool)


def config(**options):
    return dataclasses.replace(PLAIN, **options)


def made_rollout():
    rng = np.random.default_rng(0)
    prompts = np.repeat(rng.integers(4, V, (P, C)), G, axis=0)
    response = np.where(INSIDE, rng.integers(4, V, (B, T)), EOS)
    response[ENDED, LENGTHS[ENDED] - 1] = EOS
    return Rollout(
        prompt_tokens=jnp.asarray(prompts, jnp.int32),
        prompt_lengths=jnp.asarray(np.repeat(PROMPTS, G), jnp.int32),
        response=jnp.asarray(response, jnp.int32),
        lengths=jnp.asarray(LENGTHS, jnp.int32),
        ended=jnp.asarray(ENDED),
        logprobs=jnp.asarray(np.where(INSIDE, rng.normal(size=(B, T)) - 3, 0), jnp.float32),
        response_mask=jnp.ones((B, T), bool),
    )


ROLLOUT = made_rollout()


@functools.cache
def experience_program(c, group):
    def run(ref_params, rollout, scores, scorable, dense):
        size = c.num_generations if group is None else group
        batch = scored(rollout, scores, scorable, dense, eos_id=EOS, group_size=size)
        return rloo.make_experience(with_params(MODELS, {"policy": SAMPLED}, ref_params), batch, config=c)

    return jax.jit(run)


def experience_of(c, scores=SCORES, scorable=ALL, dense=None, *, ref=True, rollout=None, group=None):
    arrays = (jnp.asarray(scores, jnp.float32), jnp.asarray(scorable))
    dense = None if dense is None else jnp.asarray(dense, jnp.float32)
    return experience_program(c, group)(REFERENCE if ref else None, rollout or ROLLOUT, *arrays, dense)


@functools.cache
def update_program(c, models):
    def run(state, experience, orders, rates, key):
        # Plain gradient descent: Adam would make rounding visible where a gradient is near 0.
        optimizer = at_rates(optax.identity(), rates)
        state, _, steps = update_in_order(
            rloo, models, state, experience, config=c, optimizer=optimizer, key=key, orders=orders
        )
        return state, steps

    return jax.jit(run)


def fresh_state(params, step=0, ref=None):
    zero, empty = jnp.int32(0), optax.identity().init(params)
    return TrainState(params, empty, jnp.int32(step), zero, jnp.uint32(0), jnp.float32(0), jnp.uint32(0), ref)


def run_update(c, experience, params=None, *, rates=None, orders=None, ref=None, key=None, models=MODELS, step=0):
    """(state, metrics of each step) after plain gradient descent from `params`, by default those that sampled."""
    state = fresh_state({"policy": SAMPLED if params is None else params}, step, ref)
    if orders is None:
        orders = jnp.tile(jnp.arange(experience.lengths.shape[0])[None], (c.num_iterations, 1))
    rates = jnp.ones(pg.steps_per_update(c)) if rates is None else jnp.asarray(rates, jnp.float32)
    key = jax.random.key(0) if key is None else key
    return update_program(c, models)(state, experience, orders, rates, key)


def evaluated(c, experience):
    """Metrics of an evaluation of the policy that has moved."""
    return jax.jit(functools.partial(rloo.eval_metrics, config=c))(with_params(MODELS, {"policy": MOVED}), experience)


def gradient_of(c, experience, params=None, **options):
    """Of the first optimizer step, as one vector: what a rate of 1 takes off the params."""
    before = SAMPLED if params is None else params
    state, stats = run_update(c, experience, params, **options)
    return flat(before) - flat(state.params["policy"]), {name: np.asarray(x)[0] for name, x in stats.items()}


def assert_close(found, wanted, name=""):
    assert abs(float(found) - float(wanted)) <= 2e-5 * max(abs(float(wanted)), 0.1), (name, float(found), float(wanted))


def kl_by_hand(estimator="k1", keep=ALL):
    """[B, T] of the policy against its reference, from torch's log-probabilities."""
    logr = (torch_logprobs(REFERENCE)[0] - torch_logprobs(SAMPLED)[0]).numpy()
    kl = {"k1": -logr, "k2": logr**2 / 2, "k3": np.exp(logr) - 1 - logr}[estimator]
    return np.where(INSIDE & keep[:, None], kl, 0)


def loo_by_hand(rewards, keep=ALL):
    out = np.zeros(B)
    for i in range(B):
        others = [j for j in range(B) if j // G == i // G and j != i and keep[j]]
        if keep[i] and others:
            out[i] = rewards[i] - np.mean([rewards[j] for j in others])
    return out


def torch_logprobs(params):
    """(log-probabilities, entropies) [B, T] of the rollout."""
    params = jax.tree.map(lambda x: torch.tensor(np.asarray(x)) if isinstance(x, jax.Array) else x, params)
    prompts = np.arange(C)[None] >= (C - np.repeat(PROMPTS, G))[:, None]
    tokens = np.concatenate([ROLLOUT.prompt_tokens, ROLLOUT.response], axis=1)
    logits = torch_logits(params, tokens, np.concatenate([prompts, INSIDE], axis=1))[:, -T - 1 : -1]
    logps = (logits / PLAIN.temperature).log_softmax(-1)
    chosen = logps.gather(-1, torch.tensor(np.asarray(ROLLOUT.response)).long()[..., None])
    return chosen[..., 0], -(logps.exp() * logps).sum(-1)


def reinforce_gradient(params, advantages):
    """Of -mean over responses of sum_t A_t log pi_t, by torch, as one vector."""
    leaves = jax.tree.map(lambda x: torch.tensor(np.asarray(x), requires_grad=True), params)
    terms = torch_logprobs(leaves)[0] * torch.tensor(np.where(INSIDE, advantages, 0))
    return flat(torch.autograd.grad(-terms.sum(1).mean(), jax.tree.leaves(leaves)))


UNSCORED = np.where(np.isin(np.arange(B), [1, 3, 4, 9, 10, 11]), np.nan, SCORES)
"""One row of the first group, two of the second, all of the last."""


# ---------------------------------------------------------------------------------------------- rewards to advantages


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_of_each_estimator_is_taken_off_the_reward(estimator):
    experience, metrics = experience_of(config(kl_estimator=estimator, beta=0.3))
    kl = kl_by_hand(estimator)
    wanted = loo_by_hand(SCORES - 0.3 * kl.sum(1))
    np.testing.assert_allclose(experience.advantages.reshape(-1), wanted, rtol=1e-4, atol=1e-5)
    assert_close(metrics["kl"], kl.sum() / INSIDE.sum())
    assert_close(metrics["objective/kl"], kl.sum(1).mean())
    assert_close(metrics["objective/non_score_reward"], -0.3 * kl.sum(1).mean())
    assert_close(metrics["objective/rlhf_reward"], (SCORES - 0.3 * kl.sum(1)).mean())
    assert_close(metrics["reward"], SCORES.mean())


@pytest.mark.parametrize("limits", [(-0.4, 0.9), (0.6,)])
def test_scores_are_penalised_normalised_clipped_and_then_charged_for_the_kl(limits):
    options = {"normalize_reward": True, "reward_clip_range": limits, "missing_eos_penalty": 1.5, "beta": 0.4}
    experience, metrics = experience_of(config(**options))
    scores = SCORES - 1.5 * ~ENDED
    scores = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-8)
    scores = scores.clip(*(limits if len(limits) == 2 else (-limits[0], limits[0])))
    assert len(set(scores)) < B
    rewards = scores - 0.4 * kl_by_hand().sum(1)
    np.testing.assert_allclose(experience.advantages.reshape(-1), loo_by_hand(rewards), rtol=1e-4, atol=1e-5)
    assert_close(metrics["objective/scores"], scores.mean())
    assert_close(metrics["objective/rlhf_reward"], rewards.mean())


def test_a_missing_eos_may_replace_the_score():
    options = {"missing_eos_penalty": 2.0, "eos_penalty_mode": "replace", "beta": 0.0}
    experience, metrics = experience_of(config(**options), ref=False)
    wanted = np.where(ENDED, SCORES, -2.0)
    np.testing.assert_allclose(experience.advantages.reshape(-1), loo_by_hand(wanted), rtol=1e-5, atol=1e-6)
    assert_close(metrics["objective/scores"], wanted.mean())


@pytest.mark.parametrize("excluded", [False, True], ids=["in the baseline", "left out of it"])
def test_truncated_responses_teach_nothing_and_stay_in_the_baseline_unless_asked(excluded):
    c = config(mask_truncated_completions=True, baseline_excludes_truncated=excluded, beta=0.3)
    experience, metrics = experience_of(c)
    kl = kl_by_hand(keep=ENDED)
    wanted = loo_by_hand(SCORES - 0.3 * kl.sum(1), ENDED if excluded else ALL)
    np.testing.assert_allclose(experience.advantages.reshape(-1), np.where(ENDED, wanted, 0), rtol=1e-4, atol=1e-5)
    assert_close(metrics["kl"], kl.sum() / (INSIDE & ENDED[:, None]).sum())
    # Whatever a truncated response says, the gradient is the same.
    plain, _ = gradient_of(c, experience, MOVED)
    other = jnp.where(jnp.asarray(ENDED).reshape(P, G, 1), experience.response, 7)
    changed, _ = gradient_of(c, experience.replace(response=other), MOVED)
    assert np.linalg.norm(plain) > 1e-3 and distance(changed, plain) < 1e-6


def test_a_row_without_a_score_is_never_read_and_gives_no_gradient():
    there = ~np.isnan(UNSCORED)
    experience, metrics = experience_of(config(normalize_reward=True), UNSCORED, there)
    zero, _ = experience_of(config(normalize_reward=True), np.where(there, SCORES, 1e9), there)
    np.testing.assert_array_equal(experience.advantages, zero.advantages)
    advantages = np.asarray(experience.advantages).reshape(-1)
    assert (advantages[~there] == 0).all() and advantages[5] == 0 and advantages[0] == -advantages[2] != 0
    assert all(np.isfinite(x).all() for x in (*jax.tree.leaves(experience), *metrics.values()))
    assert_close(metrics["reward"], np.nanmean(UNSCORED))
    assert_close(metrics["reward_std"], np.nanstd(UNSCORED, ddof=1))
    plain, _ = gradient_of(config(), experience, MOVED)
    other = jnp.where(jnp.asarray(there).reshape(P, G, 1), experience.response, 7)
    changed, _ = gradient_of(config(), experience.replace(response=other), MOVED)
    assert distance(changed, plain) < 1e-6


def test_a_token_is_not_charged_for_the_kl_before_it():
    whole, _ = experience_of(config(beta=0.3))
    tokens, _ = experience_of(config(beta=0.3, token_level_kl=True))
    found, sequence = np.asarray(tokens.advantages).reshape(B, T), np.asarray(whole.advantages).reshape(B)
    np.testing.assert_allclose(found[:, 0], sequence, rtol=1e-5)
    before = np.cumsum(kl_by_hand(), axis=1) - kl_by_hand()
    np.testing.assert_allclose(found, np.where(INSIDE, sequence[:, None] + 0.3 * before, 0), rtol=1e-4, atol=1e-5)


def test_dense_rewards_count_in_the_sequence_and_are_rewards_to_go_of_tokens():
    dense = np.random.default_rng(1).normal(size=(B, T)).astype(np.float32)
    inside = np.where(INSIDE, dense, 0)
    whole, metrics = experience_of(config(beta=0.0), dense=dense, ref=False)
    wanted = loo_by_hand(SCORES + inside.sum(1))
    np.testing.assert_allclose(whole.advantages.reshape(B), wanted, rtol=1e-4, atol=1e-5)
    tokens, _ = experience_of(config(beta=0.0, token_level_kl=True), dense=dense, ref=False)
    gone = np.cumsum(inside, axis=1) - inside
    wanted = np.where(INSIDE, wanted[:, None] - gone, 0)
    np.testing.assert_allclose(tokens.advantages.reshape(B, T), wanted, rtol=1e-4, atol=2e-5)
    # TRL's `reward` is the sum of all rewards of a response.
    assert_close(metrics["reward"], (SCORES + inside.sum(1)).mean())
    _, metrics = experience_of(config(beta=0.0), np.zeros(B), dense=dense, ref=False)
    assert metrics["frac_reward_zero_std"] == 0


def test_without_a_reference_no_kl_is_charged_nor_reported():
    experience, metrics = experience_of(config(beta=0.0), ref=False)
    np.testing.assert_allclose(experience.advantages.reshape(B), loo_by_hand(SCORES), rtol=1e-5, atol=1e-6)
    assert "kl" not in metrics
    assert "objective/kl" not in metrics  # 0 would say that the policy has not moved


def test_a_group_of_one_has_no_advantage_but_all_metrics():
    for options in ({}, {"normalize_advantages": True}, {"token_level_kl": True, "beta": 0.0}):
        experience, metrics = experience_of(config(**options), group=1, ref=options.get("beta") != 0.0)
        assert experience.lengths.shape == (B, 1) and not np.asarray(experience.advantages).any()
        assert all(np.isfinite(x) for x in metrics.values()) and metrics["frac_reward_zero_std"] == 1


@pytest.mark.parametrize("options", [{}, {"normalize_reward": True}, {"normalize_advantages": True}], ids=str)
def test_a_group_of_equal_rewards_has_no_advantage_and_counts_as_one_of_no_deviation(options):
    scores = np.where(np.arange(B) < 2 * G, np.repeat([12345.678, 0.1, 0, 0], G), SCORES).astype(np.float32)
    assert (scores[:G].sum() - scores[0]) / 2 - scores[0] or scores[:G].sum() / G != scores[0]  # rounding shows
    experience, found = experience_of(config(beta=0.0, **options), scores, ref=False)
    advantages = np.asarray(experience.advantages)
    assert not advantages[:2].any() and advantages[2:].all()
    assert found["frac_reward_zero_std"] == 0.5


def test_rewards_that_the_eos_penalty_makes_equal_count_as_equal():
    c = config(beta=0.0, missing_eos_penalty=1.0, eos_penalty_mode="replace", stop_token="eos")
    response, lengths = ROLLOUT.response.at[:G].set(V - 1), ROLLOUT.lengths.at[:G].set(T)
    endless = ROLLOUT.replace(response=response, lengths=lengths)
    experience, metrics = experience_of(c, ref=False, rollout=endless)
    assert not np.asarray(experience.advantages)[0].any() and np.asarray(experience.advantages)[1:].any()
    assert metrics["frac_reward_zero_std"] == 0.25


@pytest.mark.parametrize("token_level_kl", [False, True], ids=["sequences", "tokens"])
def test_absent_rows_change_no_metric(token_level_kl):
    c = config(token_level_kl=token_level_kl, beta=0.3)
    padded = jax.tree.map(lambda x: jnp.concatenate([x, x[-G:]]), ROLLOUT)
    padded = padded.replace(lengths=padded.lengths.at[B:].set(-1))
    scores, there = np.append(SCORES, [np.nan] * G), np.append(ALL, [False] * G)
    both = []
    for given in ({}, {"rollout": padded, "scores": scores, "scorable": there}):
        experience, found = experience_of(c, **given)
        both.append({**found, **evaluated(c, experience)})
    wrong = {n: (float(both[1][n]), float(v)) for n, v in both[0].items() if abs(both[1][n] - v) > 1e-4 * abs(v) + 1e-6}
    assert not wrong, wrong


def test_the_samplers_log_probabilities_are_taken_when_asked():
    experience, metrics = experience_of(config(old_logprobs="sampler"))
    given = np.asarray(ROLLOUT.logprobs)
    np.testing.assert_array_equal(experience.logprobs.reshape(B, T), given)
    assert_close(metrics["objective/entropy"], -given.sum(1).mean())


def test_metrics_are_over_the_tokens_and_rows_that_count():
    """Where TRL counts padding, or rewards after the KL penalty (docs/numerics.md)."""
    scores = np.repeat([1.0, 2.0, 3.0, 4.0], G) + np.where(np.arange(B) < G, SCORES, 0)
    c = config(micro_batch_size=2 * G, beta=0.3)
    experience, found = experience_of(c, scores)
    found = {**found, **gradient_of(c, experience, MOVED)[1]}
    assert found["frac_reward_zero_std"] == 0.75
    logprobs, entropy = (x.numpy() for x in torch_logprobs(MOVED))
    assert_close(found["entropy"], entropy[INSIDE].mean())
    old = torch_logprobs(SAMPLED)[0].numpy()
    assert_close(found["objective/entropy"], -np.where(INSIDE, old, 0).sum(1).mean())
    assert_close(found["val/ratio"], np.exp(logprobs - old)[INSIDE].mean())
    assert found["val/num_eos_tokens"] == ENDED.sum()


# --------------------------------------------------------------------------------------------------------- the update


TOKENS = pytest.param({"token_level_kl": True, "policy_loss": "reinforce"}, id="tokens", marks=pytest.mark.runs)


@pytest.mark.parametrize("options", [pytest.param({}, id="clipped"), TOKENS])
def test_shared_prompts_learn_what_lone_ones_do_in_any_micro_batch(options):
    c = config(num_mini_batches=2, num_iterations=2, beta=0.3, **options)
    experience, _ = experience_of(c)
    orders = jnp.array([[2, 0, 3, 1], [0, 1, 2, 3]])
    rows = (orders[:, :, None] * G + jnp.arange(G)[None, None]).reshape(2, B)
    rates = [2e-2, 1e-2, 3e-2, 2e-2]
    start = flat(SAMPLED)
    state, stats = run_update(c, experience, rates=rates, orders=orders)
    moved = flat(state.params) - start
    lone = split_groups(experience)
    assert lone.lengths.shape == (B, 1)
    cases = ((None, lone, rows, None), (2, lone, rows, (3, 5)), (G, experience, orders, (2, 3, 4)))
    for size, given, order, buckets in cases:
        other = dataclasses.replace(c, micro_batch_size=size, gradient_checkpointing=size == 2, length_buckets=buckets)
        found, others = run_update(other, given, rates=rates, orders=order)
        assert distance(flat(found.params), flat(state.params)) < 1e-5
        assert distance(flat(found.params) - start, moved) < 3e-5
        for name, values in stats.items():
            if name.startswith("loss"):  # sums of terms of both signs, which may all but cancel in one of the steps
                assert distance(others[name], values) < 1e-5
            elif name != "val/ratio_error":
                np.testing.assert_allclose(others[name], values, rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("token_level_kl", [False, True], ids=["sequences", "tokens"])
@pytest.mark.parametrize("policy_loss", ["clipped", "reinforce"])
def test_the_gradient_is_reinforces(policy_loss, token_level_kl):
    c = config(policy_loss=policy_loss, token_level_kl=token_level_kl, beta=0.5)
    experience, _ = experience_of(c)
    advantages = np.asarray(experience.advantages).reshape(B, -1) + np.zeros((B, T), np.float32)
    found, stats = gradient_of(c, experience)
    assert distance(found, reinforce_gradient(SAMPLED, advantages)) < 1e-5
    assert stats["val/ratio_error"] < 1e-5 and stats["policy/approxkl_avg"] < 1e-9
    # Once the policy has moved a ratio is not 1: only the loss without one keeps this gradient.
    found, stats = gradient_of(c, experience, MOVED)
    gap = distance(found, reinforce_gradient(MOVED, advantages))
    assert gap < 1e-5 if policy_loss == "reinforce" else gap > 1e-2
    assert policy_loss == "clipped" or stats["clip_ratio/region_mean"] == stats["policy/clipfrac_avg"] == 0


@pytest.mark.parametrize("token_level_kl", [False, True], ids=["sequences", "tokens"])
def test_clipping_is_counted_on_its_side(token_level_kl):
    c = config(token_level_kl=token_level_kl, epsilon=0.02, epsilon_high=0.05)
    experience, _ = experience_of(c)
    _, stats = gradient_of(c, experience, MOVED)
    new, old = (torch_logprobs(params)[0].numpy() for params in (MOVED, SAMPLED))
    gap = np.where(INSIDE, new - old, 0)
    gap, counted = (gap, INSIDE) if token_level_kl else (gap.sum(1, keepdims=True), np.ones((B, 1), bool))
    advantages = np.asarray(experience.advantages).reshape(B, -1)
    low = ((np.exp(gap) < 0.98) & (advantages < 0))[counted]
    high = ((np.exp(gap) > 1.05) & (advantages > 0))[counted]
    assert low.any() and high.any()
    wanted = {"low_mean": low.mean(), "low_min": low.min(), "high_mean": high.mean(), "high_max": high.max()}
    for name, value in {**wanted, "region_mean": (low | high).mean()}.items():
        assert_close(stats[f"clip_ratio/{name}"], value, name)
    assert_close(stats["policy/clipfrac_avg"], (low | high).mean())
    # Where every action is clipped, so is the least clipped one.
    all_low = experience.replace(logprobs=experience.logprobs + 1, advantages=-jnp.ones_like(experience.advantages))
    _, stats = gradient_of(c, all_low)
    assert stats["clip_ratio/low_mean"] == 1 and stats["clip_ratio/low_min"] == 1


def test_each_optimizer_step_takes_its_minibatch_at_its_rate():
    c = config(num_iterations=2, num_mini_batches=2, beta=0.3)
    experience, _ = experience_of(c)
    orders, rates = jnp.array([[2, 0, 3, 1], [1, 3, 0, 2]]), [3e-3, 0.0, 7e-3, 5e-3]
    state, stats = run_update(c, experience, orders=orders, rates=rates)
    assert int(state.step) == 1 and int(state.episodes) == B and stats["loss"].shape == (4,)
    policy, alone = SAMPLED, []
    for rows, rate in zip(np.asarray(orders).reshape(4, 2), rates):
        part = jax.tree.map(lambda x, rows=rows: x[rows], experience)
        single, found = run_update(config(batch_size=B // 2, beta=0.3), part, policy, rates=[rate])
        policy = single.params["policy"]
        alone.append(found)
    assert distance(flat(state.params), flat(policy)) < 1e-6
    for name in ("loss", "grad_norm", "entropy", "policy/approxkl_avg", "val/ratio"):
        np.testing.assert_allclose(stats[name], [found[name][0] for found in alone], rtol=1e-4, atol=1e-6, err_msg=name)
    _, means = rloo.update(
        MODELS,
        fresh_state({"policy": SAMPLED}),
        experience,
        config=c,
        optimizer=at_rates(optax.identity(), jnp.asarray(rates, jnp.float32)),
        key=jax.random.key(0),
    )
    assert means["val/first_ratio_error"] < 1e-5 < means["val/ratio_error"] and means["val/ratio_var"] > 0
    assert means["loss"].shape == () and "ratio_error" not in means


def test_the_order_of_groups_is_that_of_the_batch_or_new_each_pass():
    once = np.asarray(pg.permutations(jax.random.key(0), 3, 16, "once"))
    again = np.asarray(pg.permutations(jax.random.key(0), 3, 16, "per_epoch"))
    assert (np.sort(once) == np.arange(16)).all() and (np.sort(again) == np.arange(16)).all()
    assert (once == once[0]).all() and len({tuple(row) for row in again}) == 3


@pytest.mark.parametrize("done, due", [(0, [3]), (2, [1, 4])], ids=["steps 1 to 4", "steps 9 to 12"])
def test_the_reference_moves_after_every_third_optimizer_step(done, due):
    options = {"num_iterations": 2, "num_mini_batches": 2, "beta": 0.3}
    c = config(**options, sync_ref_model=True, ref_model_sync_steps=3, ref_model_mixup_alpha=0.25)
    experience, _ = experience_of(config(**options))
    rates = np.array([5e-3, 4e-3, 3e-3, 2e-3])
    ref = wanted = REFERENCE
    state, _ = run_update(c, experience, rates=rates, ref=ref, step=done)
    for number in due:
        reached, _ = run_update(config(**options), experience, rates=np.where(np.arange(4) < number, rates, 0))
        wanted = jax.tree.map(lambda r, p: 0.75 * r + 0.25 * p, wanted, reached.params["policy"])
    assert distance(flat(state.ref_params), flat(wanted)) < 1e-6 < distance(flat(wanted), flat(ref))
    plain, _ = run_update(config(**options), experience, rates=rates)
    assert distance(flat(state.params), flat(plain.params)) < 1e-6 and plain.ref_params is None


def test_a_dropout_mask_belongs_to_a_row_and_to_a_key():
    plain = custom_shape("1x16x2", V, 64)
    fields = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    dropping = models_of(dataclasses.replace(plain, config=dataclasses.replace(plain.config, **fields)))
    c, keys = config(beta=0.3), [jax.random.key(0), jax.random.key(1)]
    rest = split_groups(experience_of(c)[0]), random_params(plain)
    first, second = (gradient_of(c, *rest, key=key, models=dropping)[0] for key in keys)
    none, _ = gradient_of(dataclasses.replace(c, disable_dropout=True), *rest, key=keys[0], models=dropping)
    assert distance(second, first) > 0.1 and distance(none, first) > 0.1
    assert distance(none, gradient_of(c, *rest, models=models_of(plain))[0]) < 1e-6
    other = dataclasses.replace(c, micro_batch_size=3, length_buckets=(2, 3, 5))  # as wide as their prompts need
    assert distance(gradient_of(other, *rest, key=keys[0], models=dropping)[0], first) < 1e-5


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": G, "token_level_kl": True}], ids=str)
def test_eval_metrics_are_those_of_a_step_at_rate_0(options):
    c = config(beta=0.3, epsilon=0.02, **options)
    experience, _ = experience_of(c)
    seen = evaluated(c, experience)
    _, stats = run_update(c, experience, MOVED, rates=[0.0])
    learned = {"grad_norm", "val/ratio_error", "nonfinite/causes", "nonfinite/steps_applied"}
    assert set(stats) - set(seen) == learned
    for name, value in seen.items():
        assert_close(value, stats[name][0], name)
