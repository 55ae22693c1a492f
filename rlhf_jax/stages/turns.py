"""Responses of several turns: generate, call tools, and generate again after their results in the rows that called.

The tokens of earlier turns are kept as they were sampled. Results of tools are part of the response, and its mask
`Rollout.sampled` leaves them out. One program generates all turns. A turn that `rollout_max_steps` cuts continues while
other responses have turns left, and then in the next update.

Shapes: B responses of a rollout, H of them on this process' devices, T response columns.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlhf_jax.config import PolicyConfig
from rlhf_jax.data import PromptData
from rlhf_jax.data.chat import ChatTemplate, Conversation, text_messages, text_of
from rlhf_jax.data.prompts import NO_PROMPT
from rlhf_jax.data.tool_calls import ToolCalls
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import local_rows, multihost, sharding
from rlhf_jax.runtime.stopping import Tick, no_tick
from rlhf_jax.stages.partial_rollouts import by_response
from rlhf_jax.stages.programs import prompt_width
from rlhf_jax.tools.environments import Environments, methods
from rlhf_jax.tools.records import ToolRecords
from rlhf_jax.tools.toolbox import Toolbox, failures
from rlhf_jax.types import PartialResponses, PromptBatch, Rollout, RolloutState, Unfinished


@dataclasses.dataclass
class Conversations:
    """What was said in the responses of a rollout, tools included.

    Attributes:
      messages: of each of the H responses.
      environments: one for each response; None without environments.
      responses, calls, failures: of all processes: responses that are finished, calls of tools in them, and those that
        failed.
      seconds: that resets and calls took.
    """

    messages: list[Conversation]
    environments: list[Any] | None
    responses: int
    calls: int
    failures: int
    seconds: float

    @property
    def metrics(self) -> dict[str, float]:
        """How often tools were called, and failed."""
        return call_metrics([self])

    @property
    def columns(self) -> dict[str, list[Any]]:
        """What reward functions get beside the columns of the data."""
        return {} if self.environments is None else {"environments": self.environments}


def call_metrics(conversations: Sequence[Conversations]) -> dict[str, float]:
    """How often tools were called in all responses of some conversations, and failed; empty without responses."""
    responses, calls, failures = (
        sum(getattr(each, name) for each in conversations) for name in ("responses", "calls", "failures")
    )
    if not responses:
        return {}
    return {
        "tools/call_frequency": calls / responses,
        "tools/failure_frequency": failures / calls if calls else 0.0,
    }


@dataclasses.dataclass
class Responses:
    """Responses of a policy.

    Attributes:
      rollout, rollout_state: of `Programs.generate`.
      prompts: on the mesh.
      source, rows: the prompts' data, and the row in it of each of the B responses. Prompts that environments began are
        data of their own.
      conversations: None: there are no tools.
      present: [B] bool, False for responses that go on in the next update, and those to the same prompt. None: all are
        finished.
    """

    rollout: Rollout
    rollout_state: RolloutState | None
    prompts: PromptBatch
    source: PromptData
    rows: np.ndarray
    conversations: Conversations | None = None
    present: np.ndarray | None = None


@dataclasses.dataclass
class _Row:
    """A response whose last turn may call tools."""

    prefix: str  # the text before the turn
    active: bool
    at: str  # responses of the run that it began with, for the records
    turn: int = 0
    start: int = 0  # column of the turn's first token
    messages: Conversation = dataclasses.field(default_factory=list)


class _Prompt(NamedTuple):
    """A prompt that ends with what a reset returned."""

    ids: list[int]
    text: str
    messages: Conversation


class _TurnResult(NamedTuple):
    """What a turn that ended added to a response."""

    row: int
    messages: Conversation
    suffix: list[int] | None = None  # ids of the results; None: the response has ended
    text: str = ""  # of the whole conversation up to there
    calls: int = 0
    failures: int = 0


@dataclasses.dataclass
class _GoingOn:
    """What is stored besides tokens of responses that go on in the next update, by row: the rows of this process, but
    of all processes in `prompts` and `counts`."""

    states: dict[int, _Row] = dataclasses.field(default_factory=dict)
    environments: dict[int, Any] = dataclasses.field(default_factory=dict)
    prompts: dict[int, _Prompt] = dataclasses.field(default_factory=dict)
    counts: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # [2] int64: calls and failures


@dataclasses.dataclass
class _Batch:
    """The responses of a rollout that this process holds, with the lengths of their prompts and their environments, and
    the `counts` of all responses."""

    responses: _LocalResponses
    prompt_lengths: dict[int, int]
    environments: dict[int, Any]
    counts: dict[int, np.ndarray]


class _LocalResponses:
    """The H responses that this process' devices hold, on the host.

    Attributes:
      rows: their positions in the batch, ascending.
      states: of each, by its position.
    """

    def __init__(self, rows: np.ndarray, columns: int):
        self.rows = rows.tolist()
        self.states: dict[int, _Row] = {}
        self._index = {row: index for index, row in enumerate(self.rows)}
        self.response, self.sampled = np.zeros((len(rows), columns), np.int32), np.ones((len(rows), columns), bool)
        self.lengths, self.ended = np.zeros(len(rows), np.int32), np.zeros(len(rows), bool)

    def begin(self, unfinished: Unfinished, goes_on: np.ndarray, mesh: Any) -> None:
        """Takes over the tokens of responses that go on, [B] bool."""
        of_rows = (unfinished.response, unfinished.sampled, unfinished.lengths, unfinished.ended)
        response, sampled, lengths, ended = local_rows.fetch(of_rows, mesh)
        goes_on = goes_on[self.rows]
        self.response, self.sampled = np.array(response), sampled | ~goes_on[:, None]
        self.lengths, self.ended = np.where(goes_on, lengths, 0), ended & goes_on

    def fetch(self, rollout: Rollout | Unfinished, mesh: Any) -> None:
        """Takes over what was generated, in one transfer."""
        fetched = local_rows.fetch((rollout.response, rollout.lengths, rollout.ended), mesh)
        self.response, self.lengths, self.ended = map(np.array, fetched)

    def turn(self, row: int) -> np.ndarray:
        """The tokens of a response's last turn."""
        index = self._index[row]
        return self.response[index, self.states[row].start : self.lengths[index]]

    def cut(self, row: int) -> bool:
        """Whether the last turn of a response has not ended."""
        index = self._index[row]
        return not self.ended[index] and self.lengths[index] < self.response.shape[1]

    def go_on(self, row: int, suffix: list[int], text: str) -> None:
        """Appends results to a response, as tokens that were not sampled; it continues after them."""
        index, state = self._index[row], self.states[row]
        span = np.s_[index, self.lengths[index] : self.lengths[index] + len(suffix)]
        self.response[span], self.sampled[span] = suffix, False
        self.lengths[index] += len(suffix)
        self.ended[index] = False
        state.start, state.prefix, state.turn = int(self.lengths[index]), text, state.turn + 1

    def end(self, row: int, length: int) -> None:
        """Ends a response after `length` tokens."""
        index = self._index[row]
        self.lengths[index], self.ended[index] = length, True

    def tokens(self, row: int) -> list[int]:
        """All tokens of a response."""
        index = self._index[row]
        return self.response[index, : self.lengths[index]].tolist()

    def results(self, row: int) -> list[tuple[int, int]]:
        """(first column, column after) of the results in a response."""
        index = self._index[row]
        sampled = np.concatenate([[True], self.sampled[index, : self.lengths[index]], [True]])
        edges = np.flatnonzero(sampled[1:] != sampled[:-1])
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


class Turns:
    """The turns of a policy's responses.

    Args:
      environments: None: there are none.
      calls: how the policy calls them.
    """

    def __init__(
        self,
        config: PolicyConfig,
        toolbox: Toolbox,
        environments: Environments | None,
        calls: ToolCalls,
        positions: int,
        mesh: Any,
    ):
        self._config, self._toolbox, self._calls = config, toolbox, calls
        self._environments, self._positions, self._mesh = environments, positions, mesh
        longest = max(map(len, calls.tokenizer.hf.get_vocab()), default=1)
        self._most_characters = longest * config.response_length
        self._templates: dict[str | None, ChatTemplate] = {}
        self._records: ToolRecords | None = None
        self._going_on: _GoingOn | None = None

    def record(self, folder: str) -> None:
        """Records calls in a local folder from now on; calls that are recorded there, or in the run of tools_replay,
        are not repeated. Every process must call it.

        Raises:
          UserError: as `ToolRecords`, on any process.
        """
        error = None
        try:
            self._records = ToolRecords(folder, jax.process_index(), self._config.tools_replay)
        except UserError as raised:
            error = raised
        multihost.agree(error=error)

    def respond(
        self,
        generate: Callable[[PromptBatch, PartialResponses], tuple[Rollout, RolloutState | None]],
        place: Callable[[PromptBatch], PromptBatch],
        source: PromptData,
        prompts: PromptBatch,
        rows: np.ndarray,
        *,
        real: int,
        tick: Tick,
        at: str,
        unfinished: Unfinished | None = None,
    ) -> Responses:
        """All turns of B responses.

        Args:
          generate: (prompts on the mesh, what the responses have already) -> (Rollout, RolloutState).
          place: puts prompts on the mesh, this process' share.
          prompts: a batch of them, on the host.
          rows: [B] row numbers in it.
          real: the first rows, whose responses may call tools.
          tick: called before each turn but the first; may raise.
          at: which responses of the run they are, for the records.
          unfinished: of the update before, with `held` and `began` as numpy arrays; None: all responses begin.

        Raises:
          UserError: a reset failed, a prompt is too long, or a tool returned something other than text, on any process.
        """
        began = time.perf_counter()
        count, columns = len(rows), self._config.response_length
        device_rows, owners = local_rows.held_rows(self._mesh, count), local_rows.owners(self._mesh, count)
        process_rows = [row for row in device_rows.tolist() if owners[row] == jax.process_index() and row < real]
        responses = _LocalResponses(device_rows, columns)
        if unfinished is None:
            goes_on = np.zeros(count, bool)
            logprobs = local_rows.place(np.zeros((len(device_rows), columns), np.float32), self._mesh, count)
        else:
            goes_on, logprobs = by_response(np.asarray(unfinished.held), count), unfinished.logprobs
            responses.begin(unfinished, goes_on, self._mesh)
        resumes = bool(goes_on.any()) and self._going_on is None
        earlier = self._going_on if goes_on.any() and self._going_on is not None else _GoingOn()
        environments, prompts_of = earlier.environments, earlier.prompts
        if self._environments is not None:
            # After a resume the responses that go on come first: their instances were the first of the checkpoint.
            beginning = sorted(
                (row for row in process_rows if resumes or not goes_on[row]), key=lambda row: not goes_on[row]
            )
            opened, begun = self._begin(source, rows, beginning, go_on=unfinished is not None)
            environments, prompts_of = environments | opened, prompts_of | begun
            source, rows = self._with_prompts(source, rows, prompts_of)
            prompts = source.batch_from_rows(rows, device_rows)
        placed = place(prompts)
        texts = source.display_texts(rows[device_rows])
        responses.states = {
            row: earlier.states.get(row) or _Row(text, row < real, at)
            for row, text in zip(responses.rows, texts, strict=True)
        }
        counts = {row: earlier.counts.get(row, np.zeros(2, np.int64)) for row in range(real)}
        batch = _Batch(responses, {row: len(source.tokens[rows[row]]) for row in process_rows}, environments, counts)
        if unfinished is not None and resumes:
            began_in = by_response(np.asarray(unfinished.began), count)
            self._recall(batch, [row for row in responses.rows if goes_on[row]], began_in)
        seconds = time.perf_counter() - began
        for iteration in itertools.count():
            if iteration:
                tick()
            arrays = (responses.response, responses.lengths, responses.ended)
            response, lengths, ended = local_rows.place(arrays, self._mesh, count)
            rollout, state = generate(placed, PartialResponses(response, logprobs, lengths, ended))
            after = None if unfinished is None or state is None else state.unfinished
            responses.fetch(rollout if after is None else after, self._mesh)
            logprobs = rollout.logprobs
            began = time.perf_counter()
            outcomes = self._call(
                batch, [row for row in process_rows if responses.states[row].active and not responses.cut(row)]
            )
            seconds += time.perf_counter() - began
            if all(each.suffix is None for each in outcomes):
                break
        rollout, present = rollout.replace(sampled=local_rows.place(responses.sampled, self._mesh, count)), None
        if after is not None:  # an update donates its state, so the state has an array of its own
            sampled = local_rows.place(responses.sampled, self._mesh, count)
            state = state.replace(unfinished=after.replace(sampled=sampled))
            present = _present(after, count)
            self._keep(batch, prompts_of, np.flatnonzero(~present).tolist())
        finished = range(real) if present is None else np.flatnonzero(present).tolist()
        calls, failed = sum((counts[row] for row in finished), np.zeros(2, np.int64)).tolist()
        instances = None if self._environments is None else [environments.get(row) for row in responses.rows]
        messages = [each.messages for each in responses.states.values()]
        conversations = Conversations(messages, instances, len(finished), calls, failed, seconds)
        return Responses(rollout, state, placed, source, rows, conversations, present)

    def _keep(self, batch: _Batch, prompts: Mapping[int, _Prompt], later: Sequence[int]) -> None:
        """Stores what the responses `later`, which go on in the next update, have besides their tokens."""

        def of(values: Mapping[int, Any]) -> dict[int, Any]:
            return {row: values[row] for row in later if row in values}

        unfinished = self._going_on = _GoingOn(
            of(batch.responses.states), of(batch.environments), of(prompts), of(batch.counts)
        )
        if self._environments is not None:
            self._environments.hold(list(unfinished.environments.values()))

    # --- environments

    def _begin(
        self, source: PromptData, rows: np.ndarray, beginning: list[int], *, go_on: bool
    ) -> tuple[dict[int, Any], dict[int, _Prompt]]:
        """Resets an environment for each response of this process that begins; `go_on`: as `Environments.begin`.

        Returns:
          (the environments of this process' responses by row, the prompts of all processes' responses by row)
        """
        environments, result, error = self._environments, [], None
        assert environments is not None
        instances: list[Any] = []
        try:
            numbers = [int(rows[row]) for row in beginning]
            prompts = map(_prompt_argument, source.texts(numbers))
            of_data = [{**source.raw[i], **prompt} for i, prompt in zip(numbers, prompts, strict=True)]
            instances, texts = environments.begin(of_data, go_on=go_on)
            for row, data, text in zip(beginning, of_data, texts, strict=True):
                result.append((row, *self._prompt(source, int(rows[row]), environments.environment_name(data), text)))
        except UserError as raised:
            error = raised
        parts = multihost.agree(result, error)
        begun = {row: _Prompt(*prompt) for part in parts for row, *prompt in part}
        return dict(zip(beginning, instances, strict=True)), begun

    def _with_prompts(
        self, source: PromptData, rows: np.ndarray, prompts: Mapping[int, _Prompt]
    ) -> tuple[PromptData, np.ndarray]:
        """(the prompts of the B responses, their rows in them)"""
        # Rows that only pad the batch have any prompt.
        ids, rendered, conversations = zip(*(prompts.get(row, prompts[0]) for row in range(len(rows))), strict=True)
        width = prompt_width(self._config)
        source = dataclasses.replace(
            source,
            tokens=[np.asarray(row, np.int32) for row in ids],
            prompts=rendered,
            conversations=conversations,
            raw=[source.raw[int(row)] for row in rows],
            buckets=(width,),
            report=dataclasses.replace(source.report, longest=width),
        )
        return source, np.arange(len(rows), dtype=np.int32)

    def _prompt(self, source: PromptData, row: int, name: str | None, text: str | None) -> _Prompt:
        """A prompt that ends with what a reset returned."""
        assert source.conversations is not None
        messages = [dict(message) for message in source.conversations[row]]
        if messages == NO_PROMPT:
            messages = [{"role": "user", "content": ""}]
        if text is not None:
            messages = [*messages[:-1], {**messages[-1], "content": text_of(messages[-1]) + text}]
        if name not in self._templates:
            assert self._environments is not None
            schemas = [*self._toolbox.schemas, *self._environments.schemas[name]]
            kwargs = {**(self._config.chat_template_kwargs or {}), "tools": schemas or None}
            self._templates[name] = ChatTemplate(self._calls.tokenizer, kwargs)
        template = self._templates[name].for_row(source.raw[row])
        rendered = template.render(text_messages(messages), generation_prompt=True)
        ids, most = self._calls.tokenizer.encode(rendered), self._config.query_length
        if len(ids) > most:
            raise UserError(
                f"{source.report.name}, row {row}: with the text of its reset the prompt has {len(ids)} "
                f"tokens, but query_length is {most}: raise it, or shorten what reset returns"
            )
        return _Prompt(ids, rendered, messages)

    # --- a turn

    def _call(self, batch: _Batch, ended: Sequence[int]) -> list[_TurnResult]:
        """Makes the calls of turns that ended, each process for its own rows, and shares what was said.

        Args:
          ended: rows of this process whose turn ended.

        Returns:
          What was said in the responses of all processes.

        Raises:
          UserError: a tool returned something other than text, or not what is recorded, on any process.
        """
        outcomes: list[_TurnResult] = []
        error = None
        states, environments = batch.responses.states, batch.environments
        most = self._config.max_tool_calling_iterations
        try:
            turns: dict[int, Conversation] = {}
            for row in ended:
                tokens = batch.responses.turn(row)
                turns[row] = [self._calls.parse(tokens.tolist(), states[row].prefix)] if len(tokens) else []
            calling = [
                row
                for row, turn in turns.items()
                if (most is None or states[row].turn < most) and turn and turn[0].get("tool_calls")
            ]
            results = self._toolbox.call(
                [turns[row][0]["tool_calls"] for row in calling],
                [methods(environments[row]) for row in calling] if environments else None,
                records=self._records,
                places=[(states[row].at, row, states[row].turn) for row in calling],
            )
            for row, calls, answers in zip(calling, results.calls, results.messages, strict=True):
                used = states[row].start + len(batch.responses.turn(row))
                suffix, text = self._suffix(answers, used, batch.prompt_lengths[row])
                messages = turns.pop(row) + (answers if suffix is not None else [])
                outcomes.append(_TurnResult(row, messages, suffix, text, len(calls), failures(calls)))
            outcomes += [_TurnResult(row, turn) for row, turn in turns.items()]
        except UserError as raised:
            error = raised
        everywhere = [_TurnResult(*each) for part in multihost.agree(outcomes, error) for each in part]
        for each in everywhere:
            batch.counts[each.row] = batch.counts[each.row] + (each.calls, each.failures)
            if each.row in states:
                states[each.row].messages += each.messages
                states[each.row].active = each.suffix is not None
                if each.suffix is not None:
                    batch.responses.go_on(each.row, each.suffix, each.text)
        return everywhere

    def _recall(self, batch: _Batch, rows: Sequence[int], began: np.ndarray) -> None:
        """Repeats, after a resume, the turns of responses that go on. Functions are not called again: their results are
        taken from the records. The methods of environments are.

        Args:
          batch: the responses, with all of their tokens.
          rows: those on this process' devices that go on.
          began: [B] the updates that responses began in.

        Raises:
          UserError: as `_call`, or tools return other results than a response contains.
        """
        responses = batch.responses
        lengths, was_ended = responses.lengths.copy(), responses.ended.copy()
        tokens, results = {row: responses.tokens(row) for row in rows}, {row: responses.results(row) for row in rows}
        turns = {row: len(results[row]) + (not responses.cut(row)) for row in rows}
        for row in rows:
            responses.states[row].at = update_label(int(began[row]))
        for turn in range(max(multihost.agree(max(turns.values(), default=0)))):
            suffixes: dict[int, list[int] | None] = {}
            for row in (row for row in rows if turn < turns[row]):
                first, after = (*results[row], (len(tokens[row]), None))[turn]
                responses.end(row, first)
                suffixes[row] = None if after is None else tokens[row][first:after]
            # Only the process that owns a row calls its tools; others may hold the row too.
            outcomes = self._call(batch, [row for row in suffixes if row in batch.prompt_lengths])
            changed = [each.row for each in outcomes if suffixes.get(each.row, each.suffix) != each.suffix]
            error = None
            if changed:
                error = UserError(
                    f"{responses.states[changed[0]].at}, row {changed[0]}, turn {turn + 1}: tools return other results "
                    "than the response in the checkpoint contains, and the run's folder has no record of them. Restore "
                    "its tools.jsonl"
                )
            multihost.agree(error=error)
        responses.lengths, responses.ended = lengths, was_ended

    def _suffix(self, answers: Conversation, used: int, prompt_length: int) -> tuple[list[int] | None, str]:
        """What follows a response of `used` tokens, and its text; None where there is no room for it."""
        if sum(len(answer["content"]) for answer in answers) > self._most_characters:
            return None, ""
        suffix, text = self._calls.suffix(answers)
        length = used + len(suffix)
        if length > self._config.response_length or prompt_length + length >= self._positions:
            return None, ""
        return suffix, text

    def keep_environments(self) -> None:
        """Leaves the environments of responses as they are, as `Environments.keep`."""
        if self._environments is not None:
            self._environments.keep()

    def host_state(self) -> dict[str, Any]:
        """What environments keep across responses, of each process. Every process must call it."""
        if self._environments is None:
            return {}
        states, error = None, None
        try:
            states = self._environments.states()
        except UserError as problem:
            error = problem
        return {"environments": multihost.agree(states, error)}

    def restore_host_state(self, saved: dict[str, Any]) -> list[str]:
        """Takes back what `host_state` returned. Returns a line for each thing that is lost."""
        if self._environments is None:
            return []
        processes = jax.process_count()
        states = saved.get("environments", [{}] * processes)
        if len(states) != processes:
            return [f"environments are new: {len(states)} processes saved the state of theirs, not {processes}"]
        return self._environments.restore(states[jax.process_index()])

    def close(self) -> None:
        """Ends the threads of tools."""
        self._toolbox.close()
        if self._environments is not None:
            self._environments.close()


def update_label(step: int) -> str:
    """What the responses of an update, counted from 0, are called in the records."""
    return f"update {step + 1}"


def _present(unfinished: Unfinished, count: int) -> np.ndarray:
    """[B] bool: which responses do not go on in the next update."""
    return ~by_response(sharding.fetch(unfinished.held), count)


def _prompt_argument(prompt: Any) -> dict[str, Any]:
    """What reset gets of a row's prompt."""
    return {} if prompt == NO_PROMPT else {"prompt": prompt}


def respond(
    generate: Callable[[PromptBatch, PartialResponses | None, int], tuple[Rollout, RolloutState | None]],
    place: Callable[[PromptBatch], PromptBatch],
    turns: Turns | None,
    prompts: PromptBatch,
    source: PromptData,
    *,
    group_size: int,
    at: str,
    real: int | None = None,
    tick: Tick = no_tick,
    unfinished: Unfinished | None = None,
) -> Responses:
    """Responses of a policy, of one turn or with the turns of its tools.

    Args:
      generate: (prompts on the mesh, what the responses have already or None, responses to each prompt) -> (Rollout,
        RolloutState).
      turns: None: there are no tools.
      prompts: a batch of `source`, on the host.
      group_size: responses to a prompt.
      place, at, real, tick, unfinished: of `Turns.respond`; real None: all rows.
    """
    rows = np.repeat(prompts.rows, group_size)
    if turns is None:
        placed, present = place(prompts), None
        rollout, state = generate(placed, None, group_size)
        if unfinished is not None and state is not None:
            present = _present(state.unfinished, len(rows))
        return Responses(rollout, state, placed, source, rows, present=present)
    return turns.respond(
        lambda placed, begun: generate(placed, begun, len(rows) // len(placed.rows)),
        place,
        source,
        prompts,
        rows,
        real=len(rows) if real is None else real,
        tick=tick,
        at=at,
        unfinished=unfinished,
    )
