"""What the property tests share: a function of ours and one of torch give the same values and gradients."""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")


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


def with_gradients(function):
    """Jitted: (function, gradients in its first arrays, for a weighted sum of what it returns)."""

    def run(weights, given, *rest):
        out, back = jax.vjp(lambda *given: function(*given, *rest), *given)
        return out, back(weights.astype(out.dtype))

    return jax.jit(run)


def same(ours, theirs, given, *rest, precision, seed=0, scale=1.0, gradient_scale=1.0):
    """Value and gradients of `with_gradients` and of torch in float64; rest: masks, lengths, tokens."""
    dtype, tolerance = precision
    tensors = [torch.tensor(x, requires_grad=True) for x in given]
    wanted = theirs(*tensors, *(torch.tensor(x) for x in rest))
    weights = np.random.default_rng(seed).normal(size=tuple(wanted.shape))
    back = torch.autograd.grad(wanted, tensors, torch.tensor(weights), allow_unused=True)
    value, gradients = ours(weights, tuple(x.astype(dtype) for x in given), *rest)
    assert value.dtype == dtype
    near(value, wanted.detach(), tolerance, scale)
    for gradient, other in zip(gradients, back, strict=True):
        near(gradient, np.zeros(gradient.shape) if other is None else other, 4 * tolerance, gradient_scale)
