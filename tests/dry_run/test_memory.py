"""--dry_run's memory: from the stage's own programs, compiled and never run."""

import dataclasses
import json
import pathlib
import sys

import jax
import pytest

from rlhf_jax import train
from rlhf_jax.config import GRPOConfig, PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf_jax.config.check import check
from rlhf_jax.dry_run import memory, report, topologies
from rlhf_jax.dry_run.compiling import Program
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import sharding
from tests.helpers import skipped_steps

TINY = {"scratch_model": "2x32x4", "tokenizer_name_or_path": "synthetic", "dataset_name": "synthetic", "dry_run": True}
POLICY = {"sft_model_path": None, "reward_model_path": None, "query_length": 32, "response_length": 8}
POLICY |= {"batch_size": 16, "micro_batch_size": 8, **TINY}
MIB = 2**20


@pytest.fixture(scope="module")
def stage():
    return memory.abstract_stage(PPOConfig(**POLICY), sharding.make_mesh(devices=jax.devices()[:1]))


@pytest.fixture(scope="module")
def programs(stage):
    return {program.name: program for program in memory.programs(stage)}


def test_parts_are_the_bytes_of_params_and_moments(stage):
    parts = memory.resident_bytes(stage)
    heads = {"policy": "causal", "value": "scalar"}
    made = lambda head: jax.eval_shape(lambda: stage.opened.policy.init(jax.random.key(0), heads=(head,)))  # noqa: E731
    counts = {role: sum(x.size for x in jax.tree.leaves(made(head))) for role, head in heads.items()}
    assert {role: parts[role] for role in heads} == {role: 4 * count for role, count in counts.items()}
    # Adam's two moments and its count of steps.
    assert parts["optimizer"] == 8 * sum(counts.values()) + 4
    assert parts["reference"] == 4 * counts["policy"]


def test_the_programs_are_those_of_an_update(programs):
    assert list(programs) == ["generate", "experience", "update"]
    assert not any(program.refused for program in programs.values())


def test_the_update_takes_the_place_of_the_state_that_it_is_given(stage, programs):
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((stage.state.params, stage.state.opt_state)))
    assert state <= programs["update"].aliased <= state + 1024


def test_what_a_program_does_not_see_counts_too(stage, programs):
    held = memory.resident_bytes(stage)
    assert programs["generate"].other_resident == sum(held.values()) - held["policy"]
    # The reference is all that an update does not see, but for the few scalars of the state.
    assert abs(programs["update"].other_resident - held["reference"]) < 64
    program = dataclasses.replace(
        programs["update"], arguments=100, outputs=50, temporary=30, aliased=40, other_resident=7
    )
    assert program.peak == 7 + 100 + 30 + 50 - 40


def test_models_that_a_program_does_not_read_count_too():
    config = GRPOConfig(**POLICY, num_generations=2, beta=0.0)  # its log-probabilities are the update's own
    stage = memory.abstract_stage(config, sharding.make_mesh(devices=jax.devices()[:1]))
    (experience,) = memory.programs(stage, only=("experience",))
    assert experience.arguments < memory.resident_bytes(stage)["policy"]
    assert experience.peak >= sum(memory.resident_bytes(stage).values())


def test_a_larger_micro_batch_takes_more(programs):
    whole = dataclasses.replace(PPOConfig(**POLICY), micro_batch_size=16)
    stage = memory.abstract_stage(whole, sharding.make_mesh(devices=jax.devices()[:1]))
    (update,) = memory.programs(stage, only=("update",))
    assert 1.3 < update.temporary / programs["update"].temporary < 3


def test_micro_batches_of_tokens_take_their_widest():
    # 8 rows of 32 + 32 tokens, or as many tokens.
    options = {**POLICY, "scratch_model": "1x32x4", "batch_size": 64, "response_length": 32}
    mesh, names, sizes = sharding.make_mesh(devices=jax.devices()[:1]), ("experience", "update"), []
    for size in ({"micro_batch_size": 8}, {"micro_batch_size": None, "micro_batch_tokens": 8 * 64}):
        stage = memory.abstract_stage(PPOConfig(**{**options, **size}), mesh)
        sizes.append({program.name: program.temporary for program in memory.programs(stage, only=names)})
    for name in names:
        assert sizes[1][name] < 1.3 * sizes[0][name]


def test_offloaded_models_take_nothing_on_the_device():
    away = RLOOConfig(**POLICY, num_generations=2, offload_frozen="pinned_host")
    parts = memory.resident_bytes(memory.abstract_stage(away, sharding.make_mesh(devices=jax.devices()[:1])))
    assert parts["reference"] == 0 and parts["policy"] > 0


def test_a_model_that_comes_back_for_a_program_counts_while_it_runs():
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    here, away = (RLOOConfig(**POLICY, num_generations=2, offload_frozen=where) for where in ("none", "pinned_host"))
    peaks = [memory.programs(memory.abstract_stage(config, mesh), only=("experience",))[0] for config in (here, away)]
    assert peaks[0].other_resident == peaks[1].other_resident and peaks[0].peak == peaks[1].peak


def test_a_cache_is_two_arrays_a_layer_of_prompt_and_response(stage):
    assert memory.cache_bytes(stage) == 2 * 2 * 16 * (32 + 8) * 32 * 4


def test_a_reward_stage_from_scratch_has_a_plan():
    lengths = {"query_length": 16, "max_length": 32, "batch_size": 8}
    config = RewardConfig(**TINY, **lengths, model_name_or_path=None, margin_column="margin")
    planned = memory.abstract_stage(config, sharding.make_mesh(devices=jax.devices()[:1]))
    assert [program.name for program in memory.programs(planned)] == ["update"]


def test_adams_first_moment_may_be_kept_in_half():
    half = SFTConfig(**TINY, model_name_or_path=None, adam_mu_dtype="bfloat16", max_length=32, batch_size=8)
    stage = memory.abstract_stage(half, sharding.make_mesh(devices=jax.devices()[:1]))
    parts = memory.resident_bytes(stage)
    assert parts["optimizer"] == 6 * parts["model"] // 4 + 4
    assert [p.name for p in memory.programs(stage)] == ["update"]


@pytest.mark.parametrize(
    ("peak", "limit", "refused", "words"),
    [
        (3 * MIB, 4 * MIB, False, "memory: fits: peak 3.0 MiB of 4.0 MiB per device, in update"),
        (5 * MIB, 4 * MIB, False, "memory: does NOT fit: peak 5.0 MiB of 4.0 MiB per device, in update. Use more"),
        (3 * MIB, 4 * MIB, True, "memory: does NOT fit: the compiler refuses update. Use more devices"),
        (3 * MIB, None, False, "memory: peak 3.0 MiB per device, in update"),
    ],
)
def test_a_dry_run_says_whether_it_fits(peak, limit, refused, words):
    program = Program("update", 0.0, peak, 0, 0, 0, 0, refused="too large" if refused else None)
    said = report.verdict(PPOConfig(**POLICY), [Program("score", 0.0, MIB, 0, 0, 0, 0), program], limit)
    assert said.startswith(words)
    if "NOT" in said:
        assert "options that need less: micro_batch_size (now " in said and said.endswith("use_peft (now False)")


@pytest.mark.parametrize("topology", [None, "v5e:2x2"])
def test_steps_that_may_be_skipped_are_a_branch_except_on_gpus(topology):
    """On a CPU a select keeps more, on TPUs no less."""
    if topology is not None:
        pytest.importorskip("libtpu")
    device = (jax.devices() if topology is None else topologies.topology_devices(topology))[0]
    assert "conditional(" in skipped_steps.compile_for(device).compiled.as_text()


def test_a_dry_run_prints_parts_programs_and_the_verdict(capsys):
    config = PPOConfig(**POLICY)
    check(config)
    report.show(config)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "parameters" in line] == ["policy", "value", "reference"]
    assert lines[-1] == "compute float32; dry run: nothing was loaded or written"
    rows = [line.split()[0] for line in lines[lines.index(next(x for x in lines if "each device" in x)) + 1 :]]
    assert rows[:6] == ["policy", "value", "optimizer", "reference", "total", "cache"]
    programs = ["generate", "experience", "update"]
    assert rows[6:17] == ["during", *programs, "predicted", *programs, "all", "most", "memory:"]
    assert "memory: fits" in lines[-2]
    assert any(line.startswith("predicted seconds at least, from the compiled instructions") for line in lines)


def test_a_topology_is_for_dry_runs():
    with pytest.raises(UserError, match="--topology v5e:4x4 needs --dry_run"):
        train.run(PPOConfig(**{**POLICY, "dry_run": False}, topology="v5e:4x4"))


def test_without_libtpu_a_topology_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    flags = ["--topology", "v5e:4x4", "--dry_run"]
    assert train.main(["--config", "quickstart.py", *flags]) == 2
    assert "pip install '.[tpu-aot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind, says, bytes_of_it",
    [
        ("TPU v5 lite", None, int(15.75 * 2**30)),  # not there: what libtpu gives programs
        ("TPU v5 lite", 15 * 2**30, 15 * 2**30),  # there: what it says itself
        ("TPU v99", None, None),
    ],
)
def test_the_memory_of_a_chip_is_what_it_says_or_what_is_known_of_its_kind(kind, says, bytes_of_it):
    class Chip:
        platform, device_kind = "tpu", kind

        def memory_stats(self):
            if says is None:
                raise jax.errors.JaxRuntimeError("UNIMPLEMENTED")
            return {"bytes_limit": says}

    assert topologies.capacity(Chip()) == bytes_of_it


@pytest.mark.parametrize("config", (RLOOConfig, SFTConfig))
def test_a_model_that_reads_images_is_given_those_with_most_tiles(tmp_path, config):
    from tests.helpers import vision as tiny

    folder = tiny.checkpoint(tmp_path / "model", splitting=True)  # images of 3 x 3 tiles and a whole
    sizes = {"query_length": 96, "batch_size": 4, "micro_batch_size": 4}
    if config is SFTConfig:
        given = SFTConfig(**sizes, model_name_or_path=folder, max_length=112)
    else:
        given = RLOOConfig(**sizes, sft_model_path=folder, num_generations=2, response_length=4)
    planned = memory.abstract_stage(given, sharding.make_mesh(devices=jax.devices()[:1]))
    assert planned.train_data.images.tiles == 10
    (update,) = memory.programs(planned, only=("update",))
    rows = 4 if config is SFTConfig else 2
    pixels = [x for x in jax.tree.leaves(update.traced.args_info) if len(x.shape) == 5]
    assert [(x.shape, str(x.dtype)) for x in pixels] == [((rows, 10, 3, 16, 16), "uint8")]


def test_a_value_model_has_a_plan_without_images(tmp_path):
    from tests.helpers import vision as tiny

    folder = tiny.checkpoint(tmp_path / "model", splitting=True)
    changes = {"sft_model_path": folder, "scratch_model": None, "tokenizer_name_or_path": None}
    given = PPOConfig(**{**POLICY, **changes})
    assert memory.abstract_stage(given, sharding.make_mesh(devices=jax.devices()[:1])).train_data.images is None


@pytest.mark.parametrize("why", ("no image processor", "another family", "assistant_only_loss"))
def test_a_model_of_images_and_text_has_a_plan_of_its_text_model(tmp_path, why):
    from tests.helpers import vision as tiny

    folder = pathlib.Path(tiny.checkpoint(tmp_path / "model", splitting=True))
    if why == "no image processor":
        (folder / "preprocessor_config.json").unlink()
    if why == "another family":
        hf = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**hf, "model_type": "llava", "image_token_index": 58}))
    options = {"model_name_or_path": str(folder), "query_length": 16, "max_length": 32, "batch_size": 4}
    given = SFTConfig(**options, assistant_only_loss=why == "assistant_only_loss")
    if why == "assistant_only_loss":
        turn = "{% if m['role'] == 'user' %} a {% else %}{% generation %} a {% endgeneration %}{% endif %}"
        template = "{% for m in messages %}" + turn + "{% endfor %}"
        (folder / "chat_template.jinja").write_text(template)
    planned = memory.abstract_stage(given, sharding.make_mesh(devices=jax.devices()[:1]))
    assert planned.train_data.images is None and not planned.network.model.reads_images
