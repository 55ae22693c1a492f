"""The course of an evaluation: check, open, answer, score, judge, count, write. Everything that can be refused is,
before a weight is read."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.evaluate import plan as planning
from rlhf_jax.evaluate import rouge, terminal
from rlhf_jax.evaluate.judge import PROMPT, FunctionJudge, RemoteJudge, check_prompt
from rlhf_jax.evaluate.options import EvaluateConfig, check
from rlhf_jax.evaluate.pairs import Pairs
from rlhf_jax.evaluate.policies import Policies
from rlhf_jax.models.placement import Weights
from rlhf_jax.parallel import sharding
from rlhf_jax.rewards.python_functions import resolve
from rlhf_jax.runtime.run_folder import write_atomically
from rlhf_jax.utils.strict_json import json_text


def run(config: EvaluateConfig, say=print) -> dict[str, Any]:
    """An evaluation, written to its output_dir and printed.

    Args:
      config: the options.
      say: takes a line of progress or of the report.

    Returns:
      What evaluation.json holds.

    Raises:
      UserError: an option, a file, a row or a tensor is wrong, or a judge or reward failed; says which.
    """
    check(config)
    plan = planning.make(config)
    judges = _judges(config)
    if config.rouge:
        rouge.check()
    options = {"resamples": config.bootstrap_resamples, "seed": config.seed}
    weights = Weights(sharding.make_mesh())
    policies = None if plan.prompts is None else Policies(config, plan, weights)
    pairs = None if plan.pairs is None else Pairs(plan.pairs, config, weights)
    if policies is not None and judges and not policies.opponents:
        raise UserError(
            "a judge compares two answers: give --against a checkpoint, or 'reference' and data with answers"
        )
    for judge in judges:
        if isinstance(judge, RemoteJudge) and policies is not None:
            judge.probe()
    found: dict[str, Any] = {"config": dataclasses.asdict(config), "plan": plan.shown()}
    os.makedirs(plan.output_dir, exist_ok=True)
    samples: list[dict[str, Any]] = []
    if policies is not None:
        answered, samples = policies.run(judges, options, say)
        found |= answered
    if pairs is not None:
        found["reward_model"] = {"path": plan.pairs.model_name_or_path} | pairs.run(options, say)
    path = os.path.join(plan.output_dir, "evaluation.json")
    write_atomically(path, json_text(found, indent=2) + "\n")
    for block in terminal.blocks(found, samples, config.num_completions_to_print):
        say(block)
    files = ["evaluation.json"] + (["samples.jsonl"] if samples else [])
    say(f"written: {' and '.join(os.path.join(plan.output_dir, name) for name in files)}")
    return found


def _judges(config: EvaluateConfig) -> list[FunctionJudge | RemoteJudge]:
    """The judges asked for, each ready to compare."""
    timeout = 600.0 if config.reward_timeout is None else config.reward_timeout
    judges: list[FunctionJudge | RemoteJudge] = [FunctionJudge(resolve(spec), timeout) for spec in config.judge_funcs]
    if config.judge_url is None:
        return judges
    template = PROMPT
    if config.judge_prompt is not None:
        try:
            with open(config.judge_prompt, encoding="utf-8") as file:
                template = file.read()
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
