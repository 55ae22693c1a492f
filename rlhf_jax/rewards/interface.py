"""Reward functions: import by name, names and marks, and validation of the numbers they return.

python_functions.py calls Python functions, server.py a server; scorer.py combines all rewards of a run.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import numbers
import os
import pathlib
import pkgutil
import sys
import sysconfig
import traceback
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax import storage
from rlhf_jax.data import reasoning_gym
from rlhf_jax.data.files import type_with_article
from rlhf_jax.errors import UserError
from rlhf_jax.rewards import builtin, instructions, math_verification
from rlhf_jax.utils import bounded_calls

RewardFunction = Callable[..., Any]

KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Keywords that every function may take; a data column of the same name is not passed."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class RewardFailure(UserError):
    """A reward function or server returned no usable reward for a row. Names it, the row, and what it returned."""


# --- names and marks


def unwrap_partial(function: Any) -> Any:
    """The function inside a functools.partial; anything else unchanged."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def function_name(function: RewardFunction) -> str:
    """The name for messages and metrics: __name__ (of a partial, that of its function), an object's `name` if that is a
    string, else the name of its class."""
    function = unwrap_partial(function)
    name = getattr(function, "__name__", None) or getattr(function, "name", None)
    return name if isinstance(name, str) and name else type(function).__name__


def unique_names(functions: Sequence[RewardFunction]) -> tuple[str, ...]:
    """A unique name for the metrics of each function; see `function_name`."""
    return number_duplicates(map(function_name, functions))


def number_duplicates(bases: Iterable[str]) -> tuple[str, ...]:
    """The same names, with duplicates as name, name_2, name_3."""
    names: list[str] = []
    for base in bases:
        name = base
        number = 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return tuple(names)


def jax_reward(function: Callable) -> Callable:
    """Marks a pure JAX function: it is compiled into the scoring of a rollout, so that no row leaves the device.

    Args:
      function: (tokens [B, T] int32, the response; lengths [B] int32, 0..T, the stop token included) -> [B], or [B, T]
        for token-level rewards.

    Returns:
      The function.
    """
    try:
        function._is_jax_reward = True
    except AttributeError:  # bound methods and builtins take no attributes
        return jax_reward(lambda tokens, lengths: function(tokens, lengths))
    return function


def is_jax_reward(function: Any) -> bool:
    """Whether `jax_reward` marked the function, or the function inside a partial."""
    return getattr(function, "_is_jax_reward", False) or getattr(unwrap_partial(function), "_is_jax_reward", False)


@dataclasses.dataclass(frozen=True)
class Signature:
    """Keywords that a function accepts (None: any) and those that it requires."""

    accepts: frozenset[str] | None
    required: frozenset[str]

    @classmethod
    def of(cls, function: Any, name: str) -> Signature:
        """Raises a UserError for a function that cannot be called with keywords."""
        advice = "Wrap it: def reward(prompts, completions, **columns): ..."
        if inspect.isclass(function):
            raise UserError(f"reward function {name} is a class: pass an instance, {name}()")
        if not callable(function):
            raise UserError(f"reward function {name} of type {type(function).__name__} is not callable")
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            raise UserError(f"reward function {name}: its signature cannot be read. {advice}") from None
        if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
            raise UserError(
                f"reward function {name} takes {', '.join(positional)} by position only, but reward functions are "
                f"called with keywords. {advice}"
            )
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        required = frozenset(p.name for p in named if p.default is p.empty)
        return cls(None if accepts_any else frozenset(p.name for p in named), required)


def column_types(function: Any) -> dict[str, tuple[type, ...]]:
    """The types of a column's values that a function's annotations name, by keyword: (str,) for `solution: list[str]`.
    Keywords without such an annotation are absent."""
    function = unwrap_partial(function)
    try:
        hints = typing.get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
    except Exception:  # annotations are user code
        return {}
    column_kinds = {}
    for name, hint in hints.items():
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if name in KEYWORDS or not isinstance(origin, type) or not issubclass(list, origin) or len(arguments) != 1:
            continue
        kinds = typing.get_args(arguments[0]) or (arguments[0],)
        if all(isinstance(kind, type) and kind is not Any for kind in kinds):
            column_kinds[name] = (*kinds, int) if float in kinds else kinds
    return column_kinds


def type_note(name: str, function: Any, rows: Iterable[Mapping[str, Any]]) -> str | None:
    """A line on a column with a row of another type than the function's annotation; None if there is none."""
    expected = column_types(function)
    for row in rows:
        for column, kinds in expected.items():
            value = row.get(column)
            if value is not None and not isinstance(value, kinds):
                expects = " or ".join(dict.fromkeys(kind.__name__ for kind in kinds))
                built_in = unwrap_partial(function).__module__ == builtin.__name__
                return (
                    f"column {column!r} holds {type_with_article(value)}, {quoted(value, 60)}, but reward function "
                    f"{name} expects {expects}: {'its text is compared' if built_in else 'it gets the value as it is'}"
                )
    return None


def is_async(function: Any) -> bool:
    """Whether a call returns a coroutine: `async def`, an object with an async __call__, a partial of either."""
    function = unwrap_partial(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


# --- functions by name

BY_NAME: dict[str, RewardFunction] = {
    "accuracy_reward": builtin.accuracy_reward,
    "reasoning_accuracy_reward": builtin.reasoning_accuracy_reward,
    "think_format_reward": builtin.think_format_reward,
    "exact_match_reward": builtin.exact_match_reward,
    "boxed_format_reward": builtin.boxed_format_reward,
    "get_soft_overlong_punishment": builtin.get_soft_overlong_punishment(1280, 256),
    "reasoning_gym_reward": builtin.reasoning_gym_reward,
    **{function.__name__: function for function in instructions.FUNCTIONS},
}
"""Names that `reward_funcs` takes. The arguments of get_soft_overlong_punishment are those of TRL's scripts."""
_CHECKED = {
    "accuracy_reward": math_verification.check_installed,
    "reasoning_accuracy_reward": math_verification.check_installed,
    "reasoning_gym_reward": reasoning_gym.check_installed,
}
"""Of the functions that need a package."""


def split_spec(spec: str) -> tuple[str, str]:
    """(module or file, name in it) of 'module:function', 'file.py:function' or 'package.module.function'."""
    place, _, name = spec.rpartition(":" if ":" in spec else ".")
    return place, name


def resolve(spec: str) -> Callable:
    """The reward function that `spec` names: one of `BY_NAME`, or one of `load_function`. Raises a UserError as that
    does, or if a package that it needs is not installed."""
    if spec in BY_NAME:
        _CHECKED.get(spec, lambda name: None)(spec)
        return BY_NAME[spec]
    return load_function(spec, "reward function", tuple(BY_NAME))


def load_function(spec: str, kind: str, names: Sequence[str] = ()) -> Callable:
    """As `load_object`, a class instantiated without arguments. Raises a UserError if it is not callable too."""
    target, name = load_object(spec, kind, names), split_spec(spec)[1]
    if inspect.isclass(target):
        target = _run_user_code(f"{kind} {spec!r}", f"{name}() failed", target)
    if not callable(target):
        raise UserError(f"{kind} {spec!r}: {name} is of type {type(target).__name__} and is not callable")
    return target


def load_object(spec: str, kind: str, names: Sequence[str] = ()) -> Any:
    """The object of 'module:function', 'file.py:function' or 'package.module.function', which is imported.

    The working folder is searched for modules after everything else, and a file's own folder for its imports. Two
    objects of one file share one module.

    Args:
      spec: its name.
      kind: what it is, for messages: 'reward function'.
      names: what may be named instead, for messages.

    Raises:
      UserError: no such module, file or name (suggests the nearest), or an exception during import (with its line).
    """
    title = f"{kind} {spec!r}"
    forms = ["'module:function'", "'file.py:function'", "'package.module.function'"]
    forms += [f"one of {', '.join(names)}"] if names else []
    forms = " or ".join([", ".join(forms[:-1]), forms[-1]])
    place, name = split_spec(spec)
    if not place or not name or spec.endswith(".py"):
        near = _suggest(spec, names)
        raise UserError(f"{title} does not name a function in a module. Give {forms}.{near}")
    target = _load_file(title, place) if place.endswith(".py") else _load_module(title, place, name, forms)
    for part in name.split("."):
        if not hasattr(target, part):
            attributes = getattr(target, "__dict__", {})
            public_names = [key for key, value in attributes.items() if callable(value) and not key.startswith("_")]
            has = _suggest(part, public_names) or (f" It has {', '.join(public_names[:8])}." if public_names else "")
            raise UserError(f"{title}: {place} has no {part!r}.{has}")
        target = getattr(target, part)
    return target


def _suggest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _run_user_code(title: str, what: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except SyntaxError as error:
        raise UserError(f"{title}: {error.filename}, line {error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"{title}: {what}: {describe_error(error)}") from error


def _load_module(title: str, name: str, function: str, forms: str) -> Any:
    _append_to_path(storage.working_folder())
    importlib.invalidate_caches()  # the file may be newer than Python's listing of the folder
    try:
        missing = name not in sys.modules and importlib.util.find_spec(name) is None
    except ModuleNotFoundError as error:  # any other name: the parent's own import fails
        missing = error.name is None or f"{name}.".startswith(f"{error.name}.")
    except (ImportError, ValueError):
        missing = True
    except Exception:  # the parent's code fails; importing it below reports that
        missing = False
    if not missing:
        return _run_user_code(title, f"importing {name} failed", lambda: importlib.import_module(name))
    parent, _, last = name.rpartition(".")
    paths = getattr(sys.modules.get(parent), "__path__", ()) if parent else None
    near = _suggest(last, (module.name for module in pkgutil.iter_modules(paths)))
    if storage.is_file(f"{name}.py"):
        near = f" Did you mean {name}.py:{function}?"
    raise UserError(f"{title}: there is no module {name!r}.{near} Give {forms}")


def _load_file(title: str, place: str) -> Any:
    path = pathlib.Path(storage.absolute(place)).resolve()
    if not path.is_file():
        near = _suggest(path.name, (file.name for file in path.parent.glob("*.py")))
        raise UserError(f"{title}: there is no file {path}.{near}")
    name = f"{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    version = path.stat().st_mtime_ns, path.stat().st_size
    if getattr(sys.modules.get(name), "__version_of_file__", None) == version:
        return sys.modules[name]
    _append_to_path(str(path.parent))
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module
    try:
        _run_user_code(title, f"importing {path} failed", lambda: module_spec.loader.exec_module(module))
    except BaseException:
        del sys.modules[name]
        raise
    module.__version_of_file__ = version
    return module


def _append_to_path(folder: str) -> None:
    # Permanently, since a function may import when it is called; at the end, so that it shadows nothing installed.
    if folder not in sys.path and not ("" in sys.path and folder == storage.working_folder()):
        sys.path.append(folder)


# --- for messages


def describe_error(error: BaseException) -> str:
    """'TypeError: message (file.py, line 3)', with the innermost line of the user's code."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    installed = [sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")] + ["<frozen"]
    frames = traceback.extract_tb(error.__traceback__)
    ours = (os.path.dirname(__file__), os.path.dirname(bounded_calls.__file__))
    frames = [frame for frame in frames if os.path.dirname(frame.filename) not in ours]
    user_frames = [frame for frame in frames if not frame.filename.startswith(tuple(installed))] or frames
    where = f" ({user_frames[-1].filename}, line {user_frames[-1].lineno})" if user_frames else ""
    return f"{type(error).__name__}: {error}".rstrip(": ") + where


def quoted(value: Any, limit: int = 200) -> str:
    """A value for a message, quoted if a string, its middle cut beyond `limit` characters."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-(limit // 2) :]}"
    return repr(text) if isinstance(value, str) else text


def describe_row(row: int, prompts: Sequence, completions: Sequence) -> str:
    """A row for a message: its prompt cut to about 200 characters, its completion to 2,000."""
    return f"Row {row}: prompt {quoted(prompts[row])}, completion {quoted(completions[row], 2000)}"


# --- rewards


def as_number(value: Any) -> float:
    """A number, a bool or a 0-d array as a float that float32 can hold; None ('not applicable') as NaN.

    Raises:
      ValueError: a string, NaN, infinity, a number beyond float32, a complex or another object.
    """
    if value is None:
        return math.nan
    if getattr(value, "shape", None) == ():  # a numpy, JAX or torch scalar
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{quoted(value)} is not a number")
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not abs(value) <= _FLOAT32_MAX:  # NaN too
        raise ValueError(f"{value} is not a finite float32")
    return value


def completion_ids(response: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """The tokens of each response, with its stop token and without padding.

    Args:
      response: [B, T] int.
      lengths: [B] int.

    Returns:
      B lists of ids.
    """
    return [row[:n].tolist() for row, n in zip(response, lengths)]


@dataclasses.dataclass
class TrainerState:
    """Progress of the run, by the names of transformers' TrainerState: for rewards that change during training."""

    global_step: int = 0
    """Updates done."""
    max_steps: int = 0
    """Updates in all."""
    epoch: float = 0.0
    """Epochs over the prompts so far."""
    num_train_epochs: float = 0.0
    episode: int = 0
    """Episodes trained on."""
    is_eval: bool = False
    """The rows are of an evaluation or of a table of samples, not of training."""
    num_input_tokens_seen: int = 0
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True


@dataclasses.dataclass
class FunctionResults:
    """Results of F functions on B rows."""

    rewards: np.ndarray
    """[B, F] float32, NaN where a function returned None or failed."""
    failed: np.ndarray
    """[B] bool: rows that a failing function could not score (failure='drop')."""
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Duration of each function, by its name."""
    extra: dict[str, list] = dataclasses.field(default_factory=dict)
    """Columns passed to log_extra, B values each; of two with one name, the later function's."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """Mean of the values passed to log_metric, by name."""
    problems: list[str] = dataclasses.field(default_factory=list)
    """A message for each function that failed (failure='drop')."""


def unscored_warning(
    results: FunctionResults, prompts: Sequence, completions: Sequence, columns: Mapping[str, Sequence]
) -> str:
    """A warning if every function returned None for some rows, with their count and the first one; '' otherwise."""
    rows = np.flatnonzero(np.isnan(results.rewards).all(axis=1) & ~results.failed)
    if not len(rows) or not results.rewards.shape[1]:
        return ""
    first = int(rows[0])
    values = "".join(f", {name} {quoted(column[first])}" for name, column in columns.items())
    return (
        f"every reward function returned None for {len(rows)} of {len(results.failed)} rows, which are not trained on. "
        f"{describe_row(first, prompts, completions)}{values}"
    )
