"""advantages.py, value and gradient, against torch and TRL's own functions, in float32 and float64, on any arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlhf_jax import advantages as adv
from tests.helpers import properties
from tests.helpers.properties import arrays, few, masks, near, same, seeds

torch = pytest.importorskip("torch")
precision = properties.precision
B, T = 3, 5
PAD = 9
lengths_of_rows = hnp.arrays(np.int32, B, elements=st.integers(0, T))


@pytest.fixture(scope="module")
def trl():
    """The module of TRL's PPO."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        return pytest.importorskip("trl.experimental.ppo.ppo_trainer")


@pytest.fixture(scope="module")
def nanstd():
    """TRL's own."""
    return pytest.importorskip("trl.trainer.utils").nanstd


# ------------------------------------------------------------------------------------------------- cuts and their masks


@few
@given(hnp.arrays(bool, st.sampled_from([(B, T), (4, 1), (1, 1)])))
def test_first_true_of_any_rows_is_trls(trl, rows):
    found = adv.first_true(rows)
    np.testing.assert_array_equal(found, trl.first_true_indices(torch.tensor(rows)))


@few
@given(hnp.arrays(np.int32, st.sampled_from([(B, T), (4, 1)]), elements=st.integers(0, 3)), st.integers(0, 4))
def test_a_response_is_cut_where_trl_cuts_it(trl, tokens, stop):
    """ppo_trainer.py:168-188 and 763-769; stop 4 is in no row."""
    width = tokens.shape[1]
    cut = trl.truncate_response(stop, PAD, torch.tensor(tokens))
    last = trl.first_true_indices(cut == PAD) - 1
    index = torch.arange(width).repeat(len(tokens), 1)
    found = adv.response_lengths(tokens, stop)
    inside, valued = adv.response_mask(found, width), adv.value_mask(found, width)
    np.testing.assert_array_equal(np.where(inside, tokens, PAD), cut)
    np.testing.assert_array_equal(inside, ~(index > last[:, None]))
    np.testing.assert_array_equal(valued, ~(index > last[:, None] + 1))


@few
@given(lengths_of_rows)
def test_masks_of_any_length_are_trls_of_a_response_padded_there(trl, lengths):
    """Length 0 too, which no stop token gives: a response that starts with padding."""
    index = torch.arange(T).repeat(B, 1)
    last = trl.first_true_indices(index >= torch.tensor(lengths)[:, None]) - 1
    np.testing.assert_array_equal(adv.response_mask(lengths, T), ~(index > last[:, None]))
    np.testing.assert_array_equal(adv.value_mask(lengths, T), ~(index > last[:, None] + 1))


# ---------------------------------------------------------------------------------------------------- masked statistics


@pytest.mark.parametrize("axis", [None, 1])
@few
@given(arrays(B, T), masks(B, T))
def test_masked_means_and_their_gradients_are_trls(trl, precision, axis, x, mask):
    assume(mask.sum(axis).min() > 0)
    same(adv.masked_mean, lambda x, mask: trl.masked_mean(x, mask, axis), [x], mask, precision=precision, axis=axis)


@pytest.mark.parametrize("ddof", [0, 1])
@few
@given(arrays(B, T), masks(B, T))
def test_masked_variances_and_their_gradients_are_trls(trl, precision, ddof, x, mask):
    assume(mask.sum() > 1)
    same(adv.masked_var, lambda x, mask: trl.masked_var(x, mask, ddof == 1), [x], mask, precision=precision, ddof=ddof)


@pytest.mark.parametrize("shift_mean", [True, False], ids=["centred", "mean kept"])
@pytest.mark.parametrize("ddof", [0, 1])
@few
@given(arrays(B, T), masks(B, T), seeds)
def test_whitening_and_its_gradient_are_trls(trl, precision, ddof, shift_mean, x, mask, seed):
    def theirs(x, mask):
        if ddof == 1:
            white = trl.masked_whiten(x, mask, shift_mean)
        else:
            mean = trl.masked_mean(x, mask)
            white = (x - mean) * torch.rsqrt(trl.masked_var(x, mask, False) + 1e-8) + (0 if shift_mean else mean)
        return torch.where(mask, white, 0)

    assume(mask.sum() > 1)
    deviation = np.sqrt(x[mask].var(ddof=ddof) + 1e-8)  # whitening divides rounding errors by it
    assume(deviation > 1e-2)
    size = np.linalg.norm(x) / deviation * max(1, 1 / deviation)
    options = {"precision": precision, "seed": seed, "scale": size, "gradient_scale": size}
    same(adv.masked_whiten, theirs, [x], mask, **options, ddof=ddof, shift_mean=shift_mean)


# ------------------------------------------------------------------------------------------------------- KL and rewards


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@few
@given(arrays(B, T), arrays(B, T))
def test_estimates_of_the_kl_and_their_gradients_are_torchs(precision, estimator, logprobs, ref):
    """ppo_trainer.py:773-774; k2 is Schulman's."""

    def theirs(logprobs, ref):
        logr = ref - logprobs
        return {"k1": -logr, "k2": logr**2 / 2, "k3": (logr.exp() - 1) - logr}[estimator]

    same(adv.kl_penalty, theirs, [logprobs, ref], precision=precision, estimator=estimator)


@few
@given(arrays(2, 7))
def test_k1_and_k3_are_the_kl_on_average_and_k3_is_never_negative(precision, logits):
    """The expectation is a sum over the whole vocabulary: nothing is sampled."""
    dtype, tolerance = precision
    policy, ref = (x.numpy() for x in torch.tensor(logits).log_softmax(-1))
    weights, kl = np.exp(policy), (np.exp(policy) * (policy - ref)).sum()
    k1, k2, k3 = (
        np.asarray(adv.kl_penalty(policy.astype(dtype), ref.astype(dtype), name), np.float64)
        for name in ("k1", "k2", "k3")
    )
    for estimate in (k1, k3):
        assert abs((weights * estimate).sum() - kl) <= tolerance * max(kl, (weights * np.abs(estimate)).sum(), 1)
    assert (k2 >= 0).all() and (k3 >= 0).all()
    assert kl < 1e-3 or (k1 < 0).any()  # so much for k1


@few
@given(st.floats(0.01, 1), st.floats(0, 40), st.floats(0.5, 10), st.integers(1, 512))
def test_the_adaptive_coefficient_is_that_of_ziegler_et_al(precision, coef, kl, target, n):
    dtype, tolerance = precision
    error = np.clip(kl / target - 1, -0.2, 0.2)
    new = adv.adaptive_kl(dtype.type(coef), dtype.type(kl), target=target, horizon=10000, n_steps=n)
    assert new.dtype == dtype
    near(new, coef * (1 + error * n / 10000), tolerance, 0)


@pytest.mark.parametrize("position", ["after_eos", "eos"])
@few
@given(arrays(B, T), arrays(B), lengths_of_rows, seeds)
def test_scores_and_their_gradients_land_in_the_column_of_trl(precision, position, rewards, scores, lengths, seed):
    """after_eos: ppo_trainer.py:775-779, with TRL's `sequence_lengths`, one less than a length."""

    def theirs(rewards, scores, lengths):
        last = lengths.long() - 1
        after = torch.where(last + 1 < T, last + 1, last)
        placed = rewards.clone()
        placed[torch.arange(B), after if position == "after_eos" else last.clamp(min=0)] += scores
        return placed

    same(adv.place_scores, theirs, [rewards, scores], lengths, precision=precision, seed=seed, position=position)


@few
@given(seeds, masks(4, 3), arrays(3))
def test_combined_rewards_are_trls(precision, seed, applies, weights):
    """rloo_trainer.py:1549-1561."""
    rewards = np.where(applies, np.random.default_rng(seed).normal(size=applies.shape), np.nan)
    total, scorable = adv.combine_rewards(rewards.astype(precision[0]), weights.astype(precision[0]))
    theirs = torch.tensor(rewards)
    near(total, (theirs * torch.tensor(weights)[None]).nansum(dim=1), precision[1])
    np.testing.assert_array_equal(scorable, ~theirs.isnan().all(dim=1))


# ----------------------------------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@few
@given(arrays(B, T), arrays(B, T), lengths_of_rows, arrays(B, elements=st.sampled_from([0.0, 0.5, 0.95, 1.0])), seeds)
def test_gae_and_its_gradients_are_trls(precision, gamma, rewards, values, lengths, lam, seed):
    """ppo_trainer.py:787-796, on responses that end anywhere, with a lambda for each row as in VAPO."""

    def theirs(rewards, values, lam):
        last, reversed_ = 0, []
        for t in reversed(range(T)):
            following = values[:, t + 1] if t < T - 1 else 0.0
            last = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * last
            reversed_.append(last)
        return torch.stack(reversed_[::-1], axis=1)

    inside = np.arange(T)[None] < lengths[:, None]
    given_arrays = [np.where(inside, rewards, 0), np.where(inside, values, 0)]
    options = {"precision": precision, "seed": seed, "gamma": gamma}
    (returns,) = same(gae, theirs, given_arrays, lam, **options)
    near(returns, theirs(*map(torch.tensor, (*given_arrays, lam))).numpy() + given_arrays[1], precision[1])


@few
@given(arrays(B, T), arrays(B, T), hnp.arrays(bool, (B, T)), st.sampled_from([0.9, 1.0]), st.sampled_from([0.0, 0.9]))
def test_columns_outside_the_mask_are_no_steps_of_gae_and_returns(precision, rewards, values, mask, gamma, lam):
    """They are those of the other columns side by side."""
    order = np.argsort(~mask, axis=1, kind="stable")
    inside = np.arange(T)[None] < mask.sum(1)[:, None]

    def together(x):
        return np.where(inside, np.take_along_axis(np.asarray(x), order, axis=1), 0)

    found = *adv.gae(rewards, values, gamma=gamma, lam=lam, mask=mask), adv.return_to_go(rewards * mask, gamma, mask)
    alone = together(rewards), together(values)
    wanted = *adv.gae(*alone, gamma=gamma, lam=lam), adv.return_to_go(alone[0], gamma)
    for one, other in zip(found, wanted):
        near(together(one), np.where(inside, other, 0), precision[1])
    assert not np.asarray(found[0])[~mask].any() and not np.asarray(found[1])[~mask].any()


def gae(rewards, values, lam, gamma):
    return adv.gae(rewards, values, gamma=gamma, lam=lam)


@few
@given(hnp.arrays(np.int32, B, elements=st.integers(1, 60)), st.sampled_from([0.05, 0.3, 2.0]))
def test_a_length_adaptive_lambda_is_that_of_vapo(precision, lengths, alpha):
    wanted = (1 - 1 / (alpha * torch.tensor(lengths, dtype=torch.float64))).clamp(0, 1)
    near(adv.length_adaptive_lam(lengths, alpha), wanted, 1e-6)  # of integers: float32 in both precisions


@few
@given(arrays(B, T), st.sampled_from([1.0, 0.9, 0.0]), seeds)
def test_returns_to_go_and_their_gradients_are_the_recursion(precision, rewards, gamma, seed):
    def theirs(rewards):
        columns = [rewards[:, -1]]
        for column in range(T - 2, -1, -1):
            columns.append(rewards[:, column] + gamma * columns[-1])
        return torch.stack(columns[::-1], dim=1)

    same(adv.return_to_go, theirs, [rewards], precision=precision, seed=seed, scale=4.0 * T, gamma=gamma)


@pytest.mark.parametrize("position", ["after_eos", "eos"])
@few
@given(seeds, lengths_of_rows)
def test_columns_after_the_longest_response_change_no_advantage(precision, position, seed, lengths):
    """From KL to whitened advantages in T columns and in T + 3. After eos a response that fills T has no column left
    for its score, so that there it must be shorter."""
    dtype, tolerance = precision
    rng = np.random.default_rng(seed)
    lengths = np.minimum(lengths, T - 1) if position == "after_eos" else lengths
    assume(lengths.sum() > 2)
    kl, values = rng.normal(size=(2, B, T)).astype(dtype)
    scores = rng.normal(size=B).astype(dtype)
    short = chain(kl, values, scores, lengths, position)
    noise = rng.normal(size=(2, B, 3)).astype(dtype)
    wide = chain(*(np.concatenate([x, n], axis=1) for x, n in zip((kl, values), noise)), scores, lengths, position)
    for one, other in zip(short, wide, strict=True):
        near(other[:, :T], one, 10 * tolerance, 1 / np.std(short[0]) if np.std(short[0]) else 1)
        assert not np.asarray(other[:, T:]).any()


@functools.partial(jax.jit, static_argnames="position")
def chain(kl, values, scores, lengths, position):
    inside, valued = adv.response_mask(lengths, kl.shape[1]), adv.value_mask(lengths, kl.shape[1])
    seen = valued if position == "after_eos" else inside
    placed = adv.place_scores(jnp.where(inside, -0.1 * kl, 0), scores, lengths, position)
    rewards = adv.masked_whiten(jnp.where(seen, placed, 0), seen, shift_mean=False)
    advantages, returns = adv.gae(rewards, jnp.where(seen, values, 0), gamma=0.97, lam=0.9)
    return adv.masked_whiten(advantages, inside), jnp.where(seen, returns, 0)


@few
@given(arrays(B, 2, T), seeds)
def test_what_was_exclusive_cumsum_is_the_whole_less_what_is_to_come(precision, costs, seed):
    def theirs(costs):
        return costs.sum(-1, keepdim=True) - costs.flip(-1).cumsum(-1).flip(-1)

    size = max(np.linalg.norm(costs), 1)
    same(adv.exclusive_cumsum, theirs, [costs], precision=precision, seed=seed, scale=size, gradient_scale=size)
    assert not np.asarray(adv.exclusive_cumsum(costs.astype(precision[0])))[..., 0].any()


# --------------------------------------------------------------------------------------------------------------- groups


@few
@given(arrays(4, 3), masks(4, 3), seeds)
def test_leave_one_out_and_its_gradients_are_trls_and_every_group_sums_to_0(precision, rewards, keep, seed):
    """rloo_trainer.py:1584-1606, any rewards missing."""

    def theirs(rewards, keep):
        rewards = torch.where(keep, rewards, torch.nan)
        counts = (~rewards.isnan()).sum(dim=1, keepdim=True)
        baselines = (torch.nansum(rewards, dim=1, keepdim=True) - rewards) / (counts - 1)
        return torch.where((counts > 1) & keep, rewards - baselines, 0)

    def torchs(rewards, keep):
        """Its gradient is NaN where a reward is: of the other groups and rewards."""
        counts = keep.sum(dim=1, keepdim=True)
        others = (torch.where(keep, rewards, 0).sum(dim=1, keepdim=True) - rewards) / (counts - 1).clamp(min=1)
        return torch.where((counts > 1) & keep, rewards - others, 0)

    near(torchs(*map(torch.tensor, (rewards, keep))), theirs(*map(torch.tensor, (rewards, keep))), 1e-12)
    same(adv.leave_one_out, torchs, [rewards], keep, precision=precision, seed=seed)
    dtype, tolerance = precision
    near(adv.leave_one_out(rewards.astype(dtype), keep).sum(1), np.zeros(4), tolerance, max(np.linalg.norm(rewards), 1))
    near(adv.leave_one_out(rewards.astype(dtype)), adv.leave_one_out(rewards.astype(dtype), np.ones((4, 3), bool)), 0)


@few
@given(seeds, masks(4, 3))
def test_normalised_advantages_are_trls(nanstd, precision, seed, keep):
    """rloo_trainer.py:1602-1603."""
    values = np.where(keep, np.random.default_rng(seed).normal(size=keep.shape), np.nan)
    theirs = torch.tensor(values)
    assume(keep.sum() > 1 and nanstd(theirs) > 1e-2)
    found, divisor = adv.normalize(values.astype(precision[0]), keep, 1e-4)
    wanted = torch.nan_to_num((theirs - theirs.nanmean()) / (nanstd(theirs) + 1e-4), nan=0.0)
    near(found, wanted, precision[1], 1 / float(nanstd(theirs)))
    near(divisor, nanstd(theirs) + 1e-4, precision[1])


@few
@given(seeds, masks(4, 3))
def test_the_mean_and_the_deviation_of_a_group_and_their_gradients_are_trls(nanstd, precision, seed, keep):
    """grpo_trainer.py:2749-2767, any rewards missing, as far as torch's gradients are numbers."""

    def std_of_kept(rewards, keep):
        return torch.stack([nanstd(row[kept], dim=0, keepdim=True) for row, kept in zip(rewards, keep)])

    def mean_of_kept(rewards, keep):
        return torch.stack([row[kept].mean(0, keepdim=True) for row, kept in zip(rewards, keep)])

    rewards = np.random.default_rng(seed).normal(size=keep.shape)
    keep = keep | np.array([True, False, True])  # a deviation of one is NaN in torch
    same(adv.group_mean, mean_of_kept, [rewards], keep, precision=precision, seed=seed)
    smallest = min(np.std(row[kept]) for row, kept in zip(rewards, keep))
    assume(smallest > 1e-2)
    same(adv.group_std, std_of_kept, [rewards], keep, precision=precision, seed=seed, gradient_scale=1 / smallest)


@pytest.mark.parametrize("size, functions", [(1, 1), (3, 1), (3, 2)])
@few
@given(seeds, st.sampled_from([0.3, 0.7, 1.0]))
def test_normalizing_each_reward_is_trls(nanstd, precision, size, functions, seed, share):
    """grpo_trainer.py:2783-2788."""
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(3, size, functions))
    grouped = torch.tensor(np.where(rng.random(rewards.shape) < share, rewards, np.nan))
    weights = rng.normal(size=functions)
    mean = grouped.nanmean(dim=1, keepdim=True)
    std = nanstd(grouped, dim=1, keepdim=True) if size > 1 else torch.zeros_like(mean)
    assume(not (std < 1e-2).any() or size == 1)
    wanted = ((grouped - mean) / (std + 1e-4) * torch.tensor(weights)).nansum(dim=2)
    dtype, tolerance = precision
    found = adv.normalize_each_reward(grouped.numpy().astype(dtype), ~grouped.isnan().numpy(), weights.astype(dtype))
    assert found.dtype == dtype
    near(found, wanted, 100 * tolerance)  # as far as rewards are close to each other


# ----------------------------------------------------------------------------------------------------------- any array

MASKED = {
    "masked_mean": adv.masked_mean,
    "masked_var": adv.masked_var,
    "masked_whiten": adv.masked_whiten,
    "leave_one_out": adv.leave_one_out,
    "group_mean": adv.group_mean,
    "group_std": adv.group_std,
    "normalize": lambda x, keep: adv.normalize(x, keep, 1e-4)[0],
    "normalize_each_reward": lambda x, keep: adv.normalize_each_reward(x[..., None], keep[..., None], np.ones(1)),
}
DEVIATIONS = ("group_std", "normalize", "normalize_each_reward")  # one of 0 has no gradient


@pytest.mark.parametrize("name", MASKED)
@few
@given(seeds, masks(4, 3), st.sampled_from([np.nan, np.inf, -7.0]))
def test_what_is_not_kept_is_never_read_and_has_no_gradient(precision, name, seed, keep, poison):
    x = np.random.default_rng(seed).normal(size=keep.shape)
    clean, dirty = (squares(np.where(keep, x, value).astype(precision[0]), keep, name) for value in (0, poison))
    for one, other in zip(clean, dirty, strict=True):
        assert one.dtype == precision[0]
        np.testing.assert_array_equal(one, other)
    assert np.isfinite(dirty[0]) and not np.asarray(dirty[1])[~keep].any()
    assert np.isfinite(dirty[1]).all() or name in DEVIATIONS


@functools.partial(jax.jit, static_argnames="name")
def squares(x, keep, name):
    """The sum of squares of what the function gives, and its gradient."""
    return jax.value_and_grad(lambda x: jnp.square(MASKED[name](x, keep)).sum())(x)


UNMASKED = {
    "kl_penalty k1": lambda x, keep: adv.kl_penalty(x, x[::-1]),
    "kl_penalty k2": lambda x, keep: adv.kl_penalty(x, x[::-1], "k2"),
    "kl_penalty k3": lambda x, keep: adv.kl_penalty(x, x[::-1], "k3"),
    "adaptive_kl": lambda x, keep: adv.adaptive_kl(x[0, 0], x[0, 1], target=0.3, horizon=1000, n_steps=7),
    "place_scores": lambda x, keep: adv.place_scores(x, x[:, 0], jnp.array([0, 1, 2, 3])),
    "gae": lambda x, keep: adv.gae(x, x[::-1], gamma=0.9, lam=0.95),
    "gae of a lambda a row": lambda x, keep: adv.gae(x, x[::-1], gamma=0.9, lam=jnp.linspace(0, 1, 4)),
    "combine_rewards": lambda x, keep: adv.combine_rewards(x, x[0]),
    "return_to_go": lambda x, keep: adv.return_to_go(x, 0.9),
    "exclusive_cumsum": lambda x, keep: adv.exclusive_cumsum(x),
}


@pytest.mark.parametrize("name", [*MASKED, *UNMASKED])
def test_half_precision_is_widened_before_anything_is_summed(name):
    rng = np.random.default_rng(0)
    properties.widens({**MASKED, **UNMASKED}[name], [rng.normal(size=(4, 500)), rng.random((4, 500)) < 0.7])
