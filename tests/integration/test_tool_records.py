"""Runs with tools, killed in a call, between calls and between turns: the bytes of the whole run, and no recorded call
made twice."""

import collections
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from rlhf_jax import storage
from tests.helpers import buckets
from tests.helpers import tool_tokenizer as tt
from tests.helpers.children import QUICK
from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "chaos"))  # as for a script run from there

import chaos_compare  # noqa: E402

pytestmark = pytest.mark.runs

CONFIG = """
from rlhf_jax.config import GRPOConfig
from tests.helpers.tool_tokenizer import SHORT_TURNS


def get_config(variant=None):
    return GRPOConfig(
        run_dir="run",
        sft_model_path=None,
        scratch_model="1x16x2",
        tokenizer_name_or_path="tools/tokenizer",
        dataset_name="tools/prompts.jsonl",
        dataset_test_split=None,
        eval_dataset_name="tools/prompts.jsonl",
        max_eval_samples=4,
        eval_steps=1,
        query_length=44,
        length_buckets=(44,),
        response_length=64,
        stop_token_ids=SHORT_TURNS,
        temperature=1.0,
        batch_size=8,
        num_generations=2,
        total_episodes=24,
        learning_rate=1e-3,
        save_steps=1,
        tools=("my_tools.py:tell",),
        environment_factory=("my_tools.py:Counter",),
    )
"""
TOOLS = """
import json, os, signal

from tests.helpers import tool_tokenizer


def _note(**what):
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps(what) + "\\n")
    with open("calls.jsonl") as file:
        count = sum(1 for _ in file)
    if os.environ.get("KILL") == f"{count} {what['when']}":
        os.kill(os.getpid(), signal.SIGKILL)


def tell(word: str) -> str:
    '''Says a word.

    Args:
        word: The word.
    '''
    _note(name="tell", when="in a call")
    return word


class Counter(tool_tokenizer.Counter):
    def get_reward(self):  # of what is kept across responses too
        return super().get_reward() + 0.1 * self.resets

    def state(self):
        return {"resets": self.resets}

    def load_state(self, state):
        self.resets = state["resets"]
"""


LIMIT = "old_logprobs='sampler', rollout_max_steps=5, "
"""Options of responses that go on in later updates."""


def run(folder, *options, **environment):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "tests.helpers.one_cache", "--config", "config.py", *options]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stderr[-3000:]


def prepare(folder, options=""):
    tt.save(folder / "tools", rows=8)
    (folder / "config.py").write_text(CONFIG.replace("        tools=(", f"        {options}tools=("))
    (folder / "my_tools.py").write_text(TOOLS)
    return folder


def recorded(folder):
    return [json.loads(line) for line in (folder / "run" / "tools.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By options: the folder of a run that nothing killed."""

    @functools.cache
    def of(options):
        folder = prepare(tmp_path_factory.mktemp("whole"), options)
        code, said = run(folder)
        assert code == 0, said
        return folder

    return of


@pytest.mark.parametrize(("options", "at"), [("", 2), ("", 9), ("", 18), (LIMIT, 5), (LIMIT, 15)])
def test_a_run_killed_in_a_call_makes_no_recorded_call_again(runs, tmp_path, options, at):
    folder, whole = prepare(tmp_path, options), runs(options)
    code, _ = run(folder, KILL=f"{at} in a call")
    assert code == -signal.SIGKILL
    code, said = run(folder)
    assert code == 0, said
    assert chaos_compare.differences(whole / "run", folder / "run") == []
    assert recorded(folder) == recorded(whole)
    tells = sum(line["name"] == "tell" for line in recorded(whole))
    assert tells >= at
    made = (folder / "calls.jsonl").read_text().splitlines()
    assert len(made) == tells + 1, "the call in which it was killed is made again, and no other"
    places = collections.Counter((line["at"], line["row"], line["turn"], line["number"]) for line in recorded(folder))
    assert max(places.values()) == 1
    assert {line["at"].split()[0] for line in recorded(whole)} == {"update", "evaluation", "samples"}


def test_a_run_in_a_bucket_makes_no_call_again_that_is_older_than_its_checkpoint(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, whole = prepare(tmp_path, LIMIT), runs(LIMIT)
    run_dir = f"s3://{buckets.BUCKET}/run"
    with buckets.in_use("s3") as (_, environment):
        environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        code, _ = run(folder, "--run_dir", run_dir, **environment, KILL="15 in a call")
        assert code == -signal.SIGKILL
        stored = storage.read_text(f"{run_dir}/tools.jsonl").splitlines()
        code, said = run(folder, "--run_dir", run_dir, **environment)
        assert code == 0, said
        copy = pathlib.Path(storage.local_copy(run_dir))
        assert recorded(copy.parent) == recorded(whole)
        for name in ("metrics.jsonl", "policy/model.safetensors"):
            assert (copy / name).read_bytes() == (whole / "run" / name).read_bytes()
        stored_calls, calls = (
            sum(line["name"] == "tell" for line in lines) for lines in (map(json.loads, stored), recorded(whole))
        )
        made = (folder / "calls.jsonl").read_text().splitlines()
        assert 0 < stored_calls < 15 and len(made) == 15 + calls - stored_calls
        # The records in the bucket are enough to train from.
        code, said = run(folder, "--run_dir", "replayed", "--tools_replay", run_dir, **environment)
        assert code == 0, said
        assert (folder / "calls.jsonl").read_text().splitlines() == made


@pytest.mark.parametrize("options", ["", LIMIT])
def test_a_replay_of_a_run_is_that_run_without_a_call(runs, tmp_path, options):
    whole = runs(options)
    folder = prepare(tmp_path, f"{options}tools_replay={str(whole / 'run')!r}, ")
    code, said = run(folder)
    assert code == 0, said
    assert not (folder / "calls.jsonl").exists() and recorded(folder) == recorded(whole)
    for name in ("metrics.jsonl", "policy/model.safetensors"):
        assert (folder / "run" / name).read_bytes() == (whole / "run" / name).read_bytes()
