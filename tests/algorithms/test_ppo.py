"""The PPO step: what it learns, what it must not depend on, and that it compiles once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_jax import advantages as adv
from rlhf_jax.algorithms import policy_gradient as pg
from rlhf_jax.algorithms import ppo, response_logprobs
from rlhf_jax.algorithms.optimizer import make_optimizer, scale_by_adamw
from rlhf_jax.config import PPOConfig
from rlhf_jax.types import Rollout, TrainState
from tests.helpers.algorithms import at_rates, models_of, scored, with_params
from tests.helpers.bag_model import BagModel

V, C, T, B = 61, 9, 7, 8
EOS = 3
MODEL = BagModel(V)
MODELS = models_of(MODEL, MODEL, MODEL)
CONFIG = PPOConfig(
    batch_size=B, num_mini_batches=2, num_ppo_epochs=2, response_length=T, adam_epsilon=1e-5, missing_eos_penalty=1.0
)


def make_params(seed=0):
    return {
        "policy": MODEL.init(jax.random.key(seed), heads=("causal",)),
        "value": MODEL.init(jax.random.key(seed + 1), heads=("scalar",)),
    }


def make_state(params, config=CONFIG, optimizer=None):
    optimizer = optimizer or scale_by_adamw(config)
    return optimizer, TrainState(
        params=params,
        opt_state=optimizer.init(params),
        step=jnp.int32(0),
        episodes=jnp.int32(0),
        seed=jnp.uint32(0),
        kl_coef=jnp.float32(config.kl_coef),
        tokens=jnp.uint32(0),
    )


@pytest.fixture(scope="module")
def world():
    rng = np.random.default_rng(0)
    # Lengths of every kind: none, eos first, eos last, no eos.
    lengths, ended = np.array([0, 1, T, T, 3, 4, 5, 6]), np.array([0, 1, 1, 0, 1, 1, 1, 1], bool)
    response = np.where(np.arange(T)[None] < lengths[:, None], rng.integers(4, V, (B, T)), EOS)
    response[ended, lengths[ended] - 1] = EOS
    rollout = Rollout(
        prompt_tokens=jnp.asarray(rng.integers(4, V, (B, C)), jnp.int32),
        prompt_lengths=jnp.array([9, 1, 3, 5, 9, 2, 7, 4], jnp.int32),
        response=jnp.asarray(response, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        ended=jnp.asarray(ended),
        logprobs=jnp.asarray(rng.normal(size=(B, T)) - 3, jnp.float32),
        response_mask=jnp.ones((B, T), bool),
    )
    scores = jnp.asarray(rng.normal(size=B), jnp.float32)
    return make_params(), make_params(7)["policy"], rollout, scores


def experience_of(world, config=CONFIG, token_rewards=None):
    params, ref, rollout, scores = world

    @jax.jit
    def run(params, ref, rollout, scores, kl_coef):
        batch = scored(rollout, scores, None, token_rewards, eos_id=EOS)
        return ppo.make_experience(with_params(MODELS, params, ref), batch, config=config, kl_coef=kl_coef)

    return run(params, ref, rollout, scores, jnp.float32(config.kl_coef))


def run_update(params, experience, config=CONFIG, rate=1e-3, seed=0, optimizer=None):
    optimizer, state = make_state(params, config, optimizer)
    run = update_program(MODELS, optimizer, rate, config)
    return run(state, experience, jax.random.key(seed))


def update_program(models, optimizer, rate, config, **options):
    optimizer = at_rates(optimizer, jnp.float32(rate))

    def run(state, experience, key):
        return ppo.update(models, state, experience, config=config, optimizer=optimizer, key=key)

    return jax.jit(run, **options)


def distance(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    pairs = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in pairs]
    return max(float(jnp.linalg.norm(x - y) / (jnp.linalg.norm(y) + 1e-9)) for x, y in pairs)


def test_rewards_are_minus_kl_plus_the_score_after_eos(world):
    config = dataclasses.replace(CONFIG, lam=1.0, missing_eos_penalty=None)
    experience, metrics = experience_of(world, config)
    _, _, rollout, scores = world
    # With gamma = lam = 1 a return is the sum of the rewards from there on: its first column holds them all.
    total = np.asarray(experience.returns[:, 0, 0])
    expected = np.asarray(scores)
    short = np.asarray(rollout.lengths) > 0
    kl = float(metrics["objective/kl"])
    np.testing.assert_allclose(total.mean(), expected.mean() - config.kl_coef * kl, rtol=1e-5)
    np.testing.assert_allclose(metrics["objective/rlhf_reward"], total.mean(), rtol=1e-5)
    assert short.sum() == B - 1


@pytest.mark.parametrize("mode, expected", [("subtract", [-1.0, 0.0]), ("replace", [-1.0, 0.0])])
def test_a_response_without_eos_is_penalised(world, mode, expected):
    _, _, rollout, scores = world
    config = dataclasses.replace(CONFIG, eos_penalty_mode=mode)
    out = np.asarray(pg.penalize_missing_eos(scores, rollout, (EOS,), config))
    missing = np.array([True, False, False, True, False, False, False, False])
    if mode == "subtract":
        np.testing.assert_allclose(out - np.asarray(scores), -1.0 * missing, atol=1e-6)
    else:
        np.testing.assert_allclose(out, np.where(missing, -1.0, scores))


def test_any_of_several_stop_ids_counts_as_eos(world):
    _, _, rollout, scores = world
    row, inside = np.asarray(rollout.response), np.arange(T)[None] < np.asarray(rollout.lengths)[:, None]
    other = next(int(i) for i in np.unique(row[inside]) if i != EOS)
    out = np.asarray(pg.penalize_missing_eos(scores, rollout, (EOS, other), CONFIG))
    missing = ~(np.isin(row, (EOS, other)) & inside).any(axis=1)
    alone = np.asarray(pg.penalize_missing_eos(scores, rollout, (EOS,), CONFIG))
    np.testing.assert_allclose(out - np.asarray(scores), -1.0 * missing, atol=1e-6)
    assert (out >= alone).all() and (out > alone).any()


def test_filler_eos_after_the_end_is_not_an_eos(world):
    _, _, rollout, scores = world
    # Row 0 has length 0 and is filled with eos: it must be punished.
    out = pg.penalize_missing_eos(scores, rollout, (EOS,), CONFIG)
    np.testing.assert_allclose(out[0], scores[0] - 1.0, rtol=1e-6)


def test_prompts_cut_to_their_length_never_change_the_result(world, monkeypatch):
    """Micro-batches of similar length in three widths, against whole ones; and judged as they are learned from."""
    plain, cut = (
        dataclasses.replace(CONFIG, micro_batch_size=2, length_buckets=buckets, num_mini_batches=1)
        for buckets in ((C,), (3, 5, C))
    )
    widths, evaluate = set(), response_logprobs.response_logprobs

    def seen(network, rows, *rest, **options):
        widths.add(rows.prompt_tokens.shape[1] + T)
        return evaluate(network, rows, *rest, **options)

    for module in (pg, ppo):
        monkeypatch.setattr(module, "response_logprobs", seen)
    wanted, judged = experience_of(world, plain)
    assert widths == {C + T}
    experience, found = experience_of(world, cut)
    assert widths == {3 + T, 5 + T, C + T}
    assert distance(experience, wanted) < 1e-5
    for name, value in found.items():
        np.testing.assert_allclose(value, judged[name], rtol=1e-4, atol=1e-6, err_msg=name)
    widths.clear()
    ours, metrics = run_update(world[0], wanted, cut, 0.1, 0, optax.identity())
    assert widths == {3 + T, 5 + T, C + T}
    theirs, others = run_update(world[0], wanted, plain, 0.1, 0, optax.identity())
    assert distance(ours.params, theirs.params) < 1e-5
    for name, value in metrics.items():
        if name not in ("val/first_ratio_error", "policy/first_approxkl"):
            assert abs(float(value) - float(others[name])) <= 1e-4 * max(abs(float(others[name])), 0.01), name


@pytest.mark.parametrize(
    "aggregation, policy, value",
    [
        ("token_mean", [1 / 6, 1 / 6], [1 / 10, 1 / 10]),
        ("token_mean_micro", [1 / 4, 1 / 4], [1 / 8, 1 / 8]),
        ("seq_mean", [1 / 8, 1 / 4], [1 / 12, 1 / 4]),
    ],
)
def test_what_a_token_weighs_by_hand(aggregation, policy, value):
    """The first of two micro-batches of two rows, lengths 2, 0 and 3, 1 in 4 columns; values have one column more."""
    config = dataclasses.replace(CONFIG, loss_aggregation=aggregation)
    counts = pg.Counts(*map(jnp.float32, (4, 6, 6, 10, 6)), size=4, micro_batches=2)
    lengths = jnp.array([2, 0])
    masks = adv.response_mask(lengths, 4)[:, None], adv.value_mask(lengths, 4)[:, None]
    for mask, total, wanted in zip(masks, (counts.tokens, counts.values), (policy, value)):
        weights = ppo.token_weights(mask, total, counts, config)
        np.testing.assert_allclose(jnp.broadcast_to(weights, (2, 1, 1)).reshape(2), wanted, rtol=1e-6)


def test_a_mean_of_micro_batch_means_is_the_mean_of_their_losses_alone(world):
    """token_mean_micro is what TRL computes: each micro-batch by itself, then the mean."""
    config = dataclasses.replace(CONFIG, loss_aggregation="token_mean_micro", num_mini_batches=1, micro_batch_size=2)
    experience, _ = experience_of(world, config)
    rest = {"objective": ppo.OBJECTIVE, "batch_tokens": jnp.float32(1)}
    together, tally, _ = pg.minibatch_gradients(MODELS, world[0], experience, config=config, **rest)
    alone = dataclasses.replace(config, loss_aggregation="token_mean")
    parts = [jax.tree.map(lambda x, i=i: x[i : i + 2], experience) for i in range(0, B, 2)]
    each = [pg.minibatch_gradients(MODELS, world[0], part, config=alone, **rest) for part in parts]
    mean = jax.tree.map(lambda *x: sum(x) / len(x), *[grads for grads, _, _ in each])
    assert distance(together, mean) < 1e-5
    losses = [float(tally.sums["loss/policy_avg"]) for _, tally, _ in each]
    np.testing.assert_allclose(tally.sums["loss/policy_avg"], np.mean(losses), rtol=1e-4, atol=1e-6)


def test_rows_add_up_to_the_loss_and_the_gradient_of_their_batch(world):
    config = dataclasses.replace(CONFIG, num_mini_batches=1, micro_batch_size=4)
    experience, _ = experience_of(world, config)
    measures = pg.row_measures(MODELS, world[0], experience, config=config, objective=ppo.OBJECTIVE)
    tokens = jnp.sum(experience.trained_mask).astype(jnp.float32)
    options = {"config": config, "objective": ppo.OBJECTIVE, "batch_tokens": tokens}
    gradients, tally, _ = pg.minibatch_gradients(MODELS, world[0], experience, **options)
    assert distance(measures["gradients"], gradients) < 1e-5
    loss = tally.sums["loss/policy_avg"] + config.vf_coef * tally.sums["loss/value_avg"]
    np.testing.assert_allclose(measures["loss"].sum(), loss, rtol=1e-5)
    norms = np.asarray(measures["gradient_norm"])
    assert norms.shape == (B,) and (norms >= 0).all() and norms[1:].max() > 0
    total = np.sqrt(sum(float(jnp.sum(x * x)) for x in jax.tree.leaves(gradients)))
    assert total <= norms.sum() * (1 + 1e-5)


def test_the_kl_of_a_response_is_the_sum_over_its_own_tokens(world):
    params, ref, rollout, _ = world
    config = dataclasses.replace(CONFIG, rollout_batch_size=None)
    _, found = experience_of(world, config)
    kl = jax.jit(lambda p, r: response_logprobs.token_kl(with_params(MODELS, p, r), rollout, config).sum(axis=1))(
        params, ref
    )
    assert kl.shape == (B,) and float(kl[0]) == 0.0  # an empty response
    assert float(kl.mean()) == pytest.approx(float(found["objective/kl"]), rel=1e-4)


def test_what_stands_after_the_end_changes_nothing(world):
    params, ref, rollout, scores = world
    inside = adv.response_mask(rollout.lengths, T)
    noisy = rollout.replace(response=jnp.where(inside, rollout.response, 50))
    clean, _ = experience_of(world)
    other, _ = experience_of((params, ref, noisy, scores))
    for name in ("logprobs", "advantages", "returns"):
        inner, found = (jnp.where(inside, getattr(x, name)[:, 0], 0.0) for x in (clean, other))
        assert distance(found, inner) < 2e-5, name
    config = dataclasses.replace(CONFIG, score_position="eos")
    clean, _ = experience_of(world, config)
    other, _ = experience_of((params, ref, noisy, scores), config)
    a, _ = run_update(params, clean, config, 0.1, 0, optax.identity())
    b, _ = run_update(params, other, config, 0.1, 0, optax.identity())
    assert distance(a.params, b.params) < 1e-5


def test_the_first_optimizer_step_sees_ratio_one(world):
    experience, _ = experience_of(world)
    for micro in (4, 1):
        _, metrics = run_update(world[0], experience, dataclasses.replace(CONFIG, micro_batch_size=micro))
        assert float(metrics["val/first_ratio_error"]) <= 1e-5
        assert float(metrics["policy/first_approxkl"]) <= 1e-9


def test_the_ratio_error_is_that_of_the_worst_token(world):
    params, _, rollout, _ = world
    experience, _ = experience_of(world)
    row = int(jnp.argmax(rollout.lengths))
    off = experience.replace(logprobs=experience.logprobs.at[row, 0, 1].add(0.5))
    config = dataclasses.replace(CONFIG, num_mini_batches=1, micro_batch_size=2)
    _, metrics = run_update(params, off, config)
    assert float(metrics["val/first_ratio_error"]) == pytest.approx(1 - np.exp(-0.5), rel=1e-4)


def test_eos_itself_gets_credit(world):
    # Only eos decides the score here: with the score on eos the advantage of that action is the largest.
    params, ref, rollout, _ = world
    rollout = rollout.replace(lengths=jnp.where(rollout.lengths == 0, 1, rollout.lengths))
    scores = jnp.where(rollout.ended, 5.0, -5.0)
    config = dataclasses.replace(CONFIG, score_position="eos", kl_coef=0.0, missing_eos_penalty=None, lam=0.0)
    experience, _ = experience_of((params, ref, rollout, scores), config)
    last = np.asarray(rollout.lengths) - 1
    at_end = np.asarray(experience.advantages)[np.arange(B), 0, last]
    assert (at_end[np.asarray(rollout.ended)] > 0.5).all()
    assert (at_end[~np.asarray(rollout.ended)] < -0.5).all()


def test_dense_rewards_land_where_they_were_given(world):
    config = dataclasses.replace(CONFIG, lam=1.0, kl_coef=0.0, missing_eos_penalty=None)
    dense = jnp.arange(B * T, dtype=jnp.float32).reshape(B, T)
    params, ref, rollout, _ = world
    experience, found = experience_of((params, ref, rollout, jnp.ones(B)), config, dense)
    inside = np.asarray(adv.response_mask(rollout.lengths, T))
    summed = np.where(inside, dense, 0.0).sum(axis=1)
    assert float(found["objective/scores"]) == pytest.approx(summed.mean() + 1, rel=1e-5)
    experience, _ = experience_of((params, ref, rollout, jnp.zeros(B)), config, dense)
    expected = np.cumsum(np.where(inside, dense, 0.0)[:, ::-1], axis=1)[:, ::-1]
    np.testing.assert_allclose(np.asarray(experience.returns)[:, 0, 0], expected[:, 0], rtol=1e-4, atol=1e-4)


def test_the_kl_controller_moves_toward_its_target():
    _, state = make_state(make_params())
    config = dataclasses.replace(CONFIG, kl_target=6.0, kl_horizon=1000, batch_size=100)
    up, down = (ppo.adapt_kl_coef(state, {"objective/kl": jnp.float32(kl)}, config) for kl in (9.0, 1.0))
    np.testing.assert_allclose(up.kl_coef, 0.05 * (1 + 0.2 * 100 / 1000), rtol=1e-6)
    np.testing.assert_allclose(down.kl_coef, 0.05 * (1 - 0.2 * 100 / 1000), rtol=1e-6)
    fixed = ppo.adapt_kl_coef(state, {"objective/kl": jnp.float32(9.0)}, CONFIG)
    assert float(fixed.kl_coef) == float(state.kl_coef)


def test_a_shared_backbone_learns_with_one_network(world):
    params = {"policy": {**world[0]["policy"], "score": world[0]["value"]["score"]}}
    models = models_of(MODEL, MODEL)
    optimizer, state = make_state(params)
    _, ref, rollout, scores = world

    @jax.jit
    def step(state):
        whole, batch = with_params(models, state.params, ref), scored(rollout, scores, eos_id=EOS)
        experience, _ = ppo.make_experience(whole, batch, config=CONFIG, kl_coef=state.kl_coef)
        return update_program(models, optimizer, 3e-3, CONFIG)(state, experience, jax.random.key(0))

    losses = []
    for _ in range(4):
        state, metrics = step(state)
        losses.append(float(metrics["loss/value_avg"]))
    assert losses[-1] < losses[0]
    assert float(jnp.abs(state.params["policy"]["score"]["kernel"] - params["policy"]["score"]["kernel"]).max()) > 0


def test_an_update_compiles_once_and_gives_its_input_back(world):
    optimizer, state = make_state(jax.tree.map(jnp.copy, world[0]))
    experience, _ = experience_of(world)
    step = update_program(MODELS, optimizer, 1e-3, CONFIG, donate_argnums=0)
    old = jax.tree.leaves(state.params)[0]
    for seed in range(3):
        state, _ = step(state, experience, jax.random.key(seed))
    assert step._cache_size() == 1 and old.is_deleted()
    assert int(state.step) == 3 and int(state.episodes) == 3 * B


def test_the_same_update_twice_is_bit_equal(world):
    experience, _ = experience_of(world)
    a, _ = run_update(world[0], experience)
    b, _ = run_update(world[0], experience)
    assert all(bool((x == y).all()) for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params)))


# --- options that are off by default


def program_text(world, config, optimizer):
    """The lowered update, and the experience that it takes."""
    experience, _ = experience_of(world, config)
    _, state = make_state(world[0], config, optimizer.transformation)

    def run(state, experience, key):
        return ppo.update(MODELS, state, experience, config=config, optimizer=optimizer, key=key)

    return jax.jit(run).lower(state, experience, jax.random.key(0)).as_text(), experience


def test_an_option_that_is_off_is_in_no_program(world):
    off = dataclasses.replace(CONFIG, kl_loss_estimator="k1", entropy_coef=0, kl_loss_coef=0, lr_scheduler_kwargs={})
    (one, experience), (other, _) = (program_text(world, c, make_optimizer(c, 10, 4)) for c in (CONFIG, off))
    assert one == other
    assert experience.ref_logprobs is None and len(jax.tree.leaves(experience)) == 11
    on = dataclasses.replace(CONFIG, dual_clip=3.0)
    assert program_text(world, on, make_optimizer(on, 10, 4))[0] != one


def test_options_at_neutral_values_change_nothing(world):
    neutral = dataclasses.replace(CONFIG, epsilon_high=CONFIG.cliprange, dual_clip=1e6, value_lam=CONFIG.lam)
    wanted, _ = experience_of(world)
    experience, _ = experience_of(world, neutral)
    assert distance(experience, wanted) < 1e-6
    (ours, found), (theirs, others) = (
        run_update(world[0], wanted, c, 0.1, 0, optax.identity()) for c in (neutral, CONFIG)
    )
    assert distance(ours.params, theirs.params) < 1e-6
    assert float(found.pop("policy/clipfrac_lower_avg")) == 0 and found.keys() == others.keys()


@pytest.mark.parametrize(("aggregation", "estimator"), [("token_mean", "k3"), ("seq_mean", "k2")])
def test_the_whole_loss_and_its_gradient_written_out(world, aggregation, estimator):
    config = dataclasses.replace(
        CONFIG,
        loss_aggregation=aggregation,
        num_mini_batches=1,
        cliprange=0.05,
        epsilon_high=0.1,
        dual_clip=1.2,
        entropy_coef=0.3,
        kl_loss_coef=0.7,
        kl_loss_estimator=estimator,
    )
    experience, _ = experience_of(world, config)
    lengths = experience.lengths[:, 0]
    inside = adv.response_mask(lengths, T)
    old, advantages, old_values, returns = (
        getattr(experience, name)[:, 0] for name in ("logprobs", "advantages", "values", "returns")
    )
    rollout = world[2]
    prompt_mask = jnp.arange(C)[None] >= (C - rollout.prompt_lengths)[:, None]
    tokens = jnp.concatenate([rollout.prompt_tokens, rollout.response], axis=1)
    mask = jnp.concatenate([prompt_mask, rollout.response_mask], axis=1)
    params = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(5), x.shape), world[0])
    ref = world[1]

    def chosen_and_all(policy):
        logits = MODEL.logits(policy, MODEL.hidden(policy, tokens, mask)[:, -T - 1 : -1])
        logprobs = jax.nn.log_softmax(logits / (config.temperature + 1e-7))
        return jnp.take_along_axis(logprobs, tokens[:, -T:, None], axis=2)[..., 0], logprobs

    def written_out(params):
        new, every = chosen_and_all(params["policy"])
        values = MODEL.scalars(params["value"], MODEL.hidden(params["value"], tokens, mask)[:, -T - 1 : -1])
        a, ratio = advantages, jnp.exp(new - old)
        token = jnp.maximum(-a * ratio, -a * jnp.clip(ratio, 0.95, 1.1))
        token = jnp.where((a < 0) & (token > -1.2 * a), -1.2 * a, token)
        gap = chosen_and_all(ref)[0] - new
        kl = jnp.exp(gap) - 1 - gap if estimator == "k3" else gap**2 / 2
        token = token + 0.7 * kl + 0.3 * (jnp.exp(every) * every).sum(axis=2)
        near = jnp.clip(values, old_values - config.cliprange_value, old_values + config.cliprange_value)
        value = 0.5 * jnp.maximum((values - returns) ** 2, (near - returns) ** 2)

        def mean(x, mask):
            x = jnp.where(mask, x, 0.0)
            if aggregation == "token_mean":
                return x.sum() / mask.sum()
            return (x.sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1)).mean()

        return mean(token, inside) + config.vf_coef * mean(value, adv.value_mask(lengths, T))

    _, counts = pg.update_parts(MODELS, experience, config)
    ours = jax.jit(
        jax.value_and_grad(
            lambda p: ppo.loss_and_metrics(with_params(MODELS, p), experience, counts, config), has_aux=True
        )
    )
    (loss, (tally, _)), gradient = ours(params)
    metrics = tally.sums
    wanted, wanted_gradient = jax.jit(jax.value_and_grad(written_out))(params)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert distance(gradient, wanted_gradient) < 1e-4
    assert float(metrics["policy/clipfrac_lower_avg"]) > 0 and float(metrics["loss/kl_avg"]) > 0


def test_advantages_and_returns_have_lambdas_of_their_own(world):
    at, short = (lambda **options: experience_of(world, dataclasses.replace(CONFIG, **options))[0]), {"lam": 0.6}
    plain, monte_carlo, both = at(**short), at(lam=1.0), at(**short, value_lam=1.0)
    np.testing.assert_allclose(both.advantages, plain.advantages, atol=1e-6)
    np.testing.assert_allclose(both.returns, monte_carlo.returns, atol=1e-6)
    assert distance(plain.returns, monte_carlo.returns) > 1e-3
    adaptive = at(**short, adaptive_lam_alpha=0.5)
    np.testing.assert_allclose(adaptive.returns, plain.returns, atol=1e-6)
    assert distance(adaptive.advantages, plain.advantages) > 1e-3
    rng = np.random.default_rng(4)
    rewards, values = (jnp.asarray(rng.normal(size=(3, T)), jnp.float32) for _ in range(2))
    config = dataclasses.replace(CONFIG, adaptive_lam_alpha=0.5, value_lam=1.0)
    got, returns = ppo.advantages_and_returns(rewards, values, jnp.array([2, 4, 7]), config)
    for row, lam in enumerate((0.0, 0.5, 1 - 1 / 3.5)):
        wanted, _ = adv.gae(rewards[row : row + 1], values[row : row + 1], gamma=1.0, lam=lam)
        np.testing.assert_allclose(got[row], wanted[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(returns, adv.gae(rewards, values, gamma=1.0, lam=1.0)[1], rtol=1e-6)


def built_in_update(models, config):
    """The jitted update by `make_optimizer`, and a fresh state of params."""
    optimizer = make_optimizer(config, 10, pg.steps_per_update(config))

    def run(state, experience, key):
        return ppo.update(models, state, experience, config=config, optimizer=optimizer, key=key)

    run = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})  # what takes time is to compile it
    return run, lambda params: make_state(params, config, optimizer.transformation)[1]


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("kind", ["separate", "shared_backbone"])
def test_only_the_critic_learns_in_its_warm_up_and_one_program_has_both(world, kind):
    config = dataclasses.replace(
        CONFIG, value_model=kind, critic_warmup_steps=2, learning_rate=1e-3, weight_decay=0.1, weight_decay_on="all"
    )
    experience, _ = experience_of(world, config)
    params, models = world[0], MODELS
    if kind == "shared_backbone":
        params, models = {"policy": {**params["policy"], "score": params["value"]["score"]}}, models_of(MODEL, MODEL)

    def of_critic(params):
        return params["value"] if kind == "separate" else params["policy"]["score"]

    def of_policy(params):
        return {name: x for name, x in params["policy"].items() if name != "score"}

    run, fresh = built_in_update(models, config)
    state = start = fresh(params)
    moments = []
    for update in range(4):
        before = state
        state, metrics = run(state, experience, jax.random.key(update))
        moments.append(jax.tree.leaves(state.opt_state[0][0].inner_states["policy"]))
        warming = update < 2
        assert (bits(of_policy(state.params)) == bits(of_policy(before.params))) == warming
        assert bits(of_critic(state.params)) != bits(of_critic(before.params))
        assert all(not x.any() for x in moments[-1]) == warming and int(state.step) == update + 1
        assert not warming or float(metrics["policy/approxkl_avg"]) < 1e-9
    assert run._cache_size() == 1
    # What counts is the state's step alone: a run that is resumed has no other memory of its warm-up.
    later, _ = run(start.replace(step=jnp.int32(2)), experience, jax.random.key(0))
    assert bits(of_policy(later.params)) != bits(of_policy(start.params))
    if kind == "separate":  # the critic learns as it does without a warm-up
        plain, fresh = built_in_update(models, dataclasses.replace(config, critic_warmup_steps=0))
        both, _ = plain(fresh(params), experience, jax.random.key(0))
        alone, _ = run(start, experience, jax.random.key(0))
        assert distance(alone.params["value"], both.params["value"]) < 1e-6


def test_the_value_learning_rate_changes_the_critic_alone(world):
    config = dataclasses.replace(CONFIG, learning_rate=1e-3)
    experience, _ = experience_of(world, config)
    found = []
    for rate in (None, 5e-3):
        run, fresh = built_in_update(MODELS, dataclasses.replace(config, value_learning_rate=rate))
        found.append(run(fresh(world[0]), experience, jax.random.key(0))[0].params)
    assert distance(found[1]["policy"], found[0]["policy"]) < 1e-6
    assert distance(found[1]["value"], found[0]["value"]) > 1e-3
