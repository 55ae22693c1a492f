"""Games of textarena as environments: their randomness is their own, others are refused."""

import random
import sys

import numpy as np
import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.tools import textarena_games
from rlhf_jax.tools.environments import methods, open_environments


def game(name="GuessTheNumber-v0"):
    pytest.importorskip("textarena")
    return textarena_games.factory(f"textarena:{name}")()


def won(environment, seed):
    """Moves of halving from the start of a game to its end, and what it said."""
    said, low, high = [environment.reset(seed=seed, other="column")], 1, 20
    while "over" not in said[-1]:
        middle = (low + high) // 2
        said.append(environment.play(f"[{middle}]"))
        low, high = (middle + 1, high) if "higher" in said[-1] else (low, middle - 1)
    return said


def test_a_game_is_played_by_calls_and_gives_its_reward():
    environment = game()
    assert list(methods(environment)) == ["play"]
    said = won(environment, 3)
    assert "between 1 and 20" in said[0] and all("number is" in each for each in said[1:-1])
    assert "Congratulations" in said[-1] and environment.get_reward() == 1.0
    assert environment.play("[1]") == "The game is over."
    environment.reset(seed=4)
    assert environment.get_reward() == 0.0


def test_games_are_functions_of_their_seeds_and_moves_and_leave_global_generators_alone():
    one, other = game(), game()
    states = random.getstate(), np.random.get_state()[1].tolist()
    alone = [won(one, seed) for seed in range(8)]
    assert len({tuple(said) for said in alone}) > 3
    random.seed(7)
    again = []
    for seed in range(8):
        again.append(won(other, seed))
        random.random()
        one.reset(seed=seed + 100)
    assert again == alone
    random.setstate(states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    won(one, 5)
    assert random.getstate() == states[0]


def test_games_that_draw_in_their_moves_keep_their_place():
    boards = []
    for between in (lambda: None, lambda: random.seed(1)):
        environment = game("2048-v0")
        boards.append([environment.reset(seed=5)])
        for move in ("[left]", "[up]", "[right]", "[down]") * 3:
            between()
            boards[-1].append(environment.play(move))
    assert boards[0] == boards[1]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("Wordle-v0", "loads word lists from the network"),
        ("TicTacToe-v0", "cannot be played here: .*number of players"),
        ("Nothing-v0", "textarena has no game 'Nothing-v0'"),
    ],
)
def test_other_games_are_refused(name, match):
    pytest.importorskip("textarena")
    with pytest.raises(UserError, match=match):
        open_environments([f"textarena:{name}"], None, timeout=5.0)


def test_rows_need_a_seed():
    with pytest.raises(UserError, match="needs a column 'seed'.* as the data set 'seeds' has; got None"):
        game().reset(prompt="x")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    monkeypatch.setattr(textarena_games, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package textarena: pip install '.\[textarena\]'"):
        open_environments(["textarena:GuessTheNumber-v0"], None, timeout=5.0)
