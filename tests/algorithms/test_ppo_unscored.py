"""A row without a score in PPO: nothing of it is read, and the others learn what they would learn alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_jax.algorithms import ppo
from rlhf_jax.config import PPOConfig
from rlhf_jax.types import Rollout, TrainState
from tests.helpers.algorithms import at_rates, models_of, scored, update_in_order, with_params
from tests.helpers.arrays import distance
from tests.helpers.bag_model import BagModel
from tests.helpers.models_common import assert_trees_equal, random_params

V, C, N, T = 61, 5, 6, 7
EOS = 3
SCORABLE = np.array([True, False, True, True, False, True])
MODEL = BagModel(V)
MODELS = models_of(MODEL, MODEL, MODEL)


def batch_of_responses():
    """(rollout, scores), with lengths of every kind in scored and unscored rows."""
    rng = np.random.default_rng(0)
    lengths = np.array([0, 4, T, 1, T, 3])
    ended = np.array([False, True, False, True, True, True])
    response = np.where(np.arange(T)[None] < lengths[:, None], rng.integers(4, V, (N, T)), EOS)
    response[ended, lengths[ended] - 1] = EOS
    rollout = Rollout(
        prompt_tokens=jnp.asarray(rng.integers(4, V, (N, C)), jnp.int32),
        prompt_lengths=jnp.array([5, 2, 3, 1, 5, 4], jnp.int32),
        response=jnp.asarray(response, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        ended=jnp.asarray(ended),
        logprobs=jnp.asarray(rng.normal(size=(N, T)) - 3, jnp.float32),
        response_mask=jnp.ones((N, T), bool),
    )
    return rollout, jnp.asarray(rng.normal(size=N), jnp.float32)


OF_TOKENS = PPOConfig(response_length=T, whiten_rewards=True, missing_eos_penalty=1.0, old_logprobs="sampler")
OF_SEQUENCES = PPOConfig(
    response_length=T, score_position="eos", whiten_ddof=0, loss_aggregation="seq_mean", num_mini_batches=2
)


@functools.cache
def ppo_programs(config):
    """make_experience, and an update by plain gradient descent, at the same params."""
    params = {"policy": random_params(MODEL, ("causal",), 0), "value": random_params(MODEL, ("scalar",), 1)}
    ref, kl_coef = random_params(MODEL, ("causal",), 2), jnp.float32(config.kl_coef)

    def experience(rollout, scores, scorable):
        batch = scored(rollout, scores, jnp.asarray(scorable), eos_id=EOS)
        return ppo.make_experience(with_params(MODELS, params, ref), batch, config=config, kl_coef=kl_coef)

    def update(experience):
        zero, optimizer = jnp.int32(0), at_rates(optax.identity(), jnp.float32(0.1))
        state = TrainState(params, optimizer.init(params), zero, zero, jnp.uint32(0), kl_coef, jnp.uint32(0))
        orders = jnp.tile(jnp.arange(experience.lengths.shape[0]), (config.num_ppo_epochs, 1))
        options = {"config": config, "optimizer": optimizer, "orders": orders}
        state, found, _ = update_in_order(ppo, MODELS, state, experience, **options)
        return jax.tree.map(jnp.subtract, state.params, params), found

    return jax.jit(experience), jax.jit(update)


@pytest.mark.parametrize("config", [OF_TOKENS, OF_SEQUENCES], ids=["tokens", "sequences"])
def test_ppo_never_reads_a_row_without_a_score(config):
    experience, update = ppo_programs(config)
    rollout, scores = batch_of_responses()
    garbage = np.random.default_rng(1)
    # How long the responses are stays as it is: of lengths the metrics tell for all rows.
    spoilt = rollout.replace(
        response=jnp.where(SCORABLE[:, None], rollout.response, garbage.integers(4, V, (N, T))),
        logprobs=jnp.where(SCORABLE[:, None], rollout.logprobs, garbage.normal(size=(N, T)).astype(np.float32) * 50),
    )
    clean, found = experience(rollout, scores, SCORABLE)
    nonsense = jnp.where(SCORABLE, scores, jnp.array([0.0, 1e9, 0.0, 0.0, jnp.nan, 0.0]))
    dirty, found_dirty = experience(spoilt, nonsense, SCORABLE)
    assert_trees_equal(found_dirty, found)
    for name in ("logprobs", "values", "advantages", "returns"):
        np.testing.assert_array_equal(getattr(dirty, name)[SCORABLE], getattr(clean, name)[SCORABLE])
    (step, learned), (step_dirty, learned_dirty) = update(clean), update(dirty)
    assert_trees_equal((step_dirty, learned_dirty), (step, learned))
    assert min(np.abs(x).max() for x in jax.tree.leaves(step)) > 0
    # It is the mark that protects: scored, the same rows change nearly everything.
    _, read = experience(rollout, scores, np.ones(N, bool))
    changed = {name for name in found if not np.array_equal(read[name], found[name])}
    assert {"objective/kl", "objective/entropy", "objective/scores", "objective/scores_std"} <= changed


def test_ppo_learns_of_the_scored_rows_what_it_learns_of_them_alone():
    experience, update = ppo_programs(OF_TOKENS)
    rollout, scores = batch_of_responses()
    made, found = experience(rollout, scores, SCORABLE)
    alone, wanted = experience(jax.tree.map(lambda x: x[SCORABLE], rollout), scores[SCORABLE], np.ones(4, bool))
    for name in set(wanted) - {"val/num_eos_tokens"}:  # of all responses
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert float(found["val/num_eos_tokens"]) == 4.0 and float(wanted["val/num_eos_tokens"]) == 2.0
    np.testing.assert_allclose(made.advantages[SCORABLE], alone.advantages, rtol=1e-4, atol=1e-5)
    (step, learned), (step_alone, learned_alone) = update(made), update(alone)
    assert max(jax.tree.leaves(jax.tree.map(distance, step, step_alone))) < 1e-4
    for name in set(learned) - {"val/first_ratio_error", "policy/first_approxkl"}:
        np.testing.assert_allclose(learned[name], learned_alone[name], rtol=1e-4, atol=1e-6, err_msg=name)
