"""An option: a field of a frozen dataclass, with its type and range, and `Metadata` beside them.

One type checker serves Python configs, config.json and command-line flags, so that a wrong value gives the same error
everywhere. The dataclasses are beside what reads them (`generate/options.py`, `data/options.py`, ...), and
`config/stages.py` joins them to the config of a stage.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from rlhf_jax.errors import UserError
from rlhf_jax.utils.text import short_repr

# Computation is in float32: a larger number would become inf, a smaller one 0.
_LARGEST, _SMALLEST = float.fromhex("0x1.fffffep+127"), 2.0**-126
_MAX_DEPTH = 50  # of nested dicts and lists


class Metadata(NamedTuple):
    """What is known of an option.

    Attributes:
      rare: `--help` leaves it out unless the config sets it.
      resume: whether a resume may change it: 'free': it does not change what a run computes, or only what happens when
        it fails; 'rounding': it changes where and in which parts results are computed, which are equal up to rounding;
        'fixed'.
      path: names files, folders or something on the hub.
      in_config_json: False: it differs between the processes of a run and is not a property of the run.
      lowers: the phases whose memory another value lowers, with the option's place among those of the phase, the
        cheapest first.
      like: the class whose option of the same name this one repeats with another default; that one has the help text
        and the rest of the metadata.
    """

    rare: bool = False
    resume: Literal["fixed", "rounding", "free"] = "fixed"
    path: bool = False
    in_config_json: bool = True
    lowers: Mapping[str, int] = {}
    like: type | None = None


def option(default: Any, **metadata: Any) -> Any:
    """A dataclass field with a default and `Metadata`."""
    return dataclasses.field(default=default, metadata={"option": Metadata(**metadata)})


def metadata(config_type: type, name: str) -> Metadata:
    """The metadata of an option, of the nearest class that declares some: a class that overrides a default keeps it."""
    for owner in config_type.__mro__:
        field = getattr(owner, "__dataclass_fields__", {}).get(name)
        if field is not None and "option" in field.metadata:
            declared = field.metadata["option"]
            return declared if declared.like is None else metadata(declared.like, name)._replace(like=declared.like)
    return Metadata()


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one owner. A stage's config inherits those of all owners that it has."""

    def problems(self) -> Iterator[str]:
        """A line for every set of options that exclude each other, or whose values do not fit each other. A class
        that overrides this yields from `super().problems()` first. Values out of range are found before, see
        `out_of_range`."""
        yield from ()


def out_of_range(options: Any) -> Iterator[str]:
    """A line for every option of a dataclass whose value is impossible by itself."""
    ranges = field_ranges(type(options))
    for name, value in vars(options).items():
        if type(value) is int and abs(value) >= 2**31 and name != "seed":
            yield f"{name} is {value}; it must be below 2^31, since steps, rows and tokens are 32-bit integers."
        elif name in ranges and (error := ranges[name].error(name, value)):
            yield error


def nearest(name: str, choices: Iterable[str], n: int = 3) -> str:
    """' Did you mean a, b?' for the names in `choices` closest to `name`, or the empty string."""
    close = difflib.get_close_matches(name, list(choices), n=n, cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""


# --- ranges


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that a number may have: metadata of a field's type, `Annotated[int, Range(...)]`.

    Attributes:
      description: completes 'it must be ...'.
      contains: whether a value is in the range.
    """

    description: str
    contains: Callable[[float], bool]

    def error(self, name: str, value: Any) -> str | None:
        """What is wrong with the value of an option; None if nothing is. None is in every range."""
        if value is None or self.contains(value):
            return None
        return f"{name} is {value}; it must be {self.description}."


PositiveInt = Annotated[int, Range("at least 1", lambda v: v >= 1)]
NonNegativeInt = Annotated[int, Range("at least 0", lambda v: v >= 0)]
PositiveFloat = Annotated[float, Range("above 0", lambda v: v > 0)]
NonNegativeFloat = Annotated[float, Range("at least 0", lambda v: v >= 0)]
Fraction = Annotated[float, Range("between 0 and 1", lambda v: 0 <= v <= 1)]
Decay = Annotated[float, Range("at least 0 and below 1", lambda v: 0 <= v < 1)]
StepsOrFraction = Annotated[
    float,
    Range(
        "0 (only at the end), between 0 and 1 (a fraction of the run) or a whole number of updates below 2^31",
        lambda v: 0 <= v < 1 or (1 <= v < 2**31 and float(v).is_integer()),
    ),
]

Seed = Annotated[int, Range("at least 0 and below 2^32", lambda v: 0 <= v < 2**32)]
TopP = Annotated[float, Range("above 0 and at most 1", lambda v: 0 < v <= 1)]


def _field_ranges(config_type: type) -> dict[str, Range]:
    """Field name -> its Range, for the fields of a config dataclass that have one."""
    ranges: dict[str, Range] = {}
    for name, hint in typing.get_type_hints(config_type, include_extras=True).items():
        parts = (hint, *typing.get_args(hint))  # Annotated[...] or Annotated[...] | None
        metadata = [extra for part in parts for extra in getattr(part, "__metadata__", ())]
        ranges.update((name, extra) for extra in metadata if isinstance(extra, Range))
    return ranges


# --- types


def _field_types(config_type: type) -> dict[str, Any]:
    """Field name -> type of a config dataclass, without ranges."""
    hints = typing.get_type_hints(config_type)
    return {f.name: hints[f.name] for f in dataclasses.fields(config_type)}


# Not decorated: mypy takes no class of dataclasses as the argument of a cached function.
field_types: Callable[[type], dict[str, Any]] = functools.cache(_field_types)
field_ranges: Callable[[type], dict[str, Range]] = functools.cache(_field_ranges)


def without_none(hint: Any) -> tuple[Any, bool]:
    """(the type without None, whether None is allowed)."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        rest = [a for a in typing.get_args(hint) if a is not type(None)]
        return rest[0], len(rest) < len(typing.get_args(hint))
    return hint, False


def list_or_word(hint: Any) -> tuple[str, ...]:
    """The words that a field takes in place of its list: `tuple[int, ...] | Literal["word"]`; of other types, none."""
    inner, _ = without_none(hint)
    if typing.get_origin(inner) is not tuple:
        return ()
    literals = [part for part in typing.get_args(hint) if typing.get_origin(part) is typing.Literal]
    return tuple(word for part in literals for word in typing.get_args(part))


def stage_type(hint: Any) -> type | None:
    """The stage's config class of a pipeline's field (`PPOConfig`, `PPOConfig | None`); None for other types."""
    inner, _ = without_none(hint)
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def is_dict(hint: Any) -> bool:
    """Whether a field holds a dict: on the command line it is written as JSON."""
    return typing.get_origin(without_none(hint)[0]) is dict


def is_json(hint: Any) -> bool:
    """Whether a field holds a dict or a list of dicts: on the command line they are written as JSON."""
    inner, _ = without_none(hint)
    return is_dict(hint) or (typing.get_origin(inner) is tuple and is_dict(typing.get_args(inner)[0]))


def describe_type(hint: Any) -> str:
    """A type in words, for messages: 'a whole number or None', 'one of linear, cosine, constant'."""
    inner, optional = without_none(hint)
    if typing.get_origin(inner) is typing.Literal:
        words = "one of " + ", ".join(str(a) for a in typing.get_args(inner))
    elif is_json(hint) and not is_dict(hint):
        words = 'a list of dicts of plain values (on the command line JSON: \'[{"path": "posts.jsonl"}]\')'
    elif typing.get_origin(inner) is tuple:
        names = {str: "a list of words", int: "a list of whole numbers", float: "a list of numbers"}
        words = " or ".join((names[typing.get_args(inner)[0]], *map(repr, list_or_word(hint))))
    elif stage_type(hint) is not None:
        words = f"a {inner.__name__}"
    elif is_dict(hint):
        words = "a dict of plain values (on the command line JSON: '{\"top_k\": 50}')"
    else:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[inner]
    return words + (" or None" if optional else "")


def checked_types(config: Any, prefix: str = "") -> Any:
    """The config with every field of its declared type; UserError names the first that is not."""
    values = {}
    for name, hint in field_types(type(config)).items():
        value = getattr(config, name)
        stage = stage_type(hint)
        if stage is None:
            values[name] = checked_value(prefix + name, hint, value)
        elif type(value) is stage:
            values[name] = checked_types(value, f"{name}.")
        elif value is not None or not without_none(hint)[1]:
            raise UserError(f"{prefix}{name} must be {describe_type(hint)}, not {type(value).__name__}.")
    return dataclasses.replace(config, **values)


def checked_value(name: str, hint: Any, value: Any) -> Any:
    """`value` converted to type `hint`; UserError names the option and its type.

    Ints become floats and lists tuples. For a list of words or floats, a single one becomes a list of one, and the word
    'none' an empty list.
    """
    wrong = UserError(f"{name} = {short_repr(value)}: it must be {describe_type(hint)}.")
    inner, optional = without_none(hint)
    if value is None:
        if optional:
            return None
        raise wrong
    if typing.get_origin(inner) is typing.Literal:
        allowed = typing.get_args(inner)
        if isinstance(value, bool) or not isinstance(value, str | int) or value not in allowed:
            raise UserError(str(wrong) + nearest(short_repr(value, 50).strip("'"), map(str, allowed), 1))
        return value
    if typing.get_origin(inner) is tuple:
        if isinstance(value, str) and value in list_or_word(hint):
            return value
        item_type = typing.get_args(inner)[0]
        single = str if item_type is str else (int, float) if item_type is float else ()
        if isinstance(value, single) and not isinstance(value, bool):
            value = (value,)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise wrong
        if item_type is str and [str(v).lower() for v in value] == ["none"]:
            return None if optional else ()
        return tuple(checked_value(name, item_type, v) for v in value)
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
    if inner is int:
        _check_bits(name, value)
    return value


def _check_bits(name: str, value: int) -> None:
    if abs(value) >= 2**63:
        raise UserError(f"{name} is a number of {value.bit_length()} bits: it must be below 2^63.")


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """`value` as config.json returns it (tuples become lists); UserError if JSON cannot hold it."""
    if depth > _MAX_DEPTH:
        raise UserError(f"{name.partition('[')[0]} is nested more than {_MAX_DEPTH} deep, or contains itself.")
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(f"{name}[{key!r}]", item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item, depth + 1) for item in value]
    if isinstance(value, int):
        _check_bits(name, value)
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise UserError(
        f"{name} = {short_repr(value)}: it must be plain, so that config.json can hold it: text, a finite number, "
        "true, false, None, or a list or dict (with text keys) of these."
    )
