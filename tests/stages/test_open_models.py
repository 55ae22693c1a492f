"""Opening the models of a run: the attention of every one of them."""

import types

import numpy as np
import pytest

from rlhf_jax import data
from rlhf_jax.config import PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf_jax.dry_run import memory
from rlhf_jax.errors import UserError
from rlhf_jax.models import attention_kernels, custom_shape
from rlhf_jax.models.io import hf
from rlhf_jax.parallel import sharding
from rlhf_jax.stages import open_models
from tests.helpers.models_common import random_params
from tests.helpers.runs import RLOO_OPTIONS

OPTIONS = {"tokenizer_name_or_path": "synthetic", "dataset_name": "synthetic", "batch_size": 8}


def opened(config):
    """The stage of a config, without weights."""
    return memory.abstract_stage(config, sharding.make_mesh(1, 1, 1))


def ppo(**options):
    shared = {name: value for name, value in RLOO_OPTIONS.items() if name in PPOConfig.__dataclass_fields__}
    return PPOConfig(**{**shared, **options})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a policy and a classifier whose layers have two windows, and of a policy with dropout."""
    path, tokenizer = tmp_path_factory.mktemp("models"), data.load_tokenizer("synthetic")
    rows = 128 * -(-tokenizer.vocab_size // 128)
    windows = custom_shape("gemma2:2x32x2", rows, 256)
    dropout = custom_shape("1x32x2", rows, 256, attention_dropout=0.1)
    for name, model, kind in (
        ("policy", windows, "causal"),
        ("classifier", windows, "scalar"),
        ("dropout", dropout, "causal"),
    ):
        hf.save(path / name, model, random_params(model, (kind,)), kind=kind)
        data.save_tokenizer(tokenizer, str(path / name))
    return path


@pytest.fixture
def splash_on_cpu(monkeypatch):
    monkeypatch.setattr(attention_kernels, "PLATFORMS", {"splash": "cpu"})


@pytest.mark.parametrize("name", ["cudnn", "splash"])
@pytest.mark.parametrize("config_type", [SFTConfig, RewardConfig, PPOConfig])
def test_a_kernel_is_refused_on_devices_that_it_is_not_for(config_type, name):
    given = {**OPTIONS, "scratch_model": "1x16x2", "attn_implementation": name}
    given |= {"reward_model_path": None} if config_type is PPOConfig else {}
    path = "sft_model_path" if config_type is PPOConfig else "model_name_or_path"
    with pytest.raises(UserError, match=f"--attn_implementation {name} .* 1x16x2: .* platform cpu.* Give --attn"):
        opened(config_type(**{**given, path: None}))


def test_float16_is_refused_on_tpus():
    device = types.SimpleNamespace(platform="tpu")
    mesh = types.SimpleNamespace(shape={"tensor": 1}, devices=np.array([device]))
    weights = types.SimpleNamespace(mesh=mesh, shardings=lambda *_: None)
    with pytest.raises(UserError, match="--dtype float16: TPUs multiply in bfloat16"):
        open_models.on_mesh(custom_shape("1x16x2", 64), weights, "causal", "m", dtype="float16")


@pytest.mark.parametrize(
    "option, folder",
    [
        ("sft_model_path", "policy"),
        ("ref_model_path", "policy"),
        ("reward_model_path", "classifier"),
        ("value_model_path", "classifier"),
    ],
)
def test_every_model_of_a_run_must_be_supported(models, splash_on_cpu, option, folder):
    given = {option: str(models / folder), "attn_implementation": "splash"}
    given |= {"scratch_model": None} if option == "sft_model_path" else {}
    with pytest.raises(UserError, match=f"--attn_implementation splash .*/{folder}: it takes one window"):
        opened(ppo(**given))


def test_dropout_of_attention_is_refused_where_updates_apply_it(models, splash_on_cpu):
    given = {**RLOO_OPTIONS, "scratch_model": None, "num_generations": 2, "sft_model_path": str(models / "dropout")}
    given["attn_implementation"] = "splash"
    with pytest.raises(UserError, match="/dropout: it has no dropout, and the model's attention_dropout is 0.1"):
        opened(RLOOConfig(**given))
    assert opened(RLOOConfig(**given, disable_dropout=True)).opened.policy.attn_implementation == "splash"
    assert opened(ppo(scratch_model=None, **{k: given[k] for k in ("sft_model_path", "attn_implementation")}))


@pytest.mark.parametrize("name, used", [("auto", "blocked"), ("blocked", "blocked"), ("splash", "splash")])
def test_all_models_of_a_run_have_its_attention_and_the_run_says_which(splash_on_cpu, name, used):
    stage = opened(ppo(attn_implementation=name))
    models = (stage.opened.policy, stage.opened.reference, stage.opened.value)
    assert {model.attn_implementation for model in models} == {used}
    assert f"attention over whole rows: {used}" in stage.messages
