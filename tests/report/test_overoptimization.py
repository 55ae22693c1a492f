"""The gold reward of a run (measured, weight 0): its metric, its fit against √KL, and its chart on the page."""

import json
import math

import numpy as np
import pytest

from rlhf_jax import report
from rlhf_jax.config import PPOConfig
from rlhf_jax.report import charts, overoptimization, page
from tests.helpers import report_runs


def study(folder, weights=(1.0, 0.0), updates=40, **options):
    """A run with a second reward that rises and falls: 0.3 + d (1.5 - 0.8 log d) of its √KL."""
    options = {"reward_model_path": "runs/a/reward_model", "reward_funcs": ("m:gold",), **options}
    config = PPOConfig(reward_weights=weights, **options)
    run = report_runs.make(folder, config, updates=updates)
    rows = report_runs.read_lines(run.metrics)
    for row in rows:
        d = math.sqrt(row["objective/kl"])
        row["rewards/gold/mean"] = 0.3 + d * (1.5 - 0.8 * math.log(d))
        if "eval/kl" in row:
            row["eval_rewards/gold/mean"] = row["rewards/gold/mean"] - 0.1
    report_runs.lines(run.metrics, rows)
    return str(folder)


def curves_of(*folders):
    return charts.Curves(report.read(folders)[1])


def test_the_fit_finds_the_numbers_that_made_the_points():
    d = np.linspace(0, 5, 30)
    r = overoptimization.fitted_reward((0.3, 1.5, 0.8), d)
    assert overoptimization.fit(d, r) == pytest.approx((0.3, 1.5, 0.8), abs=1e-9)
    assert overoptimization.fitted_reward((0.3, 1.5, 0.8), np.array([0.0, 1.0, math.e])) == pytest.approx(
        [0.3, 1.8, 0.3 + math.e * 0.7]
    )
    holes = np.where(np.arange(30) % 3 == 0, np.nan, r)
    assert overoptimization.fit(d, holes) == pytest.approx((0.3, 1.5, 0.8), abs=1e-9)


@pytest.mark.parametrize("d", [[0, 1, 2, 3, 4], [1.0] * 30, [math.nan] * 30], ids=["few", "still", "none"])
def test_there_is_no_fit_of_too_little(d):
    assert overoptimization.fit(np.array(d, float), np.ones(len(d))) is None


def test_a_reward_of_weight_0_is_drawn_with_its_fit_and_its_turn(tmp_path):
    found = overoptimization.gold_reward_chart(curves_of(study(tmp_path / "a")))
    (fit,) = found["fits"]
    assert found["name"] == "gold"
    assert (fit["alpha"], fit["beta"]) == pytest.approx((1.5, 0.8), rel=0.01)
    assert fit["peak"] == pytest.approx(math.exp(1.5 / 0.8 - 1), rel=0.02)  # where the derivative is 0
    at_peak = np.interp(fit["peak"], fit["x"], fit["y"])
    assert at_peak == pytest.approx(max(fit["y"]), rel=0.01)
    (train,), (held_out,) = found["train"], found["eval"]
    assert len(train["x"]) == 40 and len(held_out["x"]) == 10
    lines = report_runs.read_lines(tmp_path / "a" / "metrics.jsonl")
    assert train["y"] == pytest.approx([row["rewards/gold/mean"] for row in lines], rel=1e-4)


def test_a_run_that_learns_from_all_its_rewards_has_no_such_chart(tmp_path):
    assert overoptimization.gold_reward_chart(curves_of(study(tmp_path / "a", weights=(1.0, 0.5)))) is None
    report_runs.make(tmp_path / "b", PPOConfig())
    assert overoptimization.gold_reward_chart(curves_of(str(tmp_path / "b"))) is None


@pytest.mark.parametrize(
    "options",
    [
        {"more_reward_models": ("b/reward_model", "c/reward_model"), "reward_ensemble": "min"},
        {"more_reward_models": ("b/reward_model",), "weights": (1.0, 1.0, 0.0)},
        {"reward_funcs": ()},  # the function was given to rlhf_jax.run
        {"reward_model_path": None, "reward_funcs": ("m:gold", "m:other"), "weights": (0.0, 1.0)},
        {"reward_funcs": ("get_soft_overlong_punishment", "p.m.gold"), "weights": (1.0, 1.0, 0.0)},
    ],
)
def test_it_is_known_whatever_the_other_rewards_are(tmp_path, options):
    assert overoptimization.gold_reward_chart(curves_of(study(tmp_path / "a", **options)))["name"] == "gold"


def test_the_page_has_the_chart_and_the_numbers(tmp_path):
    groups = report.read([study(tmp_path / "a"), study(tmp_path / "b", updates=30)])[1]
    html = page.render_page(groups, "study")
    assert (
        'data-scatter="measured"' in html
        and "maximum at d" in html
        and html.count('<i class="dot"') == 6  # runs, fits, and the difference of the two
        and "gold against √KL" in html
    )
    data = json.loads(html.split('id="data">')[1].split("</script>")[0])
    assert len(data["tabs"][0]["measured"]["fits"]) == 2
    report_runs.make(tmp_path / "plain", PPOConfig())
    assert 'data-scatter="measured"' not in page.render_page(report.read([str(tmp_path / "plain")])[1], "plain")
