"""Configs in and out of files: a config.py, a name in configs/, a variant of one, a run's config.json.

One type checker serves Python configs, config.json and command-line flags, so that each says the same of a wrong value.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import errno
import functools
import importlib.util
import inspect
import json
import math
import pathlib
import re
import traceback
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from rlhf_jax.config import STAGES, Config, Pipeline, StageConfig, stage_name, trl_options
from rlhf_jax.errors import UserError
from rlhf_jax.utils.text import parse_json, shown

CONFIG_TYPES: dict[str, type] = {**STAGES, "pipeline": Pipeline}
# What computes with the numbers is float32: a larger one would be inf there, a smaller one 0.
_LARGEST, _SMALLEST = float.fromhex("0x1.fffffep+127"), 2.0**-126
_DEEPEST = 50  # dicts and lists in each other


def nearest(name: str, known: Iterable[str], n: int = 3) -> str:
    """' Did you mean a, b?' for the names in `known` closest to `name`, or the empty string."""
    close = difflib.get_close_matches(name, list(known), n=n, cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""


# --- values and their types


@functools.cache
def field_types(config_type: type) -> dict[str, Any]:
    """Field name -> type of a config dataclass, with the annotations evaluated."""
    hints = typing.get_type_hints(config_type)
    return {f.name: hints[f.name] for f in dataclasses.fields(config_type)}


def _alternatives(hint: Any) -> tuple[Any, bool]:
    """(the type without None, whether None is allowed)."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        rest = [a for a in typing.get_args(hint) if a is not type(None)]
        return rest[0], len(rest) < len(typing.get_args(hint))
    return hint, False


def stage_type(hint: Any) -> type[StageConfig] | None:
    """The stage's config class of a pipeline's field (`PPOConfig`, `PPOConfig | None`); None for other types."""
    inner, _ = _alternatives(hint)
    return inner if isinstance(inner, type) and issubclass(inner, StageConfig) else None


def is_dict(hint: Any) -> bool:
    """Whether a field holds a dict: on the command line it is written as JSON."""
    return typing.get_origin(_alternatives(hint)[0]) is dict


def describe_type(hint: Any) -> str:
    """A type in words, for messages: 'a whole number or None', 'one of linear, cosine, constant'."""
    inner, optional = _alternatives(hint)
    if typing.get_origin(inner) is typing.Literal:
        words = "one of " + ", ".join(str(a) for a in typing.get_args(inner))
    elif typing.get_origin(inner) is tuple:
        names = {str: "a list of words", int: "a list of whole numbers", float: "a list of numbers"}
        words = names[typing.get_args(inner)[0]]
    elif stage_type(hint) is not None:
        words = f"a {inner.__name__}"
    elif is_dict(hint):
        words = "a dict of plain values (on the command line JSON: '{\"top_k\": 50}')"
    else:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[inner]
    return words + (" or None" if optional else "")


def checked_value(name: str, hint: Any, value: Any) -> Any:
    """`value` as `hint` wants it; UserError names the option and its type.

    Ints become floats and lists tuples. For a list of words or floats, one alone is a list of one, and the word 'none'
    an empty list.
    """
    wrong = UserError(f"{name} = {shown(value)}: it must be {describe_type(hint)}.")
    inner, optional = _alternatives(hint)
    if value is None:
        if optional:
            return None
        raise wrong
    if typing.get_origin(inner) is typing.Literal:
        allowed = typing.get_args(inner)
        if isinstance(value, bool) or not isinstance(value, str | int) or value not in allowed:
            raise UserError(str(wrong) + nearest(shown(value, 50).strip("'"), map(str, allowed), 1))
        return value
    if typing.get_origin(inner) is tuple:
        of = typing.get_args(inner)[0]
        single = str if of is str else (int, float) if of is float else ()
        if isinstance(value, single) and not isinstance(value, bool):
            value = (value,)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise wrong
        if of is str and [str(v).lower() for v in value] == ["none"]:
            return None if optional else ()
        return tuple(checked_value(name, of, v) for v in value)
    if is_dict(hint):
        if not isinstance(value, dict):
            raise wrong
        return _plain(name, value)
    if inner is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**128 else math.inf
    if not isinstance(value, inner) or (isinstance(value, bool) and inner is not bool):
        raise wrong
    if inner is float and not math.isfinite(value):
        raise UserError(f"{name} = {value!r}: it must be a finite number.")
    if inner is float and value and not _SMALLEST <= abs(value) <= _LARGEST:
        raise UserError(f"{name} = {value!r}: it must be 0 or between {_SMALLEST:.2g} and {_LARGEST:.2g} (float32).")
    if inner is int and abs(value) >= 2**63:
        raise UserError(f"{name} is a number of {value.bit_length()} bits: it must be below 2^63.")
    return value


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """`value` as config.json gives it back (tuples as lists); UserError where it could not."""
    if depth > _DEEPEST:
        raise UserError(f"{name.partition('[')[0]} is nested more than {_DEEPEST} deep, or holds itself.")
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(f"{name}[{key!r}]", item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item, depth + 1) for item in value]
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UserError(f"{name} is a number of {value.bit_length()} bits: it must be below 2^63.")
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise UserError(
        f"{name} = {shown(value)}: it must be plain, as config.json holds it: text, a finite number, true, false, "
        "None, or a list or dict (with text keys) of these."
    )


def value_from_words(name: str, hint: Any, words: Sequence[str]) -> Any:
    """The value that command-line words spell: `3e-6`, `None`, `true`, `a b` or `a,b` for a list."""
    inner, optional = _alternatives(hint)
    is_tuple = typing.get_origin(inner) is tuple
    if is_tuple:
        words = [part for word in words for part in word.split(",") if part]
        if [w.lower() for w in words] == ["none"]:
            return None if optional else ()
        return tuple(value_from_words(name, typing.get_args(inner)[0], [w]) for w in words)
    if is_dict(hint) and words:
        words = [" ".join(words)]
    if inner is bool and not words:
        return True
    if len(words) != 1:
        got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        raise UserError(f"{name} takes one value ({describe_type(hint)}), {got}.")
    word = words[0]
    if optional and word.lower() == "none":
        return None
    if is_dict(hint):
        try:
            return checked_value(name, hint, parse_json(word))
        except json.JSONDecodeError as error:
            raise UserError(f"{name} = {word!r} is not JSON ({error}): it must be {describe_type(hint)}.") from None
    if typing.get_origin(inner) is typing.Literal:
        return checked_value(name, hint, {str(a): a for a in typing.get_args(inner)}.get(word, word))
    if inner is bool:
        return checked_value(name, hint, {"true": True, "1": True, "false": False, "0": False}.get(word.lower(), word))
    try:
        return checked_value(name, hint, inner(word))
    except UserError:
        raise
    except ValueError:
        raise UserError(f"{name} = {word!r}: it must be {describe_type(hint)}.") from None


def checked_types(config: Config, prefix: str = "") -> Config:
    """The config with every field of its declared type; UserError names the first that is not."""
    values = {}
    for name, hint in field_types(type(config)).items():
        value = getattr(config, name)
        stage = stage_type(hint)
        if stage is not None:
            if type(value) is not stage and not (value is None and _alternatives(hint)[1]):
                raise UserError(f"{prefix}{name} must be {describe_type(hint)}, not {type(value).__name__}.")
            values[name] = None if value is None else checked_types(value, f"{name}.")
        else:
            values[name] = checked_value(prefix + name, hint, value)
    return dataclasses.replace(config, **values)


# --- config.json


def to_json(config: Config) -> str:
    """config.json's text: every field, and the stage's name under 'stage'. `from_json` gives the config back."""
    return json.dumps({"stage": stage_name(config), **dataclasses.asdict(config)}, indent=2) + "\n"


def from_json(text: str, source: str = "config.json") -> Config:
    """The config that `to_json` wrote. Absent fields take their defaults; unknown ones are a UserError."""
    try:
        data = parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{source} is not JSON: {error}.") from None
    if not isinstance(data, dict) or data.get("stage") not in list(CONFIG_TYPES):
        got = data.get("stage") if isinstance(data, dict) else type(data).__name__
        raise UserError(
            f"{source} is not a run's config.json: 'stage' must be one of {', '.join(CONFIG_TYPES)}, not {shown(got)}."
        )
    try:
        return _from_dict(CONFIG_TYPES[data.pop("stage")], data, "")
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def _from_dict(config_type: type, data: dict[str, Any], prefix: str) -> Any:
    hints = field_types(config_type)
    values = {}
    for name, value in data.items():
        if name not in hints:
            raise UserError(f"unknown field {prefix}{name}.{_what_became_of(name, config_type)}")
        stage = stage_type(hints[name])
        if stage is not None and not (value is None and _alternatives(hints[name])[1]):
            if not isinstance(value, dict):
                raise UserError(f"{name} must be an object with the stage's fields, not {shown(value)}.")
            values[name] = _from_dict(stage, value, f"{name}.")
        else:
            values[name] = checked_value(prefix + name, hints[name], value)
    return config_type(**values)


# --- config files


def config_folder() -> pathlib.Path:
    """configs/: inside the package when installed, beside it in a checkout."""
    package = pathlib.Path(__file__).resolve().parent.parent
    folders = (package / "configs", package.parent / "configs")
    return next((folder for folder in folders if (folder / "quickstart.py").is_file()), folders[-1])


def shipped_configs() -> dict[str, str]:
    """File name -> first line of its docstring, for every config that comes with the package."""
    lines = {}
    for path in sorted(config_folder().glob("[!_]*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines[path.name] = doc.partition("\n")[0]
    return lines


def load_config(spec: str) -> Config:
    """The config that `--config` names.

    spec: a path to a .py file that defines get_config(variant=None), or a name in configs/ ('tldr_ppo.py', 'tldr_ppo'),
    either with ':VARIANT' behind it; or a run's config.json, or the run's folder. Raises UserError.
    """
    path, variant = pathlib.Path(spec), None
    try:
        path.stat()
    except (OSError, ValueError) as error:  # ValueError: NUL, or half of a surrogate pair
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            raise UserError(f"--config {shown(spec, 200)}: no file can have that name.") from None
    if not path.exists() and ":" in path.name:
        name, _, variant = spec.rpartition(":")
        path = pathlib.Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise UserError(f"--config {spec}: the folder has no config.json.")
    if path.suffix == ".json":
        if variant is not None:
            raise UserError(f"--config {spec}: a config.json has no variants.")
        return from_json(_read(path, spec), str(path))
    if not path.is_file():
        path = _shipped(path, spec)
    config = _run_file(path, variant)
    try:
        return checked_types(config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: get_config returned a config that holds itself.") from None


def _read(path: pathlib.Path, spec: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {spec}: cannot read {path} ({error}).") from None


def _shipped(path: pathlib.Path, spec: str) -> pathlib.Path:
    """The file in configs/ that a bare name means."""
    known = list(shipped_configs())
    name = path.name if path.name in known else f"{path.name}.py"
    if len(path.parts) == 1 and name in known:
        return config_folder() / name
    hint = nearest(path.name, [*known, *(k.removesuffix(".py") for k in known)], 1)
    raise UserError(f"--config {spec}: no such file, and no such config.{hint} Shipped: {', '.join(known)}.")


def _run_file(path: pathlib.Path, variant: str | None) -> Config:
    """Run a config file and return what its get_config(variant) returns, every failure told with file and line."""
    spec = importlib.util.spec_from_file_location(f"rlhf_jax_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config {path}: a config is a .py file or a run's config.json.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise UserError(f"{path} defines no get_config(variant=None) that returns a config.")
        variants = getattr(module, "VARIANTS", {})
        if not isinstance(variants, dict | list | tuple | set | frozenset):
            raise UserError(f"{path}: VARIANTS is of type {type(variants).__name__}; it must be a dict or a list.")
        if variant is not None and variant not in variants:
            known = f"It has {', '.join(map(str, variants))}." if variants else "It has none (no VARIANTS)."
            raise UserError(f"{path.name} has no variant {variant!r}. {known}")
        config = module.get_config() if variant is None else module.get_config(variant)
    except UserError:
        raise
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        raise UserError(f"{path}{where}: {error.msg}.") from None
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # whatever the user's own code raises, sys.exit too
        raise UserError(_explain(path, error)) from error
    if inspect.iscoroutine(config):
        config.close()  # or Python warns that nobody awaited it
    if type(config) not in CONFIG_TYPES.values():
        kinds = ", ".join(t.__name__ for t in CONFIG_TYPES.values())
        raise UserError(f"{path}: get_config returned {type(config).__name__}; it must return one of {kinds}.")
    return config


def _explain(path: pathlib.Path, error: BaseException) -> str:
    """One line on an exception in a config file, with the nearest field where a field's name is unknown."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    where = f"{path}, line {frames[-1].lineno}" if frames else str(path)
    try:
        said = str(error)
    except Exception:  # the user's own class
        said = "(its message cannot be written)"
    text = f"{where}: {type(error).__name__}: {said}."
    if isinstance(error, TypeError) and re.match(r"\w+\.__init__\(\) got an unexpected keyword argument '", said):
        config_name, field = said.split(".")[0], said.rsplit("'", 2)[1]
        known = {t.__name__: t for t in CONFIG_TYPES.values()}.get(config_name)
        return text + (_what_became_of(field, known) if known else "")
    return text


def _what_became_of(field: str, config_type: type) -> str:
    """' It is num_generations here.' for a name of TRL's, else the nearest fields of the config."""
    stage = next((name for name, known in STAGES.items() if known is config_type), None)
    found = trl_options.answer(field, stage) if stage else None
    if found is None:
        return nearest(field, field_types(config_type))
    if found.renamed:
        return f" It is {found.renamed.to} here" + (f": {found.text}." if found.text else ".")
    return f" {found.text}"
