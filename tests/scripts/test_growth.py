"""scripts/bench/growth.py: its exponents, its sizes, and one tiny axis measured, kept and drawn."""

import json
import re
import sys

import pytest

from tests.helpers.paths import ROOT

SCRIPTS = ROOT / "scripts" / "bench"
sys.path.insert(0, str(SCRIPTS))

import growth  # noqa: E402


def test_an_exponent_is_the_slope_of_the_logarithms():
    assert growth.slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    assert growth.slope([8, 16, 64], [5, 5, 5]) == pytest.approx(0)


def test_sizes_are_the_numbers_behind_the_values():
    assert growth.sizes_of("batch", (8, 16)) == [8, 16]
    assert growth.sizes_of("vocabulary", ("6x128x4@2048",)) == [2048]
    (size,) = growth.sizes_of("model", ("14m",))
    assert size == 14_067_712  # Biderman et al. 2023, table of the suite: 14m


def test_an_unknown_axis_is_refused(capsys):
    assert growth.main(["--axes", "batch,colour"]) == 2
    assert re.search("--axes colour.*batch, prompt length", capsys.readouterr().err)


@pytest.mark.benchmark
def test_a_small_axis_is_measured_kept_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(growth, "AXES", {"batch": ("batch", (2, 4))})
    monkeypatch.setattr(growth, "BASE", {"shape": "1x16x2", "batch": 2, "query_length": 64, "response_length": 4})
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "growth.json", tmp_path / "growth.png"
    assert growth.main(["--axes", "batch", "--json", str(out), "--picture", str(picture)]) == 0, capsys.readouterr().err
    (table,) = json.loads(out.read_text())["tables"]
    assert [row["size"] for row in table["points"]] == [2, 4]
    assert all(row["seconds"] > 0 and row["peak_mib"] > 0 for row in table["points"])
    assert table["exponents"]["flops"] == pytest.approx(1, abs=0.1)
    assert picture.read_bytes().startswith(b"\x89PNG")
