"""Decode steps of a rollout, from the lengths of its responses alone.

A step gives one token to each live row. The first token of a row comes from its prompt, so a row of L tokens is live
for L - 1 steps. Slot steps are the sum over steps of the rows that are computed, live or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlhf_jax.generate.slots import LEAST_ROWS


class Steps(NamedTuple):
    """What decoding takes."""

    steps: int
    slot_steps: int


def refill(lengths: Sequence[int], slots: int, share: float = 0.125, shrink: bool = False) -> Steps:
    """Slots that take the next rows once `share` of them (at least one) are idle.

    Args:
      lengths: tokens of each row, in the order of the queue.
      slots: rows that are computed in a step.
      share: m / slots: slots are refilled when m of them are idle.
      shrink: whether the live rows go on in half of the slots once they fit and the queue is empty.
    """
    queue = [length - 1 for length in lengths if length > 1]
    size = min(slots, len(lengths))
    most = size - max(int(size * share), 1) if size < len(lengths) else size
    live: list[int] = []
    steps = slot_steps = 0

    def run(until: int) -> None:
        """Steps while more than `until` rows are live."""
        nonlocal live, steps, slot_steps
        while len(live) > until:
            # To the step after which enough rows have ended.
            count = sorted(live)[len(live) - until - 1]
            live = [left - count for left in live if left > count]
            steps, slot_steps = steps + count, slot_steps + count * size

    while queue:
        free = size - len(live)
        live, queue = live + queue[:free], queue[free:]
        run(most)
    while shrink and size // 2 >= LEAST_ROWS:
        run(size // 2)
        size //= 2
    run(0)
    return Steps(steps, slot_steps)
