"""One program in several processes: the numbers of one, each row scored once, and one end for all.

Real processes over loopback, started by the command as a user does (see one_cache): pytest -m processes -n 0
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.helpers import tool_tokenizer
from tests.helpers.children import QUICK, reward_checkpoint
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.processes

STAGES = ("all/sft", "all/reward", "all/ppo", "rloo", "grpo", "tools")
MESHES = {"one": (1, 1, "1 1"), "two": (2, 2, "2 1"), "four": (4, 1, "1 2")}
"""Processes, devices each, devices on fsdp and on tensor; `data` takes the others, 2."""
SHARES = {"two": (8, 8), "four": (8, 0, 8, 0)}
"""Rows of training that each process scores: with tensor over processes two hold the same rows, and one scores them."""
UPDATES = 2

CONFIG = """
import dataclasses
import os

from rlhf_jax.config import GRPOConfig, Pipeline, PPOConfig, RLOOConfig, RewardConfig, SFTConfig
from tests.helpers.tool_tokenizer import SHORT_TURNS

SHARED = dict(
    dataset_name="synthetic",
    max_train_samples=64,
    max_eval_samples=6,
    query_length=64,
    learning_rate=1e-3,
    batch_size=8,
    micro_batch_size=8,
    report_to=(),
    mesh_fsdp=int(os.environ["MESH"].split()[0]),
    mesh_tensor=int(os.environ["MESH"].split()[1]),
)
START = dict(scratch_model="2x32x4", tokenizer_name_or_path="synthetic")
SUPERVISED = dict(max_steps=2, max_length=96, length_buckets=(96,), **SHARED)
POLICY = dict(
    reward_funcs=("REWARDS:brevity", "REWARDS:slowly"),
    length_buckets=(64,),
    response_length=6,
    rollout_batch_size=8,
    log_completions=True,
    num_sample_generations=1,
    save_steps=1,
    total_episodes=16,
    **SHARED,
)


def get_config(variant):
    if variant == "all":
        return Pipeline(
            sft=SFTConfig(model_name_or_path=None, **START, **SUPERVISED),
            reward=RewardConfig(
                model_name_or_path="{run_dir}/sft/policy",
                normalize_dataset_name="synthetic",
                normalize_samples=6,
                center_rewards_coefficient=0.01,  # without it Adam makes a level out of rounding
                **SUPERVISED,
            ),
            ppo=PPOConfig(
                sft_model_path="{run_dir}/sft/policy",
                reward_model_path="{run_dir}/reward/reward_model",
                num_ppo_epochs=2,
                num_mini_batches=1,
                **POLICY,
            ),
        )
    if variant == "grpo":
        # No top_entropy_quantile: a new model's entropies are nearly equal, and rounding decides which are above it.
        # The gradient of their sum is nearly 0, which Adam with its small epsilon makes large.
        entropy = dict(use_adaptive_entropy=True, entropy_target=20.0, adam_epsilon=1e-5)
        return GRPOConfig(num_generations=2, beta=0.05, num_iterations=2, **entropy, **START, **POLICY)
    if variant in ("tools", "partial"):
        helper = "tests.helpers.tool_tokenizer"
        policy = {**POLICY, "response_length": 64, "length_buckets": (64,), "dataset_name": "TOOLS/prompts.jsonl"}
        policy |= {"eval_dataset_name": "TOOLS/prompts.jsonl", "stop_token_ids": SHORT_TURNS, "temperature": 1.0}
        start = {**START, "tokenizer_name_or_path": "TOOLS/tokenizer"}
        calls = dict(tools=(f"{helper}:tell", f"{helper}:fail"), environment_factory=(f"{helper}:Counter",))
        if variant == "partial":  # responses go on in later updates
            policy |= {"total_episodes": 32, "rollout_max_steps": 8, "old_logprobs": "sampler"}
        return GRPOConfig(num_generations=2, **calls, **start, **policy)
    # The reward model of RLOO reads text, with a tokenizer of its own.
    reads = dict(reward_model_path="REWARD", reward_input="text")
    rloo = RLOOConfig(sft_model_path=None, num_generations=2, **reads, **START, **POLICY)
    if variant == "memory":  # CPUs stand for accelerators; that of the second process has no memory
        import jax
        from rlhf_jax.dry_run import micro_batches, topologies

        micro_batches.PLATFORMS = ("cpu",)
        topologies.capacity = lambda device: 2**10 if jax.process_index() else 2**40
        return SFTConfig(model_name_or_path=None, **START, **{**SUPERVISED, "micro_batch_size": None})
    if variant == "ends":
        # In its second update: what would come after that, and another model, are not made.
        return dataclasses.replace(rloo, reward_model_path=None, dataset_test_split=None, num_sample_generations=0)
    return rloo


VARIANTS = dict.fromkeys(("all", "rloo", "grpo", "tools", "partial", "memory", "ends"))
"""

REWARDS = """
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


def alone(prompts, trainer_state, **_):
    if process() == 1 and trainer_state.global_step == 1:
        from rlhf_jax.metrics import logger

        def log(*_, **__):
            raise RuntimeError("only here")

        logger.MetricLogger.log = log
    return [0.0] * len(prompts)


async def told(prompts, completions, trainer_state, **_):
    # As slowly, under its name, and a signal to one process in update 2.
    if process() == int(os.environ["TOLD"]) and trainer_state.global_step == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.3)
    return await slowly(prompts, completions)


told.__name__ = "slowly"  # by which its metrics are called


def dying(prompts, trainer_state, **_):
    if process() == int(os.environ["DIES"]) and trainer_state.global_step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [0.0] * len(prompts)
"""


class Started:
    """Some processes of one command. Gloo's threads write to their output too: only our own lines are read."""

    def __init__(self, folder, mesh, variant, *options, own=lambda index: (), **environment):
        count, devices, axes = MESHES[mesh]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        join = ("--distributed", address, "--num_processes", str(count)) if count > 1 else ()
        notes = folder / "notes" / f"{mesh}-{variant}"
        notes.mkdir(parents=True, exist_ok=True)
        # NPROC is the number of threads of XLA's pool, of which a collective holds one a device (see test_devices).
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "NPROC": "16", "MESH": axes}
        # A program is compiled by one process for all of them: to find it, they have all made the same one. Runs beside
        # each other share none: one's first process would find what the other's wrote, and its others wait for it.
        env["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled" / {"ends": "rloo"}.get(variant, variant))
        env |= {"XLA_FLAGS": QUICK, "JAX_SHARE_BINARY_BETWEEN_HOSTS": "1", "NOTES": str(notes), **environment}
        self.began = time.monotonic()
        self.processes, self.logs = [], []
        for index in range(count):
            command = [sys.executable, "-m", "tests.helpers.one_cache", "--config", f"{folder / 'config.py'}:{variant}"]
            command += ["--run_dir", str(folder / mesh / variant), *join, *options]
            command += ["--process_id", str(index), *own(index)] if join else []
            self.logs.append(folder / f"{mesh}-{variant}-{index}.log")
            with open(self.logs[-1], "w") as log:
                self.processes.append(
                    subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
                )

    def ends(self, timeout=400):
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
    folder = tmp_path_factory.mktemp("processes")
    reward_checkpoint(folder)
    (folder / "rewards.py").write_text(REWARDS)
    config = CONFIG.replace("REWARDS:", f"{folder / 'rewards.py'}:")
    tool_tokenizer.save(folder / "tools", rows=16)
    config = config.replace('"REWARD"', repr(str(folder / "reward"))).replace("TOOLS/", f"{folder / 'tools'}/")
    (folder / "config.py").write_text(config)
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    """Every algorithm on every mesh, finished."""
    for mesh in MESHES:
        # Two beside each other: while one process compiles, the others of its run wait.
        pair = [Started(folder, mesh, variant) for variant in ("all", "rloo")]
        for codes, texts in [started.ends() for started in pair]:
            assert not any(codes), "\n-----\n".join(text[-3000:] for text in texts)
    # GRPO has RLOO's trainer, so that two meshes are enough.
    for variant, meshes in {"grpo": ("one", "two"), "tools": ("one", "four")}.items():
        for codes, texts in [started.ends() for started in [Started(folder, mesh, variant) for mesh in meshes]]:
            assert not any(codes), "\n-----\n".join(text[-3000:] for text in texts)
    return folder


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def notes_of(folder, mesh, variant):
    """What each process scored in a run's training, in order: a list of (process, step, prompt, ids)."""
    found = []
    for process in range(MESHES[mesh][0]):
        path = folder / "notes" / f"{mesh}-{variant}" / f"scored-{process}.jsonl"
        for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            found += [(process, line["step"], prompt, tuple(ids)) for prompt, ids in line["rows"]]
    return found


PAIRS = [
    (mesh, run) for mesh in ("two", "four") for run in STAGES if (mesh, run) not in (("four", "grpo"), ("two", "tools"))
]


@pytest.mark.parametrize("mesh, run", PAIRS)
def test_metrics_do_not_depend_on_the_processes(runs, mesh, run):
    one, many = metrics_of(runs / "one" / run), metrics_of(runs / mesh / run)
    assert [line["step"] for line in many] == list(range(1, UPDATES + 1))
    assert_same_metrics(one, many, {"loss"} if run in ("rloo", "grpo") else set())  # RLOO's is a mean that cancels


def assert_same_metrics(one, many, cancelling):
    """Those of a run in one process and in many, up to rounding; `cancelling`: means that are nearly 0."""
    assert len(one) == len(many)
    for expected, line in zip(one, many, strict=True):
        assert set(line) == set(expected)
        # These measure rounding, which is another one on another mesh.
        loose = {"val/first_ratio_error", "policy/first_approxkl"} | cancelling
        far = {
            name: (line[name], value)
            for name, value in expected.items()
            if "rows_at_once" not in name  # of the functions' processes
            and value != line[name]
            and not abs(line[name] - value) <= (1e-5 if name in loose else 1e-4 * max(abs(value), 0.01))
        }
        assert not far


@pytest.mark.parametrize(
    "mesh, variant", [*((mesh, variant) for mesh in SHARES for variant in ("all", "rloo")), ("four", "tools")]
)
def test_each_row_is_scored_once_by_one_process(runs, mesh, variant):
    one, many = notes_of(runs, "one", variant), notes_of(runs, mesh, variant)
    training = [row for row in one if row[1] is not None]
    assert len(training) == 8 * UPDATES and len({row[3] for row in training}) > 4
    # The same tokens, and no row twice: 8 of each update, and each row of an evaluation or a table.
    assert sorted(map(repr, (row[1:] for row in many))) == sorted(map(repr, (row[1:] for row in one)))
    shares = [sum(row[0] == process and row[1] is not None for row in many) for process in range(MESHES[mesh][0])]
    assert shares == list(SHARES[mesh])


@pytest.mark.parametrize("mesh, run", [(mesh, run) for mesh in SHARES for run in ("all/ppo", "rloo")])
def test_tables_of_completions_are_those_of_one_process(runs, mesh, run):
    for name in ("training_1.jsonl", "training_2.jsonl", "2.jsonl"):
        one, many = (
            [json.loads(line) for line in (runs / at / run / "completions" / name).read_text().splitlines()]
            for at in ("one", mesh)
        )
        assert len(one) == len(many) > 0
        for expected, row in zip(one, many):
            numbers = {key for key, value in expected.items() if isinstance(value, float)}
            assert {k: v for k, v in row.items() if k not in numbers} == {
                k: v for k, v in expected.items() if k not in numbers
            }
            np.testing.assert_allclose([row[k] for k in numbers], [expected[k] for k in numbers], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mesh, run", PAIRS)
def test_exported_weights_do_not_depend_on_the_processes(runs, mesh, run):
    from safetensors.numpy import load_file

    names = {"all/reward": ["reward_model"], "all/ppo": ["policy", "value"]}
    for name in names.get(run, ["policy"]):
        one, many = (load_file(runs / at / run / name / "model.safetensors") for at in ("one", mesh))
        assert set(one) == set(many)
        # The bias of a key moves no attention: its gradient is rounding, which Adam makes large.
        far = {
            key: np.linalg.norm(many[key] - x) / max(np.linalg.norm(x), 1e-3)
            for key, x in one.items()
            if not key.endswith("query_key_value.bias")
        }
        assert max(far.values()) <= 1e-4, max(far.items(), key=lambda item: item[1])


def test_a_metric_that_functions_log_is_a_mean_over_all_rows(runs):
    one, two, four = (metrics_of(runs / mesh / "rloo")[0] for mesh in ("one", "two", "four"))
    assert [one["rows_at_once"], two["rows_at_once"], four["rows_at_once"]] == [8, 4, 4]


def test_the_first_process_alone_prints_and_compares(runs):
    others = (runs / "two-all-1.log").read_text(errors="replace")
    assert not re.findall(r"(?m)^(?:sft|reward|ppo)[ :].*", others)
    assert "written:" in (runs / "two-all-0.log").read_text(errors="replace")
    compared = [json.loads((runs / mesh / "all" / "ppo" / "comparison.json").read_text()) for mesh in ("one", "two")]
    assert abs(compared[0]["gain"] - compared[1]["gain"]) < 1e-3


def test_how_processes_find_each_other_is_no_part_of_a_run(runs):
    kept = json.loads((runs / "two" / "rloo" / "config.json").read_text())
    assert not {"distributed", "num_processes", "process_id"} & set(kept)
    codes, texts = Started(runs, "two", "rloo", "--resume", "must").ends()
    assert codes == [0, 0] and "is finished (update 2); nothing to do" in texts[0]


def test_all_processes_take_the_micro_batches_of_the_one_with_the_least_memory(folder):
    codes, texts = Started(folder, "two", "memory").ends()
    assert codes == [0, 0], texts
    assert "sft: micro_batch_size 4: the smallest, and it does NOT fit cpu (0.9 KiB, " in texts[0]
    assert "sft: gradient: 2 micro-batches of 4 rows per step" in texts[0]
    assert json.loads((folder / "two" / "memory" / "config.json").read_text())["micro_batch_size"] == 4


# --- when something goes wrong


@pytest.mark.parametrize("dies", [0, 1])
def test_a_killed_process_ends_the_others_with_its_name_and_what_to_do(folder, dies):
    reward = ("--reward_funcs", f"{folder / 'rewards.py'}:dying")
    # The second goes on where the first was killed.
    started = Started(folder, "two", "ends", *reward, "--run_dir", str(folder / "killed"), DIES=str(dies))
    while started.processes[dies].poll() is None and time.monotonic() - started.began < 200:
        time.sleep(0.05)
    died = time.monotonic()
    codes, texts = started.ends()
    assert time.monotonic() - died < 60
    assert codes[dies] == -signal.SIGKILL and codes[1 - dies] not in (0, None)
    pid = started.processes[dies].pid
    gone, then = errors(texts[1 - dies])
    assert f"error: process {dies} of 2 (host {socket.gethostname()}, pid {pid}) is gone" in gone
    assert "rerun the command on every process to resume from the newest checkpoint" in then


@pytest.mark.parametrize(
    "function, options, said",
    [
        ("failing", (), "reward function failing raised ValueError: the judge is out"),
        ("hanging", ("--reward_timeout", "2"), "reward function hanging did not return within 2 s"),
    ],
)
def test_a_reward_that_fails_on_one_process_ends_all_with_one_error(folder, function, options, said, tmp_path):
    reward = ("--reward_funcs", f"{folder / 'rewards.py'}:{function}")
    run_dir = tmp_path / "run"
    started = Started(folder, "two", "ends", *reward, *options, "--run_dir", str(run_dir), "--save_steps", "0")
    codes, texts = started.ends()
    assert codes == [2, 2], texts
    first, second = map(errors, texts)
    assert first == second and len(first) == 1
    assert f"error: process 1 of 2 ({socket.gethostname()}): {said}" in first[0]
    # What was done is saved, as with one process.
    assert "stopped by an error after update 1, which is saved" in texts[0]
    assert (run_dir / "checkpoints" / "1").is_dir()


@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_process_stops_all_at_the_same_point(runs, folder, tmp_path, who):
    reward = ("--reward_funcs", f"{folder / 'rewards.py'}:brevity", f"{folder / 'rewards.py'}:told")
    run_dir = tmp_path / "run"
    own = ("--run_dir", str(run_dir), "--save_steps", "0", "--override_resume")
    codes, texts = Started(folder, "two", "rloo", *reward, *own, TOLD=str(who)).ends()
    assert codes == [75, 75], texts
    said = "rloo: stopped by SIGTERM after update 1, which is saved; rerun the command to resume"
    assert all(said in text for text in texts)
    assert os.listdir(run_dir / "checkpoints") == ["1"]
    whole = (runs / "two" / "rloo" / "metrics.jsonl").read_bytes()
    assert (run_dir / "metrics.jsonl").read_bytes() == whole.splitlines(keepends=True)[0]
    if who == 1:  # whoever heard it, this is where the run goes on
        reward = ("--reward_funcs", f"{folder / 'rewards.py'}:brevity", f"{folder / 'rewards.py'}:slowly")
        codes, texts = Started(folder, "two", "rloo", *reward, *own).ends()
        assert codes == [0, 0], texts
        assert (run_dir / "metrics.jsonl").read_bytes() == whole


def test_a_process_that_ends_alone_ends_the_others_with_its_error(folder, tmp_path):
    reward = ("--reward_funcs", f"{folder / 'rewards.py'}:alone")
    started = Started(folder, "two", "ends", *reward, "--run_dir", str(tmp_path / "run"))
    codes, texts = started.ends()
    assert codes[0] == 1 and codes[1] != 0
    assert re.search(r"process 1 of 2 \(.*\) ended with an error: RuntimeError: only here", errors(texts[0])[0])
    assert "RuntimeError: only here" in texts[1] and "is gone" not in texts[1]


def test_a_folder_that_is_not_shared_is_refused_before_training(folder, tmp_path):
    started = Started(folder, "two", "ends", own=lambda index: ("--run_dir", str(tmp_path / str(index))))
    codes, texts = started.ends()
    assert codes == [2, 2]
    assert "need a file system that all processes share" in errors(texts[0])[0]
    assert not (tmp_path / "0" / "checkpoints").exists()


def test_every_process_that_holds_a_response_rebuilds_it_after_a_resume(folder):
    """Killed after its second update. With tensor over processes two hold each response, and one of them calls its
    tools."""
    codes, texts = Started(folder, "one", "partial").ends()
    assert not any(codes), texts[0][-3000:]
    killed, checkpoints = Started(folder, "four", "partial"), folder / "four" / "partial" / "checkpoints"
    while not (checkpoints / "2").exists() and all(process.poll() is None for process in killed.processes):
        time.sleep(0.02)
    for process in killed.processes:
        process.kill()
    killed.ends()
    codes, texts = Started(folder, "four", "partial").ends()
    assert not any(codes), "\n-----\n".join(text[-3000:] for text in texts)
    assert_same_metrics(metrics_of(folder / "one" / "partial"), metrics_of(folder / "four" / "partial"), {"loss"})
