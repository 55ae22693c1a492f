"""Seconds that each test took, recorded at the end of a session of pytest: the next one begins with the slowest files.

    python -m tests.helpers.durations    # writes the slowest of those of this machine to tests/durations.json

tests/durations.json serves where no session has ended yet.
"""

import collections
import contextlib
import json
import pathlib
from collections.abc import Mapping

import filelock
import pytest

from rlhf_jax.storage import write_atomically
from tests.helpers import programs
from tests.helpers.paths import ROOT

COMMITTED = ROOT / "tests" / "durations.json"
SLOW, MOST = 5.0, 150  # seconds of a test that is committed, and how many are: below 20 KB

Seconds = Mapping[str, float]  # of each test, by its id


def recorded() -> pathlib.Path:
    """The file of this machine, beside the compiled programs."""
    return programs.folder().parent / "durations.json"


def read(path: pathlib.Path) -> dict[str, float]:
    """The seconds in a file; none if there is no such file, or none that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def write(path: pathlib.Path, seconds: Seconds) -> None:
    """Writes seconds in the order of the ids, a test a line."""
    write_atomically(str(path), json.dumps(dict(sorted(seconds.items())), indent=0) + "\n")


def exists(test: str) -> bool:
    """Whether the file of a test has a function of its name: the record of a machine also has tests of earlier
    versions."""
    file, _, name = test.partition("::")
    path = ROOT / file
    return path.is_file() and f"def {name.partition('[')[0]}(" in path.read_text(encoding="utf-8")


def record(path: pathlib.Path, seconds: Seconds) -> None:
    """Puts the seconds of a session into a file; those of tests that it did not run stay. A folder that cannot be
    written to is no error: the record only orders tests."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock"):
            write(path, {**read(path), **{test: round(value, 2) for test, value in seconds.items()}})


def slowest_files_first(items: list, seconds: Seconds) -> None:
    """Sorts tests by the seconds of their files, those of a file in their order: workers take whole files, and a slow
    one that comes last would run alone."""
    of_files = collections.Counter()
    for item in items:
        of_files[item.path] += seconds.get(item.nodeid, 0.0)
    items.sort(key=lambda item: -of_files[item.path])


class Durations:
    """The plugin of pytest that orders by one record and writes the next.

    The workers of a session must collect in one order, so they get the seconds from the process that started them: a
    session beside this one may write in between.
    """

    def __init__(self, config: pytest.Config):
        self.is_worker = hasattr(config, "workerinput")
        self.before = config.workerinput["durations"] if self.is_worker else {**read(COMMITTED), **read(recorded())}
        self.seconds = collections.Counter()

    @pytest.hookimpl(optionalhook=True)  # of xdist
    def pytest_configure_node(self, node):
        node.workerinput["durations"] = self.before

    @pytest.hookimpl(trylast=True)  # after tests that -m and -k leave out
    def pytest_collection_modifyitems(self, items):
        slowest_files_first(items, self.before)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self):
        if not self.is_worker:
            record(recorded(), self.seconds)


if __name__ == "__main__":
    slow = {test: value for test, value in read(recorded()).items() if value >= SLOW and exists(test)}
    write(COMMITTED, dict(sorted(slow.items(), key=lambda test: -test[1])[:MOST]))
