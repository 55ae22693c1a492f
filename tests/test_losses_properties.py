"""losses.py and the KL estimators, value and gradient, against torch in float32 and float64: extreme logits, any mask,
the edge of a clip, expectations."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlhf_jax import advantages as adv
from rlhf_jax import losses
from tests.helpers.properties import near, same, with_gradients

torch = pytest.importorskip("torch")
few = settings(max_examples=25, deadline=None)
B, T, V = 3, 5, 6
numbers = st.floats(-4, 4, width=32, allow_subnormal=False)  # exact in both precisions
extremes = st.sampled_from([0.0, 1.0, -2.5, 30.0, 88.75, 1e4, 9999.0, -1e4, -np.inf])
seeds = st.integers(0, 2**31)
masks = hnp.arrays(bool, (B, T))


def arrays(*shape, elements=numbers):
    return hnp.arrays(np.float64, shape, elements=elements)


extreme_logits = arrays(B, V, elements=extremes).filter(lambda x: np.isfinite(x).any(1).all())


@pytest.fixture(params=["float32", "float64"])
def precision(request):
    """(dtype, tolerance), under x64 for float64."""
    with jax.enable_x64(True) if request.param == "float64" else contextlib.nullcontext():
        yield np.dtype(request.param), {"float32": 1e-5, "float64": 1e-12}[request.param]


# ------------------------------------------------------------------------------------------------------- extreme logits


def chosen_logprobs(logits, tokens):
    return logits.log_softmax(-1).gather(-1, tokens[:, None].long())[:, 0]


def test_logprobs_of_extreme_logits_and_their_gradients_are_torchs(precision):
    """Up to 1e4 either way, ties, tokens ruled out, chosen or not."""
    ours = with_gradients(losses.logprobs_from_logits)

    @few
    @given(extreme_logits, hnp.arrays(np.int32, B, elements=st.integers(0, V - 1)), seeds)
    def run(logits, tokens, seed):
        same(ours, chosen_logprobs, [logits], tokens, precision=precision, seed=seed)

    run()


def test_logprobs_of_large_ties_have_all_digits_of_float32():
    logits = np.array([[1e4, 1e4, -np.inf], [-1e4, -1e4, -1e4]], np.float32)
    found = losses.logprobs_from_logits(logits, np.array([1, 2]))
    near(found, chosen_logprobs(torch.tensor(logits, dtype=torch.float64), torch.tensor([1, 2])), 1e-5)


def test_entropies_of_extreme_logits_and_their_gradients_are_torchs(precision):
    ours = with_gradients(losses.entropy_from_logits)

    def theirs(logits):
        """Of the tokens that are not ruled out: torch's own gradient is NaN at -inf."""
        rows = [row[row.isfinite()].log_softmax(-1) for row in logits]
        return -torch.stack([(row.exp() * row).sum() for row in rows])

    @few
    @given(extreme_logits, seeds)
    def run(logits, seed):
        same(ours, theirs, [logits], precision=precision, seed=seed)

    run()


def test_logprobs_and_entropies_are_those_of_trl(precision):
    """trainer/utils.py:480-561, on logits of every size that it can take (an -inf is NaN in its entropy)."""
    utils = pytest.importorskip("trl.trainer.utils")
    logprobs, entropy = with_gradients(losses.logprobs_from_logits), with_gradients(losses.entropy_from_logits)

    @few
    @given(arrays(B, V), st.sampled_from([1.0, 20.0]), seeds)
    def run(logits, scale, seed):
        logits, tokens = logits * scale, np.random.default_rng(seed).integers(0, V, B)
        scale = max(1, np.abs(logits).max())
        same(logprobs, utils.selective_log_softmax, [logits], tokens, precision=precision, seed=seed, scale=scale)
        same(entropy, utils.entropy_from_logits, [logits], precision=precision, seed=seed, scale=scale)

    run()


def test_cross_entropy_of_extreme_logits_and_its_gradient_are_torchs(precision):
    ours = with_gradients(lambda logits, labels, mask: losses.cross_entropy(logits, labels, mask))

    def theirs(logits, labels, mask):
        labels = torch.where(mask, labels, -100).long()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    @few
    @given(extreme_logits, hnp.arrays(bool, B), seeds)
    def run(logits, mask, seed):
        # A label is a token that may come.
        labels = np.argmax(np.isfinite(logits) * np.random.default_rng(seed).random((B, V)), axis=1)
        same(ours, theirs, [logits], labels, mask, precision=precision, seed=seed)

    run()


def test_pairwise_losses_of_extreme_scores_and_their_gradients_are_torchs(precision):
    ours = with_gradients(losses.pairwise_reward_loss)

    def theirs(chosen, rejected):
        return -torch.nn.functional.logsigmoid(chosen - rejected)

    @few
    @given(arrays(2, B, elements=st.sampled_from([0.0, 1.0, -3.0, 40.0, 1e4, -1e4])), seeds)
    def run(scores, seed):
        same(ours, theirs, list(scores), precision=precision, seed=seed)
        _, (chosen, rejected) = ours(np.ones(B), tuple(scores.astype(precision[0])))
        # Whatever lifts one score lowers the other by as much.
        near(chosen + rejected, np.zeros(B), precision[1])

    run()


# ------------------------------------------------------------------------------------------------------------- any mask


def torch_policy_terms(new, old, advantages, low, high):
    ratio = torch.exp(new - old)
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


def torch_value_terms(values, old, returns):
    near_old = torch.clamp(values, old - 0.2, old + 0.2)
    return 0.5 * torch.max(torch.square(values - returns), torch.square(near_old - returns))


LOSSES = {
    "policy": (
        lambda *x: losses.clipped_policy_loss(*x, cliprange=0.2, cliprange_high=0.3),
        lambda *x: torch_policy_terms(*x, 0.2, 0.3),
    ),
    "value": (lambda *x: losses.clipped_value_loss(*x, cliprange_value=0.2), torch_value_terms),
}


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_a_clipped_loss_is_torchs_mean_over_what_the_mask_holds_and_reads_nothing_else(precision, name, poison):
    """torch sees the chosen tokens only; every mask, the empty one too."""
    function, theirs = LOSSES[name]
    ours = with_gradients(function)

    @few
    @given(seeds, masks)
    def run(seed, mask):
        new, old, third = np.random.default_rng(seed).normal(size=(3, B, T))
        new = old + 0.3 * new
        arrays = [np.where(mask, x, poison) for x in (new, old, third)]
        count = max(mask.sum(), 1)
        same(ours, lambda *x: theirs(*(y[x[-1]] for y in x[:-1])).sum() / count, arrays, mask, precision=precision)

    run()


@pytest.mark.parametrize("name", LOSSES)
def test_a_clipped_loss_depends_neither_on_the_order_of_rows_nor_on_padding_nor_on_the_cuts(precision, name):
    dtype, tolerance = precision
    whole = jax.jit(LOSSES[name][0])
    cut = jax.jit(
        lambda new, old, third: (
            losses.policy_loss_terms(new, old, third, cliprange=0.2, cliprange_high=0.3)[0]
            if name == "policy"
            else losses.value_loss_terms(new, old, third, cliprange_value=0.2)[0]
        )
    )

    @few
    @given(seeds, masks, st.permutations(range(B)), st.integers(0, B))
    def run(seed, mask, order, where):
        arrays = np.random.default_rng(seed).normal(size=(3, B, T)).astype(dtype)
        wanted = whole(*arrays, mask)
        order = list(order)
        near(whole(*arrays[:, order], mask[order]), wanted, tolerance)
        wide = np.pad(arrays, ((0, 0), (0, 0), (0, 2)), constant_values=7)
        near(whole(*wide, np.pad(mask, ((0, 0), (0, 2)))), wanted, tolerance)
        # A micro-batch gives its sum over the count of all.
        terms = np.where(mask, cut(*arrays), 0)
        parts = [terms[:where].sum() / max(mask.sum(), 1), terms[where:].sum() / max(mask.sum(), 1)]
        near(sum(parts), wanted, tolerance)

    run()


# --------------------------------------------------------------------------------------------------- the edge of a clip


def test_beside_the_edge_of_the_clip_the_gradient_is_torchs(precision):
    """-A r or 0, to both sides of both edges."""
    dtype, tolerance = precision
    ours = with_gradients(
        lambda new, old, advantages: losses.policy_loss_terms(new, old, advantages, cliprange=0.1, cliprange_high=0.4)[
            0
        ]
    )

    @few
    @given(arrays(4), st.sampled_from([1e-3, 1e-1]))
    def run(advantages, step):
        advantages = advantages + np.where(advantages >= 0, 0.5, -0.5)
        ratios = np.array([0.9 - step, 0.9 + step, 1.4 - step, 1.4 + step])
        new = np.log(ratios)
        same(ours, lambda *x: torch_policy_terms(*x, 0.1, 0.4), [new, 0 * new, advantages], precision=precision)
        _, (gradient, *_) = ours(np.ones(4), tuple(x.astype(dtype) for x in (new, 0 * new, advantages)))
        outside = np.array([True, False, False, True])
        away = np.where(ratios < 1, advantages < 0, advantages > 0)
        near(gradient, np.where(outside & away, 0, -advantages * ratios), 4 * tolerance)

    run()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [0.1, -0.3])
def test_on_the_edge_of_the_clip_the_policy_gradient_lies_between_those_of_its_sides(precision, gap, advantage):
    """Both branches of the maximum are equal there, so that it is a convention: torch takes -A r whole, we a part.
    Nothing is clipped yet, and no ratio but a made-up one falls on the edge."""
    dtype, tolerance = precision
    zero, advantage = dtype.type(0), dtype.type(advantage)
    _, _, ratio = losses.policy_loss_terms(dtype.type(gap), zero, advantage, cliprange=0.2)
    clip = abs(float(ratio) - 1)  # exact, for the ratio is between 1/2 and 2

    def ours(new):
        terms, clipped, _ = losses.policy_loss_terms(new, zero, advantage, cliprange=clip)
        return terms, clipped

    (value, clipped), gradient = jax.value_and_grad(ours, has_aux=True)(dtype.type(gap))
    whole = -float(advantage) * float(ratio)
    near(value, whole, tolerance)
    assert not clipped and 0 < gradient / whole <= 1 + tolerance
    there = torch.tensor(float(ratio), requires_grad=True, dtype=torch.float64)
    ahead = -float(advantage) * there
    torch.max(ahead, -float(advantage) * there.clamp(1 - clip, 1 + clip)).backward()
    assert float(there.grad) == -float(advantage)


@pytest.mark.parametrize("side", [1.0, -1.0])
@pytest.mark.parametrize("target", [3.0, -3.0])
def test_on_the_edge_of_the_clip_the_value_gradient_lies_between_those_of_its_sides(precision, side, target):
    dtype, tolerance = precision
    old, value, target = dtype.type(1.0), dtype.type(1.0 + 0.25 * side), dtype.type(target)

    def ours(value):
        return losses.value_loss_terms(value, old, target, cliprange_value=0.25)

    (loss, clipped), gradient = jax.value_and_grad(ours, has_aux=True)(value)
    near(loss, 0.5 * (value - target) ** 2, tolerance)
    assert not clipped and 0 < gradient / (value - target) <= 1 + tolerance


# -------------------------------------------------------------------------------- what is true of a draw on average


def distributions(logits):
    """(log policy, log reference, KL) over a small vocabulary, of logits [2, V], in float64."""
    policy, ref = torch.tensor(logits).log_softmax(-1)
    return policy.numpy(), ref.numpy(), float((policy.exp() * (policy - ref)).sum())


def test_k1_and_k3_are_the_kl_on_average_and_k3_is_never_negative(precision):
    """The expectation is a sum over the whole vocabulary: nothing is sampled."""
    dtype, tolerance = precision
    estimates = jax.jit(lambda p, q: [adv.kl_penalty(p, q, name) for name in ("k1", "k2", "k3")])

    @few
    @given(arrays(2, 7))
    def run(logits):
        policy, ref, kl = distributions(logits)
        k1, k2, k3 = (np.asarray(x, np.float64) for x in estimates(policy.astype(dtype), ref.astype(dtype)))
        weights = np.exp(policy)
        for estimate in (k1, k3):
            assert abs((weights * estimate).sum() - kl) <= tolerance * max(kl, (weights * np.abs(estimate)).sum(), 1)
        assert (k2 >= 0).all() and (k3 >= 0).all()
        assert kl < 1e-3 or (k1 < 0).any()  # so much for k1

    run()


def test_only_k2_has_the_gradient_of_the_kl_on_average(precision):
    """Of a token drawn from the policy: k2's is KL(policy || reference)'s, k1's is 0, k3's is that of
    KL(reference || policy)."""
    dtype, tolerance = precision

    @jax.jit
    def expected(logits, ref):
        weights = jax.nn.softmax(logits)

        def mean(logits, estimator):
            return (weights * adv.kl_penalty(jax.nn.log_softmax(logits), ref, estimator)).sum()

        return [jax.grad(mean)(logits, estimator) for estimator in ("k1", "k2", "k3")]

    @few
    @given(arrays(2, 7))
    def run(logits):
        theirs = torch.tensor(logits[0], requires_grad=True)
        policy, ref = theirs.log_softmax(-1), torch.tensor(logits[1]).log_softmax(-1)
        (forward,) = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), theirs, retain_graph=True)
        (backward,) = torch.autograd.grad((ref.exp() * (ref - policy)).sum(), theirs)
        k1, k2, k3 = expected(logits[0].astype(dtype), ref.numpy().astype(dtype))
        near(k1, np.zeros(7), tolerance)
        near(k2, forward, tolerance)
        near(k3, backward, tolerance)

    run()


def test_reinforce_is_the_gradient_of_the_expected_advantage_and_a_baseline_changes_nothing(precision):
    """sum_v pi(v) grad(-A(v) log pi(v)) = -grad sum_v pi(v) A(v), summed over a small vocabulary; Williams 1992."""
    dtype, tolerance = precision

    @jax.jit
    def expected(logits, advantages):
        weights = jax.nn.softmax(logits)

        def loss(logits):
            logprobs = losses.logprobs_from_logits(jnp.tile(logits[None], (V, 1)), jnp.arange(V))
            return (weights * losses.reinforce_loss_terms(logprobs, advantages)).sum()

        return jax.grad(loss)(logits)

    @few
    @given(arrays(V), arrays(V), numbers)
    def run(logits, advantages, baseline):
        theirs = torch.tensor(logits, requires_grad=True)
        (wanted,) = torch.autograd.grad(-(theirs.softmax(-1) * torch.tensor(advantages)).sum(), theirs)
        near(expected(logits.astype(dtype), advantages.astype(dtype)), wanted, tolerance)
        near(expected(logits.astype(dtype), (advantages - baseline).astype(dtype)), wanted, tolerance, 4.0)

    run()


# ---------------------------------------------------------------------------------------------- group policy gradients


def test_a_clipped_ratio_is_the_clipped_loss_of_ppo(precision):
    """Value and gradient with respect to the log-probability, A r or 0."""
    dtype, tolerance = precision

    @jax.jit
    def run_both(new, old, advantages):
        def ours(new):
            return losses.clipped_ratio_loss_terms(jnp.exp(new - old), advantages, epsilon=0.1, epsilon_high=0.4)

        def theirs(new):
            return losses.policy_loss_terms(new, old, advantages, cliprange=0.1, cliprange_high=0.4)[0]

        return [jax.vjp(f, new)[0:1] + jax.vjp(f, new)[1](jnp.ones_like(new)) for f in (ours, theirs)]

    @few
    @given(seeds)
    def run(seed):
        new, old, advantages = (0.4 * np.random.default_rng(seed).normal(size=(3, B, T))).astype(dtype)
        for found, wanted in zip(*run_both(new, old, advantages), strict=True):
            near(found, wanted, tolerance)

    run()


EQUATIONS = {
    "sequence_log_ratio": lambda x, y, a, mask: losses.sequence_log_ratio(x - y, mask),
    "vespo_weights": lambda x, y, a, mask: losses.vespo_weights(
        x - y, a, mask, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0
    ),
    "off_policy_mask": lambda x, y, a, mask: losses.off_policy_mask(a, x, y, mask, threshold=0.2),
    "high_entropy_mask": lambda x, y, a, mask: losses.high_entropy_mask(jnp.exp(x), mask, quantile=0.8),
    "sampler_ratio of tokens": lambda x, y, a, mask: losses.sampler_ratio(
        x, y, mask, mode="token_truncate", clip_max=2.0
    ),
    "sampler_ratio of responses": lambda x, y, a, mask: losses.sampler_ratio(
        x, y, mask, mode="sequence_mask", clip_max=2.0
    ),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_masked_tokens_are_never_read_and_rows_know_their_place_nowhere(precision, name):
    """Nor does padding change what a row is given."""
    dtype, tolerance = precision
    function = jax.jit(EQUATIONS[name])

    @few
    @given(seeds, masks, st.permutations(range(B)), st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
    def run(seed, mask, order, poison):
        rng, order = np.random.default_rng(seed), list(order)
        x, y = rng.normal(size=(2, B, T)).astype(dtype)
        given_arrays = (x, y, rng.normal(size=(B, 1)).astype(dtype), mask)
        wanted = np.asarray(function(*given_arrays))
        dirty = [np.where(mask, x, dtype.type(poison)) for x in given_arrays[:2]]
        np.testing.assert_array_equal(function(*dirty, *given_arrays[2:]), wanted)
        near(function(*(x[order] for x in given_arrays)), wanted[order], tolerance)
        wide = [np.pad(x, ((0, 0), (0, 2 if x.shape[1] > 1 else 0)), constant_values=0) for x in given_arrays]
        near(np.asarray(function(*wide))[:, : wanted.shape[1]], wanted, tolerance)

    run()


def test_the_share_of_high_entropies_is_what_was_asked_for(precision):
    """Without ties: those of a rank of at least quantile * (n - 1)."""
    dtype, _ = precision
    function = jax.jit(lambda x, mask, quantile: losses.high_entropy_mask(x, mask, quantile=quantile))

    @few
    @given(seeds, masks, st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
    def run(seed, mask, quantile):
        entropy = np.random.default_rng(seed).permutation(B * T).reshape(B, T).astype(dtype)
        found, n = np.asarray(function(entropy, mask, quantile)), mask.sum()
        ranks = np.array([(entropy[mask] < x).sum() for x in entropy.reshape(-1)]).reshape(B, T)
        np.testing.assert_array_equal(found, mask & (ranks >= np.round(quantile * max(n - 1, 0), 5)))

    run()


def test_vespo_weights_are_largest_where_k_is_lambda_times_the_ratio(precision):
    dtype, tolerance = precision
    weigh = jax.jit(
        lambda x, k, lam: losses.vespo_weights(
            x, np.ones((1, 1)), np.ones((1, 1), bool), k_pos=k, lambda_pos=lam, k_neg=0.0, lambda_neg=0.0
        )[0, 0]
    )

    @few
    @given(st.floats(0.5, 4), st.floats(0.5, 4), st.floats(-3, 3))
    def run(k, lam, log_ratio):
        top = float(weigh(np.full((1, 1), np.log(k / lam), dtype), k, lam))
        at = float(weigh(np.full((1, 1), log_ratio, dtype), k, lam))
        assert 0 <= at <= top * (1 + 10 * tolerance)
        near(weigh(np.zeros((1, 1), dtype), k, lam), 1.0, tolerance)

    run()


def test_the_ratio_of_a_response_is_the_product_of_those_of_its_tokens(precision):
    dtype, tolerance = precision

    @jax.jit
    def ratios(x, y, mask):
        return [losses.sampler_ratio(x, y, mask, mode=f"{level}_truncate") for level in ("token", "sequence")]

    @few
    @given(seeds, masks)
    def run(seed, mask):
        x, y = np.random.default_rng(seed).normal(size=(2, B, T)).astype(dtype)
        tokens, whole = ratios(x, y, mask)
        near(whole, np.prod(tokens, axis=1, keepdims=True), 10 * tolerance)

    run()
