"""Rows from the hub, from local files and folders, and from objects; every one of them can be named."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_jax.types import UserError

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


def _from_list(rows: Sequence[Any], name: str, places: Sequence[str] | None = None) -> Rows:
    rows = [
        row if isinstance(row, Mapping | Malformed) else Malformed(f"is {kind_of(row)}, not an object") for row in rows
    ]
    place = (lambda i: f"{name}, row {i + 1}") if places is None else places.__getitem__
    return Rows(name, rows, _union(rows), place)


def _from_dataset(table: Any, name: str) -> Rows:
    return Rows(name, table, tuple(table.column_names), lambda i: f"{name}, row {i + 1}")


@contextlib.contextmanager
def _quiet():
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
                    rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                rows.append(Malformed(f"{_not_json(error)} at character {error.pos + 1}"))
            places.append(f"{path}, line {number}")
    return _from_list(rows, path, places)


def _read_json(path: str) -> Rows:
    """A list of objects, an object that holds one list of them, or JSON lines under the wrong name."""
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        text = file.read()
    problem = content = None
    try:
        content = json.loads(text)
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
    return _from_list(content, path)


def _check_columns(table: Any, path: str) -> None:
    """Refuses columns of a .csv that pyarrow left as bytes, because not all of them are UTF-8."""
    import pyarrow.types

    for name in table.column_names:
        if pyarrow.types.is_binary(table[name].type):
            for number, value in enumerate(table[name].to_pylist(), 1):
                if value is not None and _not_utf8(value.decode("utf-8", "surrogateescape")):
                    raise UserError(f"{path}, row {number}: {name!r} is not UTF-8")


def _read_table(path: str, suffix: str) -> Rows:
    with _quiet() as datasets:
        try:
            import pyarrow.csv
            import pyarrow.feather
            import pyarrow.parquet

            if suffix == ".arrow":  # the library writes streams, Arrow itself files
                with open(path, "rb") as file:
                    is_file = file.read(6) == b"ARROW1"
                if not is_file:
                    return _from_dataset(datasets.Dataset.from_file(path), path)
                table = pyarrow.feather.read_table(path)
            elif suffix == ".parquet":
                table = pyarrow.parquet.read_table(path)
            else:
                options = pyarrow.csv.ParseOptions(newlines_in_values=True)
                table = pyarrow.csv.read_csv(path, parse_options=options)
                _check_columns(table, path)
            return _from_dataset(datasets.Dataset(table), path)
        except UserError:
            raise
        except (OSError, ValueError) as error:  # pyarrow's errors are both
            raise UserError(f"{path}: cannot be read as {suffix[1:]}: {str(error).splitlines()[0]}") from error


def _read_file(path: str) -> Rows:
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


def _read_folder(folder: str, split: str) -> Rows:
    if any(os.path.exists(os.path.join(folder, file)) for file in ("state.json", "dataset_dict.json")):
        with _quiet() as datasets:
            return _pick(datasets.load_from_disk(folder), folder, split)
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
    parts = [_read_file(path) for path in chosen]
    if len(parts) == 1:
        return parts[0]
    rows = [row for part in parts for row in part]
    return _from_list(rows, folder, [part.place(i) for part in parts for i in range(len(part))])


def _pick(loaded: Any, name: str, split: str) -> Rows:
    """One split of whatever the datasets library gave."""
    if isinstance(loaded, Mapping):
        if split not in loaded:
            raise UserError(f"{name} has no split {split!r}; it has {', '.join(loaded)}")
        loaded = loaded[split]
    return _from_dataset(loaded, name)


def _read_hub(name: str, split: str, config: str | None, revision: str | None) -> Rows:
    with _quiet() as datasets:
        try:
            return _from_dataset(
                datasets.load_dataset(name, config, split=split, revision=revision), f"{name} ({split})"
            )
        except Exception as error:  # the library raises a dozen kinds, some of them its own
            text = " ".join(str(error).split()) or type(error).__name__
            names = re.search(r"Should be one of \[(.*?)\]", text)
            if "split" in text.lower() and names:
                raise UserError(f"{name} has no split {split!r}; it has {names[1]}") from error
            if "Config name is missing" in text or "BuilderConfig" in text:
                raise UserError(f"{name}: {text[:400].rstrip('.')}. Set dataset_config.") from error
            raise UserError(
                f"data set {name!r} (revision {revision or 'main'}) could not be loaded: {text[:300].rstrip('.')}. "
                "dataset_name is a hub name, a local file or folder, or 'synthetic'."
            ) from error


def load_rows(
    source: Any,
    *,
    split: str = "train",
    kind: str = "prompts",
    dataset_config: str | None = None,
    dataset_revision: str | None = None,
    streaming: bool = False,
    max_samples: int | None = None,
    seed: int = 0,
) -> Rows:
    """The rows of one split.

    Args:
      source: hub name, local file (one split, whatever its name) or folder, 'synthetic', or an object: a
        datasets.Dataset or DatasetDict, or a list of dicts.
      split: split to take.
      kind: 'prompts', 'demonstrations' or 'pairs', of the synthetic data set.
      dataset_config, dataset_revision: of a hub data set.
      streaming: refused.
      max_samples: only the first so many rows.
      seed: of the synthetic data set.

    Raises:
      UserError: nothing to read there, no such split, a stream.
    """
    if streaming or type(source).__name__ in ("IterableDataset", "IterableDatasetDict", "generator"):
        raise UserError(
            "dataset_streaming is refused: the rows of an update are a function of seed and step, so that a run can "
            "continue from anywhere, and a stream cannot be gone back in. Leave it off; max_train_samples takes a part "
            "of the data."
        )
    if isinstance(source, str | os.PathLike):
        source = os.fspath(source)
        if source == "synthetic":
            from rlhf_jax.data.synthetic import load_synthetic

            rows = _from_dataset(load_synthetic(kind, split, max_samples, seed), f"synthetic {kind} ({split})")
        elif os.path.isfile(source):
            rows = _read_file(source)
        elif os.path.isdir(source):
            rows = _read_folder(source, split)
        elif os.path.splitext(source)[1].lower() in SUFFIXES or source.startswith(("/", ".", "~")):
            raise UserError(f"{source}: there is no such file or folder")
        else:
            rows = _read_hub(source, split, dataset_config, dataset_revision)
    elif isinstance(source, list | tuple):
        rows = _from_list(source, f"the list given as {split} data")
    elif isinstance(source, Mapping):
        rows = _pick(source, "the DatasetDict given", split)
    elif hasattr(source, "column_names") and hasattr(source, "select"):
        rows = _from_dataset(source, f"the data set given as {split} data")
    else:
        raise UserError(
            f"{split} data of type {type(source).__name__}: give a name, a path, a datasets.Dataset or a list of dicts"
        )
    if not len(rows):
        raise UserError(f"{rows.name}: has no rows")
    return rows.first(max_samples)


def is_one_split(source: Any) -> bool:
    """Whether a source is a single split: a plain file, or an object that is no DatasetDict."""
    if isinstance(source, str | os.PathLike):
        return os.path.isfile(source)
    return not isinstance(source, Mapping)


def load_split(config: Any, which: str, kind: str, given: Any = None) -> Rows | None:
    """The training or evaluation rows that a stage's config asks for.

    Args:
      config: a stage's config (its data fields).
      which: 'train' or 'eval'.
      kind: 'prompts', 'demonstrations' or 'pairs'.
      given: an object in place of the configured name.

    Returns:
      The rows; None for evaluation where the config has none: no split named, or a plain file for training and no
      eval_dataset_name.
    """
    common = {"kind": kind, "streaming": config.dataset_streaming}
    hub = {"dataset_config": config.dataset_config, "dataset_revision": config.dataset_revision}
    if which == "train":
        source = config.dataset_name if given is None else given
        split = config.dataset_train_split
        return load_rows(source, split=split, max_samples=config.max_train_samples, **common, **hub)
    limit = {"max_samples": config.max_eval_samples}
    other = config.eval_dataset_name if given is None else given
    if other is not None:
        split = config.dataset_test_split or "validation"
        return load_rows(other, split=split, **limit, **common)
    if config.dataset_test_split is None or is_one_split(config.dataset_name):
        return None
    return load_rows(config.dataset_name, split=config.dataset_test_split, **limit, **common, **hub)


def require_columns(rows: Rows, wanted: Mapping[str, str]) -> None:
    """Checks that columns exist.

    Args:
      rows: the rows.
      wanted: option that renames the column -> name of the column.

    Raises:
      UserError: names the column, the source, the columns there are, and the option; or, where no line of the source
        could be read, the first of them.
    """
    if not rows.column_names:
        malformed = [i for i, row in enumerate(rows.table) if isinstance(row, Malformed)]
        if malformed:
            count = f"{len(malformed)} of {len(rows)} rows {'is' if len(malformed) == 1 else 'are'} bad"
            raise UserError(f"{rows.place(malformed[0])}: {rows.table[malformed[0]]} ({count}). No row is usable.")
    for option, column in wanted.items():
        if column not in rows.column_names:
            near = difflib.get_close_matches(column, rows.column_names, 1)
            raise UserError(
                f"{rows.name} has no column {column!r}; it has {', '.join(rows.column_names) or 'none'}. "
                f"Name the right one by {option}" + (f" (did you mean {near[0]!r}?)" if near else "")
            )
