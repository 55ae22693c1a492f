"""Evaluation of policies on held-out prompts: sampling, rewards, win rates, judges."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from rlhf_jax import data
from rlhf_jax.data import synthetic
from rlhf_jax.errors import UserError
from rlhf_jax.evaluate import aggregate, rouge
from rlhf_jax.evaluate import plan as planning
from rlhf_jax.evaluate.answers import (
    Answers,
    Sampler,
    add_scores,
    reference_answers,
    reference_texts,
    task_names,
)
from rlhf_jax.evaluate.judge import JudgeResult
from rlhf_jax.evaluate.options import EvaluateConfig
from rlhf_jax.inference import Policy
from rlhf_jax.models.io import generation_config
from rlhf_jax.models.placement import Weights
from rlhf_jax.parallel import multihost, sharding
from rlhf_jax.rewards import scorer as scoring
from rlhf_jax.runtime.run_folder import template_date
from rlhf_jax.stages import open_models
from rlhf_jax.stages.guide import open_guide
from rlhf_jax.stages.open_models import Source
from rlhf_jax.stages.open_tools import open_tools
from rlhf_jax.stages.programs import sampling_of
from rlhf_jax.stages.rollout_models import suppressed_ids
from rlhf_jax.storage import write_atomically
from rlhf_jax.utils.strict_json import json_text


class PolicyEvaluation:
    """Evaluates a policy and its opponents. The constructor loads configs, tokenizers and data; `run` loads weights.

    Args:
      config: options of the command.
      plan: the resolved inputs, with prompts.
      weights: loader of params.
    """

    def __init__(self, config: EvaluateConfig, plan: planning.Plan, weights: Weights):
        self.config, self.plan, self.weights = config, plan, weights
        rows, columns = self._load_rows(), (plan.prompts.prompt_column,)
        source = Source(plan.policy.path, plan.policy.revision)
        self.images = open_models.wants_images(source, rows, columns)
        self._open_policies()
        self.eos_ids = self._stop_ids() or self.policy.tokenizer.eos_ids
        date = None if plan.prompts.run_dir is None else template_date(plan.prompts.run_dir)
        tokenizer = dataclasses.replace(self.policy.tokenizer, template_date=date)
        for checkpoint in {*([] if plan.ref is None else [plan.ref]), *plan.others}:
            data.check_same_tokenizer(tokenizer, checkpoint.path, checkpoint.revision)
        self.tools = open_tools(plan.prompts, (), None)
        self.source = data.from_rows(data.PromptData, rows, self.tools.prompt_config, tokenizer, self.policy.processor)
        self.references = self._load_references()
        has_references = bool(self.references) and plan.reference is not False
        self.opponents = [*(["reference"] if has_references else []), *(other.name for other in plan.others)]
        self.scorer = self._open_scorer(tokenizer)
        policies = [self.policy, *self.others.values()]
        self.turns = self.tools.turns(
            [self.source],
            tokenizer,
            positions=min(policy.model.config.max_position_embeddings for policy in policies),
            mesh=self.weights.mesh,
        )
        self.suppress_ids, self.messages = suppressed_ids(
            plan.prompts,
            tokenizer,
            max((policy.model for policy in policies), key=lambda model: model.config.vocab_size),
            () if self.scorer is None else self.scorer.models,
            reference=None if self.ref is None else self.ref.model,
        )
        self.automaton, (self.source,) = open_guide(
            plan.prompts,
            [self.source],
            tokenizer,
            rows=max(policy.model.config.vocab_size for policy in policies),
            stop_ids=sampling_of(plan.prompts, self.eos_ids).stop_ids,
            excluded_ids={*self.suppress_ids, *(i for policy in policies for i in policy.model.suppress_ids)},
        )
        self.messages += self.tools.messages
        if self.scorer is not None:
            self.messages += self.scorer.type_notes(self.source.some_raw())
        if config.best_of_n and self.scorer is None:
            raise UserError(
                "--best_of_n needs a reward to select by: set --reward_model_path, --reward_funcs or --reward_server"
            )
        self.has_gold_reward = plan.prompts.dataset_name == "synthetic"

    def _open_policies(self) -> None:
        """The policy, its reference and its opponents, without weights; with `images` they read images."""
        plan = self.plan
        self.policy = self._open(plan.policy)
        self.ref = None if plan.ref is None else self._open(plan.ref)
        opened = {} if plan.ref is None else {plan.ref: self.ref}
        self.others = {other: opened.get(other) or self._open(other) for other in plan.others}

    def _open(self, checkpoint: planning.Checkpoint) -> Policy:
        policy = Policy(
            checkpoint.path,
            revision=checkpoint.revision,
            tokenizer=self.config.tokenizer_name_or_path,
            dtype=self.plan.prompts.dtype,
            weights=self.weights,
            images=self.images,
        )
        self._check_context(policy.model, checkpoint.path)
        return policy

    def _stop_ids(self) -> tuple[int, ...] | None:
        policy, rows = self.plan.policy, self.policy.model.config.vocab_size
        stop_token_ids = self.plan.prompts.stop_token_ids
        return generation_config.resolve_stop_ids(stop_token_ids, path=policy.path, revision=policy.revision, rows=rows)

    def _check_context(self, model: Any, path: str) -> None:
        tokens = self.plan.prompts.query_length + self.plan.prompts.response_length
        open_models.check_context(model, tokens, "--query_length + --response_length", path)

    def _load_rows(self) -> data.Rows:
        prompts_config = self.plan.prompts
        if self.config.data is not None:
            return data.load_rows(
                prompts_config.dataset_name,
                split=prompts_config.dataset_test_split,
                split_option="--split",
                kind="demonstrations",
                dataset_config=prompts_config.dataset_config,
                dataset_revision=prompts_config.dataset_revision,
                max_samples=prompts_config.max_eval_samples,
                label="evaluation data",
                text_columns={*data.text_columns_of(prompts_config), self.config.completion_column},
            )
        sets = data.eval_sets(prompts_config, "demonstrations")
        if not sets:
            raise UserError(f"--run_dir {self.config.run_dir}: the run has no evaluation data; set --data")
        return next(iter(sets.values()))

    def _load_references(self) -> list[str] | None:
        config, plan = self.config, self.plan
        if plan.reference is False and not config.rouge:
            return None
        references = reference_texts(self.source, config.completion_column)
        if references is None and (plan.reference or config.rouge):
            option = "--rouge" if config.rouge else "--against reference"
            columns = ", ".join(self.source.columns([0])) or "no other column"
            raise UserError(
                f"{option}: {self.source.report.name} has no column {config.completion_column!r} with reference "
                f"answers; it has {columns}. Set --completion_column"
            )
        return references

    def _open_scorer(self, tokenizer: data.Tokenizer) -> scoring.Scorer | None:
        config, functions = self.plan.prompts, self.tools.reward_functions
        if not (config.reward_model_path or config.reward_funcs or config.reward_server or functions):
            return None
        models = scoring.open_models(config, tokenizer, self.source.conversational)
        for model in models:
            model.model = open_models.on_mesh(model.model, self.weights, "scalar", model.path, dtype=config.dtype)
            self._check_context(model.model, model.path)
        scorer = scoring.Scorer(config, tokenizer, models, functions, self.weights.mesh)
        scorer.check_columns((*self.source.columns([0]), *self.tools.reward_columns))
        return scorer

    def run(
        self, judges: list, bootstrap_options: dict[str, Any], log: Callable[[str], None]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Samples, scores and judges. Every process must call it; the first one judges and writes.

        Args:
          judges: of answers, see `evaluate.judge`.
          bootstrap_options: of `bootstrap`.
          log: called with each line of progress.

        Returns:
          (metrics of the policies for evaluation.json, rows of samples.jsonl; none on other processes than the first)
        """
        for message in (str(self.source.report), *self.messages):
            log(message)
        all_answers = self._sample(log)
        self._add_metrics(all_answers, log)
        samples: list[dict[str, Any]] = []
        results = multihost.from_first(lambda: self._judge(all_answers, judges, bootstrap_options, log, samples))
        return results, samples

    def _judge(
        self,
        all_answers: list[Answers],
        judges: list,
        bootstrap_options: dict[str, Any],
        log: Callable[[str], None],
        samples: list[dict[str, Any]],
    ) -> dict[str, Any]:
        """Judges answers, writes samples.jsonl and puts its rows into `samples`. Returns the metrics."""
        rewards = () if self.scorer is None else self.scorer.names
        policy, opponents = all_answers[0], all_answers[1:]
        prompts = self.source.display_texts(range(len(self.source)))
        samples[:] = aggregate.sample_rows(prompts, all_answers, rewards, {})
        self._write(samples)  # before the judges, which may fail after the expensive sampling
        judge_results: dict[str, JudgeResult] = {}
        win_rates = []
        for other in opponents:
            win_rates += aggregate.win_rates_by_score(policy, other, rewards, **bootstrap_options)
            for judge in judges:
                log(f"{judge.name}: {2 * len(prompts)} questions about {policy.name} and {other.name}")
                result = judge.compare(prompts, policy.first, other.first)
                judge_results[f"{judge.name} against {other.name}"] = result
                for problem in result.problems:
                    log(f"{judge.name}: {problem}")
                win_rates.append(
                    aggregate.win_rate_row(judge.name, result.preference, policy, other, result, **bootstrap_options)
                )
        if judge_results:
            samples[:] = aggregate.sample_rows(prompts, all_answers, rewards, judge_results)
            self._write(samples)
        tasks = task_names(self.source)
        results: dict[str, Any] = {
            "data": {"name": self.source.report.name, "prompts": len(prompts), "fingerprint": self.source.fingerprint},
            "sampling": self._sampling_options(),
            "rewards": list(rewards),
            "policies": [aggregate.policy_row(answers, rewards, tasks, **bootstrap_options) for answers in all_answers],
            "win_rates": win_rates,
        }
        if self.config.best_of_n:
            results["best_of_n"] = aggregate.best_of_n_rows(policy, rewards, self.config.best_of_n, **bootstrap_options)
        return results

    def _sampling_options(self) -> dict[str, Any]:
        config = self.plan.prompts
        return {
            "temperature": 0.0 if self.plan.greedy else config.temperature,
            **{name: getattr(config, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")},
            "suppress_unused_ids": config.suppress_unused_ids,
            "generation_kwargs": config.generation_kwargs,
            "structured_outputs_regex": config.structured_outputs_regex,
            "structured_outputs_regex_column": config.structured_outputs_regex_column,
            "tools": list(config.tools),
            "environment_factory": list(config.environment_factory),
            "max_tool_calling_iterations": config.max_tool_calling_iterations,
            "response_length": config.response_length,
            "stop_token_ids": list(self.eos_ids) if config.stop_token_ids is not None else None,
            "query_length": config.query_length,
            "seed": self.config.seed,
            "samples": self.plan.samples,
        }

    def _sample(self, log: Callable[[str], None]) -> list[Answers]:
        """Answers of the policy, then of its opponents. One policy's weights (and the reference model's) are loaded at
        a time."""

        def log_progress(name: str, done: int, total: int) -> None:
            if done == total or (done * 10) // total > ((done - 1) * 10) // total:
                log(f"{name}: {done} of {total} prompts answered")

        if self.ref is not None:
            self.ref.load()
        sampler = Sampler(
            self.plan.prompts,
            self.source,
            self.plan.samples,
            eos_ids=self.eos_ids,
            suppress_ids=self.suppress_ids,
            automaton=self.automaton,
            turns=self.turns,
            seed=self.config.seed,
            batch_size=self.config.batch_size,
            greedy=self.plan.greedy,
            ref=self.ref,
            on_progress=log_progress,
        )
        policies = [(self.plan.policy.name, self.policy)]
        policies += [(other.name, policy) for other, policy in self.others.items()]
        all_answers = []
        try:
            for policy_index, (name, policy) in enumerate(policies):
                policy.load()
                all_answers.append(sampler.answers(name, policy, policy_index))
                if policy is not self.ref:
                    policy.release()
        finally:
            if self.turns is not None:
                self.turns.close()
        if self.ref is not None:
            self.ref.release()
        if "reference" in self.opponents:
            all_answers.insert(1, self._reference_answers(log))
        return all_answers

    def _reference_answers(self, log: Callable[[str], None]) -> Answers:
        """The reference answers, truncated to the context of the models that read them."""
        models = [self.policy.model, *(reward.model for reward in (self.scorer.models if self.scorer else ()))]
        max_context = min(model.config.max_position_embeddings for model in models)
        max_tokens = max_context - self.plan.prompts.query_length
        answers, truncated = reference_answers(
            self.references,
            self.source,
            self.policy.tokenizer,
            batch_size=self.config.batch_size,
            shards=sharding.row_shards(self.weights.mesh),
            max_tokens=max_tokens,
        )
        if truncated:
            count = f"{truncated} of {len(self.references)}"
            log(f"reference: {count} answers are truncated to {max_tokens} tokens for the rewards")
        return answers

    def _add_metrics(self, all_answers: list[Answers], log: Callable[[str], None]) -> None:
        """Adds rewards, the built-in task's gold reward, and ROUGE."""
        if self.scorer is not None:
            models = self.scorer.models
            self.scorer.set_params([self.weights.load(m.model, m.path, "scalar", m.revision) for m in models])
            try:
                for answers in all_answers:
                    if answers.path is None and self.tools.environments is not None:
                        log("reference: answers that had no environment have no rewards")
                        continue
                    add_scores(answers, self.scorer, self.weights.mesh)
            finally:
                self.scorer.close()
            log(f"rewards: {', '.join(self.scorer.names)}")
        for answers in all_answers:
            if self.has_gold_reward:
                prompts, group = self.source.display_texts(range(len(self.source))), answers.lengths.shape[1]
                gold = [synthetic.gold_reward([p] * group, texts) for p, texts in zip(prompts, answers.texts)]
                answers.extra["gold"] = np.asarray(gold)
            if self.config.rouge and answers.path is not None:
                scores = rouge.scores(self.references, answers.first)
                answers.extra |= {name: values[:, None] for name, values in scores.items()}

    def _write(self, samples: list[dict[str, Any]]) -> None:
        text = "".join(json_text(row) + "\n" for row in samples)
        write_atomically(os.path.join(self.plan.output_dir, "samples.jsonl"), text)
