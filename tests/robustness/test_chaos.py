"""scripts/chaos/chaos.py: the comparison detects differences, kills land where asked, a short campaign succeeds."""

import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest

from rlhf_jax.metrics.logger import MetricLogger
from rlhf_jax.runtime.run_folder import RunFolder
from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "chaos"))  # as for a script run from there

import chaos  # noqa: E402
import chaos_compare  # noqa: E402
from chaos_runs import Event, Leg, Measured, Plan  # noqa: E402


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Two folders of the same short run, with what a test may spoil in the second."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        folder = RunFolder.open("run", {"stage": "sft"})
        with MetricLogger.open(folder.path, report_to="tensorboard") as logger:
            for step in (1, 2, 3):
                logger.log(step, {"loss": step / 2})
                logger.text(step, "completions/samples", f"table {step}")
        folder.write_completions(3, [{"completion": "c"}])
        for path in ("policy", "checkpoints/2", "checkpoints/3"):
            os.makedirs(f"run/{path}")
        pathlib.Path("run/policy/model.safetensors").write_bytes(b"weights")
        folder.finish(3, {"loss": 1.5}, {"policy": "run/policy"})
        folder.close()
    return tmp_path / "a/run", tmp_path / "b/run"


def log_again(run, start, *steps):
    with MetricLogger.open(str(run), report_to="tensorboard", start_step=start) as logger:
        for step in steps:
            logger.log(step, {"loss": step / 2})
            logger.text(step, "completions/samples", f"table {step}")


def cut(run, start):
    RunFolder(str(run)).cut(start)
    RunFolder(str(run)).write_completions(3, [{"completion": "c"}])


SPOILED = {
    "policy/model.safetensors differs at byte 6": lambda run: (run / "policy/model.safetensors").write_bytes(
        b"weightS"
    ),
    "policy/model.safetensors is missing": lambda run: (run / "policy/model.safetensors").unlink(),
    "metrics.jsonl.tmp is left over": lambda run: (run / "metrics.jsonl.tmp").touch(),
    "metrics.jsonl differs in line 2": lambda run: (run / "metrics.jsonl").write_text(
        (run / "metrics.jsonl").read_text().replace("1.0", "1.1")
    ),
    "completions/3.jsonl differs": lambda run: (run / "completions/3.jsonl").write_text("{}"),
    "checkpoints/ holds ['1', '2', '3'], not ['2', '3']": lambda run: (run / "checkpoints/1").mkdir(),
    "timings.jsonl has steps [1, 2, 3, 'torn": lambda run: (run / "timings.jsonl").open("a").write('{"step'),
    "tensorboard/: loss has steps [1, 2, 3, 3], not [1, 2, 3]": lambda run: (log_again(run, 0, 3), cut(run, 3)),
    "tensorboard/: loss has steps [1, 3], not [1, 2, 3]": lambda run: (cut(run, 1), log_again(run, 1, 3)),
}


@pytest.mark.parametrize("said", SPOILED)
def test_what_differs_is_named(two, said):
    assert chaos_compare.differences(*two) == []
    SPOILED[said](two[1])
    assert said in "\n".join(chaos_compare.differences(*two))


def test_a_continued_run_is_identical_whose_later_half_was_written_twice(two):
    cut(two[1], 1)
    log_again(two[1], 1, 2)
    cut(two[1], 1)
    log_again(two[1], 1, 2, 3)
    assert chaos_compare.differences(*two) == []


def test_a_torn_record_ends_an_event_file_as_in_tensorboard(two):
    path = next((two[1] / "tensorboard").iterdir())
    path.write_bytes(path.read_bytes()[:-5])
    found = chaos_compare.differences(*two)
    assert len(found) == 1 and "memory/" in found[0] or "time/" in found[0] or "eps" in found[0]


# --- where a kill fell

MEASURED = Measured(
    wall=9.0,
    seconds={
        "compile": {1: 2.0, 2: 1.0},
        "rollout": dict.fromkeys(range(1, 7), 0.1),
        "update": dict.fromkeys(range(1, 7), 0.2),
        "save": dict.fromkeys((2, 4, 6), 0.3),
        "export": {1: 0.5},
    },
    files={"save": dict.fromkeys((2, 4, 6), 20), "export": {1: 9}, "any": {0: 90}},
    renames=1,
)


def died(asked, at, *lines):
    """Where a leg says that it died, which was asked to at `asked` and got the signal at `at`."""
    leg = Leg.__new__(Leg)
    leg.plan, leg.events, leg.hit, leg.began = Plan(asked), [Event.of(line) for line in lines], at, 0.0
    leg.how, leg.victim, leg.reader = "KILL", 0, object()
    return leg.died_in(MEASURED)[0]


def test_a_kill_counts_for_the_phase_that_it_met():
    update = ("1 begin update 3", "2 end update 3")
    assert died("update", 1.5, update[0]) == "update"
    assert died("update", 2.1, *update) == "between"  # too late
    saving = (
        "3 begin save 4",
        "3.1 file save 4 1 mkdir checkpoints/4.tmp",
        "3.2 file save 4 2 rename checkpoints/4.tmp",
    )
    assert died("save", 3.15, *saving[:2], "3.1 begin update 5") == "save"  # in the background of an update
    assert died("update", 3.15, *saving[:2], "3.1 begin update 5") == "update"
    assert died("save", 3.21, *saving) == "save"  # around the rename
    assert died("save", 3.5, *saving) == "between"
    assert died("export", 3.1, "3 begin export 1", "3.05 kill export 1 3 write policy/config.json") == "export"


def test_kills_are_spread_over_phases_and_come_after_a_checkpoint(tmp_path):
    options = chaos.parse(["--folder", str(tmp_path), "--kills", "100"])
    campaign = chaos.Campaign(options)
    campaign.measured = dict.fromkeys(chaos.STAGES, MEASURED)
    rng = random.Random(0)
    for number in range(100):
        committed = rng.choice(([], [], [2], [2, 4], [4, 6]))
        stage = chaos.STAGES[number % 4]
        plan = campaign.next_plan(rng, stage, committed, 0)
        if plan.phase == "save":
            assert plan.number in (2, 4, 6) and plan.number > max(committed, default=0)
        if plan.phase in ("rollout", "update"):
            assert max(committed, default=0) < plan.number <= 6
        assert plan.file or plan.wait <= MEASURED.wall
        committed = committed or ([2] if plan.number > 2 or plan.phase == "export" else [])
        campaign.kills.append({"stage": stage, "phase": plan.phase, "committed": committed, "identical": True})
    counts = {phase: sum(kill["phase"] == phase for kill in campaign.kills) for phase in chaos.PHASES}
    assert min(counts.values()) >= 10, counts
    assert sum(bool(kill["committed"]) for kill in campaign.kills) >= 60
    text = chaos.table(campaign.kills)
    assert "identical: 100 of 100" in text and f"{counts['save']:>9}" in text


def test_a_campaign_goes_on_where_it_was_and_not_with_another(tmp_path):
    kill = {"case": 4, "stage": "sft", "signal": "KILL", "processes": 1, "resume_devices": 1}
    (tmp_path / "results.jsonl").write_text(json.dumps(kill) + "\n")
    campaign = chaos.Campaign(chaos.parse(["--folder", str(tmp_path)]))
    assert len(campaign.kills) == 1 and campaign.cases == 5
    with pytest.raises(SystemExit, match="--folder"):
        chaos.Campaign(chaos.parse(["--folder", str(tmp_path), "--signal", "TERM"]))


@pytest.mark.processes
def test_runs_killed_anywhere_end_as_one_left_in_peace(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(ROOT / "scripts/chaos/chaos.py"), "--short"]
    found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "identical: 5 of 5" in found.stdout
    shutil.rmtree(tmp_path, ignore_errors=True)
