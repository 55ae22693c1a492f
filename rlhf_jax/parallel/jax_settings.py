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
_GUARD = (None, "allow", "log")
REFUSED: dict[str, tuple[Any, ...]] = {
    "jax_random_seed_offset": (0,),
    "jax_high_dynamic_range_gumbel": (False,),
    "jax_disable_jit": (False,),
    "jax_no_tracing": (False,),
    "jax_no_execution": (False,),
    "jax_custom_vjp3": (False,),
    "jax_scan3": (False,),
    "jax_transfer_guard": _GUARD,  # batches reach the devices as arguments of programs
    "jax_transfer_guard_host_to_device": _GUARD,
    "jax_transfer_guard_device_to_host": _GUARD,
    "jax_transfer_guard_device_to_device": _GUARD,
}
"""Settings that change numbers and have no context manager in jax, or that no run works with, and the values that
are accepted."""
ROUNDING = (
    "jax_default_matmul_precision",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
    "jax_disable_most_optimizations",
    "jax_compiler_enable_remat_pass",
    "jax_memory_fitting_level",
    "jax_memory_fitting_effort",
    "jax_allow_f16_reductions",
    "jax_use_direct_linearize",
    "jax_remat3",
    "jax_softmax_custom_jvp",
    "jax_enable_pgle",
    "jax_use_magma",
    "jax_ragged_dot_use_ragged_dot_instruction",
    "jax_cpu_collectives_implementation",
    "jax_use_shardy_partitioner",
)
"""Settings that change the form of programs, and so their rounding, where this version of jax has them."""

_thread = threading.local()


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Within it, and in a function that it decorates, the settings of `PINNED` hold.

    Raises:
      UserError: a setting of `REFUSED` has another value.
    """
    for name, accepted in REFUSED.items():
        if (setting := getattr(jax.config, name, accepted[0])) not in accepted:
            raise UserError(f"{name.upper()}={setting}: a run needs {accepted[0]!r}, jax's default. Unset it")
    with contextlib.ExitStack() as stack:
        for name, value in PINNED.items():
            stack.enter_context(getattr(jax, name)(value))
        outer, _thread.pinned = is_pinned(), True
        try:
            yield
        finally:
            _thread.pinned = outer


def rounding() -> dict[str, str]:
    """The values of `ROUNDING`'s settings, by name."""
    return {name: str(getattr(jax.config, name)) for name in ROUNDING if hasattr(jax.config, name)}


def is_pinned() -> bool:
    """Whether this thread is within `pinned`: programs that it traces are found only by threads that are, too."""
    return getattr(_thread, "pinned", False)
