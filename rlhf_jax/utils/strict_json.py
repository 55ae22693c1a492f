"""Strict JSON: every digit of a number kept, NaN and the infinities as strings, no terminal control characters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

# json.dumps escapes characters below the blank. These others may stand inside strings only, where \uXXXX is the same
# character: control and direction marks, and surrogate halves, which have no UTF-8 form.
_ESCAPED = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def json_value(x: Any) -> Any:
    """A scalar as strict JSON holds it: NaN and the infinities become 'NaN', 'Infinity' and '-Infinity'.

    Args:
      x: a Python, numpy or host jax scalar, a string or None.

    Returns:
      bool, int, float, str or None. `float()` of the three strings gives the number back.
    """
    if isinstance(x, (str, bool)) or x is None:
        return x
    x = np.asarray(x)
    if x.ndim:
        raise TypeError(f"a JSON number must be a scalar; got shape {x.shape}")
    x = x.item()
    if not isinstance(x, float) or math.isfinite(x):
        return x
    return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"


def json_text(value: Any, indent: int | None = None, default: Callable[[Any], str] | None = None) -> str:
    """Strict JSON of nested dicts and lists, their scalars converted by `json_value`.

    Args:
      value: dicts, lists, tuples and numpy arrays of scalars and strings.
      default: text of a value of another type; None: it is a TypeError.

    Returns:
      The text, without a line end.
    """

    def convert(x):
        if isinstance(x, dict):
            return {str(k): convert(v) for k, v in x.items()}
        if getattr(x, "ndim", 0):
            x = x.tolist()
        return [convert(v) for v in x] if isinstance(x, (list, tuple)) else json_value(x)

    text = json.dumps(convert(value), indent=indent, ensure_ascii=False, allow_nan=False, default=default)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def with_floats(row: dict[str, Any]) -> dict[str, Any]:
    """'NaN', 'Infinity' and '-Infinity' among a dict's values as floats again."""
    return {k: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()}
