"""docs/from_trl.md: TRL's program and ours, as they are printed, on tiny models from a hub on loopback."""

import io
import json
import os
import re
import subprocess
import sys

import datasets
import jax
import pytest

from rlhf_jax import data, models
from rlhf_jax.data import synthetic
from rlhf_jax.models.io import hf
from tests.helpers.hub import Hub
from tests.helpers.paths import ROOT

TRL, OURS, _ = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "from_trl.md").read_text(), re.M | re.S)
SMALLER = {  # of both programs: what is too large for a test, each found once or more
    "total_episodes=1_000_000": "total_episodes=16",
    "per_device_train_batch_size=16": "use_cpu=True, bf16=False, per_device_train_batch_size=2",
    "gradient_accumulation_steps=4": "gradient_accumulation_steps=4, num_sample_generations=0",
    "batch_size=512": "batch_size=8",
    "micro_batch_size=128": "micro_batch_size=2, num_sample_generations=0",
    "response_length=53": "response_length=8",
}


def smaller(program: str) -> str:
    for old, new in SMALLER.items():
        program = re.sub(rf"\b{re.escape(old)}\b", new, program)
    return program


def model_files(folder, kind: str) -> dict[str, bytes]:
    """A GPT-NeoX of one layer with the built-in tokenizer, and rows for TRL's [PAD]."""
    tokenizer = data.load_tokenizer("synthetic")
    model = models.custom_shape("1x16x2", vocab_size=tokenizer.vocab_size + 8, max_positions=640)
    params = jax.device_get(model.init(jax.random.key(0), heads=(kind,)))
    hf.save(folder, model, params, kind=kind)
    data.save_tokenizer(tokenizer, str(folder))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def data_files() -> dict[str, bytes]:
    files = {}
    for split in ("train", "validation"):
        buffer = io.BytesIO()
        datasets.Dataset.from_list(synthetic.demonstrations(32, split="test")).to_parquet(buffer)
        files[f"data/{split}-00000-of-00001.parquet"] = buffer.getvalue()
    return files


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with Hub() as hub:
        (sft,) = set(re.findall(r'"(cleanrl/\S*__sft__tldr)"', TRL + OURS))
        (reward,) = set(re.findall(r'"(cleanrl/\S*__reward__tldr)"', TRL + OURS))
        hub.add(sft, model_files(tmp_path_factory.mktemp("sft"), "causal"))
        hub.add(reward, model_files(tmp_path_factory.mktemp("reward"), "scalar"))
        hub.add("trl-lib/tldr", data_files(), kind="dataset")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XLA_"))}
        home = str(tmp_path_factory.mktemp("home"))
        yield {**kept, "HF_ENDPOINT": hub.endpoint, "HF_HOME": home, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def run(environment, folder, program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.runs
def test_our_program_runs(environment, tmp_path):
    assert run(environment, tmp_path, smaller(OURS)).strip().endswith("policy")
    lines = [json.loads(line) for line in (tmp_path / "runs/tldr_ppo/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "objective/kl" in line] == [1, 2]


@pytest.mark.runs
def test_trls_program_runs(environment, tmp_path):
    pytest.importorskip("trl.experimental.ppo")
    run(environment, tmp_path, smaller(TRL))
    assert (tmp_path / "runs" / "tldr_ppo" / "model.safetensors").is_file()


def test_both_programs_set_the_same_options():
    """Those of TRL's PPOConfig under their names here; batch sizes multiplied by the number of devices."""
    theirs = dict(re.findall(r"^    (\w+)=([^,\n]+),", TRL.split("args = PPOConfig(")[1], re.M))
    ours = dict(re.findall(r"^    (\w+)=([^,\n]+),", OURS, re.M))
    for name, value in theirs.items():
        if name in ours:
            assert ours[name] == value, name
    rows = int(theirs["per_device_train_batch_size"]) * 8
    assert int(ours["micro_batch_size"]) == rows
    assert int(ours["batch_size"]) == rows * int(theirs["gradient_accumulation_steps"])
    assert {*theirs} - {*ours} <= {
        *("per_device_train_batch_size", "gradient_accumulation_steps", "output_dir", "args", "processing_class"),
        *("model", "ref_model", "reward_model", "value_model", "train_dataset", "eval_dataset"),
    }
