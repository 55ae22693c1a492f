"""scripts/scaling/scaling.py: pages show the rows, shapes are the models', searches end where something fits."""

import importlib.util
import math
import sys

import jax
import pytest

from rlhf_jax import models
from rlhf_jax.config import files
from rlhf_jax.config import shipped as catalog
from rlhf_jax.config.check import check
from rlhf_jax.dry_run.compiling import Program
from tests.helpers.paths import ROOT, SCRIPTS

spec = importlib.util.spec_from_file_location("scaling", SCRIPTS / "scaling" / "scaling.py")
scaling = sys.modules["scaling"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scaling)

GIB = scaling.GIB
ROWS = {name: scaling.read(scaling.DOCS / "scaling" / table.file) for name, table in scaling.TABLES.items()}
CARDS, SHIPPED = scaling.TABLES["cards"], scaling.TABLES["shipped"]
ON_A_CPU = ("quickstart", "goldrush")


@pytest.mark.parametrize("name", scaling.TABLES)
def test_the_page_shows_the_rows_that_are_there(name):
    table = scaling.TABLES[name]
    page = (ROOT / "docs" / table.page).read_text()
    assert scaling.shown(page, name)[1] == "\n".join(table.lines(ROWS[name])) + "\n"


@pytest.mark.parametrize("name", scaling.SHAPES)
def test_a_shape_has_the_parameters_of_the_published_model(name):
    model = models.Model.from_hf_config(scaling.SHAPES[name]["config"], images=name in scaling.IMAGE_MODELS)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == scaling.SHAPES[name]["parameters"]


def test_slices_go_from_small_to_large_and_their_chips_divide_the_batch():
    for kind in (scaling.V5E, scaling.V5P):
        chips = [math.prod(map(int, topology.split(":")[1].split("x"))) for topology in kind]
        assert chips == sorted(set(chips))
        for count in chips:
            config = scaling.rloo_config("path", min(count, 128))
            assert config.batch_size % config.rollout_batch_size == config.batch_size % config.micro_batch_size == 0


def test_models_of_a_family_go_from_large_to_small():
    def size(name):
        if name in scaling.SHAPES:
            return scaling.SHAPES[name]["parameters"]
        config = models.pythia(name).config
        return config.num_hidden_layers * config.hidden_size**2

    for family in scaling.FAMILIES.values():
        sizes = [size(name) for name in family]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("way", scaling.WAYS)
def test_every_way_of_a_card_is_a_valid_config(way):
    make, options = scaling.WAYS[way]
    config = scaling.dataclasses.replace(make("folder"), **options)
    check(config)
    assert config.use_peft == ("LoRA" in way) and config.load_in_4bit == ("4 bits" in way)


# --- rows


@pytest.fixture
def compiled(monkeypatch):
    """Programs that were compiled, of stages that hold 4 of 8 bytes; `peaks` has the peak of each."""
    held = {"topology": "v5e:1x1", "limit": 8, "parts": {}, "least": 4, "peak": 4, "fits": True}
    asked, peaks = [], {"update": 6, "generate": 7}

    def in_process(config, name):
        asked.append((config.topology, name))
        return Program(name, 0.0, peaks[name], 0, 0, 0, 0)

    monkeypatch.setattr(scaling, "without_programs", lambda *_: {**held, "programs": {}})
    monkeypatch.setattr(scaling.in_processes, "in_process", in_process)
    return asked, peaks


def test_a_program_is_compiled_once(tmp_path, compiled):
    rows, name = tmp_path / "rows.json", "gpus_ppo:70m:full:h100:1"
    for programs in (("update",), ("update",), scaling.PROGRAMS, scaling.PROGRAMS):
        assert scaling.TABLES["gpus_ppo"].try_one(rows, name, programs)
    assert compiled[0] == [("h100:1", "update"), ("h100:1", "generate")]
    assert scaling.read(rows)[name]["peak"] == 7


def test_nothing_more_is_compiled_for_a_slice_that_is_too_small(tmp_path, compiled):
    compiled[1]["update"] = 9
    assert not scaling.TABLES["gpus_ppo"].try_one(tmp_path / "rows.json", "gpus_ppo:70m:full:h100:1", scaling.PROGRAMS)
    assert [name for _, name in compiled[0]] == ["update"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--tables rloo --only Qwen2.5-0.5B --kinds v5e", ["rloo:Qwen2.5-0.5B:full:v5e:1x1"]),
        ("--tables cards --only Pythia --kinds 24gb", ["PPO:12b:24gb", "PPO:6.9b:24gb", "PPO:2.8b:24gb"]),
    ],
)
def test_slices_and_models_are_tried_until_one_fits(words, names, tmp_path, monkeypatch):
    asked = []
    fits = "rloo:Qwen2.5-0.5B:full:v5e:1x1", "PPO:2.8b:24gb"
    fill = lambda path, name, *_: asked.append(name) or {"fits": name in fits}  # noqa: E731
    monkeypatch.setattr(scaling, "fill", fill)
    monkeypatch.setattr(scaling, "write_table", lambda *_: None)
    assert scaling.main([*words.split(), "--rows", str(tmp_path)]) == 0
    assert asked[: len(names)] == names and asked[len(names)] not in names


def test_models_and_kinds_that_no_table_has_are_named(capsys):
    assert scaling.main(["--only", "Qwen9"]) == 2 and "--only Qwen9" in capsys.readouterr().err
    assert scaling.main(["--tables", "cards", "--kinds", "v5e"]) == 2 and "24gb" in capsys.readouterr().err


def test_what_was_compiled_for_a_gpu_is_held_against_every_card_that_it_stands_for(tmp_path, compiled):
    rows = tmp_path / "rows.json"
    programs = {name: {"peak": 20 * GIB, "refused": ""} for name in scaling.PROGRAMS}
    row = {"topology": "a6000:1", "limit": 18 * GIB, "peak": 20 * GIB, "fits": False, "programs": programs}
    scaling.keep(rows, "PPO:70m:24gb", row)
    assert CARDS.try_one(rows, "PPO:70m:48gb", scaling.PROGRAMS) and compiled[0] == []
    assert scaling.read(rows)["PPO:70m:48gb"]["limit"] == scaling.CARDS["48gb"][1] * 3 // 4
    assert CARDS.same_programs(scaling.read(rows), "PPO:70m:80gb") is None  # compiled for an A100


# --- lines


def test_a_cell_names_the_largest_that_fits_none_or_nothing_where_not_all_were_tried():
    programs = dict.fromkeys(scaling.PROGRAMS, {})
    fits, too_large = ({"fits": fits, "peak": 6 * GIB, "programs": programs} for fits in (True, False))
    assert scaling.largest_cell([("2.8b", too_large), ("1b", fits), ("410m", None)]) == "1b: 6.0"
    assert scaling.largest_cell([("2.8b", too_large), ("1b", too_large)]) == "none"
    assert scaling.largest_cell([("2.8b", too_large), ("1b", None)]) == ""
    assert scaling.largest_cell([("1b", {**fits, "programs": {"update": {}}}), ("410m", None)]) == ""


def row(**changed):
    parts = {"policy": GIB, "optimizer": 2 * GIB, "reference": GIB // 2}
    found = {"topology": "v5e:2x2", "chips": 4, "mesh": [1, 4, 1], "micro": 16, "parts": parts, "cache": GIB}
    found |= {"limit": 16 * GIB, "least": 5 * GIB, "peak": 9 * GIB, "fits": True}
    found["logits"] = {"whole": 2**31, "block": 200 * 2**20}
    update = {"peak": 9 * GIB, "refused": "", "largest": [2**28, "sub.1 f32[345,151936]{1,0:T(8,128)}"]}
    return found | {"programs": {"update": update, "generate": {**update, "peak": 6 * GIB}}} | changed


def test_a_line_shows_the_logits_and_the_largest_array():
    (line,) = scaling.rloo_line("Qwen2.5-0.5B", "full", [row(), None]).splitlines()
    assert line == (
        "| Qwen2.5-0.5B | 151,936 | full | v5e:2x2 | 1x4x1 | 16 | 3.5 | 1.0 | 6.0 | 9.0 | 16 | 2,048 | 200 "
        "| 256, `f32[345,151936]` |"
    )
    programs = {"update": row()["programs"]["update"]}
    assert "| at least 5.0 | 9.0 |" in scaling.rloo_line("Qwen2.5-0.5B", "full", [row(programs=programs)])
    too_small = scaling.rloo_line("Qwen2.5-0.5B", "full", [row(fits=False)])
    assert "| larger than v5e:2x2 |" in too_small and too_small.count("|") == line.count("|")


@pytest.mark.parametrize(
    "single, machine, fits",
    [
        (row(topology="h100:2", chips=2), row(topology="h100:8", chips=8), ("h100:2", None)),
        (row(topology="h100:4", chips=4, fits=False), row(topology="h100:8", chips=8), ("h100:8", None)),
        (row(topology="h100:4", fits=False), row(topology="h100:8x2", chips=16), ("h100:8x2", "h100:8x2")),
        (row(topology="h100:4", fits=False), row(topology="h100:8x8", chips=64, fits=False), ("none", "none")),
    ],
)
def test_a_model_that_is_too_large_names_the_smallest_number_of_gpus_that_fits(single, machine, fits):
    lines = scaling.gpus_line("12b", "full", [single, machine]).splitlines()
    assert [line.split(" | ")[2] for line in lines] == ["h100:1", "h100:8"]
    for line, which in zip(lines, fits):
        assert ("**too much**" in line) == (which is not None)
        assert which is None or f"; fits {which}" in line
        assert line.count("|") == scaling.TABLES["gpus_ppo"].head.count("|")


# --- shipped configs


def test_every_shipped_config_for_gpus_and_every_variant_has_a_row_that_fits():
    names = set()
    for name in files.shipped_configs():
        if not name.startswith(ON_A_CPU):
            variants = [v for v in catalog.variants(files.config_folder() / name) if not v.endswith("_cpu")]
            names |= {f"{name}:{variant}" for variant in variants} if variants else {name}
    assert names == set(SHIPPED.configs) == set(ROWS["shipped"])
    for name, row in ROWS["shipped"].items():
        assert row["programs"]["update"] and row["fits"] and row["peak"] <= row["limit"], name


def test_a_config_keeps_its_options_and_takes_shapes_for_its_models(tmp_path):
    config = SHIPPED.config("ppo_llama.py:3b", str(tmp_path))
    given = files.load_config("ppo_llama.py:3b")
    assert config.sft_model_path == config.reward_model_path == str(tmp_path / "Llama-3.2-3B")
    changed = {name for name, value in vars(given).items() if getattr(config, name) != value}
    assert changed == {"sft_model_path", "reward_model_path", "topology"}


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", SHIPPED.configs)
def test_the_models_of_a_shipped_config_leave_room_on_its_gpus(name, tmp_path):
    size = scaling.CARDS.get(SHIPPED.configs[name], ("", None))[1]
    row = scaling.without_programs(SHIPPED.config(name, str(tmp_path)), size)
    assert 0 < row["held"] < 0.6 * row["limit"]
    assert row["held"] == ROWS["shipped"][name]["held"]  # the row is of the config as it is
