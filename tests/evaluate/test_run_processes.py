"""python -m rlhf_jax.evaluate in two processes: the bytes that one process with as many devices writes."""

import json
import os
import socket
import subprocess
import sys

import jax
import pytest

from rlhf_jax import data, models
from rlhf_jax.data import synthetic
from rlhf_jax.models.io import hf
from tests.helpers import tool_tokenizer
from tests.helpers.children import QUICK, policy_checkpoints
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.processes
POSTS = 6


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A policy, its reference, a reward model, posts, pairs, a reward function and a judge."""
    folder = tmp_path_factory.mktemp("room")
    policy_checkpoints(folder)
    for name, rows in (("posts", synthetic.demonstrations(POSTS)), ("pairs", synthetic.preference_pairs(POSTS))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.py").write_text(
        "def shorter(prompts, completions):\n    return [int(len(b) < len(a)) for a, b in completions]\n"
        "def failing(prompts, completions):\n    raise ValueError('the judge is out')\n"
        "def brevity(completions, **_):\n    return [-len(text) for text in completions]\n"
    )
    return folder


def started(room, output, *more, judge="shorter", **places):
    given = {"model": room / "policy", "data": room / "posts.jsonl", "ref_model_path": room / "sft"}
    given |= {"reward_model_path": room / "reward", "pairs": room / "pairs.jsonl", "output_dir": output}
    given |= {"reward_funcs": f"{room / 'own.py'}:brevity", "judge_funcs": f"{room / 'own.py'}:{judge}"}
    given |= {"response_length": 6, "query_length": 60, "temperature": 1.0, "batch_size": 8, "best_of_n": 2}
    given |= {"num_generations": 2, "bootstrap_resamples": 100}
    return started_with(given, *more, **places)


def started_with(given, *more, processes=1, devices=1):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "NPROC": "16"}
    env |= {"XLA_FLAGS": QUICK}
    join = [["--distributed", address, "--num_processes", str(processes), "--process_id", str(i)] for i in range(2)]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "rlhf_jax.evaluate", *words, *(join[i] if processes > 1 else ()), *more],
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]


def ends(processes):
    done = [process.communicate(timeout=300) for process in processes]
    return [process.returncode for process in processes], done


def test_two_processes_write_the_bytes_of_one(room, tmp_path):
    runs = [started(room, tmp_path / "one", devices=2), started(room, tmp_path / "two", processes=2)]
    (one, [printed]), (two, outputs) = map(ends, runs)
    assert one == [0] and two == [0, 0], [printed, outputs]
    for name in ("evaluation.json", "samples.jsonl"):
        expected, found = ((tmp_path / at / name).read_text() for at in ("one", "two"))
        assert found.replace(str(tmp_path / "two"), str(tmp_path / "one")) == expected
    content = json.loads((tmp_path / "two" / "evaluation.json").read_text())
    assert content["policies"][0]["kl"] and content["reward_model"] and content["best_of_n"]
    assert "distributed" not in content["config"]
    own = [line for line in outputs[0][0].splitlines() if "Gloo" not in line]
    assert [line.replace("/two", "/one") for line in own] == printed[0].splitlines()
    assert not [line for line in outputs[1][0].splitlines() if "Gloo" not in line]  # the first one prints


def test_a_judge_that_fails_ends_both_with_its_error(room, tmp_path):
    codes, outputs = ends(started(room, tmp_path / "out", processes=2, judge="failing"))
    assert codes == [2, 2], outputs
    assert all("the judge is out" in error for _, error in outputs)


def test_each_process_resets_environments_of_its_own_responses(monkeypatch, tmp_path):
    tool_tokenizer.save(tmp_path, POSTS)
    tokenizer = data.load_tokenizer(str(tmp_path / "tokenizer"))
    model = models.custom_shape("1x16x2", vocab_size=tokenizer.vocab_size, max_positions=128)
    params = jax.tree.map(lambda x: 4 * x, model.init(jax.random.key(0), heads=("causal",)))
    hf.save(tmp_path / "policy", model, jax.device_get(params), kind="causal")
    data.save_tokenizer(tokenizer, str(tmp_path / "policy"))
    (tmp_path / "own.py").write_text(
        "import os\nfrom tests.helpers.tool_tokenizer import Counter as Base, tell\n"
        "class Counter(Base):\n    def reset(self, **row):\n"
        "        with open(os.environ['RESETS'] + str(os.getpid()), 'a') as file:\n            file.write('.')\n"
        "        return super().reset(**row)\n"
    )
    given = {"model": tmp_path / "policy", "data": tmp_path / "prompts.jsonl", "temperature": 1.0, "batch_size": 8}
    given |= {"response_length": 64, "query_length": 44, "bootstrap_resamples": 100}
    given |= {"tools": f"{tmp_path / 'own.py'}:tell", "environment_factory": f"{tmp_path / 'own.py'}:Counter"}
    stops = ["--stop_token_ids", *map(str, tool_tokenizer.SHORT_TURNS)]

    def run(name, **places):
        monkeypatch.setenv("RESETS", str(tmp_path / f"{name}-resets-"))
        codes, outputs = ends(started_with({**given, "output_dir": tmp_path / name}, *stops, **places))
        assert set(codes) == {0}, outputs
        resets = [len(path.read_text()) for path in tmp_path.glob(f"{name}-resets-*")]
        return json.loads((tmp_path / name / "evaluation.json").read_text()), resets

    (one, resets), (two, shares) = run("one", devices=2), run("two", processes=2)
    assert two["policies"] == one["policies"] and two["policies"][0]["tools/call_frequency"] > 0
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("one", "two")]
    assert samples[0] == samples[1]
    assert len(resets) == 1 and len(shares) == 2 and sum(shares) == resets[0] >= POSTS
