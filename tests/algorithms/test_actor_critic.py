"""Log-probabilities of responses: logits in chunks give the same numbers and gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.algorithms import actor_critic
from tests.helpers.arrays import distance, normal


class Head:
    """A causal head alone."""

    layout = None

    @staticmethod
    def logits(params, hidden):
        return hidden.astype(jnp.float32) @ params


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logits_in_chunks_give_the_same_numbers_and_gradients(monkeypatch, temperature):
    hidden, kernel = normal(0, 6, 5, 4), normal(1, 4, 11)
    tokens = jax.random.randint(jax.random.key(2), (6, 5), 0, 11)

    def loss(kernel, hidden):
        logprobs, entropy = actor_critic.response_logprobs(Head, kernel, hidden, tokens, temperature)
        return jnp.sum(jnp.sin(logprobs)) + jnp.sum(entropy), (logprobs, entropy)

    def run():
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(kernel, hidden)

    def widest():
        jaxpr = jax.make_jaxpr(jax.grad(lambda *args: loss(*args)[0], argnums=(0, 1)))(kernel, hidden)
        shapes = [v.aval.shape for e in all_equations(jaxpr.jaxpr) for v in e.outvars if hasattr(v.aval, "shape")]
        return max(math.prod(shape) for shape in shapes if shape[-1:] == (11,))

    whole, largest = run(), widest()
    logits = np.asarray(hidden @ kernel, np.float64) / (temperature + 1e-7)
    exact = np.take_along_axis(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), np.array(tokens)[..., None], -1)
    assert distance(whole[0][1][0], exact[..., 0]) < 1e-6
    monkeypatch.setattr(actor_critic, "LOGIT_POSITIONS", 12)
    for found, wanted in zip(jax.tree.leaves(run()), jax.tree.leaves(whole)):
        assert distance(found, wanted) < 1e-6
    assert (largest, widest()) == (6 * 5 * 11, 2 * 5 * 11)


def all_equations(jaxpr):
    """Of a jaxpr and of all that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from all_equations(inner)
