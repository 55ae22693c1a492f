"""scripts/bench/rollouts.py: forced lengths on all sides, simulated steps, tables, and a small case with its bound."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from rlhf_jax.generate import Decoding, slots
from tests.helpers.paths import ROOT, SCRIPTS

sys.path.insert(0, str(SCRIPTS / "bench"))  # as for a script run from there

import rollouts  # noqa: E402
import rollouts_case  # noqa: E402
import rollouts_ours  # noqa: E402
import rollouts_simulated  # noqa: E402

BOUNDS = ROOT / "tests" / "scripts" / "benchmark_bounds.json"
LIMITS = [9, 1, 4, 12, 2, 6, 3, 5, 7, 11]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Ten rows of the tiny model with lengths of their own."""
    folder = tmp_path_factory.mktemp("rollouts")
    model, vocabulary = rollouts.prepare("tiny", folder)
    case = rollouts.Case("tiny", "tight", len(LIMITS), 8, 12, None, 1)
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


@pytest.mark.parametrize("longest_first", [False, True])
def test_ours_gives_each_row_its_length(work, longest_first):
    options = {"decoding": {"slots": 4}, "longest_first": longest_first}
    run = rollouts_ours.program(dataclasses.replace(work, **options), return_steps=True)
    rollout, steps = run(LIMITS)
    assert rollouts_ours.lengths_of(rollout) == LIMITS
    queue = sorted(LIMITS, reverse=True) if longest_first else LIMITS
    found = [int(np.asarray(count).sum()) for count in steps]
    assert found == list(rollouts_simulated.refill(queue, 4))


@pytest.mark.parametrize("system", ["one_batch", "continuous"])
def test_transformers_gives_each_row_its_length(work, system):
    pytest.importorskip("torch")
    pytest.importorskip("psutil")
    import rollouts_transformers

    with getattr(rollouts_transformers, system)(dataclasses.replace(work, slots=4)) as run:
        assert run(LIMITS) == LIMITS
        assert run([1] * len(LIMITS)) == [1] * len(LIMITS)


def test_rows_of_generate_end_at_their_limits():
    torch = pytest.importorskip("torch")
    import rollouts_transformers

    limits = rollouts_transformers.Limits(prompt_length=5, limits=[1, 3])
    assert [limits(torch.zeros(2, width), None).tolist() for width in (5, 6, 7, 8)] == [
        [False, False],
        [True, False],
        [True, False],
        [True, True],
    ]


def test_child_processes_read_the_rollouts_that_were_written(work, tmp_path):
    work.write(tmp_path / "x-case.json")
    assert rollouts_case.Rollouts.read(tmp_path / "x-case.json") == work
    assert work.tokens == sum(LIMITS)


def test_a_response_of_another_length_is_an_error(work):
    with pytest.raises(RuntimeError, match="responses of"):
        rollouts_case.measure(work, lambda limits: [1] * len(limits), 0.0)


# --- simulated steps


def test_steps_of_batches_and_slots_by_hand():
    lengths = [5, 2, 3, 9]  # live for 4, 1, 2, 8 steps
    assert rollouts_simulated.batches(lengths, 2) == (4 + 8, 2 * 12)
    # Slots 4, 1: after a step the row of 2 steps, after two more that of 8 beside the last step of the first.
    assert rollouts_simulated.refill(lengths, 2) == (1 + 2 + 8, 2 * 11)
    assert rollouts_simulated.refill([9, 5, 3, 2], 2) == (8, 16)
    assert rollouts_simulated.refill(lengths, 4) == (8, 32)
    assert rollouts_simulated.bound(lengths, 2) == 8
    assert rollouts_simulated.bound([5] * 4, 2) == 8


def test_slots_that_wait_for_others_to_be_idle_take_more_steps():
    # m = 2 of 4: the two rows that end after 1 and 3 steps are replaced together.
    assert rollouts_simulated.refill([2, 4, 10, 10, 3, 3], 4, 0.5) == (9, 36)
    assert rollouts_simulated.refill([2, 4, 10, 10, 9, 9], 4, 0.5).steps == 3 + 8
    assert rollouts_simulated.refill([2, 4, 10, 10, 9, 9], 4, 0.25).steps == 3 + 8
    assert rollouts_simulated.refill([2, 4, 10, 10, 9, 1], 4, 0.25).steps == 1 + 8


def test_live_rows_go_on_in_half_of_the_slots():
    lengths = [2] * 8 + [11] * 8  # 16 slots for a step, 8 for nine more
    assert rollouts_simulated.refill(lengths, 16, shrink=True) == (10, 16 + 9 * 8)
    assert rollouts_simulated.refill(lengths, 16) == (10, 160)
    assert rollouts_simulated.refill([1] * 4, 4, shrink=True) == (0, 0)
    assert rollouts_simulated.LEAST_ROWS == slots.LEAST_ROWS


# --- what is measured


def test_each_piece_is_alone_and_changed_in_the_default():
    sides = {side.name: side for side in rollouts.pieces(4)}
    assert len(sides) == 14
    off, default = sides["everything off"].decoding, sides["default"].decoding
    assert Decoding(**default) == Decoding()
    for name, side in sides.items():
        base = default if name.startswith("default") else off
        changed = {field for field, value in side.decoding.items() if value != base[field]}
        assert len(changed) == (name not in ("everything off", "default")), name
        Decoding(**side.decoding)
    assert sides["only 4 slots, longest first"].longest_first and not sides["only 4 slots"].longest_first


def result(speed, peak=100.0):
    return {
        "seconds": [1.0],
        "tokens_per_second": speed,
        "first_seconds": 2.0,
        "peak_mib": peak,
        "above_imports_mib": 9,
    }


def test_ratios_are_of_the_same_round_and_to_the_better_of_the_two():
    sides = [rollouts.Contestant(*names) for names in (("ours", "ours"), ("a", "generate"), ("b", "continuous"))]
    rounds = [
        {"ours": result(30, 110.0), "a": result(10), "b": result(5)},
        {"ours": result(80), "a": result(20), "b": result(6)},
    ]
    ours, a, b = rollouts.result_rows(sides, rounds)
    assert ours["ratio"] == {"median": 3.5, "low": 3, "high": 4} and ours["peak_mib"] == 110
    assert a["ratio"]["median"] == 1 and b["ratio"] == {"median": 0.4, "low": 0.3, "high": 0.5}
    text = rollouts.table([ours, a, b])
    assert "| ours | 55 (30 to 80) | 110 MiB | 9 MiB | 2.0 s | 3.50 (3.00 to 4.00) |" in text


def test_what_fails_is_shown_and_the_others_compared():
    sides = [rollouts.Contestant(*names) for names in (("ours", "ours"), ("a", "generate"), ("b", "continuous"))]
    rounds = [{"ours": result(30), "a": result(10), "b": {"error": "ValueError: no | pages\nmore"}}]
    rows = rollouts.result_rows(sides, rounds)
    assert rows[0]["ratio"]["median"] == 3
    assert "| b | failed: ValueError: no / pages |" in rollouts.table(rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rounds 0", "--rounds 0: give 1 or more"),
        ("--slots 65", "--slots 65: give 1 to --rows 64"),
        ('--decoding {"speed":1}', "--decoding"),
        ("--check", "--check needs --baseline FILE"),
        ("--baseline x.json --pieces", "--baseline needs --systems ours generate"),
    ],
)
def test_wrong_options_are_refused_with_reason(words, said, capsys):
    assert rollouts.main(words.split()) == 2
    assert said in capsys.readouterr().err
