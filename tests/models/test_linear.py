"""Products: the plain formula's values, gradients summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models import linear
from tests.helpers.arrays import normal


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_and_its_gradients_are_those_of_the_plain_formula(bias):
    x, kernel, up = normal(0, 3, 5, 4), normal(1, 4, 6), normal(2, 3, 5, 6)
    given = (x, kernel, normal(3, 6) if bias else None)

    def plain(x, kernel, bias):
        out = jnp.einsum("abd,df->abf", x, kernel)
        return (out if bias is None else out + bias[None, None]) * up

    def ours(x, kernel, bias):
        return linear.product(None, (None, None), jnp.dtype(jnp.float32), x, kernel, bias) * up

    for function in (lambda f: f(*given), lambda f: jax.grad(lambda *a: f(*a).sum(), argnums=(0, 1, 2))(*given)):
        for found, expected in zip(jax.tree.leaves(function(ours)), jax.tree.leaves(function(plain)), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_kernel_and_bias_are_summed_in_float32_when_layers_are_bfloat16():
    # 257 rows of ones: bfloat16 has 256 and 258.
    x = jnp.ones((257, 1), jnp.bfloat16)

    def loss(kernel, bias):
        return linear.product(None, (None, None), jnp.dtype(jnp.bfloat16), x, kernel, bias).sum()

    kernel, bias = jax.grad(loss, argnums=(0, 1))(jnp.ones((1, 1)), jnp.zeros(1))
    assert (kernel.dtype, bias.dtype) == (jnp.float32, jnp.float32)
    assert kernel[0, 0] == 257 and bias[0] == 257
