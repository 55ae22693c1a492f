"""The first PPO update of a tiny model moves as the first one of the N+ reference output does (arXiv 2403.17031).

`python -m tests.parity.test_first_update` prints both, epoch by epoch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms import ppo, reward_model
from rlhf_jax.algorithms.optimizer import make_optimizer
from rlhf_jax.config import PPOConfig
from rlhf_jax.generate import Sampling, generate
from rlhf_jax.models import custom_shape
from rlhf_jax.types import PromptBatch, TrainState
from tests.helpers.algorithms import models_of, scored, with_params
from tests.helpers.arrays import distance

V, C, T, B = 61, 8, 16, 64
EOS = 3
EPOCHS = 4
MODEL = custom_shape("2x32x4", V, 64)
MODELS = models_of(MODEL, MODEL, MODEL)
# As there: one minibatch, rewards whitened, AdamW's epsilon 1e-5, the value model starts as the reward model. The rate
# is not: a model of this width needs a larger step to move as far as Pythia-160m does at 1e-5.
CONFIG = PPOConfig(
    batch_size=B,
    num_ppo_epochs=1,
    num_mini_batches=1,
    response_length=T,
    temperature=0.7,
    whiten_rewards=True,
    missing_eos_penalty=1.0,
    learning_rate=2e-4,
    adam_epsilon=1e-5,
)
NPLUS = {
    "policy/approxkl_avg": (0.0, 2.89e-3, 5.62e-3, 8.12e-3),
    "policy/clipfrac_avg": (0.0, 0.0252, 0.0505, 0.0729),
    "val/ratio": (1.0, 1.00006, 1.00109, 1.00218),
    "loss/policy_avg": (0.0, -0.01057, -0.01844, -0.02434),
}
"""`reference_output/ppo.txt`, Pythia-160m and 512 episodes: cumulative means over the epochs of the first update."""

quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # it hardly runs


@functools.cache
def first_rollout():
    """(params, experience of one sampled batch): policy 3 times wider than at init, so that it prefers something."""
    policy = jax.tree.map(lambda x: 3.0 * x, MODEL.init(jax.random.key(0), heads=("causal",)))
    value = MODEL.init(jax.random.key(1), heads=("scalar",))
    rng = np.random.default_rng(0)
    prompts = PromptBatch(
        jnp.asarray(rng.integers(4, V, (B, C)), jnp.int32), jnp.asarray(rng.integers(1, C + 1, B)), jnp.arange(B)
    )
    sampling = Sampling(T, CONFIG.temperature, stop_ids=(EOS,), fill_id=EOS)

    @quick_jit
    def experience_of(params):
        rollout = generate(MODEL, params["policy"], prompts, jax.random.key(2), sampling)
        scores = reward_model.score_rollout(MODEL, value, rollout, dtype=jnp.float32)
        models, batch = with_params(MODELS, params, policy), scored(rollout, scores, eos_id=EOS)
        return ppo.make_experience(models, batch, config=CONFIG, kl_coef=jnp.float32(CONFIG.kl_coef))[0]

    params = {"policy": policy, "value": value}
    return params, experience_of(params)


@functools.cache
def learn(epochs, calls):
    """Metrics of `calls` calls of ppo.update of `epochs` epochs each, one after another, and the params at the end."""
    config = dataclasses.replace(CONFIG, num_ppo_epochs=epochs)
    params, experience = first_rollout()
    config = dataclasses.replace(config, lr_scheduler_type="constant")
    optimizer, zero = make_optimizer(config, 1, epochs), jnp.int32(0)
    state = TrainState(params, optimizer.init(params), zero, zero, jnp.uint32(0), jnp.float32(0), jnp.uint32(0))
    options = {"config": config, "optimizer": optimizer, "key": jax.random.key(3)}
    step = quick_jit(lambda state: ppo.update(MODELS, state, experience, **options))
    found = []
    for _ in range(calls):
        state, metrics = step(state)
        found.append({name: float(x) for name, x in metrics.items()})
    return found, state.params


def first_update_table() -> dict[str, tuple[float, ...]]:
    """The numbers of `NPLUS` here: cumulative means over epochs 1 to 4 of the first update."""
    epochs, _ = learn(1, EPOCHS)
    return {name: tuple(np.mean([e[name] for e in epochs[: n + 1]]) for n in range(EPOCHS)) for name in NPLUS}


def test_in_the_first_epoch_nothing_has_moved():
    first = learn(1, EPOCHS)[0][0]
    assert first["policy/approxkl_avg"] < 1e-10
    assert abs(first["val/ratio"] - 1) < 1e-5 and first["val/first_ratio_error"] < 1e-5
    assert first["policy/clipfrac_avg"] == 0 and first["val/clipfrac_avg"] == 0
    # Whitened advantages have mean 0, and so has the loss at ratio 1.
    assert abs(first["loss/policy_avg"]) < 1e-6
    assert first["grad_norm"] > 1e-3


def test_over_epochs_2_to_4_the_policy_moves_as_far_as_that_of_nplus():
    """In kind: the signs and orders of magnitude of another model on another task."""
    found = {name: np.array(values) for name, values in first_update_table().items()}
    kl, clipped, ratio, loss = (found[name] for name in NPLUS)
    assert (np.diff(kl) > 0).all() and (np.diff(clipped) > 0).all() and (np.diff(loss) < 0).all()
    for name in ("policy/approxkl_avg", "policy/clipfrac_avg", "loss/policy_avg"):
        times = found[name][1:] / np.array(NPLUS[name][1:])
        assert (times > 1 / 3).all() and (times < 3).all(), (name, times)
    assert 1e-3 < kl[-1] < 1e-2 and 1e-3 < ratio[-1] - 1 < 1e-2


def test_four_epochs_in_one_call_are_four_calls_of_one():
    epochs, params = learn(1, EPOCHS)
    (together,), others = learn(EPOCHS, 1)
    for name in (
        "policy/approxkl_avg",
        "policy/clipfrac_avg",
        "val/clipfrac_avg",
        "val/ratio",
        "loss/policy_avg",
        "loss/value_avg",
        "policy/entropy_avg",
        "grad_norm",
    ):
        mean = np.mean([e[name] for e in epochs])
        assert abs(together[name] - mean) <= 1e-4 * max(abs(mean), 0.01), name
    assert together["policy/first_approxkl"] == epochs[0]["policy/approxkl_avg"]
    gaps = jax.tree.map(distance, without_key_biases(params), without_key_biases(others))
    assert max(jax.tree.leaves(gaps)) < 1e-5


def without_key_biases(params):
    """Params with 0 in the biases of keys, whose gradient is rounding alone: Adam turns it into steps of full size."""

    def zero(path, x):
        if not jax.tree_util.keystr(path).endswith("['query_key_value']['bias']"):
            return x
        heads = MODEL.config.num_attention_heads
        return x.reshape(x.shape[0], heads, 3, -1).at[:, :, 1].set(0.0).reshape(x.shape)

    return jax.tree_util.tree_map_with_path(zero, params)


if __name__ == "__main__":
    for name, ours in first_update_table().items():
        print(f"{name:<22}", *(f"{x:10.6f}" for x in ours), "  N+:", *(f"{x:10.6f}" for x in NPLUS[name]))
