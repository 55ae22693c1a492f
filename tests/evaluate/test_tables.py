"""The comparison as a table, samples side by side, and JSON."""

import io
import json

import numpy as np
import pytest

from rlhf_jax import evaluate


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


def test_rewards_by_name_have_a_column_each_and_every_mean_an_interval():
    exact, graded = [1.0, 1.0, 1.0, 0.0], [0.5, 1.5, 0.5, np.nan]
    row = evaluate.summarize(
        "GRPO", rewards={"exact": exact, "graded": graded}, lengths=[4, 6, 4, 6], entropy=[0.5] * 4
    )
    # Wilson's interval of 3 in 4, as of a win rate; 5/6 -+ 1.96 sqrt(1/3 / 3)
    low, high = 0.300642, 0.954413
    assert row["rewards"]["exact"] == pytest.approx({"mean": 0.75, "se": 0.25, "low": low, "high": high}, abs=1e-6)
    graded = {"mean": 5 / 6, "se": 1 / 3, "low": 5 / 6 - 1.959964 / 3, "high": 5 / 6 + 1.959964 / 3}
    assert row["rewards"]["graded"] == pytest.approx(graded, abs=1e-6)
    head, _, line, other = evaluate.comparison_table([row, evaluate.summarize("SFT", lengths=[5] * 4)]).splitlines()
    assert head.split() == ["exact", "graded", "length", "entropy"]
    assert [cell.strip() for cell in line.split("  ") if cell] == [
        *("GRPO", "0.750 (0.301 to 0.954)", "0.833 (0.180 to 1.487)", "5.0 (3.9 to 6.1)", "0.500 (0.500 to 0.500)")
    ]
    assert other.split() == ["SFT", "-", "-", "5.0", "(5.0", "to", "5.0)", "-"]


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
    assert "reference (gold     |                   |\n1.00)               | SFT (gold 0.25)   | PPO\n" in text
    assert "Tom lost a key.     | Tom lost Tom lost | (empty)\n                    | Tom lost Tom lost |" in text


def test_wide_characters_take_two_columns_of_the_terminal():
    responses = [{"name": "SFT", "text": "これは" * 20}, {"name": "PPO", "text": "a b"}]
    first, *_ = evaluate.side_by_side([{"post": "", "responses": responses}], width=60).splitlines()[5:]
    wide, _, rest = first.partition("|")
    assert 2 * len(wide.strip()) + 1 <= 30 and rest.strip() == "a b"


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
