"""micro_batch_size by memory: which sizes are compiled, and which one a run gets and records."""

import dataclasses
import json
import math

import jax
import pytest

import rlhf_jax
from rlhf_jax.config import PPOConfig, RLOOConfig, SFTConfig, batch_sizes
from rlhf_jax.dry_run import memory, micro_batches
from rlhf_jax.dry_run.micro_batches import Need
from rlhf_jax.parallel import sharding

TINY = {"scratch_model": "2x32x4", "tokenizer_name_or_path": "synthetic", "dataset_name": "synthetic"}
POLICY = {**TINY, "sft_model_path": None, "reward_model_path": None, "query_length": 64, "response_length": 16}
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


def peaks(stage, sizes, name="update"):
    return [memory.programs(stage, only=(name,), micro_batch_size=n)[0].peak for n in sizes]


CONFIGS = {
    "ppo": PPOConfig(**POLICY, batch_size=32),
    "rloo": RLOOConfig(**POLICY, batch_size=32, num_generations=4),
    "sft": SFTConfig(**TINY, model_name_or_path=None, batch_size=32, max_length=80),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_size_is_the_largest_whose_compiled_update_fits(name):
    config, lines = CONFIGS[name], []
    stage, sizes = memory.abstract_stage(config, one_device()), batch_sizes.even_sizes(config, 1)
    middle, above = sizes[-3], sizes[-2]
    fits, exceeds = peaks(stage, (middle, above))
    assert fits < exceeds
    capacity = int((fits + exceeds) / 2 / micro_batches.USABLE)
    assert micro_batches.by_memory(stage, sizes, capacity, lines.append) == middle
    (line,) = lines
    assert line.startswith(f"micro_batch_size {middle}: the largest that fits cpu (")
    assert f"the update needs {fits / 2**20:,.1f} MiB with {middle} rows, " in line and f" with {above}" in line


def test_what_is_measured_is_the_program_of_a_run_with_that_size():
    config, mesh = CONFIGS["rloo"], one_device()
    stages = [memory.abstract_stage(dataclasses.replace(config, micro_batch_size=n), mesh) for n in (4, 16)]
    of_run = [memory.programs(stage, only=("update",))[0] for stage in stages]
    other = memory.programs(stages[0], only=("update",), micro_batch_size=16)[0]
    assert of_run[0].peak < of_run[1].peak == other.peak
    assert other.traced.lower().as_text() == of_run[1].traced.lower().as_text()


def test_where_all_fits_the_minibatch_is_whole_and_where_nothing_fits_the_line_says_what_needs_less():
    config, lines = CONFIGS["ppo"], []
    stage, sizes = memory.abstract_stage(config, one_device()), batch_sizes.even_sizes(config, 1)
    assert micro_batches.by_memory(stage, sizes, 2**40, lines.append) == 32
    assert micro_batches.by_memory(stage, sizes, 2**10, lines.append) == 1
    assert lines[0].startswith("micro_batch_size 32: the whole minibatch fits cpu (921.6 GiB, 0.9 of the memory")
    assert lines[1].startswith("micro_batch_size 1: the smallest, and it does NOT fit cpu (0.9 KiB, ")
    assert "Use more devices; options that need less: micro_batch_size (now 1), " in lines[1]


def test_forward_passes_before_the_update_must_fit_too(monkeypatch):
    config, lines, programs = CONFIGS["ppo"], [], memory.programs
    stage, sizes = memory.abstract_stage(config, one_device()), batch_sizes.even_sizes(config, 1)

    def large_experience(stage, only, **options):
        (program,) = programs(stage, only=only, **options)
        rows = options["micro_batch_size"]
        return [dataclasses.replace(program, temporary=2**33 * rows) if only == ("experience",) else program]

    monkeypatch.setattr(memory, "programs", large_experience)
    assert micro_batches.by_memory(stage, sizes, 70 * 2**30, lines.append) == 4
    assert lines[0].endswith(f", experience {64 + peaks_gib(programs, stage):.1f} GiB with 8")


def peaks_gib(programs, stage):
    (program,) = programs(stage, only=("experience",), micro_batch_size=8)
    return (program.peak - program.temporary) / 2**30


# --- of a run


ROWS = [{"prompt": f"what is {n}?", "completion": f" it is {n % 3}."} for n in range(16)]
RUN = SFTConfig(
    **{**TINY, "dataset_name": "synthetic", "scratch_model": "1x16x2"},
    model_name_or_path=None,
    dataset_test_split=None,
    query_length=32,
    max_length=64,
    batch_size=8,
    max_steps=2,
    save_steps=1,
    report_to=(),
)


@pytest.fixture
def small_device(monkeypatch):
    """The CPU in place of an accelerator in which 4 of 8 rows fit."""
    config = dataclasses.replace(RUN, dry_run=True)
    fits, exceeds = peaks(memory.abstract_stage(config, one_device()), (4, 8))
    capacity = int((fits + exceeds) / 2 / micro_batches.USABLE)
    monkeypatch.setattr(micro_batches, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(micro_batches.topologies, "capacity", lambda device: capacity)
    return capacity


def run(folder, **changes):
    config = dataclasses.replace(RUN, run_dir=str(folder), **changes)
    result = rlhf_jax.run(config, train_dataset=ROWS)
    return result, json.loads((folder / "config.json").read_text())["micro_batch_size"]


def test_a_run_records_its_size_and_a_resume_takes_it_without_a_search(small_device, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    _, size = run(folder, max_steps=2)
    assert size == 4
    said = capsys.readouterr().out
    assert "sft: micro_batch_size 4: the largest that fits cpu (" in said
    assert "gradient: 2 micro-batches of 4 rows per step" in said

    # A device of another size, on which a search would end elsewhere.
    monkeypatch.setattr(micro_batches, "by_memory", lambda *_: pytest.fail("searched"))
    (folder / "finished.json").unlink()
    _, size = run(folder)
    said = capsys.readouterr().out
    assert size == 4 and "gradient: 2 micro-batches of 4 rows per step" in said
    assert "micro_batch_size" not in said.replace("micro_batch_size 4", "")
    assert "changed since the run began" not in said
