"""What the property tests share: a function of ours and one of torch give the same values and gradients."""

import contextlib
import functools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

torch = pytest.importorskip("torch")

# The fixture `precision` holds for all examples of a test.
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**31)
numbers = st.floats(-4, 4, width=32, allow_subnormal=False)  # exact in both precisions


def arrays(*shape, elements=numbers):
    """Arrays of float64."""
    return hnp.arrays(np.float64, shape, elements=elements)


def masks(*shape):
    """Arrays of bool."""
    return hnp.arrays(bool, shape)


@pytest.fixture(params=["float32", "float64"])
def precision(request):
    """(dtype, tolerance), under x64 for float64; torch is at float64, where TRL divides counts too."""
    torch.set_default_dtype(torch.float64)
    with jax.enable_x64(True) if request.param == "float64" else contextlib.nullcontext():
        yield np.dtype(request.param), {"float32": 1e-5, "float64": 1e-12}[request.param]
    torch.set_default_dtype(torch.float32)


def near(actual, wanted, tolerance, scale=1.0):
    """||actual - wanted|| <= tolerance * max(||wanted||, scale), where finite; elsewhere the same -inf.

    scale: of the numbers that were summed.
    """
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    assert actual.shape == wanted.shape
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(wanted))
    actual, wanted = (np.where(np.isneginf(x), 0, x) for x in (actual, wanted))
    gap, bound = np.linalg.norm(actual - wanted), tolerance * max(np.linalg.norm(wanted), scale)
    assert gap <= bound, (gap, bound, actual, wanted)


@functools.cache
def with_gradients(function, **options):
    """Jitted: (value, gradients in the given arrays of its weighted sum, what else the function returns)."""

    def value(given, rest):
        out = function(*given, *rest, **options)
        return (out[0], out[1:]) if isinstance(out, tuple) else (out, ())

    def run(weights, given, *rest):
        out, back, others = jax.vjp(lambda given: value(given, rest), given, has_aux=True)
        return out, back(weights.astype(out.dtype))[0], others

    return jax.jit(run)


def same(ours, theirs, given, *rest, precision, seed=0, scale=1.0, gradient_scale=1.0, **options):
    """Ours, in either precision, has the value and the gradients of torch's in float64.

    rest: masks, lengths, tokens; options: of ours. Of several results the first is compared, the others are returned.
    """
    dtype, tolerance = precision
    tensors = [torch.tensor(x, requires_grad=True) for x in given]
    wanted = theirs(*tensors, *(torch.tensor(x) for x in rest))
    weights = np.random.default_rng(seed).normal(size=tuple(wanted.shape))
    back = torch.autograd.grad(wanted, tensors, torch.tensor(weights), allow_unused=True)
    value, gradients, others = with_gradients(ours, **options)(weights, tuple(x.astype(dtype) for x in given), *rest)
    assert value.dtype == dtype
    near(value, wanted.detach(), tolerance, scale)
    for gradient, other in zip(gradients, back, strict=True):
        near(gradient, np.zeros(gradient.shape) if other is None else other, 4 * tolerance, gradient_scale)
    return others


def widens(function, given):
    """Arrays of half precision are summed in float32: the bits of the result are those of the same numbers in it."""
    half = [np.asarray(x) if x.dtype == bool else jax.numpy.asarray(x, jax.numpy.bfloat16) for x in given]
    wide = [x if x.dtype == bool else x.astype(jax.numpy.float32) for x in half]
    for found, wanted in zip(*(jax.tree.leaves(jax.jit(function)(*x)) for x in (half, wide)), strict=True):
        assert found.dtype == wanted.dtype and found.dtype != jax.numpy.bfloat16
        np.testing.assert_array_equal(found, wanted)
