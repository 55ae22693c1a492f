"""Several data sets as one: their rows one after the other, or by weights, in an order that is a function of seed and
step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from rlhf_jax.data import batches
from rlhf_jax.data.files import Rows
from rlhf_jax.data.format import Format, formatted
from rlhf_jax.data.loading import load_train_split
from rlhf_jax.data.options import DataOptions
from rlhf_jax.data.ragged import Chained
from rlhf_jax.errors import UserError

Data = TypeVar("Data", bound=batches.Batched)
# --- the data sets of a config


@dataclasses.dataclass(frozen=True)
class TrainingRows:
    """The rows of a stage's training data: of one data set, or of each of its mixture."""

    sets: tuple[tuple[Rows, Any], ...]
    """Rows, and the stage's config with the options of their data set."""
    is_mixture: bool = False
    weights: tuple[float, ...] | None = None
    """Of an epoch's rows; None: each row once an epoch."""


def load_training_rows(config: DataOptions, kind: str, dataset: Any = None) -> TrainingRows:
    """The rows of a stage's training data.

    Args:
      kind: as `loading.load_train_split`.
      dataset: an object in place of the configured names.

    Raises:
      UserError: see `loading.load_rows`; or a fraction leaves none of a data set's rows.
    """
    entries = config.datasets
    if dataset is not None or entries is None:
        return TrainingRows(((load_train_split(config, kind, dataset), config),))
    configs = [config.with_entry(entry) for entry in entries]
    formats = [Format(entry.get("format") or {}) for entry in entries]
    rows = [
        load_train_split(entry_config, kind, text_columns=form.columns)
        for entry_config, form in zip(configs, formats, strict=True)
    ]
    if "fraction" in entries[0]:
        rows = _fractions(rows, [entry["fraction"] for entry in entries])
    rows = [formatted(part, entry["format"]) if entry.get("format") else part for part, entry in zip(rows, entries)]
    weights = tuple(float(entry["weight"]) for entry in entries) if "weight" in entries[0] else None
    return TrainingRows(tuple(zip(rows, configs, strict=True)), True, weights)


def _fractions(rows: Sequence[Rows], fractions: Sequence[float]) -> list[Rows]:
    """The first rows of each set, so that they have these shares and none is repeated, as in TRL."""
    shares = [fraction / sum(fractions) for fraction in fractions]
    total = min(len(part) / share for part, share in zip(rows, shares, strict=True))
    counts = [round(share * total) for share in shares]
    for part, count in zip(rows, counts, strict=True):
        if not count:
            raise UserError(f"datasets: {part.name} has {len(part)} rows, of which its fraction leaves none")
    return [part.first(count) for part, count in zip(rows, counts, strict=True)]


def mixed(parts: Sequence[Data], weights: Sequence[float] | None, length_buckets: Sequence[int] | None) -> Data:
    """Several data sets of one kind as one.

    Args:
      weights: of an epoch's rows; None: each row once an epoch.

    Raises:
      UserError: some are conversations and some are texts.
    """
    reports = [part.report for part in parts]
    fields: dict[str, Any] = {}
    for name in parts[0].per_row:
        values = [getattr(part, name) for part in parts]
        if all(value is None for value in values):
            continue
        if any(value is None for value in values):
            names = {value is None: report.name for value, report in zip(values, reports, strict=True)}
            raise UserError(
                f"datasets: {names[False]} has conversations and {names[True]} has texts; give one or the other"
            )
        fields[name] = np.concatenate(values) if isinstance(values[0], np.ndarray) else Chained(values)
    sizes = [len(part) for part in parts]
    shares = None if weights is None else Shares(tuple(sizes), tuple(weights))
    longest = max(report.longest for report in reports)
    buckets = tuple(length_buckets or batches.default_buckets(longest))
    batches.bucket(longest, buckets)
    digest = hashlib.sha256(repr([[part.fingerprint for part in parts], weights]).encode()).hexdigest()
    more = {}
    if all(hasattr(part, "column_names") for part in parts):
        more["known_columns"] = tuple(dict.fromkeys(name for part in parts for name in part.column_names))
    return dataclasses.replace(
        parts[0],
        **fields,
        **more,
        buckets=buckets,
        report=_report(reports, shares),
        shares=shares,
        known_fingerprint=f"{sum(sizes)} rows, {digest[:16]}",
    )


def _report(reports: Sequence[batches.DataReport], shares: Shares | None) -> batches.DataReport:
    """The sums of reports, which are in the note."""
    total = {
        name: sum(getattr(report, name) for report in reports)
        for name in ("read", "kept", "bad", "truncated", "dropped", "tokens")
    }
    counts = [report.kept for report in reports] if shares is None else shares.counts
    parts = [f"{count / sum(counts):.0%} {report}" for count, report in zip(counts, reports, strict=True)]
    return batches.DataReport(
        name=f"mixture of {len(reports)} data sets",
        longest=max(report.longest for report in reports),
        first_bad=next((report.first_bad for report in reports if report.first_bad), None),
        template_date=next((report.template_date for report in reports if report.template_date), None),
        note=" | ".join(parts),
        **total,
    )


# --- weights


@dataclasses.dataclass(frozen=True)
class Shares:
    """Data sets that have shares of an epoch's rows by weight.

    An epoch has as many rows as all sets together. A set takes its share of them from permutations of its own rows, one
    after the other, and continues them in the next epoch: no row is repeated before all rows of its set have been used.
    """

    sizes: tuple[int, ...]
    """Rows of each set; their indices follow one another."""
    weights: tuple[float, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each set in an epoch: largest remainders."""
        exact = np.asarray(self.weights) / sum(self.weights) * sum(self.sizes)
        counts = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: sum(self.sizes) - counts.sum()]] += 1
        return tuple(counts.tolist())

    def order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """Row indices of an epoch, [N] int64."""
        return _order(self, seed, epoch, shuffle)


@functools.lru_cache(maxsize=2)
def _order(shares: Shares, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    counts = shares.counts
    order = np.empty(sum(counts), np.int64)
    if shuffle:
        places = np.random.default_rng([seed, epoch, 0]).permutation(len(order))
    else:  # each set evenly over the epoch
        at = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
        places = np.argsort(np.argsort(at, kind="stable"), kind="stable")
    first_place = first_row = 0
    for number, (count, size) in enumerate(zip(counts, shares.sizes, strict=True), 1):
        start = epoch * count
        visits = range(start // size, -(-(start + count) // size))
        rows = [_permutation(seed, visit, number, size, shuffle) for visit in visits]
        taken = np.concatenate(rows)[start - visits.start * size :][:count] if count else np.zeros(0, np.int64)
        order[np.sort(places[first_place : first_place + count])] = taken + first_row
        first_place, first_row = first_place + count, first_row + size
    return order


def _permutation(seed: int, visit: int, number: int, size: int, shuffle: bool) -> np.ndarray:
    return np.random.default_rng([seed, visit, number]).permutation(size) if shuffle else np.arange(size)
