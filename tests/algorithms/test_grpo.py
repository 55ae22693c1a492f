"""GRPO against TRL's own loss, rewards and entropy control, and REINFORCE++ in its two published forms.

The forward pass is patched out on both sides: the params are the log-probabilities and entropies of a batch of rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax import advantages as adv
from rlhf_jax.algorithms import group_policy_gradient as gpg
from rlhf_jax.algorithms import grpo
from rlhf_jax.algorithms.rollout_metrics import reward_metrics
from rlhf_jax.config import GRPOConfig
from rlhf_jax.types import GroupExperience, Rollout, TrainState
from tests.helpers import trl_grpo
from tests.helpers.algorithms import at_rates, models_of, scored, with_params
from tests.helpers.arrays import distance, flat
from tests.helpers.optional import optional
from tests.helpers.properties import near

torch = optional("torch")
P, G, T = 4, 2, 5
B, EOS = P * G, 3
ALL = np.ones(B, bool)
MODELS = models_of("policy", "reference")
PLAIN = GRPOConfig(batch_size=B, num_generations=G, response_length=T, max_grad_norm=None)
few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 2**31)
every_loss = pytest.mark.parametrize("loss_type", grpo.LOSSES)


def config(**options):
    return dataclasses.replace(PLAIN, **options)


def rows_of_params(model, params, rows, config, dropout_keys=None, entropy_gradient=False):
    """In place of a forward pass: the first token of a response is its row in the params."""
    row = rows.response[:, :, 0]
    entropies = params["entropies"][row]
    return params["logps"][row], entropies if entropy_gradient else jax.lax.stop_gradient(entropies)


@pytest.fixture(autouse=True)
def no_forward_pass(monkeypatch):
    for module in (grpo, gpg):
        monkeypatch.setattr(module, "group_logprobs", rows_of_params)


def arrays_of(seed, *, spread=0.3, of_tokens=False, empty=True):
    """What the loss of B rows is made of, float32, by TRL's names; each pair of rows has a token at least."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0 if empty else 1, T + 1, size=B)
    lengths[::2] = np.maximum(lengths[::2], 1)
    old = rng.normal(size=(B, T)) - 2
    logps = old + spread * rng.normal(size=(B, T))
    floats = {
        "logps": logps,
        "entropies": rng.gamma(1.0, size=(B, T)),
        "old_per_token_logps": old,
        "ref_per_token_logps": logps + 0.3 * rng.normal(size=(B, T)),
        "sampling_per_token_logps": old + 0.3 * rng.normal(size=(B, T)),
        "advantages": rng.normal(size=(B, T) if of_tokens else B) * (rng.random((B, 1) if of_tokens else B) < 0.9),
    }
    return {name: x.astype(np.float32) for name, x in floats.items()}, lengths.astype(np.int32)


def params_of(arrays):
    return {"policy": {name: jnp.asarray(arrays[name]) for name in ("logps", "entropies")}}


def grouped(x, size=G):
    return jnp.asarray(x).reshape(-1, size, *np.shape(x)[1:])


def experience_of(arrays, lengths, c, with_old=True):
    ref = grouped(arrays["ref_per_token_logps"]) if c.beta else None
    return GroupExperience(
        prompt_tokens=jnp.ones((P, 1), jnp.int32),
        prompt_lengths=jnp.ones(P, jnp.int32),
        response=grouped(np.tile(np.arange(B)[:, None], (1, T))),
        mask=jnp.ones((P, G, T), bool),
        lengths=grouped(lengths),
        logprobs=grouped(arrays["old_per_token_logps"]) if with_old else None,
        advantages=grouped(arrays["advantages"]),
        ref_logprobs=ref,
        sampler_logprobs=grouped(arrays["sampling_per_token_logps"]),
    )


def our_step(arrays, lengths, c, *, with_old=True, share=None, entropy_coef=None):
    """(gradients, sums by micro-batch, metrics) of a minibatch."""
    experience = experience_of(arrays, lengths, c, with_old)
    loss_fn, micros, _ = grpo.by_micro_batch(MODELS, experience, c, share=share, entropy_coef=entropy_coef)
    parts = []
    for index in range(micros.lengths.shape[0]):
        item = (jax.tree.map(lambda x, index=index: x[index], micros), None)
        parts.append(jax.grad(loss_fn, has_aux=True)(params_of(arrays), item, index))
    gradients, (sums, extremes) = jax.tree.map(lambda *x: sum(x), *parts)
    return gradients["policy"], sums, grpo.step_metrics(sums, extremes, T, c)


def trl_step(made, arrays, lengths, c, *, with_old=True, items=None):
    """(gradients, loss) of TRL's micro-batches of a minibatch, in float64; its metrics are left in the trainer."""
    tensors = {name: torch.tensor(x, dtype=torch.float64) for name, x in arrays.items()}
    tensors["completion_mask"] = mask = (torch.arange(T)[None] < torch.tensor(lengths)[:, None]).int()
    leaves = [tensors[name].requires_grad_() for name in ("logps", "entropies")]
    old = tensors["old_per_token_logps"] if with_old else tensors["logps"].detach()
    if not with_old:
        del tensors["old_per_token_logps"]
    if c.importance_sampling_correction:
        bounds = c.importance_sampling_clip_min, c.importance_sampling_clip_max
        tensors["importance_sampling_ratio"] = trl_grpo.sampler_ratio(
            old, tensors["sampling_per_token_logps"], mask, c.importance_sampling_mode, *bounds
        )
    count, total = made.current_gradient_accumulation_steps, 0.0
    for index in range(count):
        rows = slice(index * B // count, (index + 1) * B // count)
        made.accelerator.sync_gradients = index == count - 1
        micro = {name: x[rows] for name, x in tensors.items()}
        items_in_batch = mask.sum() if items is None else torch.tensor(items)
        # Without a bonus TRL takes entropies under no_grad.
        if not made._entropy_bonus_enabled:
            micro["entropies"] = micro["entropies"].detach()
        total = total + trl_grpo.loss(made, {**micro, "num_items_in_batch": items_in_batch})
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    gradients = [np.zeros((B, T)) if x is None else x.numpy() for x in gradients]
    return dict(zip(("logps", "entropies"), gradients, strict=True)), float(total.detach())


# ------------------------------------------------------------------------------------------------- the loss against TRL


@st.composite
def loss_options(draw, loss_type):
    levels = ["token"] if loss_type == "vespo" else ["token", "sequence"]  # vespo: as the validation asks for
    chosen = {
        "importance_sampling_level": ["token", "sequence"],
        "beta": [0.0, 0.3],
        "use_bias_correction_kl": [True, False],
        "epsilon": [0.1, 0.3],
        "epsilon_high": [None, 0.2, 1.2],
        "delta": [None, 1.1, 1.5],
        "off_policy_mask_threshold": [None, 0.05],
        "top_entropy_quantile": [1.0, 0.6],
        "entropy_coef": [0.0, 0.1],
        "importance_sampling_correction": [True, False],
        "importance_sampling_mode": [f"{level}_{bound}" for level in levels for bound in ("truncate", "mask")],
        "importance_sampling_clip_min": [None, 0.7],
        "num_mini_batches": [1, 2],
        "micro_batch_size": [None, B // 2, G],
    }
    options = {name: draw(st.sampled_from(values)) for name, values in chosen.items()}
    return config(
        **options,
        loss_type=loss_type,
        importance_sampling_clip_max=1.5,
        metrics="trl",
        loss_aggregation="token_mean_micro",
    )


@every_loss
def test_the_loss_its_gradients_and_its_metrics_are_trls(loss_type):
    @few
    @given(seeds, loss_options(loss_type), st.booleans(), st.booleans(), st.integers(0, 30))
    def run(seed, c, with_old, of_tokens, more):
        arrays, lengths = arrays_of(seed, of_tokens=of_tokens)
        count, items = B // (c.micro_batch_size or B), int(lengths.sum()) + more
        made = trl_grpo.trainer(c, count)
        wanted, loss = trl_step(made, arrays, lengths, c, with_old=with_old, items=items)
        share = jnp.float32(items / c.num_mini_batches)
        gradients, _, metrics = our_step(arrays, lengths, c, with_old=with_old, share=share)
        near(metrics["loss"], loss, 1e-5)
        for name, gradient in wanted.items():
            near(gradients[name], gradient, 1e-5)
        logged = {name: np.mean(values) for name, values in made._metrics["train"].items()}
        logged.pop("entropy_coef", None)  # of the update
        if loss_type in ("dapo", "vespo", "cispo") and "policy_loss" in logged:
            logged["policy_loss"] *= count  # TRL logs the mean over micro-batches of their shares
        assert {"entropy"} | ({"kl"} if c.beta else set()) <= set(logged)
        for name, value in logged.items():
            near(metrics[name], value, 1e-5)

    run()


def test_the_metric_of_each_loss_is_logged():
    """TRL's names."""
    names = {"sapo": None, "vespo": "vespo/phi_seq_mean", "cispo": "cispo_clip_ratio"}
    arrays, lengths = arrays_of(0)
    for loss_type in grpo.LOSSES:
        _, _, metrics = our_step(arrays, lengths, config(loss_type=loss_type))
        name = names.get(loss_type, "clip_ratio/region_mean")
        assert name is None or metrics[name] > 0, loss_type


@pytest.mark.parametrize("size", [None, G])
def test_the_adaptive_entropy_coefficient_moves_as_trls_does(size):
    """Over six optimizer steps, whose entropies lie on both sides of the target."""
    options = {"entropy_coef": 0.02, "entropy_coef_delta": 0.04, "entropy_coef_max": 0.09, "entropy_target": 1.0}
    c = config(
        use_adaptive_entropy=True, micro_batch_size=size, loss_aggregation="token_mean_micro", metrics="trl", **options
    )
    made, control = trl_grpo.trainer(c, B // (size or B)), jnp.asarray(grpo.initial_entropy_control(c))
    seen = []
    for step, scale in enumerate([0.1, 0.2, 0.3, 5.0, 7.0, 6.0, 0.1]):
        arrays, lengths = arrays_of(step)
        arrays["entropies"] = (scale * arrays["entropies"]).astype(np.float32)
        wanted, loss = trl_step(made, arrays, lengths, c)
        applied = gpg.applied_entropy_coef(control, c)
        gradients, sums, metrics = our_step(arrays, lengths, c, entropy_coef=applied)
        near(metrics["loss"], loss, 1e-5)
        near(gradients["entropies"], wanted["entropies"], 1e-5)
        control = grpo.next_entropy_control(control, sums, c)
        near(control, [made.entropy_coef, made._last_world_entropy], 1e-5)
        seen.append((float(applied), float(control[0])))
    applied, coefficients = np.array(seen).T
    np.testing.assert_allclose(coefficients, [0.06, 0.09, 0.09, 0.05, 0.01, 0, 0.04], atol=1e-6)
    np.testing.assert_allclose(applied, [0, 0.06, 0.09, 0.09, 0, 0, 0], atol=1e-6)
