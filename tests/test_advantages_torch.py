"""advantages.py against torch, in TRL's own words, on random arrays."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax import advantages

torch = pytest.importorskip("torch")
few = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 2**31)
shapes = st.sampled_from([(1, 1), (1, 4), (3, 1), (3, 5)])  # few, for every new one is compiled


def random_case(seed, b, t):
    """rewards, values [b, t] float64, scores [b], lengths [b] 0..t."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(b, t)), rng.normal(size=(b, t)), rng.normal(size=b), rng.integers(0, t + 1, size=b)


def check(actual, wanted, tolerance):
    actual, wanted = np.asarray(actual), wanted.numpy() if hasattr(wanted, "numpy") else wanted
    assert actual.shape == wanted.shape
    np.testing.assert_allclose(actual, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=["float32", "float64"])
def precision(request):
    """(dtype, tolerance), under x64 for float64."""
    with jax.enable_x64(True) if request.param == "float64" else contextlib.nullcontext():
        yield np.dtype(request.param), {"float32": 2e-5, "float64": 1e-12}[request.param]


def torch_whiten(values, mask, unbiased, shift_mean):
    mean = (values * mask).sum() / mask.sum()
    var = ((values - mean) ** 2 * mask).sum() / mask.sum()
    if unbiased:
        var = var * mask.sum() / (mask.sum() - 1)
    white = (values - mean) * torch.rsqrt(var + 1e-8)
    return white if shift_mean else white + mean


def test_gae_equals_the_double_loop(precision):
    dtype, tolerance = precision

    @few
    @given(seeds, shapes, st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.95, 0.0]))
    def run(seed, shape, gamma, lam):
        b, t = shape
        rewards, values, _, _ = random_case(seed, b, t)
        wanted = np.zeros((b, t))
        for row in range(b):
            for start in range(t):
                for k in range(start, t):
                    following = values[row, k + 1] if k + 1 < t else 0.0
                    delta = rewards[row, k] + gamma * following - values[row, k]
                    wanted[row, start] += (gamma * lam) ** (k - start) * delta
        got, returns = advantages.gae(rewards.astype(dtype), values.astype(dtype), gamma=gamma, lam=lam)
        assert got.dtype == dtype
        check(got, wanted, tolerance)
        check(returns, wanted + values, tolerance)

    run()


def test_length_adaptive_gae_equals_the_sum_of_discounted_differences(precision):
    """VAPO: A_t = sum_l lambda^l delta_{t+l} with lambda = 1 - 1 / (alpha l) of each response."""
    dtype, tolerance = precision

    @few
    @given(seeds, shapes, st.sampled_from([0.05, 0.3, 2.0]))
    def run(seed, shape, alpha):
        b, t = shape
        rewards, values, _, _ = random_case(seed, b, t)
        lengths = np.random.default_rng(seed).integers(1, 60, size=b)
        lam = (1 - 1 / (alpha * torch.tensor(lengths, dtype=torch.float64))).clamp(0, 1)
        following = torch.nn.functional.pad(torch.tensor(values), (0, 1))
        deltas = torch.tensor(rewards) + following[:, 1:] - following[:, :-1]
        powers = lam[:, None, None] ** (torch.arange(t)[None, :] - torch.arange(t)[:, None]).clamp(min=0)
        wanted = (powers.triu() * deltas[:, None, :]).sum(-1)
        lams = advantages.length_adaptive_lam(lengths, alpha)
        check(lams, lam, 2e-6)  # of integer lengths: float32 in both precisions
        got, returns = advantages.gae(rewards.astype(dtype), values.astype(dtype), gamma=1.0, lam=np.asarray(lam))
        assert got.dtype == dtype
        check(got, wanted, tolerance)
        check(returns, wanted + torch.tensor(values), tolerance)
        check(advantages.gae(rewards.astype(dtype), values.astype(dtype), gamma=1.0, lam=lams)[0], wanted, 5e-5)

    run()


def test_whitening_equals_trl(precision):
    dtype, tolerance = precision

    @few
    @given(seeds, shapes, st.sampled_from([0, 1]), st.booleans())
    def run(seed, shape, ddof, shift_mean):
        b, t = shape
        values, _, _, lengths = random_case(seed, b, t)
        lengths[0] = t
        mask = np.asarray(advantages.response_mask(lengths, t))
        if mask.sum() < 2:
            return
        wanted = torch_whiten(torch.tensor(values), torch.tensor(mask), ddof == 1, shift_mean).numpy()
        got = advantages.masked_whiten(values.astype(dtype), mask, ddof=ddof, shift_mean=shift_mean)
        check(got, np.where(mask, wanted, 0), 10 * tolerance)

    run()


def test_masked_mean_and_var_equal_torch(precision):
    dtype, tolerance = precision

    @few
    @given(seeds, shapes, st.sampled_from([0, 1]))
    def run(seed, shape, ddof):
        b, t = shape
        values, noise, _, _ = random_case(seed, b, t)
        mask = noise > 0
        chosen = torch.tensor(values[mask])
        mean = chosen.mean() if len(chosen) else torch.tensor(0.0)
        var = chosen.var(correction=ddof) if len(chosen) > 1 else torch.tensor(0.0)
        check(advantages.masked_mean(values.astype(dtype), mask), mean, tolerance)
        check(advantages.masked_var(values.astype(dtype), mask, ddof), var, 10 * tolerance)

    run()


def test_kl_estimators_equal_torch_and_k2_and_k3_are_never_negative(precision):
    dtype, tolerance = precision

    @few
    @given(seeds, shapes)
    def run(seed, shape):
        b, t = shape
        logprobs, ref, _, _ = random_case(seed, b, t)
        logr = torch.tensor(ref) - torch.tensor(logprobs)
        wanted = {"k1": -logr, "k2": logr**2 / 2, "k3": (logr.exp() - 1) - logr}
        for estimator, numbers in wanted.items():
            got = advantages.kl_penalty(logprobs.astype(dtype), ref.astype(dtype), estimator)
            check(got, numbers, 5 * tolerance)
            assert estimator == "k1" or (np.asarray(got) >= 0).all()

    run()


def test_k3_of_nearly_equal_models_is_not_negative():
    gaps = np.random.default_rng(0).normal(size=(4, 5000)) * np.array([1e-6, 1e-4, 1e-2, 1.0])[:, None]
    logprobs = -1.0 - gaps.astype(np.float32)
    assert (np.asarray(advantages.kl_penalty(logprobs, -np.ones_like(logprobs), "k3")) >= 0).all()


@few
@given(seeds, shapes)
def test_score_placement_equals_trl(seed, shape):
    b, t = shape
    rewards, _, scores, lengths = random_case(seed, b, t)
    wanted, after = torch.tensor(rewards), torch.tensor(lengths)
    end = torch.where(after < t, after, after - 1)
    wanted[torch.arange(b), end] += torch.tensor(scores)
    got = advantages.place_scores(rewards.astype(np.float32), scores.astype(np.float32), lengths)
    check(got, wanted, 1e-6)


@few
@given(seeds, shapes)
def test_lengths_and_masks_equal_trl_truncation(seed, shape):
    """One stop token of id 0, then pads: TRL's chain of truncate_response, first_true_indices and padding masks."""
    b, t = shape
    tokens = np.random.default_rng(seed).integers(0, 4, size=(b, t))
    responses, pad = torch.tensor(tokens), 9
    stop = (t * (responses != 0) + torch.arange(t)).min(-1).values.unsqueeze(-1)
    processed = responses.masked_fill(torch.arange(t) > stop, pad)
    sequence_length = (t * (processed != pad) + torch.arange(t)).min(-1).values - 1
    index = torch.arange(t).repeat(b, 1)
    lengths = advantages.response_lengths(tokens, 0)
    check(lengths, (sequence_length + 1).numpy(), 0)
    check(advantages.response_mask(lengths, t), ~(index > sequence_length[:, None]), 0)
    check(advantages.value_mask(lengths, t), ~(index > sequence_length[:, None] + 1), 0)


@few
@given(seeds, shapes)
def test_padding_the_response_changes_nothing_inside_it(seed, shape):
    """Whole chain, scores to whitened advantages, in T and in T + 3 columns; rows that fill T are left out of it,
    because only there does the score move on."""
    b, t = shape
    rewards, values, scores, lengths = random_case(seed, b, t)
    lengths = np.minimum(lengths, t - 1)

    def chain(extra):
        wide = ((0, 0), (0, extra))
        mask, seen = advantages.response_mask(lengths, t + extra), advantages.value_mask(lengths, t + extra)
        r = jnp.where(mask, np.pad(rewards, wide).astype(np.float32), 0)
        v = jnp.where(seen, np.pad(values, wide).astype(np.float32), 0)
        a, returns = advantages.gae(advantages.place_scores(r, scores, lengths), v, gamma=1.0, lam=0.95)
        return advantages.masked_whiten(a, mask), returns

    for short, wide in zip(chain(0), chain(3), strict=True):
        np.testing.assert_allclose(short, wide[:, :t], rtol=2e-5, atol=2e-5)


@few
@given(seeds, st.integers(2, 6))
def test_leave_one_out_equals_the_mean_of_the_others(seed, group):
    rewards = np.random.default_rng(seed).normal(size=(3, group))
    wanted = np.stack([rewards[:, i] - np.delete(rewards, i, axis=1).mean(1) for i in range(group)], axis=1)
    check(advantages.leave_one_out(rewards.astype(np.float32)), wanted, 1e-5)


# ------------------------------------------------------------------------------------------------------------- groups


def random_groups(seed, group, prompts=3):
    """rewards [prompts, group] float64, and which of them there are; any number of a group, none too."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(prompts, group)), rng.random((prompts, group)) < rng.choice([0.3, 0.7, 1.0])


def trl_nanstd(x):
    """trainer/utils.py `nanstd` over all elements."""
    count = (~x.isnan()).sum()
    correction = torch.where(count > 1, count / (count - 1), torch.nan)
    return (((x - x.nanmean()) ** 2).nanmean() * correction).sqrt()


def test_trls_own_example_of_leave_one_out():
    """docs/source/rloo_trainer.md: 3 prompts, 4 responses each; there a column is a group, here a row."""
    rewards = np.array([[1, 2, 3], [2, 3, 4], [5, 6, 7], [8, 9, 10]], np.float32).T
    wanted = [(i - (16 - i) / 3) for i in (1, 2, 5, 8)]
    check(advantages.leave_one_out(rewards), np.tile(wanted, (3, 1)), 1e-6)
    check(advantages.leave_one_out(rewards, np.ones_like(rewards, bool)), np.tile(wanted, (3, 1)), 1e-6)


@few
@given(seeds, st.integers(2, 5))
def test_leave_one_out_of_what_is_kept_equals_trl(seed, group):
    """rloo_trainer.py:1584-1606, unscorable rewards NaN as there."""
    rewards, keep = random_groups(seed, group)
    there = torch.tensor(np.where(keep, rewards, np.nan))
    counts = (~there.isnan()).sum(dim=1, keepdim=True)
    baselines = (torch.nansum(there, dim=1, keepdim=True) - there) / (counts - 1)
    wanted = torch.nan_to_num(there - baselines, nan=0.0).numpy()
    wanted = np.where(keep.sum(1, keepdims=True) > 1, wanted, 0)  # the only one of its group: 0 / 0, or its rounding
    got = advantages.leave_one_out(np.where(keep, rewards, np.nan).astype(np.float32), keep)
    check(got, wanted, 1e-5)
    np.testing.assert_allclose(got.sum(1), 0, atol=1e-5)


@few
@given(seeds, st.integers(2, 5), st.sampled_from([np.nan, np.inf, -7.0]))
def test_what_is_not_kept_is_never_read(seed, group, value):
    rewards, keep = random_groups(seed, group)
    zero = advantages.leave_one_out(np.where(keep, rewards, 0).astype(np.float32), keep)
    other = advantages.leave_one_out(np.where(keep, rewards, value).astype(np.float32), keep)
    np.testing.assert_array_equal(zero, other)
    assert not np.asarray(other)[~keep].any()
    gradient = jax.grad(lambda x: jnp.sum(jnp.square(advantages.leave_one_out(x, keep))))
    assert np.isfinite(gradient(np.where(keep, rewards, value).astype(np.float32))).all()


@few
@given(seeds, st.integers(2, 5))
def test_a_baseline_does_not_know_its_own_reward(seed, group):
    rewards, _ = random_groups(seed, group)
    jacobian = jax.jacobian(lambda x: x - advantages.leave_one_out(x))(rewards[0].astype(np.float32))
    others = (1 - np.eye(group)) / (group - 1)
    check(jacobian, others, 1e-6)


@few
@given(seeds, st.integers(2, 5))
def test_normalising_equals_trl(seed, group):
    """rloo_trainer.py:1602-1603."""
    values, keep = random_groups(seed, group)
    there = torch.tensor(np.where(keep, values, np.nan))
    wanted = torch.nan_to_num((there - there.nanmean()) / (trl_nanstd(there) + 1e-4), nan=0.0)
    got, divisor = advantages.normalize(np.where(keep, values, np.nan).astype(np.float32), keep, 1e-4)
    check(got, wanted, 1e-4)
    if keep.sum() > 1:
        check(divisor, trl_nanstd(there) + 1e-4, 1e-5)


@few
@given(seeds, st.integers(1, 4))
def test_combining_rewards_equals_trl(seed, functions):
    """rloo_trainer.py:1549-1561: nansum of what is applicable, unscorable where nothing is."""
    rewards, keep = random_groups(seed, functions, prompts=6)
    rewards, weights = np.where(keep, rewards, np.nan), np.random.default_rng(seed).normal(size=functions)
    given_rewards = torch.tensor(rewards)
    wanted = (given_rewards * torch.tensor(weights)[None]).nansum(dim=1)
    got, scorable = advantages.combine_rewards(rewards.astype(np.float32), weights.astype(np.float32))
    check(got, wanted, 1e-5)
    check(scorable, ~given_rewards.isnan().all(dim=1), 0)


def test_combined_rewards_have_gradients_where_some_are_not_applicable():
    rewards = np.array([[1.0, np.nan], [2.0, 5.0], [np.nan, np.nan]], np.float32)
    of_weights = jax.grad(lambda weights: advantages.combine_rewards(rewards, weights)[0].sum())(jnp.ones(2))
    check(of_weights, np.array([3.0, 5.0], np.float32), 0)


@few
@given(seeds, shapes)
def test_what_was_exclusive_cumsum_and_what_is_still_to_come_are_the_whole(seed, shape):
    b, t = shape
    costs, _, _, lengths = random_case(seed, b, t)
    costs = np.where(np.arange(t)[None] < lengths[:, None], costs, 0)
    before = np.asarray(advantages.exclusive_cumsum(costs.astype(np.float32)))
    to_go = np.stack([costs[:, i:].sum(1) for i in range(t)], axis=1)
    assert not before[:, 0].any()
    check(before + to_go, np.tile(costs.sum(1, keepdims=True), (1, t)), 1e-5)
    grouped = advantages.exclusive_cumsum(costs.reshape(b, 1, t).astype(np.float32))
    np.testing.assert_array_equal(grouped[:, 0], before)


# ------------------------------------------------------------------------------------------------------- groups of GRPO


def nanstd():
    return pytest.importorskip("trl.trainer.utils").nanstd


@few
@given(seeds, st.sampled_from([1, 3]))
def test_the_mean_and_the_deviation_of_a_group_equal_trls(seed, group):
    """grpo_trainer.py:2749-2767: NaN where a group has nothing, and the deviation of a single one."""
    rewards, keep = random_groups(seed, group)
    there = torch.tensor(np.where(keep, rewards, np.nan))
    given_rewards = np.where(keep, rewards, np.nan).astype(np.float32)
    check(advantages.group_mean(given_rewards, keep)[:, 0], torch.nan_to_num(there.nanmean(dim=1)), 1e-5)
    check(advantages.group_std(given_rewards, keep)[:, 0], torch.nan_to_num(nanstd()(there, dim=1)), 1e-5)


@few
@given(seeds, st.sampled_from([1, 3]), st.sampled_from([1, 2]))
def test_normalizing_each_reward_equals_trl(seed, group, functions):
    """grpo_trainer.py:2783-2788."""
    rng = np.random.default_rng(seed)
    rewards, keep = random_groups(seed, functions, prompts=3 * group)
    weights = rng.normal(size=functions)
    grouped = torch.tensor(np.where(keep, rewards, np.nan)).view(-1, group, functions)
    mean = grouped.nanmean(dim=1, keepdim=True)
    std = nanstd()(grouped, dim=1, keepdim=True) if group > 1 else torch.zeros_like(mean)
    wanted = ((grouped - mean) / (std + 1e-4) * torch.tensor(weights)).nansum(dim=2)
    found = advantages.normalize_each_reward(
        grouped.numpy().astype(np.float32), ~grouped.isnan().numpy(), weights.astype(np.float32)
    )
    check(found, wanted, 1e-4)


@few
@given(seeds, shapes, st.sampled_from([1.0, 0.9, 0.0]))
def test_what_is_to_come_equals_the_double_loop(seed, shape, gamma):
    rewards, *_ = random_case(seed, *shape)
    wanted = np.stack([(rewards[:, i:] * gamma ** np.arange(shape[1] - i)).sum(1) for i in range(shape[1])], axis=1)
    check(advantages.return_to_go(rewards.astype(np.float32), gamma), wanted, 2e-5)
