"""scripts/accelerator_day.py: it runs on a CPU at toy sizes, continues, skips, reports and fills in the page."""

import importlib
import json
import re
import subprocess
import sys
import zipfile

import pytest

from tests.helpers.paths import ROOT, SCRIPTS

sys.path.insert(0, str(SCRIPTS))  # as for a script run from there

import accelerator_day as day  # noqa: E402

PAGE = ROOT / "docs/benchmarks.md"
# Other cases of the benchmark compute the same at toy sizes, and resume_deterministic as resume.
PARTS = ("environment", "attention_410m", "deterministic", "ppo_410m_16_trl", "resume", "numbers", "greedy", "replay")


def run(out, *words):
    command = [sys.executable, day.__file__, "--out", str(out), "--small", "--platform", "cpu", *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.runs
def test_all_parts_run_on_a_cpu_and_write_what_they_measured(tmp_path):
    pytest.importorskip("trl")  # and torch: some parts compare with them
    out = tmp_path / "day.json"
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    done = run(out, "--minutes", "20", "--only", *PARTS, "chat", "--write", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(out.read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        **dict.fromkeys(PARTS, "done"),
        "chat": "skipped",  # there is no --model
    }
    results = {name: part.get("result") for name, part in parts.items()}
    assert results["environment"]["kind"] == "cpu"
    assert results["numbers"]["float32, highest"]["logits"] < 1e-5
    assert results["greedy"]["greedy"]["equal tokens"] == 1.0
    assert {
        f"{form}, blocked, {what}" for form in ("whole rows", "shared prompts") for what in ("alone", "dots", "none")
    } == results["attention_410m"]["measured"].keys()
    assert all(one["ms"] > 0 and one["MiB"] > 0 for one in results["attention_410m"]["measured"].values())
    assert "ppo_small replays" in results["replay"]
    assert results["resume"]["different"] == []
    assert results["deterministic"]["options"]["deterministic"]
    predicted = results["deterministic"]["pairs"][0]["ours"]["predicted"]
    assert list(predicted) == ["generate", "score", "experience", "update"]
    assert all(program["seconds"] > 0 and program["peak_mib"] > 0 for program in predicted.values())
    tables, filled = out.with_suffix(".md").read_text(), page.read_text()
    for line in (
        "| PPO 1x32x2, 4 rows | – |",
        "| PPO 1x32x2, 4 rows, `--deterministic`: predicted, measured, s |",
        "| logits |",
        "| whole rows, `blocked` | none |",
        "ppo_small replays",
        "no file differs",
    ):
        assert line in tables and line in filled
    began = json.loads(out.read_text())["began"]
    blocks = rf"\n<!-- day \w+ of {began} .*?<!-- end of day \w+ of {began} -->\n"
    assert re.sub(blocks, "", filled, flags=re.DOTALL) == PAGE.read_text()


def names(words=()):
    return [part.name for part in day.parts_of(day.parse(words))]


def test_the_order_is_that_of_what_the_page_lacks():
    first = ["environment", "attention_410m", "attention_1b"]
    for case in ("ppo_410m_32", "rloo_410m_32", "ppo_410m_16", "rloo_410m_16"):
        first += [case, f"{case}_trl"]
    first += ["difference", "resume"]
    assert names()[: len(first)] == first
    assert {"ppo_1b_16", "rloo_1b_32_trl", "decoding", "chat", "numbers", "greedy", "replay"} < {*names()[len(first) :]}


OPTIONS = {"algo": "ppo", "shape": "1b", "deterministic": False}


def benchmark(system, seconds, peak):
    update = {"updates": [9.0, *seconds], "micro": 16, "peak_device_mib": peak, "matmul_flops": 4e12}
    phase = {"phase": "generate", "system": system, "seconds": 0.5, "flops_per_second": 1e12, "mfu": 0.25}
    return {"options": OPTIONS, "pairs": [{system: update}], "phases": [phase]}


def test_tables_have_trls_side_where_there_is_one_and_name_what_was_not_measured():
    parts = {
        "ppo_1b_16": {"status": "done", "result": benchmark("ours", [2.0, 2.0], 1000.0)},
        "greedy": {"status": "cut", "why": "the time was up"},
        "ppo_1b_16_trl": {"status": "failed", "why": "a log\nerror: trl runs out of memory"},
    }
    lines = day.markdown(parts).splitlines()
    assert "| PPO 1b, 16 rows | 2.00, 2.00 | – | – | 1,000 MiB | – |" in lines
    assert "| share of the peak | 25 %, – | –, – | –, – | –, – |" in lines
    assert (
        lines[-1]
        == "Not complete: greedy (cut: the time was up); ppo_1b_16_trl (failed: error: trl runs out of memory)."
    )
    parts["ppo_1b_16_trl"] = {"status": "done", "result": {"out_of_memory": "..."}}
    assert "| PPO 1b, 16 rows | 2.00, 2.00 | out of memory | – | 1,000 MiB | – |" in day.markdown(parts).splitlines()
    parts["ppo_1b_16_trl"] = {"status": "done", "result": benchmark("trl", [4.0, 4.0], 3000.0)}
    assert (
        "| PPO 1b, 16 rows | 2.00, 2.00 | 4.00, 4.00 | 2.00 | 1,000 MiB | 3,000 MiB |"
        in day.markdown(parts).splitlines()
    )


def test_tables_that_a_part_prints_are_in_its_section():
    rows, chat = "| sampler | 0.010 |", "x\n16 held-out prompts, means\nRLOO - before in score: 0.1\nwritten: y\n"
    parts = {
        "difference": {"status": "done", "result": {}, "text": f"| a | b |\n|---|---|\n{rows}\n"},
        "decoding": {"status": "done", "result": {}, "text": "a case\n\n| ours | 9 tokens/s |\n"},
        "chat": {"status": "done", "result": chat, "text": chat},
    }
    written = day.markdown(parts)
    assert rows in written.splitlines() and "| ours | 9 tokens/s |" in written.splitlines()
    assert "```\n16 held-out prompts, means\nRLOO - before in score: 0.1\n```" in written


def test_a_page_keeps_the_rows_of_other_days_and_gets_those_of_this_day_once():
    page = f"before\n\n{day.place('numbers')}\n\nafter\n"

    def result(differences):
        return {"resume": {"status": "done", "result": {"killed after updates": 4, "different": differences}}}

    first = day.filled(page, result(["policy"]), "2026-12-01 09:00")
    again = day.filled(first, result([]), "2026-12-01 09:00")
    assert "1 differences: policy" in first and "1 differences" not in again and "no file differs" in again
    both = day.filled(first, result([]), "2026-12-02 09:00")
    assert "1 differences: policy" in both and "no file differs" in both
    assert "1 December 2026" in both and "2 December 2026" in both
    assert day.filled(both, result([]), "2026-12-02 09:00") == both
    assert both.startswith("before\n\n<!-- day numbers -->\n") and both.endswith("\n\nafter\n")


def test_a_page_without_the_places_of_the_tables_is_refused(tmp_path, capsys):
    (tmp_path / "page.md").write_text("text")
    with pytest.raises(SystemExit):
        day.parse(["--write", str(tmp_path / "page.md")])
    assert "<!-- day attention -->" in capsys.readouterr().err
    assert day.parse(["--write", str(PAGE)]).write == PAGE


def test_a_part_runs_as_on_a_gpu(tmp_path):
    out = tmp_path / "day.json"
    done = run(out, "--only", "environment")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(out.read_text())["parts"]["environment"]["result"]["kind"] == "cpu"
    assert "products of matrices" in out.with_suffix(".md").read_text()


def part(code, *words, **fields):
    return day.Part("probe", ("-c", code, *words), **fields)


@pytest.fixture
def args(tmp_path):
    return day.parse(["--out", str(tmp_path / "day.json")])


def test_the_file_that_a_part_writes_is_its_result(args, tmp_path):
    code = "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('{\"speed\": 3}'); print('noise')"
    outcome = day.run_part(part(code, "--json", str(tmp_path / "x.json")), args, 60, {})
    assert (outcome["status"], outcome["result"], outcome["text"]) == ("done", {"speed": 3}, "noise\n")


def test_part_that_fails_is_reported_with_the_end_of_its_log(args):
    outcome = day.run_part(part("raise ValueError('no such kernel')"), args, 60, {})
    assert outcome["status"] == "failed" and "no such kernel" in outcome["why"]


def test_replay_that_fails_is_a_result_and_one_that_breaks_is_a_failure(args):
    code = "print('ppo_small DOES NOT REPLAY'); raise SystemExit(1)"
    assert day.run_part(part(code), args, 60, {})["status"] == "done"
    outcome = day.run_part(part("raise ValueError('no such kernel')"), args, 60, {})
    assert outcome["status"] == "failed" and "no such kernel" in outcome["why"]


def test_running_out_of_memory_is_a_result(args, tmp_path):
    code = "print('error: trl runs out of memory with micro-batches of 32: 80 GiB'); raise SystemExit(2)"
    outcome = day.run_part(part(code, "--json", str(tmp_path / "x.json")), args, 60, {})
    assert outcome["status"] == "done" and "80 GiB" in outcome["result"]["out_of_memory"]


def test_part_whose_package_is_missing_is_skipped_by_name(args):
    outcome = day.run_part(part("1/0", needs=("no_such_package",)), args, 60, {})
    assert outcome["status"] == "skipped" and "no_such_package" in outcome["why"]


def test_part_is_cut_at_the_end_of_the_time_with_its_children(args, tmp_path):
    late = tmp_path / "late"
    child = f"import subprocess, time; subprocess.Popen(['sh', '-c', 'sleep 2; touch {late}']); time.sleep(30)"
    outcome = day.run_part(part(child), args, 1.0, {})
    assert outcome["status"] == "cut"
    subprocess.run(["sleep", "2.5"], check=True)
    assert not late.exists()


def test_a_part_that_was_cut_off_continues_with_what_it_had_measured(args, tmp_path):
    """Also on another machine, which has only --out."""
    code = """import json, pathlib, sys, time
file = pathlib.Path(sys.argv[2])
had = json.loads(file.read_text()) if file.exists() else []
file.write_text(json.dumps([*had, len(had)]))
time.sleep(0 if had else 30)"""
    probe = part(code, "--json", str(tmp_path / "x.json"))
    cut = day.run_part(probe, args, 1.0, {})
    assert (cut["status"], cut["result"]) == ("cut", [0])
    (tmp_path / "x.json").unlink()
    done = day.run_part(probe, args, 60, cut)
    assert (done["status"], done["result"]) == ("done", [0, 1])
    assert day.run_part(probe, args, 1.0, None)["result"] == [0]  # --again


def test_complete_parts_are_not_run_again_unless_asked_and_failed_ones_are_last(args, monkeypatch, capsys):
    machine = {"devices": ["cpu:0"], "kind": "cpu", "versions": {}, "flops_per_second": {"bandwidth": 1.0}}
    results = {"environment": {"status": "done", "seconds": 0, "result": machine, "text": ""}}
    failed = {"resume": {"status": "failed", "why": "no disk"}, "greedy": {"status": "cut", "why": "time"}}
    args.out.write_text(json.dumps({"began": "2026-12-01 09:00", "parts": {**results, **failed}}))
    resume = {"killed after updates": 4, "different": []}
    results |= {"greedy": {"status": "done", "seconds": 0, "result": {}, "text": ""}}
    results |= {"resume": {"status": "done", "seconds": 0, "result": resume, "text": ""}}
    ran = []
    monkeypatch.setattr(day, "run_part", lambda part, *_: ran.append(part.name) or results[part.name])
    words = ["--out", str(args.out), "--only", "environment", "resume", "greedy"]
    assert day.main([*words, "--minutes", "0"]) == 1 and ran == []
    assert "no time is left for greedy, resume" in capsys.readouterr().out
    assert day.main(words) == 0
    assert ran == ["greedy", "resume"]
    assert day.main([*words, "--again", "environment"]) == 0
    assert ran == ["greedy", "resume", "environment"]


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
    assert day.run_part(probe, args, 60, {})["status"] == "skipped"
    for version in ("1.0", "1.1"):
        wheel(tmp_path / "wheels", version)
        day.install(args)
        importlib.invalidate_caches()
        assert day.run_part(probe, args, 60, {})["result"] == f"{version}\n"
        (tmp_path / "wheels" / f"probe_of_wheels-{version}-py3-none-any.whl").unlink()
    (tmp_path / "wheels" / "probe_of_wheels-1.2-py3-none-any.whl").write_bytes(b"no wheel")
    with pytest.raises(SystemExit, match="pip could not install"):
        day.install(args)


def test_help_names_every_part(capsys):
    with pytest.raises(SystemExit):
        day.parse(["--help"])
    said = capsys.readouterr().out
    # "ppo_410m_8, _64": what follows a name shares its beginning; TRL's sides are said once.
    assert [name for name in names() if name not in said and f"_{name.split('_')[-1]}" not in said] == []


def test_unknown_part_is_refused_with_the_names(tmp_path, capsys):
    with pytest.raises(SystemExit):
        day.parse(["--out", str(tmp_path / "day.json"), "--only", "speed"])
    assert "speed" in capsys.readouterr().err
