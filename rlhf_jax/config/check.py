"""Which configs can work: the options of each owner, and those of a pipeline's stages together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhf_jax import storage
from rlhf_jax.config.resolution import stages_of
from rlhf_jax.config.stages import Config, Pipeline
from rlhf_jax.errors import UserError
from rlhf_jax.option import Options, out_of_range
from rlhf_jax.runtime.options import bucket_paths


def check(config: Config) -> None:
    """Raise UserError for a config that cannot work, with every problem on a line of its own; in a pipeline each line
    begins with its stage. Needs no model and no data."""
    problems = []
    for name, stage in stages_of(config).items():
        problems += [f"{name}: {line}" if isinstance(config, Pipeline) else line for line in problems_of(stage)]
    if isinstance(config, Pipeline):
        problems += _pipeline_links(config)
    problems += bucket_paths(config.run_dir or "")
    if problems:
        raise UserError("\n".join(problems))


def problems_of(options: Options) -> list[str]:
    """A line for each problem of some options: values out of range, or if there are none, options that do not fit
    together, since arithmetic on values out of range would mislead."""
    return [*out_of_range(options)] or [*options.problems()]


def _pipeline_links(config: Pipeline) -> Iterator[str]:
    """A line for a pipeline that has not exactly one policy stage, or whose policy stage starts from other models."""
    policies = {name: stage for name in ("ppo", "rloo", "grpo") if (stage := getattr(config, name)) is not None}
    if len(policies) != 1:
        policy_names = " and ".join(policies) or "none"
        yield f"a pipeline has one of ppo, rloo and grpo, not {policy_names}: set the others to None."
        return
    run_dir, (policy, stage) = config.run_dir or "{run_dir}", *policies.items()
    exports = {}
    if config.sft is not None:
        exports["sft_model_path"] = "sft/policy"
    if config.reward is not None:
        exports["reward_model_path"] = "reward/reward_model"
    for name, folder in exports.items():
        path = (getattr(stage, name) or "").replace("{run_dir}", run_dir)
        if storage.absolute(path) != storage.absolute(f"{run_dir}/{folder}"):
            yield (
                f"{policy}: {name} is {getattr(stage, name)!r}, not this pipeline's own '{{run_dir}}/{folder}': give "
                f"that, or run {policy} with its own config."
            )
    for name, path in _starts(config, policy, stage) if config.sft is None else ():
        if "{run_dir}" in (path or "") or storage.absolute(path or "") == storage.absolute(f"{run_dir}/sft/policy"):
            yield f"{name} is {path!r}, but the pipeline has no SFT stage (sft is None): give a model."
    if config.reward is None:
        if stage.reward_model_path is not None:
            yield (
                f"{policy}: reward_model_path is {stage.reward_model_path!r}, but the pipeline has no reward stage "
                "(reward is None): set it to None and give reward_funcs or reward_server, or add the stage."
            )
        elif not stage.reward_funcs and stage.reward_server is None and not stage.environment_factory:
            yield (
                f"{policy}: without a reward stage (reward is None) the pipeline needs reward_funcs, reward_server or "
                "environment_factory."
            )


def _starts(config: Pipeline, policy: str, stage: Any) -> Iterator[tuple[str, str | None]]:
    """The options that name the models which a pipeline without an SFT stage starts from."""
    yield f"{policy}: sft_model_path", stage.sft_model_path
    if config.reward is not None:
        yield "reward: model_name_or_path", config.reward.model_name_or_path
