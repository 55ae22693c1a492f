"""Compilations of programs that never run."""

import dataclasses

import jax
import pytest

from rlhf_jax.config import PPOConfig
from rlhf_jax.dry_run import compiling, hlo, memory, topologies
from rlhf_jax.parallel import sharding


@pytest.mark.parametrize(
    "error, size, said",
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (16.95G) exceeds available HBM (15.75G). HLO module: jit_update.",
            int(16.95 * 2**30),
            "needs 16.95 GiB of 15.75 GiB",
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.2G of 15.7G hbm.", int(18.2 * 2**30), ""),
        ("RESOURCE_EXHAUSTED: no room\nfor more", 0, "RESOURCE_EXHAUSTED: no room"),
    ],
)
def test_a_program_that_the_compiler_refuses_says_what_it_needs(error, size, said):
    class Refused:
        def lower(self):
            raise jax.errors.JaxRuntimeError(error)

    program = compiling.compile_program("update", Refused(), other_resident=7)
    assert program.peak == 7 + size and said in program.refused and program.refused


def test_another_error_of_the_compiler_is_not_hidden():
    class Broken:
        def lower(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
        compiling.compile_program("update", Broken(), other_resident=0)


def test_sizes_are_those_of_the_assignment():
    lines = [
        "allocation 0: size 4096, page 0, thread-local:",
        " value: <1566 add.8669 @0> (size=4096,offset=0): f32[]",
        "allocation 1: size 600, page 0, parameter 10, shape |f32[16]| at ShapeIndex {}, maybe-live-out:",
        "allocation 2: size 70, page 0, parameter 12, shape |f32[16]| at ShapeIndex {}:",
        "allocation 3: size 8, page 0, constant:",
        "allocation 4: size 9000, page 0, maybe-live-out:",
        "allocation 5: size 50000, page 0, preallocated-temp:",
    ]
    assert compiling.sizes("\n".join(lines)) == (670, 59000)


def counted(text):
    """Bytes moved and sent by a program."""
    return hlo.traffic(text), sum(c.sent * c.times for c in hlo.collectives(text))


@pytest.mark.runs
def test_what_a_tpu_is_compiled_for_until_memory_is_assigned_needs_as_much_as_when_code_is_generated(
    monkeypatch, tmp_path
):
    pytest.importorskip("libtpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # libtpu refuses those of the CPU
    options = {"scratch_model": "14m", "tokenizer_name_or_path": "synthetic", "dataset_name": "synthetic"}
    options |= {"sft_model_path": None, "reward_model_path": None, "query_length": 512, "batch_size": 256}
    config = PPOConfig(**options, mesh_fsdp=16, micro_batch_size=256, dtype="bfloat16")
    mesh = sharding.make_mesh(1, 16, 1, devices=topologies.topology_devices("v5e:4x4"))
    stage = memory.abstract_stage(config, mesh)

    def whole(name, traced, others):
        program = compiling.compile_program(name, traced, others, compiling.dump_options(str(tmp_path / name)))
        text = compiling.dumped(str(tmp_path / name), "after_codegen.txt").read_text()
        return dataclasses.replace(program, dumped_text=text)

    for name in ("generate", "update"):
        to_the_end, assigned = (memory.programs(stage, only=(name,), compile_fn=fn)[0] for fn in (whole, None))
        assert assigned.compiled is None and assigned.arguments == to_the_end.arguments
        assert assigned.peak == pytest.approx(to_the_end.peak, abs=2**14)  # v5e takes 15,872 bytes more, always
        moved, sent = zip(*(counted(program.text) for program in (to_the_end, assigned)))
        assert moved[0] == moved[1] > 0 and sent[0] == sent[1] > 0
