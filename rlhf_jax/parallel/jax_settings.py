"""Settings of jax that change which numbers a program draws or computes.

Runs have those that this package is tested with, whatever the environment, the caller or a reward function sets. The
caller's own stay as they are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax

from rlhf_jax.errors import UserError

PINNED: dict[str, Any] = {
    "default_prng_impl": "threefry2x32",
    "threefry_partitionable": True,  # so that samples do not depend on the mesh
    "enable_x64": False,
    "numpy_dtype_promotion": "standard",
    "numpy_rank_promotion": "allow",
}
"""Context managers of jax, which hold for the thread that enters them, and their values."""
REFUSED: dict[str, Any] = {
    "jax_random_seed_offset": 0,
    "jax_high_dynamic_range_gumbel": False,
    "jax_disable_jit": False,
}
"""Settings that jax has no context manager for, or that no run works with, and their only values."""

_thread = threading.local()


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Within it, and in a function that it decorates, the settings of `PINNED` hold.

    Raises:
      UserError: a setting of `REFUSED` has another value.
    """
    for name, value in REFUSED.items():
        if (setting := getattr(jax.config, name)) != value:
            raise UserError(f"{name.upper()}={setting}: a run needs {value!r}, jax's default. Unset it")
    with contextlib.ExitStack() as stack:
        for name, value in PINNED.items():
            stack.enter_context(getattr(jax, name)(value))
        outer, _thread.pinned = is_pinned(), True
        try:
            yield
        finally:
            _thread.pinned = outer


def is_pinned() -> bool:
    """Whether this thread is within `pinned`: programs that it traces are found only by threads that are, too."""
    return getattr(_thread, "pinned", False)
