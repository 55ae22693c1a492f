"""Out of memory on a device: names the phase, the size of the allocation, and options that need less."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import jax

from rlhf_jax.errors import UserError
from rlhf_jax.option import metadata

PHASES = ("loading", "generate", "score", "experience", "update", "evaluation")
_QUANTIZED = ("load_in_8bit", "load_in_4bit")


class OutOfMemory(UserError):
    """A device has too little memory for a phase."""


@contextlib.contextmanager
def translate_errors(config, phase: Callable[[], str]) -> Iterator[None]:
    """Raises OutOfMemory in place of XLA's RESOURCE_EXHAUSTED; other errors pass.

    Args:
      phase: returns the current phase, one of `PHASES`.
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
      phase: one of `PHASES`.
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


def what_needs_less(config, phase: str) -> str:
    """What to change where a phase does not fit, by a compiled program."""
    options = lowers(config, phase) + ([] if config.use_peft else ["use_peft (now False)"])
    return f"Use more devices; options that need less: {', '.join(options)}"


def lowers(config, phase: str) -> list[str]:
    """The options that lower the memory of a phase, with their values, the cheapest first."""
    no_help = set() if config.use_peft else set(_QUANTIZED)
    no_help |= {"load_in_8bit"} if config.load_in_4bit else set()
    no_help |= {"micro_batch_size"} if config.micro_batch_tokens is not None else set()
    no_help |= {"gradient_checkpointing"} if config.remat == "full" else set()
    lowering = {name: metadata(type(config), name).lowers for name in vars(config) if name not in no_help}
    names = sorted((name for name in lowering if phase in lowering[name]), key=lambda name: lowering[name][phase])
    # With policy dots it is the policy that recomputes more.
    shown = {"gradient_checkpointing": "gradient_checkpointing_policy"} if config.remat == "dots" else {}
    names = [shown.get(name, name) for name in names]
    return [f"{name} (now {vars(config)[name]})" for name in names]
