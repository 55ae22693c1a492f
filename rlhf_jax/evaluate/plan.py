"""The plan of an evaluation: options and a run's folder resolved to policies, data and rewards. Reads configs only."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from rlhf_jax import storage
from rlhf_jax.config import PolicyConfig, PPOConfig, RewardConfig, SFTConfig, StageConfig
from rlhf_jax.config import files as config_files
from rlhf_jax.config.check import problems_of
from rlhf_jax.data.options import PairOptions, PromptOptions
from rlhf_jax.errors import UserError
from rlhf_jax.evaluate.options import EvaluateConfig
from rlhf_jax.generate.options import SamplingOptions
from rlhf_jax.inference import POLICY_STAGES, policy_folder
from rlhf_jax.parallel.options import MeshOptions
from rlhf_jax.rewards.options import RewardOptions
from rlhf_jax.runtime import run_folder
from rlhf_jax.stages import ALGORITHMS, adapters
from rlhf_jax.tools.options import ToolOptions

REFERENCE, REF_MODEL, POLICY = "reference", "ref_model", "policy"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A policy: its name in tables, and its folder or hub name."""

    name: str
    path: str
    revision: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The resolved inputs of an evaluation.

    Attributes:
      prompts: data, sampling and rewards of the policies, as a PPO config; None: no policy is evaluated.
      greedy: greedy decoding (temperature 0); the temperature of `prompts` is then 1.
      policy: the evaluated policy.
      ref: the reference model of the KL.
      others: checkpoints that the policy is compared with.
      reference: whether it is compared with the reference answers of the data; None: if there are any.
      samples: responses to each prompt.
      pairs: model and data of the pairs, as a reward-stage config; None: no reward model is evaluated.
      output_dir: folder of the results.
      warnings: what the evaluation lacks that the run had.
    """

    prompts: PPOConfig | None
    greedy: bool
    policy: Checkpoint | None
    ref: Checkpoint | None
    others: tuple[Checkpoint, ...]
    reference: bool | None
    samples: int
    pairs: RewardConfig | None
    output_dir: str
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The plan in evaluation.json."""
        return dataclasses.asdict(dataclasses.replace(self, prompts=None, pairs=None))


def make_plan(config: EvaluateConfig) -> Plan:
    """The plan of a command.

    Raises:
      UserError: the run is not finished or has nothing to evaluate, or an option of the run or the command is invalid.
    """
    stages, objects = _finished_stages(config.run_dir) if config.run_dir is not None else ({}, {})
    names = (name for name in (*POLICY_STAGES, *stages) if name in stages and name != "reward")
    name = next(names, None)
    stage = None if name is None else stages[name]
    if stages and stage is None and config.model is None and config.data is not None:
        raise UserError(f"--run_dir {config.run_dir} has a reward model and no policy: --data needs --model too")
    prompts = policy = ref = None
    opponents: tuple[Checkpoint, ...] = ()
    reference: bool | None = False
    if stage is not None or config.model is not None:
        path = policy_folder(config.model if config.model is not None else stage.run_dir)
        policy = Checkpoint(POLICY, path, config.model_revision)
        prompts = _prompts_config(config, stage, policy)
        ref = _reference_model(config, name, stage)
        opponents, reference = _opponents(config, ref)
    pairs = _pairs_config(config, stages.get("reward"), prompts)
    if prompts is not None and "reward" in stages and stage is not None and not isinstance(stage, PolicyConfig):
        prompts = prompts if config.reward_model_path else _with_reward(prompts, stages["reward"])
    default = os.path.join(config.run_dir, "evaluation") if config.run_dir is not None else "runs/evaluation"
    plan = Plan(
        prompts=prompts,
        greedy=config.temperature == 0,
        policy=policy,
        ref=ref,
        others=opponents,
        reference=reference,
        samples=config.num_generations or max(config.best_of_n, default=1),
        pairs=pairs,
        output_dir=config.output_dir or default,
        warnings=_absent_objects(config, name, objects, prompts, pairs),
    )
    _check(plan)
    return plan


# --- the run


def _finished_stages(run_dir: str) -> tuple[dict[str, StageConfig], dict[str, list[str]]]:
    """(configs of the finished stage or stages in a folder, with paths adapted to a moved folder; the arguments of
    `rlhf_jax.run` that took the place of their options), by stage name."""
    stages, objects = {}, {}
    for folder in config_files.stage_folders(run_dir, "--run_dir "):
        stage, config = config_files.load_run(folder)
        if not isinstance(config, StageConfig):
            raise UserError(f"--run_dir {run_dir}: its config.json is of a {stage}, not of one stage")
        finished = run_folder.RunFolder(storage.absolute(folder)).finished()
        if finished is None:
            raise UserError(
                f"--run_dir {run_dir}: the run in {folder} is not finished, so its model is not written yet. Rerun its "
                "command to finish it, or set --model to a checkpoint"
            )
        stages[stage], objects[stage] = config, finished["objects"]
    return stages, objects


def _absent_objects(
    config: EvaluateConfig,
    stage: str | None,
    objects: dict[str, list[str]],
    prompts: PPOConfig | None,
    pairs: RewardConfig | None,
) -> tuple[str, ...]:
    """Warnings of reward functions that were arguments of `rlhf_jax.run` and so are not in the run's folder; a
    UserError if the evaluation data were."""
    for name, used, option in ((stage, prompts, "data"), ("reward", pairs, "pairs")):
        arguments = objects.get(name, [])
        lost = "eval_dataset" in arguments or ("train_dataset" in arguments and used and used.eval_dataset_name is None)
        if used is not None and lost and getattr(config, option) is None:
            raise UserError(
                f"--run_dir {config.run_dir}: the data set of this run was an argument of rlhf_jax.run, so its folder "
                f"does not name it. Set --{option} to a file, a folder or a hub name"
            )
    for option, example in (("tools", "FILE.py:FUNCTION"), ("environment_factory", "FILE.py:CLASS")):
        if prompts is not None and option in objects.get(stage, []) and not getattr(prompts, option):
            raise UserError(
                f"--run_dir {config.run_dir}: {option} of this run was an argument of rlhf_jax.run, so its folder does "
                f"not name it. Set --{option} to {example}"
            )
    if prompts is not None and "reward_funcs" in objects.get(stage, []) and config.reward_funcs is None:
        return (
            "the reward functions of this run were arguments of rlhf_jax.run, so its folder does not name them and "
            "they score nothing here; set --reward_funcs to FILE.py:FUNCTION",
        )
    return ()


# --- policies and their data


def _fields(config_type: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config_type)}


def _set_options(config: EvaluateConfig, target: type) -> dict[str, Any]:
    """The options that are set and that a stage's config also has."""
    skip = {"run_dir", "seed", "batch_size", "num_generations", "num_completions_to_print"}
    skip |= {"distributed", "num_processes", "process_id"}
    names = (_fields(EvaluateConfig) & _fields(target)) - skip
    return {name: value for name in names if (value := getattr(config, name)) is not None}


_OF_PROMPTS = (
    *(PromptOptions, SamplingOptions, RewardOptions, ToolOptions, MeshOptions),
    *("seed", "dtype", "missing_eos_penalty", "eos_penalty_mode"),
)
_OF_PAIRS = (PairOptions, MeshOptions, "seed", "dtype")
"""The options of a run that its evaluation has too: of a class, or by name."""


def _options_of_run(run: StageConfig, which: Sequence[type | str]) -> dict[str, Any]:
    names = (name for part in which for name in ([part] if isinstance(part, str) else _fields(part)))
    return {name: getattr(run, name) for name in names if name in vars(run)} | {"length_buckets": None}


def _prompts_config(config: EvaluateConfig, run: StageConfig | None, policy: Checkpoint) -> PPOConfig:
    """Data, sampling and rewards: those of the run, overridden by options of the command."""
    base: dict[str, Any] = {"reward_model_path": None, "dataset_test_split": "validation", "max_eval_samples": 256}
    if run is not None:
        base |= _options_of_run(run, _OF_PROMPTS) | {"reward_failure": "raise", "tools_replay": None}
    if isinstance(run, SFTConfig):
        base["response_length"] = run.max_length - run.query_length
    base |= {"sft_model_path": policy.path, "model_revision": policy.revision or "main", "batch_size": 64}
    options = _set_options(config, PPOConfig)
    if options.get("temperature") == 0:
        options["temperature"] = 1.0
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        if name in options and base.get("generation_kwargs"):
            base["generation_kwargs"] = {k: v for k, v in base["generation_kwargs"].items() if k != name}
    if {"structured_outputs_regex", "structured_outputs_regex_column"} & options.keys():
        base |= {"structured_outputs_regex": None, "structured_outputs_regex_column": None}
    if "stop_token_ids" in options:
        base["stop_token_id"] = None
    if {"reward_model_path", "reward_funcs", "reward_server"} & options.keys() and "reward_weights" not in options:
        base["reward_weights"] = None  # the run's weights belong to its own rewards
    if "reward_model_path" in options:
        base |= {"more_reward_models": (), "reward_ensemble": "sum", "reward_model_revision": "main"}
    if config.data is not None:
        base |= {"dataset_name": config.data, "dataset_test_split": config.split, "eval_dataset_name": None}
        base |= {"dataset_config": None, "dataset_revision": None}
    return PPOConfig(**(base | options))


def _with_reward(prompts: PPOConfig, reward: RewardConfig) -> PPOConfig:
    """The config with the reward model of a pipeline that has no PPO, RLOO or GRPO stage."""
    return dataclasses.replace(prompts, reward_model_path=os.path.join(reward.run_dir, "reward_model"))


def _reference_model(config: EvaluateConfig, stage: str | None, run: StageConfig | None) -> Checkpoint | None:
    """The reference model of the KL: ref_model_path, or that of the run."""
    if config.ref_model_path is not None:
        return Checkpoint(REF_MODEL, policy_folder(config.ref_model_path))
    if not isinstance(run, PolicyConfig):
        return None
    if run.ref_model_path is not None:
        return Checkpoint(REF_MODEL, run.ref_model_path)
    if run.scratch_model is not None:
        return None
    path, revision = run.sft_model_path, run.model_revision
    if run.use_peft:
        start = adapters.start_of(run, stage in ALGORITHMS and ALGORITHMS[stage].continues_adapter)
        has_adapter = start.reference is not None
        path, revision = (start.paths[start.reference], None) if has_adapter else (start.path, start.revision)
    return Checkpoint(REF_MODEL, path, revision)


def _opponents(config: EvaluateConfig, ref: Checkpoint | None) -> tuple[tuple[Checkpoint, ...], bool | None]:
    """(checkpoints to compare with, whether to compare with the reference answers; None: if there are any)."""
    if config.against is None:
        return (() if ref is None else (ref,)), None
    opponents, names = [], {POLICY, REFERENCE, REF_MODEL}
    for spec in dict.fromkeys(config.against):
        if spec == REFERENCE:
            continue
        if spec == REF_MODEL:
            if ref is None:
                raise UserError(f"--against {REF_MODEL}: there is no reference model; set --ref_model_path")
            opponents.append(ref)
            continue
        path = policy_folder(spec)
        parts = [part for part in path.rstrip("/").split("/") if part not in (".", "")]
        name = next((n for i in range(1, len(parts) + 1) if (n := "/".join(parts[-i:])) not in names), path)
        if parts[-1] == POLICY and len(parts) > 1:  # runs all write their policy to a folder of this name
            name = "/".join(parts[-2:])
        while name in names:
            name += "'"
        names.add(name)
        opponents.append(Checkpoint(name, path))
    return tuple(opponents), REFERENCE in config.against


# --- pairs


def _pairs_config(config: EvaluateConfig, run: RewardConfig | None, prompts: PPOConfig | None) -> RewardConfig | None:
    """The reward model to evaluate and its pairs: the option pairs, or the evaluation pairs of the reward stage."""
    if config.pairs is None and run is None:
        return None
    model = config.reward_model_path or (prompts.reward_model_path if prompts is not None else None)
    if run is not None and model is None:
        model = os.path.join(run.run_dir, "reward_model")
    if model is None:
        raise UserError("--pairs needs --reward_model_path: the reward model to evaluate on them")
    base = {"dataset_test_split": "validation", "max_eval_samples": 256}
    if run is not None:
        base = _options_of_run(run, _OF_PAIRS)
    elif prompts is not None:
        base |= {"query_length": prompts.query_length, "dtype": prompts.dtype}
    base |= {
        "normalize_dataset_name": None,
        "model_name_or_path": model,
        "model_revision": config.reward_model_revision or "main",
    }
    if config.pairs is not None:
        base |= {"dataset_name": config.pairs, "dataset_test_split": config.pairs_split, "eval_dataset_name": None}
        base |= {"dataset_config": None, "dataset_revision": None, "margin_column": None}
    options = _set_options(config, RewardConfig)
    for name in ("model_revision", "dataset_config", "dataset_revision", "tokenizer_name_or_path"):
        options.pop(name, None)  # they are options of the policy and the prompts
    return RewardConfig(**(base | options))


# --- validation


def _check(plan: Plan) -> None:
    """UserError for invalid options, or an output folder that cannot be written."""
    problems = []
    for config in (plan.prompts, plan.pairs):
        if config is not None:
            problems += problems_of(config)
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    if storage.is_remote(plan.output_dir):
        return  # `run` tries it
    existing = storage.absolute(plan.output_dir)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
        reason = "is not a folder" if not os.path.isdir(existing) else "cannot be written to"
        raise UserError(f"--output_dir {plan.output_dir}: {existing} {reason}. Set another folder")
