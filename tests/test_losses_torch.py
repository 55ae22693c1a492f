"""losses.py and its gradients against torch and its autograd, on random arrays."""

import contextlib

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax import losses
from tests.helpers import trl_grpo

torch = pytest.importorskip("torch")
few = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 2**31)
shapes = st.sampled_from([(1, 1), (3, 5)])  # few, for every new one is compiled


@pytest.fixture(params=["float32", "float64"])
def precision(request):
    """(dtype, tolerance), under x64 for float64."""
    with jax.enable_x64(True) if request.param == "float64" else contextlib.nullcontext():
        yield np.dtype(request.param), {"float32": 2e-5, "float64": 1e-11}[request.param]


def both(jax_loss, torch_loss, arrays, dtype, tolerance):
    """The same scalar and the same gradients from float arrays, torch in float64."""
    value, gradients = jax.value_and_grad(jax_loss, argnums=tuple(range(len(arrays))))(
        *(x.astype(dtype) for x in arrays)
    )
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    wanted = torch_loss(*tensors)
    wanted.backward()
    assert value.dtype == dtype
    np.testing.assert_allclose(value, wanted.item(), rtol=tolerance, atol=tolerance)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        other = np.zeros(tensor.shape) if tensor.grad is None else tensor.grad.numpy()
        np.testing.assert_allclose(gradient, other, rtol=10 * tolerance, atol=10 * tolerance)


def random_mask(rng, shape):
    mask = rng.random(shape) < 0.7
    mask.flat[0] = True
    return mask


def test_logprobs_and_entropy_equal_torch(precision):
    dtype, tolerance = precision

    @few
    @given(seeds, shapes, st.sampled_from([1.0, 30.0]))
    def run(seed, shape, scale):
        rng = np.random.default_rng(seed)
        logits, tokens = rng.normal(size=(*shape, 7)) * scale, rng.integers(0, 7, size=shape)
        weights = rng.normal(size=shape)
        both(
            lambda x: (losses.logprobs_from_logits(x, tokens) * weights.astype(dtype)).sum(),
            lambda x: (
                x.log_softmax(-1).gather(-1, torch.tensor(tokens)[..., None])[..., 0] * torch.tensor(weights)
            ).sum(),
            [logits],
            dtype,
            tolerance * scale,
        )
        both(
            lambda x: (losses.entropy_from_logits(x) * weights.astype(dtype)).sum(),
            lambda x: (torch.distributions.Categorical(logits=x).entropy() * torch.tensor(weights)).sum(),
            [logits],
            dtype,
            tolerance * scale,
        )

    run()


def test_policy_loss_and_gradients_equal_trl(precision):
    dtype, tolerance = precision

    @few
    @given(seeds, shapes, st.sampled_from([0.2, 0.02]))
    def run(seed, shape, cliprange):
        rng = np.random.default_rng(seed)
        old, advantages, mask = rng.normal(size=shape) - 3, rng.normal(size=shape), random_mask(rng, shape)
        keep = torch.tensor(mask)

        def reference(new, old, advantages):
            new, old = (x.masked_fill(~keep, 1.0) for x in (new, old))
            ratio = torch.exp(new - old)
            plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
            return (torch.max(plain, clipped) * keep).sum() / keep.sum()

        both(
            lambda *x: losses.clipped_policy_loss(*x, mask, cliprange=cliprange),
            reference,
            [old + 0.3 * rng.normal(size=shape), old, advantages],
            dtype,
            tolerance,
        )

    run()


def test_value_loss_and_gradients_equal_trl(precision):
    dtype, tolerance = precision

    @few
    @given(seeds, shapes)
    def run(seed, shape):
        rng = np.random.default_rng(seed)
        old, returns, mask = rng.normal(size=shape), rng.normal(size=shape), random_mask(rng, shape)
        keep = torch.tensor(mask)

        def reference(values, old, returns):
            near = torch.clamp(values, old - 0.2, old + 0.2)
            largest = torch.max(torch.square(values - returns), torch.square(near - returns))
            return 0.5 * (largest * keep).sum() / keep.sum()

        both(
            lambda *x: losses.clipped_value_loss(*x, mask, cliprange_value=0.2),
            reference,
            [old + 0.3 * rng.normal(size=shape), old, returns],
            dtype,
            tolerance,
        )

    run()


def test_clip_flags_equal_trl():
    rng = np.random.default_rng(0)
    new, old, third = (rng.normal(size=(8, 9)).astype(np.float32) for _ in range(3))
    ratio = torch.exp(torch.tensor(new) - torch.tensor(old))
    plain, near = -torch.tensor(third) * ratio, -torch.tensor(third) * ratio.clamp(0.8, 1.2)
    assert np.array_equal(losses.policy_loss_terms(new, old, third, cliprange=0.2)[1], (near > plain).numpy())
    near = torch.clamp(torch.tensor(new), torch.tensor(old) - 0.2, torch.tensor(old) + 0.2)
    wanted = torch.square(near - torch.tensor(third)) > torch.square(torch.tensor(new) - torch.tensor(third))
    assert np.array_equal(losses.value_loss_terms(new, old, third, cliprange_value=0.2)[1], wanted.numpy())


def test_pairwise_loss_and_gradients_equal_torch(precision):
    dtype, tolerance = precision

    @few
    @given(seeds, st.booleans(), st.sampled_from([None, 0.01]))
    def run(seed, with_margin, centre):
        rng = np.random.default_rng(seed)
        chosen, rejected, margin = 3 * rng.normal(size=(3, 4))

        def reference(chosen, rejected):
            gap = chosen - rejected - (torch.tensor(margin) if with_margin else 0)
            return -torch.nn.functional.logsigmoid(gap).mean() + (centre or 0) * torch.mean((chosen + rejected) ** 2)

        both(
            lambda c, r: losses.pairwise_reward_loss(
                c, r, margin.astype(dtype) if with_margin else None, centre
            ).mean(),
            reference,
            [chosen, rejected],
            dtype,
            tolerance,
        )

    run()


def test_cross_entropy_and_gradients_equal_torch(precision):
    dtype, tolerance = precision

    @few
    @given(seeds, shapes)
    def run(seed, shape):
        rng = np.random.default_rng(seed)
        logits, labels, mask = rng.normal(size=(*shape, 6)), rng.integers(0, 6, size=shape), random_mask(rng, shape)
        labels = np.where(mask, labels, -100)
        both(
            lambda x: losses.cross_entropy(x, labels, mask).sum() / mask.sum(),
            lambda x: torch.nn.functional.cross_entropy(x.reshape(-1, 6), torch.tensor(labels).reshape(-1)),
            [logits],
            dtype,
            tolerance,
        )

    run()


def test_reinforce_loss_and_gradients_equal_torch_and_are_the_clipped_loss_at_ratio_one(precision):
    dtype, tolerance = precision

    @few
    @given(seeds, shapes)
    def run(seed, shape):
        rng = np.random.default_rng(seed)
        logprobs, advantages = rng.normal(size=shape) - 3, rng.normal(size=shape)
        both(
            lambda *x: losses.reinforce_loss_terms(*x).mean(),
            lambda logprobs, advantages: -(advantages * logprobs).mean(),
            [logprobs, advantages],
            dtype,
            tolerance,
        )
        old, weights = logprobs.astype(dtype), advantages.astype(dtype)
        clipped = jax.grad(lambda x: losses.policy_loss_terms(x, old, weights, cliprange=0.2)[0].sum())(old)
        plain = jax.grad(lambda x: losses.reinforce_loss_terms(x, weights).sum())(old)
        np.testing.assert_allclose(clipped, plain, rtol=tolerance, atol=tolerance)

    run()


def test_a_clip_of_two_widths_equals_trls_rloo(precision):
    """rloo_trainer.py:1728-1739: -min(ratio A, clamp(ratio, 1 - epsilon, 1 + epsilon_high) A)."""
    dtype, tolerance = precision

    @few
    @given(seeds, shapes)
    def run(seed, shape):
        rng = np.random.default_rng(seed)
        old, advantages = rng.normal(size=shape) - 3, rng.normal(size=shape)

        def reference(new, old, advantages):
            ratio = torch.exp(new - old)
            return -torch.min(ratio * advantages, ratio.clamp(0.9, 1.4) * advantages).mean()

        both(
            lambda *x: losses.policy_loss_terms(*x, cliprange=0.1, cliprange_high=0.4)[0].mean(),
            reference,
            [old + 0.4 * rng.normal(size=shape), old, advantages],
            dtype,
            tolerance,
        )

    run()


def test_a_dual_clip_and_its_gradients_equal_the_published_objective(precision):
    """Ye et al. 2020: max(min(r A, clip(r) A), c A) where A < 0, which is maximised."""
    dtype, tolerance = precision

    @few
    @given(seeds, shapes, st.sampled_from([1.5, 3.0]))
    def run(seed, shape, dual_clip):
        rng = np.random.default_rng(seed)
        old, advantages = rng.normal(size=shape) - 3, rng.normal(size=shape)

        def ours(new, old, advantages):
            plain, _, _ = losses.policy_loss_terms(new, old, advantages, cliprange=0.2, cliprange_high=0.28)
            return losses.dual_clip_terms(plain, advantages, dual_clip=dual_clip)[0].mean()

        def published(new, old, advantages):
            ratio = torch.exp(new - old)
            objective = torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
            objective = torch.where(advantages < 0, torch.max(objective, dual_clip * advantages), objective)
            return -objective.mean()

        both(ours, published, [old + rng.normal(size=shape), old, advantages], dtype, tolerance)

    run()


# ---------------------------------------------------------------------------------------------- group policy gradients


@pytest.fixture(scope="module")
def trl():
    """TRL's GRPOTrainer."""
    return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer


def any_mask(rng, shape):
    """Some rows empty, some full."""
    return np.arange(shape[1])[None] < rng.integers(0, shape[1] + 1, size=(shape[0], 1))


def test_sequence_ratios_and_gradients_equal_trl(precision):
    """grpo_trainer.py:3186-3188."""
    dtype, tolerance = precision

    @few
    @given(seeds, shapes)
    def run(seed, shape):
        rng = np.random.default_rng(seed)
        mask, weights = any_mask(rng, shape), rng.normal(size=(shape[0], 1))
        keep = torch.tensor(mask)
        both(
            lambda x: (losses.sequence_log_ratio(x, mask) * weights.astype(dtype)).sum(),
            lambda x: (((x * keep).sum(-1) / keep.sum(-1).clamp(min=1.0))[:, None] * torch.tensor(weights)).sum(),
            [rng.normal(size=shape)],
            dtype,
            tolerance,
        )

    run()


@pytest.mark.parametrize("delta", [None, 1.3, 1.1])
def test_clipped_ratios_and_gradients_equal_trl(precision, delta):
    """grpo_trainer.py:3210-3218, one ratio a token or a row."""
    dtype, tolerance = precision

    def reference(ratio, advantages):
        clipped = torch.clamp(ratio, 0.9, 1.2)
        ratio = ratio if delta is None else torch.clamp(ratio, max=delta)
        return -torch.min(ratio * advantages, clipped * advantages).sum()

    @few
    @given(seeds, st.sampled_from([((3, 5), (3, 5)), ((3, 1), (3, 5)), ((3, 5), (3, 1))]))
    def run(seed, shapes):
        rng = np.random.default_rng(seed)
        ratio, advantages = np.exp(0.3 * rng.normal(size=shapes[0])), rng.normal(size=shapes[1])
        both(
            lambda *x: losses.clipped_ratio_loss_terms(*x, epsilon=0.1, epsilon_high=0.2, delta=delta).sum(),
            reference,
            [ratio, advantages],
            dtype,
            tolerance,
        )

    run()


def test_a_capped_ratio_and_its_gradients_equal_trl(precision):
    """grpo_trainer.py:3206-3208."""
    dtype, tolerance = precision

    def reference(logprobs, ratio, advantages):
        return -(torch.clamp(ratio, max=1.5).detach() * advantages * logprobs + 0 * ratio).sum()

    @few
    @given(seeds, shapes, st.booleans())
    def run(seed, shape, of_sequences):
        rng = np.random.default_rng(seed)
        width = 1 if of_sequences else shape[1]
        both(
            lambda *x: losses.cispo_loss_terms(*x, epsilon_high=1.5).sum(),
            reference,
            [-np.exp(rng.normal(size=shape)), np.exp(rng.normal(size=(shape[0], width))), rng.normal(size=shape)],
            dtype,
            tolerance,
        )

    run()


def test_the_soft_gate_and_its_gradients_equal_trl(precision):
    """grpo_trainer.py:3219-3222."""
    dtype, tolerance = precision

    def reference(ratio, advantages):
        temperatures = torch.where(advantages > 0, 0.75, 1.25)  # exact in float32
        return -(torch.sigmoid(temperatures * (ratio - 1)) * 4 / temperatures * advantages).sum()

    @few
    @given(seeds, shapes, st.sampled_from([0.3, 3.0]))
    def run(seed, shape, scale):
        rng = np.random.default_rng(seed)
        both(
            lambda *x: losses.sapo_loss_terms(*x, temperature_pos=0.75, temperature_neg=1.25).sum(),
            reference,
            [np.exp(scale * rng.normal(size=shape)), rng.normal(size=shape)],
            dtype,
            10 * tolerance,
        )

    run()


def test_vespo_weights_equal_trls(trl, precision):
    """With and without the sampler's ratio, far beyond where log-ratios are cut too."""
    dtype, tolerance = precision
    # TRL's constants are float32 (torch.where of two numbers), so is the bound 1e-4 that a lambda of 0 becomes.
    lowest = 0.0 if dtype == np.float32 else 0.125
    options = {"k_pos": 0.5, "lambda_pos": 0.25, "k_neg": 1.5, "lambda_neg": lowest}

    @few
    @given(seeds, shapes, st.sampled_from([0.1, 1.0, 12.0]), st.booleans())
    def run(seed, shape, scale, with_sampler):
        rng = np.random.default_rng(seed)
        log_ratio, advantages, mask = (
            scale * rng.normal(size=shape),
            rng.normal(size=(shape[0], 1)),
            any_mask(rng, shape),
        )
        advantages[0] = 0
        sampler = np.where(mask, np.exp(scale * rng.normal(size=shape)) * (rng.random(shape) < 0.8), 1)
        sampler = sampler if with_sampler else None
        wanted = trl.get_gamma_weights(
            torch.tensor(advantages),
            torch.tensor(log_ratio),
            torch.tensor(mask),
            None if sampler is None else torch.tensor(sampler),
            **options,
        )
        given_sampler = None if sampler is None else sampler.astype(dtype)
        found = losses.vespo_weights(
            log_ratio.astype(dtype), advantages.astype(dtype), mask, sampler_ratio=given_sampler, **options
        )
        assert found.dtype == dtype
        # An error of the sum of log-ratios is multiplied by k - lambda w, at most where the weight is still above 0.
        np.testing.assert_allclose(found, wanted, rtol=100 * tolerance, atol=tolerance)

    run()


def test_the_responses_that_are_kept_equal_trls(trl, precision):
    dtype, _ = precision

    @few
    @given(seeds, shapes)
    def run(seed, shape):
        rng = np.random.default_rng(seed)
        advantages, (logprobs, sampler) = rng.normal(size=(shape[0], 1)), rng.normal(size=(2, *shape))
        advantages[0], mask = 0, any_mask(rng, shape)
        wanted = trl.get_off_policy_mask(*(torch.tensor(x) for x in (advantages, logprobs, sampler, mask)), 0.3)
        found = losses.off_policy_mask(*(x.astype(dtype) for x in (advantages, logprobs, sampler)), mask, threshold=0.3)
        np.testing.assert_array_equal(found, wanted.numpy())

    run()


@few
@given(seeds, st.sampled_from([(1, 1), (3, 5), (4, 8)]), st.floats(0, 1) | st.sampled_from([0.2, 0.8]), st.booleans())
def test_tokens_of_high_entropy_equal_trls(trl, seed, shape, fraction, tied):
    """torch.quantile of whatever the mask holds, ties and empty masks too."""
    rng = np.random.default_rng(seed)
    entropy, mask = rng.gamma(1.0, size=shape).astype(np.float32), any_mask(rng, shape)
    entropy = np.round(entropy) if tied else entropy
    trainer = trl.__new__(trl)
    trainer.accelerator = trl_grpo.OneProcess()
    wanted = trainer.get_high_entropy_mask(torch.tensor(entropy), torch.tensor(mask).int(), 1 - fraction)
    found = losses.high_entropy_mask(entropy, mask, quantile=1 - fraction)
    np.testing.assert_array_equal(found, wanted.numpy())


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_sampler_ratios_equal_trls(precision, mode):
    dtype, tolerance = precision

    @few
    @given(seeds, shapes, st.sampled_from([None, 0.5]), st.sampled_from([None, 2.0]))
    def run(seed, shape, low, high):
        rng = np.random.default_rng(seed)
        (learner, sampler), mask = rng.normal(size=(2, *shape)), any_mask(rng, shape)
        if mode.endswith("truncate") and low is high is None:
            return  # torch.clamp needs a bound
        wanted = trl_grpo.sampler_ratio(*(torch.tensor(x) for x in (learner, sampler, mask)), mode, low, high)
        found = losses.sampler_ratio(
            learner.astype(dtype), sampler.astype(dtype), mask, mode=mode, clip_min=low, clip_max=high
        )
        assert found.dtype == dtype and found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=10 * tolerance, atol=tolerance)

    run()
