"""Decoding in slots: a queue of rows that is known before the first token, in one program without the host.

A slot decodes one row at a time. Where there are more rows than slots, idle slots take the next rows of the queue once
`Decoding.refill` of them are idle; when the queue is empty, or there are as many slots as rows from the start, a loop
of S slots is followed by loops of S / 2, S / 4, ... to which the live rows move together. A token depends on the key,
the row, its place and the weights alone: slots, order and block sizes change nothing but the last bits of logits.

Shapes: N rows of the queue, S slots, P prompts, G = N / P responses to a prompt, T response columns, Q tokens of a row
in a step (1, or 1 and drafts).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.generate.drafts import ngram_drafts
from rlhf_jax.generate.guided import Automaton
from rlhf_jax.generate.sampling import Sampling, is_on, sample
from rlhf_jax.types import Array, Params

RESTART_TOKENS = 128
"""Tokens of a row that an earlier call left unfinished whose keys and values are computed at a time."""
LEAST_ROWS = 8
"""Rows of the smallest loop: fewer cost nearly as much, and each loop is compiled."""


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How rows are decoded. Frozen and hashable: static under jit. No field changes what a row samples but by rounding;
    an int8 cache does.

    Attributes:
      block: columns of the first segment of the cache; only segments that hold tokens are read (see
        models.cached_attention). None: an eighth of the columns, at least 128.
      shrink: whether live rows move together into half of the slots when half of the rows have ended.
      slots: rows that are decoded at a time, over all devices; None: all.
      refill: share of the slots that are idle before they take rows of the queue.
      draft: 'ngram' proposes tokens that followed the last two before; None: one token a step.
      draft_tokens: tokens that are proposed in a step.
      cache_dtype: 'int8' keeps the responses' keys and values in int8; None: in the compute dtype.
      max_steps: decode steps of one call, after which rows are left unfinished; None: no limit.
    """

    block: int | None = None
    shrink: bool = False
    slots: int | None = None
    refill: float = 0.125
    draft: str | None = None
    draft_tokens: int = 4
    cache_dtype: str | None = None
    max_steps: int | None = None

    @property
    def queries(self) -> int:
        """Q."""
        return 1 + (self.draft_tokens if self.draft else 0)


class Prompts(NamedTuple):
    """What the rows answer."""

    tokens: Array  # [P, C] int32, left-padded
    lengths: Array  # [P] int32
    prefix: Any  # keys and values, of `model.prefill`


class Rows(NamedTuple):
    """The queue. Each row has its first token, or more where an earlier call left it unfinished."""

    response: Array  # [N, T] int32
    logprobs: Array  # [N, T] float32
    lengths: Array  # [N] int32, tokens so far
    ended: Array  # [N] bool, whether a stop token was sampled
    keys: Array  # [N] typed
    limits: Array  # [N] int32, most tokens
    expected: Array  # [N] float32, expected tokens: the longest first
    state: Array | None  # [N] int32, of the automaton after the tokens so far; None: responses are not guided


class Steps(NamedTuple):
    """What decoding took."""

    steps: Array  # [1] int32
    slot_steps: Array  # [1] float32, the sum of the slots of each step


class _Slots(NamedTuple):
    row: Array  # [S] int32, N: idle
    t: Array  # [S] int32, tokens of the row so far; [] where all rows have as many
    token: Array  # [S] int32, the last of them
    seen: Array | None  # [S, V] bool
    prefix: Any  # of S rows, or of P prompts where slot i holds row i
    cache: Any  # of `model.empty_cache`


class _Loop(NamedTuple):
    slots: _Slots
    rows: Rows
    taken: Array  # [] int32, rows of the queue that have had a slot
    steps: Steps


def decode_rows(
    model,
    params: Params,
    prompts: Prompts,
    rows: Rows,
    *,
    sampling: Sampling,
    decoding: Decoding,
    dtype: Any,
    automaton: Automaton | None = None,
    started: bool = False,
) -> tuple[Rows, Steps]:
    """Decodes rows until each has ended, or for `decoding.max_steps` steps.

    Args:
      model: a `models.Model` with a causal head, on one shard of the rows.
      params: of `model.unstack`.
      prompts: row i answers prompt i // G.
      rows: the queue.
      automaton: where rows have states.
      started: whether rows may have more than one token, whose keys and values are computed again.

    Returns:
      (rows, steps)
    """
    decoder = _Decoder(model, params, prompts, rows.lengths.shape[0], sampling, decoding, dtype, automaton, started)
    return decoder.run(rows)


@dataclasses.dataclass
class _Decoder:
    model: Any
    params: Params
    prompts: Prompts
    count: int  # N
    sampling: Sampling
    decoding: Decoding
    dtype: Any
    automaton: Automaton | None
    started: bool

    def __post_init__(self):
        slots = self.decoding.slots
        self.size = self.count if slots is None else min(slots, self.count)
        self.group = self.count // self.prompts.lengths.shape[0]

    def run(self, rows: Rows) -> tuple[Rows, Steps]:
        unfinished = _unfinished(rows)
        order = jnp.argsort(jnp.where(unfinished, -rows.expected, jnp.inf), stable=True).astype(jnp.int32)
        steps = Steps(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.float32))
        queue = self.size < self.count
        slots = self._idle_slots(rows) if queue else self._all_slots(rows, unfinished)
        loop = _Loop(slots, rows, jnp.int32(0), steps)
        if queue:
            most, queued = self.size - max(int(self.size * self.decoding.refill), 1), jnp.sum(unfinished)

            def refilled(loop: _Loop) -> _Loop:
                return self._while(self._refill(loop, order, queued), most)

            loop = jax.lax.while_loop(lambda loop: (loop.taken < queued) & self._has_steps(loop), refilled, loop)
        size = self.size
        while self.decoding.shrink and size // 2 >= LEAST_ROWS:
            loop = self._compacted(self._while(loop, size // 2), size // 2)
            size //= 2
        loop = self._while(loop, 0)
        return loop.rows, loop.steps

    def _while(self, loop: _Loop, live: int) -> _Loop:
        """Steps while more than `live` slots hold a row."""

        def goes_on(loop: _Loop) -> Array:
            return (jnp.sum(loop.slots.row < self.count) > live) & self._has_steps(loop)

        return jax.lax.while_loop(goes_on, self._step, loop)

    def _has_steps(self, loop: _Loop) -> Array | bool:
        most = self.decoding.max_steps
        return True if most is None else loop.steps.steps[0] < most

    # --- slots

    def _empty_cache(self) -> Any:
        decoding = self.decoding
        queries = max(decoding.queries, self._restart_width if self.started else 1)
        options = {"queries": queries, "block": decoding.block, "int8": decoding.cache_dtype == "int8"}
        return self.model.empty_cache(self.size, self.sampling.max_new_tokens, self.dtype, **options)

    def _all_slots(self, rows: Rows, unfinished: Array) -> _Slots:
        """Slot i holds row i, and prompts stay shared by their rows."""
        row = jnp.where(unfinished, jnp.arange(self.count), self.count).astype(jnp.int32)
        together = not self.started and self.decoding.queries == 1
        t = jnp.int32(1) if together else jnp.maximum(rows.lengths, 1)
        token, seen = self._last_token(rows, t), self._seen(rows, row)
        slots = _Slots(row, t, token, seen, self.prompts.prefix, self._empty_cache())
        return self._restarted(slots, rows, unfinished) if self.started else slots

    def _idle_slots(self, rows: Rows) -> _Slots:
        row = jnp.full(self.size, self.count, jnp.int32)
        t, prefix = jnp.ones(self.size, jnp.int32), self._row_prefix(jnp.zeros(self.size, jnp.int32))
        return _Slots(row, t, jnp.zeros_like(row), self._seen(rows, row), prefix, self._empty_cache())

    def _row_prefix(self, row: Array) -> Any:
        """Each slot's own copy of its row's prompt."""
        prompt = jnp.minimum(row, self.count - 1) // self.group
        return jax.tree.map(lambda x: jnp.take(x, prompt, axis=0), self.prompts.prefix)

    def _last_token(self, rows: Rows, t: Array) -> Array:
        last = jnp.broadcast_to(t - 1, rows.lengths.shape)
        return jnp.take_along_axis(rows.response, last[:, None], axis=1)[:, 0]

    def _seen(self, rows: Rows, row: Array) -> Array | None:
        """Tokens of prompt and response so far: [S, V] bool; None without a repetition penalty."""
        if not is_on(self.sampling.repetition_penalty, 1.0):
            return None
        row = jnp.minimum(row, self.count - 1)
        tokens, lengths = (x[row // self.group] for x in self.prompts[:2])
        columns, width = jnp.arange(tokens.shape[1]), tokens.shape[1]
        # Index V is out of bounds and dropped: padding is not a seen token.
        vocabulary = self.model.config.vocab_size
        prompt = jnp.where(columns[None] >= (width - lengths)[:, None], tokens, vocabulary)
        response_mask = jnp.arange(rows.response.shape[1])[None] < rows.lengths[row][:, None]
        text = jnp.concatenate([prompt, jnp.where(response_mask, rows.response[row], vocabulary)], axis=1)
        return mark_seen(jnp.zeros((len(row), vocabulary), bool), text)

    def _refill(self, loop: _Loop, order: Array, queued: Array) -> _Loop:
        """Idle slots take the next rows of the queue."""
        slots, rows, taken, steps = loop
        idle = slots.row == self.count
        place = taken + jnp.cumsum(idle) - 1
        takes = idle & (place < queued)
        row = jnp.where(takes, order[jnp.minimum(place, self.count - 1)], slots.row)
        row_index = jnp.minimum(row, self.count - 1)
        t = jnp.where(takes, rows.lengths[row_index], slots.t)
        token = jnp.where(takes, rows.response[row_index, t - 1], slots.token)
        prefix = jax.tree.map(lambda new, old: take_rows(takes, new, old), self._row_prefix(row), slots.prefix)
        seen = slots.seen
        if seen is not None:
            seen = take_rows(takes, self._seen(rows, row), seen)
        slots = _Slots(row, t, token, seen, prefix, slots.cache)
        slots = self._restarted(slots, rows, takes) if self.started else slots
        return _Loop(slots, rows, taken + jnp.sum(takes), steps)

    @property
    def _restart_width(self) -> int:
        return min(RESTART_TOKENS, self.sampling.max_new_tokens)

    def _restarted(self, slots: _Slots, rows: Rows, takes: Array) -> _Slots:
        """Keys and values of all but the last token of the rows that slots have just taken."""
        width, row_index = self._restart_width, jnp.minimum(slots.row, self.count - 1)
        lengths = jnp.where(takes, slots.t - 1, 0)
        offsets = jnp.arange(width)
        prompt_lengths = self.prompts.lengths[row_index // self.group]

        def body(state: tuple[Array, Any]) -> tuple[Array, Any]:
            start, cache = state
            columns = jnp.minimum(start + offsets, rows.response.shape[1] - 1)
            tokens, active = rows.response[row_index][:, columns], lengths > start
            positions = prompt_lengths[:, None] + start + offsets[None]
            index = jnp.full(len(row_index), start)
            options = {"active": active, "end": start + width}
            _, cache = self.model.decode(
                self.params, slots.prefix, cache, tokens, positions, index, self.dtype, **options
            )
            return start + width, cache

        _, cache = jax.lax.while_loop(lambda state: jnp.any(lengths > state[0]), body, (jnp.int32(0), slots.cache))
        return slots._replace(cache=cache)

    def _compacted(self, loop: _Loop, size: int) -> _Loop:
        """The live rows in `size` slots."""
        slots = loop.slots
        indices = jnp.argsort(slots.row == self.count, stable=True)[:size]

        def take(x: Array) -> Array:
            return jnp.take(x, indices, axis=0)

        row = take(slots.row)
        shared = jax.tree.leaves(slots.prefix)[0].shape[0] != len(slots.row)
        slots = _Slots(
            row=row,
            t=slots.t if slots.t.ndim == 0 else take(slots.t),
            token=take(slots.token),
            seen=None if slots.seen is None else take(slots.seen),
            prefix=self._row_prefix(row) if shared else jax.tree.map(take, slots.prefix),
            cache=jax.tree.map(take, slots.cache),
        )
        return loop._replace(slots=slots)

    # --- a step

    def _step(self, loop: _Loop) -> _Loop:
        slots, rows, taken, steps = loop
        live, row_index = slots.row < self.count, jnp.minimum(slots.row, self.count - 1)
        queries, size = self.decoding.queries, len(slots.row)
        tokens = slots.token[:, None]
        if queries > 1:
            tokens = jnp.concatenate([tokens, self._drafts(slots, rows, row_index)], axis=1)
        # Places of the tokens that are sampled.
        t = jnp.broadcast_to(slots.t, (size,))[:, None] + jnp.arange(queries)[None]
        positions = self.prompts.lengths[row_index // self.group][:, None] + t - 1
        end = jnp.max(jnp.where(live, slots.t, 1)) + queries - 1
        hidden, cache = self.model.decode(
            self.params,
            slots.prefix,
            slots.cache,
            tokens,
            positions,
            slots.t - 1,
            self.dtype,
            end=end,
        )
        mask = state = None
        if rows.state is not None:
            state = rows.state[row_index]
            states, left = self.automaton.states(state, tokens[:, 1:]), rows.limits[row_index][:, None] - t - 1
            mask = partial(self.automaton.mask, state=states.reshape(-1), left=left.reshape(-1))
        sampled, logprobs = self._sample(hidden, rows.keys[row_index], t, tokens, slots.seen, mask)

        # A token counts if the drafts before it equal the sampled tokens, and none of them ended the row.
        right = jnp.cumprod(tokens[:, 1:] == sampled[:, :-1], axis=1, dtype=jnp.int32)
        counts = jnp.concatenate([jnp.ones((size, 1), bool), right.astype(bool)], axis=1)
        stops = jnp.zeros_like(counts)
        for stop in self.sampling.stop_ids:
            stops = stops | (sampled == stop)
        stopped_before = jnp.cumsum(stops, axis=1) - stops > 0
        counts = counts & ~stopped_before & live[:, None] & (t < rows.limits[row_index][:, None])
        new = jnp.sum(counts, axis=1)
        columns = jnp.where(counts, t, rows.response.shape[1])  # past the end: dropped
        row, after = slots.row, jnp.broadcast_to(slots.t, (size,)) + new
        ended = jnp.any(stops & counts, axis=1)
        rows = rows._replace(
            response=rows.response.at[row[:, None], columns].set(sampled, mode="drop"),
            logprobs=rows.logprobs.at[row[:, None], columns].set(logprobs, mode="drop"),
            lengths=rows.lengths.at[row].set(after, mode="drop"),
            ended=rows.ended.at[row].set(ended, mode="drop"),
        )
        if state is not None:
            after_new = jnp.take_along_axis(self.automaton.states(state, sampled), new[:, None], axis=1)[:, 0]
            rows = rows._replace(state=rows.state.at[row].set(after_new, mode="drop"))
        seen = slots.seen
        if seen is not None:
            seen = mark_seen(seen, jnp.where(counts, sampled, self.model.config.vocab_size))
        last = jnp.take_along_axis(sampled, jnp.maximum(new - 1, 0)[:, None], axis=1)[:, 0]
        slots = _Slots(
            row=jnp.where(ended | (after >= rows.limits[row_index]), self.count, row),
            t=slots.t + 1 if slots.t.ndim == 0 else after,
            token=last,
            seen=seen,
            prefix=slots.prefix,
            cache=cache,
        )
        return _Loop(slots, rows, taken, Steps(steps.steps + 1, steps.slot_steps + size))

    def _sample(
        self,
        hidden: Array,
        keys: Array,
        t: Array,
        tokens: Array,
        seen: Array | None,
        mask: Callable[[Array], Array] | None,
    ) -> tuple[Array, Array]:
        """[S, Q, D] hidden states, [S] keys -> tokens and log-probabilities, each [S, Q]; `mask`: of [S * Q, V]."""
        size, queries = t.shape
        if seen is not None and queries > 1:
            vocabulary = self.model.config.vocab_size
            before = jnp.tri(queries, dtype=bool)[:, None]  # of each token those up to it
            drafted = jax.vmap(mark_seen, (None, 0))(seen, jnp.where(before, tokens[None], vocabulary))
            seen = drafted.swapaxes(0, 1).reshape(size * queries, -1)
        keys = jnp.repeat(keys, queries, axis=0)
        hidden = hidden.reshape(size * queries, -1)
        out = sample(self.model, self.params, hidden, keys, t.reshape(-1), seen, self.sampling, mask=mask)
        return tuple(x.reshape(size, queries) for x in out)

    def _drafts(self, slots: _Slots, rows: Rows, row_index: Array) -> Array:
        prompt = row_index // self.group
        group = prompt[:, None] * self.group + jnp.arange(self.group)[None]
        return ngram_drafts(
            self.prompts.tokens[prompt],
            rows.response[row_index],
            rows.response[group],
            rows.lengths[group],
            slots.t,
            self.decoding.draft_tokens,
        )


def _unfinished(rows: Rows) -> Array:
    """[N] bool."""
    return ~rows.ended & (rows.lengths < rows.limits)


def take_rows(takes: Array, new: Array, old: Array) -> Array:
    """Rows of `new` where `takes` [S], else of `old`."""
    return jnp.where(takes.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def mark_seen(seen: Array, tokens: Array) -> Array:
    """[S, V] bool with the tokens [S, n] of each row set; index V is dropped."""
    return seen.at[jnp.arange(len(seen))[:, None], tokens].set(True, mode="drop")
