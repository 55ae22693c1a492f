"""The sampler: what is drawn from logits, and what is done to them before."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from rlhf_jax import generate as gen
from rlhf_jax.generate.sampling import sample
from tests.helpers.optional import optional

torch = optional("torch")
V = 97


def test_inverse_cdf_draws_follow_the_softmax():
    logits = 3 * jax.random.normal(jax.random.key(1), (1, 700))
    n = 40_000
    keys = jax.random.split(jax.random.key(2), n)
    draws = jax.jit(gen.draw)(keys, jnp.broadcast_to(logits, (n, 700)))
    expected = np.asarray(jax.nn.softmax(logits[0]), np.float64) * n
    order = np.argsort(-expected)
    counts = np.bincount(np.asarray(draws), minlength=700)[order]
    expected = expected[order]
    head = expected > 20
    observed = np.append(counts[head], counts[~head].sum())
    wanted = np.append(expected[head], expected[~head].sum())
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


def test_an_excluded_entry_is_never_drawn():
    logits = jnp.where(jnp.arange(600) % 7 == 3, 0.0, -jnp.inf)[None]
    keys = jax.random.split(jax.random.key(0), 5000)
    draws = np.asarray(jax.jit(gen.draw)(keys, jnp.broadcast_to(logits, (5000, 600))))
    assert set(draws % 7) == {3} and len(set(draws)) == 86


def test_suppressed_ids_are_never_drawn_and_stay_in_the_log_probabilities():
    class Head:
        def next_logits(self, params, hidden):
            return hidden

    logits = jnp.tile(jnp.array([2.0, 0.0, 1.0, 3.0]), (4000, 1))
    keys = jax.random.split(jax.random.key(0), 4000)
    draw = jax.jit(
        lambda keys, ids: sample(Head(), None, logits, keys, jnp.zeros(4000, jnp.int32), None, ids), static_argnums=1
    )
    for temperature in (1.0, 0.5):
        sampling = gen.Sampling(
            1, temperature=temperature, suppress_ids=(1, 3, 9)
        )  # 9 has no row: nothing to leave out
        tokens, logprobs = (np.asarray(x) for x in draw(keys, sampling))
        assert set(tokens.tolist()) == {0, 2}
        share = 1 / (1 + np.exp(-1 / temperature))
        assert abs((tokens == 0).mean() - share) < 4 * np.sqrt(share * (1 - share) / 4000)
        wanted = np.asarray(jax.nn.log_softmax(logits[0] / temperature))[tokens]
        np.testing.assert_allclose(logprobs, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"temperature": 0.9, "top_k": 30, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_logit_processing_equals_transformers(options):
    pytest.importorskip("torch")  # transformers' logit processors need it
    from transformers.generation import logits_process as lp

    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (4, V)).astype(np.float32)
    ids = rng.integers(0, V, (4, 6))
    sampling = gen.Sampling(1, **options)
    chain = []
    if sampling.repetition_penalty != 1.0:
        chain.append(lp.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    chain.append(lp.TemperatureLogitsWarper(sampling.temperature + 1e-7))
    if sampling.top_k:
        chain.append(lp.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(lp.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(lp.MinPLogitsWarper(sampling.min_p))
    theirs = functools.reduce(lambda x, p: p(torch.tensor(ids), x), chain, torch.tensor(logits))
    seen = None
    if sampling.repetition_penalty != 1.0:
        seen = jnp.zeros((4, V), bool).at[jnp.arange(4)[:, None], ids].set(True)
    ours = gen.process_logits(jnp.asarray(logits), seen, sampling)
    np.testing.assert_array_equal(np.isinf(ours), np.isinf(theirs.numpy()))
    finite = ~np.isinf(theirs.numpy())
    np.testing.assert_allclose(np.asarray(ours)[finite], theirs.numpy()[finite], rtol=1e-6)
