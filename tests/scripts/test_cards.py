"""The largest model of a card: the page shows the rows, models are tried from large to small and once."""

import sys

import pytest

from rlhf_jax import models
from rlhf_jax.config.check import check
from tests.helpers.paths import ROOT, SCRIPTS

sys.path.insert(0, str(SCRIPTS / "scaling"))

import cards  # noqa: E402
import slices  # noqa: E402

GIB = 2**30


def test_the_page_shows_the_models_that_were_compiled():
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert slices.shown(page, "cards")[1] == "\n".join(cards.table(slices.read(cards.PATH))) + "\n"


def test_models_of_a_family_go_from_large_to_small():
    def size(name):
        known = slices.SHAPES.get(name)
        if known is not None:
            return known["parameters"]
        model = models.pythia(name)
        return model.config.num_hidden_layers * model.config.hidden_size**2

    for family in cards.FAMILIES.values():
        sizes = [size(name) for name in family]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("way", cards.WAYS)
def test_every_way_is_a_valid_config_of_one_device(way):
    config = cards.config_of(way, "folder")
    check(config)
    assert (config.mesh_data, config.mesh_fsdp, config.mesh_tensor) == (1, 1, 1)
    assert config.use_peft == ("LoRA" in way) and config.load_in_4bit == ("4 bits" in way)


def test_the_search_ends_at_the_first_model_that_fits(tmp_path, monkeypatch):
    asked = []

    def fill(path, name, programs, make, *args):
        asked.append(name)
        return {"fits": args[1] == "1b"}

    monkeypatch.setattr(slices, "fill", fill)
    cards.find(tmp_path / "rows.json", "24gb", "PPO", "Pythia")
    assert asked == [f"PPO:{model}:24gb" for model in ("12b", "6.9b", "2.8b", "1.4b", "1b")]


def test_what_was_compiled_for_a_gpu_is_held_against_every_card_that_it_stands_for(tmp_path, monkeypatch):
    rows = tmp_path / "rows.json"
    programs = {name: {"peak": 20 * GIB, "refused": ""} for name in cards.PROGRAMS}
    row = {"topology": "a6000:1", "limit": 18 * GIB, "peak": 20 * GIB, "fits": False, "programs": programs}
    slices.keep(rows, "PPO:70m:24gb", row)
    monkeypatch.setattr(cards, "FAMILIES", {"Pythia": ("70m",)})
    cards.find(rows, "48gb", "PPO", "Pythia")  # nothing is compiled
    found = slices.read(rows)["PPO:70m:48gb"]
    assert found["fits"] and found["programs"] == programs and found["limit"] == cards.CARDS["48gb"][1] * 3 // 4
    assert cards.same_programs(slices.read(rows), "80gb", "70m", "PPO") is None  # compiled for an A100


def test_a_cell_names_the_largest_that_fits_none_or_nothing_where_not_all_were_tried():
    programs = dict.fromkeys(cards.PROGRAMS, {})
    fits, too_large = ({"fits": fits, "peak": 6 * GIB, "programs": programs} for fits in (True, False))
    assert cards._cell([("2.8b", too_large), ("1b", fits), ("410m", None)]) == "1b: 6.0"
    assert cards._cell([("2.8b", too_large), ("1b", too_large)]) == "none"
    assert cards._cell([("2.8b", too_large), ("1b", None)]) == ""
    assert cards._cell([("1b", {**fits, "programs": {"update": {}}}), ("410m", None)]) == ""
