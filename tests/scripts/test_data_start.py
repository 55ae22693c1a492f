"""scripts/bench/data_start.py: its rows, and a small measurement."""

import json
import sys

import pytest

from tests.helpers.paths import ROOT

SCRIPTS = ROOT / "scripts" / "bench"
sys.path.insert(0, str(SCRIPTS))

import data_start  # noqa: E402


def test_posts_are_repeated_and_no_two_are_the_same(tmp_path):
    posts = [{"prompt": f"TITLE: a\n\nPOST: {text}", "completion": " x"} for text in ("one", "two")]
    source = tmp_path / "posts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in posts))
    data_start.write_posts(tmp_path / "out.jsonl", 5, str(source))
    rows = [json.loads(line) for line in open(tmp_path / "out.jsonl")]
    assert [row["prompt"].split("POST: ")[1] for row in rows] == ["0 one", "1 two", "2 one", "3 two", "4 one"]
    data_start.write_posts(tmp_path / "out.jsonl", 4, None)
    assert len({json.loads(line)["prompt"] for line in open(tmp_path / "out.jsonl")}) == 4


def test_a_file_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        data_start.main(["--posts", "nowhere.jsonl"])
    assert "--posts nowhere.jsonl: no such file" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_second_start_maps_what_the_first_made(capsys):
    assert data_start.main(["--rows", "1500", "--rounds", "1", "--processes", "2"]) == 0
    lines = {line[:24].strip(): line[24:].split() for line in capsys.readouterr().out.splitlines()}
    assert lines.keys() >= {"tokenizer alone", "first start", "second start"}
    assert lines["of several: tokenizes"] and lines["of several: maps"]
