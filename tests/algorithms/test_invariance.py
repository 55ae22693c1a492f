"""What PPO, RLOO, GRPO and the sampler must not depend on: order of a batch, length of a bucket, size of a micro-batch.

Lengths are any: empty responses, full ones, cut ones. Hypothesis draws the same cases each time: of all possible ones
some put a ratio on the edge of its clip, where rounding decides.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlhf_jax import models
from rlhf_jax.algorithms import grpo, microbatch, policy_gradient, ppo, reward_model, rloo
from rlhf_jax.algorithms.metrics import length_metrics
from rlhf_jax.algorithms.networks import Models, Network
from rlhf_jax.algorithms.response_logprobs import token_kl
from rlhf_jax.config import GRPOConfig, PPOConfig, RLOOConfig
from rlhf_jax.generate import Sampling, generate
from rlhf_jax.types import Experience, PromptBatch, Rollout, TrainState
from tests.helpers.algorithms import at_rates, models_of, replaced, scored, update_in_order, with_params
from tests.helpers.arrays import flat
from tests.helpers.bag_model import BagModel
from tests.helpers.models_common import random_params

V, C, T, B, G = 41, 4, 5, 8, 2
EOS = 3
MORE_C, MORE_T = 3, 2
MODEL = BagModel(V)
MODELS = models_of(MODEL, MODEL, MODEL)
DECODER = models.custom_shape("1x16x2", V, 64)
PARAMS = {"policy": MODEL.init(jax.random.key(0)), "value": MODEL.init(jax.random.key(1), ("scalar",))}
REF = MODEL.init(jax.random.key(2))
few = settings(max_examples=10, deadline=None, derandomize=True)


def moved(params):
    """As if something had been learned since the rollout, so that ratios are not 1 and some are clipped."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: x + (0.02 * rng.normal(size=x.shape)).astype(np.float32), params)


MOVED = moved(PARAMS)


@st.composite
def cases(draw, shortest=0, longest=T):
    """(rollout of B rows, scores [B]): lengths of each kind, ended or cut at T."""
    prompts = draw(st.lists(st.integers(1, C), min_size=B, max_size=B))
    lengths = np.array(draw(st.lists(st.integers(shortest, longest), min_size=B, max_size=B)))
    ended = np.array(draw(st.lists(st.booleans(), min_size=B, max_size=B))) & (lengths > 0) | (lengths < T)
    assume((lengths > 0).sum() > 2)
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    response = rng.integers(4, V, (B, T))
    response[ended, np.maximum(lengths - 1, 0)[ended]] = EOS
    rollout = Rollout(
        prompt_tokens=rng.integers(4, V, (B, C)).astype(np.int32),
        prompt_lengths=np.array(prompts, np.int32),
        response=np.where(np.arange(T)[None] < lengths[:, None], response, EOS).astype(np.int32),
        lengths=lengths.astype(np.int32),
        ended=ended & (lengths > 0),
        logprobs=(rng.normal(size=(B, T)) - 3).astype(np.float32),
        response_mask=np.ones((B, T), bool),
    )
    return rollout, rng.normal(size=B).astype(np.float32)


def in_longer_buckets(rollout):
    """The same with more padding before the prompts and more fill after the responses."""
    before, after = ((0, 0), (MORE_C, 0)), ((0, 0), (0, MORE_T))
    return rollout.replace(
        prompt_tokens=np.pad(rollout.prompt_tokens, before, constant_values=9),
        response=np.pad(rollout.response, after, constant_values=EOS),
        logprobs=np.pad(rollout.logprobs, after, constant_values=-5),
        response_mask=np.pad(rollout.response_mask, after, constant_values=True),
    )


def of_one_prompt(rollout):
    """Rows of a group answer one prompt."""
    first = np.arange(B) // G * G
    return rollout.replace(prompt_tokens=rollout.prompt_tokens[first], prompt_lengths=rollout.prompt_lengths[first])


def take(tree, rows):
    return jax.tree.map(lambda x: x[rows], tree)


def near(a, b, tolerance, name=""):
    a, b = flat(a), flat(b)
    gap = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-3)
    assert gap <= tolerance, (name, gap)


def same_metrics(found, wanted, but=()):
    for name in set(wanted) - set(but):
        a, b = np.asarray(found[name], np.float64), np.asarray(wanted[name], np.float64)
        assert (np.abs(a - b) <= 1e-4 * np.maximum(np.abs(b), 0.01)).all(), (name, a, b)


KEEP_GRADIENTS = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, total, params: (grads, jax.tree.map(lambda t, g: 2 * t + g, total, grads)),
)
"""Plain gradient descent whose state holds the gradients of all steps."""
AT_RATE = at_rates(KEEP_GRADIENTS, jnp.float32(0.03))


# Programs that run for a millisecond: what takes time is to compile them.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def fresh_state(params):
    zero = jnp.int32(0)
    return TrainState(params, KEEP_GRADIENTS.init(params), zero, zero, jnp.uint32(0), jnp.float32(0), jnp.uint32(0))


def in_parts(config, **options):
    """The same config with small chunks and micro-batches."""
    return dataclasses.replace(config, rollout_batch_size=4, **options)


# ------------------------------------------------------------------------------------------------------------------ PPO

OF_TOKENS = PPOConfig(
    batch_size=B, num_ppo_epochs=1, num_mini_batches=2, kl_coef=0.3, whiten_rewards=True, missing_eos_penalty=1.0
)
OF_SEQUENCES = PPOConfig(
    batch_size=B,
    num_ppo_epochs=1,
    score_position="eos",
    whiten_ddof=0,
    gamma=0.97,
    kl_estimator="k3",
    loss_aggregation="seq_mean",
    value_model="shared_backbone",
)
WITH_OPTIONS = PPOConfig(
    batch_size=B,
    num_ppo_epochs=1,
    num_mini_batches=2,
    cliprange=0.1,
    epsilon_high=0.2,
    dual_clip=1.3,
    entropy_coef=0.1,
    kl_loss_coef=0.2,
    adaptive_lam_alpha=0.5,
    value_lam=1.0,
)
every_ppo = pytest.mark.parametrize(
    "config", [OF_TOKENS, OF_SEQUENCES, WITH_OPTIONS], ids=["token_mean", "seq_mean", "options"]
)


@functools.cache
def ppo_program(config):
    """rollout, scores, order of rows -> (experience, its metrics, gradients of an update, its metrics)."""
    models, params, moved = MODELS, PARAMS, MOVED
    if config.value_model == "shared_backbone":
        models = models_of(MODEL, MODEL)
        params, moved = ({"policy": {**p["policy"], "score": p["value"]["score"]}} for p in (PARAMS, MOVED))

    @quick_jit
    def run(rollout, scores, order):
        batch, kl_coef = scored(rollout, scores, eos_id=EOS), jnp.float32(config.kl_coef)
        made, found = ppo.make_experience(with_params(models, params, REF), batch, config=config, kl_coef=kl_coef)
        options = {"config": config, "optimizer": AT_RATE, "orders": order[None]}
        state, learned, _ = update_in_order(ppo, models, fresh_state(moved), made, **options)
        return made, found, state.opt_state, learned

    return lambda *given: jax.device_get(run(*given))


@every_ppo
def test_ppo_follows_the_rows_whatever_their_order(config):
    run = ppo_program(config)

    @few
    @given(cases(), st.permutations(range(B)))
    def check(case, order):
        order, rows = np.array(order), np.random.default_rng(0).permutation(B)
        made, found, gradient, learned = run(*case, rows)
        # The same minibatches: row order[i] is row i there.
        other, others, other_gradient, also = run(*take(case, order), np.argsort(order)[rows])
        near(other, take(made, order), 2e-5)
        near(other_gradient, gradient, 2e-5)
        same_metrics(others, found)
        same_metrics(also, learned)
        assert np.linalg.norm(flat(gradient)) > 1e-2

    check()


@every_ppo
def test_ppo_is_the_same_in_longer_buckets_and_smaller_micro_batches(config):
    """After eos a response that fills T has no column left for its score, so that there it must be shorter."""
    run, cut = ppo_program(config), ppo_program(in_parts(config, micro_batch_size=2))
    longest = T if config.score_position == "eos" else T - 1

    @few
    @given(cases(longest=longest))
    def check(case):
        rollout, scores = case
        rows = np.random.default_rng(0).permutation(B)
        made, found, gradient, learned = run(rollout, scores, rows)
        wide, others, other_gradient, also = cut(in_longer_buckets(rollout), scores, rows)
        inside = np.arange(T)[None] < rollout.lengths[:, None]
        names = ("logprobs", "values", "advantages", "returns")
        for name in (*names, *(["ref_logprobs"] if config.kl_loss_coef else [])):
            one, other = getattr(made, name)[:, 0], getattr(wide, name)[:, 0]
            near(np.where(inside, other[:, :T], 0), np.where(inside, one, 0), 2e-5, name)
        assert not wide.advantages[:, :, T:].any()
        near(other_gradient, gradient, 2e-5)
        same_metrics(others, found)
        same_metrics(also, learned)

    check()


# ----------------------------------------------------------------------------------------------------------------- RLOO

RLOO_SEQUENCES = RLOOConfig(
    batch_size=B, num_generations=G, num_mini_batches=2, beta=0.3, missing_eos_penalty=1.0, normalize_advantages=True
)
RLOO_TOKENS = RLOOConfig(
    batch_size=B,
    num_generations=G,
    token_level_kl=True,
    kl_estimator="k3",
    epsilon=0.1,
    epsilon_high=0.2,
    mask_truncated_completions=True,
)
both_rloo = pytest.mark.parametrize("config", [RLOO_SEQUENCES, RLOO_TOKENS], ids=["sequences", "tokens"])


@functools.cache
def group_program(algorithm, config):
    """rollout, scores, order of groups -> (experience, its metrics, gradients of an update, its metrics)."""
    policy, moved = {"policy": PARAMS["policy"]}, {"policy": MOVED["policy"]}

    @quick_jit
    def run(rollout, scores, order):
        batch = scored(rollout, scores, eos_id=EOS, group_size=G)
        made, found = algorithm.make_experience(with_params(MODELS, policy, REF), batch, config=config)
        options = {"config": config, "optimizer": AT_RATE, "orders": order[None]}
        state, learned, _ = update_in_order(algorithm, MODELS, fresh_state(moved), made, **options)
        return made, found, state.opt_state, learned

    return lambda *given: jax.device_get(run(*given))


@both_rloo
def test_rloo_follows_groups_and_their_rows_whatever_their_order(config):
    run = group_program(rloo, config)

    @few
    @given(cases(), st.permutations(range(B // G)), st.permutations(range(G)))
    def check(case, groups, within):
        rollout, scores = of_one_prompt(case[0]), case[1]
        groups, order = np.array(groups), np.random.default_rng(0).permutation(B // G)
        rows = (groups[:, None] * G + np.array(within)[None]).reshape(-1)
        made, found, gradient, learned = run(rollout, scores, order)
        other, others, other_gradient, also = run(take(rollout, rows), scores[rows], np.argsort(groups)[order])
        for name in ("response", "lengths", "logprobs", "advantages"):
            one, moved = (getattr(x, name).reshape(B, -1) for x in (made, other))
            near(moved, one[rows], 2e-5, name)
        near(other_gradient, gradient, 2e-5)
        same_metrics(others, found)
        same_metrics(also, learned)

    check()


@both_rloo
def test_rloo_is_the_same_in_longer_buckets_and_smaller_micro_batches(config):
    run, cut = group_program(rloo, config), group_program(rloo, in_parts(config, micro_batch_size=G))

    @few
    @given(cases())
    def check(case):
        rollout, scores = of_one_prompt(case[0]), case[1]
        order = np.random.default_rng(0).permutation(B // G)
        made, found, gradient, learned = run(rollout, scores, order)
        wide, others, other_gradient, also = cut(in_longer_buckets(rollout), scores, order)
        near(wide.logprobs[..., :T], made.logprobs, 2e-5)
        near(wide.advantages[..., : made.advantages.shape[-1]], made.advantages, 2e-5)
        near(other_gradient, gradient, 2e-5)
        same_metrics(others, found)
        same_metrics(also, learned)

    check()


# ----------------------------------------------------------------------------------------------------------------- GRPO

GRPO_TOKENS = GRPOConfig(
    batch_size=B,
    num_generations=G,
    num_mini_batches=2,
    beta=0.3,
    entropy_coef=0.1,
    top_entropy_quantile=0.6,
    importance_sampling_correction=True,
    importance_sampling_mode="token_truncate",
    mask_truncated_completions=True,
)
GRPO_SEQUENCES = GRPOConfig(
    batch_size=B,
    num_generations=G,
    loss_type="grpo",
    importance_sampling_level="sequence",
    kl_in_reward=True,
    beta=0.3,
    gamma=0.9,
    whiten_advantages=True,
    off_policy_mask_threshold=0.2,
)


@pytest.mark.parametrize("config", [GRPO_TOKENS, GRPO_SEQUENCES], ids=["tokens", "sequences"])
def test_grpo_is_the_same_in_longer_buckets_smaller_micro_batches_and_without_shared_prompts(config):
    run = group_program(grpo, config)
    cut = group_program(grpo, in_parts(config, micro_batch_size=G, shared_prompts=False))

    @few
    @given(cases(shortest=1))
    def check(case):
        rollout, scores = of_one_prompt(case[0]), case[1]
        order = np.random.default_rng(0).permutation(B // G)
        made, found, gradient, learned = run(rollout, scores, order)
        wide, others, other_gradient, also = cut(in_longer_buckets(rollout), scores, order)
        near(wide.logprobs[..., :T], made.logprobs, 2e-5)
        near(wide.advantages[..., : made.advantages.shape[-1]], made.advantages, 2e-5)
        near(other_gradient, gradient, 2e-5)
        same_metrics(others, found)
        same_metrics(also, learned)

    check()


@pytest.mark.runs
def test_under_dropout_a_token_is_selected_by_the_entropy_that_its_loss_has():
    """The forward pass before a step drops what that step drops. With token_mean_micro there is only the step's own."""
    fields = {"hidden_dropout": 0.3, "attention_dropout": 0.3}
    dropping = models_of(dataclasses.replace(DECODER, config=dataclasses.replace(DECODER.config, **fields)))
    config = GRPOConfig(batch_size=B, num_generations=G, num_iterations=2, entropy_coef=0.1, top_entropy_quantile=0.5)
    rng = np.random.default_rng(4)
    prompts = np.array([3, 1, 4, 2])
    experience = Experience(
        prompt_tokens=rng.integers(4, V, (B // G, C)).astype(np.int32),
        prompt_lengths=prompts.astype(np.int32),
        response=rng.integers(4, V, (B // G, G, T)).astype(np.int32),
        mask=np.ones((B // G, G, T), bool),
        trained_mask=np.ones((B // G, G, T), bool),
        lengths=np.full((B // G, G), T, np.int32),
        logprobs=(rng.normal(size=(B // G, G, T)) - 3).astype(np.float32),
        advantages=rng.normal(size=(B // G, G)).astype(np.float32),
        sampler_logprobs=np.zeros((B // G, G, T), np.float32),
    )

    def learned(order, **options):
        options = {"config": dataclasses.replace(config, **options), "optimizer": AT_RATE}

        def run(state, experience, orders):
            return update_in_order(grpo, dropping, state, experience, orders=orders, **options)

        state, metrics, _ = quick_jit(run)(fresh_state({"policy": random_params(DECODER)}), experience, order)
        return state.opt_state, metrics["loss"]

    orders = np.array([[2, 0, 3, 1], [1, 0, 2, 3]])
    gradient, loss = learned(orders)
    # A key goes to a row by the length of its prompt, unless rows stay in their order.
    alone, other = learned(np.tile(np.argsort(prompts), (2, 1)), loss_aggregation="token_mean_micro")
    near(alone, gradient, 2e-5)
    near(other, loss, 2e-5)
    for size in ({"micro_batch_size": G}, {"micro_batch_tokens": BY_ROWS}):
        cut, other = learned(orders, **size)
        near(cut, gradient, 2e-5)
        near(other, loss, 2e-5)


# ---------------------------------------------------------------------------------------------- micro_batch_tokens

BY_ROWS, BY_GROUPS = 2 * (C + T), C + G * T  # tokens of a micro-batch


@pytest.fixture
def two_widths(monkeypatch):
    """Responses of 3 or 5 columns: half as much to compile."""
    monkeypatch.setattr(microbatch, "RESPONSE_WIDTHS", (2, 1))


@pytest.mark.parametrize("config", [OF_TOKENS, OF_SEQUENCES], ids=["token_mean", "seq_mean"])
def test_ppo_is_the_same_by_tokens(config, two_widths):
    tokens = {"micro_batch_tokens": BY_ROWS, "gradient_checkpointing": config is OF_SEQUENCES}
    run, cut = ppo_program(config), ppo_program(dataclasses.replace(config, **tokens))

    @few
    @given(cases(shortest=-1))  # a row of length -1 is absent
    def check(case):
        rows = np.random.default_rng(0).permutation(B)
        made, found, gradient, learned = run(*case, rows)
        also_made, others, other_gradient, also = cut(*case, rows)
        for name in ("logprobs", "values", "advantages", "returns"):
            near(getattr(also_made, name), getattr(made, name), 1e-5, name)
        near(other_gradient, gradient, 5e-6)
        same_metrics(others, found)
        same_metrics(also, learned)

    check()


@pytest.mark.parametrize(
    ("algorithm", "config", "together"),
    [(rloo, RLOO_SEQUENCES, True), (rloo, RLOO_TOKENS, False), (grpo, GRPO_TOKENS, True)],
    ids=["rloo", "rloo, each row alone", "grpo"],
)
def test_groups_are_the_same_by_tokens(algorithm, config, together, two_widths):
    tokens = {"micro_batch_tokens": BY_GROUPS if together else BY_ROWS, "shared_prompts": together}
    run, cut = group_program(algorithm, config), group_program(algorithm, dataclasses.replace(config, **tokens))

    @few
    @given(cases(shortest=1 if algorithm is grpo else 0), st.integers(0, B // G))
    def check(case, absent):
        rollout, scores = of_one_prompt(case[0]), case[1]
        rows = np.arange(B) < B - absent * G  # the last prompts pad the batch
        assume((rollout.lengths[rows] > 0).sum() > 2)
        rollout = rollout.replace(lengths=np.where(rows, rollout.lengths, -1))
        order = np.random.default_rng(0).permutation(B // G)
        made, found, gradient, learned = run(rollout, scores, order)
        also_made, others, other_gradient, also = cut(rollout, scores, order)
        near(also_made.logprobs, made.logprobs, 1e-5)
        near(also_made.advantages, made.advantages, 1e-5)
        near(other_gradient, gradient, 5e-6)
        same_metrics(others, found)
        same_metrics(also, learned)

    check()


# --------------------------------------------------------------------------------------------- scores, KL, and sampling


@quick_jit
def scores_and_kl(rollout):
    scores = reward_model.score_rollout(DECODER, random_params(DECODER, ("scalar",)), rollout, dtype=jnp.float32)
    policy, reference = (Network(DECODER, random_params(DECODER, seed=seed)) for seed in range(2))
    return scores, token_kl(Models(policy, reference), rollout, OF_TOKENS).sum(axis=1)


@few
@given(cases(), st.permutations(range(B)))
def test_a_score_and_a_kl_belong_to_their_row_in_any_order_and_bucket(case, order):
    rollout, order = case[0], np.array(order)
    wanted = jax.device_get(scores_and_kl(rollout))
    near(scores_and_kl(in_longer_buckets(rollout)), wanted, 2e-5)
    near(scores_and_kl(take(rollout, order)), take(wanted, order), 2e-5)


@functools.cache
def sampler(tokens):
    sampling = Sampling(tokens, 0.9, top_p=0.95, repetition_penalty=1.2, stop_ids=(EOS,), fill_id=EOS)

    @quick_jit
    def run(prompts, seed, rows):
        return generate(DECODER, random_params(DECODER), prompts, jax.random.key(seed), sampling, rows=rows)

    return lambda *given: jax.device_get(run(*given))


@few
@given(st.lists(st.integers(1, C), min_size=B, max_size=B), st.permutations(range(B)), st.integers(0, 2**31))
def test_samples_depend_neither_on_their_order_nor_on_the_buckets_of_prompt_and_response(lengths, order, seed):
    tokens = np.random.default_rng(seed).integers(4, V, (B, C)).astype(np.int32)
    prompts = PromptBatch(tokens, np.array(lengths, np.int32), np.arange(B))
    rows, order = np.arange(B), np.array(order)
    wanted = sampler(T)(prompts, seed, rows)
    shuffled = sampler(T)(take(prompts, order), seed, order)
    wide = prompts.replace(tokens=np.pad(tokens, ((0, 0), (MORE_C, 0)), constant_values=9))
    longer = sampler(T + MORE_T)(wide, seed, rows)
    for name in ("response", "lengths", "ended"):
        np.testing.assert_array_equal(getattr(shuffled, name), getattr(wanted, name)[order], name)
    near(shuffled.logprobs, wanted.logprobs[order], 2e-5)
    np.testing.assert_array_equal(longer.response[:, :T], wanted.response)
    np.testing.assert_array_equal(np.minimum(longer.lengths, T), wanted.lengths)
    np.testing.assert_array_equal(longer.ended & (longer.lengths <= T), wanted.ended)
    near(longer.logprobs[:, :T], wanted.logprobs, 2e-5)


# -------------------------------------------------------------------------------------- tokens that came from elsewhere


def table_of(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=V) - 2, jnp.float32) for name in ("logp", "entropy", "value")}


TABLES = {name: table_of(seed) for seed, name in enumerate(("policy", "value", "reference"))}
"""Log-probabilities, entropies and values that depend on a token alone, so that it matters to nothing what is read."""


def of_tables(network, rows, config, *, critic=None, **_):
    """In place of `response_logprobs`."""
    values = None if critic is None else critic.params["value"][rows.response]
    return network.params["logp"][rows.response], network.params["entropy"][rows.response], values


@functools.cache
def table_program(algorithm, config):
    """(rollout, scores, rewards of tokens) -> (experience, its metrics, gradients of an update, its metrics)."""
    trained = {"policy": TABLES["policy"], **({"value": TABLES["value"]} if algorithm is ppo else {})}
    moved = jax.tree.map(lambda x: x + jnp.sin(jnp.arange(V)) / 10, trained)
    group_size = 1 if algorithm is ppo else G
    more = {"kl_coef": jnp.float32(0.3)} if algorithm is ppo else {}

    @quick_jit
    def run(rollout, scores, dense):
        batch = scored(rollout, scores, None, dense, eos_id=EOS, group_size=group_size)
        models = with_params(MODELS, trained, TABLES["reference"])
        made, found = algorithm.make_experience(models, batch, config=config, **more)
        order = jnp.arange(B // group_size)[None]
        options = {"config": config, "optimizer": AT_RATE, "orders": order}
        state, learned, _ = update_in_order(algorithm, MODELS, fresh_state(moved), made, **options)
        return made, {**found, **length_metrics(rollout)}, state.opt_state, learned

    def call(*given):
        with contextlib.ExitStack() as stack:
            for module in (policy_gradient, ppo, rloo, grpo):
                stack.enter_context(replaced(module, "response_logprobs", of_tables))
            return jax.device_get(run(*given))

    return call


def with_holes(rollout, dense, rng):
    """(rollout with tokens from elsewhere, eos among them, rewards of tokens at the sampled ones, their columns)."""
    wide = 2 * T
    response, logprobs = np.full((B, wide), EOS, np.int32), rng.normal(size=(B, wide)).astype(np.float32)
    rewards, sampled = rng.normal(size=(B, wide)).astype(np.float32), np.zeros((B, wide), bool)
    lengths = rollout.lengths.copy()
    for row, length in enumerate(rollout.lengths):
        if length < 1:
            continue
        places = np.sort(rng.choice(wide - 2, length, replace=False))  # and room after the end
        lengths[row] = places[-1] + 1
        response[row, : lengths[row]] = rng.choice([EOS, *range(4, V)], lengths[row])
        for wholes, parts in ((response, rollout.response), (logprobs, rollout.logprobs), (rewards, dense)):
            wholes[row, places] = parts[row, :length]
        sampled[row, places] = True
    changes = {"response": response, "logprobs": logprobs, "lengths": lengths, "sampled": sampled}
    return rollout.replace(**changes, response_mask=np.ones((B, wide), bool)), rewards, sampled


HOLES = {
    "ppo of tokens": (ppo, OF_TOKENS),
    "ppo of sequences": (ppo, dataclasses.replace(OF_SEQUENCES, value_model="separate")),
    "ppo with options": (ppo, WITH_OPTIONS),
    "rloo of sequences": (rloo, RLOO_SEQUENCES),
    "rloo of tokens": (rloo, RLOO_TOKENS),
    "grpo of tokens": (grpo, dataclasses.replace(GRPO_TOKENS, top_entropy_quantile=1.0)),
    "grpo of sequences": (grpo, GRPO_SEQUENCES),
}


@pytest.mark.parametrize("name", HOLES)
def test_tokens_from_elsewhere_change_nothing_but_what_is_read(name):
    """A response with holes has the advantages, losses, gradients and metrics of its sampled tokens alone."""
    algorithm, config = HOLES[name]
    run = table_program(algorithm, config)

    @few
    @given(cases(longest=T - 1), st.integers(0, 2**31))
    def check(case, seed):
        rng = np.random.default_rng(seed)
        rollout, scores = case
        rollout = rollout if algorithm is ppo else of_one_prompt(rollout)
        dense = rng.normal(size=(B, T)).astype(np.float32)
        made, found, gradient, learned = run(rollout, scores, dense)
        holey, rewards, sampled = with_holes(rollout, dense, rng)
        other, others, other_gradient, also = run(holey, scores, rewards)
        inside = np.arange(T)[None] < rollout.lengths[:, None]
        for field in ("logprobs", "advantages", "values", "returns", "ref_logprobs", "sampler_logprobs"):
            one, two = getattr(made, field), getattr(other, field)
            if one is not None and one.ndim == 3:
                near(two.reshape(B, -1)[sampled], one.reshape(B, -1)[inside], 1e-5, field)
                unread = ~sampled & (np.arange(2 * T)[None] < holey.lengths[:, None])
                assert not two.reshape(B, -1)[unread].any(), field
            elif one is not None:
                near(two, one, 1e-5, field)
        np.testing.assert_array_equal(other.trained_mask.reshape(B, -1).sum(1), made.trained_mask.reshape(B, -1).sum(1))
        near(other_gradient, gradient, 1e-5)
        same_metrics(others, found)
        same_metrics(also, learned)

    check()
