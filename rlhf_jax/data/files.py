"""`Rows`, the common form of a data set, and its readers for local files and folders.

Large files become Arrow files in the cache, of which rows are read when they are needed; see `arrow_cache`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.data import arrow_cache
from rlhf_jax.data.ragged import Chained
from rlhf_jax.errors import MissingSplit, UserError
from rlhf_jax.utils.text import parse_json, written_forms

SUFFIXES = {
    ".jsonl": "json lines",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".arrow": "arrow",
}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Suffixes that may follow those of COMPRESSED -> pyarrow's names."""
COMPRESSED = (".jsonl", ".json", ".csv")
_ALIASES = {"validation": ("valid", "val", "dev"), "train": ("training",), "test": ("testing",)}


class MalformedRow(str):
    """Placeholder for a row that could not be read; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a data set before validation, with the source of each."""

    name: str
    table: Sequence[Any]
    """Mappings or `MalformedRow`; may be a datasets.Dataset."""
    column_names: tuple[str, ...]
    """In order of first appearance."""
    location: Callable[[int], str]
    """Row index -> file and line for messages."""
    fingerprint: Any = None
    """What identifies the content, of JSON types; None: rows whose tokens are not cached."""
    note: str | None = None
    """A remark for the report on the data."""

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), 1024):  # indexing a Dataset row by row is slow
            yield from self.slice(start, start + 1024)

    def slice(self, start: int, stop: int) -> list[Any]:
        """The rows start .. stop - 1, as far as there are such."""
        return _slice(self.table, start, min(stop, len(self)))

    def first(self, count: int | None) -> Rows:
        """At most the first `count` rows."""
        if count is None or count >= len(self):
            return self
        table = self.table.select(range(count)) if hasattr(self.table, "select") else self.table[:count]
        return dataclasses.replace(
            self, table=table, fingerprint=None if self.fingerprint is None else [self.fingerprint, count]
        )

    def mapped(self, function: Callable[[Any], Any], columns: Iterable[str], identity: Any) -> Rows:
        """Rows to which a function is applied when they are read.

        Args:
          function: of a row, which may be a `MalformedRow`; can be pickled.
          columns: that it makes.
          identity: what identifies it, of JSON types.
        """
        fingerprint = None if self.fingerprint is None else [self.fingerprint, identity]
        names = tuple(dict.fromkeys([*self.column_names, *columns]))
        return dataclasses.replace(self, table=_Mapped(self, function), column_names=names, fingerprint=fingerprint)

    def noted(self, *notes: str) -> Rows:
        """The rows with further remarks."""
        return dataclasses.replace(self, note="; ".join(filter(None, (self.note, *notes))) or None)


class _Mapped(Sequence[Any]):
    """Rows that a function makes when they are read."""

    def __init__(self, rows: Rows, function: Callable[[Any], Any]):
        self._rows, self._function = dataclasses.replace(rows, location=str), function  # some locations are no pickle

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            return [self._function(row) for row in self._rows.slice(start, stop)]
        return self._function(self._rows.table[index])


def _slice(table: Sequence[Any], start: int, stop: int) -> list[Any]:
    """Rows start .. stop - 1 of a table that has at least `stop` rows."""
    if isinstance(table, Chained):
        parts = zip(table.parts, table.starts.tolist(), strict=False)
        spans = [(part, max(start - first, 0), min(stop - first, len(part))) for part, first in parts]
        return [row for part, low, high in spans if low < high for row in _slice(part, low, high)]
    rows = table[start:stop]
    if not isinstance(rows, Mapping):
        return list(rows)
    return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]


class JsonLines(Sequence[Any]):
    """Rows of JSON, parsed when they are read.

    Args:
      table: a datasets.Dataset with the columns 'line', bytes, and 'number', of the line in its file.
    """

    def __init__(self, table: Any):
        self._table = table  # its rows follow one another: nothing else is selected
        self._lines, self.numbers = table.data.table["line"], table.data.table["number"]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [_parse_line(line.as_py()) for line in self._lines[index]]
        return _parse_line(self._lines[int(index)].as_py())

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), 1024):
            yield from self[start : start + 1024]

    def select(self, rows: range) -> JsonLines:
        """Rows that follow one another."""
        return JsonLines(self._table.select(rows))


def stem_and_format(path: str) -> tuple[str, str, str]:
    """The name of a file as (stem, suffix, suffix of its compression or '')."""
    stem, suffix = os.path.splitext(path)
    compression = suffix.lower() if suffix.lower() in COMPRESSIONS else ""
    if compression:
        stem, suffix = os.path.splitext(stem)
    return stem, suffix.lower(), compression


def is_data_file(path: str) -> bool:
    """Whether a file's name is that of a data file."""
    _, suffix, compression = stem_and_format(path)
    return suffix in (COMPRESSED if compression else SUFFIXES)


def type_with_article(value: Any) -> str:
    """The type name of a value with its article: 'a list', 'an int'."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _column_names(rows: Sequence[Any]) -> tuple[str, ...]:
    """The keys of all rows, in order of first appearance."""
    return tuple(dict.fromkeys(key for row in rows if isinstance(row, Mapping) for key in row))


def from_list(rows: Sequence[Any], name: str) -> Rows:
    """Rows of a list; elements that are no mapping become `MalformedRow`. Messages call a row 'NAME, row N'."""
    rows = [
        row if isinstance(row, Mapping | MalformedRow) else MalformedRow(f"is {type_with_article(row)}, not an object")
        for row in rows
    ]
    return Rows(name, rows, _column_names(rows), functools.partial(_numbered, name))


def is_columns(source: Any) -> bool:
    """Whether an object is a pandas DataFrame or a dict of columns, {"prompt": [...], "completion": [...]}, and no dict
    of splits or data sets."""
    if _is_data_frame(source):
        return True
    if not isinstance(source, Mapping) or not all(map(_is_column, source.values())):
        return False
    return not all(map(_is_list_of_objects, source.values()))


def _is_data_frame(source: Any) -> bool:
    return hasattr(source, "iloc") and hasattr(source, "columns")


def _is_column(values: Any) -> bool:
    is_array = hasattr(values, "tolist") and hasattr(values, "__len__")
    return isinstance(values, list | tuple) or (is_array and not _is_data_frame(values))


def _is_list_of_objects(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, Mapping) for value in values)


def from_columns(source: Any, name: str) -> Rows:
    """Rows of what `is_columns`. Arrays in it become lists, numbers of numpy Python's, and NaN, NaT and NA null.

    Raises:
      UserError: the columns differ in length, or two have one name.
    """
    columns = {str(column): _plain(values) for column, values in source.items()}
    if len(columns) < len(list(source)):
        raise UserError(f"{name}: two columns have the same name; it has {', '.join(map(str, source))}")
    return from_list(rows_of_columns(columns, name), name)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.ndim > 1 and value.dtype != object:
        return value  # an image
    if isinstance(value, np.ndarray | np.generic) or _is_series(value):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    is_missing = type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value)
    return None if is_missing else value


def _is_series(value: Any) -> bool:
    return hasattr(value, "iloc") and hasattr(value, "tolist")


def rows_of_columns(columns: Mapping[str, Sequence[Any]], name: str) -> list[dict[str, Any]]:
    """The rows of columns; UserError where they differ in length."""
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{column} {length}" for column, length in lengths.items())
        raise UserError(f"{name}: holds columns of different lengths: {counts}")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _numbered(name: str, index: int) -> str:
    """The location of a row that has no line."""
    return f"{name}, row {index + 1}"


def from_dataset(table: Any, name: str, fingerprint: Any = None) -> Rows:
    """Rows of a datasets.Dataset, whose content `fingerprint` identifies."""
    if table.format["type"] is not None or set(table.format["columns"]) != set(table.column_names):
        fingerprint = None  # the user's own transformation
    return Rows(name, table, tuple(table.column_names), functools.partial(_numbered, name), fingerprint)


@contextlib.contextmanager
def datasets_without_progress_bars():
    """The datasets library with its progress bars disabled."""
    import datasets

    enabled = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    finally:
        if enabled:
            datasets.enable_progress_bars()


def _utf8_error(text: str) -> tuple[int, str] | None:
    """(position, message) of the first invalid byte in text that was read with errors='surrogateescape', or None."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00
        return error.start, f"is not UTF-8: byte 0x{byte:02x} at character"
    return None


def _json_error(error: json.JSONDecodeError) -> str:
    """The message, without the ' at' or colon with which some of Python's messages end."""
    return f"is not JSON: {error.msg.rstrip(': ').removesuffix(' at')}"


def _parse_line(line: bytes) -> Any:
    """The row of a line, or `MalformedRow`."""
    text = line.decode("utf-8", "surrogateescape")
    try:
        if invalid := _utf8_error(text):
            return MalformedRow(f"{invalid[1]} {invalid[0] + 1}")
        row = parse_json(text)
    except json.JSONDecodeError as error:
        return MalformedRow(f"{_json_error(error)} at character {error.pos + 1}")
    return row if isinstance(row, Mapping) else MalformedRow(f"is {type_with_article(row)}, not an object")


@contextlib.contextmanager
def _open_text(path: str) -> Iterator[Any]:
    """The text of a file, decompressed, with \\n for every line end."""
    compression = stem_and_format(path)[2]
    with _errors_of_the_file(path):
        raw = _open_compressed(path) if compression else open(path, "rb")
        with io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape") as file:
            yield file


def _open_compressed(path: str) -> Any:
    """The bytes of a file, decompressed if its name says that it is compressed."""
    import pyarrow as pa

    codec = COMPRESSIONS.get(stem_and_format(path)[2])
    if codec is not None and not pa.Codec.is_available(codec):
        raise UserError(f"{path}: this pyarrow reads no {codec}: decompress the file")
    return pa.input_stream(path, compression=codec)


def _lines(path: str) -> Iterator[tuple[bytes, int]]:
    """(line, its number from 1) of those that are not blank, with \\n for every line end."""
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield line.encode("utf-8", "surrogateescape"), number


def _located(path: str, numbers: Any, index: int) -> str:
    """The location of a row that is a line, or with None an element."""
    return _numbered(path, index) if numbers is None else f"{path}, line {numbers[index]}"


def _read_json_lines(path: str) -> Rows:
    if (lines := _cached_lines(path, ["lines"], lambda: (_lines(path), True))) is not None:
        return lines
    rows, numbers = [], []
    for line, number in _lines(path):
        rows.append(_parse_line(line))
        numbers.append(number)
    return dataclasses.replace(from_list(rows, path), location=functools.partial(_located, path, numbers))


def _cached_lines(
    path: str, kind: list[str], read: Callable[[], tuple[Iterable[tuple[bytes, int]], bool]]
) -> Rows | None:
    """Rows of JSON texts, from the cache.

    Args:
      kind: what `read` makes of it.
      read: (text and number of each row, whether these are lines of the file)

    Returns:
      The rows; None for a small file, or without a cache.
    """
    if os.path.getsize(path) < arrow_cache.MINIMUM_BYTES:
        return None
    fingerprint = [*kind, arrow_cache.file_fingerprint(path)]

    def write(folder: str) -> dict[str, Any]:
        import pyarrow as pa

        schema = pa.schema({"line": pa.large_binary(), "number": pa.int64()})
        texts, are_lines = read()
        with pa.OSFile(os.path.join(folder, "table.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            batch: list[tuple[bytes, int]] = []
            columns: dict[str, None] = {}
            size = 0
            for text, number in texts:
                batch.append((text, number))
                row = _parse_line(text)
                if isinstance(row, Mapping):
                    columns.update(dict.fromkeys(row))
                size += len(text)
                if size > 2**20:
                    writer.write_batch(pa.record_batch([list(column) for column in zip(*batch)], schema=schema))
                    batch, size = [], 0
            if batch:
                writer.write_batch(pa.record_batch([list(column) for column in zip(*batch)], schema=schema))
        return {"lines": are_lines, "columns": list(columns)}

    entry = arrow_cache.cached(arrow_cache.entry_key(fingerprint), path, write)
    if entry is None:
        return None
    table = JsonLines(entry.table)
    location = functools.partial(_located, path, table.numbers if entry.meta["lines"] else None)
    return Rows(path, table, tuple(entry.meta["columns"]), location, fingerprint)


def _read_json(path: str) -> Rows:
    """Rows of a list of objects, of an object with one such list or of columns, or of JSON lines in a .json file."""

    def texts() -> tuple[Iterable[tuple[bytes, int]], bool]:
        content = _parse_document(path)
        if content is None:
            return _lines(path), True
        return ((json.dumps(row).encode(), i) for i, row in enumerate(content, 1)), False

    try:
        if (rows := _cached_lines(path, ["document"], texts)) is not None:
            return rows
    except RecursionError:  # json writes less deeply nested texts than it reads
        pass
    content = _parse_document(path)
    return _read_json_lines(path) if content is None else from_list(content, path)


def _parse_document(path: str) -> list[Any] | None:
    """The rows of a JSON document; None if it has JSON lines."""
    with _open_text(path) as file:
        text = file.read()
    problem = content = None
    try:
        content = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return None
        problem = error
    if invalid := _utf8_error(text):
        line, column = text.count("\n", 0, invalid[0]) + 1, invalid[0] - text.rfind("\n", 0, invalid[0])
        raise UserError(f"{path}, line {line}: {invalid[1]} {column}") from problem
    if problem is not None:
        raise UserError(f"{path}, line {problem.lineno}: {_json_error(problem)} at column {problem.colno}") from problem
    if isinstance(content, Mapping):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = _rows_of_object(content, path) or (lists[0] if len(lists) == 1 else [content])
    if not isinstance(content, list):
        raise UserError(f"{path}: holds {type_with_article(content)}, not a list of objects")
    return content


def _rows_of_object(content: Mapping[str, Any], path: str) -> list[dict[str, Any]] | None:
    """The rows of an object of columns: lists, or {"0": value, "1": value} as pandas' to_json writes them; None for an
    object that is a row, of conversations for example, or that has one list of rows.

    Raises:
      UserError: the columns differ in length, or it has several lists of rows.
    """
    values = list(content.values())
    if values and all(isinstance(value, Mapping) and value and all(map(str.isdigit, value)) for value in values):
        if all(value.keys() == values[0].keys() for value in values):
            return rows_of_columns({name: list(value.values()) for name, value in content.items()}, path)
    if not values or not all(isinstance(value, list) for value in values) or any(map(_is_conversation, values)):
        return None
    if all(map(_is_list_of_objects, values)):
        if len(values) > 1:
            raise UserError(f"{path}: holds several lists of objects: {', '.join(content)}; give each a file")
        return None
    return rows_of_columns(content, path)


def _is_conversation(values: list[Any]) -> bool:
    return bool(values) and isinstance(values[0], Mapping) and bool({"role", "from"} & values[0].keys())


def _check_columns(table: Any, path: str) -> None:
    """UserError for a .csv column with invalid UTF-8, which pyarrow keeps as bytes."""
    import pyarrow.types

    for name in table.column_names:
        if pyarrow.types.is_binary(table[name].type):
            for number, value in enumerate(table[name].to_pylist(), 1):
                if value is not None and _utf8_error(value.decode("utf-8", "surrogateescape")):
                    raise UserError(f"{path}, row {number}: {name!r} is not UTF-8")


def _read_csv(path: str, text_columns: Collection[str]) -> Any:
    """The table of a .csv file. Columns are text where they are `text_columns`, or where a value that was read as
    another type could not be written as it stands in the file: 007, 3.10, NA."""
    import pyarrow as pa
    import pyarrow.csv

    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    table = pyarrow.csv.read_csv(_open_compressed(path), parse_options=options)
    _check_columns(table, path)
    converted = [field.name for field in table.schema if not pa.types.is_string(field.type)]
    if not converted:
        return table
    as_text = pyarrow.csv.ConvertOptions(include_columns=converted, column_types=dict.fromkeys(converted, pa.string()))
    texts = pyarrow.csv.read_csv(_open_compressed(path), parse_options=options, convert_options=as_text)
    for name in converted:
        if name in text_columns or not _comes_back(table[name], texts[name]):
            table = table.set_column(table.column_names.index(name), name, texts[name])
    return table


def _comes_back(values: Any, texts: Any) -> bool:
    """Whether the values of a column, written as text, are the texts that they were read from."""
    import pyarrow as pa

    return not pa.types.is_null(values.type) and all(
        text in written_forms(value)
        for start in range(0, len(values), 2**16)
        for value, text in zip(values.slice(start, 2**16).to_pylist(), texts.slice(start, 2**16).to_pylist())
    )


def _read_table(path: str, suffix: str, text_columns: Collection[str]) -> Rows:
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet

    large = os.path.getsize(path) >= arrow_cache.MINIMUM_BYTES
    columns = [sorted(text_columns)] if suffix == ".csv" else []
    fingerprint = [suffix, *columns, arrow_cache.file_fingerprint(path)] if large else None

    def read() -> Any:
        return pyarrow.parquet.read_table(path) if suffix == ".parquet" else _read_csv(path, text_columns)

    def write(folder: str) -> dict[str, Any]:
        with _errors_of_the_file(path):
            if suffix == ".parquet":
                file = pyarrow.parquet.ParquetFile(path)
                schema, batches = file.schema_arrow, file.iter_batches(1024)
            else:
                table = read()
                schema, batches = table.schema, iter(table.to_batches(1024))
        with (
            pa.OSFile(os.path.join(folder, "table.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, schema) as writer,
        ):
            while True:
                with _errors_of_the_file(path):
                    batch = next(batches, None)
                if batch is None:
                    return {}
                writer.write_batch(batch)

    with datasets_without_progress_bars() as datasets:
        if suffix in (".parquet", ".csv"):
            if large and (entry := arrow_cache.cached(arrow_cache.entry_key(fingerprint), path, write)) is not None:
                return from_dataset(entry.table, path, fingerprint)
            with _errors_of_the_file(path):
                return from_dataset(datasets.Dataset(read()), path, fingerprint)
        with _errors_of_the_file(path):
            with open(path, "rb") as file:  # datasets writes the stream format, Arrow the file format
                is_file = file.read(6) == b"ARROW1"
            if not is_file:
                return from_dataset(datasets.Dataset.from_file(path), path, fingerprint)
            return from_dataset(datasets.Dataset(pyarrow.feather.read_table(path)), path, fingerprint)


@contextlib.contextmanager
def _errors_of_the_file(path: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:  # pyarrow raises both
        form = "".join(stem_and_format(path)[1:]).removeprefix(".")
        raise UserError(f"{path}: cannot be read as {form}: {(str(error).splitlines() or [''])[0]}") from error


def read_file(path: str, text_columns: Collection[str] = ()) -> Rows:
    """Rows of one file, in the format of its suffix. In a .csv file, `text_columns` are text whatever they hold.

    Raises:
      UserError: the suffix is unknown, or the file is empty or unreadable.
    """
    _, suffix, compression = stem_and_format(path)
    if not is_data_file(path):
        raise UserError(
            f"{path}: data files end in {', '.join(SUFFIXES)}, not {suffix + compression or 'nothing'}; "
            f"{', '.join(COMPRESSED)} may be compressed ({', '.join(COMPRESSIONS)})"
        )
    if os.path.getsize(path) == 0:
        raise UserError(f"{path}: is empty")
    if suffix in (".jsonl", ".json"):
        rows = (_read_json_lines if suffix == ".jsonl" else _read_json)(path)
        if len(rows) == 1 and isinstance(rows.table[0], Mapping):  # a line may be a document
            columns = _rows_of_object(rows.table[0], path)
            rows = (
                rows if columns is None else dataclasses.replace(from_list(columns, path), fingerprint=rows.fingerprint)
            )
    else:
        rows = _read_table(path, suffix, text_columns)
    if not len(rows):
        raise UserError(f"{path}: has no rows")
    return rows


def _split_of_file(path: str, root: str) -> tuple[str | None, str]:
    """(split, data set name) from a path such as prompts_train.jsonl or train/000.parquet."""
    relative = stem_and_format(os.path.relpath(path, root))[0]
    for split, aliases in _ALIASES.items():
        pattern = rf"(?<![a-z])({'|'.join((split, *aliases))})(?![a-z])"
        match = re.search(pattern, relative.lower())
        if match:
            return split, re.sub(r"[\d\W_]+|of", "", relative[: match.start()])
    return None, re.sub(r"[\d\W_]+|of", "", relative)


def read_folder(folder: str, split: str, text_columns: Collection[str] = ()) -> Rows:
    """Rows of one split of a folder that datasets saved, or whose files are named after their splits; `text_columns`
    as `read_file`."""
    if any(os.path.exists(os.path.join(folder, file)) for file in ("state.json", "dataset_dict.json")):
        with datasets_without_progress_bars() as datasets:
            return select_split(datasets.load_from_disk(folder), folder, split, _folder_fingerprint(folder))
    paths = sorted(
        os.path.join(parent, file)
        for parent, _, files in os.walk(folder)
        for file in files
        if is_data_file(file) and not file.startswith(("dataset_info", "."))
    )
    if not paths:
        raise UserError(f"{folder}: no data files (they end in {', '.join(SUFFIXES)})")
    labels = {path: _split_of_file(path, folder) for path in paths}
    splits = sorted({name for name, _ in labels.values() if name})
    if not splits and split == "train":
        selected = paths  # without split names all files are training data
    else:
        canonical = next((name for name, aliases in _ALIASES.items() if split in (name, *aliases)), split)
        selected = [path for path in paths if labels[path][0] == canonical]
    if not selected:
        raise MissingSplit(folder, split, splits)
    if len({labels[path][1] for path in selected}) > 1:
        names = ", ".join(os.path.relpath(path, folder) for path in selected)
        raise UserError(f"{folder} holds several data sets for split {split!r}: {names}; name one file")
    files = [read_file(path, text_columns) for path in selected]
    return files[0] if len(files) == 1 else chain(files, folder)


def chain(files: Sequence[Rows], name: str) -> Rows:
    """Rows of several files, one after the other."""
    table = Chained([file.table for file in files])

    def location(index: int) -> str:
        part, place = table.place(index)
        return files[part].location(place)

    # A small file beside a large one has no fingerprint: its content takes the place of one.
    prints = [[list(file)] if file.fingerprint is None else file.fingerprint for file in files]
    try:
        fingerprint = None if all(file.fingerprint is None for file in files) else json.loads(json.dumps(prints))
    except (TypeError, ValueError):
        fingerprint = None
    names = tuple(dict.fromkeys(column for file in files for column in file.column_names))
    return Rows(name, table, names, location, fingerprint)


def _folder_fingerprint(folder: str) -> Any:
    """What identifies the content of a folder that datasets saved; None if it is small."""
    paths = sorted(os.path.join(parent, file) for parent, _, files in os.walk(folder) for file in files)
    if sum(map(os.path.getsize, paths)) < arrow_cache.MINIMUM_BYTES:
        return None
    return [[os.path.relpath(path, folder), arrow_cache.file_fingerprint(path)] for path in paths]


def write_table(table: Any, folder: str) -> None:
    """Writes a datasets.Dataset to table.arrow in a folder, as `arrow_cache.cached` expects it."""
    import pyarrow as pa

    schema = table.features.arrow_schema
    with (
        pa.OSFile(os.path.join(folder, "table.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for batch in table.with_format("arrow").iter(1024):
            writer.write_table(batch.cast(schema))


def table_fingerprint(table: Any) -> str | None:
    """What identifies the content of a datasets.Dataset, by its data: datasets' own fingerprint is random after some
    transformations. None for a small one."""
    import pyarrow as pa
    import xxhash

    if table.data.nbytes < arrow_cache.MINIMUM_BYTES:
        return None
    digest = xxhash.xxh3_128()
    for batch in table.with_format("arrow").iter(1024):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_table(batch.combine_chunks())
        digest.update(sink.getvalue())
    return digest.hexdigest()


def select_split(loaded: Any, name: str, split: str, fingerprint: Any = None) -> Rows:
    """Rows of one split of a Dataset or DatasetDict, whose content `fingerprint` identifies."""
    if isinstance(loaded, Mapping):
        if split not in loaded:
            raise MissingSplit(name, split, loaded)
        loaded = loaded[split]
    return from_dataset(loaded, name, None if fingerprint is None else [fingerprint, split])
