"""Games of the package textarena as environments: 'textarena:GAME', as 'textarena:GuessTheNumber-v0'.

Games of one player that load nothing from the network. They draw from Python's and numpy's global generators, so each
instance has its own states of these, which are set while it plays.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from rlhf_jax.errors import UserError
from rlhf_jax.rewards.interface import describe_error

PREFIX = "textarena:"
INSTALL = "pip install '.[textarena]'"


class TextArenaGame:
    """A game that a policy plays by calls of `play`.

    The reward is the game's own once it is over, and 0 before.

    Args:
      name: of textarena, as 'GuessTheNumber-v0' or 'Sudoku-v0-easy'.
      make: makes the game of textarena.

    Raises:
      UserError: the game cannot be made.
    """

    def __init__(self, name: str, make: Callable[[], Any]):
        self._name = name
        self._states: Any = None
        try:
            self._game = make()
        except Exception as error:  # the game's own
            raise UserError(f"{PREFIX}{name} cannot be played here: {describe_error(error)}") from error

    def _begun(self, seed: int) -> str:
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()
        with self._own_randomness():
            try:
                self._game.reset(num_players=1, seed=None)
            except Exception as error:  # the game's own
                raise UserError(f"{PREFIX}{self._name} cannot be played here: {describe_error(error)}") from error
            return self._said()

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[None]:
        global_states = random.getstate(), np.random.get_state()
        _set_random(self._states)
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            _set_random(global_states)

    def _said(self) -> str:
        """What the game has said since the last call."""
        _, observations = self._game.get_observation()
        roles = {self._game.state.role_mapping.get(0)}
        texts = (text for player, text, _ in observations if self._game.state.role_mapping.get(player) not in roles)
        return "\n".join(texts)

    def reset(self, seed: int | None = None, **row) -> str:
        """Begins a game. `seed`: a column of the data."""
        if not isinstance(seed, int) or seed < 0:
            raise UserError(
                f"{PREFIX}{self._name} needs a column 'seed' with a number from 0, as the data set 'seeds' has; got "
                f"{seed!r:.60}"
            )
        return self._begun(seed)

    def play(self, move: str) -> str:
        """Makes a move in the game.

        Args:
            move: The move, in the form that the game asks for, as "[4]".

        Returns:
            What the game answers.
        """
        if self._game.state.done:
            return "The game is over."
        with self._own_randomness():
            done, _ = self._game.step(move)
            observation = self._said()
        if not done:
            return observation
        return "\n".join(filter(None, [observation, "The game is over.", self._game.state.game_info[0].get("reason")]))

    def get_reward(self) -> float:
        """The game's reward; 0 while it is not over."""
        rewards = self._game.state.rewards
        return float(rewards[0]) if self._game.state.done and rewards else 0.0


def factory(spec: str) -> Callable[[], TextArenaGame]:
    """Makes games of 'textarena:GAME'.

    Raises:
      UserError: there is no such game, it has several players, needs the network, or does not begin the same way twice.
    """
    name = spec.removeprefix(PREFIX)
    constructor = functools.partial(TextArenaGame, name, _maker(name))
    game = constructor()
    if game.reset(seed=0) != game.reset(seed=0):
        raise UserError(f"{PREFIX}{name} does not begin the same way twice with a seed: runs could not be resumed")
    return constructor


def _maker(name: str) -> Callable[[], Any]:
    """Makes the game of textarena, without the wrappers that keep what was said before a reset."""
    if find_spec("textarena") is None:
        raise UserError(f"{PREFIX}{name} needs the package textarena: {INSTALL}")
    try:
        from textarena.envs.registration import ENV_REGISTRY, make
    except ImportError as error:
        raise UserError(f"textarena cannot be imported: {describe_error(error)}. {INSTALL}") from error
    entry = ENV_REGISTRY.get(f"{name}-raw")
    if entry is None:
        raise UserError(f"textarena has no game {name!r}; its games are listed at textarena.ai, as 'GuessTheNumber-v0'")
    module = find_spec(str(entry.entry_point).partition(":")[0])
    if module is None or module.origin is None or "nltk" in pathlib.Path(module.origin).read_text("utf-8"):
        raise UserError(f"{PREFIX}{name} loads word lists from the network, and is not supported")
    return functools.partial(make, f"{name}-raw")


def _set_random(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
