"""Results of tools on disk: what is recorded is not called again."""

import json

import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.tools.records import Place, ToolRecords
from rlhf_jax.tools.toolbox import Toolbox

CALL = {"name": "add", "arguments": {"a": 1}, "content": "1", "failed": False, "last": False}
FIRST, SECOND = Place("update 1", 3, 0, 0), Place("update 1", 3, 0, 1)


def test_a_call_is_a_line_on_disk_once(tmp_path):
    records = ToolRecords(str(tmp_path), 0)
    assert not (tmp_path / "tools.jsonl").exists() and records.find(FIRST, CALL) is None
    for place in (FIRST, SECOND, FIRST):  # again, by a resume
        records.add(place, CALL)
    lines = [json.loads(line) for line in (tmp_path / "tools.jsonl").read_text().splitlines()]
    assert lines == [{"at": "update 1", "row": 3, "turn": 0, "number": n, **CALL} for n in (0, 1)]
    again = ToolRecords(str(tmp_path), 0)
    assert again.find(FIRST, CALL) == again.find(SECOND, CALL) == CALL
    assert again.find(Place("update 2", 3, 0, 0), CALL) is None


def test_a_process_reads_what_all_have_recorded_and_writes_its_own_file(tmp_path):
    one, other = (ToolRecords(str(tmp_path), process) for process in (0, 1))
    one.add(FIRST, CALL)
    other.add(SECOND, CALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tools.1.jsonl", "tools.jsonl"]
    for process in range(3):
        assert all(ToolRecords(str(tmp_path), process).find(place, CALL) == CALL for place in (FIRST, SECOND))


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_line_that_was_cut_off_is_removed(tmp_path, cut):
    records, path = ToolRecords(str(tmp_path), 0), tmp_path / "tools.jsonl"
    records.add(FIRST, CALL)
    records.add(SECOND, CALL)
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    records = ToolRecords(str(tmp_path), 0)
    assert records.find(FIRST, CALL) == CALL and records.find(SECOND, CALL) is None
    records.add(SECOND, CALL)
    assert path.read_bytes() == content


def test_a_line_that_is_no_record_is_named(tmp_path):
    (tmp_path / "tools.jsonl").write_text('{"at": "update 1"}\n')
    with pytest.raises(UserError, match="tools.jsonl, line 1 is no record of a call: remove the line"):
        ToolRecords(str(tmp_path), 0)


def test_recorded_functions_are_not_called_and_environments_must_return_the_same(tmp_path):
    called = []

    def note(a: int) -> int:
        """Notes a number.

        Args:
            a: It.
        """
        called.append(a)
        return a

    async def later(a: int) -> int:
        """Notes a number, later.

        Args:
            a: It.
        """
        called.append(-a)
        return -a

    toolbox = Toolbox([note, later], timeout=5.0)
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("later", "note", "move", "absent")]
    methods, places = [{"move": lambda a: f"moved {a}"}], [("update 1", 5, 2)]
    first = toolbox.call([calls], methods, records=ToolRecords(str(tmp_path), 0), places=places)
    assert called == [1, -1] and [message["content"] for message in first.messages[0]][:2] == ["1", "moved 1"]
    content = (tmp_path / "tools.jsonl").read_text()
    again = toolbox.call([calls], methods, records=ToolRecords(str(tmp_path), 0), places=places)
    assert called == [1, -1] and again.messages == first.messages and again.failures == first.failures == 1
    assert (tmp_path / "tools.jsonl").read_text() == content
    with pytest.raises(UserError, match="turn 3: move of the environment returned 'moved 2', but 'moved 1' is"):
        other = [{"move": lambda a: "moved 2"}]
        toolbox.call([calls], other, records=ToolRecords(str(tmp_path), 0), places=places)
    calls[1]["function"]["arguments"] = {"a": 2}
    with pytest.raises(UserError, match="row 5, turn 3: the policy calls .*'a': 2.* is recorded.*Remove .*tools.jsonl"):
        toolbox.call([calls], methods, records=ToolRecords(str(tmp_path), 0), places=places)
    toolbox.close()


def test_a_call_is_on_disk_before_the_next_one_is_made(tmp_path):
    def look(a: int) -> str:
        """Says how many calls are recorded.

        Args:
            a: Ignored.
        """
        path = tmp_path / "tools.jsonl"
        return str(len(path.read_text().splitlines()) if path.exists() else 0)

    toolbox, calls = Toolbox([look], timeout=5.0), [{"function": {"name": "look", "arguments": {"a": 1}}}] * 2
    results = toolbox.call([calls, calls], records=ToolRecords(str(tmp_path), 0), places=[("", 0, 0), ("", 1, 0)])
    toolbox.close()
    assert [message["content"] for row in results.messages for message in row] == ["0", "1", "2", "3"]


def test_a_replay_takes_the_results_of_another_run_and_records_them_again(tmp_path):
    def fail(a: int) -> int:
        """Must not be called.

        Args:
            a: It.
        """
        raise AssertionError

    old, new, other = (tmp_path / name for name in ("old", "new", "other"))
    for folder in (old, new, other):
        folder.mkdir()
    call = {"name": "fail", "arguments": {"a": 1}, "last": False, "content": "7", "failed": False}
    move = {"name": "move", "arguments": {"a": 1}, "last": False, "content": "moved", "failed": False}
    recorded, place = ToolRecords(str(old), 0), ("update 1", 3, 0)
    for number, line in enumerate((call, move)):
        recorded.add(Place(*place, number), line)
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("fail", "move")]
    toolbox, methods = Toolbox([fail], timeout=5.0), [{"move": lambda a: "moved"}]
    for _ in range(2):  # and a resume of the replay
        results = toolbox.call([calls], methods, records=ToolRecords(str(new), 0, str(old)), places=[place])
        assert [message["content"] for message in results.messages[0]] == ["7", "moved"] and results.failures == 0
        assert (new / "tools.jsonl").read_bytes() == (old / "tools.jsonl").read_bytes()
    with pytest.raises(UserError, match="move of the environment returned 'x', but .*Leave out tools_replay"):
        toolbox.call([calls], [{"move": lambda a: "x"}], records=ToolRecords(str(other), 0, str(old)), places=[place])
    with pytest.raises(UserError, match="tools_replay: update 2, row 3, turn 1 calls 'fail', but .*has no call there"):
        toolbox.call([calls], methods, records=ToolRecords(str(other), 0, str(old)), places=[("update 2", 3, 0)])
    with pytest.raises(UserError, match="tools_replay: .*nothing has no tools.jsonl"):
        ToolRecords(str(other), 0, str(tmp_path / "nothing"))
    toolbox.close()
