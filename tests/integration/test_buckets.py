"""Runs in a bucket: the files of a local run, also after kills and faults, with one process and with two."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.parse

import pytest

import rlhf_jax
from rlhf_jax import report, storage, train
from rlhf_jax.errors import UserError
from rlhf_jax.runtime.callbacks import Callback
from rlhf_jax.runtime.run_folder import RunFolder
from rlhf_jax.storage import bucket
from tests.helpers import buckets
from tests.helpers.children import QUICK
from tests.helpers.paths import ROOT
from tests.helpers.runs import ppo_config, sft_config, wordiness

STORES = ["s3", "gs"]


@pytest.fixture
def store(request, tmp_path, monkeypatch):
    """(folder in a bucket, proxy, environment), the cache in tmp_path and pauses between tries short."""
    kind = getattr(request, "param", "s3")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("asyncio.sleep", buckets.at_once)
    monkeypatch.setattr(bucket, "FIRST_WAIT", 0.01)
    with buckets.in_use(kind) as (proxy, environment):
        yield f"{kind}://{buckets.BUCKET}/run", proxy, environment


def files(folder, *names):
    """{name: content} of files below a local folder."""
    return {name: (pathlib.Path(folder) / name).read_bytes() for name in names}


SAME = ("sft/metrics.jsonl", "sft/policy/model.safetensors", "ppo/metrics.jsonl", "ppo/completions/4.jsonl")
SAME += ("ppo/policy/model.safetensors", "ppo/value/model.safetensors", "ppo/policy/tokenizer.json")


@pytest.mark.runs
@pytest.mark.parametrize("store", STORES, indirect=True)
def test_a_run_in_a_bucket_leaves_the_files_of_a_local_one(golden_ppo, store):
    folder = store[0]
    train.run(sft_config(f"{folder}/sft", report_to=("tensorboard",)))
    train.run(ppo_config(f"{folder}/ppo", f"{folder}/sft"), reward_funcs=[wordiness])
    copy = storage.local_copy(folder)
    assert files(copy, *SAME) == files(pathlib.Path(golden_ppo.run_dir).parent, *SAME)
    assert list(pathlib.Path(copy).glob("sft/tensorboard/events*"))
    texts = ["hello", "what now"]
    one, two = (rlhf_jax.load_policy(f"{root}/ppo").generate(texts, max_new_tokens=4) for root in (folder, copy))
    assert one == two
    assert report.write([f"{folder}/ppo"], png=False) == [f"{folder}/ppo/report.html"]
    assert "objective/kl" in storage.read_text(f"{folder}/ppo/report.html")
    assert train.run(sft_config(f"{folder}/sft")).paths == {"policy": f"{folder}/sft/policy"}  # finished


@pytest.mark.runs
def test_an_adapter_in_a_bucket_is_read_with_its_base_in_the_bucket(store, tmp_path):
    folder = store[0]
    for root in (folder, str(tmp_path / "local")):
        train.run(sft_config(f"{root}/sft", max_steps=1))
        base = {"model_name_or_path": f"{root}/sft/policy", "scratch_model": None}
        train.run(sft_config(f"{root}/lora", max_steps=1, use_peft=True, lora_r=2, **base))
    copy = pathlib.Path(storage.local_copy(f"{folder}/lora/policy_adapter"))
    local, name = tmp_path / "local" / "lora" / "policy_adapter", "adapter_model.safetensors"
    assert files(copy, name) == files(local, name)
    assert json.loads((copy / "adapter_config.json").read_text())["base_model_name_or_path"] == f"{folder}/sft/policy"
    one, two = (
        rlhf_jax.load_policy(str(path)).generate(["hello"], max_new_tokens=4)
        for path in (f"{folder}/lora/policy_adapter", local)
    )
    assert one == two


@pytest.mark.runs
def test_data_is_read_from_a_bucket(store):
    rows = [{"prompt": f"post {i}:", "completion": f" word {i}"} for i in range(16)]
    storage.write_atomically(f"{store[0]}-data/rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    given = {"dataset_name": f"{store[0]}-data/rows.jsonl", "max_steps": 1, "max_train_samples": None}
    assert train.run(sft_config(store[0], **given)).metrics["loss"] > 0


class Faults(Callback):
    """Sets the store's faults at the ends of updates."""

    def __init__(self, faults, **by_step):
        self.faults, self.by_step = faults, by_step

    def on_step_end(self, step, metrics, control):
        for name, value in self.by_step.get(f"at_{step}", {}).items():
            setattr(self.faults, name, value)


@pytest.mark.runs
def test_a_permission_that_is_taken_away_for_a_while_costs_checkpoints_and_no_line(store, capsys):
    faults = Faults(store[1].faults, at_2={"refuse": True}, at_4={"refuse": False})
    train.run(sft_config(store[0], max_steps=6), callbacks=[faults])
    printed = capsys.readouterr()
    said = (printed.out + printed.err).splitlines()
    warnings = [line for line in said if "could not be written" in line or "access is refused" in line]
    assert warnings and all(f"s3://{buckets.BUCKET}: cannot " in line or "no checkpoint" in line for line in warnings)
    lines = storage.read_text(f"{store[0]}/metrics.jsonl").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {"5", "6"} <= set(storage.complete_folders(f"{store[0]}/checkpoints"))
    assert storage.exists(f"{store[0]}/finished.json")


@pytest.mark.runs
def test_a_bucket_that_stays_closed_ends_the_run_with_a_line_and_a_resume_is_whole(golden_sft, store):
    with pytest.raises(UserError, match=rf"s3://{buckets.BUCKET}"):
        train.run(sft_config(store[0]), callbacks=[Faults(store[1].faults, at_2={"refuse": True})])
    store[1].faults.refuse = False
    train.run(sft_config(store[0]))
    copy, names = storage.local_copy(store[0]), ("metrics.jsonl", "policy/model.safetensors")
    assert files(copy, *names) == files(golden_sft.run_dir, *names)


@pytest.mark.runs
@pytest.mark.parametrize("fault, value", [("failures", 1), ("failures", 3), ("delay", 0.1)])
def test_a_run_in_which_every_call_fails_at_first_or_is_slow_is_the_same(store, tmp_path, fault, value):
    setattr(store[1].faults, fault, value)
    train.run(sft_config(store[0], max_steps=2))
    setattr(store[1].faults, fault, 0)
    train.run(sft_config(tmp_path / "local", max_steps=2))
    copy, names = storage.local_copy(store[0]), ("metrics.jsonl", "policy/model.safetensors")
    assert files(copy, *names) == files(tmp_path / "local", *names)


def test_somebody_elses_files_and_a_second_run_are_refused(store):
    folder, _, _ = store
    storage.write_atomically(f"{folder}/thesis.tex", "x")
    with pytest.raises(UserError, match=r"not empty and not a run's folder \(it contains thesis.tex\)"):
        RunFolder.open(folder, {"stage": "sft"})
    storage.remove(f"{folder}/thesis.tex")
    first = RunFolder.open(folder, {"stage": "sft"})
    with pytest.raises(UserError, match=f"in use by process {os.getpid()} on"):
        RunFolder.open(folder, {"stage": "sft"})
    first.close()
    RunFolder.open(folder, {"stage": "sft"}).close()


def test_refused_credentials_are_one_line_before_anything_is_loaded(store, capsys):
    store[1].faults.refuse = True
    words = ["sft", "--config", "quickstart.py"]
    assert train.main([*words[1:], "--run_dir", store[0]]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith(f"error: s3://{buckets.BUCKET}: cannot look for run/sft")


# --- kills


CONFIG = """
from rlhf_jax.config import SFTConfig

def get_config(variant=None):
    return SFTConfig(
        dataset_name="synthetic", tokenizer_name_or_path="synthetic", query_length=64, max_train_samples=64,
        max_eval_samples=8, learning_rate=1e-3, batch_size=8, report_to=("tensorboard",), save_steps=1, max_length=72,
        length_buckets=(72,), model_name_or_path=None, scratch_model="1x16x2", max_steps=4, eval_steps=2, seed=3,
    )
"""


class Command:
    """The same command again and again, in `count` processes that share no disk."""

    def __init__(self, tmp_path, store, count=1):
        self.tmp_path, self.store, self.count = tmp_path, store, count
        (tmp_path / "config.py").write_text(CONFIG)

    def start(self, run_dir=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.store[1].faults.calls.clear()
        processes = []
        for index in range(self.count):
            home = self.tmp_path / f"machine-{index}"
            home.mkdir(exist_ok=True)
            env = {**os.environ, **self.store[2], "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK, "NPROC": "16"}
            env |= {"XDG_CACHE_HOME": str(home), "TMPDIR": str(home), "JAX_SHARE_BINARY_BETWEEN_HOSTS": "1"}
            command = [sys.executable, "-m", "tests.helpers.one_cache", "--config", str(self.tmp_path / "config.py")]
            command += ["--run_dir", run_dir or self.store[0]]
            if self.count > 1:
                command += ["--distributed", address, "--num_processes", str(self.count), "--process_id", str(index)]
                command += ["--mesh_fsdp", str(self.count)]
            with open(self.tmp_path / f"log-{index}.txt", "a") as log:
                processes.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
        return processes

    def finish(self, run_dir=None):
        processes = self.start(run_dir)
        codes = [process.wait(300) for process in processes]
        assert not any(codes), "\n".join(path.read_text()[-3000:] for path in self.tmp_path.glob("log-*.txt"))

    def kill_when(self, wanted, victim=0):
        """Kills a process right after a call whose path contains `wanted`; the others end by themselves."""
        processes = self.start()
        while processes[victim].poll() is None:
            if any(wanted in urllib.parse.unquote(path) for method, path in list(self.store[1].faults.calls)):
                break
            time.sleep(0.002)
        processes[victim].send_signal(signal.SIGKILL)
        assert processes[victim].wait() == -signal.SIGKILL, f"it ended before {wanted}"
        for process in processes:
            process.wait(120)


def whole_run(folder):
    """What a finished run leaves that must not depend on kills."""
    copy = pathlib.Path(storage.local_copy(folder))
    names = sorted(str(path.relative_to(copy)) for path in copy.glob("policy/*"))
    found = files(copy, "metrics.jsonl", "config.json", "finished.json", *names)
    found["checkpoints"] = sorted(storage.complete_folders(f"{folder}/checkpoints"))
    return found


@pytest.mark.runs
@pytest.mark.parametrize("store", STORES, indirect=True)
def test_a_run_killed_while_it_uploads_a_checkpoint_ends_as_one_left_in_peace(store, tmp_path):
    command = Command(tmp_path, store)
    command.finish()
    expected = whole_run(store[0])
    storage.remove_tree(store[0])
    store[1].faults.delay = 0.01 if store[0].startswith("s3") else 0.0  # so that the kill comes between two objects
    command.kill_when("checkpoints/2/state/params")
    assert storage.complete_folders(f"{store[0]}/checkpoints") == ["1"]
    assert storage.exists(f"{store[0]}/checkpoints/2")  # a part of it
    command.kill_when("checkpoints/3/uploaded")
    command.finish()
    assert whole_run(store[0]) == expected


@pytest.mark.processes
def test_two_processes_without_a_shared_disk_are_killed_and_resumed(store, tmp_path):
    command = Command(tmp_path, store, count=2)
    command.finish()
    expected = whole_run(store[0])
    parts = bucket.names(f"{store[0]}/checkpoints/4")
    assert {"uploaded.0", "uploaded.1", "commit.json"} <= set(parts)
    shards = bucket.names(f"{store[0]}/checkpoints/4/state/params.model.backbone.embed_in.embedding")
    assert {"0.0", "1.0"} <= set(shards) or {"0.0", "0.1"} <= set(shards)  # one of each process
    storage.remove_tree(store[0])
    store[1].faults.delay = 0.01
    command.kill_when("checkpoints/2/state/params", victim=1)
    assert storage.complete_folders(f"{store[0]}/checkpoints") == ["1"]
    command.finish()
    assert whole_run(store[0]) == expected
    alone = Command(tmp_path, store)  # the checkpoint of two is read by one
    storage.remove(f"{store[0]}/finished.json")
    alone.finish()
    assert whole_run(store[0])["metrics.jsonl"] == expected["metrics.jsonl"]
