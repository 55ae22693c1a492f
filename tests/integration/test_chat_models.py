"""Chat models as they are published: a Llama whose tokenizer has no pad token and fills every row of the embedding, its
template, conversations, and a reward model of the same tokenizer."""

import json
import pathlib

import jax
import numpy as np
import pytest

import rlhf_jax
from rlhf_jax import models
from rlhf_jax.config import PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf_jax.models.io import hf
from rlhf_jax.stages import open_stage
from tests.helpers.chat_tokenizer import assistant, bytes_tokenizer, user
from tests.helpers.runs import lines

EOS, OTHER = "<|im_end|>", "<end>"
PROMPTS = [{"prompt": [user(f"what is {i} + {i}?")]} for i in range(16)]
CHATS = [{**row, "completion": [assistant(f"it is {2 * i}")]} for i, row in enumerate(PROMPTS)]
PAIRS = [{**row, "chosen": [assistant(f"{2 * i}")], "rejected": [assistant("no")]} for i, row in enumerate(PROMPTS)]


def checkpoint(folder: pathlib.Path, kind: str, seed: int, pad: str | None) -> str:
    tokenizer = bytes_tokenizer(eos=EOS).hf
    model = models.custom_shape("llama:1x16x2x1", vocab_size=len(tokenizer), max_positions=128)
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
