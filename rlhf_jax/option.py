"""What an option is beside its type and its help: declared once, where the option is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


class Metadata(NamedTuple):
    """What is known of an option.

    Attributes:
      rare: `--help` leaves it out unless the config sets it.
      resume: whether a resume may change it: 'free': it does not change what a run computes, or only what happens when
        it fails; 'rounding': it changes where and in which parts results are computed, which are equal up to rounding;
        'fixed'.
      path: names files, folders or something on the hub.
      in_config_json: False: it is no property of the run and differs between its processes.
      lowers: the phases whose memory another value lowers, with the option's place among those of the phase, the
        cheapest first.
    """

    rare: bool = False
    resume: Literal["fixed", "rounding", "free"] = "fixed"
    path: bool = False
    in_config_json: bool = True
    lowers: Mapping[str, int] = {}


def option(default: Any, **metadata: Any) -> Any:
    """A dataclass field with a default and `Metadata`."""
    return dataclasses.field(default=default, metadata={"option": Metadata(**metadata)})


def metadata(config_type: type, name: str) -> Metadata:
    """The metadata of an option, of the nearest class that declares some: a class that overrides a default keeps it."""
    for owner in config_type.__mro__:
        field = getattr(owner, "__dataclass_fields__", {}).get(name)
        if field is not None and "option" in field.metadata:
            return field.metadata["option"]
    return Metadata()
