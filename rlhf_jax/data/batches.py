"""Batching shared by prompts, demonstrations and pairs: length buckets, padding, row order, fingerprints, reports."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from rlhf_jax.data.ragged import Chained, Ragged, lengths_of
from rlhf_jax.errors import UserError

Batch = TypeVar("Batch")
_ALL = slice(None)


@dataclasses.dataclass(frozen=True)
class DataReport:
    """Row and token counts of one data set after loading."""

    name: str
    read: int
    kept: int
    bad: int = 0
    truncated: int = 0
    dropped: int = 0
    longest: int = 0
    """Length of the longest kept sequence in tokens."""
    tokens: int = 0
    """Total tokens kept."""
    first_bad: str | None = None
    template_date: str | None = None
    """The date that the chat template prints (see `ChatTemplate.date`)."""
    note: str | None = None
    """A remark that ends the report."""

    def __str__(self) -> str:
        """One line for the terminal."""
        excluded = [f"{n} {what}" for n, what in ((self.bad, "bad"), (self.dropped, "too long, dropped")) if n]
        parts = [f"{self.kept} of {self.read} rows" + (f" ({', '.join(excluded)})" if excluded else "")]
        parts.append(f"{self.tokens} tokens, mean {self.tokens / max(self.kept, 1):.0f}, longest {self.longest}")
        if self.truncated:
            parts.append(f"{self.truncated} truncated")
        if self.template_date:
            parts.append(f"the chat template prints {self.template_date}")
        if self.note:
            parts.append(self.note)
        if self.first_bad:
            parts.append(f"first bad row: {self.first_bad}")
        return f"{self.name}: " + "; ".join(parts)


def default_buckets(longest: int) -> tuple[int, ...]:
    """Quarters of the longest length, each rounded up to a multiple of 8."""
    return tuple(sorted({-(-longest * quarter // 32) * 8 for quarter in (1, 2, 3, 4)}))


def bucket(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket of at least `length` tokens. Few padded lengths mean few compiled shapes.

    Raises:
      UserError: all buckets are shorter.
    """
    large_enough = [size for size in buckets if size >= length]
    if not large_enough:
        raise UserError(
            f"length_buckets ends at {max(buckets, default=0)}, but a row has {length} tokens: "
            f"add a bucket of at least {length}"
        )
    return min(large_enough)


@functools.lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)


class Order(Protocol):
    """An order of rows of its own."""

    def order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """Row indices of an epoch, [N] int64."""


def rows_of_step(
    rows: int,
    batch_size: int,
    seed: int,
    step: int,
    name: str = "the data set",
    shuffle: bool = True,
    shares: Order | None = None,
) -> np.ndarray:
    """Row indices of update `step` (0-based), a pure function of the arguments.

    Each epoch is a new permutation, or file order if `shuffle` is false, or what `shares` makes of it. It has
    rows // batch_size updates; the remaining rows are dropped, like TRL's drop_last.

    Returns:
      [batch_size] int64.

    Raises:
      UserError: there are fewer rows than batch_size.
    """
    steps = rows // batch_size
    if steps == 0:
        raise UserError(
            f"{name} has {rows} usable rows, fewer than batch_size = {batch_size}: lower batch_size or give more rows"
        )
    start = step % steps * batch_size
    if shares is not None:
        order = shares.order(seed, step // steps, shuffle)
    else:
        order = _permutation(rows, seed, step // steps) if shuffle else np.arange(rows)
    return order[start : start + batch_size]


def pad_right(sequences: Sequence[np.ndarray], width: int, fill: int) -> np.ndarray:
    """[B, width] int32, padded on the right."""
    out = np.full((len(sequences), width), fill, np.int32)
    for row, tokens in zip(out, sequences, strict=True):
        row[: len(tokens)] = tokens
    return out


def pad_left(sequences: Sequence[np.ndarray], width: int, fill: int) -> np.ndarray:
    """[B, width] int32, padded on the left."""
    out = np.full((len(sequences), width), fill, np.int32)
    for row, tokens in zip(out, sequences, strict=True):
        row[width - len(tokens) :] = tokens
    return out


def fingerprint(*stores: Sequence[np.ndarray]) -> str:
    """sha256 of all tokens and lengths, in order. A resumed run compares it to detect changed data."""
    digest = hashlib.sha256()
    for store in stores:
        digest.update(np.int64(len(store)).tobytes())
        digest.update(lengths_of(store).tobytes())
        for tokens in _values(store):
            digest.update(np.ascontiguousarray(tokens, np.int32))
    return digest.hexdigest()


def _values(store: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The numbers of all sequences in order, many at a time where they lie together."""
    if isinstance(store, Chained):
        for part in store.parts:
            yield from _values(part)
    else:
        yield from store.values() if isinstance(store, Ragged) else store


class Batched(Generic[Batch]):
    """Base class that makes batches of tokenized rows. A subclass has `pad_id`, `buckets` and `report`."""

    source: ClassVar[str] = "demonstrations"
    """What built-in data sets are asked for: 'demonstrations' or 'pairs'."""
    per_row: ClassVar[tuple[str, ...]]
    """The fields with an element for each row."""
    encoder: ClassVar[Callable[..., tuple[Any, Any]]]
    """(Rows, options, Tokenizer, ImageProcessor or None) -> (Rows in the house's form, `tokenized.Encoder`)"""
    buckets: tuple[int, ...]
    report: DataReport
    shuffle = True
    known_fingerprint: str | None = None
    """Kept with cached tokens."""
    shares: Order | None = None
    """The order of the rows of a mixture with weights."""

    @property
    def widest(self) -> int:
        """Columns of a batch with the longest row."""
        return bucket(self.report.longest, self.buckets)

    def _make_batch(self, rows: np.ndarray, local: np.ndarray | slice) -> Batch:
        """The batch of row indices `rows`, of which only `rows[local]` are prepared."""
        raise NotImplementedError

    def _sequences(self) -> tuple[list[np.ndarray], ...]:
        """The token sequences, one list for each column."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._sequences()[0])

    def rows_of(self, seed: int, step: int, batch_size: int) -> np.ndarray:
        """Row indices of update `step` (0-based); see `rows_of_step`."""
        return rows_of_step(len(self), batch_size, seed, step, self.report.name, self.shuffle, self.shares)

    def batch(self, seed: int, step: int, batch_size: int, local: np.ndarray | slice = _ALL) -> Batch:
        """Numpy batch of update `step` (0-based); `rows_of_step` chooses the rows.

        Args:
          local: [H] int, positions in the batch that this process prepares (see `parallel.local_rows`); default: all.
            Padded widths are those of the whole batch, so that every process has the same shape.
        """
        return self._make_batch(self.rows_of(seed, step, batch_size), local)

    def batch_from_rows(self, rows: np.ndarray, local: np.ndarray | slice = _ALL) -> Batch:
        """Numpy batch of row indices `rows` [B]. `local` as `batch`."""
        return self._make_batch(rows, local)

    def source_rows(self, row: int) -> dict[str, Any]:
        """What a row of a batch is in the data set, for messages: {"row"}."""
        return {"row": row}

    def in_order(self, start: int, count: int, local: np.ndarray | slice = _ALL) -> Batch:
        """Rows start .. start + count - 1. Past the end the last row repeats, to keep the shape. `local` as `batch`."""
        return self._make_batch(np.minimum(np.arange(start, start + count), len(self) - 1), local)

    @property
    def fingerprint(self) -> str:
        """The number of rows and a sha256 of their tokens."""
        return self.known_fingerprint or f"{len(self)} rows, {fingerprint(*self._sequences())[:16]}"

    def describe(self) -> dict[str, Any]:
        """What is cached with the tokens because it takes long to compute, of JSON types."""
        return {"fingerprint": self.fingerprint}
