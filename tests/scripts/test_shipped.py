"""Shipped configs on GPUs: the page shows the rows, every config has one, its models leave room on its GPUs."""

import sys

import pytest

from rlhf_jax.config import files
from rlhf_jax.config import shipped as catalog
from tests.helpers.paths import ROOT, SCRIPTS

sys.path.insert(0, str(SCRIPTS / "scaling"))

import shipped  # noqa: E402
import slices  # noqa: E402

ON_A_CPU = ("quickstart", "goldrush")


def test_the_page_shows_the_configs_that_were_compiled():
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert slices.shown(page, "shipped")[1] == "\n".join(shipped.table(slices.read(shipped.PATH))) + "\n"


def test_every_shipped_config_for_gpus_and_every_variant_has_a_row():
    names = set()
    for name in files.shipped_configs():
        if not name.startswith(ON_A_CPU):
            variants = [v for v in catalog.variants(files.config_folder() / name) if not v.endswith("_cpu")]
            names |= {f"{name}:{variant}" for variant in variants} if variants else {name}
    assert names == set(shipped.CONFIGS)


def test_every_row_was_compiled_and_fits():
    rows = slices.read(shipped.PATH)
    assert set(rows) == set(shipped.CONFIGS)
    for name, row in rows.items():
        assert row["peaks"] and max(row["peaks"].values()) <= row["limit"], name


def test_a_config_keeps_its_options_and_takes_shapes_for_its_models(tmp_path):
    config = shipped.config_of("ppo_llama.py:3b", str(tmp_path))
    given = files.load_config("ppo_llama.py:3b")
    assert config.sft_model_path == config.reward_model_path == str(tmp_path / "Llama-3.2-3B")
    changed = {name for name, value in vars(given).items() if getattr(config, name) != value}
    assert changed == {"sft_model_path", "reward_model_path"}


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", shipped.CONFIGS)
def test_the_models_of_a_shipped_config_leave_room_on_its_gpus(name):
    row = shipped.measure(name, compiled=False)
    assert row["peaks"] == {} and 0 < row["held"] < 0.6 * row["limit"]
    assert row["held"] == slices.read(shipped.PATH)[name]["held"]  # the row is of the config as it is
