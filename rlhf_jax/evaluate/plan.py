"""From options and a run's folder to what is evaluated: policies, data, rewards. Of these it reads configs alone."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from rlhf_jax.config import (
    PolicyConfig,
    PPOConfig,
    RewardConfig,
    SFTConfig,
    StageConfig,
    stage_name,
    validation,
)
from rlhf_jax.config import files as config_files
from rlhf_jax.errors import UserError
from rlhf_jax.evaluate.options import EvaluateConfig
from rlhf_jax.inference import policy_folder
from rlhf_jax.runtime import run_folder
from rlhf_jax.stages import ALGORITHMS, adapters

REFERENCE, REF_MODEL, POLICY = "reference", "ref_model", "policy"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A policy by its name in tables and its place."""

    name: str
    path: str
    revision: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
      prompts: data, sampling and rewards of the policies, as a config of PPO's; None: no policy is evaluated.
      greedy: temperature 0 was asked for; that of `prompts` is then 1.
      policy: the one evaluated.
      ref: the KL's reference.
      others: checkpoints that the policy is compared with.
      reference: whether it is compared with the data's answers: None where they are there.
      samples: responses to each prompt.
      pairs: data of the pairs, as a config of the reward stage's; None: no reward model is measured.
      output_dir: where results go.
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

    def shown(self) -> dict[str, Any]:
        """As evaluation.json tells it."""
        return dataclasses.asdict(dataclasses.replace(self, prompts=None, pairs=None))


def make(config: EvaluateConfig) -> Plan:
    """The plan of a command.

    Raises:
      UserError: the run is not finished or has nothing to evaluate, an option of it or of the command cannot be.
    """
    stages = _stages(config.run_dir) if config.run_dir is not None else {}
    own = next((stages[name] for name in ("ppo", "rloo", "sft") if name in stages), None)
    if stages and own is None and config.model is None and config.data is not None:
        raise UserError(f"--run_dir {config.run_dir} holds a reward model and no policy: --data needs --model too")
    prompts = policy = ref = None
    others: tuple[Checkpoint, ...] = ()
    reference: bool | None = False
    if own is not None or config.model is not None:
        path = policy_folder(config.model if config.model is not None else own.run_dir)
        policy = Checkpoint(POLICY, path, config.model_revision)
        prompts = _prompts(config, own, policy)
        ref = _ref(config, own)
        others, reference = _against(config, policy, ref)
    pairs = _pairs(config, stages.get("reward"), prompts)
    if prompts is not None and "reward" in stages and own is not None and not isinstance(own, PolicyConfig):
        prompts = prompts if config.reward_model_path else _with_reward(prompts, stages["reward"])
    default = os.path.join(config.run_dir, "evaluation") if config.run_dir is not None else "runs/evaluation"
    plan = Plan(
        prompts=prompts,
        greedy=config.temperature == 0,
        policy=policy,
        ref=ref,
        others=others,
        reference=reference,
        samples=config.num_generations or max(config.best_of_n, default=1),
        pairs=pairs,
        output_dir=config.output_dir or default,
    )
    _check(plan)
    return plan


# --- the run


def _stages(run_dir: str) -> dict[str, StageConfig]:
    """The finished stages in a folder: one, or those of a pipeline, with paths that hold where the run was moved."""
    if not os.path.isdir(run_dir):
        raise UserError(f"--run_dir {run_dir}: there is no such folder")
    single = os.path.isfile(os.path.join(run_dir, "config.json"))
    folders = [run_dir] if single else [os.path.join(run_dir, name) for name in ("sft", "reward", "ppo", "rloo")]
    found = {}
    for place in folders:
        if not os.path.isfile(os.path.join(place, "config.json")):
            continue
        config = config_files.load_config(place)
        if not isinstance(config, StageConfig):
            raise UserError(f"--run_dir {run_dir}: its config.json is of a {stage_name(config)}, not of one stage")
        if run_folder.RunFolder(os.path.abspath(place)).finished() is None:
            raise UserError(
                f"--run_dir {run_dir}: the run in {place} is not finished, so its model is not written yet. Let the "
                "same command finish it, or give a checkpoint by --model"
            )
        found[stage_name(config)] = _moved(config, place)
    if not found:
        raise UserError(
            f"--run_dir {run_dir} holds no run: there is no config.json in it, nor in a folder sft, reward, ppo or rloo"
        )
    return found


def _moved(config: StageConfig, place: str) -> StageConfig:
    """The config with its folder where it is now; paths into the pipeline's folder go along."""
    old, new = os.path.dirname(os.path.abspath(config.run_dir or "")), os.path.dirname(os.path.abspath(place))
    changed: dict[str, Any] = {"run_dir": place}
    for name, value in vars(config).items():
        if isinstance(value, str) and name.endswith("_path") and not os.path.exists(value):
            inside = os.path.relpath(os.path.abspath(value), old)
            if not inside.startswith("..") and os.path.exists(os.path.join(new, inside)):
                changed[name] = os.path.join(new, inside)
    return dataclasses.replace(config, **changed)


# --- policies and their data


def _fields(of: type) -> set[str]:
    return {field.name for field in dataclasses.fields(of)}


def _given(config: EvaluateConfig, target: type) -> dict[str, Any]:
    """The options of a command that a stage's config has too."""
    skip = {"run_dir", "seed", "batch_size", "num_generations", "num_completions_to_print"}
    names = (_fields(EvaluateConfig) & _fields(target)) - skip
    return {name: value for name in names if (value := getattr(config, name)) is not None}


_PLAIN = {
    **dict.fromkeys(("micro_batch_size", "rollout_batch_size", "length_buckets", "scratch_model")),
    **dict.fromkeys(("early_stop", "report_to"), ()),
    **dict.fromkeys(("whiten_rewards", "gradient_checkpointing", "log_completions"), False),
    **{"batch_size": 64, "num_mini_batches": 1, "eval_steps": 0, "offload_frozen": "none"},
    **{"value_model": "shared_backbone", "value_model_path": None, "reward_failure": "raise", "on_nonfinite": "stop"},
    **{"use_peft": False, "load_in_8bit": False, "lora_value": "full", "start_adapter": "auto", "adapters": ()},
    **dict.fromkeys(("lora_target_modules", "modules_to_save", "model_adapter_name", "ref_adapter_name")),
}
"""Options of training, as they neither matter nor get in the way."""


def _prompts(config: EvaluateConfig, run: StageConfig | None, policy: Checkpoint) -> PPOConfig:
    """Data, sampling and rewards: the run's, with the command's options over them."""
    base: dict[str, Any] = {"reward_model_path": None, "dataset_test_split": "validation", "max_eval_samples": 256}
    if run is not None:
        base |= {name: getattr(run, name) for name in _fields(PolicyConfig) & _fields(type(run))}
    if isinstance(run, SFTConfig):
        base["response_length"] = run.max_length - run.query_length
    base |= {**_PLAIN, "sft_model_path": policy.path, "model_revision": policy.revision or "main"}
    base["tokenizer_name_or_path"] = None
    given = _given(config, PPOConfig)
    if given.get("temperature") == 0:
        given["temperature"] = 1.0
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        if name in given and base.get("generation_kwargs"):
            base["generation_kwargs"] = {k: v for k, v in base["generation_kwargs"].items() if k != name}
    if {"reward_model_path", "reward_funcs", "reward_server"} & given.keys() and "reward_weights" not in given:
        base["reward_weights"] = None  # of other rewards
    if "reward_model_path" in given:
        base |= {"more_reward_models": (), "reward_ensemble": "sum", "reward_model_revision": "main"}
    if config.data is not None:
        base |= {"dataset_name": config.data, "dataset_test_split": config.split, "eval_dataset_name": None}
        base |= {"dataset_config": None, "dataset_revision": None}
    return PPOConfig(**(base | given))


def _with_reward(prompts: PPOConfig, reward: RewardConfig) -> PPOConfig:
    """A pipeline without its policy stage: its reward model scores."""
    return dataclasses.replace(prompts, reward_model_path=os.path.join(reward.run_dir, "reward_model"))


def _ref(config: EvaluateConfig, run: StageConfig | None) -> Checkpoint | None:
    """The KL's reference: the one given, else the run's."""
    if config.ref_model_path is not None:
        return Checkpoint(REF_MODEL, policy_folder(config.ref_model_path), config.ref_model_revision)
    if not isinstance(run, PolicyConfig):
        return None
    if run.ref_model_path is not None:
        return Checkpoint(REF_MODEL, run.ref_model_path, run.ref_model_revision)
    if run.scratch_model is not None:
        return None
    path, revision = run.sft_model_path, run.model_revision
    if run.use_peft:
        start = adapters.start_of(run, ALGORITHMS[stage_name(run)].continues_adapter)
        named = start.reference is not None
        path, revision = (start.paths[start.reference], None) if named else (start.path, start.revision)
    return Checkpoint(REF_MODEL, path, revision)


def _against(
    config: EvaluateConfig, policy: Checkpoint, ref: Checkpoint | None
) -> tuple[tuple[Checkpoint, ...], bool | None]:
    """(checkpoints to compare with, whether the data's answers are compared with: None where they are there)."""
    if config.against is None:
        return (() if ref is None else (ref,)), None
    others, names = [], {POLICY, REFERENCE, REF_MODEL}
    for spec in dict.fromkeys(config.against):
        if spec == REFERENCE:
            continue
        if spec == REF_MODEL:
            if ref is None:
                raise UserError(f"--against {REF_MODEL}: there is no reference model; give --ref_model_path")
            others.append(ref)
            continue
        path = policy_folder(spec)
        parts = [part for part in path.rstrip("/").split("/") if part not in (".", "")]
        name = next((n for i in range(1, len(parts) + 1) if (n := "/".join(parts[-i:])) not in names), path)
        if parts[-1] == POLICY and len(parts) > 1:  # every run's is called so
            name = "/".join(parts[-2:])
        while name in names:
            name += "'"
        names.add(name)
        others.append(Checkpoint(name, path))
    return tuple(others), REFERENCE in config.against


# --- pairs


def _pairs(config: EvaluateConfig, run: RewardConfig | None, prompts: PPOConfig | None) -> RewardConfig | None:
    """The pairs to measure reward models on: those given, else the reward stage's, where its model is the one."""
    if config.pairs is None and run is None:
        return None
    model = config.reward_model_path or (prompts.reward_model_path if prompts is not None else None)
    if run is not None and model is None:
        model = os.path.join(run.run_dir, "reward_model")
    if model is None:
        raise UserError("--pairs needs --reward_model_path: the reward model to measure on them")
    base = {"dataset_test_split": "validation", "max_eval_samples": 256}
    if run is not None:
        base = {name: getattr(run, name) for name in _fields(RewardConfig)}
    elif prompts is not None:
        base |= {"query_length": prompts.query_length, "dtype": prompts.dtype}
    base |= {**{k: v for k, v in _PLAIN.items() if k in _fields(RewardConfig)}, "normalize_dataset_name": None}
    base |= {"model_name_or_path": model, "model_revision": config.reward_model_revision or "main"}
    if config.pairs is not None:
        base |= {"dataset_name": config.pairs, "dataset_test_split": config.pairs_split, "eval_dataset_name": None}
        base |= {"dataset_config": None, "dataset_revision": None, "margin_column": None}
    given = _given(config, RewardConfig)
    for name in ("model_revision", "dataset_config", "dataset_revision", "tokenizer_name_or_path"):
        given.pop(name, None)  # of the policy and of the prompts
    return RewardConfig(**(base | {"tokenizer_name_or_path": None} | given))


# --- what cannot be


def _check(plan: Plan) -> None:
    problems = []
    for config in (plan.prompts, plan.pairs):
        if config is not None:
            problems += [*validation.out_of_range(config)] or [*validation.combinations(config)]
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    nearest = os.path.abspath(plan.output_dir)
    while not os.path.exists(nearest):
        nearest = os.path.dirname(nearest)
    if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
        what = "is no folder" if not os.path.isdir(nearest) else "cannot be written to"
        raise UserError(f"--output_dir {plan.output_dir}: {nearest} {what}. Give another folder")
