"""`Rows`, the common form of a data set, and its readers for local files and folders."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_jax.errors import UserError
from rlhf_jax.utils.text import parse_json

SUFFIXES = {
    ".jsonl": "json lines",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".arrow": "arrow",
}
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
    location: Callable[[int], str]
    """Row index -> file and line for messages."""

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Any]:
        if not hasattr(self.table, "iter"):
            yield from self.table
            return
        for columns in self.table.iter(1024):  # indexing a Dataset row by row is slow
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))

    def first(self, count: int | None) -> Rows:
        """At most the first `count` rows."""
        if count is None or count >= len(self):
            return self
        table = self.table.select(range(count)) if hasattr(self.table, "select") else self.table[:count]
        return dataclasses.replace(self, table=table)


def type_with_article(value: Any) -> str:
    """The type name of a value with its article: 'a list', 'an int'."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _column_names(rows: Sequence[Any]) -> tuple[str, ...]:
    """The keys of all rows, in order of first appearance."""
    return tuple(dict.fromkeys(key for row in rows if isinstance(row, Mapping) for key in row))


def from_list(rows: Sequence[Any], name: str, locations: Sequence[str] | None = None) -> Rows:
    """Rows of a list; elements that are no mapping become `MalformedRow`.

    Args:
      rows: the elements.
      name: of the data set, for messages.
      locations: of each row, for messages; default: 'NAME, row N'.
    """
    rows = [
        row if isinstance(row, Mapping | MalformedRow) else MalformedRow(f"is {type_with_article(row)}, not an object")
        for row in rows
    ]
    location = (lambda i: f"{name}, row {i + 1}") if locations is None else locations.__getitem__
    return Rows(name, rows, _column_names(rows), location)


def from_dataset(table: Any, name: str) -> Rows:
    """Rows of a datasets.Dataset."""
    return Rows(name, table, tuple(table.column_names), lambda i: f"{name}, row {i + 1}")


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


def _read_json_lines(path: str) -> Rows:
    rows, locations = [], []
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                if invalid := _utf8_error(line):
                    rows.append(MalformedRow(f"{invalid[1]} {invalid[0] + 1}"))
                else:
                    rows.append(parse_json(line))
            except json.JSONDecodeError as error:
                rows.append(MalformedRow(f"{_json_error(error)} at character {error.pos + 1}"))
            locations.append(f"{path}, line {number}")
    return from_list(rows, path, locations)


def _read_json(path: str) -> Rows:
    """Rows of a list of objects, of an object with one such list, or of JSON lines in a .json file."""
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        text = file.read()
    problem = content = None
    try:
        content = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _read_json_lines(path)
        problem = error
    if invalid := _utf8_error(text):
        line, column = text.count("\n", 0, invalid[0]) + 1, invalid[0] - text.rfind("\n", 0, invalid[0])
        raise UserError(f"{path}, line {line}: {invalid[1]} {column}") from problem
    if problem is not None:
        raise UserError(f"{path}, line {problem.lineno}: {_json_error(problem)} at column {problem.colno}") from problem
    if isinstance(content, Mapping):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else [content]
    if not isinstance(content, list):
        raise UserError(f"{path}: holds {type_with_article(content)}, not a list of objects")
    return from_list(content, path)


def _check_columns(table: Any, path: str) -> None:
    """UserError for a .csv column with invalid UTF-8, which pyarrow keeps as bytes."""
    import pyarrow.types

    for name in table.column_names:
        if pyarrow.types.is_binary(table[name].type):
            for number, value in enumerate(table[name].to_pylist(), 1):
                if value is not None and _utf8_error(value.decode("utf-8", "surrogateescape")):
                    raise UserError(f"{path}, row {number}: {name!r} is not UTF-8")


def _read_table(path: str, suffix: str) -> Rows:
    with datasets_without_progress_bars() as datasets:
        try:
            import pyarrow.csv
            import pyarrow.feather
            import pyarrow.parquet

            if suffix == ".arrow":  # datasets writes the stream format, Arrow the file format
                with open(path, "rb") as file:
                    is_file = file.read(6) == b"ARROW1"
                if not is_file:
                    return from_dataset(datasets.Dataset.from_file(path), path)
                table = pyarrow.feather.read_table(path)
            elif suffix == ".parquet":
                table = pyarrow.parquet.read_table(path)
            else:
                options = pyarrow.csv.ParseOptions(newlines_in_values=True)
                table = pyarrow.csv.read_csv(path, parse_options=options)
                _check_columns(table, path)
            return from_dataset(datasets.Dataset(table), path)
        except UserError:
            raise
        except (OSError, ValueError) as error:  # pyarrow raises both
            raise UserError(f"{path}: cannot be read as {suffix[1:]}: {str(error).splitlines()[0]}") from error


def read_file(path: str) -> Rows:
    """Rows of one file, in the format of its suffix; UserError for an unknown suffix or an empty or unreadable file."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path}: data files end in {', '.join(SUFFIXES)}, not {suffix or 'nothing'}")
    if os.path.getsize(path) == 0:
        raise UserError(f"{path}: is empty")
    if suffix in (".jsonl", ".json"):
        rows = (_read_json_lines if suffix == ".jsonl" else _read_json)(path)
    else:
        rows = _read_table(path, suffix)
    if not len(rows):
        raise UserError(f"{path}: has no rows")
    return rows


def _split_of_file(path: str, root: str) -> tuple[str | None, str]:
    """(split, data set name) from a path such as prompts_train.jsonl or train/000.parquet."""
    relative = os.path.splitext(os.path.relpath(path, root))[0]
    for split, aliases in _ALIASES.items():
        pattern = rf"(?<![a-z])({'|'.join((split, *aliases))})(?![a-z])"
        match = re.search(pattern, relative.lower())
        if match:
            return split, re.sub(r"[\d\W_]+|of", "", relative[: match.start()])
    return None, re.sub(r"[\d\W_]+|of", "", relative)


def read_folder(folder: str, split: str) -> Rows:
    """Rows of one split of a folder that datasets saved, or whose files are named after their splits."""
    if any(os.path.exists(os.path.join(folder, file)) for file in ("state.json", "dataset_dict.json")):
        with datasets_without_progress_bars() as datasets:
            return select_split(datasets.load_from_disk(folder), folder, split)
    paths = sorted(
        os.path.join(parent, file)
        for parent, _, files in os.walk(folder)
        for file in files
        if os.path.splitext(file)[1].lower() in SUFFIXES and not file.startswith(("dataset_info", "."))
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
        raise UserError(f"{folder} has no split {split!r}; its files name {', '.join(splits) or 'none'}")
    if len({labels[path][1] for path in selected}) > 1:
        names = ", ".join(os.path.relpath(path, folder) for path in selected)
        raise UserError(f"{folder} holds several data sets for split {split!r}: {names}; name one file")
    files = [read_file(path) for path in selected]
    if len(files) == 1:
        return files[0]
    rows = [row for file in files for row in file]
    return from_list(rows, folder, [file.location(i) for file in files for i in range(len(file))])


def select_split(loaded: Any, name: str, split: str) -> Rows:
    """Rows of one split of a Dataset or DatasetDict."""
    if isinstance(loaded, Mapping):
        if split not in loaded:
            raise UserError(f"{name} has no split {split!r}; it has {', '.join(loaded)}")
        loaded = loaded[split]
    return from_dataset(loaded, name)
