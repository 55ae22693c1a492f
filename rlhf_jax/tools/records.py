"""Results of tools on disk, before the policy reads them: a resume makes no recorded call again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlhf_jax.errors import UserError

RecordedCall = dict[str, Any]
"""{"name", "arguments", "content": what the policy read, "failed", "last": whether it comes after those of plain
functions}"""
NAMES = re.compile(r"tools(?:\.\d+)?\.jsonl")
"""Of the files of records in a run's folder."""


class Place(NamedTuple):
    """Of a call: which responses of the run, the row among them, its turn, and the number of the call in the turn."""

    at: str
    row: int
    turn: int
    number: int


class ToolRecords:
    """tools.jsonl of a run's folder, and tools.N.jsonl of its process N: a line for each call, its `Place` and its
    `RecordedCall`.

    Args:
      folder: of the run, which all processes see.
      process: of this process.

    Raises:
      UserError: a line is no record.
    """

    def __init__(self, folder: str, process: int):
        self._path = os.path.join(folder, f"tools.{process}.jsonl" if process else "tools.jsonl")
        self._calls: dict[Place, RecordedCall] = {}
        for name in sorted(filter(NAMES.fullmatch, os.listdir(folder))):
            self._read(os.path.join(folder, name))

    def _read(self, path: str) -> None:
        """Takes over a file, without a last line that is cut off."""
        with open(path, "rb") as file:
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if path == self._path and len(whole) < len(content):
            os.truncate(path, len(whole))
        for number, line in enumerate(whole.decode("utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                self._calls[Place(*(record.pop(name) for name in Place._fields))] = record
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{path}, line {number} is no record of a call: remove the line") from error

    def find(self, place: Place, function: Mapping[str, Any]) -> RecordedCall | None:
        """What a call returned before; None: it was not made.

        Raises:
          UserError: another call is recorded in its place.
        """
        recorded = self._calls.get(place)
        if recorded is None:
            return None
        ours, theirs = ((call["name"], call["arguments"]) for call in (function, recorded))
        if ours != theirs:
            raise UserError(
                f"{place.at}, row {place.row}, turn {place.turn + 1}: the policy calls {ours!r:.200}, but "
                f"{theirs!r:.200} is recorded: the run does not go on as it was, with other versions or on another "
                f"machine perhaps. Remove {self._path} to make the calls again"
            )
        return recorded

    def add(self, place: Place, call: RecordedCall) -> None:
        """Writes a call that is not recorded yet, and waits until it is on disk.

        Raises:
          UserError: an environment, whose calls are repeated, did not return what is recorded.
        """
        recorded = self._calls.get(place)
        if recorded is not None:
            if recorded["content"] != call["content"]:
                raise UserError(
                    f"{place.at}, row {place.row}, turn {place.turn + 1}: {call['name']} of the environment returned "
                    f"{call['content']!r:.200}, but {recorded['content']!r:.200} is recorded: a resume resets "
                    "environments and repeats their calls, which must return the same. Remove "
                    f"{self._path} to go on with what they return now"
                )
            return
        self._calls[place] = call
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({**place._asdict(), **call}) + "\n")
            file.flush()
            os.fsync(file.fileno())
