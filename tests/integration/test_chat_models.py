"""Chat models as they are published: a Llama whose tokenizer has no pad token and fills every row of the embedding, its
template, conversations, and a reward model of the same tokenizer."""

import json
import pathlib

import jax
import numpy as np
import pytest

import rlhf_jax
from rlhf_jax import models, train
from rlhf_jax.config import PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf_jax.models.io import hf
from rlhf_jax.stages import open_stage
from tests.helpers.chat_tokenizer import assistant, bytes_tokenizer, user
from tests.helpers.runs import lines

EOS, OTHER = "<|im_end|>", "<end>"
PROMPTS = [{"prompt": [user(f"what is {i} + {i}?")]} for i in range(16)]
CHATS = [{**row, "completion": [assistant(f"it is {2 * i}")]} for i, row in enumerate(PROMPTS)]
PAIRS = [{**row, "chosen": [assistant(f"{2 * i}")], "rejected": [assistant("no")]} for i, row in enumerate(PROMPTS)]


def checkpoint(folder: pathlib.Path, kind: str, seed: int, pad: str | None, max_positions: int = 128) -> str:
    tokenizer = bytes_tokenizer(eos=EOS).hf
    model = models.custom_shape("llama:1x16x2x1", vocab_size=len(tokenizer), max_positions=max_positions)
    params = jax.device_get(model.init(jax.random.key(seed), heads=(kind,), score_std=0.3))
    hf.save(folder, model, params, kind=kind)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"pad_token": pad}
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    return str(folder)


PADS = [pytest.param(None, id="no pad"), pytest.param(EOS, id="pads with eos", marks=pytest.mark.runs)]


@pytest.fixture(scope="module", params=PADS)
def folders(request, tmp_path_factory):
    """(policy, reward model) without a pad of their own, and the same with one."""
    folder, made = tmp_path_factory.mktemp("chat"), []
    for pad in (request.param, OTHER):
        name = f"pad-{pad}".strip("<>|")
        made.append(
            (
                checkpoint(folder / name / "policy", "causal", 1, pad),
                checkpoint(folder / name / "rm", "scalar", 2, OTHER),
            )
        )
    return made


SHARED = {"query_length": 64, "batch_size": 8, "dataset_test_split": None, "report_to": (), "learning_rate": 1e-2}
ROLLOUT = {**SHARED, "response_length": 6, "total_episodes": 16, "num_sample_generations": 0, "stop_token": "eos"}
ROLLOUT |= {"missing_eos_penalty": 1.0, "temperature": 3.0}
SUPERVISED = {**SHARED, "max_length": 96, "max_steps": 2}


def stage_of(kind, policy, reward, run_dir):
    if kind in (SFTConfig, RewardConfig):
        return kind(model_name_or_path=policy, run_dir=run_dir, **SUPERVISED)
    return kind(sft_model_path=policy, reward_model_path=reward, run_dir=run_dir, **ROLLOUT)


@pytest.mark.parametrize("kind", [SFTConfig, RewardConfig, PPOConfig, RLOOConfig])
def test_the_pad_token_changes_nothing(kind, folders, tmp_path):
    rows = {SFTConfig: CHATS, RewardConfig: PAIRS}.get(kind, PROMPTS)
    found = []
    for number, (policy, reward) in enumerate(folders):
        run_dir = str(tmp_path / str(number))
        rlhf_jax.run(stage_of(kind, policy, reward, run_dir), train_dataset=rows)
        found.append(lines(run_dir))
    assert found[0] == found[1]
    assert all(np.isfinite(v) for line in found[0] for v in line.values() if isinstance(v, float))


def test_the_value_model_starts_from_a_reward_model_of_the_same_tokenizer_that_reads_conversations(folders, tmp_path):
    policy, reward = folders[0]
    stage = open_stage(stage_of(PPOConfig, policy, reward, str(tmp_path / "run")), train_dataset=PROMPTS)
    (reader,) = stage.scorer.models
    assert reader.tokenizer is not None
    value, theirs = (jax.tree.leaves(params) for params in (stage.state.params["value"], reader.params))
    assert all((x == y).all() for x, y in zip(value, theirs, strict=True))


@pytest.mark.runs
@pytest.mark.parametrize("kind", [PPOConfig, RewardConfig])
@pytest.mark.parametrize("known", [True, False])
def test_a_bias_of_the_score_that_config_json_does_not_name_is_trained(kind, known, tmp_path, monkeypatch):
    """The model from it starts has one more array than its config.json says, which programs were compiled ahead for."""
    policy, folder = checkpoint(tmp_path / "policy", "causal", 1, None), tmp_path / "rm"
    reward = checkpoint(folder, "scalar", 2, None)
    model, params = hf.load(reward, kind="scalar")
    hf.save(folder, model, {**params, "score": {**params["score"], "bias": np.ones(1, np.float32)}}, kind="scalar")
    assert "bias" in hf.load_shapes(reward, kind="scalar")[1]["score"]
    if not known:  # as of a checkpoint whose weights are not there yet
        monkeypatch.setattr(hf, "_has_score_bias", lambda folder: False)
    start = reward if kind is RewardConfig else policy
    run = rlhf_jax.run(stage_of(kind, start, reward, str(tmp_path / "run")), train_dataset=PAIRS)
    exported = run.paths["value" if kind is PPOConfig else "reward_model"]
    assert "bias" in hf.load(exported, kind="scalar")[1]["score"]
    assert len(lines(run.run_dir)) == 2


@pytest.mark.runs
@pytest.mark.parametrize("variant", ["lora", "ppo"])
def test_the_quickstart_of_a_chat_model_learns_from_instructions_and_compares_before_and_after(
    variant, tmp_path, capsys
):
    policy, run_dir = checkpoint(tmp_path / "policy", "causal", 1, None, max_positions=512), tmp_path / "run"
    short = {"total_episodes": 16, "batch_size": 8, "query_length": 320, "length_buckets": 320, "max_eval_samples": 8}
    short |= {"dataset_name": "instructions", "reward_funcs": "instruction_reward", "num_sample_generations": 0}
    flags = [word for name, value in short.items() for word in (f"--{name}", str(value))]
    given = ["--config", f"quickstart_smollm2.py:{variant}", "--sft_model_path", policy, "--run_dir", str(run_dir)]
    assert train.main([*given, *flags]) == 0
    [stage] = [path.name for path in run_dir.iterdir() if path.is_dir()]
    assert f"{stage.upper()} - before in score, mean over prompts" in capsys.readouterr().out
    compared = json.loads((run_dir / stage / "comparison.json").read_text())
    assert [row["name"] for row in compared["rows"]] == ["before", stage.upper()] and len(compared["samples"]) == 3
    assert all(0 <= row["rewards"]["instruction_reward"]["mean"] <= 1 for row in compared["rows"])
    assert "instructions/all" in lines(run_dir / stage)[0]
    assert (run_dir / stage / "policy_adapter").is_dir() == (variant in ("lora", "ppo"))


@pytest.mark.runs
@pytest.mark.parametrize("variant", ["ppo_cpu", "rloo_cpu"])
def test_the_tldr_config_of_a_chat_model_trains_its_three_stages(variant, tmp_path, capsys):
    policy, run_dir = checkpoint(tmp_path / "policy", "causal", 1, None, max_positions=512), tmp_path / "run"
    algorithm = variant.removesuffix("_cpu")
    sizes = {"dataset_name": "synthetic", "query_length": 160, "batch_size": 8, "max_eval_samples": 8}
    supervised = {**sizes, "max_length": 240, "max_steps": 2}
    stages = {
        "sft": {**supervised, "model_name_or_path": policy},
        "reward": {**supervised, "normalize_dataset_name": "synthetic", "normalize_samples": 16},
        algorithm: {**sizes, "total_episodes": 16, "num_sample_generations": 0},
    }
    flags = [f"--{stage}.{name}={value}" for stage, options in stages.items() for name, value in options.items()]
    assert train.main(["--config", f"tldr_smollm2.py:{variant}", "--run_dir", str(run_dir), *flags]) == 0
    assert f"{algorithm.upper()} - SFT in gold reward, mean over prompts" in capsys.readouterr().out
    found = lines(run_dir / algorithm)
    assert len(found) == 2 and all(np.isfinite(v) for line in found for v in line.values() if isinstance(v, float))
