"""Runs continued from each of their checkpoints, over two passes of the data: what the uninterrupted run leaves."""

import dataclasses
import os
import shutil
import sys
import tempfile

import pytest

import rlhf_jax
from rlhf_jax.config import GRPOConfig, RewardConfig, SFTConfig
from tests.helpers import tool_tokenizer as tt
from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "chaos"))  # as for a script run from there

import chaos_compare  # noqa: E402

from tests.helpers.runs import KillAt  # noqa: E402

pytestmark = pytest.mark.runs

SHARED = {
    "run_dir": "run",
    "dataset_name": "synthetic",
    "tokenizer_name_or_path": "synthetic",
    "scratch_model": "1x16x2",
    "query_length": 44,
    "max_eval_samples": 4,
    "eval_steps": 2,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "batch_size": 8,
    "save_steps": 1,
    "save_total_limit": None,
}
SUPERVISED = {"model_name_or_path": None, "max_length": 64, "length_buckets": (64,)}
ADAPTED = {
    "use_peft": True,
    "lora_r": 2,
    "lora_target_modules": ("all-linear",),
    "modules_to_save": ("final_layer_norm",),
    "disable_dropout": False,
}
ROLLING = {
    "sft_model_path": None,
    "reward_model_path": None,
    "reward_funcs": ("rlhf_jax.data.synthetic:gold_reward",),
    "length_buckets": (44,),
    "response_length": 6,
    "num_mini_batches": 2,
    "log_completions": True,
    "num_sample_generations": 3,
    "num_completions_to_print": 1,
}
# What updates of GRPO change besides params and moments: the reference and the coefficient of the entropy bonus.
MOVING = {
    "beta": 0.05,
    "sync_ref_model": True,
    "ref_model_sync_steps": 3,
    "use_adaptive_entropy": True,
    "entropy_target": 20.0,
    "top_entropy_quantile": 0.5,
}
# Checkpoints hold unfinished responses and lengths by prompt.
PARTIAL = {
    "response_length": 12,
    "temperature": 5.0,
    "num_generations": 2,
    "rollout_max_steps": 4,
    "old_logprobs": "sampler",
    "decode_slots": 4,
    "draft": "ngram",
}
# Whose state is that of the update alone.
HOME = tempfile.mkdtemp()
TOOLS = {
    "tools": ("tests.helpers.tool_tokenizer:tell", "tests.helpers.tool_tokenizer:fail"),
    "environment_factory": ("tests.helpers.tool_tokenizer:Counter",),
    "reward_funcs": (),
    "tokenizer_name_or_path": f"{HOME}/tokenizer",
    "dataset_name": f"{HOME}/prompts.jsonl",
    "eval_dataset_name": f"{HOME}/prompts.jsonl",
    "response_length": 64,
    "stop_token_ids": tt.SHORT_TURNS,
    "num_generations": 2,
}
# PPO and RLOO are GRPO with another loss here, and take as long again to trace; scripts/chaos/chaos.py has them.
# A pass ends with an update (3 updates of 8 rows are 24), or within one (20 rows, or 10 prompts of 2 responses).
CONFIGS = {
    "sft": (SFTConfig(**SHARED, **SUPERVISED, max_train_samples=24, max_steps=6), 6),
    "reward": (RewardConfig(**SHARED, **SUPERVISED, **ADAPTED, max_train_samples=20, max_steps=5), 5),
    "grpo": (GRPOConfig(**SHARED, **ROLLING, **MOVING, max_train_samples=10, num_generations=2, total_episodes=40), 5),
    "partial": (GRPOConfig(**{**SHARED, **ROLLING, **PARTIAL}, max_train_samples=10, total_episodes=40), 5),
    "tools": (GRPOConfig(**{**SHARED, **ROLLING, **TOOLS}, max_train_samples=10, total_episodes=32), 4),
}


class Killed(BaseException):
    """Stands for a kill: raised in the middle of a run."""


@pytest.fixture(scope="module", params=CONFIGS)
def whole(request, tmp_path_factory):
    """A config, its updates, and the folder of the uninterrupted run."""
    config, updates = CONFIGS[request.param]
    tt.save(HOME, rows=10)
    folder = tmp_path_factory.mktemp("whole")
    before = os.getcwd()
    os.chdir(folder)
    try:
        rlhf_jax.run(config)
    finally:
        os.chdir(before)
    assert sorted(int(name) for name in os.listdir(folder / "run/checkpoints")) == list(range(1, updates + 1))
    return config, updates, folder / "run"


def test_a_run_continued_from_any_of_its_checkpoints_ends_the_same(whole, tmp_path, monkeypatch, capsys):
    config, updates, reference = whole
    monkeypatch.chdir(tmp_path)
    for start in range(1, updates + 1):
        shutil.rmtree("run", ignore_errors=True)
        shutil.copytree(reference, "run")
        os.remove("run/finished.json")
        for step in range(start + 1, updates + 1):
            shutil.rmtree(f"run/checkpoints/{step}")
        rlhf_jax.run(config)
        assert f"resuming after update {start} of {updates}" in capsys.readouterr().out
        assert chaos_compare.differences(reference, tmp_path / "run") == [], f"from checkpoint {start}"


def test_a_run_killed_in_every_update_ends_the_same(whole, tmp_path, monkeypatch, capsys):
    config, updates, reference = whole
    monkeypatch.chdir(tmp_path)
    for step in range(2, updates + 1):
        with pytest.raises(Killed):
            rlhf_jax.run(config, callbacks=[KillAt(step, Killed)])
    rlhf_jax.run(config)
    said = capsys.readouterr().out
    assert all(f"resuming after update {step} of {updates}" in said for step in range(1, updates))
    assert chaos_compare.differences(reference, tmp_path / "run") == []


@pytest.mark.parametrize("whole", ["sft"], indirect=True)
def test_another_seed_is_told_apart(whole, tmp_path, monkeypatch):
    # What the tests above compare with sees a run that went another way.
    config, updates, reference = whole
    monkeypatch.chdir(tmp_path)
    rlhf_jax.run(dataclasses.replace(config, seed=1))
    found = " ".join(chaos_compare.differences(reference, tmp_path / "run"))
    assert "metrics.jsonl differs in line 1" in found and "model.safetensors differs" in found
    assert "config.json differs" in found and "tensorboard/: loss" in found
