"""losses.py, value and gradient, against torch and TRL's own functions: float32 and float64, any mask, extremes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlhf_jax import losses
from tests.helpers import properties, trl_grpo
from tests.helpers.properties import arrays, few, masks, near, same, seeds

torch = pytest.importorskip("torch")
precision = properties.precision
B, T, V = 3, 5, 6


@pytest.fixture(scope="module")
def trl():
    """TRL's GRPOTrainer."""
    return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer


def any_mask(rng):
    """[B, T]: responses of any length; some are empty, some full."""
    return np.arange(T)[None] < rng.integers(0, T + 1, size=(B, 1))


# --------------------------------------------------------------------------------------------------- log-probabilities

extremes = st.sampled_from([0.0, 1.0, -2.5, 30.0, 88.75, 1e4, 9999.0, -1e4, -np.inf])
extreme_logits = arrays(B, V, elements=extremes).filter(lambda x: np.isfinite(x).any(1).all())


def chosen_logprobs(logits, tokens):
    return logits.log_softmax(-1).gather(-1, tokens[:, None].long())[:, 0]


@few
@given(extreme_logits, hnp.arrays(np.int32, B, elements=st.integers(0, V - 1)), seeds)
def test_logprobs_of_extreme_logits_and_their_gradients_are_torchs(precision, logits, tokens, seed):
    """Up to 1e4 either way, ties, tokens ruled out, chosen or not."""
    same(losses.logprobs_from_logits, chosen_logprobs, [logits], tokens, precision=precision, seed=seed)


def test_logprobs_of_large_ties_have_all_digits_of_float32():
    logits = np.array([[1e4, 1e4, -np.inf], [-1e4, -1e4, -1e4]], np.float32)
    found = losses.logprobs_from_logits(logits, np.array([1, 2]))
    near(found, chosen_logprobs(torch.tensor(logits, dtype=torch.float64), torch.tensor([1, 2])), 1e-5)


@few
@given(extreme_logits, seeds)
def test_entropies_of_extreme_logits_and_their_gradients_are_torchs(precision, logits, seed):
    def theirs(logits):
        """Of the tokens that are not ruled out: torch's own gradient is NaN at -inf."""
        rows = [row[row.isfinite()].log_softmax(-1) for row in logits]
        return -torch.stack([(row.exp() * row).sum() for row in rows])

    same(losses.entropy_from_logits, theirs, [logits], precision=precision, seed=seed)


@few
@given(arrays(B, V), st.sampled_from([1.0, 20.0]), seeds)
def test_logprobs_and_entropies_are_those_of_trl(precision, logits, scale, seed):
    """trainer/utils.py:480-561, on logits of every size that it can take (an -inf is NaN in its entropy)."""
    utils = pytest.importorskip("trl.trainer.utils")
    logits, tokens = logits * scale, np.random.default_rng(seed).integers(0, V, B)
    options = {"precision": precision, "seed": seed, "scale": max(1, np.abs(logits).max())}
    same(losses.logprobs_from_logits, utils.selective_log_softmax, [logits], tokens, **options)
    same(losses.entropy_from_logits, utils.entropy_from_logits, [logits], **options)


# ----------------------------------------------------------------------------------------------------------------- PPO

TOKENS, ROWS = (B, T), (B, 1)
CLIPS = [  # low, high, delta; the shapes of log-probabilities and of advantages
    (0.2, None, None, TOKENS, TOKENS),
    (0.1, 0.4, None, TOKENS, ROWS),
    (0.1, 0.2, 1.3, TOKENS, TOKENS),
    (0.1, 0.2, 1.1, ROWS, TOKENS),
]


@pytest.mark.parametrize("low, high, delta, shape, shape_of_advantages", CLIPS)
@few
@given(seeds)
def test_policy_losses_their_clips_and_their_gradients_are_trls(
    precision, low, high, delta, shape, shape_of_advantages, seed
):
    """grpo_trainer.py:3210-3218; without delta ppo_trainer.py:841-845 and rloo_trainer.py:1728-1739."""

    def parts(new, old, advantages):
        ratio = torch.exp(new - old)
        clipped = torch.clamp(ratio, 1 - low, 1 + (low if high is None else high))
        bounded = ratio if delta is None else torch.clamp(ratio, max=delta)
        return ratio, bounded * advantages, clipped * advantages

    rng = np.random.default_rng(seed)
    old, advantages = rng.normal(size=shape) - 3, rng.normal(size=shape_of_advantages)
    given_arrays = [old + 0.4 * rng.normal(size=shape), old, advantages]
    clipped, ratio = same(
        losses.policy_loss_terms,
        lambda *x: -torch.min(*parts(*x)[1:]),
        given_arrays,
        precision=precision,
        seed=seed,
        cliprange=low,
        cliprange_high=high,
        delta=delta,
    )
    wanted, plain, bound = parts(*map(torch.tensor, given_arrays))
    near(ratio, wanted, precision[1])
    np.testing.assert_array_equal(clipped, bound < plain)


def torch_value_losses(values, old, returns):
    near_old = torch.clamp(values, old - 0.2, old + 0.2)
    return torch.square(values - returns), torch.square(near_old - returns)


@few
@given(seeds)
def test_value_losses_their_clips_and_their_gradients_are_trls(precision, seed):
    """ppo_trainer.py:829-837."""
    old, returns, noise = np.random.default_rng(seed).normal(size=(3, B, T))
    given_arrays = [old + 0.3 * noise, old, returns]

    def theirs(*x):
        return 0.5 * torch.max(*torch_value_losses(*x))

    (clipped,) = same(
        losses.value_loss_terms, theirs, given_arrays, precision=precision, seed=seed, cliprange_value=0.2
    )
    plain, near_old = torch_value_losses(*map(torch.tensor, given_arrays))
    np.testing.assert_array_equal(clipped, near_old > plain)


def torch_policy_loss(new, old, advantages):
    ratio = torch.exp(new - old)
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.3)).sum()


MEANS = {
    losses.clipped_policy_loss: ({"cliprange": 0.2, "cliprange_high": 0.3}, torch_policy_loss),
    losses.clipped_value_loss: (
        {"cliprange_value": 0.2},
        lambda *x: 0.5 * torch.max(*torch_value_losses(*x)).sum(),
    ),
}


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("function", MEANS)
@few
@given(seeds, masks(B, T))
def test_a_clipped_loss_is_torchs_mean_over_what_the_mask_holds_and_reads_nothing_else(
    precision, function, poison, seed, mask
):
    """torch sees the chosen tokens only; every mask, the empty one too."""
    options, theirs = MEANS[function]
    new, old, third = np.random.default_rng(seed).normal(size=(3, B, T))
    given_arrays = [np.where(mask, x, poison) for x in (old + 0.3 * new, old, third)]

    def chosen(*x):
        return theirs(*(y[x[-1]] for y in x[:-1])) / max(mask.sum(), 1)

    same(function, chosen, given_arrays, mask, precision=precision, **options)


@pytest.mark.parametrize("dual_clip", [1.5, 3.0])
@few
@given(seeds)
def test_a_dual_clip_and_its_gradients_are_the_published_objective(precision, dual_clip, seed):
    """Ye et al. 2020: max(min(r A, clip(r) A), c A) where A < 0, which is maximised."""

    def published(loss, advantages):
        return -torch.where(advantages < 0, torch.max(-loss, dual_clip * advantages), -loss)

    advantages, noise = np.random.default_rng(seed).normal(size=(2, B, T))
    loss = -advantages * np.exp(noise)
    (clipped,) = same(
        losses.dual_clip_terms, published, [loss, advantages], precision=precision, seed=seed, dual_clip=dual_clip
    )
    np.testing.assert_array_equal(clipped, (advantages < 0) & (np.exp(noise) > dual_clip))


@few
@given(arrays(B, T), arrays(B, T))
def test_the_loss_of_reinforce_and_its_gradients_are_torchs(precision, logprobs, advantages):
    same(losses.reinforce_loss_terms, lambda *x: -x[1] * x[0], [logprobs, advantages], precision=precision)


# ---------------------------------------------------------------------------------------------- group policy gradients


@few
@given(seeds)
def test_sequence_ratios_and_their_gradients_are_trls(precision, seed):
    """grpo_trainer.py:3186-3188."""
    rng = np.random.default_rng(seed)

    def theirs(x, mask):
        return ((x * mask).sum(-1) / mask.sum(-1).clamp(min=1.0))[:, None]

    same(losses.sequence_log_ratio, theirs, [rng.normal(size=(B, T))], any_mask(rng), precision=precision, seed=seed)


@pytest.mark.parametrize("width", [1, T])
@few
@given(seeds)
def test_a_capped_ratio_and_its_gradients_are_trls(precision, width, seed):
    """grpo_trainer.py:3206-3208, one ratio a token or a row."""

    def theirs(logprobs, ratio, advantages):
        return -torch.clamp(ratio, max=1.5).detach() * advantages * logprobs

    rng = np.random.default_rng(seed)
    given_arrays = [-np.exp(rng.normal(size=(B, T))), np.exp(rng.normal(size=(B, width))), rng.normal(size=(B, T))]
    same(losses.cispo_loss_terms, theirs, given_arrays, precision=precision, seed=seed, epsilon_high=1.5)


@few
@given(seeds, st.sampled_from([0.3, 3.0]))
def test_the_soft_gate_and_its_gradients_are_trls(precision, seed, scale):
    """grpo_trainer.py:3219-3222."""

    def theirs(ratio, advantages):
        tau = torch.where(advantages > 0, 0.7, 1.2)
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages

    noise, advantages = np.random.default_rng(seed).normal(size=(2, B, T))
    options = {"precision": precision, "seed": seed, "temperature_pos": 0.7, "temperature_neg": 1.2}
    same(losses.sapo_loss_terms, theirs, [np.exp(scale * noise), advantages], **options)


@few
@given(seeds, st.sampled_from([0.1, 1.0, 12.0]), st.booleans())
def test_vespo_weights_are_trls(trl, precision, seed, scale, with_sampler):
    """With and without the sampler's ratio, far beyond where log-ratios are cut too."""
    dtype, tolerance = precision
    options = {"k_pos": 0.5, "lambda_pos": 0.25, "k_neg": 1.5, "lambda_neg": 0.0}
    rng = np.random.default_rng(seed)
    log_ratio, advantages, mask = scale * rng.normal(size=(B, T)), rng.normal(size=(B, 1)), any_mask(rng)
    advantages[0] = 0
    sampler = np.where(mask, np.exp(scale * rng.normal(size=(B, T))) * (rng.random((B, T)) < 0.8), 1)
    wanted = trl.get_gamma_weights(
        *(torch.tensor(x) for x in (advantages, log_ratio, mask)),
        torch.tensor(sampler) if with_sampler else None,
        **options,
    )
    found = losses.vespo_weights(
        log_ratio.astype(dtype),
        advantages.astype(dtype),
        mask,
        sampler_ratio=sampler.astype(dtype) if with_sampler else None,
        **options,
    )
    assert found.dtype == dtype
    # An error of the sum of log-ratios is multiplied by k - lambda w, at most where the weight is still above 0.
    np.testing.assert_allclose(found, wanted, rtol=200 * tolerance, atol=2 * tolerance)


@few
@given(seeds)
def test_the_responses_that_are_kept_are_trls(trl, precision, seed):
    rng = np.random.default_rng(seed)
    advantages, (logprobs, sampler) = rng.normal(size=(B, 1)), rng.normal(size=(2, B, T))
    advantages[0], mask = 0, any_mask(rng)
    wanted = trl.get_off_policy_mask(*(torch.tensor(x) for x in (advantages, logprobs, sampler, mask)), 0.3)
    given_arrays = (x.astype(precision[0]) for x in (advantages, logprobs, sampler))
    np.testing.assert_array_equal(losses.off_policy_mask(*given_arrays, mask, threshold=0.3), wanted)


@few
@given(seeds, st.sampled_from([(1, 1), (3, 5), (4, 8)]), st.floats(0, 1) | st.sampled_from([0.2, 0.8]), st.booleans())
def test_tokens_of_high_entropy_are_trls(trl, seed, shape, fraction, tied):
    """torch.quantile of whatever the mask holds, ties and empty masks too."""
    rng = np.random.default_rng(seed)
    entropy = rng.gamma(1.0, size=shape).astype(np.float32)
    mask = np.arange(shape[1])[None] < rng.integers(0, shape[1] + 1, size=(shape[0], 1))
    entropy = np.round(entropy) if tied else entropy
    trainer = trl.__new__(trl)
    trainer.accelerator = trl_grpo.OneProcess()
    wanted = trainer.get_high_entropy_mask(torch.tensor(entropy), torch.tensor(mask).int(), 1 - fraction)
    found = losses.high_entropy_mask(entropy, mask, quantile=1 - fraction)
    np.testing.assert_array_equal(found, wanted.numpy())


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@few
@given(seeds, st.sampled_from([(None, 2.0), (0.5, None), (0.5, 2.0)]))
def test_sampler_ratios_and_their_gradients_are_trls(precision, mode, seed, bounds):
    rng = np.random.default_rng(seed)
    same(
        losses.sampler_ratio,
        lambda *x: trl_grpo.sampler_ratio(*x, mode, *bounds),
        list(rng.normal(size=(2, B, T))),
        any_mask(rng),
        precision=precision,
        seed=seed,
        mode=mode,
        clip_min=bounds[0],
        clip_max=bounds[1],
    )


# ----------------------------------------------------------------------------------------- reward model and fine-tuning


@pytest.mark.parametrize("with_margin, centre", [(False, None), (True, None), (True, 0.01)])
@few
@given(arrays(3, B, elements=st.sampled_from([0.0, 1.0, -3.0, 40.0, 1e4, -1e4])), seeds)
def test_pairwise_losses_and_their_gradients_are_torchs(precision, with_margin, centre, scores, seed):
    """Scores may be extreme."""

    def theirs(chosen, rejected, margin=0.0):
        centring = (centre or 0) * (chosen + rejected) ** 2
        return -torch.nn.functional.logsigmoid(chosen - rejected - margin) + centring

    given_arrays = list(scores if with_margin else scores[:2])
    options = {"center_coefficient": centre} if centre else {}
    same(losses.pairwise_reward_loss, theirs, given_arrays, precision=precision, seed=seed, **options)


@few
@given(extreme_logits, masks(B), seeds)
def test_cross_entropy_of_extreme_logits_and_its_gradient_are_torchs(precision, logits, mask, seed):
    def theirs(logits, labels, mask):
        labels = torch.where(mask, labels, -100).long()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    # A label is a token that may come.
    labels = np.argmax(np.isfinite(logits) * np.random.default_rng(seed).random((B, V)), axis=1)
    same(losses.cross_entropy, theirs, [logits], labels, mask, precision=precision, seed=seed)


# -------------------------------------------------------------------------------------------------- masks, rows, widths

MASKED = {  # of x, y [B, T], a [B, 1] and mask [B, T]: a number of each row, or of each token
    "clipped_policy_loss": lambda x, y, a, mask: jnp.full(
        a.shape, losses.clipped_policy_loss(x, y, jnp.broadcast_to(a, x.shape), mask, cliprange=0.2)
    ),
    "clipped_value_loss": lambda x, y, a, mask: jnp.full(
        a.shape, losses.clipped_value_loss(x, y, jnp.broadcast_to(a, x.shape), mask, cliprange_value=0.2)
    ),
    "sequence_log_ratio": lambda x, y, a, mask: losses.sequence_log_ratio(x, mask),
    "vespo_weights": lambda x, y, a, mask: losses.vespo_weights(
        x, a, mask, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0
    ),
    "off_policy_mask": lambda x, y, a, mask: losses.off_policy_mask(a, x, y, mask, threshold=0.2),
    "high_entropy_mask": lambda x, y, a, mask: losses.high_entropy_mask(x, mask, quantile=0.8),
    "sampler_ratio of tokens": lambda x, y, a, mask: losses.sampler_ratio(
        x, y, mask, mode="token_truncate", clip_max=2.0
    ),
    "sampler_ratio of responses": lambda x, y, a, mask: losses.sampler_ratio(
        x, y, mask, mode="sequence_mask", clip_max=2.0
    ),
}


@pytest.mark.parametrize("name", MASKED)
@few
@given(seeds, masks(B, T), st.permutations(range(B)), st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_masked_tokens_are_never_read_and_neither_the_order_of_rows_nor_padding_matters(
    precision, name, seed, mask, order, poison
):
    dtype, tolerance = precision
    function, rng, order = jax.jit(MASKED[name]), np.random.default_rng(seed), list(order)
    x, y = rng.normal(size=(2, B, T)).astype(dtype)
    given_arrays = (x, y, rng.normal(size=(B, 1)).astype(dtype), mask)
    wanted = np.asarray(function(*given_arrays))
    dirty = [np.where(mask, x, dtype.type(poison)) for x in given_arrays[:2]]
    np.testing.assert_array_equal(function(*dirty, *given_arrays[2:]), wanted)
    near(function(*(x[order] for x in given_arrays)), wanted[order], tolerance)
    wide = [np.pad(x, ((0, 0), (0, 2 if x.shape[1] > 1 else 0)), constant_values=0) for x in given_arrays]
    near(np.asarray(function(*wide))[:, : wanted.shape[1]], wanted, tolerance)


UNMASKED = {
    "logprobs_from_logits": lambda x, y, a, mask: losses.logprobs_from_logits(x, jnp.arange(B)),
    "entropy_from_logits": lambda x, y, a, mask: losses.entropy_from_logits(x),
    "importance_ratio": lambda x, y, a, mask: losses.importance_ratio(x),
    "policy_loss_terms": lambda x, y, a, mask: losses.policy_loss_terms(x, y, a, cliprange=0.2),
    "value_loss_terms": lambda x, y, a, mask: losses.value_loss_terms(x, y, x[::-1], cliprange_value=0.2),
    "dual_clip_terms": lambda x, y, a, mask: losses.dual_clip_terms(x, y, dual_clip=1.5),
    "reinforce_loss_terms": lambda x, y, a, mask: losses.reinforce_loss_terms(x, y),
    "cispo_loss_terms": lambda x, y, a, mask: losses.cispo_loss_terms(x, y, a, epsilon_high=1.5),
    "sapo_loss_terms": lambda x, y, a, mask: losses.sapo_loss_terms(x, a, temperature_pos=1.0, temperature_neg=1.05),
    "pairwise_reward_loss": lambda x, y, a, mask: losses.pairwise_reward_loss(x[0], y[0], x[1]),
    "cross_entropy": lambda x, y, a, mask: losses.cross_entropy(x, jnp.arange(B), mask[:, 0]),
}


@pytest.mark.parametrize("name", [*MASKED, *UNMASKED])
def test_half_precision_is_widened_before_anything_is_summed(name):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, B, 500))
    properties.widens({**MASKED, **UNMASKED}[name], [x, y, rng.normal(size=(B, 1)), rng.random((B, 500)) < 0.7])
