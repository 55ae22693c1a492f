"""The curves and the recipe of a model card; what else it says is in test_run_folder.py."""

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlhf_jax.runtime import model_card


def test_a_curve_goes_from_its_least_to_its_greatest():
    assert model_card.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert model_card.sparkline([3.0, 3.0]) == "▅▅"
    assert model_card.sparkline([0.0, math.nan, 1.0]) == "▁·█"
    assert model_card.sparkline([math.nan, math.inf]) == "··"


def test_a_long_curve_is_means_of_stretches():
    line = model_card.sparkline(np.arange(1000))
    assert len(line) == 40 and list(line) == sorted(line)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=200))
def test_any_values_make_a_line(values):
    assert len(model_card.sparkline(values)) == min(len(values), 40)


def test_a_card_has_curves_and_the_recipes_name_alone(tmp_path):
    folder = tmp_path / "policy"
    folder.mkdir()
    (tmp_path / "recipe.json").write_text(json.dumps({"config": "/home/secret/my_ppo.py:big", "options": {}}))
    curves = {"objective/scores": [0.5, 1.0, 2.0], "objective/kl": [1.0]}
    model_card.write_model_card(str(folder), "ppo", {"dataset_name": "d"}, {}, curves=curves)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "| objective/scores | 0.5 | ▁▃█ | 2 |" in card and "objective/kl" not in card
    assert "Recipe: `my_ppo.py:big`" in card and "secret" not in card
