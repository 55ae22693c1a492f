"""Evaluation of a policy while it trains: metrics on held-out prompts, and sample completions."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms import nonfinite
from rlhf_jax.algorithms.groups import sampled_mask
from rlhf_jax.parallel import sharding
from rlhf_jax.rewards.interface import completion_ids
from rlhf_jax.rewards.scorer import Scored, Scorer
from rlhf_jax.runtime.stopping import Tick, no_tick
from rlhf_jax.stages.programs import Programs
from rlhf_jax.stages.turns import Conversations, Turns, respond
from rlhf_jax.types import Array, Images, Params, Rollout, TrainState
from rlhf_jax.utils.tables import THUMBNAILS

Completions = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""Rows of a completions table, and values by token of the first of them."""

NEARLY_GREEDY = 0.01  # temperature of TRL's generate_completions
TOKEN_ROWS = 64
"""Samples, and responses of a training batch, whose values by token are written."""
_MIN_METRICS = ("completions/min_length", "completions/min_terminated_length", "clip_ratio/low_min")
_MAX_METRICS = ("completions/max_length", "completions/max_terminated_length", "clip_ratio/high_max")
_SUM_METRICS = ("val/num_eos_tokens", "completions/unused_ids", "rewards/dropped", "rollout/tokens")


@dataclasses.dataclass
class ScoredBatch:
    """A rollout with its scores; `rows` are the prompts' rows in `source`, one for each response."""

    rollout: Rollout
    scored: Scored
    source: Any
    rows: np.ndarray
    images: Images | None = None  # of the prompts, on the mesh
    conversations: Conversations | None = None  # of tools


@dataclasses.dataclass(frozen=True)
class RolloutEvaluator:
    """Samples and scores a policy; trains nothing.

    Attributes:
      programs: of the stage.
      scorer: the rewards of the run.
      turns: of responses that call tools; None: there are no tools.
      tokenizer: the policy's.
      train_data, eval_sets: prompts; eval_sets by name.
      group_size: responses to a prompt.
      token_advantages: whether samples have advantages token by token.
      seed: evaluation draws from a seed of its own, the same each time, so that two evaluations differ by the policy
        alone. On the mesh, like the state's seed: elsewhere the rollout would compile a second time.
    """

    programs: Programs
    scorer: Scorer
    turns: Turns | None
    tokenizer: Any
    train_data: Any
    eval_sets: dict[str, Any]
    group_size: int
    token_advantages: bool
    seed: Array

    @property
    def held_out(self):
        """The first evaluation set; the training prompts where there is none."""
        return next(iter(self.eval_sets.values()), self.train_data)

    @property
    def _config(self):
        return self.programs.config

    # --- metrics

    def evaluate(self, state: TrainState, tick: Tick = no_tick) -> dict[str, float]:
        """Every metric of an update that needs no optimizer step, on each evaluation set, at the training temperature.

        Names are those of training with the prefix `eval_` (`eval_NAME_` with several sets). The first set also gives
        the few metrics that all algorithms have: `eval/scores` with its standard error, `eval/kl`,
        `eval/response_length`, `eval/eos_rate`.
        """
        metrics, step = {}, int(sharding.fetch(state.step))
        for name, source in self.eval_sets.items():
            means, scores = self._evaluate_set(state, name, source, step, tick)
            metrics.update({f"eval_{name}_{key}" if name else f"eval_{key}": value for key, value in means.items()})
            if "eval/scores" not in metrics:
                deviation = np.std(scores, ddof=1) / np.sqrt(len(scores)) if len(scores) > 1 else np.nan
                metrics["eval/scores"] = float(np.mean(scores)) if len(scores) else math.nan
                metrics["eval/scores_se"] = float(deviation)
                if "objective/kl" in means:
                    metrics["eval/kl"] = means["objective/kl"]
                metrics["eval/response_length"] = means["val/response_length"]
                metrics["eval/eos_rate"] = 1.0 - means["completions/clipped_ratio"]
        return metrics

    def _evaluate_set(self, state: TrainState, name: str, source, step: int, tick: Tick):
        """Metrics of one set, batches weighted by their responses, and the scores of the responses that have one."""
        by_batch, weights, scores = [], [], []
        programs, policy = self.programs, state.params["policy"]
        options: dict[str, Any] = {"limit": len(source), "group_size": self.group_size, "step": step, "tick": tick}
        sampled = self._sample(policy, source, at=f"evaluation {name} after update {step}", **options)
        for batch, real in sampled:
            experience, metrics = programs.make_experience(
                state, batch.rollout, batch.scored, self.group_size, batch.images
            )
            losses = programs.eval_metrics(state, experience)
            of_tools: dict[str, Any] = {} if batch.conversations is None else batch.conversations.metrics
            metrics = {**metrics, **losses, **of_tools, **batch.scored.metrics}
            metrics, each, scorable = sharding.fetch((metrics, batch.scored.total_scores, batch.scored.scorable))
            by_batch.append({name: float(x) for name, x in metrics.items()})
            weights.append(real)
            scores.append(each[scorable])
        names = dict.fromkeys(name for metrics in by_batch for name in metrics)
        means = {name: _combine(name, [m.get(name, math.nan) for m in by_batch], weights) for name in names}
        means["num_tokens"] = float(sharding.fetch(state.tokens))
        means.pop("rollout/tokens")
        means.pop("nonfinite/causes")
        return means, np.concatenate(scores)

    # --- sampling

    def _batches(self, source, limit: int, group_size: int) -> Iterator[tuple[Any, int, int]]:
        """The first `limit` prompts of `source` in batches of one size: (prompts, first prompt, real prompts).

        The size is that of a training batch, whose programs are compiled already, also for fewer prompts.
        """
        config, context = self._config, self.programs.context
        # Rows that divide into chunks, micro-batches and over the devices as those of training do.
        unit = math.lcm(
            config.rollout_batch_size or 1, config.micro_batch_size or 1, sharding.row_shards(context.mesh) * group_size
        )
        size = max(config.batch_size // unit, 1) * unit // group_size
        for start in range(0, limit, size):
            rows = context.local_rows(size)
            yield source.in_order(start, size, rows), start, min(size, limit - start)

    def _sample(
        self,
        policy: Params,
        source,
        *,
        at: str,
        limit: int,
        tick: Tick,
        temperature: float | None = None,
        group_size: int = 1,
        step: int = 0,
    ) -> Iterator[tuple[ScoredBatch, int]]:
        """Scored responses to the first `limit` prompts, batch by batch: (ScoredBatch, real rows). The rows after the
        real ones are absent."""
        programs = self.programs
        for prompts, start, real in self._batches(source, limit, group_size):
            tick()
            count, real = len(prompts.rows) * group_size, real * group_size
            first = programs.context.place_batch(np.int32(start))
            responses = respond(
                programs.sampler(policy, seed=self.seed, step=first, temperature=temperature),
                programs.place,
                self.turns,
                prompts,
                source,
                group_size=group_size,
                at=f"{at}, prompts from {start}",
                real=real,
                tick=tick,
            )
            rollout, images = responses.rollout, responses.prompts.images
            if real < count:
                lengths = jnp.where(jnp.arange(count) < real, rollout.lengths, -1)
                rollout = rollout.replace(lengths=jax.device_put(lengths, rollout.lengths.sharding))
            scored = self.scorer.score(
                rollout,
                responses.source,
                responses.rows,
                group=group_size,
                state=programs.trainer_state(step, is_eval=True),
                limit=real,
                conversations=responses.conversations,
            )
            yield ScoredBatch(rollout, scored, responses.source, responses.rows, images, responses.conversations), real

    def complete(
        self,
        policy: Params,
        source,
        limit: int,
        temperature: float | None,
        *,
        advantages: Callable[[ScoredBatch], Array] | None = None,
        tick: Tick = no_tick,
        at: str = "",
    ) -> dict[str, Any]:
        """A response of a policy to each of the first `limit` prompts of `source`, in order.

        Args:
          policy: params as in TrainState.
          source: prompts.
          limit: number of prompts.
          temperature: of sampling; None: as in training.
          advantages: ScoredBatch -> [B, 1, T]; None: no advantages.
          tick: called before each batch; may raise.
          at: when in the run, for the records of tools.

        Returns:
          {"prompts", "completions", "columns", "rows": lists; "lengths", "ended", "scores", "kl", "entropy": numpy [N];
          "rewards": numpy [N] by name; "ids", "token_kl", "advantages": numpy [N, T]; "kl" and "token_kl" are None
          without a reference; scores and rewards are NaN where no reward applies; the entropy of a response is
          estimated by the mean of -log p of its tokens, at the sampler's temperature}
        """
        parts, prompts = [], []
        for batch, real in self._sample(policy, source, at=at, limit=limit, tick=tick, temperature=temperature):
            rollout = batch.rollout
            prompts += batch.source.display_texts(batch.rows[:real])
            kl = None
            if self.programs.has_reference:
                kl = self.programs.token_kl(policy, rollout, images=batch.images)
            score = jnp.where(batch.scored.scorable, batch.scored.total_scores, jnp.nan)
            by_token = kl, None if advantages is None else advantages(batch)
            of_rows = (
                rollout.response,
                rollout.lengths,
                rollout.ended,
                -rollout.logprobs.sum(axis=1) / jnp.maximum(sampled_mask(rollout).sum(axis=1), 1),
                score,
                batch.scored.each_reward,
            )
            host = sharding.fetch((*of_rows, *by_token))
            parts.append([None if x is None else x[:real] for x in host])
        response, lengths, ended, entropy, scores, each, token_kl, token_advantages = (
            None if x[0] is None else np.concatenate(x) for x in zip(*parts, strict=True)
        )
        rows = np.arange(len(prompts))
        return {
            "prompts": prompts,
            "completions": self.texts(response, lengths),
            "columns": source.columns(rows),
            "rows": rows.tolist(),
            "lengths": lengths,
            "ended": ended,
            "scores": scores,
            "rewards": dict(zip(self.scorer.names, each.T, strict=True)),
            "kl": None if token_kl is None else token_kl.sum(axis=1),
            "entropy": entropy,
            "ids": response,
            "token_kl": token_kl,
            "advantages": None if token_advantages is None else token_advantages.reshape(len(lengths), -1),
        }

    # --- tables

    def samples(self, state: TrainState, tick: Tick = no_tick) -> Completions:
        """The table of TRL's generate_completions: one batch of evaluation prompts, nearly greedy."""
        source, advantages = self.held_out, None
        if self.token_advantages and self._config.old_logprobs == "forward":  # the sampler's: another temperature

            def advantages(batch):
                experience, _ = self.programs.make_experience(state, batch.rollout, batch.scored, 1, batch.images)
                return experience.advantages

        limit = min(len(source), self._config.batch_size, TOKEN_ROWS)
        at = f"samples after update {int(sharding.fetch(state.step))}"
        options: dict[str, Any] = {"advantages": advantages, "tick": tick, "at": at}
        answers = self.complete(state.params["policy"], source, limit, NEARLY_GREEDY, **options)
        columns = (answers[name] for name in ("prompts", "completions", "scores", "lengths", "ended"))
        rows = [
            {"query": query, "model response": text, "score": float(score), "length": int(length), "ended": bool(ended)}
            for query, text, score, length, ended in zip(*columns)
        ]
        if source.images is not None and self._config.log_multimodal:
            for row, index in zip(rows, answers["rows"], strict=True):
                row[THUMBNAILS] = source.images.thumbnails(index)
        return rows, self.token_rows(answers["ids"], answers["lengths"], answers["token_kl"], answers["advantages"])

    def training_table(self, batch: ScoredBatch, advantages: Array, token_kl: Array | None) -> Completions:
        """TRL's completions table of a training batch.

        Args:
          advantages: [P, G, T], or [P, G] of whole responses.
          token_kl: [N, T] of the first N responses; None without a reference.
        """
        fetched = (batch.rollout.response, batch.rollout.lengths, batch.scored.each_reward, advantages, token_kl)
        response, lengths, each, advantages, kl = sharding.fetch(fetched)
        advantages = advantages.reshape(len(lengths), -1)
        n = len(lengths[:TOKEN_ROWS]) if kl is None else len(kl)
        finished = np.flatnonzero(lengths[:n] >= 0)  # as in the table: others go on in the next update
        by_token = advantages[finished] if advantages.shape[1] > 1 else None
        tokens = self.token_rows(response[finished], lengths[finished], None if kl is None else kl[finished], by_token)
        if advantages.shape[1] > 1:  # the mean over the response's tokens
            response_mask = np.arange(advantages.shape[1])[None] < lengths[:, None]
            advantages = (advantages * response_mask).sum(1, keepdims=True) / np.maximum(lengths, 1)[:, None]
        rows = []
        if batch.images is not None:
            thumbnails = functools.lru_cache(maxsize=None)(batch.source.images.thumbnails)
        for i, (prompt, text) in enumerate(zip(batch.source.display_texts(batch.rows), self.texts(response, lengths))):
            if lengths[i] < 0:  # goes on in the next update
                continue
            row = {"prompt": prompt, "completion": text}
            if batch.images is not None and self._config.log_multimodal:
                row[THUMBNAILS] = thumbnails(int(batch.rows[i]))
            row |= {name: float(value) for name, value in zip(self.scorer.names, each[i])}
            taken = {*row, "advantage"}
            extra = batch.scored.extra.items()
            row |= {f"extra/{name}" if name in taken else name: values[i] for name, values in extra}
            rows.append(row | {"advantage": float(advantages[i, 0])})
        return rows, tokens

    def first_token_kl(
        self, state: TrainState, rollout: Rollout, images: Images | None = None, group_size: int = 1
    ) -> Array | None:
        """KL of the tokens [N, T] of a rollout's first rows, about TOKEN_ROWS; None without a reference. `images` are
        those of its prompts, each with `group_size` rows."""
        if not self.programs.has_reference:
            return None
        rows = rollout.lengths.shape[0]
        count, chunk = min(TOKEN_ROWS, rows), self._config.rollout_batch_size or TOKEN_ROWS
        count -= count % chunk if chunk < count else 0
        if count < rows:
            rollout = _first_rows(rollout, count)
        if images is not None:
            images = _of_first_rows(images, count, group_size)
        return self.programs.token_kl(state.params["policy"], rollout, state, images)

    def token_rows(self, response, lengths, kl, advantages) -> list[dict[str, Any]]:
        """The values by token of responses, for completions/STEP.tokens.jsonl.

        Args:
          response: [N, T] ids.
          lengths: [N].
          kl, advantages: [N, T] float32, or None.

        Returns:
          [{"tokens": texts, "kl": nats, "advantages"}] to 6 digits, without those that are None.
        """
        rows = []
        for i, ids in enumerate(completion_ids(response, np.maximum(lengths, 0))):
            rows.append({"tokens": self.tokenizer.token_texts(ids)})
            for name, values in (("kl", kl), ("advantages", advantages)):
                if values is not None:
                    rows[i][name] = [float(f"{x:.6g}") for x in values[i, : len(ids)]]
        return rows

    def texts(self, response, lengths) -> list[str]:
        """Responses as text, without special tokens."""
        ids = completion_ids(response, np.maximum(lengths, 0))
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in ids]

    def nonfinite_rows(self, batch: ScoredBatch, experience: Any) -> list[dict[str, Any]]:
        """The rows of an update that are not finite, in the order in which causes spread; all rows where each by itself
        is finite.

        Returns:
          [{"row": of the prompts' data, "prompt", "response", "score", "not_finite": names of `nonfinite.CAUSES`}]
        """
        score, scorable = batch.scored.total_scores, batch.scored.scorable
        fetched = (batch.rollout.response, batch.rollout.lengths, score, scorable, experience)
        response, lengths, score, scorable, experience = sharding.fetch(fetched)
        parts = {name: getattr(experience, f"{name}s", None) for name in ("logprob", "value", "advantage", "return")}
        parts = {"score": np.where(scorable, score, 0.0), **parts}
        bad = {
            name: ~np.isfinite(x.reshape(len(lengths), -1)).all(axis=1) for name, x in parts.items() if x is not None
        }
        rows = []
        for i, (prompt, text) in enumerate(zip(batch.source.display_texts(batch.rows), self.texts(response, lengths))):
            row = {"row": int(batch.rows[i]), "prompt": prompt, "response": text, "score": float(score[i])}
            rows.append(row | {"not_finite": [name for name in bad if bad[name][i]]})
        worst = [row for row in rows if row["not_finite"]]
        return sorted(worst, key=lambda row: nonfinite.CAUSES.index(row["not_finite"][0])) or rows


@functools.partial(jax.jit, static_argnums=1)
def _first_rows(rollout: Rollout, count: int) -> Rollout:
    """The first rows of a rollout; jitted, since each of several processes holds only a share of it."""
    return jax.tree.map(lambda x: x[:count], rollout)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _of_first_rows(images: Images, count: int, group_size: int) -> Images:
    """The images of the first rows of a rollout, one a row."""
    return jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0)[:count], images)


def _combine(name: str, values: Sequence[float], weights: Sequence[int]) -> float:
    """One number of several batches': minimum, maximum, sum, or the mean by responses, without NaN."""
    # A batch in which no response ended reports 0 as its minimal terminated length.
    ignored = {0.0} if name == "completions/min_terminated_length" else set()
    pairs = [(v, w) for v, w in zip(values, weights) if not math.isnan(v) and v not in ignored]
    if not pairs:
        return min(values)
    if name in _MIN_METRICS:
        return min(v for v, _ in pairs)
    if name in _MAX_METRICS:
        return max(v for v, _ in pairs)
    if name in _SUM_METRICS:
        return sum(v for v, _ in pairs)
    return sum(v * w for v, w in pairs) / sum(w for _, w in pairs)
