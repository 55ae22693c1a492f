"""Presets of GRPO: the options that they set, flags that override them, and refusals."""

import dataclasses

import pytest

from rlhf_jax.config import GRPOConfig, Pipeline, RLOOConfig, preset
from rlhf_jax.config.check import check
from rlhf_jax.config.command_line import with_flags
from rlhf_jax.config.presets import PRESETS, with_preset
from rlhf_jax.errors import UserError

START = {"scratch_model": "2x32x4", "tokenizer_name_or_path": "synthetic", "dataset_name": "synthetic"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_options_and_passes_validation(name):
    config = preset(name, **START)
    assert {key: getattr(config, key) for key in PRESETS[name][1]} == PRESETS[name][1]
    check(config)


@pytest.mark.parametrize("flags", [["epsilon_high", "preset"], ["preset", "epsilon_high"]])
def test_a_flag_overrides_the_preset_in_any_order(flags):
    words = {"preset": ["dapo"], "epsilon_high": ["0.5"]}
    config = with_flags(GRPOConfig(**START), [(name, words[name]) for name in flags])
    assert config.epsilon_high == 0.5 and config.mask_truncated_completions


@pytest.mark.parametrize("flag", ["preset", "grpo.preset"])
def test_in_a_pipeline_a_preset_is_of_its_stage_grpo(flag):
    pipeline = Pipeline(ppo=None, grpo=GRPOConfig(**START))
    assert with_flags(pipeline, [(flag, ["gspo"])]).grpo.importance_sampling_level == "sequence"


def test_options_in_python_override_a_preset():
    assert preset("dapo", epsilon_high=0.3).epsilon_high == 0.3


@pytest.mark.parametrize(
    "config, flag, words, message",
    [
        (GRPOConfig(), "preset", ["dappo"], "Did you mean dapo"),
        (GRPOConfig(), "preset", [], "takes one of"),
        (RLOOConfig(), "preset", ["dapo"], "not grpo"),
        (Pipeline(), "preset", ["dapo"], "no stage grpo"),
        (Pipeline(), "ppo.preset", ["dapo"], "not grpo"),
        (GRPOConfig(), "sft.preset", ["dapo"], "no stage sft"),
    ],
)
def test_a_preset_that_cannot_be_set_is_refused(config, flag, words, message):
    with pytest.raises(UserError, match=message):
        with_flags(config, [(flag, words)])


def test_a_preset_keeps_all_other_options():
    given = GRPOConfig(**START, learning_rate=0.125)
    changed = {field.name for field in dataclasses.fields(given)} - set(PRESETS["dapo"][1])
    after = with_preset(given, "dapo")
    assert all(getattr(given, name) == getattr(after, name) for name in changed)
