"""Packing of demonstrations: several in one row, each a segment with positions and attention of its own."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax.data import batches
from rlhf_jax.data.batches import DataReport
from rlhf_jax.data.demonstrations import DemoBatch, DemoData, DemoRows
from rlhf_jax.data.ragged import Ragged, lengths_of


def best_fit_decreasing(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Groups sequences into rows of at most `width` tokens, as TRL's packing_strategy 'bfd'.

    The longest remaining sequence goes into the fullest row that has room for it, the oldest of several; if there is
    none, it begins a row (best-fit decreasing; Ding et al. 2024, arXiv:2404.10830).

    Args:
      lengths: of the sequences, 1 to `width` each.
      width: tokens of a row.

    Returns:
      Indices of the sequences of each row.
    """
    rows: list[list[int]] = []
    by_room: dict[int, collections.deque[int]] = {}
    rooms: list[int] = []  # sorted, those of by_room
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[index])
        best = bisect_left(rooms, length)
        if best < len(rooms):
            room = rooms[best]
            row = by_room[room].popleft()
            if not by_room[room]:
                del by_room[room], rooms[best]
        else:
            room, row = width, len(rows)
            rows.append([])
        rows[row].append(index)
        room -= length
        if room:
            if room not in by_room:
                by_room[room] = collections.deque()
                insort(rooms, room)
            by_room[room].append(row)
    return rows


@dataclasses.dataclass(frozen=True)
class PackedDemoData(DemoRows):
    """Demonstrations packed into rows of one width. A row of a batch is a pack."""

    data: DemoData
    packs: Sequence[np.ndarray]
    """The demonstrations of each row."""
    width: int
    completion_only: bool
    report: DataReport
    shares: batches.Order | None = None

    def __len__(self) -> int:
        return len(self.packs)

    @property
    def widest(self) -> int:
        """Columns of every batch."""
        return self.width

    def _make_batch(self, rows: np.ndarray, local: np.ndarray | slice) -> DemoBatch:
        """The loss mask has the tokens that a demonstration by itself would be trained on, so prompt lengths are 0."""
        packs = [self.packs[i] for i in rows[local]]
        tokens = [np.concatenate([self.data.tokens[i] for i in pack]) for pack in packs]
        segments = [np.repeat(np.arange(len(pack)), [len(self.data.tokens[i]) for i in pack]) for pack in packs]
        masks = [np.concatenate([self._loss_mask(i) for i in pack]) for pack in packs]
        return DemoBatch(
            tokens=batches.pad_right(tokens, self.width, self.data.pad_id),
            prompt_lengths=np.zeros(len(packs), np.int32),
            lengths=batches.lengths_of(tokens),
            loss_mask=batches.pad_right(masks, self.width, 0).astype(bool),
            segment_ids=batches.pad_right(segments, self.width, 0),
        )

    def _loss_mask(self, index: int) -> np.ndarray:
        """bool, the tokens of a demonstration that are trained on. The first of a segment is no label of the one
        before."""
        size = len(self.data.tokens[index])
        mask = np.ones(size, bool) if self.data.loss_masks is None else self.data.loss_masks[index].copy()
        mask[: max(1, self.data.prompt_lengths[index] if self.completion_only else 0)] = False
        return mask

    def source_rows(self, row: int) -> dict[str, Any]:
        """{"rows"}: the demonstrations of a pack."""
        return {"rows": np.asarray(self.packs[row]).tolist()}

    @property
    def fingerprint(self) -> str:
        """That of the demonstrations."""
        return self.data.fingerprint


def pack(data: DemoData, width: int, completion_only: bool) -> PackedDemoData:
    """Packs demonstrations into rows of `width` tokens, by their lengths alone. Those of a mixture with weights are
    packed set by set, and weights are shares of rows.

    Args:
      data: sequences of at most `width` tokens.
      width: tokens of a row (max_length).
      completion_only: whether prompts are left out of the loss.
    """
    lengths, shares = lengths_of(data.tokens), None
    if data.shares is None:
        packs = Ragged.from_lists(best_fit_decreasing(lengths, width))
    else:  # a row is of one set, so that sets have their shares
        starts = np.concatenate([[0], np.cumsum(data.shares.sizes)]).tolist()
        sets = [
            [[start + index for index in row] for row in best_fit_decreasing(lengths[start:end], width)]
            for start, end in itertools.pairwise(starts)
        ]
        packs = Ragged.from_lists([row for rows in sets for row in rows])
        shares = dataclasses.replace(data.shares, sizes=tuple(len(rows) for rows in sets))
    share = data.report.tokens / (len(packs) * width)
    note = f"packed into {len(packs)} rows of {width} tokens, {share:.0%} full"
    notes = [data.report.note, note] if data.report.note else [note]
    report = dataclasses.replace(data.report, note="; ".join(notes))
    return PackedDemoData(data, packs, width, completion_only, report, shares)
