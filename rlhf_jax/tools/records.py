"""Results of tools on disk, before the policy reads them: a resume makes no recorded call again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlhf_jax import storage
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
      folder: local, with the records of all processes of the run.
      replay: folder of another run, whose results are taken in place of calls; None: calls are made.

    Raises:
      UserError: a line is no record, or `replay` has none.
    """

    def __init__(self, folder: str, process: int, replay: str | None = None):
        self._replay = replay
        self._path = os.path.join(folder, f"tools.{process}.jsonl" if process else "tools.jsonl")
        self._calls: dict[Place, RecordedCall] = {}
        self._replayed: dict[Place, RecordedCall] = {}
        for path in recordings(folder):
            self._read(path, self._calls)
        for path in () if replay is None else replayed(replay):
            self._read(path, self._replayed)

    def _read(self, path: str, calls: dict[Place, RecordedCall]) -> None:
        """Takes over a file, without a last line that is cut off."""
        with open(path, "rb") as file:
            content = file.read()
        complete_lines = content[: content.rfind(b"\n") + 1]
        if path == self._path and len(complete_lines) < len(content):
            os.truncate(path, len(complete_lines))
        for number, line in enumerate(complete_lines.decode("utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                calls[Place(*(record.pop(name) for name in Place._fields))] = record
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{path}, line {number} is no record of a call: remove the line") from error

    def find(self, place: Place, function: Mapping[str, Any]) -> RecordedCall | None:
        """What a call returned before; None: it was not made.

        Raises:
          UserError: another call is recorded in its place, or the run to replay has none there.
        """
        recorded = self._calls.get(place) or self._replayed.get(place)
        if recorded is None:
            if self._replay is not None:
                raise UserError(
                    f"tools_replay: {_named(place)} calls {function['name']!r}, but {self._replay} has no call there: "
                    "it ended before, or has other options"
                )
            return None
        ours, theirs = ((call["name"], call["arguments"]) for call in (function, recorded))
        if ours != theirs:
            raise UserError(
                f"{_named(place)}: the policy calls {ours!r:.200}, but {theirs!r:.200} is recorded: the run does not "
                f"go on as it was, with other versions or on another machine perhaps. {self._advice(place)} to make "
                "the calls again"
            )
        return recorded

    def add(self, place: Place, call: RecordedCall) -> None:
        """Writes a call that is not recorded yet, and waits until it is on disk.

        Raises:
          UserError: an environment, whose calls are repeated, did not return what is recorded.
        """
        recorded = self._calls.get(place) or self._replayed.get(place)
        if recorded is not None and recorded["content"] != call["content"]:
            raise UserError(
                f"{_named(place)}: {call['name']} of the environment returned {call['content']!r:.200}, but "
                f"{recorded['content']!r:.200} is recorded: environments are reset and their calls repeated, which "
                f"must return the same. {self._advice(place)} to go on with what they return now"
            )
        if place in self._calls:
            return
        self._calls[place] = call
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({**place._asdict(), **call}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _advice(self, place: Place) -> str:
        return f"Remove {self._path}" if place in self._calls else "Leave out tools_replay"


def recordings(folder: str) -> list[str]:
    """The files of records in a run's folder."""
    return [os.path.join(folder, name) for name in sorted(filter(NAMES.fullmatch, os.listdir(folder)))]


def replayed(folder: str) -> list[str]:
    """Local files of the records of a run to replay. Raises a UserError where there are none."""
    local = storage.local_copy(folder, ("tools*.jsonl",))
    paths = recordings(local) if os.path.isdir(local) else []
    if not paths:
        raise UserError(f"tools_replay: {folder} has no tools.jsonl: give the folder of a run that called tools")
    return paths


def _named(place: Place) -> str:
    return f"{place.at}, row {place.row}, turn {place.turn + 1}"
