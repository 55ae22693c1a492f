"""The tool of the built-in task 'boxes', and the environment of 'guess_number' (`rlhf_jax.data.tool_tasks`)."""

from __future__ import annotations

from rlhf_jax.data import tool_tasks


def open_box(number: int) -> int:
    """Opens a box.

    Args:
        number: The number on the box.

    Returns:
        The amount in it.
    """
    if number not in tool_tasks.BOXES:
        raise ValueError(f"There is no box {number}.")
    return tool_tasks.amount(number)


class GuessNumber:
    """A number that is to be guessed; the reward is 1 if it was."""

    def reset(self, number: int, **row) -> None:
        """Begins a game. `number`: a column of the data."""
        self._number, self._guessed = number, False

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: The guess.

        Returns:
            higher, lower or right
        """
        answer = tool_tasks.answer(self._number, number)
        self._guessed |= answer == "right"
        return answer

    def get_reward(self) -> float:
        """1 if the number was guessed, else 0."""
        return float(self._guessed)
