"""What policies answer to the same prompts: responses, their KL to a reference, their rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms import actor_critic
from rlhf_jax.algorithms.actor_critic import Models, Network
from rlhf_jax.config import PPOConfig
from rlhf_jax.data import PromptData, batches
from rlhf_jax.errors import UserError
from rlhf_jax.generate import Sampling
from rlhf_jax.inference import Policy
from rlhf_jax.parallel import sharding
from rlhf_jax.rewards.interface import TrainerState, completion_ids
from rlhf_jax.rewards.scorer import Scorer
from rlhf_jax.stages.build_programs import sampling_of
from rlhf_jax.types import PromptBatch, Rollout


@dataclasses.dataclass
class Answers:
    """G answers to each of P prompts.

    Attributes:
      name, path: of the policy; the data's own answers have no path.
      texts: [P][G].
      lengths: [P, G] tokens, the end included.
      ended: [P, G] bool, by themselves.
      kl: [P, G] nats, or None.
      each: [P, G, F] rewards, NaN where one does not apply; None before `score`, or without rewards.
      scores: [P, G], their weighted sum, NaN where none applies.
      more: further numbers an answer, [P, G] by name.
      batches: the rollouts on the host, with the rows and the real prompts of each.
    """

    name: str
    path: str | None
    texts: list[list[str]]
    lengths: np.ndarray
    ended: np.ndarray
    kl: np.ndarray | None
    batches: list[tuple[Rollout, np.ndarray, int]]
    each: np.ndarray | None = None
    scores: np.ndarray | None = None
    more: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def first(self) -> list[str]:
        """[P]: the first answer to each prompt."""
        return [row[0] for row in self.texts]


def seed_of(seed: int, policy: int) -> int:
    """A seed for each policy, so that their answers are drawn independently; those of number 0 do not depend on who
    it is compared with."""
    return int(np.random.SeedSequence([seed, policy]).generate_state(1)[0])


def in_batches(source: PromptData, size: int) -> Iterator[tuple[PromptBatch, int]]:
    """All prompts in order, (a batch, its real prompts); the last is filled up."""
    for start in range(0, len(source), size):
        yield source.in_order(start, size), min(size, len(source) - start)


def batch_prompts(batch_size: int, group: int, prompts: int, shards: int) -> int:
    """Prompts of a batch: about batch_size responses, no more than there are, and rows that divide over the devices."""
    size = min(max(batch_size // group, 1), prompts)
    return -(-size // shards) * shards


class Sampler:
    """Draws answers, and takes their KL while the policy's weights are there.

    Args:
      config: sampling options.
      source: the prompts.
      samples: answers of the policy that is evaluated to each prompt.
      seed, batch_size: as the command's options.
      greedy: take the likeliest tokens; there is no KL then.
      ref: the KL's reference with its weights, or None.
      tick: called with a policy's name, prompts done and prompts in all.
    """

    def __init__(
        self,
        config: PPOConfig,
        source: PromptData,
        samples: int,
        *,
        seed: int,
        batch_size: int,
        greedy: bool = False,
        ref: Policy | None = None,
        tick: Callable[[str, int, int], None] = lambda *_: None,
    ):
        self._config, self._source, self._samples, self._tick = config, source, samples, tick
        self._seed, self._batch_size, self._greedy = seed, batch_size, greedy
        self._ref = None if greedy else ref

    def _sampling(self, policy: Policy) -> Sampling:
        return sampling_of(self._config, policy.tokenizer.eos_id, 0.0 if self._greedy else None)

    def answers(self, name: str, policy: Policy, number: int) -> Answers:
        """The answers of a policy with its weights; number 0 is the one that is evaluated, others answer once."""
        group = self._samples if number == 0 else 1
        size = batch_prompts(self._batch_size, group, len(self._source), sharding.row_shards(policy.mesh))
        kl_of = None if self._ref is None else self._kl(policy)
        kept, texts, lengths, ended, kls = [], [], [], [], []
        for prompts, real in in_batches(self._source, size):
            start = len(texts)
            rows = np.arange(start * group, (start + size) * group, dtype=np.int32)
            seed = seed_of(self._seed, number)
            rollout = policy.sample(prompts, seed, self._sampling(policy), group, rows)
            kl = None if kl_of is None else kl_of(policy.params, self._ref.params, rollout)
            host, kl = jax.device_get((rollout, kl))
            kept.append((host, prompts.rows, real))
            take = real * group
            ids = completion_ids(host.response[:take], host.lengths[:take])
            said = [policy.tokenizer.decode(own, skip_special_tokens=True) for own in ids]
            texts += [said[i : i + group] for i in range(0, take, group)]
            for whole, part in ((lengths, host.lengths), (ended, host.ended), (kls, kl)):
                if part is not None:
                    whole.append(np.asarray(part)[:take].reshape(-1, group))
            self._tick(name, len(texts), len(self._source))
        kl = np.concatenate(kls).astype(np.float64) if kls else None
        return Answers(name, policy.path, texts, np.concatenate(lengths), np.concatenate(ended), kl, kept)

    def _kl(self, policy: Policy):
        config, reference = self._config, self._ref.model

        def kl(params, ref_params, rollout):
            models = Models(Network(policy.model, params), Network(reference, ref_params))
            return actor_critic.token_kl(models, rollout, config).sum(axis=1)

        return jax.jit(kl)


def reference_answers(
    name: str, texts: list[str], source: PromptData, tokenizer: Any, batch_size: int, shards: int, most: int
) -> tuple[Answers, int]:
    """The data's own answers as those of a policy, with their eos.

    Args:
      texts: an answer to each prompt.
      most: tokens that an answer may have; longer ones are cut.

    Returns:
      (Answers, how many were cut)
    """
    ids = tokenizer.encode_batch(texts)
    ids = [own if own and own[-1] == tokenizer.eos_id else [*own, tokenizer.eos_id] for own in ids]
    ended = np.asarray([len(own) <= most for own in ids])
    ids = [np.asarray(own[:most], np.int32) for own in ids]
    width = batches.bucket(max(map(len, ids)), batches.default_buckets(max(map(len, ids))))
    size, kept = batch_prompts(batch_size, 1, len(texts), shards), []
    for prompts, real in in_batches(source, size):
        own = [ids[row] for row in prompts.rows]
        lengths = batches.lengths_of(own)
        rollout = Rollout(
            prompt_tokens=prompts.tokens,
            prompt_lengths=prompts.lengths,
            response=batches.pad_right(own, width, tokenizer.eos_id),
            lengths=lengths,
            ended=ended[prompts.rows],
            logprobs=np.zeros((size, width), np.float32),
            response_mask=np.ones((size, width), bool),
        )
        kept.append((rollout, prompts.rows, real))
    lengths = batches.lengths_of(ids)[:, None]
    found = Answers(name, None, [[text] for text in texts], lengths, ended[:, None], None, kept)
    return found, int((~ended).sum())


def score(answers: Answers, scorer: Scorer, source: PromptData, mesh) -> None:
    """Sets `each` and `scores` of all answers."""
    each, scores = [], []
    group = answers.lengths.shape[1]
    for rollout, rows, real in answers.batches:
        count, there = len(rows) * group, real * group
        lengths = np.where(np.arange(count) < there, rollout.lengths, -1).astype(np.int32)  # the others are absent
        placed = sharding.shard_batch(rollout.replace(lengths=lengths), mesh)
        found = scorer.score(
            placed, source, np.repeat(rows, group), group, TrainerState(is_eval=True), limit=real * group
        )
        own, whole = jax.device_get((found.each_reward, jnp.where(found.scorable, found.total_scores, jnp.nan)))
        each.append(own[:there].reshape(real, group, -1))
        scores.append(whole[:there].reshape(real, group))
    answers.each = np.concatenate(each).astype(np.float64)
    answers.scores = np.concatenate(scores).astype(np.float64)


def reference_texts(source: PromptData, column: str) -> list[str] | None:
    """The data's own answer to each prompt; None where there is no such column.

    Args:
      source: the prompts with their other columns.
      column: of texts, or of conversations, whose last message counts. 'completion' is also OpenAI's 'summary'.

    Raises:
      UserError: a row has none.
    """
    columns = source.columns(range(len(source)))
    if column == "completion" and column not in columns and "summary" in columns:
        column = "summary"
    if column not in columns:
        return None
    texts = []
    for row, value in enumerate(columns[column]):
        if isinstance(value, list) and value and isinstance(value[-1], dict):
            value = value[-1].get("content")
        if not isinstance(value, str) or not value.strip():
            raise UserError(
                f"{source.report.name}: {column!r} of usable row {row + 1} is {value!r:.60}, not an answer. Mend it, "
                "name another column by --completion_column, or leave reference out of --against"
            )
        texts.append(value if column != "summary" or value.startswith(" ") else f" {value}")
    return texts
