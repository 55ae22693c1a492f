"""Rows from the hub, from local files and folders, and from objects; every one of them can be named."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from typing import Any

from rlhf_jax.data.files import SUFFIXES, Malformed, Rows, from_dataset, from_list, pick, quiet, read_file, read_folder
from rlhf_jax.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""What an evaluation set may be called: a part of metrics' names."""
_NAMED = re.compile(r"([A-Za-z0-9_.-]+)=(.+)")
_HALF_NAMED = re.compile(r"[A-Za-z0-9_.-]*=")


def _read_hub(name: str, split: str, config: str | None, revision: str | None) -> Rows:
    with quiet() as datasets:
        try:
            return from_dataset(
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
    label: str | None = None,
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
      label: what messages call a list or data set given as an object; default: 'train data', after the split.

    Raises:
      UserError: nothing to read there, no such split, a stream.
    """
    if streaming or type(source).__name__ in ("IterableDataset", "IterableDatasetDict", "generator"):
        raise UserError(
            "dataset_streaming is refused: the rows of an update are a function of seed and step, so that a run can "
            "continue from anywhere, and a stream cannot be gone back in. Leave it off; max_train_samples takes a part "
            "of the data."
        )
    label = label or f"{split} data"
    if isinstance(source, str | os.PathLike):
        source = os.fspath(source)
        if source == "synthetic":
            from rlhf_jax.data.synthetic import load_synthetic

            rows = from_dataset(load_synthetic(kind, split, max_samples, seed), f"synthetic {kind} ({split})")
        elif os.path.isfile(source):
            rows = read_file(source)
        elif os.path.isdir(source):
            rows = read_folder(source, split)
        elif os.path.splitext(source)[1].lower() in SUFFIXES or source.startswith(("/", ".", "~")):
            raise UserError(f"{source}: there is no such file or folder")
        else:
            rows = _read_hub(source, split, dataset_config, dataset_revision)
    elif isinstance(source, list | tuple):
        rows = from_list(source, f"the list given as {label}")
    elif isinstance(source, Mapping):
        rows = pick(source, "the DatasetDict given", split)
    elif hasattr(source, "column_names") and hasattr(source, "select"):
        rows = from_dataset(source, f"the data set given as {label}")
    else:
        raise UserError(
            f"{label} of type {type(source).__name__}: give a name, a path, a datasets.Dataset or a list of dicts"
        )
    if not len(rows):
        raise UserError(f"{rows.name}: has no rows")
    return rows.first(max_samples)


def is_one_split(source: Any) -> bool:
    """Whether a source is a single split: a plain file, or an object that is no DatasetDict."""
    if isinstance(source, str | os.PathLike):
        return os.path.isfile(source)
    return not isinstance(source, Mapping)


def _named_sources(text: str) -> dict[str, str] | None:
    """NAME=SOURCE,NAME=SOURCE as a dict; None for one source, which may have '=' and ',' in it: a path that exists, or
    text that does not begin as such a list does."""
    if os.path.exists(text) or not _HALF_NAMED.match(text.strip()):
        return None
    sources: dict[str, str] = {}
    for part in map(str.strip, text.split(",")):
        found = _NAMED.fullmatch(part)
        if found is None:
            raise UserError(
                f"eval_dataset_name {text!r}: {part!r} is not NAME=SOURCE, with letters, digits, '_', '.' and '-' in "
                "the name, and a comma between two sets; and no file or folder has the whole name"
            )
        if found[1] in sources:
            raise UserError(f"eval_dataset_name {text!r} names two sets {found[1]!r}; give each a name of its own")
        sources[found[1]] = found[2]
    return sources


def _given_sources(given: Any) -> Mapping[str, Any] | None:
    """A dict of name -> source; None for one source, which a DatasetDict is too."""
    if not isinstance(given, Mapping) or any(kind.__name__.endswith("DatasetDict") for kind in type(given).__mro__):
        return None
    for name in given:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(
                f"eval_dataset (in place of eval_dataset_name) has a set called {name!r}: a name is letters, digits, "
                "'_', '.' and '-', because metrics are named after it"
            )
    return given


def eval_sets(config: Any, kind: str, given: Any = None) -> dict[str, Rows]:
    """The evaluation rows that a stage's config asks for, by name.

    Args:
      config: a stage's config (its data fields). eval_dataset_name is one source, or several as
        'NAME=SOURCE,NAME=SOURCE'.
      kind: 'prompts', 'demonstrations' or 'pairs', of the synthetic data set.
      given: in place of eval_dataset_name: an object (see `load_rows`), or a dict of name -> source.

    Returns:
      name -> rows, at most max_eval_samples each; a single source without a name is called ''. Empty where the config
      has no evaluation data: no split named, or a plain file for training and no eval_dataset_name; or an empty dict.

    Raises:
      UserError: a name is missing, empty, of other characters or given twice; a source is missing; see `load_rows`.
    """
    limits = {"kind": kind, "streaming": config.dataset_streaming, "max_samples": config.max_eval_samples}
    split = config.dataset_test_split or "validation"
    source = config.eval_dataset_name if given is None else given
    if source is None:
        if config.dataset_test_split is None or is_one_split(config.dataset_name):
            return {}
        hub = {"dataset_config": config.dataset_config, "dataset_revision": config.dataset_revision}
        return {"": load_rows(config.dataset_name, split=split, **limits, **hub)}
    sources = _named_sources(source) if isinstance(source, str) else _given_sources(source)
    if sources is None:
        return {"": load_rows(source, split=split, **limits)}
    return {
        name: load_rows(one, split=split, label=f"evaluation set {name!r}", **limits) for name, one in sources.items()
    }


def load_split(config: Any, which: str, kind: str, given: Any = None) -> Rows | None:
    """The training or evaluation rows that a stage's config asks for.

    Args:
      config: a stage's config (its data fields).
      which: 'train' or 'eval'.
      kind: 'prompts', 'demonstrations' or 'pairs', of the synthetic data set.
      given: an object in place of the configured name.

    Returns:
      The rows; None for evaluation where `eval_sets` has none.

    Raises:
      UserError: several evaluation sets, or see `load_rows`.
    """
    if which == "train":
        return load_rows(
            config.dataset_name if given is None else given,
            split=config.dataset_train_split,
            kind=kind,
            dataset_config=config.dataset_config,
            dataset_revision=config.dataset_revision,
            streaming=config.dataset_streaming,
            max_samples=config.max_train_samples,
        )
    sets = eval_sets(config, kind, given)
    if len(sets) > 1:
        raise UserError(f"eval_dataset_name names {len(sets)} sets ({', '.join(sets)}) where only one is read")
    return next(iter(sets.values()), None)


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
