"""stages/throughput.py: shares of the peak, by hand and in a run."""

import types

import numpy as np
import pytest

import rlhf_jax
from rlhf_jax.parallel import peaks
from rlhf_jax.parallel.peaks import Peak
from rlhf_jax.stages.throughput import Throughput
from rlhf_jax.stages.work import Work
from tests.helpers.runs import lines, ppo_config, sft_config, wordiness


def throughput(phases):
    made = Throughput(types.SimpleNamespace(work=lambda step, tokens: phases))
    made.peak = Peak(1000.0, 50.0, "measured")
    return made


def test_shares_are_work_over_seconds_and_peak():
    phases = {"generate": Work(200.0, 10.0, 40.0), "update": Work(600.0, 60.0)}
    found = throughput(phases)(3, 60, {"time/generate": 2.0, "time/update": 3.0, "step_time": 8.0})
    assert found == {
        "mfu": 800 / 8 / 1000,
        "tokens_per_second/generate": 5.0,
        "mfu/generate": 0.1,
        "bandwidth/generate": 0.4,
        "tokens_per_second/update": 20.0,
        "mfu/update": 0.2,
        "peak/flops": 1000.0,
        "peak/bandwidth": 50.0,
    }


def test_a_stage_without_phases_is_timed_from_update_to_update():
    assert throughput({"update": Work(600.0, 60.0)})(3, 60, {"time/step": 4.0, "time/save": 1.0})["mfu/update"] == 0.2


@pytest.mark.parametrize("phases, tokens", [({}, 5), ({"update": Work(1.0, 1.0)}, 0)])
def test_without_work_or_tokens_nothing_is_told(phases, tokens):
    assert throughput(phases)(3, tokens, {"time/step": 3.0, "time/save": 0.0}) == {}


def test_the_peak_is_that_of_all_devices_and_before_it_is_measured_nothing_is_told(monkeypatch):
    monkeypatch.setattr(peaks, "peak", lambda device, dtype: Peak(2e12, 3e9, "measured"))
    devices = np.asarray(["one", "another"])
    stage = types.SimpleNamespace(
        work=lambda step, tokens: {"update": Work(600.0, 60.0)},
        config=types.SimpleNamespace(dtype="float32"),
        weights=types.SimpleNamespace(mesh=types.SimpleNamespace(devices=devices)),
    )
    made, timings = Throughput(stage), {"time/step": 3.0, "time/save": 0.0}
    assert made(5, 60, timings) == {}
    line = "mfu and bandwidth are shares of 4 TFLOP/s of float32 and 6 GB/s of 2 devices, measured"
    assert made.measure_peak() == line and made(5, 60, timings)["peak/flops"] == 4e12


def test_each_update_of_a_run_has_its_shares(tmp_path, capsys):
    sft = rlhf_jax.run(sft_config(tmp_path / "sft"))
    for line in lines(sft.run_dir, "timings.jsonl"):
        assert line["tokens_per_second/update"] > 0 and 0 < line["mfu"] == line["mfu/update"] < 1
    ppo = rlhf_jax.run(ppo_config(tmp_path / "ppo", sft.run_dir), reward_funcs=wordiness)
    phases = {"generate", "experience", "update"}  # no reward model
    for line in lines(ppo.run_dir, "timings.jsonl"):
        assert {name.split("/")[1] for name in line if name.startswith("mfu/")} == phases
        assert 0 < line["mfu"] < max(line[f"mfu/{phase}"] for phase in phases) and 0 < line["bandwidth/generate"]
        # The work of the phases is that of the update.
        work = sum(line[f"mfu/{phase}"] * line[f"time/{phase}"] for phase in phases)
        assert line["mfu"] == pytest.approx(work / line["step_time"])
    out = capsys.readouterr().out
    assert "ppo: mfu and bandwidth are shares of " in out and " | mfu 0.0" in out
