"""GRPO against TRL's own loss, rewards and entropy control, and REINFORCE++ in its two published forms.

The forward pass is patched out on both sides: the params are the log-probabilities and entropies of a batch of rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax import advantages as adv
from rlhf_jax import models
from rlhf_jax.algorithms import grpo, microbatch
from rlhf_jax.algorithms import policy_gradient as pg
from rlhf_jax.algorithms.groups import without_absent
from rlhf_jax.config import GRPOConfig
from rlhf_jax.types import Experience, Rollout, TrainState
from tests.helpers import trl_grpo
from tests.helpers.algorithms import at_rates, models_of, scored, update_in_order, with_params
from tests.helpers.arrays import distance, flat
from tests.helpers.optional import optional
from tests.helpers.properties import near
from tests.parity import trl_steps

torch = optional("torch")
P, G, T = 4, 2, 5
B, EOS = P * G, 3
ALL = np.ones(B, bool)
MODEL = models.custom_shape("1x16x2", 41, 64)
MODELS = models_of(MODEL, MODEL)
PLAIN = GRPOConfig(batch_size=B, num_generations=G, response_length=T, max_grad_norm=None)
few = settings(max_examples=12, deadline=None)
seeds = st.integers(0, 2**31)
every_loss = pytest.mark.parametrize("loss_type", grpo.LOSSES)


def config(**options):
    return dataclasses.replace(PLAIN, **options)


def rows_of_params(network, rows, config, *, critic=None, dropout_keys=None, entropy_gradient=False):
    """In place of a forward pass: the first token of a response is its row in the params."""
    row, params = rows.response[:, :, 0], network.params
    entropies = params["entropies"][row]
    return params["logps"][row], entropies if entropy_gradient else jax.lax.stop_gradient(entropies), None


@pytest.fixture(autouse=True)
def no_forward_pass(monkeypatch):
    for module in (grpo, pg):
        monkeypatch.setattr(module, "response_logprobs", rows_of_params)


def arrays_of(seed, *, spread=0.3, of_tokens=False, empty=True):
    """What the loss of B rows is made of, float32, by TRL's names; each pair of rows has a token at least."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0 if empty else 1, T + 1, size=B)
    lengths[::2] = np.maximum(lengths[::2], 1)
    old = rng.normal(size=(B, T)) - 2
    logps = old + spread * rng.normal(size=(B, T))
    floats = {
        "logps": logps,
        "entropies": rng.gamma(1.0, size=(B, T)),
        "old_per_token_logps": old,
        "ref_per_token_logps": logps + 0.3 * rng.normal(size=(B, T)),
        "sampling_per_token_logps": old + 0.3 * rng.normal(size=(B, T)),
        "advantages": rng.normal(size=(B, T) if of_tokens else B) * (rng.random((B, 1) if of_tokens else B) < 0.9),
    }
    return {name: x.astype(np.float32) for name, x in floats.items()}, lengths.astype(np.int32)


def params_of(arrays):
    return {"policy": {name: jnp.asarray(arrays[name]) for name in ("logps", "entropies")}}


def grouped(x, size=G):
    return jnp.asarray(x).reshape(-1, size, *np.shape(x)[1:])


def experience_of(arrays, lengths, c, with_old=True):
    ref = grouped(arrays["ref_per_token_logps"]) if c.beta else None
    return Experience(
        prompt_tokens=jnp.ones((P, 1), jnp.int32),
        prompt_lengths=jnp.ones(P, jnp.int32),
        response=grouped(np.tile(np.arange(B)[:, None], (1, T))),
        mask=jnp.ones((P, G, T), bool),
        trained_mask=grouped(np.arange(T)[None] < lengths[:, None]),
        lengths=grouped(lengths),
        logprobs=grouped(arrays["old_per_token_logps"]) if with_old else None,
        advantages=grouped(arrays["advantages"]),
        ref_logprobs=ref,
        sampler_logprobs=grouped(arrays["sampling_per_token_logps"]),
    )


def our_step(arrays, lengths, c, *, with_old=True, share=None, entropy_coef=None, experience=None):
    """(gradients, tally, metrics) of a minibatch."""
    if experience is None:
        experience = experience_of(arrays, lengths, c, with_old)
    share = jnp.sum(experience.trained_mask).astype(jnp.float32) if share is None else share
    gradients, tally, _ = pg.minibatch_gradients(
        MODELS,
        params_of(arrays),
        experience,
        config=c,
        objective=grpo.OBJECTIVE,
        batch_tokens=share,
        entropy_coef=entropy_coef,
    )
    return gradients["policy"], tally, grpo.step_metrics(tally, c)


def in_trls_order(arrays, lengths, c, *, with_old=True, share=None, entropy_coef=None):
    """(gradients, tally, metrics) as TRL's: means over micro-batches, each by itself (tests/parity/trl_steps.py)."""
    experience = experience_of(arrays, lengths, c, with_old)
    alone, count = trl_steps.single(c), B // (c.micro_batch_size or B)
    share = jnp.sum(experience.trained_mask).astype(jnp.float32) if share is None else share
    options = {"share": share / count, "entropy_coef": entropy_coef}
    groups = P // count
    parts = [jax.tree.map(lambda x, i=i: x[i * groups : (i + 1) * groups], experience) for i in range(count)]
    found = [our_step(arrays, lengths, alone, experience=part, **options) for part in parts]
    gradients = jax.tree.map(lambda *x: sum(x) / count, *[gradients for gradients, _, _ in found])
    tally = functools.reduce(microbatch.merge, [tally for _, tally, _ in found])
    each = {name: np.array([metrics[name] for *_, metrics in found]) for name in found[0][2]}
    return gradients, tally, trl_steps.mean_of_micro_batches(each, c)


def trl_step(made, arrays, lengths, c, *, with_old=True, items=None):
    """(gradients, loss) of TRL's micro-batches of a minibatch, in float64; its metrics are left in the trainer."""
    tensors = {name: torch.tensor(x, dtype=torch.float64) for name, x in arrays.items()}
    tensors["completion_mask"] = mask = (torch.arange(T)[None] < torch.tensor(lengths)[:, None]).int()
    leaves = [tensors[name].requires_grad_() for name in ("logps", "entropies")]
    old = tensors["old_per_token_logps"] if with_old else tensors["logps"].detach()
    if not with_old:
        del tensors["old_per_token_logps"]
    if c.importance_sampling_correction:
        bounds = c.importance_sampling_clip_min, c.importance_sampling_clip_max
        tensors["importance_sampling_ratio"] = trl_grpo.sampler_ratio(
            old, tensors["sampling_per_token_logps"], mask, c.importance_sampling_mode, *bounds
        )
    count, total = made.current_gradient_accumulation_steps, 0.0
    for index in range(count):
        rows = slice(index * B // count, (index + 1) * B // count)
        made.accelerator.sync_gradients = index == count - 1
        micro = {name: x[rows] for name, x in tensors.items()}
        items_in_batch = mask.sum() if items is None else torch.tensor(items)
        # Without a bonus TRL takes entropies under no_grad.
        if not made._entropy_bonus_enabled:
            micro["entropies"] = micro["entropies"].detach()
        total = total + trl_grpo.loss(made, {**micro, "num_items_in_batch": items_in_batch})
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    gradients = [np.zeros((B, T)) if x is None else x.numpy() for x in gradients]
    return dict(zip(("logps", "entropies"), gradients, strict=True)), float(total.detach())


# ------------------------------------------------------------------------------------------------- the loss against TRL


@st.composite
def loss_options(draw, loss_type):
    levels = ["token"] if loss_type == "vespo" else ["token", "sequence"]  # vespo: as the validation asks for
    chosen = {
        "importance_sampling_level": ["token", "sequence"],
        "beta": [0.0, 0.3],
        "use_bias_correction_kl": [True, False],
        "epsilon": [0.1, 0.3],
        "epsilon_high": [None, 0.2, 1.2],
        "delta": [None, 1.1, 1.5],
        "off_policy_mask_threshold": [None, 0.05],
        "top_entropy_quantile": [1.0, 0.6],
        "entropy_coef": [0.0, 0.1],
        "importance_sampling_correction": [True, False],
        "importance_sampling_mode": [f"{level}_{bound}" for level in levels for bound in ("truncate", "mask")],
        "importance_sampling_clip_min": [None, 0.7],
        "num_mini_batches": [1, 2],
        "micro_batch_size": [None, B // 2, G],
    }
    options = {name: draw(st.sampled_from(values)) for name, values in chosen.items()}
    return config(
        **options,
        loss_type=loss_type,
        importance_sampling_clip_max=1.5,
        loss_aggregation="token_mean_micro",
    )


@every_loss
def test_the_loss_its_gradients_and_its_metrics_are_trls(loss_type):
    @few
    @given(seeds, loss_options(loss_type), st.booleans(), st.booleans(), st.integers(0, 30))
    def run(seed, c, with_old, of_tokens, more):
        arrays, lengths = arrays_of(seed, of_tokens=of_tokens)
        count, items = B // (c.micro_batch_size or B), int(lengths.sum()) + more
        made = trl_grpo.trainer(c, count)
        wanted, loss = trl_step(made, arrays, lengths, c, with_old=with_old, items=items)
        share = jnp.float32(items / c.num_mini_batches)
        gradients, _, metrics = in_trls_order(arrays, lengths, c, with_old=with_old, share=share)
        ours, _, found = our_step(arrays, lengths, c, with_old=with_old, share=share)  # what training computes
        near(found["loss"], loss, 1e-5)
        for name in gradients:
            near(ours[name], gradients[name], 1e-5)
        near(metrics["loss"], loss, 1e-5)
        for name, gradient in wanted.items():
            near(gradients[name], gradient, 1e-5)
        logged = {name: np.mean(values) for name, values in made._metrics["train"].items()}
        logged.pop("entropy_coef", None)  # of the update
        assert {"entropy"} | ({"kl"} if c.beta else set()) <= set(logged)
        for name, value in logged.items():
            near(metrics[name], value, 1e-5)

    run()


def test_the_metric_of_each_loss_is_logged():
    """TRL's names."""
    names = {"sapo": None, "vespo": "vespo/phi_seq_mean", "cispo": "cispo_clip_ratio"}
    arrays, lengths = arrays_of(0)
    for loss_type in grpo.LOSSES:
        _, _, metrics = our_step(arrays, lengths, config(loss_type=loss_type))
        name = names.get(loss_type, "clip_ratio/region_mean")
        assert name is None or metrics[name] > 0, loss_type


@pytest.mark.parametrize("size", [None, G])
def test_the_adaptive_entropy_coefficient_moves_as_trls_does(size):
    """Over six optimizer steps, whose entropies lie on both sides of the target."""
    options = {"entropy_coef": 0.02, "entropy_coef_delta": 0.04, "entropy_coef_max": 0.09, "entropy_target": 1.0}
    c = config(use_adaptive_entropy=True, micro_batch_size=size, loss_aggregation="token_mean_micro", **options)
    made, control = trl_grpo.trainer(c, B // (size or B)), jnp.asarray(grpo.initial_entropy_control(c))
    seen = []
    for step, scale in enumerate([0.1, 0.2, 0.3, 5.0, 7.0, 6.0, 0.1]):
        arrays, lengths = arrays_of(step)
        arrays["entropies"] = (scale * arrays["entropies"]).astype(np.float32)
        wanted, loss = trl_step(made, arrays, lengths, c)
        applied = pg.applied_entropy_coef(control, c)
        gradients, sums, metrics = our_step(arrays, lengths, c, entropy_coef=applied)
        near(metrics["loss"], loss, 1e-5)
        near(gradients["entropies"], wanted["entropies"], 1e-5)
        control = grpo.next_entropy_control(control, sums, c)
        near(control, [made.entropy_coef, made._last_world_entropy], 1e-5)
        seen.append((float(applied), float(control[0])))
    applied, coefficients = np.array(seen).T
    np.testing.assert_allclose(coefficients, [0.06, 0.09, 0.09, 0.05, 0.01, 0, 0.04], atol=1e-6)
    np.testing.assert_allclose(applied, [0, 0.06, 0.09, 0.09, 0, 0, 0], atol=1e-6)


# ---------------------------------------------------------------------------------------------- rewards to advantages


def rewards_of(each, weights, size, scorable=None, **more):
    """`pg.Rewards` of rewards [B, F], NaN where a function returned None."""
    each, weights = jnp.asarray(each, jnp.float32), jnp.asarray(weights, jnp.float32)
    scores, applies = adv.combine_rewards(each, weights)
    rows = scores.shape[0]
    none = jnp.zeros((rows, T))
    fields = {
        "scores": scores,
        "response_scores": scores,
        "raw": scores,
        "dense": none,
        "kl_coef": jnp.float32(0),
        "values": None,
        "present": jnp.ones(rows, bool),
        "each": each,
        "weights": tuple(weights.tolist()),
        "kl": none,
        "scorable": applies if scorable is None else scorable,
        "masked": jnp.zeros(rows, bool),
        "trained_mask": jnp.ones((rows, T), bool),
        "lengths": jnp.full(rows, T, jnp.int32),
        "group_size": size,
    }
    return pg.Rewards(**{**fields, **more})


@pytest.mark.parametrize(
    "options",
    [{"scale_rewards": scale} for scale in ("group", "batch", "none")]
    + [{"multi_objective_aggregation": "normalize_then_sum"}],
    ids=["group", "batch", "none", "normalize_then_sum"],
)
def test_advantages_are_trls_whatever_the_functions_leave_out(options):
    """None for some functions, for all of them, for all responses but one; rewards that are all equal."""
    c = config(**options)

    @few
    @given(
        seeds, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.sampled_from([0.0, 0.3, 0.8]), st.booleans()
    )
    def run(seed, functions, size, missing, equal):
        rng = np.random.default_rng(seed)
        each = rng.normal(size=(B, functions))
        each = np.where(rng.random(each.shape) < missing, np.nan, np.round(each) if equal else each).astype(np.float32)
        weights = rng.normal(size=functions).astype(np.float32)
        wanted, _ = trl_grpo.advantages(torch.tensor(each), c, torch.tensor(weights), size)
        # The float32 mean of three equal rewards may differ from them by a last bit.
        _, equal_rows = trl_grpo.advantages(torch.tensor(each).double(), c, torch.tensor(weights).double(), size)
        rewards = rewards_of(each, weights, size)
        made = grpo.advantages(rewards, c)
        # What is divided by 1e-4 where rewards are nearly equal keeps fewer digits.
        near(made.advantages, wanted, 1e-3 if equal else 2e-5)
        there = np.asarray(rewards.scorable)
        assert not np.asarray(made.advantages)[~there].any()
        metrics = trl_steps.with_zero_std(grpo.OBJECTIVE).rollout_metrics(rewards, made, c)
        near(metrics["frac_reward_zero_std"], equal_rows.double().mean(), 1e-6)

    run()


SCORES = np.array([1.0, 2.0, 6.0, np.nan, 4.0, np.nan, np.nan, 5.0], np.float32)


def advantages_of(scores, size=4, **options):
    return np.asarray(grpo.advantages(rewards_of(scores[:, None], [1.0], size), config(**options)).advantages)


def test_the_baseline_is_the_mean_of_the_group_or_of_the_others_or_nothing():
    plain = {"scale_rewards": "none"}
    np.testing.assert_allclose(advantages_of(SCORES, **plain), [-2, -1, 3, 0, -0.5, 0, 0, 0.5], atol=1e-6)
    others = advantages_of(SCORES, baseline="leave_one_out", **plain)
    np.testing.assert_allclose(others, [-3, -1.5, 4.5, 0, -1, 0, 0, 1], atol=1e-6)
    nothing = advantages_of(SCORES, baseline="none", **plain)
    np.testing.assert_allclose(nothing, np.nan_to_num(SCORES), atol=1e-6)


def test_the_scale_is_the_deviation_of_the_group_or_of_the_batch():
    first, second, whole = np.sqrt(7.0), np.sqrt(0.5), np.nanstd(SCORES, ddof=1)
    wanted = np.array([-2, -1, 3, 0, -0.5, 0, 0, 0.5])
    of_group = wanted / (np.repeat([first, second], 4) + 1e-4)
    np.testing.assert_allclose(advantages_of(SCORES), of_group, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(advantages_of(SCORES, scale_rewards="batch"), wanted / (whole + 1e-4), atol=1e-6)
    alone = advantages_of(SCORES, baseline="leave_one_out", scale_rewards="batch")
    np.testing.assert_allclose(alone, np.array([-3, -1.5, 4.5, 0, -1, 0, 0, 1]) / (whole + 1e-4), atol=1e-6)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("value", [100.3, 1000.1, 12345.678])
def test_equal_rewards_have_no_advantage(value, size):
    scores = np.full(2 * size, value, np.float32)
    scores[size:] += np.arange(size)
    for options in ({}, {"baseline": "leave_one_out"}, {"scale_rewards": "batch"}, {"scale_rewards": "none"}):
        found = advantages_of(scores, size, **options)
        assert not found[:size].any() and found[size:].any(), options
    summed = config(multi_objective_aggregation="normalize_then_sum")
    found = grpo.advantages(rewards_of(np.stack([scores, scores], axis=1), [1.0, 0.5], size), summed)
    assert not np.asarray(found.advantages)[:size].any() and np.asarray(found.advantages)[size:].any()
    equal = advantages_of(scores[:size], size, scale_rewards="batch", whiten_advantages=True)
    assert not equal.any()


def test_differences_from_the_baseline_are_clipped():
    found = advantages_of(SCORES, scale_rewards="none", reward_clip_range=(-1.5, 2.0))
    np.testing.assert_allclose(found, [-1.5, -1, 2, 0, -0.5, 0, 0, 0.5], atol=1e-6)
    found = advantages_of(SCORES, scale_rewards="none", reward_clip_range=(1.0,))
    np.testing.assert_allclose(found, [-1, -1, 1, 0, -0.5, 0, 0, 0.5], atol=1e-6)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_a_lone_response_has_no_advantage(baseline):
    """Of a group of one, and of a group in which one has a score."""
    assert not advantages_of(SCORES[:3], 1, baseline=baseline).any()
    assert not advantages_of(np.array([3.0, np.nan], np.float32), 2, baseline=baseline).any()


# ------------------------------------------------------------------------------------------------- making experience

LENGTHS = np.array([5, 2, 1, 4, 5, 5, 3, 1], np.int32)
ENDED = np.array([0, 1, 1, 1, 1, 0, 1, 1], bool)
INSIDE = np.arange(T)[None] < LENGTHS[:, None]
REWARDS = np.random.default_rng(1).normal(size=B).astype(np.float32)


def rollout_of(arrays):
    response = np.tile(np.arange(B)[:, None], (1, T))  # the first token is the row: `rows_of_params`
    return Rollout(
        prompt_tokens=jnp.ones((B, 1), jnp.int32),
        prompt_lengths=jnp.ones(B, jnp.int32),
        response=jnp.asarray(response, jnp.int32),
        lengths=jnp.asarray(LENGTHS),
        ended=jnp.asarray(ENDED),
        logprobs=jnp.asarray(arrays["sampling_per_token_logps"]),
        response_mask=jnp.ones((B, T), bool),
    )


def made_of(c, *, scores=REWARDS, scorable=ALL, dense=None, seed=0, policy=True):
    """(experience, metrics) of log-probabilities of `arrays_of`; policy False: without the policy's."""
    arrays, _ = arrays_of(seed)
    params = params_of(arrays)["policy"]
    ref = {**params, "logps": jnp.asarray(arrays["ref_per_token_logps"])} if c.beta else None
    batch = scored(rollout_of(arrays), jnp.asarray(scores), jnp.asarray(scorable), dense, eos_id=EOS, group_size=G)
    whole = with_params(MODELS, {"policy": params if policy else None}, ref)
    return grpo.make_experience(whole, batch, config=c)


def test_the_policys_log_probabilities_before_a_single_step_are_never_computed_nor_missed():
    arrays, lengths = arrays_of(0)
    made, _ = made_of(config(beta=0.3), policy=False)
    assert made.logprobs is None and made.ref_logprobs is not None and made.sampler_logprobs is not None
    for options in ({"num_iterations": 2}, {"num_mini_batches": 2}, {"kl_in_reward": True}):
        made, _ = made_of(config(beta=0.3, **options))
        np.testing.assert_array_equal(made.logprobs.reshape(B, T), np.where(INSIDE, arrays["logps"], 0))
        assert (made.ref_logprobs is None) == ("kl_in_reward" in options)
    sampled, _ = made_of(config(old_logprobs="sampler"))
    np.testing.assert_array_equal(sampled.logprobs, sampled.sampler_logprobs)
    sampler = np.where(INSIDE, arrays["sampling_per_token_logps"], 0)
    np.testing.assert_array_equal(sampled.sampler_logprobs.reshape(B, T), sampler)


@every_loss
def test_a_single_step_has_the_loss_that_it_has_with_log_probabilities_computed_before(loss_type):
    c = config(
        loss_type=loss_type,
        beta=0.3,
        entropy_coef=0.1,
        importance_sampling_correction=True,
        importance_sampling_mode="token_truncate",
    )
    arrays, lengths = arrays_of(3)
    arrays["old_per_token_logps"] = arrays["logps"]
    (plain, _, metrics), (computed, _, others) = (our_step(arrays, lengths, c, with_old=old) for old in (False, True))
    assert np.linalg.norm(plain["logps"]) > 1e-2
    assert distance(computed, plain) < 1e-6
    for name, value in metrics.items():
        near(others[name], value, 1e-6)


def test_truncated_responses_are_in_the_baseline_but_not_trained_on():
    c = config(mask_truncated_completions=True, beta=0.3, num_iterations=2)
    made, metrics = made_of(c)
    plain, _ = made_of(dataclasses.replace(c, mask_truncated_completions=False))
    np.testing.assert_array_equal(made.advantages, plain.advantages)
    np.testing.assert_array_equal(made.trained_mask.reshape(B, T), INSIDE & ENDED[:, None])
    arrays, _ = arrays_of(0)
    logr = (arrays["ref_per_token_logps"] - arrays["logps"])[INSIDE & ENDED[:, None]]
    near(metrics["objective/kl"], -logr.sum() / B, 1e-5)


def test_a_row_without_a_score_is_never_read_and_has_no_policy_gradient():
    there = np.array([1, 0, 1, 1, 0, 0, 1, 1], bool)
    for options in ({}, {"beta": 0.1, "kl_in_reward": True, "whiten_advantages": True}):
        c = config(**options)
        made, metrics = made_of(c, scores=np.where(there, REWARDS, np.nan), scorable=there)
        other, others = made_of(c, scores=np.where(there, REWARDS, 1e9), scorable=there)
        np.testing.assert_array_equal(made.advantages, other.advantages)
        assert not np.asarray(made.advantages).reshape(B, -1)[~there].any()
        assert np.isfinite(made.advantages).all() and metrics == others


def test_kl_in_the_reward_is_discounted_from_each_token_on_and_reported():
    c = config(kl_in_reward=True, beta=0.2, gamma=0.9, scale_rewards="none")
    made, metrics = made_of(c)
    arrays, _ = arrays_of(0)
    kl = np.where(INSIDE, arrays["logps"] - arrays["ref_per_token_logps"], 0)
    pairs = REWARDS.reshape(P, G)
    rewards = -0.2 * kl
    rewards[np.arange(B), LENGTHS - 1] += (pairs - pairs.mean(axis=1, keepdims=True)).reshape(B)
    wanted = np.zeros((B, T + 1))
    for t in reversed(range(T)):
        wanted[:, t] = rewards[:, t] + 0.9 * wanted[:, t + 1]
    near(np.asarray(made.advantages).reshape(B, T), np.where(INSIDE, wanted[:, :T], 0), 1e-5)
    near(metrics["kl"], kl[INSIDE].mean(), 1e-5)
    near(metrics["objective/non_score_reward"], -0.2 * kl.sum(axis=1).mean(), 1e-5)
    near(metrics["objective/rlhf_reward"], (REWARDS - 0.2 * kl.sum(axis=1)).mean(), 1e-5)


# ---------------------------------------------------------------------------------------------------------- REINFORCE++


def openrlhf(rewards, kl, mask, *, beta, gamma, baseline):
    """experience_maker.py of OpenRLHF (`reinforce`, `reinforce_baseline`), without its clamp of the KL at 10."""
    if baseline == "group_mean":
        groups = rewards.view(-1, G)
        rewards = (groups - groups.mean(-1, keepdim=True)).view(-1)
    rewards = rewards.clamp(min=-10, max=10)
    last = mask.size(1) - 1 - mask.long().fliplr().argmax(dim=1, keepdim=True)
    token_rewards = torch.zeros_like(kl).scatter_(1, last, rewards[:, None]) - beta * kl * mask
    returns, later = torch.zeros_like(kl), torch.zeros(len(rewards), dtype=kl.dtype)
    for t in reversed(range(mask.size(1))):
        later = token_rewards[:, t] + gamma * later
        returns[:, t] = later
    chosen = returns[mask]
    variance = ((chosen - chosen.mean()) ** 2).mean()
    return (returns - chosen.mean()) * variance.clamp(min=1e-8).rsqrt() * mask


def verl(rewards, kl, mask, *, beta, gamma, baseline):
    """core_algos.py of verl: REINFORCE++, and REINFORCE++-baseline, which has no return-to-go."""
    last = mask.size(1) - 1 - mask.long().fliplr().argmax(dim=1, keepdim=True)
    if baseline == "group_mean":
        groups = rewards.view(-1, G)
        returns = (groups - groups.mean(-1, keepdim=True)).view(-1)[:, None].expand(mask.shape) * mask
    else:
        token_rewards = torch.zeros_like(kl).scatter_(1, last, rewards[:, None]) - beta * kl
        returns, later = torch.zeros_like(kl), 0
        for t in reversed(range(mask.size(1))):
            later = token_rewards[:, t] + gamma * later
            returns[:, t] = later
            later = later * mask[:, t]
    chosen = returns[mask]
    return (returns - chosen.mean()) * torch.rsqrt(chosen.var(unbiased=True) + 1e-8) * mask


@pytest.mark.parametrize("baseline", ["none", "group_mean"])
@pytest.mark.parametrize("published, ddof", [(openrlhf, 0), (verl, 1)], ids=["openrlhf", "verl"])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_is_that_of(published, ddof, baseline, gamma):
    in_reward = published is openrlhf or baseline == "none"  # verl's form with a baseline has no rewards of tokens
    if not in_reward and gamma != 1:
        pytest.skip("no return-to-go to discount")
    c = config(
        beta=0.1 if in_reward else 0.0,
        kl_in_reward=in_reward,
        gamma=gamma,
        baseline=baseline,
        scale_rewards="none",
        whiten_advantages=True,
        whiten_ddof=ddof,
        reward_clip_range=(10.0,),
        loss_type="bnpo",
    )
    rewards = 8 * REWARDS
    made, _ = made_of(c, scores=rewards)
    arrays, _ = arrays_of(0)
    kl = torch.tensor(arrays["logps"] - arrays["ref_per_token_logps"], dtype=torch.float64)
    given_arrays = torch.tensor(rewards, dtype=torch.float64), kl, torch.tensor(INSIDE)
    wanted = published(*given_arrays, beta=0.1, gamma=gamma, baseline=baseline)
    assert published is verl or baseline == "group_mean" or np.abs(rewards).max() > 10
    if published is verl and np.abs(rewards).max() > 10:  # verl does not clip
        made, _ = made_of(dataclasses.replace(c, reward_clip_range=None), scores=rewards)
    near(np.asarray(made.advantages).reshape(B, T), wanted, 1e-5)


# ---------------------------------------------------------------------------------------------------------- the update

EVERYTHING = {
    "beta": 0.3,
    "entropy_coef": 0.1,
    "top_entropy_quantile": 0.6,
    "off_policy_mask_threshold": 0.05,
    "importance_sampling_correction": True,
    "importance_sampling_mode": "token_truncate",
    "importance_sampling_clip_max": 1.5,
}


def program(c):
    """state, experience, rates -> (state, metrics of each optimizer step) by plain gradient descent, jitted."""

    def run(state, experience, rates):
        orders = jnp.tile(jnp.array([[2, 0, 3, 1]]), (c.num_iterations, 1))
        optimizer = at_rates(optax.identity(), rates)
        state, _, steps = update_in_order(grpo, MODELS, state, experience, config=c, optimizer=optimizer, orders=orders)
        return state, steps

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def fresh_state(c, arrays):
    control = grpo.initial_entropy_control(c)
    zero, params = jnp.int32(0), params_of(arrays)
    return TrainState(
        params,
        optax.identity().init(params),
        zero,
        zero,
        jnp.uint32(0),
        jnp.float32(0),
        jnp.uint32(0),
        entropy_control=None if control is None else jnp.asarray(control),
    )


@every_loss
def test_micro_batches_change_neither_what_is_learned_nor_its_metrics(loss_type):
    c = config(loss_type=loss_type, num_iterations=2, num_mini_batches=2, **EVERYTHING)
    arrays, lengths = arrays_of(5)
    experience, rates = experience_of(arrays, lengths, c), jnp.array([0.5, 0.4, 0.3, 0.2])
    state, stats = program(c)(fresh_state(c, arrays), experience, rates)
    moved = distance(state.params, params_of(arrays))
    assert moved > 1e-3
    cut, others = program(dataclasses.replace(c, micro_batch_size=G))(fresh_state(c, arrays), experience, rates)
    assert distance(cut.params, state.params) < 1e-6
    for name, values in stats.items():
        near(others[name], values, 1e-5)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo"])
def test_micro_batches_of_a_minibatch_have_the_loss_that_trl_has_of_the_minibatch_at_once(loss_type):
    """Means, the entropy quantile and the entropy bonus are of the minibatch."""
    c = config(loss_type=loss_type, micro_batch_size=G, **EVERYTHING)
    arrays, lengths = arrays_of(11)
    wanted, loss = trl_step(trl_grpo.trainer(c), arrays, lengths, c)
    state, stats = program(c)(fresh_state(c, arrays), experience_of(arrays, lengths, c), jnp.ones(1))
    near(stats["loss"][0], loss, 1e-5)
    for name, gradient in wanted.items():
        near(arrays[name] - state.params["policy"][name], gradient, 1e-5)


@every_loss
def test_absent_rows_change_nothing(loss_type):
    """Rows of length -1, which pad a batch."""
    c = config(loss_type=loss_type, **{**EVERYTHING, "top_entropy_quantile": 1.0}, num_mini_batches=2)
    arrays, lengths = arrays_of(6)
    whole = experience_of(arrays, lengths, c)
    padded = jax.tree.map(lambda x: jnp.concatenate([x, x[-2:]]), whole)
    padded = without_absent(padded, jnp.arange(P + 2) < P)
    results = []
    for experience in (whole, padded):
        gradients, _, found = our_step(arrays, lengths, c, experience=experience)
        results.append((gradients, found))
    (gradients, metrics), (others, found) = results
    assert distance(others, gradients) < 1e-6
    for name, value in metrics.items():
        near(found[name], value, 1e-6)


@every_loss
def test_a_minibatch_without_a_token_to_train_on_changes_nothing_and_has_finite_metrics(loss_type):
    """With mask_truncated_completions all of it may be truncated."""
    c = config(loss_type=loss_type, **EVERYTHING)
    arrays, _ = arrays_of(7)
    gradients, _, metrics = our_step(arrays, np.zeros(B, np.int32), c)
    assert not flat(gradients).any()
    assert {name: x for name, x in metrics.items() if not np.isfinite(x).all()} == {}


def test_adaptive_entropy_begins_without_a_bonus_and_moves_by_its_delta():
    c = config(
        use_adaptive_entropy=True,
        entropy_coef=0.1,
        entropy_coef_delta=0.03,
        entropy_target=50.0,
        num_iterations=2,
        num_mini_batches=2,
    )
    arrays, lengths = arrays_of(8, empty=False)
    run, experience, start = program(c), experience_of(arrays, lengths, c), fresh_state(c, arrays)
    np.testing.assert_array_equal(start.entropy_control, np.array([0.1, np.inf], np.float32))
    state, stats = run(start, experience, jnp.ones(4))
    np.testing.assert_allclose(stats["entropy_coef"], [0.13, 0.16, 0.19, 0.22], rtol=1e-5)
    applied = np.array([0.0, 0.13, 0.16, 0.19])
    near(stats["loss"] - stats["policy_loss"], -applied * stats["entropy"], 1e-5)
    near(state.entropy_control, [0.22, stats["entropy"][-1]], 1e-6)
    # The rows of the first step have met a bonus once, in the third; nothing but the bonus moves an entropy.
    gone = np.asarray(state.params["policy"]["entropies"]) - arrays["entropies"]
    rows = np.concatenate([np.arange(G) + G * group for group in (2, 0)])
    inside = (np.arange(T)[None] < lengths[:, None]) / lengths[rows].sum()
    near(gone[rows], 0.16 * inside[rows], 1e-5)
    high, _ = program(dataclasses.replace(c, entropy_target=0.0))(start, experience, jnp.ones(4))
    near(high.entropy_control[0], 0.0, 1e-6)
    np.testing.assert_array_equal(high.params["policy"]["entropies"], arrays["entropies"])


def test_an_update_that_is_skipped_leaves_the_entropy_coefficient():
    c = config(use_adaptive_entropy=True, entropy_coef=0.1, on_nonfinite="skip")
    arrays, lengths = arrays_of(9)
    state = fresh_state(c, arrays)
    experience = experience_of(arrays, lengths, c)
    experience = experience.replace(advantages=experience.advantages.at[0, 0].set(jnp.nan))
    after, _ = program(c)(state, experience, jnp.ones(1))
    np.testing.assert_array_equal(after.entropy_control, state.entropy_control)
    np.testing.assert_array_equal(after.params["policy"]["logps"], arrays["logps"])


def test_an_update_is_compiled_once():
    c = config(use_adaptive_entropy=True, **{**EVERYTHING, "entropy_coef": 0.0}, num_iterations=2)
    run, state = program(c), None
    for seed in range(3):
        arrays, lengths = arrays_of(seed)
        state = fresh_state(c, arrays) if state is None else state
        state, _ = run(state, experience_of(arrays, lengths, c), jnp.ones(2))
    assert run._cache_size() == 1 and int(state.step) == 3


def test_eval_metrics_are_those_of_a_step_at_rate_0():
    c = config(micro_batch_size=G, **EVERYTHING)
    arrays, lengths = arrays_of(4)
    experience = experience_of(arrays, lengths, c)
    seen = grpo.eval_metrics(with_params(MODELS, params_of(arrays)), experience, config=c)
    _, stats = program(c)(fresh_state(c, arrays), experience, jnp.zeros(1))
    of_updates = {"grad_norm", "entropy_coef", "nonfinite/causes", "nonfinite/steps_applied"}
    for name in set(stats) - of_updates - {"val/ratio_error"}:
        near(seen[name], stats[name][0], 1e-5)
