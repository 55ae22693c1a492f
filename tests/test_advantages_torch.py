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
