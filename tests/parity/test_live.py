"""The real TRL trains beside ours, from the same weights, on the same crafted responses; and what sweeps are of."""

import importlib
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.paths import ROOT
from tests.parity import replay

pytest.importorskip("torch")
from tests.parity.recording import draw, tiny  # noqa: E402

SCRIPTS = ROOT / "scripts" / "parity"


def script(name):
    """The module of a script."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("trainer, seed", [pytest.param("ppo", 6, marks=pytest.mark.runs), ("rloo", 3)])
def test_trls_trainer_and_ours_agree_side_by_side(trainer, seed, tmp_path, monkeypatch):
    """scripts/parity/parity_sweep.py does this for random seeds; its result is in docs/numerics.md."""
    pytest.importorskip("trl")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # which TRL's PPO asks, where there is a GPU
    recorder = importlib.import_module(f"tests.parity.recording.{trainer}")
    setting = draw.DRAW[trainer](seed, tmp_path / "case")
    assert setting.crafted
    recorder.record(setting)
    report = replay.open_case(setting.folder).run()
    assert report.passed, report.table()


def test_draws_are_those_of_their_seed_and_reach_every_choice(tmp_path):
    for trainer, of_seed in draw.DRAW.items():
        settings = [of_seed(seed, tmp_path) for seed in range(60)]
        assert settings[7] == of_seed(7, tmp_path) and settings[7] != settings[8]
        assert {one.crafted for one in settings} == {one.sequential for one in settings} == {True, False}
        assert len({one.accum for one in settings}) > 1
        values = {}
        for one in settings:
            for name, value in one.options.items():
                values.setdefault(name, set()).add(json.dumps(value))
        single = {name for name, seen in values.items() if len(seen) == 1}
        # Present or absent is their choice.
        assert single <= {"warmup_steps", "whiten_rewards", "stop_token_id", "sync_ref_model", "reward_weights"}, (
            trainer
        )
        assert any("warmup_steps" not in one.options for one in settings)


def test_crafted_responses_end_in_every_way():
    setting = tiny.Setting(Path("unused"))
    eos, pad, width = tiny.EOS, setting.pad, 8
    for after, fill in (("pad", pad), ("eos", eos), ("junk", None)):
        ids = tiny.crafted_responses(np.random.default_rng(0), 16, width, setting, after)
        first = np.where((ids == eos).any(1), (ids == eos).argmax(1), width)
        assert {0, width - 1, width} <= set(first.tolist())
        assert (ids[3] == pad).argmax() == 0 and first[4] > 0 and ids[4, first[4] - 1] == pad
        assert ids[6, -1] == pad and first[6] == width
        tails = [ids[row, end + 1 :] for row, end in enumerate(first)]
        if fill is not None:
            assert all((tail == fill).all() for tail in tails)
        else:
            assert any(((tail != eos) & (tail != pad)).any() for tail in tails)


def test_the_sweep_counts_what_replays_and_names_what_does_not():
    sweep = script("parity_sweep")
    line = {"trainer": "ppo", "seed": 0, "replays": True, "out": [], "worst": {"objective/kl": 2e-6}}
    bad = {**line, "seed": 4, "replays": False, "out": ["advantages"], "worst": {"final policy, tensors": 1e-3}}
    printed = sweep.summary([line, bad])
    assert "| ppo | 2 | 1 | 0.0e+00 | 2.0e-06 | 1.0e-03 |" in printed
    assert "ppo seed 4 is out: advantages" in printed and "rloo" not in printed
    kinds = {"arrays": ["advantages: mask", "losses of micro-batches", "value-model outputs", "reward-model scores"]}
    kinds |= {"metrics": ["objective/scores", "loss", "rewards//mean"], "weights": ["final policy, key biases"]}
    for wanted, names in kinds.items():
        assert {sweep.kind(name) for name in names} == {wanted}


def test_a_record_is_asked_for_by_flags(tmp_path):
    recorder = script("record_trl")
    arguments = ["rloo", str(tmp_path), "--accum", "2", "--crafted", "--functions", "low_ids", "sometimes"]
    trainer, setting = recorder.parse([*arguments, "--options", '{"beta": 0.1}'])
    assert trainer == "rloo" and setting.folder == tmp_path
    assert (setting.accum, setting.crafted, setting.sequential) == (2, True, False)
    assert setting.functions == ("low_ids", "sometimes") and setting.options == {"beta": 0.1}
