"""The table and the file of a sweep, from the outcomes of its runs."""

import csv
import io

import pytest

from rlhf_jax.metrics.statistics import t_interval
from rlhf_jax.sweep import plan, results
from rlhf_jax.sweep.results import Outcome


@pytest.fixture
def sweep(tmp_path):
    flags = ["--rloo.learning_rate", "1e-5", "3e-5", "--seed", "0", "1"]
    return plan.parse(["--config", "quickstart_rloo.py", *flags, "--run_dir", str(tmp_path)])


def test_a_row_for_each_combination_without_the_seed(sweep):
    scores = (0.25, 0.75, 0.5)
    outcomes = [Outcome({"eval/scores": x, "objective/scores": 9.0, "objective/kl": 0.125}) for x in scores]
    lines = results.table(sweep, [*outcomes, Outcome({}, "loss is nan\nmore")]).splitlines()
    assert lines[0].split() == ["rloo.learning_rate", "seeds", "eval/scores", "objective/kl"]
    mean, half_width = t_interval([0.25, 0.75])
    low, high = mean - half_width, mean + half_width
    assert lines[2].split(maxsplit=2) == ["1e-5", "2", f"0.5 [{low:.4g}, {high:.4g}]  0.125 [0.125, 0.125]"]
    assert " ".join(lines[3].split()) == "3e-5 1, 1 failed 0.5 0.125"
    assert lines[4].startswith("[ ]: 95 % interval") and lines[5:] == [
        "failed: rloo.learning_rate=3e-5, seed=1: loss is nan"
    ]


def test_a_combination_without_a_finished_run_is_failed(sweep):
    lines = results.table(sweep, [Outcome({"eval/scores": 1.0})] * 2 + [Outcome({}, "no")] * 2).splitlines()
    assert " ".join(lines[3].split()) == "3e-5 0, 2 failed failed"


def test_the_file_has_a_row_for_each_run_that_ended(sweep):
    outcomes = [Outcome({"reward": 0.5, "kl": 1.0}), Outcome({}, "first, line\nsecond"), None, None]
    text = results.csv_text(sweep, outcomes)
    assert list(csv.DictReader(io.StringIO(text))) == [
        {
            "run": "rloo.learning_rate=1e-5,seed=0",
            **{"rloo.learning_rate": "1e-5", "seed": "0", "status": "finished", "kl": "1.0", "reward": "0.5"},
            "error": "",
        },
        {
            "run": "rloo.learning_rate=1e-5,seed=1",
            **{"rloo.learning_rate": "1e-5", "seed": "1", "status": "failed", "kl": "", "reward": ""},
            "error": "first, line\nsecond",
        },
    ]
