"""What a config means once defaults that depend on other options are filled in."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from rlhf_jax import storage
from rlhf_jax.config.stages import STAGES, Config, Pipeline, StageConfig, stage_name
from rlhf_jax.errors import UserError
from rlhf_jax.option import checked_types
from rlhf_jax.runtime.options import CommandOptions

SHARED = ("seed", "resume", "dry_run", "override_resume")
"""Options of a pipeline that override those of its stages, if given."""
COMMAND_OPTIONS = tuple(field.name for field in dataclasses.fields(CommandOptions) if field.name not in SHARED)
"""Options of the command, which all stages of a pipeline share."""


def resolve(config: Config) -> Config:
    """The config with every value of its declared type, its run folder named and, in a pipeline, each stage with its
    folder, the pipeline's own options, and `{run_dir}` replaced.

    Idempotent; reads no file. Defaults that depend on devices stay None: see `batch_sizes.for_devices`.

    Raises:
      UserError: a value of another type, or a pipeline's stage with options that only the pipeline may have.
    """
    config = checked_types(config)
    changed: dict[str, Any] = {"run_dir": _run_dir(config), **_stages(config)}
    return dataclasses.replace(config, **changed)


def stages_of(config: Config) -> dict[str, StageConfig]:
    """The stages to run, in order, by name, each resolved: the one stage, or those of a pipeline."""
    config = resolve(config)
    if not isinstance(config, Pipeline):
        return {stage_name(config): config}
    return {name: stage for name in STAGES if (stage := getattr(config, name, None)) is not None}


def _run_dir(config: Config) -> str:
    run_dir = os.path.expanduser(config.run_dir or f"runs/{stage_name(config)}")
    return storage.absolute(run_dir) if storage.is_remote(run_dir) else run_dir.rstrip("/") or "/"


def _stages(config: Config) -> dict[str, StageConfig]:
    """The resolved stages of a pipeline by name; none for a stage's config."""
    if not isinstance(config, Pipeline):
        return {}
    run_dir = _run_dir(config)
    shared = {name: getattr(config, name) for name in SHARED}
    shared = {name: value for name, value in shared.items() if value is not None and value is not False}
    of_command = {name: getattr(config, name) for name in COMMAND_OPTIONS}
    stages = {}
    for name in STAGES:
        stage, folder = getattr(config, name, None), f"{run_dir}/{name}"
        if stage is None:
            continue
        if stage.run_dir is not None and storage.absolute(stage.run_dir) != storage.absolute(folder):
            raise UserError(
                f"{name}.run_dir is {stage.run_dir!r}, but this stage of the pipeline writes to {folder!r}: give "
                "run_dir for the whole pipeline, or run the stage with its own config."
            )
        for option, value in of_command.items():
            if getattr(stage, option) not in (getattr(type(stage), option), value):
                raise UserError(
                    f"{name}.{option} is {getattr(stage, option)!r}, but all stages run in one command: "
                    f"give --{option} for the whole pipeline."
                )
        paths = {key: text.replace("{run_dir}", run_dir) for key, text in vars(stage).items() if isinstance(text, str)}
        stages[name] = dataclasses.replace(stage, **{**paths, **shared, **of_command, "run_dir": folder})
    return stages
