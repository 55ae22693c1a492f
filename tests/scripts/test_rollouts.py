"""scripts/bench/rollouts.py: workloads, forced lengths on all sides, bytes of decoding, tables, a small case with its
bound."""

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


def test_small_case_of_nano_vllm_reports_bytes_a_second_of_its_decode_steps(capfd, tmp_path):
    words = [
        "--short",
        "--workload",
        "nano_vllm",
        "--systems",
        "ours",
        "--repeats",
        "1",
        "--json",
        str(tmp_path / "out"),
    ]
    code = rollouts.main([*words, "--decoding", '{"slots": 8, "shrink": true}', "--response_length", "32"])
    shown = capfd.readouterr()
    assert code == 0, shown.err
    (case,) = json.loads((tmp_path / "out").read_text())["cases"]
    (row,) = case["rows"]
    # 16 rows of 3 to 32 tokens in 8 slots: more steps than the longest row has, fewer than one row after another.
    assert 31 < row["steps"] < 16 * 31
    assert row["step_bytes"] > 4 * rollouts.Shape.of(rollouts.model_of("tiny")).matrices
    (result,) = (results["ours"] for results in case["rounds"])
    per_second = row["step_bytes"] * row["steps"] / (result["seconds"][0] - result["prompt_seconds"])
    assert row["bytes_per_second"]["median"] == pytest.approx(per_second)
    assert "nano_vllm lengths, 16 rows, up to 32 + up to 32 tokens" in shown.out and "GB/s" in shown.out


# --- lengths


def test_lengths_are_drawn_by_seed_with_their_mean_and_within_their_columns():
    for kind, mean in (("lognormal", 0.225), ("tight", 0.5)):
        drawn = rollouts.drawn_lengths(kind, 20_000, 1024, seed=3)
        assert drawn == rollouts.drawn_lengths(kind, 20_000, 1024, seed=3)
        assert drawn != rollouts.drawn_lengths(kind, 20_000, 1024, seed=4)
        assert 1 <= min(drawn) and max(drawn) <= 1024
        assert np.mean(drawn) == pytest.approx(mean * 1024, rel=0.03)
    assert np.std(rollouts.drawn_lengths("tight", 20_000, 1024, seed=3)) == pytest.approx(102.4, rel=0.03)


def test_nano_vllm_is_the_public_benchmark_and_scales_down():
    prompts, limits = rollouts.nano_vllm(256, 151_936, 1024, 1024, seed=0)
    assert (sum(map(len, prompts)), sum(limits)) == (142_827, 133_966)  # as its README says
    assert min(map(len, prompts)) >= 100 and min(limits) >= 100 and max(limits) <= 1024
    prompts, limits = rollouts.nano_vllm(500, 64, 32, 128, seed=1)
    assert {len(prompt) for prompt in prompts} == set(range(3, 33)) and max(map(max, prompts)) == 63
    assert (min(limits), max(limits)) == (12, 128)


@pytest.mark.parametrize("system", rollouts_child.SIDES)
def test_each_side_gives_each_row_its_length(work, system):
    if system != "ours":
        pytest.importorskip("torch")
    prompts = [prompt[: 1 + row % 8] for row, prompt in enumerate(work.prompts)]
    side = rollouts_child.SIDES[system](dataclasses.replace(work, prompts=prompts, decoding={"slots": 4}))
    lengths, steps = side.generate(LIMITS)
    assert lengths == LIMITS and steps >= max(LIMITS) - 1 and side.imports_mib > 0
    assert side.generate([1] * len(LIMITS)) == ([1] * len(LIMITS), 0)


def test_a_response_of_another_length_is_an_error(work):
    side = rollouts_child.Side(lambda limits: ([2] * len(limits), 1), 0.0, lambda: 1.0, lambda: 1.0)
    with pytest.raises(RuntimeError, match="responses of"):
        rollouts_child.measure(work, side)


# --- what is measured


def result(speed, peak=100.0):
    return {
        "seconds": [1.0],
        "tokens_per_second": speed,
        "first_seconds": 2.0,
        "peak_mib": peak,
        "above_imports_mib": 9,
        "prompt_seconds": 0.5,
        "decode_seconds": 0.5,
        "steps": 100,
        "step_bytes": 5e6,
        "bytes_per_second": 1e9,
        "copy_rate": 4e9,
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
    text = rollouts.decode_table([ours, theirs])
    assert "| ours | 0.50 s | 100 | 5.00 ms | 0.005 GB | 1.0 GB/s | 4.0 GB/s | 25% |" in text


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
