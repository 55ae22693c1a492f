"""scripts/bench/rollouts.py: forced lengths on all sides, tables, and a small case with its bound."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from tests.helpers.paths import ROOT, SCRIPTS

sys.path.insert(0, str(SCRIPTS / "bench"))  # as for a script run from there

import rollouts  # noqa: E402
import rollouts_child  # noqa: E402

BOUNDS = ROOT / "tests" / "scripts" / "benchmark_bounds.json"
LIMITS = [9, 1, 4, 12, 2, 6, 3, 5, 7, 11]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Ten rows of the tiny model with lengths of their own."""
    folder = tmp_path_factory.mktemp("rollouts")
    model, vocabulary = rollouts.prepare("tiny", folder)
    case = rollouts.Case("tiny", "tight", len(LIMITS), 8, 12, 1)
    made = rollouts.rollouts_of(case, model, vocabulary, 0, 1)
    return dataclasses.replace(made, limits=LIMITS)


# --- the small case of CI


@pytest.mark.benchmark
def test_small_case_is_not_slower_or_larger_beside_generate_than_its_bounds(capfd, monkeypatch, tmp_path):
    pytest.importorskip("torch")
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # of the tests: programs that are not optimised
    words = ["--short", "--baseline", str(BOUNDS), "--check", "--json", str(tmp_path / "out.json")]
    # A host that others share halves either system's speed for a while: what is slower is slower three times.
    for _ in range(3):
        code = rollouts.main(words)
        shown = capfd.readouterr()
        if code == 0:
            break
    assert code == 0, shown.out + shown.err
    assert "no ratio is below its bound" in shown.out
    (case,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [row["name"] for row in case["rows"]] == ["ours", "transformers, generate"]
    assert all(0 < row["above_imports_mib"] < row["peak_mib"] for row in case["rows"])


# --- lengths


def test_lengths_are_drawn_by_seed_with_their_mean_and_within_their_columns():
    for kind, mean in (("lognormal", 0.225), ("tight", 0.5)):
        drawn = rollouts.drawn_lengths(kind, 20_000, 1024, seed=3)
        assert drawn == rollouts.drawn_lengths(kind, 20_000, 1024, seed=3)
        assert drawn != rollouts.drawn_lengths(kind, 20_000, 1024, seed=4)
        assert 1 <= min(drawn) and max(drawn) <= 1024
        assert np.mean(drawn) == pytest.approx(mean * 1024, rel=0.03)
    assert np.std(rollouts.drawn_lengths("tight", 20_000, 1024, seed=3)) == pytest.approx(102.4, rel=0.03)


@pytest.mark.parametrize("system", rollouts_child.SIDES)
def test_each_side_gives_each_row_its_length(work, system):
    if system != "ours":
        pytest.importorskip("torch")
    run, imports = rollouts_child.SIDES[system](dataclasses.replace(work, decoding={"slots": 4}))
    assert run(LIMITS) == LIMITS and imports > 0
    assert run([1] * len(LIMITS)) == [1] * len(LIMITS)


def test_a_response_of_another_length_is_an_error(work):
    with pytest.raises(RuntimeError, match="responses of"):
        rollouts_child.measure(work, lambda limits: [1] * len(limits), 0.0)


# --- what is measured


def result(speed, peak=100.0):
    return {
        "seconds": [1.0],
        "tokens_per_second": speed,
        "first_seconds": 2.0,
        "peak_mib": peak,
        "above_imports_mib": 9,
    }


def test_ratios_are_of_the_same_round():
    rounds = [
        {"ours": result(30, 110.0), "generate": result(10)},
        {"ours": result(80), "generate": result(20)},
    ]
    ours, theirs = rollouts.result_rows(rounds)
    assert ours["ratio"] == {"median": 3.5, "low": 3, "high": 4} and ours["peak_mib"] == 110
    assert rollouts.ratios(rounds)["memory"]["high"] == 1.0 and "ratio" not in theirs
    text = rollouts.table([ours, theirs])
    assert "| ours | 55 (30 to 80) | 110 MiB | 9 MiB | 2.0 s | 3.50 (3.00 to 4.00) |" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rounds 0", "--rounds 0: give 1 or more"),
        ('--decoding {"speed":1}', "--decoding"),
        ("--check", "--check needs --baseline FILE"),
        ("--baseline x.json --systems ours", "--baseline needs --systems ours generate"),
    ],
)
def test_wrong_options_are_refused_with_reason(words, said, capsys):
    assert rollouts.main(words.split()) == 2
    assert said in capsys.readouterr().err
