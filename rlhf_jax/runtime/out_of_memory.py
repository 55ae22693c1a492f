"""Out of memory on a device: names the phase, the size of the allocation, and options that need less."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import jax

from rlhf_jax.errors import UserError

# Options that lower the memory of a phase, the cheapest first.
_ACTIVATIONS = ("micro_batch_size", "micro_batch_tokens", "gradient_checkpointing", "length_buckets", "dtype")
_ROWS = ("rollout_batch_size", "decode_slots")
_QUANTIZED = ("load_in_8bit", "load_in_4bit")
_WEIGHTS = ("mesh_fsdp", "adam_mu_dtype", "offload_frozen", *_QUANTIZED)
LOWERS = {
    "loading": ("mesh_fsdp", "mesh_tensor", "dtype", "adam_mu_dtype", "offload_frozen", *_QUANTIZED),
    "generate": (*_ROWS, "mesh_fsdp", "mesh_tensor", "offload_frozen", "dtype", *_QUANTIZED),
    "score": ("rollout_batch_size", "micro_batch_size", "micro_batch_tokens", "offload_frozen", "dtype"),
    "experience": ("rollout_batch_size", "micro_batch_size", "micro_batch_tokens", "offload_frozen", "dtype"),
    "update": (*_ACTIVATIONS, *_WEIGHTS),
    "evaluation": ("rollout_batch_size", "micro_batch_size", "micro_batch_tokens", "batch_size", "dtype"),
}


class OutOfMemory(UserError):
    """A device has too little memory for a phase."""


@contextlib.contextmanager
def translate_errors(config, phase: Callable[[], str]) -> Iterator[None]:
    """Raises OutOfMemory in place of XLA's RESOURCE_EXHAUSTED; other errors pass.

    Args:
      config: of the stage.
      phase: returns the current phase, a key of `LOWERS`.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(message(config, phase(), str(error))) from error


def message(config, phase: str, error: str) -> str:
    """The error message: what failed and which options to change.

    Args:
      config: of the stage.
      phase: a key of `LOWERS`.
      error: XLA's message.
    """
    request = re.search(r"allocat\w*\s+(?:a buffer of\s+)?([\d.]+)\s*(bytes|[KMGT]i?B)?", error)
    needed = ""
    if request and (request[2] in (None, "bytes")):
        needed = f" (allocating {float(request[1]) / 2**30:,.1f} GiB)"
    elif request:
        needed = f" (allocating {request[1]} {request[2]})"
    return (
        f"out of memory in {phase}{needed}. Options that need less: {', '.join(lowers(config, phase))}. "
        "Run the command with --dry_run to see what each device holds"
    )


def lowers(config, phase: str) -> list[str]:
    """The options that lower the memory of a phase, with their values, the cheapest first."""
    no_help = set() if config.use_peft else set(_QUANTIZED)
    no_help |= {"load_in_8bit"} if config.load_in_4bit else set()
    no_help |= {"micro_batch_size"} if getattr(config, "micro_batch_tokens", None) is not None else set()
    names = [name for name in LOWERS[phase] if hasattr(config, name) and name not in no_help]
    return [f"{name} (now {getattr(config, name)})" for name in names]
