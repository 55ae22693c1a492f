"""Looking at a policy: evaluation, sample completions, tables. Nothing here learns."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms import nonfinite
from rlhf_jax.parallel import sharding
from rlhf_jax.rewards.interface import completion_ids
from rlhf_jax.rewards.scorer import Scored
from rlhf_jax.stages import base
from rlhf_jax.types import Rollout

NEARLY_GREEDY = 0.01  # temperature of TRL's generate_completions
FEW = 64
"""Samples, and responses of a training batch, of whose tokens there is a record."""
_LEAST = ("completions/min_length", "completions/min_terminated_length", "clip_ratio/low_min")
_MOST = ("completions/max_length", "completions/max_terminated_length", "clip_ratio/high_max")
_SUMS = ("val/num_eos_tokens", "rewards/dropped", "rollout/tokens")


@dataclasses.dataclass
class Batch:
    """A rollout with its scores; `rows` are the prompts' rows in `source`, one a response."""

    rollout: Rollout
    scored: Scored
    source: Any
    rows: np.ndarray


class LookingStage(base.Stage):
    """The eyes of a stage that samples; what it looks at comes from a subclass (see `PolicyStage`)."""

    token_advantages = False
    """Whether a response has advantages of its own, token by token, without others to its prompt."""

    @property
    def held_out(self):
        """The first evaluation set; the training prompts where there is none."""
        return next(iter(self.eval_sets.values()), self.train_data)

    def _batches(self, source, limit: int, group: int):
        """The first `limit` prompts of `source` in batches of one size: (prompts, first prompt, real prompts)."""
        c = self.config
        # Rows that divide into chunks, micro-batches and over the devices as those of training do.
        unit = math.lcm(c.rollout_batch_size or 1, c.micro_batch_size or 1, sharding.row_shards(self.mesh) * group)
        most = max(c.batch_size // unit, 1) * unit
        size = min(most, -(-limit * group // unit) * unit) // group
        for start in range(0, limit, size):
            yield source.in_order(start, size, self.here(size)), start, min(size, limit - start)

    def _sample(self, policy, source, limit, temperature, group, step):
        """Scored responses to the first `limit` prompts, batch by batch: (Batch, real rows); the others are absent."""
        for prompts, start, real in self._batches(source, limit, group):
            self.tick()
            first = self.place_batch(np.int32(start))
            rollout = self.roll(policy, prompts, self._eval_seed, first, temperature, group)
            rows, real = np.repeat(prompts.rows, group), real * group
            if real < len(rows):
                lengths = jnp.where(jnp.arange(len(rows)) < real, rollout.lengths, -1)
                rollout = rollout.replace(lengths=jax.device_put(lengths, rollout.lengths.sharding))
            scored = self.scorer.score(rollout, source, rows, group, self.trainer_state(step, is_eval=True), limit=real)
            yield Batch(rollout, scored, source, rows), real

    def complete(self, params, source, limit: int, temperature: float | None, advantages=None) -> dict:
        """A response of a policy to each of the first `limit` prompts of `source`, in order.

        Args:
          advantages: Batch -> [B, T]; None: no advantages.

        Returns:
          {"prompts", "completions", "columns": lists; "lengths", "ended", "scores", "kl": numpy [N]; "ids", "token_kl",
          "advantages": numpy [N, T]; "kl" and "token_kl" are None without a reference; a score is NaN where no reward
          applies}
        """
        parts = []
        for batch, real in self._sample(params, source, limit, temperature, 1, 0):
            rollout = batch.rollout
            kl = None
            if self.ref_params is not None:
                kl = self._kl({"policy": params}, self.base, sharding.resident(self.ref_params), rollout)
            scores = jnp.where(batch.scored.scorable, batch.scored.whole, jnp.nan)
            of_tokens = kl, None if advantages is None else advantages(batch)
            host = sharding.fetch((rollout.response, rollout.lengths, rollout.ended, scores, *of_tokens))
            parts.append([None if x is None else x[:real] for x in (*host, batch.rows)])
        response, lengths, ended, scores, kl, advantages, rows = (
            None if x[0] is None else np.concatenate(x) for x in zip(*parts, strict=True)
        )
        return {
            "prompts": source.display_texts(rows),
            "completions": self.texts(response, lengths),
            "columns": source.columns(rows),
            "lengths": lengths,
            "ended": ended,
            "scores": scores,
            "kl": None if kl is None else kl.sum(axis=1),
            "ids": response,
            "token_kl": kl,
            "advantages": advantages,
        }

    def kl_of_few(self, state, rollout: Rollout):
        """KL of the tokens [FEW, T] of a rollout's first rows; None where the algorithm has no reference."""
        if self.ref_params is None:
            return None
        count, chunk = min(FEW, rollout.lengths.shape[0]), self.config.rollout_batch_size or FEW
        count -= count % chunk if chunk < count else 0
        if count < rollout.lengths.shape[0]:
            rollout = _first(rollout, count)
        return self._kl({"policy": state.params["policy"]}, self.base, self.reference(state), rollout)

    def of_tokens(self, response, lengths, kl, advantages) -> list[dict[str, Any]]:
        """What there is to say of each token of responses, for completions/STEP.tokens.jsonl.

        Args:
          response: [N, T] ids.
          lengths: [N].
          kl, advantages: [N, T] float32, or None.

        Returns:
          [{"tokens": texts, "kl": nats, "advantages"}], the last two where they are there; to 6 digits.
        """
        rows = []
        for i, ids in enumerate(completion_ids(response, np.maximum(lengths, 0))):
            rows.append({"tokens": self.tokenizer.token_texts(ids)})
            for name, values in (("kl", kl), ("advantages", advantages)):
                if values is not None:
                    rows[i][name] = [float(f"{x:.6g}") for x in values[i, : len(ids)]]
        return rows

    def texts(self, response, lengths) -> list[str]:
        """Responses as text, special tokens left out."""
        ids = completion_ids(response, np.maximum(lengths, 0))
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in ids]

    def evaluate(self, state):
        """Every metric of an update that needs no learning, on each evaluation set, at the training temperature.

        Names are those of training behind `eval_` (`eval_NAME_` with several sets); of the first set also the few that
        all algorithms have: `eval/scores` with its standard error, `eval/kl`, `eval/response_length`, `eval/eos_rate`.
        """
        found, step = {}, int(sharding.fetch(state.step))
        for name, source in self.eval_sets.items():
            means, scores = self._evaluate(state, source, step)
            found.update({f"eval_{name}_{key}" if name else f"eval_{key}": value for key, value in means.items()})
            if "eval/scores" not in found:
                spread = np.std(scores, ddof=1) / np.sqrt(len(scores)) if len(scores) > 1 else np.nan
                found["eval/scores"] = float(np.mean(scores)) if len(scores) else math.nan
                found["eval/scores_se"] = float(spread)
                if "objective/kl" in means:
                    found["eval/kl"] = means["objective/kl"]
                found["eval/response_length"] = means["val/response_length"]
                found["eval/eos_rate"] = 1.0 - means["completions/clipped_ratio"]
        return found

    def _evaluate(self, state, source, step):
        """Metrics of one set, batches weighted by their responses, and the scores of the responses that have one."""
        found, weights, scores = [], [], []
        policy = state.params["policy"]
        for batch, real in self._sample(policy, source, len(source), None, self.eval_group, step):
            experience, metrics = self.judge(state, batch.rollout, batch.scored, self.eval_group)
            metrics = {**metrics, **self._look(state.params, self.base, experience), **batch.scored.metrics}
            metrics, each, there = sharding.fetch((metrics, batch.scored.whole, batch.scored.scorable))
            found.append({name: float(x) for name, x in metrics.items()})
            weights.append(real)
            scores.append(each[there])
        names = dict.fromkeys(name for metrics in found for name in metrics)
        means = {name: _together(name, [f.get(name, math.nan) for f in found], weights) for name in names}
        means["num_tokens"] = float(sharding.fetch(state.tokens))
        means.pop("rollout/tokens")
        means.pop("nonfinite/causes")
        return means, np.concatenate(scores)

    def samples(self, state):
        """The table of TRL's generate_completions: one batch of evaluation prompts, nearly greedy."""
        source, advantages = self.held_out, None
        if self.token_advantages and self.config.old_logprobs == "forward":  # the sampler's are at another temperature

            def advantages(batch):
                return self.judge(state, batch.rollout, batch.scored, 1)[0].advantages

        limit = min(len(source), self.config.batch_size, FEW)
        found = self.complete(state.params["policy"], source, limit, NEARLY_GREEDY, advantages)
        rows = [
            {"query": query, "model response": text, "score": float(score), "length": int(length), "ended": bool(ended)}
            for query, text, score, length, ended in zip(
                found["prompts"], found["completions"], found["scores"], found["lengths"], found["ended"]
            )
        ]
        return rows, self.of_tokens(found["ids"], found["lengths"], found["token_kl"], found["advantages"])

    def training_completions(self):
        """TRL's completions table of the last training batch, where log_completions asks for it; else nothing."""
        if self.shown is None:
            return [], []
        (batch, advantages, kl), self.shown = self.shown, None
        found = (batch.rollout.response, batch.rollout.lengths, batch.scored.each, advantages, kl)
        response, lengths, each, advantages, kl = sharding.fetch(found)
        advantages = advantages.reshape(len(lengths), -1)
        few = len(lengths[:FEW]) if kl is None else len(kl)
        by_token = advantages if advantages.shape[1] > 1 else None
        tokens = self.of_tokens(response[:few], lengths[:few], kl, by_token)
        if advantages.shape[1] > 1:  # of tokens: their mean over the response
            inside = np.arange(advantages.shape[1])[None] < lengths[:, None]
            advantages = (advantages * inside).sum(1, keepdims=True) / np.maximum(lengths, 1)[:, None]
        rows = []
        for i, (prompt, text) in enumerate(zip(batch.source.display_texts(batch.rows), self.texts(response, lengths))):
            row = {"prompt": prompt, "completion": text}
            row |= {name: float(value) for name, value in zip(self.scorer.names, each[i])}
            taken = {*row, "advantage"}
            extra = batch.scored.extra.items()
            row |= {f"extra/{name}" if name in taken else name: values[i] for name, values in extra}
            rows.append(row | {"advantage": float(advantages[i, 0])})
        return rows, tokens

    def offenders(self, step):
        """The rows of an update that are not finite, those with what spreads from others to them last; all rows where
        each by itself is finite.

        Returns:
          [{"row": of the prompts' data, "prompt", "response", "score", "not_finite": names of `guard.CAUSES`}]
        """
        if step not in self.evidence:
            return []
        batch, experience = self.evidence[step]
        score, scorable = batch.scored.whole, batch.scored.scorable
        found = (batch.rollout.response, batch.rollout.lengths, score, scorable, experience)
        response, lengths, score, scorable, experience = sharding.fetch(found)
        there = {name: getattr(experience, f"{name}s", None) for name in ("logprob", "value", "advantage", "return")}
        parts = {"score": np.where(scorable, score, 0.0), **there}
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
def _first(rollout: Rollout, count: int) -> Rollout:
    """Its first rows; jitted, for of several processes each has only a share."""
    return jax.tree.map(lambda x: x[:count], rollout)


def _together(name: str, values: list[float], weights: list[int]) -> float:
    """One number of several batches': the least, the most, the sum, or the mean by responses; NaN is left out."""
    # No response of a batch ended: its least terminated length is 0 and says nothing.
    none = {0.0} if name == "completions/min_terminated_length" else set()
    pairs = [(v, w) for v, w in zip(values, weights) if not math.isnan(v) and v not in none]
    if not pairs:
        return min(values)
    if name in _LEAST:
        return min(v for v, _ in pairs)
    if name in _MOST:
        return max(v for v, _ in pairs)
    if name in _SUMS:
        return sum(v for v, _ in pairs)
    return sum(v * w for v, w in pairs) / sum(w for _, w in pairs)
