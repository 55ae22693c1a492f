"""advantages.py, value and gradient, against torch and TRL's own functions, in float32 and float64, on any arrays."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlhf_jax import advantages as adv
from tests.helpers.properties import near, same, with_gradients

torch = pytest.importorskip("torch")
few = settings(max_examples=25, deadline=None)
B, T = 3, 5
PAD = 9
numbers = st.floats(-4, 4, width=32, allow_subnormal=False)  # exact in both precisions


def arrays(*shape):
    return hnp.arrays(np.float64, shape, elements=numbers)


def masks(*shape):
    return hnp.arrays(bool, shape)


seeds = st.integers(0, 2**31)
lengths = hnp.arrays(np.int32, B, elements=st.integers(0, T))


@pytest.fixture(params=["float32", "float64"])
def precision(request):
    """(dtype, tolerance), under x64 for float64; torch is at float64, where TRL divides counts too."""
    torch.set_default_dtype(torch.float64)
    with jax.enable_x64(True) if request.param == "float64" else contextlib.nullcontext():
        yield np.dtype(request.param), {"float32": 1e-5, "float64": 1e-12}[request.param]
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def trl():
    """The module of TRL's PPO."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        return pytest.importorskip("trl.experimental.ppo.ppo_trainer")


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
@given(lengths)
def test_masks_of_any_length_are_trls_of_a_response_padded_there(trl, lengths):
    """Length 0 too, which no stop token gives: a response that starts with padding."""
    index = torch.arange(T).repeat(B, 1)
    last = trl.first_true_indices(index >= torch.tensor(lengths)[:, None]) - 1
    np.testing.assert_array_equal(adv.response_mask(lengths, T), ~(index > last[:, None]))
    np.testing.assert_array_equal(adv.value_mask(lengths, T), ~(index > last[:, None] + 1))
    assert adv.response_mask(lengths, T).sum(1).tolist() == lengths.tolist()


# ---------------------------------------------------------------------------------------------------- masked statistics


@pytest.mark.parametrize("axis", [None, 1])
def test_masked_means_and_their_gradients_are_trls(trl, precision, axis):
    ours = with_gradients(lambda x, mask: adv.masked_mean(x, mask, axis))

    @few
    @given(arrays(B, T), masks(B, T))
    def run(x, mask):
        assume(mask.sum(axis).min() > 0)
        same(ours, lambda x, mask: trl.masked_mean(x, mask, axis), [x], mask, precision=precision)

    run()


@pytest.mark.parametrize("ddof", [0, 1])
def test_masked_variances_and_their_gradients_are_trls(trl, precision, ddof):
    ours = with_gradients(lambda x, mask: adv.masked_var(x, mask, ddof))

    @few
    @given(arrays(B, T), masks(B, T))
    def run(x, mask):
        assume(mask.sum() > 1)
        same(ours, lambda x, mask: trl.masked_var(x, mask, ddof == 1), [x], mask, precision=precision)

    run()


def spread(x, mask, ddof):
    """sqrt(var + 1e-8) of what is chosen: whitening divides rounding errors by it."""
    return np.sqrt(x[mask].var(ddof=ddof) + 1e-8)


@pytest.mark.parametrize("shift_mean", [True, False], ids=["centred", "mean kept"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_whitening_and_its_gradient_are_trls(trl, precision, ddof, shift_mean):
    def theirs(x, mask):
        if ddof == 1:
            white = trl.masked_whiten(x, mask, shift_mean)
        else:
            mean = trl.masked_mean(x, mask)
            white = (x - mean) * torch.rsqrt(trl.masked_var(x, mask, False) + 1e-8) + (0 if shift_mean else mean)
        return torch.where(mask, white, 0)

    ours = with_gradients(lambda x, mask: adv.masked_whiten(x, mask, shift_mean=shift_mean, ddof=ddof))

    @few
    @given(arrays(B, T), masks(B, T), seeds)
    def run(x, mask, seed):
        assume(mask.sum() > 1)
        deviation = spread(x, mask, ddof)
        assume(deviation > 1e-2)
        scale = np.linalg.norm(x) / deviation
        size = scale * max(1, 1 / deviation)
        same(ours, theirs, [x], mask, precision=precision, seed=seed, scale=size, gradient_scale=size)

    run()


@pytest.mark.parametrize("ddof", [0, 1])
def test_what_is_whitened_has_mean_0_and_variance_1_whatever_its_place_and_scale(precision, ddof):
    dtype, tolerance = precision
    whiten = jax.jit(lambda x, mask: adv.masked_whiten(x, mask, ddof=ddof))
    keeping = jax.jit(lambda x, mask: adv.masked_whiten(x, mask, ddof=ddof, shift_mean=False))

    @few
    @given(arrays(B, T), masks(B, T), st.floats(0.5, 4), st.floats(-3, 3))
    def run(x, mask, factor, shift):
        assume(mask.sum() > 1 and spread(x, mask, ddof) > 0.1)
        white = np.asarray(whiten(x.astype(dtype), mask), np.float64)
        assert not white[~mask].any()
        bound = tolerance * np.linalg.norm(x) / spread(x, mask, ddof)
        assert abs(white[mask].mean()) <= bound
        # 1e-8 is added to the variance: that much and more is missing.
        assert abs(white[mask].var(ddof=ddof) - 1) <= bound + 1e-8 / 0.1**2
        kept = np.asarray(keeping(x.astype(dtype), mask), np.float64)
        near(kept[mask] - white[mask], np.full(mask.sum(), x[mask].mean()), tolerance, np.linalg.norm(kept))
        moved = whiten((factor * x + shift).astype(dtype), mask)
        near(moved, white, 10 * tolerance + 1e-8 / 0.1**2, 10 * np.linalg.norm(x))

    run()


# ------------------------------------------------------------------------------------------------------- KL and rewards


def test_the_adaptive_coefficient_is_that_of_ziegler_et_al(precision):
    dtype, tolerance = precision
    step = jax.jit(lambda coef, kl, target, n: adv.adaptive_kl(coef, kl, target=target, horizon=10000, n_steps=n))

    @few
    @given(st.floats(0.01, 1), st.floats(0, 40), st.floats(0.5, 10), st.integers(1, 512))
    def run(coef, kl, target, n):
        error = torch.clamp(torch.tensor(kl, dtype=torch.float64) / target - 1, -0.2, 0.2)
        new = step(dtype.type(coef), dtype.type(kl), target, n)
        assert new.dtype == dtype
        near(new, coef * (1 + error.numpy() * n / 10000), tolerance, 0)
        near(step(dtype.type(coef), dtype.type(target), target, n), coef, tolerance, 0)

    run()


@pytest.mark.parametrize("position", ["after_eos", "eos"])
def test_scores_and_their_gradients_land_in_one_column(precision, position):
    """after_eos: ppo_trainer.py:775-779, with TRL's `sequence_lengths`, one less than a length."""
    ours = with_gradients(lambda rewards, scores, lengths: adv.place_scores(rewards, scores, lengths, position))

    def theirs(rewards, scores, lengths):
        last = lengths.long() - 1
        after = torch.where(last + 1 < T, last + 1, last)
        placed = rewards.clone()
        placed[torch.arange(B), after if position == "after_eos" else last.clamp(min=0)] += scores
        return placed

    @few
    @given(arrays(B, T), arrays(B), lengths, seeds)
    def run(rewards, scores, lengths, seed):
        same(ours, theirs, [rewards, scores], lengths, precision=precision, seed=seed)

    run()


# ----------------------------------------------------------------------------------------------------------- advantages


def test_gae_and_its_gradients_are_trls(precision):
    """ppo_trainer.py:787-796, on responses that end anywhere."""
    ours = with_gradients(lambda rewards, values: adv.gae(rewards, values, gamma=0.9, lam=0.8)[0])
    returns = jax.jit(lambda rewards, values: adv.gae(rewards, values, gamma=0.9, lam=0.8)[1])

    def theirs(rewards, values):
        last, reversed_ = 0, []
        for t in reversed(range(T)):
            following = values[:, t + 1] if t < T - 1 else 0.0
            last = rewards[:, t] + 0.9 * following - values[:, t] + 0.9 * 0.8 * last
            reversed_.append(last)
        return torch.stack(reversed_[::-1], axis=1)

    @few
    @given(arrays(B, T), arrays(B, T), lengths, seeds)
    def run(rewards, values, lengths, seed):
        inside = np.arange(T)[None] < lengths[:, None]
        given = [np.where(inside, rewards, 0), np.where(inside, values, 0)]
        same(ours, theirs, given, precision=precision, seed=seed)
        wanted = theirs(*map(torch.tensor, given)).numpy() + given[1]
        near(returns(*(x.astype(precision[0]) for x in given)), wanted, precision[1])

    run()


@pytest.mark.parametrize("position", ["after_eos", "eos"])
def test_columns_after_the_longest_response_change_no_advantage(precision, position):
    """From KL to whitened advantages in T columns and in T + 3. After eos a response that fills T has no column left
    for its score, so that there it must be shorter."""
    dtype, tolerance = precision

    @jax.jit
    def chain(kl, values, scores, lengths):
        inside, valued = adv.response_mask(lengths, kl.shape[1]), adv.value_mask(lengths, kl.shape[1])
        seen = valued if position == "after_eos" else inside
        placed = adv.place_scores(jnp.where(inside, -0.1 * kl, 0), scores, lengths, position)
        placed = jnp.where(seen, placed, 0)
        rewards = adv.masked_whiten(placed, seen, shift_mean=False)
        advantages, returns = adv.gae(rewards, jnp.where(seen, values, 0), gamma=0.97, lam=0.9)
        return adv.masked_whiten(advantages, inside), jnp.where(seen, returns, 0)

    @few
    @given(seeds, lengths)
    def run(seed, lengths):
        rng = np.random.default_rng(seed)
        lengths = np.minimum(lengths, T - 1) if position == "after_eos" else lengths
        assume(lengths.sum() > 2)
        kl, values = rng.normal(size=(2, B, T)).astype(dtype)
        scores = rng.normal(size=B).astype(dtype)
        short = chain(kl, values, scores, lengths)
        noise = rng.normal(size=(2, B, 3)).astype(dtype)
        wide = chain(*(np.concatenate([x, n], axis=1) for x, n in zip((kl, values), noise)), scores, lengths)
        for one, other in zip(short, wide, strict=True):
            near(other[:, :T], one, 10 * tolerance, 1 / np.std(short[0]) if np.std(short[0]) else 1)
            assert not np.asarray(other[:, T:]).any()

    run()


def random_groups(seed, keep):
    """rewards [P, G], NaN where not kept."""
    return np.where(keep, np.random.default_rng(seed).normal(size=keep.shape), np.nan)


def test_leave_one_out_is_trls_and_every_group_sums_to_0(precision):
    """rloo_trainer.py:1584-1606, any rewards missing."""
    dtype, tolerance = precision
    leave_one_out = jax.jit(adv.leave_one_out)

    @few
    @given(seeds, masks(4, 3))
    def run(seed, keep):
        rewards = random_groups(seed, keep)
        there = torch.tensor(rewards)
        counts = (~there.isnan()).sum(dim=1, keepdim=True)
        baselines = (torch.nansum(there, dim=1, keepdim=True) - there) / (counts - 1)
        wanted = torch.where((counts > 1) & torch.tensor(keep), there - baselines, 0)
        found = leave_one_out(rewards.astype(dtype), keep)
        assert found.dtype == dtype
        near(found, wanted, tolerance)
        near(found.sum(1), np.zeros(4), tolerance)
        complete = np.nan_to_num(rewards)
        near(adv.leave_one_out(complete.astype(dtype)), (complete - complete.mean(1, keepdims=True)) * 1.5, tolerance)

    run()


def test_a_baseline_knows_neither_its_own_reward_nor_one_that_is_missing(precision):
    dtype, tolerance = precision
    jacobian = jax.jit(jax.jacobian(lambda x, keep: x - adv.leave_one_out(x, keep)))

    @few
    @given(seeds, masks(4))
    def run(seed, keep):
        found = np.asarray(jacobian(np.random.default_rng(seed).normal(size=4).astype(dtype), keep))
        others = keep[None] & keep[:, None] & ~np.eye(4, dtype=bool)
        learned = keep & (keep.sum() > 1)
        near(found[learned], (others / max(keep.sum() - 1, 1))[learned], tolerance)
        # Without an advantage there is nothing to learn: x - 0.
        near(found[~learned], np.eye(4)[~learned], tolerance)

    run()


def test_normalised_and_combined_rewards_are_trls(trl, precision):
    """rloo_trainer.py:1549-1561 and 1602-1603, with TRL's own `nanstd`."""
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    dtype, tolerance = precision
    normalize, combine = jax.jit(lambda x, keep: adv.normalize(x, keep, 1e-4)), jax.jit(adv.combine_rewards)

    @few
    @given(seeds, masks(4, 3), arrays(3))
    def run(seed, keep, weights):
        rewards = random_groups(seed, keep)
        there = torch.tensor(rewards)
        total, scorable = combine(rewards.astype(dtype), weights.astype(dtype))
        near(total, (there * torch.tensor(weights)[None]).nansum(dim=1), tolerance)
        np.testing.assert_array_equal(scorable, ~there.isnan().all(dim=1))
        assume(keep.sum() > 1 and nanstd(there) > 1e-2)
        wanted = torch.nan_to_num((there - there.nanmean()) / (nanstd(there) + 1e-4), nan=0.0)
        found, divisor = normalize(rewards.astype(dtype), keep)
        near(found, wanted, tolerance, 1 / float(nanstd(there)))
        near(divisor, nanstd(there) + 1e-4, tolerance)

    run()


def test_what_was_exclusive_cumsum_is_the_whole_less_what_is_to_come(precision):
    ours = with_gradients(adv.exclusive_cumsum)

    def theirs(costs):
        return costs.sum(-1, keepdim=True) - costs.flip(-1).cumsum(-1).flip(-1)

    @few
    @given(arrays(B, 2, T), seeds)
    def run(costs, seed):
        scale = np.linalg.norm(costs)
        size = max(scale, 1)
        same(ours, theirs, [costs], precision=precision, seed=seed, scale=size, gradient_scale=size)
        assert not np.asarray(adv.exclusive_cumsum(costs.astype(precision[0])))[..., 0].any()

    run()


# ------------------------------------------------------------------------------------------------------- groups of GRPO


def test_the_mean_and_the_deviation_of_a_group_and_their_gradients_are_trls(precision):
    """With TRL's own `nanstd`, any rewards missing, as far as torch's gradients are numbers."""
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    mean, std = with_gradients(adv.group_mean), with_gradients(adv.group_std)

    def std_of_kept(rewards, keep):
        return torch.stack([nanstd(row[kept], dim=0, keepdim=True) for row, kept in zip(rewards, keep)])

    def mean_of_kept(rewards, keep):
        return torch.stack([row[kept].mean(0, keepdim=True) for row, kept in zip(rewards, keep)])

    @few
    @given(seeds, masks(4, 3))
    def run(seed, keep):
        rewards = np.random.default_rng(seed).normal(size=keep.shape)
        keep = keep | np.array([True, False, True])  # a deviation of one is NaN in torch
        same(mean, mean_of_kept, [rewards], keep, precision=precision, seed=seed)
        smallest = min(np.std(row[kept]) for row, kept in zip(rewards, keep))
        assume(smallest > 1e-2)
        same(std, std_of_kept, [rewards], keep, precision=precision, seed=seed, gradient_scale=1 / smallest)

    run()


def test_rewards_that_a_group_does_not_keep_are_never_read(precision):
    dtype, tolerance = precision
    functions = [jax.jit(f) for f in (adv.group_mean, adv.group_std)]

    @few
    @given(seeds, masks(4, 3), st.sampled_from([np.nan, np.inf, -7.0]))
    def run(seed, keep, poison):
        rewards = np.random.default_rng(seed).normal(size=keep.shape)
        for function in functions:
            clean = function(np.where(keep, rewards, 0).astype(dtype), keep)
            dirty = function(np.where(keep, rewards, poison).astype(dtype), keep)
            assert clean.dtype == dtype and np.isfinite(clean).all()
            np.testing.assert_array_equal(clean, dirty)

    run()


def test_normalized_rewards_forget_place_and_scale_of_each_function(precision):
    dtype, tolerance = precision
    normalize = jax.jit(lambda *given: adv.normalize_each_reward(*given, eps=0.0))

    @few
    @given(seeds, st.floats(0.5, 4), st.floats(-4, 4))
    def run(seed, scale, place):
        rng = np.random.default_rng(seed)
        rewards, applies = rng.normal(size=(2, 4, 2)), np.ones((2, 4, 2), bool)
        assume(rewards.std(axis=1).min() > 0.1)
        weights = rng.normal(size=2).astype(dtype)
        plain = normalize(rewards.astype(dtype), applies, weights)
        moved = np.stack([scale * rewards[..., 0] + place, rewards[..., 1]], axis=2)
        assert plain.dtype == dtype
        near(normalize(moved.astype(dtype), applies, weights), plain, 50 * tolerance)
        near(plain.sum(axis=1), np.zeros(2), 10 * tolerance)

    run()


def test_returns_to_go_and_their_gradients_are_the_recursion(precision):
    @few
    @given(arrays(B, T), st.sampled_from([1.0, 0.9, 0.0]), seeds)
    def run(rewards, gamma, seed):
        def theirs(rewards):
            columns = [rewards[:, -1]]
            for column in range(T - 2, -1, -1):
                columns.append(rewards[:, column] + gamma * columns[-1])
            return torch.stack(columns[::-1], dim=1)

        same(returns[gamma], theirs, [rewards], precision=precision, seed=seed, scale=4.0 * T)

    returns = {gamma: with_gradients(lambda x, g=gamma: adv.return_to_go(x, g)) for gamma in (1.0, 0.9, 0.0)}
    run()
