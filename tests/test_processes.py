"""One program in several processes: the numbers of one, each row scored once, and one end for all.

Real processes over loopback, started by the command as a user does: pytest -m processes -n 0
"""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

pytestmark = pytest.mark.processes

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAGES = ("sft", "reward", "ppo", "rloo")
MESHES = {"one": (1, 1, ()), "two": (2, 2, ("--mesh_fsdp", "2")), "four": (4, 1, ("--mesh_fsdp", "2"))}
"""Processes, devices each, options."""
UPDATES = 2

CONFIG = '''
from rlhf_jax.config import PPOConfig, RLOOConfig, RewardConfig, SFTConfig

SHARED = dict(
    dataset_name="synthetic",
    max_train_samples=64,
    query_length=64,
    learning_rate=1e-3,
    batch_size=8,
    micro_batch_size=8,
    report_to=(),
)
START = dict(scratch_model="2x32x4", tokenizer_name_or_path="synthetic")
POLICY = dict(
    sft_model_path=None,
    reward_model_path="REWARD",
    reward_input="REWARD_INPUT",
    reward_funcs=("REWARDS:brevity", "REWARDS:slowly"),
    max_eval_samples=6,
    length_buckets=(64,),
    response_length=6,
    rollout_batch_size=8,
    log_completions=True,
    num_sample_generations=1,
    save_steps=1,
    **START,
    **SHARED,
)


def get_config(variant):
    if variant == "sft":
        return SFTConfig(model_name_or_path=None, max_steps=2, max_length=96, max_eval_samples=6, **START, **SHARED)
    if variant == "reward":
        return RewardConfig(model_name_or_path=None, max_steps=2, max_length=96, max_eval_samples=6, **START, **SHARED)
    if variant == "ppo":
        return PPOConfig(num_ppo_epochs=2, num_mini_batches=1, total_episodes=16, **POLICY)
    return RLOOConfig(num_generations=2, total_episodes=16, **POLICY)


VARIANTS = dict.fromkeys(("sft", "reward", "ppo", "rloo"))
'''

REWARDS = '''
import asyncio, json, os, signal, time


def process():
    import jax
    return jax.process_index()


def note(kind, **what):
    with open(os.environ["NOTES"] + f"/{kind}-{process()}.jsonl", "a") as file:
        file.write(json.dumps(what) + "\\n")


def brevity(prompts, completion_ids, trainer_state, log_metric, log_extra, **_):
    step = None if trainer_state.is_eval else trainer_state.global_step
    note("scored", step=step, rows=[[p, ids] for p, ids in zip(prompts, completion_ids)])
    log_metric("rows_at_once", len(prompts))
    log_extra("first", [ids[0] if ids else None for ids in completion_ids])
    return [-0.1 * len(ids) for ids in completion_ids]


async def slowly(prompts, completions, **_):
    await asyncio.sleep(0.01)
    return [None if len(c) % 2 else 0.01 * len(c) for c in completions]


def failing(prompts, trainer_state, **_):
    if process() == 1 and trainer_state.global_step == 1:
        raise ValueError("the judge is out")
    return [0.0] * len(prompts)


def hanging(prompts, trainer_state, **_):
    if process() == 1 and trainer_state.global_step == 1:
        time.sleep(600)
    return [0.0] * len(prompts)


def dying(prompts, trainer_state, **_):
    if process() == int(os.environ["DIES"]) and trainer_state.global_step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [0.0] * len(prompts)
'''


class Started:
    """Some processes of one command. Gloo's threads write to their output too: only our own lines are read."""

    def __init__(self, folder, mesh, variant, *options, **environment):
        count, devices, axes = MESHES[mesh]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        join = ("--distributed", address, "--num_processes", str(count)) if count > 1 else ()
        (folder / "notes" / mesh).mkdir(parents=True, exist_ok=True)
        # NPROC is the number of threads of XLA's pool, of which a collective holds one a device (see test_devices).
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "NPROC": "16"}
        env |= {"XLA_FLAGS": "--xla_backend_optimization_level=0", "NOTES": str(folder / "notes" / mesh), **environment}
        self.began = time.monotonic()
        self.processes, self.logs = [], []
        for index in range(count):
            command = [sys.executable, "-m", "rlhf_jax.train", "--config", f"{folder / 'config.py'}:{variant}"]
            command += ["--run_dir", str(folder / mesh / variant), *axes, *join, *options]
            command += ["--process_id", str(index)] if join else []
            self.logs.append(folder / f"{mesh}-{variant}-{index}.log")
            with open(self.logs[-1], "w") as log:
                self.processes.append(
                    subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
                )

    def ends(self, timeout=150):
        """(exit status, output) of each."""
        try:
            for process in self.processes:
                process.wait(max(timeout - (time.monotonic() - self.began), 0.1))
        finally:
            for process in self.processes:
                process.kill()
        texts = [log.read_text(errors="replace") for log in self.logs]
        return [process.returncode for process in self.processes], texts


def errors(text):
    return [line for line in text.splitlines() if "error: " in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reward model, a config file and a file of reward functions."""
    import jax

    from rlhf_jax import data, models
    from rlhf_jax.models import hf

    folder = tmp_path_factory.mktemp("processes")
    model = models.custom_shape("2x32x4", vocab_size=256, max_positions=128)
    params = jax.device_get(model.init(jax.random.key(1), heads=("scalar",), score_std=0.3))
    hf.save(folder / "reward", model, params, kind="scalar")
    data.save_tokenizer(data.load_tokenizer("synthetic"), str(folder / "reward"))
    (folder / "rewards.py").write_text(REWARDS)
    config = CONFIG.replace("REWARDS:", f"{folder / 'rewards.py'}:").replace("REWARD_INPUT", "auto")
    (folder / "config.py").write_text(config.replace('"REWARD"', repr(str(folder / "reward"))))
    return folder
