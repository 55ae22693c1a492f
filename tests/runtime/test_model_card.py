"""Model cards: where a model comes from, how it was made, its curves and its recipe."""

import math
import os

import numpy as np
import pytest
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
    curves = {"objective/scores": [0.5, 1.0, 2.0], "objective/kl": [1.0]}
    model_card.write_model_card(
        str(folder), "ppo", {"dataset_name": "d"}, {}, curves=curves, recipe="/home/secret/my_ppo.py:big"
    )
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "| objective/scores | 0.5 | ▁▃█ | 2 |" in card and "objective/kl" not in card
    assert "Recipe: `my_ppo.py:big`" in card and "secret" not in card


def test_a_policys_card_says_where_it_comes_from_and_how_it_was_made():
    config = {"stage": "ppo", "dataset_name": "trl-lib/tldr", "kl_coef": 0.07, "run_dir": "/home/me/secret", "x": None}
    metrics = {"objective/kl": 1.5, "loss": float("nan")}
    card = model_card.model_card("policy", "ppo", config, metrics, base_model="cleanrl/sft")
    assert "base_model: cleanrl/sft" in card and "datasets:\n- trl-lib/tldr" in card
    assert "| kl_coef | `0.07` |" in card and "| objective/kl | 1.5 |" in card and "| loss | nan |" in card
    assert "schulman2017" in card and "ziegler2019" in card and "AutoModelForCausalLM" in card
    assert "secret" not in card and "| x |" not in card and "| stage |" not in card


def test_a_card_of_rloo_names_and_cites_its_method():
    config = {"dataset_name": "trl-lib/tldr", "num_generations": 4, "run_dir": "runs/secret"}
    card = model_card.model_card("policy", "rloo", config, {"reward": 1.5}, base_model="cleanrl/sft")
    head, text = card.removeprefix("---\n").split("---\n", 1)
    assert "- rlhf_jax\n- rloo\n" in head and "base_model: cleanrl/sft" in head
    assert "# Policy by RLOO" in text and "| num_generations | `4` |" in text and "| reward | 1.5 |" in text
    assert "ahmadian2024back" in text and "arXiv:2402.14740" in text and "Gall{\\'e}" in text
    assert "schulman2017" not in text and "secret" not in card


def test_local_paths_and_scratch_models_stay_out_of_a_cards_head(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("runs/sft")
    card = model_card.model_card("reward_model", "reward", {"dataset_name": "pairs.jsonl"}, {}, base_model="runs/sft")
    assert "base_model" not in card and "datasets:" not in card and "from `runs/sft`" in card
    card = model_card.model_card("policy", "sft", {"scratch_model": "2x32x4", "dataset_name": "synthetic"}, {})
    assert "random weights (2x32x4)" in card and "built-in synthetic task" in card and "base_model" not in card


def test_a_card_says_what_its_folder_holds(tmp_path):
    for name in ("policy", "value"):
        os.makedirs(tmp_path / name)
        model_card.write_model_card(str(tmp_path / name), "ppo", {"dataset_name": "d"}, {}, base_model="a/b")
    assert (tmp_path / "policy" / "README.md").read_text().startswith("---\n")
    value = (tmp_path / "value" / "README.md").read_text()
    assert "# Value model by PPO" in value and "AutoModelForSequenceClassification" in value
    with pytest.raises(ValueError, match="policy, value, reward_model"):
        model_card.write_model_card(str(tmp_path / "other"), "ppo", {}, {})


def test_a_card_of_grpo_names_its_loss():
    card = model_card.model_card("policy", "grpo", {"dataset_name": "d", "loss_type": "cispo"}, {})
    assert "# Policy by GRPO\n" in card and "of a run of GRPO (`loss_type` cispo) with rlhf_jax" in card
    assert "shao2024deepseekmath" in card


def test_data_and_rewards_that_were_objects_are_not_called_a_data_set_of_the_hub():
    config = {"dataset_name": "trl-lib/tldr", "dataset_test_split": "validation", "learning_rate": 1e-6}
    card = model_card.model_card("policy", "ppo", config, {}, objects=("train_dataset", "reward_funcs"))
    assert "tldr" not in card and "on the data given to `rlhf_jax.run`" in card
    assert "`rlhf_jax.run(config, train_dataset=..., reward_funcs=...)`" in card and "config.json" not in card
    card = model_card.model_card("policy", "ppo", config, {}, objects=("reward_funcs",))
    assert "- trl-lib/tldr" in card and "`rlhf_jax.run(config, reward_funcs=...)`" in card
