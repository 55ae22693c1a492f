"""Loading of rows from the hub, local files and folders, or Python objects."""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from rlhf_jax import storage
from rlhf_jax.data import arithmetic, arrow_cache, instructions, reasoning_gym, shapes, synthetic, tool_tasks
from rlhf_jax.data.files import (
    MalformedRow,
    Rows,
    datasets_without_progress_bars,
    from_columns,
    from_dataset,
    from_list,
    is_columns,
    is_data_file,
    read_file,
    read_folder,
    table_fingerprint,
    write_table,
)
from rlhf_jax.data.options import DataOptions
from rlhf_jax.errors import MissingSplit, UserError


class BuiltIn(NamedTuple):
    """A data set that is made and not read.

    Attributes:
      load: (kind, split, size, seed) -> a datasets.Dataset.
      sizes: default number of rows of each split.
      cached_rows: number of rows from which making them takes longer than reading them from a cache; None: they are
        never cached.
      note: of the rows, for the report on the data.
      identity: what the rows depend on besides these arguments and the code, of JSON types.
    """

    load: Callable[[str, str, int | None, int], Any]
    sizes: Mapping[str, int]
    cached_rows: int | None = 2048
    note: Callable[[Any], str] | None = None
    identity: Callable[[], list[Any]] = list


BUILT_IN = {
    "synthetic": BuiltIn(synthetic.load_synthetic, synthetic.SIZES),
    "arithmetic": BuiltIn(arithmetic.load_arithmetic, arithmetic.SIZES),
    "instructions": BuiltIn(instructions.load_instructions, instructions.SIZES),
    "shapes": BuiltIn(shapes.load_shapes, shapes.SIZES, cached_rows=None),  # pictures
    **{name: BuiltIn(tool_tasks.loader(name), tool_tasks.SIZES) for name in ("boxes", "guess_number", "seeds")},
}
"""Built-in data sets by name; beside them, the tasks of reasoning-gym."""
TEXT_COLUMNS = frozenset("prompt completion chosen rejected summary subreddit title post".split())
"""Columns that are text in any .csv file, whatever they hold."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""Valid name of an evaluation set; metric names contain it."""
_NAME_AND_SOURCE = re.compile(r"([A-Za-z0-9_.-]+)=(.+)")
_NAME_PREFIX = re.compile(r"[A-Za-z0-9_.-]*=")


def _read_hub(name: str, split: str, config: str | None, revision: str | None) -> Rows:
    with datasets_without_progress_bars() as datasets:
        try:
            table = datasets.load_dataset(name, config, split=split, revision=revision)
            large = table.data.nbytes >= arrow_cache.MINIMUM_BYTES
            return from_dataset(table, f"{name} ({split})", [name, table._fingerprint] if large else None)
        except Exception as error:  # datasets raises many types of exceptions
            text = " ".join(str(error).split()) or type(error).__name__
            names = re.search(r"Should be one of \[(.*?)\]", text)
            if "split" in text.lower() and names:
                raise MissingSplit(name, split, re.findall(r"[^', ]+", names[1])) from error
            if "Config name is missing" in text or "BuilderConfig" in text:
                raise UserError(f"{name}: {text[:400].rstrip('.')}. Set dataset_config.") from error
            raise UserError(
                f"data set {name!r} (revision {revision or 'main'}) could not be loaded: {text[:300].rstrip('.')}. "
                f"dataset_name is a hub name, a local file or folder, {', '.join(map(repr, BUILT_IN))} or "
                f"'{reasoning_gym.PREFIX}TASK'."
            ) from error


def built_in(source: str) -> BuiltIn | None:
    """The built-in data set of a name, or None."""
    if source.startswith(reasoning_gym.PREFIX):
        return BuiltIn(
            functools.partial(reasoning_gym.load_reasoning_gym, source),
            reasoning_gym.SIZES,
            cached_rows=0,
            note=reasoning_gym.note,
            identity=lambda: reasoning_gym.identity(source),
        )
    return BUILT_IN.get(source)


def _read_built_in(name: str, dataset: BuiltIn, kind: str, split: str, size: int | None, seed: int) -> Rows:
    """Rows of a built-in data set. Making thousands takes seconds, so they are cached."""
    title = f"{name} {kind} ({split})"
    fingerprint = [name, kind, split, size, seed, *dataset.identity()]
    rows = dataset.sizes.get(split, 0) if size is None else size
    if dataset.cached_rows is None or rows < dataset.cached_rows:
        return from_dataset(dataset.load(kind, split, size, seed), title)

    def write(folder: str) -> dict[str, Any]:
        write_table(dataset.load(kind, split, size, seed), folder)
        return {}

    entry = arrow_cache.cached(arrow_cache.entry_key(fingerprint), title, write)
    table = dataset.load(kind, split, size, seed) if entry is None else entry.table
    loaded_rows = from_dataset(table, title, fingerprint)
    return loaded_rows if dataset.note is None else loaded_rows.noted(dataset.note(table))


def load_rows(
    source: Any,
    *,
    split: str = "train",
    split_option: str = "dataset_train_split",
    kind: str = "prompts",
    dataset_config: str | None = None,
    dataset_revision: str | None = None,
    max_samples: int | None = None,
    seed: int = 0,
    label: str | None = None,
    text_columns: Collection[str] = (),
) -> Rows:
    """The rows of one split.

    Args:
      source: hub name, local file (read as one split, whatever its name) or folder, the name of a built-in data set,
        or an object: a datasets.Dataset or DatasetDict, a pandas DataFrame, a list of dicts or a dict of lists.
      split_option: option that sets it, for messages.
      kind: 'prompts', 'demonstrations' or 'pairs'; for the built-in data sets.
      dataset_config, dataset_revision: of a hub data set.
      max_samples: load only the first max_samples rows.
      seed: of the built-in data sets.
      label: name for an object in messages; default: the split followed by 'data', as in 'train data'.
      text_columns: columns of a .csv file that are text beside TEXT_COLUMNS, see `text_columns_of`.

    Raises:
      UserError: the source or split does not exist or has no rows, or the source is a stream.
    """
    if type(source).__name__ in ("IterableDataset", "IterableDatasetDict", "generator"):
        raise UserError(
            "a stream is refused: the rows of an update are a function of seed and step, so that a run can resume at "
            "any step, and a stream has no random access. Rows of files are mapped from the disk, so memory does not "
            "grow with their number; max_train_samples takes the first rows. To train on a stream, write as many rows "
            "as the run needs to a file: datasets' take, then to_json."
        )
    try:
        rows = _read(
            source,
            split=split,
            kind=kind,
            dataset_config=dataset_config,
            dataset_revision=dataset_revision,
            max_samples=max_samples,
            seed=seed,
            label=label or f"{split} data",
            text_columns=TEXT_COLUMNS.union(text_columns),
        )
    except MissingSplit as error:
        raise UserError(f"{error}. Set {split_option}") from None
    if not len(rows):
        raise UserError(f"{rows.name}: has no rows")
    return rows.first(max_samples)


def _read(
    source: Any,
    *,
    split: str,
    kind: str,
    dataset_config: str | None,
    dataset_revision: str | None,
    max_samples: int | None,
    seed: int,
    label: str,
    text_columns: Collection[str],
) -> Rows:
    """The rows of one split, of a built-in data set at least the first `max_samples`; see `load_rows`."""
    if isinstance(source, str | os.PathLike):
        source = storage.local_copy(os.fspath(source))
        if (dataset := built_in(source)) is not None:
            return _read_built_in(source, dataset, kind, split, max_samples, seed)
        if os.path.isfile(source):
            return read_file(source, text_columns)
        if os.path.isdir(source):
            return read_folder(source, split, text_columns)
        if is_data_file(source) or source.startswith(("/", ".", "~")):
            raise UserError(f"{source}: there is no such file or folder")
        return _read_hub(source, split, dataset_config, dataset_revision)
    if isinstance(source, Mapping) and not is_columns(source):
        if split not in source:
            raise MissingSplit(f"the {type(source).__name__} given", split, source)
        return _read_object(source[split], label)
    return _read_object(source, label)


def _read_object(source: Any, label: str) -> Rows:
    """Rows of a Python object that is one split."""
    if isinstance(source, list | tuple):
        return from_list(source, f"the list given as {label}")
    if is_columns(source):
        return from_columns(source, f"the columns given as {label}")
    if hasattr(source, "column_names") and hasattr(source, "to_batches"):  # pyarrow.Table
        with datasets_without_progress_bars() as datasets:
            source = datasets.Dataset(source)
    if hasattr(source, "column_names") and hasattr(source, "select"):
        return from_dataset(source, f"the data set given as {label}", table_fingerprint(source))
    raise UserError(
        f"{label} of type {type(source).__name__}: give a name, a path, a datasets.Dataset or DatasetDict, a pandas "
        "DataFrame, a list of dicts or a dict of lists"
    )


def text_columns_of(config: DataOptions) -> set[str]:
    """The columns of texts that the data options of a config name."""
    options = ("prompt_column", "completion_column", "chosen_column", "rejected_column")
    return {value for option, value in vars(config).items() if option in options}


def is_single_split(source: Any) -> bool:
    """Whether a source is a single split: a file, or an object other than a DatasetDict."""
    if isinstance(source, str | os.PathLike):
        return storage.is_file(os.fspath(source))
    return is_columns(source) or not isinstance(source, Mapping)


def _named_sources(text: str) -> dict[str, str] | None:
    """NAME=SOURCE,NAME=SOURCE as a dict, or None for a single source.

    A single source may contain '=' and ',': it is an existing path, or does not start with NAME=.
    """
    if storage.is_remote(text) or storage.exists(text) or not _NAME_PREFIX.match(text.strip()):
        return None
    sources: dict[str, str] = {}
    for part in map(str.strip, text.split(",")):
        match = _NAME_AND_SOURCE.fullmatch(part)
        if match is None:
            raise UserError(
                f"eval_dataset_name {text!r}: {part!r} is not NAME=SOURCE, with letters, digits, '_', '.' and '-' in "
                "the name and a comma between sets; and there is no file or folder of the full name"
            )
        if match[1] in sources:
            raise UserError(f"eval_dataset_name {text!r} names two sets {match[1]!r}; give each a unique name")
        sources[match[1]] = match[2]
    return sources


def _sources_of_dict(dataset: Any) -> Mapping[str, Any] | None:
    """A dict of name -> source, or None for a single source (a DatasetDict or a dict of columns is one)."""
    if (
        not isinstance(dataset, Mapping)
        or is_columns(dataset)
        or any(base.__name__.endswith("DatasetDict") for base in type(dataset).__mro__)
    ):
        return None
    for name in dataset:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(
                f"eval_dataset (in place of eval_dataset_name) has a set named {name!r}: use letters, digits, '_', '.' "
                "and '-', because metric names contain it"
            )
    return dataset


def eval_sets(config: DataOptions, kind: str, dataset: Any = None) -> dict[str, Rows]:
    """The evaluation rows of a stage's config, by name.

    Args:
      config: a stage's config (its data fields). eval_dataset_name is one source, or several as
        'NAME=SOURCE,NAME=SOURCE'.
      kind: 'prompts', 'demonstrations' or 'pairs'; for the built-in data sets.
      dataset: replaces eval_dataset_name: an object (see `load_rows`), or a dict of name -> source.

    Returns:
      name -> rows, at most max_eval_samples each; a single source without a name has the name ''. Empty where the
      config has no evaluation data (no split, or a training file or a mixture without eval_dataset_name) or
      `dataset` is {}.

    Raises:
      UserError: a name is missing, empty, repeated or has other characters; a source is missing; see `load_rows`.
    """
    limits = {"kind": kind, "max_samples": config.max_eval_samples}
    limits |= {"text_columns": text_columns_of(config)}
    limits |= {"split_option": "dataset_test_split, None for a run without evaluation"}
    split = config.dataset_test_split or "validation"
    source = config.eval_dataset_name if dataset is None else dataset
    if source is None:
        mixture = config.datasets is not None
        if mixture or config.dataset_test_split is None or is_single_split(config.dataset_name):
            return {}
        hub = {"dataset_config": config.dataset_config, "dataset_revision": config.dataset_revision}
        return {"": load_rows(config.dataset_name, split=split, **limits, **hub)}
    sources = _named_sources(source) if isinstance(source, str) else _sources_of_dict(source)
    if sources is None:
        return {"": load_rows(source, split=split, **limits)}
    return {
        name: load_rows(eval_source, split=split, label=f"evaluation set {name!r}", **limits)
        for name, eval_source in sources.items()
    }


def load_train_split(config: DataOptions, kind: str, dataset: Any = None, text_columns: Collection[str] = ()) -> Rows:
    """The training rows of a stage's config, which names one data set.

    Args:
      kind: 'prompts', 'demonstrations' or 'pairs'; for the built-in data sets.
      dataset: an object in place of the configured name.
      text_columns: columns of texts beside those that the config names.

    Raises:
      UserError: see `load_rows`.
    """
    return load_rows(
        config.dataset_name if dataset is None else dataset,
        split=config.dataset_train_split,
        kind=kind,
        dataset_config=config.dataset_config,
        dataset_revision=config.dataset_revision,
        max_samples=config.max_train_samples,
        text_columns=text_columns_of(config).union(text_columns),
    )


def require_columns(rows: Rows, required: Mapping[str, str]) -> None:
    """Checks that columns exist.

    Args:
      required: option that sets the column's name -> name of the column.

    Raises:
      UserError: a column is missing; or no row could be read, in which case the first bad row is reported.
    """
    if not rows.column_names:
        malformed = [i for i, row in enumerate(rows.table) if isinstance(row, MalformedRow)]
        if malformed:
            count = f"{len(malformed)} of {len(rows)} rows {'is' if len(malformed) == 1 else 'are'} bad"
            raise UserError(f"{rows.location(malformed[0])}: {rows.table[malformed[0]]} ({count}). No row is usable.")
    for option, column in required.items():
        if column not in rows.column_names:
            near = difflib.get_close_matches(column, rows.column_names, 1)
            raise UserError(
                f"{rows.name} has no column {column!r}; it has {', '.join(rows.column_names) or 'none'}. "
                f"Set {option} to the right one" + (f" (did you mean {near[0]!r}?)" if near else "")
            )
