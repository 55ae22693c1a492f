"""storage/paths.py: a path leads to one place, whatever spells it and whatever changes the working folder later."""

import os
import pathlib
import subprocess
import sys

import pytest

from rlhf_jax import storage, train
from rlhf_jax.config import Pipeline, RLOOConfig
from tests.helpers.paths import ROOT

REWARDS = """
import os, tempfile

def length(completions, **_):
    return [float(len(text)) for text in completions]

def wanders(completions, **_):
    os.chdir(tempfile.mkdtemp())  # as code that runs what a model wrote does
    return length(completions)
"""
STAGE = {
    "scratch_model": "1x16x2",
    "tokenizer_name_or_path": "synthetic",
    "dataset_name": "prompts.jsonl",
    "eval_dataset_name": "near=prompts.jsonl",
    "sft_model_path": None,
    "reward_model_path": None,
    "query_length": 16,
    "response_length": 4,
    "length_buckets": (16,),
    "num_generations": 2,
    "num_generations_eval": 1,
    "batch_size": 4,
    "micro_batch_size": 4,
    "total_episodes": 8,
    "eval_steps": 1,
    "save_steps": 1,
}


def files(folder):
    """What a pipeline leaves, by name: without what differs from run to run, and with one name for the reward."""
    paths = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    left = {}
    for path in paths:
        name = str(path.relative_to(folder))
        if not name.startswith(("rloo/checkpoints/", "rloo/tensorboard/", "rloo/timings.jsonl", "rloo/.lock")):
            left[name] = (
                path.read_bytes().replace(b"rewards.py:wanders", b"rewards.py:length").replace(b"wanders", b"length")
            )
    return left


@pytest.mark.runs
def test_a_reward_function_that_changes_the_working_folder_moves_no_file(tmp_path, monkeypatch):
    left = {}
    for reward in ("length", "wanders"):
        home = tmp_path / reward
        home.mkdir()
        monkeypatch.chdir(home)
        (home / "rewards.py").write_text(REWARDS)
        (home / "prompts.jsonl").write_text("".join(f'{{"prompt": "what is {n}?"}}\n' for n in range(8)))
        stage = RLOOConfig(**STAGE, reward_funcs=(f"rewards.py:{reward}",), report_to=())
        result = train.run(Pipeline(run_dir="runs/one", sft=None, reward=None, ppo=None, rloo=stage))
        assert result.paths["policy"] == "runs/one/rloo/policy"  # as it was spelled
        left[reward] = files(home / "runs" / "one")
    assert set(left["wanders"]) == set(left["length"])
    assert "rloo/policy/model.safetensors" in left["length"] and "rloo/comparison.json" in left["length"]
    assert [name for name, content in left["length"].items() if left["wanders"][name] != content] == []


def test_home_and_the_working_folder_are_resolved_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    start, other = tmp_path / "start", tmp_path / "other"
    for folder in (start, other, tmp_path / "home"):
        folder.mkdir()
    monkeypatch.chdir(start)
    assert storage.absolute("~/x/../y/") == str(tmp_path / "home" / "y")
    assert storage.located("a") == "a" and storage.located("~/a") == str(tmp_path / "home" / "a")
    with storage.from_here():
        storage.write_atomically("a", "text")
        assert storage.located("a") == "a"
        os.chdir(other)
        assert storage.located("a") == storage.absolute("a") == str(start / "a") and storage.read_text("a") == "text"
        assert storage.local_copy("a") == str(start / "a") and storage.local_copy("owner/name") == "owner/name"
    assert not storage.exists("a") and storage.absolute("a") == str(other / "a")


@pytest.mark.parametrize("words", [["train", "--config", "quickstart.py"], ["evaluate", "--run_dir", "/run"]])
def test_commands_name_a_working_folder_that_was_removed(tmp_path, words):
    gone, program = tmp_path / "gone", pathlib.Path(sys.executable).with_name("rlhf-jax")
    gone.mkdir()
    script = 'rmdir "$PWD"; exec "$@"'
    child = subprocess.run(
        ["bash", "-c", script, "bash", str(program), *words],
        cwd=gone,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 2
    assert child.stderr.splitlines()[-1] == "error: the working folder no longer exists: change to one that does"
