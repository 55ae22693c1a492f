"""docs/scaling.md's table is what its rows say; the rows' arithmetic."""

import os
import sys

import pytest

from tests.helpers.paths import ROOT, SCRIPTS

sys.path.insert(0, str(SCRIPTS / "scaling"))

import scaling  # noqa: E402


def test_the_page_shows_the_rows_that_are_there():
    page = (ROOT / "docs" / "scaling.md").read_text()
    shown = page.split("<!-- table -->\n", 1)[1].split("<!-- end -->", 1)[0].strip().splitlines()
    assert shown == scaling.table(scaling.ROWS)
    weak = page.split("<!-- weak -->\n", 1)[1].split("<!-- end of weak -->", 1)[0].strip().splitlines()
    assert weak == scaling.weak_table(scaling.ROWS)


def test_every_row_has_a_mesh_that_fills_its_slice():
    chips = {"v5e:4x4": 16, "v5e:16x16": 256, "v5p:2x2x2": 8, "v5p:4x4x8": 128}
    assert chips.keys() == scaling.LAYOUTS.keys()
    for topology, sizes in scaling.LAYOUTS.items():
        for (data, fsdp, tensor), micro, rollout in sizes.values():
            assert data * fsdp * tensor == chips[topology]
            assert 512 % micro == 512 % rollout == micro % (data * fsdp) == rollout % (data * fsdp) == 0


def test_the_bound_is_the_longest_of_three_times():
    # On v5e: 2 s of products, 1 s of memory, 3 s of links.
    done = {"flops": 2 * 197e12, "moved": 819e9, "sent": 600e9}
    assert scaling.bound(done, "v5e:4x4") == (pytest.approx(3.0), "links")
    assert scaling.bound({**done, "sent": 0.0}, "v5e:4x4") == (pytest.approx(2.0), "FLOPs")


def compiled(program, log):
    """Stands for scaling.measure: a row with one program, made in another process."""
    with open(log, "a") as file:
        file.write(f"{program} {os.getpid()}\n")
    peak = {"generate": 5, "update": 9}[program]
    return {"parts": {"policy": 4}, "limit": 8, "programs": {program: {"peak": peak, "refused": ""}}}


def test_a_row_is_compiled_once_each_program_in_a_process_of_its_own(tmp_path):
    log = tmp_path / "log"
    for _ in range(2):
        row = scaling.fill(tmp_path, "1b:ppo:v5e:4x4", compiled, str(log))
    names, processes = zip(*(line.split() for line in log.read_text().splitlines()))
    assert names == ("generate", "update") and len({*processes, str(os.getpid())}) == 3
    assert row["peak"] == 9 and not row["fits"] and set(row["programs"]) == {"generate", "update"}


def broken(program):
    """Stands for scaling.measure where it fails."""
    raise RuntimeError("no such chip")


def test_a_row_whose_process_fails_is_not_written(tmp_path):
    with pytest.raises(scaling.UserError, match="a process exited with code 1"):
        scaling.fill(tmp_path, "1b:ppo:v5e:4x4", broken)
    assert not list(tmp_path.iterdir())


def row(**changed):
    program = {"peak": 2 * scaling.GIB, "own": scaling.GIB, "refused": "", "flops": 1e12, "moved": 1e9, "sent": 0.0}
    step = {"step": {"flops": 1e9, "moved": 2**20, "sent": 0.0}}
    parts = {"policy": scaling.GIB, "value": scaling.GIB, "optimizer": 4 * scaling.GIB, "reference": scaling.GIB // 2}
    found = {"size": "1b", "algo": "ppo", "topology": "v5e:4x4", "mesh": [1, 16, 1], "micro": 256, "parts": parts}
    found |= {"limit": 16 * scaling.GIB, "peak": 9 * scaling.GIB, "cache": scaling.GIB, "fits": True}
    return found | {"programs": {"generate": program | step, "update": program}} | changed


def test_a_row_shows_each_part():
    assert scaling.line(row()).startswith(
        "| 1b | PPO | v5e:4x4 | 1x16x1 | 256 | 2.0 | 4.0 | 0.5 | 1.0 | 1.0 | 9.0 | 16 |"
    )


def test_a_row_that_does_not_fit_says_which_slice_does():
    line = scaling.line(row(fits=False, peak=20 * scaling.GIB, smallest="v5e:8x8"))
    assert "**too much**: 20.0 | 16 | fits v5e:8x8" in line
