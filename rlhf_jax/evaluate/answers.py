"""Answers of policies to the evaluation prompts: sampling, KL to a reference, rewards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms.networks import Models, Network
from rlhf_jax.algorithms.response_logprobs import token_kl
from rlhf_jax.config import PPOConfig
from rlhf_jax.data import PromptData, batches, conversation_forms, row_texts
from rlhf_jax.data.chat import text_of
from rlhf_jax.errors import UserError
from rlhf_jax.generate.guided import Automaton
from rlhf_jax.inference import Policy
from rlhf_jax.parallel import local_rows, sharding
from rlhf_jax.rewards.interface import TrainerState, completion_ids
from rlhf_jax.rewards.scorer import Scorer
from rlhf_jax.stages.programs import sampling_of
from rlhf_jax.stages.turns import Conversations, Turns, call_metrics, respond
from rlhf_jax.types import PartialResponses, PromptBatch, Rollout


class Batch(NamedTuple):
    """Answers that are scored together.

    Attributes:
      rollout: on the host.
      source, rows: the prompts, and the row in them of each answer.
      real: the first answers, without those that pad the batch.
      conversations: of answers that may call tools; None: there are no tools.
    """

    rollout: Rollout
    source: PromptData
    rows: np.ndarray
    real: int
    conversations: Conversations | None = None


@dataclasses.dataclass
class Answers:
    """G answers to each of P prompts.

    Attributes:
      name, path: of the policy; reference answers have no path.
      texts: [P][G].
      lengths: [P, G] tokens, including eos.
      ended: [P, G] bool, whether the answer ended with eos.
      kl: [P, G] nats, or None.
      batches: all answers, in order.
      rewards: [P, G, F], NaN where a reward does not apply; None before `add_scores`, or without rewards.
      scores: [P, G], the weighted sum of rewards, NaN where none applies.
      extra: further metrics, [P, G] by name.
      of_tools: how often tools were called, and failed.
    """

    name: str
    path: str | None
    texts: list[list[str]]
    lengths: np.ndarray
    ended: np.ndarray
    kl: np.ndarray | None
    batches: list[Batch]
    rewards: np.ndarray | None = None
    scores: np.ndarray | None = None
    extra: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    of_tools: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def first(self) -> list[str]:
        """[P]: the first answer to each prompt."""
        return [row[0] for row in self.texts]


def policy_seed(seed: int, policy_index: int) -> int:
    """The sampling seed of a policy. Policies are sampled independently, so that the answers of policy 0 do not depend
    on the others."""
    return int(np.random.SeedSequence([seed, policy_index]).generate_state(1)[0])


def iterate_batches(source: Any, size: int) -> Iterator[tuple[Any, int]]:
    """(batch, its number of rows without padding) for all rows of a data set in order."""
    for start in range(0, len(source), size):
        yield source.in_order(start, size), min(size, len(source) - start)


def prompts_per_batch(batch_size: int, group: int, prompts: int, shards: int) -> int:
    """Number of prompts in a batch of about batch_size responses, at most `prompts`, rounded up to a multiple of
    `shards`."""
    size = min(max(batch_size // group, 1), prompts)
    return -(-size // shards) * shards


class Sampler:
    """Samples answers, and computes their KL while the policy's weights are loaded.

    Args:
      config: sampling options.
      samples: answers to each prompt by the evaluated policy.
      eos_ids: of the evaluated policy's tokenizer, which all policies share.
      suppress_ids: ids that are never sampled.
      seed, batch_size: options of the command.
      greedy: greedy decoding, without KL.
      automaton: of the texts that responses may have; None: any.
      turns: of responses that call tools; None: there are no tools.
      ref: reference policy of the KL with its weights loaded, or None.
      on_progress: called with a policy's name, the prompts done and the total.
    """

    def __init__(
        self,
        config: PPOConfig,
        source: PromptData,
        samples: int,
        *,
        eos_ids: tuple[int, ...],
        suppress_ids: tuple[int, ...],
        seed: int,
        batch_size: int,
        greedy: bool = False,
        automaton: Automaton | None = None,
        turns: Turns | None = None,
        ref: Policy | None = None,
        on_progress: Callable[[str, int, int], None] = lambda *_: None,
    ):
        self._config, self._source, self._samples, self._on_progress = config, source, samples, on_progress
        self._seed, self._batch_size, self._greedy = seed, batch_size, greedy
        self._automaton, self._turns = automaton, turns
        self._ref = None if greedy else ref
        self._sampling = sampling_of(config, eos_ids, 0.0 if greedy else None, suppress_ids)

    def answers(self, name: str, policy: Policy, policy_index: int) -> Answers:
        """Answers of a policy whose weights are loaded: `samples` to each prompt for policy 0, which is evaluated, and
        one for others."""
        group = self._samples if policy_index == 0 else 1
        size = prompts_per_batch(self._batch_size, group, len(self._source), sharding.row_shards(policy.mesh))
        compute_kl = None if self._ref is None else self._kl_program(policy)
        seed, answered, texts, kls = policy_seed(self._seed, policy_index), [], [], []
        for start in range(0, len(self._source), size):
            batch, images = self._batch(policy, seed, start, size, group)
            kl = None
            if compute_kl is not None:
                kl = compute_kl(policy.params, self._ref.params, batch.rollout, images, self._sampling.temperature)
            host, kl = sharding.fetch((batch.rollout, kl))
            answered.append(batch._replace(rollout=host))
            ids = completion_ids(host.response[: batch.real], host.lengths[: batch.real])
            decoded = [policy.tokenizer.decode(completion, skip_special_tokens=True) for completion in ids]
            texts += [decoded[i : i + group] for i in range(0, batch.real, group)]
            kls += [] if kl is None else [np.asarray(kl)[: batch.real].reshape(-1, group)]
            self._on_progress(name, len(texts), len(self._source))
        kl = np.concatenate(kls).astype(np.float64) if kls else None
        lengths, ended = (
            np.concatenate([getattr(each.rollout, field)[: each.real].reshape(-1, group) for each in answered])
            for field in ("lengths", "ended")
        )
        conversations = [batch.conversations for batch in answered if batch.conversations is not None]
        of_tools = call_metrics(conversations) if conversations else {}
        return Answers(name, policy.path, texts, lengths, ended, kl, answered, of_tools=of_tools)

    def _batch(self, policy: Policy, seed: int, start: int, size: int, group: int) -> tuple[Batch, Any]:
        """(answers to `size` prompts, with their rollout on the devices; the prompts' images)"""
        numbers = np.arange(start * group, (start + size) * group, dtype=np.int32)

        def place(prompts: PromptBatch) -> PromptBatch:
            count = len(prompts.rows)
            share = prompts.replace(rows=prompts.rows[local_rows.held_rows(policy.mesh, count)])
            return local_rows.place(share, policy.mesh, count)

        def generate(prompts: PromptBatch, begun: PartialResponses | None, responses: int) -> tuple[Rollout, None]:
            options: dict[str, Any] = {"automaton": self._automaton, "begun": begun}
            return policy.sample(prompts, seed, self._sampling, responses, numbers, **options), None

        prompts = self._source.in_order(start, size, local_rows.held_rows(policy.mesh, size))
        real, at = min(size, len(self._source) - start) * group, f"prompts from {start}"
        answered = respond(generate, place, self._turns, prompts, self._source, group_size=group, at=at, real=real)
        if self._turns is not None:
            self._turns.keep_environments()  # they are scored after all answers
        batch = Batch(answered.rollout, answered.source, answered.rows, real, answered.conversations)
        return batch, answered.prompts.images

    def _kl_program(self, policy: Policy):
        reference = self._ref.model

        def kl(params, ref_params, rollout, images, temperature):
            config = dataclasses.replace(self._config, temperature=temperature)
            models = Models(Network(policy.model, params), Network(reference, ref_params))
            if images is not None:
                group = rollout.lengths.shape[0] // images.pixels.shape[0]
                images = jax.tree.map(lambda x: jnp.repeat(x, group, axis=0), images)
            return token_kl(models, rollout, config, images).sum(axis=1)

        return jax.jit(kl)


def reference_answers(
    texts: list[str], source: PromptData, tokenizer: Any, *, batch_size: int, shards: int, max_tokens: int
) -> tuple[Answers, int]:
    """The reference answers of the data set in the form of a policy's, with eos.

    Prompt and answer have the tokens of the joined text; the prompt keeps the number of tokens that it has alone.

    Args:
      texts: an answer to each prompt.
      batch_size, shards: as `prompts_per_batch`.
      max_tokens: longer answers are truncated.

    Returns:
      (Answers, number of truncated answers)
    """
    rendered = source.conversational
    fitted = row_texts.fit_prompts(source.display_texts(range(len(texts))), tokenizer, None, "drop", rendered=rendered)
    # A prompt that was cut by its tokens, or has those of images, is not that of its text.
    pairs = zip(fitted, source.tokens, strict=True)
    fitted = [
        prompt if prompt.ids == ids.tolist() else prompt._replace(ids=ids.tolist(), text=None) for prompt, ids in pairs
    ]
    sequences = [one.ids for one in row_texts.join_completions(fitted, texts, tokenizer, rendered=rendered)]
    cuts = [min(len(prompt.ids), len(sequence) - 1) for prompt, sequence in zip(fitted, sequences, strict=True)]
    heads = [np.asarray(sequence[:cut], np.int32) for sequence, cut in zip(sequences, cuts, strict=True)]
    ids = [sequence[cut:] for sequence, cut in zip(sequences, cuts, strict=True)]
    ended = np.asarray([len(completion) <= max_tokens for completion in ids])
    ids = [np.asarray(completion[:max_tokens], np.int32) for completion in ids]
    width = batches.bucket(max(map(len, ids)), batches.default_buckets(max(map(len, ids))))
    size, answered = prompts_per_batch(batch_size, 1, len(texts), shards), []
    for prompts, real in iterate_batches(source, size):
        completions, before = [ids[row] for row in prompts.rows], [heads[row] for row in prompts.rows]
        lengths = batches.lengths_of(completions)
        rollout = Rollout(
            prompt_tokens=batches.pad_left(before, prompts.tokens.shape[1], tokenizer.pad_id),
            prompt_lengths=batches.lengths_of(before),
            response=batches.pad_right(completions, width, tokenizer.eos_id),
            lengths=lengths,
            ended=ended[prompts.rows],
            logprobs=np.zeros((size, width), np.float32),
            response_mask=np.ones((size, width), bool),
        )
        answered.append(Batch(rollout, source, prompts.rows, real))
    lengths = batches.lengths_of(ids)[:, None]
    answers = Answers("reference", None, [[text] for text in texts], lengths, ended[:, None], None, answered)
    return answers, int((~ended).sum())


def add_scores(answers: Answers, scorer: Scorer, mesh) -> None:
    """Sets `rewards` and `scores` of all answers."""
    rewards, scores = [], []
    group = answers.lengths.shape[1]
    for rollout, source, rows, real, conversations in answers.batches:
        lengths = np.where(np.arange(len(rows)) < real, rollout.lengths, -1).astype(np.int32)  # -1 marks padding rows
        placed = sharding.shard_batch(rollout.replace(lengths=lengths), mesh)
        state = TrainerState(is_eval=True)
        scored = scorer.score(placed, source, rows, group=group, state=state, limit=real, conversations=conversations)
        each, total_scores, scorable = sharding.fetch((scored.each_reward, scored.total_scores, scored.scorable))
        weighted = np.where(scorable, total_scores, np.float32(np.nan))
        rewards.append(each[:real].reshape(-1, group, each.shape[1]))
        scores.append(weighted[:real].reshape(-1, group))
    answers.rewards = np.concatenate(rewards).astype(np.float64)
    answers.scores = np.concatenate(scores).astype(np.float64)


MOST_TASKS = 100
"""More different values in a column 'task' are no names of tasks."""


def task_names(source: PromptData) -> list[str] | None:
    """The task of each prompt: the column 'task', if all rows have a text there; None without such a column."""
    names = source.columns(range(len(source))).get("task")
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) > MOST_TASKS:
        return None
    return names


def reference_texts(source: PromptData, column: str) -> list[str] | None:
    """The reference answer to each prompt; None if there is no such column.

    Args:
      source: the prompts with their other columns.
      column: column of texts, or of conversations, of which the last message is the answer. Without a 'completion' it
        may be OpenAI's 'summary'.

    Raises:
      UserError: a row has no answer.
    """
    columns = source.columns(range(len(source)))
    if column == "completion" and column not in columns and "summary" in columns:
        column = "summary"
    if column not in columns:
        return None
    texts = []
    for row, value in enumerate(columns[column]):
        if source.conversational:
            with contextlib.suppress(conversation_forms.FormError):
                value = conversation_forms.as_messages(value)
        if isinstance(value, list) and value and isinstance(value[-1], dict):
            value = text_of(value[-1])
        if not isinstance(value, str) or not value.strip():
            raise UserError(
                f"{source.report.name}: {column!r} of usable row {row + 1} is {value!r:.60}, not an answer. Fix it, "
                "set --completion_column to another column, or leave reference out of --against"
            )
        texts.append(value if column != "summary" or value.startswith(" ") else f" {value}")
    return texts
