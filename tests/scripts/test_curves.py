"""scripts/parity/curves.py: a picture of runs, and runs that are none."""

import importlib.util
import json
import sys

import numpy as np
import pytest

from tests.helpers.paths import SCRIPTS

spec = importlib.util.spec_from_file_location("curves", SCRIPTS / "parity" / "curves.py")
curves = sys.modules["curves"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(curves)


def run_of(folder, entropy):
    folder.mkdir()
    lines = [{"step": n, "rewards/exact_match_reward/mean": n / 10, entropy: 1.0} for n in range(1, 11)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_of_two_algorithms_are_one_picture(tmp_path):
    pytest.importorskip("matplotlib")
    grpo, ppo = run_of(tmp_path / "grpo", "entropy"), run_of(tmp_path / "ppo", "policy/entropy_avg")
    picture = tmp_path / "docs" / "picture.png"
    assert curves.main(["--picture", str(picture), f"GRPO={grpo}", f"PPO={ppo}"]) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_point_is_the_mean_of_five_updates(tmp_path):
    x, y = curves.curve(run_of(tmp_path / "run", "entropy"), curves.PANELS["task"][0])
    np.testing.assert_allclose(y, [0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    assert x.tolist() == [5, 6, 7, 8, 9, 10]


def test_a_score_is_plotted_against_the_kl(tmp_path):
    lines = [{"step": n, "objective/scores": float(n), "objective/kl": 2.0 * n} for n in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    x, y = curves.curve(tmp_path, curves.PANELS["kl"][1])
    np.testing.assert_allclose(x, [6.0, 8.0])
    np.testing.assert_allclose(y, [3.0, 4.0])


@pytest.mark.parametrize("given", ["GRPO", "GRPO=nowhere"])
def test_a_folder_without_metrics_is_refused(given, tmp_path, capsys):
    assert curves.main(["--picture", str(tmp_path / "x.png"), given]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


def test_a_run_of_another_task_is_refused(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    pytest.importorskip("matplotlib")
    assert curves.main(["--picture", str(tmp_path / "x.png"), f"GRPO={folder}"]) == 2
    assert "rewards/exact_match_reward/mean" in capsys.readouterr().err
