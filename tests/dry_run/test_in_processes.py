"""Programs that are compiled in processes of their own, here for the CPU."""

import dataclasses

import pytest

from rlhf_jax.config import PPOConfig, SFTConfig
from rlhf_jax.dry_run import in_processes, memory

TINY = {"scratch_model": "1x16x2", "tokenizer_name_or_path": "synthetic", "dataset_name": "synthetic"}
TINY |= {"batch_size": 8, "micro_batch_size": 8, "dry_run": True}
SFT = SFTConfig(**TINY, model_name_or_path=None, max_steps=9)
POLICY = {**TINY, "sft_model_path": None, "reward_model_path": None, "query_length": 32, "response_length": 4}


@dataclasses.dataclass(frozen=True)
class OwnConfig(SFTConfig):
    """Stands for one of a user's file."""


def test_a_process_finds_the_sizes_that_this_one_does():
    told = []
    here = memory.programs(memory.abstract_stage(SFT, memory.stage_mesh(SFT)))
    there = in_processes.programs(SFT, told.append)
    assert told == there and [program.name for program in there] == ["update"]
    sizes = [(x.arguments, x.outputs, x.temporary, x.aliased, x.other_resident) for x in (*here, *there)]
    assert sizes[0] == sizes[1] and there[0].peak > 0


@pytest.mark.runs
def test_programs_come_in_the_order_of_an_update_and_only_those_that_there_are():
    assert [p.name for p in in_processes.programs(PPOConfig(**POLICY), lambda _: None)] == [
        "generate",
        "experience",
        "update",
    ]


def test_a_process_that_fails_says_why():
    wrong = dataclasses.replace(SFT, scratch_model="nonsense")
    with pytest.raises(RuntimeError, match="compiled update exited with code 1:(.|\n)*nonsense"):
        in_processes.programs(wrong, lambda _: None)


def test_a_config_of_a_file_stays_in_this_process():
    assert in_processes.can_compile(SFT) and not in_processes.can_compile(OwnConfig())
