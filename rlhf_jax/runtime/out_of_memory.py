"""Out of memory on a device: which phase, what it asked for, and which options lower it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import jax

from rlhf_jax.errors import UserError

# Options that lower what a phase holds, the cheapest first.
_ACTIVATIONS = ("micro_batch_size", "gradient_checkpointing", "length_buckets", "dtype")
_WEIGHTS = ("mesh_fsdp", "adam_mu_dtype", "offload_frozen", "load_in_8bit")
LOWERS = {
    "loading": ("mesh_fsdp", "mesh_tensor", "dtype", "adam_mu_dtype", "offload_frozen", "load_in_8bit"),
    "generate": ("rollout_batch_size", "mesh_fsdp", "mesh_tensor", "offload_frozen", "dtype", "load_in_8bit"),
    "score": ("rollout_batch_size", "micro_batch_size", "offload_frozen", "dtype"),
    "experience": ("rollout_batch_size", "micro_batch_size", "offload_frozen", "dtype"),
    "update": (*_ACTIVATIONS, *_WEIGHTS),
    "evaluation": ("rollout_batch_size", "micro_batch_size", "batch_size", "dtype"),
}


class OutOfMemory(UserError):
    """A device could not hold what a phase needs."""


@contextlib.contextmanager
def translate_errors(config, phase: Callable[[], str]) -> Iterator[None]:
    """Says of an allocation that fails within it what the user can do.

    Args:
      config: of the stage.
      phase: gives what is being done, a key of `LOWERS`.

    Raises:
      OutOfMemory: in place of XLA's RESOURCE_EXHAUSTED; other errors pass.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(message(config, phase(), str(error))) from error


def message(config, phase: str, error: str) -> str:
    """What to tell the user.

    Args:
      config: of the stage.
      phase: a key of `LOWERS`.
      error: XLA's message.
    """
    asked = re.search(r"allocat\w*\s+(?:a buffer of\s+)?([\d.]+)\s*(bytes|[KMGT]i?B)?", error)
    needed = ""
    if asked and (asked[2] in (None, "bytes")):
        needed = f" when it asked for {float(asked[1]) / 2**30:,.1f} GiB more"
    elif asked:
        needed = f" when it asked for {asked[1]} {asked[2]} more"
    names = [name for name in LOWERS[phase] if hasattr(config, name) and (name != "load_in_8bit" or config.use_peft)]
    lowers = [f"{name} (now {getattr(config, name)})" for name in names]
    return (
        f"out of memory in {phase}{needed}. What lowers it: {', '.join(lowers)}. "
        "The same command with --dry_run says what each device holds"
    )
