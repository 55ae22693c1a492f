"""Packages whose names are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def attributes(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that imports jax, tokenizers or checkpoints only for those who use them: its
    options are read by `--help`, which imports none of these.

    Args:
      package: `__name__` of the package.
      homes: module in the package that has a name, by that name.
    """

    def attribute(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute
