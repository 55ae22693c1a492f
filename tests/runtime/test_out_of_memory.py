"""Out of memory: the phase, the size of the allocation, the options that need less, and what is kept."""

import dataclasses

import jax
import pytest

import rlhf_jax
from rlhf_jax.config import PPOConfig, RLOOConfig, SFTConfig
from rlhf_jax.runtime import out_of_memory
from rlhf_jax.stages.programs import Programs
from rlhf_jax.stages.rollout import RolloutStage

pytestmark = pytest.mark.runs

XLA = "RESOURCE_EXHAUSTED: Out of memory allocating 3221225472 bytes."
GPU = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12.50GiB."
CONFIG = RLOOConfig(
    sft_model_path=None,
    reward_model_path=None,
    scratch_model="1x16x2",
    tokenizer_name_or_path="synthetic",
    dataset_name="synthetic",
    dataset_test_split=None,
    max_train_samples=16,
    query_length=64,
    length_buckets=(64,),
    response_length=4,
    num_generations=2,
    batch_size=4,
    micro_batch_size=2,
    total_episodes=12,
    num_sample_generations=0,
    save_steps=0,
    report_to=(),
)


@pytest.mark.parametrize("phase", out_of_memory.PHASES)
@pytest.mark.parametrize("config", [SFTConfig(), PPOConfig()], ids=["sft", "ppo"])
def test_every_option_that_is_named_is_one_of_the_stage(phase, config):
    said = out_of_memory.message(config, phase, XLA)
    assert said.startswith(f"out of memory in {phase} (allocating 3.0 GiB). Options that need less: ")
    names = [part.split(" (now ")[0] for part in said.split("need less: ")[1].split(". Run the")[0].split("), ")]
    assert names and all(hasattr(config, name) for name in names)
    assert "allocating 12.50 GiB" in out_of_memory.message(config, phase, GPU)


def test_of_two_sizes_of_a_micro_batch_the_one_that_is_given_is_named():
    said = out_of_memory.message(PPOConfig(micro_batch_tokens=8192), "update", XLA)
    assert "micro_batch_tokens (now 8192)" in said and "micro_batch_size" not in said


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gradient_checkpointing": False}, "gradient_checkpointing (now False)"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_policy": "dots"}, "policy (now dots)"),
        ({"gradient_checkpointing": True}, None),
    ],
)
def test_recomputing_is_named_while_there_is_more_to_recompute(options, named):
    said = out_of_memory.message(PPOConfig(**options), "update", XLA)
    assert named in said if named else "gradient_checkpointing" not in said


def test_other_errors_pass():
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"),
        out_of_memory.translate_errors(CONFIG, lambda: "update"),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")


def length(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize(("phase", "kept"), [("generate", [2]), ("experience", [2]), ("update", [])])
def test_what_was_done_is_saved_where_the_state_is_whole(tmp_path, monkeypatch, phase, kept):
    """The third update runs out of memory: before its update program, the state of the second is whole."""
    owner, method = {
        "generate": (Programs, "generate"),
        "experience": (Programs, "make_experience"),
        "update": (RolloutStage, "_prompts"),
    }[phase]
    real, step, present = getattr(owner, method), RolloutStage.train_step, []

    def fails(self, *args, **options):
        stage, number = present[-1] if present else (None, 0)
        if number == 2 and stage.phase == phase:
            raise jax.errors.JaxRuntimeError(XLA)
        return real(self, *args, **options)

    def train_step(self, state, number, *tick):
        present.append((self, number))
        return step(self, state, number, *tick)

    monkeypatch.setattr(RolloutStage, "train_step", train_step)
    monkeypatch.setattr(owner, method, fails)
    config = dataclasses.replace(CONFIG, run_dir=str(tmp_path / "run"))
    with pytest.raises(out_of_memory.OutOfMemory, match=rf"out of memory in {phase}.*3\.0 GiB"):
        rlhf_jax.run(config, reward_funcs=length)
    assert [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()] == kept
    monkeypatch.undo()
    # With another of the options that the message names the run goes on.
    result = rlhf_jax.run(dataclasses.replace(config, micro_batch_size=4), reward_funcs=length)
    assert result.metrics["episode"] == 12
