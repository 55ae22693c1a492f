"""What the three kinds of data share: ragged token stores, length buckets, the order of rows, batches, the report."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from rlhf_jax.errors import UserError

Batch = TypeVar("Batch")
_ALL = slice(None)


@dataclasses.dataclass(frozen=True)
class DataReport:
    """What became of the rows of one data set."""

    name: str
    read: int
    kept: int
    bad: int = 0
    truncated: int = 0
    dropped: int = 0
    longest: int = 0
    """Tokens of the longest sequence kept."""
    tokens: int = 0
    """Tokens kept in all."""
    first_bad: str | None = None
    note: str | None = None
    """What else there is to say of these rows."""

    def __str__(self) -> str:
        """One line for the terminal."""
        left_out = [f"{n} {what}" for n, what in ((self.bad, "bad"), (self.dropped, "too long, dropped")) if n]
        parts = [f"{self.kept} of {self.read} rows" + (f" ({', '.join(left_out)})" if left_out else "")]
        parts.append(f"{self.tokens} tokens, mean {self.tokens / max(self.kept, 1):.0f}, longest {self.longest}")
        if self.truncated:
            parts.append(f"{self.truncated} truncated")
        if self.note:
            parts.append(self.note)
        if self.first_bad:
            parts.append(f"first bad row: {self.first_bad}")
        return f"{self.name}: " + "; ".join(parts)


def default_buckets(longest: int) -> tuple[int, ...]:
    """Quarters of the longest length, each rounded up to a multiple of 8."""
    return tuple(sorted({-(-longest * quarter // 32) * 8 for quarter in (1, 2, 3, 4)}))


def bucket(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `length` tokens: few padded lengths keep compiled shapes few.

    Raises:
      UserError: none does.
    """
    holding = [size for size in buckets if size >= length]
    if not holding:
        raise UserError(
            f"length_buckets ends at {max(buckets, default=0)}, but a row has {length} tokens: "
            f"add a bucket of at least {length}"
        )
    return min(holding)


@functools.lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def rows_of_step(
    rows: int, batch_size: int, seed: int, step: int, name: str = "the data set", shuffle: bool = True
) -> np.ndarray:
    """Rows of update `step` (0-based): a pure function of its arguments. An epoch is a fresh permutation, or with
    `shuffle` off the rows as they come; it has rows // batch_size updates, and the rest of it is left out, as TRL's
    drop_last does.

    Returns:
      [batch_size] int64.

    Raises:
      UserError: fewer rows than batch_size.
    """
    steps = rows // batch_size
    if steps == 0:
        raise UserError(
            f"{name} has {rows} usable rows, fewer than batch_size = {batch_size}: lower batch_size or give more rows"
        )
    start = step % steps * batch_size
    order = _permutation(rows, seed, step // steps) if shuffle else np.arange(rows)
    return order[start : start + batch_size]


def pad_right(sequences: Sequence[np.ndarray], width: int, fill: int) -> np.ndarray:
    """[B, width] int32, each sequence at the start of its row."""
    out = np.full((len(sequences), width), fill, np.int32)
    for row, tokens in zip(out, sequences, strict=True):
        row[: len(tokens)] = tokens
    return out


def pad_left(sequences: Sequence[np.ndarray], width: int, fill: int) -> np.ndarray:
    """[B, width] int32, each sequence at the end of its row."""
    out = np.full((len(sequences), width), fill, np.int32)
    for row, tokens in zip(out, sequences, strict=True):
        row[width - len(tokens) :] = tokens
    return out


def lengths_of(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """[B] int32."""
    return np.fromiter((len(tokens) for tokens in sequences), np.int32, len(sequences))


def fingerprint(*stores: Sequence[np.ndarray]) -> str:
    """sha256 of all tokens and lengths, in order: whether a resumed run sees the rows that it saw before."""
    digest = hashlib.sha256()
    for store in stores:
        digest.update(np.int64(len(store)).tobytes())
        digest.update(lengths_of(store).tobytes())
        for tokens in store:
            digest.update(np.asarray(tokens, np.int32).tobytes())
    return digest.hexdigest()


class Batched(Generic[Batch]):
    """Batches of a data set that holds `pad_id`, `buckets` and `report`, and says how rows become a batch (`_take`) and
    what its tokens are (`_stores`)."""

    report: DataReport
    shuffle = True

    def _take(self, rows: np.ndarray, here: np.ndarray | slice) -> Batch:
        raise NotImplementedError

    def _stores(self) -> tuple[list[np.ndarray], ...]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._stores()[0])

    def rows_of(self, seed: int, step: int, batch_size: int) -> np.ndarray:
        """The rows of update `step` (0-based); see `rows_of_step`."""
        return rows_of_step(len(self), batch_size, seed, step, self.report.name, self.shuffle)

    def batch(self, seed: int, step: int, batch_size: int, here: np.ndarray | slice = _ALL) -> Batch:
        """Rows of update `step` (0-based), numpy arrays; see `rows_of_step` for which rows.

        Args:
          here: [H] int, the rows of the batch to prepare (see `shares.here`); default: all. Widths are the whole
            batch's, so that all processes have one shape.
        """
        return self._take(self.rows_of(seed, step, batch_size), here)

    def in_order(self, start: int, count: int, here: np.ndarray | slice = _ALL) -> Batch:
        """Rows start .. start + count - 1; past the end the last row again, so that shapes stay. `here` as `batch`."""
        return self._take(np.minimum(np.arange(start, start + count), len(self) - 1), here)

    @property
    def fingerprint(self) -> str:
        """How many rows there are, and a sha256 of their tokens."""
        return f"{len(self)} rows, {fingerprint(*self._stores())[:16]}"
