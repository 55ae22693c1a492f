"""Options of earlier versions, which config.json of their runs still has."""

from __future__ import annotations

from typing import Any, NamedTuple


class Removed(NamedTuple):
    """An option of earlier versions."""

    value: Any  # what every run does now
    reason: str


REMOVED = {
    "metrics": Removed("correct", "It was removed: runs log what was metrics='correct'."),
    **dict.fromkeys(
        ("ref_model_revision", "value_model_revision"),
        Removed("main", "It was removed: download the revision (hf download --revision) and give its folder."),
    ),
    "dataset_streaming": Removed(False, "It was removed: a stream has no random access, so no run could use it."),
}


def is_removed(name: str, value: Any) -> bool:
    """Whether an option is one of earlier versions, at a value that changes nothing now."""
    removed = REMOVED.get(name)
    return removed is not None and removed.value == value
