"""Dry runs, memory and collectives for NVIDIA GPUs that the machine lacks, by the programs that XLA compiles. Needs
the extra `gpu-aot`: `pytest -m gpu_aot`."""

import dataclasses

import pytest

from rlhf_jax import train
from rlhf_jax.config import GRPOConfig, PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf_jax.dry_run import hlo, memory, micro_batches, topologies
from rlhf_jax.parallel import sharding
from tests.helpers import collectives, skipped_steps

pytest.importorskip("jax_cuda13_plugin")
pytestmark = pytest.mark.gpu_aot
MIB = 2**20
TINY = {"scratch_model": "2x32x4", "tokenizer_name_or_path": "synthetic", "dataset_name": "synthetic"}
POLICY = {"sft_model_path": None, "reward_model_path": None, "query_length": 32, "response_length": 8}
POLICY |= {"batch_size": 16, "micro_batch_size": 8, **TINY}


@pytest.mark.parametrize("topology, mesh", [("h100:1", "1"), ("h100:8", "4"), ("a100:4", "1")])
def test_a_dry_run_says_what_each_gpu_holds_and_sends(topology, mesh, tmp_path, capsys):
    flags = [f"--{name}={value}" for name, value in POLICY.items() if value is not None]
    (tmp_path / "tiny.py").write_text(
        "from rlhf_jax.config import PPOConfig\n\n\ndef get_config(variant=None):\n"
        "    return PPOConfig(sft_model_path=None, reward_model_path=None)\n"
    )
    command = ["--config", str(tmp_path / "tiny.py"), *flags, "--micro_batch_size=16", "--mesh_fsdp", mesh]
    assert train.main([*command, "--topology", topology, "--dry_run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = {line.split()[0] for line in lines if line.startswith("  ")}
    assert {"policy", "value", "optimizer", "reference", "cache", "generate", "experience", "update"} <= first
    assert any(f"of {topology}, described" in line for line in lines)
    limit = {"h": "59.3", "a": "59.4"}[topology[0]]
    assert "memory: fits: peak" in lines[-2] and f"of {limit} GiB per device" in lines[-2]
    sent = [line for line in lines if line.startswith("  update ") and ("all-reduce" in line or "all-gather" in line)]
    assert len(sent) == (topology != "h100:1")
    assert "compiled without Triton's matrix products" in "".join(lines)
    assert ("reduce-scatter" in "".join(sent)) == (mesh != "1")


def stage_of(config, topology="h100:1", **mesh):
    return memory.abstract_stage(config, sharding.make_mesh(**mesh, devices=topologies.topology_devices(topology)))


BFLOAT16 = {"dtype": "bfloat16", "gradient_checkpointing": True}
LORA = {"use_peft": True, "lora_target_modules": ("all-linear",)}


@pytest.mark.parametrize(
    "config",
    [
        RLOOConfig(**POLICY, **BFLOAT16, **LORA, load_in_8bit=True, num_generations=2, top_k=8, top_p=0.9),
        GRPOConfig(**POLICY, **BFLOAT16, num_generations=2, beta=0.1),
        SFTConfig(**TINY, **BFLOAT16, model_name_or_path=None, max_length=32, batch_size=8),
        RewardConfig(**TINY, model_name_or_path=None, query_length=16, max_length=32, batch_size=8),
    ],
    ids=lambda config: type(config).__name__,
)
def test_every_program_of_a_stage_compiles(config):
    programs = memory.programs(stage_of(config))
    assert "update" in {program.name for program in programs} and not any(program.refused for program in programs)


def test_offloaded_models_take_nothing_on_the_gpu():
    here, away = (
        stage_of(RLOOConfig(**POLICY, num_generations=2, offload_frozen=where)) for where in ("none", "pinned_host")
    )
    assert memory.resident_bytes(away) == {**memory.resident_bytes(here), "reference": 0}
    (held,), (waiting,) = (memory.programs(stage, only=("update",)) for stage in (here, away))
    assert held.peak - waiting.peak == memory.resident_bytes(here)["reference"]
    (held,), (waiting,) = (memory.programs(stage, only=("experience",)) for stage in (here, away))
    assert held.peak == waiting.peak  # it is copied to the device for this program


def test_steps_that_may_be_skipped_keep_no_second_copy_of_params_and_moments():
    (gpu,) = topologies.topology_devices("h100:1")
    # The gradients; a branch in place of the select keeps three more trees.
    assert skipped_steps.compile_for(gpu).temporary < 1.1 * skipped_steps.PARAMS_BYTES


def test_under_fsdp_generation_gathers_kernels_in_the_compute_dtype():
    config = PPOConfig(**{**POLICY, "scratch_model": "2x64x8", "dtype": "bfloat16"}, mesh_fsdp=8)
    stage = stage_of(config, "h100:8", fsdp=8)
    (program,) = memory.programs(stage, only=("generate",))
    gathers = [c.shape for c in hlo.collectives(program.compiled.as_text()) if c.kind == "all-gather"]
    assert any("bf16[" in shape for shape in gathers) and not any("f32[" in shape for shape in gathers)


def test_under_fsdp_generation_gathers_the_codes_of_a_quantized_base():
    config = RLOOConfig(**{**POLICY, "scratch_model": "2x64x8", "dtype": "bfloat16"}, num_generations=2, mesh_fsdp=8)
    stage = stage_of(dataclasses.replace(config, **LORA, load_in_8bit=True), "h100:8", fsdp=8)
    (program,) = memory.programs(stage, only=("generate",))
    sent = [c.shape for c in hlo.collectives(program.compiled.as_text()) if c.kind == "all-gather"]
    for kernel in ("64,192", "64,64", "64,256"):
        assert any(f"s8[{kernel}]" in shape for shape in sent)
        assert not any(f"f32[{kernel}]" in shape or f"bf16[{kernel}]" in shape for shape in sent)


def test_under_fsdp_generation_holds_an_adapters_base_only_merged():
    config = RLOOConfig(**{**POLICY, "scratch_model": "4x512x8", "dtype": "bfloat16"}, num_generations=2, mesh_fsdp=8)
    temporary = []
    for options in ({}, LORA):
        stage = stage_of(dataclasses.replace(config, **options), "h100:8", fsdp=8)
        (program,) = memory.programs(stage, only=("generate",))
        temporary.append(program.temporary)
    of_all, of_adapters = temporary
    assert of_adapters < 1.05 * of_all  # 1.4 with the base gathered before its adapters are merged


@pytest.fixture(scope="module")
def sent():
    devices = topologies.topology_devices("h100:8")
    return {mesh: collectives.compiled(mesh, devices=devices) for mesh in collectives.MESHES}


@pytest.mark.parametrize("mesh", collectives.MESHES, ids=collectives.name_of)
def test_eight_gpus_send_what_the_layout_needs(sent, mesh):
    data, fsdp, tensor = mesh
    needs = collectives.update_needs(*mesh, reduce_scatters=True)
    # XLA for GPUs sums the gradients of what is outside the loop over layers, two embeddings and a head, once for all
    # micro-batches.
    micro_batches = collectives.ROWS // collectives.MICRO
    table = collectives.VOCABULARY * collectives.WIDTH / fsdp / tensor
    needs -= (micro_batches - 1) * 3 * collectives.summed(table, data)
    assert 0.98 < sent[mesh]["update"]["sent"] / needs < 1.02


@pytest.mark.parametrize("mesh", collectives.MESHES, ids=collectives.name_of)
def test_a_decode_step_on_gpus_sends_activations_and_never_weights(sent, mesh):
    program, needs = sent[mesh]["generate"], collectives.decode_needs(*mesh)
    assert program["gathers"] == 0
    assert needs <= program["step"] < 1.2 * needs + 4 * collectives.ROWS + 16


def test_micro_batches_are_the_largest_that_fit_a_gpu(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.00011")  # 9.3 MB
    config, lines = RLOOConfig(**{**POLICY, "micro_batch_size": None}, num_generations=2, topology="h100:1"), []
    config = dataclasses.replace(config, dry_run=True, response_length=64)
    chosen, programs = micro_batches.settled(config, memory.abstract_stage, lines.append)
    size, usable = chosen.micro_batch_size, micro_batches.USABLE * 0.00011 * topologies.GPUS["h100"].memory
    assert 2 <= size < 16 and lines[0].startswith(f"micro_batch_size {size}: the largest that fits NVIDIA H100")
    (above,) = memory.programs(stage_of(config), only=("update",), micro_batch_size=2 * size)
    assert programs["update"].peak <= usable < above.peak
    assert programs["experience"].peak <= usable
