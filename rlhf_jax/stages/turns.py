"""Responses of several turns: generate, call tools, go on with their results, for the rows that called.

The tokens of earlier turns are kept as they were sampled. Results of tools are part of the response, and its mask
`Rollout.sampled` leaves them out. One program generates all turns.

Shapes: B responses of a rollout, H of them on this process' devices, T response columns.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rlhf_jax.config import PolicyConfig
from rlhf_jax.data import PromptData
from rlhf_jax.data.chat import ChatTemplate, Conversation, text_messages, text_of
from rlhf_jax.data.prompts import NO_PROMPT
from rlhf_jax.data.tool_calls import ToolCalls
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import local_rows, multihost
from rlhf_jax.runtime.stopping import Tick, no_tick
from rlhf_jax.stages.programs import Programs, prompt_width
from rlhf_jax.tools.environments import Environments, methods
from rlhf_jax.tools.records import ToolRecords
from rlhf_jax.tools.toolbox import Toolbox
from rlhf_jax.types import Params, PartialResponses, PromptBatch, Rollout, RolloutState


@dataclasses.dataclass
class Conversations:
    """What was said in the responses of a rollout, tools included.

    Attributes:
      messages: of each of the H responses.
      environments: of each of them; None: there are none.
      responses, calls, failures: of all processes: responses, calls of tools in them, and those that failed.
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
    """How often tools were called in all responses of some conversations, and failed."""
    responses, calls, failures = (
        sum(getattr(each, name) for each in conversations) for name in ("responses", "calls", "failures")
    )
    return {
        "tools/call_frequency": calls / max(responses, 1),
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
    """

    rollout: Rollout
    rollout_state: RolloutState | None
    prompts: PromptBatch
    source: PromptData
    rows: np.ndarray
    conversations: Conversations | None = None


@dataclasses.dataclass
class _Row:
    """A response whose last turn may call tools."""

    prefix: str  # the text before the turn
    active: bool
    start: int = 0  # column of the turn's first token
    messages: Conversation = dataclasses.field(default_factory=list)


class _Held:
    """The H responses that this process' devices hold, on the host.

    Attributes:
      rows: their positions in the batch, ascending.
      states: of each.
    """

    def __init__(self, rows: list[int], texts: Sequence[str], columns: int, real: int):
        self.rows = rows
        self.states = {row: _Row(text, row < real) for row, text in zip(rows, texts, strict=True)}
        self._index = {row: index for index, row in enumerate(rows)}
        self.response, self.sampled = np.zeros((len(rows), columns), np.int32), np.ones((len(rows), columns), bool)
        self.lengths, self.ended = np.zeros(len(rows), np.int32), np.zeros(len(rows), bool)

    def fetch(self, rollout: Rollout, mesh: Any) -> None:
        """Takes over what was generated, in one transfer."""
        fetched = local_rows.fetch((rollout.response, rollout.lengths, rollout.ended), mesh)
        self.response, self.lengths, self.ended = map(np.array, fetched)

    def turn(self, row: int) -> np.ndarray:
        """The tokens of a response's last turn."""
        index = self._index[row]
        return self.response[index, self.states[row].start : self.lengths[index]]

    def go_on(self, row: int, suffix: list[int], text: str) -> None:
        """Appends results to a response, as tokens that were not sampled; it continues after them."""
        index, state = self._index[row], self.states[row]
        own = np.s_[index, self.lengths[index] : self.lengths[index] + len(suffix)]
        self.response[own], self.sampled[own] = suffix, False
        self.lengths[index] += len(suffix)
        self.ended[index] = False
        state.start, state.prefix = int(self.lengths[index]), text


class Turns:
    """The turns of a policy's responses.

    Args:
      config: of the stage.
      toolbox: the tools.
      environments: None: there are none.
      calls: how the policy calls them.
      positions: of the policy.
      mesh: of the run.
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

    def record(self, folder: str | None) -> None:
        """Records calls in a run's folder from now on (None: nowhere); calls that are recorded there, or in the run of
        tools_replay, are not repeated. Every process must call it.

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
    ) -> Responses:
        """All turns of B responses.

        Args:
          generate: (prompts on the mesh, what the responses have already) -> (Rollout, RolloutState).
          place: puts prompts on the mesh, this process' share.
          source: the prompts.
          prompts: a batch of them, on the host.
          rows: [B] row numbers in it.
          real: the first rows, whose responses may call tools.
          tick: called before each turn but the first; may raise.
          at: which responses of the run they are, for the records.

        Raises:
          UserError: a reset failed, a prompt is too long, or a tool returned what is no text, on any process.
        """
        began = time.perf_counter()
        count = len(rows)
        held, owners = local_rows.held_rows(self._mesh, count), local_rows.owners(self._mesh, count)
        own = [row for row in held.tolist() if owners[row] == jax.process_index() and row < real]
        environments: dict[int, Any] = {}
        if self._environments is not None:
            source, rows, environments = self._begin(source, rows, own, real)
            prompts = source.of_rows(rows, held)
        placed, columns = place(prompts), self._config.response_length
        responses = _Held(held.tolist(), source.display_texts(rows[held]), columns, real)
        prompt_lengths = {row: len(source.tokens[rows[row]]) for row in own}
        logprobs = local_rows.place(np.zeros((len(held), columns), np.float32), self._mesh, count)
        calls = failures = 0
        seconds = time.perf_counter() - began
        for iteration in itertools.count():
            if iteration:
                tick()
            arrays = (responses.response, responses.lengths, responses.ended)
            response, lengths, ended = local_rows.place(arrays, self._mesh, count)
            begun = PartialResponses(response, logprobs, lengths, ended)
            rollout, rollout_state = generate(placed, begun)
            responses.fetch(rollout, self._mesh)
            logprobs = rollout.logprobs
            began = time.perf_counter()
            most = self._config.max_tool_calling_iterations
            may_go_on = most is None or iteration < most
            turn = (at, iteration)
            parts = self._call(responses, own, prompt_lengths, environments, turn, may_go_on=may_go_on)
            calls += sum(part["calls"] for part in parts)
            failures += sum(part["failures"] for part in parts)
            said = [row for part in parts for row in part["rows"]]
            for row, turn, suffix, text in said:
                if row in responses.states:
                    responses.states[row].messages += turn
                    responses.states[row].active = suffix is not None
                    if suffix is not None:
                        responses.go_on(row, suffix, text)
            seconds += time.perf_counter() - began
            if all(suffix is None for _, _, suffix, _ in said):
                break
        rollout = rollout.replace(sampled=local_rows.place(responses.sampled, self._mesh, count))
        instances = None if self._environments is None else [environments.get(row) for row in responses.rows]
        messages = [state.messages for state in responses.states.values()]
        conversations = Conversations(messages, instances, real, calls, failures, seconds)
        return Responses(rollout, rollout_state, placed, source, rows, conversations)

    # --- environments

    def _begin(
        self, source: PromptData, rows: np.ndarray, own: list[int], real: int
    ) -> tuple[PromptData, np.ndarray, dict[int, Any]]:
        """Resets an environment for each of this process' responses.

        Returns:
          (the prompts of the B responses, their rows in them, the environments of this process' responses by row)
        """
        environments, result, error = self._environments, [], None
        assert environments is not None
        instances: list[Any] = []
        try:
            numbers = [int(rows[row]) for row in own]
            prompts = map(_prompt_argument, source.texts(numbers))
            of_data = [{**source.raw[i], **prompt} for i, prompt in zip(numbers, prompts, strict=True)]
            instances, texts = environments.begin(of_data)
            for row, data, text in zip(own, of_data, texts, strict=True):
                result.append((row, *self._prompt(source, int(rows[row]), environments.name_of(data), text)))
        except UserError as raised:
            error = raised
        parts = multihost.agree(result, error)
        begun = {row: prompt for part in parts for row, *prompt in part}
        # Rows that only pad the batch have any prompt.
        ids, rendered, conversations = zip(*(begun[row if row < real else 0] for row in range(len(rows))), strict=True)
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
        return source, np.arange(len(rows), dtype=np.int32), dict(zip(own, instances, strict=True))

    def _prompt(
        self, source: PromptData, row: int, name: str | None, text: str | None
    ) -> tuple[list[int], str, Conversation]:
        """(ids, text, messages) of a prompt that ends with what a reset returned."""
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
        template = self._templates[name].of_row(source.raw[row])
        rendered = template.render(text_messages(messages), generation_prompt=True)
        ids, most = self._calls.tokenizer.encode(rendered), self._config.query_length
        if len(ids) > most:
            raise UserError(
                f"{source.report.name}, row {row}: with the text of its reset the prompt has {len(ids)} "
                f"tokens, but query_length is {most}: raise it, or shorten what reset returns"
            )
        return ids, rendered, messages

    # --- a turn

    def _call(
        self,
        responses: _Held,
        own: list[int],
        prompt_lengths: dict[int, int],
        environments: dict[int, Any],
        place: tuple[str, int],
        *,
        may_go_on: bool,
    ) -> list[dict[str, Any]]:
        """Makes the calls of the turns that ended, each process those of its own rows.

        Args:
          responses: that this process holds.
          own: the rows whose tools this process calls.
          prompt_lengths: tokens of their prompts.
          environments: of these rows, where there are any.
          place: which responses of the run they are, and which turn, for the records.
          may_go_on: whether a response may go on after a call.

        Returns:
          Of each process {"rows": [(row, messages of the turn, ids of what follows or None, their text)], "calls",
          "failures"}.

        Raises:
          UserError: a tool returned what is no text or not what is recorded, on any process.
        """
        result = error = None
        at, iteration = place
        try:
            said: dict[int, Conversation] = {}
            for row in own:
                tokens, state = responses.turn(row), responses.states[row]
                if state.active:
                    said[row] = [self._calls.parse(tokens.tolist(), state.prefix)] if len(tokens) else []
            calling = [row for row, turn in said.items() if may_go_on and turn and turn[0].get("tool_calls")]
            results = self._toolbox.call(
                [said[row][0]["tool_calls"] for row in calling],
                [methods(environments[row]) for row in calling] if environments else None,
                records=self._records,
                places=[(at, row, iteration) for row in calling],
            )
            outcomes: list[tuple[int, Conversation, list[int] | None, str | None]] = []
            for row, answers in zip(calling, results.messages, strict=True):
                used = responses.states[row].start + len(responses.turn(row))
                suffix, text = self._suffix(answers, used, prompt_lengths[row])
                outcomes.append((row, said.pop(row) + (answers if suffix is not None else []), suffix, text))
            outcomes += [(row, turn, None, None) for row, turn in said.items()]
            count = sum(map(len, results.calls))
            result = {"rows": outcomes, "calls": count, "failures": results.failures}
        except UserError as raised:
            error = raised
        return multihost.agree(result, error)

    def _suffix(self, answers: Conversation, used: int, prompt_length: int) -> tuple[list[int] | None, str | None]:
        """What follows a response of `used` tokens; (None, None) where there is no room for it."""
        if sum(len(answer["content"]) for answer in answers) > self._most_characters:
            return None, None
        suffix, text = self._calls.suffix(answers)
        length = used + len(suffix)
        if length > self._config.response_length or prompt_length + length >= self._positions:
            return None, None
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


def _prompt_argument(prompt: Any) -> dict[str, Any]:
    """What reset gets of a row's prompt."""
    return {} if prompt == NO_PROMPT else {"prompt": prompt}


def respond(
    programs: Programs,
    turns: Turns | None,
    policy: Params,
    prompts: PromptBatch,
    source: PromptData,
    *,
    group_size: int,
    at: str,
    real: int | None = None,
    tick: Tick = no_tick,
    **options: Any,
) -> Responses:
    """Responses of a policy, of one turn or with the turns of its tools.

    Args:
      programs: of the stage.
      turns: None: there are no tools.
      policy, **options: of `Programs.generate`.
      prompts: a batch of `source`, on the host.
      source: the prompts.
      group_size: responses to a prompt.
      at, real, tick: of `Turns.respond`; real None: all rows.
    """
    rows = np.repeat(prompts.rows, group_size)
    if turns is None:
        placed = programs.place(prompts)
        return Responses(*programs.generate(policy, placed, group_size=group_size, **options), placed, source, rows)

    def generate(placed: PromptBatch, begun: PartialResponses) -> tuple[Rollout, RolloutState | None]:
        return programs.generate(policy, placed, group_size=len(rows) // len(placed.rows), begun=begun, **options)

    real = len(rows) if real is None else real
    return turns.respond(generate, programs.place, source, prompts, rows, real=real, tick=tick, at=at)
