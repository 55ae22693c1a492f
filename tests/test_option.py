"""An option is declared once: help, resumes, memory hints, TRL's table and the page of options read it there."""

import dataclasses
import pathlib
import re

import pytest

from rlhf_jax.config import STAGES, PPOConfig, StageConfig, help, trl_options
from rlhf_jax.option import (
    Metadata,
    Options,
    field_ranges,
    field_types,
    metadata,
    option,
    without_none,
)
from rlhf_jax.runtime import config_diff, out_of_memory
from rlhf_jax.runtime.options import options_metadata

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "options.md").read_text(encoding="utf-8")
FIELDS = [(stage, name) for stage, config in STAGES.items() for name in config.__dataclass_fields__]


def other(value):
    """A value that is not this one."""
    return not value if isinstance(value, bool) else "another"


@pytest.mark.parametrize(("stage", "name"), FIELDS)
def test_what_is_declared_is_what_help_resumes_hints_and_documents_say(stage, name):
    config, known = STAGES[stage](), metadata(STAGES[stage], name)
    assert (f"--{name} " in help.text(config, "x")) == (not known.rare)
    before = {"x": 1, name: getattr(config, name)}
    after = {**before, name: other(before[name])}
    for rounding in (False, True):
        refused = config_diff.differences(before, after, config_diff.may_change(rounding))
        assert bool(refused) == (known.resume == "fixed" or (known.resume == "rounding" and not rounding))
    assert (name in config_diff.in_config_json(before)) == known.in_config_json
    assert set(known.lowers) <= set(out_of_memory.PHASES)
    owners = [owner for owner in STAGES[stage].__mro__ if name in getattr(owner, "__dataclass_fields__", {})]
    section = PAGE.split(f"\n## {owners[-1].__name__}\n")[1].split("\n## ")[0]
    (row,) = re.findall(rf"^\| `{name}` \| .*$", section, re.M)
    marks = {"free": "| free |", "rounding": "| rounding |", "fixed": "|  |"}
    assert marks["free" if not known.in_config_json else known.resume] in row
    answer = trl_options.answer(name, stage)
    assert answer is not None and answer.kind != "unsupported" and answer.renamed is None


def test_phases_name_the_options_that_lower_their_memory_the_cheapest_first():
    for phase in out_of_memory.PHASES:
        places = {name: known.lowers[phase] for name, known in options_metadata().items() if phase in known.lowers}
        assert sorted(places.values()) == list(range(1, len(places) + 1)), places


def test_paths_are_compared_by_the_files_that_they_name():
    names = {name for name, known in options_metadata().items() if known.path}
    assert {"sft_model_path", "dataset_name", "adapters", "reward_funcs"} <= names and "temperature" not in names
    for name in names:
        assert config_diff.differences({name: "a"}, {name: "b"}, (), lambda *_: True) == []
    assert config_diff.differences({"temperature": 1}, {"temperature": 2}, (), lambda *_: True) != []


def test_a_class_that_overrides_a_default_keeps_what_is_declared():
    @dataclasses.dataclass(frozen=True)
    class Base(Options):
        x: int = option(1, rare=True, resume="free")
        y: int = 2

    @dataclasses.dataclass(frozen=True)
    class Child(Base):
        x: int = 3

    assert Child().x == 3 and metadata(Child, "x") == Metadata(rare=True, resume="free")
    assert metadata(Child, "y") == metadata(Child, "absent") == Metadata()
    assert metadata(PPOConfig, "logging_steps") == metadata(StageConfig, "logging_steps")


def test_every_number_has_a_range_but_those_of_processes():
    for config_type in STAGES.values():
        hints, ranges = field_types(config_type), field_ranges(config_type)
        numbers = {name for name, hint in hints.items() if without_none(hint)[0] in (int, float)}
        assert numbers - set(ranges) == {"num_processes", "process_id"}, config_type
        assert set(ranges) <= numbers
