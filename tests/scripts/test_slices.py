"""The smallest slices: pages show the rows, shapes are the models', slices are tried in order and once."""

import json
import math
import os
import sys

import jax
import pytest

from rlhf_jax import models
from tests.helpers.paths import ROOT, SCRIPTS

sys.path.insert(0, str(SCRIPTS / "scaling"))

import scaling  # noqa: E402
import slices  # noqa: E402

GIB = slices.GIB


@pytest.mark.parametrize("table", slices.TABLES)
def test_the_page_shows_the_rows_that_are_there(table):
    page = (ROOT / "docs" / slices.TABLES[table].page).read_text()
    lines = "\n".join(slices.table_of(slices.read(scaling.ROWS / "slices.json"), table))
    assert slices.shown(page, table)[1] == lines + "\n"


@pytest.mark.parametrize("name", slices.SHAPES)
def test_a_shape_has_the_parameters_of_the_published_model(name):
    model = models.Model.from_hf_config(slices.SHAPES[name]["config"], images=name in slices.IMAGE_MODELS)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == slices.SHAPES[name]["parameters"]


def test_slices_go_from_small_to_large_and_their_chips_divide_the_batch():
    for kind in (slices.V5E, slices.V5P):
        chips = [math.prod(map(int, topology.split(":")[1].split("x"))) for topology in kind]
        assert chips == sorted(set(chips))
        for count in chips:
            config = slices.rloo_config("path", min(count, 128), (1, min(count, 128), 1))
            assert config.batch_size % config.rollout_batch_size == config.batch_size % config.micro_batch_size == 0


def tried(program, log, sizes):
    """Stands for slices.measure: made in another process."""
    with open(log, "a") as file:
        file.write(f"{program} {os.getpid()}\n")
    entry = {"peak": sizes[program], "refused": ""}
    return {"topology": "v5e:1x1", "least": 4, "limit": 8, "programs": {program: entry}}


def compiled(log):
    """The programs that `tried` was called for."""
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


def test_a_program_is_compiled_once_in_a_process_of_its_own(tmp_path):
    log, rows, sizes = tmp_path / "log", tmp_path / "rows.json", {"update": 6, "generate": 7}
    for programs in (("update",), ("update",), slices.PROGRAMS, slices.PROGRAMS):
        row = slices.fill(rows, "name", programs, tried, str(log), sizes)
    assert compiled(log) == ["update", "generate"] and row["peak"] == 7 and row["fits"]
    assert slices.read(rows) == {"name": json.loads(json.dumps(row))}
    assert str(os.getpid()) not in log.read_text()


def test_nothing_more_is_compiled_for_a_slice_that_is_too_small(tmp_path):
    log, rows, sizes = tmp_path / "log", tmp_path / "rows.json", {"update": 9, "generate": 7}
    assert not slices.fill(rows, "name", slices.PROGRAMS, tried, str(log), sizes)["fits"]
    assert compiled(log) == ["update"]


def test_slices_are_tried_until_one_fits(tmp_path, monkeypatch):
    asked = []

    def fill(path, name, programs, make, *args):
        asked.append((name, programs))
        return {"fits": name.endswith("v5e:2x2")}

    monkeypatch.setattr(slices, "fill", fill)
    slices.find(tmp_path / "rows.json", "rloo", "Qwen2.5-0.5B", "full", slices.V5E, ("update",))
    names = [f"rloo:Qwen2.5-0.5B:full:{topology}" for topology in ("v5e:1x1", "v5e:2x2")]
    assert asked == [(name, ("update",)) for name in names]


def row(**changed):
    parts = {"policy": GIB, "optimizer": 2 * GIB, "reference": GIB // 2}
    found = {
        "topology": "v5e:2x2",
        "chips": 4,
        "mesh": [1, 4, 1],
        "micro": 16,
        "rollout": 32,
        "parts": parts,
        "cache": GIB,
    }
    found |= {"limit": 16 * GIB, "least": 5 * GIB, "peak": 9 * GIB, "fits": True}
    found["logits"] = {"whole": 2**31, "block": 200 * 2**20}
    update = {"peak": 9 * GIB, "refused": "", "largest": [2**28, "sub.1 f32[345,151936]{1,0:T(8,128)}"]}
    return found | {"programs": {"update": update, "generate": {**update, "peak": 6 * GIB}}} | changed


def test_a_line_shows_the_logits_and_the_largest_array():
    (line,) = slices.rloo_line("Qwen2.5-0.5B", "full", [row(), None]).splitlines()
    assert line == (
        "| Qwen2.5-0.5B | 151,936 | full | v5e:2x2 | 1x4x1 | 16 | 3.5 | 1.0 | 6.0 | 9.0 | 16 | 2,048 | 200 "
        "| 256, `f32[345,151936]` |"
    )
    assert line.count("|") == slices.TABLES["rloo"].head.count("|")


def test_generation_that_was_not_compiled_is_shown_by_what_it_needs_at_least():
    programs = {"update": row()["programs"]["update"]}
    assert "| at least 5.0 | 9.0 |" in slices.rloo_line("Qwen2.5-0.5B", "full", [row(programs=programs)])
    assert "| at least 5.0 | 9.0 |" in slices.gpus_line("1b", "full", [row(chips=1, programs=programs), None])


def test_a_model_that_fits_no_slice_that_was_tried_says_so():
    line = slices.rloo_line("Qwen2.5-0.5B", "full", [row(fits=False)])
    assert "| larger than v5e:2x2 |" in line and line.count("|") == slices.TABLES["rloo"].head.count("|")


def test_the_smallest_slice_that_fits_becomes_the_row():
    rows = {
        slices.name_of("rloo", "Gemma-3-1b", "LoRA", topology): row(topology=topology, fits=topology != "v5e:1x1")
        for topology in ("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5p:2x2x1")
    }
    found = slices.best(rows, "rloo", "Gemma-3-1b", "LoRA")
    assert [row["topology"] for row in found] == ["v5e:2x2", "v5p:2x2x1"]
    assert "Not compiled: SmolLM2-135M (full)" in slices.table_of(rows, "rloo")[-1]


def test_a_kind_of_gpu_has_a_line_for_one_and_for_eight():
    one, eight = row(topology="h100:1", chips=1), row(topology="h100:8", chips=8, micro=64)
    lines = slices.gpus_line("1b", "full", [None, None, one, eight]).splitlines()
    assert lines == [
        "| 1b | full | h100:1 | 16 | 3.5 | 1.0 | 6.0 | 9.0 | 16.0 |",
        "| 1b | full | h100:8 | 64 | 3.5 | 1.0 | 6.0 | 9.0 | 16.0 |",
    ]
    assert {line.count("|") for line in lines} == {slices.TABLES["gpus_ppo"].head.count("|")}


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
    lines = slices.gpus_line("12b", "full", [single, machine]).splitlines()
    assert [line.split(" | ")[2] for line in lines] == ["h100:1", "h100:8"]
    for line, which in zip(lines, fits):
        assert ("**too much**" in line) == (which is not None)
        assert which is None or f"; fits {which}" in line
        assert line.count("|") == slices.TABLES["gpus_ppo"].head.count("|")
