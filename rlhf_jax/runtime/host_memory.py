"""Returns to the system what this process has freed."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def _malloc_trim():
    """glibc's malloc_trim, or None with another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def trim() -> None:
    """Returns freed memory to the system: glibc keeps what lies between blocks that are in use.

    Without glibc nothing happens.
    """
    if (malloc_trim := _malloc_trim()) is not None:
        malloc_trim(0)
