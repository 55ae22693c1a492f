"""The comparison's statistics, against numbers made by hand, and its text."""

import io
import json
import math

import numpy as np
import pytest

from rlhf_jax import evaluate


def test_mean_and_standard_error_by_hand():
    # Variance (ddof 1) of 1, 2, 3, 4 is 5/3; over 4, the root of 5/12.
    mean, error = evaluate.mean_and_standard_error([1, 2, 3, 4])
    assert mean == 2.5 and error == pytest.approx(math.sqrt(5 / 12), rel=1e-12)


def test_one_number_has_no_standard_error():
    assert evaluate.mean_and_standard_error([3.0])[0] == 3.0
    assert math.isnan(evaluate.mean_and_standard_error([3.0])[1])
    assert math.isnan(evaluate.mean_and_standard_error([])[0])


def test_a_difference_is_taken_prompt_by_prompt():
    difference, error = evaluate.paired_difference([11, 22, 33], [10, 20, 30])
    assert difference == 2.0 and error == pytest.approx(1 / math.sqrt(3))


def test_ties_count_half_in_a_win_rate():
    # 2 wins, 1 tie, 1 loss: 2.5 / 4. The ends of Wilson's interval solve (0.625 - x)^2 = z^2 x (1 - x) / 4.
    rate, low, high = evaluate.win_rate([2, 2, 1, 0], [1, 1, 1, 1])
    assert rate == 0.625
    z2 = 1.959963984540054**2
    roots = np.roots([1 + z2 / 4, -(2 * 0.625 + z2 / 4), 0.625**2])
    np.testing.assert_allclose(sorted(roots), [low, high], rtol=1e-9)


def test_a_win_rate_of_one_keeps_its_interval_inside():
    rate, low, high = evaluate.win_rate(np.ones(100), np.zeros(100))
    assert rate == 1.0 and high == 1.0 and low == pytest.approx(100 / (100 + 3.8414588))
    assert evaluate.win_rate(np.zeros(100), np.ones(100))[1] == pytest.approx(0.0, abs=1e-15)


def test_only_pairs_are_compared():
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        evaluate.win_rate([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="at least one pair"):
        evaluate.win_rate([], [])


def test_the_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        wins = rng.random(60) < 0.7
        _, low, high = evaluate.win_rate(wins, np.full(60, 0.5))
        covered += low <= 0.7 <= high
    assert 930 <= covered <= 975


def test_reliability_by_hand():
    low, high = evaluate.reliability([0.0, math.log(2), -math.log(9), math.log(19)], bins=2)
    # A tie and one of 2 to 1 that is right; one of 9 to 1 that is wrong and one of 19 to 1 that is right.
    assert low == {"low": 0.5, "high": 0.75, "pairs": 2, "confidence": pytest.approx(7 / 12), "accuracy": 0.75}
    assert high == {"low": 0.75, "high": 1.0, "pairs": 2, "confidence": pytest.approx(0.925), "accuracy": 0.5}
    assert evaluate.calibration_error([low, high]) == pytest.approx((abs(0.75 - 7 / 12) + 0.425) / 2)
    assert [row["pairs"] for row in evaluate.reliability([])] == [0] * 10
    assert evaluate.calibration_error(evaluate.reliability([])) == 0


def test_a_calibrated_model_has_no_calibration_error_and_a_sure_one_that_guesses_has_a_half():
    draw = np.random.default_rng(1)
    sure = draw.uniform(0, 4, 200_000)
    right = draw.random(len(sure)) < 1 / (1 + np.exp(-sure))
    assert evaluate.calibration_error(evaluate.reliability(np.where(right, sure, -sure))) < 0.01
    guesses = evaluate.reliability(np.where(draw.random(10_000) < 0.5, 50.0, -50.0))
    assert evaluate.calibration_error(guesses) == pytest.approx(0.5, abs=0.02)


def test_unigram_entropy_by_hand():
    # Frequencies 1/2, 1/4, 1/4.
    assert evaluate.unigram_entropy([[5, 5], [7, 9]]) == pytest.approx(1.5 * math.log(2))
    assert evaluate.unigram_entropy([np.full(9, 3)]) == 0.0
    assert evaluate.unigram_entropy([]) == 0.0
    assert evaluate.unigram_entropy(iter([range(8)])) == pytest.approx(math.log(8))


def rows():
    gold = np.array([1.0, 2.0, 3.0, 2.0])
    return [
        evaluate.summarize("demonstrations", gold=gold),
        evaluate.summarize("SFT", gold=gold, score=gold, kl=[0, 0, 0, 0], lengths=[3, 5, 4, 4], ended=[1, 1, 1, 0]),
        evaluate.summarize("PPO", gold=gold + 1, score=gold * 2, kl=gold, lengths=[3] * 4, ended=[1] * 4, against=gold),
    ]


def test_a_row_holds_what_was_given_and_no_more():
    first, _, third = rows()
    assert set(first) == {"name", "samples", "gold_reward", "gold_reward_se"}
    assert third["samples"] == 4 and third["eos_rate"] == 1.0 and third["win_rate"] == 1.0
    assert third["gold_reward"] == 3.0 and third["length"] == 3.0 and third["length_se"] == 0.0


def test_the_table_has_aligned_columns_and_dashes_for_what_is_missing():
    head, rule, *lines = evaluate.comparison_table(rows()).splitlines()
    assert head.split("  ")[-1] == "win rate (95 %)" and set(rule) == {"-"} and len(rule) >= len(head)
    cells = [[cell for cell in line.split("  ") if cell] for line in lines]
    cells = [[cell.strip() for cell in line] for line in cells]
    assert cells == [
        ["demonstrations", "2.000 ± 0.408", "-", "-", "-", "-", "-"],
        ["SFT", "2.000 ± 0.408", "2.000 ± 0.408", "0.00 ± 0.00", "4.0 ± 0.4", "75.0 %", "-"],
        ["PPO", "3.000 ± 0.408", "4.000 ± 0.816", "2.00 ± 0.41", "3.0 ± 0.0", "100.0 %", "100.0 % (51.0 to 100.0)"],
    ]
    assert len({len(line) for line in [head, rule, *lines]}) == 1


def test_a_column_that_nobody_fills_is_left_out():
    assert "win rate" not in evaluate.comparison_table(rows()[:2])


SAMPLES = [
    {
        "post": "SUBREDDIT: r/x\n\n" + "word " * 30,
        "responses": [
            {"name": "reference", "text": " Tom lost a key.", "gold": 1.0},
            {"name": "SFT", "text": "Tom lost " * 6, "gold": 0.25},
            {"name": "PPO", "text": ""},
        ],
    }
]


def test_samples_stand_side_by_side_within_the_width():
    text = evaluate.side_by_side(SAMPLES, width=60)
    assert all(len(line) <= 60 for line in text.splitlines())
    assert text.startswith("== Sample 1\nSUBREDDIT: r/x\n\nword")
    assert "reference (gold    | SFT (gold 0.25)    | PPO\n1.00)              |" in text
    assert "Tom lost a key." in text and "(empty)" in text


def test_the_table_is_printed_last_and_everything_is_kept_in_json(tmp_path):
    stream = io.StringIO()
    evaluate.print_comparison(rows(), SAMPLES, title="On 4 held-out posts", stream=stream)
    text = stream.getvalue()
    assert text.index("== Sample 1") < text.index("On 4 held-out posts") < text.index("gold reward")
    path = tmp_path / "comparison.json"
    evaluate.write_comparison(str(path), rows(), SAMPLES, seed=1, missing=float("nan"))
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["rows"] == rows() and found["samples"] == SAMPLES
    assert found["seed"] == 1 and found["missing"] == "NaN"
