"""Numbers gone bad: nothing that is not finite reaches params or optimizer state, in any trainer, at any step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_jax.advantages import value_mask
from rlhf_jax.algorithms import nonfinite, ppo, response_logprobs, reward_model, rloo, sft
from rlhf_jax.algorithms.networks import Network
from rlhf_jax.algorithms.optimizer import apply_gradients, scale_by_adamw, user_optimizer
from rlhf_jax.config import PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf_jax.data import DemoBatch, PairBatch
from rlhf_jax.types import Experience, TrainState
from tests.helpers.algorithms import at_rates, models_of, update_in_order, with_params
from tests.helpers.arrays import same_bits
from tests.helpers.bag_model import BagModel
from tests.helpers.models_common import random_params

B = 8
WRONG = {"nan": jnp.nan, "+inf": jnp.inf, "-inf": -jnp.inf}


def all_finite(tree):
    return all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(tree)))


def state_of(params, optimizer, **fields):
    zero = jnp.int32(0)
    state = TrainState(params, optimizer.init(params), zero, zero, jnp.uint32(0), jnp.float32(0.05), jnp.uint32(0))
    return state.replace(**fields)


# --- one optimizer step

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
GRADS = {"w": jnp.ones((2, 3)), "b": jnp.full(3, 0.5)}
ADAM = scale_by_adamw(PPOConfig(weight_decay=0.1, max_grad_norm=1.0))
AT_RATE = at_rates(ADAM, jnp.float32(1e-2))


def attempt(grads=GRADS, loss=1.0, enabled=True, allowed=True, optimizer=None):
    """(params moved, {what was reported}) of one step; both trees are bit for bit the old ones or all new."""
    optimizer = at_rates(ADAM, jnp.float32(0.1)) if optimizer is None else optimizer
    opt_state = optimizer.init(PARAMS)

    def step(grads, loss, enabled, allowed):
        options = {"step": jnp.int32(0), "loss": {"loss": loss}, "steps_enabled": enabled, "allowed": allowed}
        return nonfinite.apply_if_finite(optimizer, PARAMS, opt_state, grads, **options)

    params, after, enabled, report = jax.jit(step)(grads, jnp.float32(loss), jnp.bool_(enabled), jnp.bool_(allowed))
    moved = not same_bits(params, PARAMS)
    assert all_finite((params, after)) and bool(enabled) == moved == bool(report["nonfinite/steps_applied"])
    assert same_bits(after, opt_state) or moved
    return moved, nonfinite.cause_names(int(report["nonfinite/causes"]))


def test_a_good_step_is_that_of_the_optimizer():
    optimizer, zero = at_rates(ADAM, jnp.float32(0.1)), jnp.int32(0)
    opt_state = ADAM.init(PARAMS)
    wanted = jax.jit(lambda *args: apply_gradients(optimizer, *args, zero))(PARAMS, opt_state, GRADS)

    def step(params, opt_state, grads):
        options = {"step": zero, "loss": jnp.float32(0), "steps_enabled": jnp.bool_(True)}
        return nonfinite.apply_if_finite(optimizer, params, opt_state, grads, **options)

    params, after, enabled, report = jax.jit(step)(PARAMS, opt_state, GRADS)
    assert same_bits((params, after), wanted) and bool(enabled)
    assert float(report["grad_norm"]) == pytest.approx(float(optax.tree.norm(GRADS)))
    assert attempt() == (True, [])


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_step_that_is_not_finite_is_not_taken(wrong):
    assert attempt(loss=wrong) == (False, ["loss"])
    one = {**GRADS, "b": GRADS["b"].at[1].set(wrong)}
    assert attempt(one) == (False, ["gradient"])
    assert attempt(one, loss=wrong) == (False, ["loss", "gradient"])


def test_a_gradient_that_overflows_when_squared_is_not_taken():
    """Each number is finite; the norm is not, and AdamW's second moment would not be."""
    huge = {**GRADS, "b": GRADS["b"].at[0].set(1e30)}
    assert attempt(huge) == (False, ["gradient"])
    unclipped = scale_by_adamw(PPOConfig())
    assert not all_finite(unclipped.update(huge, unclipped.init(PARAMS))[1])


def test_what_another_optimizer_makes_of_a_finite_gradient_is_looked_at():
    assert attempt(optimizer=user_optimizer(optax.sgd(1e39))) == (False, ["optimizer"])
    assert attempt(optimizer=user_optimizer(optax.trace(0.9))) == (True, [])


def test_nothing_is_taken_after_a_bad_step_or_where_it_is_not_allowed():
    assert attempt(enabled=False) == (False, [])
    assert attempt(enabled=False, loss=jnp.nan) == (False, [])  # the first bad step has said so
    assert attempt(allowed=False) == (False, [])
    assert attempt(allowed=False, loss=jnp.nan) == (False, ["loss"])


# --- an update

STOP, SKIP = SFTConfig(), SFTConfig(on_nonfinite="skip", max_nonfinite=2)


def settled(config, found, count):
    """(bad updates in a row, step, episodes) after an update of 8 episodes."""
    state = state_of(PARAMS, ADAM, step=jnp.int32(3), episodes=jnp.int32(24), nonfinite=jnp.int32(count))
    after = nonfinite.finish_update(
        state, jnp.int32(found), config, trained={"params": GRADS}, counts={"step": 1, "episodes": 8}
    )
    assert after.params is GRADS and after.step.dtype == after.nonfinite.dtype == jnp.int32
    return int(after.nonfinite), int(after.step), int(after.episodes)


def test_bad_updates_are_counted_and_the_last_stands_still():
    assert settled(STOP, 0, 0) == settled(SKIP, 0, 1) == settled(SKIP, 0, 0) == (0, 4, 32)
    assert settled(STOP, 1, 0) == (1, 3, 24)
    assert settled(SKIP, 1, 0) == (1, 4, 32) and settled(SKIP, 4, 1) == (2, 3, 24)
    for found in (0, 1):  # one that was started before the host had heard of the last
        assert settled(STOP, found, 1) == (1, 3, 24) and settled(SKIP, found, 2) == (2, 3, 24)


def test_an_update_may_learn_until_the_limit():
    def may(config, count, found=0):
        state = state_of(PARAMS, ADAM, nonfinite=jnp.int32(count))
        return bool(nonfinite.updates_enabled(state, jnp.int32(found), config))

    assert may(STOP, 0) and not may(STOP, 1) and may(SKIP, 1) and not may(SKIP, 2) and not may(SKIP, 0, 8)


def test_causes_have_names_and_only_floats_are_looked_at():
    arrays = {"score": jnp.array([1.0, jnp.nan]), "value": {"a": jnp.array([1.0]), "b": jnp.arange(3)}}
    arrays["loss"] = jnp.float32(-jnp.inf)
    assert nonfinite.cause_names(int(nonfinite.find_causes(**arrays))) == ["score", "loss"]
    assert nonfinite.cause_names(sum(1 << i for i in range(len(nonfinite.CAUSES)))) == list(nonfinite.CAUSES)
    assert bool(nonfinite.is_finite({"n": jnp.int32(3), "none": None}))


def test_target_kl_ends_the_means_with_the_first_step_that_is_not_taken():
    stats = {"nonfinite/causes": jnp.zeros(4, jnp.int32), "loss": jnp.array([1.0, 2.0, 6.0, jnp.nan])}
    stats["nonfinite/steps_applied"] = jnp.array([1, 1, 0, 0])
    found = nonfinite.mean_over_steps(stats, PPOConfig(target_kl=0.1))
    assert float(found["loss"]) == 3.0 and float(found["policy/steps_done"]) == 0.5
    plain = nonfinite.mean_over_steps(stats, PPOConfig())
    assert np.isnan(plain["loss"]) and "policy/steps_done" not in plain
    assert int(plain["nonfinite/steps_applied"]) == 2
    config = PPOConfig(target_kl=0.1)
    assert [bool(nonfinite.below_target_kl(jnp.float32(x), config)) for x in (0.0, 0.149, 0.151, jnp.nan)] == [
        True,
        True,
        False,
        True,
    ]
    assert nonfinite.below_target_kl(jnp.float32(9.0), PPOConfig()) is True


# --- every trainer: rows that hold one of these ids make the loss, or its gradient alone, go bad

V, C, T, G = 61, 6, 4, 2
LOSS = {10: jnp.nan, 11: jnp.inf, 12: -jnp.inf}
GRADIENT = {20: jnp.nan, 21: jnp.inf, 22: -jnp.inf, 23: 1e30}
SPOILERS = {**dict.fromkeys(LOSS, "loss"), **dict.fromkeys(GRADIENT, "gradient")}


@jax.custom_vjp
def through(x, factor):
    return x


through.defvjp(lambda x, factor: (x, factor), lambda factor, g: (g * factor, None))


def spoiled(x, tokens):
    """x as it is, unless a spoiler is among the tokens."""
    add, factor = jnp.float32(0.0), jnp.float32(1.0)
    for number, wrong in LOSS.items():
        add = jnp.where(jnp.any(tokens == number), wrong, add)
    for number, wrong in GRADIENT.items():
        factor = jnp.where(jnp.any(tokens == number), wrong, factor)
    return through(x + add, factor)


MODEL = BagModel(V)
MODELS = models_of(MODEL, MODEL, MODEL)
OPTIONS = {"optimizer": AT_RATE, "key": jax.random.key(0)}
COMMON = {"learning_rate": 1e-2, "on_nonfinite": "skip", "batch_size": B, "max_grad_norm": 1.0}
SFT = SFTConfig(**COMMON)
REWARD = RewardConfig(**COMMON)
PPO = PPOConfig(**COMMON, response_length=T, num_ppo_epochs=2, num_mini_batches=2)
RLOO = RLOOConfig(
    **COMMON, response_length=T, num_generations=G, num_mini_batches=4, sync_ref_model=True, ref_model_sync_steps=1
)


def tokens(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(30, V, shape), jnp.int32)


def floats(*shape, seed=0):
    return jnp.asarray(0.1 * np.random.default_rng(seed).normal(size=shape), jnp.float32)


LENGTHS = jnp.array([0, 1, 2, 3, 4, 4, 3, 2], jnp.int32)
INSIDE = jnp.arange(T)[None] < LENGTHS[:, None]


def sft_case(monkeypatch):
    real = sft.token_losses
    monkeypatch.setattr(sft, "token_losses", lambda *a, **k: spoiled(real(*a, **k), a[2]))
    batch = DemoBatch(tokens(B, C + T), jnp.full(B, C), C + LENGTHS)

    def update(state, batch):
        return sft.update(Network(MODEL), state, batch, config=SFT, **OPTIONS)

    return ("causal",), update, batch, lambda batch, row, n: batch.replace(tokens=batch.tokens.at[row, 0].set(n))


def reward_case(monkeypatch):
    real = reward_model.pair_scores

    def pair_scores(model, params, batch, **options):
        return [spoiled(x, batch.rejected_tokens) for x in real(model, params, batch, **options)]

    monkeypatch.setattr(reward_model, "pair_scores", pair_scores)
    full = jnp.full(B, C + T, jnp.int32)
    batch = PairBatch(tokens(B, C + T), full, tokens(B, C + T, seed=1), full, jnp.zeros(B))

    def update(state, batch):
        return reward_model.update(Network(MODEL), state, batch, config=REWARD, **OPTIONS)

    def spoil(batch, row, number):
        return batch.replace(rejected_tokens=batch.rejected_tokens.at[row, 0].set(number))

    return ("scalar",), update, batch, spoil


def ppo_case(monkeypatch):
    real = ppo.response_logprobs

    def response_logprobs(network, rows, *rest, **options):
        logprobs, entropy, values = real(network, rows, *rest, **options)
        return logprobs, entropy, spoiled(values, rows.prompt_tokens)

    monkeypatch.setattr(ppo, "response_logprobs", response_logprobs)
    arrays = {name: floats(B, 1, T, seed=i) for i, name in enumerate(("values", "advantages", "returns"))}
    batch = Experience(
        tokens(B, C),
        jnp.full(B, C),
        tokens(B, 1, T),
        mask=INSIDE[:, None],
        trained_mask=INSIDE[:, None],
        lengths=LENGTHS[:, None],
        logprobs=jnp.full((B, 1, T), -4.0, jnp.float32),
        value_mask=value_mask(LENGTHS, T)[:, None],
        **arrays,
    )
    rows = jnp.tile(jnp.arange(B), (2, 1))

    def update(state, batch):
        return update_in_order(ppo, MODELS, state, batch, config=PPO, orders=rows, **OPTIONS)[:2]

    def spoil(batch, row, number):
        return batch.replace(prompt_tokens=batch.prompt_tokens.at[row, 0].set(number))

    return None, update, batch, spoil


def rloo_case(monkeypatch):
    real = rloo.response_logprobs

    def response_logprobs(network, rows, *rest, **options):
        logprobs, *others = real(network, rows, *rest, **options)
        return spoiled(logprobs, rows.prompt_tokens), *others

    monkeypatch.setattr(rloo, "response_logprobs", response_logprobs)
    p = B // G
    lengths = jnp.maximum(LENGTHS, 1).reshape(p, G)
    inside = jnp.arange(T)[None, None] < lengths[..., None]
    batch = Experience(
        tokens(p, C),
        jnp.full(p, C),
        tokens(p, G, T),
        mask=inside,
        trained_mask=inside,
        lengths=lengths,
        logprobs=jnp.full((p, G, T), -4.0, jnp.float32),
        advantages=floats(p, G),
    )

    def update(state, batch):
        return update_in_order(rloo, MODELS, state, batch, config=RLOO, orders=jnp.arange(p)[None], **OPTIONS)[:2]

    def spoil(batch, row, number):
        return batch.replace(prompt_tokens=batch.prompt_tokens.at[row // G, 0].set(number))

    return None, update, batch, spoil


CASES = {"sft": sft_case, "reward": reward_case, "ppo": ppo_case, "rloo": rloo_case}


def start(heads, name="ppo"):
    """The state before an update; RLOO's has a reference that moves."""

    def made(heads, seed):
        return jax.tree.map(jnp.asarray, random_params(MODEL, heads, seed))

    if heads:
        return state_of({"model": made(heads, 0)}, ADAM)
    state = state_of({"policy": made(("causal",), 0), "value": made(("scalar",), 1)}, ADAM)
    return state.replace(ref_params=made(("causal",), 2)) if name == "rloo" else state


def learned(state):
    return state.params, state.opt_state, state.ref_params, state.kl_coef


@pytest.mark.parametrize("name", CASES)
def test_no_trainer_learns_from_what_is_not_finite(name, monkeypatch):
    heads, update, clean, spoil = CASES[name](monkeypatch)
    step, before = jax.jit(update), start(heads, name)
    steps = {"sft": 1, "reward": 1, "ppo": 4, "rloo": 4}[name]
    for number, cause in SPOILERS.items():
        if (name, number) == ("rloo", 12):
            continue  # a log-probability of -inf is a ratio of 0, whose loss and gradient are finite
        after, found = step(before, spoil(clean, 0, number))  # row 0 is in the first minibatch
        assert same_bits(learned(after), learned(before)), number
        assert nonfinite.cause_names(int(found["nonfinite/causes"]))[0] == cause, number
        assert int(found["nonfinite/steps_applied"]) == 0
        assert (int(after.nonfinite), int(after.step), int(after.episodes)) == (1, 1, B)
    moved, found = step(after, clean)
    assert not same_bits(moved.params, after.params) and all_finite((learned(moved), found["grad_norm"]))
    assert (int(found["nonfinite/causes"]), int(found["nonfinite/steps_applied"])) == (0, steps)
    assert (int(moved.nonfinite), int(moved.step), int(moved.episodes)) == (0, 2, 2 * B)
    if steps > 1:
        # The second minibatch is bad: the first step stays, and none comes after.
        part, found = step(moved, spoil(clean, B // 2 if name == "ppo" else G, 20))
        assert int(found["nonfinite/steps_applied"]) == 1 and int(part.nonfinite) == 1
        assert not same_bits(part.params, moved.params) and all_finite(learned(part))
        counts = {int(x) for x in jax.tree.leaves(part.opt_state) if x.dtype == jnp.int32}
        assert counts == {steps + 1}
    over, _ = step(moved.replace(nonfinite=jnp.int32(nonfinite.max_in_a_row(SFT))), clean)
    assert same_bits(over, moved.replace(nonfinite=jnp.int32(nonfinite.max_in_a_row(SFT))))
    assert step._cache_size() == 1


@pytest.mark.parametrize("name, quantities", [("ppo", 4), ("rloo", 2)])
def test_an_experience_that_is_not_finite_is_not_learned_from(name, quantities, monkeypatch):
    heads, update, clean, _ = CASES[name](monkeypatch)
    step, before = jax.jit(update), start(heads, name)
    cases = {"logprobs": "logprob", "advantages": "advantage", "values": "value", "returns": "return"}
    for field, cause in list(cases.items())[: quantities if name == "rloo" else 4]:
        for wrong in WRONG.values():
            array = getattr(clean, field)
            at = (-1,) * (array.ndim - 1) + (0,)  # the last row, which is in the last minibatch, at its first token
            after, found = step(before, clean.replace(**{field: array.at[at].set(wrong)}))
            assert same_bits(learned(after), learned(before)) and int(after.nonfinite) == 1, (field, wrong)
            assert nonfinite.cause_names(int(found["nonfinite/causes"])) == [cause]
    if name == "ppo":  # nobody reads what stands outside the response
        beyond = {field: getattr(clean, field).at[0, 0, -1].set(jnp.nan) for field in cases}
        after, found = step(before, clean.replace(**beyond))
        assert int(found["nonfinite/causes"]) == 0 and all_finite(learned(after))


def test_the_kl_coefficient_and_the_reference_are_not_poisoned():
    config = dataclasses.replace(PPO, kl_target=1.0, batch_size=512)
    state = start(None)
    assert float(ppo.adapt_kl_coef(state, {"objective/kl": jnp.float32(5.0)}, config).kl_coef) > 0.05
    for kl, count in ((jnp.nan, 0), (5.0, 1)):
        counted = state.replace(nonfinite=jnp.int32(count))
        same_one = ppo.adapt_kl_coef(counted, {"objective/kl": jnp.float32(kl)}, config)
        assert same_bits(same_one.kl_coef, state.kl_coef)


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_target_kl_ends_an_updates_steps(name, monkeypatch):
    config = dataclasses.replace({"ppo": PPO, "rloo": RLOO}[name], target_kl=1e-6)
    monkeypatch.setitem(globals(), name.upper(), config)
    heads, update, batch, _ = CASES[name](monkeypatch)
    step, before = jax.jit(update), start(heads, name)
    after, found = step(before, batch)  # of some other policy: not even the first step is taken
    assert same_bits(learned(after), learned(before)) and float(found["policy/steps_done"]) == 0.0
    assert (int(after.nonfinite), int(after.step)) == (0, 1)
    after, found = step(before, batch.replace(logprobs=own_logprobs(name, batch)))
    assert float(found["policy/steps_done"]) == 0.25 and int(found["nonfinite/steps_applied"]) == 1
    counts = {int(x) for x in jax.tree.leaves(after.opt_state) if x.dtype == jnp.int32}
    assert counts == {1} and int(after.nonfinite) == 0 and int(after.step) == 1
    assert step._cache_size() == 1


def own_logprobs(name, batch):
    """The behaviour policy is the one that begins, so that approxkl is 0 at the first step."""
    params = start(None).params
    if name == "ppo":
        policy, config = with_params(MODELS, params).policy, PPO
    else:
        policy, config = Network(MODEL, params["policy"]), RLOO
    return jax.jit(lambda e: response_logprobs.response_logprobs(policy, e, config)[0])(batch)
