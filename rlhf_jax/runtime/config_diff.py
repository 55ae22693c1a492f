"""The options in which two configs of a run differ, and which of them a resume may change."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Collection
from typing import Any

from rlhf_jax.runtime.options import options_metadata
from rlhf_jax.runtime.removed_options import is_removed


def may_change(rounding: bool = False) -> frozenset[str]:
    """The options that a resume may change: those that do not change what a run computes, or only what happens when it
    fails; with `rounding` also those that change it up to rounding."""
    allowed = ("free", "rounding") if rounding else ("free",)
    return frozenset(name for name, option in options_metadata().items() if option.resume in allowed)


def in_config_json(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that are no property of a run."""
    metadata = options_metadata()
    return {name: value for name, value in options.items() if name not in metadata or metadata[name].in_config_json}


def is_path(name: str) -> bool:
    """Whether an option names files, folders or something on the hub."""
    metadata = options_metadata()
    return name in metadata and metadata[name].path


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as {'a.b': value}, with values as JSON has them (tuples are lists)."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = json.loads(json.dumps(value))
    return flat


def differences(
    old: dict[str, Any],
    new: dict[str, Any],
    may_differ: Collection[str] | None = None,
    same_files: Callable[[Any, Any], bool] = operator.eq,
) -> list[str]:
    """The options in which two configs differ, one line each: 'name: old -> new'.

    Args:
      old, new: configs as dicts, nested or not.
      may_differ: options to ignore; None: those of `may_change`.
      same_files: (old value, new value) of an option that is a path -> whether both name the same files.

    Returns:
      Lines in the order of the new config; options that only the old one has come last.
    """
    may_differ = may_change() if may_differ is None else may_differ
    old, new = flatten(old), flatten(new)
    lines = []
    for name in dict.fromkeys([*new, *old]):
        if name.split(".")[-1] in may_differ:
            continue
        if name in old and name in new and is_path(name.split(".")[-1]) and same_files(old[name], new[name]):
            continue
        if name not in new and is_removed(name.split(".")[-1], old[name]):
            continue
        before, after = (json.dumps(c[name]) if name in c else "(no such option)" for c in (old, new))
        if before != after:
            lines.append(f"{name}: {before} -> {after}")
    return lines
