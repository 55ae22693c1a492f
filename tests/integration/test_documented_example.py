"""TRL's documented example of RLOO, to the letter, from a hub on loopback and without torch: a chat model of another
family, questions as conversations with solutions, accuracy_reward."""

import io
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap

import datasets
import jax
import numpy as np
import pytest
import tokenizers

from rlhf_jax import models
from rlhf_jax.models.io import hf
from tests.helpers.hub import Hub, environment_without_torch
from tests.helpers.paths import ROOT

pytest.importorskip("math_verify")

MODEL, QUESTIONS = "Qwen/Qwen2.5-0.5B-Instruct", "trl-lib/DeepMath-103K"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (  # as Qwen2.5's: a system message where there is none
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def question(index: int) -> dict:
    text = f"What is {index} + {index % 7}?"
    return {"prompt": [{"role": "user", "content": text}], "solution": f"${index + index % 7}$"}


def model_files() -> dict[str, bytes]:
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([row["prompt"][0]["content"] for row in map(question, range(100))], trainer)
    settings = {"tokenizer_class": "Qwen2Tokenizer", "pad_token": SPECIALS[0], "eos_token": SPECIALS[2]}
    settings |= {"bos_token": None, "chat_template": TEMPLATE, "model_max_length": 32768}
    model = models.custom_shape("qwen2:2x32x4x2", vocab_size=320, max_positions=1024)
    params = jax.device_get(model.init(jax.random.key(1)))
    with tempfile.TemporaryDirectory() as folder:
        hf.save(folder, model, params, kind="causal")
        files = {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}
    files["tokenizer.json"] = bpe.to_str().encode()
    files["tokenizer_config.json"] = json.dumps(settings).encode()
    files["generation_config.json"] = json.dumps({"eos_token_id": [2, 0], "pad_token_id": 0}).encode()
    return files


def data_files() -> dict[str, bytes]:
    files = {}
    for split, numbers in (("train", range(160)), ("test", range(200, 208))):
        buffer = io.BytesIO()
        datasets.Dataset.from_list(list(map(question, numbers))).to_parquet(buffer)
        files[f"data/{split}-00000-of-00001.parquet"] = buffer.getvalue()
    return files


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with Hub() as hub:
        hub.add(MODEL, model_files())
        hub.add(QUESTIONS, data_files(), kind="dataset")
        yield environment_without_torch(hub, tmp_path_factory.mktemp("home"))


def run(environment, folder, *arguments: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def metrics_of(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.runs
def test_the_config_trains_by_the_command(environment, tmp_path):
    run(environment, tmp_path, "-m", "rlhf_jax.train", "--config", "rloo_deepmath.py", "--total_episodes", "128")
    run_dir = tmp_path / "runs" / "rloo_deepmath_0.5b"
    updates = [line for line in metrics_of(run_dir) if "objective/kl" in line]
    assert [line["step"] for line in updates] == [1, 2]
    assert all(np.isfinite(value) for line in updates for value in line.values())
    config = json.loads((run_dir / "policy" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["num_key_value_heads"] == 2
    assert json.loads((run_dir / "policy" / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    (table,) = list((run_dir / "completions").glob("*.jsonl"))[:1]
    row = json.loads(table.read_text().splitlines()[0])
    assert any("<|im_start|>assistant" in str(value) for value in row.values())


@pytest.mark.runs
def test_the_python_form_trains_with_the_function(environment, tmp_path):
    program = f"""
        import rlhf_jax
        from rlhf_jax.rewards import accuracy_reward

        config = rlhf_jax.RLOOConfig(
            sft_model_path={MODEL!r}, dataset_name={QUESTIONS!r}, dataset_test_split=None, total_episodes=16,
            batch_size=8, num_generations=2, query_length=128, query_overflow="truncate", response_length=16,
            run_dir="out",
        )
        result = rlhf_jax.run(config, reward_funcs=accuracy_reward)
        print(sorted(result.metrics))
    """
    done = run(environment, tmp_path, "-c", textwrap.dedent(program))
    assert "rewards/accuracy_reward" in done.stdout
    assert [line["step"] for line in metrics_of(tmp_path / "out") if "objective/kl" in line] == [1, 2]


@pytest.mark.runs
def test_the_page_for_trls_users_trains_ppo_and_grpo_by_one_function(environment, tmp_path):
    """docs/from_trl.md, "Your model, your reward function", with fewer episodes."""
    page = (ROOT / "docs" / "from_trl.md").read_text(encoding="utf-8")
    (program,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if MODEL in block]
    shorter = {"total_episodes=6400": "total_episodes=16", "batch_size=64": "batch_size=8"}
    shorter |= {"response_length=64": "response_length=16", "num_generations=8": "num_generations=2"}
    for old, new in shorter.items():
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    run(environment, tmp_path, "-c", program)
    for name in ("ppo_mine", "grpo_mine"):
        updates = [line["step"] for line in metrics_of(tmp_path / "runs" / name) if "rewards/correct/mean" in line]
        assert updates == [1, 2]
