"""micro_batch_size by memory: which sizes are compiled, and which one a run gets and records."""

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys

import jax
import pytest

import rlhf_jax
from rlhf_jax.config import PPOConfig, RLOOConfig, SFTConfig, batch_sizes
from rlhf_jax.dry_run import memory, micro_batches, report
from rlhf_jax.dry_run.compiling import Program
from rlhf_jax.dry_run.micro_batches import Need
from rlhf_jax.parallel import sharding
from rlhf_jax.utils.text import bytes_text
from tests.helpers.children import QUICK
from tests.helpers.paths import ROOT

TINY = {"scratch_model": "1x16x2", "tokenizer_name_or_path": "synthetic", "dataset_name": "synthetic"}
TINY |= {"batch_size": 16, "dry_run": True}  # nothing of it is cached
POLICY = {**TINY, "sft_model_path": None, "reward_model_path": None, "query_length": 32, "response_length": 8}
SIZES = (1, 2, 4, 8, 16, 32, 64)


def affine(rows, params=100.0, gradients=30.0, row=10.0):
    temporary = gradients + row * rows
    return Need(params + temporary, temporary)


def search(usable, first=8, measure=affine, sizes=SIZES):
    measured = []

    def counted(rows):
        measured.append(rows)
        return measure(rows)

    rows, needs = micro_batches.largest(sizes, first, usable, counted)
    assert sorted(needs) == sorted(measured) and rows in needs
    assert len(measured) <= micro_batches.MOST_SIZES + (rows == sizes[0])
    return rows, measured


@pytest.mark.parametrize("first", SIZES)
@pytest.mark.parametrize("usable", [139, 140, 149, 150, 180, 209, 210, 300, 449, 450, 769, 770, 10_000])
def test_the_size_is_the_largest_that_fits_wherever_the_search_begins(usable, first):
    rows, measured = search(usable, first)
    assert rows == max((n for n in SIZES if affine(n).peak <= usable), default=1)
    assert len(measured) <= micro_batches.MOST_SIZES


def test_the_first_size_is_taken_as_proportional_and_two_as_a_line():
    assert search(450) == (32, [8, 16, 32])  # 110 temporary bytes for 8 rows are at most 440 for 32
    assert search(539) == (32, [8, 16, 32]) and search(540) == (32, [8, 32])
    assert search(250) == (8, [8, 16])  # the line ends at 16 rows
    assert search(209) == (4, [8, 4]) and search(145) == (1, [8, 2, 1])
    assert search(10_000) == (64, [8, 64])


def test_a_size_that_was_estimated_to_fit_and_does_not_is_followed_by_smaller_ones():
    curved = lambda rows: Need(100.0 + rows**1.3, rows**1.3)  # noqa: E731
    assert search(curved(32).peak - 1, measure=curved) == (16, [8, 32, 16])
    assert search(curved(16).peak - 1, measure=curved) == (8, [8, 16])


def test_sizes_that_the_compiler_refuses_are_halved_until_one_fits():
    refused = lambda rows: Need(math.inf, math.inf) if rows > 4 else affine(rows)  # noqa: E731
    assert search(10_000, first=64, measure=refused)[0] == 4
    never = lambda rows: Need(math.inf, math.inf)  # noqa: E731
    assert search(10_000, first=64, measure=never)[0] == 1


def test_a_minibatch_has_sizes_of_whole_groups_on_all_devices():
    assert batch_sizes.even_sizes(PPOConfig(batch_size=24), 2) == [2, 4, 6, 8, 12, 24]
    assert batch_sizes.even_sizes(RLOOConfig(batch_size=48, num_mini_batches=2, num_generations=4), 1) == [4, 8, 12, 24]
    assert batch_sizes.even_sizes(PPOConfig(batch_size=7), 2) == [7]


# --- by the programs of a stage


def one_device():
    return sharding.make_mesh(devices=jax.devices()[:1])


def peaks(config, *sizes):
    """Of the update."""
    stage = memory.abstract_stage(config, one_device())
    return [memory.programs(stage, only=("update",), micro_batch_size=n)[0].peak for n in sizes]


def between(fits, exceeds):
    """A capacity in which one fits and the other does not."""
    assert fits < exceeds
    return int((fits + exceeds) / 2 / micro_batches.USABLE)


CONFIGS = {
    "ppo": PPOConfig(**POLICY),
    "rloo": RLOOConfig(**POLICY, num_generations=4),
    "sft": SFTConfig(**TINY, model_name_or_path=None, query_length=32, max_length=40),
}


def chosen(config, capacity):
    """(size, line)"""
    stage, lines = memory.abstract_stage(config, one_device()), []
    size, programs = micro_batches.by_memory(stage, batch_sizes.even_sizes(config, 1), capacity, lines.append)
    assert all(program.peak <= micro_batches.USABLE * capacity for program in programs.values()) or size == 1
    (line,) = lines
    return size, line


@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_the_size_is_the_largest_whose_compiled_update_fits(name):
    fits, exceeds = peaks(CONFIGS[name], 4, 8)
    size, line = chosen(CONFIGS[name], between(fits, exceeds))
    assert size == 4 and line.startswith("micro_batch_size 4: the largest that fits cpu (")
    needs, above = re.search(r"the update needs (.+) with 4 rows, (.+) with 8(?: rows)?$", line).groups()
    assert needs == bytes_text(fits)
    # By compilation, or by the line through other sizes.
    assert above == bytes_text(exceeds) or re.fullmatch(r"about [\d.]+ [KM]iB", above)


def test_what_is_compiled_is_the_program_of_a_run_with_that_size():
    config, mesh = CONFIGS["rloo"], one_device()
    stages = [memory.abstract_stage(dataclasses.replace(config, micro_batch_size=n), mesh) for n in (4, 16)]
    of_run = [memory.programs(stage, only=("update",))[0] for stage in stages]
    other = memory.programs(stages[0], only=("update",), micro_batch_size=16)[0]
    assert of_run[0].peak < of_run[1].peak == other.peak
    assert other.traced.lower().as_text() == of_run[1].traced.lower().as_text()


def test_where_all_fits_the_minibatch_is_whole_and_where_nothing_fits_the_line_says_what_needs_less():
    size, line = chosen(CONFIGS["sft"], 2**40)
    assert size == 16 and line.startswith("micro_batch_size 16: the whole minibatch fits cpu (921.6 GiB, 0.9 of ")
    size, line = chosen(CONFIGS["sft"], 2**10)
    assert size == 1 and line.startswith("micro_batch_size 1: the smallest, and it does NOT fit cpu (0.9 KiB, 0.9 of ")
    assert "Use more devices; options that need less: micro_batch_size (now 1), " in line


def test_forward_passes_before_the_update_must_fit_too(monkeypatch):
    programs = memory.programs

    def large_experience(stage, only, micro_batch_size, **options):
        if only == ("experience",):
            return [Program("experience", 0.0, 0, 0, 2**33 * micro_batch_size, 0, 0)]
        return programs(stage, only=only, micro_batch_size=micro_batch_size, **options)

    monkeypatch.setattr(memory, "programs", large_experience)
    size, line = chosen(CONFIGS["ppo"], 40 * 2**30)  # 36 GiB
    assert size == 4 and line.endswith(", experience 64.0 GiB with 8")
    size, line = chosen(CONFIGS["ppo"], 4 * 2**30)
    assert (
        size == 1 and "does NOT fit cpu (3.6 GiB, " in line and ", experience 8.0 GiB with 1. Use more devices" in line
    )


def test_what_says_how_rows_are_cut_stays(tmp_path):
    for options in ({"micro_batch_size": 2}, {"micro_batch_tokens": 80}, {"loss_aggregation": "token_mean_micro"}, {}):
        config = dataclasses.replace(CONFIGS["ppo"], run_dir=str(tmp_path / "run"), **options)
        refused = lambda *_: pytest.fail("opened")  # noqa: E731
        assert micro_batches.settled(config, refused, refused) == (config, {})  # {}: on a CPU


# --- of a run


ROWS = [{"prompt": f"what is {n}?", "completion": f" it is {n % 3}."} for n in range(16)]
RUN = SFTConfig(
    **{**TINY, "dry_run": False},
    model_name_or_path=None,
    dataset_test_split=None,
    query_length=32,
    max_length=40,
    length_buckets=(40,),
    max_steps=2,
    save_steps=1,
    report_to=(),
)


@pytest.fixture(scope="module")
def capacity():
    """Of a device in which micro-batches of 4 rows fit."""
    return between(*peaks(dataclasses.replace(RUN, dry_run=True), 4, 8))


@pytest.fixture
def accelerator(monkeypatch, capacity):
    """The CPU in place of one of that capacity."""
    monkeypatch.setattr(micro_batches, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(micro_batches.topologies, "capacity", lambda device: capacity)
    return monkeypatch


def run(folder, **changes):
    rlhf_jax.run(dataclasses.replace(RUN, run_dir=str(folder), **changes), train_dataset=ROWS)
    return json.loads((folder / "config.json").read_text())["micro_batch_size"]


def test_a_run_records_its_size_and_a_resume_takes_it_without_a_search(accelerator, tmp_path, capsys):
    folder = tmp_path / "run"
    assert run(folder) == 4
    said = capsys.readouterr().out
    assert "sft: micro_batch_size 4: the largest that fits cpu (" in said
    assert "gradient: 4 micro-batches of 4 rows per step" in said

    accelerator.setattr(micro_batches, "by_memory", lambda *_: pytest.fail("searched"))
    (folder / "finished.json").unlink()
    assert run(folder) == 4
    said = capsys.readouterr().out
    assert "gradient: 4 micro-batches of 4 rows per step" in said and "changed since" not in said

    (folder / "finished.json").unlink()
    assert run(folder, micro_batch_size=8) == 8
    assert "sft: changed since the run began: micro_batch_size: 4 -> 8" in capsys.readouterr().out

    # Recorded by a run on other devices, over which its rows were spread.
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"micro_batch_size": 8', '"micro_batch_size": 3'))
    (folder / "finished.json").unlink()
    accelerator.setattr(micro_batches, "by_memory", lambda *_: (2, {}))
    assert run(folder) == 2
    said = capsys.readouterr().out
    assert "sft: micro_batch_size 3, with which the run began, does not divide its rows over 1 device\n" in said
    assert "sft: changed since the run began: micro_batch_size: 3 -> 2" in said


def test_a_run_that_began_without_a_recorded_size_keeps_that_of_its_tokens(accelerator, tmp_path, capsys):
    accelerator.setattr(micro_batches, "PLATFORMS", ())
    folder = tmp_path / "run"
    assert run(folder) is None
    accelerator.setattr(micro_batches, "PLATFORMS", ("cpu",))
    (folder / "finished.json").unlink()
    assert run(folder) is None
    assert capsys.readouterr().out.count("gradient: 1 micro-batches of 16 rows per step") == 2


def test_a_dry_run_says_the_size_and_compiles_it_once(accelerator, tmp_path, capsys):
    compile_program, by_memory, events = memory.compiling.compile_program, micro_batches.by_memory, []

    def counted(name, *arguments, **options):
        events.append(name)
        return compile_program(name, *arguments, **options)

    def searched(*arguments):
        result = by_memory(*arguments)
        events.append("chosen")
        return result

    accelerator.setattr(memory.compiling, "compile_program", counted)
    accelerator.setattr(micro_batches, "by_memory", searched)
    report.show(dataclasses.replace(RUN, dry_run=True, run_dir=str(tmp_path / "run")))
    said = capsys.readouterr().out
    assert "\nmicro_batch_size 4: the largest that fits cpu (" in said
    assert "gradient: 4 micro-batches of 4 rows per step" in said and "memory: fits: peak" in said
    assert len(events) > 2 and events[-1] == "chosen" and {*events[:-1]} == {"update"}


CONFIG = """
import rlhf_jax
from rlhf_jax import RLOOConfig
from rlhf_jax.dry_run import memory, micro_batches
from tests.helpers.runs import RLOO_OPTIONS

micro_batches.PLATFORMS, micro_batches.topologies.capacity = ("cpu",), lambda device: CAPACITY
programs, compiled = memory.programs, []


def counted(stage, *, only, micro_batch_size, **options):
    compiled.append(f"{only[0]}_{micro_batch_size}")
    return programs(stage, only=only, micro_batch_size=micro_batch_size, **options)


memory.programs = counted
options = {**RLOO_OPTIONS, "query_length": 64, "length_buckets": None, "total_episodes": 8}
rewards = ("rlhf_jax.data.synthetic:gold_reward",)
rlhf_jax.run(RLOOConfig(**options, num_generations=2, reward_funcs=rewards, run_dir="FOLDER/run"))
print("compiled", *compiled)
"""


def test_the_run_finds_the_programs_of_its_size_on_disk(tmp_path):
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK, **cache}
    code = CONFIG.replace("CAPACITY", str(1_600_000)).replace("FOLDER", str(tmp_path))
    for _ in range(2):  # the second time all of them are read from disk, with the same sizes
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        compiled = done.stdout.splitlines()[-1].split()[1:]
        size = re.search(r"rloo: micro_batch_size (\d+): the largest that fits cpu ", done.stdout)[1]
        assert {"update_8", f"update_{size}", f"experience_{size}"} <= {*compiled} and size in "24"
        names = [file.name.split("-")[0] for file in (tmp_path / "cache").glob("*-cache")]
        for name in ("update", "experience"):
            assert names.count(f"jit__{name}") == sum(one.startswith(name) for one in compiled)
        shutil.rmtree(tmp_path / "run")
