"""Arrays of the tests: drawn, differentiated, compared."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def flat(tree):
    """All numbers of a pytree in a row, float64."""
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


def distance(a, b) -> float:
    """||a - b|| / ||b||, of arrays or of all leaves of two trees."""
    a, b = flat(a), flat(b)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def same_bits(a, b) -> bool:
    """Whether two trees have the same structure and every leaf the same bytes; NaN is itself."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
    )


def value_and_vjp(function, arguments, upstream):
    """(What a function returns, its gradients for `upstream`), jitted."""
    return jax.jit(lambda *args: (function(*args), jax.vjp(function, *args)[1](upstream)))(*arguments)
