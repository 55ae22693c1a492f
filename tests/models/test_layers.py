"""GELU: exact in value and slope, with one array kept for the backward pass."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models import layers


def test_gelu_is_the_exact_one():
    x = jnp.linspace(-6.0, 6.0, 1001)
    assert np.abs(layers.gelu(x) - jax.nn.gelu(x, approximate=False)).max() < 1e-6
    assert np.abs(layers.gelu(x) - jax.nn.gelu(x, approximate=True)).max() > 1e-4


def test_the_slope_of_gelu_is_the_formulas_and_all_that_is_kept():
    x = jnp.linspace(-9, 9, 1001)
    exact = jax.vmap(jax.grad(lambda x: 0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2)))))(x)
    np.testing.assert_allclose(jax.vmap(jax.grad(layers.gelu))(x), exact, atol=1e-6)
    residuals = jax.eval_shape(lambda x: jax.vjp(layers.gelu, x)[1], x)
    assert [leaf.shape for leaf in jax.tree.leaves(residuals) if leaf.shape] == [x.shape]
