"""The options in which two configs of a run differ, and which of them a resume may change."""

from __future__ import annotations

import fnmatch
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_jax.config.removed import is_removed
from rlhf_jax.parallel import multihost

# Not in config.json: how processes connect is not a property of the run, and differs between its processes.
NOT_KEPT = (*multihost.OPTIONS, "topology")
# Options that do not change what a run computes, or only what happens when it fails.
MAY_DIFFER = (
    *("run_dir", "resume", "override_resume", "dry_run", "max_minutes", "save_*"),
    *("logging_steps", "report_to", "run_name", "project", "push_to_hub", "hub_*", "num_completions_to_print"),
    *("metric_for_best_model", "greater_is_better", "load_best_model_at_end"),
    *("dataset_num_proc", "on_nonfinite", "max_nonfinite", "alarm_*", "early_stop"),
)
# Options that change where and in which parts results are computed: equal up to rounding.
ROUNDING = ("mesh_*", "micro_batch_*", "rollout_batch_size", "gradient_checkpointing*", "offload_frozen")
ROUNDING += ("deterministic", "attn_implementation", "decode_shrink", "draft", "draft_tokens")

# Options that name files or folders, or something on the hub.
PATHS = ("*_path", "*dataset_name", "datasets", "adapters", "more_reward_models", "reward_funcs")


def matches(name: str, patterns: Sequence[str] = MAY_DIFFER) -> bool:
    """Whether an option matches one of `patterns`, in which `*` matches anything."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


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
    may_differ: Sequence[str] = MAY_DIFFER,
    same_files: Callable[[Any, Any], bool] = operator.eq,
) -> list[str]:
    """The options in which two configs differ, one line each: 'name: old -> new'.

    Args:
      old, new: configs as dicts, nested or not.
      may_differ: options to ignore; `*` matches anything.
      same_files: (old value, new value) of an option of `PATHS` -> whether both name the same files.

    Returns:
      Lines in the order of the new config; options that only the old one has come last.
    """
    old, new = flatten(old), flatten(new)
    lines = []
    for name in dict.fromkeys([*new, *old]):
        if matches(name.split(".")[-1], may_differ):
            continue
        if name in old and name in new and matches(name, PATHS) and same_files(old[name], new[name]):
            continue
        if name not in new and is_removed(name.split(".")[-1], old[name]):
            continue
        before, after = (json.dumps(c[name]) if name in c else "(no such option)" for c in (old, new))
        if before != after:
            lines.append(f"{name}: {before} -> {after}")
    return lines
