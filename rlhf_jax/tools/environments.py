"""Environments, as TRL's GRPOTrainer has them: objects that are reset for each response, whose public methods are tools
and which may own the reward."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.rewards.interface import describe_error, load_object
from rlhf_jax.tools import textarena_games
from rlhf_jax.tools.toolbox import tool_schema
from rlhf_jax.utils.bounded_calls import Call, Caller, Hang

NAME = "environment"
"""Column of the data that names each row's environment, where there are several."""
STATE = ("state", "load_state")
"""Methods of an environment that keeps something across responses: one returns it, of JSON types, one takes it back."""


class Environments:
    """Instances by the name of their factory, one for each response of a batch; they are reset and used again, except
    those of responses that go on.

    Attributes:
      several: whether rows name their environment; else the only one has the name None.
      schemas: the JSON schemas of each environment's tools.
      reward_functions: a reward function for each class that has `get_reward`, by its name.

    Args:
      factories: functions or classes without arguments.
      timeout: seconds of a reset.

    Raises:
      UserError: a factory fails, an instance has no reset, or a method is not a tool.
    """

    def __init__(self, factories: Mapping[str | None, Callable], timeout: float):
        self.several = None not in factories
        self._factories, self._timeout, self._caller = dict(factories), timeout, Caller("environments")
        self._pool = {name: [self._new(name)] for name in factories}
        self._going_on: dict[str | None, int] = dict.fromkeys(factories, 0)  # the first of each pool
        self._states_before: dict[int, Any] = {}  # of instances of responses that may go on, by id
        self.schemas: dict[str | None, list[dict[str, Any]]] = {}
        self.reward_functions: list[Callable] = []
        kinds: list[type] = []
        for name, (instance,) in self._pool.items():
            if not inspect.ismethod(getattr(instance, "reset", None)):
                raise UserError(f"environment {type(instance).__name__} has no method reset, which begins a response")
            self.schemas[name] = [tool_schema(method) for method in methods(instance).values()]
            if _keeps_state(instance):
                _state(instance)  # what cannot be saved is an error before the run
            if inspect.ismethod(getattr(instance, "get_reward", None)) and type(instance) not in kinds:
                kinds.append(type(instance))
                self.reward_functions.append(_reward_function(type(instance)))

    def _new(self, name: str | None) -> Any:
        try:
            return self._factories[name]()
        except UserError:
            raise
        except Exception as error:  # the user's code
            what = "environment_factory" if name is None else f"environment_factory {name!r}"
            raise UserError(f"{what} failed: {describe_error(error)}") from error

    def check_row(self, row: Mapping[str, Any], where: str) -> None:
        """Raises a UserError where a row names no environment; `where`: of the row, for the message."""
        if self.several and row.get(NAME) not in self._pool:
            names = ", ".join(map(repr, self._pool))
            raise UserError(f"{where}: {NAME!r} is {row.get(NAME)!r:.60}; environment_factory has {names}")

    def environment_name(self, row: Mapping[str, Any]) -> str | None:
        """The environment of a row."""
        return row[NAME] if self.several else None

    def begin(self, rows: Sequence[Mapping[str, Any]], *, go_on: bool = False) -> tuple[list[Any], list[str | None]]:
        """Resets an instance for each response.

        Args:
          rows: of the data, all their columns.
          go_on: whether responses may go on after a resume, which repeats them from the state before the reset.

        Returns:
          (the instances, what each reset returned: text, or None)

        Raises:
          UserError: a reset fails, does not return in time, or returns something else.
        """
        used = dict(self._going_on)
        instances, texts = [], []
        for row in rows:
            name = self.environment_name(row)
            if used[name] == len(self._pool[name]):
                self._pool[name].append(self._new(name))
            instance = self._pool[name][used[name]]
            used[name] += 1
            if go_on and _keeps_state(instance):
                self._states_before[id(instance)] = _state(instance)
            arguments = {key: value for key, value in row.items() if not (self.several and key == NAME)}
            title = f"environment {type(instance).__name__}: reset"
            call = Call(title, instance.reset, self._timeout, arguments)
            self._caller.call(call)
            instances.append(instance)
            texts.append(_observation(call))
        return instances, texts

    def hold(self, instances: Sequence[Any]) -> None:
        """Marks the instances of responses that go on: they are not reset until the next call."""
        ranks = {id(instance): rank for rank, instance in enumerate(instances)}
        for name, pool in self._pool.items():
            pool.sort(key=lambda instance: ranks.get(id(instance), len(ranks)))
            self._going_on[name] = sum(id(instance) in ranks for instance in pool)
        self._states_before = {number: state for number, state in self._states_before.items() if number in ranks}

    def states(self) -> dict[str, list[Any]]:
        """The states of instances with `STATE`, by the name of their factory ('': the only one), for a checkpoint: for
        responses that go on, the states before their resets.

        Raises:
          UserError: `state` of one fails or returns no JSON types.
        """
        keeping = {name: pool for name, pool in self._pool.items() if _keeps_state(pool[0])}
        before = self._states_before
        return {
            name or "": [before[id(each)] if id(each) in before else _state(each) for each in pool]
            for name, pool in keeping.items()
        }

    def restore(self, states: Mapping[str, Sequence[Any]]) -> list[str]:
        """Takes back what `states` returned.

        Returns:
          A line for each class that cannot take it back.

        Raises:
          UserError: `load_state` of one fails.
        """
        lost = []
        for name, pool in self._pool.items():
            if not _keeps_state(pool[0]):
                lost.append(
                    f"environment {type(pool[0]).__name__} is reset: what it keeps across responses is lost, since it "
                    "has no methods state and load_state"
                )
                continue
            of_pool = states.get(name or "", ())
            pool += [self._new(name) for _ in range(len(of_pool) - len(pool))]
            for instance, state in zip(pool, of_pool, strict=False):
                try:
                    instance.load_state(state)
                except Exception as error:  # the user's code
                    raise UserError(
                        f"environment {type(instance).__name__}: load_state failed: {describe_error(error)}"
                    ) from error
        return lost

    def keep(self) -> None:
        """Leaves the instances as they are: later responses get other ones."""
        self._pool = {name: [] for name in self._pool}

    def close(self) -> None:
        """Ends the thread of resets."""
        self._caller.close()


def methods(instance: Any) -> dict[str, Callable]:
    """The tools of an environment: its public methods by name, but `reset`, `get_reward`, and `STATE` where it has
    both."""
    members = inspect.getmembers(instance, predicate=inspect.ismethod)
    no_tools = {"reset", "get_reward", *(STATE if _keeps_state(instance) else ())}
    return {name: method for name, method in members if name not in no_tools and not name.startswith("_")}


def _keeps_state(instance: Any) -> bool:
    return all(inspect.ismethod(getattr(instance, name, None)) for name in STATE)


def _state(instance: Any) -> Any:
    """What an environment keeps across responses, as a checkpoint has it."""
    try:
        return json.loads(json.dumps(instance.state()))
    except Exception as error:  # the user's code
        raise UserError(
            f"environment {type(instance).__name__}: state failed, or returned what is not of JSON types: "
            f"{describe_error(error)}"
        ) from error


def open_environments(specs: Sequence[str], factory: Any, timeout: float) -> Environments | None:
    """The environments of the option `environment_factory`, or of a factory or a dict of them in its place; None
    without any.

    Args:
      specs: 'file.py:Class' or 'textarena:GAME', or several as 'NAME=file.py:Class'.
      factory: a callable, or a dict of them; None: those of `specs`.
      timeout: seconds of a reset.

    Raises:
      UserError: as `Environments`; both are set, a spec has no name or names nothing.
    """
    if factory is not None and specs:
        raise UserError("environment_factory is in the config and an argument of rlhf_jax.run: remove one of them")
    if factory is None:
        pairs = [spec.partition("=")[::2] if "=" in spec else (None, spec) for spec in specs]
        names = [name for name, _ in pairs]
        if len(pairs) > 1 and (None in names or len(set(names)) < len(names)):
            raise UserError(
                f"environment_factory: several need a name each, NAME=file.py:Class; got {', '.join(specs)}"
            )
        factory = {name: _factory(spec) for name, spec in pairs}
    factories = dict(factory) if isinstance(factory, Mapping) else {None: factory}
    for name, each in factories.items():
        if not callable(each):
            raise UserError(
                f"environment_factory {'' if name is None else repr(name)} is no function or class: {each!r:.60}"
            )
    return Environments(factories, timeout) if factories else None


def _factory(spec: str) -> Any:
    if spec.startswith(textarena_games.PREFIX):
        return textarena_games.factory(spec)
    return load_object(spec, "environment_factory")


def _observation(call: Call) -> str | None:
    outcome = call.outcome
    assert outcome is not None
    if isinstance(outcome.error, KeyboardInterrupt):
        raise outcome.error
    if isinstance(outcome.error, Hang):
        raise UserError(f"{call.title} {outcome.error} (tool_timeout)")
    if outcome.error is not None:
        raise UserError(f"{call.title} raised {describe_error(outcome.error)}") from outcome.error
    value = outcome.result
    if isinstance(value, list) and all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in value):
        return "".join(block["text"] for block in value)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{call.title} returned {value!r:.60}; it returns text, blocks of text, or None")
    return value


def _reward_function(kind: type) -> Callable:
    """The `get_reward` of a class as a reward function: None for responses of other environments."""
    if inspect.iscoroutinefunction(kind.get_reward):  # type: ignore[attr-defined]

        async def get_reward(environments: list[Any]) -> list[float | None]:
            return [await each.get_reward() if type(each) is kind else None for each in environments]
    else:

        def get_reward(environments: list[Any]) -> list[float | None]:
            return [each.get_reward() if type(each) is kind else None for each in environments]

    get_reward.__name__ = kind.__name__
    return get_reward
