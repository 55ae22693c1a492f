"""Runs an evaluation: validate, load configs and data, sample, score, judge, aggregate, write. All user errors that can
be detected early are raised before weights are loaded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from rlhf_jax import storage
from rlhf_jax.errors import UserError
from rlhf_jax.evaluate import plan as planning
from rlhf_jax.evaluate import rouge, terminal
from rlhf_jax.evaluate.judge import PROMPT, FunctionJudge, RemoteJudge, check_prompt
from rlhf_jax.evaluate.options import EvaluateConfig, check
from rlhf_jax.evaluate.pairs import PairEvaluation
from rlhf_jax.evaluate.policies import PolicyEvaluation
from rlhf_jax.models.placement import Weights
from rlhf_jax.parallel import jax_settings, multihost, sharding
from rlhf_jax.rewards.python_functions import resolve
from rlhf_jax.storage import write_atomically
from rlhf_jax.utils.strict_json import json_text


@storage.from_here()
@jax_settings.pinned()
def run(config: EvaluateConfig, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs an evaluation, prints its tables and writes evaluation.json and samples.jsonl. With several processes every
    one must call it; the first one judges, prints and writes.

    Args:
      config: the options.
      log: called with each line of progress and each table.

    Returns:
      The content of evaluation.json.

    Raises:
      UserError: an option, a file, a row or a tensor is invalid, or a judge or reward failed.
    """
    log = log if multihost.is_main() else lambda _: None
    check(config)
    plan = planning.make_plan(config)
    for warning in plan.warnings:
        log(f"warning: {warning}")
    judges = _judges(config)
    if config.rouge:
        rouge.check()
    bootstrap_options = {"resamples": config.bootstrap_resamples, "seed": config.seed}
    weights = Weights(sharding.make_mesh())
    policies = None if plan.prompts is None else PolicyEvaluation(config, plan, weights)
    pairs = None if plan.pairs is None else PairEvaluation(plan.pairs, config, weights)
    if policies is not None and judges and not policies.opponents:
        raise UserError(
            "a judge compares two answers: set --against to a checkpoint, or to 'reference' with data that has answers"
        )
    for judge in judges:
        if isinstance(judge, RemoteJudge) and policies is not None:
            multihost.from_first(judge.probe)
    options = {name: value for name, value in dataclasses.asdict(config).items() if name not in _PROCESSES}
    results: dict[str, Any] = {"config": options, "plan": plan.as_json()}
    multihost.from_first(lambda: _open_output(plan.output_dir))
    samples: list[dict[str, Any]] = []
    if policies is not None:
        policy_results, samples = policies.run(judges, bootstrap_options, log)
        results |= policy_results
    if pairs is not None:
        results["reward_model"] = {"path": plan.pairs.model_name_or_path} | pairs.run(bootstrap_options, log)
    path = os.path.join(plan.output_dir, "evaluation.json")
    multihost.from_first(lambda: write_atomically(path, json_text(results, indent=2) + "\n"))
    for block in terminal.blocks(results, samples, config.num_completions_to_print):
        log(block)
    files = ["evaluation.json"] + (["samples.jsonl"] if samples else [])
    log(f"written: {' and '.join(os.path.join(plan.output_dir, name) for name in files)}")
    return results


_PROCESSES = ("distributed", "num_processes", "process_id")
"""Options without effect on the results, which evaluation.json leaves out."""


def _open_output(folder: str) -> None:
    """Creates the folder of the results; one in a bucket is tried, before anything is computed."""
    storage.make_dir(folder)
    if storage.is_remote(folder):
        write_atomically(os.path.join(folder, ".writable"), "")
        storage.remove(os.path.join(folder, ".writable"))


def _judges(config: EvaluateConfig) -> list[FunctionJudge | RemoteJudge]:
    """The configured judges."""
    timeout = 600.0 if config.reward_timeout is None else config.reward_timeout
    judges: list[FunctionJudge | RemoteJudge] = [FunctionJudge(resolve(spec), timeout) for spec in config.judge_funcs]
    if config.judge_url is None:
        return judges
    template = PROMPT
    if config.judge_prompt is not None:
        try:
            template = storage.read_text(config.judge_prompt)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--judge_prompt {config.judge_prompt} cannot be read: {error}") from None
        check_prompt(template, f"--judge_prompt {config.judge_prompt}")
    name = config.judge_api_key_env
    if name != EvaluateConfig.judge_api_key_env and not os.environ.get(name, "").strip():
        raise UserError(f"--judge_api_key_env {name}: this environment variable is not set")
    remote = RemoteJudge(
        config.judge_url,
        config.judge_model,
        template=template,
        options={"temperature": 0, "max_tokens": 512, **(config.judge_kwargs or {})},
        timeout=config.judge_timeout,
        retries=config.judge_retries,
        concurrency=config.judge_concurrency,
        token_env=name,
    )
    return [*judges, remote]
