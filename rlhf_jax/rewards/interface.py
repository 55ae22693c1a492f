"""Scores of a rollout: by reward models and JAX functions on the device, by Python functions and servers on the host.

Here: reward functions as such, found by name, named and marked, and what counts as a reward. functions.py calls Python
functions, remote.py a server.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.errors import UserError

RewardFunction = Callable[..., Any]

FORMS = "Give 'module:function', 'file.py:function' or 'package.module.function'"
KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What every function is offered, a column of the same name notwithstanding."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class RewardFailure(UserError):
    """A reward function or server gave no usable reward for a row. Names it, the row, and what came instead."""


# --- names and marks


def unwrap_partial(function: Any) -> Any:
    """What a functools.partial wraps; anything else as it is."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def function_name(function: RewardFunction) -> str:
    """The name that messages and metrics use: __name__, of a partial that of what it wraps; an object's `name` if that
    is text, else its class's."""
    function = unwrap_partial(function)
    name = getattr(function, "__name__", None) or getattr(function, "name", None)
    return name if isinstance(name, str) and name else type(function).__name__


def unique_names(functions: Sequence[RewardFunction]) -> tuple[str, ...]:
    """A name for the metrics of each function, see `function_name`; equal ones are numbered."""
    return number_duplicates(map(function_name, functions))


def number_duplicates(given: Iterable[str]) -> tuple[str, ...]:
    """The same names, equal ones as name, name_2, name_3."""
    names: list[str] = []
    for base in given:
        name = base
        number = 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return tuple(names)


def jax_reward(function: Callable) -> Callable:
    """Marks a pure JAX function: it is compiled into the scoring of a rollout, and no row leaves the device.

    Args:
      function: (tokens [B, T] int32, the response; lengths [B] int32, 0..T, the stop token included) -> [B], or [B, T]
        for a reward a token.

    Returns:
      The function.
    """
    try:
        function._is_jax_reward = True
    except AttributeError:  # bound methods and builtins take no attributes
        return jax_reward(lambda tokens, lengths: function(tokens, lengths))
    return function


def is_jax_reward(function: Any) -> bool:
    """Whether `jax_reward` marked the function, or what its partial wraps."""
    return getattr(function, "_is_jax_reward", False) or getattr(unwrap_partial(function), "_is_jax_reward", False)


@dataclasses.dataclass(frozen=True)
class Signature:
    """Keywords that a function takes (None: any), and those that it must get."""

    takes: frozenset[str] | None
    needs: frozenset[str]

    @classmethod
    def of(cls, function: Any, name: str) -> Signature:
        """UserError where keywords cannot reach the function."""
        advice = "Wrap it: def reward(prompts, completions, **columns): ..."
        if inspect.isclass(function):
            raise UserError(f"reward function {name} is a class: give an instance, {name}()")
        if not callable(function):
            raise UserError(f"reward function {name} of type {type(function).__name__} cannot be called")
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            raise UserError(f"reward function {name}: Python cannot tell what arguments it takes. {advice}") from None
        if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
            raise UserError(
                f"reward function {name} takes {', '.join(positional)} by position only, but rewards are called with "
                f"keywords. {advice}"
            )
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        needs = frozenset(p.name for p in named if p.default is p.empty)
        return cls(None if takes_any else frozenset(p.name for p in named), needs)


def is_async(function: Any) -> bool:
    """Whether a call gives a coroutine: `async def`, an object whose __call__ is, a partial of either."""
    function = unwrap_partial(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


# --- functions by name


def resolve(spec: str) -> Callable:
    """The function that `spec` names: 'module:function', 'file.py:function' or TRL's 'package.module.function'.

    Modules are looked for in the working folder too, last. A file's imports are looked for in its own folder too; two
    functions of one file share one module. A class is instantiated without arguments.

    Raises:
      UserError: no such module, file or name (with the nearest), an exception on the way (with its line), no function.
    """
    place, _, name = spec.rpartition(":" if ":" in spec else ".")
    if not place or not name or spec.endswith(".py"):
        raise UserError(f"reward function {spec!r} names no function in a module. {FORMS}")
    found = _load_file(spec, place) if place.endswith(".py") else _load_module(spec, place)
    for part in name.split("."):
        if not hasattr(found, part):
            own = getattr(found, "__dict__", {})
            known = [key for key, value in own.items() if callable(value) and not key.startswith("_")]
            has = _nearest(part, known) or (f" It has {', '.join(known[:8])}." if known else "")
            raise UserError(f"reward function {spec!r}: {place} has no {part!r}.{has}")
        found = getattr(found, part)
    if inspect.isclass(found):
        found = _attempt(spec, f"{name}() failed", found)
    if not callable(found):
        raise UserError(f"reward function {spec!r}: {name} is of type {type(found).__name__} and cannot be called")
    return found


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _attempt(spec: str, what: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except SyntaxError as error:
        raise UserError(f"reward function {spec!r}: {error.filename}, line {error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"reward function {spec!r}: {what}: {describe_error(error)}") from error


def _load_module(spec: str, name: str) -> Any:
    _look_in(os.getcwd())
    importlib.invalidate_caches()  # the file may be newer than Python's list of the folder
    try:
        missing = name not in sys.modules and importlib.util.find_spec(name) is None
    except ModuleNotFoundError as error:  # of the module or a parent; of another one it is the parent's code that fails
        missing = error.name is None or f"{name}.".startswith(f"{error.name}.")
    except (ImportError, ValueError):
        missing = True
    except Exception:  # the parent's code fails, and will below
        missing = False
    if not missing:
        return _attempt(spec, f"importing {name} failed", lambda: importlib.import_module(name))
    parent, _, last = name.rpartition(".")
    paths = getattr(sys.modules.get(parent), "__path__", ()) if parent else None
    near = _nearest(last, (found.name for found in pkgutil.iter_modules(paths)))
    if os.path.isfile(f"{name}.py"):
        near = f" Did you mean {name}.py:{spec[len(name) + 1 :]}?"
    raise UserError(f"reward function {spec!r}: there is no module {name!r}.{near} {FORMS}")


def _load_file(spec: str, place: str) -> Any:
    path = pathlib.Path(place).expanduser().resolve()
    if not path.is_file():
        near = _nearest(path.name, (other.name for other in path.parent.glob("*.py")))
        raise UserError(f"reward function {spec!r}: there is no file {path}.{near}")
    name = f"{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    version = path.stat().st_mtime_ns, path.stat().st_size
    if getattr(sys.modules.get(name), "__version_of_file__", None) == version:
        return sys.modules[name]
    _look_in(str(path.parent))
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        _attempt(spec, f"importing {path} failed", lambda: module_spec.loader.exec_module(module))
    except BaseException:
        del sys.modules[name]
        raise
    module.__version_of_file__ = version
    return module


def _look_in(folder: str) -> None:
    # For good, as a function may import when it is called; last, so that nothing installed is hidden.
    if folder not in sys.path and not ("" in sys.path and folder == os.getcwd()):
        sys.path.append(folder)


# --- for messages


def describe_error(error: BaseException) -> str:
    """'TypeError: what it says (file.py, line 3)': the innermost line that is neither ours nor installed."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    installed = [sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")] + ["<frozen"]
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if os.path.dirname(frame.filename) != os.path.dirname(__file__)]
    own = [frame for frame in frames if not frame.filename.startswith(tuple(installed))] or frames
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}".rstrip(": ") + where


def quoted(value: Any, limit: int = 200) -> str:
    """A value for a message, its middle left out beyond `limit` characters."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-(limit // 2) :]}"
    return repr(text) if isinstance(value, str) else text


def describe_row(row: int, prompts: Sequence, completions: Sequence) -> str:
    """A row for a message: its prompt shortened to about 200 characters, its completion to 2,000."""
    return f"Row {row}: prompt {quoted(prompts[row])}, completion {quoted(completions[row], 2000)}"


# --- rewards


def as_number(value: Any) -> float:
    """A finite float32 as a float, of a number, a bool or an array without dimensions; None is NaN: 'not applicable'.

    Raises:
      ValueError: text, NaN, infinity, more than float32 holds, a complex or other object.
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
    """The tokens of each response, its stop token included, its fill left out.

    Args:
      response: [B, T] int.
      lengths: [B] int.

    Returns:
      B lists of ids.
    """
    return [row[:n].tolist() for row, n in zip(response, lengths)]


@dataclasses.dataclass
class TrainerState:
    """Where the run is, by the names of transformers' TrainerState: for rewards that change as training goes on."""

    global_step: int = 0
    """Updates done."""
    max_steps: int = 0
    """Updates in all."""
    epoch: float = 0.0
    """Passes over the prompts so far."""
    num_train_epochs: float = 0.0
    episode: int = 0
    """Responses learned from."""
    is_eval: bool = False
    """The rows are those of an evaluation or of a table of samples, not of training."""
    num_input_tokens_seen: int = 0
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True


@dataclasses.dataclass
class FunctionResults:
    """What F functions said of B rows."""

    rewards: np.ndarray
    """[B, F] float32, NaN where a function said None or failed."""
    failed: np.ndarray
    """[B] bool: rows that a failing function could not score (failure='drop')."""
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """How long each function took, by its name."""
    extra: dict[str, list] = dataclasses.field(default_factory=dict)
    """Columns given to log_extra, B values each; where two functions give one, the later function's."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """Mean of the values given to log_metric, by name."""
    problems: list[str] = dataclasses.field(default_factory=list)
    """A message for each function that failed (failure='drop')."""


def unscored_warning(
    called: FunctionResults, prompts: Sequence, completions: Sequence, columns: Mapping[str, Sequence]
) -> str:
    """A message when every function said None of some rows, '' otherwise: the count, and the first one whole."""
    rows = np.flatnonzero(np.isnan(called.rewards).all(axis=1) & ~called.failed)
    if not len(rows) or not called.rewards.shape[1]:
        return ""
    first = int(rows[0])
    values = "".join(f", {name} {quoted(column[first])}" for name, column in columns.items())
    return (
        f"every reward function returned None for {len(rows)} of {len(called.failed)} rows, which teach nothing. "
        f"{describe_row(first, prompts, completions)}{values}"
    )
