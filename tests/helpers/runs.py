"""Tiny runs on the built-in task: their options, what they leave, and how they are cut off."""

import os

import jax

from rlhf_jax.config import PPOConfig, SFTConfig
from rlhf_jax.metrics import logger
from rlhf_jax.models.io import hf
from rlhf_jax.runtime.callbacks import Callback

OPTIONS = {
    "dataset_name": "synthetic",
    "tokenizer_name_or_path": "synthetic",
    "query_length": 64,
    "max_train_samples": 64,
    "max_eval_samples": 8,
    "learning_rate": 1e-3,
    "batch_size": 8,
    "report_to": (),
    "save_steps": 1,
}
TEXTS = {"max_length": 72, "length_buckets": (72,)}
RLOO_OPTIONS = {
    "sft_model_path": None,
    "scratch_model": "2x32x2",
    "tokenizer_name_or_path": "synthetic",
    "dataset_name": "synthetic",
    "dataset_test_split": None,
    "reward_model_path": None,
    "query_length": 44,
    "length_buckets": (44,),
    "response_length": 6,
    "max_train_samples": 32,
    "batch_size": 8,
    "total_episodes": 16,
    "learning_rate": 1e-3,
    "num_sample_generations": 0,
    "report_to": (),
    "save_steps": 0,
}


def sft_config(folder, **options):
    fixed = {**OPTIONS, **TEXTS, "model_name_or_path": None, "scratch_model": "1x16x2", "max_steps": 4, **options}
    return SFTConfig(run_dir=str(folder), **fixed)


def ppo_config(folder, sft, **options):
    fixed = {
        **OPTIONS,
        "sft_model_path": os.path.join(sft, "policy"),
        "reward_model_path": None,
        "value_model": "shared_backbone",
        "length_buckets": (64,),
        "total_episodes": 32,
        "response_length": 6,
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "num_sample_generations": 2,
        "missing_eos_penalty": 1.0,
        **options,
    }
    return PPOConfig(run_dir=str(folder), **fixed)


def wordiness(completions, **_):
    return [float(len(text.split())) for text in completions]


class Killed(Exception):
    """Stands for a kill: raised in the middle of a run."""


class KillAt(Callback):
    """Ends the run when the metrics of an update are read: before its checkpoint, after that of the one before."""

    def __init__(self, step, error=Killed):
        self.step, self.error = step, error

    def on_step_end(self, step, metrics, control):
        if step == self.step:
            raise self.error


def lines(folder, name="metrics.jsonl"):
    """Of metrics.jsonl, or another file of a run's folder."""
    return logger.read_metrics(os.path.join(folder, name))


def tensors(path):
    """Params of a saved policy."""
    return jax.tree.leaves(hf.load(path, kind="causal")[1])


def rollout_of(stage, prompts, **options):
    """Responses of a stage's starting policy to a batch of prompts from the host."""
    state, programs = stage.state, stage.programs
    policy, keys = state.params["policy"], {"seed": state.seed, "step": state.step}
    return programs.generate(policy, programs.place(prompts), **keys, **options)[0]


def compilations(stage, names=("generate", "experience", "update")):
    """How often each program of a stage was compiled."""
    return {name: getattr(stage.programs.jitted, name)._cache_size() for name in names}
