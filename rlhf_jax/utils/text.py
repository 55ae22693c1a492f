"""Untrusted text made safe to print, JSON of any size and depth, and numbers formatted for people."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

import numpy as np

MAX_MESSAGE_LENGTH = 20_000
"""In characters."""
_KEPT = frozenset("\n\t\u200c\u200d\u00ad")  # joiners are part of words and emoji
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_SUSPECT = re.compile(r"[^\x20-\x7e\n]")
_QUERY = re.compile(r"(://[^\s?#]*)[?#]\S*")
_PASSWORD = re.compile(r"(?<=://)[^\s/?#]*@")


def printable(text: str) -> str:
    """The text with characters that a terminal would execute or cannot show replaced by escapes such as \\x1b, \\u202e
    and \\ud800: control characters but line ends and tabs (escape sequences move the cursor, set titles, fill the
    clipboard), marks that change the direction of text, and unpaired surrogates."""

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
            return character
        code = ord(character)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return _SUSPECT.sub(escape, text)


def error_message(text: str) -> str:
    """An error's text: `printable`, its middle cut beyond MAX_MESSAGE_LENGTH, user and password of URLs as ***."""
    if len(text) > MAX_MESSAGE_LENGTH:
        text = f"{text[: MAX_MESSAGE_LENGTH // 2]} ... {text[-MAX_MESSAGE_LENGTH // 2 :]}"
    return _PASSWORD.sub("***@", printable(text))


def has_password(text: str) -> bool:
    """Whether the text contains a URL with a user or a password."""
    return _PASSWORD.search(text) is not None


def redact_queries(value: Any) -> Any:
    """Strings, also in lists and dicts, with the query of a URL, which may hold a secret, replaced by `?...`."""
    if isinstance(value, str):
        return _QUERY.sub(r"\1?...", value)
    if isinstance(value, dict):
        return {key: redact_queries(item) for key, item in value.items()}
    return [redact_queries(item) for item in value] if isinstance(value, list | tuple) else value


def short_repr(value: Any, limit: int = 2000) -> str:
    """repr of a value, its middle cut beyond `limit` characters; the name of its type if repr fails."""
    try:
        text = repr(value)
    except Exception:  # __repr__ may be user code
        return f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def parse_json(text: str | bytes) -> Any:
    """json.loads with one error type, also for deep nesting and for integers with too many digits.

    Raises:
      json.JSONDecodeError: the text is not valid JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("Nested too deeply", "", 0) from None
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError(f"Not UTF-8 ({error.reason})", "", 0) from None
    except ValueError:  # Python's limit on the digits of an integer
        raise json.JSONDecodeError("A number with too many digits", "", 0) from None


def written_forms(value: Any) -> tuple[str, ...]:
    """The texts that a value may have been read from, the plainest last: '7' of 7, '7.0' and '7' of 7.0, 'True' and
    'true' of True, '' of None."""
    if value is None:
        return ("",)
    if isinstance(value, bool):
        return str(value), str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(value), str(int(value))
    return (str(value),)


def duration(seconds: float) -> str:
    """Seconds for people: 3.2s, 4m10s, 2h05m, 3d04h."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 60:
        return f"{minutes}m{int(seconds) % 60:02d}s"
    return f"{hours}h{minutes % 60:02d}m" if hours < 24 else f"{days}d{hours % 24:02d}h"


def bytes_text(count: float) -> str:
    """Bytes as text: '12.3 MiB'."""
    unit = 30 if count >= 2**30 else 20 if count >= 2**20 else 10
    return f"{count / 2**unit:,.1f} {'KMG'[unit // 10 - 1]}iB"


def short_number(x: Any) -> str:
    """A number in at most 4 significant digits, for the terminal."""
    if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
        return str(x)
    return f"{float(x):.4g}"
