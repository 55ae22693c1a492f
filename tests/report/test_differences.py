"""Differences between groups of runs: paired by seed and by prompt, by hand."""

import pytest

from rlhf_jax import report
from rlhf_jax.config import PPOConfig
from rlhf_jax.report import charts, differences, html_parts, page
from tests.helpers import report_runs


def make(folder, config, seed, metrics, samples=(), step=10):
    """A run with a line of metrics at one update, and samples: (prompt, score)."""
    run = report_runs.make(folder, config, updates=1, seed=seed, sample_rows=0)
    report_runs.lines(run.metrics, [{"step": step, **metrics}])
    rows = [{"query": prompt, "model response": "r", "score": score} for prompt, score in samples]
    run.write_completions(step, rows, "samples", [])


def rows_of(folder, tab="policy"):
    _, groups = report.read([str(folder)])
    return differences.differences(groups, tab), groups


def test_final_values_are_paired_by_seed(tmp_path):
    for seed, a, b in ((1, 1.0, 0.5), (2, 2.0, 1.0), (3, 4.0, 2.0)):
        make(tmp_path / f"a{seed}", PPOConfig(), seed, {"eval/scores": a, "objective/scores": 9.0})
        make(tmp_path / f"b{seed}", PPOConfig(kl_coef=0.2), seed, {"eval/scores": b, "eval/kl": 1.0}, step=20)
    make(tmp_path / "b4", PPOConfig(kl_coef=0.2), 4, {"eval/scores": 100.0})  # no run of this seed in the other group
    (row,), groups = rows_of(tmp_path)
    # Differences 0.5, 1, 2: mean 7/6, standard deviation 0.763763, t(2) 4.302653: 4.302653 * 0.763763 / sqrt(3).
    assert row == {
        **{"left": 0, "right": 1, "metric": "eval/scores", "pairs": 3, "unit": "seeds"},
        **{"mean": 1.167, "error": 1.9, "updates": ([10], [20])},
    }
    text = html_parts.group_differences(groups, "policy")
    assert "1.167 <small>± 1.9 (95 %)</small>" in text and "10 against 20" in text and "Few seeds say little" in text
    assert "Differences between groups" in page.render_page(groups, "t")


def test_without_evaluations_scores_of_training_are_compared_and_kl_where_both_have_it(tmp_path):
    for seed in (1, 2):
        make(tmp_path / f"a{seed}", PPOConfig(), seed, {"objective/scores": 3.0, "eval/kl": 2.0 * seed})
        make(tmp_path / f"b{seed}", PPOConfig(kl_coef=0.2), seed, {"objective/scores": 1.0, "eval/kl": 1.0})
    rows, _ = rows_of(tmp_path)
    assert [(row["metric"], row["mean"], row["error"]) for row in rows] == [
        ("objective/scores", 2, 0),
        ("eval/kl", 2, 13),  # differences 1 and 3: t(1) 12.706205, standard error 1
    ]


def test_scores_of_samples_are_paired_by_prompt(tmp_path):
    make(tmp_path / "a1", PPOConfig(), 1, {"loss": 1.0}, [("q0", 1.0), ("q1", 2.0), ("q2", 4.0)])
    make(tmp_path / "a2", PPOConfig(), 2, {"loss": 1.0}, [("q0", 3.0), ("q1", 4.0), ("q2", 4.0)])
    make(tmp_path / "b1", PPOConfig(kl_coef=0.2), 1, {"loss": 1.0}, [("q0", 1.0), ("q1", 3.0), ("q9", 9.0)])
    (row,), groups = rows_of(tmp_path)
    # Means over seeds 2 and 3 against 1 and 3: differences 1 and 0, standard error 0.707107 / sqrt(2).
    assert (row["metric"], row["pairs"], row["unit"]) == ("score of samples", 2, "prompts")
    assert (row["mean"], row["error"], row["updates"]) == (0.5, 0.5, ([10], [10]))
    text = html_parts.group_differences(groups, "policy")
    assert "0.5 <small>± 0.5 (standard error)</small>" in text and "2 prompts" in text


def test_the_last_samples_with_scores_count_and_damaged_rows_do_not(tmp_path):
    make(tmp_path / "a", PPOConfig(), 1, {"loss": 1.0}, [("q0", 1.0), ("q1", 2.0)])
    make(tmp_path / "b", PPOConfig(kl_coef=0.2), 1, {"loss": 1.0}, [("q0", 0.0), ("q0", 1.0), ("q1", 0.5)])
    completions = tmp_path / "a" / "completions"
    damaged = ['{"query": "q0"}', '{"query": 3, "score": 1}', "[]", '{"query": "q1", "score": "NaN"}', ""]
    (completions / "20.jsonl").write_text("\n".join(damaged))
    (completions / "training_30.jsonl").write_text('{"query": "q0", "score": 50.0}\n{"query": "q1", "score": 50.0}\n')
    (row,), _ = rows_of(tmp_path)
    assert (row["mean"], row["error"]) == (1, 0.5)  # 1 - 0.5 and 2 - 0.5: equal prompts are averaged


@pytest.mark.parametrize("seeds", [(1,), (3, 4)])
def test_fewer_than_two_pairs_are_no_table(tmp_path, seeds):
    for seed in (1, 2):
        make(tmp_path / f"a{seed}", PPOConfig(), seed, {"eval/scores": 1.0}, [("q", 1.0)])
    for seed in seeds:
        make(tmp_path / f"b{seed}", PPOConfig(kl_coef=0.2), seed, {"eval/scores": 1.0}, [("q", 1.0), ("p", 1.0)])
    rows, groups = rows_of(tmp_path)
    assert rows == [] and len(groups) == 2 and html_parts.group_differences(groups, "policy") == ""
    assert differences.differences(groups[:1], "policy") == []


def test_many_groups_are_compared_with_the_first(tmp_path):
    for number in range(8):
        make(tmp_path / str(number), PPOConfig(kl_coef=0.1 + number), 1, {"loss": 1.0}, [("q0", number), ("q1", 0.0)])
    rows, groups = rows_of(tmp_path)
    assert [(row["left"], row["right"]) for row in rows] == [(0, other) for other in range(1, 8)]
    assert "compared with the first alone" in html_parts.group_differences(groups, "policy")


def test_every_tab_has_its_metrics():
    assert differences.METRICS.keys() == charts.TABS.keys()
