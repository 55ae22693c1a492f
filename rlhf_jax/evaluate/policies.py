"""Policies on held-out prompts: opened without a weight, then answered, scored, judged and counted."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from rlhf_jax import data
from rlhf_jax.data import synthetic
from rlhf_jax.errors import UserError
from rlhf_jax.evaluate import aggregate, rouge
from rlhf_jax.evaluate import plan as planning
from rlhf_jax.evaluate.answers import Answers, Sampler, reference_answers, reference_texts
from rlhf_jax.evaluate.answers import score as add_scores
from rlhf_jax.evaluate.judge import Judged
from rlhf_jax.evaluate.options import EvaluateConfig
from rlhf_jax.inference import Policy
from rlhf_jax.models.placement import Weights
from rlhf_jax.parallel import sharding
from rlhf_jax.rewards import scorer as scoring
from rlhf_jax.runtime.run_folder import write_atomically
from rlhf_jax.stages import base
from rlhf_jax.utils.strict_json import json_text


class Policies:
    """The policy, whom it is compared with, and their rewards. Opening them reads configs, tokenizers and data."""

    def __init__(self, config: EvaluateConfig, plan: planning.Plan, weights: Weights):
        self.config, self.plan, self.weights = config, plan, weights
        c = plan.prompts
        self.policy = self._open(plan.policy)
        self.ref = None if plan.ref is None else self._open(plan.ref)
        same = {} if plan.ref is None else {plan.ref: self.ref}
        self.others = {other: same.get(other) or self._open(other) for other in plan.others}
        tokenizer = self.policy.tokenizer
        for place in {*([] if plan.ref is None else [plan.ref]), *plan.others}:
            data.check_same_tokenizer(tokenizer, place.path, place.revision)
        self.source = self._prompts(c, tokenizer)
        self.references = None
        if plan.reference is not False or config.rouge:
            self.references = reference_texts(self.source, config.completion_column)
        if self.references is None and (plan.reference or config.rouge):
            asked = "--rouge" if config.rouge else "--against reference"
            there = ", ".join(self.source.columns([0])) or "no other column"
            raise UserError(
                f"{asked}: {self.source.report.name} has no column {config.completion_column!r} with reference "
                f"answers; it has {there}. Name it by --completion_column"
            )
        self.opponents = [*(["reference"] if self.references and plan.reference is not False else [])]
        self.opponents += [other.name for other in plan.others]
        self.scorer = self._scorer(c, tokenizer)
        if config.best_of_n and self.scorer is None:
            raise UserError(
                "--best_of_n needs a reward to choose by: --reward_model_path, --reward_funcs, --reward_server"
            )
        self.gold = c.dataset_name == "synthetic"

    def _open(self, place: planning.Checkpoint) -> Policy:
        c, tokenizer = self.plan.prompts, self.config.tokenizer_name_or_path
        policy = Policy(place.path, revision=place.revision, tokenizer=tokenizer, dtype=c.dtype, weights=self.weights)
        needed = c.query_length + c.response_length
        base.check_context(policy.model, needed, "--query_length + --response_length", place.path)
        return policy

    def _prompts(self, c, tokenizer) -> data.PromptData:
        if self.config.data is not None:
            rows = data.load_rows(
                c.dataset_name,
                split=c.dataset_test_split,
                kind="demonstrations",
                dataset_config=c.dataset_config,
                dataset_revision=c.dataset_revision,
                max_samples=c.max_eval_samples,
                label="evaluation data",
            )
            return data.prompts_from_rows(rows, c, tokenizer)
        sets = data.load_eval_prompts(c, tokenizer)
        if not sets:
            raise UserError(f"--run_dir {self.config.run_dir}: the run has no evaluation data; give --data")
        return next(iter(sets.values()))

    def _scorer(self, c, tokenizer) -> scoring.Scorer | None:
        if c.reward_model_path is None and not c.reward_funcs and c.reward_server is None:
            return None
        models = scoring.open_models(c, tokenizer, self.source.conversational)
        for model in models:
            model.model = model.model.on(self.weights.mesh)
            needed = c.query_length + c.response_length
            base.check_context(model.model, needed, "--query_length + --response_length", model.path)
        scorer = scoring.Scorer(c, tokenizer, models, [], self.weights.mesh)
        scorer.check_columns(tuple(self.source.columns([0])))
        return scorer

    # --- the work

    def run(self, judges: list, options: dict[str, Any], say) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """(what evaluation.json holds of policies, the rows of samples.jsonl)."""
        say(str(self.source.report))
        everyone = self._answers(say)
        names = () if self.scorer is None else self.scorer.names
        self._measure(everyone, say)
        mine, others = everyone[0], everyone[1:]
        prompts = self.source.display_texts(range(len(self.source)))
        samples = aggregate.sample_rows(prompts, everyone, names, {})
        self._write(samples)  # a judge may fail, and answers cost more than verdicts
        verdicts: dict[str, Judged] = {}
        win_rates = []
        for other in others:
            win_rates += aggregate.score_wins(mine, other, names, **options)
            for judge in judges:
                say(f"{judge.name}: {2 * len(prompts)} questions about {mine.name} and {other.name}")
                judged = judge.compare(prompts, mine.first, other.first)
                verdicts[f"{judge.name} against {other.name}"] = judged
                for problem in judged.problems:
                    say(f"{judge.name}: {problem}")
                win_rates.append(aggregate.wins(judge.name, judged.preference, mine, other, judged, **options))
        if verdicts:
            samples = aggregate.sample_rows(prompts, everyone, names, verdicts)
            self._write(samples)
        c = self.plan.prompts
        found: dict[str, Any] = {
            "data": {"name": self.source.report.name, "prompts": len(prompts), "fingerprint": self.source.fingerprint},
            "sampling": {
                "temperature": 0.0 if self.plan.greedy else c.temperature,
                **{name: getattr(c, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")},
                **{"generation_kwargs": c.generation_kwargs, "response_length": c.response_length},
                **{"query_length": c.query_length, "seed": self.config.seed, "samples": self.plan.samples},
            },
            "rewards": list(names),
            "policies": [aggregate.policy_row(answers, names, **options) for answers in everyone],
            "win_rates": win_rates,
        }
        if self.config.best_of_n:
            found["best_of_n"] = aggregate.best(mine, names, self.config.best_of_n, **options)
        return found, samples

    def _answers(self, say) -> list[Answers]:
        """Everybody's, one policy's weights (and the reference's) at a time."""
        c, everyone = self.plan.prompts, []

        def tick(name: str, done: int, of: int) -> None:
            if done == of or (done * 10) // of > ((done - 1) * 10) // of:
                say(f"{name}: {done} of {of} prompts answered")

        if self.ref is not None:
            self.ref.load()
        sampler = Sampler(
            c,
            self.source,
            self.plan.samples,
            seed=self.config.seed,
            batch_size=self.config.batch_size,
            greedy=self.plan.greedy,
            ref=self.ref,
            tick=tick,
        )
        todo = [(self.plan.policy.name, self.policy), *((other.name, policy) for other, policy in self.others.items())]
        for number, (name, policy) in enumerate(todo):
            policy.load()
            everyone.append(sampler.answers(name, policy, number))
            if policy is not self.ref:
                policy.release()
        if self.ref is not None:
            self.ref.release()
        if "reference" in self.opponents:
            shards = sharding.row_shards(self.weights.mesh)
            readers = [self.policy.model, *(m.model for m in (self.scorer.models if self.scorer else ()))]
            most = min(model.config.max_position_embeddings for model in readers) - c.query_length
            size = self.config.batch_size
            given = ("reference", self.references, self.source, self.policy.tokenizer, size, shards, most)
            answers, cut = reference_answers(*given)
            if cut:
                say(f"reference: {cut} of {len(self.references)} answers are cut to {most} tokens for the rewards")
            everyone.insert(1, answers)
        return everyone

    def _measure(self, everyone: list[Answers], say) -> None:
        """Rewards, the built-in task's gold reward, ROUGE."""
        if self.scorer is not None:
            self.scorer.load_weights(self.weights)
            try:
                for answers in everyone:
                    add_scores(answers, self.scorer, self.source, self.weights.mesh)
            finally:
                self.scorer.close()
            say(f"rewards: {', '.join(self.scorer.names)}")
        for answers in everyone:
            if self.gold:
                prompts, group = self.source.display_texts(range(len(self.source))), answers.lengths.shape[1]
                told = [synthetic.gold_reward([p] * group, row) for p, row in zip(prompts, answers.texts)]
                answers.more["gold"] = np.asarray(told)
            if self.config.rouge and answers.path is not None:
                found = rouge.scores(self.references, answers.first)
                answers.more |= {name: values[:, None] for name, values in found.items()}

    def _write(self, samples: list[dict[str, Any]]) -> None:
        text = "".join(json_text(row) + "\n" for row in samples)
        write_atomically(os.path.join(self.plan.output_dir, "samples.jsonl"), text)
