"""Rows from local files and folders, and the form that rows from anywhere are kept in."""

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


class Malformed(str):
    """Stands for a row that could not be read: what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """A data set's rows as they came, good or bad, and where each came from."""

    name: str
    table: Sequence[Any]
    """Mappings, or `Malformed`; a datasets.Dataset serves too."""
    column_names: tuple[str, ...]
    place: Callable[[int], str]
    """The name of a row for messages: its file and number."""

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Any]:
        if not hasattr(self.table, "iter"):
            yield from self.table
            return
        for columns in self.table.iter(1024):  # a data set gives rows one by one only slowly
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))

    def first(self, count: int | None) -> Rows:
        """At most the first `count` rows."""
        if count is None or count >= len(self):
            return self
        table = self.table.select(range(count)) if hasattr(self.table, "select") else self.table[:count]
        return dataclasses.replace(self, table=table)


def kind_of(value: Any) -> str:
    """The type of a value with its article: 'a list', 'an int'."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _union(rows: Sequence[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key for row in rows if isinstance(row, Mapping) for key in row))


def from_list(rows: Sequence[Any], name: str, places: Sequence[str] | None = None) -> Rows:
    """Rows of a list of objects; what is no object is `Malformed`. `places` names each row (default: NAME, row N)."""
    rows = [
        row if isinstance(row, Mapping | Malformed) else Malformed(f"is {kind_of(row)}, not an object") for row in rows
    ]
    place = (lambda i: f"{name}, row {i + 1}") if places is None else places.__getitem__
    return Rows(name, rows, _union(rows), place)


def from_dataset(table: Any, name: str) -> Rows:
    """Rows of a datasets.Dataset."""
    return Rows(name, table, tuple(table.column_names), lambda i: f"{name}, row {i + 1}")


@contextlib.contextmanager
def quiet():
    """The library without its progress bars."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    finally:
        if shown:
            datasets.enable_progress_bars()


def _not_utf8(text: str) -> tuple[int, str] | None:
    """Where text that was read with errors='surrogateescape' is not UTF-8, and what to say of it; None: nowhere."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00
        return error.start, f"is not UTF-8: byte 0x{byte:02x} at character"
    return None


def _not_json(error: json.JSONDecodeError) -> str:
    """What is wrong, without the 'at' and the colon that some of Python's messages end with."""
    return f"is not JSON: {error.msg.rstrip(': ').removesuffix(' at')}"


def _read_json_lines(path: str) -> Rows:
    rows, places = [], []
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                if wrong := _not_utf8(line):
                    rows.append(Malformed(f"{wrong[1]} {wrong[0] + 1}"))
                else:
                    rows.append(parse_json(line))
            except json.JSONDecodeError as error:
                rows.append(Malformed(f"{_not_json(error)} at character {error.pos + 1}"))
            places.append(f"{path}, line {number}")
    return from_list(rows, path, places)


def _read_json(path: str) -> Rows:
    """A list of objects, an object that holds one list of them, or JSON lines under the wrong name."""
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        text = file.read()
    problem = content = None
    try:
        content = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _read_json_lines(path)
        problem = error
    if wrong := _not_utf8(text):
        line, column = text.count("\n", 0, wrong[0]) + 1, wrong[0] - text.rfind("\n", 0, wrong[0])
        raise UserError(f"{path}, line {line}: {wrong[1]} {column}") from problem
    if problem is not None:
        raise UserError(f"{path}, line {problem.lineno}: {_not_json(problem)} at column {problem.colno}") from problem
    if isinstance(content, Mapping):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else [content]
    if not isinstance(content, list):
        raise UserError(f"{path}: holds {kind_of(content)}, not a list of objects")
    return from_list(content, path)


def _check_columns(table: Any, path: str) -> None:
    """Refuses columns of a .csv that pyarrow left as bytes, because not all of them are UTF-8."""
    import pyarrow.types

    for name in table.column_names:
        if pyarrow.types.is_binary(table[name].type):
            for number, value in enumerate(table[name].to_pylist(), 1):
                if value is not None and _not_utf8(value.decode("utf-8", "surrogateescape")):
                    raise UserError(f"{path}, row {number}: {name!r} is not UTF-8")


def _read_table(path: str, suffix: str) -> Rows:
    with quiet() as datasets:
        try:
            import pyarrow.csv
            import pyarrow.feather
            import pyarrow.parquet

            if suffix == ".arrow":  # the library writes streams, Arrow itself files
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
        except (OSError, ValueError) as error:  # pyarrow's errors are both
            raise UserError(f"{path}: cannot be read as {suffix[1:]}: {str(error).splitlines()[0]}") from error


def read_file(path: str) -> Rows:
    """Rows of one file, by its suffix; UserError for another suffix, an empty file, or one that cannot be read."""
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
    """(split, what the file is called beside it) from a path such as prompts_train.jsonl or train/000.parquet."""
    relative = os.path.splitext(os.path.relpath(path, root))[0]
    for split, others in _ALIASES.items():
        pattern = rf"(?<![a-z])({'|'.join((split, *others))})(?![a-z])"
        found = re.search(pattern, relative.lower())
        if found:
            return split, re.sub(r"[\d\W_]+|of", "", relative[: found.start()])
    return None, re.sub(r"[\d\W_]+|of", "", relative)


def read_folder(folder: str, split: str) -> Rows:
    """Rows of a split of a folder: one that datasets saved, or files named after their splits."""
    if any(os.path.exists(os.path.join(folder, file)) for file in ("state.json", "dataset_dict.json")):
        with quiet() as datasets:
            return pick(datasets.load_from_disk(folder), folder, split)
    paths = sorted(
        os.path.join(here, file)
        for here, _, files in os.walk(folder)
        for file in files
        if os.path.splitext(file)[1].lower() in SUFFIXES and not file.startswith(("dataset_info", "."))
    )
    if not paths:
        raise UserError(f"{folder}: no data files there (they end in {', '.join(SUFFIXES)})")
    found = {path: _split_of_file(path, folder) for path in paths}
    splits = sorted({name for name, _ in found.values() if name})
    if not splits and split == "train":
        chosen = paths  # no file names a split: all are for training
    else:
        wanted = next((name for name, others in _ALIASES.items() if split in (name, *others)), split)
        chosen = [path for path in paths if found[path][0] == wanted]
    if not chosen:
        raise UserError(f"{folder} has no split {split!r}; its files name {', '.join(splits) or 'none'}")
    if len({found[path][1] for path in chosen}) > 1:
        names = ", ".join(os.path.relpath(path, folder) for path in chosen)
        raise UserError(f"{folder} holds several data sets for split {split!r}: {names}; name one file")
    parts = [read_file(path) for path in chosen]
    if len(parts) == 1:
        return parts[0]
    rows = [row for part in parts for row in part]
    return from_list(rows, folder, [part.place(i) for part in parts for i in range(len(part))])


def pick(loaded: Any, name: str, split: str) -> Rows:
    """One split of whatever the datasets library gave."""
    if isinstance(loaded, Mapping):
        if split not in loaded:
            raise UserError(f"{name} has no split {split!r}; it has {', '.join(loaded)}")
        loaded = loaded[split]
    return from_dataset(loaded, name)
