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
from rlhf_jax.data import PromptData, Tokenizer
from rlhf_jax.data.chat import Conversation
from rlhf_jax.data.tool_calls import ToolCalls
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import local_rows, multihost
from rlhf_jax.runtime.stopping import Tick, no_tick
from rlhf_jax.stages.programs import Programs
from rlhf_jax.tools.toolbox import Toolbox, open_toolbox
from rlhf_jax.types import Params, PartialResponses, PromptBatch, Rollout, RolloutState


@dataclasses.dataclass
class Conversations:
    """What was said in the responses of a rollout, tools included.

    Attributes:
      messages: of each of the H responses.
      metrics: how often tools were called, and failed.
      seconds: that the calls took.
    """

    messages: list[Conversation]
    metrics: dict[str, float]
    seconds: float


@dataclasses.dataclass
class _Row:
    """A response whose last turn may call tools."""

    prefix: str  # the text before the turn
    start: int = 0  # column of the turn's first token
    messages: Conversation = dataclasses.field(default_factory=list)
    active: bool = True


class Turns:
    """The turns of a policy's responses.

    Args:
      config: response_length, max_tool_calling_iterations.
      toolbox: the tools.
      calls: how the policy calls them.
      positions: of the policy.
      mesh: of the run.
    """

    def __init__(self, config: PolicyConfig, toolbox: Toolbox, calls: ToolCalls, positions: int, mesh: Any):
        self._config, self._toolbox, self._calls = config, toolbox, calls
        self._positions, self._mesh = positions, mesh
        longest = max(map(len, calls.tokenizer.hf.get_vocab()), default=1)
        self._most_characters = longest * config.response_length

    def respond(
        self,
        generate: Callable[[PartialResponses], tuple[Rollout, RolloutState | None]],
        source: PromptData,
        rows: np.ndarray,
        real: int,
        tick: Tick,
    ) -> tuple[Rollout, RolloutState | None, Conversations]:
        """All turns of B responses.

        Args:
          generate: what the responses have already -> (Rollout, RolloutState).
          source: the prompts.
          rows: [B] row numbers in it.
          real: the first rows, whose responses may call tools.
          tick: called before each turn but the first; may raise.

        Raises:
          UserError: a tool returned what is no text, on any process.
        """
        held, owners = local_rows.held_rows(self._mesh, len(rows)), local_rows.owners(self._mesh, len(rows))
        texts = source.display_texts(rows[held])
        states = {int(row): _Row(text) for row, text in zip(held, texts, strict=True)}
        for row in states:
            states[row].active = row < real
        own = [row for row in states if owners[row] == jax.process_index()]
        prompt_lengths = {row: len(source.tokens[rows[row]]) for row in own}
        shape = (len(held), self._config.response_length)
        sampled, begun = np.ones(shape, bool), self._nothing(len(rows), shape)
        calls = failures = 0
        seconds = 0.0
        for iteration in itertools.count():
            if iteration:
                tick()
            rollout, rollout_state = generate(begun)
            fetched = local_rows.fetch((rollout.response, rollout.lengths, rollout.ended), self._mesh)
            response, lengths, ended = map(np.array, fetched)
            began = time.perf_counter()
            place = {int(row): index for index, row in enumerate(held)}
            ids = {row: response[place[row], states[row].start : lengths[place[row]]] for row in own}
            most = self._config.max_tool_calling_iterations
            result = error = None
            try:
                result = self._call(ids, states, prompt_lengths, calls_left=most is None or iteration < most)
            except UserError as raised:
                error = raised
            goes_on = False
            for part in multihost.agree(result, error):
                calls, failures = calls + part["calls"], failures + part["failures"]
                for row, messages, suffix, text in part["rows"]:
                    goes_on |= suffix is not None
                    if row not in states:
                        continue
                    states[row].messages += messages
                    states[row].active = suffix is not None
                    if suffix is None:
                        continue
                    index = place[row]
                    end = lengths[index] + len(suffix)
                    response[index, lengths[index] : end], sampled[index, lengths[index] : end] = suffix, False
                    lengths[index], ended[index] = end, False
                    states[row].start, states[row].prefix = int(end), text
            seconds += time.perf_counter() - began
            if not goes_on:
                break
            placed = local_rows.place((response, lengths, ended), self._mesh, len(rows))
            begun = PartialResponses(placed[0], rollout.logprobs, placed[1], placed[2])
        rollout = rollout.replace(sampled=local_rows.place(sampled, self._mesh, len(rows)))
        metrics = {
            "tools/call_frequency": calls / max(real, 1),
            "tools/failure_frequency": failures / calls if calls else 0.0,
        }
        messages = [states[int(row)].messages for row in held]
        return rollout, rollout_state, Conversations(messages, metrics, seconds)

    def _nothing(self, count: int, shape: tuple[int, int]) -> PartialResponses:
        """The beginning of B responses, of which this process holds `shape`."""
        integers, floats = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        arrays = (integers, floats, integers[:, 0], np.zeros(shape[0], bool))
        return PartialResponses(*local_rows.place(arrays, self._mesh, count))

    def _call(
        self, ids: dict[int, np.ndarray], states: dict[int, _Row], prompt_lengths: dict[int, int], *, calls_left: bool
    ) -> dict[str, Any]:
        """Makes the calls of the turns that ended.

        Args:
          ids: of this process' rows, the tokens of the turn.
          states: of the rows.
          prompt_lengths: tokens of their prompts.
          calls_left: whether a response may go on after another call.

        Returns:
          {"rows": [(row, messages of the turn, ids of what follows or None, their text)], "calls", "failures"}, of
          values that JSON has.
        """
        said = {}
        for row, tokens in ids.items():
            if states[row].active:
                said[row] = [self._calls.parse(tokens.tolist(), states[row].prefix)] if len(tokens) else []
        calling = [row for row, turn in said.items() if calls_left and turn and turn[0].get("tool_calls")]
        results = self._toolbox.call([said[row][0]["tool_calls"] for row in calling])
        outcomes = []
        for row, turn in said.items():
            suffix = text = None
            if row in calling:
                answers = results.messages[calling.index(row)]
                used = states[row].start + len(ids[row])
                suffix, text = self._suffix(answers, used, prompt_lengths[row])
                turn = turn if suffix is None else [*turn, *answers]
            outcomes.append((row, turn, suffix, text))
        return {"rows": outcomes, "calls": results.calls, "failures": results.failures}

    def _suffix(self, answers: Conversation, used: int, prompt_length: int) -> tuple[list[int] | None, str | None]:
        """What follows a response of `used` tokens; (None, None) where there is no room for it."""
        if sum(len(answer["content"]) for answer in answers) > self._most_characters:
            return None, None
        suffix, text = self._calls.suffix(answers)
        length = used + len(suffix)
        if length > self._config.response_length or prompt_length + length >= self._positions:
            return None, None
        return suffix, text

    def close(self) -> None:
        """Ends the threads of tools."""
        self._toolbox.close()


def respond(
    programs: Programs,
    turns: Turns | None,
    policy: Params,
    prompts: PromptBatch,
    source: PromptData,
    rows: np.ndarray,
    *,
    real: int | None = None,
    tick: Tick = no_tick,
    **options: Any,
) -> tuple[Rollout, RolloutState | None, Conversations | None]:
    """Responses of a policy, of one turn or with the turns of its tools.

    Args:
      programs: of the stage.
      turns: None: there are no tools.
      policy, prompts, **options: of `Programs.generate`.
      source, rows, real, tick: of `Turns.respond`; real None: all rows.
    """
    if turns is None:
        return *programs.generate(policy, prompts, **options), None

    def generate(begun: PartialResponses) -> tuple[Rollout, RolloutState | None]:
        return programs.generate(policy, prompts, begun=begun, **options)

    return turns.respond(generate, source, rows, len(rows) if real is None else real, tick)


def open_tools(config: PolicyConfig, functions: Sequence[Callable]) -> tuple[Toolbox | None, PolicyConfig]:
    """The tools of a run, and the config whose chat template shows them to the policy.

    Args:
      config: of the stage.
      functions: tools beside those of the config.

    Raises:
      UserError: a tool is no function with a schema, or an option does not go with tools.
    """
    toolbox = open_toolbox(config.tools, functions, config.tool_timeout)
    if toolbox is None:
        return None, config
    for name, value in (("rollout_max_steps", None), ("structured_outputs_regex", None)):
        if getattr(config, name) != value:
            raise UserError(f"{name} with tools is not supported: remove one of them")
    if config.structured_outputs_regex_column is not None:
        raise UserError("structured_outputs_regex_column with tools is not supported: remove one of them")
    if config.stop_token is None and config.stop_token_ids is None:
        raise UserError("tools need a token that ends the policy's messages: set stop_token eos or stop_token_ids")

    def shown(kwargs: dict[str, Any] | None) -> dict[str, Any]:
        if "tools" in (kwargs or {}):
            raise UserError("chat_template_kwargs has 'tools', which the policy could not call: give the option tools")
        return {**(kwargs or {}), "tools": toolbox.schemas}

    entries = config.datasets
    if entries is not None:
        own = "chat_template_kwargs"
        entries = tuple({**entry, own: shown(entry[own])} if own in entry else entry for entry in entries)
    kwargs = shown(config.chat_template_kwargs)
    return toolbox, dataclasses.replace(config, chat_template_kwargs=kwargs, datasets=entries)


def open_turns(
    config: PolicyConfig,
    toolbox: Toolbox,
    sources: Sequence[PromptData],
    tokenizer: Tokenizer,
    positions: int,
    mesh: Any,
) -> Turns:
    """The turns of a policy.

    Args:
      config: of the stage, as before `open_tools`.
      toolbox: of `open_tools`.
      sources: the prompts.
      tokenizer: the policy's.
      positions: of the policy.
      mesh: of the run.

    Raises:
      UserError: prompts are texts, have images or tools of their own; or as `ToolCalls`.
    """
    for source in sources:
        name = source.report.name
        if not source.conversational:
            raise UserError(f"tools need conversations as prompts, lists of messages; those of {name} are texts")
        if source.images is not None:
            raise UserError(f"tools with images are not supported; {name} has images")
        if "tools" in source.column_names:
            raise UserError(
                f"{name} has a column 'tools', which the policy could not call: remove it or the option tools"
            )
    calls = ToolCalls(tokenizer, toolbox.schemas, config.chat_template_kwargs)
    return Turns(config, toolbox, calls, positions, mesh)
