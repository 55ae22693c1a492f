"""scripts/accelerator_day.py: it runs to its end on a CPU at toy sizes, continues, skips and reports."""

import importlib
import json
import subprocess
import sys
import zipfile

import pytest

from tests.helpers.paths import SCRIPTS

sys.path.insert(0, str(SCRIPTS))  # as for a script run from there

import accelerator_day as day  # noqa: E402

PARTS = ("environment", "numbers", "replay", "greedy", "ppo_410m", "attention", "resume", "deterministic")


def run(out, *words):
    command = [sys.executable, day.__file__, "--out", str(out), "--small", "--platform", "cpu", *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.runs
def test_all_parts_run_on_a_cpu_and_write_what_they_measured(tmp_path):
    pytest.importorskip("trl")  # and torch: some parts compare with them
    out = tmp_path / "day.json"
    # Another case of the benchmark computes the same at toy sizes, and resume_deterministic as resume.
    done = run(out, "--minutes", "20", "--only", *PARTS)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert {part["status"] for part in results.values()} == {"done"}
    assert results["environment"]["result"]["kind"] == "cpu"
    assert results["numbers"]["result"]["float32, highest"]["logits"] < 1e-5
    assert results["greedy"]["result"]["greedy"]["equal tokens"] == 1.0
    assert results["attention"]["result"]["blocked"]["policy's gradient"]["ms"] > 0
    assert "ppo_small replays" in results["replay"]["result"]
    assert results["resume"]["result"]["different"] == []
    assert results["deterministic"]["result"]["options"]["deterministic"]
    tables = out.with_suffix(".md").read_text()
    for line in (
        "| ppo_410m | 4, 4 |",
        "| logits |",
        "| blocked |",
        "ppo_small replays",
        "no file differs",
    ):
        assert line in tables


def test_tables_name_what_was_not_measured_and_rows_have_all_their_cells():
    update = {"updates": [9.0, 2.0, 2.0], "micro": 16, "peak_mib": 1000.0}
    pairs = [{"ours": update, "trl": {**update, "updates": [3.0, 4.0, 4.0], "micro": 32}}]
    phase = {"phase": "generate", "system": "ours", "seconds": 0.5, "mfu": 0.25}
    results = {"ppo_1b": {"status": "done", "result": {"pairs": pairs, "phases": [phase]}}}
    lines = day.markdown({**results, "greedy": {"status": "cut"}}).splitlines()
    assert "| ppo_1b | 16, 32 | 2.00, 2.00 | 4.00, 4.00 | 2.00 | 1,000 | 1,000 |" in lines
    assert "| ppo_1b | generate | ours | 0.500 | 25.0% |" in lines
    assert lines[-1] == "Not measured: greedy (cut)."


def test_a_part_runs_as_on_a_gpu(tmp_path):
    out = tmp_path / "day.json"
    done = run(out, "--only", "environment")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(out.read_text())["environment"]["result"]["kind"] == "cpu"
    assert "products of matrices" in out.with_suffix(".md").read_text()


def part(code, *words, **fields):
    return day.Part("probe", ("-c", code, *words), **fields)


@pytest.fixture
def args(tmp_path):
    return day.parse(["--out", str(tmp_path / "day.json")])


def test_the_file_that_a_part_writes_is_its_result(args, tmp_path):
    code = "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('{\"speed\": 3}'); print('noise')"
    outcome = day.run_part(part(code, "--json", str(tmp_path / "x.json")), args, 60)
    assert (outcome["status"], outcome["result"], outcome["text"]) == ("done", {"speed": 3}, "noise\n")


def test_part_that_fails_is_reported_with_the_end_of_its_log(args):
    outcome = day.run_part(part("raise ValueError('no such kernel')"), args, 60)
    assert outcome["status"] == "failed" and "no such kernel" in outcome["why"]


def test_replay_that_fails_is_a_result_and_one_that_breaks_is_a_failure(args):
    code = "print('ppo_small DOES NOT REPLAY'); raise SystemExit(1)"
    assert day.run_part(part(code), args, 60)["status"] == "done"
    outcome = day.run_part(part("raise ValueError('no such kernel')"), args, 60)
    assert outcome["status"] == "failed" and "no such kernel" in outcome["why"]


def test_part_whose_package_is_missing_is_skipped_by_name(args):
    outcome = day.run_part(part("1/0", needs=("no_such_package",)), args, 60)
    assert outcome["status"] == "skipped" and "no_such_package" in outcome["why"]


def test_part_is_cut_at_the_end_of_the_time_with_its_children(args, tmp_path):
    late = tmp_path / "late"
    child = f"import subprocess, time; subprocess.Popen(['sh', '-c', 'sleep 2; touch {late}']); time.sleep(30)"
    outcome = day.run_part(part(child), args, 1.0)
    assert outcome["status"] == "cut"
    subprocess.run(["sleep", "2.5"], check=True)
    assert not late.exists()


def test_complete_parts_are_not_run_again_unless_asked(args, tmp_path, monkeypatch, capsys):
    machine = {"devices": ["cpu:0"], "kind": "cpu", "versions": {}, "flops_per_second": {"bandwidth": 1.0}}
    results = {"environment": {"status": "done", "seconds": 0, "result": machine, "text": ""}}
    args.out.write_text(json.dumps({**results, "greedy": {"status": "cut"}}))
    results["greedy"] = {"status": "done", "seconds": 0, "result": {}, "text": ""}
    ran = []
    monkeypatch.setattr(day, "run_part", lambda part, *_: ran.append(part.name) or results[part.name])
    assert day.main(["--out", str(args.out), "--only", "environment", "greedy"]) == 0
    assert ran == ["greedy"]
    assert day.main(["--out", str(args.out), "--only", "environment", "--again", "environment"]) == 0
    assert ran == ["greedy", "environment"]


def wheel(folder, version):
    """A wheel of a package of one module."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"probe_of_wheels-{version}-py3-none-any.whl", "w") as file:
        info = f"probe_of_wheels-{version}.dist-info"
        file.writestr("probe_of_wheels.py", f"version = {version!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: probe-of-wheels\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def test_wheels_of_a_folder_are_installed_and_changed_ones_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    args = day.parse(["--out", str(tmp_path / "day.json"), "--wheels", str(tmp_path / "wheels")])
    with pytest.raises(SystemExit, match="--wheels .*no such folder"):
        day.install(args)
    probe = part("import probe_of_wheels as p; print(p.version)", needs=("probe_of_wheels",))
    assert day.run_part(probe, args, 60)["status"] == "skipped"
    for version in ("1.0", "1.1"):
        wheel(tmp_path / "wheels", version)
        day.install(args)
        importlib.invalidate_caches()
        assert day.run_part(probe, args, 60)["result"] == f"{version}\n"
        (tmp_path / "wheels" / f"probe_of_wheels-{version}-py3-none-any.whl").unlink()
    (tmp_path / "wheels" / "probe_of_wheels-1.2-py3-none-any.whl").write_bytes(b"no wheel")
    with pytest.raises(SystemExit, match="pip could not install"):
        day.install(args)


def test_help_names_every_part(capsys):
    with pytest.raises(SystemExit):
        day.parse(["--help"])
    said = capsys.readouterr().out
    assert [name for name in (part.name for part in day.parts_of(day.parse([]))) if name not in said] == []


def test_unknown_part_is_refused_with_the_names(tmp_path, capsys):
    with pytest.raises(SystemExit):
        day.parse(["--out", str(tmp_path / "day.json"), "--only", "speed"])
    assert "speed" in capsys.readouterr().err
