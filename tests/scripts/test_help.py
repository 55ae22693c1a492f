"""Every script says what it is for and which options it takes."""

import runpy
import sys

import pytest

from tests.helpers.paths import ROOT, SCRIPTS

WITHOUT_OPTIONS = {
    "options_page.py": "prints a page",
    "bench/accelerator_tables.py": "imported by accelerator_day.py",
    "bench/benchmark_case.py": "imported by the benchmarks",
    "bench/benchmark_report.py": "imported by the benchmarks",
    "chaos/chaos_compare.py": "imported by the campaigns",
    "chaos/chaos_runs.py": "imported by chaos.py",
    "parity/record_trl.py": "imports the TRL that it records before it reads its options",
}
FILES = sorted(path.relative_to(SCRIPTS).as_posix() for path in SCRIPTS.rglob("*.py"))


def test_scripts_without_options_are_there():
    assert WITHOUT_OPTIONS.keys() <= set(FILES)


@pytest.mark.parametrize("name", [name for name in FILES if name not in WITHOUT_OPTIONS])
def test_help_is_shown(name, monkeypatch, capsys):
    if name == "parity/real_model.py":
        pytest.importorskip("torch")
    path = SCRIPTS / name
    monkeypatch.setattr(sys, "path", [str(path.parent), str(ROOT), *sys.path])  # as for a script run from there
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    assert stop.value.code == 0
    assert "usage:" in capsys.readouterr().out
