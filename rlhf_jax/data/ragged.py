"""Sequences of different lengths in few arrays, which may be memory-mapped, and lists whose elements are made when
read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

Element = TypeVar("Element")


class Ragged(Sequence[np.ndarray]):
    """Sequences of numbers that lie one after the other in chunks. Elements are views, which may be read-only.

    Attributes:
      lengths: [N] int32.
    """

    def __init__(self, chunks: Sequence[tuple[np.ndarray, np.ndarray]], rows: np.ndarray | None = None):
        """Args:
        chunks: (offsets [n + 1], values [offsets[n]]) of n sequences each.
        rows: [N] int, which of all sequences this holds, in this order; None: all.
        """
        self._chunks = list(chunks)
        sizes = [len(offsets) - 1 for offsets, _ in self._chunks]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        lengths = [np.diff(offsets).astype(np.int32) for offsets, _ in self._chunks]
        self.lengths = np.concatenate(lengths) if lengths else np.zeros(0, np.int32)
        self._rows = rows
        if rows is not None:
            self.lengths = self.lengths[rows]

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]]) -> Ragged:
        """A copy of sequences of whole numbers."""
        offsets = np.concatenate([[0], np.cumsum([len(sequence) for sequence in lists], dtype=np.int64)])
        values = np.fromiter((value for sequence in lists for value in sequence), np.int32, int(offsets[-1]))
        return cls([(offsets, values)])

    @classmethod
    def from_column(cls, column: Any, rows: np.ndarray | None = None) -> Ragged:
        """A view of an Arrow column of lists of int32, or of uint8 as bool.

        Args:
          column: pyarrow.ChunkedArray without nulls.
        """
        chunks = []
        for chunk in column.chunks:
            values = chunk.values.to_numpy(zero_copy_only=True)
            chunks.append((chunk.offsets.to_numpy(), values.view(bool) if values.dtype == np.uint8 else values))
        return cls(chunks, rows)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = _checked(index, len(self))
        row = index if self._rows is None else int(self._rows[index])
        chunk = int(np.searchsorted(self._starts, row, "right")) - 1
        offsets, values = self._chunks[chunk]
        place = row - self._starts[chunk]
        return values[offsets[place] : offsets[place + 1]]

    def values(self) -> Iterator[np.ndarray]:
        """The numbers of all sequences in order, a whole chunk at a time if no rows were selected."""
        if self._rows is None:
            for offsets, values in self._chunks:
                yield values[offsets[0] : offsets[-1]]
        else:
            yield from self


class Chained(Sequence[Element], Generic[Element]):
    """Several sequences as one."""

    def __init__(self, parts: Sequence[Sequence[Element]]):
        self.parts = list(parts)
        self.starts = np.concatenate([[0], np.cumsum([len(part) for part in self.parts], dtype=np.int64)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def place(self, index: int) -> tuple[int, int]:
        """(part, place in it) of an element."""
        index = _checked(index, len(self))
        part = int(np.searchsorted(self.starts, index, "right")) - 1
        return part, index - int(self.starts[part])

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        part, place = self.place(index)
        return self.parts[part][place]

    def __iter__(self) -> Iterator[Element]:
        for part in self.parts:
            yield from part

    @property
    def lengths(self) -> np.ndarray:
        """[N] int32, of parts that have lengths."""
        return np.concatenate([lengths_of(part) for part in self.parts])


class Lazy(Sequence[Element], Generic[Element]):
    """A sequence whose elements are made when they are read."""

    def __init__(self, length: int, make: Callable[[int], Element]):
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._length))]
        return self._make(_checked(index, self._length))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None


def lengths_of(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """[B] int32."""
    if isinstance(sequences, Ragged | Chained):
        return sequences.lengths
    return np.fromiter((len(tokens) for tokens in sequences), np.int32, len(sequences))


def _checked(index: Any, length: int) -> int:
    """An index from 0, as lists take it."""
    index = operator.index(index)
    if not -length <= index < length:
        raise IndexError(f"{index} of {length}")
    return index % length
