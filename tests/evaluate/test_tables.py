"""The comparison as a table, samples side by side, and JSON."""

import io
import json

import numpy as np

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
