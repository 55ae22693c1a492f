"""Rows to columns of tokens, by `datasets`' map: read from the cache, or made by the first process of a machine.

The table has a row for each row of the data set, also for those that are bad or too long, which have no tokens: rows
can be divided among processes, and their order never changes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from rlhf_jax.data import arrow_cache
from rlhf_jax.data.files import Rows
from rlhf_jax.data.ragged import Ragged
from rlhf_jax.errors import UserError

BATCH = 1024
"""Rows tokenized at a time: enough for the tokenizer's threads, whose working memory is many times the ids."""
_MANY = 20_000  # rows from which a process says what it does where there is no progress bar
Kind = Literal["tokens", "mask", "int", "float", "flag", "text"]
Encoded = dict[str, Any] | str | None
"""A row's columns; why it is bad; or None for a row that is left out because of its length. Columns with LEFT_OUT among
them are those of a row that is left out too, without its tokens."""
LEFT_OUT = "left out"


class Encoder(Protocol):
    """Makes tokens of rows. It is pickled for worker processes.

    Attributes:
      columns: what it makes of a row, by name.
    """

    columns: Mapping[str, Kind]

    def identity(self) -> Any:
        """Everything that its result depends on beside the rows, of JSON types; None: its results are not cached."""

    def fault(self, row: Any) -> str | None:
        """Why a row is bad; None if it is not."""

    def encode(self, rows: list[Any]) -> list[Encoded]:
        """What is made of each row."""

    def data(self, tokenized: Tokenized, length_buckets: Sequence[int] | None) -> Any:
        """The `batches.Batched` of the rows' tokens. Raises a UserError where no row is left, or one fits no bucket."""


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """The tokens of a data set.

    Attributes:
      rows: the data set.
      table: a pyarrow.Table with the encoder's columns, and 'kept' and 'fault', for each row.
      mapped: whether the table is a memory-mapped file.
      meta: what was kept beside it.
    """

    rows: Rows
    table: Any
    mapped: bool
    meta: Mapping[str, Any]

    @functools.cached_property
    def usable_rows(self) -> np.ndarray:
        """[N] int64, the rows that have tokens."""
        return np.flatnonzero(self.table["kept"].to_numpy())

    @functools.cached_property
    def bad(self) -> int:
        """The number of bad rows."""
        return len(self.table) - self.table["fault"].null_count

    @functools.cached_property
    def first_bad(self) -> str | None:
        """Where the first bad row is, and why it is bad."""
        if not self.bad:
            return None
        index = int(np.flatnonzero(self.table["fault"].is_valid().to_numpy())[0])
        return f"{self.rows.location(index)}: {self.table['fault'][index].as_py()}"

    def check_bad(self, on_bad_row: str) -> None:
        """Raises a UserError for bad rows, unless they are to be skipped and some are good."""
        good = self.bad < len(self.table)
        if self.bad and (on_bad_row == "raise" or not good):
            raise bad_rows_error(self.first_bad, self.bad, len(self.table), good)

    def ragged(self, name: str) -> Ragged:
        """A column of sequences, of the rows that are kept."""
        all_usable = len(self.usable_rows) == len(self.table)
        return Ragged.from_column(self.table[name], None if all_usable else self.usable_rows)

    def numbers(self, name: str) -> np.ndarray:
        """[N] a column of numbers, of the rows that are kept."""
        return self.table[name].to_numpy()[self.usable_rows]

    def count(self, name: str) -> int:
        """The number of rows with a flag, also of those that are left out."""
        return int(self.table[name].to_numpy().sum())

    def text(self, index: int) -> str | None:
        """The column 'text' of a row that is kept."""
        return self.table["text"][int(self.usable_rows[index])].as_py()


def bad_rows_error(first: str | None, bad: int, count: int, good: bool) -> UserError:
    """The error for bad rows: the first with its reason, and how many there are."""
    advice = "Fix it, or set on_bad_row=skip to leave bad rows out." if good else "No row is usable."
    return UserError(f"{first} ({bad} of {count} rows {'is' if bad == 1 else 'are'} bad). {advice}")


class _BadRowError(Exception):
    """A row is bad, and on_bad_row is 'raise'."""


def tokenize(
    rows: Rows,
    encoder: Encoder,
    *,
    on_bad_row: str,
    num_proc: int | None,
) -> Tokenized:
    """The tokens of rows.

    Args:
      on_bad_row: 'raise' or 'skip'.
      num_proc: worker processes; None: this one alone, with the tokenizer's threads.

    Raises:
      UserError: a row is bad and on_bad_row is 'raise', or no row is good; it has the file and line of the first bad
        row, and how many there are. Or, where tokens are cached, as `Encoder.data`.
    """
    identity = None if rows.fingerprint is None else encoder.identity()
    run = functools.partial(_run, rows, encoder, on_bad_row, num_proc)
    if identity is not None:

        def write(folder: str) -> dict[str, Any]:
            import datasets

            path = os.path.join(folder, "table.arrow")
            run(path)
            tokenized = Tokenized(rows, datasets.Dataset.from_file(path).data.table, True, {})
            tokenized.check_bad(on_bad_row)
            return encoder.data(tokenized, None).describe()

        form = [type(encoder).__name__, dict(encoder.columns)]
        key = arrow_cache.entry_key([rows.name, rows.fingerprint, *form, identity])
        if (entry := arrow_cache.cached(key, rows.name, write)) is not None:
            tokenized = Tokenized(rows, entry.table.data.table, True, entry.meta)
            tokenized.check_bad(on_bad_row)
            return tokenized
    tokenized = Tokenized(rows, run(None), False, {})
    tokenized.check_bad(on_bad_row)
    return tokenized


def _run(rows: Rows, encoder: Encoder, on_bad_row: str, num_proc: int | None, path: str | None) -> Any:
    """Tokenizes all rows, into an Arrow file, or with None into a table in memory, which is returned."""
    batch = _Batch(rows.table, encoder, on_bad_row == "raise")
    try:
        if path is None and len(rows) < _MANY and (num_proc or 1) == 1:
            import pyarrow as pa

            starts = range(0, len(rows), BATCH)
            return pa.concat_tables([batch(start, min(start + BATCH, len(rows))) for start in starts])
        return _map(rows, batch, num_proc, path)
    except _BadRowError as error:
        faults = [(i, fault) for i, row in enumerate(rows) if (fault := encoder.fault(row)) is not None]
        first, reason = faults[0] if faults else (0, str(error))
        raise bad_rows_error(
            f"{rows.location(first)}: {reason}", max(len(faults), 1), len(rows), len(faults) < len(rows)
        ) from None


class _Batch:
    """Makes a table of some of the rows."""

    def __init__(self, table: Sequence[Any], encoder: Encoder, raise_bad: bool):
        self._rows = Rows("", table, (), str)
        self._encoder, self._raise_bad, self.columns = encoder, raise_bad, encoder.columns

    def __call__(self, start: int, stop: int) -> Any:
        encoded = self._encoder.encode(self._rows.slice(start, stop))
        if self._raise_bad and (bad := next((row for row in encoded if isinstance(row, str)), None)) is not None:
            raise _BadRowError(bad)
        return _table(encoded, self.columns)

    def from_indices(self, batch: Mapping[str, list[int]]) -> Any:
        """For `datasets`' map: of a batch of consecutive row indices."""
        return self(batch["row"][0], batch["row"][-1] + 1)


class _Ahead:
    """Makes the next two batches in threads while one is written, so that the tokenizer, which works without Python's
    lock, never waits for the rows of a batch to be read."""

    def __init__(self, batch: _Batch, count: int):
        self._batch, self._count = batch, count
        self._pool = concurrent.futures.ThreadPoolExecutor(2)
        self._pending: dict[int, concurrent.futures.Future] = {}

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown(cancel_futures=True)

    def from_indices(self, batch: Mapping[str, list[int]]) -> Any:
        """As `_Batch.from_indices`."""
        start, stop = batch["row"][0], batch["row"][-1] + 1
        # The first is made alone, since transformers may change settings of a tokenizer at its first call.
        table = self._batch(start, stop) if start not in self._pending else None
        for following in range(stop, min(stop + 2 * BATCH, self._count), BATCH):
            if following not in self._pending:
                last = min(following + BATCH, self._count)
                self._pending[following] = self._pool.submit(self._batch, following, last)
        return table if table is not None else self._pending.pop(start).result()


def _table(encoded: list[Encoded], columns: Mapping[str, Kind]) -> Any:
    """The table of encoded rows."""
    import pyarrow as pa

    row_columns = [row if isinstance(row, dict) else {} for row in encoded]
    arrays = {
        "kept": pa.array([isinstance(row, dict) and LEFT_OUT not in row for row in encoded], pa.bool_()),
        "fault": pa.array([row if isinstance(row, str) else None for row in encoded], pa.string()),
    }
    for name, kind in columns.items():
        values = [row.get(name) for row in row_columns]
        if kind in ("tokens", "mask"):
            flat = pa.int32() if kind == "tokens" else pa.uint8()
            sizes = [0 if value is None else len(value) for value in values]
            offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
            filled = [np.asarray(value, flat.to_pandas_dtype()) for value in values if value is not None]
            joined = np.concatenate(filled) if filled else np.zeros(0, flat.to_pandas_dtype())
            arrays[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(joined, flat))
        elif kind == "text":
            arrays[name] = pa.array(values, pa.string())
        else:
            form = {"int": np.int32, "float": np.float32, "flag": np.bool_}[kind]
            arrays[name] = pa.array(np.asarray([0 if value is None else value for value in values], form))
    return pa.table(arrays)


# --- datasets' map


def _map(rows: Rows, batch: _Batch, num_proc: int | None, path: str | None) -> Any:
    import datasets
    import pyarrow as pa

    schema = _table([], batch.columns).schema
    num_proc = None if num_proc is None or num_proc < 2 else min(num_proc, len(rows))
    parts = path if path is None or num_proc is None else os.path.join(os.path.dirname(path), "part.arrow")
    with _progress(rows, num_proc), _Ahead(batch, len(rows)) if num_proc is None else _new_processes() as ahead:
        dataset = datasets.Dataset(pa.table({"row": np.arange(len(rows))})).map(
            batch.from_indices if num_proc is not None else ahead.from_indices,
            batched=True,
            batch_size=BATCH,
            remove_columns=["row"],
            features=datasets.Features.from_arrow_schema(schema),
            num_proc=num_proc,
            cache_file_name=parts,
            keep_in_memory=path is None,
            load_from_cache_file=False,
            new_fingerprint="tokens",
            desc=f"Tokenizing {rows.name}",
        )
    table = dataset.data.table
    if path != parts:  # one file, of whatever number of workers
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return table


@contextlib.contextmanager
def _progress(rows: Rows, num_proc: int | None) -> Iterator[None]:
    """datasets' progress bar in a terminal; elsewhere a line, if there are many rows."""
    import datasets

    shown, terminal = datasets.is_progress_bar_enabled(), sys.stderr.isatty()
    if not terminal:
        datasets.disable_progress_bars()
        if len(rows) >= _MANY:
            workers = "" if num_proc is None else f" in {num_proc} processes"
            print(f"tokenizing {len(rows):,} rows of {rows.name}{workers}", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown and not terminal:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def _new_processes() -> Iterator[None]:
    """datasets' workers as new processes. It would fork this one, and a child could wait forever for a lock that one of
    JAX's threads held."""
    import multiprocess

    method = multiprocess.get_start_method(allow_none=True)
    main, parallelism = sys.modules["__main__"], os.environ.get("TOKENIZERS_PARALLELISM")
    multiprocess.set_start_method("spawn", force=True)
    sys.modules["__main__"] = types.ModuleType("__main__")  # a worker would run the user's script
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        multiprocess.set_start_method(method, force=True)
        # datasets disables the tokenizer's threads for its workers and leaves it at that.
        if parallelism is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
            os.unsetenv("TOKENIZERS_PARALLELISM")
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = parallelism
