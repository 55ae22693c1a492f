"""Every metric that a run can log is explained, in docs/metrics.md and in a report alike."""

import ast
import re

import pytest

from rlhf_jax.algorithms import nonfinite
from rlhf_jax.metrics.alarms import ALARMS
from rlhf_jax.metrics.catalog import explain, explanations, page
from rlhf_jax.report import charts
from tests.helpers.paths import PACKAGE, ROOT

PREFIXES = "objective val policy loss clip_ratio sampling vespo completions rewards eval time memory nonfinite"
METRIC = re.compile(rf"({'|'.join(PREFIXES.split())})(/[a-z_]+)+")
# Bits, which are written as names; and what metrics are made of.
RAW = {"nonfinite/causes", "clip_ratio/low", "clip_ratio/high", "vespo/phi_seq"}


def literals():
    """Strings of the package which look like a metric's name, with the file."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and METRIC.fullmatch(node.value):
                yield node.value, path.name


def test_the_page_of_the_docs_is_the_table():
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == page(), (
        "python -m rlhf_jax.metrics.catalog > docs/metrics.md"
    )


def test_every_metric_that_the_code_names_is_explained():
    found = dict(literals())
    assert len(found) >= 45 and {"ppo.py", "nonfinite.py"} <= set(dict(map(reversed, found.items())))
    assert not {name: file for name, file in found.items() if name not in RAW and explain(name) is None}
    made = [f"alarm/{name}" for name in ALARMS] + [f"nonfinite/{name}" for name in nonfinite.CAUSES]
    made += ["rewards/my_reward/mean", "rewards/my_reward/std", "time/reward/my_reward"]
    assert not [name for name in made if explain(name) is None]


def test_every_metric_that_a_report_draws_is_explained():
    names = [name for _, section in charts.SECTIONS for chart in section for name in chart.metrics]
    assert not [name for name in names if explain(name.replace("*", "x")) is None]


def test_an_explanation_says_what_it_is_and_where_it_is_healthy():
    for name, explanation in explanations().items():
        assert explanation.meaning.endswith("."), name
        counter = name in ("step", "episode", "epoch", "num_tokens", "eps", "wall_time")
        assert counter or (explanation.healthy and explanation.action), name


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("eval_objective/kl", "objective/kl"),
        ("eval_my_set_objective/kl", "objective/kl"),
        ("eval_near_rewards/brevity/mean", "rewards/*/mean"),
        ("eval/loss", "eval/loss"),
        ("eval_books/accuracy", "eval/accuracy"),
        ("eval_near_completions/mean_length", "completions/mean_length"),
        ("train/margin", "margin"),
        ("eval_near_reward_std", "reward_std"),
        ("a_share", None),
        ("eval_near_a_share", None),
        ("eval_", None),
    ],
)
def test_the_twins_of_evaluations_have_the_same_explanation(name, means):
    explanation = explain(name)
    assert means in explanation.names if means else explanation is None
