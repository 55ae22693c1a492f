"""Products: the plain formula's values, gradients summed in float32."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@settings(deadline=None, max_examples=20)
@given(
    rows=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    features=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_transposed_kernel_gives_the_product_and_its_gradients(rows, features, bias, seed):
    d, f = features
    x, kernel, up = normal(seed, *rows, d), normal(seed + 1, d, f), normal(seed + 2, *rows, f)
    bias, float32 = normal(seed + 3, f) if bias else None, jnp.dtype(jnp.float32)

    def plain(x, kernel, bias):
        return linear.product(None, (None, None), float32, x, kernel, bias) * up

    def ours(x, kernel, bias):
        return linear.transposed_product(None, (None, None), float32, x, kernel.T, bias) * up

    @functools.partial(jax.jit, static_argnums=0)
    def product_and_gradients(f, *given):
        return f(*given), jax.grad(lambda *a: f(*a).sum(), (0, 1, 2))(*given)

    found, expected = (jax.tree.leaves(product_and_gradients(f, x, kernel, bias)) for f in (ours, plain))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows, first", [(8, "kernel"), (64, "x")])
def test_few_rows_are_the_right_factor_in_the_compiled_program(rows, first):
    # As the left factor with a transposed result the kernel is read up to twice as fast.
    def product(x, kernel):
        return linear.transposed_product(None, (None, None), jnp.dtype(jnp.float32), x, kernel)

    shapes = jax.ShapeDtypeStruct((rows, 96), jnp.float32), jax.ShapeDtypeStruct((256, 96), jnp.float32)
    text = jax.jit(product).lower(*shapes).compile().as_text()
    result = re.search(r"= f32\[(\d+),(\d+)\]\S* dot\(", text)
    assert result.groups() == (("256", str(rows)) if first == "kernel" else (str(rows), "256"))
